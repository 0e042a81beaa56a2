"""What runs in the process of one rank of the platform suite's world."""

from __future__ import annotations

from pathlib import Path

from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.testing.conformance.check import NotApplicable
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, load_probe
from hyper_ckpt.testing.conformance.probe import PlatformProbe
from hyper_ckpt.testing.conformance.subject import Subject

_joined: list[tuple[PlatformProbe, Platform]] = []


def join(rank: int, world_size: int, probe: str, address: str, port: int) -> None:
    """Makes this process a rank, for all checks that follow."""
    made = load_probe(probe)
    _joined.append((made, made.join(rank, world_size, address, port)))


def run_check(rank: int, world_size: int, name: str, folder: str, timeout: float) -> str | None:
    """Runs a check on this rank. Returns why it does not apply, or None where it passed."""
    probe, platform = _joined[-1]
    check = next(check for check in PLATFORM_CHECKS if check.name == name)
    try:
        check.run(Subject(probe, platform, Path(folder), timeout))
    except NotApplicable as reason:
        return str(reason)
    return None


def leave(rank: int, world_size: int) -> None:
    """Leaves the world."""
    probe, _ = _joined.pop()
    probe.leave()
