"""Manifests and receipts that nobody saved: refused with our own errors, quickly, in little memory, or read."""

import itertools
import json
import os
import random
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_ckpt import load, read, read_metadata, save
from hyper_ckpt.errors import CheckpointError, CorruptCheckpointError, CoverageError, ManifestError

from ._ranks import untouched as untouched_by
from ._records import make_checkpoint, make_state, manifest_of, mutated, put, receipt_of, receipt_path, use
from ._states import flat

MANIFESTS, RECEIPTS, FLIPS = 400, 250, 150


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "outside.json").write_text("{}")
    make_checkpoint(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def survives(path: Path, what: object) -> tuple[int, int]:
    """Uses a checkpoint in every way. Returns how many ways worked and how many were refused."""
    worked = refused = 0
    for action in use(path):
        begin = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                action()
            worked += 1
        except CheckpointError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error} came out of {what}") from error
        assert time.monotonic() - begin < 3, what
    return worked, refused


def limited(action: Callable[[], Any], megabytes: int = 96) -> Any:
    """Runs `action` and checks that it took little memory."""
    tracemalloc.start()
    try:
        return action()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < megabytes << 20, f"{peak >> 20} MiB"


def test_mutated_manifests(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, rng = manifest_of(path), random.Random(20)
    counts = [0, 0]
    for number in range(MANIFESTS):
        bad = mutated(good, rng, 1 + number % 3)
        put(path, bad)
        for i, n in enumerate(survives(path, json.dumps(bad)[:4000])):
            counts[i] += n
    with capsys.disabled():
        print(f"\n{MANIFESTS} mutated manifests: {counts[0]} uses worked, {counts[1]} were refused")
    assert min(counts) > 50, "both happen"


def test_mutated_receipts(path: Path) -> None:
    good, manifest, rng = receipt_of(path), manifest_of(path), random.Random(21)
    counts = [0, 0]
    for number in range(RECEIPTS):
        bad = mutated(good, rng, 1 + number % 3)
        put(path, dict(manifest), bad)
        for i, n in enumerate(survives(path, json.dumps(bad)[:4000])):
            counts[i] += n
    assert min(counts) > 50, "both happen"


@pytest.mark.parametrize("resealed", [False, True])
def test_flipped_and_cut_bytes(path: Path, resealed: bool) -> None:
    good, rng = (path / "manifest.json").read_text(), random.Random(22)
    zeroed = good.replace(manifest_of(path)["digest"], "0" * 32)
    for number in range(FLIPS):
        data = bytearray((zeroed if resealed else good).encode())
        at = rng.randrange(len(data))
        if number % 3:
            data[at] ^= 1 << rng.randrange(8)
        else:
            del data[at : at + rng.choice([1, 5, 10**6])]
        if resealed:
            put(path, bytes(data))
        else:
            (path / "manifest.json").write_bytes(data)
        worked, _ = survives(path, bytes(data))
        assert resealed or worked == 1, "verify reports, everything else raises"


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(m: dict[str, Any]) -> None:
        m["files"][0][0] = name

    return change


def set_at(value: Any, *where: Any) -> Callable[[dict[str, Any]], None]:
    def change(m: dict[str, Any]) -> None:
        parent = m
        for key in where[:-1]:
            parent = parent[key]
        parent[where[-1]] = value

    return change


def columns(**changes: list[Any]) -> Callable[[dict[str, Any]], None]:
    def change(m: dict[str, Any]) -> None:
        m["tensors"]["columns"].update(changes)

    return change


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    **{f"file {n!r}": rename_file(n) for n in ("../outside.json", "/etc/passwd", "a/../../b", "a\0b", "", ".", "x/y")},
    "the manifest as a data file": rename_file("manifest.json"),
    "a receipt as a data file": rename_file("receipts/x.json"),
    "an id that leaves": set_at("../../../../x", "save_id"),
    "an id with parts": set_at("a/b", "save_id"),
    "a negative size": set_at(-1, "files", 0, 1),
    "a huge size": set_at(2**62, "files", 0, 1),
    "a huge header": set_at(2**59, "files", 0, 2),
    "a billion ranks": set_at(10**9, "world_size"),
    "no rank": set_at(0, "world_size"),
    "a file's rank": set_at(5, "files", 0, 4),
    "a file list of nobody": set_at([[99]], "file_lists"),
    "a negative start": set_at(-8, "tensors", "grid", "start"),
    "a start behind the file": set_at(10**9, "tensors", "grid", "start"),
    "a start beyond 64 bits": set_at(2**70, "tensors", "grid", "start"),
    "a huge shape": set_at([2**40, 2**40], "tensors", "grid", "shape"),
    "a larger shape": set_at([10**12], "tensors", "grid", "shape"),
    "a thousand dimensions": set_at([1] * 1000, "tensors", "grid", "shape"),
    "a negative dimension": set_at([-10], "tensors", "grid", "shape"),
    "an unknown dtype": set_at("float7", "tensors", "grid", "dtype"),
    "a wider dtype": set_at("int64", "tensors", "grid", "dtype"),
    "no such grid": set_at(10**6, "tensors", "grid", "grid"),
    "a grid with a hole": set_at([[5]], "grids", 0, 0),
    "a grid in reverse": lambda m: m.update(grids=[[[[0, 8, 4]], 0]], file_lists=[[0] * 3]),
    "a million cells": set_at([[list(range(1000)), list(range(1000))], 0], "grids", 0),
    "many cuts": set_at([[list(range(200_000))], 0], "grids", 0),
    "columns that overlap": columns(offsets=[[0, 0], [0, 2], [1, 2], [0, 0]]),
    "columns with a hole": columns(sizes=[[2, 2], [1, 4], [3, 4], [1, 2]]),
    "columns with a hole and an overlap": columns(
        offsets=[[0, 0], [0, 2], [1, 2], [0, 0]], sizes=[[2, 2], [1, 4], [3, 4], [2, 2]]
    ),
    "columns outside": columns(offsets=[[0, 0], [0, 2], [1, 2], [3, 0]]),
    "columns that wrap around": columns(
        offsets=[[0, 0], [0, 2], [1, 2], [2**62, 0]], sizes=[[2, 2], [1, 4], [3, 4], [2**62, 2]]
    ),
    "sizes that wrap around": columns(sizes=[[2, 2], [1, 4], [3, 4], [2**62, 4]]),
    "fewer columns": columns(files=[0, 0, 0]),
    "no columns": columns(files=[], offsets=[], sizes=[], start=0),
    "columns of one dimension": columns(offsets=[[0]] * 4, sizes=[[1]] * 4),
    "deep state": set_at("DEEP", "state"),
    "deep user metadata": set_at("DEEP", "user"),
    "a deep tensor": set_at("DEEP", "tensors", "grid"),
    "a deep grid": set_at("DEEP", "grids", 0),
    "deep files": set_at("DEEP", "files"),
    "a tensor that the state lacks": lambda m: m["tensors"].__setitem__("other", m["tensors"]["grid"]),
    "a state without its tensor": lambda m: m["tensors"].pop("grid"),
    "user metadata with a tensor": set_at({"!": "dict", "k": ["user"], "v": [{"!": "tensor"}]}, "user"),
    "user metadata without its key": set_at({"!": "dict", "k": [], "v": []}, "user"),
    "user metadata that is a list": set_at({"!": "list", "v": []}, "user"),
    "an early time": set_at(-1e300, "created"),
}  # fmt: skip
HARMLESS = {"a tensor that the state lacks", "an early time"}


