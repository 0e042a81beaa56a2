"""torch's old ShardedTensor: FSDP1 without a mesh, and boxes by hand as torchrec cuts tables."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor

import hyper_ckpt
from hyper_ckpt.errors import UnsupportedLayoutError, UnsupportedStateError
from hyper_ckpt.layout import Boxes
from hyper_ckpt_torch.platform import TorchPlatform

TABLE = torch.arange(60.0).reshape(10, 6)


def trained(seed):
    """A small network, wrapped by FSDP1, after a step; and what one process would have."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    def network():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    model = Fsdp(network(), device_id=torch.device("cpu"), use_orig_params=True)
    config = (ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    Fsdp.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *config)
    optimizer, alone = torch.optim.AdamW(model.parameters()), network()
    single = torch.optim.AdamW(alone.parameters())
    for net, steps in ((model, optimizer), (alone, single)):
        net(torch.ones(2, 5)).sum().backward()
        steps.step()
    return Fsdp, model, optimizer, alone, single


def fsdp1(rank, world_size, where, saves):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 and its ShardedTensor are deprecated
        fsdp, model, optimizer, alone, single = trained(3 if saves else 4)
        state = {"model": model.state_dict(), "optimizer": fsdp.optim_state_dict(model, optimizer)}
        assert "ShardedTensor" in {type(value).__name__ for value in state["model"].values()}
    if saves:
        hyper_ckpt.save(state, where)
        if rank == 0:
            check_read(where, alone, single)
    for share_reads in (True, False):
        memory = [shard.tensor for value in state["model"].values() for shard in value.local_shards()]
        if saves:
            for tensor in memory:
                tensor.zero_()
        pointers = [tensor.data_ptr() for tensor in memory]
        hyper_ckpt.load(state, where, share_reads=share_reads)
        assert [tensor.data_ptr() for tensor in memory] == pointers, "filled in place"
    if not saves:  # another world, another seed: what was saved is there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(fsdp.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
            again = {"model": model.state_dict(), "optimizer": fsdp.optim_state_dict(model, optimizer)}
        hyper_ckpt.save(again, f"{where}-again")
        if rank == 0:
            first, second = hyper_ckpt.read(where), hyper_ckpt.read(f"{where}-again")
            assert {name: value.tobytes() for name, value in first["model"].items()} == {
                name: value.tobytes() for name, value in second["model"].items()
            }
            moments = first["optimizer"]["state"]
            for name, state in second["optimizer"]["state"].items():
                assert all(np.array_equal(value, moments[name][key]) for key, value in state.items())


def check_read(where, alone, single):
    found = hyper_ckpt.read(where)
    for name, parameter in alone.named_parameters():
        assert np.allclose(found["model"][name], parameter.detach().numpy(), atol=1e-6)
        moments = found["optimizer"]["state"][name]
        assert np.allclose(moments["exp_avg"], single.state[parameter]["exp_avg"].numpy(), atol=1e-6)


def test_fsdp1_without_a_mesh(gloo, tmp_path):
    where = str(tmp_path / "checkpoint")
    gloo(fsdp1, where, True, world_size=2)
    gloo(fsdp1, where, False, world_size=3)


def table(rank, boxes, fill):
    """A ShardedTensor of some boxes of TABLE: (rank, offsets, sizes) each."""
    from torch.distributed._shard import sharded_tensor as old

    shards = [
        old.Shard.from_tensor_and_offsets(
            (TABLE if fill else TABLE * 0)[o[0] : o[0] + n[0], o[1] : o[1] + n[1]].clone(), list(o), rank
        )
        for owner, o, n in boxes
        if owner == rank
    ]
    return old.init_from_local_shards(shards, *TABLE.shape)


QUARTERS = [(0, (0, 0), (3, 6)), (0, (7, 0), (3, 2)), (1, (3, 0), (4, 6)), (1, (7, 2), (3, 4))]  # rank 2 has none
COLUMNS = [(0, (0, 4), (10, 2)), (1, (0, 0), (10, 1)), (2, (0, 1), (10, 3))]


def boxes_by_hand(rank, world_size, where):
    platform = TorchPlatform()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value, target = table(rank, QUARTERS, True), table(rank, COLUMNS, False)
    description = platform.tensors.describe(value)
    assert description.layout == Boxes(tuple((o, n) for owner, o, n in QUARTERS if owner == rank))
    assert platform.tensors.signature(value) == platform.tensors.signature(value)
    hyper_ckpt.save({"table": value}, where, platform=platform)
    hyper_ckpt.load({"table": target}, where, platform=platform)
    for shard in target.local_shards():
        (o, n) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        assert torch.equal(shard.tensor, TABLE[o[0] : o[0] + n[0], o[1] : o[1] + n[1]])
    dtensor = distribute_tensor(TABLE * 0, init_device_mesh("cpu", (3,)), [TorchShard(0)])
    hyper_ckpt.load({"table": dtensor}, where, platform=platform)
    assert torch.equal(dtensor.full_tensor(), TABLE)
    refused(platform, value)


def refused(platform, value):
    with pytest.raises(UnsupportedStateError, match="without memory"):
        platform.tensors.empty(platform.tensors.describe(value), value)
    if value.local_shards():
        value.local_shards()[0].metadata.shard_sizes[0] += 1
        with pytest.raises(UnsupportedLayoutError, match="metadata says"):
            platform.tensors.local_shards(value)


def test_boxes_by_hand(gloo, tmp_path):
    gloo(boxes_by_hand, str(tmp_path / "checkpoint"), world_size=3)
