"""numpy arrays and hand-made shards as a platform's tensors, the buffer pool, the world of one."""

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.host_stager import BufferPool
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors, overlaps_itself
from hyper_ckpt.contracts.platform import Done, LocalShard, TensorDescription, Tensors
from hyper_ckpt.dtypes import BY_NAME, TABLE, numpy_dtype
from hyper_ckpt.errors import (
    PlatformError,
    TargetError,
    UnsupportedDtypeError,
    UnsupportedLayoutError,
    UnsupportedStateError,
)
from hyper_ckpt.layout import Boxes, Replicated
from hyper_ckpt.values import ShardedTensor

TENSORS = NumpyTensors()
COMPOSITE = CompositeTensors([TENSORS])
DTYPES = [row.name for row in TABLE]


def whole(array: np.ndarray) -> LocalShard:
    (shard,) = TENSORS.local_shards(array)
    return shard


def random_array(name: str, *shape: int) -> np.ndarray:
    """Any bits at all: NaN payloads and denormals have to survive."""
    data = np.random.default_rng(5).integers(
        0, 2 if name == "bool" else 256, (*shape, BY_NAME[name].itemsize), np.uint8
    )
    return np.ascontiguousarray(data).reshape(-1).view(numpy_dtype(name)).reshape(shape)


def views_of(name: str) -> list[np.ndarray]:
    base = random_array(name, 6, 5, 4)
    return [base, base[1:5, ::2], base.T, base[::-1], base[2, 3, 1:2].reshape(()), base[:0], base[..., 1]]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_both_ways(name: str) -> None:
    stager = NumpyPlatform().stager
    for array in views_of(name):
        assert TENSORS.describe(array) == TensorDescription(name, array.shape, Replicated())
        view = TENSORS.host_view(whole(array))
        assert (view.dtype, view.shape) == (BY_NAME[name].carrier, array.shape)
        assert view.tobytes() == array.tobytes()
        assert view.size == 0 or np.shares_memory(view, array)
        buffer = stager.buffer(array.nbytes)
        stager.copy_out(whole(array), buffer).wait()
        target = TENSORS.empty(TensorDescription(name, array.shape, Replicated()))
        assert target.dtype.name == name
        stager.copy_in(buffer, whole(target)).wait()
        assert target.tobytes() == array.tobytes()
        TENSORS.writable(whole(array))[...] = 0
        assert not np.frombuffer(array.tobytes(), np.uint8).any()
        stager.release(buffer)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array([{}]), "codec"),
        (np.array(["text"]), "tolist"),
        (np.array([b"text"]), "uint8"),
        (np.array(["2020-01-01"], "datetime64[s]"), "int64"),
        (np.array([1], "timedelta64[s]"), "int64"),
        (np.zeros(2, [("a", "i4")]), "each field"),
        (np.zeros(2, ">f4"), "big-endian"),
        (np.zeros(2, np.longdouble), "float64"),
        (np.zeros(2, np.clongdouble), "complex128"),
        (np.zeros(2, ml_dtypes.float6_e2m3fn), "cannot be stored"),
    ],
)
def test_other_dtypes_are_refused_with_a_remedy(array: np.ndarray, says: str) -> None:
    with pytest.raises(UnsupportedDtypeError, match=says):
        TENSORS.describe(array)


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="mask"):
        TENSORS.describe(np.ma.zeros(3))


def test_other_values_are_not_tensors() -> None:
    assert [COMPOSITE.describe(value) for value in (1, np.float32(1), [np.ones(1)], b"", None)] == [None] * 5


