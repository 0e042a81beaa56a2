"""The command line: what lies in a directory, what a checkpoint holds, whether it is whole."""

from __future__ import annotations


def main() -> None:
    """The entry point of `hyper-ckpt`. Ends the process with one of the exit codes that `--help` lists."""
    import io
    import sys

    from hyper_ckpt.cli.app import cli

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without "·" is no reason to fail
    cli(prog_name="hyper-ckpt")
