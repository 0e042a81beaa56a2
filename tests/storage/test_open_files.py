"""Files that stay open between reads."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.errors import DigestError, MissingFileError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.open_files import OpenFiles


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for i in range(8):
        (tmp_path / str(i)).write_bytes(bytes([i]))
    return [str(tmp_path / str(i)) for i in range(8)]


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files that were opened to be read."""
    paths, real = list[str](), os.open

    def counted(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            paths.append(os.fspath(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", counted)
    return paths


def descriptors() -> int:
    gc.collect()  # what earlier tests left is closed now or before, but not in between
    return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))


def content(kept: OpenFiles, path: str) -> bytes:
    with kept.opened(path) as fd:
        return os.pread(fd, 2, 0)


def test_the_least_recently_used_is_closed(files: list[str], opens: list[str]) -> None:
    kept, before = OpenFiles(3), descriptors()
    with kept.kept():
        for number in (0, 1, 2, 0, 3, 0, 1):
            assert content(kept, files[number]) == bytes([number])
        assert [files.index(path) for path in opens] == [0, 1, 2, 3, 1]
        assert descriptors() == before + 3
    assert descriptors() == before


def test_what_is_in_use_is_not_closed(files: list[str]) -> None:
    kept, before = OpenFiles(1), descriptors()
    with kept.opened(files[0]) as outer:
        with kept.kept(), kept.opened(files[1]) as inner:
            assert os.pread(outer, 1, 0) == b"\0"
            assert os.pread(inner, 1, 0) == b"\1"
        assert os.pread(outer, 1, 0) == b"\0"
    assert descriptors() == before


def test_outside_nothing_stays_open(files: list[str], opens: list[str]) -> None:
    kept, before = OpenFiles(3), descriptors()
    for _ in range(2):
        assert content(kept, files[0]) == b"\0"
        assert descriptors() == before
    assert len(opens) == 2
    with pytest.raises(FileNotFoundError), kept.kept():
        content(kept, files[0] + "-gone")
    assert descriptors() == before


def test_many_threads(files: list[str]) -> None:
    kept, before = OpenFiles(2), descriptors()

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).integers(0, len(files), 300).tolist()
        with kept.kept():
            for number in order:
                assert content(kept, files[number]) == bytes([number])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert descriptors() == before


@pytest.mark.parametrize("verify", ["off", "during", "before"])
def test_a_load_opens_each_file_a_few_times(tmp_path: Path, opens: list[str], verify: Any) -> None:
    state = {f"w{i}": np.full(3 << 18, i, "f4") for i in range(8)}
    hyper_ckpt.save(state, tmp_path / "c", no_dist=True)
    opens.clear()
    target = {name: np.zeros_like(value) for name, value in state.items()}
    before = descriptors()
    hyper_ckpt.load(target, tmp_path / "c", verify=verify, no_dist=True, threads=1)
    # Once for its header, once for its blocks, once more where they are verified first.
    assert sum(path.endswith(".safetensors") for path in opens) <= 3
    assert descriptors() == before
    assert all(np.array_equal(target[name], value) for name, value in state.items())


def test_a_load_that_fails_closes_its_files(tmp_path: Path) -> None:
    hyper_ckpt.save({"w": np.zeros(3 << 18, "f4")}, tmp_path / "c", no_dist=True)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = descriptors()
    with pytest.raises(DigestError):
        hyper_ckpt.load({"w": np.ones(3 << 18, "f4")}, tmp_path / "c", no_dist=True)
    assert descriptors() == before


class Inverted(LocalStore):
    """Stores every byte inverted."""

    def read_into(self, name: str, ranges: Any, buffers: Any) -> None:
        super().read_into(name, ranges, buffers)
        for buffer in buffers:
            buffer[:] = bytes(255 - byte for byte in buffer)


def test_a_store_that_reads_otherwise_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x01\x02")
    data = bytearray(2)
    with Inverted(tmp_path).reader("a") as read:
        assert read([memoryview(data)], 0) == 2
    assert data == b"\xfe\xfd"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.reading(), pytest.raises(MissingFileError, match="gone"):
        store.read_into("gone", [(0, 1)], [memoryview(bytearray(1))])
