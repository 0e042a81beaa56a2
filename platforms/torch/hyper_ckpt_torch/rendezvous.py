"""How the members of a process group find their key-value store: rank 0 tells the others through torch's own store.

That is used once, for the address alone: a call on it that waits blocks its client for all threads, it has no
deadline that holds, and it listens on all interfaces.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from torch.distributed.distributed_c10d import _get_default_store

from hyper_ckpt.errors import RankFailedError, RankTimeoutError
from hyper_ckpt.key_value import Address, KeyValueClient, KeyValueServer, own_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # type checkers don't see the public name
else:
    from torch.distributed import Store

CONNECT_SECONDS = 300.0
_PAUSE_SECONDS = 0.02
T = TypeVar("T")


def open_store(
    group_name: str, rank: int, world_size: int, patience: Callable[[], float], host: str | None = None
) -> KeyValueServer | KeyValueClient:
    """The key-value store of a process group: rank 0 hosts it, the others wait until they can connect.

    Args:
        group_name: the same on all members, and no other group's.
        patience: seconds to wait for rank 0, now and later.
        host: the name under which others reach rank 0; None finds one.

    Raises:
        RankTimeoutError: rank 0 has not opened it in time, or cannot be reached.
        PlatformError: this is rank 0, and cannot listen.
    """
    rendezvous, key = _get_default_store(), f"hyper_ckpt/key_value_store/{group_name}"
    if rank == 0:
        server = KeyValueServer(host or own_address(_master_host(rendezvous)))
        with _rank_zero_named():
            rendezvous.set(key, server.address.encoded().decode("ascii"))
        return server
    deadline = time.monotonic() + min(patience(), CONNECT_SECONDS)
    return _in_time(lambda: _join(rendezvous, key, world_size, patience, deadline), deadline)


def _join(
    rendezvous: Store, key: str, world_size: int, patience: Callable[[], float], deadline: float
) -> KeyValueClient:
    cause: Exception | None = None
    while time.monotonic() < deadline:
        with _rank_zero_named():
            found = rendezvous.get(key) if rendezvous.check([key]) else None
        if found is None:
            time.sleep(_PAUSE_SECONDS)
            continue
        client = KeyValueClient(Address.decoded(bytes(found)), patience)
        try:
            # The last one to connect removes the address, so that a later process group of the same name can't take
            # it for its own.
            if client.within(lambda: deadline - time.monotonic()).add("connected", 1) == world_size - 1:
                with _rank_zero_named():
                    rendezvous.delete_key(key)
            return client
        except (RankFailedError, RankTimeoutError) as error:  # of a group that is gone: rank 0 is about to replace it
            cause = error
            time.sleep(_PAUSE_SECONDS)
    raise _unreachable(cause)


def _in_time(action: Callable[[], T], deadline: float) -> T:
    """Runs what may never return, since torch's store may be hosted by a process that is stopped, in a thread that is
    given up then."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((action(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, name="hyper-ckpt-rendezvous", daemon=True).start()
    try:
        result, error = done.get(timeout=max(deadline - time.monotonic(), 0.0) + 1.0)
    except queue.Empty:
        raise _unreachable(None) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _unreachable(cause: Exception | None) -> RankTimeoutError:
    what = "cannot be reached at the address it gave" if cause else "has not called in"
    error = RankTimeoutError(
        f"rank 0 {what} in time: is it in the same save or load, and can this host reach it? "
        "TorchPlatform(key_value_host=...) sets the name under which others reach rank 0",
        ranks=[0],
    )
    error.__cause__ = cause
    return error


@contextlib.contextmanager
def _rank_zero_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError("the process that hosts the job's own store is gone", ranks=[0]) from error


def _master_host(rendezvous: Store) -> str | None:
    """The host that all ranks of the job found to begin with, as far as it is known."""
    inner: object | None = rendezvous
    while inner is not None:
        host = getattr(inner, "host", None)  # a TCPStore has one, below the prefixes that torch puts around it
        if host:
            return str(host)
        inner = getattr(inner, "underlying_store", None)
    return os.environ.get("MASTER_ADDR")
