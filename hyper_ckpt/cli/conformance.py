"""Runs the suite that every platform, or every store, must pass."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from hyper_ckpt.cli import exits
from hyper_ckpt.testing.conformance import command
from hyper_ckpt.testing.conformance.check import ChoiceError, Outcome
from hyper_ckpt.text import clean


def run(
    platform: str | None,
    store: str | None,
    ranks: int,
    only: Sequence[str],
    without: Sequence[str],
    report: str | None,
) -> int:
    """Runs a suite and prints each outcome as it comes. Returns the exit code.

    Raises:
        click.UsageError: not exactly one of platform and store, or an unknown check.
    """
    if (platform is None) == (store is None):
        raise click.UsageError("give either --platform NAME or --store URL")
    choice = command.Choice(tuple(only), dict(map(_reason, without)))
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    try:
        running = command.run_store(store, choice) if store else command.run_platform(platform or "", ranks, choice)
        for outcome in running:
            outcomes.append(outcome)
            if outcome.message != command.NOT_ASKED:
                click.echo("\n".join(_lines(outcome)))
    except ChoiceError as error:
        raise click.UsageError(str(error)) from None
    counts = [f"{n} {s}" for s in ("passed", "failed", "skipped") if (n := sum(o.status == s for o in outcomes))]
    click.echo(f"{', '.join(counts)} in {time.monotonic() - begin:.1f} s")
    if report is not None:
        subject = {"store": store} if store else {"platform": platform, "ranks": ranks}
        facts = command.store_facts(store) if store else command.platform_facts(platform or "")
        content = command.report(subject, outcomes, *facts)
        Path(report).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return exits.DAMAGED if any(outcome.status == "failed" for outcome in outcomes) else exits.OK


def _reason(option: str) -> tuple[str, str]:
    name, _, reason = option.partition("=")
    if not reason.strip():
        raise click.UsageError(f"--without {option}: give a reason, --without NAME=REASON")
    return name, reason


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"{outcome.status:8}{outcome.part:11}{outcome.check}  ({outcome.seconds:.1f} s)"
    for line in outcome.message.splitlines():
        yield clean(f"          {line}")
