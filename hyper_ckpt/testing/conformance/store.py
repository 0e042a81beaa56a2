"""The suite that every byte store must pass."""

from __future__ import annotations

from collections.abc import Callable

from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.testing.conformance.check import Check
from hyper_ckpt.testing.conformance.store_objects import objects
from hyper_ckpt.testing.conformance.store_publish import processes, publishing
from hyper_ckpt.testing.conformance.store_subject import StoreSubject, at_once, get, put
from hyper_ckpt.testing.conformance.store_writes import sinks

__all__ = ["STORE_CHECKS", "StoreSubject", "at_once", "get", "put", "run_on"]

STORE_CHECKS: tuple[Check, ...] = tuple(
    check for part in (objects, sinks, publishing, processes) for check in part.checks
)


def run_on(check: Check, open_store: Callable[[], ByteStore]) -> None:
    """Runs one check on a root that nobody has used.

    Args:
        open_store: opens a store over this root, each time a new one.

    Raises:
        AssertionError: the promise is broken.
        NotApplicable: the store has nothing that it is about.
    """
    check.run(StoreSubject(open_store))
