"""What the tests of torch.distributed.checkpoint ask of `get_state_dict` and of optimizers: states that are whole on
one rank, experts, frozen and tied parameters, hooks that rename, an optimizer for each parameter."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hyper_ckpt
from hyper_ckpt_torch import TrainState

Gloo = Callable[..., list[Any]]
Parts = tuple[nn.Module, Any]
WHOLE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))


def step(parts: Parts) -> Parts:
    model, optimizer = parts
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    optimizer.zero_grad()
    return parts


def state_of(parts: Parts, options: StateDictOptions | None = None) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(*parts, options=options), strict=True))


def load(parts: Parts, path: str | Path, how: str, options: StateDictOptions | None = None) -> None:
    if how == "TrainState":
        hyper_ckpt.load(TrainState(*parts), path, strict="exact")
        return
    state = state_of(parts, options)
    hyper_ckpt.load(state, path, strict="exact")
    set_model_state_dict(parts[0], state["model"], options=options)  # set_state_dict takes none that is empty
    set_optimizer_state_dict(*parts, state["optimizer"], options=options)


def flat(value: Any) -> Any:
    """Tensors whole and as lists, so that states compare; tuples as lists, as torch's broadcasts make them."""
    if isinstance(value, Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
    if isinstance(value, dict):
        return {key: flat(each) for key, each in value.items()}
    return [flat(each) for each in value] if isinstance(value, list | tuple) else value


def same(one: Parts, other: Parts) -> None:
    first, second = (flat(state_of(parts)) for parts in (one, other))
    assert first["model"] == second["model"]
    assert first["optimizer"] == second["optimizer"]


def fsdp2(seed: int) -> Parts:
    model = fully_shard(network(seed))
    return model, torch.optim.Adam(model.parameters(), lr=0.1 + seed)


def whole_on_rank_0(rank: int, world_size: int, path: str) -> None:
    """Rank 0 alone holds the state, the others an empty dict: saved so, loaded so, and loaded into shards."""
    saved = step(fsdp2(0))
    state = state_of(saved, FROM_RANK_0)
    assert bool(state["model"]) == (rank == 0)
    hyper_ckpt.save(state, path)
    for how, options in (("get_state_dict", FROM_RANK_0), ("get_state_dict", None), ("TrainState", None)):
        target = fsdp2(1)
        load(target, path, how, options)
        same(saved, target)


class Experts(nn.Module):
    """Each rank holds one expert of two, sharded over the ranks that hold it too, and a part of what all share."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shared, expert = nn.Linear(6, 6), nn.Linear(6, 6)
        with torch.no_grad():
            expert.weight.add_(rank % 2)
        self.experts = nn.ModuleDict({str(rank % 2): expert})


def experts(rank: int, world_size: int, path: str) -> None:
    def make(seed: int) -> Parts:
        model = Experts(rank, seed)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        fully_shard(model.experts[str(rank % 2)], mesh=mesh["dp"])
        fully_shard(model.shared, mesh=init_device_mesh("cpu", (world_size,)))
        return model, torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)

    saved = step(make(0))
    hyper_ckpt.save(state_of(saved), path)
    for how in ("get_state_dict", "TrainState"):
        target = make(1)
        load(target, path, how)
        same(saved, target)
    stored = hyper_ckpt.read_metadata(path).state_dict_metadata
    assert {"model/experts.0.weight", "model/experts.1.weight", "model/shared.weight"} <= {*stored}


PLAN = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel(use_local_output=False)}


def parallel_groups(rank: int, world_size: int, path: str) -> None:
    """Tensor parallelism, and parameter groups of which one may be empty."""
    mesh = init_device_mesh("cpu", (world_size,))

    def make(seed: int, empty: bool) -> Parts:
        model = parallelize_module(network(seed), mesh, PLAN)
        biases = [] if empty else [model[0].bias, model[1].bias]
        weights = [each for each in model.parameters() if not any(each is bias for bias in biases)]
        groups = [{"params": weights}, {"params": biases, "lr": 0.2 + seed}]
        return model, torch.optim.AdamW(groups, lr=0.1 + seed, foreach=False)

    for empty in (False, True):
        saved, where = step(make(0, empty)), f"{path}-{empty}"
        hyper_ckpt.save(state_of(saved), where)
        for how in ("get_state_dict", "TrainState"):
            target = make(1, empty)
            load(target, where, how)
            same(saved, target)
            assert [group["lr"] for group in target[1].param_groups] == [0.1, 0.2]


def fsdp1_into_others(rank: int, world_size: int, path: str) -> None:
    """Hybrid sharding of FSDP1 into its plain sharding, and its weights into tensor parallelism."""
    flatten = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)

    def make(seed: int, hybrid: bool) -> Parts:
        kinds: dict[str, Any] = {"device_mesh": init_device_mesh("cpu", (world_size,))}
        if hybrid:
            kinds = {"device_mesh": init_device_mesh("cpu", (2, 2)), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        model = flatten(network(seed), **kinds)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        saved = make(0, hybrid=True)
        saved[0](torch.ones(2, 6)).sum().backward()
        saved[1].step()
        hyper_ckpt.save(state_of(saved), path)
        want = flat(state_of(saved, WHOLE))
        target = make(1, hybrid=False)
        load(target, path, "get_state_dict")
        assert flat(state_of(target, WHOLE)) == want
    tensor_parallel = parallelize_module(network(1), init_device_mesh("cpu", (world_size,)), PLAN)
    hyper_ckpt.load(TrainState(tensor_parallel), path)
    assert want["model"] in (flat(tensor_parallel.state_dict()), {})  # ranks other than 0 have no whole one


@pytest.mark.parametrize("case", [whole_on_rank_0, experts, parallel_groups, fsdp1_into_others])
def test_on_ranks(gloo: Gloo, tmp_path: Path, case: Any) -> None:
    gloo(case, str(tmp_path / "c"), world_size=2 if case is parallel_groups else 4)


def some_without_state(seed: int) -> Parts:
    model = network(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def test_moments_of_a_parameter_that_was_frozen_later(tmp_path: Path) -> None:
    saved, target = step(some_without_state(0)), some_without_state(1)
    for model, _ in (saved, target):
        model[0].requires_grad_(False)
    hyper_ckpt.save(TrainState(*saved), tmp_path / "c")
    load(target, tmp_path / "c", "TrainState")
    assert flat(saved[1].state_dict()) == flat(target[1].state_dict())
    assert len(target[1].state) == 4


def test_moments_of_some_parameters(tmp_path: Path) -> None:
    """A parameter that never got a gradient has none after the load, too."""
    saved, target = some_without_state(0), some_without_state(1)
    saved[0][1].weight.grad = torch.ones(6, 10)
    saved[1].step()
    hyper_ckpt.save(TrainState(*saved), tmp_path / "c")
    load(target, tmp_path / "c", "TrainState")
    assert [*target[1].state] == [target[0][1].weight]


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("flatten", [False, True])
def test_tied_weights(tmp_path: Path, flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved, target = (step((model, torch.optim.AdamW(model.parameters()))) for model in (Tied(0), Tied(1)))
    hyper_ckpt.save(state_of(saved, options), tmp_path / "c")
    load(target, tmp_path / "c", "get_state_dict", options)
    same(saved, target)
    assert target[0].head.weight is target[0].embedding.weight


class Renamed(nn.Module):
    """Saved under names that its hooks make, as modules that are fused in memory do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(2, 2)
        self._register_state_dict_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}fused"] = state.pop(f"{prefix}inner.weight")

    @staticmethod
    def _rename_back(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}inner.weight"] = state.pop(f"{prefix}fused")


