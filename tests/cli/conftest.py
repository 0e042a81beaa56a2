import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyper_ckpt.cli.app import cli

from ._world import save_by_four


@pytest.fixture(scope="session")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "step-7"
    save_by_four(str(path))
    return path


@pytest.fixture
def checkpoint(_saved: Path, tmp_path: Path) -> Path:
    """A checkpoint of 4 ranks, to do with as one likes."""
    return Path(shutil.copytree(_saved, tmp_path / "step-7"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in this process, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(cli, [str(a) for a in args], prog_name="hyper-ckpt")
