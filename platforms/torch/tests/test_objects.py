"""Objects with state_dict and load_state_dict stand in the state as they are, and are filled in place."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler, TensorDataset

import hyper_ckpt
from hyper_ckpt import PerRank

Gloo = Callable[..., list[Any]]
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state: dict[str, Any], steps: int, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        state["model"](torch.randn(6, 5, generator=generator)).square().mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()


def raw(value: Any) -> Any:
    """Plain values and SHA-256 of tensors, of objects by their state_dict."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict):
        return {key: raw(each) for key, each in value.items()}
    return [raw(each) for each in value] if isinstance(value, list) else value


def test_module_optimizer_and_scheduler(tmp_path: Path) -> None:
    first = make(0)
    train(first, 3)
    hyper_ckpt.save(first, tmp_path / "c")
    second = make(1)
    train(second, 1)
    parameters = list(second["model"].parameters())
    report = hyper_ckpt.load(second, tmp_path / "c", strict="exact")
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert raw(second) == raw(first)
    assert all(a is b for a, b in zip(parameters, second["model"].parameters(), strict=True))
    assert second["optimizer"].param_groups[0]["params"][0] is parameters[0]
    train(first, 2)
    train(second, 2)
    assert raw(second) == raw(first), "they go on alike"


def test_a_fresh_optimizer_takes_its_moments(tmp_path: Path) -> None:
    first = make(0)
    train(first, 3)
    hyper_ckpt.save(first, tmp_path / "c")
    second = make(1)
    report = hyper_ckpt.load(second, tmp_path / "c", strict="exact")
    assert report.unexpected == ()
    assert len([name for name in report.loaded if name.rpartition("/")[2] in MOMENTS]) == 18
    assert raw(second) == raw(first)
    train(first, 2)
    train(second, 2)
    assert raw(second) == raw(first)


def test_moments_that_were_not_saved_are_dropped(tmp_path: Path) -> None:
    """What was saved is the truth: an optimizer that had not stepped has not stepped."""
    first, used = make(0), make(1)
    hyper_ckpt.save(first, tmp_path / "c")
    train(used, 1)
    hyper_ckpt.load(used, tmp_path / "c", strict="exact")
    assert raw(used) == raw(first)
    assert not used["optimizer"].state


class Loader:
    """As torchdata's StatefulDataLoader: an object of its own inside, plain values, tensors."""

    def __init__(self, seed: int) -> None:
        self.sampler_iter_state = torch.Generator().manual_seed(seed).get_state()
        self.yielded = 0
        self.nested = {"workers": [{"fetched": 0}, {"fetched": 0}], "snapshot": None}

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.yielded, 10))

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.sampler_iter_state, "yielded": self.yielded, **self.nested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler_iter_state, self.yielded = state["rng"], state["yielded"]
        self.nested = {"workers": state["workers"], "snapshot": state["snapshot"]}


def test_plain_values_that_the_target_lacks_are_handed_over(tmp_path: Path) -> None:
    """A scheduler adds `initial_lr` to the optimizer's groups; the target has none yet."""
    first = make(0)
    train(first, 1)
    hyper_ckpt.save({"model": first["model"], "optimizer": first["optimizer"]}, tmp_path / "c")
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    hyper_ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "c", strict="exact")
    assert raw(optimizer) == raw(first["optimizer"])
    assert optimizer.param_groups[0]["initial_lr"] == 0.1


def test_an_object_decides_where_a_dict_must_fit(tmp_path: Path) -> None:
    with_tensor, without = Loader(1), Loader(2)
    with_tensor.nested["snapshot"] = {"cache": torch.ones(2)}
    hyper_ckpt.save({"loader": with_tensor}, tmp_path / "with")
    hyper_ckpt.save({"loader": without}, tmp_path / "without")
    plain = {"loader": {"snapshot": None, "workers": [], "rng": Loader(4).sampler_iter_state, "yielded": 0}}
    with pytest.raises(hyper_ckpt.errors.ContainerMismatchError, match="loader/workers"):
        hyper_ckpt.load(plain, tmp_path / "without")
    fresh = Loader(3)
    hyper_ckpt.load({"loader": fresh}, tmp_path / "with", strict="exact")
    assert raw(fresh) == raw(with_tensor)
    hyper_ckpt.load({"loader": with_tensor}, tmp_path / "without", strict="exact")
    assert raw(with_tensor) == raw(without)


