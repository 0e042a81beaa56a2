"""Layouts: the boxes of MindSpore's and hyper-parallel's shardings, against what MindSpore itself cuts."""

import math
import random
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore.parallel import Layout
from mindspore.parallel._tensor import (
    _apply_tensor_transform_operators,
    _construct_from_to_tensor_layout,
    _expand_layout,
    _generate_transform_operator_stack,
    _get_needed_rank_transform_operator_map_by_layouts,
    _load_tensor,
)
from mindspore.parallel.strategy import _NetStrategyInfo
from mindspore.train._utils import _get_parameter_redundancy_without_opt_shard

from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import Mesh, MeshLayout, Replicate, Shard
from hyper_ckpt.tensor_map import read_dtensor
from hyper_ckpt_mindspore.devices import Device
from hyper_ckpt_mindspore.layouts import Layouts, read_entry
from hyper_ckpt_mindspore.tensors import MindSporeTensors


def parameter(shape: tuple[int, ...], name: str = "w") -> ms.Parameter:
    return ms.Parameter(ms.Tensor(np.zeros(shape, np.float32)), name=name)


class FakeDTensor(ms.Tensor):
    """As hyper-parallel's: a tensor whose shape is the global one, and whose local part is another tensor."""

    def __init__(self, shape, layout=None, placements=(), device_mesh=None, local=None):
        super().__init__(np.zeros(shape, np.float32))
        self._local = local
        self.layout, self.placements, self.device_mesh = layout, placements, device_mesh

    def to_local(self):
        return self._local


def hyper_parallel_layout(mesh, tensor_map, ranks, partial=(), interleaved=False):
    """As hyper-parallel's `Layout`."""
    fields = {
        "mesh_shape": mesh,
        "tensor_map": tensor_map,
        "interleaved_parallel": interleaved,
        "alias_name": tuple("abcdef"[: len(mesh)]),
        "rank_list": tuple(ranks),
    }
    return SimpleNamespace(**fields, partial=list(partial), to_dict=lambda: fields)


def box(spec_or_entry, shape, rank, world=None):
    """The box of a rank by our own code, of a parameter of the whole shape's part."""
    layouts = Layouts(range(world or 64), rank, {"w": [*(spec_or_entry,), "Float32", shape]})
    return layouts.of(parameter((1,) * len(shape))).box


def random_case(rng: random.Random, *, several: bool):
    """A device matrix, a tensor map, and a global shape that it cuts evenly."""
    mesh = tuple(rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.randint(1, 4)))
    numbers = list(range(len(mesh)))
    rng.shuffle(numbers)
    tensor_map = []
    for _ in range(rng.randint(1, 3)):
        taken = [numbers.pop() for _ in range(min(rng.choice([0, 1, 2] if several else [0, 1]), len(numbers)))]
        tensor_map.append(-1 if not taken else taken[0] if len(taken) == 1 else tuple(taken))
    shape = []
    for each in tensor_map:
        cuts = [n for n in (each if isinstance(each, tuple) else (each,)) if n != -1]
        shape.append(math.prod(mesh[len(mesh) - 1 - n] for n in cuts) * rng.choice([1, 2, 3]))
    return mesh, tuple(tensor_map), tuple(shape)


def cut_out(whole, found):
    return whole[tuple(slice(o, o + n) for o, n in zip(*found, strict=True))]


def test_agrees_with_what_mindspore_loads():
    """`_load_tensor` cuts a rank's part out of a whole tensor, with one mesh dimension per tensor dimension."""
    rng, compared = random.Random(0), 0
    while compared < 2500:
        mesh, tensor_map, shape = random_case(rng, several=False)
        whole = np.arange(math.prod(shape)).reshape(shape)
        fields = {"device_matrix": mesh, "tensor_map": tensor_map}
        for rank in range(math.prod(mesh)):
            expected = _load_tensor(ms.Tensor(whole), list(mesh), list(tensor_map), rank_id=rank)
            found = cut_out(whole, box(fields, shape, rank, math.prod(mesh)))
            assert np.array_equal(expected, found), (mesh, tensor_map, shape, rank)
            compared += 1


