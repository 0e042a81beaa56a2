"""Ranks that do not talk: each stores all that it holds, and the receipts together are the checkpoint."""

import json
import os
import random
import shutil
import signal
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import hyper_ckpt
from hyper_ckpt import NumpyPlatform, PerRank, SaveOptions, ShardedTensor
from hyper_ckpt.cli.app import cli
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CoverageError,
    DigestError,
    ManifestError,
    MissingKeyError,
    PlatformError,
)
from hyper_ckpt.layout import Mesh, MeshLayout, Replicate, Shard
from hyper_ckpt.receipt import ZERO_DIGEST, seal
from hyper_ckpt.testing.launch import launch
from hyper_ckpt.testing.meshed import distribute, meshed_platform

from .alone_job import save_part
from .helpers import State, blank, load_on, same, save_on

W = np.arange(60, dtype="f4").reshape(10, 6)
BOUNDS = [0, 3, 4, 10]


def part(rank: int) -> State:
    """One rank of three: a sharded tensor, a replica, ties, a blob, a value that belongs to ranks, a stage."""
    low, high = BOUNDS[rank], BOUNDS[rank + 1]
    tied = np.arange(5, dtype="i2")
    return {
        "w": ShardedTensor([(W[low:high].copy(), (low, 0))], W.shape),
        "replica": np.arange(7),
        "empty": np.zeros((0, 2)),
        "tied": {"a": tied, "b": tied},
        "step": 12,
        "rng": PerRank(("state", rank)),
        "blob": list(range(20_000)),
        "only": {f"stage{rank}": np.full(3, rank, "u1")},
    }


def save_alone(rank: int, path: Any, *, world: int = 3, state: State | None = None, token: str = "run-1") -> Any:
    return hyper_ckpt.save(
        part(rank) if state is None else state,
        path,
        platform=NumpyPlatform(rank=rank, world_size=world),
        use_collectives=False,
        options=SaveOptions(save_token=token),
    )


