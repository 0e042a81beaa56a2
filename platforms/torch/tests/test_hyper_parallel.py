"""hyper-parallel's own DTensor on torch: a look-alike, and the real one where it is installed."""

import importlib.util
import math
import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor

import hyper_ckpt
from hyper_ckpt import layout as layouts
from hyper_ckpt.errors import UnsupportedLayoutError, UnsupportedStateError
from hyper_ckpt.layout import Mesh, MeshLayout
from hyper_ckpt.tensor_map import read_layout
from hyper_ckpt_torch.platform import TorchPlatform, all_tensors


class Placement:
    def __eq__(self, other):
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self):
        return hash((type(self), *vars(self).items()))


class Shard(Placement):
    def __init__(self, dim):
        self.dim = dim


class Replicate(Placement):
    pass


class Layout:
    """As theirs: called with the names of mesh dimensions, one or several for each dimension of the tensor."""

    def __init__(self, mesh_shape, alias_name, rank_list=None):
        self.mesh_shape, self.alias_name = mesh_shape, alias_name
        self.rank_list = tuple(range(math.prod(mesh_shape))) if rank_list is None else rank_list
        self.tensor_map, self.partial = None, [None] * len(mesh_shape)

    def __call__(self, *names):
        made = Layout(self.mesh_shape, self.alias_name, self.rank_list)
        made.tensor_map = tuple(tuple(map(self._number, n)) if isinstance(n, tuple) else self._number(n) for n in names)
        return made

    def _number(self, name):
        return -1 if name == "None" else len(self.alias_name) - 1 - self.alias_name.index(name)

    def to_dict(self):
        raise TypeError("argument of type 'NoneType' is not iterable")  # as theirs where the mesh has no names

    def get_global_shape(self, shape):
        cuts = [each if isinstance(each, tuple) else (each,) for each in self.tensor_map]
        pieces = [math.prod(self.mesh_shape[len(self.mesh_shape) - 1 - n] for n in each if n != -1) for each in cuts]
        return tuple(length * count for length, count in zip(shape, pieces, strict=True))


class LikeDTensor(torch.Tensor):
    """What the library sees of theirs, which refuses all of torch's own methods."""

    def __new__(cls, local, layout):
        made = torch.Tensor._make_subclass(cls, local, local.requires_grad)
        made._local, made._layout = local, layout
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"Operator {func} does not contain a parallel layout infer func.")

    @staticmethod
    def from_local(local, device_mesh, placements):
        layout = Layout(device_mesh.mesh_shape, device_mesh.mesh_dim_names, device_mesh.rank_list)
        by_dim = {placement.dim: axis for axis, placement in enumerate(placements) if isinstance(placement, Shard)}
        return LikeDTensor(
            local, layout(*(layout.alias_name[by_dim[d]] if d in by_dim else "None" for d in range(local.ndim)))
        )

    @property
    def layout(self):
        return self._layout

    @property
    def device_mesh(self):
        layout = self._layout
        return SimpleNamespace(mesh_shape=layout.mesh_shape, mesh_dim_names=layout.alias_name,
                               rank_list=layout.rank_list, device_type="cpu")  # fmt: skip

    @property
    def placements(self):
        found = [Replicate() for _ in self._layout.mesh_shape]
        for dim, each in enumerate(self._layout.tensor_map):
            for number in each if isinstance(each, tuple) else (each,):
                if number != -1:
                    found[len(found) - 1 - number] = Shard(dim)
        return tuple(found)

    @property
    def shape(self):
        return self._layout.get_global_shape(self._local.shape)

    def to_local(self):
        return self._local


MESH = Layout((2, 2), ("dp", "tp"))
LAYOUTS = {
    "rows": MESH("dp", "None"),
    "columns": MESH("None", "tp"),
    "both": MESH("tp", "dp"),
    "one dimension twice": MESH(("tp", "dp"), "None"),
    "in order": MESH(("dp", "tp"), "None"),
    "whole": MESH("None", "None"),
    "other ranks": Layout((4,), ("all",), (3, 1, 0, 2))("all", "None"),
    "some ranks": Layout((2,), ("some",), (2, 1))("None", "some"),
}
SHAPE = (8, 4)


def whole(name, dtype=torch.float32):
    number = sorted(LAYOUTS).index(name)
    return (torch.arange(32) + 100 * number).reshape(SHAPE).to(dtype)


