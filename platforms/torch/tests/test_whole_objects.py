"""An object is handed its whole saved state, as it was saved; what cannot be is refused before anything changes."""

import io
import warnings
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hyper_ckpt
from hyper_ckpt import PerRank
from hyper_ckpt.contracts.objects import MissingTensor
from hyper_ckpt.errors import (
    MissingKeyError,
    PlanError,
    ShapeMismatchError,
    StateMismatchError,
    TargetError,
    UnexpectedKeyError,
)

Gloo = Callable[..., list[Any]]


class Holder:
    """Keeps exactly what it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def exactly(value: Any) -> Any:
    """The value with types and kinds of containers spelt out."""
    if isinstance(value, Tensor | np.ndarray):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(key, exactly(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [exactly(each) for each in value]
    return type(value).__name__, value


@pytest.fixture(autouse=True)
def torch_platform() -> Iterator[None]:
    """A state of such objects does not say of which framework they are, and other tests import MindSpore."""
    hyper_ckpt.use("torch")
    yield
    hyper_ckpt.use(None)


def test_the_framework_must_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hyper_ckpt.save({"it": Holder({"w": torch.ones(2), "n": np.ones(2)})}, tmp_path / "c")
    hyper_ckpt.save({"it": Holder({"n": np.ones(2)})}, tmp_path / "n")
    hyper_ckpt.use(None)
    monkeypatch.setattr("hyper_ckpt.registry._is_imported", lambda spec: spec.name in ("torch", "mindspore"))
    target, arrays = Holder({}), Holder({})
    with pytest.raises(TargetError, match="mindspore and torch are imported: pass platform="):
        hyper_ckpt.load({"it": target}, tmp_path / "c")
    assert target.state == {}
    hyper_ckpt.load({"it": arrays}, tmp_path / "n")
    assert exactly(arrays.state) == exactly({"n": np.ones(2)})
    hyper_ckpt.load({"it": target}, tmp_path / "c", platform="numpy")
    assert exactly(target.state) == exactly({"w": np.ones(2, "f4"), "n": np.ones(2)})
    monkeypatch.setattr("hyper_ckpt.registry._is_imported", lambda spec: spec.name == "torch")
    again = Holder({})
    hyper_ckpt.load({"it": again}, tmp_path / "c")
    assert exactly(again.state) == exactly({"w": torch.ones(2), "n": np.ones(2)})


def saved_state() -> dict[str, Any]:
    twin = torch.arange(3.0)
    return {
        "z": [torch.ones(2), {"k": torch.zeros(())}],
        "a": (np.arange(3), None, "text"),
        "twins": [twin, twin],
        "empty": [torch.zeros(0, 3), {}],
        7: torch.ones(2, dtype=torch.bfloat16),
    }


TARGETS: dict[str, Callable[[], Any]] = {
    "empty": dict,
    "nothing": lambda: None,
    "a list": lambda: [torch.ones(1)],
    "other shapes": lambda: {"z": [torch.ones(9), {"k": torch.zeros(2)}], 7: torch.ones(2)},
    "more": lambda: {**saved_state(), "more": torch.ones(1), "z": [torch.ones(2)] * 5},
    "one tensor in two places": lambda: {"twins": [shared := torch.zeros(3), torch.zeros(3)], "z": [shared]},
    "the same": saved_state,
}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("strict", [True, False, "exact"])
def test_the_saved_structure_is_handed_over(kind: str, strict: Any, tmp_path: Path) -> None:
    hyper_ckpt.save({"it": Holder(saved_state())}, tmp_path / "c")
    target = Holder(TARGETS[kind]())
    report = hyper_ckpt.load({"it": target}, tmp_path / "c", strict=strict)
    assert exactly(target.state) == exactly(saved_state())
    assert target.state["twins"][0] is target.state["twins"][1] or kind in (
        "more",
        "the same",
        "one tensor in two places",
    )
    assert (report.unexpected, report.missing, report.mismatched, report.changed) == ((), (), (), ())


def test_tensors_that_fit_are_filled_where_they_are(tmp_path: Path) -> None:
    own = {"w": torch.zeros(2), "n": np.zeros(2), "other": torch.zeros(3)}
    hyper_ckpt.save({"it": Holder({"w": torch.ones(2), "n": np.ones(2), "other": torch.ones(4)})}, tmp_path / "c")
    target = Holder(dict(own))
    hyper_ckpt.load({"it": target}, tmp_path / "c")
    assert target.state["w"] is own["w"]
    assert target.state["n"] is own["n"]
    assert target.state["other"].tolist() == [1.0] * 4
    assert own["other"].tolist() == [0.0] * 3


def test_tensors_on_the_meta_device_are_made_anew(tmp_path: Path) -> None:
    hyper_ckpt.save({"it": Holder({"w": torch.ones(2)})}, tmp_path / "c")
    target = Holder({"w": torch.zeros(2, device="meta")})
    hyper_ckpt.load({"it": target}, tmp_path / "c")
    assert target.state["w"].tolist() == [1.0, 1.0]


def test_objects_inside_objects_are_still_objects(tmp_path: Path) -> None:
    def made(value: float) -> tuple[Holder, nn.Linear, Holder]:
        torch.manual_seed(int(value))
        model, inner = nn.Linear(2, 2), Holder({"rows": [torch.full((1,), value)] * int(value)})
        return Holder({"inner": inner, "model": model, "x": torch.full((2,), value)}), model, inner

    first, model, inner = made(3)
    second, fresh_model, fresh_inner = made(0)
    hyper_ckpt.save({"it": first}, tmp_path / "c")
    hyper_ckpt.load({"it": second}, tmp_path / "c", strict="exact")
    assert (second.state["inner"], second.state["model"]) == (fresh_inner, fresh_model)
    assert exactly(fresh_inner.state) == exactly(inner.state)
    assert torch.equal(fresh_model.weight, model.weight)
    del first.state["inner"]
    hyper_ckpt.save({"it": first}, tmp_path / "d")
    with pytest.raises(MissingKeyError, match="it/inner/rows"):
        hyper_ckpt.load({"it": second}, tmp_path / "d")
    other = Holder({"model": nn.Linear(2, 3), "x": torch.zeros(2)})
    with pytest.raises(ShapeMismatchError, match="it/model/weight"):
        hyper_ckpt.load({"it": other}, tmp_path / "d")
    assert other.state["x"].tolist() == [0.0, 0.0]


def test_a_module_inside_an_object_is_loaded_as_any_other(tmp_path: Path) -> None:
    hyper_ckpt.save({"it": Holder({"model": nn.Linear(2, 2), "n": 1})}, tmp_path / "c")
    target = Holder({"model": nn.Linear(2, 2, bias=False), "n": 0})
    with pytest.raises(UnexpectedKeyError, match="it/model/bias"):
        hyper_ckpt.load({"it": target}, tmp_path / "c", strict="exact")
    assert target.state["n"] == 0
    with pytest.warns(UserWarning, match="'it/model/bias'"):
        hyper_ckpt.load({"it": target}, tmp_path / "c")
    saved = hyper_ckpt.read(tmp_path / "c", platform="torch")["it"]
    assert torch.equal(target.state["model"].weight, saved["model"]["weight"])
    assert target.state["n"] == 1


class Extra(nn.Linear):
    """As fp8 layers do: tensors, or bytes, whose length depends on what was done."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [torch.arange(5), {"scales": [torch.ones(2)], "n": 3}, b"abc", None])
