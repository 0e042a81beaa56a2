"""What authors meet: checks can't be lost, reasons must be given, and a rank that dies spoils nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_ckpt.errors import PluginError
from hyper_ckpt.testing.conformance import PlatformSuite, StoreSuite
from hyper_ckpt.testing.conformance.check import Check, NotApplicable, reasons_of, run_checks
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, PlatformBench, load_probe

CHECKS = {check.name: check for check in PLATFORM_CHECKS}


class Mixin:
    def test_groups_are_kept(self) -> None:
        pass


@pytest.mark.parametrize("suite", [PlatformSuite, StoreSuite])
def test_checks_cannot_be_replaced(suite: type) -> None:
    name = f"test_{suite.checks[0].name}"  # type: ignore[attr-defined]
    for value in (None, lambda self: None):
        with pytest.raises(TypeError, match=name):
            type("TestMine", (suite,), {name: value})
    with pytest.raises(TypeError, match="bench"):
        type("TestMine", (suite,), {"bench": None})
    with pytest.raises(TypeError, match="__test__"):
        type("TestMine", (suite,), {"__test__": False})


def test_a_mixin_cannot_replace_checks_either() -> None:
    with pytest.raises(TypeError, match="test_groups_are_kept"):
        type("TestMine", (Mixin, PlatformSuite), {"probe": "a:b"})


def test_what_is_left_out_has_a_name_and_a_reason() -> None:
    for without, text in [({"wrold": "why"}, "wrold"), ({"world": " "}, "no reason")]:
        with pytest.raises(TypeError, match=text):
            type("TestMine", (PlatformSuite,), {"without": without})
    reasons = reasons_of({"world": "single process", "groups_are_kept": "its own"}, PLATFORM_CHECKS)
    assert reasons["groups_are_kept"] == "its own"
    assert reasons["ranks_are_numbered"] == "single process"
    assert "meta_tensors" not in reasons


def test_left_out_checks_are_skipped_with_their_reason() -> None:
    suite = type("TestMine", (PlatformSuite,), {"without": {"world": "single process"}, "probe": "none:none"})
    with pytest.raises(pytest.skip.Exception, match="single process"):
        suite().test_groups_are_kept(None)


def test_outcomes() -> None:
    def run(check: Check) -> None:
        if check.name == "meta_tensors":
            raise NotApplicable("it has none")
        if check.name == "groups_are_kept":
            raise KeyError("of the plugin")

    outcomes = {o.check: o for o in run_checks(PLATFORM_CHECKS, run, {"a_group_of_one": "no groups"})}
    assert [*outcomes] == [*CHECKS]
    assert (outcomes["meta_tensors"].status, outcomes["meta_tensors"].message) == ("skipped", "it has none")
    assert (outcomes["a_group_of_one"].status, outcomes["a_group_of_one"].message) == ("skipped", "no groups")
    assert outcomes["groups_are_kept"].status == "failed"
    assert "KeyError" in outcomes["groups_are_kept"].message
    assert outcomes["broadcasts_in_flight"].status == "passed"


def test_what_is_no_probe() -> None:
    for target in ("nowhere:Probe", "hyper_ckpt.box:nothing", "hyper_ckpt"):
        with pytest.raises(PluginError, match="module:callable"):
            load_probe(target)
    with pytest.raises(PluginError, match="must make a PlatformProbe"):
        load_probe("builtins:dict")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlatformBench]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with PlatformBench("half_ranks:HalfProbe", tmp_path, world_size=3, timeout=6) as bench:
        yield bench


def test_a_rank_that_dies_spoils_nothing(bench: PlatformBench) -> None:
    bench.run(CHECKS["groups_are_kept"])
    with pytest.raises(AssertionError, match=r"promised: (.|\n)*rank 1 died \(exit code 3\)"):
        bench.run(CHECKS["all_gather_object_is_in_rank_order"])
    bench.run(CHECKS["groups_are_kept"])


def test_a_rank_that_hangs_spoils_nothing(bench: PlatformBench) -> None:
    told = r"promised: (.|\n)*rank 1 waited for rank 0, which had failed(.|\n)*in gather_bytes"
    with pytest.raises(AssertionError, match=told):
        bench.run(CHECKS["gather_bytes_of_unequal_sizes"])
    bench.run(CHECKS["groups_are_kept"])


def test_checks_that_need_more_ranks_are_skipped(bench: PlatformBench) -> None:
    with pytest.raises(NotApplicable, match="4 ranks"):
        bench.run(CHECKS["broadcasts_in_disjoint_groups"])


def test_a_world_that_cannot_be_joined_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with PlatformBench("half_ranks:NeverJoins", tmp_path, world_size=2) as bench:
        for name in ("groups_are_kept", "a_group_of_one"):
            with pytest.raises(AssertionError, match=r"no route to 127\.0\.0\.1"):
                bench.run(CHECKS[name])
