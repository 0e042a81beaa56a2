"""Where a run goes on: the same checkpoint on every rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hyper_ckpt.api.common import attempt, check_timeout, operation
from hyper_ckpt.api.load import LoadReport, load
from hyper_ckpt.api.load_warnings import forgotten_text
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnreadableFileError
from hyper_ckpt.manager.arguments import check_same, step_number
from hyper_ckpt.manager.run import Run
from hyper_ckpt.options import DEFAULT_TIMEOUT
from hyper_ckpt.text import clean

logger = logging.getLogger("hyper_ckpt")


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` did.

    Args:
        step: which was loaded.
        report: of the load, on this rank.
        skipped: newer steps that are damaged or cannot be read, each with the reason.
    """

    step: int
    report: LoadReport
    skipped: tuple[tuple[int, str], ...]


def restore(
    run: Run,
    platform: Platform,
    state: Mapping[Any, Any],
    step: int | None,
    skip_damaged: bool,
    options: Mapping[str, Any],
    arguments: bytes,
) -> Restored | None:
    """See `CheckpointManager.restore`. A load ends alike on all ranks, so that all try the same next one.

    Args:
        arguments: of the manager, which must be the same on all ranks.
    """
    skipped: list[tuple[int, str]] = []
    for number, folder in _candidates(run, platform, step, options.get("timeout", DEFAULT_TIMEOUT), arguments):
        try:
            report = load(state, run.url(folder), platform=platform, **{"verify": "before", **options})
        except (CorruptCheckpointError, CheckpointNotFoundError, UnreadableFileError) as error:
            if step is not None or not skip_damaged:
                raise
            skipped.append((number, str(error)))
            continue
        if report.forgotten and platform.ranks.rank == 0:
            warnings.warn(forgotten_text(report.forgotten, run.url(folder)), stacklevel=3)
        if skipped and platform.ranks.rank == 0:
            warnings.warn(
                f"step {number} of {run.store.url} was loaded, since newer ones cannot be: {reasons(skipped)}",
                stacklevel=3,
            )
        return Restored(number, report, tuple(skipped))
    if skipped:
        raise CorruptCheckpointError(
            f"no checkpoint of {run.store.url} can be loaded: {reasons(skipped)}. Restore its files from a copy, or "
            "begin a run with another root"
        )
    if platform.ranks.rank == 0:
        logger.info("no checkpoint in %s: the run begins at the beginning", clean(run.store.url))
    return None


def reasons(skipped: list[tuple[int, str]]) -> str:
    """The first few steps and why they cannot be loaded, for a message."""
    return "; ".join(f"step {number}: {why}" for number, why in skipped[:4]) + "; ..." * (len(skipped) > 4)


def _candidates(
    run: Run, platform: Platform, step: int | None, timeout: object, arguments: bytes
) -> list[tuple[int, str]]:
    """Steps to try, the newest first, with their folders: those that rank 0 sees."""

    def check() -> int | None:
        check_timeout(timeout)
        return None if step is None else step_number(step)

    number, error = attempt(check)

    def look(sent: list[bytes]) -> bytes:
        check_same(sent)
        if number is not None:
            return msgspec.msgpack.encode([(number, run.existing(number))])
        found = [(i.step, i.path.rpartition("/")[2]) for i in run.steps() if i.state != "incomplete"]
        return msgspec.msgpack.encode(found[::-1])

    this = operation(platform, timeout, f"steps of {run.store.url}")
    data = this.agree("looking for checkpoints", arguments, error, look, last=True)
    return msgspec.msgpack.decode(data, type=list[tuple[int, str]])
