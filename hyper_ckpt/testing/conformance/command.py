"""The suites without pytest, for platforms and stores that are installed: what `hyper-ckpt conformance` runs."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from hyper_ckpt.errors import PluginError
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.conformance.check import Check, ChoiceError, Outcome, reasons_of, run_checks, similar
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, WORLD_SECONDS, PlatformBench
from hyper_ckpt.testing.conformance.store import LIMIT_SECONDS, STORE_CHECKS, run_on
from hyper_ckpt.testing.conformance.threads import within
from hyper_ckpt.version import VERSION

NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class Choice:
    """Which checks run.

    Args:
        only: names of checks; empty: all.
        without: reasons by name of a check or part, for those that are left out.
    """

    only: Collection[str] = ()
    without: Mapping[str, str] | None = None

    def reasons(self, checks: tuple[Check, ...]) -> dict[str, str]:
        """The reason for each check that does not run.

        Raises:
            ChoiceError: a name is of no check, or a reason is empty.
        """
        names = [check.name for check in checks]
        for name in self.only:
            if name not in names:
                raise ChoiceError(f"no check is called {name}{similar(name, names) or '. --list shows all'}")
        reasons = reasons_of(self.without or {}, checks)
        return {c.name: NOT_ASKED for c in checks if self.only and c.name not in self.only} | reasons


def run_platform(
    name: str, ranks: int, choice: Choice, started: Callable[[Check], None], limit: float | None = None
) -> Iterator[Outcome]:
    """Runs the platform suite, one outcome after another.

    Args:
        started: told of each check before it runs.
        limit: seconds that a check may take. One that takes longer inside this process ends it, after a dump of the
            stacks: nothing else can stop what hangs in a framework.

    Raises:
        ChoiceError: see `Choice.reasons`.
        PluginError, NoPlatformError: there is no such platform, it does not load, or it has no probe.
    """
    reasons = choice.reasons(PLATFORM_CHECKS)
    registry().platform(name)  # raises what is wrong with it
    probe = registry().platform_spec(name).probe
    if probe is None:
        raise PluginError(
            f"platform {name!r} has no probe, through which its tensors are looked at: write a subclass of "
            "hyper_ckpt.testing.conformance.PlatformProbe and announce it, PlatformSpec(..., probe='module:callable')"
        )
    with (
        tempfile.TemporaryDirectory(prefix="hyper-ckpt-") as folder,
        PlatformBench(probe, Path(folder), world_size=ranks, timeout=limit or WORLD_SECONDS) as bench,
    ):

        def run(check: Check) -> None:
            if check.part == "world":  # its ranks are watched from outside
                bench.run(check)
                return
            with contextlib.suppress(Exception):  # the check raises it again
                bench.load()  # importing a framework is no part of a check
            with _watched(limit or LIMIT_SECONDS):
                bench.run(check)

        yield from run_checks(PLATFORM_CHECKS, run, reasons, started)


def run_store(
    url: str, choice: Choice, started: Callable[[Check], None], limit: float | None = None
) -> Iterator[Outcome]:
    """Runs the store suite below `url`, in places of its own that are removed at the end.

    Args:
        started: told of each check before it runs.
        limit: seconds that a check may take.

    Raises:
        ChoiceError: see `Choice.reasons`.
        UnknownSchemeError, PluginError: no store opens this URL.
    """
    reasons = choice.reasons(STORE_CHECKS)
    store = registry().store(url)
    root = _below(store.url if isinstance(store, LocalStore) else url, f"conformance-{secrets.token_hex(8)}")
    seconds = limit or LIMIT_SECONDS

    def run(check: Check) -> None:
        place = _below(root, check.name)
        run_on(check, lambda: registry().store(place), seconds)

    with _removed_afterwards(root, seconds):
        yield from run_checks(STORE_CHECKS, run, reasons, started)


@contextlib.contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Ends this process, with a dump of all stacks, if it is in here for longer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)  # type: ignore[arg-type]
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _below(url: str, name: str) -> str:
    if "://" not in url:
        return os.path.join(url, name)
    # Not by urlunsplit: it drops the // of a URL without a host.
    place, options = re.fullmatch(r"([^?#]*)(.*)", url, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{place.rstrip('/')}/{name}{options}"


@contextlib.contextmanager
def _removed_afterwards(root: str, seconds: float) -> Iterator[None]:
    if "://" in root:

        def remove() -> None:
            store = registry().store(root)
            for name in store.list():
                store.delete(name)

        try:
            yield
        finally:
            try:
                within(seconds, remove)
            except Exception as error:  # the outcomes of the checks matter more
                warnings.warn(f"what the checks wrote below {root} could not be removed: {error}", stacklevel=1)
        return
    path = os.path.abspath(root)
    made = [path]
    while not os.path.exists(os.path.dirname(made[-1])):
        made.append(os.path.dirname(made[-1]))
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        for folder in made[1:]:
            with contextlib.suppress(OSError):  # somebody else uses it by now
                os.rmdir(folder)


def report(
    subject: Mapping[str, Any],
    outcomes: list[Outcome],
    announces: str,
    modules: tuple[str, ...],
    running: str | None = None,
) -> Any:
    """What was tested, with which versions, and how each check went, for JSON.

    Args:
        running: the check that runs now, in a report that is written meanwhile.
        subject: what was asked for.
        announces: what the plugin announces, as in `PluginInfo.announces`.
        modules: top-level modules whose versions matter.
    """
    promises = {check.name: check.promise for check in (*PLATFORM_CHECKS, *STORE_CHECKS)}
    counts = {status: sum(o.status == status for o in outcomes) for status in ("passed", "failed", "skipped")}
    return {
        **subject,
        "versions": _versions(announces, modules),
        **counts,
        "running": running,
        "checks": [{**asdict(outcome), "promise": promises[outcome.check]} for outcome in outcomes],
    }


def platform_facts(name: str) -> tuple[str, tuple[str, ...]]:
    """What the plugin of a platform announces, and the modules of its framework."""
    return f"platform {name}", registry().platform_spec(name).modules


def store_facts(url: str) -> tuple[str, tuple[str, ...]]:
    """What the plugin of a store announces, and no modules."""
    scheme = urlsplit(url).scheme if "://" in url else ""
    return f"store {f'{scheme}://' if scheme else 'paths'}", ()


def _versions(announces: str, modules: tuple[str, ...]) -> dict[str, str]:
    found = {"hyper-ckpt": VERSION, "python": sys.version.split()[0], "numpy": np.__version__}
    for plugin in registry().plugins():
        if announces in plugin.announces:
            found[plugin.distribution] = plugin.version
    for module in modules:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[module] = importlib.metadata.version(module.replace("_", "-"))
    return {**found, "os": platform.platform()}
