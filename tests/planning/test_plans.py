"""Who writes what: whole, once, balanced, and the same on every rank."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_ckpt.columns import Columns
from hyper_ckpt.errors import PlanError, RanksDisagreeError, UnsupportedDtypeError
from hyper_ckpt.layout import Boxes, Layout, Mesh, MeshLayout, Replicate, Replicated, Shard
from hyper_ckpt.planning import share
from hyper_ckpt.planning.load import plan_shared
from hyper_ckpt.planning.save import SavePolicy
from hyper_ckpt.planning.share import build_lines, table_of

from .worlds import Spec, bytes_per_rank, describe, plan, world_of

MIB = 1 << 20
Tensors = Mapping[str, Spec]


def f32(shape: tuple[int, ...], layout: Layout | None = None) -> Spec:
    return "float32", shape, layout or Replicated()


def on(shape: tuple[int, ...], ranks: tuple[int, ...], *placements: Replicate | Shard) -> MeshLayout:
    return MeshLayout(Mesh(shape, ranks), placements)


def chunks(columns: Columns, name: str) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(rank, offsets, sizes) of every chunk of a tensor."""
    rows = np.flatnonzero(columns.tensor == columns.table.names.index(name))
    return [(int(columns.rank[r]), *columns.box(r)) for r in rows]


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(share, "MIN_CUT_BYTES", 64)
    return 64


def test_small_replicas_are_not_cut_and_spread() -> None:
    world = world_of(4, lambda rank: {f"t{i:02}": f32((1000,)) for i in range(40)})
    columns = plan(world)
    assert len(columns) == 40
    assert bytes_per_rank(columns, 4) == [40_000] * 4


@pytest.mark.parametrize(
    "shapes", [[(4096, 1024)], [(4096, 999), (777, 1024), (3, 5)], [(1, 8, 1 << 20)], [(1 << 23,)]]
)
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_large_replicas_are_balanced_within_a_unit(shapes: list[tuple[int, ...]], world_size: int) -> None:
    world = world_of(world_size, lambda rank: {f"t{i}": f32(shape) for i, shape in enumerate(shapes)})
    columns = plan(world)
    loads = bytes_per_rank(columns, world_size)
    assert sum(loads) == sum(int(np.prod(s)) * 4 for s in shapes)
    # A unit is a row, or for huge rows an index deeper in.
    unit = max(int(np.prod(s[share.unit_dim(s, 4) + 1 :])) * 4 for s in shapes)
    # One share has two ends, each rounded by up to half a unit; the ends of equal units round alike.
    assert max(loads) - min(loads) <= unit * (1 if len(shapes) == 1 else 2)


def test_stacked_experts_are_cut_below_their_first_dimension() -> None:
    columns = plan(world_of(4, lambda rank: {"experts": f32((2, 64, 1 << 16))}))
    assert bytes_per_rank(columns, 4) == [8 * MIB] * 4
    assert [c[2] for c in chunks(columns, "experts")] == [(1, 32, 1 << 16)] * 4


def test_levelling_sees_what_ranks_hold_alone() -> None:
    def of_rank(rank: int) -> Tensors:
        own = {f"own{rank}": f32((rank * 256, 1024))}
        return {**own, "shared": f32((3 * 1024, 1024))}

    assert bytes_per_rank(plan(world_of(3, of_rank)), 3) == [5 * MIB] * 3


