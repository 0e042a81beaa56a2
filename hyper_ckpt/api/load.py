"""load: flatten the target, agree, match, plan, read, set plain values."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_ckpt import errors
from hyper_ckpt.agreement import Operation, StoppedError, broadcast_bytes
from hyper_ckpt.api.common import (
    CheckpointId,
    all_tensors,
    attempt,
    operation,
    resolve_id,
    resolve_platform,
    settle,
    state_of,
    tensor_test,
)
from hyper_ckpt.columns import Columns, Located
from hyper_ckpt.contracts.placement import StorageReader
from hyper_ckpt.contracts.planner import LoadPlanner, OwnBoxes, PlanContext
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.description import without
from hyper_ckpt.engine.load import Loader, LoadJob, Stored, Target
from hyper_ckpt.engine.stage import from_host
from hyper_ckpt.engine.workers import default_threads
from hyper_ckpt.errors import MissingFileError, StateMismatchError, TargetError, UnsupportedStateError
from hyper_ckpt.manifest import MANIFEST_NAME, VERSION, Manifest
from hyper_ckpt.options import DEFAULT_MAX_HOST_BYTES, DEFAULT_TIMEOUT, LoadOptions, Strict, Verify
from hyper_ckpt.planning.describe import describe_tensor, find_ties, local_shards
from hyper_ckpt.planning.standard import StandardLoadPlanner
from hyper_ckpt.registry import registry
from hyper_ckpt.state import BlobNode, FlatState, Node, compare, flatten, restore, select, skeleton
from hyper_ckpt.state.walk import blob_owners, values_by_kind
from hyper_ckpt.storage.filesystem import FileSystemReader

MAX_ATTEMPTS = 100
"""How often a load begins again because the checkpoint was replaced under it: each time, a save was completed."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank.

    Args:
        loaded: names of the tensors that were filled.
        missing: names that the target wants and the checkpoint does not have; left as they were.
        unexpected: names that the checkpoint has and the target does not want.
        mismatched: what was left as it was because kind, shape or dtype differ, each with the reason.
        kept: `PerRank` names that kept the target's value, because no such rank saved one.
        bytes_read: bytes of tensors that this rank read from the store.
        bytes_received: bytes of tensors that other ranks read for it.
        peak_host_bytes: the most host memory held besides the target.
        seconds: per phase.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_read: int
    bytes_received: int
    peak_host_bytes: int
    seconds: dict[str, float]


