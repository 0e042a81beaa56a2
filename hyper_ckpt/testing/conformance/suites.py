"""The suites as pytest classes: every check is a test.

class TestMine(PlatformSuite):
    probe = "my_plugin.probe:Probe"

class TestMyStore(StoreSuite):
    def make_store(self, tmp_path):
        return MyStore(f"mine://{tmp_path}")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getattr_static
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.testing.conformance.check import Check, ChoiceError, NotApplicable, reasons_of
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, PlatformBench
from hyper_ckpt.testing.conformance.store import LIMIT_SECONDS, STORE_CHECKS, run_on

_BENCH = pytest.StashKey[PlatformBench]()


class Suite:
    """What both suites have in common: no check is lost without a word.

    `without` names checks, or parts of the suite, that are left out, each with its reason; they are skipped.
    """

    checks: ClassVar[tuple[Check, ...]] = ()
    without: ClassVar[Mapping[str, str]] = {}
    _kept: ClassVar[dict[str, Any]] = {}  # what a subclass must not replace, by name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        changed = sorted(name for name, value in cls._kept.items() if getattr_static(cls, name, None) is not value)
        if "__test__" in vars(cls):
            changed.append("__test__")
        if changed:
            raise TypeError(
                f"{cls.__name__} replaces {', '.join(changed)} of the suite: a check is left out with "
                "`without = {name: reason}` only"
            )
        try:
            reasons_of(cls.without, cls.checks)
        except ChoiceError as error:
            raise TypeError(f"{cls.__name__}: {error}") from None


def _test_of(check: Check, run: Callable[[Any, Check], None]) -> Callable[..., None]:
    """The test of a check: `run` gets the value of the suite's fixture `bench`."""

    def test(self: Suite, bench: Any) -> None:
        reason = reasons_of(self.without, self.checks).get(check.name)
        if reason is not None:
            pytest.skip(reason)
        try:
            run(bench, check)
        except NotApplicable as missing:
            pytest.skip(str(missing))

    test.__name__ = f"test_{check.name}"
    test.__doc__ = check.promise
    return test


def _complete(suite: type[Suite], checks: tuple[Check, ...], run: Callable[[Any, Check], None]) -> None:
    """Gives a suite its tests."""
    suite.checks = checks
    for check in checks:
        setattr(suite, f"test_{check.name}", _test_of(check, run))
    names = ["checks", "bench", *(f"test_{check.name}" for check in checks)]
    suite._kept = {name: getattr_static(suite, name) for name in names}


class PlatformSuite(Suite):
    """The contract of `Platform` as tests.

    `probe` is the "module:callable" of a `PlatformProbe`; `world_size` the number of ranks, at least 4 for all checks
    to apply; `timeout` the seconds that a check on a world may take. The ranks of a class are started once.
    """

    probe: ClassVar[str]
    world_size: ClassVar[int] = 4
    timeout: ClassVar[float] = 60.0

    @pytest.fixture
    def bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlatformBench:
        """One for all tests of the class."""
        node = request.node.getparent(pytest.Class)
        if _BENCH not in node.stash:
            folder = tmp_path_factory.mktemp(type(self).__name__)
            made = PlatformBench(self.probe, folder, world_size=self.world_size, timeout=self.timeout)
            node.stash[_BENCH] = made
            node.addfinalizer(made.close)
        found: PlatformBench = node.stash[_BENCH]
        return found


class StoreSuite(Suite):
    """The contract of `ByteStore` as tests: subclasses define `make_store`.

    `timeout` is the seconds that a check may take.
    """

    timeout: ClassVar[float] = LIMIT_SECONDS

    def make_store(self, tmp_path: Path) -> ByteStore:
        """A store over a root that nobody has used; the same root for the same `tmp_path`."""
        raise NotImplementedError

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Callable[[Check], None]:
        return lambda check: run_on(check, lambda: self.make_store(tmp_path), self.timeout)

    @pytest.fixture
    def store(self, tmp_path: Path) -> ByteStore:
        """A store, for tests of a subclass's own."""
        return self.make_store(tmp_path)


_complete(PlatformSuite, PLATFORM_CHECKS, lambda bench, check: bench.run(check))
_complete(StoreSuite, STORE_CHECKS, lambda bench, check: bench(check))
