"""`hyper-ckpt conformance`: exit codes, what it prints, its report, and that it leaves nothing behind."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.cli.app import cli
from hyper_ckpt.contracts.platform import PlatformSpec
from hyper_ckpt.contracts.store import StoreSpec
from hyper_ckpt.hookspecs import hookimpl
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS
from hyper_ckpt.testing.conformance.store import STORE_CHECKS
from hyper_ckpt.version import VERSION

from ._bad_stager import Columns
from ._bad_stores import PadsReads
from ._parts import GoodTensors, PartsProbe


class Plugin:
    """A platform without a probe, one that is broken, and a store that pads reads."""

    @hookimpl
    def hyper_ckpt_platforms(self) -> list[PlatformSpec]:
        here = f"{__name__}:broken"
        return [
            PlatformSpec("silent", (), lambda: 0, NumpyPlatform, "pip install silent"),
            PlatformSpec("broken", (), lambda: 0, NumpyPlatform, "pip install broken", here),
        ]

    @hookimpl
    def hyper_ckpt_stores(self) -> list[StoreSpec]:
        return [StoreSpec(("padded",), f"{__name__}:padded")]


def broken() -> PartsProbe:
    return PartsProbe(GoodTensors, Columns)


def padded(url: str) -> PadsReads:
    store = PadsReads(LocalStore(url.removeprefix("padded://")))
    store.url = url
    return store


@pytest.fixture
def plugin() -> Iterator[None]:
    registry().register(Plugin(), "test conformance")
    yield
    registry().unregister("test conformance")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["conformance", *map(str, arguments)])


def test_a_platform_that_passes(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run("--platform", "numpy", "--without", "world=not now", "--report", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["platform"], report["ranks"], report["failed"]) == ("numpy", 4, 0)
    assert report["versions"]["hyper-ckpt"] == VERSION
    assert {"python", "numpy", "os"} <= report["versions"].keys()
    checks = {check["check"]: check for check in report["checks"]}
    assert [*checks] == [check.name for check in PLATFORM_CHECKS]
    assert checks["copy_out_gives_the_bytes"]["status"] == "passed"
    assert checks["groups_are_kept"] | {"seconds": 0} == {
        "check": "groups_are_kept",
        "part": "world",
        "status": "skipped",
        "seconds": 0,
        "message": "not now",
        "promise": next(check.promise for check in PLATFORM_CHECKS if check.name == "groups_are_kept"),
    }
    assert report["passed"] + report["skipped"] == len(PLATFORM_CHECKS)


def test_the_world_of_a_platform() -> None:
    result = run("--platform", "numpy", "--check", "ranks_are_numbered", "--ranks", 2)
    assert result.exit_code == 0, result.output
    assert "1 passed" in result.output
    assert f"{len(PLATFORM_CHECKS) - 1} skipped" in result.output


@pytest.mark.usefixtures("plugin")
def test_a_platform_that_breaks_a_promise(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run("--platform", "broken", "--check", "copy_out_gives_the_bytes", "--report", file)
    assert result.exit_code == 1
    assert all(word in result.output for word in ("failed", "promised: ", "seen: ", "change: "))
    failed = [check for check in json.loads(file.read_text())["checks"] if check["status"] == "failed"]
    assert [check["check"] for check in failed] == ["copy_out_gives_the_bytes"]
    assert "promised" in failed[0]["message"]


@pytest.mark.usefixtures("plugin")
def test_a_platform_without_a_probe() -> None:
    result = run("--platform", "silent")
    assert result.exit_code == 4
    assert "PlatformProbe" in result.output
    assert "probe='module:callable'" in result.output


def test_a_store_that_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("mine")
    for place in ("there", "new/deep"):
        result = run("--store", tmp_path / place)
        assert result.exit_code == 0, result.output
        assert f"{len(STORE_CHECKS)} passed" in result.output
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["there", "there/mine"]


@pytest.mark.usefixtures("plugin")
def test_a_store_that_breaks_a_promise(tmp_path: Path) -> None:
    only = ("--check", "a_short_read_is_an_error", "--check", "lists_by_prefix")
    result = run("--store", f"padded://{tmp_path}", *only, "--report", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "1 passed, 1 failed" in result.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "report.json"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["store"] == f"padded://{tmp_path}"


def test_a_store_of_one_process() -> None:
    result = run("--store", "memory://conformance", "--without", "processes=it lives in one process")
    assert result.exit_code == 0, result.output
    assert registry().store("memory://conformance").list() == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "either --platform NAME or --store URL"),
        (("--platform", "numpy", "--store", "x"), "either"),
        (("--platform", "numpy", "--check", "nothing"), "no check is called nothing"),
        (("--platform", "numpy", "--without", "wrold=why"), "wrold"),
        (("--platform", "numpy", "--without", "world"), "NAME=REASON"),
        (("--platform", "numpy", "--ranks", "0"), "0"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_an_unknown_platform() -> None:
    result = run("--platform", "nothing")
    assert result.exit_code == 4
    assert "no platform 'nothing'" in result.output


def test_it_needs_no_pytest(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from hyper_ckpt.cli.app import cli\n"
        f"cli(['conformance', '--platform', 'numpy', '--check', 'meta_tensors', '--report', {str(tmp_path / 'r')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert "no tensors without memory" in done.stdout
