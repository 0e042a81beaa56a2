"""Real gloo runs: saved in one distribution, loaded in another, every byte compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TReplicate
from torch.distributed.tensor import Shard as TShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hyper_ckpt
from hyper_ckpt.agreement import Operation
from hyper_ckpt.api.common import all_tensors
from hyper_ckpt.contracts.planner import PlanContext
from hyper_ckpt.state import flatten, skeleton
from hyper_ckpt_torch.platform import TorchPlatform

Gloo = Callable[..., list[Any]]
State = dict[str, Any]


class Net(nn.Module):
    """Lengths of 7 and 5 divide nothing: uneven and empty shards everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def plain() -> nn.Module:
    return Net()


def fsdp() -> nn.Module:
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def hsdp() -> nn.Module:
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "shard")))
    return net


def tp_fsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    net = Net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net


def ddp_tp() -> nn.Module:
    """Each pair of ranks has a mesh of its own: [0, 1], [2, 3], ..."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    net = Net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


BUILDERS = {f.__name__: f for f in (plain, fsdp, hsdp, tp_fsdp, ddp_tp)}


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def make(kind: str, *, zero: bool) -> State:
    """Model and two moments per parameter, as an optimizer would lay them out."""
    model = BUILDERS[kind]().state_dict()
    params = {n: v for n, v in model.items() if v.is_floating_point()}
    state = {
        "model": model,
        "optimizer": {
            "exp_avg": {n: torch.full_like(v, 0.5) + v for n, v in params.items()},
            "step": {n: torch.tensor(11.0) for n in params},
        },
    }
    if zero:
        for part in (state["model"], *state["optimizer"].values()):
            for value in part.values():
                (value.to_local() if isinstance(value, DTensor) else value).zero_()
    return state


def fulls(state: State) -> dict[str, bytes]:
    flat = {**state["model"], **{f"o.{k}.{n}": v for k, d in state["optimizer"].items() for n, v in d.items()}}
    return {name: full(value).numpy().tobytes() for name, value in flat.items()}


def save_kind(rank: int, world_size: int, kind: str, path: str) -> dict[str, bytes]:
    state = make(kind, zero=False)
    hyper_ckpt.save(state, path)
    return fulls(state)


def load_kind(rank: int, world_size: int, kind: str, path: str, share: bool) -> dict[str, bytes]:
    state = make(kind, zero=True)
    report = hyper_ckpt.load(state, path, share_reads=share)
    assert not (report.missing)
    assert not (report.unexpected)
    assert not (report.mismatched)
    return fulls(state)


CASES = [
    ("tp_fsdp", 6, "fsdp", 4),  # dimension 7 on dp 3 x tp 2
    ("tp_fsdp", 4, "plain", 1),
    ("fsdp", 4, "tp_fsdp", 6),
    ("fsdp", 3, "hsdp", 4),
    ("hsdp", 6, "ddp_tp", 4),
    ("ddp_tp", 4, "fsdp", 2),
    ("plain", 2, "tp_fsdp", 4),  # DDP: replicas on every rank
]


@pytest.mark.parametrize(("saved", "save_ranks", "loaded", "load_ranks"), CASES)
def test_any_distribution_to_any_other(
    gloo: Gloo, tmp_path: Path, saved: str, save_ranks: int, loaded: str, load_ranks: int
) -> None:
    path = str(tmp_path / "checkpoint")
    expected = gloo(save_kind, saved, path, world_size=save_ranks)[0]
    for share in (True, False):
        for got in gloo(load_kind, loaded, path, share, world_size=load_ranks):
            assert got == expected
    whole = hyper_ckpt.read(path)
    assert {n: v.tobytes() for n, v in whole["model"].items()} == {n: expected[n] for n in whole["model"]}
    assert hyper_ckpt.verify(path).ok


def count_structures(rank: int, world_size: int, kind: str) -> tuple[int, list[int]]:
    platform = TorchPlatform()
    context = PlanContext(all_tensors(platform), rank, world_size)
    flat = flatten(make(kind, zero=False), is_tensor=lambda v: isinstance(v, torch.Tensor))
    description = hyper_ckpt.StandardSavePlanner().build_local_plan(flat.tensors, skeleton(flat.tree), context)
    operation = Operation(platform.ranks, 0, 30.0)
    operation.meet({})
    world = operation.exchange(description)
    return len(world.structures), [len(mesh) for mesh in world.meshes[0]]


@pytest.mark.parametrize(
    ("kind", "ranks", "meshes"),
    # TP + FSDP: what is not split by TP lies on the two dp columns of the mesh.
    [("ddp_tp", 6, [3]), ("fsdp", 4, [1]), ("hsdp", 4, [1]), ("tp_fsdp", 6, [1, 2])],
)
def test_replicas_and_shards_are_one_structure(gloo: Gloo, kind: str, ranks: int, meshes: list[int]) -> None:
    """Instances of each mesh: with DDP + TP, the three meshes of two ranks are one."""
    for structures, instances in gloo(count_structures, kind, world_size=ranks):
        assert structures == 1
        assert sorted(instances) == meshes


def save_pipeline(rank: int, world_size: int, path: str) -> None:
    """Two stages of two ranks each, sharded inside the stage; the embedding stands in both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    stage = rank // 2
    weight = torch.arange(15.0).reshape(5, 3) + 100 * stage
    state = {
        f"stage{stage}": {"w": distribute_tensor(weight, mesh, [TShard(0)])},
        "embedding": torch.arange(6.0),
        "pipeline": {"microbatches": 4},
    }
    hyper_ckpt.save(state, path)


