"""Options that several commands have."""

from __future__ import annotations

import os
from typing import Any

import click

from hyper_ckpt.cli import exits

debug_option = click.option(
    "--debug",
    is_flag=True,
    envvar=exits.DEBUG_VARIABLE,
    expose_value=False,
    callback=exits.set_debug,
    help=f"Show where an error comes from. Also {exits.DEBUG_VARIABLE}=1.",
)


class HomePath(click.Path):
    """A path of this machine, with ~ for a home directory also where no shell has expanded it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(os.path.expanduser(value), param, ctx)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON: all of it, names in full.")