def put_hostile(path: Path, name: str) -> None:
    bad = manifest_of(path)
    HOSTILE[name](bad)
    put(path, bad)
    if '"DEEP"' in (text := (path / "manifest.json").read_text()):
        zeroed = text.replace(manifest_of(path)["digest"], "0" * 32)
        put(path, zeroed.replace('"DEEP"', '{"!":"list","v":[' * 100_000 + "1" + "]}" * 100_000).encode())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests(path: Path, name: str) -> None:
    put_hostile(path, name)
    worked, refused = limited(lambda: survives(path, name))
    if name in HARMLESS:
        return
    into = make_state()
    into["columns"] = np.zeros((4, 6))  # whole: all chunks of it are wanted at once
    if name.endswith("dtype"):
        pass
    elif "user" in name:
        with pytest.raises(ManifestError):
            read_metadata(path)
    else:
        with pytest.raises(CheckpointError) as caught:
            untouched_by(into, lambda: load(into, path, no_dist=True, verify="off"))
        assert isinstance(caught.value, ManifestError | CoverageError), caught.value
        with pytest.raises(type(caught.value)):
            read(path)
    assert refused, worked


@pytest.mark.parametrize("name", HOSTILE)
def test_saving_over_a_hostile_manifest_removes_nothing_else(path: Path, name: str) -> None:
    put_hostile(path, name)
    save(make_state(), path, no_dist=True, overwrite=True, durable=False)
    assert flat(read(path)["grid"]) == flat(make_state()["grid"])
    assert (path.parent / "outside.json").exists()


RECORDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "no block size": set_at(0, "block_bytes"),
    "a negative block size": set_at(-1, "block_bytes"),
    "another block size": set_at(8, "block_bytes"),
    "a huge block size": set_at(2**62, "block_bytes"),
    "a negative length": set_at(-4, "pieces", 0, 2),
    "a huge length": lambda r: r["pieces"].__setitem__(0, [0, 0, 2**62, ""]),
    "a start behind the file": set_at(2**60, "pieces", -1, 1),
    "a piece of no file": set_at(7, "pieces", 0, 0),
    "no digests": set_at("", "pieces", 0, 3),
    "digests that are no numbers": set_at("zz" * 8, "pieces", 0, 3),
    "a payload of no piece": set_at({"mine": 99}, "payloads"),
    "a negative payload": set_at({"mine": -1}, "payloads"),
    "no payload": set_at({}, "payloads"),
    "no pieces": set_at([], "pieces"),
    "a file that leaves": set_at("../outside.json", "files", 0, 0),
    "another file": set_at("manifest.json", "files", 0, 0),
    "a file of another size": set_at(2**50, "files", 0, 1),
    "a file with a huge header": set_at(2**59, "files", 0, 2),
    "a negative header": set_at(-5, "files", 0, 2),
    "another rank": set_at(3, "rank"),
    "another save": set_at("0" * 16, "save_id"),
    "another format": set_at("other", "format"),
    "a newer version": set_at(2, "version"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_hostile_receipts(path: Path, name: str) -> None:
    bad = receipt_of(path)
    RECORDS[name](bad)
    put(path, None, bad)
    worked, refused = limited(lambda: survives(path, name))
    assert refused, f"{worked} uses worked"
    into = make_state()
    with pytest.raises(CheckpointError):
        untouched_by(into, lambda: load(into, path, no_dist=True))


def test_a_receipt_that_is_huge_or_not_a_file(path: Path) -> None:
    receipt = receipt_path(path)
    receipt.unlink()
    receipt.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError):
        limited(lambda: load(make_state(), path, no_dist=True))


def test_a_data_file_that_leads_elsewhere_is_still_compared(path: Path) -> None:
    file = next(path.glob("rank-*.safetensors"))
    os.rename(file, path.parent / "moved")
    file.symlink_to(path.parent / "moved")
    assert flat(read(path)["grid"]) == flat(make_state()["grid"])  # a link to the same bytes is fine
    (path.parent / "moved").write_bytes(b"\0" * (path.parent / "moved").stat().st_size)
    with pytest.raises(CorruptCheckpointError):
        read(path)


def test_headers_of_any_bytes(path: Path) -> None:
    file = next(path.glob("rank-*.safetensors"))
    good, rng = file.read_bytes(), random.Random(23)
    for number in itertools.chain(range(8), (rng.randrange(4096) for _ in range(40))):
        file.write_bytes(good[:number] + bytes([good[number] ^ 0xFF]) + good[number + 1 :])
        with pytest.raises(CorruptCheckpointError):
            load(make_state(), path, no_dist=True, verify="off")


def test_no_memory_is_taken_for_what_is_stored_nowhere(path: Path) -> None:
    bad = manifest_of(path)
    HOSTILE["no columns"](bad)
    set_at([3, 2**53], "tensors", "columns", "shape")(bad)
    put(path, bad)
    with pytest.raises(CoverageError, match="'columns'"):
        read(path)
