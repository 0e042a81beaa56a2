"""DTensors as they are made by torch's own parallelisms: the boxes of all ranks put together are the tensor."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import hyper_ckpt
from hyper_ckpt import layout as layouts
from hyper_ckpt.contracts.platform import TensorDescription
from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt_torch.platform import TorchPlatform

Gathered = tuple[TensorDescription, list[list[tuple[tuple[int, ...], tuple[int, ...], bytes]]]]


def described(platform: TorchPlatform, value: torch.Tensor) -> Gathered:
    """The description, equal on all ranks that hold the tensor, and every rank's shards."""
    tensors = platform.tensors
    description = tensors.describe(value)
    shards = [(s.offsets, s.sizes, tensors.host_view(s).tobytes()) for s in tensors.local_shards(value)]
    # Also what any other rank would work out for this one.
    mesh = description.layout.mesh
    if platform.ranks.rank in mesh.ranks:
        at = np.array(np.unravel_index([mesh.ranks.index(platform.ranks.rank)], mesh.shape))
        box = layouts.expand(description.shape, mesh.shape, description.layout.placements, description.layout.order, at)
        assert [(tuple(box[0][0]), tuple(box[1][0]))] == [s[:2] for s in shards]
    return description, platform.ranks.all_gather_object(shards)


def put_together(shape: tuple[int, ...], dtype: torch.dtype, everybody: Gathered) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor that the boxes make, and how many ranks hold each element."""
    whole, holders = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.int64)
    for shards in everybody:
        for offsets, sizes, data in shards:
            region = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            if data:
                whole[region] = torch.frombuffer(bytearray(data), dtype=dtype).view(sizes)
            holders[region] += 1
    return whole, holders


def check_whole(platform: TorchPlatform, value: torch.Tensor, expected: torch.Tensor) -> TensorDescription:
    description, everybody = described(platform, value)
    assert description.shape == tuple(expected.shape)
    whole, holders = put_together(tuple(expected.shape), expected.dtype, everybody)
    assert torch.equal(whole, expected)
    assert holders.numel() == 0 or holders.min() == holders.max() >= 1
    return description


PLACEMENTS = [
    ((4,), (6, 5), (Shard(0),)),  # uneven
    ((4,), (6, 5), (Shard(1),)),
    ((4,), (2, 3), (Shard(0),)),  # empty on two ranks
    ((4,), (0, 3), (Shard(0),)),
    ((4,), (8, 3), (Replicate(),)),
    ((2, 2), (5, 7), (Shard(0), Shard(1))),
    ((2, 2), (5, 7), (Shard(1), Shard(0))),
    ((2, 2), (5, 7), (Shard(0), Shard(0))),  # nested, uneven
    ((2, 2), (3, 2), (Shard(0), Shard(0))),
    ((2, 2), (5, 7), (Replicate(), Shard(1))),
    ((2, 2), (5, 7), (Shard(1), Replicate())),
    ((2, 2), (), (Replicate(), Replicate())),
    ((1, 4), (6, 5), (Shard(0), Shard(1))),  # a mesh dimension of one
    ((4, 1), (6, 5), (Shard(0), Shard(0))),
    ((2, 1, 2), (8, 3), (_StridedShard(0, split_factor=2), Replicate(), Shard(0))),
]


def distribute(rank: int, world_size: int) -> None:
    platform = TorchPlatform()
    for mesh_shape, shape, placements in PLACEMENTS:
        mesh = init_device_mesh("cpu", mesh_shape)
        full = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        value = distribute_tensor(full.clone(), mesh, list(placements))
        description = check_whole(platform, value, full)
        assert description.layout.mesh.shape == mesh_shape
        assert torch.equal(full, value.full_tensor())
        # Parameters, and other dtypes, are no different.
        check_whole(platform, nn.Parameter(value.to(torch.bfloat16)), full.to(torch.bfloat16))


def test_distributed_tensors(gloo):
    gloo(distribute)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def block(width: int) -> Block:
    torch.manual_seed(3)
    return Block(width)


TP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def fsdp_and_tp(rank: int, world_size: int, dp: int, tp: int, width: int) -> dict[str, object]:
    """FSDP2 over tensor parallelism. With width 3, `up` has 7 rows: on 3 x 2, rank (2, 0) holds none of them."""
    platform = TorchPlatform()
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    expected = {name: p.detach().clone() for name, p in block(width).named_parameters()}
    model = parallelize_module(block(width), mesh["tp"], TP_PLAN)
    fully_shard(model, mesh=mesh["dp"])
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        description = check_whole(platform, parameter, expected[name])
        found[name] = (description.layout.placements, description.layout.order, parameter.to_local().shape[0])
    return found


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("width", [3, 4])
def test_fsdp_over_tensor_parallelism(gloo, dp, tp, width):
    found = gloo(fsdp_and_tp, dp, tp, width, world_size=dp * tp)
    both = (layouts.Shard(0), layouts.Shard(0))
    assert {each["up.weight"][:2] for each in found} == {(both, (1, 0))}, "tensor parallelism has cut first"
    assert {each["down.weight"][:2] for each in found} == {((layouts.Shard(0), layouts.Shard(1)), ())}
    if (dp, tp, width) == (3, 2, 3):
        assert [each["up.weight"][2] for each in found] == [2, 1, 2, 1, 0, 1]


def empty_parts(rank: int, world_size: int, where: str) -> None:
    """The columns of a row-wise layer over more ranks than there are pairs of them: FSDP leaves the last one (0, 0)."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize_module(nn.Linear(6, 5), mesh["tp"], RowwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    expected = torch.randn(6, generator=torch.Generator().manual_seed(5))
    one_dimensional = torch.empty(0) if rank == 3 else expected.view(6, 1)[2 * rank : 2 * rank + 2]
    by_hand = DTensor.from_local(one_dimensional, mesh["tp"], [Shard(0)], run_check=False,
                                 shape=torch.Size((6, 1)), stride=(1, 1))  # fmt: skip
    state = {**model.state_dict(), "by hand": by_hand}
    local = [value.to_local().detach() for value in state.values()]
    wanted = [part.clone() for part in local]
    assert local[0].numel() == (0 if rank == 3 else 10)
    hyper_ckpt.save({"m": state}, where)
    for share_reads in (True, False):
        for part in local:
            part.zero_()
        hyper_ckpt.load({"m": state}, where, share_reads=share_reads)
        assert all(torch.equal(a, b) for a, b in zip(local, wanted, strict=True))
    if rank == 0:
        torch.manual_seed(0)
        whole = nn.Linear(6, 5)
        found = hyper_ckpt.read(where)["m"]
        assert np.array_equal(found["weight"], whole.weight.detach().numpy())
        assert np.array_equal(found["by hand"][:, 0], expected.numpy())


