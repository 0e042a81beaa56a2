"""One rank's part of a save: from a state to files and a receipt. Talks to no other rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import xxhash

from hyper_ckpt.api.common import RememberedTensors, all_tensors, form_of, kept, parts_of_kind, tensor_test
from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.box import offsets_inside
from hyper_ckpt.columns import Columns, Placed
from hyper_ckpt.contracts.placement import FilePlan, StorageWriter
from hyper_ckpt.contracts.planner import PlanContext, SavePlanner
from hyper_ckpt.contracts.platform import Carrier, LocalShard, Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.description import Description
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.save import SaveJob, Source, WritePiece, WriteResult, staging_bytes, write
from hyper_ckpt.engine.stage import to_host
from hyper_ckpt.errors import PlanError, UnsupportedTypeError
from hyper_ckpt.manifest import VERSION
from hyper_ckpt.manifest_writer import chunk_starts
from hyper_ckpt.metadata import Metadata
from hyper_ckpt.options import DEFAULT_MAX_HOST_BYTES, SaveOptions
from hyper_ckpt.receipt import FileRecord, LocalPart
from hyper_ckpt.registry import registry
from hyper_ckpt.state import FlatState, encode_tree, flatten, keep_variants, label_of, skeleton
from hyper_ckpt.state.names import variant_name
from hyper_ckpt.state.variants import Groups
from hyper_ckpt.state.walk import values_by_kind

Writer = Callable[[SaveJob], WriteResult]


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


@dataclass(frozen=True)
class Prepared:
    """What a rank knows before it talks to others; `user` is the user metadata as a tree."""

    flat: FlatState
    description: Description
    user: bytes

    def with_variants(self, groups: Mapping[str, Groups], rank: int) -> Prepared:
        """The same state, in which tensors that differ between ranks are called as this rank's variants are stored.

        Args:
            groups: by the names of such tensors, see `World.groups`.
        """
        tensors = {}
        for name, value in self.flat.tensors.items():
            label = label_of(groups[name], rank) if name in groups else None
            tensors[name if label is None else variant_name(name, label)] = value
        return replace(self, flat=replace(self.flat, tensors=tensors, tree=keep_variants(self.flat.tree, groups)))


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells rank 0 when it has written."""

    files: tuple[FileRecord, ...]
    receipt: str
    receipt_size: int
    plan: bytes


@dataclass(frozen=True, eq=False)
class Planned:
    """What a rank will write: chunks, where they go, and the memory that each piece of a file comes from."""

    prepared: Prepared
    columns: Columns
    placed: Placed
    files: list[FilePlan]
    pieces: list[WritePiece]
    save_id: str


class Begun(Protocol):
    """A save after the plan, whatever remains to be agreed on: first `write`, then `finish` with what that returned.

    `planned` is None where `error` says why this rank cannot write; `finish` must be called all the same, with
    something that raises it.
    """

    @property
    def planned(self) -> Planned | None: ...

    @property
    def error(self) -> BaseException | None: ...

    def write(self, pieces: list[WritePiece] | None = None, writer: Writer = write) -> Written:
        """Writes this rank's part; `pieces` are copies of those planned."""

    def finish(self, write: Callable[[], Written]) -> Metadata:
        """Writes by `write`, and does the rest, in any thread."""


@dataclass(frozen=True, eq=False)
class Written:
    """What a rank has written, and from which plan."""

    result: WriteResult
    columns: Columns
    placed: Placed
    prepared: Prepared

    def report(self) -> bytes:
        """What rank 0 must know of it."""
        result = self.result
        told = Report(result.receipt.files, result.receipt_digest, result.receipt_size, plan_digest(self.columns))
        return msgspec.msgpack.encode(told)