def test_agrees_with_mindspores_transformations():
    """Where several mesh dimensions cut one tensor dimension: what MindSpore's engine gives each rank."""
    rng, compared = random.Random(1), 0
    while compared < 150:
        mesh, tensor_map, shape = random_case(rng, several=True)
        world = math.prod(mesh)
        if world == 1 or not any(isinstance(each, tuple) for each in tensor_map):
            continue
        whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        matrix, expanded, expanded_shape = _expand_layout(list(mesh), list(tensor_map), list(shape))
        for rank in range(world):
            start, end = _construct_from_to_tensor_layout(
                expanded_shape, matrix, [-1] * len(expanded_shape), expanded_shape, matrix, expanded, "w"
            )
            operators = _get_needed_rank_transform_operator_map_by_layouts(start, end, list(range(world)), rank)
            values = {other: whole.reshape(expanded_shape) for other in range(world)}
            _apply_tensor_transform_operators(_generate_transform_operator_stack(operators, rank), values, world)
            found = cut_out(whole, box({"device_matrix": mesh, "tensor_map": tensor_map}, shape, rank, world))
            assert np.array_equal(np.asarray(values[rank]).reshape(found.shape), found), (mesh, tensor_map, rank)
            compared += 1


OPTIMIZER_CASES = [
    ([2, 4], [[0], [-1]], 2), ([2, 4], [[1], [-1]], 4), ([2, 4], [[1], [-1]], 2), ([2, 4], [[-1], [0]], -1),
    ([8], [[-1], [-1]], 8), ([8], [[-1], [-1]], -1), ([8], [[-1], [-1]], 4), ([2, 2, 2], [[0], [-1]], 2),
    ([2, 2, 2], [[0], [-1]], -1), ([2, 2, 2], [[1], [0]], 2), ([4, 2], [[0], [-1]], 2), ([2, 2, 2], [[2], [-1]], 2),
]  # fmt: skip


@pytest.mark.parametrize(("matrix", "tensor_map", "pieces"), OPTIMIZER_CASES)
def test_sharding_by_the_optimizer(matrix, tensor_map, pieces):
    """The strategy metadata fold it into the layout; each holder of a slice gets one of equal runs of its rows."""
    shape, world = (32, 8), math.prod(matrix)
    info = SimpleNamespace(
        opt_weight_shard_size=pieces, dev_matrix=list(matrix), tensor_map=[list(each) for each in tensor_map],
        rank_list=list(range(world)), tensor_type="Float32", tensor_shape=shape,
    )  # fmt: skip
    entry = object.__new__(_NetStrategyInfo)._layout_process(info)
    flat = [each[0] for each in tensor_map]
    holders: dict[str, list[list[int]]] = {}
    _get_parameter_redundancy_without_opt_shard({"w": (list(matrix), flat)}, holders, 0)
    for rank in range(world):
        (group,) = (group for group in holders["w"] if rank in group)
        offsets, sizes = box({"device_matrix": matrix, "tensor_map": flat}, shape, rank, world)
        count = len(group) if pieces == -1 else pieces
        rows = sizes[0] // count
        expected = (offsets[0] + group.index(rank) % count * rows, *offsets[1:]), (rows, *sizes[1:])
        assert Layouts(range(world), rank, {"w": entry}).of(parameter((rows, sizes[1]))).box == expected


def test_mindspores_layout_objects():
    layout = Layout((2, 3, 2), ("dp", "sp", "mp"), rank_list=list(range(8, 20)))(("mp", "dp"), "None")
    spec = read_entry(layout)
    assert (spec.mesh, spec.tensor_map, spec.ranks) == ((2, 3, 2), ((0, 2), ()), tuple(range(8, 20)))
    layouts = Layouts(range(24), 15, {"w": layout})
    found = layouts.of(parameter((2, 5)))
    mesh = Mesh((2, 3, 2), tuple(range(8, 20)))
    assert found.shape == (8, 5)
    assert found.layout == MeshLayout(mesh, (Shard(0), Replicate(), Shard(0)), (2, 0, 1))
    assert found.box == ((6, 0), (2, 5)), "rank 15 is at (1, 0, 1): mp is major, so piece 1 * 2 + 1"