def test_the_shape_of_an_empty_part_does_not_matter(gloo, tmp_path):
    gloo(empty_parts, str(tmp_path / "checkpoint"))


def hybrid_sharding(rank: int, world_size: int) -> None:
    platform = TorchPlatform()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(block(3), mesh=mesh)
    for name, parameter in model.named_parameters():
        description = check_whole(platform, parameter, dict(block(3).named_parameters())[name].detach())
        assert description.layout.placements == (layouts.Replicate(), layouts.Shard(0))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for parameter, state in optimizer.state.items():
        moment = state["exp_avg"]
        assert check_whole(platform, moment, moment.full_tensor()).layout == platform.tensors.describe(parameter).layout
        assert platform.tensors.describe(state["step"]).layout == layouts.Replicated()


def test_hybrid_sharding_and_its_optimizer(gloo):
    gloo(hybrid_sharding)


def tensor_parallel_on_a_submesh(rank: int, world_size: int) -> tuple[int, ...]:
    platform = TorchPlatform()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(block(3), mesh["tp"], TP_PLAN)
    for name, parameter in model.named_parameters():
        check_whole(platform, parameter, dict(block(3).named_parameters())[name].detach())
    return platform.tensors.describe(model.up.weight).layout.mesh.ranks


def test_tensor_parallelism_on_a_submesh(gloo):
    assert gloo(tensor_parallel_on_a_submesh) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def outside_the_mesh(rank: int, world_size: int) -> int:
    platform = TorchPlatform()
    mesh = dist.device_mesh.DeviceMesh("cpu", [1, 2])
    value = DTensor.from_local(torch.full((2, 3), float(rank)) if rank in (1, 2) else torch.empty(0), mesh, [Shard(0)],
                               run_check=False, shape=torch.Size((4, 3)), stride=(3, 1))  # fmt: skip
    description, everybody = described(platform, value)
    assert description.layout.mesh.ranks == (1, 2)
    assert [len(shards) for shards in everybody] == [0, 1, 1, 0]
    return len(everybody[rank])


