"""Planners to subclass: every rank lists its items, rank 0 sees all of them before it decides who writes.

What they cost, beside the standard planners: a save gathers every rank's items at rank 0, one by one, so that
its planning grows with ranks times tensors. The standard planners gather nothing of the kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from hyper_ckpt.box import cut, offsets_inside, uncovered
from hyper_ckpt.columns import Columns, TensorTable
from hyper_ckpt.contracts.planner import OwnBoxes, PlanContext, SavePlanner
from hyper_ckpt.contracts.platform import LocalShard, Tensors, sampled_fingerprint
from hyper_ckpt.description import (
    EXPLICIT,
    Description,
    ExplicitBoxes,
    LayoutRecord,
    RankPart,
    Structure,
    TensorRecord,
    World,
)
from hyper_ckpt.errors import PlanError
from hyper_ckpt.items import LoadPlan, ReadItem, SavePlan, WriteItem
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.metadata import (
    ChunkStorageMetadata,
    LazyMapping,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_ckpt.planning.describe import describe, describe_tensor, local_shards
from hyper_ckpt.planning.listed import Box, box_of, held, inside, items_of, shown
from hyper_ckpt.planning.load import cut_large
from hyper_ckpt.planning.save import check_cover
from hyper_ckpt.planning.share import Rows, table_of
from hyper_ckpt.planning.standard import StandardLoadPlanner


class ItemSavePlanner(SavePlanner):
    """A save planner to subclass: override `create_local_plan`, `create_global_plan`, or both.

    As it is, every box is written once, by the least loaded of its holders, and no box is cut. Planning pays the
    gather: rank 0 receives the items of all ranks.

    A tensor whose replicas differ between ranks is offered to `create_global_plan` as several: a variant for each set
    of ranks that hold equal ones, named "w~r3" after the lowest rank of the set, and offered by that rank only. With
    `conflicts="warn"` it is one, which the lowest holder offers.
    """

    _decided: tuple[ExplicitBoxes, Columns] | None = None

    def identity(self) -> str:
        """Class and options, equal on all ranks: a subclass with options adds them."""
        return type(self).__name__

    def create_local_plan(self, tensors: Mapping[str, Any], context: PlanContext) -> SavePlan:
        """What this rank may write: boxes of its local shards, or parts of them. Runs on every rank.

        Args:
            tensors: this rank's, by name.
        """
        return SavePlan(
            tuple(
                WriteItem(MetadataIndex(name, offsets), sizes, describe_tensor(name, tensors[name], context).dtype)
                for name, offsets, sizes in _own_boxes(tensors, context)
            )
        )

    def create_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """What each rank writes, of what it listed: whole items, or parts of them. Runs on rank 0.

        Must be pure: it may be called more than once. Together the items must cover every tensor exactly once.

        Args:
            plans: one for each rank. Of names that are the same memory, only the first is there.
        """
        return spread(plans)

    def build_local_plan(self, tensors: Mapping[str, Any], skeleton: bytes, context: PlanContext) -> Description:
        found = describe(tensors, skeleton, context, saving=True)
        plan = self.create_local_plan(tensors, context)
        boxes: dict[str, dict[Box, LocalShard]] = defaultdict(dict)
        for item in items_of(plan, SavePlan, "create_local_plan"):
            name, box, shard = held(item, tensors, context)
            if 0 not in box[1]:
                boxes[name][box] = shard
        return _explicit(found, boxes, tensors, context)

    def loose_plan(self, world: World) -> Columns:
        table = table_of(world)
        offered = _offered(world, table)
        dtypes = dict(zip(table.names, table.dtypes, strict=True))
        plans = [
            SavePlan(tuple(WriteItem(MetadataIndex(name, box[0]), box[1], dtypes[name]) for name, box in own))
            for own in offered
        ]
        decided: Any = self.create_global_plan(plans)
        if not isinstance(decided, list | tuple) or len(decided) != world.world_size:
            raise PlanError(f"create_global_plan must return a list of {world.world_size} plans, one for each rank")
        rows = Rows(table.width)
        for rank, plan in enumerate(decided):
            own: dict[str, list[Box]] = defaultdict(list)
            for name, box in offered[rank]:
                own[name].append(box)
            items = items_of(plan, SavePlan, "create_global_plan")
            _add(rows, table, [(*_granted(item, own, rank), rank, -1) for item in items])
        columns = rows.columns(table)
        self._decided = world.boxes, columns
        return columns

    def build_global_plan(self, world: World) -> Columns:
        # A save asks for the loose part first, which is all of it: worth keeping until then.
        boxes, columns = self._decided or (None, None)
        if columns is None or boxes is not world.boxes or columns.table != table_of(world):
            columns = self.loose_plan(world)
        self._decided = None
        check_cover(columns)
        return columns

    def finalize_plan(self, world: World, loose: Columns, rank: int) -> Columns:
        return loose

    def get_data(self, tensors: Mapping[str, Any], name: str, context: PlanContext) -> list[LocalShard]:
        return local_shards(name, tensors[name], context)


def spread(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Keeps each distinct box once, with the least loaded of the ranks that list it; ties go to the lowest."""
    holders: dict[WriteItem, list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item].append(rank)
    kept: list[list[WriteItem]] = [[] for _ in plans]
    loads = [0] * len(plans)
    # Boxes with one holder first, then large ones: what comes last levels best.
    for item, ranks in sorted(holders.items(), key=lambda kv: (len(kv[1]), -kv[0].nbytes)):
        rank = min(ranks, key=lambda r: (loads[r], r))
        loads[rank] += item.nbytes
        kept[rank].append(item)
    return [SavePlan(tuple(items)) for items in kept]


