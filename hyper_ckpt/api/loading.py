"""The story of a load on one rank: flatten the target, agree, match, plan, read, set plain values."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hyper_ckpt import errors
from hyper_ckpt.agreement import Operation, StoppedError, broadcast_bytes
from hyper_ckpt.api.common import (
    RememberedTensors,
    all_tensors,
    attempt,
    few,
    form_of,
    parts_of_kind,
    tensor_maker,
    tensor_test,
)
from hyper_ckpt.api.load_report import LoadReport
from hyper_ckpt.api.load_warnings import tell
from hyper_ckpt.api.matching import Match, Matcher, count_votes, refuse_unexpected
from hyper_ckpt.api.objects import changed_dtypes, with_floats
from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.api.saved_boxes import SavedBoxes
from hyper_ckpt.api.sharing import choose_sharing, pass_on_blobs
from hyper_ckpt.columns import Columns, Located
from hyper_ckpt.contracts.placement import StorageReader
from hyper_ckpt.contracts.planner import LoadPlanner, PlanContext
from hyper_ckpt.contracts.platform import Platform, Tensors
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.description import Description, without
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.cast import CastStager, CastTensors, host_memory, staging_bytes, uncast
from hyper_ckpt.engine.load import Loader, LoadJob
from hyper_ckpt.engine.overlaps import check_shared_memory
from hyper_ckpt.engine.stored import Stored
from hyper_ckpt.engine.targets import Target
from hyper_ckpt.errors import MissingFileError, UnsupportedStateError
from hyper_ckpt.manifest import MANIFEST_NAME, VERSION, Manifest
from hyper_ckpt.options import DEFAULT_MAX_HOST_BYTES, LoadOptions, ShareReads, Strict, Verify
from hyper_ckpt.planning.describe import describe_tensor, local_shards, own_boxes
from hyper_ckpt.registry import registry
from hyper_ckpt.state import BlobNode, FlatState, Restore, flatten, prepare_restore, skeleton
from hyper_ckpt.state.tree import has_blobs

MAX_BOX_BYTES = 1 << 60
"""More than any box has."""
MAX_ATTEMPTS = 100
"""How often a load begins again because the checkpoint was replaced under it: each time, a save was completed."""


@dataclass(frozen=True, eq=False)
class LoadCall:
    """The arguments of a load, resolved."""

    platform: Platform
    store: ByteStore
    reader: StorageReader
    planner: LoadPlanner
    options: LoadOptions
    strict: Strict
    verify: Verify
    share_reads: ShareReads
    threads: int
    max_host_bytes: int | None

    def load_metadata(self) -> Manifest:
        """What the checkpoint holds."""
        return (self.reader.load_partial if self.options.partial else self.reader.load_metadata)(self.store)

    def agreed_options(self) -> dict[str, str]:
        """What must be equal on all ranks."""
        names = ("options", "strict", "verify", "share_reads", "max_host_bytes")
        return {
            "call": "load",
            "checkpoint_id": self.store.url,
            "platform": self.platform.name,
            "format version": str(VERSION),
            "planner": self.planner.identity(),
            "storage_reader": self.reader.identity(),
            **{name: repr(getattr(self, name)) for name in names},
        }


class Loading:
    """One load on one rank."""

    def __init__(self, call: LoadCall, operation: Operation, reporter: Reporter) -> None:
        self._call, self._operation, self._reporter = call, operation, reporter
        self._ranks = call.platform.ranks
        self._tensors: Tensors = RememberedTensors(all_tensors(call.platform))
        self._stager = call.platform.stager
        if call.options.cast_keys:
            self._tensors = CastTensors(self._tensors)
            self._stager = CastStager(self._stager, self._tensors)
        self._context = PlanContext(self._tensors, self._ranks.rank, self._ranks.world_size)
        self._seconds: dict[str, float] = {}
        self._kept: list[str] = []
        self._of_ranks: list[str] = []

    def run(self, state: Mapping[Any, Any]) -> LoadReport:
        """The story; begun again if the checkpoint is replaced while it is read."""
        with self._phase("prepare"):
            flat, error = attempt(lambda: self._flatten(state))
        self._operation.meet(self._call.agreed_options(), error)
        assert flat is not None
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            manifest = self._read_manifest()
            try:
                return self._load(flat, manifest)
            except MissingFileError:
                if not attempts_left or not self._was_replaced(manifest):
                    raise
        raise AssertionError("unreachable")

    def _flatten(self, state: Mapping[Any, Any]) -> FlatState:
        return flatten(
            state,
            is_tensor=tensor_test(self._tensors),
            parts_of_kind=parts_of_kind(self._tensors),
            codecs=registry().codecs(),
            allow_pickle=self._call.options.allow_pickle,
            form_of=form_of(self._tensors),
        )

    def _read_manifest(self) -> Manifest:
        """One rank reads it and shares it."""
        found: list[Manifest] = []

        def read(_: list[bytes]) -> bytes:
            found.append(self._call.load_metadata())
            return b""

        with self._phase("metadata"):
            self._operation.agree("reading the manifest", decide=read)
            if self._operation.ranks.world_size == 1:
                return found[0]
            manifest, error = attempt(lambda: self._share(found))
            self._operation.agree("sharing the manifest", error=error)
            assert manifest is not None
            return manifest

    def _share(self, found: list[Manifest]) -> Manifest:
        data = broadcast_bytes(self._ranks, found[0].data if found else b"")
        return found[0] if found else Manifest(data, f"{self._call.store.url}/{MANIFEST_NAME}")

    def _was_replaced(self, manifest: Manifest) -> bool:
        def look(_: list[bytes]) -> bytes:
            now = self._call.load_metadata()
            return b"1" if now.save_id != manifest.save_id else b""

        return bool(self._operation.agree("looking for a newer manifest", decide=look))

    def _load(self, flat: FlatState, manifest: Manifest) -> LoadReport:
        self._kept.clear()
        self._of_ranks.clear()
        with self._phase("plan"):
            stored = Stored(self._call.store, manifest, self._call.verify != "off")
            match = self._match(flat, manifest, stored)
            manifest, flat = match.manifest or manifest, match.flat or flat
            stored.rename(manifest)
            changes: list[Restore] = []
            loader = self.plan(
                skeleton(flat.tree),
                manifest,
                match,
                stored,
                lambda: changes.append(self._prepare_values(flat, match, stored)),
            )
        with self._operation.working():
            with self._phase("read"):
                _, error = attempt(lambda: self._read(loader, flat, match, stored, changes))
                stopped = isinstance(error, StoppedError)
                if error is not None:
                    self._operation.stop()
                vote = msgspec.msgpack.encode((stopped, with_floats(changes[-1].loads, self._context)))
                looked_at = self._operation.agree("loading", vote, None if stopped else error, _refuse_stopped)
            # Plain values change nowhere unless all that was to be read has been read everywhere.
            with self._phase("values"):
                changed, error = attempt(lambda: self._set(changes[-1], looked_at))
                self._operation.agree("setting plain values", error=error, last=True)
        unfilled = self._unfilled(loader, match)
        self._reporter.finished("loaded", sum(f.size for f in manifest.files) if self._ranks.rank == 0 else 0)
        # Ranks that do not talk cannot tell what nobody wants: other ranks have other stages of a pipeline.
        knows = self._ranks.rank == 0 and self._operation.ranks.world_size == self._ranks.world_size
        of_ranks = self._of_ranks if manifest.world_size != self._ranks.world_size else []
        tell(match, self._kept, of_ranks, changed or [], self._call.strict, self._ranks, knows=knows)
        return self._report(match, loader, unfilled, changed or [])

    def _report(self, match: Match, loader: Loader, unfilled: set[str], changed: Sequence[str]) -> LoadReport:
        counts = loader.counts
        return LoadReport(
            loaded=tuple(sorted(match.wanted.keys() - unfilled)),
            unfilled=tuple(sorted(unfilled)),
            missing=tuple(match.missing),
            unexpected=tuple(match.unexpected),
            forgotten=tuple(match.forgotten),
            mismatched=tuple(match.mismatched),
            kept=tuple(self._kept),
            bytes_read=counts.read,
            bytes_received=counts.received,
            peak_host_bytes=counts.peak_host_bytes,
            seconds=self._seconds,
            mapped=dict(match.mapped),
            cast=dict(match.cast),
            shared_reads=loader.shares,
            shared_boxes=counts.shared_boxes,
            broadcasts=counts.broadcasts,
            packed_boxes=counts.packed_boxes,
            conflicts=match.conflicts,
            changed=tuple(changed),
        )

    def _match(self, flat: FlatState, manifest: Manifest, stored: Stored) -> Match:
        """Compares the target with the checkpoint, on all ranks."""
        call = self._call
        objects = call.platform.objects
        matcher = Matcher(flat, manifest, self._context, call.strict, call.options, objects, stored.check_files)
        find = functools.partial(call.reader.locate, rank=self._ranks.rank)
        match, error = attempt(lambda: matcher.run(call.planner, find))
        own = match.vote() if match else b""
        verdict = self._operation.agree("comparing the state with the checkpoint", own, error, count_votes)
        assert match is not None
        match.hear(verdict)
        match.ignore(call.options.ignore)
        if call.strict == "exact":
            refuse_unexpected([name for name in match.unexpected if not match.is_ignored(name)], manifest.checkpoint)
        return match

    def plan(
        self,
        frame: bytes,
        manifest: Manifest,
        match: Match,
        stored: Stored,
        read_values: Callable[[], None] | None = None,
    ) -> Loader:
        """Decides what this rank reads, checks the files it will open, and reads values that are no tensors: what is
        damaged there, or cannot be set, is found before anything is filled.

        Args:
            frame: the skeleton of the state.
            read_values: None: there is no target but new tensors.
        """
        planner = self._call.planner
        description, error = attempt(lambda: planner.build_local_plan(match.wanted, frame, manifest, self._context))
        self._operation.agree("describing the target", error=error)
        assert description is not None
        # Ranks that mapped names differently may mean different tensors by one name: then each reads for itself.
        # Where parts are missing, each finds out for itself what it can have.
        shares = match.alike and not manifest.absent and self._shares(description, match, manifest)
        if shares and has_blobs(manifest.state):  # the same on all ranks
            pass_on_blobs(self._operation, self._ranks, stored, match)
        loader, error = attempt(lambda: self._loader(description, manifest, match, stored, shares, read_values))
        self._operation.agree("checking the files", error=error)
        assert loader is not None
        return loader

    def _shares(self, description: Description, match: Match, manifest: Manifest) -> bool:
        """Whether reads are shared, the same on all ranks."""
        call = self._call
        if call.share_reads != "auto":
            return call.share_reads
        records = {r.name: r for r in description.structure.tensors}
        wanted = whole = 0
        for name, _, sizes in own_boxes(match.wanted, self._context):
            wanted += math.prod(sizes) * dtype_of(records[name].dtype).itemsize
        for name in match.wanted:
            whole += math.prod(records[name].shape) * dtype_of(records[name].dtype).itemsize
        return choose_sharing(self._operation, call.platform, call.store, manifest.files, wanted, whole)

    def _loader(
        self,
        description: Description,
        manifest: Manifest,
        match: Match,
        stored: Stored,
        shares: bool,
        read_values: Callable[[], None] | None,
    ) -> Loader:
        """Shares out the reads, finds the stored pieces, and checks the files that hold them."""
        call, rank, planner = self._call, self._ranks.rank, self._call.planner
        world = self._operation.exchange(description) if shares else None
        # Of names that are one memory, only the first is read. A rank whose part is empty cannot tell that they
        # are: where reads are shared, all ranks must leave out the same.
        ties = match.ties if world is None else world.ties
        wanted = {name: value for name, value in match.wanted.items() if name not in ties}
        boxes = own_boxes(wanted, self._context)
        if world is not None:
            most = call.options.broadcast_batch_bytes or MAX_BOX_BYTES
            world = dataclasses.replace(world, conflicts=match.unshared, memo={})
            columns = planner.build_global_plan(without(world, ties), rank, boxes, most)
        else:
            columns = planner.finalize_plan(description, rank, boxes)
        located = self._locate(manifest, columns)
        stored.check_files(np.unique(located.file).tolist())
        if read_values is not None:
            read_values()
        targets = self._targets(wanted)
        self._check_shared_memory(match, targets, manifest, stored)
        self._tensors.before_writes([*wanted.values()])
        job = LoadJob(
            self._ranks,
            self._stager,
            stored,
            call.store,
            columns,
            located,
            targets,
            self._operation.batch_ready,
            call.options.broadcast_batch_bytes,
            call.threads,
            call.max_host_bytes,
            self._reporter.progress,
            shares,
            read_values is not None,
        )
        self._reporter.agreed(int(columns.nbytes().sum()))
        loader = Loader(job, DEFAULT_MAX_HOST_BYTES)
        self._refuse_unfilled(loader, match)
        if call.verify == "before":
            loader.verify_first()
        return loader

    def _check_shared_memory(
        self, match: Match, targets: dict[str, list[Target]], manifest: Manifest, stored: Stored
    ) -> None:
        """Refuses targets that share memory for which different bytes were saved."""
        others = {n: match.wanted[n] for n in match.ties if n not in match.alike_ties and n not in targets}
        limit = DEFAULT_MAX_HOST_BYTES if self._call.max_host_bytes is None else self._call.max_host_bytes
        saved = SavedBoxes(self._call, self._ranks, manifest, stored)
        check_shared_memory({**targets, **self._targets(others)}, match.ties, match.alike_ties, saved.read, limit)

    def _locate(self, manifest: Manifest, columns: Columns) -> Located:
        own = np.flatnonzero(columns.rank == self._ranks.rank)
        located = self._call.reader.locate(manifest, columns.take(own), self._ranks.rank)
        return dataclasses.replace(located, want=own[located.want] if len(own) else located.want)

    def _targets(self, wanted: Mapping[str, Any]) -> dict[str, list[Target]]:
        targets = {}
        for name, value in wanted.items():
            plain = self._tensors.plain(value)
            if plain is not None:
                dtype, shape = plain.description.dtype, plain.description.shape
                targets[name] = [Target(name, (0,) * len(shape), shape, dtype, plain.nbytes, plain.address)]
            else:
                targets[name] = self._shards_of(name, value)
        return targets

    def _shards_of(self, name: str, value: Any) -> list[Target]:
        dtype = describe_tensor(name, value, self._context).dtype
        itemsize = dtype_of(dtype).itemsize
        try:
            targets = []
            for s in local_shards(name, value, self._context):
                nbytes, memory = math.prod(s.sizes) * itemsize, self._tensors.writable(s)
                converts = host_memory(self._tensors, s)
                room = staging_bytes(s, nbytes, converts)
                targets.append(Target(name, s.offsets, s.sizes, dtype, nbytes, memory, s, room, converts))
            return targets
        except UnsupportedStateError as error:
            raise type(error)(f"{name!r}: {error}") from error

    def _read(self, loader: Loader, flat: FlatState, match: Match, stored: Stored, changes: list[Restore]) -> None:
        loader.open_groups()
        loader.run()
        others = {}
        for name, tensor in match.wanted.items():
            applied = self._call.planner.apply_tensor(name, uncast(tensor))
            if applied is not match.replaced.get(name, flat.tensors[name]):
                others[name] = applied
        if others:  # rare: a planner that makes tensors of its own
            match.replaced |= others
            self._kept.clear()
            self._of_ranks.clear()
            changes.append(self._prepare_values(flat, match, stored))

    def _set(self, restore: Restore, looked_at: bytes) -> list[str]:
        """Changes the target; returns what its objects made of other dtypes. `looked_at` names those that are asked."""
        restore.run()
        names = set(msgspec.msgpack.decode(looked_at, type=list[str]))
        return changed_dtypes([each for each in restore.loads if each.name in names], self._context)

    def _prepare_values(self, flat: FlatState, match: Match, stored: Stored) -> Restore:
        """Reads and decodes what is no tensor, and returns what sets it."""
        objects = self._call.platform.objects
        return prepare_restore(
            flat,
            match.saved,
            payload=lambda name: self.payload(stored, name),
            blob=lambda name, node: self.blob(stored, name, node),
            make_tensor=tensor_maker(self._tensors, self._call.platform.stager),
            tensors=match.replaced,
            codecs=registry().codecs(),
            allow_pickle=self._call.options.allow_pickle,
            check=objects.check,
            load=objects.load,
        )

    def payload(self, stored: Stored, name: str) -> bytes | None:
        """What this rank saved of a `PerRank`; None, noted, if it saved none."""
        data = stored.payload(self._ranks.rank, name) if self._ranks.rank < stored.world_size else None
        if data is None:
            self._kept.append(name)
            return None
        self._of_ranks.append(name)
        return self._call.planner.apply_bytes(name, data)

    def blob(self, stored: Stored, name: str, node: BlobNode) -> bytes:
        """A large plain value."""
        data = stored.payload(node.rank or 0, name)
        if data is None:
            raise errors.ManifestError(f"the value of {name!r} is missing from the receipt of rank {node.rank}")
        return self._call.planner.apply_bytes(name, data)

    def _unfilled(self, loader: Loader, match: Match) -> set[str]:
        """Names of which not all was planned: a planner may fill less, but must not be thought to fill all."""
        columns = loader.job.columns
        planned = np.bincount(columns.tensor, columns.nbytes(), len(columns.table.names))
        filled = dict(zip(columns.table.names, planned.tolist(), strict=True))

        def is_filled(name: str, own: Sequence[Target]) -> bool:
            return bool(filled.get(name, 0) >= sum([t.nbytes for t in own]))

        unfilled = {name for name, own in loader.job.targets.items() if not is_filled(name, own)}
        return unfilled | {*match.uncovered} | {name for name, first in match.ties.items() if first in unfilled}

    def _refuse_unfilled(self, loader: Loader, match: Match) -> None:
        """A tensor that was made for an object has no content that could stay."""
        left = sorted(self._unfilled(loader, match) & match.made) if match.made else []
        if left:
            raise errors.PlanError(
                f"{few([*map(repr, left)])}: the plan fills only a part of what an object in the target does not have "
                "yet: let the object make it, with initial values, before the load, or list its whole shards"
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start


def _refuse_stopped(votes: list[bytes]) -> bytes:
    """Whoever stopped because of another rank has filled only a part: nobody may take that for a load. Returns the
    names of the objects that all ranks shall look at."""
    said = [msgspec.msgpack.decode(vote, type=tuple[bool, list[str]]) for vote in votes]
    stopped = [rank for rank, (is_stopped, _) in enumerate(said) if is_stopped]
    if stopped:
        raise errors.RankFailedError(f"ranks {stopped} stopped for a failure that no rank reports", stopped)
    return msgspec.msgpack.encode(sorted({name for _, names in said for name in names}))
