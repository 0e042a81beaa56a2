"""The commands. What they need is imported when one runs, so that `--help` is quick."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import click

from hyper_ckpt.cli import exits, text
from hyper_ckpt.cli.changes import clean_command, copy_command, remove_command
from hyper_ckpt.cli.options import HomePath, debug_option, json_option
from hyper_ckpt.text import size
from hyper_ckpt.version import VERSION


@click.group(cls=exits.Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="hyper-ckpt")
@debug_option
def cli() -> None:
    """Look at checkpoints of hyper-ckpt, copy and remove them. They are given as paths or URLs.

    \b
    Exit codes:
      0  fine
      1  damaged, or the save did not finish
      2  wrong usage
      3  no checkpoint there
      4  another error
    """


for _command in (clean_command, remove_command, copy_command):
    cli.add_command(_command)


@cli.command("ls")
@click.argument("root", default=".")
@json_option
@debug_option
def list_command(root: str, as_json: bool) -> None:
    """List the checkpoints in ROOT and one level below, the newest last.

    Numbered ones (step-9, step-10) stand in the order of their numbers. STATE is complete, incomplete (the
    save did not finish, or still runs), damaged, unreadable (no permission, an I/O error, or no regular file), or newer
    (than this release). Data is not read: see verify. NOTES are what a CheckpointManager keeps with them: pinned, and
    metrics.
    """
    from hyper_ckpt.manager.listing import checkpoints
    from hyper_ckpt.registry import registry

    store = registry().store(root)
    found = checkpoints(store)
    if as_json:
        click.echo(text.as_json({"root": store.url, "checkpoints": [dataclasses.asdict(e) for e in found]}))
    elif found:
        _print(_list_lines(found))
    if not found:
        exits.fail(f"no checkpoint in {store.url}, and none one level below")
        raise click.exceptions.Exit(exits.NOT_FOUND)


@cli.command("show")
@click.argument("checkpoint")
@click.option(
    "--tensor", metavar="NAME", help="Only this tensor (or pattern, with * and ?): file and bytes of each chunk."
)
@click.option("--files", is_flag=True, help="The files in place of tensors and values.")
@click.option("--limit", type=click.IntRange(0), default=200, show_default=True, help="Lines of each list; 0: all.")
@json_option
@debug_option
def show_command(checkpoint: str, tensor: str | None, files: bool, limit: int, as_json: bool) -> None:
    """Show what CHECKPOINT holds: tensors, how each is split, plain values.

    SPLIT tells how the stored bytes are cut: "4 x (2,·)" is four chunks of two rows, "·" a dimension that is
    not cut. Lines fit the terminal (COLUMNS); names too long for that lose their middle.
    """
    from hyper_ckpt.cli import show

    view = show.look(checkpoint)
    _print(
        show.as_json(view, tensor=tensor) if as_json else show.as_text(view, tensor=tensor, files=files, limit=limit)
    )


@cli.command("verify")
@click.argument("checkpoint")
@click.option("--threads", type=click.IntRange(1), help="Threads that read. Default: one per processor, 2 to 8.")
@json_option
@debug_option
def verify_command(checkpoint: str, threads: int | None, as_json: bool) -> None:
    """Read all of CHECKPOINT and compare it with its digests."""
    from hyper_ckpt.cli import verify

    begin = time.monotonic()
    outcome = verify.check(checkpoint, threads)
    seconds = time.monotonic() - begin
    if as_json:
        report = outcome.report
        facts = {"checkpoint": outcome.url, "state": outcome.state, "ok": report.ok, "seconds": round(seconds, 3)}
        problems = [dataclasses.asdict(p) for p in report.problems]
        click.echo(text.as_json({**facts, "bytes_checked": report.bytes_checked, "problems": problems}))
    else:
        _print(verify.as_text(outcome, seconds))
    if not outcome.report.ok:
        raise click.exceptions.Exit(exits.DAMAGED)


@cli.command("plugins")
@json_option
@debug_option
def plugins_command(as_json: bool) -> None:
    """List the plugins of this environment, ready or with the error that stopped them."""
    from hyper_ckpt.cli import plugins
    from hyper_ckpt.registry import registry

    found = registry().plugins()
    if as_json:
        click.echo(text.as_json({"plugins": [dataclasses.asdict(plugin) for plugin in found]}))
    else:
        _print(plugins.as_text(found))


@cli.command("conformance")
@click.option("--platform", metavar="NAME", help="The platform to test, as `plugins` lists it.")
@click.option("--store", metavar="URL", help="A place where the store under test may write; it is left as it was.")
@click.option("--ranks", type=click.IntRange(1), default=4, show_default=True, help="Ranks of the platform's world.")
@click.option("--check", "only", metavar="CHECK", multiple=True, help="Only this check. May be given several times.")
@click.option(
    "--without",
    metavar="NAME=REASON",
    multiple=True,
    help="Leave out a check, or a part of the suite, for this reason. May be given several times.",
)
@click.option("--report", metavar="FILE", type=HomePath(dir_okay=False, writable=True), help="Also write JSON here.")
@click.option(
    "--limit",
    metavar="SECONDS",
    type=click.FloatRange(1),
    help="How long a check may take: 120 in one process, 60 on a world, if this is not given.",
)
@click.option("--list", "listing", is_flag=True, help="List the checks and what they promise; run nothing.")
@debug_option
def conformance_command(
    platform: str | None,
    store: str | None,
    ranks: int,
    only: tuple[str, ...],
    without: tuple[str, ...],
    report: str | None,
    limit: float | None,
    listing: bool,
) -> None:
    """Test that a platform or a store keeps what its contract promises.

    For authors of plugins, and to test a platform on the hardware at hand. Exit code 1: a promise is broken; what
    was promised, what was seen and what to change stands with each.
    """
    from hyper_ckpt.cli import conformance

    if listing:
        conformance.show(platform, store)
        return
    code = conformance.run(platform, store, ranks, only, without, report, limit)
    if code != exits.OK:
        raise click.exceptions.Exit(code)


@cli.command("bench")
@click.argument("path", type=HomePath(exists=True, file_okay=False))
@click.option("--mib", type=click.IntRange(16), default=256, show_default=True, help="Size of the state that is saved.")
@click.option("--repetitions", type=click.IntRange(1), default=5, show_default=True, help="How often each is timed.")
@json_option
@debug_option
def bench_command(path: str, mib: int, repetitions: int, as_json: bool) -> None:
    """Measure the disk at PATH, and saves and loads as a fraction of what it can do.

    Everything takes turns in one run; a new folder is made in PATH, and removed.
    """
    from hyper_ckpt.cli import bench

    lines = bench.run(path, mib, repetitions)
    if as_json:
        click.echo(text.as_json({"mib": mib, "lines": [dataclasses.asdict(line) for line in lines]}))
    else:
        _print(bench.as_text(lines))


def _print(lines: Iterable[str]) -> None:
    """Writes in large pieces: click flushes each of them."""
    pending: list[str] = []
    for line in lines:
        pending.append(line)
        if len(pending) >= 1000:
            click.echo("\n".join(pending))
            pending.clear()
    if pending:
        click.echo("\n".join(pending))


def _list_lines(found: Iterable[Any]) -> Iterable[str]:
    now = time.time()
    rows = [
        (
            e.name,
            text.duration(now - e.created) if e.created else "",
            size(e.nbytes),
            "" if e.world_size is None else f"{e.world_size:,}",
            "" if e.tensors is None else f"{e.tensors:,}",
            e.state,
            _notes(e),
        )
        for e in found
    ]
    header = ("CHECKPOINT", "AGE", "SIZE", "RANKS", "TENSORS", "STATE", "NOTES")
    columns = len(header) if any(row[-1] for row in rows) else len(header) - 1
    yield from text.table(header[:columns], [row[:columns] for row in rows], right=(1, 2, 3, 4))
    for e in found:
        if e.problem is not None and e.state != "incomplete":
            yield text.paragraph(f"{e.name}: {e.problem}")


def _notes(entry: Any) -> str:
    metrics = [f"{name}={'nan' if value is None else f'{value:.6g}'}" for name, value in entry.metrics.items()]
    return ", ".join(["pinned"] * entry.pinned + metrics)
