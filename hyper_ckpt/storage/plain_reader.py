"""Reads folders of plain safetensors files, as Hugging Face and others write them, into any sharding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HeaderError,
    MissingFileError,
    UnsupportedLayoutError,
)
from hyper_ckpt.manifest import MAX_DIMS, Manifest
from hyper_ckpt.receipt import PLAIN_NAME, FileRecord
from hyper_ckpt.storage.filesystem import FileSystemReader
from hyper_ckpt.storage.plain_manifest import PlainTensor, plain_manifest
from hyper_ckpt.storage.safetensors_file import Entry, header_digest, header_length, parse_header
from hyper_ckpt.storage.whole import read_whole
from hyper_ckpt.strict_json import refuse_duplicates

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20


class PlainSafetensorsReader(FileSystemReader):
    """Finds tensors in a folder of `*.safetensors` files, with or without a `*.safetensors.index.json`.

    The files have no digests: pass `verify="off"` to `load`. Headers, sizes and names are checked all the same. An
    index decides which file a tensor is taken from.

    Args:
        path: path or URL of the folder; None: `load(checkpoint_id=...)` says it.
        under: the key of the state below which the tensors stand, as "model" for a state {"model": {name: tensor}};
            None: the state itself has them, {name: tensor}.
        files: names of the files to read, where there are others besides; no index is then looked at.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        under: str | None = None,
        files: Sequence[str] | None = None,
    ) -> None:
        super().__init__(path)
        if isinstance(files, str) or not all(isinstance(file, str) for file in files or ()):
            raise ValueError(f"files are names of files, in a list, not {files!r}")
        self._under, self._files = under, None if files is None else tuple(files)

    def identity(self) -> str:
        return f"{type(self).__name__}(under={self._under!r}, files={self._files!r})"

    def load_metadata(self, store: ByteStore) -> Manifest:
        """What the files hold. Reads the index and the headers.

        Raises:
            CheckpointNotFoundError: there is no such file.
            MissingFileError: one that the index or `files` names is not there.
            HeaderError: a header is damaged, or a dtype is unknown.
        UnsupportedLayoutError: a file holds shards, as torch writes them, not whole tensors.
            CorruptCheckpointError: files and index do not fit each other, or two files hold one tensor.
        """
        names, chosen = self._choose(store)
        files: list[FileRecord] = []
        tensors: dict[str, PlainTensor] = {}
        for file in sorted(names):
            record, entries = _open(store, file)
            files.append(record)
            for entry in entries:
                if chosen is None or chosen.get(entry.name) == file:
                    _add(tensors, entry, file, store.url)
        _check_index(tensors, chosen, store.url)
        return plain_manifest(store, files, tensors, under=self._under)

    def _choose(self, store: ByteStore) -> tuple[set[str], dict[str, str] | None]:
        """The files to read, and the index: which file has which tensor."""
        if self._files is not None:
            return _plain(self._files, store.url), None
        found = [name for name in store.list() if "/" not in name]
        indexes = [name for name in found if name.endswith(INDEX_SUFFIX)]
        if len(indexes) > 1:
            raise CorruptCheckpointError(
                f"{store.url} has {len(indexes)} indexes ({', '.join(indexes[:3])}): say which files are meant, as "
                "PlainSafetensorsReader(files=[...])"
            )
        if indexes:
            chosen = _read_index(store, indexes[0])
            return _plain(chosen.values(), f"{store.url}/{indexes[0]}"), chosen
        names = [name for name in found if name.endswith(SUFFIX)]
        if not names:
            raise CheckpointNotFoundError(f"no safetensors files at {store.url}: give the folder that holds them")
        return _plain(names, store.url), None


def _plain(names: Iterable[str], where: str) -> set[str]:
    """The distinct names, each of which stays below the folder."""
    found = set(names)
    for name in sorted(found):
        if not PLAIN_NAME.fullmatch(name):
            raise CorruptCheckpointError(
                f"{where}: {name!r} is not a plain file name; rename the file: letters, digits, '.', '_' and '-'"
            )
    return found


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_index(store: ByteStore, name: str) -> dict[str, str]:
    data = read_whole(store, name, MAX_INDEX_BYTES)
    try:
        index = msgspec.json.decode(data, type=_Index)
        refuse_duplicates(data, b"")
        return index.weight_map
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{store.url}/{name} is not an index of safetensors files: {error}") from error


def _open(store: ByteStore, name: str) -> tuple[FileRecord, list[Entry]]:
    """Reads a file's header, of which the length is checked before there is room for it."""
    info = store.stat(name)
    if info is None:
        raise MissingFileError(f"{store.url}/{name} is missing: restore it, or correct the index")
    try:
        prefix = bytearray(min(8, info.size))
        store.read_into(name, [(0, len(prefix))], [memoryview(prefix)])
        header = bytearray(header_length(bytes(prefix), info.size))
        store.read_into(name, [(0, len(header))], [memoryview(header)])
        entries = parse_header(bytes(header), info.size)
    except HeaderError as error:
        raise HeaderError(f"{store.url}/{name}: {error}. Fetch the file again") from error
    except UnsupportedLayoutError as error:
        raise UnsupportedLayoutError(f"{store.url}/{name}: {error}") from error
    return FileRecord(name, info.size, len(header), header_digest(bytes(header)), 0), entries


def _add(tensors: dict[str, PlainTensor], entry: Entry, file: str, where: str) -> None:
    if entry.sizes != entry.global_shape or len(entry.sizes) > MAX_DIMS:
        raise HeaderError(
            f"{where}/{file} holds only a part of {entry.name!r}, or one with too many dimensions: a data file of "
            "hyper-ckpt is read without this reader, together with its manifest"
        )
    if entry.name in tensors:
        names = " and ".join(dict.fromkeys([tensors[entry.name].file, file]))
        raise CorruptCheckpointError(
            f"{where}: {entry.name!r} is stored twice, in {names}: say which files are meant, as "
            "PlainSafetensorsReader(files=[...])"
        )
    tensors[entry.name] = PlainTensor(file, entry.start, entry.dtype.name, entry.sizes)


def _check_index(tensors: Mapping[str, PlainTensor], chosen: Mapping[str, str] | None, where: str) -> None:
    absent = [name for name in chosen or () if name not in tensors]
    if chosen and absent:
        raise CorruptCheckpointError(
            f"{where}: the index says that {absent[0]!r} is in {chosen[absent[0]]}, but it is not there "
            f"({len(absent)} such tensors): files of two downloads may be mixed"
        )
