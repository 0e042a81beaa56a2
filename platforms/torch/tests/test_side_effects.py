"""A save or load leaves no trace in the job: not in storages, not in the default device's way."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hyper_ckpt
from hyper_ckpt.contracts.platform import LocalShard
from hyper_ckpt.errors import UnsupportedStateError
from hyper_ckpt_torch.tensors import TorchTensors

Gloo = Callable[..., list[Any]]


def test_storages_can_still_be_resized(tmp_path: Path) -> None:
    """FSDP frees and regains storages: `tensor.numpy()` would forbid that for good."""
    tensor = torch.arange(4.0)
    hyper_ckpt.save({"t": tensor}, tmp_path / "c")
    hyper_ckpt.load({"t": tensor}, tmp_path / "c")
    tensor.untyped_storage().resize_(64)
    assert tensor.resize_(8)[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_view_keeps_its_tensor() -> None:
    tensors = TorchTensors((0,))
    conjugate = torch.full((100_000,), 1 + 2j).conj()
    view = tensors.host_view(LocalShard((0,), (100_000,), conjugate))  # of a resolved copy that nobody else holds
    del conjugate
    gc.collect()
    torch.zeros(100_000, dtype=torch.complex64)
    assert view is not None
    assert (view == np.complex64(1 - 2j)).all()


def round_trip_on(rank: int, world_size: int, path: str, device: str) -> None:
    state = {"t": torch.arange(12.0).reshape(3, 4).t(), "r": torch.ones(3)}
    target = {"t": torch.zeros(4, 3), "r": torch.zeros(3)}
    with torch.device(device):
        hyper_ckpt.save(state, path)
        hyper_ckpt.load(target, path)
    assert torch.equal(target["t"], state["t"])
    assert torch.equal(target["r"], state["r"])


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_default_device(gloo: Gloo, tmp_path: Path, ranks: int) -> None:
    gloo(round_trip_on, str(tmp_path / "c"), "meta", world_size=ranks)


def test_a_tied_model_on_the_meta_device_stays_tied(tmp_path: Path) -> None:
    def tied() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    hyper_ckpt.save({"model": tied().state_dict()}, tmp_path / "c")
    with torch.device("meta"):
        model = tied()
    state = {"model": model.state_dict()}
    hyper_ckpt.load(state, tmp_path / "c")
    assert state["model"]["0.weight"] is state["model"]["1.weight"]


def test_an_object_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    hyper_ckpt.save({"m": torch.nn.Linear(2, 2)}, tmp_path / "c")
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(hyper_ckpt.errors.TargetError, match=r"'m/bias' has no memory"):
        hyper_ckpt.load({"m": module}, tmp_path / "c")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_no_data_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match=r"'model/bias'.*meta device"):
        hyper_ckpt.save({"model": torch.nn.Linear(2, 2, device="meta").state_dict()}, tmp_path / "c")
    with pytest.raises(UnsupportedStateError, match=r"'n'.*nested"):
        hyper_ckpt.save({"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, tmp_path / "c")


class Fused(torch.nn.Module):
    """A fused parameter, and buffers that are views of its parts."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(first + torch.arange(12.0).reshape(6, 2))
        for i, name in enumerate("qkv"):
            self.register_buffer(f"w_{name}", self.qkv.data[2 * i : 2 * i + 2])
        self.register_buffer("bits", self.qkv.data.view(torch.int32)[1:])


def test_views_of_one_parameter_load_into_the_same(tmp_path):
    saved, fresh = Fused(0), Fused(100)
    hyper_ckpt.save({"m": saved}, tmp_path / "c")
    hyper_ckpt.load({"m": fresh}, tmp_path / "c")
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in fresh.state_dict().items())
    with torch.no_grad():
        saved.w_q = saved.w_q + 1
    hyper_ckpt.save({"m": saved}, tmp_path / "d")
    before = fresh.qkv.detach().clone()
    with pytest.raises(hyper_ckpt.errors.TargetError, match="different values were saved"):
        hyper_ckpt.load({"m": fresh}, tmp_path / "d")
    assert torch.equal(fresh.qkv, before)
