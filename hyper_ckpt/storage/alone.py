"""Checkpoints of ranks that did not talk: no manifest, but a receipt of every rank that describes its part."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hyper_ckpt.box import IntArray, pad, uncovered
from hyper_ckpt.columns import Columns, Placed, TensorTable
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt.errors import CheckpointNotFoundError, CoverageError, ManifestError
from hyper_ckpt.manifest import MANIFEST_NAME, MAX_CORNERS, MAX_DIMS, Manifest
from hyper_ckpt.manifest_writer import ManifestContent, encode_manifest
from hyper_ckpt.receipt import FileRecord, LocalPart, Receipt, decode_receipt
from hyper_ckpt.state import Node, decode_tree, encode_tree, merge
from hyper_ckpt.state.walk import tensor_names
from hyper_ckpt.storage.whole import read_record

_RECEIPT = re.compile(r"receipts/rank-(\d{5,})-([0-9a-f]{16})\.json")
MAX_WORLD = 1 << 20
MAX_COMPARED = 5000

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Chunk:
    """A piece that one rank stored: a box of tensor `name`, its file and start there, and its digests."""

    name: str
    box: Box
    rank: int
    file: FileRecord
    start: int
    digests: str


def find_alone(store: ByteStore, prefix: str = "", *, partial: bool = False) -> Manifest | None:
    """The manifest that ranks which did not talk would have published, put together from their receipts.

    Args:
        store: where they lie, below `prefix`.
        partial: make do with the receipts that are there: `Manifest.absent` names the other ranks, and tensors may have
            holes.

    Returns:
        None where there is no such receipt.

    Raises:
        CheckpointNotFoundError: receipts are missing, and not `partial`; names the ranks.
        ManifestError: a receipt is damaged, or they do not speak of one save.
        CoverageError: a tensor is not stored whole, although all receipts are there.
    """
    complete, incomplete = _saves(store, prefix)
    found = complete or (incomplete if partial else [])
    if len(found) > 1:
        ids = " and ".join(each.save_id for each in found)
        kind = "complete" if complete else "incomplete"
        raise ManifestError(
            f"{_where(store, prefix)} holds several {kind} saves, {ids}: remove the files of all but one"
        )
    if incomplete and not found:
        raise _incomplete(_where(store, prefix), incomplete[0])
    if not found:
        return None
    (save,) = found
    receipts = [_read(store, prefix, save.save_id, rank, save.names) for rank in sorted(save.names)]
    return Manifest(_assemble(store, receipts, partial=bool(save.absent)), f"{store.url}/{prefix}{MANIFEST_NAME}")


@dataclass(frozen=True)
class _Save:
    """A save by ranks that did not talk: its receipts' names by rank, and the ranks without one."""

    save_id: str
    names: dict[int, str]
    absent: list[int]
    world_size: int


def _saves(store: ByteStore, prefix: str) -> tuple[list[_Save], list[_Save]]:
    """The complete and the incomplete ones."""
    complete: list[_Save] = []
    incomplete: list[_Save] = []
    for save_id, names in sorted(_by_id(store, prefix).items()):
        first = _read(store, prefix, save_id, min(names), names)[0]
        if first.description is None:
            continue
        if max(names) >= first.world_size:
            raise ManifestError(
                f"{_where(store, prefix)}: save {save_id} has a receipt of rank {max(names)}, but rank {min(names)} "
                f"says that there were {first.world_size} ranks: use a save_token once only"
            )
        absent = sorted(set(range(min(first.world_size, MAX_WORLD))) - names.keys())
        (incomplete if absent else complete).append(_Save(save_id, names, absent, first.world_size))
    return complete, incomplete


def _incomplete(where: str, save: _Save) -> CheckpointNotFoundError:
    more = len(save.absent) > 8
    ranks = f"rank{'s' * (len(save.absent) > 1)} {', '.join(map(str, save.absent[:8]))}{', ...' * more}"
    return CheckpointNotFoundError(
        f"no checkpoint at {where}: of save {save.save_id}, by {save.world_size} ranks that did not talk, the receipts "
        f"of {ranks} are missing. They may still be saving; else load an earlier checkpoint, or what is there with "
        "LoadOptions(partial=True) (`hyper-ckpt show` says what that is)"
    )