def test_targets_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(TargetError, match="read-only"):
        TENSORS.writable(whole(np.frombuffer(b"1234", np.uint8)))
    windows = np.lib.stride_tricks.as_strided(np.zeros(6), (4, 3), (8, 8))
    with pytest.raises(TargetError, match="share memory"):
        TENSORS.writable(whole(windows))


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [((), (), False), ((3, 4), (16, 4), False), ((3, 4), (-16, 4), False), ((4, 3), (4, 16), False),
     ((3, 4), (0, 4), True), ((1, 4), (0, 4), False), ((3, 4), (12, 4), True),
     ((0, 4), (0, 0), False), ((2, 2), (1, 2), True)],
)  # fmt: skip
def test_overlap(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    assert overlaps_itself(shape, strides, 4) is overlaps


def test_storage_keys() -> None:
    base = np.arange(12.0)
    assert len({TENSORS.storage_key(whole(a)) for a in (base, base[:], base.reshape(12))}) == 1
    other = [base, base[1:], base[:4], base.reshape(3, 4), base.view("i8"), base[::-1], base.copy()]
    assert len({TENSORS.storage_key(whole(a)) for a in other}) == len(other)
    assert TENSORS.storage_key(whole(base[:0])) is None
    assert TENSORS.storage_key(whole(base[3:4])) == TENSORS.storage_key(whole(base[3::20]))


@pytest.mark.parametrize("name", DTYPES)
def test_plain_arrays(name: str) -> None:
    base = random_array(name, 6, 5, 4)
    for array in (base, base[2:4], base[5, 4, 3:]):
        view = TENSORS.writable(whole(array))
        assert TENSORS.plain(array) == (TENSORS.describe(array), view.ctypes.data, array.nbytes)
        assert COMPOSITE.plain(array) == TENSORS.plain(array)


class Own(np.ndarray):
    """Of a class that may mean something else."""


def test_what_is_not_so_simple_is_not_plain(tmp_path: Path) -> None:
    base = np.arange(24.0).reshape(4, 6)
    fixed = base.copy()
    fixed.flags.writeable = False
    mapped = np.memmap(tmp_path / "f", np.uint8, "w+", shape=(3,))
    odd: list[Any] = [
        base.T,
        base[:, 1:],
        base[:0],
        base[1, 2],
        fixed,
        mapped,
        base.view(Own),
        np.ma.masked_array(base),
    ]
    odd += [np.array(["a"]), np.array([None]), base.astype(">f8"), np.broadcast_to(base[0], (4, 6)), 1.0, None]
    assert [TENSORS.plain(each) for each in odd] == [None] * len(odd)
    assert [COMPOSITE.plain(each) for each in odd] == [None] * len(odd)


class Whole(Tensors):
    """Arrays are its own, and it says of none that it is plain."""

    def describe(self, value: Any) -> TensorDescription | None:
        return TENSORS.describe(value)

    local_shards, host_view, writable = TENSORS.local_shards, TENSORS.host_view, TENSORS.writable
    fingerprint, empty, storage_key = TENSORS.fingerprint, TENSORS.empty, TENSORS.storage_key


def test_another_part_does_not_say_what_is_plain() -> None:
    assert CompositeTensors([Whole(), TENSORS]).plain(np.ones(3)) is None


def test_fingerprints_follow_the_contents() -> None:
    big = np.arange(1 << 18, dtype="i8").reshape(512, 512)
    assert TENSORS.fingerprint([whole(big)]) == TENSORS.fingerprint([whole(np.asfortranarray(big))])
    changed = big.copy()
    changed[0, 0] = 1
    assert TENSORS.fingerprint([whole(big)]) != TENSORS.fingerprint([whole(changed)])
    assert COMPOSITE.fingerprint([whole(big)]) == TENSORS.fingerprint([whole(big)])
    assert len(COMPOSITE.fingerprint([])) == 8


def test_sharded_tensors_are_boxes() -> None:
    top, none, corner = np.ones((2, 5), "f4"), np.ones((0, 3), "f4"), np.full((1, 2), 7, "f4")
    value = ShardedTensor([(top, (0, 0)), (none, (4, 0)), (corner, (3, 3))], (4, 5))
    boxes = (((0, 0), (2, 5)), ((3, 3), (1, 2)))  # an empty array is only there for its dtype
    description = COMPOSITE.describe(value)
    assert description == TensorDescription("float32", (4, 5), Boxes(boxes))
    shards = COMPOSITE.local_shards(value)
    assert tuple((s.offsets, s.sizes) for s in shards) == boxes
    view = COMPOSITE.writable(shards[1])
    assert view is not None
    view[...] = 0
    assert not corner.any()
    made = COMPOSITE.empty(description, value)
    assert isinstance(made, ShardedTensor)
    assert COMPOSITE.describe(made) == description
    assert not np.shares_memory(made.shards[0][0], top)


F4 = np.zeros((2, 2), "f4")


@pytest.mark.parametrize(
    ("shards", "shape", "error", "says"),
    [
        ([], (4, 4), UnsupportedStateError, "one empty array"),
        ([(F4, (0, 0)), (F4.astype("f8"), (2, 0))], (4, 4), UnsupportedStateError, "float32"),
        ([(F4, (3, 0))], (4, 4), UnsupportedLayoutError, "inside"),
        ([(F4, (-1, 0))], (4, 4), UnsupportedLayoutError, "inside"),
        ([(F4, (0,))], (4, 4), UnsupportedLayoutError, "inside"),
        ([(F4, (0, 0))], (4,), UnsupportedLayoutError, "inside"),
        ([(F4, (0, 0)), (F4, (2, 0)), (F4, (1, 1))], (4, 4), UnsupportedLayoutError, "overlap"),
        ([(np.array(1, "f4"), ()), (np.array(2, "f4"), ())], (), UnsupportedLayoutError, "overlap"),
        ([([1, 2], (0,))], (4,), UnsupportedStateError, "not list"),
        ([(ShardedTensor([(F4, (0, 0))], (2, 2)), (0, 0))], (4, 4), UnsupportedStateError, "not ShardedTensor"),
    ],
)
def test_wrong_shards_are_refused(shards: Any, shape: tuple[int, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        COMPOSITE.describe(ShardedTensor(shards, shape))


def test_a_stranger_is_no_tensor_of_the_platform() -> None:
    with pytest.raises(UnsupportedStateError, match="list is not a tensor"):
        COMPOSITE.local_shards([1])


def test_the_pool_reuses_and_does_not_grow() -> None:
    pool = BufferPool()
    first = pool.take(1_000_000)
    assert 1_000_000 <= first.nbytes <= 1_125_000
    pool.give(first)
    assert pool.take(999_000) is first
    pool.give(first)
    for nbytes in (0, 1, 5_000, 70_000, 300_000, 900_000):
        buffer = pool.take(nbytes)
        assert buffer.nbytes >= nbytes
        pool.give(buffer)
        assert pool.held_bytes <= first.nbytes


def test_the_pool_refuses_what_is_not_its_own() -> None:
    pool = BufferPool()
    buffer = pool.take(100_000)
    with pytest.raises(PlatformError, match="exactly what"):
        pool.give(buffer[:5000])
    pool.give(buffer)
    with pytest.raises(PlatformError, match="once"):
        pool.give(buffer)


def test_the_pool_survives_a_failed_allocation() -> None:
    def refuse(nbytes: int) -> np.ndarray:
        raise MemoryError

    pool = BufferPool(refuse)
    with pytest.raises(MemoryError):
        pool.take(10)
    assert pool.held_bytes == 0


def test_the_pool_is_safe_for_threads() -> None:
    pool, problems = BufferPool(), []

    def use(number: int) -> None:
        for _ in range(300):
            buffer = pool.take(5_000 + number % 2 * 20_000)
            buffer[:] = number
            if (buffer != number).any():
                problems.append(number)
            pool.give(buffer)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert pool.held_bytes <= 8 * 28_000


def test_a_world_of_one() -> None:
    ranks = NumpyPlatform().ranks
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.all_gather_object("x") == ["x"]
    assert ranks.gather_bytes(b"x") == [b"x"]
    assert ranks.scatter_bytes([b"y"]) == b"y"
    assert isinstance(ranks.broadcast_into([np.zeros(1, np.uint8)], 0, ranks.groups([(0,)])[0]), Done)
    ranks.key_value_store.set("key", b"value")
    assert ranks.key_value_store.get("key") == b"value"
    ranks.key_value_store.delete("key")
    ranks.key_value_store.delete("key")
    assert ranks.key_value_store.get("key") is None
    with pytest.raises(ValueError, match="exactly one"):
        ranks.scatter_bytes([])
    with pytest.raises(ValueError, match="no rank 1"):
        ranks.broadcast_into([], 1)
