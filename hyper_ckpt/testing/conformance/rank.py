"""What runs in the process of one rank of the platform suite's world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.testing.conformance.check import NotApplicable, PluginRaised, raised
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, load_probe
from hyper_ckpt.testing.conformance.probe import PlatformProbe
from hyper_ckpt.testing.conformance.spec import active_now
from hyper_ckpt.testing.conformance.subject import Subject


@dataclass(frozen=True)
class _Joined:
    probe: PlatformProbe
    platform: Platform
    active_before: dict[str, int]


_joined: list[_Joined] = []


def join(rank: int, world_size: int, probe: str, address: str, port: int) -> None:
    """Makes this process a rank, for all checks that follow."""
    made = load_probe(probe)
    before = active_now()
    _joined.append(_Joined(made, made.join(rank, world_size, address, port), before))


def run_check(rank: int, world_size: int, name: str, folder: str, timeout: float) -> str | None:
    """Runs a check on this rank. Returns why it does not apply, or None where it passed.

    Raises:
        AssertionError: it did not pass. Errors of the plugin lose their traceback on the way: what it says is in there.
    """
    here = _joined[-1]
    check = next(check for check in PLATFORM_CHECKS if check.name == name)
    try:
        check.run(Subject(here.probe, here.platform, Path(folder), timeout, here.active_before))
    except NotApplicable as reason:
        return str(reason)
    except AssertionError:
        raise
    except Exception as error:
        raise PluginRaised(raised(error, check.promise)) from error
    return None


def leave(rank: int, world_size: int) -> None:
    """Leaves the world."""
    _joined.pop().probe.leave()