def load_alone(rank: int, world: int, target: State, path: Any, **options: Any) -> hyper_ckpt.LoadReport:
    platform = NumpyPlatform(rank=rank, world_size=world)
    return hyper_ckpt.load(target, path, platform=platform, use_collectives=False, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for rank in (2, 0, 1):
        save_alone(rank, tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.mark.parametrize("rank", range(3))
def test_each_rank_gets_its_own_back(path: Path, rank: int) -> None:
    target = blank(part(rank))
    target["w"] = ShardedTensor([(np.zeros((n, 6), "f4"), (o, 0)) for o, n in [(BOUNDS[rank], 1)]], W.shape)
    report = load_alone(rank, 3, target, path, strict=True)
    assert target["rng"].value == ("state", rank)
    assert same(target["w"].shards[0][0], W[BOUNDS[rank] : BOUNDS[rank] + 1])
    for key in ("replica", "empty", "tied", "step", "blob", "only"):
        assert same(target[key], part(rank)[key]), key
    assert report.bytes_received == 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_other_world_loads_it_with_or_without_collectives(path: Path, world: int) -> None:
    def target(_: int) -> State:
        return {"w": np.zeros_like(W), "replica": np.zeros(7, int), "step": 0, "only": {"stage1": np.zeros(3, "u1")}}

    states, reports = load_on(world, target, str(path), strict=False)
    alone = [target(rank) for rank in range(world)]
    for rank, each in enumerate(alone):
        load_alone(rank, world, each, path, strict=False)
    for each in (*states, *alone):
        assert same(each, {"w": W, "replica": np.arange(7), "step": 12, "only": {"stage1": np.full(3, 1, "u1")}})
    if world > 1:
        assert sum(r.bytes_received for r in reports) > 0  # read once, passed on, as from any checkpoint


def test_reading_verifying_and_listing(path: Path) -> None:
    state = hyper_ckpt.read(path)
    assert same(state["w"], W)
    assert same(state["blob"], part(0)["blob"])
    assert sorted(state["only"]) == ["stage0", "stage1", "stage2"]
    report = hyper_ckpt.verify(path)
    assert report.ok
    assert report.bytes_checked > 3 * 100_000, "every rank's part is checked"
    metadata = hyper_ckpt.read_metadata(path)
    assert metadata.world_size == 3
    (file,) = {where.relative_path for _, where in metadata.storage_data["tied/a"][:1]}
    assert metadata.storage_data["tied/b"][0][1].relative_path == file
    assert metadata.storage_data["tied/b"][0][1].offset == metadata.storage_data["tied/a"][0][1].offset


def test_a_rank_prefers_its_own_copy_and_is_told_that_they_differ(tmp_path: Path) -> None:
    for rank in range(2):
        save_alone(rank, tmp_path / "c", world=2, state={"x": np.full(4, rank), "lr": rank / 10})
    for rank, expected in ((0, 0), (1, 1), (5, 0)):
        target = {"x": np.zeros(4, int), "lr": 9.0}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_alone(rank, 6, target, tmp_path / "c")
        told = " ".join(str(w.message) for w in caught)
        assert "different values of 'x'" in told
        assert "different values of 'lr'" in told
        assert ("rank 5 got the lowest rank's" in told) == (rank == 5)
        assert (target["x"].tolist(), target["lr"]) == ([expected] * 4, expected / 10)


def test_an_incomplete_set_names_what_is_missing(tmp_path: Path) -> None:
    for rank in (0, 2):
        save_alone(rank, tmp_path / "c", world=4)
    for use in (hyper_ckpt.read, hyper_ckpt.verify, hyper_ckpt.read_metadata):
        with pytest.raises(CheckpointNotFoundError, match=r"by 4 ranks.*ranks 1, 3 are missing"):
            use(tmp_path / "c")
    with pytest.raises(CheckpointExistsError, match="may become a checkpoint"):
        hyper_ckpt.save({"a": 1}, tmp_path / "c")
    hyper_ckpt.save({"a": 1}, tmp_path / "c", overwrite=True)
    assert hyper_ckpt.read(tmp_path / "c") == {"a": 1}


def test_a_path_is_used_once(path: Path) -> None:
    with pytest.raises(CheckpointExistsError, match=r"rank 1's part of this save already.*save_token"):
        save_alone(1, path)
    with pytest.raises(CheckpointExistsError, match="files of another save"):
        save_alone(1, path, token="run-2")
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint"):
        hyper_ckpt.save({"a": 1}, path)
    before = sorted(os.listdir(path / "receipts"))
    hyper_ckpt.save({"a": 1}, path, overwrite=True)
    assert hyper_ckpt.read(path) == {"a": 1}
    assert not set(before) & set(os.listdir(path / "receipts")), "what was replaced is removed"
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint"):
        save_alone(0, path, token="run-3")


def test_two_complete_saves_are_not_chosen_between(tmp_path: Path) -> None:
    for token in "ab":
        for rank in range(2):
            save_alone(rank, tmp_path / token, world=2, token=token)
    shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
    with pytest.raises(ManifestError, match="several complete saves"):
        hyper_ckpt.read(tmp_path / "a")


def test_one_token_for_two_saves_is_noticed(tmp_path: Path) -> None:
    save_alone(0, tmp_path / "c", world=2, state={"x": np.zeros(2)})
    save_alone(1, tmp_path / "c", world=2, state={"x": np.zeros(2, "f4")})
    with pytest.raises(ManifestError, match=r"rank 0 saved 'x' as float64 .* but rank 1 as float32"):
        hyper_ckpt.read(tmp_path / "c")
    save_alone(0, tmp_path / "d", world=3, state={"x": 1})
    save_alone(1, tmp_path / "d", world=2, state={"x": 1})
    save_alone(2, tmp_path / "d", world=3, state={"x": 1})
    with pytest.raises(ManifestError, match=r"different saves.*save_token once"):
        hyper_ckpt.read(tmp_path / "d")


def test_holes_and_overlaps_are_refused(tmp_path: Path) -> None:
    def state(low: int, high: int) -> State:
        return {"w": ShardedTensor([(W[low:high].copy(), (low, 0))], W.shape)}

    for number, (first, second) in enumerate([((0, 4), (5, 10)), ((0, 6), (4, 10))]):
        save_alone(0, tmp_path / str(number), world=2, state=state(*first))
        save_alone(1, tmp_path / str(number), world=2, state=state(*second))
        with pytest.raises(CoverageError, match=r"'w'.*hole or overlap"):
            hyper_ckpt.read(tmp_path / str(number))


def test_a_whole_replica_beside_shards(tmp_path: Path) -> None:
    save_alone(0, tmp_path / "c", world=2, state={"w": ShardedTensor([(W[2:4].copy(), (2, 0))], W.shape)})
    save_alone(1, tmp_path / "c", world=2, state={"w": W})
    assert same(hyper_ckpt.read(tmp_path / "c")["w"], W)
    target = {"w": ShardedTensor([(np.zeros((2, 6), "f4"), (2, 0))], W.shape)}
    load_alone(0, 2, target, tmp_path / "c")
    assert same(target["w"].shards[0][0], W[2:4])


def test_layouts_of_a_framework(tmp_path: Path) -> None:
    layout = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), (Replicate(), Shard(0)))
    for rank in range(4):
        platform = meshed_platform(NumpyPlatform(rank=rank, world_size=4).ranks)
        hyper_ckpt.save(
            {"w": distribute(W, layout, rank, on_device=True)},
            tmp_path / "c",
            platform=platform,
            use_collectives=False,
            options=SaveOptions(save_token="t"),
        )
    assert same(hyper_ckpt.read(tmp_path / "c")["w"], W)
    target = distribute(np.zeros_like(W), layout, 3, on_device=True)
    platform = meshed_platform(NumpyPlatform(rank=3, world_size=4).ranks)
    hyper_ckpt.load({"w": target}, tmp_path / "c", platform=platform, use_collectives=False)
    assert same(target.local, W[5:])


