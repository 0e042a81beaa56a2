"""What the tests of torch.distributed.checkpoint ask of models: parallel in one way, saved, loaded, and trained on like
one process that was never interrupted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hyper_ckpt
from hyper_ckpt.errors import MissingKeyError
from hyper_ckpt_torch import TrainState

Gloo = Callable[..., list[Any]]
KINDS = ("FSDP2", "HSDP", "TP", "FSDP2 and TP", "DDP")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2, self.net3 = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.net3(self.net2(self.net1(x).relu()).relu())


def make(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Model()
    size = dist.get_world_size() if dist.is_initialized() else 1
    if kind in ("TP", "FSDP2 and TP"):
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
        model = parallelize_module(model, mesh["tp"], plan)
        if kind == "FSDP2 and TP":
            fully_shard(model, mesh=mesh["dp"])
    elif kind == "HSDP":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "FSDP2":
        fully_shard(model)
    elif kind == "DDP":
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(parts: Any, steps: int, begin: int = 0) -> None:
    """Every rank with the same batch, so that all kinds compute the same up to rounding."""
    for step in range(begin, begin + steps):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        parts[0](batch).square().mean().backward()
        parts[1].step()
        parts[1].zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    found = get_model_state_dict(model)
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


def end_to_end(rank: int, world_size: int, path: str, kind: str, how: str) -> None:
    reference, first, second = make("none"), make(kind), make(kind, 1)
    train(reference, 2)
    train(first, 2)
    if how == "get_state_dict":
        state = dict(zip(("model", "optimizer"), get_state_dict(*first), strict=True))
    else:
        state = TrainState(*first)
    handle = hyper_ckpt.async_save({**state, "losses": [0.5, 0.25], "seen": torch.tensor(8)}, path)
    handle.result()
    if how == "get_state_dict":
        target = dict(zip(("model", "optimizer"), get_state_dict(*second), strict=True))
    else:
        target = TrainState(*second)
    target |= {"losses": [], "seen": torch.tensor(0)} if how == "get_state_dict" else {"losses": [0.0, 0.0]}
    target["losses"], target["seen"] = [0.0, 0.0], torch.tensor(0)
    hyper_ckpt.load(target, path, strict="exact")
    if how == "get_state_dict":
        set_state_dict(*second, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert (target["losses"], target["seen"].item()) == ([0.5, 0.25], 8)
    for parts in (reference, first, second):
        train(parts, 1, 2)
    loaded = weights(second[0])
    assert all(torch.equal(loaded[name], each) for name, each in weights(first[0]).items())
    assert close(loaded, weights(reference[0]))


@pytest.mark.parametrize("how", ["get_state_dict", "TrainState"])
@pytest.mark.parametrize("kind", KINDS)
def test_end_to_end(gloo: Gloo, tmp_path: Path, kind: str, how: str) -> None:
    gloo(end_to_end, str(tmp_path / "c"), kind, how, world_size=4)


def save_kind(rank: int, world_size: int, path: str, kind: str) -> None:
    parts = make(kind)
    train(parts, 2)
    hyper_ckpt.save(TrainState(*parts), path)


def load_kinds(rank: int, world_size: int, path: str, kinds: tuple[str, ...]) -> None:
    reference = make("none")
    train(reference, 2)
    for kind in kinds:
        parts = make(kind, 3)
        hyper_ckpt.load(TrainState(*parts), path, strict="exact")
        assert close(weights(parts[0]), weights(reference[0])), kind
        train(parts, 1, 2)


@pytest.mark.parametrize("kind", ["FSDP2", "HSDP", "FSDP2 and TP"])
def test_one_kind_into_all_others(gloo: Gloo, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "c")
    gloo(save_kind, path, kind, world_size=4)
    gloo(load_kinds, path, KINDS, world_size=4)
    load_kinds(0, 1, path, ("none",))


def fine_tune(rank: int, world_size: int, path: str) -> None:
    """A pretrained body with a new head: what is there is loaded, the rest is as it was."""
    body = make("FSDP2")
    train(body, 1)
    hyper_ckpt.save({"model": get_model_state_dict(body[0])}, path)
    tuned = Model()
    tuned.head, tuned.net3 = nn.Linear(8, 2), nn.Identity()
    fully_shard(tuned)
    head = weights(tuned)["head.weight"].clone()
    target = {"model": get_model_state_dict(tuned)}
    with pytest.raises(MissingKeyError, match=r"head\.weight"):
        hyper_ckpt.load(target, path)
    report = hyper_ckpt.load(target, path, strict=False)
    assert sorted(report.missing) == ["model/head.bias", "model/head.weight"]
    assert torch.equal(weights(tuned)["net1.weight"], weights(body[0])["net1.weight"])
    assert torch.equal(weights(tuned)["head.weight"], head)


def test_fine_tuning(gloo: Gloo, tmp_path: Path) -> None:
    gloo(fine_tune, str(tmp_path / "c"), world_size=2)


def test_only_one_part_is_loaded(gloo: Gloo, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    gloo(save_kind, path, "FSDP2", world_size=4)
    model, optimizer = make("none", 5)
    hyper_ckpt.load(TrainState(model), path)
    found = hyper_ckpt.read(path, keys=["optimizer/state"], platform="torch")
    assert found.keys() == {"optimizer"}
    assert found["optimizer"].keys() == {"state"}
    hyper_ckpt.load({"optimizer": TrainState(model, optimizer)["optimizer"]}, path)
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], found["optimizer"]["state"][name]["exp_avg"])
