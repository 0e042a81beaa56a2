"""The story of a save on one rank that talks to no other: prepare, write everything it holds, describe it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import xxhash

from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.api.views import own_metadata
from hyper_ckpt.api.writing import Part, Planned, Prepared, SaveCall, Writer, Written
from hyper_ckpt.columns import Columns, TensorTable
from hyper_ckpt.engine.commit import refuse_occupied
from hyper_ckpt.engine.save import WritePiece, write
from hyper_ckpt.metadata import Metadata
from hyper_ckpt.planning.describe import local_shards
from hyper_ckpt.planning.load import plan_alone
from hyper_ckpt.receipt import LocalPart
from hyper_ckpt.state import encode_tree
from hyper_ckpt.version import VERSION as LIBRARY_VERSION


@dataclass(frozen=True, eq=False)
class BegunAlone:
    """What this rank writes, and what it says of it. See `writing.Begun`."""

    saving: SavingAlone
    planned: Planned
    description: LocalPart
    missing_folders: int
    error: BaseException | None = None

    def write(self, pieces: list[WritePiece] | None = None, writer: Writer = write) -> Written:
        return self.saving.write(self.planned, self.description, pieces, writer)

    def finish(self, write: Callable[[], Written]) -> Metadata:
        try:
            return self.saving.finish(self.description, write())
        except BaseException:
            self.saving.call.store.remove_folders(self.missing_folders)
            raise


class SavingAlone:
    """One rank's save without collectives: `begin`, then what that returns. All receipts together are the checkpoint.

    Args:
        save_id: the same for all ranks of a save, see `id_of`.
    """

    def __init__(self, call: SaveCall, save_id: str, reporter: Reporter) -> None:
        self.call, self.reporter, self._save_id, self._part = call, reporter, save_id, Part(call)

    def begin(self, state: Mapping[Any, Any]) -> BegunAlone:
        """What must be done in the caller's thread. What fails, fails on this rank alone."""
        prepared = self._part.prepare(state)
        refuse_occupied(self.call.store, self._save_id, self._part.context.rank)
        columns, ties = self._plan(prepared)
        part = LocalPart(
            time.time(),
            LIBRARY_VERSION,
            msgspec.Raw(encode_tree(prepared.flat.tree)),
            msgspec.Raw(prepared.user),
            tuple((r.name, r.dtype, r.shape) for r in prepared.description.structure.tensors),
            tuple(self._chunks(prepared, columns)),
            ties,
        )
        payloads = {**prepared.flat.payloads, **prepared.flat.blobs}
        planned = self._part.plan(prepared, columns, self._save_id, payloads, self.reporter)
        return BegunAlone(self, planned, part, self.call.store.missing_folders())

    def write(
        self, planned: Planned, description: LocalPart, pieces: list[WritePiece] | None, writer: Writer
    ) -> Written:
        """Writes this rank's part; `pieces` are copies of those planned."""
        own = planned if pieces is None else replace(planned, pieces=pieces)
        return self._part.write(own, self.reporter, description, writer)

    def finish(self, description: LocalPart, written: Written) -> Metadata:
        """What remains once it is written."""
        self.reporter.staged()
        files = list(written.result.receipt.files)
        self.reporter.finished("durable" if self.call.durable else "published", 0)
        facts = (self._save_id, self._part.context.world_size, description.created, self.call.user_metadata)
        tree = written.prepared.flat.tree
        return own_metadata(written.columns, written.placed, files, tree, facts, description.ties)

    def _plan(self, prepared: Prepared) -> tuple[Columns, dict[str, str]]:
        """Every box that this rank holds: nobody can say who else does. Memory with several names is stored once."""
        description, context = prepared.description, self._part.context
        ties = dict(description.rank_part.ties)
        records = [r for r in description.structure.tensors if r.name not in ties]
        table = TensorTable.of([(r.name, r.dtype, r.shape) for r in records])
        boxes = [
            (r.name, shard.offsets, shard.sizes)
            for r in records
            for shard in local_shards(r.name, prepared.flat.tensors[r.name], context)
        ]
        return plan_alone(table, context.rank, boxes), ties

    def _chunks(self, prepared: Prepared, columns: Columns) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """The rows of the columns, which are the receipt's first pieces, with tensors counted in the description."""
        number_of = {r.name: i for i, r in enumerate(prepared.description.structure.tensors)}
        names = [columns.table.names[i] for i in np.asarray(columns.tensor).tolist()]
        return [(number_of[name], *columns.box(row)) for row, name in enumerate(names)]


def id_of(save_token: str | None, world_size: int) -> str:
    """The save id that ranks arrive at without talking.

    Raises:
        ValueError: there are several ranks and no token.
    """
    if save_token is not None:
        return xxhash.xxh3_64_hexdigest(save_token.encode("utf-8", "surrogatepass"))
    if world_size > 1:
        raise ValueError(
            "ranks that do not talk need options=SaveOptions(save_token=...): the same on all of them, and another one "
            'for every attempt, e.g. f"{job_id}-{step}-{restart}"'
        )
    return secrets.token_hex(8)
