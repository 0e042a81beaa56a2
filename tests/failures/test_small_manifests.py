"""Small manifests of very much, and of what costs very much: only what is wanted is expanded, in little memory."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_ckpt import load, read, read_metadata, save, verify
from hyper_ckpt.cells import GridCells, ListedCells, grid_cells
from hyper_ckpt.cli.app import cli
from hyper_ckpt.columns import Columns, Placed, TensorTable
from hyper_ckpt.errors import CheckpointError, ManifestError
from hyper_ckpt.manager.note import Note, read_note
from hyper_ckpt.manifest import Document, Manifest, TensorRow
from hyper_ckpt.manifest_writer import ManifestContent, encode_manifest
from hyper_ckpt.receipt import ZERO_DIGEST, FileRecord, seal
from hyper_ckpt.state import encode_tree, flatten
from hyper_ckpt.storage.filesystem import FileSystemReader
from hyper_ckpt.storage.local_store import LocalStore

MIB = 1 << 20


def limited(action: Callable[[], Any], megabytes: int) -> Any:
    tracemalloc.start()
    try:
        return action()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < megabytes << 20, f"{peak >> 20} MiB"


RANKS, ROWS, WIDTH, TENSORS = 16_384, 4, 8, 4_548
CELL = ROWS * WIDTH * 2


def manifest_of_many_ranks() -> bytes:
    """One tensor that 16,384 ranks saved in a row each, as the library writes it, and 4,547 more on its grid."""
    marker, names = object(), [f"layers.{i:05}" for i in range(TENSORS)]
    flat = flatten(dict.fromkeys(names, marker), is_tensor=lambda value: value is marker)
    table = TensorTable.of([(names[0], "bfloat16", (RANKS * ROWS, WIDTH))])
    n, zero = np.arange(RANKS), np.zeros(RANKS, np.int64)
    offsets, sizes = np.stack([n * ROWS, zero], axis=1), np.tile([ROWS, WIDTH], (RANKS, 1))
    files = [
        FileRecord(f"rank-{r:05d}-{'0' * 16}.safetensors", 4096 + TENSORS * CELL, 4096, "0" * 32, r) for r in n.tolist()
    ]
    content = ManifestContent(
        "0" * 16, RANKS, 0.0, "1", files, ["0" * 32] * RANKS, encode_tree(flat.tree),
        encode_tree(flatten({"user": None}, is_tensor=lambda _: False).tree), names, dict.fromkeys(names[1:], names[0]),
    )  # fmt: skip
    columns = Columns(table, zero, n, offsets, sizes, zero, zero - 1)
    placed = Placed(tuple(f.name for f in files), n, n, zero, n, zero, offsets, sizes)
    document = msgspec.json.decode(encode_manifest(content, columns, placed), type=Document)
    row = msgspec.json.decode(document.tensors[names[0]], type=TensorRow)
    for i, name in enumerate(names):
        document.tensors[name] = msgspec.Raw(msgspec.json.encode(msgspec.structs.replace(row, start=i * CELL)))
    return seal(msgspec.json.encode(msgspec.structs.replace(document, digest=ZERO_DIGEST)))[0]


def test_a_rank_finds_its_share_of_what_very_many_saved() -> None:
    """Expanded, it is 75 million chunks."""
    data = manifest_of_many_ranks()
    assert len(data) < 8 * MIB

    def locate(world_size: int, rank: int) -> Any:
        manifest = Manifest(data)
        names = sorted(manifest.tensors)
        table = TensorTable.of([(name, "bfloat16", (RANKS * ROWS, WIDTH)) for name in names])
        own = RANKS * ROWS // world_size
        n = np.arange(TENSORS)
        offsets, sizes = np.tile([rank * own, 0], (TENSORS, 1)), np.tile([own, WIDTH], (TENSORS, 1))
        zero = n * 0
        columns = Columns(table, n, zero + rank, offsets, sizes, zero, zero - 1)
        return FileSystemReader().locate(manifest, columns, rank)

    located = limited(lambda: locate(RANKS, 5000), 64)
    assert located.file.tolist() == [5000] * TENSORS
    assert sorted(located.start.tolist()) == [i * CELL for i in range(TENSORS)]
    located = locate(RANKS // 3, 77)
    assert set(located.file.tolist()) == {231, 232, 233}
    assert (located.sizes.prod(axis=1).reshape(TENSORS, -1).sum(axis=1) == 3 * ROWS * WIDTH).all()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save({"w": np.arange(64, dtype="u1"), "n": 1}, tmp_path / "c")
    return tmp_path / "c"


def change(path: Path, how: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    how(manifest)
    put(path, json.dumps({**manifest, "digest": ZERO_DIGEST}, separators=(",", ":")))


def put(path: Path, text: str) -> None:
    (path / "manifest.json").write_bytes(seal(text.encode())[0])


def attempt(action: Callable[[], Any]) -> None:
    try:
        action()
    except CheckpointError:
        return


def use(path: Path) -> None:
    attempt(lambda: load({"w": np.zeros(64, "u1"), "n": 0}, path, no_dist=True))
    attempt(lambda: read_metadata(path))
    verify(path)
    assert CliRunner().invoke(cli, ["show", str(path)], prog_name="hyper-ckpt").exit_code in (0, 1, 3, 4)


def large_grid(m: dict[str, Any]) -> None:
    """A grid of a quarter of a million cells, under 300 shapes."""
    side = 500
    m["grids"].append([[list(range(side)), list(range(side))], len(m["file_lists"])])
    m["file_lists"].append([0] * side * side)
    for i in range(300):
        row = {"dtype": "uint8", "shape": [side + i, side + i], "grid": len(m["grids"]) - 1}
        m["tensors"][f"x{i}"] = row


def many_references(m: dict[str, Any]) -> None:
    """Eight thousand tensors on one grid of ten thousand cells, and on the same bytes."""
    m["grids"].append([[list(range(100)), list(range(100))], len(m["file_lists"])])
    m["file_lists"].append([0] * 10_000)
    for i in range(8_000):
        m["tensors"][f"x{i}"] = {"dtype": "uint8", "shape": [100, 100], "grid": len(m["grids"]) - 1, "start": i % 7}


def many_cut_dimensions(m: dict[str, Any]) -> None:
    n, d = 4096, 12
    offsets = [[(i >> k) & 1 for k in range(d)] for i in range(n)]
    m["tensors"]["w"] = {
        "dtype": "uint8",
        "shape": [2] * d,
        "offsets": offsets,
        "sizes": [[1] * d] * n,
        "files": [0] * n,
    }


@pytest.mark.parametrize("how", [large_grid, many_references, many_cut_dimensions])
def test_manifests_that_would_cost_minutes_or_gigabytes(path: Path, how: Callable[[dict[str, Any]], None]) -> None:
    change(path, how)
    target = {"w": np.zeros(64, "u1"), "n": 0}
    if how is many_cut_dimensions:
        with pytest.raises(ManifestError, match="cut 12 dimensions"):
            limited(lambda: load({"w": np.zeros((2,) * 12, "u1"), "n": 0}, path, no_dist=True), 128)
    else:
        limited(lambda: load(target, path, no_dist=True, strict=False), 400)
        assert target["w"].tolist() == list(range(64))
    limited(lambda: use(path), 500)


@pytest.mark.parametrize(
    "items",
    [
        ",".join(f'{{"!":"int","v":"{k * (2**61 - 1):x}"}}' for k in range(1 << 4, 1 << 14)),
        ",".join(f'{{"!":"tuple","v":[{{"!":"int","v":"{k * (2**61 - 1):x}"}}]}}' for k in range(1 << 4, 1 << 14)),
    ],
)
def test_items_of_sets_that_collide(path: Path, items: str) -> None:
    def how(m: dict[str, Any]) -> None:
        m["state"]["v"][m["state"]["k"].index("n")] = "HERE"

    change(path, how)
    text = (path / "manifest.json").read_text().replace('"HERE"', f'{{"!":"set","v":[{items}]}}')
    put(path, text.replace(json.loads(text)["digest"], ZERO_DIGEST))
    with pytest.raises(ManifestError, match="items of one hash"):
        load({"w": np.zeros(64, "u1"), "n": 0}, path, no_dist=True)


def test_keys_that_collide(path: Path) -> None:
    def how(m: dict[str, Any]) -> None:
        keys = [f"~i{k * (2**61 - 1):#x}" for k in range(8, 1008)]
        m["state"]["v"][m["state"]["k"].index("n")] = {"!": "list", "v": [{"!": "dict", "k": keys, "v": [1] * 1000}]}

    change(path, how)
    with pytest.raises(ManifestError, match="items of one hash"):
        read(path)


def twice(text: str, old: str) -> str:
    assert old in text
    return text.replace(old, f"{old},{old}", 1)


TWICE = {
    "a field": lambda text: twice(text, '"world_size":1'),
    "a tensor": lambda text: text.replace('"tensors":{', '"tensors":{"w":{"dtype":"uint8","shape":[0]},', 1),
    "a tensor's shape": lambda text: twice(text, '"shape":[64]'),
    "an escaped name": lambda text: text.replace(
        '"tensors":{', '"tensors":{"\\u0077":{"dtype":"uint8","shape":[0]},', 1
    ),
    "a node's keys": lambda text: twice(text, '"k":["w","n"]'),
    "user metadata": lambda text: twice(text, '"k":["user"]'),
}


@pytest.mark.parametrize("where", TWICE)
def test_a_key_that_stands_twice(path: Path, where: str) -> None:
    text = (path / "manifest.json").read_text()
    put(path, TWICE[where](text).replace(json.loads(text)["digest"], ZERO_DIGEST))
    target = {"w": np.zeros(64, "u1"), "n": 0}
    with pytest.raises(ManifestError, match="twice"):
        read_metadata(path) if where == "user metadata" else load(target, path, no_dist=True)


def test_a_key_that_stands_twice_in_a_receipt_or_a_note(path: Path) -> None:
    (receipt,) = (path / "receipts").iterdir()
    text = receipt.read_text()
    data, digest = seal(twice(text, '"world_size":1').replace(json.loads(text)["digest"], ZERO_DIGEST).encode())
    receipt.write_bytes(data)
    change(path, lambda m: m.update(receipts=[digest]))
    with pytest.raises(ManifestError, match="twice"):
        load({"w": np.zeros(64, "u1"), "n": 0}, path, no_dist=True)
    (path / "hyper-ckpt-step.json").write_bytes(
        msgspec.json.encode(Note()).replace(b'"pinned":false', b'"pinned":true,"pinned":false')
    )
    note = read_note(LocalStore(str(path)), "")
    assert note is not None
    assert note.pinned, "a damaged note counts as a pin"


def test_equal_manifests_in_other_words_are_read(path: Path) -> None:
    """Escapes and the order of fields are a writer's choice."""
    change(path, lambda m: m.update(user=m["user"], tensors={"w": dict(reversed(m["tensors"]["w"].items()))}))
    target = {"w": np.zeros(64, "u1"), "n": 0}
    load(target, path, no_dist=True)
    assert target["w"].tolist() == list(range(64))