def test_names_that_hooks_make(tmp_path: Path) -> None:
    saved, target = Renamed(0), Renamed(1)
    hyper_ckpt.save({"model": saved}, tmp_path / "c")
    assert {*hyper_ckpt.read_metadata(tmp_path / "c").state_dict_metadata} == {"model/fused", "model/inner.bias"}
    hyper_ckpt.load({"model": target}, tmp_path / "c", strict="exact")
    assert flat(saved.state_dict()) == flat(target.state_dict())


@pytest.mark.parametrize("how", ["get_state_dict", "TrainState"])
def test_an_optimizer_for_each_parameter(tmp_path: Path, how: str) -> None:
    def make(seed: int) -> Parts:
        model = network(seed)
        optimizers = [torch.optim.Adam([parameter], lr=0.1) for parameter in model.parameters()]
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number + seed)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizers

    saved, target = make(0), make(1)
    hyper_ckpt.save(TrainState(*saved) if how == "TrainState" else state_of(saved), tmp_path / "c")
    load(target, tmp_path / "c", how)
    same(saved, target)


def test_from_and_into_a_file_of_torch_save(tmp_path: Path) -> None:
    state = {"model": network(0).state_dict(), "step": 3}
    hyper_ckpt.save(state, tmp_path / "c")
    torch.save(hyper_ckpt.read(tmp_path / "c", platform="torch"), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert flat(whole) == flat({**state, "model": dict(state["model"])})
    hyper_ckpt.save(whole, tmp_path / "again")
    assert flat(hyper_ckpt.read(tmp_path / "again", platform="torch")) == flat(whole)


def test_views_of_one_tensor_are_staged_alike(tmp_path: Path) -> None:
    """Each name has what it showed when the save was asked for."""
    base = torch.randn(8, 8)
    state = {"base": base, "line": base.view(64)[5:50], "middle": base[2:6, 2:6], "columns": base[:, ::3]}
    want = flat(deepcopy({name: each.clone() for name, each in state.items()}))
    handle = hyper_ckpt.async_save(state, tmp_path / "c")
    handle.wait_staged()
    base.fill_(42.0)
    handle.result()
    assert flat(hyper_ckpt.read(tmp_path / "c", platform="torch")) == want
