"""Checkpoints written by earlier releases load as they were saved."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.manifest import VERSION

from . import states

DATA = Path(__file__).resolve().parents[1] / "data"
VERSIONS = [(version, kind) for version in range(1, VERSION + 1) for kind in ("", "-alone")]

# The ranks hold different values of one name, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:ranks saved different values")


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, hyper_ckpt.PerRank):
        return isinstance(other, hyper_ckpt.PerRank) and equal(one.value, other.value)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        same = len(one) == len(other) and type(one).__name__ == type(other).__name__
        return same and all(map(equal, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize(("version", "kind"), VERSIONS)
def test_it_is_read_as_it_was_saved(version: int, kind: str) -> None:
    path = DATA / f"version-{version}{kind}"
    expected = getattr(states, f"version_{version}")(0)
    expected["table"] = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [7] * 4, [8] * 4], np.uint8)
    assert equal(expected, hyper_ckpt.read(path))
    assert hyper_ckpt.verify(path).ok
    metadata = hyper_ckpt.read_metadata(path)
    assert (metadata.version, metadata.world_size, metadata.user_metadata) == (version, 2, {"golden": version})


@pytest.mark.parametrize(("version", "kind"), VERSIONS)
def test_it_loads_into_a_state(version: int, kind: str) -> None:
    target = getattr(states, f"version_{version}")(0)
    table = np.zeros((4, 4), np.uint8)
    for array in (*target["model"].values(), target["half"], target["complex"], target["tied"]["a"]):
        array[...] = 0
    target |= {"table": table, "differs": 0, "large": [0] * 20_000}
    hyper_ckpt.load(target, DATA / f"version-{version}{kind}", strict="exact")
    assert target["model"]["layer.0.weight"].tolist() == np.arange(24).reshape(6, 4).tolist()
    assert table.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [7] * 4, [8] * 4]
    assert (target["differs"], target["large"][-1], target["tied"]["b"][5]) == (10, 19_999, 5)


def test_a_newer_version_is_refused_naming_the_release(tmp_path: Path) -> None:
    from hyper_ckpt.receipt import ZERO_DIGEST, seal

    shutil.copytree(DATA / "version-1", tmp_path / "newer")
    manifest = tmp_path / "newer" / "manifest.json"
    data = (
        manifest.read_bytes().replace(b'"version":1,', b'"version":9,', 1).replace(b'"library":"', b'"library":"7.', 1)
    )
    at = data.index(b'"digest":"') + 10
    manifest.write_bytes(seal(data[:at] + ZERO_DIGEST.encode() + data[at + 32 :])[0])
    with pytest.raises(hyper_ckpt.errors.VersionError, match=r"version 9.*hyper-ckpt 7\.0\.1\.0"):
        hyper_ckpt.read(tmp_path / "newer")
