"""How commands end: exit codes, one line per error, silence for a reader that left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback

import click

from hyper_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from hyper_ckpt.text import clean

OK, DAMAGED, USAGE, NOT_FOUND, FAILED = range(5)
DEBUG_VARIABLE = "HYPER_CKPT_DEBUG"
_DEBUG = "hyper_ckpt.debug"


def set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Callback of `--debug`, which stands before or after the name of the command."""
    context.meta[_DEBUG] = context.meta.get(_DEBUG, False) or value


def code_of(error: Exception) -> int:
    """The exit code that tells scripts what went wrong."""
    if isinstance(error, CheckpointNotFoundError):
        return NOT_FOUND
    return DAMAGED if isinstance(error, CorruptCheckpointError) else FAILED


def fail(message: str) -> None:
    """One line on the error stream."""
    click.echo(f"hyper-ckpt: {clean(' '.join(message.split()))}", err=True)


class Commands(click.Group):
    """A group whose commands never end in a traceback, unless it is asked for."""

    def invoke(self, ctx: click.Context) -> object:
        """Runs a command; errors become exit codes."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BrokenPipeError:
            _forget_output()
            ctx.exit(128 + signal.SIGPIPE)
        except (KeyboardInterrupt, click.Abort):
            # click would end with 1, which here means damaged.
            ctx.exit(128 + signal.SIGINT)
        except Exception as error:  # whatever it is: code 1 would mean damaged
            _report(error, ctx.meta.get(_DEBUG, False))
            ctx.exit(code_of(error))


def _report(error: Exception, debug: bool) -> None:
    if debug:
        click.echo("\n".join(map(clean, traceback.format_exc().splitlines())), err=True)
    elif isinstance(error, CheckpointError):
        fail(str(error))
    else:
        fail(f"unexpected {type(error).__name__}: {error}. --debug shows where")


def _forget_output() -> None:
    """The reader is gone: what is still buffered must not fail again when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