def test_the_first_of_several_cuts_first():
    layout = Layout((2, 2), ("a", "b"))
    for names, expected in [(("a", "b"), [0, 1, 2, 3]), (("b", "a"), [0, 2, 1, 3])]:
        entry = [layout(names), "Float32", (4,)]
        assert [Layouts(range(4), r, {"w": entry}).of(parameter((1,))).box[0][0] for r in range(4)] == expected


def test_ranks_outside_the_mesh_own_nothing():
    entry = {"device_matrix": (2,), "tensor_map": (0, -1), "rank_list": [2, 3]}
    tensors = MindSporeTensors(Layouts(range(4), 0, {"w": entry}), Device())
    assert tensors.local_shards(parameter((2, 3))) == []
    assert tensors.describe(parameter((2, 3))).shape == (4, 3)
    mine = MindSporeTensors(Layouts(range(4), 3, {"w": entry}), Device())
    (shard,) = mine.local_shards(parameter((2, 3)))
    assert (shard.offsets, shard.sizes) == ((2, 0), (2, 3))


def test_ranks_are_numbered_as_in_the_group():
    entry = {"device_matrix": (2,), "tensor_map": (0,), "rank_list": [4, 6]}
    found = Layouts((4, 5, 6), 6, {"w": entry}).of(parameter((3,)))
    assert found.layout.mesh == Mesh((2,), (0, 2))
    assert found.box == ((3,), (3,))
    with pytest.raises(UnsupportedLayoutError, match=r"on ranks \[6\].*group has all ranks"):
        Layouts((4, 5), 4, {"w": entry}).of(parameter((3,)))


STRATEGY = {"w": [Layout((2,), ("a",))("a", "None"), "Float32", (4, 3)]}


@pytest.mark.parametrize("layouts", [STRATEGY, {0: STRATEGY}, {0: {}, 1: STRATEGY}])
def test_strategy_metadata_in_all_their_forms(layouts):
    """By name, of the current rank (under 0), and of all ranks."""
    assert Layouts(range(2), 1, layouts).of(parameter((2, 3))).box == ((2, 0), (2, 3))
    assert Layouts(range(2), 1, layouts).of(parameter((2, 3), "other")) is None
    assert Layouts(range(2), 1, layouts).of(ms.Tensor(np.zeros((2, 3)))) is None


def test_strategy_metadata_of_other_ranks_are_refused():
    with pytest.raises(ValueError, match=r"ranks \[0, 2\], but none for this one, 1"):
        Layouts(range(2), 1, {0: STRATEGY, 2: STRATEGY})


def test_entries_of_compiled_networks():
    entry = ([2, 2], [1, -1], [2, 3], 0, True, "", [4, 3])
    assert Layouts(range(4), 3, {"w": entry}).of(parameter((2, 3))).box == ((2, 0), (2, 3))
    with pytest.raises(UnsupportedLayoutError, match=r"layouts\['w'\].*get_current_strategy_metadata"):
        Layouts(range(4), 3, {"w": ([2, 2], [1, -1], [1, 3], 0, True, "group", [4, 3])})


REFUSED = [
    (Layout((2, 2), ("dp", "interleaved_parallel"))(("dp", "interleaved_parallel"), "None"), (8, 3), "interleaved"),
    ({"device_matrix": (3,), "tensor_map": (0,)}, (8,), "does not go evenly"),
    ({"device_matrix": (2,), "tensor_map": (0,)}, (4, 4), "layout for 1 dimensions was given for a tensor of 2"),
    ({"device_matrix": (2,), "tensor_map": (1,)}, (4,), "does not fit a device matrix"),
    ({"device_matrix": (2, 2), "tensor_map": (0, 0)}, (4, 4), "does not fit a device matrix"),
    (hyper_parallel_layout((2,), (0,), [0, 1], partial=["sum"]), (4,), "only the sum over ranks"),
]


@pytest.mark.parametrize(("entry", "shape", "reason"), REFUSED)
def test_what_cannot_be_stored_is_refused_with_the_reason(entry, shape, reason):
    with pytest.raises(UnsupportedLayoutError, match=reason):
        box(entry, shape, 0)


