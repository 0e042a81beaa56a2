"""What the tests of torch.distributed.checkpoint ask of its calls, writers, readers and planners, and of optimizers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import hyper_ckpt
from hyper_ckpt import FileSystemReader, FileSystemWriter, StandardLoadPlanner, StandardSavePlanner
from hyper_ckpt.contracts.planner import PlanContext
from hyper_ckpt.description import Description
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DtypeMismatchError,
    MissingKeyError,
    ShapeMismatchError,
    UnsupportedStateError,
)

Gloo = Callable[..., list[Any]]


def test_a_state_with_nothing_in_it(tmp_path: Path) -> None:
    hyper_ckpt.save({}, tmp_path / "c")
    assert hyper_ckpt.load({}, tmp_path / "c").loaded == ()
    hyper_ckpt.save({}, tmp_path / "alone", no_dist=True)
    hyper_ckpt.load({}, tmp_path / "alone", no_dist=True)


def test_paths_of_calls_writers_and_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = FileSystemWriter("first")
    hyper_ckpt.save({"w": torch.ones(2)}, storage_writer=writer)
    hyper_ckpt.save({"w": torch.full((2,), 2.0)}, "second", storage_writer=writer)  # the call's path wins
    for path, value in (("first", 1.0), ("second", 2.0)):
        by_path, by_reader = {"w": torch.zeros(2)}, {"w": torch.zeros(2)}
        hyper_ckpt.load(by_path, path)
        hyper_ckpt.load(by_reader, path, storage_reader=FileSystemReader("first"))
        assert by_path["w"].tolist() == by_reader["w"].tolist() == [value] * 2
    with pytest.raises(ValueError, match="checkpoint_id"):
        hyper_ckpt.save({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="checkpoint_id"):
        hyper_ckpt.load({"w": torch.ones(2)}, storage_reader=None)
    with pytest.raises(CheckpointNotFoundError):
        hyper_ckpt.load({"w": torch.ones(2)}, "third")


def test_a_path_that_is_taken(tmp_path: Path) -> None:
    hyper_ckpt.save({"w": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        hyper_ckpt.save({"w": torch.zeros(2)}, tmp_path / "c")
    hyper_ckpt.save({"other": torch.zeros(3)}, tmp_path / "c", overwrite=True)
    assert [*hyper_ckpt.read_metadata(tmp_path / "c").state_dict_metadata] == ["other"]


class Counter:
    """An object with a state of its own, which must be told and not replaced."""

    def __init__(self, value: float) -> None:
        self.data, self.calls = torch.full((3, 3), value), 0

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data, self.calls = state["data"], self.calls + 1


def test_nested_states_and_objects(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {
            "nested": {"list": [torch.full((2,), value), {"deep": torch.full((1,), value)}], 5: {"n": value}},
            "tuple": (torch.full((2, 2), value), "text"),
            "bytes": [1, 2, 3, int(value)],
            "object": Counter(value),
        }

    first, second = state(7.0), state(0.0)
    counter, tensor = second["object"], second["nested"]["list"][0]
    hyper_ckpt.save(first, tmp_path / "c")
    hyper_ckpt.load(second, tmp_path / "c", strict="exact")
    assert second["object"] is counter
    assert counter.calls == 1
    assert second["nested"]["list"][0] is tensor
    assert tensor.tolist() == [7.0, 7.0]
    assert (second["bytes"], second["nested"][5]["n"], counter.data[0, 0].item()) == ([1, 2, 3, 7], 7.0, 7.0)
    assert second["tuple"][0].tolist() == [[7.0, 7.0]] * 2


def test_views_strides_and_dtypes(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    kinds = (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    saved = {"transposed": base.t(), "slice": base[1:3, ::2], "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    saved |= {str(kind): torch.tensor([1, 0, 1]).to(kind) for kind in kinds}
    hyper_ckpt.save(saved, tmp_path / "c")
    target = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in saved.items()}
    target["transposed"] = torch.zeros(4, 6).t()
    hyper_ckpt.load(target, tmp_path / "c")
    for name, each in saved.items():
        assert torch.equal(target[name].view(each.shape).to(torch.complex64), each.to(torch.complex64)), name
    with pytest.raises(UnsupportedStateError):
        hyper_ckpt.save({"sparse": torch.eye(3).to_sparse()}, tmp_path / "sparse")


def test_what_does_not_fit(tmp_path: Path) -> None:
    hyper_ckpt.save({"w": torch.ones(4), "b": torch.ones(2)}, tmp_path / "c")
    for wrong, error in (
        ({"w": torch.zeros(5)}, ShapeMismatchError),
        ({"w": torch.zeros(4, dtype=torch.float64)}, DtypeMismatchError),
        ({"w": torch.zeros(4), "new": torch.zeros(1)}, MissingKeyError),
    ):
        with pytest.raises(error):
            hyper_ckpt.load(wrong, tmp_path / "c")
        assert not wrong["w"].any(), "nothing was loaded"
    target = {"w": torch.zeros(4), "new": torch.full((1,), 9.0)}
    report = hyper_ckpt.load(target, tmp_path / "c", strict=False)
    assert (report.loaded, report.missing, target["new"].item()) == (("w",), ("new",), 9.0)
    assert target["w"].tolist() == [1.0] * 4


def other_order(rank: int, world_size: int, path: str) -> None:
    """Keys, tensors and objects in another order on each rank."""
    names = [f"key-{i}" for i in range(5)]
    names = names[rank:] + names[:rank]
    state = {name: torch.full((3,), float(name[-1])) for name in names}
    hyper_ckpt.save({**state, "nested": {name: int(name[-1]) for name in names}}, path)
    target: dict[str, Any] = {name: torch.zeros(3) for name in reversed(names)}
    target["nested"] = dict.fromkeys(names, -1)
    hyper_ckpt.load(target, path, strict="exact")
    assert all(target[name].tolist() == [float(name[-1])] * 3 for name in names)
    assert target["nested"] == {name: int(name[-1]) for name in names}


def test_keys_in_another_order_on_each_rank(gloo: Gloo, tmp_path: Path) -> None:
    gloo(other_order, str(tmp_path / "c"), world_size=4)


class FaultyPlanner(StandardSavePlanner):
    def build_local_plan(self, tensors: Mapping[str, Any], skeleton: bytes, context: PlanContext) -> Description:
        if context.rank == 1:
            raise ValueError("planned to fail")
        return super().build_local_plan(tensors, skeleton, context)


class FaultyWriter(FileSystemWriter):
    def place(self, columns: Any, save_id: str) -> Any:
        raise RuntimeError("placed to fail")


class FaultyReader(FileSystemReader):
    def locate(self, manifest: Any, columns: Any, rank: int) -> Any:
        if rank == 1:
            raise RuntimeError("read to fail")
        return super().locate(manifest, columns, rank)


class FaultyLoadPlanner(StandardLoadPlanner):
    def apply_tensor(self, name: str, tensor: Any) -> Any:
        raise RuntimeError("applied to fail")


def with_faults(rank: int, world_size: int, path: str) -> list[str]:
    """Every rank gets the same error, whichever rank fails; nothing is published, and the next call works."""
    outcomes = []
    state = {"w": torch.ones(2), f"own-{rank}": torch.ones(1)}
    hyper_ckpt.save(state, f"{path}/good")
    for number, call in enumerate(
        (
            lambda at: hyper_ckpt.save(state, at, planner=FaultyPlanner()),
            lambda at: hyper_ckpt.save(state, at, storage_writer=FaultyWriter()),
            lambda at: hyper_ckpt.async_save(state, at, planner=FaultyPlanner()).result(),
            lambda at: hyper_ckpt.load(dict(state), f"{path}/good", storage_reader=FaultyReader()),
            lambda at: hyper_ckpt.load(dict(state), f"{path}/good", planner=FaultyLoadPlanner()),
        )
    ):
        try:
            call(f"{path}/bad-{number}")
            outcomes.append("nothing")
        except CheckpointError as error:
            outcomes.append(f"CheckpointError: {'to fail' in str(error)}")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {'to fail' in str(error)}")
        assert not (Path(path) / f"bad-{number}" / "manifest.json").exists()
    hyper_ckpt.save(state, f"{path}/after")
    hyper_ckpt.load(state, f"{path}/after")
    return outcomes


def test_faults_of_one_rank_are_all_ranks(gloo: Gloo, tmp_path: Path) -> None:
    outcomes = gloo(with_faults, str(tmp_path), world_size=2)
    assert outcomes[0] == outcomes[1]
    assert all(text.endswith("True") for text in outcomes[0]), outcomes


def test_states_of_one_after_the_other(tmp_path: Path) -> None:
    """What changes after an asynchronous save has returned is not in it."""
    state = {"w": torch.zeros(1000)}
    handles = []
    for step in range(3):
        state["w"].fill_(step)
        handles.append(hyper_ckpt.async_save(state, tmp_path / f"c-{step}"))
    state["w"].fill_(-1)
    for step, handle in enumerate(handles):
        handle.result()
        assert hyper_ckpt.read(tmp_path / f"c-{step}", platform="torch")["w"].unique().tolist() == [step]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen, self.unused = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.body(x))


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "subset"])
def test_optimizers_with_state_for_some_parameters(tmp_path: Path, kind: str, flatten: bool) -> None:
    """Without any state, with frozen parameters, with such that never got a gradient, and of some parameters only."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Net()
        parameters = [*(model.body if kind == "subset" else model).parameters()]
        if kind in ("adam", "subset"):
            return model, torch.optim.Adam(parameters, lr=0.1)
        return model, torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if kind == "momentum" else 0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    first, second = make(0), make(1)
    step(*first)
    step(*second)
    hyper_ckpt.save(
        {"m": get_model_state_dict(first[0]), "o": get_optimizer_state_dict(*first, options=options)}, tmp_path / "c"
    )
    target = {"m": get_model_state_dict(second[0]), "o": get_optimizer_state_dict(*second, options=options)}
    hyper_ckpt.load(target, tmp_path / "c", strict="exact")
    set_model_state_dict(second[0], target["m"])
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=False)  # torch misses the unused one's
    set_optimizer_state_dict(*second, target["o"], options=options)
    own = [{**each.state_dict()["state"]} for _, each in (first, second)]
    for number, values in own[0].items():
        assert all(torch.equal(value, own[1][number][name]) for name, value in values.items() if value is not None)
