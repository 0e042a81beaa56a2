"""Runs the suite that every platform, or every store, must pass."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from hyper_ckpt.cli import exits
from hyper_ckpt.testing.conformance import command
from hyper_ckpt.testing.conformance.check import Check, ChoiceError, Outcome
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS
from hyper_ckpt.testing.conformance.store import STORE_CHECKS
from hyper_ckpt.text import clean

_HEAD = 68  # part and name of a check, and dots up to its outcome


def run(
    platform: str | None,
    store: str | None,
    ranks: int,
    only: Sequence[str],
    without: Sequence[str],
    report: str | None,
    limit: float | None = None,
) -> int:
    """Runs a suite and prints each outcome as it comes. Returns the exit code.

    Raises:
        click.UsageError: not exactly one of platform and store, or an unknown check.
    """
    if (platform is None) == (store is None):
        raise click.UsageError("give either --platform NAME or --store URL")
    choice = command.Choice(tuple(only), dict(map(_reason, without)))
    subject: dict[str, Any] = {"store": store} if store else {"platform": platform, "ranks": ranks}
    shown = _Shown(subject, choice, None if report is None else Path(report))
    begin = time.monotonic()
    if store:
        running = command.run_store(store, choice, shown.started, limit)
    else:
        running = command.run_platform(platform or "", ranks, choice, shown.started, limit)
    try:
        for outcome in running:
            shown.ended(outcome)
    except ChoiceError as error:
        raise click.UsageError(str(error)) from None
    shown.write(None)
    counts = {status: sum(o.status == status for o in shown.outcomes) for status in ("passed", "failed", "skipped")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    click.echo(f"{told} in {time.monotonic() - begin:.1f} s")
    return exits.DAMAGED if counts["failed"] else exits.OK


@dataclass
class _Shown:
    """Prints what comes, and keeps a report of it."""

    subject: dict[str, Any]
    choice: command.Choice
    report: Path | None
    outcomes: list[Outcome] = field(default_factory=list)

    def started(self, check: Check) -> None:
        click.echo(_head(check), nl=False)
        self.write(check.name)

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.message != command.NOT_ASKED:
            click.echo("\n".join(_lines(outcome, self.choice)))

    def write(self, running: str | None) -> None:
        if self.report is None:
            return
        store = self.subject.get("store")
        facts = command.store_facts(store) if store else command.platform_facts(self.subject["platform"])
        _replace(self.report, command.report(self.subject, self.outcomes, *facts, running))


def show(platform: str | None, store: str | None) -> None:
    """Prints the checks of the suite that is chosen, or of both, and what each promises."""
    suites = [("platform", PLATFORM_CHECKS)] if not store or platform else []
    suites += [("store", STORE_CHECKS)] if not platform or store else []
    for name, checks in suites:
        click.echo(f"{name}: {len(checks)} checks")
        for check in checks:
            click.echo(f"  {check.part:11}{check.name}\n             {check.promise}")


def _replace(path: Path, content: Any) -> None:
    """Writes JSON so that a reader sees all of it, whenever this process ends."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout and the like
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _reason(option: str) -> tuple[str, str]:
    name, _, reason = option.partition("=")
    if not reason.strip():
        raise click.UsageError(f"--without {option}: give a reason, --without NAME=REASON")
    return name, reason


def _head(check: Check | Outcome) -> str:
    name = check.name if isinstance(check, Check) else check.check
    return f"{check.part:11}{name} ".ljust(_HEAD, ".") + " "


def _lines(outcome: Outcome, choice: command.Choice) -> Iterator[str]:
    """What follows a head that was printed when the check started; of a check that did not, its head too."""
    left_out = {outcome.check, outcome.part} & set(choice.without or {})
    head = _head(outcome) if left_out else ""
    yield f"{head}{outcome.status} ({outcome.seconds:.1f} s)"
    for line in outcome.message.splitlines():
        yield clean(f"           {line}")