def part(tensors, layout, full, fill):
    """This rank's DTensor of a whole tensor; nothing, on a rank outside the mesh."""
    found = tensors._parts[1]._shardings.of(read_layout(layout), tuple(full.shape))
    offsets, sizes = found.box or ((0,) * full.ndim, tuple(n // p for n, p in zip(full.shape, [1, 2], strict=True)))
    region = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    return LikeDTensor(full[region].clone() if fill else torch.zeros(sizes, dtype=full.dtype), layout)


def resharded(rank, world_size, where):
    platform = TorchPlatform()
    state = {name: part(platform.tensors, layout, whole(name), True) for name, layout in LAYOUTS.items()}
    hyper_ckpt.save({"m": state}, where, platform=platform)
    hyper_ckpt.save({"m": state}, where, platform=platform, overwrite=True)  # described from memory
    if rank == 0:
        found = hyper_ckpt.read(where)["m"]
        assert all(np.array_equal(found[name], whole(name).numpy()) for name in LAYOUTS)
    names = sorted(LAYOUTS)
    for share_reads in (True, False):
        for shift in (1, 3):  # each tensor into the layout of another
            others = {name: LAYOUTS[names[(n + shift) % len(names)]] for n, name in enumerate(names)}
            target = {name: part(platform.tensors, layout, whole(name), False) for name, layout in others.items()}
            memory = {name: value.to_local().data_ptr() for name, value in target.items()}
            hyper_ckpt.load({"m": target}, where, platform=platform, share_reads=share_reads)
            for name, layout in others.items():
                if rank in layout.rank_list:
                    expected = part(platform.tensors, layout, whole(name), True).to_local()
                    assert torch.equal(target[name].to_local(), expected), (name, share_reads, shift)
                    assert target[name].to_local().data_ptr() == memory[name]
    mesh = init_device_mesh("cpu", (4,))
    of_torch = {name: distribute_tensor(torch.zeros(SHAPE), mesh, [TorchShard(0)]) for name in LAYOUTS}
    hyper_ckpt.load({"m": of_torch}, where, platform=platform)
    assert all(torch.equal(value.full_tensor(), whole(name)) for name, value in of_torch.items())


def test_every_layout_into_every_other(gloo, tmp_path):
    gloo(resharded, str(tmp_path / "checkpoint"))


def test_what_is_said_of_one():
    tensors = all_tensors(range(4), 2)
    value = LikeDTensor(torch.ones(4, 2, requires_grad=True), MESH("dp", "tp"))
    description = tensors.describe(value)
    assert (description.dtype, description.shape) == ("float32", (8, 4))
    assert description.layout == MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), (layouts.Shard(0), layouts.Shard(1)))
    (shard,) = tensors.local_shards(value)
    assert (shard.offsets, shard.sizes) == ((4, 0), (4, 2))
    before = value.to_local()._version
    tensors.writable(shard)[...] = 7
    assert (value.to_local() == 7).all()
    with torch._C.DisableTorchFunctionSubclass():
        assert value._version > before, "autograd knows of it"
    assert tensors.plain(value) is None
    assert tensors.signature(value) == tensors.signature(LikeDTensor(value.to_local(), MESH("dp", "tp")))
    assert tensors.signature(value) != tensors.signature(LikeDTensor(value.to_local(), MESH("tp", "dp")))
    partial = tensors.describe(LikeDTensor(torch.ones(4, 4), MESH("dp", "None")))
    assert partial.layout == MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), (layouts.Shard(0), layouts.Replicate()))


def test_targets_without_memory_are_replaced():
    tensors = all_tensors(range(4), 2)
    value = LikeDTensor(torch.empty(4, 2, device="meta"), MESH("dp", "tp"))
    description = tensors.describe(value)
    assert not description.has_memory
    made = tensors.empty(description, value)
    assert type(made) is LikeDTensor
    assert made.to_local().shape == (4, 2)
    assert not made.to_local().is_meta
    assert tensors.describe(made).layout == description.layout
    twice = LikeDTensor(torch.empty(2, 4, device="meta"), MESH(("tp", "dp"), "None"))
    with pytest.raises(UnsupportedStateError, match="more than its placements"):
        tensors.empty(tensors.describe(twice), twice)


def test_what_cannot_be_stored_is_refused():
    tensors = all_tensors(range(4), 2)
    layout = MESH("dp", "None")
    layout.partial = ["sum", None]
    with pytest.raises(UnsupportedLayoutError, match="only the sum"):
        tensors.describe(LikeDTensor(torch.ones(4, 4), layout))
    with pytest.raises(UnsupportedLayoutError, match="not in the group"):
        all_tensors(range(2), 0).describe(LikeDTensor(torch.ones(4, 4), MESH("dp", "None")))
    uneven = LikeDTensor(torch.ones(4, 4), MESH("dp", "None"))
    uneven._layout.get_global_shape = lambda shape: (7, 4)
    with pytest.raises(UnsupportedLayoutError, match=r"\(7, 4\) is cut into 2 pieces.*Pad"):
        tensors.describe(uneven)


def the_real_one(rank, world_size, where):
    os.environ["HYPER_PARALLEL_PLATFORM"] = "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hyper_parallel.core import placement_types as theirs
        from hyper_parallel.core.device_mesh import init_device_mesh as their_mesh
        from hyper_parallel.core.dtensor import DTensor
        from hyper_parallel.core.dtensor import distribute_tensor as their_distribute

        mesh = their_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        unnamed = their_mesh("cpu", (4,))
    full = torch.arange(32.0).reshape(8, 4)
    shard, replicate = theirs.Shard, theirs.Replicate()
    cuts = [
        (mesh, (shard(0), shard(1))),
        (mesh, (replicate, shard(0))),
        (mesh, (shard(1), replicate)),
        (unnamed, (shard(0),)),
    ]
    values = {str(n): torch.nn.Parameter(their_distribute(full + n, *cut)) for n, cut in enumerate(cuts)}
    assert all(type(value) is DTensor for value in values.values())
    hyper_ckpt.save({"model": values}, where)
    target = {str(n): their_distribute(torch.zeros(8, 4), *cuts[(n + 1) % 4]) for n in range(4)}
    hyper_ckpt.load({"model": target}, where)
    for n in range(4):
        expected = their_distribute(full + n, *cuts[(n + 1) % 4]).to_local()
        assert torch.equal(target[str(n)].to_local(), expected)
    if rank == 0:
        found = hyper_ckpt.read(where)["model"]
        assert all(np.array_equal(found[str(n)], (full + n).numpy()) for n in range(4))


@pytest.mark.skipif(importlib.util.find_spec("hyper_parallel") is None, reason="hyper-parallel is not installed")
def test_the_real_one(gloo, tmp_path):
    gloo(the_real_one, str(tmp_path / "checkpoint"))
