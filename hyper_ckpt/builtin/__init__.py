"""The built-in platform and stores, announced through the same hooks as any plugin's."""

from __future__ import annotations

import functools

from hyper_ckpt.builtin.log_lines import LogLines
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.builtin.progress_bar import ProgressBar
from hyper_ckpt.contracts.events import EventSpec
from hyper_ckpt.contracts.platform import Platform, PlatformSpec
from hyper_ckpt.contracts.store import StoreSpec
from hyper_ckpt.hookspecs import hookimpl

_NUMPY_PROBE = "hyper_ckpt.testing.conformance.numpy_probe:NumpyProbe"


def _no_world() -> int:
    return 0


@functools.cache
def _load_numpy() -> Platform:
    return NumpyPlatform()


@hookimpl
def hyper_ckpt_platforms() -> list[PlatformSpec]:
    # numpy arrays do not vote for a platform: every framework's state may hold some.
    return [PlatformSpec("numpy", (), _no_world, _load_numpy, "pip install hyper-ckpt", _NUMPY_PROBE)]


@hookimpl
def hyper_ckpt_stores() -> list[StoreSpec]:
    return [
        StoreSpec(("", "file"), "hyper_ckpt.storage.local_store:LocalStore"),
        StoreSpec(("memory",), "hyper_ckpt.storage.memory_store:MemoryStore"),
    ]


@hookimpl
def hyper_ckpt_events() -> list[EventSpec]:
    return [EventSpec("log lines", LogLines), EventSpec("progress bar", ProgressBar)]
