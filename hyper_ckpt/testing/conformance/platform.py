"""The suite that every platform must pass: its checks, and the bench that runs them."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from hyper_ckpt.errors import PluginError
from hyper_ckpt.testing.conformance.check import Check, NotApplicable, PluginRaised, raised
from hyper_ckpt.testing.conformance.making import making
from hyper_ckpt.testing.conformance.plain import plain
from hyper_ckpt.testing.conformance.prints import prints
from hyper_ckpt.testing.conformance.probe import PlatformProbe
from hyper_ckpt.testing.conformance.ranks import world
from hyper_ckpt.testing.conformance.sharded import sharded
from hyper_ckpt.testing.conformance.spec import spec_alone, spec_world
from hyper_ckpt.testing.conformance.stager import stager
from hyper_ckpt.testing.conformance.subject import Subject
from hyper_ckpt.testing.conformance.tensors import tensors
from hyper_ckpt.testing.conformance.whole import whole
from hyper_ckpt.testing.conformance.world_saves import world_saves
from hyper_ckpt.testing.pool import PoolError, RankPool
from hyper_ckpt.testing.processes import free_port

PLATFORM_CHECKS: tuple[Check, ...] = tuple(
    check
    for part in (tensors, plain, prints, stager, making, spec_alone, whole, world, spec_world, sharded, world_saves)
    for check in part.checks
)

# Importing a framework in many processes at once may take long, whatever the checks take.
_START_SECONDS = 180.0
WORLD_SECONDS = 60.0
"""How long a check on a world may take, if nothing else is said."""
_STACK_LINES = 25
_RANK = "hyper_ckpt.testing.conformance.rank"


def load_probe(target: str) -> PlatformProbe:
    """Makes the probe called "module:callable".

    Raises:
        PluginError: there is none.
    """
    module, _, name = target.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f'the probe {target!r} is not there: {error}. A probe is named "module:callable"') from error
    found = make()
    if not isinstance(found, PlatformProbe):
        raise PluginError(f"{target} makes a {type(found).__name__}: it must make a PlatformProbe")
    return found


class PlatformBench:
    """Runs checks of a platform. Worlds of processes are started once, and anew after a check that failed.

    Args:
        probe: "module:callable"; or a probe, for platforms whose world is inside this process.
        folder: an empty directory for checkpoints.
        world_size: number of ranks of a world, at least 4 for all checks to apply.
        timeout: seconds for each check on a world.
    """

    def __init__(
        self, probe: str | PlatformProbe, folder: Path, *, world_size: int = 4, timeout: float = WORLD_SECONDS
    ) -> None:
        self._target = probe if isinstance(probe, str) else None
        self._probe = None if isinstance(probe, str) else probe
        self._folder = folder
        self._world_size = world_size
        self._timeout = timeout
        self._pool: RankPool | None = None
        self._no_world: str | None = None
        self._numbers = itertools.count()

    @property
    def probe(self) -> PlatformProbe:
        """The probe of this process."""
        if self._probe is None:
            assert self._target is not None
            self._probe = load_probe(self._target)
        return self._probe

    def load(self) -> None:
        """Imports the probe and its platform, if they are not there yet."""
        self.probe.platform()

    def run(self, check: Check) -> None:
        """Runs one check.

        Raises:
            AssertionError: the promise is broken.
            NotApplicable: the framework has nothing that it is about.
        """
        folder = self._folder / f"{next(self._numbers)}-{check.name}"
        folder.mkdir(parents=True)
        if check.part != "world":
            check.run(Subject(self.probe, self.probe.platform(), folder, self._timeout / 2))
        elif not self._run_inside(check, folder):
            self._run_processes(check, folder)

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            with contextlib.suppress(PoolError):  # ranks may be gone
                self._pool.run(f"{_RANK}:leave", timeout=10.0)
            self._pool.close()
            self._pool = None

    def __enter__(self) -> PlatformBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_inside(self, check: Check, folder: Path) -> bool:
        """Whether the probe runs worlds inside this process."""
        probe, timeout = self.probe, self._timeout
        try:
            done = probe.run_world(
                self._world_size, lambda p: check.run(Subject(probe, p, folder, timeout / 2)), timeout
            )
        except (AssertionError, NotApplicable):
            raise
        except Exception as error:
            raise PluginRaised(raised(error, check.promise)) from error
        return done is not None

    def _run_processes(self, check: Check, folder: Path) -> None:
        pool = self._started()
        arguments = (check.name, str(folder), self._timeout / 2)
        try:
            answers = pool.run(f"{_RANK}:run_check", *arguments, timeout=self._timeout)
        except PoolError as error:
            self._end_at_once()
            raise AssertionError(_message(error, check.promise)) from error
        if check.spoils:
            self._end_at_once()
        reasons = [answer for answer in answers if answer is not None]
        if reasons:
            raise NotApplicable(reasons[0])

    def _started(self) -> RankPool:
        if self._target is None:
            raise PluginError('give the probe as "module:callable": every rank is a process that makes its own')
        if self._no_world is not None:
            raise AssertionError(self._no_world)
        if self._pool is None:
            self._pool = RankPool(self._world_size)
            try:
                self._pool.run(f"{_RANK}:join", self._target, "127.0.0.1", free_port(), timeout=_START_SECONDS)
            except PoolError as error:
                self._end_at_once()
                self._no_world = _message(error, f"{self._world_size} processes join one world (PlatformProbe.join)")
                raise AssertionError(self._no_world) from error
        return self._pool

    def _end_at_once(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _message(error: PoolError, promise: str) -> str:
    """What broke: the first broken promise, or else what the plugin raised, or what became of each rank."""
    failed = {rank: failure.exception() for rank, failure in error.failures.items()}
    texts = {rank: text for rank, text in error.problems.items() if rank not in failed}
    gone = _gone(texts, next(iter(failed), None))
    stacks = next(iter(texts.values()), "").splitlines()[1:][-_STACK_LINES:]
    told = [rank for rank, each in failed.items() if isinstance(each, AssertionError)]
    if told:
        # What the plugin raised may be an echo of what another rank found.
        rank = next((rank for rank in told if not isinstance(failed[rank], PluginRaised)), told[0])
        return "\n".join([str(failed[rank]), f"({'; '.join([f'on rank {rank}', *gone])})", *stacks])
    others = [f"rank {rank} raised {failure.text.strip().splitlines()[-1]}" for rank, failure in error.failures.items()]
    return "\n".join([f"promised: {promise}", f"seen: {'; '.join([*others, *gone])}", *stacks])


def _gone(texts: Mapping[int, str], failed: int | None) -> list[str]:
    """What became of the ranks that did not answer. Where another one failed or died, that is the reason."""
    died = next((rank for rank, text in texts.items() if text.startswith("died")), None)
    cause = f"rank {died}, which had died" if failed is None else f"rank {failed}, which had failed"
    lines = []
    for rank, text in texts.items():
        alone = text.startswith("died") or (failed is None and died is None)
        became = text.splitlines()[0].removesuffix(":") if alone else f"waited for {cause}"
        lines.append(f"rank {rank} {became}")
    return lines
