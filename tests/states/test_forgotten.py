"""Top-level keys of a checkpoint that the target does not mention: told, unless they are meant."""

import logging

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.errors import UnexpectedKeyError
from hyper_ckpt.options import LoadOptions

from .helpers import State, fresh, load_on, save_on

EVERYTHING = ("model", "optimizer", "counter")


def state(*keys: str) -> State:
    everything: State = {
        "model": {"w": np.ones(3)},
        "optimizer": {"m": np.ones(3), "groups": [{"lr": 1}]},
        "counter": 7,
    }
    return {key: everything[key] for key in keys}


@pytest.fixture(params=[1, 2])
def saved(request: pytest.FixtureRequest) -> tuple[str, int]:
    url = fresh()
    save_on(request.param, lambda rank: state(*EVERYTHING), url)
    return url, request.param


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hyper_ckpt" and r.levelno >= logging.WARNING]


def test_one_line_names_them_and_the_report_has_them(saved: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    url, world = saved
    _, reports = load_on(world, lambda rank: state("model"), url)
    assert [report.forgotten for report in reports] == [("optimizer", "counter")] * world
    (line,) = lines(caplog)
    assert "'optimizer', 'counter'" in line
    assert "ignore" in line


def test_a_load_of_everything_says_nothing(saved: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    url, world = saved
    _, reports = load_on(world, lambda rank: state(*EVERYTHING), url, strict="exact")
    assert [report.forgotten for report in reports] == [()] * world
    assert not lines(caplog)


@pytest.mark.parametrize("ignore", [["optimizer", "counter"], "*", ["opt*", "count?r", "never saved"]])
def test_what_is_meant_is_not_told(
    saved: tuple[str, int], ignore: str | list[str], caplog: pytest.LogCaptureFixture
) -> None:
    url, world = saved
    _, reports = load_on(world, lambda rank: state("model"), url, options=LoadOptions(ignore=ignore), strict="exact")
    assert not lines(caplog)
    for report in reports:
        assert report.forgotten == ()
        assert {"optimizer/m", "counter"} <= {*report.unexpected}, "the report says all the same what was left out"


def test_exact_refuses_what_ignore_does_not_name(saved: tuple[str, int]) -> None:
    url, world = saved
    with pytest.raises(UnexpectedKeyError, match="counter") as caught:
        load_on(world, lambda rank: state("model"), url, options=LoadOptions(ignore=["optimizer"]), strict="exact")
    assert len(caught.value.problems) == 1


def test_ignore_silences_the_warning_of_parts(saved: tuple[str, int]) -> None:
    url, world = saved

    def target(rank: int) -> State:
        return {**state("model", "counter"), "optimizer": {"m": np.zeros(3)}}

    with pytest.warns(UserWarning, match="optimizer/groups"):
        load_on(world, target, url)
    states, _ = load_on(world, target, url, options=LoadOptions(ignore=["optimizer/groups"]))
    assert states[0]["optimizer"]["m"].tolist() == [1, 1, 1]


def test_a_key_is_forgotten_only_if_no_rank_wants_it(caplog: pytest.LogCaptureFixture) -> None:
    url = fresh()
    save_on(2, lambda rank: {f"stage{rank}": {"w": np.ones(2)}, "step": 1}, url)
    _, reports = load_on(2, lambda rank: {f"stage{rank}": {"w": np.zeros(2)}, "step": 0}, url)
    assert [report.forgotten for report in reports] == [(), ()]
    assert not lines(caplog)
    _, reports = load_on(2, lambda rank: {f"stage{rank}": {"w": np.zeros(2)}}, url)
    assert [report.forgotten for report in reports] == [("step",), ("step",)]


def test_an_empty_place_is_not_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    url = fresh()
    hyper_ckpt.save(state(*EVERYTHING), url)
    with pytest.warns(UserWarning, match="no place for them"):
        report = hyper_ckpt.load({**state("model", "counter"), "optimizer": {}}, url)
    assert report.forgotten == ()


def test_a_key_that_map_keys_finds_is_not_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    url = fresh()
    hyper_ckpt.save(state("model"), url)
    report = hyper_ckpt.load({"net": {"w": np.zeros(3)}}, url, options=LoadOptions(map_keys={"net/w": "model/w"}))
    assert report.forgotten == ()
    assert not lines(caplog)


def test_restore_warns(caplog: pytest.LogCaptureFixture) -> None:
    with hyper_ckpt.CheckpointManager(fresh()) as manager:
        manager.save(1, state(*EVERYTHING))
        with pytest.warns(UserWarning, match="'optimizer', 'counter'"):
            manager.restore(state("model"))
        caplog.clear()
        manager.restore(state("model"), options=LoadOptions(ignore=["optimizer", "counter"]))
        manager.restore(state(*EVERYTHING))
        assert not lines(caplog)


def test_ignore_must_be_names() -> None:
    with pytest.raises(ValueError, match="ignore"):
        LoadOptions(ignore=[1])  # type: ignore[list-item]


def test_very_many_top_level_keys() -> None:
    """Told in linear time: each comparison with all others would take minutes."""
    url = fresh()
    hyper_ckpt.save({f"w{i}": i for i in range(20_000)}, url)
    report = hyper_ckpt.load({"w0": 0}, url)
    assert len(report.forgotten) == 19_999