@pytest.mark.parametrize("entry", [3, "x", {}, {"device_matrix": (2,)}, (1, 2)])
def test_other_things_are_no_layouts(entry):
    with pytest.raises(TypeError, match=r"layouts\['w'\]: a layout"):
        Layouts(range(2), 0, {"w": entry})


def test_a_layout_that_was_not_called_is_named():
    with pytest.raises(ValueError, match=r"layouts\['w'\].*tensor_map"):
        Layouts(range(2), 0, {"w": Layout((2,), ("a",))})


def test_a_parameter_of_another_shape_is_refused():
    tensors = MindSporeTensors(Layouts(range(2), 1, STRATEGY), Device())
    with pytest.raises(UnsupportedLayoutError, match=r"part of shape \(4, 3\) on rank 1.*means \(2, 3\).*compile"):
        tensors.local_shards(parameter((4, 3)))


def test_a_parameter_that_mindspore_has_cut_does_not_pass_for_a_whole_one():
    value = parameter((2, 3))
    value.sliced = True
    assert Layouts(range(2), 0).of(value) is None, "cut by a layout that cuts nothing"
    value.param_info.tensor_map = [0, -1]
    with pytest.raises(
        UnsupportedLayoutError, match=r"'w' was cut by MindSpore.*layouts=get_current_strategy_metadata"
    ):
        Layouts(range(2), 0).of(value)
    assert Layouts(range(2), 0, STRATEGY).of(value).shape == (4, 3)


def test_dtensors():
    local = ms.Tensor(np.ones((2, 6), np.float32))
    value = FakeDTensor((4, 6), hyper_parallel_layout((2, 3), (1, -1), range(6)), local=local)
    tensors = MindSporeTensors(Layouts(range(6), 4), Device())
    description = tensors.describe(value)
    assert description.shape == (4, 6)
    assert description.layout == MeshLayout(Mesh((2, 3), tuple(range(6))), (Shard(0), Replicate()))
    (shard,) = tensors.local_shards(value)
    assert (shard.offsets, shard.sizes) == ((2, 0), (2, 6))
    tensors.writable(shard)[...] = 7.0
    assert (local.asnumpy() == 7.0).all()
    with pytest.raises(UnsupportedLayoutError, match="part of shape"):
        tensors.local_shards(FakeDTensor((8, 6), value.layout, local=local))
    with pytest.raises(Exception, match="without memory"):
        tensors.empty(description, value)


@pytest.mark.parametrize("part", [(0, 6), (0, 0), (0,)])
def test_the_shape_of_an_empty_part_does_not_matter(part):
    local = ms.Tensor(np.ones(part, np.float32))
    value = FakeDTensor((0, 6), hyper_parallel_layout((2,), (0, -1), range(2)), local=local)
    tensors = MindSporeTensors(Layouts(range(2), 1), Device())
    assert tensors.describe(value).shape == (0, 6)
    (shard,) = tensors.local_shards(value)
    assert shard.sizes == tensors.host_view(shard).shape == tensors.writable(shard).shape == (0, 6)
    assert tensors.storage_key(shard) is None


class Partial:
    """Of hyper-parallel: placements are known by the names of their classes."""


class StridedShard:
    dim = 0


def test_placements_of_dtensors():
    """Where a layout has no tensor map: mesh dimensions cut from left to right."""
    shard, replicate = type("Shard", (), {"dim": 1})(), type("Replicate", (), {})()
    mesh = SimpleNamespace(mesh_shape=(2, 3, 2), rank_list=tuple(range(12)))
    spec = read_dtensor(FakeDTensor((2, 12), placements=(shard, replicate, shard), device_mesh=mesh))
    assert (spec.mesh, spec.tensor_map) == ((2, 3, 2), ((), (2, 0)))
    for placement, reason in [(Partial(), "only the sum"), (StridedShard(), "cannot be stored")]:
        with pytest.raises(UnsupportedLayoutError, match=reason):
            read_dtensor(FakeDTensor((2, 12), placements=(placement,), device_mesh=mesh))
