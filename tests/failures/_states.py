"""A state with something of every kind in it, saved by any number of ranks, and the check that it came back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hyper_ckpt import PerRank, ShardedTensor, load, read, verify
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.receipt import receipt_name

SHAPE = (96, 700)


def whole(step: int) -> dict[str, Any]:
    """What a checkpoint of this step holds, as one process sees it."""
    rng = np.random.default_rng(step)
    return {
        "model": {
            "big": rng.standard_normal(SHAPE),  # more than one block
            "wide": rng.standard_normal((70, 300), np.float32),  # more than one packed write
            "small": rng.integers(0, 99, (5, 3)),
        },
        "step": step,
        "text": f"step {step} " * 10_000,  # a blob
        "seed": {"rank": 0, "step": step},
    }


def part(step: int, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """A rank's part: `big` is cut by rows, `seed` is the rank's own, the rest is the same everywhere."""
    state = whole(step)
    state["model"]["big"] = _rows(state["model"]["big"], rank, world_size)
    state["seed"] = PerRank({"rank": rank, "step": step})
    return state


def target(rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """What a rank loads into: other values of the same kinds."""
    return part(-1 % 2**31, rank, world_size)


def _rows(array: np.ndarray, rank: int, world_size: int) -> ShardedTensor:
    low, high = len(array) * rank // world_size, len(array) * (rank + 1) // world_size
    return ShardedTensor([(array[low:high].copy(), (low, 0))], array.shape)


def flat(value: Any) -> Any:
    """A state as something that `==` compares, arrays by their bytes."""
    if isinstance(value, dict):
        return {k: flat(v) for k, v in value.items()}
    if isinstance(value, PerRank):
        return flat(value.value)
    if isinstance(value, ShardedTensor):
        return [(o, flat(a)) for a, o in value.shards], value.global_shape
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return value


def same(one: Any, other: Any) -> bool:
    return bool(flat(one) == flat(other))


def assert_holds(path: str | Path, *steps: int) -> int:
    """The checkpoint at `path` is one of these steps', whole: verified, read and loaded. Returns which."""
    report = verify(path)
    assert report.ok, report.problems
    found = read(path)
    step = found["step"]
    assert step in steps, f"step {step} was found"
    assert same(found, whole(step))
    into = target()
    load(into, path, no_dist=True)
    assert same(into, part(step))
    return int(step)


def loads_whole(platform: Platform, path: str | Path, step: int, **options: Any) -> None:
    """Loads a rank's part and compares it. The ranks may be others than those that saved."""
    rank, world_size = platform.ranks.rank, platform.ranks.world_size
    into = target(rank, world_size)
    load(into, path, platform=platform, **options)
    expected = part(step, rank, world_size)
    if "seed" in into and into["seed"].value["step"] != step:  # no such rank has saved
        del into["seed"], expected["seed"]
    assert same(into, expected)


def files_in(path: str | Path) -> set[str]:
    """Every file below a directory, by its name inside it."""
    return {str(p.relative_to(path)) for p in Path(path).rglob("*") if p.is_file()}


def assert_no_leftovers(path: str | Path) -> None:
    """Nothing but the published checkpoint lies at `path`."""
    manifest = Manifest((Path(path) / "manifest.json").read_bytes())
    receipts = {receipt_name(r, manifest.save_id) for r in range(manifest.world_size)}
    assert files_in(path) == {"manifest.json", *(f.name for f in manifest.files), *receipts}
