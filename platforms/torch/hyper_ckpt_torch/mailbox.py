"""A mailbox over a TCPStore of our own, hosted by the group's rank 0.

The training's store is used once, to agree on the address: a call that waits blocks a store's client
for all threads, and a store that others wait on is no place for messages with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import _get_default_store

from hyper_ckpt.contracts.platform import Mailbox
from hyper_ckpt.errors import RankFailedError, RankTimeoutError
from hyper_ckpt_torch.gloo import COLLECTIVE_TIMEOUT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore  # type checkers don't see the public names
else:
    from torch.distributed import Store, TCPStore

CONNECT_SECONDS = 300.0
_ATTEMPT_SECONDS = 15.0
_PREFIX = "message/"  # the store also serves the groups
# What compare_set gives for an absent key. A message equal to it would read as absent: see `set`.
_ABSENT = "\0hyper_ckpt: no such message\0"


class StoreMailbox(Mailbox):
    """Messages in a TCPStore.

    Args:
        store: this process's client. On rank 0 it is the server as well, which lives as long as the mailbox.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._lock = threading.Lock()

    def another_client(self) -> TCPStore:
        """A connection of its own to the same store, for calls that wait."""
        client = _connect(self._store.host, self._store.port, is_server=False)
        client.set_timeout(COLLECTIVE_TIMEOUT)
        return client

    def set(self, key: str, value: bytes) -> None:
        if value == _ABSENT.encode():
            raise ValueError("this value means that there is no message")
        with self._lock, _rank_zero_named():
            self._store.set(_PREFIX + key, value)  # type: ignore[arg-type]  # bytes too

    def get(self, key: str) -> bytes | None:
        # `get` would wait for an absent key, and with `check` before it for one deleted in between.
        # Comparing with a value that is nowhere and setting the same never waits and changes nothing.
        with self._lock, _rank_zero_named():
            value = bytes(self._store.compare_set(_PREFIX + key, _ABSENT, _ABSENT))
        return None if value == _ABSENT.encode() else value

    def delete(self, key: str) -> None:
        with self._lock, _rank_zero_named():
            self._store.delete_key(_PREFIX + key)


@contextlib.contextmanager
def _rank_zero_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError("the group's rank 0, which hosts the mailbox, is gone", ranks=[0]) from error


def open_mailbox(group_name: str, rank: int, world_size: int, timeout: float, host: str | None = None) -> StoreMailbox:
    """The mailbox of a process group: rank 0 opens it, the others wait until they can connect.

    Args:
        group_name: the same on all members, and no other group's.
        timeout: seconds to wait for rank 0.
        host: the name under which others reach rank 0; None finds one.

    Raises:
        RankTimeoutError: rank 0 has not opened it in time, or cannot be reached.
    """
    rendezvous, key = _get_default_store(), f"hyper_ckpt/mailbox/{group_name}"
    if rank == 0:
        server = _connect("127.0.0.1", 0, is_server=True)
        rendezvous.set(key, f"{_machine()} {host or _own_address(_master_host(rendezvous))} {server.port}")
        return StoreMailbox(server)
    store = _join(rendezvous, key, timeout)
    # The last one to connect removes the address, so that a later process group of the same name can't
    # take it for its own.
    if store.add("connected", 1) == world_size - 1:
        rendezvous.delete_key(key)
    return StoreMailbox(store)


def _join(rendezvous: Store, key: str, timeout: float) -> TCPStore:
    timeout = min(timeout, CONNECT_SECONDS)
    deadline = time.monotonic() + timeout
    cause: Exception | None = None
    while time.monotonic() < deadline:
        with _rank_zero_named():
            if not rendezvous.check([key]):
                time.sleep(0.02)
                continue
            machine, host, port = rendezvous.get(key).decode().split(" ")
        host = "127.0.0.1" if machine == _machine() else host
        try:
            return _connect(host, int(port), is_server=False)
        except RuntimeError as error:  # the address of a group that is gone: rank 0 is about to replace it
            cause = error
    what = "cannot be reached at the address it gave" if cause else "has not called in"
    raise RankTimeoutError(
        f"rank 0 {what} within {timeout:g} s: is it in the same save or load, and can this host reach it? "
        "TorchPlatform(mailbox_host=...) sets the name under which others reach rank 0",
        ranks=[0],
    ) from cause


def _connect(host: str, port: int, *, is_server: bool) -> TCPStore:
    return TCPStore(
        host, port, is_master=is_server, timeout=timedelta(seconds=_ATTEMPT_SECONDS), wait_for_workers=False
    )


def _machine() -> str:
    """Equal for processes that share a loopback interface."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"host:{socket.gethostname()}"


def _master_host(rendezvous: Store) -> str:
    """The host that all ranks of the job found to begin with, as far as it is known."""
    inner: object | None = rendezvous
    while inner is not None:
        host = getattr(inner, "host", None)  # a TCPStore has one, below the prefixes that torch puts around it
        if host:
            return str(host)
        inner = getattr(inner, "underlying_store", None)
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _own_address(master: str) -> str:
    """An address of this host that the other ranks can reach: the one that talks to the job's master."""
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
