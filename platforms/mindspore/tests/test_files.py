"""Data files open in MindSpore itself, where its reader knows all dtypes in them."""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import hyper_ckpt
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt_mindspore.probe import Probe

KNOWN = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64"}
READABLE = [name for name, row in BY_NAME.items() if row.code in KNOWN and not row.stored_as_bytes]


def codes(path: Path) -> set[str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def test_every_dtype_that_mindspore_reads(tmp_path):
    probe = Probe()
    rng = np.random.default_rng(0)
    saved = {}
    for dtype in READABLE:
        for shape in [(3, 5), (), (1,), (0, 2)]:
            n = int(np.prod(shape)) * BY_NAME[dtype].itemsize
            data = rng.integers(0, 2 if dtype == "bool" else 256, n, np.uint8).tobytes()
            saved[f"{dtype}.{len(shape)}{shape[:1]}"] = (dtype, probe.make(dtype, shape, data), data)
    metadata = hyper_ckpt.save({name: value for name, (_, value, _) in saved.items()}, tmp_path / "c")
    for name, (_, value, data) in saved.items():
        if not data:
            continue
        ((_, place),) = metadata.storage_data[name]
        loaded = ms.load_checkpoint(str(tmp_path / "c" / place.relative_path), format="safetensors")
        assert loaded[name].dtype == value.dtype
        assert tuple(loaded[name].shape) == tuple(value.shape)
        assert probe.raw(loaded[name]) == data, name


def test_a_network_and_its_optimizer_load_without_this_library(tmp_path):
    net = nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4), nn.Dense(4, 2))
    hyper_ckpt.save({**net.parameters_dict(), "epoch": 3, "note": "x" * 100_000}, tmp_path / "c")
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert files
    assert all(codes(file) <= KNOWN for file in files)
    parameters = {}
    for file in files:
        parameters |= ms.load_checkpoint(str(file), format="safetensors")
    fresh = nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4), nn.Dense(4, 2))
    missing, _ = ms.load_param_into_net(fresh, parameters)
    assert missing == []
    for name, value in net.parameters_dict().items():
        assert np.array_equal(fresh.parameters_dict()[name].asnumpy(), value.asnumpy()), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_files_of_several_ranks(mccl, tmp_path, ranks):
    path = tmp_path / "c"
    mccl(save_some, str(path), world_size=ranks)
    found = {}
    files = sorted(path.glob("*.safetensors"))
    assert len(files) == ranks
    for file in files:
        assert codes(file) <= KNOWN
        found |= ms.load_checkpoint(str(file), format="safetensors")
    assert {name.split("@")[0] for name in found} >= {"w", "half", "flags"}


def save_some(rank: int, world_size: int, path: str) -> None:
    import mccl_world

    from hyper_ckpt_mindspore.platform import MindSporePlatform

    state = {
        "w": hyper_ckpt.ShardedTensor(
            [(ms.Tensor(np.full((2, 3), rank, np.float32)), (2 * rank, 0))], (2 * world_size, 3)
        ),
        "half": ms.Tensor(np.ones((500, 500 * world_size), np.float16)),
        "flags": ms.Tensor(np.array([True, False])),
    }
    hyper_ckpt.save(state, path, platform=MindSporePlatform(mccl_world.group(world_size)))