def test_ranks_outside_the_mesh_hold_nothing(gloo):
    assert gloo(outside_the_mesh) == [0, 1, 1, 0]


def numbers_of_a_subset(rank: int, world_size: int) -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["dp"]
    platform = TorchPlatform(stage.get_group())
    value = distribute_tensor(torch.ones(4, 3), stage, [Shard(0)])
    world = DTensor.from_local(torch.ones(1, 3), init_device_mesh("cpu", (4,)), [Shard(0)], run_check=False)
    with pytest.raises(UnsupportedLayoutError, match="not in the process group"):
        platform.tensors.describe(world)
    return platform.tensors.describe(value).layout.mesh.ranks, platform.tensors.local_shards(value)[0].offsets


def test_layouts_count_in_the_platforms_own_ranks(gloo):
    assert gloo(numbers_of_a_subset) == [((0, 1), (0, 0)), ((0, 1), (2, 0))] * 2


class OtherShard(Shard):
    """A sharding that only its author knows."""


def refused(rank: int, world_size: int) -> None:
    tensors = TorchPlatform().tensors
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    local = torch.ones(2, 3)

    def made(mesh, placements, local=local, **shape):
        return DTensor.from_local(local, mesh, placements, run_check=False, **shape)

    with pytest.raises(UnsupportedLayoutError, match=r"Partial.*\n?.*[Rr]edistribute"):
        tensors.describe(made(line, [Partial()]))
    with pytest.raises(UnsupportedLayoutError, match="is not supported"):
        tensors.describe(made(line, [OtherShard(0)]))
    with pytest.raises(UnsupportedLayoutError, match="no order of cuts"):
        tensors.describe(made(square, [_StridedShard(0, split_factor=3), Shard(0)]))
    with pytest.raises(UnsupportedLayoutError, match="local tensor of shape"):
        tensors.local_shards(made(line, [Shard(0)], shape=torch.Size((9, 3)), stride=(3, 1)))


def test_what_does_not_fit_is_refused(gloo):
    gloo(refused)


def strided_left_to_right(rank: int, world_size: int) -> str:
    """Strided placements read from left to right differ from FSDP2's nested cuts where lengths are uneven."""
    tensors = TorchPlatform().tensors
    rows = [[0, 1], [4], [2, 3], [5], [6], []][rank]
    value = DTensor.from_local(
        torch.tensor(rows, dtype=torch.float32), init_device_mesh("cpu", (3, 2)),
        [_StridedShard(0, split_factor=2), Shard(0)], run_check=False, shape=torch.Size((7,)), stride=(1,),
    )  # fmt: skip
    try:
        tensors.local_shards(value)
    except UnsupportedLayoutError as error:
        return str(error)
    return ""


def test_another_reading_of_strided_placements_is_refused(gloo):
    messages = gloo(strided_left_to_right, world_size=6)
    assert [bool(message) for message in messages] == [False] * 4 + [True] * 2
    assert "local tensor of shape (1,) at coordinate (2, 0)" in messages[4]