def load_pipeline(rank: int, world_size: int, path: str) -> list[float]:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {f"stage{s}": {"w": distribute_tensor(torch.zeros(5, 3), mesh, [TShard(1)])} for s in range(2)}
    hyper_ckpt.load({**state, "embedding": (embedding := torch.zeros(6))}, path)
    assert embedding.tolist() == list(range(6))
    return [float(state[f"stage{s}"]["w"].full_tensor().sum()) for s in range(2)]


def test_pipeline_stages_make_one_checkpoint(gloo: Gloo, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    gloo(save_pipeline, path, world_size=4)
    assert set(hyper_ckpt.read_metadata(path).storage_data) == {"stage0/w", "stage1/w", "embedding"}
    for sums in gloo(load_pipeline, path, world_size=3):
        assert sums == [105.0, 1605.0]


def save_subsets(rank: int, world_size: int, root: str) -> None:
    """Two groups save at the same time, each to its own path, numbered from 0 inside the group."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]  # [0, 2] and [1, 3]
    platform = TorchPlatform(groups[mine])
    value = distribute_tensor(torch.arange(10.0) + 50 * mine, mesh, [TShard(0)])
    hyper_ckpt.save({"v": value}, f"{root}/{mine}", platform=platform)
    target = {"v": distribute_tensor(torch.zeros(10), mesh, [TReplicate()])}
    hyper_ckpt.load(target, f"{root}/{mine}", platform=platform)
    assert target["v"].to_local().tolist() == [50 * mine + i for i in range(10)]


def test_process_group_subsets(gloo: Gloo, tmp_path: Path) -> None:
    gloo(save_subsets, str(tmp_path), world_size=4)
    for mine in range(2):
        metadata = hyper_ckpt.read_metadata(tmp_path / str(mine))
        assert metadata.world_size == 2
        assert [name.split("-")[1] for name in metadata.files] == ["00000", "00001"]


def load_meta(rank: int, world_size: int, path: str) -> dict[str, bytes]:
    with torch.device("meta"):
        net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    state = {"model": net.state_dict()}
    assert all(v.device.type == "meta" for v in state["model"].values())
    hyper_ckpt.load(state, path)
    net.load_state_dict(state["model"], assign=True)
    return {name: full(value).numpy().tobytes() for name, value in net.state_dict().items()}


def test_meta_device_targets(gloo: Gloo, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    expected = gloo(save_kind, "fsdp", path, world_size=2)[0]
    for got in gloo(load_meta, path, world_size=3):
        assert got == {name: expected[name] for name in got}


def diverged(rank: int, world_size: int) -> State:
    """A replicated DTensor whose replicas drifted apart, and a plain tensor that did."""
    mesh = init_device_mesh("cpu", (world_size,))
    local = torch.arange(400_000.0) + rank
    return {"d": DTensor.from_local(local, mesh, [TReplicate()]), "p": torch.full((5,), float(rank))}


def save_diverged(rank: int, world_size: int, path: str) -> list[str]:
    out = []
    for conflicts in ("warn", "keep"):
        options = hyper_ckpt.SaveOptions(conflicts=conflicts)
        with pytest.warns(UserWarning, match="'d', 'p'") as caught:
            hyper_ckpt.save(diverged(rank, world_size), f"{path}-{conflicts}", options=options)
        out += [str(w.message) for w in caught]
    target, expected = diverged(9, world_size), diverged(rank, world_size)
    hyper_ckpt.load(target, f"{path}-keep")
    assert torch.equal(target["d"].to_local(), expected["d"].to_local())
    assert torch.equal(target["p"], expected["p"])
    return out


def test_replicas_that_differ_are_never_mixed(gloo: Gloo, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for first, second in gloo(save_diverged, str(path), world_size=4):
        assert "has only the lowest rank's" in first
        assert "keeps each rank's" in second
        assert "PerRank" in second
    for saved, rank in (
        (hyper_ckpt.read(f"{path}-warn"), 0),
        (hyper_ckpt.read(f"{path}-keep", options=hyper_ckpt.LoadOptions(conflicts=2)), 2),
    ):
        assert np.array_equal(saved["d"], np.arange(400_000.0) + rank)
        assert saved["p"].tolist() == [rank] * 5


def batch_norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


def trained_with_ddp(rank: int, steps: int) -> nn.parallel.DistributedDataParallel:
    net = nn.parallel.DistributedDataParallel(batch_norm_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(100 * rank + step)
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def batch_norm_of_ddp(rank: int, world_size: int, path: str) -> None:
    first = trained_with_ddp(rank, 3)
    names = ["model/module.1.running_mean", "model/module.1.running_var"]
    with pytest.warns(UserWarning, match="BatchNorm"):
        hyper_ckpt.save({"model": first.state_dict()}, path)
    second = trained_with_ddp(rank, 0)
    report = hyper_ckpt.load({"model": second.state_dict()}, path, strict="exact")
    assert report.conflicts == dict.fromkeys(names, (rank,))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def load_batch_norm_elsewhere(rank: int, world_size: int, path: str) -> dict[str, Any]:
    second = trained_with_ddp(rank, 0)
    with pytest.raises(hyper_ckpt.errors.ConflictError, match=r"running_mean.*3 ranks saved it, but 2 load it"):
        hyper_ckpt.load({"model": second.state_dict()}, path)
    hyper_ckpt.load({"model": second.state_dict()}, path, options=hyper_ckpt.LoadOptions(conflicts=1))
    return {name: tensor.numpy() for name, tensor in second.state_dict().items()}


def test_statistics_of_batch_norm_under_ddp(gloo: Gloo, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    gloo(batch_norm_of_ddp, str(path), world_size=3)
    expected = hyper_ckpt.read(path, options=hyper_ckpt.LoadOptions(conflicts=1))["model"]
    other = hyper_ckpt.read(path, options=hyper_ckpt.LoadOptions(conflicts=0))["model"]
    assert not np.array_equal(expected["module.1.running_mean"], other["module.1.running_mean"])
    for found in gloo(load_batch_norm_elsewhere, str(path), world_size=2):
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def save_fails_on_rank_2(rank: int, world_size: int, path: str) -> str:
    state: State = {"w": torch.ones(3)} if rank != 2 else {"w": torch.ones(3), "bad": object()}
    with pytest.raises(hyper_ckpt.CheckpointError) as caught:
        hyper_ckpt.save(state, path)
    # The same group goes on.
    hyper_ckpt.save({"w": torch.ones(3)}, path)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_one_ranks_error_is_everybodys(gloo: Gloo, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    errors = gloo(save_fails_on_rank_2, path, world_size=4)
    assert len(set(errors)) == 1
    assert errors[0].startswith("UnsupportedTypeError: ")
    assert "rank 2" in errors[0]
    assert "bad" in errors[0]
    assert hyper_ckpt.read(path)["w"].tolist() == [1.0, 1.0, 1.0]
