"""Stored tensors, described."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hyper_ckpt.cells import Chunks
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import MissingKeyError
from hyper_ckpt.manifest import Manifest, StoredTensor
from hyper_ckpt.storage.filesystem import is_whole

WHOLE = "·"
_FIRST = np.zeros(1, np.int64)
_AT_ONCE = 1 << 14
"""Chunks that are expanded at once."""


@dataclass(frozen=True)
class TensorFacts:
    """A tensor in brief.

    Args:
        split: how one copy is cut into chunks.
        copies: how often it is stored; all but the first may be partial.
        tied_to: the earlier tensor whose bytes these are.
        place: file number and start of its first chunk, None if it has no bytes.
        whole: no part of it is missing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    nbytes: int
    split: str
    copies: int
    tied_to: str | None
    place: tuple[int, int] | None
    whole: bool = True


@dataclass(frozen=True)
class ChunkFacts:
    """A stored chunk: its box, its file, and its bytes from the beginning of the file."""

    copy: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


def describe_tensors(manifest: Manifest) -> list[TensorFacts]:
    """All tensors, in the order of the state.

    Raises:
        ManifestError: what the manifest says of one is invalid.
    """
    first: dict[tuple[int, int], str] = {}
    facts = []
    for name in manifest.tensors:
        stored = manifest.tensor(name)
        chunks = stored.copies[0]
        place = (int(chunks.file[0]), int(chunks.starts_of(_FIRST)[0])) if len(chunks) else None
        holder = name if place is None else first.setdefault(place, name)
        elements = math.prod(stored.shape)
        facts.append(
            TensorFacts(
                name,
                stored.dtype,
                stored.shape,
                elements,
                elements * dtype_of(stored.dtype).itemsize,
                describe_split(chunks, stored.shape),
                len(stored.copies),
                None if holder == name else holder,
                place,
                not manifest.absent or is_whole(stored),
            )
        )
    return facts


def matching(manifest: Manifest, wanted: str) -> list[str]:
    """The names that `wanted` stands for: a name, or else a pattern with * and ?.

    Raises:
        MissingKeyError: there is none.
    """
    if wanted in manifest.tensors:
        return [wanted]
    found = [name for name in manifest.tensors if fnmatch.fnmatchcase(name, wanted)]
    if not found:
        below = sum(name.startswith(f"{wanted}/") for name in manifest.tensors)
        hint = f"; '{wanted}/*' matches {below}" if below else ""
        raise MissingKeyError(f"{manifest.what} has no tensor {wanted!r}{hint}", [wanted])
    return found


def chunks_of(stored: StoredTensor, manifest: Manifest) -> Iterator[ChunkFacts]:
    """Where a tensor's bytes lie, copy by copy."""
    itemsize = dtype_of(stored.dtype).itemsize
    for copy, chunks in enumerate(stored.copies):
        for low in range(0, len(chunks), _AT_ONCE):
            some = np.arange(low, min(low + _AT_ONCE, len(chunks)))
            columns = (*chunks.cells.boxes(some), chunks.file[some], chunks.starts_of(some))
            for offsets, sizes, number, start in zip(*[c.tolist() for c in columns], strict=True):
                file, nbytes = manifest.files[number], math.prod(sizes) * itemsize
                yield ChunkFacts(copy, tuple(offsets), tuple(sizes), file.name, file.data_start + start, nbytes)


def describe_split(chunks: Chunks, shape: tuple[int, ...]) -> str:
    """How chunks cut a tensor: "whole", "4 x (2,·)" along one dimension, "grid 2x2 (4,4)", or only their number."""
    n = len(chunks)
    if n <= 1:
        return "whole" if n else "no bytes"
    each = [chunks.cells.cuts_of(d) for d in range(len(shape))]
    cuts = [count for count, _, _ in each]
    if math.prod(cuts) != n:
        return f"{n} boxes"
    parts = [WHOLE if c == 1 else str(low) if low == high else f"{low}..{high}" for c, low, high in each]
    box = f"({','.join(parts)}{',' if len(parts) == 1 else ''})"
    return f"{n} x {box}" if sum(c > 1 for c in cuts) == 1 else f"grid {'x'.join(map(str, cuts))} {box}"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape without blanks."""
    return f"({','.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
