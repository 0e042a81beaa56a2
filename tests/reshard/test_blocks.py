"""Whole blocks and parts of them: what is read of a piece, by how many threads, and what a store may do meanwhile."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_ckpt
from hyper_ckpt import ShardedTensor
from hyper_ckpt.contracts.store import ByteStore, Expect, ReadAt
from hyper_ckpt.engine import blocks
from hyper_ckpt.engine.blocks import BlockRun, Piece, shared_groups
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.digest import block_digest
from hyper_ckpt.engine.pieces import SEGMENT_BYTES, PieceReader
from hyper_ckpt.engine.plain_stager import PlainStager
from hyper_ckpt.engine.workers import run_all
from hyper_ckpt.errors import DigestError, FileSizeError, MissingFileError, StoreError
from hyper_ckpt.receipt import BLOCK_BYTES
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.faults import CountingStore

LENGTH = 3 * BLOCK_BYTES + 1000
DATA = np.random.default_rng(0).integers(0, 256, LENGTH, np.uint8)
ENDS = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES, LENGTH - 1, LENGTH]


def piece_of(data: np.ndarray, name: str = "w", file: str = "f", base: int = 0) -> Piece:
    digests = [block_digest(data[at : at + BLOCK_BYTES].data) for at in range(0, len(data), BLOCK_BYTES)]
    return Piece(name, file, base, len(data), np.array(digests, np.uint64))


def reader_of(store: ByteStore) -> PieceReader:
    return PieceReader(store, PlainStager(), Budget(SEGMENT_BYTES), SEGMENT_BYTES, lambda _: None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blocks") / "c"
    hyper_ckpt.save({"w": DATA}, path, no_dist=True, durable=False)
    return path


@pytest.mark.parametrize(("start", "stop"), [*itertools.combinations(ENDS, 2)])
@pytest.mark.parametrize("verify", ["during", "before", "off"])
def test_any_part_is_read(saved: Path, start: int, stop: int, verify: Any) -> None:
    around = np.full(stop - start + 2, 7, np.uint8)
    target = ShardedTensor([(around[1:-1], (start,))], (LENGTH,))
    report = hyper_ckpt.load({"w": target}, saved, no_dist=True, verify=verify)
    assert np.array_equal(around[1:-1], DATA[start:stop])
    assert around[0] == around[-1] == 7
    assert report.bytes_read == stop - start


@settings(max_examples=40, deadline=None)
@given(st.integers(0, LENGTH - 1), st.sampled_from(ENDS), st.sampled_from(ENDS))
def test_what_is_touched_is_checked(at: int, one: int, other: int) -> None:
    start, stop = sorted((one, other))
    damaged = DATA.copy()
    damaged[at] ^= 1
    store = MemoryStore(f"memory://blocks/{at}-{one}-{other}")
    store.publish("f", damaged.tobytes(), Expect.ANY, sync=False)
    target = np.zeros(stop - start, np.uint8)
    touched = start < stop and start // BLOCK_BYTES <= at // BLOCK_BYTES <= (stop - 1) // BLOCK_BYTES
    first = at // BLOCK_BYTES * BLOCK_BYTES
    text = f"bytes {first} to {min(first + BLOCK_BYTES, LENGTH)} \\('w'\\)"
    with pytest.raises(DigestError, match=text) if touched else contextlib.nullcontext():
        reader_of(store).read_run(piece_of(DATA), start, target.data)
    if not touched:
        assert np.array_equal(target, DATA[start:stop])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_blocks_and_each_is_read_once(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(blocks, "GROUP_BYTES", 4 * BLOCK_BYTES)
    store = CountingStore(MemoryStore(f"memory://blocks/shared-{threads}"))
    runs, wanted, read = [], [], []
    for file, count in (("a", 3), ("b", 1)):
        data = np.random.default_rng(count).integers(0, 256, count * 5 * BLOCK_BYTES - 9, np.uint8)
        store.publish(file, data.tobytes(), Expect.ANY, sync=False)
        ends = [*range(0, len(data), 5 * BLOCK_BYTES), len(data)]
        for low, high in itertools.pairwise(ends):
            wanted.append(data[low:high])
            read.append(np.zeros(high - low, np.uint8))
            runs.append(BlockRun(piece_of(data[low:high], f"{file}{low}", file, low), 0, read[-1].data))
    groups = [*shared_groups(runs[::-1], threads)]
    sizes = [sum(len(run.target) for run in group.runs) for group in groups]
    assert [group.file for group in groups] == ["a"] * 4 + ["b"] * 2
    assert max(sizes) <= 4 * BLOCK_BYTES + 4 * BLOCK_BYTES  # one run more than fills it
    before, told = store.bytes_read, []
    reader = PieceReader(store, PlainStager(), Budget(SEGMENT_BYTES), SEGMENT_BYTES, told.append)
    run_all(reader.block_tasks(runs, threads), threads)
    assert all(np.array_equal(one, other) for one, other in zip(wanted, read, strict=True))
    assert store.bytes_read - before == sum(told) == sum(map(len, wanted))


class Odd(LocalStore):
    """A store whose quick reads are odd; others are as they should be."""

    quick: Callable[[ReadAt, Sequence[memoryview], int], int]

    def reader(self, name: str) -> contextlib.AbstractContextManager[ReadAt]:
        return self._odd(name)

    @contextlib.contextmanager
    def _odd(self, name: str) -> Iterator[ReadAt]:
        with super().reader(name) as read:
            yield lambda buffers, start: type(self).quick(read, buffers, start)


def fails(read: ReadAt, buffers: Sequence[memoryview], start: int) -> int:
    if start >= BLOCK_BYTES:
        raise OSError("not now")
    return read(buffers, start)


def short(read: ReadAt, buffers: Sequence[memoryview], start: int) -> int:
    return read([buffers[0][:-1]], start)


def garbled(read: ReadAt, buffers: Sequence[memoryview], start: int) -> int:
    got = read(buffers, start)
    buffers[0][0] ^= 1
    return got


def silent(read: ReadAt, buffers: Sequence[memoryview], start: int) -> int:
    return len(buffers[0])


@pytest.mark.parametrize("quick", [fails, short, garbled, silent])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_quick_read_does_not_do_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: Any, threads: int
) -> None:
    monkeypatch.setattr(Odd, "quick", staticmethod(quick), raising=False)
    (tmp_path / "f").write_bytes(DATA.tobytes())
    target = np.zeros(LENGTH, np.uint8)
    run = BlockRun(piece_of(DATA), 0, target.data)
    told: list[int] = []
    reader = PieceReader(Odd(tmp_path), PlainStager(), Budget(SEGMENT_BYTES), SEGMENT_BYTES, told.append)
    run_all(reader.block_tasks([run], threads), threads)
    assert np.array_equal(target, DATA)
    assert sum(told) == LENGTH


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    store, target = LocalStore(tmp_path), np.zeros(LENGTH, np.uint8)
    (tmp_path / "f").write_bytes(DATA[: 2 * BLOCK_BYTES + 5].tobytes())
    with pytest.raises(FileSizeError, match="ends early"):
        reader_of(store).read_run(piece_of(DATA), 0, target.data)
    with pytest.raises(MissingFileError, match="gone"):
        reader_of(store).read_run(piece_of(DATA, file="gone"), 0, target.data)
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="folder"):
        reader_of(store).read_run(piece_of(DATA, file="folder"), 0, target.data)


def test_interrupts_do_not_leave_threads_at_work() -> None:
    done = []

    def slow() -> None:
        time.sleep(0.4)
        done.append(1)

    def interrupted() -> None:
        time.sleep(0.05)  # until the helper has begun
        raise KeyboardInterrupt

    def again() -> None:
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    tasks = [lambda: slow() if threading.current_thread() is not threading.main_thread() else interrupted()] * 2
    other = threading.Thread(target=again)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        run_all(tasks, 2)
    assert done == [1]
    other.join()
