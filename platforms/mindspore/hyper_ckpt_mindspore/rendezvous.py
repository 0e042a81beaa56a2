"""How the members of a group find their key-value store: through MindSpore's own store, or by collectives."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator

import mindspore.mint.distributed as dist

from hyper_ckpt.errors import CheckpointError, RankFailedError, RankTimeoutError
from hyper_ckpt.key_value import Address, KeyValueClient, KeyValueServer, own_address
from hyper_ckpt_mindspore.collectives import Group

CONNECT_SECONDS = 300.0
_PAUSE_SECONDS = 0.02


class Notes:
    """Small texts in MindSpore's TCPStore.

    Its `get` waits for an absent key and holds the interpreter lock meanwhile, so every text has a counter beside it,
    which says whether there is one.

    Args:
        store: this process's client.
    """

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        """Stores a text. Of a store that is gone only the counter tells."""
        with _rank_zero_named():
            self._store.set(f"message/{key}", value)
            self._store.add(f"there/{key}", 1)

    def look(self, key: str) -> bytes | None:
        """The text, None while there is none."""
        with _rank_zero_named():
            if self._store.add(f"there/{key}", 0) <= 0:
                return None
            try:
                return bytes(self._store.get(f"message/{key}"))
            except RuntimeError:
                if self._store.add(f"there/{key}", 0) <= 0:  # deleted in between
                    return None
                raise

    def drop(self, key: str) -> None:
        """Forgets a text; an absent one is fine."""
        with _rank_zero_named():
            self._store.delete_key(f"there/{key}")
            self._store.delete_key(f"message/{key}")


@contextlib.contextmanager
def _rank_zero_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError("the process that hosts the job's own store is gone", ranks=[0]) from error


def open_store(
    group: Group, patience: Callable[[], float], store: dist.TCPStore | None = None, host: str | None = None
) -> KeyValueServer | KeyValueClient:
    """The key-value store of a group: rank 0 hosts it and tells the others where.

    With a store of MindSpore's only rank 0 is waited for. Without one the address travels by collectives of the group,
    for which all have to come within MindSpore's own limit.

    Args:
        patience: seconds to wait for rank 0, now and later.
        store: of all members.
        host: the name under which others reach rank 0; None finds one.

    Raises:
        RankTimeoutError: rank 0 has not opened it in time, or cannot be reached.
        RankFailedError: a collective failed, or rank 0 could not open it.
    """
    if store is None:
        return _open_by_collectives(group, patience, host)
    notes, key = Notes(store), f"hyper_ckpt/key_value_store/{group.name}"
    if group.member == 0:
        server = KeyValueServer(host or own_address(store.host))
        notes.put(key, server.address.encoded())
        return server
    return _join(notes, key, group.size, patience)


def _open_by_collectives(
    group: Group, patience: Callable[[], float], host: str | None
) -> KeyValueServer | KeyValueClient:
    alone = len(set(group.all_gather_object(_machine()))) == 1
    server, told = None, ""
    if group.member == 0:
        try:
            server = KeyValueServer(host or own_address("localhost" if alone else os.environ.get("MS_SCHED_HOST")))
            told = server.address.encoded().decode("ascii")
        except CheckpointError as error:
            told = f"error {error}"
    told = group.all_gather_object(told)[0]
    if told.startswith("error "):
        raise RankFailedError(f"rank 0 could not open the key-value store: {told[6:]}", ranks=[0])
    return server if server is not None else KeyValueClient(Address.decoded(told.encode()), patience)


def _machine() -> str:
    """Equal for processes that share a loopback interface."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"host:{socket.gethostname()}"


def _join(notes: Notes, key: str, size: int, patience: Callable[[], float]) -> KeyValueClient:
    timeout = min(patience(), CONNECT_SECONDS)
    deadline, cause = time.monotonic() + timeout, None
    while time.monotonic() < deadline:
        found = notes.look(key)
        if found is None:
            time.sleep(_PAUSE_SECONDS)
            continue
        client = KeyValueClient(Address.decoded(found), patience)
        try:
            # The last one to connect removes the address, so that a later platform of the same group can't take it for
            # its own.
            if client.within(lambda: deadline - time.monotonic()).add("connected", 1) == size - 1:
                notes.drop(key)
            return client
        except (RankFailedError, RankTimeoutError) as error:  # of a process that is gone: rank 0 will replace it
            cause = error
            time.sleep(_PAUSE_SECONDS)
    what = "cannot be reached at the address it gave" if cause else "has not called in"
    raise RankTimeoutError(
        f"rank 0 {what} within {timeout:g} s: is it in the same save or load, and can this host reach it? "
        "MindSporePlatform(key_value_host=...) sets the name under which others reach rank 0",
        ranks=[0],
    ) from cause
