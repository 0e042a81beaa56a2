"""The format of a data file: safetensors, with what it takes to explain itself. Pure functions, no I/O.

A file is 8 bytes with the length of the header, the header (JSON, padded with spaces) and the entries' bytes
from a multiple of 4,096 on, in large files of 524,288. An entry is named after its tensor where that is possible.
`__metadata__` adds what the entry alone does not tell: {"format": "pt", "hyper_ckpt": JSON of {key: {name, shape,
offsets, dtype}}}, of which only what differs from the entry's own is written.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Annotated, Any

import msgspec
import xxhash

from hyper_ckpt.dtypes import BY_NAME, TABLE, DType
from hyper_ckpt.errors import HeaderError, PlanError, UnsupportedLayoutError
from hyper_ckpt.receipt import BLOCK_BYTES

# Readers of safetensors refuse a longer one. The 8 bytes before it don't count.
MAX_HEADER_BYTES = 100_000_000
# What a header takes besides its entries, padding included.
HEADER_BASE_BYTES = BLOCK_BYTES + 128

_ALIGNMENT = 4096
# From here on the padding is below 1 %. Where blocks begin at multiples of their size, the page cache takes each as one
# run of memory instead of several small ones: a warm read took 0.93 times as long.
_LARGE_BYTES = 128 * BLOCK_BYTES
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_NOTES = "hyper_ckpt"
_FORMAT = "format"
# Here torch.distributed.checkpoint notes the offsets of its shards, but not the shapes of their tensors.
_TORCH_SHARDS = "DCP_SHARDING_INFO"
# A key of __metadata__ must not equal a tensor's name: others note there which tensors are tied.
_RESERVED = frozenset({_METADATA, _NOTES, _FORMAT})
_LOOKS_ESCAPED = re.compile(r"@[0-9]+\Z")
_BY_CODE = {row.code: row for row in TABLE if not row.stored_as_bytes}

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Stored(msgspec.Struct, gc=False):
    """An entry as every reader of safetensors sees it."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


class _Note(msgspec.Struct, omit_defaults=True):
    """What an entry does not tell itself. `name_utf8` is hex, for names that JSON can't hold (lone surrogates)."""

    name: str | None = None
    name_utf8: str | None = None
    shape: tuple[_Count, ...] | None = None
    offsets: tuple[_Count, ...] | None = None
    dtype: str | None = None


_NO_NOTE = _Note()


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One box of one tensor, stored in one piece.

    Args:
        key: what the file calls it.
        dtype: of its elements.
        sizes: of the box, in elements.
        start: first byte, counted from the file's data section.
        name: of the tensor.
        global_shape: of the whole tensor.
        offsets: of the box in it.
    """

    key: str
    dtype: DType
    sizes: tuple[int, ...]
    start: int
    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        # Zero first: a hostile header can have millions of huge dimensions and an empty one.
        return 0 if 0 in self.sizes else prod(self.sizes) * self.dtype.itemsize


def choose_keys(names: Sequence[str]) -> list[str]:
    """A key for each entry of one file: its tensor's name if it is unique there and legal, else an escaped one.

    An escaped key ends in "@" and the entry's number, and every name that looks so is escaped itself: keys never
    collide, whatever the names are.
    """
    counts = Counter(names)
    return [
        name if counts[name] == 1 and _is_legal(name) else f"{_printable(name)}@{number}"
        for number, name in enumerate(names)
    ]


def header_upper_bound(name: str, ndim: int) -> int:
    """At least the bytes that an entry for a box of this tensor adds to a header, whatever its key and numbers.

    A header has at most `HEADER_BASE_BYTES` more than its entries together.
    """
    as_json = len(msgspec.json.encode(_printable(name)))
    # Once as key; as key and name again in the notes, JSON inside JSON, where quotes and backslashes double.
    # Numbers have at most 20 characters, comma included: three per dimension, and 7 besides. Then the field names.
    return 5 * as_json + 20 * (3 * ndim + 7) + 200


def build_header(entries: Sequence[Entry]) -> bytes:
    """The bytes of a file before its data section: a multiple of 4,096.

    Args:
        entries: in data-offset order, without a hole.

    Raises:
        PlanError: they are not, two keys are equal, or the header would be longer than readers accept.
    """
    stored: dict[str, _Stored] = {}
    notes: dict[str, _Note] = {}
    end = 0
    for entry in entries:
        if entry.start != end or entry.key in stored or entry.key in _RESERVED:
            raise PlanError(f"entry {entry.key!r} at byte {entry.start}: keys are unique and follow without a hole")
        end += entry.nbytes
        stored[entry.key] = _Stored(entry.dtype.code, entry.dtype.stored_shape(entry.sizes), (entry.start, end))
        plain = entry.key == entry.name and entry.global_shape == entry.sizes and not entry.dtype.stored_as_bytes
        if not plain:
            notes[entry.key] = _note(entry)
    metadata = {_FORMAT: "pt", _NOTES: msgspec.json.encode(notes).decode()}
    text = msgspec.json.encode({_METADATA: metadata, **stored})
    alignment = BLOCK_BYTES if end >= _LARGE_BYTES else _ALIGNMENT
    length = -(-(_LENGTH_BYTES + len(text)) // alignment) * alignment - _LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise PlanError(f"{len(entries)} entries need a header of {length:,} bytes: split the file")
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def header_digest(header: bytes) -> str:
    """Digest of all bytes before the data section."""
    return xxhash.xxh3_128_hexdigest(header)


def header_length(prefix: bytes, file_size: int) -> int:
    """Bytes before the data section, from the first 8 of the file: checked before anybody makes room for them.

    Raises:
        HeaderError: the file cannot hold a header of the length that it claims.
    """
    if len(prefix) < _LENGTH_BYTES or file_size < _LENGTH_BYTES:
        raise HeaderError(f"a file of {file_size} bytes is too short for a header")
    length = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_size - _LENGTH_BYTES):
        raise HeaderError(f"a header of {length:,} bytes cannot be in a file of {file_size:,}: it is damaged")
    return _LENGTH_BYTES + length


def parse_header(data: bytes, file_size: int) -> list[Entry]:
    """The entries of a file in data-offset order. Takes any safetensors file, and checks everything.

    Args:
        data: the file's bytes up to the data section at least.
        file_size: of the whole file.

    Raises:
        HeaderError: the header is damaged, doesn't fit the file, or uses dtypes that are not in our table.
        UnsupportedLayoutError: its entries are shards of tensors, in a form other than ours.
    """
    begin = header_length(data, file_size)
    if len(data) < begin:
        raise HeaderError(f"the header has {begin:,} bytes, but only {len(data):,} of them were read")
    members = _json_object(data[_LENGTH_BYTES:begin])
    metadata = _typed(members.pop(_METADATA, {}), dict[str, str])
    if _TORCH_SHARDS in metadata:
        raise UnsupportedLayoutError(
            "the file may hold shards of tensors, with no word of the whole: torch's HuggingFaceStorageWriter marks "
            f"all its files so ({_TORCH_SHARDS}). Write whole tensors by consolidate_safetensors_files of "
            "torch.distributed.checkpoint, and read these"
        )
    stored = _typed(members, dict[str, _Stored])
    notes = _typed(_json_object(metadata.get(_NOTES, "{}")), dict[str, _Note])
    if not notes.keys() <= stored.keys():
        raise HeaderError(f"notes on {min(notes.keys() - stored.keys())!r}, which is not in the file")
    entries = [_entry(key, stored[key], notes.get(key, _NO_NOTE)) for key in stored]
    # Where an empty entry and another start together, the empty one comes first.
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    _check_tiling(entries, file_size - begin)
    return entries


def _is_legal(name: str) -> bool:
    """Whether a tensor's name can be a key. Readers accept any text, the empty one and NUL included."""
    return name not in _RESERVED and not ("@" in name and _LOOKS_ESCAPED.search(name)) and _printable(name) is name


