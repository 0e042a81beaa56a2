"""Arguments in the forms that users have them: paths, numpy's integers; and errors as Python has them."""

import errno
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import hyper_ckpt
from hyper_ckpt import (
    FileSystemReader,
    FileSystemWriter,
    LoadOptions,
    PlainSafetensorsReader,
    SaveOptions,
    ShardedTensor,
)
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.errors import CheckpointNotFoundError, MissingFileError, UnsupportedLayoutError
from hyper_ckpt.items import ReadItem, WriteItem
from hyper_ckpt.layout import Boxes, Mesh, MeshLayout, Replicate, Shard
from hyper_ckpt.metadata import MetadataIndex
from hyper_ckpt.storage.plain_manifest import PlainTensor


def test_paths_of_readers_and_writers(tmp_path: Path) -> None:
    state = {"w": np.arange(3)}
    path = tmp_path / "c"
    hyper_ckpt.save(state, storage_writer=FileSystemWriter(path))
    hyper_ckpt.save(state, tmp_path / "d", storage_writer=FileSystemWriter(path))
    hyper_ckpt.async_save(state, storage_writer=FileSystemWriter(tmp_path / "e")).result()
    for each in ("c", "d", "e"):
        target = {"w": np.zeros(3, int)}
        hyper_ckpt.load(target, storage_reader=FileSystemReader(tmp_path / each))
        assert target["w"].tolist() == [0, 1, 2]
    assert hyper_ckpt.read(storage_reader=FileSystemReader(path))["w"].tolist() == [0, 1, 2]
    assert hyper_ckpt.read_metadata(storage_reader=FileSystemReader(path)).world_size == 1
    assert isinstance(FileSystemReader().at(path).checkpoint_id, str)


def test_paths_of_plain_files(tmp_path: Path) -> None:
    save_file({"w": np.arange(3)}, tmp_path / "model.safetensors")
    reader = PlainSafetensorsReader(tmp_path)
    assert hyper_ckpt.read(storage_reader=reader, verify="off")["w"].tolist() == [0, 1, 2]
    target = {"w": np.zeros(3, int)}
    hyper_ckpt.load(target, storage_reader=reader, verify="off")
    assert target["w"].tolist() == [0, 1, 2]


def test_a_reader_of_ones_own_with_a_path(tmp_path: Path) -> None:
    hyper_ckpt.save({"a": 1}, tmp_path / "c")
    reader = FileSystemReader()
    reader.checkpoint_id = tmp_path / "c"  # type: ignore[assignment]
    assert hyper_ckpt.read(storage_reader=reader) == {"a": 1}


NUMBERS = [np.int64, np.int32, np.uint8]


@pytest.mark.parametrize("number", NUMBERS)
def test_integers_of_numpy(tmp_path: Path, number: Any) -> None:
    whole = np.arange(12.0).reshape(4, 3)
    for rank in range(2):
        offsets = np.array([2 * rank, 0], number)
        shape = tuple(map(number, whole.shape))
        hyper_ckpt.save(
            {"w": ShardedTensor([(whole[2 * rank : 2 * rank + 2], offsets)], shape)},
            tmp_path / "c",
            platform=NumpyPlatform(rank=number(rank), world_size=number(2)),
            use_collectives=False,
            threads=number(2),
            max_host_bytes=np.int64(1 << 26),
            timeout=number(60),
            options=SaveOptions(save_token="t"),
        )
    target = {"w": ShardedTensor([(np.zeros((1, 3)), (number(3), number(0)))], whole.shape)}
    options = LoadOptions(broadcast_batch_bytes=number(100))
    hyper_ckpt.load(target, tmp_path / "c", threads=number(1), max_host_bytes=np.int64(1 << 26), options=options)
    assert target["w"].shards[0][0].tolist() == [[9, 10, 11]]
    assert repr(options) == repr(LoadOptions(broadcast_batch_bytes=100)), "ranks compare them as text"


def ints_of(value: Any) -> list[type]:
    if isinstance(value, list | tuple):
        return [kind for each in value for kind in ints_of(each)]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return [kind for name in fields for kind in ints_of(getattr(value, name))]
    return [type(value)]


@pytest.mark.parametrize("number", NUMBERS)
def test_values_hold_plain_integers(number: Any) -> None:
    n = number(1)
    index = MetadataIndex("w", (n, n))
    values = [
        MeshLayout(Mesh((n, n), (n,)), (Shard(n, (n, n)), Replicate()), (number(1), number(0))),
        Boxes((((n,), (n,)),)),
        WriteItem(index, (n, n), "float32"),
        ReadItem(index, (n, n), n, (n,)),
        PlainTensor("f", n, "int8", (n, n)),
    ]
    for value in values:
        assert set(ints_of(value)) <= {int, str, type(None)}, value
        hash(value)


def test_what_is_no_integer() -> None:
    with pytest.raises(UnsupportedLayoutError, match="offsets of a ShardedTensor must be integers"):
        hyper_ckpt.save({"w": ShardedTensor([(np.zeros(2), (0.0,))], (2,))}, "memory://arguments/x")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Shard(1.5)  # type: ignore[arg-type]


def test_not_found_is_python_s_error_too(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        hyper_ckpt.load({"a": 1}, tmp_path / "none")
    assert type(caught.value) is CheckpointNotFoundError
    assert str(caught.value).startswith("no checkpoint at ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    hyper_ckpt.save({"w": np.ones(3)}, tmp_path / "c")
    for file in (tmp_path / "c").glob("*.safetensors"):
        file.unlink()
    for verify in ("before", "during", "off"):
        with pytest.raises(FileNotFoundError) as caught:
            hyper_ckpt.load({"w": np.zeros(3)}, tmp_path / "c", verify=verify)  # type: ignore[arg-type]
        assert type(caught.value) is MissingFileError
    assert caught.value.errno in (None, errno.ENOENT)


def test_a_file_per_tensor(tmp_path: Path) -> None:
    names = ["w", "a/b", "A/b", "x" * 300, "x" * 299 + "y", "ü~\x01", "two words"]
    state = {"model": {name: np.full(i + 2, i) for i, name in enumerate(names)}, "step": 1, "big": "z" * 70_000}
    writer = FileSystemWriter(single_file_per_rank=False)
    metadata = hyper_ckpt.save(state, tmp_path / "c", storage_writer=writer)
    files = [file.name for file in (tmp_path / "c").glob("*.safetensors")]
    assert len(files) == len(names) + 1, "and one for what is no tensor"
    assert max(map(len, files)) < 255
    assert len({where.relative_path for rows in metadata.storage_data.values() for _, where in rows}) >= len(names)
    found = hyper_ckpt.read(tmp_path / "c")
    assert all((found["model"][name] == state["model"][name]).all() for name in names)  # type: ignore[index]
    assert found["big"] == state["big"]
    assert hyper_ckpt.verify(tmp_path / "c").ok
    assert writer.identity() != FileSystemWriter().identity(), "all ranks must do alike"