@settings(max_examples=200)
@given(st.data())
def test_a_grid_finds_the_same_cells_as_a_list_of_them(data: st.DataObject) -> None:
    d = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.integers(1, 9)) for _ in range(d))
    cuts = tuple(
        np.array([0, *sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4)) if n > 1 else ())], np.int64)
        for n in shape
    )
    n = int(np.prod([len(c) for c in cuts], dtype=np.int64))
    grid = grid_cells(cuts, shape, np.arange(n))
    listed = ListedCells(grid.offsets, grid.sizes, grid.file)
    assert isinstance(grid, GridCells)
    assert listed.is_whole(shape)
    low = [[data.draw(st.integers(0, m - 1)) for m in shape] for _ in range(3)]
    high = [[data.draw(st.integers(a + 1, m)) for a, m in zip(row, shape, strict=True)] for row in low]
    offsets = np.array(low, np.int64).reshape(3, d)
    sizes = np.array(high, np.int64).reshape(3, d) - offsets
    for one, two in zip(grid.touching(offsets, sizes), listed.touching(offsets, sizes), strict=True):
        assert one.tolist() == two.tolist()
    some = np.arange(0, n, 2)
    for one, two in zip(grid.boxes(some), listed.boxes(some), strict=True):
        assert one.tolist() == two.tolist()
    room = np.full(n, 1000, np.int64)
    assert grid.slack(4, room).tolist() == listed.slack(4, room).tolist()
    assert grid.least_slack(4, room) == listed.least_slack(4, room)
    assert [grid.cuts_of(k) for k in range(d)] == [listed.cuts_of(k) for k in range(d)]
