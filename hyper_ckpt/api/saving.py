"""The story of a save on one rank: flatten, agree, plan, write, commit."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from hyper_ckpt.agreement import Operation
from hyper_ckpt.api.common import (
    RememberedTensors,
    all_tensors,
    attempt,
    few,
    tensor_test,
)
from hyper_ckpt.api.views import metadata_of, own_metadata
from hyper_ckpt.box import offsets_inside
from hyper_ckpt.columns import Columns, Placed
from hyper_ckpt.contracts.placement import FilePlan, StorageWriter
from hyper_ckpt.contracts.planner import PlanContext, SavePlanner
from hyper_ckpt.contracts.platform import LocalShard, Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.description import Description, World, with_base_load, without
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.commit import Previous, discard_failed, look, publish, remove_leftovers
from hyper_ckpt.engine.save import SaveJob, Source, WritePiece, WriteResult, staging_bytes, write
from hyper_ckpt.engine.stage import to_host
from hyper_ckpt.errors import ConflictError, PlanError, UnsupportedTypeError
from hyper_ckpt.manifest import VERSION, Manifest, ManifestContent, chunk_starts, encode_manifest
from hyper_ckpt.metadata import Metadata
from hyper_ckpt.options import DEFAULT_MAX_HOST_BYTES, SaveOptions
from hyper_ckpt.planning.share import table_of
from hyper_ckpt.receipt import FileRecord
from hyper_ckpt.registry import registry
from hyper_ckpt.state import FlatState, Node, decode_tree, encode_tree, flatten, merge, skeleton, values_digest
from hyper_ckpt.state.walk import blob_owners, tensor_names, values_by_kind
from hyper_ckpt.version import VERSION as LIBRARY_VERSION


@dataclass(frozen=True, eq=False)
class SaveCall:
    """The arguments of a save, resolved."""

    platform: Platform
    store: ByteStore
    writer: StorageWriter
    planner: SavePlanner
    options: SaveOptions
    overwrite: bool
    durable: bool
    threads: int
    max_host_bytes: int | None
    user_metadata: Any

    def agreed_options(self) -> dict[str, str]:
        """What must be equal on all ranks."""
        names = ("options", "overwrite", "durable", "max_host_bytes")
        return {
            "call": "save",
            "checkpoint_id": self.store.url,
            "platform": self.platform.name,
            "format version": str(VERSION),
            "planner": self.planner.identity(),
            "storage_writer": self.writer.identity(),
            **{name: repr(getattr(self, name)) for name in names},
        }


T = TypeVar("T")


class _Decision(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells all: the id, who stores which blob, and what only it could know."""

    save_id: str
    created: float
    blobs: list[tuple[str, int]]
    base_load: bytes
    loose: bool


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells rank 0 when it has written."""

    files: tuple[FileRecord, ...]
    receipt: str
    plan: bytes


@dataclass(frozen=True)
class _Prepared:
    """What a rank knows before it talks to others."""

    flat: FlatState
    description: Description
    user: bytes


class Saving:
    """One save on one rank."""

    def __init__(self, call: SaveCall, operation: Operation) -> None:
        self._call, self._operation = call, operation
        self._ranks = call.platform.ranks
        self._context = PlanContext(
            RememberedTensors(all_tensors(call.platform)), self._ranks.rank, self._ranks.world_size
        )
        self._previous = Previous(None, (), None)
        # What only rank 0 knows.
        self._tree: Node = None
        self._columns: Columns | None = None
        self._manifest: Manifest | None = None

    def run(self, state: dict[Any, Any]) -> Metadata:
        """The story: prepare, meet, exchange, decide, write, publish."""
        prepared, error = attempt(lambda: self._prepare(state))
        self._operation.meet(self._call.agreed_options(), error)
        assert prepared is not None
        exchanged, error = attempt(
            lambda: (self._operation.exchange(prepared.description), self._gather_trees(prepared))
        )
        loose: list[Columns] = []
        data = self._operation.agree("planning", b"", error, lambda _: self._decide(*_known(exchanged), loose))
        world, _ = _known(exchanged)
        decision = msgspec.msgpack.decode(data, type=_Decision)
        planned = _planned(world, decision.base_load)
        parts = [c.pack() for c in loose[0].by_rank(self._ranks.world_size)] if decision.loose and loose else None
        written, error = attempt(
            lambda: self._write(
                prepared, planned, self._ranks.scatter_bytes(parts) if decision.loose else b"", decision
            )
        )
        report = written.report() if written else b""
        try:
            self._operation.agree(
                "saving", report, error, lambda v: self._publish(v, prepared, planned.ties, decision), True
            )
        except BaseException:
            # A rank that gave up waiting does not know whether rank 0 will still publish: then its files stay.
            if written and self._operation.settled:
                discard_failed(self._call.store, written.result.names, decision.save_id)
            raise
        assert written is not None
        return self._metadata(written, decision, world.ties)

    def _prepare(self, state: dict[Any, Any]) -> _Prepared:
        platform, tensors = self._call.platform, self._context.tensors
        flat = flatten(
            state,
            is_tensor=tensor_test(tensors),
            codecs=registry().codecs(),
            allow_pickle=self._call.options.allow_pickle,
            to_host=lambda v: to_host(tensors, platform.stager, v),
        )
        # Built-in codecs only: metadata must be readable where no plugin is installed.
        user = flatten({"user": self._call.user_metadata}, is_tensor=lambda _: False)
        if user.blobs or "per_rank" in values_by_kind(user.tree).values():
            raise UnsupportedTypeError(
                "user_metadata must be a plain value below 64 KiB: put larger things into the state"
            )
        description = self._call.planner.build_local_plan(flat.tensors, skeleton(flat.tree), self._context)
        return _Prepared(flat, description, encode_tree(user.tree))

    def _gather_trees(self, prepared: _Prepared) -> list[tuple[list[int], bytes]]:
        """At rank 0, the distinct trees, encoded, with their ranks: one of each is sent."""
        kind = xxhash.xxh3_128_digest(prepared.description.structure.skeleton)
        digests = self._ranks.all_gather_object(values_digest(prepared.flat.tree) + kind)
        ranks_of: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(digests):
            ranks_of.setdefault(bytes(digest), []).append(rank)
        first = any(ranks[0] == self._ranks.rank for ranks in ranks_of.values())
        gathered = self._ranks.gather_bytes(encode_tree(prepared.flat.tree) if first else b"")
        if gathered is None:
            return []
        return [(ranks, gathered[ranks[0]]) for ranks in ranks_of.values()]

    def _decide(self, world: World, trees: list[tuple[list[int], bytes]], loose: list[Columns]) -> bytes:
        """At rank 0: looks at the path, joins the states, and proves that what will be written is whole."""
        call = self._call
        self._previous = look(call.store, call.overwrite)
        self._tree, conflicts = merge([(ranks, decode_tree(tree)) for ranks, tree in trees])
        self._report_conflicts([f"{c.name!r} on ranks {_brief(c.ranks)}" for c in conflicts], "keeps each rank's value")
        self._report_conflicts([repr(name) for name in sorted(world.conflicts)], "keeps the lowest rank's tensor")
        columns = call.planner.loose_plan(without(world, world.ties))
        loose.append(columns)
        load = np.bincount(columns.rank, columns.nbytes(), world.world_size).astype(np.int64).tobytes()
        self._columns = call.planner.build_global_plan(_planned(world, load))
        remove_leftovers(call.store, self._previous, call.options.leftover_age)
        decision = _Decision(secrets.token_hex(8), time.time(), blob_owners(self._tree), load, bool(len(columns)))
        return msgspec.msgpack.encode(decision)

    def _report_conflicts(self, found: list[str], kept: str) -> None:
        if not found:
            return
        text = f"ranks hold different values of {few(found)}"
        if self._call.options.conflicts == "error":
            raise ConflictError(f'{text}. Wrap values that belong to a rank in PerRank, or save with conflicts="warn"')
        warnings.warn(f"{text}: the checkpoint {kept}. Wrap values that belong to a rank in PerRank", stacklevel=8)

    def _write(self, prepared: _Prepared, world: World, loose: bytes, decision: _Decision) -> _Written:
        """Plans this rank's share, as rank 0 does for all, and writes it."""
        call, rank = self._call, self._ranks.rank
        columns = call.planner.finalize_plan(world, Columns.unpack(table_of(world), loose), rank)
        placed = call.writer.place(columns, decision.save_id)
        payloads = dict(prepared.flat.payloads)
        payloads |= {name: prepared.flat.blobs[name] for name, owner in decision.blobs if owner == rank}
        sizes = [(name, len(data)) for name, data in payloads.items()]
        plans = call.writer.files(columns, placed, rank, decision.save_id, sizes)
        pieces = [*self._pieces(prepared.flat, columns, placed, plans), *_payload_pieces(plans, payloads)]
        limit = call.max_host_bytes
        if limit is None:
            limit = max(DEFAULT_MAX_HOST_BYTES, staging_bytes(pieces))
        job = SaveJob(
            call.store,
            call.platform.stager,
            plans,
            pieces,
            decision.save_id,
            rank,
            self._ranks.world_size,
            call.threads,
            Budget(limit),
            call.durable,
        )
        result = write(job)
        return _Written(result, columns, placed, prepared)

    def _pieces(self, flat: FlatState, columns: Columns, placed: Placed, plans: list[FilePlan]) -> Iterator[WritePiece]:
        """The chunks with the memory that they come from."""
        table, sizes = columns.table, columns.nbytes()
        plan_of = {plan.name: i for i, plan in enumerate(plans)}
        starts = chunk_starts(columns, placed)
        shards: dict[int, list[tuple[LocalShard, Any]]] = {}
        for row in range(len(columns)):
            number = int(columns.tensor[row])
            name = table.names[number]
            if number not in shards:
                own = self._call.planner.get_data(flat.tensors, name, self._context)
                shards[number] = [(s, self._context.tensors.host_view(s)) for s in own]
            offsets, box_sizes = columns.box(row)
            shard, view, low = _holding(shards[number], name, offsets, box_sizes)
            source = Source(shard, table.dtypes[number], view, low, box_sizes)
            file = plan_of[placed.files[int(placed.entry_file[placed.entry[row]])]]
            yield WritePiece(name, file, int(starts[row]), int(sizes[row]), source)

    def _publish(self, votes: list[bytes], prepared: _Prepared, ties: Mapping[str, str], decision: _Decision) -> bytes:
        """At rank 0, when all have written: compares what was written with the plan, and commits."""
        call = self._call
        reports = [msgspec.msgpack.decode(v, type=_Report) for v in votes]
        columns = self._columns
        assert columns is not None
        placed = call.writer.place(columns, decision.save_id)
        self._check_reports(reports, columns, placed)
        content = ManifestContent(
            decision.save_id,
            self._ranks.world_size,
            decision.created,
            LIBRARY_VERSION,
            [f for r in reports for f in r.files],
            [r.receipt for r in reports],
            encode_tree(self._tree),
            prepared.user,
            tensor_names(self._tree),
            ties,
        )
        data = encode_manifest(content, columns, placed)
        self._manifest = Manifest(data)
        publish(call.store, data, self._previous, decision.save_id, durable=call.durable)
        return b""

    def _check_reports(self, reports: list[_Report], columns: Columns, placed: Placed) -> None:
        """What each rank wrote must be what rank 0 planned for it."""
        written = {f.name: f for r in reports for f in r.files}
        for name, rank in zip(placed.files, placed.file_rank.tolist(), strict=True):
            if name not in written or written[name].rank != rank:
                raise PlanError(f"rank {rank} was to write {name} but did not")
        for rank, (report, own) in enumerate(zip(reports, columns.by_rank(len(reports)), strict=True)):
            if plan_digest(own) != report.plan:
                raise PlanError(
                    f"rank {rank} planned its share otherwise than rank 0: do all ranks run the same version?"
                )

    def _metadata(self, written: _Written, decision: _Decision, ties: Mapping[str, str]) -> Metadata:
        if self._manifest is not None:
            return metadata_of(self._manifest)
        facts = (decision.save_id, self._ranks.world_size, decision.created, self._call.user_metadata)
        files = list(written.result.receipt.files)
        return own_metadata(written.columns, written.placed, files, written.prepared.flat.tree, facts, ties)


