"""Rewrites manifests and receipts so that their own digests fit: what an attacker, or a bug, would leave."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hyper_ckpt import PerRank, ShardedTensor, load, read, read_metadata, save, verify
from hyper_ckpt.receipt import ZERO_DIGEST, seal

VALUES: list[Any] = [
    -1, 0, 1, 2, 7, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), 10**30, 0.5, 1e308, -0.0,
    None, True, False, "", "x", "0", "../x", "/etc/passwd", "a/../../b", "manifest.json", "receipts/x.json", "a\0b",
    "\u2028", "0" * 32, "f" * 16, "zz" * 16, "float64", "complex128", [], [[]], [0], [-1], [1, 1], [2**40, 2**40],
    [0, 0, 0], [[0], [0]], [[1], [2]], {}, {"": 0}, {"!": "tensor"}, {"!": "ranks", "v": []}, {"grid": 0},
]  # fmt: skip


def make_state() -> dict[str, Any]:
    """One rank's state: a grid, explicit columns (no grid has these boxes), an empty tensor, a blob, a payload."""
    array = np.arange(24.0).reshape(4, 6)
    boxes = [((0, 0), (2, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 4)), ((2, 0), (2, 2))]
    shards = [(array[o[0] : o[0] + s[0], o[1] : o[1] + s[1]].copy(), o) for o, s in boxes]
    return {
        "grid": np.arange(10, dtype=np.int32),
        "columns": ShardedTensor(shards, (4, 6)),
        "empty": np.zeros((0, 3), np.float32),
        "nested": [{"a": 1.5, "b": (None, True, "text", b"bytes")}, 2**70],
        "blob": "long " * 20_000,
        "mine": PerRank({"x": 1}),
    }


def make_checkpoint(path: Path) -> None:
    save(make_state(), path, no_dist=True, user_metadata={"epoch": 3}, durable=False)


def manifest_of(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "manifest.json").read_bytes()))


def receipt_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(receipt_path(path).read_bytes()))


def receipt_path(path: Path) -> Path:
    return next((path / "receipts").iterdir())


def sealed(record: dict[str, Any] | bytes) -> tuple[bytes, str]:
    """The record's bytes with a digest that fits, if it still has a place for one; else as it is."""
    if isinstance(record, bytes):
        data = record
    else:
        text = json.dumps({**record, **({"digest": ZERO_DIGEST} if "digest" in record else {})}, separators=(",", ":"))
        data = text.encode(errors="surrogatepass")
    return seal(data) if ZERO_DIGEST.encode() in data else (data, "")


def put(path: Path, manifest: dict[str, Any] | bytes | None = None, receipt: dict[str, Any] | None = None) -> None:
    """Writes a manifest, and a receipt that it lists, in place of the checkpoint's."""
    manifest = manifest_of(path) if manifest is None else manifest
    if receipt is not None:
        data, digest = sealed(receipt)
        receipt_path(path).write_bytes(data)
        assert isinstance(manifest, dict)
        manifest["receipts"] = [digest]
    (path / "manifest.json").write_bytes(sealed(manifest)[0])


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed in a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def mutated(record: dict[str, Any], rng: random.Random, changes: int) -> dict[str, Any]:
    """A copy with a few values replaced, removed, repeated, or moved by one."""
    out = copy.deepcopy(record)
    for _ in range(changes):
        where = rng.choice([p for p in places(out) if p != ("digest",) and p != ("format",)])
        parent = out
        for key in where[:-1]:
            parent = parent[key]
        old, what = parent[where[-1]], rng.randrange(6)
        if what == 0:
            del parent[where[-1]]
        elif what == 1 and isinstance(old, list) and old:
            old.insert(rng.randrange(len(old)), copy.deepcopy(rng.choice(old)))
        elif what == 2 and type(old) is int:
            parent[where[-1]] = old + rng.choice([-1, 1, 8, -8])
        elif what == 3 and isinstance(old, str) and old:
            i = rng.randrange(len(old))
            parent[where[-1]] = old[:i] + rng.choice("0fzA~/.\0é") + old[i + 1 :]
        else:
            parent[where[-1]] = copy.deepcopy(rng.choice(VALUES))
    return out


def use(path: Path) -> Iterator[Any]:
    """All that one does with a checkpoint, as callables."""

    def metadata() -> None:
        found = read_metadata(path)
        for mapping in (found.state_dict_metadata, found.storage_data):
            for name in mapping:
                mapping[name]

    def load_as(**options: Any) -> None:
        load({**make_state(), "more": 1}, path, no_dist=True, strict=False, **options)

    yield metadata
    yield lambda: verify(path)
    yield lambda: read(path)
    yield load_as
    yield lambda: load_as(verify="off")
    yield lambda: load_as(verify="before")
