"""Views of one memory under several names: saved by value, and loaded where the saved values agree."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.engine import overlaps
from hyper_ckpt.errors import DigestError, TargetError
from hyper_ckpt.options import LoadOptions
from hyper_ckpt.values import ShardedTensor

from .helpers import State, fresh, load_on, save_on


def dense(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 31, shape, np.int32).view("f4")


def slices(flat: np.ndarray) -> State:
    n = len(flat) // 4
    return {"one": flat[: 2 * n], "two": flat[n:], "all": flat}


def fused(flat: np.ndarray) -> State:
    rows = flat[: len(flat) // 6 * 6].reshape(6, -1)
    return {"qkv": rows, "q": rows[:2], "k": rows[2:4], "v": rows[4:], "heads": rows.reshape(2, 3, -1)[:, 1]}


def forms(flat: np.ndarray) -> State:
    square = flat[: len(flat) // 8 * 8].reshape(8, -1)
    return {
        "w": square,
        "transposed": square.T,
        "back": square[::-1, ::-3],
        "every": square[::2, 1::2],
        "bits": square.view("u2"),
        "bytes": square.view("u1")[1:3, 3:10],
        "diagonal": np.lib.stride_tricks.as_strided(square, (4,), (sum(square.strides),)),
        "scalar": square[3, 2:3].reshape(()),
    }


def sharded(flat: np.ndarray) -> State:
    n = len(flat) // 2
    return {"s": ShardedTensor([(flat[:n], (n,)), (flat[n : 2 * n], (0,))], (2 * n,)), "middle": flat[n - 3 : n + 3]}


MAKERS = [slices, fused, forms, sharded]


@pytest.fixture(params=[None, 1 << 8])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, and window by window."""
    if request.param:
        monkeypatch.setattr(overlaps, "WINDOW_BYTES", request.param)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("make", MAKERS)
def test_what_was_saved_loads_into_the_same(make: Callable[[np.ndarray], State], world: int, share_reads: bool) -> None:
    url, saved = fresh(), dense(0, 240)
    save_on(world, lambda rank: make(saved), url)
    memories = [dense(1 + rank, 240) for rank in range(world)]
    wanted = [memory.copy() for memory in memories]
    for target in wanted:  # what the views do not reach stays
        for part, value in zip(arrays(make(target)), arrays(make(saved)), strict=True):
            part[...] = value
    _, reports = load_on(world, lambda rank: make(memories[rank]), url, share_reads=share_reads)
    for memory, expected, report in zip(memories, wanted, reports, strict=True):
        assert memory.tobytes() == expected.tobytes()
        assert report.loaded == tuple(sorted(make(memory)))


def arrays(state: State) -> list[np.ndarray]:
    found = [v.shards if isinstance(v, ShardedTensor) else [(v, ())] for v in state.values()]
    return [array for shards in found for array, _ in shards]


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("make", MAKERS)
def test_one_differing_byte_refuses_before_anything_changes(
    make: Callable[[np.ndarray], State], world: int, share_reads: bool
) -> None:
    for name, value in make(dense(0, 240)).items():
        if make in (slices, fused) or name not in ("s", "w"):
            other = np.array(value)
            last = (-1,) * other.ndim
            view = other[last or ...].reshape(1).view("u1")
            view ^= 1
            other[last or ...] = view.view(other.dtype)[0]
            url = fresh()
            save_on(world, lambda rank, name=name, other=other: {**make(dense(0, 240)), name: other}, url)
            memories = [dense(1, 240) for _ in range(world)]
            with pytest.raises(TargetError, match=r"share memory in the target, but different values"):
                load_on(world, lambda rank, m=memories: make(m[rank]), url, share_reads=share_reads)
            assert all(memory.tobytes() == dense(1, 240).tobytes() for memory in memories), name


def test_different_values_where_nothing_overlaps_are_fine() -> None:
    """Only what lies in the same memory is compared."""
    url, flat = fresh(), dense(0, 100)
    hyper_ckpt.save({"low": flat[:60], "high": flat[60:], "interleaved": flat[:10]}, url)
    memory = dense(1, 200)
    hyper_ckpt.load({"low": memory[:120:2], "high": memory[1:80:2], "interleaved": memory[120:130]}, url)
    assert memory[:120:2].tobytes() == flat[:60].tobytes()


def test_a_copy_made_meanwhile_agrees() -> None:
    url, flat = fresh(), dense(0, 240)
    hyper_ckpt.async_save(fused(flat), url).result()
    memory = dense(1, 240)
    hyper_ckpt.load(fused(memory), url, verify="before", max_host_bytes=8 << 20)
    assert memory.tobytes() == flat.tobytes()


def test_damage_is_found_before_anything_changes(tmp_path: Any) -> None:
    hyper_ckpt.save(fused(dense(0, 240)), tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    memory = dense(1, 240)
    with pytest.raises(DigestError, match="Nothing was loaded"):
        hyper_ckpt.load(fused(memory), tmp_path / "c")
    assert memory.tobytes() == dense(1, 240).tobytes()


def test_what_is_cast_must_not_share_memory() -> None:
    url = fresh()
    hyper_ckpt.save(slices(dense(0, 240)), url)
    memory = np.zeros(240)
    with pytest.raises(TargetError, match="is to be cast"):
        hyper_ckpt.load(slices(memory), url, options=LoadOptions(cast=True))
    assert not memory.any()
    with pytest.raises(TargetError, match="is to be cast"):
        hyper_ckpt.load({"one": memory[:120], "all": memory.view("f4")[:240]}, url, options=LoadOptions(cast=True))


def test_memory_above_a_window() -> None:
    """Parts that reach over the edges of windows, and far more memory than is held to compare it."""
    url, count = fresh(), (3 * overlaps.WINDOW_BYTES + 4096) // 4
    flat = dense(0, count)
    state = {"all": flat, "tail": flat[count // 3 + 1 :], "columns": flat[: count // 2 * 2].reshape(2, -1)[:, 5:]}
    hyper_ckpt.save(state, url)
    memory = np.zeros(count, "f4")
    target = {
        "all": memory, "tail": memory[count // 3 + 1 :], "columns": memory[: count // 2 * 2].reshape(2, -1)[:, 5:],
    }  # fmt: skip
    report = hyper_ckpt.load(target, url)
    assert memory.tobytes() == flat.tobytes()
    assert len(report.loaded) == 3
