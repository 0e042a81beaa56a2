"""Save in any world, load in any other: the identity. The planner's limits are lowered, so that small tensors are
cut as large ones are."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_ckpt.engine import shared as engine_shared
from hyper_ckpt.options import LoadOptions
from hyper_ckpt.planning import share

from .strategies import Job, jobs, wholes
from .worlds import check_filled, check_stored_once, fresh, load_on, manifest_of, read_back, save_on


@pytest.fixture(autouse=True, params=[64, 1 << 20], ids=["cutting", "whole"])
def _low_limits(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "MIN_CUT_BYTES", request.param)
        patch.setattr(engine_shared, "PACK_BYTES", min(request.param * 4, 1 << 20))
        yield


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], Job, Job]:
    whole = draw(wholes)
    return whole, draw(jobs(whole)), draw(jobs(whole))


ways_to_load = given(pairs(), st.booleans(), st.integers(0, 25), st.sampled_from(["off", "during", "before"]))


@settings(max_examples=60)
@ways_to_load
def test_saving_and_loading_is_the_identity(
    pair: tuple[dict[str, np.ndarray], Job, Job], share_reads: bool, batches: int, verify: Any
) -> None:
    check_identity(pair, share_reads, batches, verify)


@pytest.mark.soak
@settings(max_examples=3000)
@ways_to_load
def test_saving_and_loading_is_the_identity_for_long(
    pair: tuple[dict[str, np.ndarray], Job, Job], share_reads: bool, batches: int, verify: Any
) -> None:
    check_identity(pair, share_reads, batches, verify)


def check_identity(pair: tuple[dict[str, np.ndarray], Job, Job], share_reads: bool, batches: int, verify: Any) -> None:
    """Saves in one world, loads in another, and accounts for every byte."""
    whole, saved, loaded = pair
    url = fresh()
    # Not too many: ranks meet before each.
    batch = sum(a.nbytes for a in whole.values()) // batches + 1 if batches else 64 << 20
    save_on(saved.world, lambda rank: saved.state(whole, rank), url)
    check_stored_once(url, whole)
    read_back(url, whole)
    states, reports = load_on(
        loaded.world,
        lambda rank: loaded.blank(whole, rank),
        url,
        share_reads=share_reads,
        verify=verify,
        options=LoadOptions(broadcast_batch_bytes=batch),
    )
    check_filled(states, whole)
    assert [set(r.loaded) for r in reports] == [set(s) for s in states]
    assert all(set(r.unexpected) == set(whole) - set().union(*states) for r in reports)  # what no rank wants


@settings(max_examples=25)
@given(pairs(), st.sampled_from([{"remove_redundancy": False}, {"save_to_minimum_rank": True}]), st.booleans())
def test_other_ways_to_store_replicas(
    pair: tuple[dict[str, np.ndarray], Job, Job], options: dict[str, Any], share_reads: bool
) -> None:
    whole, saved, loaded = pair
    url = fresh()
    save_on(saved.world, lambda rank: saved.state(whole, rank), url, **options)
    read_back(url, whole)
    if "remove_redundancy" in options:
        manifest = manifest_of(url)
        held = sum(
            data.nbytes
            for rank in range(saved.world)
            for value in saved.state(whole, rank).values()
            for data in ([d for d, _ in value.shards] if hasattr(value, "shards") else [value.local])
        )
        assert sum(f.size - f.data_start for f in manifest.files) == held
    else:
        check_stored_once(url, whole)
    states, _ = load_on(loaded.world, lambda rank: loaded.blank(whole, rank), url, share_reads=share_reads)
    check_filled(states, whole)
