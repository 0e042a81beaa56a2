"""A mailbox over a TCPStore of our own, hosted by the group's rank 0."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import mindspore.mint.distributed as dist

from hyper_ckpt.contracts.platform import Mailbox
from hyper_ckpt.errors import RankFailedError, RankTimeoutError
from hyper_ckpt_mindspore.collectives import Group

CONNECT_SECONDS = 300.0
_ATTEMPT_SECONDS = 5.0
_PORTS_TRIED = 10


class Messages:
    """Messages in a TCPStore, for one thread at a time.

    The store's `get` waits for an absent key and holds the interpreter lock meanwhile, so every message has a counter
    beside it, which says whether there is one.

    Args:
        store: this process's client.
    """

    def __init__(self, store: dist.TCPStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._failure: RuntimeError | None = None

    def put(self, key: str, value: bytes) -> None:
        """Stores a message. Of a store that is gone only the counter tells."""
        with self._use():
            self.store.set(f"message/{key}", bytes(value))
            self.store.add(f"there/{key}", 1)

    def look(self, key: str) -> bytes | None:
        """The message, None while there is none."""
        with self._use():
            if self.store.add(f"there/{key}", 0) <= 0:
                return None
            try:
                return bytes(self.store.get(f"message/{key}"))
            except RuntimeError:
                if self.store.add(f"there/{key}", 0) <= 0:  # deleted in between
                    return None
                raise

    def drop(self, key: str) -> None:
        """Forgets a message; an absent one is fine."""
        with self._use():
            self.store.delete_key(f"there/{key}")
            self.store.delete_key(f"message/{key}")

    def count(self, key: str) -> int:
        """Adds one to a counter."""
        with self._use():
            return int(self.store.add(key, 1))

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Once a store has failed it is not asked again: every try may take 15 s."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                yield
            except RuntimeError as error:
                self._failure = error
                raise


class StoreMailbox(Mailbox):
    """The messages of one platform.

    Args:
        messages: of a store that platforms share.
        name: no other platform's.
    """

    def __init__(self, messages: Messages, name: str) -> None:
        self._messages, self._name = messages, name

    def set(self, key: str, value: bytes) -> None:
        with _rank_zero_named():
            self._messages.put(f"{self._name}/{key}", value)

    def get(self, key: str) -> bytes | None:
        with _rank_zero_named():
            return self._messages.look(f"{self._name}/{key}")

    def delete(self, key: str) -> None:
        with _rank_zero_named():
            self._messages.drop(f"{self._name}/{key}")


@contextlib.contextmanager
def _rank_zero_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError("the group's rank 0, which hosts the mailbox, is gone", ranks=[0]) from error


def open_mailbox(
    group: Group, timeout: float, store: dist.TCPStore | None = None, host: str | None = None
) -> StoreMailbox:
    """The mailbox of a group: rank 0 opens it and tells the others where.

    With a store only rank 0 is waited for. Without one the address travels by collectives of the group, for which all
    have to come within MindSpore's own limit.

    Args:
        timeout: seconds to wait for rank 0.
        store: of all members.
        host: the name under which others reach rank 0; None finds one.

    Raises:
        RankTimeoutError: rank 0 has not opened it in time, or cannot be reached.
        RankFailedError: a collective failed.
    """
    if store is None:
        return _open_by_collectives(group, host)
    rendezvous, key = Messages(store), f"hyper_ckpt/mailbox/{group.name}"
    if group.member == 0:
        alone = store.host in ("127.0.0.1", "localhost")
        server, name = _server(alone), secrets.token_hex(8)
        there = _reached_at(alone, host, store.host)
        rendezvous.put(key, f"{_machine()} {there} {server.store.port} {name}".encode())
        return StoreMailbox(server, name)
    client, name = _join(rendezvous, key, min(timeout, CONNECT_SECONDS))
    # The last one to connect removes the address, so that a later platform of the same group can't take it for its own.
    if client.count(f"{name}/connected") == group.size - 1:
        rendezvous.drop(key)
    return StoreMailbox(client, name)


def _open_by_collectives(group: Group, host: str | None) -> StoreMailbox:
    machines = group.all_gather_object(_machine())
    alone = len(set(machines)) == 1
    server, address = None, ""
    if group.member == 0:
        try:
            server = _server(alone)
            there = _reached_at(alone, host, os.environ.get("MS_SCHED_HOST"))
            address = f"{there} {server.store.port} {secrets.token_hex(8)}"
        except (RuntimeError, OSError) as error:
            address = f"error {error}"
    address = group.all_gather_object(address)[0]
    if address.startswith("error "):
        raise RankFailedError(f"rank 0 could not open the mailbox: {address[6:]}", ranks=[0])
    there, port, name = address.split(" ")
    if server is not None:
        return StoreMailbox(server, name)
    try:
        return StoreMailbox(_client("127.0.0.1" if machines[0] == _machine() else there, int(port)), name)
    except (RuntimeError, OSError) as error:
        raise _unreachable(f"cannot be reached at {there}:{port}") from error


def _join(rendezvous: Messages, key: str, timeout: float) -> tuple[Messages, str]:
    """A client of the store at the address under `key`, and the platform's name."""
    deadline = time.monotonic() + timeout
    cause: Exception | None = None
    while time.monotonic() < deadline:
        with _rank_zero_named():
            data = rendezvous.look(key)
        if data is None:
            time.sleep(0.02)
            continue
        machine, host, port, name = data.decode().split(" ")
        try:
            return _client("127.0.0.1" if machine == _machine() else host, int(port)), name
        except (RuntimeError, OSError) as error:  # the address of a process that is gone: rank 0 will replace it
            cause = error
    what = "cannot be reached at the address it gave" if cause else "has not called in"
    raise _unreachable(f"{what} within {timeout:g} s") from cause


def _unreachable(what: str) -> RankTimeoutError:
    return RankTimeoutError(
        f"rank 0 {what}: is it in the same save or load, and can this host reach it? "
        "MindSporePlatform(mailbox_host=...) sets the name under which others reach rank 0",
        ranks=[0],
    )


@functools.cache
def _server(alone: bool) -> Messages:
    """This process's store on a free port, for this machine only if all ranks are on it."""
    host = "127.0.0.1" if alone else "0.0.0.0"
    for attempt in range(_PORTS_TRIED):
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        try:
            return Messages(_lasting_store(host, port, is_server=True))
        except RuntimeError:  # somebody else was faster
            if attempt == _PORTS_TRIED - 1:
                raise
    raise AssertionError


@functools.cache
def _client(host: str, port: int) -> Messages:
    return Messages(_lasting_store(socket.gethostbyname(host), port, is_server=False))  # the store knows no names


def _lasting_store(host: str, port: int, *, is_server: bool) -> dist.TCPStore:
    """A store that is never taken down: MindSpore's ends the process if a message arrives meanwhile."""
    store = dist.TCPStore(
        host, port, is_master=is_server, timeout=timedelta(seconds=_ATTEMPT_SECONDS), wait_for_workers=False
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store.instance))  # not even when the interpreter ends
    return store


def _machine() -> str:
    """Equal for processes that share a loopback interface."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"host:{socket.gethostname()}"


def _reached_at(alone: bool, host: str | None, other: str | None) -> str:
    """Where the other ranks find this host: as told, or the address that talks to `other`."""
    if host or alone:
        return host or "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(other or "", 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            found = str(probe.getsockname()[0])
    except OSError:
        found = ""
    return found if found and not found.startswith("127.") else socket.gethostname()
