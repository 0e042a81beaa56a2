"""CheckpointManager: what a training loop calls."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import msgspec
import xxhash

from hyper_ckpt.api.async_save import async_save
from hyper_ckpt.api.common import (
    CheckpointId,
    attempt,
    check_timeout,
    in_flight,
    operation,
    resolve_id,
    resolve_platform,
)
from hyper_ckpt.api.handle import SaveHandle
from hyper_ckpt.api.save import save
from hyper_ckpt.builtin.numpy_platform import OfflineRanks
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import (
    CheckpointError,
    PlatformError,
    RanksDisagreeError,
    SaveInFlightError,
)
from hyper_ckpt.manager.arguments import (
    check_above_zero,
    check_kind,
    check_metrics,
    check_same,
    encode_arguments,
    step_number,
)
from hyper_ckpt.manager.keeper import Keeper
from hyper_ckpt.manager.note import Note, metrics_of
from hyper_ckpt.manager.restoring import Restored, reasons, restore
from hyper_ckpt.manager.retention import Retention
from hyper_ckpt.manager.run import Run, StepInfo
from hyper_ckpt.manager.schedule import SaveInterval, Schedule
from hyper_ckpt.manager.signals import SIGTERM
from hyper_ckpt.metadata import Metadata
from hyper_ckpt.options import DEFAULT_TIMEOUT, LEFTOVER_AGE
from hyper_ckpt.text import clean


class CheckpointManager:
    """The checkpoints of one run: decides when to save, removes what is superseded, goes on after a failure.

    Every rank makes one, after its process group, with the same arguments. Checkpoints lie in `root/step-0000000100`;
    what else is in `root` is left alone. A context: leaving it closes the manager.

    Args:
        root: path or URL of the run, for this run alone.
        interval: when `should_save` says yes.
        retention: which checkpoints stay. Rank 0 removes the others once a newer one is complete.
        platform: a Platform or its name; None finds the active one, or that of a state.
        no_dist: this process is alone, whatever runs.
        on_sigterm: at a SIGTERM to any rank, have all save and be told to end (`preempted`). A handler is installed by
            a manager that is made in the main thread; handlers that were there before are called as well, what the
            signal does of itself (to end the process) is not done.
        leftover_age: seconds after which files of saves that died are removed, by the first save of this manager.
            None: never.

    Raises:
        TypeError: an argument is of another type.
        PlatformError: ranks that cannot talk have nothing to agree through.
        CheckpointError: the platform or the store is not there.
    """

    def __init__(
        self,
        root: CheckpointId,
        *,
        interval: SaveInterval | None = None,
        retention: Retention | None = None,
        platform: Platform | str | None = None,
        no_dist: bool = False,
        on_sigterm: bool = True,
        leftover_age: float | None = LEFTOVER_AGE,
    ) -> None:
        check_kind("interval", interval, SaveInterval, "steps")
        check_kind("retention", retention, Retention, "last")
        if leftover_age is not None and leftover_age != 0:
            check_above_zero("leftover_age", leftover_age)
        self._run = Run(resolve_id(root, None, "root"))
        self._given, self._no_dist = platform, no_dist
        self._platform = self._last = resolve_platform(platform, {}, no_dist)
        ranks = self._platform.ranks
        if isinstance(ranks, OfflineRanks):
            raise PlatformError(
                f"rank {ranks.rank} of {ranks.world_size} has no process group to talk through, and a manager needs "
                "one: call save and load with use_collectives=False yourself"
            )
        made: Counter[str] = self._platform.kept.setdefault("managers", Counter())
        made[self._run.store.url] += 1
        name = f"{xxhash.xxh3_64_hexdigest(self._run.store.url.encode())}/{made[self._run.store.url]}"
        self._retention = retention or Retention()
        interval = interval or SaveInterval()
        self._schedule = Schedule(ranks, interval, on_sigterm, f"hyper-ckpt/manager/{name}")
        self._arguments = encode_arguments(
            {
                "root": self._run.store.url,
                "interval": interval,
                "retention": self._retention,
                "on_sigterm": on_sigterm,
                "leftover_age": leftover_age,
            }
        )
        self._open: list[tuple[int, SaveHandle]] = []
        self._started: tuple[int, ...] = ()
        self._keeper = Keeper(self._run, self._retention, leftover_age, self._busy)
        self._closed = False
        if on_sigterm:
            SIGTERM.listen(self._schedule.ask)

    def should_save(self, step: int) -> bool:
        """Whether to save at this step. Every rank calls it, after each step, in the same order; the answer is the same
        on all, and for a step that is asked about twice. No rank waits for another.

        Raises:
            RanksDisagreeError: rank 0 named a step that this rank has passed: see `SaveInterval.lead`.
            RankFailedError: rank 0 is gone.
        """
        return self._schedule.due(step_number(step))

    @property
    def preempted(self) -> bool:
        """Whether the job is to end. True from the step on at which `should_save` had all ranks save for that, also if
        the signal came to one rank only."""
        return self._schedule.preempted

    def preempt(self) -> None:
        """As a SIGTERM to this rank: all save soon and then see `preempted`. From any thread, or a signal handler.

        Raises:
            CheckpointError: the other ranks do not listen for it.
        """
        if not self._schedule.talks:
            raise CheckpointError("the ranks of this manager do not listen: make it with on_sigterm=True on every rank")
        self._schedule.ask()

    def save(
        self,
        step: int,
        state: Mapping[Any, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        pinned: bool = False,
        **options: Any,
    ) -> Metadata:
        """Saves a step, then removes what is superseded. Every rank calls it, as `hyper_ckpt.save`.

        Args:
            metrics: numbers by name, to choose the best by; those of rank 0 count.
            pinned: no retention removes it.
            options: of `hyper_ckpt.save`. `overwrite` is True unless given: a damaged checkpoint of the step may be in
                the way.

        Raises:
            RanksDisagreeError: ranks save different steps, or made their managers with different arguments.
            ValueError: metrics are no numbers, or lack the one that the retention goes by; or the root is no run but a
                checkpoint.
            TypeError: the step is no integer, or metrics have no names.
            CheckpointError: as `hyper_ckpt.save`.
        """
        with self._starting(step):
            platform = self._begin(step, state, metrics, pinned, options)
            with self._noted(step, platform):
                found = save(state, self._run.path(step), platform=platform, **{"overwrite": True, **options})
        if platform.ranks.rank == 0:
            self._keeper.tidy(step)
            self._warn()
        return found

    def async_save(
        self,
        step: int,
        state: Mapping[Any, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        pinned: bool = False,
        **options: Any,
    ) -> SaveHandle:
        """Saves a step in the background, as `hyper_ckpt.async_save`. What is superseded is removed there, after the
        new checkpoint is complete. Arguments and errors are those of `save`."""
        with self._starting(step):
            platform = self._begin(step, state, metrics, pinned, options)
            with self._noted(step, platform):
                handle = async_save(state, self._run.path(step), platform=platform, **{"overwrite": True, **options})
            # The failures of older ones were raised by this call.
            most = options["options"].max_in_flight if options.get("options") else 1
            keep = [o for i, o in enumerate(self._open) if i >= len(self._open) - most or not o[1].done()]
            self._open = [*keep, (step, handle)]  # a new list: the background looks at it
        if platform.ranks.rank == 0:
            handle.add_done_callback(lambda error: self._keeper.forget(step) if error else self._keeper.tidy(step))
        return handle

    def restore(
        self, state: Mapping[Any, Any], step: int | None = None, *, skip_damaged: bool = True, **options: Any
    ) -> Restored | None:
        """Loads the newest checkpoint, or that of `step`, in place. Every rank calls it, as `hyper_ckpt.load`; all load
        the same.

        Args:
            step: load this one or none.
            skip_damaged: if the newest is damaged, or a file of it cannot be read (no permission, an I/O error), take
                the one before it, with a warning on rank 0; False raises.
            options: of `hyper_ckpt.load`. `verify` is "before" unless given: all blocks are read and checked before
                anything is loaded, so that a damaged checkpoint leaves the state as it was. With "during" it may be
                filled in part before an older one is loaded over it.

        Returns:
            None where the run has no checkpoint: then the state is as it was, and the log says so.

        Raises:
            CheckpointNotFoundError: there is none of `step`.
            RanksDisagreeError: ranks made their managers with different arguments.
            ValueError: the root is no run but a checkpoint.
            CorruptCheckpointError: what there is is damaged or cannot be read, all of it. The run does not begin anew
                by itself.
            CheckpointError: as `hyper_ckpt.load`.
        """
        self._refuse_closed()
        self._schedule.restart()
        return restore(self._run, self._platform_of(state), state, step, skip_damaged, options, self._arguments)

    def latest(self) -> int | None:
        """The highest complete step that this rank sees, None if there is none. No rank is asked: on a file system that
        shows new files late, let one rank look and tell the others (`restore` does). A warning names newer steps that
        are damaged or cannot be read."""
        found = self.steps()
        latest = max((info.step for info in found if info.complete), default=None)
        bad = [(i.step, i.problem or i.state) for i in reversed(found) if i.state in ("damaged", "unreadable")]
        newer = [each for each in bad if latest is None or each[0] > latest]
        if newer:
            warnings.warn(f"newer steps of {self._run.store.url} cannot be loaded: {reasons(newer)}", stacklevel=2)
        return latest

    def steps(self) -> list[StepInfo]:
        """All checkpoints of the run that this rank sees, the incomplete and damaged ones too; ascending."""
        return self._run.steps()

    def pin(self, step: int) -> None:
        """Keeps a checkpoint, whatever the retention says. Rank 0 does it, on others nothing happens.

        Raises:
            CheckpointNotFoundError: there is none of this step.
        """
        if self._platform.ranks.rank == 0:
            self._keeper.set_pin(step_number(step), True)

    def unpin(self, step: int) -> None:
        """Takes a pin back, as `pin`; retention looks at the step after the next save."""
        if self._platform.ranks.rank == 0:
            self._keeper.set_pin(step_number(step), False)

    def delete(self, step: int) -> None:
        """Removes a checkpoint, its manifest first. Rank 0 does it, on others nothing happens.

        Raises:
            CheckpointNotFoundError: there is none of this step.
            SaveInFlightError: it is being saved.
            CheckpointError: it is pinned.
        """
        if self._platform.ranks.rank == 0:
            self._keeper.delete(step_number(step))

    def close(self) -> None:
        """Waits for saves in flight, and takes the signal handler back. Called twice, it does nothing.

        Raises:
            CheckpointError: the first failure of a save of which nobody was told.
        """
        error = self._finish(told=True)
        self._warn()
        if error is not None:
            raise error

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # that error is the one to raise; what failed is told by the next save
            self._finish(told=False)

    def _finish(self, told: bool) -> BaseException | None:
        """Waits; returns the first failure, if the caller is going to be told."""
        if self._closed:
            return None
        self._closed = True
        try:
            # To ask the handles is not enough: rank 0 may still be removing what was superseded.
            if self._open:
                in_flight(self._last).wait_room(1, max(handle.timeout for _, handle in self._open))
            failures = [handle.unseen_failure() for _, handle in self._open if told]
            return next((error for error in failures if error is not None), None)
        except SaveInFlightError as error:
            return error
        finally:
            self._open = []
            SIGTERM.forget(self._schedule.ask)

    def _begin(
        self,
        step: int,
        state: Mapping[Any, Any],
        metrics: Mapping[str, Any] | None,
        pinned: bool,
        options: Mapping[str, Any],
    ) -> Platform:
        """All ranks are about to save this step; rank 0 notes its metrics, before the checkpoint is complete."""
        self._refuse_closed()
        self._warn()
        platform = self._platform_of(state, saves=True)
        timeout = options.get("timeout", DEFAULT_TIMEOUT)
        this = operation(platform, timeout, f"step {step} of {self._run.store.url}")

        def check() -> Note:
            check_timeout(timeout)
            if not options.get("use_collectives", True):
                raise ValueError(
                    "a manager needs ranks that talk: call hyper_ckpt.save with use_collectives=False yourself"
                )
            return self._note(step_number(step), metrics, pinned)

        note, error = attempt(check)
        durable = options.get("durable", True)

        def decide(sent: list[bytes]) -> bytes:
            calls = [msgspec.msgpack.decode(each, type=tuple[str, bytes]) for each in sent]
            check_same([arguments for _, arguments in calls])
            steps = [each for each, _ in calls]
            if len(set(steps)) > 1:
                named = ", ".join(f"{s} on rank {r}" for r, s in enumerate(steps[:8]))
                raise RanksDisagreeError(f"ranks save different steps: {named}. Save the same one on every rank")
            assert note is not None
            self._keeper.note(int(step), note, durable)
            return b""

        call = msgspec.msgpack.encode((clean(str(step)), self._arguments))
        this.agree("noting the step", call, error, decide, last=True)
        self._schedule.begun()
        return platform

    def _note(self, step: int, metrics: Mapping[str, Any] | None, pinned: bool) -> Note:
        wanted = self._retention.metric
        check_metrics(metrics, wanted)
        noted = metrics_of(metrics)
        if self._retention.best is not None and noted and wanted not in noted:
            raise ValueError(
                f"the best checkpoints are chosen by {wanted!r}, and the metrics of step {step} are "
                f"{', '.join(map(repr, noted))}: pass that one too, or none, or Retention(metric=...)"
            )
        return Note(metrics=noted, pinned=pinned)

    def _busy(self) -> set[int]:
        return {*self._started, *(step for step, handle in self._open if not handle.done())}

    @contextmanager
    def _starting(self, step: int) -> Iterator[None]:
        """While a save begins: what is removed in the background must not be this step."""
        self._started = (step,)
        try:
            yield
        finally:
            self._started = ()

    @contextmanager
    def _noted(self, step: int, platform: Platform) -> Iterator[None]:
        """While a step is saved that was noted: the note of a save that fails is taken back."""
        try:
            yield
        except BaseException:
            if platform.ranks.rank == 0:
                self._keeper.forget(step)
            raise

    def _platform_of(self, state: Mapping[Any, Any], *, saves: bool = False) -> Platform:
        """The platform of a call. One process may make the manager before it has any tensor."""
        if self._platform.ranks.world_size > 1:
            return self._platform
        found = resolve_platform(self._given, state, self._no_dist, saves=saves)
        if found.ranks.world_size > 1:
            raise PlatformError(
                f"this manager was made for one process, and {found.name} now has {found.ranks.world_size} ranks: "
                "make it after the process group, or pass no_dist=True"
            )
        self._last = found
        return found

    def _warn(self) -> None:
        problems = self._keeper.problems()
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            warnings.warn(
                f"what is superseded could not be removed, and takes room: {problems[0].rstrip('.')}{more}. "
                "Tried again after the next save",
                stacklevel=4,
            )
        if self._keeper.unmeasured():
            url, wanted = self._run.store.url, self._retention.metric
            warnings.warn(
                f"nothing is removed: the best are chosen by {wanted!r}, and no checkpoint of {url} has {wanted!r} "
                f"among its metrics (a finite number): pass metrics={{{wanted!r}: ...}} to save, or "
                "Retention(metric=...)",
                stacklevel=4,
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CheckpointError("this manager is closed: make another one for the same root")
