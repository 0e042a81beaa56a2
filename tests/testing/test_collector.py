"""The cyclic collector is left as it was."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.api.collector import paused_collector
from hyper_ckpt.errors import CheckpointError


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    with pytest.raises(ValueError, match="x"), paused_collector():
        raise ValueError("x")
    assert gc.isenabled() is enabled


@pytest.mark.parametrize("enabled", [True, False])
def test_every_call_leaves_it_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    state, url = {"w": np.zeros(2)}, "memory://collector"
    calls: list[Callable[[], object]] = [
        lambda: hyper_ckpt.save(state, url, no_dist=True),
        lambda: hyper_ckpt.load(state, url, no_dist=True),
        lambda: hyper_ckpt.read(url),
        lambda: hyper_ckpt.async_save(state, url, no_dist=True, overwrite=True).result(),
        lambda: hyper_ckpt.save(state, url, no_dist=True),
        lambda: hyper_ckpt.load({"other": np.zeros(2)}, url, no_dist=True),
        lambda: hyper_ckpt.read(url, keys=["other"]),
    ]
    for call in calls:
        with contextlib.suppress(CheckpointError):
            call()
        assert gc.isenabled() is enabled


def test_a_forked_child_has_it_back() -> None:
    gc.enable()
    with paused_collector():
        child = os.fork()
        if not child:
            with paused_collector():
                pass
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_is_done_in_the_background_leaves_it_alone() -> None:
    gc.enable()
    handle = hyper_ckpt.async_save({"w": np.zeros(2)}, "memory://collector/background", no_dist=True)
    gc.disable()
    handle.result()
    assert not gc.isenabled()
