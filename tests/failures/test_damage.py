"""Damaged, missing and mixed-up files: each its own error on every rank, and the target as it was."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hyper_ckpt import load, read, read_metadata, save, verify
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DigestError,
    FileSizeError,
    HeaderError,
    ManifestError,
    MissingFileError,
    StoreError,
    VersionError,
)
from hyper_ckpt.receipt import ZERO_DIGEST, seal
from hyper_ckpt.testing.world import run_world

from ._ranks import all_fail, untouched
from ._states import flat, part, same, target

WORLD = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of two steps, by 3 ranks: of one structure, so that their headers are equal."""
    root = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        run_world(WORLD, lambda p, s=step: save(part(s, p.ranks.rank, WORLD), root / f"step-{s}", platform=p))
    return root / "step-1", root / "step-2"


def data_file(path: Path, rank: int = 1) -> Path:
    return next(path.glob(f"rank-{rank:05d}-*.safetensors"))


def receipt(path: Path, rank: int = 1) -> Path:
    return next((path / "receipts").glob(f"rank-{rank:05d}-*.json"))


def resealed(data: bytes) -> bytes:
    """A record with a digest that fits what it says now."""
    start = data.index(b'"digest":"') + len(b'"digest":"')
    return seal(data[:start] + ZERO_DIGEST.encode() + data[start + 32 :])[0]


def flip(file: Path, position: int, bits: int = 0x10) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= bits
    file.write_bytes(data)


def cut(file: Path, nbytes: int) -> None:
    file.write_bytes(file.read_bytes()[: -nbytes if nbytes else 0])