class Part:
    """One rank's part of a save.

    Args:
        call: the arguments.
    """

    def __init__(self, call: SaveCall) -> None:
        self._call, ranks = call, call.platform.ranks
        tensors, memo = RememberedTensors(all_tensors(call.platform)), kept(call.platform, "described", dict[str, Any])
        self.context = PlanContext(tensors, ranks.rank, ranks.world_size, memo)

    def prepare(self, state: Mapping[Any, Any]) -> Prepared:
        """Takes the state apart and describes its tensors.

        Raises:
            UnsupportedStateError: a value cannot be stored; names it.
        """
        platform, tensors = self._call.platform, self.context.tensors
        flat = flatten(
            state,
            is_tensor=tensor_test(tensors),
            parts_of_kind=parts_of_kind(tensors),
            codecs=registry().codecs(),
            allow_pickle=self._call.options.allow_pickle,
            to_host=lambda v: to_host(tensors, platform.stager, v),
            form_of=form_of(tensors),
        )
        # Built-in codecs only: metadata must be readable where no plugin is installed.
        user = flatten({"user": self._call.user_metadata}, is_tensor=lambda _: False)
        if user.blobs or "per_rank" in values_by_kind(user.tree).values():
            raise UnsupportedTypeError(
                "user_metadata must be a plain value below 64 KiB: put larger things into the state"
            )
        description = self._call.planner.build_local_plan(flat.tensors, skeleton(flat.tree), self.context)
        return Prepared(flat, description, encode_tree(user.tree))

    def plan(
        self, prepared: Prepared, columns: Columns, save_id: str, payloads: Mapping[str, bytes], reporter: Reporter
    ) -> Planned:
        """Gives this rank's chunks and payloads their places, and finds the memory that they come from.

        Args:
            columns: the chunks, all of them this rank's.
            payloads: by name.
            reporter: told how many bytes there are.
        """
        writer, rank = self._call.writer, self.context.rank
        placed = writer.place(columns, save_id)
        sizes = [(name, len(data)) for name, data in payloads.items()]
        plans = writer.files(columns, placed, rank, save_id, sizes)
        pieces = [*self._pieces(prepared.flat, columns, placed, plans), *_payload_pieces(plans, payloads)]
        reporter.agreed(sum(plan.data_bytes for plan in plans))
        return Planned(prepared, columns, placed, plans, pieces, save_id)

    def write(
        self, planned: Planned, reporter: Reporter, description: LocalPart | None = None, writer: Writer = write
    ) -> Written:
        """Writes this rank's chunks, payloads and receipt.

        Args:
            reporter: told of bytes written.
            description: for the receipt, where no manifest will speak for this rank.
            writer: writes what is planned, here or in another process.
        """
        call, pieces = self._call, planned.pieces
        limit = call.max_host_bytes
        if limit is None:
            limit = max(DEFAULT_MAX_HOST_BYTES, staging_bytes(pieces))
        job = SaveJob(
            call.store,
            call.platform.stager,
            planned.files,
            pieces,
            planned.save_id,
            self.context.rank,
            self.context.world_size,
            call.threads,
            Budget(limit),
            call.durable,
            reporter.progress,
            description,
        )
        return Written(writer(job), planned.columns, planned.placed, planned.prepared)

    def _pieces(self, flat: FlatState, columns: Columns, placed: Placed, plans: list[FilePlan]) -> Iterator[WritePiece]:
        """The chunks with the memory that they come from."""
        table, tensors = columns.table, self.context.tensors
        plan_of = {plan.name: i for i, plan in enumerate(plans)}
        numbers = [plan_of.get(name, -1) for name in placed.files]
        files = placed.entry_file[placed.entry].tolist()
        starts, sizes = chunk_starts(columns, placed).tolist(), columns.nbytes().tolist()
        shards: dict[int, list[tuple[LocalShard, Carrier | None]]] = {}
        rows = zip(columns.tensor.tolist(), columns.boxes(), files, starts, sizes, strict=True)
        for number, (offsets, box_sizes), file, start, nbytes in rows:
            name, own = table.names[number], shards.get(number)
            if own is None:
                data = self._call.planner.get_data(flat.tensors, name, self.context)
                own = shards[number] = [(s, tensors.host_view(s)) for s in data]
            shard, view, low = _holding(own, name, offsets, box_sizes)
            source = Source(shard, table.dtypes[number], view, low, box_sizes)
            yield WritePiece(name, numbers[file], start, nbytes, source)


def plan_digest(columns: Columns) -> bytes:
    """16 bytes that tell two plans of one rank apart."""
    return xxhash.xxh3_128_digest(columns.pack())


def _payload_pieces(plans: list[FilePlan], payloads: Mapping[str, bytes]) -> Iterator[WritePiece]:
    for i, plan in enumerate(plans):
        for name, start in plan.payload_starts.items():
            yield WritePiece(name, i, start, len(payloads[name]), payloads[name])


def _holding(
    shards: list[tuple[LocalShard, Carrier | None]], name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[LocalShard, Carrier | None, tuple[int, ...]]:
    """The shard that holds a box, its memory, and the box's offsets inside it."""
    for shard, view in shards:
        if shard.sizes == sizes and shard.offsets == offsets:
            return shard, view, (0,) * len(sizes)
        low = offsets_inside(offsets, sizes, shard.offsets, shard.sizes)
        if low is not None:
            return shard, view, low
    raise PlanError(f"the plan wants {name!r} at {offsets} from this rank, which does not hold it")
