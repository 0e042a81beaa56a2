"""Values converted to the dtype of their targets, where the load was asked to."""

import itertools
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.casts import COMPLEX, INTEGERS, REALS, may_cast
from hyper_ckpt.contracts.planner import LoadPlanner
from hyper_ckpt.dtypes import BY_NAME, numpy_dtype
from hyper_ckpt.engine import cast as engine_cast
from hyper_ckpt.errors import DtypeMismatchError, MemoryBudgetError, PlanError, TargetError
from hyper_ckpt.layout import Layout, Mesh, MeshLayout, Replicate, Replicated, Shard
from hyper_ckpt.options import LoadOptions
from hyper_ckpt.planning.standard import StandardLoadPlanner
from hyper_ckpt.testing.meshed import Meshed, distribute
from hyper_ckpt.values import ShardedTensor

from .worlds import State, filled, fresh, load_on, poisoned, raw, save_on

CAST = LoadOptions(cast=True)


def converted(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(numpy_dtype(dtype))


FLOATS = [*itertools.permutations(sorted(REALS), 2), *itertools.permutations(sorted(COMPLEX), 2)]


@pytest.mark.parametrize(("dtype", "to"), FLOATS)
def test_floats(dtype: str, to: str) -> None:
    url, whole = fresh(), filled((37, 5), dtype)
    hyper_ckpt.save({"w": whole}, url)
    target = {"w": poisoned((37, 5), to)}
    report = hyper_ckpt.load(target, url, options=CAST)
    assert raw(target["w"]) == raw(converted(whole, to))
    assert report.cast == {"w": (dtype, to)}
    assert report.loaded == ("w",)


@pytest.mark.parametrize(("dtype", "to"), [*itertools.permutations(sorted(INTEGERS), 2)])
def test_integers_only_where_every_value_fits(dtype: str, to: str) -> None:
    url, info = fresh(), np.iinfo(dtype)
    whole = np.array([info.min, 0, 1, info.max], dtype)
    hyper_ckpt.save({"w": whole}, url)
    target = {"w": poisoned((4,), to)}
    if np.iinfo(to).min <= info.min and info.max <= np.iinfo(to).max:
        hyper_ckpt.load(target, url, options=CAST)
        assert target["w"].tolist() == whole.tolist()
    else:
        with pytest.raises(DtypeMismatchError, match="'w' was saved as"):
            hyper_ckpt.load(target, url, options=CAST)
        assert raw(target["w"]) == raw(poisoned((4,), to))


def test_kinds_are_never_mixed() -> None:
    kinds = [REALS, COMPLEX, INTEGERS, {"bool"}, {"int4"}, {"uint4"}, {"float8_e8m0fnu"}]
    assert set().union(*kinds) == set(BY_NAME)
    for one, other in itertools.permutations(kinds, 2):
        assert not any(may_cast(a, b) for a in one for b in other)


@pytest.mark.parametrize("cast", [False, (), "other", ["b/*"]])
def test_only_what_was_asked_for(cast: Any) -> None:
    url = fresh()
    hyper_ckpt.save({"a": {"w": np.ones(3, "f4")}, "b": {"w": np.ones(3, "f4")}}, url)
    target = {"a": {"w": np.zeros(3)}, "b": {"w": np.zeros(3, "f4")}}
    with pytest.raises(DtypeMismatchError, match=r"'a/w' was saved as float32, the target is float64.*cast=True"):
        hyper_ckpt.load(target, url, options=LoadOptions(cast=cast))
    assert target["a"]["w"].tolist() == [0, 0, 0]
    report = hyper_ckpt.load(target, url, options=LoadOptions(cast=cast), strict=False)
    assert report.cast == {}
    assert report.loaded == ("b/w",)


@pytest.mark.parametrize("cast", ["a", ["a"], ["?/*"], True, ["a/w", "never"]])
def test_names_and_patterns(cast: Any) -> None:
    url = fresh()
    hyper_ckpt.save({"a": {"w": np.ones(3, "f4")}, "b": 1}, url)
    target = {"a": {"w": np.zeros(3)}, "b": 0}
    report = hyper_ckpt.load(target, url, options=LoadOptions(cast=cast))
    assert target["a"]["w"].tolist() == [1, 1, 1]
    assert report.cast == {"a/w": ("float32", "float64")}


def test_what_is_neither() -> None:
    with pytest.raises(ValueError, match="cast"):
        LoadOptions(cast=3)  # type: ignore[arg-type]


def mesh(world: int, *placements: Any) -> Layout:
    return MeshLayout(Mesh((world,), tuple(range(world))), placements)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("verify", ["during", "before", "off"])
@pytest.mark.parametrize(("dtype", "to"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("int8", "int64")])
def test_sharded_and_shared(
    dtype: str, to: str, verify: Any, share_reads: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_cast, "STEP", 7)
    url, shape = fresh(), (12, 10)
    rows, columns, whole = filled(shape, dtype, 1), filled(shape, dtype, 2), filled(shape, dtype, 3)

    def saved(rank: int) -> State:
        arrays = {"rows": (rows, Shard(0)), "columns": (columns, Shard(1)), "whole": (whole, Replicate())}
        return {name: distribute(array, mesh(2, placement), rank) for name, (array, placement) in arrays.items()}

    save_on(2, saved, url)
    layouts = {"rows": Shard(1), "columns": Shard(0), "whole": Replicate()}

    def target(rank: int) -> State:
        blank = poisoned(shape, to)
        return {n: distribute(blank, mesh(3, p), rank, on_device=on_device) for n, p in layouts.items()}

    states, reports = load_on(
        3, target, url, options=LoadOptions(cast=True, broadcast_batch_bytes=64), share_reads=share_reads, verify=verify
    )
    for rank, state in enumerate(states):
        for name, array in (("rows", rows), ("columns", columns), ("whole", whole)):
            expected = distribute(converted(array, to), mesh(3, layouts[name]), rank)
            assert raw(state[name].local) == raw(expected.local), name
    assert all(set(report.cast) == {"rows", "columns", "whole"} for report in reports)


@pytest.mark.parametrize("share_reads", [True, False])
def test_ranks_of_two_dtypes(share_reads: bool) -> None:
    """One rank casts, the other takes the values as they are: both want the same bytes."""
    url, whole = fresh(), filled((64, 8), "bfloat16")
    save_on(1, lambda rank: {"w": whole}, url)
    names = ["bfloat16", "float32"]
    states, _ = load_on(
        2, lambda rank: {"w": poisoned((64, 8), names[rank])}, url, options=CAST, share_reads=share_reads
    )
    for state, name in zip(states, names, strict=True):
        assert raw(state["w"]) == raw(converted(whole, name))


def test_strided_and_hand_made_targets() -> None:
    url, whole = fresh(), filled((6, 8), "float32")
    hyper_ckpt.save({"w": whole, "s": whole, "scalar": np.full((), 2.5, "f4"), "none": whole[:0]}, url)
    top, rest = poisoned((8, 2), "float64").T, poisoned((4, 8), "float64")
    target = {
        "w": poisoned((12, 16), "float64")[::2, ::-2],
        "s": ShardedTensor([(top, (0, 0)), (rest, (2, 0))], (6, 8)),
        "scalar": np.zeros(()),
        "none": np.zeros((0, 8)),
    }
    hyper_ckpt.load(target, url, options=CAST)
    assert raw(target["w"]) == raw(whole.astype("f8"))
    assert raw(np.concatenate([top, rest])) == raw(whole.astype("f8"))
    assert target["scalar"] == 2.5


def test_a_target_without_memory_gets_its_own_dtype() -> None:
    url, whole = fresh(), filled((4, 4), "float32")
    save_on(1, lambda rank: {"w": whole}, url)
    states, _ = load_on(1, lambda rank: {"w": Meshed(None, (4, 4), Replicated(), 0, "float64")}, url, options=CAST)
    assert raw(states[0]["w"].local) == raw(whole.astype("f8"))


def test_ties_and_other_names() -> None:
    url, whole = fresh(), filled((4, 4), "float32")
    hyper_ckpt.save({"a": whole, "b": whole}, url)
    one = np.zeros((4, 4))
    report = hyper_ckpt.load({"x": one, "b": one}, url, options=LoadOptions(map_keys={"x": "a"}, cast=["x", "b"]))
    assert raw(one) == raw(whole.astype("f8"))
    assert set(report.cast) == {"x", "b"}


@pytest.mark.parametrize("on_device", [False, True])
def test_memory_stays_below_the_limit(on_device: bool) -> None:
    """What is staged is the saved form, and outside host memory both."""
    url, count = fresh(), 1 << 20
    whole = np.arange(count, dtype="f4")
    save_on(1, lambda rank: {f"w{i}": whole for i in range(8)}, url)
    (state,), (report,) = load_on(
        1,
        lambda rank: {f"w{i}": distribute(np.zeros(count), Replicated(), 0, on_device=on_device) for i in range(8)},
        url,
        options=CAST,
        max_host_bytes=40 << 20,
    )
    assert raw(state["w7"].local) == raw(whole.astype("f8"))
    assert report.peak_host_bytes <= 40 << 20
    with pytest.raises(MemoryBudgetError):
        load_on(
            1,
            lambda rank: {"w0": distribute(np.zeros(count), Replicated(), 0, on_device=on_device)},
            url,
            options=LoadOptions(cast=True, ignore="*"),
            max_host_bytes=4 << 20,
        )


def test_damage_is_found(tmp_path: Any) -> None:
    hyper_ckpt.save({"w": filled((64, 64), "float32")}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    target = {"w": np.zeros((64, 64))}
    for verify in ("before", "during"):
        with pytest.raises(hyper_ckpt.errors.DigestError):
            hyper_ckpt.load(target, tmp_path / "c", options=CAST, verify=verify)  # type: ignore[arg-type]
        assert not target["w"].any()


def test_a_read_only_target_is_refused() -> None:
    url = fresh()
    hyper_ckpt.save({"w": np.ones((2, 3), "f4")}, url)
    with pytest.raises(TargetError, match="'w'"):
        hyper_ckpt.load({"w": np.broadcast_to(np.zeros(3), (2, 3))}, url, options=CAST)


class HalfPlanner(StandardLoadPlanner):
    """Fills only the first row of each tensor."""

    def finalize_plan(self, description: Any, rank: int, boxes: Any) -> Any:
        return super().finalize_plan(description, rank, [(n, o, (1, *s[1:])) for n, o, s in boxes])


def test_a_planner_that_fills_a_part_is_refused() -> None:
    """What the target has beside it would have to pass through the saved dtype."""
    url, planner = fresh(), HalfPlanner()
    assert isinstance(planner, LoadPlanner)
    hyper_ckpt.save({"w": np.ones((2, 3), "f4")}, url)
    target = {"w": np.full((2, 3), 1 / 3)}
    with pytest.raises(PlanError, match="cast"):
        hyper_ckpt.load(target, url, options=CAST, planner=planner)
    assert (target["w"] == 1 / 3).all()