def _where(store: ByteStore, prefix: str) -> str:
    return f"{store.url}/{prefix}".rstrip("/")


def _by_id(store: ByteStore, prefix: str) -> dict[str, dict[int, str]]:
    """Names of receipts by save id and rank."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in store.list(f"{prefix}receipts/"):
        match = _RECEIPT.fullmatch(name.removeprefix(prefix))
        if match:
            found[match[2]][int(match[1])] = name
    return found


def _read(store: ByteStore, prefix: str, save_id: str, rank: int, names: dict[int, str]) -> tuple[Receipt, str]:
    """A receipt and its digest, with a description that fits its pieces, if it has one."""
    what = f"{store.url}/{names[rank]}"
    receipt = decode_receipt(read_record(store, names[rank]), None, what)
    if (receipt.save_id, receipt.rank) != (save_id, rank) or not rank < receipt.world_size:
        raise ManifestError(f"{what} speaks of another save or rank than its name: files of two saves are mixed")
    part = receipt.description
    try:
        if part is not None:
            _check(receipt, part)
    except (ValueError, OverflowError) as error:
        raise ManifestError(f"{what} is not a valid receipt: {error}") from error
    return receipt, receipt.digest


def _check(receipt: Receipt, part: LocalPart) -> None:
    if len(part.chunks) > len(receipt.pieces):
        raise ValueError("it has more chunks than pieces")
    for name, dtype, shape in part.tensors:
        if dtype not in BY_NAME or len(shape) > MAX_DIMS or any(not 0 <= n < 1 << 60 for n in shape):
            raise ValueError(f"tensor {name!r} is impossible")
    for (number, offsets, sizes), piece in zip(part.chunks, receipt.pieces, strict=False):
        if not 0 <= number < len(part.tensors):
            raise ValueError("a chunk names no tensor")
        name, dtype, shape = part.tensors[number]
        nbytes = BY_NAME[dtype].itemsize
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of {name!r} has other dimensions than it")
        for o, n, length in zip(offsets, sizes, shape, strict=True):
            nbytes *= n
            if o < 0 or n < 1 or o + n > length:
                raise ValueError(f"a chunk leaves {name!r}")
        if nbytes != piece.nbytes:
            raise ValueError(f"a chunk of {name!r} has another size than its piece")
    names = {name for name, _, _ in part.tensors}
    if not {*part.ties, *part.ties.values()} <= names:
        raise ValueError("a tie names no tensor")


def _assemble(store: ByteStore, receipts: Sequence[tuple[Receipt, str]], *, partial: bool) -> bytes:
    """The bytes of the manifest of receipts, by rank. `partial`: there are others, which are missing."""
    first = receipts[0][0]
    if first.world_size > MAX_WORLD:
        raise ManifestError(f"{store.url}: {first.world_size} ranks are more than any job has")
    for receipt, _ in receipts:
        if receipt.description is None or receipt.world_size != first.world_size:
            raise ManifestError(
                f"{store.url}: the receipts of rank {first.rank} and rank {receipt.rank} are of different saves, "
                f"although both are called {first.save_id}: use a save_token once only"
            )
    parts = {r.rank: r.description for r, _ in receipts if r.description is not None}
    described = [*parts.values()]
    table = _table(store, parts)
    tree = _tree(parts)
    columns, placed = _columns(table, [c for r, _ in receipts for c in _chunks(r)], store.url, partial)
    digests = {r.rank: digest for r, digest in receipts}
    content = ManifestContent(
        first.save_id,
        first.world_size,
        max(p.created for p in described),
        described[0].library,
        [f for r, _ in receipts for f in r.files],
        [digests.get(rank, "") for rank in range(first.world_size)],
        encode_tree(tree),
        bytes(described[0].user),
        tensor_names(tree),
        {},
    )
    try:
        return encode_manifest(content, columns, placed)
    except KeyError as error:
        raise ManifestError(
            f"{store.url}: no receipt describes the tensor {error}: load an earlier checkpoint"
        ) from None


def _table(store: ByteStore, parts: Mapping[int, LocalPart]) -> TensorTable:
    seen: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for rank, part in parts.items():
        for name, dtype, shape in part.tensors:
            known = seen.setdefault(name, (dtype, shape, rank))
            if known[:2] != (dtype, shape):
                raise ManifestError(
                    f"{store.url}: rank {known[2]} saved {name!r} as {known[0]} {known[1]} but rank {rank} as {dtype} "
                    f"{shape}: one name is one tensor. Load an earlier checkpoint"
                )
    return TensorTable.of([(name, dtype, shape) for name, (dtype, shape, _) in sorted(seen.items())])


def _tree(parts: Mapping[int, LocalPart]) -> Node:
    ranks_of: dict[bytes, list[int]] = {}
    for rank, part in parts.items():
        ranks_of.setdefault(bytes(part.state), []).append(rank)
    tree, conflicts = merge([(ranks, decode_tree(state)) for state, ranks in ranks_of.items()])
    if conflicts:
        _warn([c.name for c in conflicts])
    return tree


def _warn(names: Sequence[str]) -> None:
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    warnings.warn(
        f"ranks saved different values of {shown}: each rank gets its own back, others the lowest rank's. "
        "Wrap values that belong to a rank in PerRank",
        stacklevel=2,
    )


def _chunks(receipt: Receipt) -> list[_Chunk]:
    """What a rank stored, tied names included."""
    part = receipt.description
    assert part is not None
    out = []
    twins: dict[str, list[str]] = defaultdict(list)
    for name, first in part.ties.items():
        twins[first].append(name)
    for (number, offsets, sizes), piece in zip(part.chunks, receipt.pieces, strict=False):
        name = part.tensors[number][0]
        for each in (name, *twins[name]):
            out.append(
                _Chunk(each, (offsets, sizes), receipt.rank, receipt.files[piece.file], piece.start, piece.digests)
            )
    return out


def _columns(table: TensorTable, chunks: Sequence[_Chunk], url: str, partial: bool) -> tuple[Columns, Placed]:
    """All chunks: the first copy is the lowest rank's of every box; each rank with other ones has a copy of its own."""
    number_of = {name: i for i, name in enumerate(table.names)}
    by_box: dict[tuple[str, Box], list[_Chunk]] = defaultdict(list)
    of_rank: dict[tuple[str, int], list[_Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_box[chunk.name, chunk.box].append(chunk)
        of_rank[chunk.name, chunk.rank].append(chunk)
    differing = sorted({name for (name, _), same in by_box.items() if len({c.digests for c in same}) > 1})
    if differing:
        _warn(differing)
    cover = _cover(table, number_of, [same[0] for same in by_box.values()], url, partial)
    rows = [(chunk, 0) for chunk in cover]
    chosen, copies = set(map(id, cover)), defaultdict[str, int](int)
    for (name, _), own in of_rank.items():
        if any(id(chunk) not in chosen for chunk in own):
            copies[name] += 1
            rows += [(chunk, copies[name]) for chunk in own]
    rows.sort(key=lambda row: (number_of[row[0].name], row[1], row[0].box[0]))
    return _as_columns(table, number_of, rows)


def _as_columns(
    table: TensorTable, number_of: dict[str, int], rows: Sequence[tuple[_Chunk, int]]
) -> tuple[Columns, Placed]:
    n = len(rows)
    tensor = np.array([number_of[c.name] for c, _ in rows], np.int64)
    rank = np.array([c.rank for c, _ in rows], np.int64)
    offsets, sizes = _boxes(table, [c for c, _ in rows])
    copy = np.array([copy for _, copy in rows], np.int64)
    files = {c.file.name: c.file for c, _ in rows}
    file_of = {name: i for i, name in enumerate(files)}
    placed = Placed(
        tuple(files),
        np.array([f.rank for f in files.values()], np.int64),
        np.arange(n),
        tensor,
        np.array([file_of[c.file.name] for c, _ in rows], np.int64),
        np.array([c.start for c, _ in rows], np.int64),
        offsets,
        sizes,
    )
    return Columns(table, tensor, rank, offsets, sizes, copy, np.full(n, -1, np.int64)), placed


def _boxes(table: TensorTable, chunks: Sequence[_Chunk]) -> tuple[IntArray, IntArray]:
    def column(part: int, fill: int) -> IntArray:
        rows = [pad(np.array([c.box[part]], np.int64).reshape(1, -1), table.width, fill) for c in chunks]
        return np.concatenate(rows) if rows else np.zeros((0, table.width), np.int64)

    return column(0, 0), column(1, 1)


def _cover(
    table: TensorTable, number_of: dict[str, int], chunks: list[_Chunk], url: str, partial: bool
) -> list[_Chunk]:
    """Of the distinct boxes, those that cover every tensor exactly once, or as much of it as a `partial` save has.

    Where ranks held different boxes of a tensor (one all of it, others halves), those inside another one are left out.
    """
    of_tensor: dict[str, list[_Chunk]] = defaultdict(list)
    for chunk in chunks:
        of_tensor[chunk.name].append(chunk)
    for name, own in of_tensor.items():
        shape = table.shapes[number_of[name]]
        whole = [c for c in own if c.box[1] == shape]
        of_tensor[name] = whole or own
        _refuse_costly(name, shape, of_tensor[name], url)

    def bad() -> set[str]:
        found = [c for own in of_tensor.values() for c in own]
        tensor = np.array([number_of[c.name] for c in found], np.int64)
        return {table.names[i] for i in uncovered(tensor, *_boxes(table, found), table.padded_shapes())}

    for name in bad():
        of_tensor[name] = _largest(of_tensor[name])
    wrong = sorted(bad())
    if partial:  # holes are expected; what overlaps must still be stored once
        of_tensor |= {name: _disjoint(of_tensor[name], url) for name in wrong}
    elif wrong:
        raise CoverageError(
            f"{url}: the parts that ranks saved of {', '.join(map(repr, wrong[:4]))} ({len(wrong)} tensors) leave a "
            "hole or overlap: load an earlier checkpoint"
        )
    return [c for own in of_tensor.values() for c in own]


def _disjoint(chunks: list[_Chunk], url: str) -> list[_Chunk]:
    """Boxes of which none overlaps an earlier one."""
    if len(chunks) > MAX_COMPARED:
        raise CoverageError(f"{url}: {len(chunks)} parts of {chunks[0].name!r} are too many to find those that fit")
    offsets = np.array([c.box[0] for c in chunks], np.int64)
    ends = offsets + np.array([c.box[1] for c in chunks], np.int64)
    kept: list[int] = []
    for i in range(len(chunks)):
        if not ((offsets[i] < ends[kept]) & (offsets[kept] < ends[i])).all(axis=1).any():
            kept.append(i)
    return [chunks[i] for i in kept]


def _refuse_costly(name: str, shape: tuple[int, ...], chunks: Sequence[_Chunk], url: str) -> None:
    """To prove that boxes are a tiling takes 2^cut corners a box, and nobody cuts many dimensions."""
    boxes = [(c.box[0][d], c.box[1][d]) for c in chunks for d in range(len(shape))]
    cut = sum(any(boxes[i] != (0, shape[d]) for i in range(d, len(boxes), len(shape))) for d in range(len(shape)))
    if cut > 4 and len(chunks) << cut > MAX_CORNERS:
        raise ManifestError(f"{url}: {len(chunks)} parts of {name!r} that cut {cut} dimensions are not what we write")


def _largest(chunks: list[_Chunk]) -> list[_Chunk]:
    """The boxes that lie inside no other one. Many are left as they are: it takes the square of their number."""
    if not 1 < len(chunks) <= MAX_COMPARED:
        return chunks
    offsets = np.array([c.box[0] for c in chunks], np.int64)
    ends = offsets + np.array([c.box[1] for c in chunks], np.int64)
    kept = []
    for i, chunk in enumerate(chunks):
        inside = ((offsets <= offsets[i]) & (ends[i] <= ends)).all(axis=1)
        inside[i] = False
        if not inside.any():
            kept.append(chunk)
    return kept
