"""load: what users call; the story is in `loading`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_ckpt.agreement import Operation
from hyper_ckpt.api.collector import paused_collector
from hyper_ckpt.api.common import (
    MAX_TIMEOUT,
    CheckpointId,
    check_number,
    check_timeout,
    check_type,
    operation,
    resolve_id,
    resolve_platform,
    settle,
)
from hyper_ckpt.api.load_report import LoadReport
from hyper_ckpt.api.loading import LoadCall, Loading
from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.contracts.placement import StorageReader
from hyper_ckpt.contracts.planner import LoadPlanner
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.engine.workers import default_threads
from hyper_ckpt.options import DEFAULT_TIMEOUT, LoadOptions, ShareReads, Strict, Verify
from hyper_ckpt.planning.standard import StandardLoadPlanner
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.filesystem import FileSystemReader

__all__ = ["LoadReport", "load"]


def load(
    state_dict: Mapping[Any, Any],
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | str | None = None,
    platform: Platform | str | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    strict: Strict = True,
    verify: Verify = "during",
    share_reads: ShareReads = "auto",
    threads: int | None = None,
    max_host_bytes: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Loads a checkpoint into a state, in place. Every rank calls it, with the same arguments.

    The state may be distributed in any way, over any number of ranks. Tensors are filled where they lie,
    plain values are set in the given dicts and lists; a target on the meta device is replaced in its dict. Objects with
    a state_dict are handed their whole saved state by load_state_dict, but for networks, which must fit like a dict.

    Args:
        state_dict: what to load, with targets in place.
        checkpoint_id: path or URL of the checkpoint; `~` and `file://` are understood.
        storage_reader: finds chunks; with `checkpoint_id`, `storage_reader.at(checkpoint_id)` is used.
        planner: decides what is loaded into what; a planner, or the name of one that a plugin announces.
        platform: a Platform or its name; None finds it from the state.
        no_dist: this process loads alone, whatever runs.
        use_collectives: False: ranks do not talk, and each reads for itself what it wants, its own copy where it
            saved one. Any checkpoint can be loaded so. Errors are one rank's own.
        strict: True refuses missing keys and differing shapes, dtypes and containers before any data is read;
            "exact" refuses unexpected keys too; False loads what matches, but never a part of an object.
        verify: "during" checks every block while it is read (a damaged one is found after earlier ones were
            loaded); "before" checks all blocks first, so that the target stays untouched; "off" checks
            only the manifest and the sizes and headers of files.
        share_reads: True: what several ranks want is read once and passed on; False: each rank reads for itself;
            "auto": what is likely to be faster, by a short measurement. `LoadReport.shared_reads` says which it was.
        threads: threads that read; None: one per processor, 2 to 8.
        max_host_bytes: the most host memory besides the target; None: 256 MiB, or what shards outside host
            memory need at once if that is more.
        timeout: seconds until ranks that do not answer are reported.
        options: rarer options.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        StateMismatchError: state and checkpoint differ; one of its subclasses where they differ in one way only.
        CorruptCheckpointError: something stored is damaged, missing or mixed up; names it.
        RanksDisagreeError, RankFailedError, RankTimeoutError: another rank is the cause; names it.
        ValueError: neither checkpoint_id nor a reader with a path was given, or an option is none of those above.
    """
    chosen = resolve_platform(platform, state_dict, no_dist)

    def resolve() -> LoadCall:
        check_timeout(timeout)
        check_type("options", options, LoadOptions, type(None))
        check_type("storage_reader", storage_reader, StorageReader, type(None))
        check_type("planner", planner, LoadPlanner, str, type(None))
        where = resolve_id(checkpoint_id, storage_reader.checkpoint_id if storage_reader else None, "storage_reader")
        _check_choices(strict, verify, share_reads)
        return LoadCall(
            chosen,
            registry().store(where),
            (storage_reader or FileSystemReader()).at(where),
            (registry().load_planner(planner) if isinstance(planner, str) else planner) or StandardLoadPlanner(),
            options or LoadOptions(),
            strict,
            verify,
            share_reads if use_collectives and chosen.ranks.world_size > 1 else False,
            check_number("threads", threads, 1) or default_threads(),
            check_number("max_host_bytes", max_host_bytes, 0),
        )

    if use_collectives:
        # From here on the ranks count this call, so that one which fails at once stays in step with the others.
        this = operation(chosen, timeout, f"load {checkpoint_id!r}")
    else:
        this = Operation(SingleRank(), 0, min(check_timeout(timeout), MAX_TIMEOUT))
    call = settle(this, resolve)
    quiet = not call.options.progress
    reporter = Reporter("load", call.store.url, chosen, quiet, registry().observers()).start()
    with reporter.failing(), paused_collector():
        return Loading(call, this, reporter).run(state_dict)


def _check_choices(strict: Strict, verify: Verify, share_reads: ShareReads) -> None:
    if strict not in (True, False, "exact"):
        raise ValueError(f'strict is True, False or "exact", not {strict!r}')
    if verify not in ("off", "during", "before"):
        raise ValueError(f'verify is "off", "during" or "before", not {verify!r}')
    if share_reads not in (True, False, "auto"):
        raise ValueError(f'share_reads is True, False or "auto", not {share_reads!r}')
