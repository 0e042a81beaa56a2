"""Manifests of files that others wrote: what a reader of a foreign format gives to a load."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from hyper_ckpt.box import plain_ints
from hyper_ckpt.columns import Columns, Placed, TensorTable
from hyper_ckpt.contracts.store import ByteStore, ObjectInfo
from hyper_ckpt.errors import ManifestError, MissingFileError
from hyper_ckpt.manifest import MANIFEST_NAME, MAX_DIMS, Manifest
from hyper_ckpt.manifest_writer import ManifestContent, encode_manifest
from hyper_ckpt.receipt import FileRecord
from hyper_ckpt.state import encode_tree, flatten


@dataclass(frozen=True)
class PlainTensor:
    """Where a whole tensor lies, row-major and little-endian.

    Args:
        file: name of the file.
        start: bytes from the file's data section, which `FileRecord.data_start` begins.
        dtype: a name of `hyper_ckpt.dtypes`.
        shape: in elements.
    """

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", operator.index(self.start))
        object.__setattr__(self, "shape", plain_ints(self.shape))


def plain_manifest(
    store: ByteStore, files: Sequence[FileRecord], tensors: Mapping[str, PlainTensor], *, under: str | None = None
) -> Manifest:
    """A manifest of tensors in files without digests: a load of it must have `verify="off"`.

    The state that it stands for is {name: tensor}, or {under: {name: tensor}}.

    Args:
        store: where the files lie.
        files: name, bytes, bytes before the data section, xxh3-128 of these (`header_digest`), and rank 0.
        tensors: by name, in the order of the state. They may come from untrusted files.

    Raises:
        ManifestError: a file's name is not plain, or a shape is impossible, or a tensor is in none of the files. That a
            tensor lies inside its file is checked when it is first asked for.
        MissingFileError: a file is not there.
        UnsupportedDtypeError: a dtype cannot be stored.
    """
    infos = {record.name: _stat(store, record.name) for record in files}
    for name, tensor in tensors.items():
        if len(tensor.shape) > MAX_DIMS or any(not 0 <= n < 1 << 60 for n in (tensor.start, *tensor.shape)):
            raise ManifestError(f"{store.url}: {name!r} in {tensor.file} has an impossible shape {tensor.shape[:8]}")
        if tensor.file not in infos:
            raise ManifestError(f"{store.url}: {name!r} is said to be in {tensor.file!r}, which is none of the files")
    marker = object()
    inner = dict.fromkeys(tensors, marker)
    flat = flatten(inner if under is None else {under: inner}, is_tensor=lambda value: value is marker)
    rows = sorted(zip(flat.tensors, tensors.values(), strict=True), key=lambda row: row[0])
    columns, placed = _columns(rows, files)
    etags = [info.etag for info in infos.values()]
    content = ManifestContent(
        xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode((list(files), etags))),
        1,
        max((info.modified for info in infos.values()), default=0.0),
        "(files of another library)",
        files,
        (),
        encode_tree(flat.tree),
        encode_tree(flatten({"user": None}, is_tensor=lambda _: False).tree),
        tuple(flat.tensors),
        {},
    )
    return Manifest(encode_manifest(content, columns, placed), f"{store.url}/{MANIFEST_NAME}")


def _stat(store: ByteStore, name: str) -> ObjectInfo:
    info = store.stat(name)
    if info is None:
        raise MissingFileError(f"{store.url}/{name} is missing: restore it")
    return info


def _columns(rows: Sequence[tuple[str, PlainTensor]], files: Sequence[FileRecord]) -> tuple[Columns, Placed]:
    """One chunk for every tensor that is not empty, each an entry of its own."""
    tensors = [tensor for _, tensor in rows]
    table = TensorTable.of([(name, t.dtype, t.shape) for name, t in rows])
    number = {record.name: i for i, record in enumerate(files)}
    full = [i for i, t in enumerate(tensors) if 0 not in t.shape]
    tensor = np.array(full, np.int64)
    file = np.array([number[tensors[i].file] for i in full], np.int64)
    start = np.array([tensors[i].start for i in full], np.int64)
    sizes = np.ones((len(full), table.width), np.int64)
    for row, i in enumerate(full):
        sizes[row, : len(tensors[i].shape)] = tensors[i].shape
    zero, offsets = np.zeros(len(full), np.int64), np.zeros_like(sizes)
    columns = Columns(table, tensor, zero, offsets, sizes, zero, zero - 1)
    names, ranks = tuple(number), np.zeros(len(files), np.int64)
    return columns, Placed(names, ranks, np.arange(len(full)), tensor, file, start, offsets, sizes)