def explicit_order(rank: int, world_size: int) -> tuple[int, ...]:
    platform = TorchPlatform()
    mesh = init_device_mesh("cpu", (3, 2))
    full = torch.arange(7.0)
    order = (1, 0)
    placements = (layouts.Shard(0), layouts.Shard(0))
    at = np.array(mesh.get_coordinate()).reshape(-1, 1)
    offsets, sizes = layouts.expand((7,), (3, 2), placements, order, at)
    local = full[int(offsets[0, 0]) :][: int(sizes[0, 0])].clone()
    value = DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False, shape=full.shape, stride=(1,))
    if not hasattr(value._spec, "shard_order"):
        return order  # this torch has no such thing
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    value._spec.shard_order = (ShardOrderEntry(0, order),)
    return check_whole(platform, value, full).layout.order


def test_an_order_that_the_spec_gives(gloo):
    assert gloo(explicit_order, world_size=6) == [(1, 0)] * 6


def meta_target(rank: int, world_size: int) -> None:
    platform = TorchPlatform()
    tensors = platform.tensors
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = block(3)
    parallelize_module(model, mesh["tp"], TP_PLAN)
    fully_shard(model, mesh=mesh["dp"])
    for target in model.parameters():
        description = tensors.describe(target)
        assert not description.has_memory
        made = tensors.empty(description, target)
        assert isinstance(made, DTensor)
        assert tensors.describe(made) == TensorDescription(description.dtype, description.shape, description.layout)
        for shard in tensors.local_shards(made):
            tensors.writable(shard)[...] = 0
        assert (made.full_tensor() == 0).all()


def test_a_meta_target_becomes_a_dtensor_of_the_same_layout(gloo):
    gloo(meta_target)


def writes_reach_the_model(rank: int, world_size: int) -> None:
    tensors = TorchPlatform().tensors
    model = fully_shard(block(3), mesh=init_device_mesh("cpu", (4,)))
    for parameter in model.parameters():
        for shard in tensors.local_shards(parameter):
            tensors.writable(shard)[...] = 0
            tensors.storage_key(shard)
        assert (parameter.full_tensor() == 0).all()
    assert (model(torch.ones(2, 3)) == 0).all()


def test_writes_reach_the_model(gloo):
    gloo(writes_reach_the_model)


def signatures(rank: int, world_size: int) -> None:
    """Equal for other objects over the same memory, different for any other layout of equal local tensors."""
    tensors, seen = TorchPlatform().tensors, []
    local = torch.ones(4, 4)
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    backwards = dist.device_mesh.DeviceMesh("cpu", [3, 2, 1, 0])
    for mesh, placements in [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (flat, [Replicate()]),
        (backwards, [Shard(0)]),
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(1), Shard(0)]),
        (square, [Shard(0), Shard(0)]),
        (square, [_StridedShard(0, split_factor=2), Shard(0)]),
        (square, [Replicate(), Shard(0)]),
    ]:
        value = DTensor.from_local(local, mesh, placements, run_check=False)
        again = DTensor.from_local(local, mesh, placements, run_check=False)
        assert tensors.describe(value) is not None
        assert tensors.signature(value) == tensors.signature(again) == tensors.signature(value.detach())
        assert tensors.signature(nn.Parameter(value)) == tensors.signature(nn.Parameter(again))
        seen.append(tensors.signature(value))
    assert None not in seen
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    other = DTensor.from_local(local.clone(), flat, [Shard(0)], run_check=False)
    assert tensors.signature(other) not in seen
    assert tensors.signature(local) not in seen


def test_signatures(gloo):
    gloo(signatures)


def autograd_notices(rank: int, world_size: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    hyper_ckpt.save({"w": torch.ones(8, 3)}, path, durable=False)
    weight = distribute_tensor(torch.full((8, 3), 2.0), mesh, [Shard(0)]).requires_grad_()
    loss = (weight * weight).sum()
    hyper_ckpt.load({"w": weight}, path)
    assert (weight.full_tensor() == 1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_a_load_into_a_dtensor(gloo, tmp_path):
    gloo(autograd_notices, str(tmp_path / "c"))
