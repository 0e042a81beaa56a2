"""What a checkpoint holds: summary, tensors, values, files."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_ckpt.cli import text
from hyper_ckpt.cli.tensors import TensorFacts, chunks_of, describe_tensors, matching, shape_text
from hyper_ckpt.cli.values import ValueFacts, describe_value, describe_values
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.registry import registry
from hyper_ckpt.state import decode_tree, variants_of
from hyper_ckpt.state.tree import KeyedNode
from hyper_ckpt.storage.filesystem import FileSystemReader
from hyper_ckpt.text import clean, size

MAX_PARTS = 12
"""Top-level keys up to which the summary lists them."""


@dataclass(frozen=True)
class Overview:
    """A checkpoint, decoded: all that any view of it shows."""

    url: str
    manifest: Manifest
    tensors: list[TensorFacts]
    values: list[ValueFacts]
    user: ValueFacts
    conflicts: dict[str, tuple[tuple[tuple[int, ...], str], ...]]

    @property
    def elements(self) -> int:
        """Of all tensors; tied ones count once."""
        return sum(t.elements for t in self.tensors if t.tied_to is None)

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors, in one copy; tied ones count once."""
        return sum(t.nbytes for t in self.tensors if t.tied_to is None)

    @property
    def nbytes(self) -> int:
        """Of all data files."""
        return sum(f.size for f in self.manifest.files)


def look(checkpoint: str) -> Overview:
    """Reads a manifest and decodes all of it.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ManifestError, VersionError: the manifest is damaged, or newer than this release.
    """
    store = registry().store(checkpoint)
    manifest = FileSystemReader().load_partial(store)
    user = decode_tree(manifest.user)
    inner = user.v[0] if isinstance(user, KeyedNode) and len(user.v) == 1 else user
    tree = decode_tree(manifest.state)
    return Overview(
        store.url,
        manifest,
        describe_tensors(manifest),
        describe_values(tree),
        describe_value(inner, "user_metadata"),
        variants_of(tree),
    )


def as_text(view: Overview, *, tensor: str | None, files: bool, limit: int) -> Iterator[str]:
    """The lines of `show`.

    Args:
        tensor: show only tensors of this name or pattern, with their chunks.
        files: show the files in place of what is in them.
        limit: lines of one list; 0 is all.
    """
    if tensor is not None:
        by_name = {t.name: t for t in view.tensors}
        for i, name in enumerate(_chosen(view, tensor)):
            yield from ([""] if i else [])
            yield from _one_tensor(view.manifest, by_name[name], limit)
        return
    yield from _summary(view)
    yield ""
    if files:
        files_rows = [(f.name, str(f.rank), size(f.size), f"{f.size:,}") for f in view.manifest.files]
        yield from _limited(("FILE", "RANK", "SIZE", "BYTES"), files_rows, limit, (1, 2, 3), "files")
        return
    rows = [_tensor_row(t) for t in view.tensors]
    yield from _limited(("TENSOR", "DTYPE", "SHAPE", "SPLIT", "SIZE"), rows, limit, (4,), "tensors")
    if view.values:
        yield ""
        yield from map(_value_line, _cut(view.values, limit))
        yield from _left_out(len(view.values), limit, "values")


def _chosen(view: Overview, tensor: str) -> list[str]:
    """The tensors that a name or pattern stands for; of one that differs between ranks, all."""
    variants = view.conflicts.get(tensor)
    return matching(view.manifest, tensor) if variants is None else [name for _, name in variants]


def _summary(view: Overview) -> Iterator[str]:
    manifest = view.manifest
    age = text.duration(time.time() - manifest.created)
    per_rank = sum(v.kind == "per_rank" for v in view.values)
    facts = [
        ("checkpoint", view.url),
        ("save id", f"{manifest.save_id}, format version {manifest.version}"),
        ("saved", f"{text.moment(manifest.created)} ({age} ago) by {text.count(manifest.world_size, 'rank')}"),
        ("stored", f"{size(view.nbytes)} in {text.count(len(manifest.files), 'file')}"),
        ("tensors", f"{len(view.tensors):,}: {view.elements:,} elements, {size(view.tensor_bytes)}"),
        *_parts(view.tensors),
        *_conflicts(view),
        ("values", f"{len(view.values):,}{f', {per_rank:,} of them per rank' if per_rank else ''}"),
    ]
    if manifest.absent:
        facts.insert(1, ("INCOMPLETE", _missing(view)))
    for label, value in facts:
        yield f"{label:<10}  {clean(value)}"
    if view.user.type != "NoneType":
        yield f"{'metadata':<10}  {text.shortened(clean(view.user.repr), text.width() - 12)}"


def _missing(view: Overview) -> str:
    """Whose parts are missing, and what is whole all the same."""
    absent, there = sorted(view.manifest.absent), sum(t.whole for t in view.tensors)
    ranks = ", ".join(map(str, absent[:8])) + ", ..." * (len(absent) > 8)
    return (
        f"parts of {text.count(len(absent), 'rank')} are missing: {ranks}; {there:,} of {len(view.tensors):,} tensors "
        "are whole; LoadOptions(partial=True) loads what is there"
    )


def _parts(tensors: Sequence[TensorFacts]) -> Iterator[tuple[str, str]]:
    """What each top-level key holds, if there are a few."""
    groups: dict[str, list[TensorFacts]] = defaultdict(list)
    for each in tensors:
        groups[each.name.partition("/")[0]].append(each)
    if not 1 < len(groups) <= MAX_PARTS or len(groups) == len(tensors):
        return
    for name, group in groups.items():
        own = [t for t in group if t.tied_to is None]
        sizes = f"{sum(t.elements for t in own):,} elements, {size(sum(t.nbytes for t in own))}"
        yield "", f"{text.middle(clean(name), 24)}: {len(group):,}, {sizes}"