class _Wish(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A checked `ReadItem`; `reader` is -1 and `sharers` empty where the rank reads for itself."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    reader: int
    sharers: tuple[int, ...]

    def __str__(self) -> str:
        return shown(self.name, (self.offsets, self.sizes))


class ItemLoadPlanner(StandardLoadPlanner):
    """A load planner to subclass: override `create_local_plan`. As it is, every rank reads its own shards for itself.

    An item may name a `reader` and `sharers`: then one rank reads the box and broadcasts it (but for tensors that
    differ between ranks: each reads its own), which all sharers must list alike. With `share_reads=False` every rank
    reads for itself, whatever items say.
    """

    def __new__(cls, *args: Any, **options: Any) -> ItemLoadPlanner:
        # By rank, since ranks that are threads may share a planner. Not in __init__, which a subclass may not call.
        self = super().__new__(cls)
        self._wishes, self._made = {}, {}
        return self

    _wishes: dict[int, list[_Wish]]
    _made: dict[int, set[str]]

    def create_local_plan(
        self, tensors: Mapping[str, Any], stored: Mapping[str, TensorStorageMetadata], context: PlanContext
    ) -> LoadPlan:
        """Which boxes of this rank's shards to fill; what no item lists stays as it is. Runs on every rank.

        Args:
            tensors: the targets that the checkpoint has, by name.
            stored: what the checkpoint has, by name; made when asked for.
        """
        return LoadPlan(tuple(ReadItem(MetadataIndex(n, o), s) for n, o, s in _own_boxes(tensors, context)))

    def build_local_plan(
        self, tensors: Mapping[str, Any], skeleton: bytes, manifest: Manifest, context: PlanContext
    ) -> Description:
        description = describe(tensors, skeleton, context, saving=False)
        plan = self.create_local_plan(tensors, LazyMapping(manifest.tensors, lambda n: _stored(manifest, n)), context)
        items = items_of(plan, LoadPlan, "create_local_plan")
        wishes = sorted({w for item in items if (w := _wish(item, tensors, context)) is not None})
        for name in self._made.pop(context.rank, ()):
            _refuse_partial(name, tensors[name], wishes, context)
        self._wishes[context.rank] = wishes
        # Every rank sees the structures of all: what ranks share travels there, and is compared on each.
        shared = [w for w in wishes if w.sharers]
        frame = msgspec.msgpack.encode((skeleton, shared))
        return dataclasses.replace(
            description, structure=msgspec.structs.replace(description.structure, skeleton=frame)
        )

    def build_global_plan(self, world: World, rank: int, boxes: OwnBoxes, max_bytes: int) -> Columns:
        frames = [msgspec.msgpack.decode(s.skeleton, type=tuple[bytes, list[_Wish]]) for s in world.structures]
        groups = _agreed_groups([shared for _, shared in frames], world.class_of.tolist())
        number = {g: i for i, g in enumerate(groups)}
        table = table_of(world)
        rows = Rows(table.width)
        wishes = {msgspec.structs.replace(w, name=world.ties.get(w.name, w.name)) for w in self._wishes[rank]}

        def is_shared(wish: _Wish) -> bool:
            return bool(wish.sharers) and wish.name not in world.conflicts

        _add(
            rows,
            table,
            [
                (w.name, (w.offsets, w.sizes), *((w.reader, number[w.sharers]) if is_shared(w) else (rank, -1)))
                for w in sorted(wishes)
            ],
        )
        return cut_large(rows.columns(table, groups), max_bytes)

    def finalize_plan(self, description: Description, rank: int, boxes: OwnBoxes) -> Columns:
        ties = dict(description.rank_part.ties)
        own = {(ties.get(w.name, w.name), w.offsets, w.sizes) for w in self._wishes[rank]}
        return super().finalize_plan(description, rank, sorted(own))

    def acquire_tensor(self, tensors: Mapping[str, Any], name: str, context: PlanContext) -> Any:
        acquired = super().acquire_tensor(tensors, name, context)
        if acquired is not tensors[name]:
            self._made.setdefault(context.rank, set()).add(name)
        return acquired


def _own_boxes(tensors: Mapping[str, Any], context: PlanContext) -> OwnBoxes:
    """Every non-empty local shard."""
    return [
        (name, shard.offsets, shard.sizes)
        for name in sorted(tensors)
        for shard in local_shards(name, tensors[name], context)
        if 0 not in shard.sizes
    ]


def _explicit(
    found: Description, boxes: Mapping[str, Mapping[Box, LocalShard]], tensors: Mapping[str, Any], context: PlanContext
) -> Description:
    """The description with listed boxes in place of layouts. What layouts said of replicas is told box by box."""
    records, listed, prints = [], [], []
    for number, (record, known) in enumerate(zip(found.structure.tensors, found.fingerprints, strict=True)):
        own = boxes.get(record.name, {})
        records.append(TensorRecord(record.name, record.dtype, record.shape, 0))
        listed += [(number, *box) for box in own]
        shards = local_shards(record.name, tensors[record.name], context)
        full = sorted((s.offsets, s.sizes) for s in shards if 0 not in s.sizes)
        whole = {box: known[8 * i : 8 * i + 8] for i, box in enumerate(full)} if len(known) == 8 * len(full) else {}
        prints.append(
            b"".join(whole.get(box) or _fingerprint(box, own[box], context.tensors) for box in sorted(own))
            if known
            else b""
        )
    structure = Structure(tuple(records), (LayoutRecord(EXPLICIT),), found.structure.skeleton)
    part = RankPart(boxes=tuple(listed), ties=found.rank_part.ties, empty=found.rank_part.empty)
    return Description(structure, part, tuple(prints))


def _fingerprint(box: Box, shard: LocalShard, tensors: Tensors) -> bytes:
    """Of a part of a shard. Outside host memory the whole shard stands for it, and where in it the part lies."""
    low = offsets_inside(*box, shard.offsets, shard.sizes)
    assert low is not None
    view = tensors.host_view(shard)
    if view is not None:
        return sampled_fingerprint([cut(view, low, box[1])])
    return xxhash.xxh3_64_digest(tensors.fingerprint([shard]) + repr((low, box[1], shard.sizes)).encode())


def _offered(world: World, table: TensorTable) -> list[list[tuple[str, Box]]]:
    """What each rank listed of the tensors of the table, sorted; of differing replicas, the lowest rank's."""
    names = set(table.names)
    explicit = world.boxes
    out: list[list[tuple[str, Box]]] = [[] for _ in range(world.world_size)]
    rows = sorted(zip(explicit.rank.tolist(), explicit.names, explicit.offsets, explicit.sizes, strict=True))
    taken: set[tuple[str, Box]] = set()
    for rank, name, offsets, sizes in rows:
        item = (name, (offsets, sizes))
        if name not in names or item in taken:
            continue
        if name in world.conflicts:
            taken.add(item)
        out[rank].append(item)
    return out


def _granted(item: WriteItem, offered: Mapping[str, Sequence[Box]], rank: int) -> tuple[str, Box]:
    """A decided item, which must be of what its rank listed."""
    name, box = item.index.fqn, box_of(item)
    own = offered.get(name, ())
    if box not in own and not any(inside(box, whole) for whole in own):
        raise PlanError(
            f"{shown(name, box)} is no part of what rank {rank} listed: create_global_plan may give a rank its own "
            "items only, whole or in part (of replicas that differ, the lowest holder has them)"
        )
    return name, box


def _add(rows: Rows, table: TensorTable, chunks: Iterable[tuple[str, Box, int, int]]) -> None:
    """Adds (name, box, rank, group) rows."""
    number_of = {name: i for i, name in enumerate(table.names)}
    found = [(number_of[name], box, rank, group) for name, box, rank, group in chunks if 0 not in box[1]]
    if not found:
        return
    width = table.width
    offsets = np.array([box[0] + (0,) * (width - len(box[0])) for _, box, _, _ in found], np.int64)
    sizes = np.array([box[1] + (1,) * (width - len(box[1])) for _, box, _, _ in found], np.int64)
    tensor, rank, group = (np.array([row[i] for row in found], np.int64) for i in (0, 2, 3))
    rows.add(tensor, rank, offsets, sizes, np.zeros(len(found), np.int64), group)


def _stored(manifest: Manifest, name: str) -> TensorStorageMetadata:
    stored = manifest.tensor(name)
    boxes = zip(stored.copies[0].offsets.tolist(), stored.copies[0].sizes.tolist(), strict=True)
    chunks = tuple(ChunkStorageMetadata(tuple(o), tuple(s)) for o, s in boxes)
    return TensorStorageMetadata(TensorProperties(stored.dtype), stored.shape, chunks)


def _wish(item: ReadItem, tensors: Mapping[str, Any], context: PlanContext) -> _Wish | None:
    """An item of this rank, checked; None if it is empty."""
    name, box, _ = held(item, tensors, context)
    if 0 in box[1]:
        return None
    if item.reader is None and not item.sharers:
        return _Wish(name, *box, -1, ())
    sharers = tuple(map(int, item.sharers)) or (context.rank,)
    if sharers != tuple(sorted(set(sharers))) or not 0 <= sharers[0] <= sharers[-1] < context.world_size:
        raise PlanError(f"{shown(name, box)}: its sharers {sharers} are not sorted ranks of {context.world_size}")
    if item.reader not in sharers or context.rank not in sharers:
        raise PlanError(
            f"{shown(name, box)}: its sharers {sharers} must include its reader ({item.reader}) and rank "
            f"{context.rank}, which lists it"
        )
    alone = len(sharers) == 1
    return _Wish(name, *box, -1 if alone else int(item.reader), () if alone else sharers)


def _refuse_partial(name: str, tensor: Any, wishes: Sequence[_Wish], context: PlanContext) -> None:
    """What was only described has no content that could stay."""
    own = [w for w in wishes if w.name == name]
    for shard in local_shards(name, tensor, context):
        parts = [w for w in own if inside((w.offsets, w.sizes), (shard.offsets, shard.sizes))]
        if math.prod(shard.sizes) and not _fills(parts, shard):
            raise PlanError(
                f"{name!r} has no memory of its own yet, and the plan fills only a part of it: give it memory and "
                "initial values before the load, or list its whole shards"
            )


def _fills(wishes: Sequence[_Wish], shard: LocalShard) -> bool:
    d = len(shard.sizes)
    low = np.array([w.offsets for w in wishes], np.int64).reshape(-1, d) - np.array(shard.offsets, np.int64)
    sizes = np.array([w.sizes for w in wishes], np.int64).reshape(-1, d)
    if not d:
        return bool(wishes)
    return not len(uncovered(np.zeros(len(low), np.int64), low, sizes, np.array([shard.sizes], np.int64)))


def _agreed_groups(shared: Sequence[Sequence[_Wish]], class_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The distinct sets of sharers, sorted, the same on every rank.

    Args:
        shared: per structure, what its ranks share.
        class_of: the structure of each rank.

    Raises:
        PlanError: a sharer does not list what others share with it.
    """
    by_group: dict[tuple[int, ...], set[_Wish]] = defaultdict(set)
    for wish in (w for wishes in shared for w in wishes):
        by_group[wish.sharers].add(wish)
    listed = [set(wishes) for wishes in shared]
    for group, wanted in sorted(by_group.items()):
        for number in sorted({class_of[r] for r in group}):
            silent = sorted(wanted - listed[number])
            if silent:
                ranks = [r for r in group if class_of[r] == number]
                raise PlanError(
                    f"{silent[0]} is to be read by rank {silent[0].reader} for ranks {list(group)}, but ranks {ranks} "
                    "do not list it so: all sharers must list the same items, with the same reader and sharers"
                )
    return tuple(sorted(by_group))