def test_any_checkpoint_is_loaded_without_collectives(tmp_path: Path) -> None:
    save_on(3, part, str(tmp_path / "c"))
    for rank in range(2):
        target: State = {"w": np.zeros_like(W), "rng": PerRank(None)}
        load_alone(rank, 2, target, tmp_path / "c", strict=False)
        assert same(target, {"w": W, "rng": PerRank(("state", rank))})
    with pytest.raises(MissingKeyError, match="'absent'"):
        load_alone(1, 2, {"absent": 0}, tmp_path / "c")


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    two = NumpyPlatform(rank=0, world_size=2)
    with pytest.raises(ValueError, match="save_token"):
        hyper_ckpt.save({}, tmp_path / "c", platform=two, use_collectives=False)
    with pytest.raises(ValueError, match="use_collectives=False"):
        hyper_ckpt.save({}, tmp_path / "c", options=SaveOptions(save_token="t"))
    with pytest.raises(ValueError, match="planner"):
        hyper_ckpt.save(
            {}, tmp_path / "c", platform=two, use_collectives=False, planner=hyper_ckpt.StandardSavePlanner()
        )
    for call in (hyper_ckpt.save, hyper_ckpt.load):
        with pytest.raises(PlatformError, match="use_collectives=False"):
            call({"a": 1}, tmp_path / "c", platform=two)
    with pytest.raises(ValueError, match="rank must be"):
        NumpyPlatform(rank=2, world_size=2)
    assert not (tmp_path / "c").exists()


def test_a_failed_rank_leaves_nothing(tmp_path: Path) -> None:
    save_alone(0, tmp_path / "c", world=2, state={"x": 1})
    with pytest.raises(CheckpointError, match="'bad'"):
        save_alone(1, tmp_path / "c", world=2, state={"bad": object()})
    assert [n for n in os.listdir(tmp_path / "c" / "receipts") if "rank-00001" in n] == []
    save_alone(1, tmp_path / "c", world=2, state={"x": 1})
    assert hyper_ckpt.read(tmp_path / "c") == {"x": 1}


def receipts(path: Path) -> Iterator[Path]:
    return iter(sorted((path / "receipts").iterdir()))


def reseal(file: Path, record: dict[str, Any]) -> None:
    data = json.dumps({**record, "digest": ZERO_DIGEST}, separators=(",", ":")).encode(errors="surrogatepass")
    data = data.replace(b'"DEEP"', b'{"!":"list","v":[' * 5000 + b"1" + b"]}" * 5000)
    file.write_bytes(seal(data)[0])


def test_damage_is_found(path: Path) -> None:
    file = next(receipts(path))
    good = file.read_bytes()
    file.write_bytes(good.replace(b'"rank":0', b'"rank":1', 1))
    with pytest.raises(ManifestError, match="rank-00000"):
        hyper_ckpt.read(path)
    file.write_bytes(good)
    data = next(path.glob("rank-00001-*"))
    (at,) = [x.offset for _, x in hyper_ckpt.read_metadata(path).storage_data["w"] if x.relative_path == data.name]
    content = bytearray(data.read_bytes())
    content[at] ^= 1
    data.write_bytes(content)
    assert not hyper_ckpt.verify(path).ok
    with pytest.raises(DigestError, match="rank-00001"):
        hyper_ckpt.read(path)