def test_levelling_sees_explicit_boxes() -> None:
    def whole(rank: int) -> Tensors:
        boxes = Boxes((((0, 0), (1, MIB // 4)),)) if rank == 0 else Boxes((((0, MIB // 4), (1, 3 * MIB // 4)),))
        return {"a": f32((1, MIB), boxes), "w": f32((8, MIB // 4))}

    assert bytes_per_rank(plan(world_of(2, whole)), 2) == [6 * MIB] * 2


def test_data_parallel_over_tensor_parallel_submeshes_is_one_structure() -> None:
    def of_rank(rank: int) -> Tensors:
        mesh = (0, 1) if rank < 2 else (2, 3)
        return {"w": f32((1024, 1024), on((2,), mesh, Shard(0))), "b": f32((8,), on((2,), mesh, Replicate()))}

    digests = {describe(of_rank(rank), rank, 4).digest for rank in range(4)}
    assert len(digests) == 1
    world = world_of(4, of_rank)
    assert len(world.structures) == 1
    lines, loose = build_lines(world, table_of(world))
    assert not loose
    assert sorted(line.ranks.tolist() for line in lines) == [[[0, 1, 2, 3]], [[0, 2], [1, 3]]]
    assert [c[0] for c in chunks(plan(world), "w")] == [0, 2, 1, 3]


def test_digests_hold_no_rank_numbers_but_everything_else() -> None:
    base = describe({"w": f32((4,), on((2,), (0, 1), Shard(0)))}, 0, 8, b"s")
    same = describe({"w": f32((4,), on((2,), (6, 3), Shard(0)))}, 3, 8, b"s")
    assert base.digest == same.digest
    others = [
        describe({"v": f32((4,), on((2,), (0, 1), Shard(0)))}, 0, 8, b"s"),
        describe({"w": f32((5,), on((2,), (0, 1), Shard(0)))}, 0, 8, b"s"),
        describe({"w": f32((4,), on((2,), (0, 1), Shard(0, (2, 2))))}, 0, 8, b"s"),
        describe({"w": f32((4,), on((4,), (0, 1, 2, 3), Shard(0)))}, 0, 8, b"s"),
        describe({"w": f32((4,), on((2,), (0, 1), Replicate()))}, 0, 8, b"s"),
        describe({"w": ("int32", (4,), on((2,), (0, 1), Shard(0)))}, 0, 8, b"s"),
        describe({"w": f32((4,), on((2,), (0, 1), Shard(0)))}, 0, 8, b"t"),
        describe({"w": f32((4,))}, 0, 8, b"s"),
    ]
    assert len({base.digest, *(o.digest for o in others)}) == 1 + len(others)


def test_pipeline_stages_and_a_name_in_two_of_them() -> None:
    def of_rank(rank: int) -> Tensors:
        stage, ranks = rank // 2, (0, 1) if rank < 2 else (2, 3)
        layer = f32((600, 1024), on((2,), ranks, Shard(0)))
        return {f"layer{stage}": layer, "embedding": f32((2048, 1024), on((2,), ranks, Shard(0))), "step": f32(())}

    world = world_of(4, of_rank)
    assert len(world.structures) == 2
    columns = plan(world)
    assert build_lines(world, table_of(world))[1] == []
    assert {c[0] for c in chunks(columns, "layer0")} == {0, 1}
    assert {c[0] for c in chunks(columns, "embedding")} == {0, 1, 2, 3}
    assert len(chunks(columns, "step")) == 1
    loads = bytes_per_rank(columns, 4)
    assert max(loads) - min(loads) <= 4096


def test_layouts_that_differ_take_the_path_of_boxes() -> None:
    """The same two boxes: from a mesh, by hand, and from a mesh with a dimension more."""

    def of_rank(rank: int) -> Tensors:
        if rank < 2:
            return {"w": f32((8, MIB), on((2,), (0, 1), Shard(0)))}
        if rank < 4:
            return {"w": f32((8, MIB), Boxes((((4 * (rank - 2), 0), (4, MIB)),)))}
        return {"w": f32((8, MIB), on((1, 2), (4, 5), Replicate(), Shard(0)))}

    world = world_of(6, of_rank)
    assert build_lines(world, table_of(world))[1] == [0]
    columns = plan(world)
    loads = bytes_per_rank(columns, 6)
    assert sum(loads) == 32 * MIB
    assert max(loads) - min(loads) <= 8 * MIB
    assert all(load for load in loads)


@pytest.mark.parametrize("swap", [False, True])
def test_whole_here_and_boxes_there(swap: bool) -> None:
    whole = f32((6, 4))
    boxes = f32((6, 4), Boxes((((0, 0), (6, 4)),)))
    mesh = f32((6, 4), on((1,), (1,), Replicate()))
    for other in (boxes, mesh):
        world = world_of(2, lambda rank, other=other: {"w": whole if (rank == 0) != swap else other})
        assert len(chunks(plan(world), "w")) == 1


def test_meshes_without_dimensions() -> None:
    world = world_of(2, lambda rank: {"w": f32((2,), on((), (rank,)))})
    assert len(chunks(plan(world), "w")) == 1
    world = world_of(2, lambda rank: {"w": f32((2,), on((), (rank,)) if rank else None)})
    assert len(chunks(plan(world), "w")) == 1


def test_ranks_outside_a_mesh_may_describe_it() -> None:
    world = world_of(4, lambda rank: {"w": f32((4, 2), on((2,), (1, 2), Shard(0)))})
    assert [c[0] for c in chunks(plan(world), "w")] == [1, 2]


def refused(of_rank: Callable[[int], Tensors], world_size: int = 4) -> str:
    with pytest.raises(PlanError) as caught:
        plan(world_of(world_size, of_rank))
    return str(caught.value)


def test_an_absent_rank_of_a_mesh_is_named() -> None:
    spec = f32((8,), on((4,), (0, 1, 2, 3), Shard(0)))
    text = refused(lambda rank: {} if rank == 2 else {"w": spec})
    assert "'w'" in text
    assert "rank 2" in text


def test_meshes_that_overlap_are_refused() -> None:
    text = refused(lambda rank: {"w": f32((8,), on((2,), (0, 1) if rank < 2 else (1, 2), Shard(0)))}, 3)
    assert "overlap" in text
    assert "'w'" in text


@pytest.mark.parametrize(
    "boxes",
    [
        [(((0, 0), (2, 2)),), (((2, 2), (2, 2)),)],
        [(((0, 0), (4, 2)),), (((0, 1), (4, 3)),)],
        [(((0, 0), (4, 2)),), ()],
        [(((0, 0), (4, 4)),), (((0, 0), (2, 4)),)],
    ],
)
def test_holes_and_overlaps_are_refused(boxes: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]) -> None:
    text = refused(lambda rank: {"good": f32((2,)), "w": f32((4, 4), Boxes(boxes[rank]))}, 2)
    assert "'w'" in text
    assert "good" not in text


def test_layouts_that_do_not_fit_together_are_refused() -> None:
    halves = f32((4,), on((2,), (0, 1), Shard(0)))
    assert "'w'" in refused(lambda rank: {"w": halves if rank < 2 else f32((4,))})
    thirds = f32((4,), on((2,), (2, 3), Shard(0, (1, 3))))
    assert "'w'" in refused(lambda rank: {"w": halves if rank < 2 else thirds})


def test_a_name_is_one_tensor() -> None:
    text = refused(lambda rank: {"w": f32((4,)) if rank % 3 else ("int32", (4,), Replicated())})
    assert all(part in text for part in ("'w'", "int32", "float32", "ranks 0, 3", "ranks 1, 2"))
    assert "(5,)" in refused(lambda rank: {"w": f32((4 + rank,))}, 2)


def test_unknown_dtypes_are_named() -> None:
    with pytest.raises(UnsupportedDtypeError, match="float12"):
        plan(world_of(1, lambda rank: {"w": ("float12", (4,), Replicated())}))


def test_copies_and_lowest_ranks() -> None:
    def of_rank(rank: int) -> Tensors:
        mesh = on((2, 2), (0, 1, 2, 3), Replicate(), Shard(0))
        return {"w": f32((4, MIB), mesh), "s": f32(()), "b": f32((2,), Boxes((((rank % 2,), (1,)),)))}

    world = world_of(4, of_rank)
    copies = plan(world, SavePolicy(remove_redundancy=False))
    assert sorted(zip(copies.tensor.tolist(), copies.copy.tolist(), copies.rank.tolist(), strict=True)) == [
        (0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 1, 3),
        (1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 3, 3),
        (2, 0, 0), (2, 0, 1), (2, 1, 2), (2, 1, 3),
    ]  # fmt: skip
    lowest = plan(world, SavePolicy(save_to_minimum_rank=True))
    assert lowest.rank.tolist() == [0, 1, 0, 0, 1]


def test_two_structures_of_one_name_with_the_same_mesh() -> None:
    """Ranks of one mesh that are of different classes because of something else."""

    def of_rank(rank: int) -> Tensors:
        return {"w": f32((8, 2), on((2,), (0, 1), Shard(0))), f"own{rank}": f32((1,))}

    world = world_of(2, of_rank)
    assert len(world.structures) == 2
    assert [c[0] for c in chunks(plan(world), "w")] == [0, 1]
    assert build_lines(world, table_of(world))[1] == []


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[dict[str, Spec]]]:
    """Tensors on random subsets of ranks, on meshes, and replicated."""
    size = draw(st.integers(1, 6))
    tensors: list[dict[str, Spec]] = [{} for _ in range(size)]
    for i in range(draw(st.integers(1, 6))):
        shape, dtype = draw(shapes), draw(st.sampled_from(["float32", "int8", "float64"]))
        ranks = tuple(draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True)))
        outer = draw(st.sampled_from([n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]))
        options = [Replicate(), *(Shard(d) for d in range(len(shape)))]
        placements = tuple(draw(st.sampled_from(options)) for _ in range(2))
        layout = MeshLayout(Mesh((outer, len(ranks) // outer), ranks), placements, draw(st.sampled_from([(), (1, 0)])))
        chosen = draw(st.sampled_from([layout, Replicated()]))
        for rank in ranks:
            tensors[rank][f"t{i}"] = (dtype, shape, chosen)
    return size, tensors


@settings(max_examples=60)
@given(worlds())
def test_every_rank_plans_its_own_part(drawn: tuple[int, list[dict[str, Spec]]]) -> None:
    size, tensors = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "MIN_CUT_BYTES", 64)
        world = world_of(size, lambda rank: tensors[rank])
        for policy in (SavePolicy(), SavePolicy(remove_redundancy=False), SavePolicy(save_to_minimum_rank=True)):
            columns = plan(world, policy)
            assert (columns.sizes > 0).all()


@pytest.mark.parametrize("limit", [1, 100, 4096, 1 << 30])
def test_shared_reads_give_everybody_the_same_rows(limit: int, low_limit: int) -> None:
    mesh = on((2, 2), (0, 1, 2, 3), Replicate(), Shard(0))
    specs = {"w": f32((100, 7), mesh), "r": f32((3, 50, 5)), "s": f32(()), "b": f32((9,), Boxes((((0,), (9,)),)))}
    world = world_of(4, lambda rank: specs)
    plans = []
    for rank in range(4):
        boxes = [("w", (50 * (rank % 2), 0), (50, 7)), ("r", (0, 0, 0), (3, 50, 5)), ("s", (), ()), ("b", (0,), (9,))]
        plans.append(plan_shared(world, rank, boxes, limit))
    assert len({p.groups for p in plans}) == 1
    for number, group in enumerate(plans[0].groups):
        rows = {r: plans[r].take(plans[r].group == number).pack() for r in range(4)}
        assert len({rows[r] for r in group}) == 1
        assert all(not rows[r] for r in range(4) if r not in group)
    for rank, own in enumerate(plans):
        assert own.nbytes().sum() == (350 + 750 + 1 + 9) * 4
        alone = own.take(own.group < 0)
        assert set(alone.rank.tolist()) == {rank}
        shared = own.take(own.group >= 0)
        # A unit can be larger than the limit, but nothing else.
        assert shared.nbytes().max() <= max(limit, low_limit)


def test_a_world_that_called_with_other_options() -> None:
    from hyper_ckpt.agreement import Operation
    from hyper_ckpt.testing.world import run_world

    with pytest.raises(RanksDisagreeError, match=r"different planner: .* rank 2"):
        run_world(3, lambda p: Operation(p.ranks, 0, 9.0).meet({"planner": "b" if p.ranks.rank == 2 else "a"}))


def test_no_tensors_at_all() -> None:
    assert len(plan(world_of(3, lambda rank: {}))) == 0
    assert len(plan(world_of(3, lambda rank: {"w": f32((0, 3))} if rank else {}))) == 0
