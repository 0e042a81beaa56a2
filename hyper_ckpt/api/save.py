"""save: what users call; the story is in `saving`."""

from __future__ import annotations

from typing import Any

from hyper_ckpt.api.common import (
    CheckpointId,
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
    state_dict: dict[Any, Any],
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
        checkpoint_id: path or URL of the checkpoint.
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
        RanksDisagreeError, RankFailedError, RankTimeoutError: another rank is the cause; names it.
        StoreError: the store failed; names the file.
        ValueError: neither checkpoint_id nor a writer with a path was given, or options contradict each other.
    """
    chosen = resolve_platform(platform, state_dict, no_dist)
    own_options = options or SaveOptions()

    def resolve() -> SaveCall:
        where = resolve_id(checkpoint_id, storage_writer.checkpoint_id if storage_writer else None, "storage_writer")
        _check_choices(use_collectives, own_options, planner)
        policy = SavePolicy(remove_redundancy, save_to_minimum_rank)
        return SaveCall(
            chosen,
            registry().store(where),
            (storage_writer or FileSystemWriter()).at(where),
            (registry().save_planner(planner) if isinstance(planner, str) else planner) or StandardSavePlanner(policy),
            own_options,
            overwrite,
            durable,
            threads or default_threads(),
            max_host_bytes,
            user_metadata,
        )

    if not use_collectives:
        call, save_id = resolve(), id_of(own_options.save_token, chosen.ranks.world_size)
        with _reporter(call) as reporter:
            return SavingAlone(call, save_id, reporter).run(state_dict)
    # From here on the ranks count this call, so that one which fails at once stays in step with the others.
    this = operation(chosen, timeout, f"save {checkpoint_id!r}")
    call = settle(this, resolve)
    with _reporter(call) as reporter:
        return Saving(call, this, reporter).run(state_dict)


def _reporter(call: SaveCall) -> Reporter:
    return Reporter("save", call.store.url, call.platform, not call.options.progress, registry().observers())


def _check_choices(use_collectives: bool, options: SaveOptions, planner: object) -> None:
    if use_collectives and options.save_token is not None:
        raise ValueError("save_token is for use_collectives=False: ranks that talk draw an id of their own")
    if not use_collectives and planner is not None:
        raise ValueError("a planner shares out what ranks hold: with use_collectives=False each stores all of it")