def test_hostile_descriptions(path: Path) -> None:
    """Whatever a description says: our own errors, or a state."""
    file = next(receipts(path))
    good = json.loads(file.read_bytes())
    rng, refused = random.Random(5), 0
    for _ in range(300):
        record = json.loads(json.dumps(good))
        spoil(record["description"], rng)
        reseal(file, record)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hyper_ckpt.read(path)
                assert hyper_ckpt.verify(path) is not None
        except CheckpointError:
            refused += 1
    assert refused > 50


def spoil(record: Any, rng: random.Random) -> None:
    keys = list(record) if isinstance(record, dict) else range(len(record))
    key = rng.choice(list(keys))
    inner = record[key]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
        return spoil(inner, rng)
    record[key] = rng.choice(
        [-1, 0, 1, 2**62, 2**63, 2**70, None, "x", "../x", [], [[0]], [2**40, 2**40], {}, 0.5, True]
    )
    return None


def test_a_killed_process(tmp_path: Path) -> None:
    launch(3, save_part, (str(tmp_path / "c"), 1), expect={1: signal.SIGKILL})
    with pytest.raises(CheckpointNotFoundError, match="rank 1 are missing"):
        hyper_ckpt.read(tmp_path / "c")
    launch(1, f"{Path(__file__).parent / 'alone_job.py'}:late_part", (str(tmp_path / "c"),))
    assert sorted(hyper_ckpt.read(tmp_path / "c")["mine"]) == ["0", "1", "2"]


def test_the_commands_know_it(path: Path) -> None:
    listed = json.loads(CliRunner().invoke(cli, ["ls", "--json", str(path.parent)]).stdout)
    (entry,) = listed["checkpoints"]
    assert (entry["name"], entry["state"], entry["world_size"]) == ("ckpt", "complete", 3)
    assert "only/stage1" in CliRunner().invoke(cli, ["show", str(path)]).stdout
    assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 0
    next(receipts(path)).unlink()
    (entry,) = json.loads(CliRunner().invoke(cli, ["ls", "--json", str(path.parent)]).stdout)["checkpoints"]
    assert entry["state"] == "incomplete"
    assert "rank 0 are missing" in entry["problem"]
    assert CliRunner().invoke(cli, ["verify", str(path)]).exit_code == 1


def spoiled(path: Path, change: Any) -> None:
    file = next(receipts(path))
    record = json.loads(file.read_bytes())
    change(record)
    reseal(file, record)


def nested(record: Any) -> None:
    record["description"]["state"] = "DEEP"


def many_dimensions(record: Any) -> None:
    part = record["description"]
    part["tensors"].append(["many", "int8", [2] * 24])
    for i in range(3):
        part["chunks"].insert(0, [len(part["tensors"]) - 1, [i % 2] * 24, [1] * 24])
        record["pieces"].insert(0, [0, i, 1, "0" * 16])


def many_boxes(record: Any) -> None:
    part = record["description"]
    part["tensors"].append(["many", "int8", [20_000, 2]])
    for i in range(8000):
        part["chunks"].insert(0, [len(part["tensors"]) - 1, [i, 0], [2, 1]])
        record["pieces"].insert(0, [0, 0, 2, "0" * 16])


def far_away(record: Any) -> None:
    record["pieces"][0][1] = 2**63


@pytest.mark.parametrize("change", [nested, many_dimensions, many_boxes, far_away])
def test_receipts_that_would_cost_much_are_refused(path: Path, change: Any) -> None:
    spoiled(path, change)
    tracemalloc.start()
    for use in (hyper_ckpt.read, hyper_ckpt.read_metadata):
        with pytest.raises(CheckpointError):
            use(path)
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


def test_a_damaged_one_is_not_overwritten_unasked(path: Path) -> None:
    file = next(receipts(path))
    file.write_bytes(file.read_bytes().replace(b'"rank":0', b'"rank":7', 1))
    with pytest.raises(CheckpointExistsError, match="damaged"):
        hyper_ckpt.save({"a": 1}, path)
    hyper_ckpt.save({"a": 1}, path, overwrite=True)


def test_a_token_of_another_world_is_noticed(tmp_path: Path) -> None:
    save_alone(3, tmp_path / "c", world=4, state={"x": 1})
    save_alone(0, tmp_path / "c", world=2, state={"x": 1})
    save_alone(1, tmp_path / "c", world=2, state={"x": 1})
    with pytest.raises(ManifestError, match="save_token once"):
        hyper_ckpt.read(tmp_path / "c")
