"""How many bytes are read, counted at the store."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import ShardedTensor
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.receipt import BLOCK_BYTES
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.world import run_world


class Counter:
    """Bytes that were read of data files and of records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = self.records = 0
        lock, read_into, read = threading.Lock(), LocalStore.read_into, LocalStore.read

        def counted_into(store: Any, name: str, ranges: Any, buffers: Any) -> None:
            read_into(store, name, ranges, buffers)
            with lock:
                if name.endswith(".safetensors"):
                    self.data += sum(length for _, length in ranges)
                else:
                    self.records += sum(length for _, length in ranges)

        def counted(store: Any, name: str) -> bytes:
            found = read(store, name)
            with lock:
                self.records += len(found)
            return found

        monkeypatch.setattr(LocalStore, "read_into", counted_into)
        monkeypatch.setattr(LocalStore, "reader", ByteStore.reader)  # by read_into
        monkeypatch.setattr(LocalStore, "read", counted)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


@pytest.mark.parametrize(("verify", "blocks"), [("off", 0), ("during", 2)])
def test_one_row_of_a_large_tensor(tmp_path: Path, counter: Counter, verify: Any, blocks: int) -> None:
    whole = np.arange(4096 * 1024, dtype="f4").reshape(4096, 1024)
    hyper_ckpt.save({"w": whole}, tmp_path / "c", no_dist=True)
    records = sum(
        f.stat().st_size for f in [tmp_path / "c" / "manifest.json", *(tmp_path / "c" / "receipts").iterdir()]
    )
    (file,) = (tmp_path / "c").glob("*.safetensors")
    header = file.stat().st_size - whole.nbytes
    for row in (0, 1777, 4095):
        counter.data = counter.records = 0
        target = {"w": ShardedTensor([(np.zeros((1, 1024), "f4"), (row, 0))], whole.shape)}
        hyper_ckpt.load(target, tmp_path / "c", no_dist=True, verify=verify)
        assert np.array_equal(target["w"].shards[0][0][0], whole[row])
        assert counter.data <= 4096 + header + blocks * BLOCK_BYTES
        assert counter.records <= records


@pytest.mark.parametrize("world", [2, 4])
def test_a_replicated_tensor_is_read_once(tmp_path: Path, counter: Counter, world: int) -> None:
    whole = np.arange(1 << 20, dtype="f8")
    hyper_ckpt.save({"w": whole}, tmp_path / "c", no_dist=True)

    def job(platform: Platform) -> None:
        target = {"w": np.zeros_like(whole)}
        hyper_ckpt.load(target, tmp_path / "c", platform=platform, share_reads=True, timeout=30)
        assert np.array_equal(target["w"], whole)

    run_world(world, job)
    assert whole.nbytes <= counter.data <= 1.05 * whole.nbytes


@pytest.mark.parametrize("world", [2, 3, 6])
def test_as_many_bytes_as_are_needed_in_another_world(tmp_path: Path, counter: Counter, world: int) -> None:
    whole = {"a": np.arange(37 * 50, dtype="f4").reshape(37, 50), "b": np.arange(13.0)}

    def shards(array: Any, rank: int, size: int, fill: bool) -> ShardedTensor:
        step = -(-len(array) // size)
        part = array[rank * step : (rank + 1) * step]
        offsets = (rank * step, *(0,) * (array.ndim - 1))
        own = [(part.copy() if fill else np.zeros_like(part), offsets)] if len(part) else []
        empty = [(np.zeros((0, *array.shape[1:]), array.dtype), (0,) * array.ndim)]
        return ShardedTensor(own or empty, array.shape)

    def saves(platform: Platform) -> None:
        rank = platform.ranks.rank
        hyper_ckpt.save({n: shards(a, rank, 4, True) for n, a in whole.items()}, tmp_path / "c", platform=platform)

    def loads(platform: Platform) -> int:
        rank = platform.ranks.rank
        target = {n: shards(a, rank, world, False) for n, a in whole.items()}
        report = hyper_ckpt.load(target, tmp_path / "c", platform=platform, verify="off", timeout=30)
        for name, array in whole.items():
            for data, offsets in target[name].shards:
                assert np.array_equal(data, array[offsets[0] : offsets[0] + len(data)])
        return report.bytes_read

    run_world(4, saves)
    counter.data = 0
    read = run_world(world, loads)
    needed = sum(array.nbytes for array in whole.values())
    assert sum(read) == needed
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    header = sum(f.stat().st_size for f in files) - needed
    assert needed <= counter.data <= needed + world * header, "the data once, and each rank the headers it opens"


@pytest.mark.parametrize("verify", ["off", "during"])
def test_small_tensors_are_read_together_however_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any
) -> None:
    state = {f"w{i}": np.arange(12.0).reshape(3, 4) + i for i in range(200)}
    hyper_ckpt.save(state, tmp_path / "c", no_dist=True)
    target: dict[str, Any] = {name: np.zeros((4, 3)).T for name in state}
    target |= {f"w{i}": np.zeros((3, 4)) for i in range(0, 200, 3)}
    reads, read_into = [], LocalStore.read_into

    def counted(store: Any, name: str, ranges: Any, buffers: Any) -> None:
        reads.append(name)
        read_into(store, name, ranges, buffers)

    monkeypatch.setattr(LocalStore, "read_into", counted)
    hyper_ckpt.load(target, tmp_path / "c", no_dist=True, verify=verify)
    assert all(np.array_equal(target[name], value) for name, value in state.items())
    assert sum(name.endswith(".safetensors") for name in reads) <= 3  # the header; plain ones; the others
