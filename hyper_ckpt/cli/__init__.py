"""The command line: what lies in a directory, what a checkpoint holds, whether it is whole."""

from __future__ import annotations


def main() -> None:
    """The entry point of `hyper-ckpt`. Ends the process with one of the exit codes that `--help` lists."""
    from hyper_ckpt.cli.app import cli

    cli(prog_name="hyper-ckpt")