@pytest.mark.parametrize("own", [torch.arange(2), None, {"scales": []}])
def test_extra_state_comes_as_it_was_saved_and_weights_must_fit(extra: Any, own: Any, tmp_path: Path) -> None:
    first, second = (nn.Sequential(Extra(2, 2), nn.Linear(2, 2)) for _ in range(2))
    first[0].extra, second[0].extra = extra, own
    weight = second[0].weight
    hyper_ckpt.save({"model": first}, tmp_path / "c")
    hyper_ckpt.load({"model": second}, tmp_path / "c", strict="exact")
    assert exactly(second[0].extra) == exactly(extra)
    assert second[0].weight is weight
    assert torch.equal(weight, first[0].weight)
    larger = nn.Sequential(Extra(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(MissingKeyError, match=r"model/2\.weight"):
        hyper_ckpt.load({"model": larger}, tmp_path / "c")
    smaller = nn.Sequential(Extra(2, 2))
    with pytest.raises(UnexpectedKeyError, match=r"model/1\.weight"):
        hyper_ckpt.load({"model": smaller}, tmp_path / "c", strict="exact")
    with pytest.warns(UserWarning, match="2 saved values were not loaded"):
        hyper_ckpt.load({"model": smaller}, tmp_path / "c")
    assert torch.equal(smaller[0].weight, first[0].weight)


class Collects(nn.Module):
    """A metric as those of torchmetrics: a module with a list of tensors in its state."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.register_buffer("total", torch.tensor(float(count)))
        self.values = [torch.full((i,), float(i)) for i in range(count)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}values"] = self.values

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.values = state_dict.pop(f"{prefix}values")
        super()._load_from_state_dict(state_dict, prefix, *more)


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_list_in_a_module_comes_as_it_was_saved(count: int, tmp_path: Path) -> None:
    hyper_ckpt.save({"metrics": nn.ModuleDict({"a": Collects(4)})}, tmp_path / "c")
    target = nn.ModuleDict({"a": Collects(count)})
    hyper_ckpt.load({"metrics": target}, tmp_path / "c", strict="exact")
    assert exactly(target["a"].values) == exactly(Collects(4).values)
    assert target["a"].total == 4


def test_extra_state_of_a_module_that_has_none_is_unexpected(tmp_path: Path) -> None:
    first, plain = Extra(2, 2), nn.Linear(2, 2)
    first.extra = 5
    hyper_ckpt.save({"model": first}, tmp_path / "c")
    before = plain.weight.clone()
    with pytest.raises(UnexpectedKeyError, match="_extra_state"):
        hyper_ckpt.load({"model": plain}, tmp_path / "c", strict="exact")
    assert torch.equal(plain.weight, before)


def adam(*shapes: tuple[int, ...], groups: int = 1, steps: int = 2) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    chunks = [parameters[i::groups] for i in range(groups)]
    optimizer = torch.optim.Adam([{"params": chunk} for chunk in chunks], lr=0.5)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (lambda: adam((2,), (3,), groups=2, steps=0), "2 groups of 1, 1 parameters.*1 group of 2 parameters"),
        (lambda: adam((2,), steps=0), "1 group of 1 parameters.*1 group of 2 parameters"),
        (lambda: adam((3,), (2,), steps=0), r"'exp_avg' of parameter 0 has the shape \(2,\), the parameter \(3,\)"),
        (lambda: adam((3,), (2,)), r"'exp_avg' of parameter 0 has the shape \(2,\), the parameter \(3,\)"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused_before_anything_changes(
    target: Callable[[], Any], text: str, tmp_path: Path
) -> None:
    hyper_ckpt.save({"optimizer": adam((2,), (3,)), "w": torch.ones(2)}, tmp_path / "c")
    state = {"optimizer": target(), "w": torch.zeros(2)}
    with pytest.raises(TargetError, match=text):
        hyper_ckpt.load(state, tmp_path / "c")
    assert state["w"].tolist() == [0.0, 0.0]


def test_dtypes_that_an_optimizer_casts_are_put_back(tmp_path: Path) -> None:
    def made() -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.ones_like(parameter)
        return optimizer

    first, second = made(), made()
    first.step()
    (moments,) = first.state.values()
    moments["exp_avg"] = torch.tensor([1 / 3, float("nan"), 1e-20])
    hyper_ckpt.save({"optimizer": first}, tmp_path / "c")
    report = hyper_ckpt.load({"optimizer": second}, tmp_path / "c")
    (loaded,) = second.state.values()
    assert [value.dtype for value in loaded.values()] == [torch.float32, torch.float32, torch.bfloat16]
    assert loaded["exp_avg"].view(torch.int32).tolist() == moments["exp_avg"].view(torch.int32).tolist()
    assert report.changed == ()


class Halves(Holder):
    def load_state_dict(self, state: Any) -> None:
        self.state = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}


def test_dtypes_that_another_object_casts_are_reported(tmp_path: Path) -> None:
    hyper_ckpt.save({"it": Holder({"w": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)})}, tmp_path / "c")
    with pytest.warns(UserWarning, match="load_state_dict changed dtypes.*'it/w' was saved as float32.*float16"):
        report = hyper_ckpt.load({"it": Halves({})}, tmp_path / "c")
    assert len(report.changed) == 1


def test_a_manager_and_a_background_save(tmp_path: Path) -> None:
    with hyper_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"it": Holder(saved_state()), "mine": PerRank(Holder({"w": torch.ones(2)}))})
        fresh, mine = Holder({}), Holder({})
        manager.restore({"it": fresh, "mine": PerRank(mine)})
    assert exactly(fresh.state) == exactly(saved_state())
    assert exactly(mine.state) == exactly({"w": torch.ones(2)})
    hyper_ckpt.async_save({"it": Holder(saved_state())}, tmp_path / "a").result()
    again = Holder({})
    hyper_ckpt.load({"it": again}, tmp_path / "a")
    assert exactly(again.state) == exactly(saved_state())


def test_map_keys_moves_an_object_whole(tmp_path: Path) -> None:
    first, second, third = adam((2,)), adam((2,), steps=0), adam((2,), steps=0)
    hyper_ckpt.save({"opt": {"main": first}}, tmp_path / "c")

    def map_keys(name: str) -> str:
        return name.replace("optimizer", "opt/main")

    for target, keys in ((second, map_keys), (third, {"optimizer": "opt/main"})):
        options = hyper_ckpt.LoadOptions(map_keys=keys)
        hyper_ckpt.load({"optimizer": target}, tmp_path / "c", strict="exact", options=options)
        assert repr(target.state_dict()) == repr(first.state_dict())


class Sparing(hyper_ckpt.ItemLoadPlanner):
    def create_local_plan(self, tensors: Any, stored: Any, context: Any) -> hyper_ckpt.LoadPlan:
        items = super().create_local_plan(tensors, stored, context).items
        return hyper_ckpt.LoadPlan(tuple(item for item in items if item.index.fqn != "it/w"))


def test_a_planner_cannot_leave_out_what_an_object_lacks(tmp_path: Path) -> None:
    hyper_ckpt.save({"it": Holder({"w": torch.ones(2), "v": torch.ones(2)})}, tmp_path / "c")
    target = Holder({"v": torch.zeros(2)})
    with pytest.raises(PlanError, match="'it/w': the plan fills only a part"):
        hyper_ckpt.load({"it": target}, tmp_path / "c", planner=Sparing())
    assert exactly(target.state) == exactly({"v": torch.zeros(2)})
    has = Holder({"w": torch.zeros(2), "v": torch.zeros(2)})
    report = hyper_ckpt.load({"it": has}, tmp_path / "c", planner=Sparing())
    assert report.unfilled == ("it/w",)
    assert exactly(has.state) == exactly({"w": torch.zeros(2), "v": torch.ones(2)})


def test_what_is_no_state_of_an_object_is_refused(tmp_path: Path) -> None:
    hyper_ckpt.save({"it": 5}, tmp_path / "c")
    with pytest.raises(StateMismatchError, match="'it'"):
        hyper_ckpt.load({"it": Holder({"w": torch.ones(2)})}, tmp_path / "c")


class Buffer(Holder):
    """Makes what it lacks itself."""

    def make_state_tensor(self, missing: MissingTensor) -> Tensor | None:
        if missing.path == ("whole",):
            return None
        assert missing == MissingTensor(("rows", 0), "float32", (6, 2), "sharded")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return distribute_tensor(torch.zeros(missing.shape), mesh, [Shard(0)])


def sharded_rows(rank: int, world_size: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    rows = torch.arange(12.0).reshape(6, 2)
    whole = torch.arange(1 << 19).float()  # large enough to be written by both ranks
    it = {"rows": [distribute_tensor(rows, mesh, [Shard(0)])], "whole": whole}
    hyper_ckpt.save({"it": Holder(it)}, path)
    target = {"it": Holder({"whole": torch.zeros(1)}), "x": torch.zeros(1)}
    with pytest.raises(TargetError, match=r"'it/rows/0' was saved in parts of several ranks, and the Holder at 'it'"):
        hyper_ckpt.load({"it": target["it"]}, path, strict=False)
    assert target["it"].state["whole"].tolist() == [0.0]
    buffer = Buffer({})
    hyper_ckpt.load({"it": buffer}, path, strict="exact")
    assert isinstance(buffer.state["rows"][0], DTensor)
    assert torch.equal(buffer.state["rows"][0].full_tensor(), rows)
    assert torch.equal(buffer.state["whole"], whole)


def test_a_sharded_tensor_that_is_like_no_parameter_is_refused(gloo: Gloo, tmp_path: Path) -> None:
    gloo(sharded_rows, str(tmp_path / "c"), world_size=2)


class Talks(Holder):
    """An object whose state_dict and load_state_dict are collectives, as those of wrapped optimizers often are."""

    def state_dict(self) -> Any:
        dist.all_reduce(torch.full((self.state["size"],), 1.0))
        return self.state

    def load_state_dict(self, state: Any) -> None:
        dist.all_reduce(torch.full((state["size"],), 1.0))
        self.state = state


def talking(rank: int, world_size: int, path: str) -> list[str]:
    sizes = {"a": 2, "b": 3, "c": 5, "b/x": 7}
    names = [*sizes] if rank == 0 else [*reversed(sizes)]

    def state() -> dict[str, Any]:
        inner = {name: Talks({"size": sizes[name], "in": Talks({"size": sizes[name] + 10})}) for name in names}
        return {"deep": [inner, PerRank({name: Talks({"size": sizes[name] + 20}) for name in names})], **inner}

    hyper_ckpt.save(state(), path, overwrite=True)
    loaded = state()
    hyper_ckpt.load(loaded, path, strict="exact")
    return [*hyper_ckpt.read(path)["deep"][0]]


def test_objects_are_called_in_one_order_on_all_ranks(gloo: Gloo, tmp_path: Path) -> None:
    orders = gloo(talking, str(tmp_path / "c"), world_size=2)
    assert orders[0] == ["a", "b", "c", "b/x"], "keys keep the order in which they were saved"


def test_bytes_of_another_length(tmp_path: Path) -> None:
    """Older extra states are pickled into a BytesIO."""
    first, second = Extra(2, 2), Extra(2, 2)
    first.extra, second.extra = io.BytesIO(b"12345").getvalue(), b""
    hyper_ckpt.save({"model": first}, tmp_path / "c")
    hyper_ckpt.load({"model": second}, tmp_path / "c")
    assert second.extra == b"12345"


def changed_on_one_rank(rank: int, world_size: int, path: str) -> bool:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    hyper_ckpt.save({"optimizer": adam((2,)), "model": model}, path)
    target = {"optimizer": adam((2,) if rank == 0 else (3,), steps=0), "model": nn.Linear(4, 4)}
    before = target["model"].weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TargetError, match="rank 1"):
            hyper_ckpt.load(target, path)
    return torch.equal(before, target["model"].weight) and not target["optimizer"].state


def test_what_one_rank_refuses_changes_nothing_on_any(gloo: Gloo, tmp_path: Path) -> None:
    assert gloo(changed_on_one_rank, str(tmp_path / "c"), world_size=2) == [True, True]
