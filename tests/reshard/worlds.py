"""Saving in one world and loading in another, with everything compared as raw bytes."""

import itertools
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

import hyper_ckpt
from hyper_ckpt.box import cut, uncovered
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.dtypes import BY_NAME, numpy_dtype
from hyper_ckpt.layout import Mesh, MeshLayout, Shard
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.filesystem import FileSystemReader
from hyper_ckpt.testing.meshed import Meshed, meshed_platform
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import ShardedTensor

State = dict[Any, Any]
OfRank = Callable[[int], State]


def fresh() -> str:
    """A place for one checkpoint."""
    return f"memory://tests/{uuid.uuid4().hex}"


def filled(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """An array of arbitrary bits, nans included."""
    row = BY_NAME[dtype]
    count = int(np.prod(shape, dtype=np.int64)) * row.itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype == "bool":
        data &= 1
    elif dtype in ("int4", "uint4"):
        data &= 15
    return data.view(row.carrier).view(numpy_dtype(dtype)).reshape(shape)


def poisoned(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """An array that no saved one is equal to."""
    array = np.empty(shape, numpy_dtype(dtype))
    array.reshape(-1).view(np.uint8)[...] = 1 if dtype == "bool" else 9
    return array


def raw(array: Any) -> tuple[Any, ...]:
    return array.dtype.name, array.shape, array.tobytes()


def save_on(world_size: int, of_rank: OfRank, url: str, **options: Any) -> list[hyper_ckpt.Metadata]:
    def job(platform: Platform) -> hyper_ckpt.Metadata:
        return hyper_ckpt.save(of_rank(platform.ranks.rank), url, platform=platform, timeout=30, **options)

    return run_world(world_size, job, platform=meshed_platform)


def load_on(
    world_size: int, of_rank: OfRank, url: str, **options: Any
) -> tuple[list[State], list[hyper_ckpt.LoadReport]]:
    def job(platform: Platform) -> tuple[State, hyper_ckpt.LoadReport]:
        target = of_rank(platform.ranks.rank)
        report = hyper_ckpt.load(target, url, platform=platform, timeout=30, **options)
        return target, report

    results = run_world(world_size, job, platform=meshed_platform)
    return [r[0] for r in results], [r[1] for r in results]


def manifest_of(url: str) -> Manifest:
    return FileSystemReader().load_metadata(registry().store(url))


def pieces_of(value: Any) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """(offsets, array) for every box of a tensor on one rank."""
    if isinstance(value, ShardedTensor):
        return [(tuple(offsets), data) for data, offsets in value.shards]
    if isinstance(value, Meshed):
        return [] if value.box is None else [(value.box[0], value.local)]
    return [((0,) * value.ndim, value)]


def check_filled(states: list[State], whole: dict[str, np.ndarray]) -> None:
    """Every box of every rank holds what the whole tensor has there."""
    for rank, state in enumerate(states):
        for name, value in state.items():
            for offsets, data in pieces_of(value):
                assert raw(data) == raw(cut(whole[name], offsets, data.shape)), (rank, name, offsets)


def check_stored_once(url: str, whole: dict[str, np.ndarray]) -> None:
    """Every element of every tensor is stored exactly once, and nothing else is."""
    manifest = manifest_of(url)
    assert set(manifest.tensors) == set(whole)
    used: dict[int, list[tuple[int, int]]] = {}
    for name, array in whole.items():
        stored = manifest.tensor(name)
        assert (stored.dtype, stored.shape) == (array.dtype.name, array.shape)
        (chunks,) = stored.copies
        width = max(array.ndim, 1)
        offsets, sizes = np.zeros((len(chunks.file), width), np.int64), np.ones((len(chunks.file), width), np.int64)
        offsets[:, : array.ndim], sizes[:, : array.ndim] = chunks.offsets, chunks.sizes
        shape = np.ones((1, width), np.int64)
        shape[0, : array.ndim] = array.shape
        assert not len(uncovered(np.zeros(len(offsets), np.int64), offsets, sizes, shape)), name
        for file, start, size in zip(chunks.file.tolist(), chunks.start.tolist(), sizes, strict=True):
            used.setdefault(file, []).append((start, start + int(np.prod(size)) * array.itemsize))
    for number, record in enumerate(manifest.files):
        ends = [0, *itertools.chain.from_iterable(sorted(used.get(number, []))), record.size - record.data_start]
        assert ends[::2] == ends[1::2], f"{record.name}: {ends}"


def read_back(url: str, whole: dict[str, np.ndarray]) -> None:
    """`read` and `verify` see the same, without any layout."""
    assert hyper_ckpt.verify(url).ok
    state = hyper_ckpt.read(url)
    assert {name: raw(value) for name, value in state.items()} == {name: raw(value) for name, value in whole.items()}


def by_rows(world_size: int) -> MeshLayout:
    """Rows shared out over all ranks."""
    return MeshLayout(Mesh((world_size,), tuple(range(world_size))), (Shard(0),))
