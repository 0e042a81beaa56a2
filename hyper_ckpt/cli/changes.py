"""The commands that change something: clean, rm, cp. What they need is imported when one runs."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

import click

from hyper_ckpt.cli import exits, text
from hyper_ckpt.cli.options import debug_option
from hyper_ckpt.errors import CheckpointError, CheckpointNotFoundError
from hyper_ckpt.text import clean as printable
from hyper_ckpt.text import size

if TYPE_CHECKING:
    from hyper_ckpt.manager.listing import Entry

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Callback of an option that takes a time such as 90s, 30m, 24h, 7d."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no time: write 90s, 30m, 24h or 7d", context, parameter)
    return float(match[1]) * _UNITS[match[2]]


@click.command("clean")
@click.argument("run")
@click.option(
    "--older-than",
    metavar="AGE",
    default="24h",
    show_default=True,
    callback=_seconds,
    help="Younger files stay: a save may be at work.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@debug_option
def clean_command(run: str, older_than: float, dry_run: bool) -> None:
    """Remove what saves that died left in RUN and one level below.

    Complete checkpoints stay as they are, and so does what this library did not write.
    """
    from hyper_ckpt.manager.listing import folders
    from hyper_ckpt.manager.removal import clean
    from hyper_ckpt.registry import registry

    store = registry().store(run)
    if not any(folders(store).values()):
        exits.fail(f"nothing lies in {store.url}")
        raise click.exceptions.Exit(exits.NOT_FOUND)
    gone, problems = clean(store, older_than, dry_run=dry_run)
    for each in gone:
        click.echo(f"{printable(each.name)}  {size(each.nbytes)}")
    total = size(sum(each.nbytes for each in gone))
    click.echo(f"{'would remove' if dry_run else 'removed'} {text.count(len(gone), 'file')}, {total}")
    for problem in problems:
        exits.fail(problem)
    if problems:
        raise click.exceptions.Exit(exits.FAILED)


@click.command("rm")
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also pinned ones, and those that may still be being saved.")
@debug_option
def remove_command(checkpoints: tuple[str, ...], yes: bool, force: bool) -> None:
    """Remove checkpoints. Other files in their folders stay.

    All are looked at first: if one cannot go, all stay.
    """
    from hyper_ckpt.manager.removal import remove_checkpoint

    found = [_checkpoint_at(each) for each in checkpoints]
    for entry in found:
        if force:
            continue
        if entry.pinned:
            raise CheckpointError(f"{entry.path} is pinned: unpin it in its run, or pass --force")
        if entry.state == "incomplete":
            raise CheckpointError(
                f"{entry.path} is incomplete, and may still be being saved: hyper-ckpt clean removes what is old, "
                "--force removes it now"
            )
    if not yes:
        _ask([f"{printable(e.path)}  {e.state}, {size(e.nbytes)}" for e in found])
    for entry in found:
        remove_checkpoint(entry.path)
        click.echo(f"removed {printable(entry.path)}, {size(entry.nbytes)}")


def _checkpoint_at(url: str) -> Entry:
    """The checkpoint at a path. Of a run, which is none, the error says how its checkpoints are named."""
    from hyper_ckpt.manager.listing import checkpoints, entry_at
    from hyper_ckpt.registry import registry

    store = registry().store(url)
    try:
        return entry_at(store)
    except CheckpointNotFoundError as error:
        below = checkpoints(store)
        if not below:
            raise
        raise CheckpointNotFoundError(
            f"{store.url} is no checkpoint but holds {text.count(len(below), 'checkpoint')}, as the folder of a run: "
            f"name those to remove, such as {below[0].path}; hyper-ckpt ls {store.url} lists them"
        ) from error


def _ask(lines: list[str]) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("nobody is there to ask: pass --yes to remove without a question")
    for line in lines:
        click.echo(line)
    click.confirm(f"Remove {text.count(len(lines), 'checkpoint')}?", abort=True)


@click.command("cp")
@click.argument("source")
@click.argument("target")
@click.option("--threads", type=click.IntRange(1), help="Threads that copy. Default: one per processor, 2 to 8.")
@debug_option
def copy_command(source: str, target: str, threads: int | None) -> None:
    """Copy a checkpoint from SOURCE to TARGET, paths or URLs.

    Every block is checked on the way. TARGET is complete at the end, or nothing is there; a checkpoint that is there
    already is left alone.
    """
    from hyper_ckpt.cli.verify import progress_bar
    from hyper_ckpt.manager.copying import copy_checkpoint

    begin = time.monotonic()
    with progress_bar("copying") as progress:
        nbytes = copy_checkpoint(source, target, threads=threads, progress=progress)
    click.echo(f"copied {size(nbytes)} to {printable(target)} in {time.monotonic() - begin:.1f} s, all of it verified")
