"""The manifest: what a checkpoint holds and where. Values <-> bytes; see docs/format.md."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from hyper_ckpt.box import IntArray
from hyper_ckpt.cells import Chunks, GridCells, ListedCells, grid_cells
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt.errors import ManifestError, VersionError
from hyper_ckpt.receipt import PLAIN_NAME, FileRecord, check_seal
from hyper_ckpt.strict_json import refuse_duplicates

MANIFEST_NAME = "manifest.json"
FORMAT, VERSION = "hyper-ckpt", 1
MAX_DIMS = 64
MAX_CORNERS = 1 << 20
T = TypeVar("T")


class Part(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The chunks of a tensor that make one copy: cells of a grid, or explicit columns.

    `start` counts bytes from the data section of each chunk's file: one number where all are equal.
    """

    grid: int | None = None
    start: int | list[int] = 0
    offsets: list[list[int]] = []
    sizes: list[list[int]] = []
    files: list[int] = []


class TensorRow(Part, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A tensor of the manifest; the inherited fields are the copy that covers it."""

    dtype: str
    shape: tuple[int, ...]
    copies: list[Part] = []


class Grid(msgspec.Struct, frozen=True, array_like=True):
    """Where the cells of a grid begin in each dimension, and the list of files, one per cell, row-major."""

    cuts: list[list[int]]
    files: int


class Document(msgspec.Struct, frozen=True):
    """The whole file. Tensors and grids are decoded one by one."""

    format: str
    version: int
    digest: str
    save_id: str
    world_size: int
    created: float
    library: str
    files: list[FileRecord]
    receipts: list[str]
    file_lists: list[list[int]]
    grids: list[msgspec.Raw]
    tensors: dict[str, msgspec.Raw]
    state: msgspec.Raw
    user: msgspec.Raw


class StoredTensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor as stored; `copies[0]` covers it, further ones may be partial."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    copies: tuple[Chunks, ...]


class Manifest:
    """A decoded manifest. Tensors and grids are decoded when asked for.

    Args:
        data: the file's bytes.
        what: how errors call it.

    Raises:
        ManifestError: damaged or hostile.
        VersionError: written by a newer format.
    """

    def __init__(self, data: bytes, what: str = MANIFEST_NAME) -> None:
        check_seal(data, what)
        self.data, self.what = data, what
        try:
            head = msgspec.json.decode(data, type=_Head)
            if head.format != FORMAT:
                raise ValueError(f"format is {head.format!r}")
            if head.version > VERSION:
                raise VersionError(
                    f"{what} has format version {head.version}; this release reads up to {VERSION}. "
                    f"It was written by hyper-ckpt {head.library}: install that release or a later one"
                )
            self._document = msgspec.json.decode(data, type=Document)
            refuse_duplicates(data, msgspec.json.encode(self._document))
            self._check()
        except (msgspec.ValidationError, msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ManifestError(f"{what} is not a valid manifest: {error}") from error
        self._rows: dict[str, TensorRow] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._decoded: dict[str, StoredTensor] = {}
        self._names: dict[str, str] = {}
        self._cells: dict[tuple[int, tuple[int, ...]], GridCells] = {}
        self._grids: dict[int, tuple[tuple[IntArray, ...], int]] = {}
        self._lists: dict[int, IntArray] = {}
        self._single: dict[tuple[int | None, str, tuple[int, ...]], tuple[int, int]] = {}

    def _check(self) -> None:
        document = self._document
        names = [f.name for f in document.files]
        if len(set(names)) != len(names) or any(not PLAIN_NAME.fullmatch(n) for n in names):
            raise ValueError("file names must be plain, relative and distinct")
        if document.world_size < 1 or len(document.receipts) not in (0, document.world_size):
            raise ValueError("one receipt digest per rank is required, or none at all")
        for f in document.files:
            if not 0 < f.data_start <= f.size < 1 << 60 or not 0 <= f.rank < document.world_size:
                raise ValueError(f"the sizes of {f.name} are out of bounds")
        if any(not 0 <= n < len(names) for row in document.file_lists for n in row):
            raise ValueError("a file list names no file")

    @property
    def checkpoint(self) -> str:
        """How errors call the checkpoint: where it lies."""
        return self.what.removesuffix(f"/{MANIFEST_NAME}")

    @property
    def save_id(self) -> str:
        """16 hex digits, unique per save."""
        return self._document.save_id

    @property
    def world_size(self) -> int:
        """Ranks that saved."""
        return self._document.world_size

    @property
    def version(self) -> int:
        """Of the format."""
        return self._document.version

    @property
    def created(self) -> float:
        """Seconds since the epoch."""
        return self._document.created

    @property
    def files(self) -> Sequence[FileRecord]:
        """The data files."""
        return self._document.files

    @property
    def receipts(self) -> Sequence[str]:
        """The digest of each rank's receipt; none where readers made the manifest of files that have no digests."""
        return self._document.receipts

    @functools.cached_property
    def absent(self) -> frozenset[int]:
        """Ranks whose parts are missing: only in what is made of the receipts of ranks that did not talk."""
        return frozenset(rank for rank, digest in enumerate(self._document.receipts) if not digest)

    def renamed(self, names: Mapping[str, str]) -> Manifest:
        """The same manifest, with tensors and payloads under further names.

        Args:
            names: the saved name of each further name.
        """
        if not names:
            return self
        tensors = dict(self._document.tensors)
        tensors |= {name: self._document.tensors[saved] for name, saved in names.items() if saved in tensors}
        other = copy.copy(self)
        other._document = msgspec.structs.replace(self._document, tensors=tensors)
        other._rows, other._places, other._decoded = {}, {}, {}
        other._names = {**self._names, **names}
        return other

    def saved_name(self, name: str) -> str:
        """The name under which a payload was saved."""
        return self._names.get(name, name)

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Names of the tensors, in the order of the state; values are private."""
        return self._document.tensors

    @functools.cached_property
    def state(self) -> bytes:
        """The nested state, as `hyper_ckpt.state.encode_tree` wrote it."""
        return bytes(self._document.state)

    @functools.cached_property
    def user(self) -> bytes:
        """What `save(user_metadata=...)` was given, as a tree."""
        return bytes(self._document.user)

    def tensor(self, name: str) -> StoredTensor:
        """Decodes one tensor, once.

        Raises:
            KeyError: there is none of this name.
            ManifestError: what the manifest says of it is invalid.
        """
        self.rows([name])
        return self._tensor(name)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._decoded:
            row = self._rows[name]
            copies = tuple([self._chunks(part, row.dtype, row.shape) for part in (row, *row.copies)])
            self._decoded[name] = StoredTensor(name, row.dtype, row.shape, copies)
        return self._decoded[name]

    def rows(self, names: Sequence[str]) -> list[TensorRow]:
        """What the manifest says of many tensors, decoded and checked at once.

        Raises:
            KeyError, ManifestError: as `tensor`.
        """
        known, raw = self._rows, self._document.tensors
        new = [name for name in names if name not in known]
        try:
            found = _decode_rows(b",".join([raw[name] for name in new]))
        except ValueError:
            found = self._each(new, lambda name: _decode_rows(raw[name])[0])  # which names it
        known.update(zip(new, found, strict=True))
        try:
            self._places.update(zip(new, self._each(new, self._place), strict=True))
        except ManifestError:
            for name in new:  # not to be believed the next time either
                del known[name]
            raise
        return [known[name] for name in names]

    def pieces(self, names: Sequence[str]) -> tuple[IntArray, IntArray]:
        """Of tensors stored whole, once, in one piece: the number of the file, and bytes from its data section.
        -1 and 0 for all others.

        Raises:
            KeyError, ManifestError: as `tensor`.
        """
        self.rows(names)
        found = np.array([self._places[name] for name in names], np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def same_bytes(self, one: str, other: str) -> bool:
        """Whether two tensors are stored as the same bytes: they were one memory.

        Raises:
            KeyError, ManifestError: as `tensor`.
        """
        return self.tensor(one).copies[0].same_as(self.tensor(other).copies[0])

    def _place(self, name: str) -> tuple[int, int]:
        """What `pieces` says of one tensor."""
        row = self._rows[name]
        key = (row.grid, row.dtype, row.shape)
        if key not in self._single:
            self._single[key] = self._file_and_room(row)
        file, room = self._single[key]
        if file < 0 or row.copies or not isinstance(row.start, int):
            self._tensor(name)
            return -1, 0
        if not 0 <= row.start <= room:
            raise ValueError("a chunk leaves its file")
        return file, row.start

    def _file_and_room(self, row: TensorRow) -> tuple[int, int]:
        """The file of a grid's only cell, and the last byte of that where it can start; -1 and 0 where it has more."""
        _check_size(row.dtype, row.shape)
        cells = self._grid(row.grid, row.shape) if row.grid is not None else None
        if cells is None or len(cells) != 1:
            return -1, 0
        return int(cells.file[0]), cells.least_slack(BY_NAME[row.dtype].itemsize, self._room)

    def _each(self, names: Iterable[str], read: Callable[[str], T]) -> list[T]:
        """What is read of each tensor; an error names it."""
        out = []
        for name in names:
            try:
                out.append(read(name))
            except (msgspec.DecodeError, ValueError, OverflowError) as error:
                raise ManifestError(f"{self.what}: tensor {name!r} is invalid: {error}") from error
        return out

    def _chunks(self, part: Part, dtype: str, shape: tuple[int, ...]) -> Chunks:
        cells = self._listed(part, shape) if part.grid is None else self._grid(part.grid, shape)
        itemsize = BY_NAME[dtype].itemsize
        if isinstance(part.start, int):
            if len(cells) and not 0 <= part.start <= cells.least_slack(itemsize, self._room):
                raise ValueError("a chunk leaves its file")
            return Chunks(cells, part.start)
        start = np.array(part.start, np.int64)
        if len(start) != len(cells):
            raise ValueError("columns of different lengths")
        if (start < 0).any() or (start > cells.slack(itemsize, self._room)).any():
            raise ValueError("a chunk leaves its file")
        return Chunks(cells, start)

    def _listed(self, part: Part, shape: tuple[int, ...]) -> ListedCells:
        """Chunks that are listed one by one."""
        n = len(part.files)
        if len(part.offsets) != n or len(part.sizes) != n:
            raise ValueError("columns of different lengths")
        offsets = np.array(part.offsets, np.int64).reshape(n, len(shape))
        sizes = np.array(part.sizes, np.int64).reshape(n, len(shape))
        # To prove that they are a tiling takes 2^cut corners a chunk, and nobody cuts that many dimensions.
        cut = int(((offsets != 0) | (sizes != np.array(shape, np.int64))).any(axis=0).sum())
        if cut > 4 and n << cut > MAX_CORNERS:
            raise ValueError(f"{n} chunks cut {cut} dimensions")
        return self._checked(offsets, sizes, np.array(part.files, np.int64), shape)

    def _grid(self, number: int, shape: tuple[int, ...]) -> GridCells:
        """The cells of a grid over a shape, looked at once."""
        key = (number, shape)
        if key not in self._cells:
            self._cells[key] = grid_cells(*self._cuts(number, shape))
        return self._cells[key]

    def _cuts(self, number: int, shape: tuple[int, ...]) -> tuple[tuple[IntArray, ...], tuple[int, ...], IntArray]:
        if not 0 <= number < len(self._document.grids):
            raise ValueError("no such grid")
        if number not in self._grids:
            grid, lists = msgspec.json.decode(self._document.grids[number], type=Grid), self._document.file_lists
            if not 0 <= grid.files < len(lists):
                raise ValueError("the grid has no list of files")
            cuts = tuple(np.array(c, np.int64) for c in grid.cuts)
            if any(not len(c) or (np.diff(c) <= 0).any() for c in cuts):
                raise ValueError("the cuts of a grid do not ascend")
            self._grids[number] = cuts, grid.files
        cuts, files = self._grids[number]
        return cuts, shape, self._file_list(files)

    def _file_list(self, number: int) -> IntArray:
        if number not in self._lists:
            self._lists[number] = np.array(self._document.file_lists[number], np.int64)
        return self._lists[number]

    def _checked(self, offsets: IntArray, sizes: IntArray, file: IntArray, shape: tuple[int, ...]) -> ListedCells:
        whole = np.array(shape, np.int64).reshape(1, -1)
        # In an order in which hostile numbers cannot wrap around.
        if (offsets < 0).any() or (sizes <= 0).any() or (sizes > whole).any() or (offsets > whole - sizes).any():
            raise ValueError("a chunk leaves the tensor")
        if ((file < 0) | (file >= len(self.files))).any():
            raise ValueError("a chunk names no file")
        return ListedCells(offsets, sizes, file)

    @functools.cached_property
    def _room(self) -> IntArray:
        return np.array([f.size - f.data_start for f in self.files], np.int64)


_ROWS = msgspec.json.Decoder(list[TensorRow])


def _decode_rows(rows: bytes | msgspec.Raw) -> list[TensorRow]:
    data = b"[%b]" % rows
    found = _ROWS.decode(data)
    refuse_duplicates(data, msgspec.json.encode(found))
    return found


def _check_size(dtype: str, shape: tuple[int, ...]) -> None:
    """Refuses tensors that cannot be.

    Raises:
        ValueError: an unknown dtype, or too many dimensions or bytes.
    """
    if dtype not in BY_NAME:
        raise ValueError(f"unknown dtype {dtype!r}")
    impossible = len(shape) > MAX_DIMS or any(not 0 <= n < 1 << 60 for n in shape)
    if impossible or math.prod(shape) * BY_NAME[dtype].itemsize >= 1 << 60:
        raise ValueError(f"impossible shape {shape}")


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int
    library: str = "unknown"