def _conflicts(view: Overview) -> Iterator[tuple[str, str]]:
    if view.conflicts:
        name, variants = next(iter(view.conflicts.items()))
        ranks = " / ".join(text.ranges(each) for each, _ in variants[:4]) + " / ..." * (len(variants) > 4)
        kept = f"each rank's is kept: {name} of ranks {ranks}{', ...' * (len(view.conflicts) > 1)}"
        yield "conflicts", f"{text.count(len(view.conflicts), 'tensor')} differed between ranks, {kept}"


def _tensor_row(facts: TensorFacts) -> tuple[str, ...]:
    return facts.name, facts.dtype, shape_text(facts.shape), _storage(facts), size(facts.nbytes)


def _storage(facts: TensorFacts) -> str:
    """How a tensor is stored, in a word or two."""
    if facts.tied_to is not None:
        return f"tied: {facts.tied_to}"
    if not facts.whole:
        return f"NOT WHOLE: {facts.split}"
    return facts.split + (f", {facts.copies} copies" if facts.copies > 1 else "")


def _value_line(facts: ValueFacts) -> str:
    name, value = clean(facts.name), clean(facts.repr)
    room = text.width() - 3
    name = text.middle(name, max(room - min(text.cells(value), room // 2), 1))
    return f"{name} = {text.shortened(value, room - text.cells(name))}"


def _one_tensor(manifest: Manifest, facts: TensorFacts, limit: int) -> Iterator[str]:
    yield clean(facts.name)
    yield f"  {facts.dtype} {shape_text(facts.shape)}, {facts.elements:,} elements, {size(facts.nbytes)}"
    yield clean(f"  {_storage(facts)}")
    chunks = list(chunks_of(manifest.tensor(facts.name), manifest))
    header = ["FILE", "OFFSETS", "SIZES", "OFFSET", "LENGTH"]
    rows = [[c.file, shape_text(c.offsets), shape_text(c.sizes), str(c.offset), str(c.length)] for c in chunks]
    if facts.copies > 1:
        header.insert(1, "COPY")
        for chunk, row in zip(chunks, rows, strict=True):
            row.insert(1, str(chunk.copy))
    yield from _limited(header, rows, limit, (len(header) - 2, len(header) - 1), "chunks")


def _cut(rows: Sequence[Any], limit: int) -> Sequence[Any]:
    return rows[:limit] if limit else rows


def _limited(
    header: Sequence[str], rows: Sequence[Sequence[str]], limit: int, right: Sequence[int], what: str
) -> Iterator[str]:
    if rows:
        yield from text.table(header, _cut(rows, limit), right)
    yield from _left_out(len(rows), limit, what)


def _left_out(number: int, limit: int, what: str) -> Iterator[str]:
    if limit and number > limit:
        yield f"... and {number - limit:,} more {what} (--limit 0 shows all)"


def as_json(view: Overview, *, tensor: str | None) -> Iterator[str]:
    """The lines of one JSON object, a tensor to a line: a million chunks need no memory."""
    manifest = view.manifest
    wanted = None if tensor is None else set(_chosen(view, tensor))
    facts = {
        "checkpoint": view.url,
        "save_id": manifest.save_id,
        "format_version": manifest.version,
        "world_size": manifest.world_size,
        "absent_ranks": sorted(manifest.absent),
        "created": manifest.created,
        "nbytes": view.nbytes,
        "elements": view.elements,
        "tensor_bytes": view.tensor_bytes,
        "user_metadata": _value_json(view.user),
    }
    yield "{"
    for key, value in facts.items():
        yield f" {text.as_json(key)}: {text.as_json(value)},"
    files = ({"name": f.name, "rank": f.rank, "nbytes": f.size, "data_start": f.data_start} for f in manifest.files)
    yield from _array("files", files, ",")
    variants = {n: [{"ranks": ranks, "tensor": stored} for ranks, stored in v] for n, v in view.conflicts.items()}
    yield f' "conflicts": {text.as_json(variants)},'
    yield from _array("values", ({"name": v.name, "kind": v.kind, **_value_json(v)} for v in view.values), ",")
    chosen = (t for t in view.tensors if wanted is None or t.name in wanted)
    yield from _array("tensors", (_tensor_json(t, manifest) for t in chosen), "")
    yield "}"


def _array(key: str, items: Iterable[dict[str, Any]], after: str) -> Iterator[str]:
    pending = f' "{key}": ['
    for item in items:
        yield pending + ("," if pending.startswith("  ") else "")
        pending = f"  {text.as_json(item)}"
    yield pending
    yield f" ]{after}"


def _value_json(facts: ValueFacts) -> dict[str, Any]:
    return {"type": facts.type, "repr": facts.repr, "value": facts.value}


def _tensor_json(facts: TensorFacts, manifest: Manifest) -> dict[str, Any]:
    return {
        "name": facts.name,
        "dtype": facts.dtype,
        "shape": facts.shape,
        "elements": facts.elements,
        "nbytes": facts.nbytes,
        "split": facts.split,
        "copies": facts.copies,
        "tied_to": facts.tied_to,
        "whole": facts.whole,
        "chunks": [dataclasses.asdict(c) for c in chunks_of(manifest.tensor(facts.name), manifest)],
    }
