"""save: what users call; the story is in `saving`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_ckpt.api.collector import paused_collector
from hyper_ckpt.api.common import (
    CheckpointId,
    check_number,
    check_timeout,
    check_type,
    in_flight,
    operation,
    resolve_id,
    resolve_platform,
    settle,
)
from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.api.saving import Saving
from hyper_ckpt.api.saving_alone import SavingAlone, id_of
from hyper_ckpt.api.writing import SaveCall
from hyper_ckpt.contracts.placement import StorageWriter
from hyper_ckpt.contracts.planner import SavePlanner
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.engine.workers import default_threads
from hyper_ckpt.metadata import Metadata
from hyper_ckpt.options import DEFAULT_TIMEOUT, SaveOptions
from hyper_ckpt.planning.save import SavePolicy
from hyper_ckpt.planning.standard import StandardSavePlanner
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.filesystem import FileSystemWriter


def save(
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
) -> Metadata:
    """Saves a state. Every rank calls it, with the same arguments and its own part of the state.

    When it returns, the checkpoint is complete for all ranks. If it raises, it raises on every rank,
    nothing was published, and what lay at the path before is untouched.

    Args:
        state_dict: nested dicts, lists and tuples of tensors, `ShardedTensor`, `PerRank` and plain values.
        checkpoint_id: path or URL of the checkpoint; `~` and `file://` are understood.
        storage_writer: decides on files; with `checkpoint_id`, `storage_writer.at(checkpoint_id)` is used.
        planner: decides who writes what; a planner, or the name of one that a plugin announces.
        platform: a Platform or its name; None finds it from the state.
        no_dist: this process saves alone, whatever runs.
        use_collectives: False: ranks do not talk. Each stores all that it holds (nothing is shared out, and values
            are not compared), `save` returns on each when its own part is there, and the checkpoint is complete once
            all parts are. Needs `SaveOptions(save_token=...)` and an empty path, whatever `overwrite` says; `planner`,
            `remove_redundancy` and `save_to_minimum_rank` have no meaning.
        remove_redundancy: store what several ranks hold once; False: every holder stores its copy.
        save_to_minimum_rank: the lowest holder stores what several hold, instead of sharing it out.
        overwrite: replace a checkpoint at this path, atomically.
        durable: survive a power failure once this returns.
        threads: threads that write; None: one per processor, 2 to 8.
        max_host_bytes: the most host memory that this rank uses besides the state; None: 256 MiB, or one
            tensor's part outside host memory if that is larger.
        timeout: seconds until ranks that do not answer are reported.
        user_metadata: a plain value to keep with the checkpoint.
        options: rarer options.

    Returns:
        What was saved: everything on rank 0, elsewhere what the rank itself stored.

    Raises:
        CheckpointExistsError: a checkpoint is in the way.
        UnsupportedStateError: a value cannot be stored; names it.
        PlatformError: there are several processes (WORLD_SIZE, MS_WORKER_NUM, or another framework's process group
            says so), none of them is connected, and neither `platform` nor `no_dist` was given.
        RanksDisagreeError, RankFailedError, RankTimeoutError: another rank is the cause; names it.
        SaveInFlightError: an asynchronous save is not over within `timeout`. If one has failed, its error.
        StoreError: the store failed; names the file.
        ValueError: neither checkpoint_id nor a writer with a path was given, or options contradict each other.
    """
    arguments = Arguments(
        checkpoint_id, storage_writer, planner, use_collectives, remove_redundancy, save_to_minimum_rank, overwrite,
        durable, threads, max_host_bytes, user_metadata, options or SaveOptions(),
    )  # fmt: skip
    chosen = resolve_platform(platform, state_dict, no_dist, saves=True)
    with paused_collector():
        return _save(arguments, chosen, timeout, state_dict)


def _save(arguments: Arguments, platform: Platform, timeout: float, state: Mapping[Any, Any]) -> Metadata:
    # Saves become complete in the order of the calls.
    saving, _ = arguments.start(platform, timeout, waits_for_all=True)
    with saving.reporter.failing():
        begun = saving.begin(state)
        return begun.finish(begun.write)


@dataclass(frozen=True, eq=False)
class Arguments:
    """What `save` and `async_save` are called with, in the order of `save`."""

    checkpoint_id: CheckpointId | None
    storage_writer: StorageWriter | None
    planner: SavePlanner | str | None
    use_collectives: bool
    remove_redundancy: bool
    save_to_minimum_rank: bool
    overwrite: bool
    durable: bool
    threads: int | None
    max_host_bytes: int | None
    user_metadata: Any
    options: SaveOptions

    def start(self, platform: Platform, timeout: float, *, waits_for_all: bool) -> tuple[Saving | SavingAlone, float]:
        """The story that these arguments ask for, once there is room for it, or no save in flight; and seconds waited.

        Raises:
            ValueError, TypeError, CheckpointError: they cannot be meant; or an earlier save in the background failed.
            SaveInFlightError: there was no room within `timeout`.
        """
        if not self.use_collectives:
            call, waited = self._resolve(platform, check_timeout(timeout), waits_for_all)
            save_id = id_of(self.options.save_token, platform.ranks.world_size)
            return SavingAlone(call, save_id, _reporter(call)), waited
        # From here on the ranks count this call, so that one which fails at once stays in step with the others.
        this = operation(platform, timeout, f"save {self.checkpoint_id!r}")
        call, waited = settle(this, lambda: self._resolve(platform, check_timeout(timeout), waits_for_all))
        return Saving(call, this, _reporter(call)), waited

    def _resolve(self, platform: Platform, timeout: float, waits_for_all: bool) -> tuple[SaveCall, float]:
        self._check()
        flight, most = in_flight(platform), 1 if waits_for_all else self.options.max_in_flight
        waited = flight.wait_room(most, timeout)
        earlier = flight.failure(most)
        if earlier is not None:
            raise _of_earlier(earlier) from earlier
        own = self.storage_writer.checkpoint_id if self.storage_writer else None
        where = resolve_id(self.checkpoint_id, own, "storage_writer")
        store = registry().store(where)
        # What it finds there is what this save must replace.
        flight.wait_over(store.url, timeout)
        planner = registry().save_planner(self.planner) if isinstance(self.planner, str) else self.planner
        call = SaveCall(
            platform,
            store,
            (self.storage_writer or FileSystemWriter()).at(where),
            planner or StandardSavePlanner(SavePolicy(self.remove_redundancy, self.save_to_minimum_rank)),
            self.options,
            self.overwrite,
            self.durable,
            check_number("threads", self.threads, 1) or default_threads(),
            check_number("max_host_bytes", self.max_host_bytes, 0),
            self.user_metadata,
        )
        return call, waited

    def _check(self) -> None:
        check_type("options", self.options, SaveOptions)
        check_type("storage_writer", self.storage_writer, StorageWriter, type(None))
        check_type("planner", self.planner, SavePlanner, str, type(None))
        check_number("threads", self.threads, 1)
        check_number("max_host_bytes", self.max_host_bytes, 0)
        if self.use_collectives and self.options.save_token is not None:
            raise ValueError("save_token is for use_collectives=False: ranks that talk draw an id of their own")
        if not self.use_collectives and self.planner is not None:
            raise ValueError("a planner shares out what ranks hold: with use_collectives=False each stores all of it")


def _reporter(call: SaveCall) -> Reporter:
    reporter = Reporter("save", call.store.url, call.platform, not call.options.progress, registry().observers())
    return reporter.start()


def _of_earlier(error: BaseException) -> BaseException:
    """The failure of a save in the background, as the call that hears of it raises it."""
    text = f"an earlier save in the background failed, and nothing of this call was done: call it again. {error}"
    told = copy.copy(error)
    told.args = (text, *error.args[1:])
    return told
