"""Values converted on load are those that torch's own `.to(dtype)` gives."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hyper_ckpt
from hyper_ckpt.options import LoadOptions
from hyper_ckpt_torch.tensors import bits

CAST = LoadOptions(cast=True)
FLOATS = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def arbitrary(dtype: torch.dtype) -> torch.Tensor:
    """Arbitrary bits, and values about where narrow dtypes round, overflow and end."""
    rng = np.random.default_rng(0)
    raw = torch.from_numpy(rng.integers(0, 256, 4096 * dtype.itemsize, np.uint8)).view(dtype)
    scales = [1.0, 1e-5, 1e-40, 400.0, 60_000.0]
    near = torch.cat([torch.from_numpy(rng.normal(size=2000) * scale) for scale in scales])
    halves = 1 + torch.arange(512, dtype=torch.float64) * 2.0**-12 + rng.normal(size=512) * 1e-13
    return torch.cat([raw, near.to(dtype), halves.to(dtype)])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits, but for those of a nan: torch's own differ with the place of an element in a vector."""
    nan = one.to(torch.float64).isnan()
    equal = torch.equal(nan, other.to(torch.float64).isnan())
    return equal and one.dtype == other.dtype and torch.equal(bits(one)[~nan], bits(other)[~nan])


@pytest.mark.parametrize(("dtype", "to"), [*itertools.permutations(FLOATS, 2)])
def test_as_torch_converts(tmp_path: Path, dtype: torch.dtype, to: torch.dtype) -> None:
    saved = arbitrary(dtype)
    hyper_ckpt.save({"w": saved}, tmp_path / "c")
    target = {"w": torch.zeros(len(saved), dtype=to)}
    report = hyper_ckpt.load(target, tmp_path / "c", options=CAST)
    assert same(target["w"], saved.to(to))
    assert report.cast == {"w": (str(dtype).removeprefix("torch."), str(to).removeprefix("torch."))}


@pytest.mark.parametrize(("dtype", "to"), [(torch.complex64, torch.complex128), (torch.uint16, torch.int64)])
def test_other_kinds(tmp_path: Path, dtype: torch.dtype, to: torch.dtype) -> None:
    saved = torch.tensor([1, 2, 300]).to(dtype)
    hyper_ckpt.save({"w": saved}, tmp_path / "c")
    target = {"w": torch.zeros(3, dtype=to)}
    hyper_ckpt.load(target, tmp_path / "c", options=CAST)
    assert torch.equal(target["w"], saved.to(to))


def test_a_module_in_bfloat16_into_one_in_float32(tmp_path: Path) -> None:
    saved, fresh = nn.Linear(64, 32).to(torch.bfloat16), nn.Linear(64, 32)
    hyper_ckpt.save({"model": saved}, tmp_path / "c")
    hyper_ckpt.load({"model": fresh}, tmp_path / "c", options=CAST)
    for one, other in zip(saved.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.float(), other)


def masters(rank: int, world_size: int, path: str, share: bool) -> bool:
    net = nn.Sequential(nn.Linear(33, 7), nn.Linear(7, 65))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "shard")))
    saved = hyper_ckpt.read(path, platform="torch")["model"]
    report = hyper_ckpt.load({"model": net.state_dict()}, path, options=CAST, share_reads=share)
    assert len(report.cast) == 4
    assert report.shared_reads == share
    return all(torch.equal(p.full_tensor(), saved[name].float()) for name, p in net.named_parameters())


@pytest.mark.parametrize("share", [True, False])
def test_bfloat16_files_into_float32_masters_of_fsdp(gloo, tmp_path: Path, share: bool) -> None:
    path = str(tmp_path / "c")
    net = nn.Sequential(nn.Linear(33, 7), nn.Linear(7, 65)).to(torch.bfloat16)
    hyper_ckpt.save({"model": net.state_dict()}, path)
    assert gloo(masters, path, share) == [True] * 4
