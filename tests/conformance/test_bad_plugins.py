"""Every check notices a plugin that breaks its promise: a suite that passes everything proves nothing."""

import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyper_ckpt.registry import registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.conformance.check import Check, run_checks
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, PlatformBench
from hyper_ckpt.testing.conformance.store import STORE_CHECKS, run_on

from ._bad_ranks import BAD_RANKS, Blocks
from ._bad_stager import BAD_STAGERS
from ._bad_stores import BAD_STORES
from ._bad_tensors import BAD_TENSORS, MORE_BAD_TENSORS, Pair

BAD_PLATFORMS = {**BAD_TENSORS, **BAD_STAGERS, **BAD_RANKS}
PLATFORM = {check.name: check for check in PLATFORM_CHECKS}
STORE = {check.name: check for check in STORE_CHECKS}


def test_every_check_has_a_bad_plugin() -> None:
    assert BAD_PLATFORMS.keys() == PLATFORM.keys()
    assert BAD_STORES.keys() == STORE.keys()
    assert len(PLATFORM) == len(PLATFORM_CHECKS)
    assert len(STORE) == len(STORE_CHECKS)


def test_every_check_says_what_is_promised() -> None:
    assert all(check.promise.endswith(".") for check in (*PLATFORM_CHECKS, *STORE_CHECKS))


def broken(check: Check, run: Callable[[Check], None]) -> None:
    (outcome,) = run_checks([check], run)
    assert outcome.status == "failed"
    assert outcome.message.startswith("promised: ")
    assert "seen: " in outcome.message


@pytest.fixture
def _named_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Probes that ranks' processes find by name; they announce a plugin."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    registry().unregister("spec_probes")


@pytest.fixture
def _ranks_end() -> Iterator[None]:
    """Ranks that a bad plugin keeps are threads of this process: none outlives its test."""
    before = set(threading.enumerate())
    yield
    Blocks.over.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    Blocks.over.clear()


@pytest.mark.usefixtures("_named_probes", "_ranks_end")
@pytest.mark.parametrize(
    ("name", "pair"),
    [*BAD_PLATFORMS.items(), *MORE_BAD_TENSORS],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_bad_platform_is_noticed(tmp_path: Path, name: str, pair: Pair) -> None:
    bad, good = pair
    with PlatformBench(good(), tmp_path / "good", timeout=20) as bench:
        bench.run(PLATFORM[name])
    with PlatformBench(bad(), tmp_path / "bad", timeout=4) as bench:
        broken(PLATFORM[name], bench.run)


@pytest.mark.parametrize("name", STORE)
def test_a_bad_store_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make = BAD_STORES[name]
    if name == "publishers_in_several_processes":  # other processes must find its class
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        store = importlib.import_module("check_then_act").CheckThenAct
        make = lambda path: store(LocalStore(path / "root"))  # noqa: E731
    broken(STORE[name], lambda check: run_on(check, lambda: make(tmp_path)))
