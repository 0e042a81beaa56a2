"""What is there of a save by ranks that did not talk, of which some never came."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import hyper_ckpt
from hyper_ckpt import PerRank, ShardedTensor
from hyper_ckpt.cli.app import cli
from hyper_ckpt.errors import CheckpointNotFoundError, ManifestError, MissingKeyError, ShapeMismatchError, TargetError
from hyper_ckpt.options import LoadOptions

from .helpers import State, load_on, same
from .test_without_collectives import BOUNDS, W, load_alone, part, save_alone

PARTIAL = LoadOptions(partial=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of three ranks, the second never came."""
    for rank in (0, 2):
        save_alone(rank, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def rows(low: int, high: int) -> ShardedTensor:
    return ShardedTensor([(np.zeros((high - low, 6), "f4"), (low, 0))], W.shape)


def target(low: int, high: int) -> State:
    return {
        "w": rows(low, high),
        "replica": np.zeros(7, int),
        "empty": np.zeros((0, 2)),
        "tied": {"a": np.zeros(5, "i2"), "b": np.zeros(5, "i2")},
        "step": 0,
        "rng": PerRank("mine"),
        "blob": [0] * 20_000,
    }


LEFT = LoadOptions(partial=True, ignore="only")


def test_never_by_default(path: Path) -> None:
    for call in (lambda: hyper_ckpt.load(target(0, 3), path), lambda: hyper_ckpt.read(path)):
        with pytest.raises(CheckpointNotFoundError, match=r"receipts of rank 1 are missing.*partial=True"):
            call()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_saved_gets_all_of_its_own_back(path: Path, rank: int) -> None:
    state = {**target(BOUNDS[rank], BOUNDS[rank + 1]), "only": {f"stage{rank}": np.zeros(3, "u1")}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = load_alone(rank, 3, state, path, options=PARTIAL)
    assert same(state["w"].shards[0][0], W[BOUNDS[rank] : BOUNDS[rank + 1]])
    for key in ("replica", "empty", "tied", "step", "blob", "only"):
        assert same(state[key], part(rank)[key]), key
    assert state["rng"].value == ("state", rank)
    assert report.unfilled == report.missing == ()


@pytest.mark.parametrize("collectives", [True, False])
def test_what_is_not_covered_stays_and_is_named(path: Path, collectives: bool) -> None:
    bounds = [(0, 2), (2, 5), (5, 10)]

    def of_rank(rank: int) -> State:
        return {**target(*bounds[rank]), "only": {"stage1": np.full(3, 9, "u1")}}

    def load() -> tuple[list[State], list[hyper_ckpt.LoadReport]]:
        if collectives:
            return load_on(3, of_rank, str(path), options=PARTIAL, verify="before")
        states = [of_rank(rank) for rank in range(3)]
        return states, [load_alone(rank, 3, state, path, options=PARTIAL) for rank, state in enumerate(states)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states, reports = load()
    told = [str(w.message) for w in caught if "lacks the parts of rank 1: left as they were" in str(w.message)]
    assert sorted("'w', 'only/stage1'" in text for text in told) == [False, False, True]
    for rank, (state, report) in enumerate(zip(states, reports, strict=True)):
        low, high = bounds[rank]
        whole = rank != 1
        assert same(state["w"].shards[0][0], W[low:high] * whole)
        assert report.unfilled == (() if whole else ("w",))
        assert ("w" in report.loaded) == whole
        assert report.missing == ("only/stage1",)
        assert state["only"]["stage1"].tolist() == [9, 9, 9]
        assert same(state["replica"], np.arange(7))
        assert state["step"] == 12
        assert state["rng"].value == ("mine" if rank == 1 else ("state", rank))
        assert not report.shared_reads


def test_misfits_are_refused_as_ever(path: Path) -> None:
    with pytest.raises(ShapeMismatchError, match="replica"):
        load_alone(0, 3, {**target(0, 3), "replica": np.zeros(8, int)}, path, options=LEFT)
    (file,) = path.glob("rank-00000*")
    file.unlink()
    with pytest.raises(hyper_ckpt.errors.MissingFileError):
        load_alone(0, 3, target(0, 3), path, options=LEFT)


def test_with_all_parts_it_changes_nothing(path: Path) -> None:
    save_alone(1, path)
    state = target(0, 10)
    hyper_ckpt.load(state, path, options=LEFT)
    assert same(state["w"].shards[0][0], W)
    with pytest.raises(MissingKeyError):
        hyper_ckpt.load({"never saved": 1}, path, options=PARTIAL)
    assert same(hyper_ckpt.read(path, partial=True)["w"], W)


def test_reading(path: Path) -> None:
    with pytest.warns(UserWarning, match=r"lacks the parts of rank 1: left out are 'w'"):
        state = hyper_ckpt.read(path, partial=True)
    assert sorted(state) == ["blob", "empty", "only", "replica", "rng", "step", "tied"]
    assert same(state["blob"], part(0)["blob"])
    assert state["rng"].value == ("state", 0)
    assert sorted(state["only"]) == ["stage0", "stage2"]
    with pytest.warns(UserWarning, match="left out are 'w'"):
        assert hyper_ckpt.read(path, keys=["w", "step"], partial=True) == {"step": 12}


def test_holes_in_lists(tmp_path: Path) -> None:
    for rank in (0,):
        save_alone(rank, tmp_path / "c", world=2, state={"l": [ShardedTensor([(np.ones(2), (0,))], (4,)), 5]})
    with pytest.warns(UserWarning, match="'l/0'"):
        assert hyper_ckpt.read(tmp_path / "c", partial=True) == {"l": [None, 5]}


def test_parts_that_overlap_are_taken_once(tmp_path: Path) -> None:
    """The lowest rank's where they differ in their boxes; what only the other would fill is a hole."""
    for rank, (low, high) in ((1, (0, 6)), (2, (4, 9))):
        save_alone(rank, tmp_path / "c", world=4, state={"w": ShardedTensor([(W[low:high].copy(), (low, 0))], W.shape)})
    state = {"w": rows(1, 6)}
    hyper_ckpt.load(state, tmp_path / "c", options=PARTIAL)
    assert same(state["w"].shards[0][0], W[1:6])
    with pytest.warns(UserWarning, match="'w'"):
        assert hyper_ckpt.load({"w": rows(0, 10)}, tmp_path / "c", options=PARTIAL).unfilled == ("w",)


def test_an_object_takes_no_torn_tensor(path: Path) -> None:
    class Box:
        def __init__(self) -> None:
            self.state: State = {"w": rows(0, 10)}

        def state_dict(self) -> State:
            return self.state

        def load_state_dict(self, state: State) -> None:
            self.state = state

    boxes = [Box(), Box()]
    for rank in (0, 2):
        part_of = {"o": boxes[0]}
        boxes[0].state = {"w": part(rank)["w"]}
        save_alone(rank, path.parent / "o", state=part_of)
    with pytest.raises(TargetError, match=r"a part of 'o/w' is missing"):
        hyper_ckpt.load({"o": boxes[1]}, path.parent / "o", options=PARTIAL)
    assert not boxes[1].state["w"].shards[0][0].any()


def test_several_incomplete_saves_are_not_mixed(path: Path) -> None:
    save_alone(1, path.parent / "other", token="run-2")
    shutil.copytree(path.parent / "other", path, dirs_exist_ok=True)
    with pytest.raises(ManifestError, match="several incomplete saves"):
        hyper_ckpt.read(path, partial=True)


def test_show_says_what_is_there(path: Path) -> None:
    shown = CliRunner().invoke(cli, ["show", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "parts of 1 rank are missing: 1; 6 of 7 tensors are whole" in shown.stdout
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("w ")]
    assert "NOT WHOLE: 2 x (3..6,·)" in line
    found = json.loads(CliRunner().invoke(cli, ["show", "--json", str(path)]).stdout)
    assert found["absent_ranks"] == [1]
    assert [t["name"] for t in found["tensors"] if not t["whole"]] == ["w"]
