"""share_reads="auto": decided by measurement, together; and what the report says of shared reads."""

import time
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.engine import sharing
from hyper_ckpt.engine.sharing import Sample, is_worth_it
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.world import run_world

MIB = 1 << 20


def samples(world: int, wanted: int, whole: int, read: float, broadcast: float) -> list[Sample]:
    """Ranks that each read a sample of 4 MiB at `read` bytes a second in all, and broadcast at `broadcast`."""
    return [Sample(wanted, whole, 4 * MIB, 4 * MIB * world / read, broadcast) for _ in range(world)]


def test_what_is_reckoned() -> None:
    slow_store = samples(4, 256 * MIB, 256 * MIB, 200e6, 900e6)
    assert is_worth_it(slow_store)
    assert not is_worth_it(samples(4, 256 * MIB, 256 * MIB, 8e9, 900e6)), "memory is faster than the network"
    assert not is_worth_it(samples(4, 64 * MIB, 256 * MIB, 200e6, 50e6)), "nobody wants what others want"
    assert is_worth_it([Sample(1, 1, 0, 0.0, 1.0)] * 2), "where nothing could be measured"


def load_on(world: int, url: str, **options: Any) -> list[hyper_ckpt.LoadReport]:
    def job(platform: Platform) -> hyper_ckpt.LoadReport:
        target = {f"w{i}": np.zeros(5 * MIB // 4, "f4") for i in range(2)} | {"small": np.zeros(3)}
        report = hyper_ckpt.load(target, url, platform=platform, timeout=30, **options)
        assert all(target[f"w{i}"][0] == i + 1 for i in range(2))
        return report

    return run_world(world, job)


@pytest.fixture
def url() -> str:
    url = f"memory://sharing/{time.monotonic_ns()}"
    hyper_ckpt.save(
        {f"w{i}": np.full(5 * MIB // 4, i + 1, "f4") for i in range(2)} | {"small": np.zeros(3)}, url, no_dist=True
    )
    return url


def test_a_slow_store_is_read_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = MemoryStore.read_into

    def slowly(store: Any, name: str, ranges: Any, buffers: Any) -> None:
        time.sleep(sum(length for _, length in ranges) / 100e6)
        read_into(store, name, ranges, buffers)

    monkeypatch.setattr(MemoryStore, "read_into", slowly)
    monkeypatch.setattr("hyper_ckpt.api.sharing.broadcast_bandwidth", lambda ranks: 1e9)
    reports = load_on(3, url)
    assert all(r.shared_reads for r in reports)
    assert sum(r.bytes_read for r in reports) == 10 * MIB + 24


def test_a_slow_network_is_spared(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyper_ckpt.api.sharing.broadcast_bandwidth", lambda ranks: 1e5)
    reports = load_on(3, url)
    assert not any(r.shared_reads for r in reports)
    assert sum(r.bytes_read for r in reports) == 3 * (10 * MIB + 24)
    assert {(r.bytes_received, r.shared_boxes, r.broadcasts) for r in reports} == {(0, 0, 0)}


def test_the_measurement_is_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measured(ranks: Any) -> float:
        calls.append(ranks.rank)
        return 1e9

    monkeypatch.setattr("hyper_ckpt.api.sharing.broadcast_bandwidth", measured)

    def job(platform: Platform) -> None:
        for _ in range(3):
            target = {f"w{i}": np.zeros(5 * MIB // 4, "f4") for i in range(2)}
            hyper_ckpt.load(target, url, platform=platform, timeout=30, strict=False)

    run_world(2, job)
    assert sorted(calls) == [0, 1]


def test_a_real_measurement(url: str) -> None:
    def job(platform: Platform) -> float:
        return sharing.broadcast_bandwidth(platform.ranks)

    assert all(found > 0 for found in run_world(3, job))
    assert len({r.shared_reads for r in load_on(3, url)}) == 1


def test_the_report_counts_boxes_and_messages(url: str) -> None:
    reports = load_on(2, url, share_reads=True)
    assert all(r.shared_reads for r in reports)
    assert {r.shared_boxes for r in reports} == {3 + sum(r.shared_boxes - 3 for r in reports) // 2}
    assert all(0 < r.broadcasts <= r.shared_boxes for r in reports)


def test_small_boxes_travel_together() -> None:
    url = f"memory://sharing/{time.monotonic_ns()}"
    state = {f"t{i}": np.full(100, i) for i in range(50)}
    hyper_ckpt.save(state, url, no_dist=True)

    def job(platform: Platform) -> hyper_ckpt.LoadReport:
        target = {name: np.zeros_like(value) for name, value in state.items()}
        report = hyper_ckpt.load(target, url, platform=platform, timeout=30, share_reads=True)
        assert all(np.array_equal(target[name], state[name]) for name in state)
        return report

    for report in run_world(2, job):
        assert (report.shared_boxes, report.packed_boxes) == (50, 50)
        assert report.broadcasts == 2, "one for each reader"


@pytest.mark.parametrize("wrong", ["yes", None, 2])
def test_other_values_are_refused(url: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match="share_reads"):
        hyper_ckpt.load({}, url, no_dist=True, share_reads=wrong)


def test_batches_of_nothing_pass_on_each_box_by_itself(url: str) -> None:
    packed = load_on(3, url, share_reads=True)
    single = load_on(3, url, share_reads=True, options=hyper_ckpt.LoadOptions(broadcast_batch_bytes=0))
    for report in single:
        assert report.shared_reads
        assert report.broadcasts == report.shared_boxes
        assert report.packed_boxes == 0
    assert sum(r.bytes_read for r in single) == sum(r.bytes_read for r in packed) == 10 * MIB + 24
    with pytest.raises(ValueError, match="at least 0"):
        hyper_ckpt.LoadOptions(broadcast_batch_bytes=-1)
