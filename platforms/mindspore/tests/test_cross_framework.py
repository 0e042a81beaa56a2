"""One checkpoint for both frameworks: torch on 4 ranks, MindSpore on 2, torch on 3; raw bytes equal at each step."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt.testing.child import Target
from hyper_ckpt.testing.pool import RankPool

GLOO_WORLD = str(Path(__file__).parents[2] / "torch" / "tests" / "gloo_world.py")
# Those that tensors of both frameworks have.
DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
# Divides by 2 for MindSpore, by neither 4 nor 3: torch has shards of several sizes.
SHAPE = (10, 6)
WHOLE = {"scalar": (), "empty": (0, 3), "vector": (7,)}


def content(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    high = 2 if dtype == "bool" else 256
    rng = np.random.default_rng(sum(map(ord, name + dtype)))
    return rng.integers(0, high, math.prod(shape) * BY_NAME[dtype].itemsize, np.uint8).tobytes()


def rows(dtype: str, start: int, end: int) -> bytes:
    whole = np.frombuffer(content("sharded", dtype, SHAPE), BY_NAME[dtype].carrier).reshape(SHAPE)
    return whole[start:end].tobytes()


def columns(dtype: str, start: int, end: int) -> bytes:
    whole = np.frombuffer(content("sharded", dtype, SHAPE), BY_NAME[dtype].carrier).reshape(SHAPE)
    return np.ascontiguousarray(whole[:, start:end]).tobytes()


def torch_tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    import torch

    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


def torch_state(rank: int, world_size: int, *, zero: bool) -> tuple[dict[str, Any], Callable[[], bool]]:
    """FSDP2's weights and a sharded tensor of every dtype, and what says whether all is as it should be."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world_size,))
    net = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    with torch.no_grad():
        net.weight.copy_(torch_tensor("float32", SHAPE, content("sharded", "float32", SHAPE)))
        net.weight.mul_(not zero)
    fully_shard(net, mesh=mesh)
    piece = -(-SHAPE[0] // world_size)
    start, end = min(rank * piece, SHAPE[0]), min((rank + 1) * piece, SHAPE[0])

    def made(data: bytes) -> bytes:
        return bytes(len(data)) if zero else data

    local = {t: torch_tensor(t, (end - start, SHAPE[1]), made(rows(t, start, end))) for t in DTYPES}
    sharded = {
        t: DTensor.from_local(local[t], mesh, [Shard(0)], run_check=False, shape=SHAPE, stride=(SHAPE[1], 1))
        for t in DTYPES
    }
    whole = {f"{t}.{n}": torch_tensor(t, s, made(content(n, t, s))) for t in DTYPES for n, s in WHOLE.items()}

    def right() -> bool:
        def raw(tensor: Any) -> bytes:
            return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

        assert raw(net.weight.to_local()) == rows("float32", start, end)
        assert all(raw(local[t]) == rows(t, start, end) for t in DTYPES)
        return all(raw(whole[f"{t}.{n}"]) == content(n, t, s) for t in DTYPES for n, s in WHOLE.items())

    return {"net": net.state_dict(), "sharded": sharded, "whole": whole, "step": 0 if zero else 5}, right


def torch_saves(rank: int, world_size: int, path: str) -> None:
    state, right = torch_state(rank, world_size, zero=False)
    assert right()
    hyper_ckpt.save(state, path)


def torch_loads(rank: int, world_size: int, path: str) -> tuple[bool, int]:
    state, right = torch_state(rank, world_size, zero=True)
    hyper_ckpt.load(state, path, strict="exact")
    return right(), state["step"]


def mindspore_between(rank: int, world_size: int, path: str, to: str) -> bool:
    """Loads what torch saved into parameters cut along columns, compares, and saves it again."""
    import mccl_world
    import mindspore as ms

    from hyper_ckpt_mindspore.platform import MindSporePlatform
    from hyper_ckpt_mindspore.probe import Probe

    probe, width = Probe(), SHAPE[1] // world_size
    layout = ms.parallel.Layout((world_size,), ("cut",))("None", "cut")
    platform = MindSporePlatform(
        mccl_world.group(world_size), layouts={"net.weight": layout, **dict.fromkeys(DTYPES, layout)}
    )

    def cut(dtype: str, name: str) -> Any:
        value = probe.make(dtype, (SHAPE[0], width), bytes(SHAPE[0] * width * BY_NAME[dtype].itemsize))
        if dtype.startswith("float8"):  # MindSpore has no Parameter of these on the CPU
            return hyper_ckpt.ShardedTensor([(value, (0, rank * width))], SHAPE)
        return ms.Parameter(value, name=name)

    state = {
        "net": {"weight": cut("float32", "net.weight")},
        "sharded": {dtype: cut(dtype, dtype) for dtype in DTYPES},
        "whole": {f"{t}.{n}": probe.make(t, s, bytes(len(content(n, t, s)))) for t in DTYPES for n, s in WHOLE.items()},
        "step": 0,
    }
    hyper_ckpt.load(state, path, platform=platform, strict="exact")
    for dtype in DTYPES:
        value = state["sharded"][dtype]
        value = value.shards[0][0] if isinstance(value, hyper_ckpt.ShardedTensor) else value
        assert probe.raw(value) == columns(dtype, rank * width, (rank + 1) * width), dtype
        for name, shape in WHOLE.items():
            assert probe.raw(state["whole"][f"{dtype}.{name}"]) == content(name, dtype, shape), (dtype, name)
    assert probe.raw(state["net"]["weight"]) == columns("float32", rank * width, (rank + 1) * width)
    assert state["step"] == 5
    hyper_ckpt.save(state, to, platform=platform)
    return True


def import_torch(rank: int, world_size: int) -> None:
    import torch.distributed.fsdp  # noqa: F401


@pytest.fixture(scope="module")
def torch_pool() -> Iterator[RankPool]:
    pytest.importorskip("torch")
    with RankPool(4) as pool:
        pool.run(import_torch)
        yield pool


def test_torch_to_mindspore_to_torch(torch_pool: RankPool, mccl: Any, tmp_path: Path) -> None:
    def gloo(function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        store, target = str(tmp_path / f"store-{function.__name__}"), Target.of(function)
        return torch_pool.run(f"{GLOO_WORLD}:run", store, target, args, world_size=world_size, timeout=40.0)

    first, second = str(tmp_path / "by torch"), str(tmp_path / "by mindspore")
    gloo(torch_saves, first, world_size=4)
    assert mccl(mindspore_between, first, second, world_size=2) == [True, True]
    assert gloo(torch_loads, second, world_size=3) == [(True, 5)] * 3
    one, other = hyper_ckpt.read(first), hyper_ckpt.read(second)
    for part in ("net", "sharded", "whole"):
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert value.dtype == other[part][name].dtype
            assert value.tobytes() == other[part][name].tobytes()
