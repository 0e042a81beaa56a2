"""A second save of the same structure plans nothing; any change of it does."""

import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import FileSystemWriter, ItemSavePlanner, PerRank, ShardedTensor, StandardSavePlanner
from hyper_ckpt.api.common import kept
from hyper_ckpt.api.plans import plans_of
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
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
        found = hyper_ckpt.read(f"{url}/{number}", options=hyper_ckpt.LoadOptions(conflicts="lowest"))
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


@pytest.mark.filterwarnings("ignore:ranks hold different tensors")
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shapes of the arrays that were described, one by one or as plain ones."""
    seen: list[str] = []

    def noted(inner: Callable[[NumpyTensors, Any], Any]) -> Callable[[NumpyTensors, Any], Any]:
        def ask(tensors: NumpyTensors, value: Any) -> Any:
            found = inner(tensors, value)
            if found is not None:
                seen.append(str(value.shape))
            return found

        return ask

    monkeypatch.setattr(NumpyTensors, "describe", noted(NumpyTensors.describe))
    monkeypatch.setattr(NumpyTensors, "plain", noted(NumpyTensors.plain))
    return seen


def test_an_unchanged_state_is_not_described_again(asked: list[str]) -> None:
    url = f"memory://plans/{time.monotonic_ns()}"
    state = {"w": W.copy(), "n": {"x": np.ones(3), "step": 0}, "tied": [W, W]}
    for number in range(4):
        asked.clear()
        state["n"]["step"] = number
        state["w"][:] = W + number
        hyper_ckpt.save(state, f"{url}/{number}", no_dist=True)
        assert len(asked) == (1 if number else 3), "one, to see that its type is a tensor's; at first each"
        found = hyper_ckpt.read(f"{url}/{number}")
        assert np.array_equal(found["w"], W + number)
        assert found["n"]["step"] == number


def in_other_memory(state: dict[str, Any]) -> None:
    state["a"] = state["a"].copy()


def exchanged(state: dict[str, Any]) -> None:
    state["a"], state["b"] = state["b"], state["a"]


def now_tied(state: dict[str, Any]) -> None:
    state["b"] = state["a"]


def transposed(state: dict[str, Any]) -> None:
    state["a"] = state["a"].T


def as_integers(state: dict[str, Any]) -> None:
    state["a"] = state["a"].view("i8")


def as_a_row(state: dict[str, Any]) -> None:
    state["a"] = state["a"].reshape(1, 36)


def with_a_value_in_its_place(state: dict[str, Any]) -> None:
    state["a"] = 3


def in_a_list(state: dict[str, Any]) -> None:
    state["a"] = [state["a"]]


@pytest.mark.parametrize(
    "change",
    [in_other_memory, exchanged, now_tied, transposed, as_integers, as_a_row, with_a_value_in_its_place, in_a_list],
)
def test_a_state_that_changed_is_described_again(change: Callable[[dict[str, Any]], None]) -> None:
    url = f"memory://plans/{time.monotonic_ns()}"
    state: dict[str, Any] = {"a": np.arange(36.0).reshape(6, 6), "b": np.ones((6, 6)), "c": np.zeros(3)}
    for number in range(4):
        if number % 2:
            change(state)
        hyper_ckpt.save(state, f"{url}/{number}", no_dist=True)
        assert hyper_ckpt.verify(f"{url}/{number}").ok
        found = hyper_ckpt.read(f"{url}/{number}")
        assert found.keys() == state.keys()
        for name in state:
            one, two = (np.asarray(each[name]) for each in (found, state))
            assert (one.dtype, one.tolist()) == (two.dtype, two.tolist())


def test_what_is_remembered_keeps_no_tensor_alive() -> None:
    url = f"memory://plans/{time.monotonic_ns()}"
    array = np.ones(1000)
    hyper_ckpt.save({"w": array}, url, no_dist=True)
    gone = weakref.ref(array)
    del array
    assert gone() is None


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


def test_a_function_set_on_a_writer_is_asked() -> None:
    url = f"memory://plans/{time.monotonic_ns()}"
    writer = FileSystemWriter()
    writer.group_of = lambda name: "x" if name == "a" else "y"  # type: ignore[method-assign]
    hyper_ckpt.save({"a": W, "b": W, "each": PerRank(1)}, url, storage_writer=writer, no_dist=True)
    files = hyper_ckpt.read_metadata(url).files
    assert {name.rpartition("-")[2] for name in files} == {"x.safetensors", "y.safetensors"}
    assert hyper_ckpt.verify(url).ok


def test_what_is_kept_does_not_grow() -> None:
    state, sizes = {"w": W}, []
    for number in range(12):
        url = f"memory://plans/{time.monotonic_ns()}"
        hyper_ckpt.save({**state, "each": PerRank("x" * 1000 * number)}, url, no_dist=True, platform="numpy")
        plans = plans_of(kept(hyper_ckpt.registry.registry().platform("numpy"), "alone", Platform))
        sizes.append(sum(len(columns.memo["placed"][1].memo) for columns in plans._plans._values.values()))
    assert sizes[-1] == sizes[2]


def test_threads_that_save_many_states_at_once() -> None:
    states = [{f"{n}/{i}": W + n for i in range(n % 5 + 1)} for n in range(24)]

    def save(n: int) -> bool:
        url = f"memory://plans/{time.monotonic_ns()}-{n}"
        hyper_ckpt.save(states[n], url, no_dist=True)
        return all(np.array_equal(found, W + n) for found in hyper_ckpt.read(url).values())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(save, [*range(24)] * 8))
    finally:
        sys.setswitchinterval(interval)
