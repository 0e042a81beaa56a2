"""Gives `save` and `load` a store of the test's own: a scheme `wrapped://`, registered in this process only."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from hyper_ckpt.contracts.store import ByteStore, StoreSpec
from hyper_ckpt.hookspecs import hookimpl
from hyper_ckpt.registry import registry
from hyper_ckpt.testing.faults import WrapperStore

Wrap = Callable[[ByteStore], ByteStore]

SCHEME = "wrapped"
_wraps: dict[str, Wrap] = {}
_keys = itertools.count()


class _Plugin:
    @hookimpl
    def hyper_ckpt_stores(self) -> list[StoreSpec]:
        return [StoreSpec((SCHEME,), f"{__name__}:open_wrapped")]


def open_wrapped(url: str) -> ByteStore:
    key, _, path = url.removeprefix(f"{SCHEME}://").partition("/")
    return _wraps[key](registry().store("/" + path))


def through(path: str | os.PathLike[str], wrap: Wrap) -> str:
    """A URL for the checkpoint at `path`, whose store is `wrap` of the real one.

    The store's own url stays that of `path`: ranks that use different wraps still agree on where they save.
    """
    name = f"tests-of-{SCHEME}"
    if SCHEME not in registry()._stores:
        registry().register(_Plugin(), name)
    key = str(next(_keys))
    _wraps[key] = wrap
    return f"{SCHEME}://{key}{Path(path).resolve()}"


class Hooked(WrapperStore):
    """Calls `hook(kind, name)` before each operation. What it raises takes the operation's place."""

    def __init__(self, inner: ByteStore, hook: Callable[[str, str], object], *, after: bool = False) -> None:
        super().__init__(inner)
        self._hook, self._after = hook, after

    def before(self, operation, part):  # type: ignore[no-untyped-def]
        if not self._after:
            self._hook(operation.kind, operation.name)

    def after(self, operation, result):  # type: ignore[no-untyped-def]
        if self._after:
            self._hook(operation.kind, operation.name)