def _printable(name: str) -> str:
    """The name itself if UTF-8 can encode it; else with an escape for every lone surrogate."""
    if name.isascii():
        return name
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode(errors="backslashreplace").decode()
    return name


def _note(entry: Entry) -> _Note:
    writable = _printable(entry.name) is entry.name
    return _Note(
        name=entry.name if writable and entry.name != entry.key else None,
        name_utf8=None if writable else entry.name.encode(errors="surrogatepass").hex(),
        shape=entry.global_shape if entry.global_shape != entry.sizes else None,
        offsets=entry.offsets if any(entry.offsets) else None,
        dtype=entry.dtype.name if entry.dtype.stored_as_bytes else None,
    )


def _json_object(text: bytes | str) -> dict[str, Any]:
    """Parses a JSON object. Not with msgspec, which takes the last of two equal keys in silence."""
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise HeaderError(f"the header is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise HeaderError("the header is not a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise HeaderError(f"the header has the key {twice!r} twice")
    return value


def _typed(value: object, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise HeaderError(f"the header is not that of a safetensors file: {error}") from error


def _entry(key: str, stored: _Stored, note: _Note) -> Entry:
    dtype = _dtype(key, stored.dtype, note.dtype)
    sizes = stored.shape
    if dtype.stored_as_bytes and dtype.itemsize > 1:
        if sizes[-1:] != (dtype.itemsize,):
            raise HeaderError(f"entry {key!r} of {dtype.name} has the shape {sizes}, not (..., {dtype.itemsize})")
        sizes = sizes[:-1]
    start, end = stored.data_offsets
    if _bounded_product(sizes, end) * dtype.itemsize != end - start:
        raise HeaderError(f"entry {key!r} of shape {sizes} does not fit its bytes {start} to {end}")
    shape = sizes if note.shape is None else note.shape
    offsets = (0,) * len(sizes) if note.offsets is None else note.offsets
    inside = len(shape) == len(offsets) == len(sizes) and all(
        offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    if not inside:
        raise HeaderError(f"entry {key!r}: {sizes} at {offsets} is not a box of a tensor of shape {shape}")
    return Entry(key, dtype, sizes, start, _name(key, note), shape, offsets)


def _dtype(key: str, code: str, logical: str | None) -> DType:
    dtype = _BY_CODE.get(code) if logical is None else BY_NAME.get(logical)
    if dtype is None or dtype.code != code or dtype.stored_as_bytes != (logical is not None):
        raise HeaderError(f"entry {key!r} has the unknown dtype {code!r} ({logical or 'no logical one'})")
    return dtype


def _name(key: str, note: _Note) -> str:
    if note.name_utf8 is None:
        return key if note.name is None else note.name
    try:
        return bytes.fromhex(note.name_utf8).decode(errors="surrogatepass")
    except ValueError as error:
        raise HeaderError(f"entry {key!r} has a damaged name") from error


def _bounded_product(sizes: Sequence[int], bound: int) -> int:
    """The product, or some number above `bound`: thousands of huge dimensions must not cost time."""
    if 0 in sizes:
        return 0
    product = 1
    for size in sizes:
        product *= size
        if product > bound:
            break
    return product


def _check_tiling(entries: Sequence[Entry], size: int) -> None:
    end = 0
    for entry in entries:
        if entry.start != end:
            raise HeaderError(f"entry {entry.key!r} starts at byte {entry.start}, but the one before ends at {end}")
        end += entry.nbytes
    if end != size:
        raise HeaderError(f"the entries have {end:,} bytes, the file has {size:,} for them")
