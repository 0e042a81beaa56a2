"""What is stored, opened for reading: nothing is believed before it is checked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hyper_ckpt.box import IntArray
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.blocks import Piece
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.digest import Digests, block_count
from hyper_ckpt.engine.pieces import SEGMENT_BYTES, PieceReader, SmallPieces
from hyper_ckpt.engine.plain_stager import PlainStager
from hyper_ckpt.errors import CheckpointError, FileSizeError, HeaderError, ManifestError, MissingFileError
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.receipt import (
    RECEIPT_FORMAT,
    FileRecord,
    Receipt,
    decode_digests,
    decode_receipt,
    receipt_name,
)
from hyper_ckpt.storage.safetensors_file import MAX_HEADER_BYTES, header_digest
from hyper_ckpt.storage.whole import read_record

Place = tuple[str, int, int]
"""Where a piece lies: file, bytes from its data section, bytes."""


class Stored:
    """What is stored, opened for reading: files are checked once each, receipts read when needed.

    Raises:
        CheckpointError: `verify`, and there is nothing to verify with.
    """

    def __init__(self, store: ByteStore, manifest: Manifest, verify: bool) -> None:
        if verify and not manifest.receipts:
            raise CheckpointError(
                f"{manifest.checkpoint} has no digests, so that nothing in it can be verified: "
                'pass verify="off" to load it all the same'
            )
        self._store, self._manifest, self._verify = store, manifest, verify
        self.world_size = manifest.world_size
        self._digests: dict[int, tuple[Digests, dict[Place, int]]] = {}
        self._receipts: dict[int, Receipt] = {}
        self._payloads: dict[tuple[int, str], bytes | None] = {}
        self._checked: set[str] = set()
        self._listed = {file.name: file for file in manifest.files}

    def check_files(self, numbers: Sequence[int]) -> None:
        """Checks that files exist and have the recorded sizes and headers, and reads the receipts that verifying needs.

        Raises:
            MissingFileError, FileSizeError, HeaderError: naming the file.
        """
        for number in numbers:
            self._check(self._manifest.files[number])
            if self._verify:
                self.receipt(self._manifest.files[number].rank)

    def rename(self, manifest: Manifest) -> None:
        """From here on, payloads have the names that this manifest of the same checkpoint gives them."""
        self._manifest = manifest

    def _check(self, record: FileRecord) -> None:
        if record.name not in self._checked:
            check_file(self._store, record)
            self._checked.add(record.name)

    def receipt(self, rank: int) -> Receipt:
        """A rank's receipt, read once."""
        if rank not in self._receipts:
            self._receipts[rank] = read_receipt(self._store, self._manifest, rank, self._listed)
        return self._receipts[rank]

    def piece(self, name: str, file: int, start: int, nbytes: int) -> Piece:
        """A stored piece, with its digests if it is to be verified."""
        record = self._manifest.files[file]
        if not self._verify:
            return Piece(name, record.name, record.data_start + start, nbytes, None)
        blocks, (first,) = self._digests_of(record, [start], [nbytes])
        digests = blocks[first : first + block_count(nbytes)]
        return Piece(name, record.name, record.data_start + start, nbytes, digests)

    def small_pieces(self, names: list[str], file: int, starts: IntArray, sizes: IntArray) -> SmallPieces:
        """Many small pieces of one file, in the order in which they lie there."""
        record, digests = self._manifest.files[file], None
        if self._verify:
            blocks, first = self._digests_of(record, starts.tolist(), sizes.tolist())
            digests = blocks[first]
        return SmallPieces(record.name, names, record.data_start + starts, sizes, digests)

    def payload(self, rank: int, name: str) -> bytes | None:
        """A payload that a rank saved, verified, read once; None if it saved none of this name."""
        name = self._manifest.saved_name(name)
        if rank in self._manifest.absent:
            return None
        if (rank, name) not in self._payloads:
            self._payloads[rank, name] = self._read_payload(rank, name)
        return self._payloads[rank, name]

    def keep_payload(self, rank: int, name: str, data: bytes) -> None:
        """Notes a payload that another rank has read."""
        self._payloads[rank, self._manifest.saved_name(name)] = data

    def _read_payload(self, rank: int, name: str) -> bytes | None:
        receipt = self.receipt(rank)
        if name not in receipt.payloads:
            return None
        piece = receipt.pieces[receipt.payloads[name]]
        file = receipt.files[piece.file]
        self._check(file)
        data = bytearray(piece.nbytes)
        stored = Piece(name, file.name, file.data_start + piece.start, piece.nbytes, piece.blocks())
        reader = PieceReader(self._store, PlainStager(), Budget(SEGMENT_BYTES), SEGMENT_BYTES, lambda _: None, False)
        reader.read_run(stored, 0, memoryview(data))
        return bytes(data)

    def _digests_of(self, file: FileRecord, starts: Sequence[int], sizes: Sequence[int]) -> tuple[Digests, list[int]]:
        """The digests of a receipt's blocks, and the number of the first block of each piece."""
        if file.rank not in self._digests:
            self._digests[file.rank] = _digests_by_place(self.receipt(file.rank))
        blocks, firsts = self._digests[file.rank]
        places = zip(itertools.repeat(file.name), starts, sizes, strict=False)
        try:
            return blocks, [firsts[place] for place in places]
        except KeyError as error:
            raise ManifestError(
                f"the receipt of rank {file.rank} has no digests for {file.name} at {error.args[0][1]}, where the "
                "manifest has a chunk: load an earlier checkpoint"
            ) from None


