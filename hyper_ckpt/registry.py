"""Finds plugins, and chooses the platform and the store of a call. Imports no framework."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pluggy

from hyper_ckpt import hookspecs
from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.contracts.platform import Platform, PlatformSpec
from hyper_ckpt.contracts.store import ByteStore, StoreSpec
from hyper_ckpt.errors import CheckpointError, MixedFrameworksError, NoPlatformError, PluginError, UnknownSchemeError
from hyper_ckpt.state import BUILTIN
from hyper_ckpt.values import PerRank, ShardedTensor

BUILTIN_MODULE = "hyper_ckpt.builtin"
PLATFORM_VARIABLE = "HYPER_CKPT_PLATFORM"


class Registry:
    """The plugins of this process, each loaded in its own try: a broken one does not hide the others."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.preferred: str | None = None
        self._plugins = pluggy.PluginManager(hookspecs.PROJECT)
        self._plugins.add_hookspecs(hookspecs)
        self._plugins.register(importlib.import_module(BUILTIN_MODULE), "builtin")
        for entry in importlib.metadata.entry_points(group=hookspecs.PROJECT):
            try:
                self._plugins.register(entry.load(), entry.name)
            except Exception as error:  # whatever a plugin raises, the others stay usable
                self.errors[entry.name] = error
        self._announce()

    def register(self, plugin: Any, name: str) -> None:
        """Adds a plugin that no distribution announces: a module or object with hook implementations.

        Its stores and codecs are found before those of plugins that are there already.

        Raises:
            ValueError: a plugin of this name, or this very plugin, is there already.
        """
        self._plugins.register(plugin, name)
        self._announce()

    def unregister(self, name: str) -> None:
        """Takes a plugin back; one that is not there is fine."""
        if self._plugins.has_plugin(name):
            self._plugins.unregister(name=name)
            self._announce()

    def _announce(self) -> None:
        self._platforms: dict[str, PlatformSpec] = {s.name: s for s in self._announced("hyper_ckpt_platforms")}
        self._stores: list[StoreSpec] = self._announced("hyper_ckpt_stores")
        self._codecs: list[hookspecs.CodecSpec] = self._announced("hyper_ckpt_codecs")

    def _announced(self, hook: str) -> list[Any]:
        """What all plugins return for a hook, the newest first; one that raises does not hide the others."""
        found: list[Any] = []
        for implementation in reversed(getattr(self._plugins.hook, hook).get_hookimpls()):
            try:
                found += implementation.function()
            except Exception as error:
                self.errors[implementation.plugin_name] = error
        return found

    def codecs(self) -> tuple[Codec, ...]:
        """The built-in codecs, and those of plugins whose frameworks are imported.

        Raises:
            PluginError: a plugin cannot load its codecs.
        """
        out = list(BUILTIN)
        for spec in self._codecs:
            if any(m in sys.modules for m in spec.modules):
                with _blaming(f"the codecs for {', '.join(spec.modules)}", "upgrade the plugin that has them"):
                    out += spec.load()
        return tuple(out)

    def store(self, checkpoint_id: str) -> ByteStore:
        """Opens the store that claims this path or URL by its scheme.

        Raises:
            UnknownSchemeError: none does.
            PluginError: the plugin that does cannot be loaded.
        """
        scheme = urlsplit(checkpoint_id).scheme if "://" in checkpoint_id else ""
        for spec in self._stores:
            if scheme in spec.schemes:
                module, name = spec.target.split(":")
                with _blaming(f"the store for {scheme}://", "install what it needs, or upgrade the plugin that has it"):
                    store: ByteStore = getattr(importlib.import_module(module), name)(checkpoint_id)
                return store
        known = sorted(s for spec in self._stores for s in spec.schemes if s)
        raise UnknownSchemeError(
            f"no store for {scheme}:// ({checkpoint_id}). Installed schemes: {', '.join(known)}, and plain paths. "
            f"Install the plugin that brings it{self._broken()}"
        )

    def platform(self, name: str) -> Platform:
        """Loads a platform by name.

        Raises:
            NoPlatformError: there is none of this name.
            PluginError: it failed to load.
        """
        if name not in self._platforms:
            raise NoPlatformError(
                f"no platform {name!r}. Installed: {', '.join(sorted(self._platforms))}{self._broken()}"
            )
        spec = self._platforms[name]
        with _blaming(f"platform {name!r}", spec.install):
            return spec.load()

    def choose(self, state: Any) -> Platform:
        """The platform for a state, where the caller names none.

        Raises:
            MixedFrameworksError: tensors of two frameworks, or two active frameworks.
            NoPlatformError, PluginError: it is not there, or does not load.
        """
        named = self.preferred or os.environ.get(PLATFORM_VARIABLE)
        if named:
            return self.platform(named)
        votes = {spec.name for cls in leaf_types(state) for spec in self._platforms.values() if _is_of(cls, spec)}
        if len(votes) > 1:
            raise MixedFrameworksError(
                f"the state holds tensors of {' and '.join(sorted(votes))}: save each "
                "framework's part by itself, or pass platform="
            )
        if votes:
            return self.platform(votes.pop())
        active = [s for s in self._platforms.values() if s.name != "numpy" and s.active() > 0]
        if len(active) > 1:
            raise MixedFrameworksError(
                f"{' and '.join(s.name for s in active)} both have a process group and the state "
                "has no tensors of either: pass platform="
            )
        return self.platform(active[0].name if active else "numpy")

    def _broken(self) -> str:
        return "".join(f". Plugin {name!r} failed to load: {type(e).__name__}: {e}" for name, e in self.errors.items())


@contextlib.contextmanager
def _blaming(what: str, remedy: str) -> Iterator[None]:
    """Whatever a plugin raises, its user gets one of our errors, with the cause."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"{what} cannot be loaded: {text}. Try: {remedy}") from error


@functools.cache
def registry() -> Registry:
    """The registry of this process, made on first use."""
    return Registry()


def use(platform_name: str | None) -> None:
    """Chooses the platform of all later calls that name none; None takes the choice back.

    Raises:
        NoPlatformError, PluginError: there is no such platform, or it does not load.
    """
    if platform_name is not None:
        registry().platform(platform_name)
    registry().preferred = platform_name


def _is_of(cls: type, spec: PlatformSpec) -> bool:
    return any(base.__module__.partition(".")[0] in spec.modules for base in cls.__mro__)


def leaf_types(value: Any) -> Iterator[type]:
    """The types of all leaves of a nested state; some may come twice."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list | tuple | PerRank | ShardedTensor):
            if id(item) in seen:
                continue
            seen.add(id(item))
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, PerRank):
            stack.append(item.value)
        elif isinstance(item, ShardedTensor):
            stack += [data for data, _ in item.shards]
        else:
            yield type(item)
