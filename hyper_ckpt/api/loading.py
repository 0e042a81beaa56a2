"""The story of a load on one rank: flatten the target, agree, match, plan, read, set plain values."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hyper_ckpt import errors
from hyper_ckpt.agreement import Operation, StoppedError, broadcast_bytes
from hyper_ckpt.api.common import RememberedTensors, all_tensors, attempt, few, form_of, tensor_test
from hyper_ckpt.api.load_report import LoadReport
from hyper_ckpt.api.matching import Match, Matcher, count_votes, refuse_unexpected
from hyper_ckpt.api.objects import changed_dtypes, with_floats
from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.api.sharing import choose_sharing, pass_on_blobs
from hyper_ckpt.columns import Columns, Located
from hyper_ckpt.contracts.placement import StorageReader
from hyper_ckpt.contracts.planner import LoadPlanner, PlanContext
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.description import Description, without
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.load import Loader, LoadJob
from hyper_ckpt.engine.stage import from_host
from hyper_ckpt.engine.stored import Stored
from hyper_ckpt.engine.targets import Target, refuse_shared_memory
from hyper_ckpt.errors import MissingFileError, UnsupportedStateError
from hyper_ckpt.manifest import MANIFEST_NAME, VERSION, Manifest
from hyper_ckpt.options import DEFAULT_MAX_HOST_BYTES, LoadOptions, ShareReads, Strict, Verify
from hyper_ckpt.planning.describe import describe_tensor, local_shards, own_boxes
from hyper_ckpt.registry import registry
from hyper_ckpt.state import BlobNode, FlatState, Restore, flatten, prepare_restore, skeleton
from hyper_ckpt.state.tree import has_blobs

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
        self._tensors = RememberedTensors(all_tensors(call.platform))
        self._context = PlanContext(self._tensors, self._ranks.rank, self._ranks.world_size)
        self._seconds: dict[str, float] = {}
        self._kept: list[str] = []

    def run(self, state: dict[Any, Any]) -> LoadReport:
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

    def _flatten(self, state: dict[Any, Any]) -> FlatState:
        return flatten(
            state,
            is_tensor=tensor_test(self._tensors),
            codecs=registry().codecs(),
            allow_pickle=self._call.options.allow_pickle,
            form_of=form_of(self._tensors),
        )

    def _read_manifest(self) -> Manifest:
        """One rank reads it and shares it."""
        found: list[Manifest] = []

        def read(_: list[bytes]) -> bytes:
            found.append(self._call.reader.load_metadata(self._call.store))
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
            now = self._call.reader.load_metadata(self._call.store)
            return b"1" if now.save_id != manifest.save_id else b""

        return bool(self._operation.agree("looking for a newer manifest", decide=look))

    def _load(self, flat: FlatState, manifest: Manifest) -> LoadReport:
        self._kept.clear()
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
        self._warn(match, changed or [])
        return LoadReport(
            tuple(sorted(match.wanted.keys() - unfilled)),
            tuple(sorted(unfilled)),
            tuple(match.missing),
            tuple(match.unexpected),
            tuple(match.mismatched),
            tuple(self._kept),
            loader.counts.read,
            loader.counts.received,
            loader.counts.peak_host_bytes,
            self._seconds,
            dict(match.mapped),
            loader.shares,
            loader.counts.shared_boxes,
            loader.counts.broadcasts,
            loader.counts.packed_boxes,
            match.conflicts,
            tuple(changed or ()),
        )

    def _match(self, flat: FlatState, manifest: Manifest, stored: Stored) -> Match:
        """Compares the target with the checkpoint, on all ranks."""
        call = self._call
        matcher = Matcher(
            flat, manifest, self._context, call.strict, call.options, call.platform.objects, stored.check_files
        )
        match, error = attempt(lambda: matcher.run(call.planner))
        own = match.vote() if match else b""
        verdict = self._operation.agree("comparing the state with the checkpoint", own, error, count_votes)
        assert match is not None
        match.hear(verdict)
        if call.strict == "exact":
            refuse_unexpected(match.unexpected, manifest.checkpoint)
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
        shares = match.alike and self._shares(description, match, manifest)
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
            world = dataclasses.replace(world, conflicts=match.unshared, memo={})
            columns = planner.build_global_plan(without(world, ties), rank, boxes, call.options.broadcast_batch_bytes)
        else:
            columns = planner.finalize_plan(description, rank, boxes)
        located = self._locate(manifest, columns)
        stored.check_files(np.unique(located.file).tolist())
        if read_values is not None:
            read_values()
        targets = self._targets(wanted)
        refuse_shared_memory(targets, match.ties)
        job = LoadJob(
            self._ranks,
            call.platform.stager,
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
        self._tensors.before_writes([*wanted.values()])
        return targets

    def _shards_of(self, name: str, value: Any) -> list[Target]:
        dtype = describe_tensor(name, value, self._context).dtype
        itemsize = dtype_of(dtype).itemsize
        try:
            return [
                Target(name, s.offsets, s.sizes, dtype, math.prod(s.sizes) * itemsize, self._tensors.writable(s), s)
                for s in local_shards(name, value, self._context)
            ]
        except UnsupportedStateError as error:
            raise type(error)(f"{name!r}: {error}") from error

    def _read(self, loader: Loader, flat: FlatState, match: Match, stored: Stored, changes: list[Restore]) -> None:
        loader.open_groups()
        loader.run()
        others = {}
        for name, tensor in match.wanted.items():
            applied = self._call.planner.apply_tensor(name, tensor)
            if applied is not match.replaced.get(name, flat.tensors[name]):
                others[name] = applied
        if others:  # rare: a planner that makes tensors of its own
            match.replaced |= others
            self._kept.clear()
            changes.append(self._prepare_values(flat, match, stored))

    def _set(self, restore: Restore, looked_at: bytes) -> list[str]:
        """Changes the target; returns what its objects made of other dtypes. `looked_at` names those that are asked."""
        restore.run()
        names = set(msgspec.msgpack.decode(looked_at, type=list[str]))
        return changed_dtypes([each for each in restore.loads if each.name in names], self._context)

    def _prepare_values(self, flat: FlatState, match: Match, stored: Stored) -> Restore:
        """Reads and decodes what is no tensor, and returns what sets it."""
        stager, objects = self._call.platform.stager, self._call.platform.objects
        return prepare_restore(
            flat,
            match.saved,
            payload=lambda name: self.payload(stored, name),
            blob=lambda name, node: self.blob(stored, name, node),
            make_tensor=lambda dtype, shape, data: from_host(self._tensors, stager, dtype, shape, data),
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
        return unfilled | {name for name, first in match.ties.items() if first in unfilled}

    def _refuse_unfilled(self, loader: Loader, match: Match) -> None:
        """A tensor that was made for an object has no content that could stay."""
        left = sorted(self._unfilled(loader, match) & match.made) if match.made else []
        if left:
            raise errors.PlanError(
                f"{few([*map(repr, left)])}: the plan fills only a part of what an object in the target does not have "
                "yet: let the object make it, with initial values, before the load, or list its whole shards"
            )

    def _warn(self, match: Match, changed: Sequence[str]) -> None:
        left_out = match.left_out()
        # Ranks that do not talk cannot tell what nobody wants: other ranks have other stages of a pipeline.
        knows = self._ranks.rank == 0 and self._operation.ranks.world_size == self._ranks.world_size
        if left_out and self._call.strict is True and knows:
            warnings.warn(
                f"{len(left_out)} saved values were not loaded, since the target has no place for them: "
                f"{few([*map(repr, left_out)])}. Create them first, put the object itself into the state (an optimizer "
                "takes its moments, but its state_dict() has none before its first step), or pass strict=False if this "
                "is meant",
                stacklevel=6,
            )
        if changed:
            warnings.warn(
                f"load_state_dict changed dtypes: {few(changed)}. Values may have lost bits: make the object hold what "
                "was saved, or let its load_state_dict keep dtypes",
                stacklevel=6,
            )
        if self._kept:
            warnings.warn(
                f"{few([*map(repr, self._kept)])} belong to ranks, and no rank {self._ranks.rank} saved any: "
                "the target's own values were kept",
                stacklevel=6,
            )
        if match.borrowed:
            warnings.warn(
                f"{few([*map(repr, match.borrowed)])} differed between ranks: rank {self._ranks.rank} got the "
                "lowest rank's",
                stacklevel=6,
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
