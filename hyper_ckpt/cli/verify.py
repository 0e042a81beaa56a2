"""Checks a checkpoint, with progress."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hyper_ckpt.api.verify import verify
from hyper_ckpt.cli import text
from hyper_ckpt.engine.verify import Problem, VerifyReport
from hyper_ckpt.errors import CheckpointNotFoundError
from hyper_ckpt.manager.listing import is_part
from hyper_ckpt.manifest import MANIFEST_NAME
from hyper_ckpt.registry import registry
from hyper_ckpt.text import clean, size


@dataclass(frozen=True)
class Outcome:
    """Where a checkpoint lies, what was found, and the verdict: ok, damaged or incomplete."""

    url: str
    report: VerifyReport
    state: str


def check(checkpoint: str, threads: int | None) -> Outcome:
    """As `hyper_ckpt.verify`, with progress on a terminal; a save that did not finish is a problem, too.

    Raises:
        CheckpointNotFoundError: there is nothing.
    """
    store = registry().store(checkpoint)
    try:
        with progress_bar("verifying") as progress:
            report = verify(checkpoint, threads=threads, progress=progress)
    except CheckpointNotFoundError as error:
        if not any(map(is_part, store.list())):
            raise
        return Outcome(store.url, _without_manifest(error), "incomplete")
    return Outcome(store.url, report, "ok" if report.ok else "damaged")


def _without_manifest(error: Exception) -> VerifyReport:
    return VerifyReport(0, (Problem(MANIFEST_NAME, "", 0, 0, str(error)),))


@contextlib.contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the error stream, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(doing),
        BarColumn(20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)


def as_text(outcome: Outcome, seconds: float) -> Iterator[str]:
    """The lines of `verify`: every problem by file, then the verdict."""
    report, problems = outcome.report, joined(outcome.report.problems)
    for file, of_file in itertools.groupby(problems, lambda p: p.file):
        yield clean(file)
        by_what: dict[str, list[Problem]] = {}
        for each in of_file:
            by_what.setdefault(each.what, []).append(each)
        for what, places in by_what.items():
            yield text.paragraph(what, "  ")
            yield from (f"    {_place(p)}" for p in places if p.stop or p.name)
    checked = f"{size(report.bytes_checked)} checked in {seconds:.1f} s"
    found = "" if report.ok else f", {text.count(len(problems), 'problem')}"
    yield f"{outcome.state}{found}: {clean(outcome.url)}, {checked}"


def _place(problem: Problem) -> str:
    where = f"bytes {problem.start:,} to {problem.stop:,}" if problem.stop else ""
    return clean(" of ".join(filter(None, [where, problem.name])))


def joined(problems: Sequence[Problem]) -> list[Problem]:
    """Problems in the order of files and bytes; those of adjacent blocks as one."""
    out: list[Problem] = []
    for each in sorted(problems, key=lambda p: (p.file, p.start, p.stop)):
        last = out[-1] if out else None
        if last and each.start and last.stop == each.start and _same(last, each):
            out[-1] = replace(last, stop=each.stop)
        else:
            out.append(each)
    return out


def _same(one: Problem, other: Problem) -> bool:
    return (one.file, one.name, one.what) == (other.file, other.name, other.what)
