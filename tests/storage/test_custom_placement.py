"""Writers that sort tensors into files of their own: the standard reader reads them, and parts can be shipped."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import hyper_ckpt
from hyper_ckpt import FileSystemWriter, PerRank
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import MissingFileError, PlanError, RanksDisagreeError
from hyper_ckpt.layout import Mesh, MeshLayout, Shard
from hyper_ckpt.storage import filesystem
from hyper_ckpt.testing.meshed import distribute, meshed_platform
from hyper_ckpt.testing.world import run_world

WHOLE = {
    f"{part}/{name}": np.random.default_rng(seed).normal(size=(24, 5)).astype(dtype)
    for part, seed in [("model", 0), ("optimizer", 1), ("odd key!", 2)]
    for name, dtype in [("w", "float32"), ("b", "float64"), ("s", "int16")]
}
TEXT = "a blob " * 20_000


class PerKeyWriter(FileSystemWriter):
    """A file for every key of the state, so that weights can be shipped without the optimizer."""

    def group_of(self, name: str) -> str:
        return re.sub("[^A-Za-z0-9_.]", "_", name.partition("/")[0])


class OptionWriter(FileSystemWriter):
    """A writer with an option, which `at` must keep."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def identity(self) -> str:
        return f"{super().identity()}({self._prefix!r})"

    def group_of(self, name: str) -> str:
        return self._prefix if name.startswith("model") else ""


def state_of(rank: int, world_size: int, blank: bool = False) -> dict[str, Any]:
    layout = MeshLayout(Mesh((world_size,), tuple(range(world_size))), (Shard(0),))
    parts = {n: distribute(np.full_like(w, 7) if blank else w, layout, rank) for n, w in WHOLE.items()}
    state: dict[str, Any] = {"rng": PerRank(-1 if blank else rank), "model": {}, "optimizer": {}, "odd key!": {}}
    for name, value in parts.items():
        key, _, inner = name.partition("/")
        state[key][inner] = value
    state["model"]["note"] = "" if blank else TEXT
    return state


def save(path: Path, world_size: int, writer: FileSystemWriter | None) -> None:
    def job(platform: Platform) -> None:
        state = state_of(platform.ranks.rank, world_size)
        hyper_ckpt.save(state, path, storage_writer=writer, platform=platform)

    run_world(world_size, job, platform=meshed_platform)


def load(path: Path, world_size: int, *keys: str) -> None:
    def job(platform: Platform) -> None:
        rank = platform.ranks.rank
        target = {k: v for k, v in state_of(rank, world_size, blank=True).items() if not keys or k in keys}
        hyper_ckpt.load(target, path, platform=platform)
        expected = state_of(rank, world_size)
        for key in target.keys() - {"rng"}:
            for name, value in target[key].items():
                if name == "note":
                    assert value == TEXT
                else:
                    assert value.local.tobytes() == expected[key][name].local.tobytes()

    run_world(world_size, job, platform=meshed_platform)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_file_for_every_key(tmp_path: Path, world_size: int) -> None:
    save(tmp_path, world_size, PerKeyWriter())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    groups = {re.sub(r"rank-\d{5}-[0-9a-f]{16}-(.*)\.safetensors", r"\1", name) for name in files}
    assert groups == {"model", "optimizer", "odd_key_", "rng"}
    assert len(files) == 4 * world_size
    for name in files:
        keys = {k.partition("/")[0] for k in safetensors.numpy.load_file(tmp_path / name)}
        assert len(keys) == 1
    assert hyper_ckpt.verify(tmp_path).ok
    for size in range(1, world_size + 1):
        load(tmp_path, size)


def test_weights_are_shipped_alone(tmp_path: Path) -> None:
    save(tmp_path / "all", 2, PerKeyWriter())
    shipped = tmp_path / "shipped"
    shutil.copytree(tmp_path / "all", shipped, ignore=shutil.ignore_patterns("*-optimizer*", "*-odd_key_*", "*-rng*"))
    load(shipped, 3, "model")
    with pytest.raises(MissingFileError, match="-optimizer"):
        load(shipped, 1, "optimizer")


def test_the_default_has_one_file_a_rank(tmp_path: Path) -> None:
    save(tmp_path, 2, FileSystemWriter())
    assert len(list(tmp_path.glob("rank-*.safetensors"))) == 2


def test_options_of_a_subclass_are_kept(tmp_path: Path) -> None:
    writer = OptionWriter("weights")
    assert isinstance(writer.at("x"), OptionWriter)
    save(tmp_path, 2, writer)
    assert len(list(tmp_path.glob("*-weights.safetensors"))) == 2
    assert len(list(tmp_path.glob("rank-*.safetensors"))) == 4
    assert writer.checkpoint_id is None
    load(tmp_path, 1)


def test_other_options_on_one_rank(tmp_path: Path) -> None:
    def job(platform: Platform) -> None:
        writer = OptionWriter(f"w{platform.ranks.rank}")
        hyper_ckpt.save({"model": np.zeros(3)}, tmp_path, storage_writer=writer, platform=platform)

    with pytest.raises(RanksDisagreeError, match="storage_writer"):
        run_world(2, job)


@pytest.mark.parametrize("group", ["a/b", "../x", "a-b", "0001", "é", " "])
def test_groups_that_cannot_stand_in_a_name(tmp_path: Path, group: str) -> None:
    with pytest.raises(PlanError, match="begin with a letter"):
        save(tmp_path, 2, OptionWriter(group))
    assert not list(tmp_path.glob("*.safetensors"))


def test_groups_whose_headers_grow_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "MAX_HEADER_BYTES", 3000)
    save(tmp_path, 2, PerKeyWriter())
    names = [p.name for p in tmp_path.glob("*.safetensors")]
    assert any(re.fullmatch(r"rank-00001-[0-9a-f]{16}-model-0001\.safetensors", n) for n in names)
    load(tmp_path, 1)
    assert hyper_ckpt.verify(tmp_path).ok


def test_a_checkpoint_is_replaced_with_all_its_files(tmp_path: Path) -> None:
    save(tmp_path, 2, PerKeyWriter())
    old = set(tmp_path.glob("*.safetensors"))
    hyper_ckpt.save({"model": np.zeros(3)}, tmp_path, overwrite=True)
    assert not old & set(tmp_path.glob("*.safetensors"))
