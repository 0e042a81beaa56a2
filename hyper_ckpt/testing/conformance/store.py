"""The suite that every byte store must pass."""

from __future__ import annotations

from collections.abc import Callable

from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.testing.conformance.check import Check, fail
from hyper_ckpt.testing.conformance.store_objects import objects
from hyper_ckpt.testing.conformance.store_publish import processes, publishing
from hyper_ckpt.testing.conformance.store_subject import StoreSubject, get, put
from hyper_ckpt.testing.conformance.store_writes import sinks
from hyper_ckpt.testing.conformance.threads import OutOfTime, at_once, within

__all__ = ["STORE_CHECKS", "StoreSubject", "at_once", "get", "put", "run_on"]

STORE_CHECKS: tuple[Check, ...] = tuple(
    check for part in (objects, sinks, publishing, processes) for check in part.checks
)


LIMIT_SECONDS = 120.0
"""How long a check of a store may take, if nothing else is said."""


def run_on(check: Check, open_store: Callable[[], ByteStore], timeout: float = LIMIT_SECONDS) -> None:
    """Runs one check on a root that nobody has used.

    Args:
        open_store: opens a store over this root, each time a new one.
        timeout: seconds, after which the check has failed; its thread is left alone.

    Raises:
        AssertionError: the promise is broken.
        NotApplicable: the store has nothing that it is about.
    """
    try:
        within(timeout, lambda: check.run(StoreSubject(open_store)))
    except OutOfTime as error:
        fail(check.promise, str(error), "a call of the store waits for something that does not come")