def load(
    state_dict: dict[Any, Any],
    checkpoint_id: CheckpointId | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    platform: Platform | str | None = None,
    no_dist: bool = False,
    strict: Strict = True,
    verify: Verify = "during",
    share_reads: bool = True,
    threads: int | None = None,
    max_host_bytes: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Loads a checkpoint into a state, in place. Every rank calls it, with the same arguments.

    The state may be distributed in any way, over any number of ranks. Tensors are filled where they lie,
    plain values are set in the given dicts and lists; a target on the meta device is replaced in its dict.

    Args:
        state_dict: what to load, with targets in place.
        checkpoint_id: path or URL of the checkpoint.
        storage_reader: finds chunks; with `checkpoint_id`, `storage_reader.at(checkpoint_id)` is used.
        planner: decides what is loaded into what.
        platform: a Platform or its name; None finds it from the state.
        no_dist: this process loads alone, whatever runs.
        strict: True refuses missing keys and differing shapes, dtypes and containers before any data is read;
            "exact" refuses unexpected keys too; False loads what matches.
        verify: "during" checks every block while it is read (a damaged one is found after earlier ones were
            loaded); "before" checks all blocks first, so that the target stays untouched; "off" checks
            only the manifest and the sizes and headers of files.
        share_reads: what several ranks want is read once and passed on.
        threads: threads that read; None: one per processor, 2 to 8.
        max_host_bytes: the most host memory besides the target; None: 256 MiB, or what shards outside host
            memory need at once if that is more.
        timeout: seconds until ranks that do not answer are reported.
        options: rarer options.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        StateMismatchError: state and checkpoint differ; one of its subclasses where they differ in one way only.
        CorruptCheckpointError: something stored is damaged, missing or mixed up; names it.
        RanksDisagreeError, RankFailedError, RankTimeoutError: another rank is the cause; names it.
        ValueError: neither checkpoint_id nor a reader with a path was given, or an option is none of those above.
    """
    chosen = resolve_platform(platform, state_dict, no_dist)
    # From here on the ranks count this call, so that one which fails at once stays in step with the others.
    this = operation(chosen, timeout)

    def resolve() -> LoadCall:
        where = resolve_id(checkpoint_id, storage_reader.checkpoint_id if storage_reader else None, "storage_reader")
        _check_choices(strict, verify)
        return LoadCall(
            chosen,
            registry().store(where),
            (storage_reader or FileSystemReader()).at(where),
            planner or StandardLoadPlanner(),
            options or LoadOptions(),
            strict,
            verify,
            share_reads and chosen.ranks.world_size > 1,
            threads or default_threads(),
            max_host_bytes,
        )

    return Loading(settle(this, resolve), this).run(state_dict)


def _check_choices(strict: Strict, verify: Verify) -> None:
    if strict not in (True, False, "exact") or verify not in ("off", "during", "before"):
        raise ValueError(
            f'strict={strict!r} must be True, False or "exact"; verify={verify!r} "off", "during" or "before"'
        )


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
    share_reads: bool
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


@dataclass(eq=False)
class Match:
    """How the target and the checkpoint fit. `wanted` holds the targets to fill, new ones where they had no memory;
    `values` the names of the target's other leaves."""

    saved: Node
    borrowed: tuple[str, ...]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    wanted: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    values: frozenset[str] = frozenset()


class Loading:
    """One load on one rank."""

    def __init__(self, call: LoadCall, operation: Operation) -> None:
        self._call, self._operation = call, operation
        self._ranks = call.platform.ranks
        self._tensors = all_tensors(call.platform)
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
        )

    def _read_manifest(self) -> Manifest:
        """One rank reads it and shares it."""
        found: list[Manifest] = []

        def read(_: list[bytes]) -> bytes:
            found.append(self._call.reader.load_metadata(self._call.store))
            return b""

        with self._phase("metadata"):
            self._operation.agree("reading the manifest", decide=read)
            if self._ranks.world_size == 1:
                return found[0]
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
            match, error = attempt(lambda: self._match(flat, manifest))
            self._operation.agree("comparing the state with the checkpoint", error=error)
            assert match is not None
            stored = Stored(self._call.store, manifest, self._call.verify != "off")
            loader = self.plan(skeleton(flat.tree), manifest, match, stored)
        with self._phase("read"):
            _, error = attempt(lambda: self._read(flat, match, stored, loader))
            stopped = isinstance(error, StoppedError)
            if error is not None:
                self._operation.stop()
            self._operation.agree("loading", b"1" * stopped, None if stopped else error, _refuse_stopped, last=True)
        self._warn(match)
        return LoadReport(
            tuple(sorted(match.wanted)),
            tuple(match.missing),
            tuple(match.unexpected),
            tuple(match.mismatched),
            tuple(self._kept),
            loader.counts.read,
            loader.counts.received,
            loader.counts.peak_host_bytes,
            self._seconds,
        )

    def _match(self, flat: FlatState, manifest: Manifest) -> Match:
        """Compares names, kinds, shapes and dtypes, before any data is read."""
        chosen = select(state_of(manifest), self._ranks.rank)
        match = Match(chosen.tree, chosen.borrowed, values=frozenset(values_by_kind(flat.tree)))
        problems: dict[str, list[str]] = {}
        misfits = set()
        for d in compare(flat.tree, chosen.tree):
            problems.setdefault(d.kind, []).append(d.text)
            names = {"missing": match.missing, "unexpected": match.unexpected}.get(d.kind, match.mismatched)
            names.append(d.text if d.kind == "container" else d.name)
            if d.kind == "container":
                misfits.add(d.name)
        for name, value in flat.tensors.items():
            if name in misfits or name not in manifest.tensors:
                continue
            problem = self._tensor_problem(name, value, manifest, problems)
            if problem is None:
                match.wanted[name] = value
            else:
                match.mismatched.append(problem)
        _raise_problems(problems, self._call.strict, manifest.what)
        self._acquire(match, manifest)
        return match

    def _tensor_problem(self, name: str, value: Any, manifest: Manifest, problems: dict[str, list[str]]) -> str | None:
        description, stored = describe_tensor(name, value, self._context), manifest.tensor(name)
        text = None
        if description.shape != stored.shape:
            text = f"{name!r} was saved with shape {stored.shape}, the target has {description.shape}"
            problems.setdefault("shape", []).append(text)
        elif description.dtype != stored.dtype:
            text = f"{name!r} was saved as {stored.dtype}, the target is {description.dtype}"
            problems.setdefault("dtype", []).append(text)
        return text

    def _acquire(self, match: Match, manifest: Manifest) -> None:
        """New tensors for targets without memory, and which names are one memory.

        Raises:
            TargetError: different values were saved for such names.
        """
        planner = self._call.planner
        for name, value in match.wanted.items():
            acquired = planner.acquire_tensor(match.wanted, name, self._context)
            match.wanted[name] = acquired
            if acquired is not value:
                match.replaced[name] = acquired
        shards = {n: local_shards(n, v, self._context) for n, v in match.wanted.items()}
        shapes = {n: manifest.tensor(n).shape for n in match.wanted}
        match.ties = find_ties(shards, shapes, self._tensors)
        for name, first in match.ties.items():
            if not _same_bytes(manifest, name, first):
                raise TargetError(
                    f"{name!r} and {first!r} are one tensor in the target, but two values were saved for them: "
                    "untie them, or load only one of them"
                )

    def plan(self, frame: bytes, manifest: Manifest, match: Match, stored: Stored) -> Loader:
        """Decides what this rank reads, and checks the files it will open. `frame` is the skeleton of the state."""
        call, rank = self._call, self._ranks.rank
        planner = call.planner
        description, error = attempt(lambda: planner.build_local_plan(match.wanted, frame, manifest, self._context))
        self._operation.agree("describing the target", error=error)
        assert description is not None
        world = self._operation.exchange(description) if call.share_reads else None

        def plan() -> Loader:
            # Of names that are one memory, only the first is read. A rank whose part is empty cannot tell that they
            # are: where reads are shared, all ranks must leave out the same.
            ties = match.ties if world is None else world.ties
            wanted = {name: value for name, value in match.wanted.items() if name not in ties}
            shards = {name: local_shards(name, value, self._context) for name, value in wanted.items()}
            boxes: OwnBoxes = [(name, s.offsets, s.sizes) for name, own in shards.items() for s in own]
            if world is not None:
                columns = planner.build_global_plan(
                    without(world, ties), rank, boxes, call.options.broadcast_batch_bytes
                )
            else:
                columns = planner.finalize_plan(description, rank, boxes)
            located = self._locate(manifest, columns)
            stored.check_files(np.unique(located.file).tolist())
            self._read_values(match, stored)
            targets = {name: self._targets(name, value) for name, value in wanted.items()}
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
            )
            loader = Loader(job, DEFAULT_MAX_HOST_BYTES)
            if call.verify == "before":
                loader.verify_first()
            return loader

        loader, error = attempt(plan)
        self._operation.agree("checking the files", error=error)
        assert loader is not None
        loader.open_groups()
        return loader

    def _locate(self, manifest: Manifest, columns: Columns) -> Located:
        own = np.flatnonzero(columns.rank == self._ranks.rank)
        located = self._call.reader.locate(manifest, columns.take(own), self._ranks.rank)
        return dataclasses.replace(located, want=own[located.want] if len(own) else located.want)

    def _targets(self, name: str, value: Any) -> list[Target]:
        description = describe_tensor(name, value, self._context)
        shards = local_shards(name, value, self._context)
        try:
            return [Target(name, s, description.dtype, self._tensors.writable(s)) for s in shards]
        except UnsupportedStateError as error:
            raise type(error)(f"{name!r}: {error}") from error

    def _read_values(self, match: Match, stored: Stored) -> None:
        """Reads the payloads and blobs that the target wants: a damaged one is found before anything is filled."""
        rank = self._ranks.rank
        for name, kind in values_by_kind(match.saved).items():
            if kind == "per_rank" and name in match.values and rank < stored.world_size:
                stored.payload(rank, name)
        for name, owner in blob_owners(match.saved):
            if name in match.values:
                stored.payload(owner, name)

    def _read(self, flat: FlatState, match: Match, stored: Stored, loader: Loader) -> None:
        platform = self._call.platform
        loader.run()
        for name, tensor in match.wanted.items():
            applied = self._call.planner.apply_tensor(name, tensor)
            if applied is not flat.tensors[name]:
                match.replaced[name] = applied
        restore(
            flat,
            match.saved,
            payload=lambda name: self.payload(stored, name),
            blob=lambda name, node: self.blob(stored, name, node),
            make_tensor=lambda dtype, shape, data: from_host(self._tensors, platform.stager, dtype, shape, data),
            tensors=match.replaced,
            codecs=registry().codecs(),
            allow_pickle=self._call.options.allow_pickle,
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

    def _warn(self, match: Match) -> None:
        if self._kept:
            warnings.warn(
                f"{_few(self._kept)} belong to ranks, and no rank {self._ranks.rank} saved any: "
                "the target's own values were kept",
                stacklevel=6,
            )
        if match.borrowed:
            warnings.warn(
                f"{_few(match.borrowed)} differed between ranks: rank {self._ranks.rank} got the lowest rank's",
                stacklevel=6,
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start


_KINDS: dict[str, type[StateMismatchError]] = {
    "missing": errors.MissingKeyError,
    "container": errors.ContainerMismatchError,
    "shape": errors.ShapeMismatchError,
    "dtype": errors.DtypeMismatchError,
    "unexpected": errors.UnexpectedKeyError,
}


def _raise_problems(problems: dict[str, list[str]], strict: Strict, what: str) -> None:
    """Raises one error for all problems that `strict` refuses; of a class of its own if they are of one kind."""
    refused = {k: v for k, v in problems.items() if strict == "exact" or (strict and k != "unexpected")}
    if not refused:
        return
    texts = [t for v in refused.values() for t in v]
    shown = "; ".join(texts[:10]) + (f"; and {len(texts) - 10} more (see .problems)" if len(texts) > 10 else "")
    kind = _KINDS[next(iter(refused))] if len(refused) == 1 else StateMismatchError
    raise kind(f"{what} does not fit the state: {shown}. Nothing was loaded; strict=False loads what matches", texts)


def _refuse_stopped(votes: list[bytes]) -> bytes:
    """Whoever stopped because of another rank has filled only a part: nobody may take that for a load."""
    stopped = [rank for rank, vote in enumerate(votes) if vote]
    if stopped:
        raise errors.RankFailedError(f"ranks {stopped} stopped for a failure that no rank reports", stopped)
    return b""


def _same_bytes(manifest: Manifest, a: str, b: str) -> bool:
    one, two = manifest.tensor(a).copies[0], manifest.tensor(b).copies[0]
    pairs = [(one.file, two.file), (one.start, two.start), (one.offsets, two.offsets), (one.sizes, two.sizes)]
    return all(np.array_equal(x, y) for x, y in pairs)


def _few(names: Any) -> str:
    rows = [repr(n) for n in names]
    return ", ".join(rows[:5]) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