def _digests_by_place(receipt: Receipt) -> tuple[Digests, dict[Place, int]]:
    """The digests of a receipt's blocks, and where those of each piece begin."""
    names = [f.name for f in receipt.files]
    counts = [len(p.digests) // 16 for p in receipt.pieces]
    firsts = itertools.accumulate(counts, initial=0)
    places = [(names[p.file], p.start, p.nbytes) for p in receipt.pieces]
    return decode_digests("".join([p.digests for p in receipt.pieces])), dict(zip(places, firsts, strict=False))


def read_receipt(store: ByteStore, manifest: Manifest, rank: int, listed: Mapping[str, FileRecord]) -> Receipt:
    """A rank's receipt, checked against the manifest and its files by name.

    Raises:
        MissingFileError: it is not there.
        ManifestError: it is damaged, hostile, or speaks of other things than the manifest does.
    """
    name = receipt_name(rank, manifest.save_id)
    what = f"{store.url}/{name}"
    receipt = decode_receipt(read_record(store, name), manifest.receipts[rank], what)
    kind = (receipt.format, receipt.version, receipt.save_id, receipt.rank, receipt.world_size)
    fits = kind == (RECEIPT_FORMAT, manifest.version, manifest.save_id, rank, manifest.world_size)
    room = [file.size - file.data_start for file in receipt.files]
    inside = all(0 <= p.nbytes <= room[p.file] - p.start for p in receipt.pieces)
    if not fits or not inside or any(listed.get(file.name) != file for file in receipt.files):
        raise ManifestError(f"{what} does not say the same as the manifest: load an earlier checkpoint")
    return receipt


def check_file(store: ByteStore, record: FileRecord) -> None:
    """Checks one file against its record."""
    info = store.stat(record.name)
    if info is None:
        raise MissingFileError(f"{store.url}/{record.name} is missing: restore it, or load an earlier checkpoint")
    if info.size != record.size:
        raise FileSizeError(
            f"{store.url}/{record.name} has {info.size} bytes but was saved with {record.size}: it was cut or "
            "replaced. Restore it, or load an earlier checkpoint"
        )
    if record.data_start > MAX_HEADER_BYTES + 8:
        raise HeaderError(
            f"{store.url}/{record.name} is said to have a header of {record.data_start} bytes, more than any reader "
            "takes: load an earlier checkpoint"
        )
    header = bytearray(record.data_start)
    store.read_into(record.name, [(0, len(header))], [memoryview(header)])
    if header_digest(bytes(header)) != record.header_digest:
        raise HeaderError(
            f"{store.url}/{record.name} has another header than was saved: restore it, or load an earlier checkpoint"
        )