def make_newer(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_bytes(resealed(manifest.read_bytes().replace(b'"version":1', b'"version":2', 1)))


def give_huge_header(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[:8] = (1 << 63).to_bytes(8, "little")
    file.write_bytes(data)


def make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


class Damage(NamedTuple):
    """What is done to the checkpoint (second argument: another step's), the error, and a part of its text."""

    do: Callable[[Path, Path], object]
    error: type[CheckpointError]
    text: str
    name: str = ""


DAMAGES = {
    "no directory": Damage(lambda p, _: shutil.rmtree(p), CheckpointNotFoundError, "give the directory"),
    "no manifest": Damage(lambda p, _: (p / "manifest.json").unlink(), CheckpointNotFoundError, "did not finish"),
    "empty manifest": Damage(lambda p, _: (p / "manifest.json").write_bytes(b""), ManifestError, "damaged"),
    "cut manifest": Damage(lambda p, _: cut(p / "manifest.json", 9), ManifestError, "earlier checkpoint"),
    "flipped manifest": Damage(lambda p, _: flip(p / "manifest.json", -40), ManifestError, "earlier checkpoint"),
    "flipped version": Damage(lambda p, _: flip(p / "manifest.json", 33, 3), ManifestError, "earlier checkpoint"),
    "manifest is a directory": Damage(
        lambda p, _: make_directory(p / "manifest.json"), StoreError, "[Cc]heck|Remove|not a file|directory"
    ),
    "newer version": Damage(lambda p, _: make_newer(p), VersionError, "install that release"),
    "no data file": Damage(lambda p, _: data_file(p).unlink(), MissingFileError, "restore it"),
    "cut data file": Damage(lambda p, _: cut(data_file(p), 1), FileSizeError, "Restore it"),
    "emptied data file": Damage(lambda p, _: data_file(p).write_bytes(b""), FileSizeError, "Restore it"),
    "longer data file": Damage(
        lambda p, _: data_file(p).write_bytes(data_file(p).read_bytes() + b"\0"), FileSizeError, "Restore it"
    ),
    "flipped header": Damage(lambda p, _: flip(data_file(p), 20), HeaderError, "restore it"),
    "huge header": Damage(lambda p, _: give_huge_header(data_file(p)), HeaderError, "restore it"),
    "file of another rank": Damage(
        lambda p, _: shutil.copyfile(data_file(p, 0), data_file(p)), CheckpointError, "[Rr]estore it"
    ),
    "no receipt": Damage(lambda p, _: receipt(p).unlink(), MissingFileError, "moved or removed"),
    "cut receipt": Damage(lambda p, _: cut(receipt(p), 1), ManifestError, "earlier checkpoint"),
    "flipped receipt": Damage(lambda p, _: flip(receipt(p), -30), ManifestError, "earlier checkpoint"),
    "receipt of another save": Damage(
        lambda p, other: shutil.copyfile(receipt(other), receipt(p)), ManifestError, "two saves are mixed"
    ),
}
SWAPPED = {
    "swapped contents": Damage(lambda p, other: shutil.copyfile(data_file(other), data_file(p)), DigestError, "differ"),
    "flipped data": Damage(lambda p, _: flip(data_file(p), data_file(p).stat().st_size // 2), DigestError, "differ"),
}


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, saved: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Damage]:
    return damage(saved, tmp_path, DAMAGES[request.param]._replace(name=request.param))


def damage(saved: tuple[Path, Path], tmp_path: Path, how: Damage) -> tuple[Path, Damage]:
    path = tmp_path / "ckpt"
    shutil.copytree(saved[0], path)
    how.do(path, saved[1])
    return path, how


@pytest.mark.parametrize("mode", ["during", "before", "off"])
def test_a_load_says_what_is_wrong_and_touches_nothing(damaged: tuple[Path, Damage], mode: str) -> None:
    path, how = damaged
    into = target()
    if mode == "off" and "receipt" in how.name:
        return  # that of rank 1 is not read then
    with pytest.raises(how.error, match=how.text) as caught:
        untouched(into, lambda: load(into, path, no_dist=True, verify=mode))
    if mode == "off" and how.error is not CheckpointNotFoundError:
        assert path.name in str(caught.value)


def test_a_file_that_ends_early_is_one_problem_for_each_tensor(tmp_path: Path) -> None:
    state = {name: np.arange(3 << 17, dtype="f8") for name in ("a", "b", "c")}
    save(state, tmp_path / "c", no_dist=True)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - state["c"].nbytes - 5)
    report = verify(tmp_path / "c")
    gone = [(problem.name, problem.stop - problem.start) for problem in report.problems if problem.name]
    assert gone == [("b", 5), ("c", state["c"].nbytes)]
    assert not report.ok


def test_a_read_has_no_target_that_it_could_fill(tmp_path: Path) -> None:
    save({"w": np.ones(3)}, tmp_path / "c", no_dist=True)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DigestError, match="Nothing was loaded"):
        read(tmp_path / "c")
    with pytest.raises(DigestError, match="may be partly filled"):
        load({"w": np.zeros(3)}, tmp_path / "c", no_dist=True)


def test_every_rank_gets_the_same_error(damaged: tuple[Path, Damage], tmp_path: Path) -> None:
    path, how = damaged

    def refused(platform: object) -> None:
        into = target(platform.ranks.rank, WORLD)
        untouched(into, lambda: load(into, path, platform=platform, timeout=20))

    error = all_fail(WORLD, refused, tmp_path / "scratch")
    assert isinstance(error, how.error)
    assert "rank" in str(error)


def test_reading_and_verifying_say_so_too(damaged: tuple[Path, Damage]) -> None:
    path, how = damaged
    with pytest.raises(how.error, match=how.text):
        read(path)
    if how.error in (CheckpointNotFoundError, VersionError, StoreError):
        for call in (verify, read_metadata):
            with pytest.raises(how.error, match=how.text):
                call(path)
    else:
        report = verify(path)
        assert not report.ok
        assert all(p.file and p.what for p in report.problems)


@pytest.mark.parametrize("kind", SWAPPED)
@pytest.mark.parametrize("world_size", [1, WORLD])
@pytest.mark.parametrize("mode", ["during", "before"])
def test_other_bytes_under_an_equal_header(
    saved: tuple[Path, Path], tmp_path: Path, kind: str, world_size: int, mode: str
) -> None:
    path, _ = damage(saved, tmp_path, SWAPPED[kind])
    touched = []

    def refused(platform: object) -> None:
        into = target(platform.ranks.rank, world_size)
        before = flat(into)
        try:
            load(into, path, platform=platform, verify=mode, timeout=20)
        finally:
            plain = {"step", "text", "seed"}
            assert all(flat(into)[k] == before[k] for k in plain), "plain values are set last"
            touched.append(flat(into) != before)

    error = all_fail(world_size, refused, tmp_path / "scratch")
    assert isinstance(error, DigestError)
    assert data_file(path).name in str(error)
    assert any(touched) <= ("partly filled" in str(error)), error
    assert mode == "during" or not any(touched)
    assert ("partly filled" in str(error)) != ("Nothing was loaded" in str(error))
    assert not verify(path).ok
    with pytest.raises(DigestError):
        read(path)


def test_verify_off_promises_nothing_of_contents(saved: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = damage(saved, tmp_path, SWAPPED["swapped contents"])
    into = target()
    load({"model": into["model"]}, path, no_dist=True, verify="off")
    assert not same(into["model"], part(1)["model"])
    assert not same(into["model"], part(2)["model"])


def test_what_a_load_does_not_need_may_be_damaged(saved: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = damage(saved, tmp_path, DAMAGES["no data file"])
    into = {"step": 0}
    load(into, path, no_dist=True)
    assert into == {"step": 1}
