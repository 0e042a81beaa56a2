"""Folders of plain safetensors files load into any sharding; damaged and hostile ones are refused."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_ckpt
from hyper_ckpt import PlainSafetensorsReader
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HeaderError,
    ManifestError,
    MissingFileError,
    MissingKeyError,
    UnsupportedDtypeError,
    UnsupportedLayoutError,
)
from hyper_ckpt.layout import Mesh, MeshLayout, Replicated, Shard
from hyper_ckpt.receipt import FileRecord
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.plain_manifest import PlainTensor, plain_manifest
from hyper_ckpt.testing.meshed import distribute, meshed_platform
from hyper_ckpt.testing.world import run_world

RNG = np.random.default_rng(0)
WEIGHTS = {
    "embed.weight": RNG.normal(size=(64, 48)).astype(ml_dtypes.bfloat16),
    "layers.0.proj.weight": RNG.normal(size=(48, 96)).astype(np.float32),
    "layers.0.proj.bias": RNG.normal(size=96).astype(np.float16),
    "a/b~c": RNG.integers(0, 99, (5, 3)),
    "": np.array(2.5),
    "none": np.zeros((0, 3), np.int8),
}
FIRST = ["embed.weight", "", "none"]


def one_file(folder: Path) -> None:
    safetensors.numpy.save_file(WEIGHTS, folder / "model.safetensors", {"format": "pt"})


def two_files(folder: Path, *, index: bool = False) -> None:
    parts = {name: f"model-0000{1 if name in FIRST else 2}-of-00002.safetensors" for name in WEIGHTS}
    for file in set(parts.values()):
        safetensors.numpy.save_file({n: w for n, w in WEIGHTS.items() if parts[n] == file}, folder / file)
    if index:
        write_index(folder, parts)


def two_files_and_index(folder: Path) -> None:
    two_files(folder, index=True)
    # What the index does not name does not count.
    safetensors.numpy.save_file(
        {"embed.weight": np.zeros(3), "training": np.zeros(2)}, folder / "optimizer.safetensors"
    )


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def blank(layout: Callable[[tuple[int, ...]], Any], rank: int, on_device: bool = False) -> dict[str, Any]:
    return {
        name: distribute(np.full_like(w, 1), layout(w.shape), rank, on_device=on_device) for name, w in WEIGHTS.items()
    }


def load(folder: Path, reader: PlainSafetensorsReader | None = None, **options: Any) -> dict[str, Any]:
    target = {name: np.full_like(w, 1) for name, w in WEIGHTS.items()}
    chosen = {"verify": "off", **options}
    hyper_ckpt.load(target, folder, storage_reader=reader or PlainSafetensorsReader(), **chosen)
    return target


def same(target: dict[str, Any], expected: dict[str, Any] = WEIGHTS) -> bool:
    return all(target[name].tobytes() == w.tobytes() and target[name].dtype == w.dtype for name, w in expected.items())


@pytest.mark.parametrize("write", [one_file, two_files, two_files_and_index])
def test_one_process_loads_a_folder(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    assert same(load(tmp_path))


@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("on_device", [True, False])
def test_four_ranks_load_it_sharded(tmp_path: Path, share_reads: bool, on_device: bool) -> None:
    two_files(tmp_path, index=True)
    mesh = Mesh((2, 2), (0, 1, 2, 3))

    def layout(shape: tuple[int, ...]) -> Any:
        if not shape:
            return Replicated()
        return MeshLayout(mesh, (Shard(0), Shard(len(shape) - 1)))

    def job(platform: Platform) -> None:
        rank = platform.ranks.rank
        target = blank(layout, rank, on_device)
        hyper_ckpt.load(
            target,
            tmp_path,
            storage_reader=PlainSafetensorsReader(),
            platform=platform,
            verify="off",
            share_reads=share_reads,
        )
        expected = {name: distribute(w, layout(w.shape), rank) for name, w in WEIGHTS.items()}
        assert all(target[n].local.tobytes() == e.local.tobytes() for n, e in expected.items())

    run_world(4, job, platform=meshed_platform)


def test_under_a_key(tmp_path: Path) -> None:
    one_file(tmp_path)
    target = {"model": {name: np.full_like(w, 1) for name, w in WEIGHTS.items()}, "step": 3}
    reader = PlainSafetensorsReader(tmp_path.as_posix(), under="model")
    with pytest.raises(MissingKeyError, match="step"):
        hyper_ckpt.load(target, storage_reader=reader, verify="off")
    hyper_ckpt.load(target, storage_reader=reader, verify="off", strict=False)
    assert same(target["model"])
    assert target["step"] == 3


def test_metadata_says_what_is_there(tmp_path: Path) -> None:
    two_files(tmp_path)
    found = hyper_ckpt.read_metadata(tmp_path, storage_reader=PlainSafetensorsReader())
    assert set(found.storage_data) == {
        "embed.weight",
        "layers.0.proj.weight",
        "layers.0.proj.bias",
        "a~1b~0c",
        "",
        "none",
    }
    assert found.state_dict_metadata["embed.weight"].size == (64, 48)  # type: ignore[union-attr]
    again = hyper_ckpt.read_metadata(tmp_path, storage_reader=PlainSafetensorsReader())
    assert again.save_id == found.save_id


@pytest.mark.parametrize("verify", ["during", "before"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_can_be_verified_and_that_is_said(tmp_path: Path, verify: Any, world_size: int) -> None:
    one_file(tmp_path)

    def job(platform: Platform) -> None:
        target = {"": np.array(0.0)}
        with pytest.raises(CheckpointError, match=r'has no digests.*pass verify="off"'):
            hyper_ckpt.load(target, tmp_path, storage_reader=PlainSafetensorsReader(), platform=platform, verify=verify)
        assert target[""] == 0
        # The ranks are still in step.
        hyper_ckpt.load(target, tmp_path, storage_reader=PlainSafetensorsReader(), platform=platform, verify="off")
        assert target[""] == 2.5

    run_world(world_size, job)


def test_a_manifest_on_disk_has_receipts(tmp_path: Path) -> None:
    """Nobody gets around the digests by leaving the receipts out of a manifest."""
    one_file(tmp_path)
    manifest = PlainSafetensorsReader().load_metadata(LocalStore(tmp_path.as_posix()))
    (tmp_path / "manifest.json").write_bytes(manifest.data)
    for verify in ("during", "off"):
        with pytest.raises(ManifestError):
            load(tmp_path, hyper_ckpt.FileSystemReader(), verify=verify)  # type: ignore[arg-type]


def test_folders_without_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="give the folder that holds them"):
        load(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path / "absent")


@pytest.mark.parametrize("cut", [0, 3, 8, 60, -1])
def test_truncated_files(tmp_path: Path, cut: int) -> None:
    two_files(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(HeaderError, match=r"model-00002-of-00002\.safetensors: .*Fetch the file again"):
        load(tmp_path)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    one_file(tmp_path)
    file = tmp_path / "model.safetensors"

    class Late(PlainSafetensorsReader):
        def load_metadata(self, store: Any) -> Any:
            manifest = super().load_metadata(store)
            file.write_bytes(file.read_bytes()[:-1])
            return manifest

    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors has \d+ bytes"):
        load(tmp_path, Late())


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    two_files(tmp_path)
    safetensors.numpy.save_file({"embed.weight": WEIGHTS["embed.weight"]}, tmp_path / "consolidated.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"'embed.weight' is stored twice, in consol.* and model-00001"):
        load(tmp_path)
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert same(load(tmp_path, PlainSafetensorsReader(files=files)))
    with pytest.raises(MissingFileError, match="other"):
        load(tmp_path, PlainSafetensorsReader(files=["other.safetensors"]))


@pytest.mark.parametrize("index", [True, False])
def test_shards_as_torch_writes_them(tmp_path: Path, index: bool) -> None:
    """torch notes only the offsets of a shard: its file looks as if the shard were the whole tensor."""
    two_files(tmp_path, index=index)
    name, note = "layers.0.proj.bias", json.dumps({"layers.0.proj.bias": {"saved_offsets": [48]}})
    shard = {n: w[48:] if n == name else w for n, w in WEIGHTS.items() if n not in FIRST}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": note}
    safetensors.numpy.save_file(shard, tmp_path / "model-00002-of-00002.safetensors", metadata)
    for read in (
        lambda: load(tmp_path),
        lambda: hyper_ckpt.read(tmp_path, storage_reader=PlainSafetensorsReader(), verify="off"),
        lambda: hyper_ckpt.read_metadata(tmp_path, storage_reader=PlainSafetensorsReader()),
    ):
        with pytest.raises(UnsupportedLayoutError, match=r"model-00002-of-00002.safetensors.*DCP_SHARDING_INFO"):
            read()


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    two_files(tmp_path, index=True)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(tmp_path)


def test_an_index_that_names_a_tensor_where_it_is_not(tmp_path: Path) -> None:
    two_files(tmp_path)
    write_index(tmp_path, {**dict.fromkeys(WEIGHTS, "model-00001-of-00002.safetensors")})
    with pytest.raises(CorruptCheckpointError, match=r"the index says that 'layers.0.proj.weight' is in model-00001"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\0b", "", "..", "a/../b"])
def test_an_index_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    two_files(tmp_path)
    write_index(tmp_path, {"embed.weight": name})
    with pytest.raises(CorruptCheckpointError, match="is not a plain file name"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\xff"]
)
def test_damaged_indexes(tmp_path: Path, text: str) -> None:
    two_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptCheckpointError, match="is not an index"):
        load(tmp_path)


def test_several_indexes(tmp_path: Path) -> None:
    two_files(tmp_path, index=True)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="has 2 indexes"):
        load(tmp_path)


def header(members: Any, data: int = 0, length: int | None = None) -> bytes:
    text = json.dumps(members).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "a header longer than the file": header({}, length=1 << 40),
    "a header of 2**64 - 1": header({}, length=(1 << 64) - 1),
    "no object": header([]),
    "a hole": header({"w": {**ENTRY, "data_offsets": [8, 16]}}, 16),
    "an overlap": header({"w": ENTRY, "v": ENTRY}, 8),
    "bytes that are not there": header({"w": ENTRY}, 4),
    "bytes that nobody owns": header({"w": ENTRY}, 9),
    "a negative size": header({"w": {**ENTRY, "shape": [-2]}}, 8),
    "a product that wraps": header({"w": {**ENTRY, "shape": [1 << 62, 4], "data_offsets": [0, 0]}}),
    "an unknown dtype": header({"w": {**ENTRY, "dtype": "F4"}}, 8),
    "thousands of dimensions": header({"w": {**ENTRY, "shape": [1] * 9999 + [2]}}, 8),
    "a part of a tensor": header(
        {"w": ENTRY, "__metadata__": {"hyper_ckpt": json.dumps({"w": {"shape": [4], "offsets": [2]}})}}, 8
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[case])
    with pytest.raises(HeaderError, match=r"model\.safetensors"):
        hyper_ckpt.load({"w": np.zeros(2, np.float32)}, tmp_path, storage_reader=PlainSafetensorsReader(), verify="off")


def test_an_empty_tensor_of_an_impossible_shape(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(
        header({"w": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}})
    )
    with pytest.raises(CorruptCheckpointError, match="impossible shape"):
        hyper_ckpt.load({"w": np.zeros(2, np.float32)}, tmp_path, storage_reader=PlainSafetensorsReader(), verify="off")


@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (PlainTensor("m.safetensors", 0, "float32", (-1, 2)), ManifestError, "impossible shape"),
        (PlainTensor("m.safetensors", 0, "float32", (1,) * 99), ManifestError, "impossible shape"),
        (PlainTensor("m.safetensors", -8, "float32", (2,)), ManifestError, "impossible shape"),
        (PlainTensor("other", 0, "float32", (2,)), ManifestError, "none of the files"),
        (PlainTensor("m.safetensors", 0, "float31", (2,)), UnsupportedDtypeError, "float31"),
        (PlainTensor("m.safetensors", 8, "float32", (2,)), ManifestError, "leaves its file"),
    ],
)
def test_what_a_reader_says_of_tensors_is_checked(
    tmp_path: Path, tensor: PlainTensor, error: type[Exception], text: str
) -> None:
    (tmp_path / "m.safetensors").write_bytes(header({"w": ENTRY}, 8))
    size = (tmp_path / "m.safetensors").stat().st_size
    files = [FileRecord("m.safetensors", size, size - 8, "0" * 32, 0)]
    store = LocalStore(tmp_path.as_posix())
    with pytest.raises(error, match=text):
        plain_manifest(store, files, {"w": tensor}).tensor("w")
    with pytest.raises(MissingFileError, match="gone"):
        plain_manifest(store, [FileRecord("gone", size, 8, "0" * 32, 0)], {})
    with pytest.raises(CheckpointError):
        plain_manifest(store, [FileRecord("../m.safetensors", size, 8, "0" * 32, 0)], {})


@settings(max_examples=150)
@given(st.data())
def test_mutated_files_load_or_are_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    one_file(folder)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    for at in data.draw(st.lists(st.integers(0, 700), min_size=1, max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        load(folder, strict=False)


def test_read_builds_the_state_too(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    state = hyper_ckpt.read(storage_reader=PlainSafetensorsReader(str(tmp_path)), verify="off")
    assert state["w"].tolist() == np.arange(6.0).reshape(2, 3).tolist()
