"""`TrainState`: a training as one state, by clean names, whatever wraps it; harmless where there is no checkpoint."""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

import hyper_ckpt
from hyper_ckpt.errors import CheckpointNotFoundError, MissingKeyError, ShapeMismatchError, UnsupportedStateError
from hyper_ckpt_torch import TrainState
from hyper_ckpt_torch.names import unwrapped

Gloo = Callable[..., list[Any]]
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Layers, a buffer, a tied weight, a frozen one, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.norm(self.frozen(layer(x)))
        return self.head(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": others, "lr": 0.03}, {"params": decayed}], lr=0.01, amsgrad=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make(seed: int, make_optimizer: Make = adamw, prepare: Callable[[nn.Module], object] = lambda model: None) -> Any:
    torch.manual_seed(seed)
    model = Net()
    prepare(model)
    optimizer = make_optimizer(model)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def state_of(parts: Any, **more: Any) -> TrainState:
    model, optimizer, scheduler = parts
    return TrainState(model, optimizer, scheduler=scheduler, **{"step": 0, **more})


def train(parts: Any, steps: int, begin: int = 0) -> None:
    model, optimizer, scheduler = parts
    for step in range(begin, begin + steps):
        tokens = torch.randint(9, (8,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def raw(value: Any) -> Any:
    """Plain values, and SHA-256 of tensors, of objects by their state_dict."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), hashlib.sha256(data).hexdigest()
    if not isinstance(value, dict) and hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict):
        return {key: raw(each) for key, each in value.items()}
    return [raw(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("make_optimizer", [adamw, sgd, momentum])
def test_a_run_without_a_checkpoint_is_untouched(tmp_path: Path, make_optimizer: Make) -> None:
    plain, other = make(0, make_optimizer), make(0, make_optimizer)
    state = state_of(other)
    with hyper_ckpt.CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(state) is None
    with pytest.raises(CheckpointNotFoundError):
        hyper_ckpt.load(state, tmp_path / "absent")
    assert not other[1].state
    train(plain, 3)
    train(other, 3)
    assert raw([*plain]) == raw([*other])


@pytest.mark.parametrize("make_optimizer", [adamw, sgd, momentum])
def test_a_fresh_run_goes_on(tmp_path: Path, make_optimizer: Make) -> None:
    first, second = make(0, make_optimizer), make(1, make_optimizer)
    train(first, 3)
    with hyper_ckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.async_save(3, state_of(first, step=3)).result()
        state = state_of(second)
        found = manager.restore(state, strict="exact")
    assert (found.step, state["step"], found.report.unexpected) == (3, 3, ())
    assert raw([*second]) == raw([*first])
    train(first, 2, 3)
    train(second, 2, 3)
    assert raw([*second]) == raw([*first])


def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    first, second, used = make(0), make(1), make(2)
    hyper_ckpt.save(state_of(first), tmp_path / "c")
    train(used, 2)
    for parts in (second, used):  # moments of a run that goes back to its beginning are gone
        hyper_ckpt.load(state_of(parts), tmp_path / "c", strict="exact")
        assert not parts[1].state
        assert raw([*parts]) == raw([*first])


def test_tensors_are_filled_where_they_lie(tmp_path: Path) -> None:
    first, second = make(0), make(1)
    train(first, 3)
    train(second, 1)
    hyper_ckpt.save(state_of(first), tmp_path / "c")
    weights = {id(p): p.data_ptr() for p in second[0].parameters()}
    moments = [m.data_ptr() for s in second[1].state.values() for m in s.values()]
    hyper_ckpt.load(state_of(second), tmp_path / "c", strict="exact")
    assert {id(p): p.data_ptr() for p in second[0].parameters()} == weights
    assert [m.data_ptr() for s in second[1].state.values() for m in s.values()] == moments
    assert raw([*second]) == raw([*first])


def wrapped(kind: str) -> Any:
    parts = make(1)
    if kind == "DataParallel":
        return DataParallel(parts[0]), *parts[1:]
    if kind == "compile":
        return torch.compile(parts[0]), *parts[1:]
    if kind == "compile of DataParallel":
        return torch.compile(DataParallel(parts[0])), *parts[1:]
    if kind == "layers":
        parts[0].layers[1] = torch.compile(parts[0].layers[1])
        checkpoint = torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper
        parts[0].layers[0] = checkpoint(parts[0].layers[0])
    return parts


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, in torch.compile
@pytest.mark.parametrize("kind", ["DataParallel", "compile", "compile of DataParallel", "layers"])
def test_wrappers_do_not_matter(tmp_path: Path, kind: str) -> None:
    first = make(0)
    train(first, 2)
    hyper_ckpt.save(state_of(first), tmp_path / "plain")
    inside = wrapped(kind)
    hyper_ckpt.load(state_of(inside), tmp_path / "plain", strict="exact")
    assert raw(inside[1]) == raw(first[1])
    hyper_ckpt.save(state_of(inside), tmp_path / "wrapped")
    second = make(2)
    hyper_ckpt.load(state_of(second), tmp_path / "wrapped", strict="exact")
    assert raw([*second]) == raw([*first])


def test_what_get_state_dict_gives_is_the_same(tmp_path: Path) -> None:
    first, second, third = make(0, momentum), make(1, momentum), make(2, momentum)
    train(first, 2)
    hyper_ckpt.save(state_of(first), tmp_path / "a")
    model, optimizer = get_state_dict(second[0], second[1])
    own = {"model": model, "optimizer": optimizer, "scheduler": second[2], "step": 0}
    hyper_ckpt.load(own, tmp_path / "a", strict=False)
    set_state_dict(second[0], second[1], model_state_dict=own["model"], optim_state_dict=own["optimizer"])
    assert raw(second[0]) == raw(first[0])
    hyper_ckpt.save(own, tmp_path / "b")
    hyper_ckpt.load(state_of(third), tmp_path / "b", strict="exact")
    assert raw(third[0]) == raw(first[0])
    assert raw(third[1])["state"][0] == raw(first[1])["state"][0]


def test_moments_and_masters_in_another_precision(tmp_path: Path) -> None:
    """bf16 weights with moments in float32, and master copies that are in no module."""

    def build(seed: int) -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4).bfloat16()
        masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW([*masters.values(), *model.parameters()])
        for parameter in (*masters.values(), *model.parameters()):
            optimizer.state[parameter] = {
                "step": torch.tensor(float(seed)),
                "exp_avg": torch.full(parameter.shape, seed + 0.1),
                "exp_avg_sq": torch.full(parameter.shape, seed + 0.3),
            }
        return model, masters, optimizer

    def state(parts: Any) -> TrainState:
        return TrainState({"weights": parts[0], "masters": parts[1]}, parts[2])

    first, second = build(1), build(2)
    hyper_ckpt.save(state(first), tmp_path / "c")
    for fresh in (False, True):
        if fresh:
            second[2].state.clear()
        hyper_ckpt.load(state(second), tmp_path / "c", strict="exact")
        assert raw([*second]) == raw([*first])
        assert second[2].state[second[0].weight]["exp_avg"].dtype == torch.float32


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    def build(seed: int) -> TrainState:
        torch.manual_seed(seed)
        generator, critic = nn.Linear(3, 4), nn.Linear(3, 4)
        one, other = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
        for model, optimizer in ((generator, one), (critic, other)):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if seed == 0:
                optimizer.step()
        both = [torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=seed + 1)]
        return TrainState({"g": generator, "c": critic}, {"g": one, "c": other, "both": both}, epoch=seed)

    first, second = build(0), build(1)
    hyper_ckpt.save(first, tmp_path / "c")
    hyper_ckpt.load(second, tmp_path / "c", strict="exact")
    assert raw(second) == raw(first)
    saved = hyper_ckpt.read(tmp_path / "c", platform="torch")
    assert sorted(saved["optimizer"]["g"]["state"]) == ["g.bias", "g.weight"]
    assert saved["optimizer"]["both"][0]["param_groups"][0]["lr"] == 1
    assert len(saved["optimizer"]["both"][0]["param_groups"][0]["params"]) == 4


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    first = make(0)
    train(first, 1)
    hyper_ckpt.save(state_of(first), tmp_path / "c")
    other = nn.Linear(6, 6)
    with pytest.raises(MissingKeyError, match="model/weight"):
        hyper_ckpt.load(TrainState(other), tmp_path / "c")
    wide = make(1)
    wide[0].unused = nn.Linear(7, 3)
    wide = (wide[0], adamw(wide[0]), wide[2])
    before = raw(wide[0])
    with pytest.raises(ShapeMismatchError, match="unused"):
        hyper_ckpt.load(state_of(wide), tmp_path / "c")
    assert raw(wide[0]) == before
    assert not wide[1].state


def test_parameters_that_are_in_no_model_are_told(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(UnsupportedStateError, match=r"2 of 2 parameters of the AdamW are in no model.*fully_shard"):
        hyper_ckpt.save(TrainState(nn.Linear(2, 2), optimizer), tmp_path / "c")
    for wrong in (lambda: TrainState(3), lambda: TrainState(nn.Linear(2, 2), "adam")):
        with pytest.raises(TypeError, match="is a"):
            wrong()


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.frozen.weight, model.frozen.bias})


def save_sharded(rank: int, world_size: int, path: str) -> Any:
    parts = make(0, adamw, shard)
    train(parts, 3)
    hyper_ckpt.save(state_of(parts, step=3), path)
    return by_name(parts)


def load_sharded(rank: int, world_size: int, path: str, kind: str) -> Any:
    """Into fresh objects; then a step, of which all ranks do the same."""
    prepare = shard if kind == "FSDP2" else lambda model: None
    parts = make(7, adamw, prepare)
    if kind == "DDP":
        parts = (DistributedDataParallel(parts[0], find_unused_parameters=True), *parts[1:])
    state = state_of(parts)
    hyper_ckpt.load(state, path, strict="exact")
    if kind == "FSDP2":
        moment = parts[1].state[parts[0].layers[0].weight]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.placements == parts[0].layers[0].weight.placements
    loaded = by_name(parts)
    step(parts)
    return loaded, by_name(parts), state["step"]


def step(parts: Any) -> None:
    """With gradients that do not depend on how many ranks compute them."""
    model = unwrapped(parts[0])
    for name, parameter in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        if parameter.requires_grad and "unused" not in name:
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            is_sharded = isinstance(parameter, DTensor)
            parameter.grad = distribute(whole, parameter) if is_sharded else whole
    parts[1].step()
    parts[2].step()


def distribute(whole: Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(whole, like.device_mesh, like.placements)


def by_name(parts: Any) -> Any:
    return raw({key: each for key, each in state_of(parts).items() if key != "step"})


@pytest.mark.parametrize("saved_on", [1, 2, 4])
def test_fresh_objects_on_any_number_of_ranks(gloo: Gloo, tmp_path: Path, saved_on: int) -> None:
    path = str(tmp_path / "c")
    if saved_on == 1:
        parts = make(0)
        train(parts, 3)
        hyper_ckpt.save(state_of(parts, step=3), path)
        saved = by_name(parts)
    else:
        results = gloo(save_sharded, path, world_size=saved_on)
        saved = results[0]
        assert results == [saved] * saved_on
    alone = load_sharded(0, 1, path, "alone")
    assert alone[0] == saved
    for world_size, kind in ((2, "FSDP2"), (3, "FSDP2"), (2, "DDP")):
        results = gloo(load_sharded, path, kind, world_size=world_size)
        assert [loaded for loaded, *_ in results] == [saved] * world_size
        assert [went_on for _, went_on, _ in results] == [alone[1]] * world_size
        assert results[0][2] == 3


def fsdp1(seed: int, flat: bool = False) -> Any:
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)),
        use_orig_params=not flat,
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        device_id=torch.device("cpu"),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_fsdp1(parts: Any, steps: int) -> None:
    for step in range(steps):
        parts[0](torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        parts[1].step()
        parts[1].zero_grad()


def with_fsdp1(rank: int, world_size: int, path: str) -> Any:
    """Into a fresh optimizer, and into one with moments; a fresh one stays as it is where nothing is found."""
    first, second, third = fsdp1(0), fsdp1(1), fsdp1(2)
    train_fsdp1(first, 2)
    train_fsdp1(third, 1)
    hyper_ckpt.save(TrainState(*first), path)
    with pytest.raises(CheckpointNotFoundError):
        hyper_ckpt.load(TrainState(*second), f"{path}-absent")
    assert not second[1].state
    saved = raw(TrainState(*first))
    for parts in (second, third):
        hyper_ckpt.load(TrainState(*parts), path, strict="exact")
        assert raw(TrainState(*parts)) == saved
        train_fsdp1(parts, 1)
    train_fsdp1(first, 1)
    assert raw(TrainState(*first)) == raw(TrainState(*second)) == raw(TrainState(*third))
    return saved


def fsdp1_before_a_step(rank: int, world_size: int, path: str) -> None:
    warnings.simplefilter("ignore")  # FSDP1 calls what torch has deprecated
    for flat in (False, True):
        first, second = fsdp1(0, flat=flat), fsdp1(1, flat=flat)
        first[1].param_groups[0]["lr"] = 0.25
        hyper_ckpt.save(TrainState(*first), f"{path}-{flat}")
        train_fsdp1(second, 1)
        hyper_ckpt.load(TrainState(*second), f"{path}-{flat}", strict="exact")
        assert not second[1].state
        assert second[1].param_groups[0]["lr"] == 0.25
        for parts in (first, second):
            train_fsdp1(parts, 2)
        assert raw(TrainState(*first)) == raw(TrainState(*second))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp1_before_its_first_step(gloo: Gloo, tmp_path: Path) -> None:
    gloo(fsdp1_before_a_step, str(tmp_path / "c"), world_size=2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    hyper_ckpt.load(TrainState(model, optimizer), tmp_path / "c-True", strict="exact")
    assert optimizer.param_groups[0]["lr"] == 0.25


def fsdp1_with_an_empty_group(rank: int, world_size: int, path: str) -> None:
    warnings.simplefilter("ignore")  # FSDP1 calls what torch has deprecated

    def make(seed: int) -> Any:
        model, _ = fsdp1(seed)
        matrices = [each for each in model.parameters() if each.ndim > 1]
        others = [each for each in model.parameters() if each.ndim < 2]  # FSDP1's parts of parameters: all of them
        return model, torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}])

    first, second = make(0), make(1)
    assert not first[1].param_groups[0]["params"]
    train_fsdp1(first, 1)
    hyper_ckpt.save(TrainState(*first), path)
    hyper_ckpt.load(TrainState(*second), path)
    assert all(group.keys() >= {"lr", "betas", "weight_decay"} for group in second[1].param_groups)
    for parts in (first, second):
        train_fsdp1(parts, 1)
    assert raw(TrainState(*first))["model"] == raw(TrainState(*second))["model"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp1_with_a_group_without_parameters(gloo: Gloo, tmp_path: Path) -> None:
    gloo(fsdp1_with_an_empty_group, str(tmp_path / "c"), world_size=2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp1(gloo: Gloo, tmp_path: Path) -> None:
    saved = gloo(with_fsdp1, str(tmp_path / "c"), world_size=2)[0]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    hyper_ckpt.load(state, tmp_path / "c", strict="exact")
    assert raw(state)["model"] == saved["model"]
    assert raw(state)["optimizer"]["state"] == saved["optimizer"]["state"]
