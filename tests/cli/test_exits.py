"""What every command does: exit codes, errors in one line, nothing that a terminal obeys, quick help."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

import hyper_ckpt
from hyper_ckpt.cli.app import cli
from hyper_ckpt.cli.text import duration, middle, moment, ranges
from hyper_ckpt.manager import listing
from hyper_ckpt.text import clean, size

from ._world import process

Run = Callable[..., Result]
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\r\n\u202e\x9b2J[bold]"


@pytest.mark.parametrize("command", ["show", "verify"])
def test_no_checkpoint(run: Run, tmp_path: Path, command: str) -> None:
    for where in (tmp_path, tmp_path / "absent", "memory://absent/a"):
        result = run(command, where)
        assert (result.exit_code, result.stdout) == (3, "")
        assert result.stderr.startswith("hyper-ckpt: no checkpoint at")
        assert result.stderr.count("\n") == 1


def test_usage(run: Run, checkpoint: Path) -> None:
    for args in (
        ["show"],
        ["nothing"],
        ["show", checkpoint, "--limit", "-1"],
        ["verify", checkpoint, "--threads", "x"],
    ):
        assert run(*args).exit_code == 2


def test_other_errors(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for args, code in ((["ls", tmp_path / "file"], 4), (["show", tmp_path / "file"], 3), (["verify", "nosuch://a"], 4)):
        result = run(*args)
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for args in (["--debug", "show", tmp_path], ["show", "--debug", tmp_path]):
        result = run(*args)
        assert result.exit_code == 3
        assert "Traceback" in result.stderr
    assert "Traceback" not in run("show", tmp_path).stderr
    monkeypatch.setenv("HYPER_CKPT_DEBUG", "1")
    assert "Traceback" in run("show", tmp_path).stderr


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError("a\x1bb\nc"), 4), (MemoryError(), 4), (KeyboardInterrupt(), 130)]
)
def test_unexpected_errors_are_not_taken_for_damage(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(listing, "checkpoints", fail)
    result = run("ls", tmp_path)
    assert result.exit_code == code
    assert "\x1b" not in result.stderr
    assert result.stderr.count("\n") <= 1


def test_nothing_reaches_the_terminal_as_it_is(run: Run, tmp_path: Path) -> None:
    root = tmp_path / HOSTILE.replace("/", "")
    path = root / f"step-{HOSTILE}"
    state = {f"t{HOSTILE}": np.zeros(4, np.float32), f"v{HOSTILE}": HOSTILE, "d": {f"k{HOSTILE}": {HOSTILE}}}
    hyper_ckpt.save(state, path, durable=False, user_metadata={HOSTILE: HOSTILE})
    outputs = []
    for args in (["ls", root], ["show", path], ["show", path, "--files"], ["show", path, "--tensor", "t*"]):
        for extra in ([], ["--json"]) if "--files" not in args else ([],):
            result = run(*args, *extra)
            assert result.exit_code == 0
            outputs.append(result.output)
    outputs += [run("show", path, "--tensor", HOSTILE).output, run("--debug", "show", root).output]
    next(path.glob("*.safetensors")).unlink()
    outputs += [run("verify", path, *extra).output for extra in ([], ["--json"])] + [run("ls", root).output]
    (path / "manifest.json").write_text("no")
    outputs += [run(command, path).output for command in ("ls", "show", "verify")]
    for output in outputs:
        assert all(line.isprintable() for line in output.split("\n")), output
    assert "[bold]" in outputs[2]


def test_a_name_that_is_no_utf8(run: Run, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/step-\xff"
    os.mkdir(folder)
    for name in (b"/manifest.json", b"/rank-00000-0123456789abcdef.safetensors"):
        with open(folder + name, "wb"):
            pass
    (entry,) = json.loads(run("ls", tmp_path, "--json").stdout)["checkpoints"]
    assert (entry["name"], entry["state"]) == ("step-\udcff", "damaged")
    assert "step-\\udcff" in run("ls", tmp_path).stdout


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    hyper_ckpt.save({str(i): i for i in range(20_000)}, tmp_path / "c", durable=False)
    for extra in (["--json"], ["--limit", "0"]):
        command = [sys.executable, "-m", "hyper_ckpt.cli", "show", str(tmp_path / "c"), *extra]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            assert child.stdout.read(1)
            child.stdout.close()
            assert child.stderr.read() == b""
        # 0 where the system took all of it before it noticed.
        assert child.returncode in (0, 128 + signal.SIGPIPE)


def test_an_output_without_the_characters(checkpoint: Path) -> None:
    done = process("show", checkpoint, PYTHONIOENCODING="latin-1:strict")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2026" in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom hyper_ckpt.cli import main\nsys.argv = ['hyper-ckpt', 'show', '--help']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'numpy', 'msgspec', 'rich', 'pluggy', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_names_the_exit_codes(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "1  damaged" in result.stdout
    assert "3  no checkpoint there" in result.stdout
    for name, command in cli.commands.items():
        assert command.help, name
        assert run(name, "--help").exit_code == 0


def test_texts() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 10_240, 104_858, 1 << 20, 1000 << 20, 3 << 60)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "10.0 KiB", "102 KiB", "1.00 MiB", "0.98 GiB", "3.00 EiB",
    ]  # fmt: skip
    assert [duration(s) for s in (-5, 0, 119, 120, 7200, 200_000, 1e300)] == [
        "0 s",
        "0 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
        "?",
    ]
    assert moment(1e300) == "1e+300 s since 1970"
    assert ranges([5, 0, 1, 2]) == "0-2,5"
    assert middle("abcdefghij", 5) == "ab…ij"
    assert clean("a\x1b\u202e\ud800é語[b]") == "a\\x1b\\u202e\\ud800é語[b]"