class Position(DistributedSampler[int]):
    """A DistributedSampler that knows where it is."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.set_epoch(state["epoch"])
        self.done = state["done"]


def test_loaders_and_samplers(tmp_path: Path) -> None:
    loader = Loader(1)
    loader.yielded, loader.nested = 4, {"workers": [{"fetched": 2}, {"fetched": 1}], "snapshot": {"step": 3}}
    sampler = Position(TensorDataset(torch.ones(8)), 2, 1)
    sampler.set_epoch(5)
    sampler.done = 3
    state = {"loader": loader, "mine": PerRank(loader), "sampler": sampler}
    hyper_ckpt.save(state, tmp_path / "c")
    fresh = {
        "loader": Loader(2),
        "mine": PerRank(Loader(3)),
        "sampler": Position(TensorDataset(torch.ones(8)), 2, 1),
    }
    hyper_ckpt.load(fresh, tmp_path / "c")
    for got in (fresh["loader"], fresh["mine"].value):
        assert raw(got) == raw(loader)
        assert list(got) == [4, 5, 6, 7, 8, 9]
    assert raw(fresh["sampler"]) == {"epoch": 5, "done": 3}
    assert list(fresh["sampler"]) == list(sampler)


class Mixed:
    """Its state has numpy arrays beside tensors."""

    def state_dict(self) -> dict[str, Any]:
        return {"positions": np.arange(3), "scale": np.array(2.5, np.float32), "weights": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_numpy_arrays_in_a_per_rank_stay_numpy_arrays(tmp_path: Path) -> None:
    hyper_ckpt.save({"w": torch.ones(1), "values": PerRank(Mixed().state_dict()), "object": PerRank(Mixed())}, tmp_path)
    target = {"w": torch.zeros(1), "values": PerRank(None), "object": PerRank(Mixed())}
    hyper_ckpt.load(target, tmp_path)
    read = hyper_ckpt.read(tmp_path, platform="torch")
    for found in (target["values"].value, target["object"].value.loaded, read["values"].value):
        assert [type(each) for each in found.values()] == [np.ndarray, np.ndarray, torch.Tensor]
        assert (found["positions"].dtype, found["positions"].tolist()) == (np.arange(3).dtype, [0, 1, 2])
        assert (found["scale"].dtype, found["scale"].shape, float(found["scale"])) == (np.float32, (), 2.5)
        assert torch.equal(found["weights"], torch.ones(2))


def sharded(seed: int) -> dict[str, Any]:
    state = make(seed)
    fully_shard(state["model"], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(state["model"].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return {**state, "optimizer": optimizer, "scheduler": scheduler}


def on_ranks(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Saved as objects, loaded into objects; and go on alike."""
    first, second = sharded(0), sharded(1)
    train(first, 3)
    hyper_ckpt.save(first, path, overwrite=True)
    train(second, 1)
    hyper_ckpt.load(second, path, strict="exact")
    assert raw(second) == raw(first)
    assert isinstance(second["optimizer"].state_dict()["state"][0]["exp_avg"], DTensor)
    train(first, 2)
    train(second, 2)
    assert raw(second) == raw(first)
    return raw(first)


def load_on_ranks(rank: int, world_size: int, path: str) -> dict[str, Any]:
    state = sharded(2)
    train(state, 1)
    hyper_ckpt.load(state, path, strict="exact")
    return raw(state)


def test_fsdp2_objects_on_other_ranks(gloo: Gloo, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    results = gloo(on_ranks, path, world_size=3)
    assert results == [results[0]] * 3
    saved = hyper_ckpt.read(path, platform="torch")
    loaded = gloo(load_on_ranks, path, world_size=2)
    assert loaded == [loaded[0]] * 2
    assert loaded[0]["model"] == raw(saved["model"])
    assert loaded[0]["optimizer"] == raw(saved["optimizer"])


def test_tensors_in_a_deque_choose_the_platform(tmp_path: Path) -> None:
    hyper_ckpt.save({"window": deque([torch.ones(2)])}, tmp_path / "c")
    target = {"window": deque([torch.zeros(2)])}
    hyper_ckpt.load(target, tmp_path / "c")
    assert target["window"][0].tolist() == [1.0, 1.0]
