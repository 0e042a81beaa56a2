"""A switchboard over TCP: rank 0 serves the group's messages, and passes on what ranks send each other.

Every request is answered at once, so that no rank waits in it for another one. A rank whose connection ends is gone:
the kernel ends it also where the process was killed.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time

from hyper_ckpt.contracts.platform import Mailbox
from hyper_ckpt.errors import RankFailedError, RankTimeoutError

_REQUEST, _REPLY, _NUMBER = struct.Struct("<BIQ"), struct.Struct("<BQ"), struct.Struct("<I")
_RETRY_SECONDS = 0.02
_ANSWER_SECONDS = 10.0  # the hub waits for nobody before it answers
PARTING_SECONDS = 5.0
"""How long rank 0 serves the others after it is done itself."""


class Op(enum.IntEnum):
    """What a rank asks for."""

    HELLO = 0  # value: rank, world size
    SET = 1
    GET = 2
    DELETE = 3
    POST = 4  # value: how many ranks will take it, then the bytes
    TAKE = 5  # value: the rank that posts it


class Status(enum.IntEnum):
    """How it was answered."""

    OK = 0
    ABSENT = 1
    GONE = 2


class Hub:
    """The server, a thread per rank. It listens until all ranks have come.

    Raises:
        RankTimeoutError: the port did not become free in `timeout` seconds.
    """

    def __init__(self, address: str, port: int, world_size: int, timeout: float) -> None:
        self._world_size = world_size
        self._messages: dict[bytes, bytes] = {}
        self._posted: dict[bytes, tuple[bytes, int]] = {}
        self._came: set[int] = set()
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._listener = _listen(address, port, timeout)
        threading.Thread(target=self._accept, name="hyper-ckpt-hub", daemon=True).start()

    def close(self, patience: float = 0.0) -> None:
        """Ends the service when the other ranks have left, after at most `patience` seconds."""
        others = set(range(1, self._world_size))
        with self._changed:
            self._changed.wait_for(lambda: others <= self._gone, patience)
        _end(self._listener)

    def _accept(self) -> None:
        with self._listener:
            while len(self._came) < self._world_size:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # closed
                    return
                threading.Thread(target=self._serve, args=(connection,), name="hyper-ckpt-hub", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rank = None
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            op, _, value = _receive_request(connection)
            rank = self._welcome(value) if op == Op.HELLO else None
            _reply(connection, Status.ABSENT if rank is None else Status.OK)
            while rank is not None:
                _reply(connection, *self._answer(*_receive_request(connection)))
        if rank is not None:
            with self._changed:
                self._gone.add(rank)
                self._changed.notify_all()

    def _welcome(self, value: bytes) -> int | None:
        """The rank that calls; None if it is not one of this group that has not called before."""
        rank, world_size = _NUMBER.unpack_from(value)[0], _NUMBER.unpack_from(value, 4)[0]
        with self._changed:
            if world_size != self._world_size or rank in self._came:
                return None
            self._came.add(rank)
            if len(self._came) == self._world_size:
                _end(self._listener)
            return int(rank)

    def _answer(self, op: int, key: bytes, value: bytes) -> tuple[Status, bytes]:
        with self._changed:
            if op == Op.SET:
                self._messages[key] = value
            elif op == Op.DELETE:
                self._messages.pop(key, None)
            elif op == Op.GET:
                return (Status.OK, self._messages[key]) if key in self._messages else (Status.ABSENT, b"")
            elif op == Op.POST:
                self._posted[key] = value[_NUMBER.size :], _NUMBER.unpack_from(value)[0]
            elif op == Op.TAKE:
                return self._taken(key, _NUMBER.unpack(value)[0])
            return Status.OK, b""

    def _taken(self, key: bytes, sender: int) -> tuple[Status, bytes]:
        if key not in self._posted:
            return (Status.GONE if sender in self._gone else Status.ABSENT), b""
        data, readers = self._posted.pop(key)
        if readers > 1:
            self._posted[key] = data, readers - 1
        return Status.OK, data


class Client:
    """A rank's connection to the hub, for all its threads.

    Args:
        timeout: seconds to wait for the hub to come.

    Raises:
        RankTimeoutError: rank 0 did not come in time.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout: float) -> None:
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout
        while (found := _connect(address, port, rank, world_size)) is None:
            if time.monotonic() > deadline:
                raise RankTimeoutError(f"rank 0 did not open {address}:{port} within {timeout:g} s", [0])
            time.sleep(_RETRY_SECONDS)
        self._socket = found

    def call(self, op: Op, key: str, value: bytes = b"") -> tuple[int, bytes]:
        """Asks the hub.

        Raises:
            RankFailedError: rank 0, which serves it, is gone.
            RankTimeoutError: it does not answer.
        """
        with self._lock:
            try:
                _send_request(self._socket, op, key.encode("ascii"), value)
                return _receive_reply(self._socket)
            except TimeoutError as error:
                self._socket.close()  # an answer that comes after all must not be taken for another one
                raise RankTimeoutError("rank 0, which serves the mailbox, does not answer", [0]) from error
            except OSError as error:
                raise RankFailedError("rank 0, which serves the mailbox, is gone", [0]) from error

    def close(self) -> None:
        """Hangs up: to the others, this rank is gone."""
        _end(self._socket)


class HubMailbox(Mailbox):
    """The mailbox of the group."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        self._client.call(Op.SET, key, value)

    def get(self, key: str) -> bytes | None:
        status, value = self._client.call(Op.GET, key)
        return value if status == Status.OK else None

    def delete(self, key: str) -> None:
        self._client.call(Op.DELETE, key)


def _listen(address: str, port: int, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_server((address, port), backlog=1024)
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankTimeoutError(f"rank 0 cannot listen on {address}:{port}: {error}", [0]) from error
            time.sleep(_RETRY_SECONDS)  # an earlier group may be about to leave it


def _connect(address: str, port: int, rank: int, world_size: int) -> socket.socket | None:
    """A connection that the hub welcomed, None if there is none yet."""
    found = None
    with contextlib.suppress(OSError):
        found = socket.create_connection((address, port), _ANSWER_SECONDS)
        # On a loopback a socket may meet itself while nobody listens.
        if found.getsockname() != found.getpeername():
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send_request(found, Op.HELLO, b"", _NUMBER.pack(rank) + _NUMBER.pack(world_size))
            if _receive_reply(found)[0] == Status.OK:
                return found
    if found is not None:
        found.close()
    return None


def _end(connection: socket.socket) -> None:
    """Closes a socket that another thread may be waiting at."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _send_request(connection: socket.socket, op: Op, key: bytes, value: bytes) -> None:
    connection.sendall(_REQUEST.pack(op, len(key), len(value)) + key)
    connection.sendall(value)


def _receive_request(connection: socket.socket) -> tuple[int, bytes, bytes]:
    op, key, value = _REQUEST.unpack(_receive(connection, _REQUEST.size))
    return op, _receive(connection, key), _receive(connection, value)


def _reply(connection: socket.socket, status: Status, data: bytes = b"") -> None:
    connection.sendall(_REPLY.pack(status, len(data)))
    connection.sendall(data)


def _receive_reply(connection: socket.socket) -> tuple[int, bytes]:
    status, size = _REPLY.unpack(_receive(connection, _REPLY.size))
    return status, _receive(connection, size)


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes`.

    Raises:
        OSError: the other end is gone.
    """
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the other end hung up")
        view = view[count:]
    return bytes(data)
