"""async_save: what users call, and how a save is split between their thread and the background."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from hyper_ckpt.api.collector import paused_collector
from hyper_ckpt.api.common import CheckpointId, attempt, in_flight, resolve_platform, shared_stage
from hyper_ckpt.api.handle import SaveHandle
from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.api.save import Arguments
from hyper_ckpt.api.writing import Begun, SaveCall, Written
from hyper_ckpt.contracts.placement import StorageWriter
from hyper_ckpt.contracts.planner import SavePlanner
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.engine.save import write
from hyper_ckpt.engine.snapshot import Snapshot, snapshot, snapshot_bytes
from hyper_ckpt.metadata import Metadata
from hyper_ckpt.options import DEFAULT_TIMEOUT, SaveOptions


def async_save(
    state_dict: Mapping[Any, Any],
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | str | None = None,
    platform: Platform | str | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    remove_redundancy: bool = True,
    save_to_minimum_rank: bool = False,
    overwrite: bool = False,
    durable: bool = True,
    threads: int | None = None,
    max_host_bytes: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    user_metadata: Any = None,
    options: SaveOptions | None = None,
) -> SaveHandle:
    """Saves a state in the background. Every rank calls it, as `save`.

    When it returns, the ranks have agreed on the plan, and this rank's part is copied to host memory, or, where copies
    run on a device, queued to be: call `wait_staged()` before the state is changed by anything that is not ordered
    behind those copies. The rest (writing, hearing of the other ranks, publishing) happens in a thread, without
    collectives. Saves become complete in the order of the calls.

    A save that fails raises from its handle, or else from the next `save` or `async_save` of this platform, on every
    rank. At the end of the interpreter, what is in flight is waited for, up to its `timeout`.

    Args:
        state_dict: as for `save`, and so all others but
        max_host_bytes: the most host memory for copies; None: what this rank writes. If it is less than that, this
            rank's part is written before the call returns, with a warning, and only the rest is asynchronous.
        options: `max_in_flight` bounds how many saves may be open; the next call waits for room
            (`SaveHandle.waited`).

    Raises:
        SaveInFlightError: there was no room for longer than `timeout`.
        CheckpointError: as `save`, up to the plan; or an earlier save in the background failed.
    """
    arguments = Arguments(
        checkpoint_id, storage_writer, planner, use_collectives, remove_redundancy, save_to_minimum_rank, overwrite,
        durable, threads, max_host_bytes, user_metadata, options or SaveOptions(),
    )  # fmt: skip
    chosen = resolve_platform(platform, state_dict, no_dist, saves=True)
    saving, waited = arguments.start(chosen, timeout, waits_for_all=False)
    handle = SaveHandle(saving.call.store.url, timeout, waited)
    with saving.reporter.failing(), paused_collector():
        rest = _Rest(saving.call, saving.reporter, saving.begin(state_dict))
    if rest.is_written:
        handle.mark_staged()
    in_flight(chosen).submit(handle, lambda: handle.run(rest.finish))
    if rest.interrupt is not None:  # the others are told in the background
        raise rest.interrupt
    return handle


class _Rest:
    """What remains of a save once it is planned. Copies are made here, in the caller's thread.

    What fails on this rank alone is told to the others by `finish`.
    """

    def __init__(self, call: SaveCall, reporter: Reporter, begun: Begun) -> None:
        self._call, self._reporter, self._begun = call, reporter, begun
        self._shared = shared_stage(call.platform) if call.options.executor == "process" else None
        self._copies: Snapshot | None = None
        self._written: Written | None = None
        self._error = begun.error
        if begun.planned is not None:
            _, self._error = attempt(self._copy_or_write)

    @property
    def is_written(self) -> bool:
        """Whether this rank's part was written already, so that the state may change."""
        return self._written is not None

    @property
    def interrupt(self) -> BaseException | None:
        """What stopped the copying from outside, e.g. a KeyboardInterrupt."""
        return self._error if self._error is not None and not isinstance(self._error, Exception) else None

    def _copy_or_write(self) -> None:
        assert self._begun.planned is not None
        call, pieces = self._call, self._begun.planned.pieces
        needed, limit = snapshot_bytes(pieces), call.max_host_bytes
        if limit is None or needed <= limit:
            stager = call.platform.stager
            pool = stager if self._shared is None else self._shared
            self._copies = snapshot(pieces, stager, pool, call.threads)
            return
        warnings.warn(
            f"copies of what this rank saves take {needed} bytes, and max_host_bytes={limit} allows less: its part is "
            "written before async_save returns",
            stacklevel=5,
        )
        self._written = self._begun.write()

    def finish(self, staged: Callable[[], None]) -> Metadata:
        """The background's part; `staged` is called when the state may change."""
        try:
            with self._reporter.failing():
                return self._begun.finish(lambda: self._result(staged))
        finally:
            if self._copies is not None:
                self._copies.release()

    def _result(self, staged: Callable[[], None]) -> Written:
        if self._error is not None:
            raise self._error
        if self._copies is not None:
            self._copies.wait()
            staged()
            self._reporter.staged()
            return self._begun.write(self._copies.pieces, write if self._shared is None else self._shared.write)
        assert self._written is not None
        return self._written
