"""A check is one promise of a contract, as a function that raises AssertionError where it is broken."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from hyper_ckpt.testing.conformance.blame import where

Status = Literal["passed", "failed", "skipped"]


class ChoiceError(ValueError):
    """What is to run, or to be left out, was named wrongly."""


class NotApplicable(Exception):
    """The framework or store has nothing that this promise is about; the text says what is missing."""


class PluginRaised(AssertionError):
    """The plugin raised where the contract lets it raise nothing."""


@dataclass(frozen=True)
class Check:
    """One promise.

    Args:
        name: unique in its suite, and a Python name.
        part: which part of the suite it belongs to, e.g. "tensors".
        promise: what is promised, in a sentence.
        run: called with the subject of the part.
        spoils: the processes that ran it are of no use for other checks.
    """

    name: str
    part: str
    promise: str
    run: Callable[[Any], None]
    spoils: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a check went. `message` is empty for one that passed."""

    check: str
    part: str
    status: Status
    seconds: float
    message: str


class Part:
    """Collects the checks of one part of a suite, in the order in which they are written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checks: list[Check] = []

    def __call__(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """Decorates a check; its name and the first paragraph of its docstring become those of the `Check`."""
        self._add(function, spoils=False)
        return function

    def spoiling(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """Like `__call__`, for checks after which the processes that ran them are of no use."""
        self._add(function, spoils=True)
        return function

    def _add(self, function: Callable[[Any], None], *, spoils: bool) -> None:
        promise = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        self.checks.append(Check(function.__name__, self.name, promise, function, spoils))


def fail(promised: str, seen: str, change: str) -> NoReturn:
    """Raises the error of a broken promise: what was promised, what was seen, and what to change."""
    raise AssertionError(f"promised: {promised}\nseen: {seen}\nchange: {change}")


def expect(kept: bool, promised: str, seen: str, change: str) -> None:
    """Fails unless the promise was kept."""
    if not kept:
        fail(promised, seen, change)


def raised(error: BaseException, promise: str) -> str:
    """The message where the plugin raised: what, what the check was about, and where in the plugin."""
    return "\n".join([f"promised: {promise}", f"seen: {type(error).__name__}: {error}", *where(error)])


def similar(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: those that are spelt alike."""
    close = difflib.get_close_matches(name, sorted(known), 3, 0.5)
    return f". Did you mean {' or '.join(close)}?" if close else ""


def reasons_of(without: Mapping[str, str], checks: Iterable[Check]) -> dict[str, str]:
    """The reason for each check that is left out, from those given for checks and for whole parts.

    Raises:
        ChoiceError: a name is of no check and no part, or a reason is empty.
    """
    checks = list(checks)
    known = {check.name for check in checks} | {check.part for check in checks}
    for name, reason in without.items():
        if name not in known:
            raise ChoiceError(
                f"without names {name!r}, which is no check and no part of this suite{similar(name, known)}"
            )
        if not reason.strip():
            raise ChoiceError(f"without gives no reason for {name!r}: say why it is left out")
    return {
        check.name: reason for check in checks if (reason := without.get(check.name) or without.get(check.part, ""))
    }


def run_checks(
    checks: Iterable[Check],
    run: Callable[[Check], None],
    without: Mapping[str, str] | None = None,
    started: Callable[[Check], None] = lambda check: None,
) -> Iterator[Outcome]:
    """Runs checks one after another, whatever becomes of each.

    Args:
        run: runs one check; e.g. `PlatformBench.run`.
        without: reasons by name, as given by `reasons_of`.
        started: told of each check before it runs, not of those that are left out.
    """
    for check in checks:
        reason = (without or {}).get(check.name)
        if reason is not None:
            yield Outcome(check.name, check.part, "skipped", 0.0, reason)
            continue
        started(check)
        begin = time.monotonic()
        status, message = _outcome(check, run)
        yield Outcome(check.name, check.part, status, round(time.monotonic() - begin, 3), message)


def _outcome(check: Check, run: Callable[[Check], None]) -> tuple[Status, str]:
    try:
        run(check)
    except NotApplicable as reason:
        return "skipped", str(reason)
    except AssertionError as error:
        return "failed", str(error) or f"an assertion without a message; promised: {check.promise}"
    except Exception as error:  # of the plugin, where the contract lets it raise nothing
        return "failed", raised(error, check.promise)
    return "passed", ""