@dataclass(frozen=True, eq=False)
class _Written:
    """What a rank has written, and from which plan."""

    result: WriteResult
    columns: Columns
    placed: Placed
    prepared: _Prepared

    def report(self) -> bytes:
        """What rank 0 must know of it."""
        receipt = self.result.receipt
        return msgspec.msgpack.encode(_Report(receipt.files, self.result.receipt_digest, plan_digest(self.columns)))


def _known(value: T | None) -> T:
    """What was attempted, after all ranks agreed that it did not fail."""
    assert value is not None
    return value


def _planned(world: World, base_load: bytes) -> World:
    """The world that is planned: each tied memory once, and what ranks write of loose tensors counted."""
    return with_base_load(without(world, world.ties), np.frombuffer(base_load, np.int64))


def plan_digest(columns: Columns) -> bytes:
    """16 bytes that tell two plans of one rank apart."""
    return xxhash.xxh3_128_digest(columns.pack())


def _payload_pieces(plans: list[FilePlan], payloads: dict[str, bytes]) -> Iterator[WritePiece]:
    for i, plan in enumerate(plans):
        for name, start in plan.payload_starts.items():
            yield WritePiece(name, i, start, len(payloads[name]), payloads[name])


def _holding(
    shards: list[tuple[LocalShard, Any]], name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[LocalShard, Any, tuple[int, ...]]:
    """The shard that holds a box, its memory, and the box's offsets inside it."""
    for shard, view in shards:
        low = offsets_inside(offsets, sizes, shard.offsets, shard.sizes)
        if low is not None:
            return shard, view, low
    raise PlanError(f"the plan wants {name!r} at {offsets} from this rank, which does not hold it")


def _brief(groups: tuple[tuple[int, ...], ...]) -> str:
    return " / ".join(",".join(map(str, ranks[:4])) + ("..." if len(ranks) > 4 else "") for ranks in groups[:4])
