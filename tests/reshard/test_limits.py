"""Host memory is bounded, and what a manifest says of boxes is proved before anything is filled."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import Expect
from hyper_ckpt.errors import CorruptCheckpointError, ManifestError, MemoryBudgetError, PlanError
from hyper_ckpt.layout import Mesh, MeshLayout, Replicated, Shard
from hyper_ckpt.manifest import MANIFEST_NAME, Manifest
from hyper_ckpt.options import LoadOptions
from hyper_ckpt.receipt import ZERO_DIGEST, seal
from hyper_ckpt.registry import registry
from hyper_ckpt.storage import filesystem
from hyper_ckpt.testing.meshed import Meshed, distribute
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import ShardedTensor

from .strategies import Job, jobs, wholes
from .worlds import State, check_filled, check_stored_once, filled, fresh, load_on, poisoned, read_back, save_on


def least(call: Any) -> int:
    """Calls with less memory than is needed, then with what the error asks for, until that is enough."""
    limit = 1
    for _ in range(9):
        try:
            call(limit)
        except MemoryBudgetError as error:
            found = re.search(r"needs (\d+) bytes", str(error))
            assert found is not None
            assert int(found[1]) > limit
            limit = int(found[1])
        else:
            return limit
    raise AssertionError("never enough")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], Job, Job]:
    whole = draw(wholes)
    return whole, draw(jobs(whole)), draw(jobs(whole))


@settings(max_examples=20)
@given(pairs(), st.booleans(), st.sampled_from([100, 1 << 20]))
def test_the_memory_that_is_asked_for_is_enough(
    pair: tuple[dict[str, np.ndarray], Job, Job], share_reads: bool, batch: int
) -> None:
    whole, saved, loaded = pair
    url = fresh()
    least(lambda n: save_on(saved.world, lambda r: saved.state(whole, r), url, max_host_bytes=n, overwrite=True))
    read_back(url, whole)

    def load(limit: int) -> None:
        states, reports = load_on(
            loaded.world,
            lambda rank: loaded.blank(whole, rank),
            url,
            share_reads=share_reads,
            max_host_bytes=limit,
            options=LoadOptions(broadcast_batch_bytes=batch),
        )
        check_filled(states, whole)
        assert max(r.peak_host_bytes for r in reports) <= limit

    least(load)


LARGE = {"cols": filled((300, 4000)), "rows": filled((2500, 300), "float64"), "one": filled((1 << 20,), "int16")}
SMALL = {f"small{i}": filled((1000 + i, 3), "int16", i) for i in range(300)}


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("share_reads", [True, False])
def test_large_tensors_in_little_memory(on_device: bool, share_reads: bool) -> None:
    whole, url = {**LARGE, **SMALL}, fresh()

    def part(array: np.ndarray, world: int, rank: int, last: bool) -> Meshed:
        mesh = Mesh((world,), tuple(range(world)))
        split = MeshLayout(mesh, (Shard(array.ndim - 1 if last else 0),))
        return distribute(array, split if len(array) < 500 or last else Replicated(), rank, on_device=on_device)

    def save(limit: int) -> None:
        of_rank = lambda rank: {n: part(a, 3, rank, False) for n, a in whole.items()}  # noqa: E731
        save_on(3, of_rank, url, max_host_bytes=limit, overwrite=True)

    if on_device:
        assert least(save) == LARGE["rows"].nbytes
    else:
        save(1)
    check_stored_once(url, whole)

    def load(limit: int) -> None:
        def of_rank(rank: int) -> State:
            blank = {n: poisoned(a.shape, a.dtype.name) for n, a in whole.items()}
            return {n: part(a, 2, rank, n == "cols") for n, a in blank.items()}

        states, reports = load_on(
            2,
            of_rank,
            url,
            share_reads=share_reads,
            max_host_bytes=limit,
            options=LoadOptions(broadcast_batch_bytes=200_000),
        )
        check_filled(states, whole)
        assert max(r.peak_host_bytes for r in reports) <= limit

    assert least(load) < 16 << 20


def test_every_byte_is_read_once_where_reads_are_shared() -> None:
    whole, url = LARGE, fresh()
    total = sum(a.nbytes for a in whole.values())
    save_on(3, lambda rank: {n: a.copy() for n, a in whole.items()}, url)
    target = lambda rank: {n: poisoned(a.shape, a.dtype.name) for n, a in whole.items()}  # noqa: E731
    for world in (2, 4):
        states, reports = load_on(world, target, url, share_reads=True)
        check_filled(states, whole)
        assert sum(r.bytes_read for r in reports) == total
        assert all(r.bytes_read + r.bytes_received == total for r in reports)
        assert max(r.bytes_read for r in reports) < total / world + (1 << 20)
        _, alone = load_on(world, target, url, share_reads=False)
        assert [(r.bytes_read, r.bytes_received) for r in alone] == [(total, 0)] * world


def changed(url: str, change: Any) -> None:
    """Rewrites what a manifest says of the tensor "w", with a digest that fits."""
    store = registry().store(url)
    document = msgspec.json.decode(store.read(MANIFEST_NAME))
    change(document["tensors"]["w"])
    document["digest"] = ZERO_DIGEST
    store.publish(MANIFEST_NAME, seal(msgspec.json.encode(document))[0], Expect.ANY, sync=False)


DIAGONAL = [[[0, 0], [2, 2], [0, 2]], [[2, 2], [2, 2], [2, 2]]]
TWICE = [[[0, 0], [2, 2], [0, 2], [0, 2]], [[2, 2], [2, 2], [2, 2], [2, 2]]]
HALF = [[[0, 0]], [[2, 4]]]


@pytest.mark.parametrize("boxes", [DIAGONAL, TWICE, HALF, [[], []]])
def test_boxes_with_a_hole_are_refused_before_anything_is_filled(boxes: list[list[list[int]]]) -> None:
    url, w = fresh(), filled((4, 4))
    hand = [((0, 0), (2, 4)), ((2, 0), (1, 4)), ((3, 0), (1, 1)), ((3, 1), (1, 3))]
    shards = [(w[a : a + m, b : b + n].copy(), (a, b)) for (a, b), (m, n) in hand]
    save_on(1, lambda rank: {"w": ShardedTensor(shards, (4, 4))}, url)
    read_back(url, {"w": w})

    def change(row: dict[str, Any]) -> None:
        row["offsets"], row["sizes"] = boxes
        row["files"], row["start"] = [0] * len(boxes[0]), 0

    changed(url, change)
    target = {"w": np.zeros((4, 4), "f4")}
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        hyper_ckpt.load(target, url)
    assert not target["w"].any()
    with pytest.raises(CorruptCheckpointError):
        hyper_ckpt.read(url)
    assert not hyper_ckpt.verify(url).ok


def test_a_proof_that_would_take_for_ever_is_not_tried() -> None:
    url, w = fresh(), filled((4, 4))
    save_on(1, lambda rank: {"w": w}, url)

    def change(row: dict[str, Any]) -> None:
        row.pop("grid")
        row["shape"] = [2] * 50
        row["offsets"], row["sizes"] = [[0] * 50, [1] * 50], [[1] * 50] * 2
        row["files"], row["start"] = [0, 0], 0

    changed(url, change)
    with pytest.raises(ManifestError, match="50 dimensions"):
        Manifest(registry().store(url).read(MANIFEST_NAME)).tensor("w")


@pytest.mark.parametrize("world", [1, 3])
def test_files_are_split_before_their_header_grows_too_long(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "MAX_HEADER_BYTES", 20_000)
    dtypes = ["float64", "float32", "int8", "complex128"]
    whole = {f"t{i}": filled((1 + i % 5, 2), dtypes[i % 4], i) for i in range(200)}
    url = fresh()
    save_on(world, lambda rank: {n: a.copy() for n, a in whole.items()}, url)
    files = hyper_ckpt.read_metadata(url).files
    assert len(files) > 3 * world
    check_stored_once(url, whole)
    read_back(url, whole)
    states, _ = load_on(2, lambda rank: {n: poisoned(a.shape, a.dtype.name) for n, a in whole.items()}, url)
    check_filled(states, whole)


def test_a_hole_is_found_before_a_byte_is_written(tmp_path: Path) -> None:
    """A diagonal hole: in each dimension by itself, everything is covered."""
    path = tmp_path / "checkpoint"

    def save(platform: Platform) -> None:
        at = 2 * platform.ranks.rank
        shard = (np.ones((2, 2)), (at, at))
        hyper_ckpt.save({"t": hyper_ckpt.ShardedTensor([shard], (4, 4))}, path, platform=platform)

    with pytest.raises(PlanError, match=r"'t'.*a hole or an overlap"):
        run_world(2, save)
    assert not path.exists()
