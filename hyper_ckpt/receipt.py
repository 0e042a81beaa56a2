"""Receipts: what one rank wrote, with the digests of its blocks. See docs/format.md."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from hyper_ckpt.errors import ManifestError, UnsupportedStateError
from hyper_ckpt.strict_json import refuse_duplicates

BLOCK_BYTES = 524_288
"""Digested blocks count from a piece's start; the last may be shorter."""

MAX_RECORD_BYTES = 1 << 30
"""A manifest or receipt is read whole. A receipt takes some 35 bytes a block of 512 KiB, and 50 a piece; the manifest
of 16,384 ranks has some 130 MB."""

RECORD_HEAD = b'{"format":"hyper-ckpt'

ZERO_DIGEST = "0" * 32
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A data file: name inside the checkpoint, bytes, where its data section starts, xxh3-128 of its header, writer."""

    name: str
    size: int
    data_start: int
    header_digest: str
    rank: int


class PieceRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A contiguous piece of a file: file number in the receipt, bytes from the data section, bytes, xxh3-64 of
    each block as 16 hex digits, joined."""

    file: int
    start: int
    nbytes: int
    digests: str

    def blocks(self) -> npt.NDArray[np.uint64]:
        """The digests as numbers."""
        return decode_digests(self.digests)


class LocalPart(msgspec.Struct, frozen=True):
    """What a rank that talked to no other says of its part: what a manifest would say of it.

    Args:
        created: seconds since the epoch.
        library: the release that wrote it.
        state: the rank's nested state; `user` its user metadata, as a state. JSON.
        tensors: name, dtype, global shape.
        chunks: the first pieces of the receipt, in order: number of the tensor, offsets, sizes.
        ties: names that are the memory of another, with that name.
    """

    created: float
    library: str
    state: msgspec.Raw
    user: msgspec.Raw
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    chunks: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    ties: dict[str, str]


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank wrote. `payloads` maps names to piece numbers; `digest` is over the receipt, its digits zeroed;
    `description` is there if the ranks did not talk, and no manifest speaks for them."""

    format: str
    version: int
    digest: str
    save_id: str
    rank: int
    world_size: int
    block_bytes: int
    files: tuple[FileRecord, ...]
    pieces: tuple[PieceRecord, ...]
    payloads: dict[str, int]
    description: LocalPart | None = None


RECEIPT_FORMAT = "hyper-ckpt-receipt"


def decode_digests(text: str) -> npt.NDArray[np.uint64]:
    """Digests in 16 hex digits each, joined, as numbers."""
    return np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)


def receipt_name(rank: int, save_id: str) -> str:
    """Where a rank's receipt lies."""
    return f"receipts/rank-{rank:05d}-{save_id}.json"


def seal(data: bytes) -> tuple[bytes, str]:
    """Fills in the digest of a JSON record that begins with format, version and a zeroed digest.

    Raises:
        UnsupportedStateError: no reader takes so large a record.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise UnsupportedStateError(
            f"the list of what is saved takes {len(data):,} bytes, and readers take {MAX_RECORD_BYTES:,}: save the "
            "state in several checkpoints, or with fewer pieces (shards in a regular grid are listed shortly)"
        )
    digest = xxhash.xxh3_128_hexdigest(data)
    at = data.index(ZERO_DIGEST.encode())
    return data[:at] + digest.encode() + data[at + 32 :], digest


def check_seal(data: bytes, what: str) -> str:
    """Checks a record against the digest in it and returns that.

    Raises:
        ManifestError: the record is damaged.
    """
    head = re.match(rb'\{"format":"[a-z-]{1,40}","version":\d{1,9},"digest":"([0-9a-f]{32})"', data[:128])
    if head is None:
        raise ManifestError(f"{what} does not begin like a record of this library: it is damaged, or something else")
    start, stop = head.span(1)
    if xxhash.xxh3_128_hexdigest(data[:start] + ZERO_DIGEST.encode() + data[stop:]) != head[1].decode():
        raise ManifestError(f"{what} is damaged: its digest does not fit its content. Load an earlier checkpoint")
    return head[1].decode()


def encode_receipt(receipt: Receipt) -> tuple[bytes, str]:
    """The bytes of a receipt (given with any digest) and its digest."""
    return seal(msgspec.json.encode(msgspec.structs.replace(receipt, digest=ZERO_DIGEST)))


def decode_receipt(data: bytes, expected_digest: str | None, what: str) -> Receipt:
    """Reads and checks a receipt. `expected_digest` is what the manifest says, None where there is no manifest.

    Raises:
        ManifestError: damaged, hostile, or not the one the manifest speaks of.
    """
    if check_seal(data, what) != expected_digest and expected_digest is not None:
        raise ManifestError(f"{what} is not the receipt that the manifest lists: files of two saves are mixed")
    try:
        receipt = msgspec.json.decode(data, type=Receipt)
        refuse_duplicates(data, msgspec.json.encode(receipt))
        if receipt.block_bytes != BLOCK_BYTES:
            raise ValueError(f"blocks of {receipt.block_bytes} bytes are not of version 1")
        for piece in receipt.pieces:
            if (
                len(piece.digests) != -(-piece.nbytes // BLOCK_BYTES) * 16
                or not 0 <= piece.file < len(receipt.files)
                or not 0 <= piece.start < 1 << 60
            ):
                raise ValueError(f"piece {piece.file}/{piece.start} is out of bounds")
        digits = "".join([piece.digests for piece in receipt.pieces])
        if 2 * len(bytes.fromhex(digits)) != len(digits):  # spaces are no digits
            raise ValueError("a digest has other characters than digits")
        if any(not 0 <= n < len(receipt.pieces) for n in receipt.payloads.values()):
            raise ValueError("a payload names no piece")
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{what} is not a valid receipt: {error}") from error
    return receipt
