"""hyper-ckpt bench: it measures, says so, and leaves nothing behind."""

import json
from pathlib import Path

from click.testing import CliRunner

from hyper_ckpt.cli.app import cli


def test_it_measures_and_cleans_up(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", str(tmp_path), "--mib", "16", "--repetitions", "1", "--json"])
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)["lines"]
    assert [line["what"] for line in lines] == ["save, cached", "save, durable", "load, unverified", "load, verified"]
    assert all(line["seconds"] > 0 and line["floor"] > 0 and line["nbytes"] == 16 << 20 for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_as_text(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", str(tmp_path), "--mib", "16", "--repetitions", "1"])
    assert "of the floor" in done.stdout
    assert "save, durable" in done.stdout


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["bench", str(tmp_path / "absent")]).exit_code == 2
