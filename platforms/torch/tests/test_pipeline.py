"""Pipeline stages, each with what `get_state_dict` gives of it: loaded into any other stages."""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import hyper_ckpt
from hyper_ckpt.errors import ContainerMismatchError
from hyper_ckpt_torch import TrainState

Gloo = Callable[..., list[Any]]

LAYERS = 6
SPLITS = {1: [range(6)], 2: [range(1), range(1, 6)], 3: [range(2), range(2, 4), range(4, 6)],
          4: [range(3), range(3, 4), range(4, 5), range(5, 6)]}  # fmt: skip
"""By number of ranks, the layers of each stage. Layer 5 has no bias, so that a stage of its own has one group only."""


class Stage(nn.Module):
    """Some layers of a model, under the names that they have in it."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(3, 3, bias=i < 5) for i in layers})


def make(rank: int, world_size: int, groups: str) -> tuple[Stage, torch.optim.Optimizer]:
    stage = Stage(SPLITS[world_size][rank])
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(numbers(name, parameter))
    weights = [p for p in stage.parameters() if p.ndim > 1]
    biases = [p for p in stage.parameters() if p.ndim == 1]
    if groups == "one":
        return stage, torch.optim.AdamW(stage.parameters(), lr=0.1)
    listed = [{"params": weights, "weight_decay": 0.2}, {"params": biases, "lr": 0.3}]
    if groups == "reversed":
        listed.reverse()
    return stage, torch.optim.AdamW([group for group in listed if group["params"]], lr=0.1, weight_decay=0.0)


def numbers(name: str, like: torch.Tensor) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def train(stage: Stage, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for name, parameter in stage.named_parameters():
            parameter.grad = numbers(f"{name} {step}", parameter)
        optimizer.step()


def state_of(stage: Stage, optimizer: torch.optim.Optimizer, how: str) -> dict[str, Any]:
    if how == "TrainState":
        return TrainState(stage, optimizer)
    return dict(zip(("model", "optimizer"), get_state_dict(stage, optimizer), strict=True))


def digests(stage: Stage, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of each parameter, of its moments, and of its options."""
    _, moments = get_state_dict(stage, optimizer)
    found = {}
    for name, parameter in stage.named_parameters():
        group = next(group for group in moments["param_groups"] if name in group["params"])
        own = [parameter.detach(), *moments["state"][name].values()]
        options = repr(sorted((key, repr(value)) for key, value in group.items() if key != "params"))
        data = b"".join(each.numpy().tobytes() for each in own) + options.encode()
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def save(rank: int, world_size: int, path: str, groups: str, how: str = "get_state_dict") -> dict[str, str]:
    stage, optimizer = make(rank, world_size, groups)
    train(stage, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule does, on all stages alike
    if groups != "one":
        next(group for group in optimizer.param_groups if group["weight_decay"] == 0.2)["lr"] = 0.05
    hyper_ckpt.save(state_of(stage, optimizer, how), path)
    return digests(stage, optimizer)


def load(
    rank: int, world_size: int, path: str, groups: str, how: str = "get_state_dict"
) -> tuple[dict[str, str], dict[str, str]]:
    stage, optimizer = make(rank, world_size, groups)
    state = state_of(stage, optimizer, how)
    hyper_ckpt.load(state, path, strict="exact")
    if how == "get_state_dict":
        set_state_dict(stage, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert len(optimizer.state) == len([*stage.parameters()])
    loaded = digests(stage, optimizer)
    train(stage, optimizer, 1)
    return loaded, digests(stage, optimizer)


def union(results: list[dict[str, str]]) -> dict[str, str]:
    return {name: each for result in results for name, each in result.items()}


@pytest.mark.parametrize("how", ["get_state_dict", "TrainState"])
@pytest.mark.parametrize(("saved_on", "groups"), [(2, "one"), (4, "two")])
def test_stages_load_into_any_other_stages(gloo: Gloo, tmp_path: Path, saved_on: int, groups: str, how: str) -> None:
    path = str(tmp_path / "c")
    saved = union(gloo(save, path, groups, how, world_size=saved_on))
    for world_size in (2, 3, 4):
        loaded, went_on = zip(*gloo(load, path, groups, how, world_size=world_size), strict=True)
        assert union([*loaded]) == saved
        again = load(0, 1, path, groups, how)
        assert again[0] == saved
        assert again[1] == union([*went_on]), "they go on alike"


def test_groups_in_another_order(gloo: Gloo, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    saved = union(gloo(save, path, "two", world_size=4))
    assert load(0, 1, path, "reversed")[0] == saved
    assert union([loaded for loaded, _ in gloo(load, path, "reversed", world_size=3)]) == saved


def test_groups_of_other_options_name_the_way(gloo: Gloo, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    gloo(save, path, "two", world_size=2)
    with pytest.raises(ContainerMismatchError, match="flatten_optimizer_state_dict"):
        load(0, 1, path, "one")


def save_flattened(rank: int, world_size: int, path: str) -> dict[str, str]:
    stage, optimizer = make(rank, world_size, "two")
    train(stage, optimizer, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    hyper_ckpt.save(dict(zip("mo", get_state_dict(stage, optimizer, options=options), strict=True)), path)
    return digests(stage, optimizer)


def test_the_way(gloo: Gloo, tmp_path: Path) -> None:
    """Options that are kept for each parameter load into groups of any kind."""
    path = str(tmp_path / "c")
    saved = union(gloo(save_flattened, path, world_size=2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    stage, optimizer = make(0, 1, "two")
    state = dict(zip("mo", get_state_dict(stage, optimizer, options=options), strict=True))
    hyper_ckpt.load(state, path, strict="exact")
    set_state_dict(stage, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"], options=options)
    assert digests(stage, optimizer) == saved


def save_contradicting(rank: int, world_size: int, path: str) -> str:
    stage, optimizer = make(0, 1, "one")
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][: 3 + rank]
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hyper_ckpt.save(get_state_dict(stage, optimizer)[1], path)
    return " ".join(str(each.message) for each in caught)


def test_stages_that_contradict_each_other_are_told_the_way(gloo: Gloo, tmp_path: Path) -> None:
    """One parameter, and other options on each rank."""
    assert "flatten_optimizer_state_dict" in gloo(save_contradicting, str(tmp_path / "c"), world_size=2)[0]
