"""A second save of the same structure plans nothing; any change of it does."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import FileSystemWriter, ItemSavePlanner, PerRank, ShardedTensor, StandardSavePlanner
from hyper_ckpt.api.plans import plans_of
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.layout import Mesh, MeshLayout, Replicate, Shard
from hyper_ckpt.testing.meshed import distribute, meshed_platform
from hyper_ckpt.testing.world import run_world

W = np.arange(48.0).reshape(8, 6)
ROWS, COLUMNS = (MeshLayout(Mesh((2,), (0, 1)), (Shard(d),)) for d in (0, 1))
BOTH = MeshLayout(Mesh((2,), (0, 1)), (Replicate(),))


def base(rank: int) -> dict[str, Any]:
    return {
        "w": distribute(W, ROWS, rank),
        "r": distribute(W, BOTH, rank),
        "n": {"x": np.ones(3), "step": 1},
        "tied": [W, W],
    }


def another_dtype(state: dict[str, Any], rank: int) -> None:
    state["n"]["x"] = np.ones(3, "f4")


def another_shape(state: dict[str, Any], rank: int) -> None:
    state["n"]["x"] = np.ones(4)


def another_layout(state: dict[str, Any], rank: int) -> None:
    state["w"] = distribute(W, COLUMNS, rank)


def another_mesh(state: dict[str, Any], rank: int) -> None:
    state["w"] = distribute(W, MeshLayout(Mesh((2,), (1, 0)), (Shard(0),)), rank)


def another_nesting(state: dict[str, Any], rank: int) -> None:
    state["n"] = {"deep": state["n"]}


def another_container(state: dict[str, Any], rank: int) -> None:
    state["tied"] = tuple(state["tied"])


def another_name(state: dict[str, Any], rank: int) -> None:
    state["v"] = state.pop("w")


def untied(state: dict[str, Any], rank: int) -> None:
    state["tied"] = [W, W.copy()]


def on_one_rank_only(state: dict[str, Any], rank: int) -> None:
    if rank:
        state["extra"] = np.ones(2)


def differing_replicas(state: dict[str, Any], rank: int) -> None:
    state["r"] = distribute(W + rank, BOTH, rank)


CHANGES = [
    another_dtype, another_shape, another_layout, another_mesh, another_nesting, another_container, another_name,
    untied, on_one_rank_only, differing_replicas,
]  # fmt: skip


def saves(change: Callable[[dict[str, Any], int], None] | None, **options: Any) -> list[list[int]]:
    """Plans made by three saves: a first one, an equal one with other values, and a changed one. What they stored is
    compared with what it should be."""
    url = f"memory://plans/{time.monotonic_ns()}"

    def job(platform: Platform) -> list[int]:
        rank, made = platform.ranks.rank, []
        for number in range(3):
            state = base(rank)
            state["n"]["x"][:] = number
            state["n"]["step"] = number
            if number == 2 and change is not None:
                change(state, rank)
            hyper_ckpt.save(state, f"{url}/{number}", platform=platform, timeout=30, **(options if number == 2 else {}))
            made.append(plans_of(platform).made)
        return made

    made = run_world(2, job, platform=meshed_platform)
    for number in range(3):
        found = hyper_ckpt.read(f"{url}/{number}")
        assert hyper_ckpt.verify(f"{url}/{number}").ok
        tensor = found.get("w", found.get("v"))
        assert np.array_equal(tensor, W)
        if number < 2:
            assert (found["n"]["x"].tolist(), found["n"]["step"]) == ([number] * 3, number)
    return made


def test_nothing_is_planned_twice() -> None:
    made = saves(None)
    assert [m[0] for m in made] == [2, 1], "rank 0 plans for all, and each its own"
    assert all(m == [m[0]] * 3 for m in made)


@pytest.mark.filterwarnings("ignore:ranks hold different values")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_a_miss(change: Callable[[dict[str, Any], int], None]) -> None:
    for first, second, third in saves(change):
        assert first == second < third


@pytest.mark.parametrize(
    "options",
    [
        {"remove_redundancy": False},
        {"save_to_minimum_rank": True},
        {"planner": type("Mine", (StandardSavePlanner,), {})()},
        {"planner": ItemSavePlanner()},
    ],
    ids=["copies", "minimum rank", "another planner", "items"],
)
def test_another_option_or_planner_is_a_miss(options: dict[str, Any]) -> None:
    made = saves(None, **options)
    if isinstance(options.get("planner"), ItemSavePlanner):
        assert all(m == [m[0]] * 3 for m in made), "listed boxes are planned anew each time"
    else:
        assert all(m[0] == m[1] < m[2] for m in made)


def test_boxes_that_move_between_ranks_are_not_remembered() -> None:
    """Nor are they where something else is tied, so that the plan is that of a world without some tensors."""
    url = f"memory://plans/{time.monotonic_ns()}"

    def job(platform: Platform) -> list[bool]:
        rank, found = platform.ranks.rank, []
        for number in range(3):
            half = (rank + number) % 2 * 4
            part = W[half : half + 4] + number
            state = {
                "boxes": ShardedTensor([(part, (half, 0))], W.shape),
                "tied": [W, W],
                "each": PerRank(rank * number),
            }
            hyper_ckpt.save(state, f"{url}/{number}", platform=platform, timeout=30)
            found.append(np.array_equal(hyper_ckpt.read(f"{url}/{number}")["boxes"], W + number))
        return found

    assert run_world(2, job) == [[True] * 3] * 2


def test_payloads_of_another_size_move() -> None:
    """The same tensors, but other values beside them in the file."""
    url = f"memory://plans/{time.monotonic_ns()}"
    for number, size in enumerate([3, 100_000, 3, 200_000]):
        state = {"w": W + number, "each": PerRank("x" * size), "large": "y" * (100_000 + size)}
        hyper_ckpt.save(state, f"{url}/{number}", no_dist=True)
        assert hyper_ckpt.verify(f"{url}/{number}").ok
        found = hyper_ckpt.read(f"{url}/{number}")
        assert np.array_equal(found["w"], W + number)
        assert (found["each"].value, found["large"]) == ("x" * size, state["large"])


class Halves(FileSystemWriter):
    """Gives each tensor the file of a group that a list says."""

    def __init__(self, groups: dict[str, str]) -> None:
        super().__init__()
        self.groups = groups

    def group_of(self, name: str) -> str:
        return self.groups.get(name, "")


def test_a_writer_that_groups_otherwise_is_asked_again() -> None:
    url = f"memory://plans/{time.monotonic_ns()}"
    state = {"a": W, "b": W + 1, "c": np.ones(3, "f4")}
    for number, groups in enumerate([{}, {"a": "x"}, {"b": "x"}, {"a": "x", "b": "y"}, {}]):
        where = f"{url}/{number}"
        hyper_ckpt.save(state, where, storage_writer=Halves(groups), no_dist=True)
        assert hyper_ckpt.verify(where).ok
        files = {name.rpartition("-")[2].partition(".")[0] for name in hyper_ckpt.read_metadata(where).files}
        assert files & {"x", "y"} == set(groups.values())
        assert all(np.array_equal(found, state[name]) for name, found in hyper_ckpt.read(where).items())
