"""The client of the key-value store: one connection for all threads of a rank, and a deadline for every call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

from hyper_ckpt.contracts.platform import KeyValueStore
from hyper_ckpt.errors import PlatformError, RankFailedError, RankTimeoutError
from hyper_ckpt.fork_safety import reset_in_children
from hyper_ckpt.key_value import wire
from hyper_ckpt.key_value.addresses import Address
from hyper_ckpt.key_value.connection import Connection, NotServedError

ANSWER_SECONDS = 5.0
"""How long the answer to a `get` that waits may take beyond the time that it was asked to wait."""
RETRY_SECONDS = 1.0
"""How long a call waits for a server that did not answer the call before."""


class KeyValueClient(KeyValueStore):
    """The store as ranks other than 0 have it.

    Args:
        address: of rank 0's server. Nothing is sent before the first call.
        patience: seconds that a call waits for its answer, asked for each; a `get` that is asked to wait about as long
            or longer waits a few more.
    """

    def __init__(self, address: Address, patience: Callable[[], float]) -> None:
        self.address = address
        self._patience = patience
        self._link = _Link(address)

    def within(self, seconds: Callable[[], float]) -> KeyValueClient:
        twin = KeyValueClient.__new__(KeyValueClient)
        twin.address, twin._patience, twin._link = self.address, seconds, self._link
        return twin

    @property
    def own_address(self) -> str:
        """This host's address towards rank 0; connects."""
        return self._link.own_address(max(self._patience(), 0.0))

    def set_many(self, items: Mapping[str, bytes]) -> None:
        self._call(lambda number: wire.Set(number, {key: bytes(value) for key, value in items.items()}))

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        wanted = list(keys)
        return self._call(lambda number: wire.Get(number, wanted, timeout), timeout).found

    def delete(self, *keys: str) -> None:
        self._call(lambda number: wire.Delete(number, list(keys)))

    def delete_prefix(self, prefix: str) -> None:
        self._call(lambda number: wire.DeletePrefix(number, prefix))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 where there is none yet. Returns the sum."""
        return self._call(lambda number: wire.Add(number, key, amount)).total

    def close(self) -> None:
        """Hangs up."""
        self._link.close()

    def _call(self, request: Callable[[int], wire.Request], waits: float = 0.0) -> wire.Reply:
        return self._link.call(request, waits, max(self._patience(), 0.0))


class _Link:
    """The connection that all threads of a rank share, made again where it has broken."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: Connection | None = None
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """The connection is the parent's; a child makes one of its own."""
        if self._connection is not None:
            self._connection.abandon()
        self._connection = None
        self._sending = threading.Lock()
        self._next = 0
        self._silent_since: float | None = None

    def call(self, request: Callable[[int], wire.Request], waits: float, patience: float) -> wire.Reply:
        """Sends a request, which the server answers after at most `waits` seconds, and waits for the answer."""
        begin, grace = time.monotonic(), ANSWER_SECONDS
        if self._silent_since is not None:
            patience, grace = min(patience, RETRY_SECONDS), RETRY_SECONDS
        deadline = begin + max(patience, waits + grace if waits > 0 else 0.0)
        try:
            connection, number = self._send(request, deadline)
            reply = connection.reply(number, deadline)
        except TimeoutError as error:
            if self._silent_since is None:
                self._silent_since = begin
            raise self._silent(time.monotonic() - self._silent_since) from error
        except (OSError, NotServedError) as error:
            raise self._gone() from error
        self._silent_since = None
        return reply

    def own_address(self, patience: float) -> str:
        """This end of the connection."""
        self.call(lambda number: wire.Get(number, [], 0.0), 0.0, patience)
        connection = self._connection
        if connection is None:
            raise self._gone()
        return connection.own_address

    def close(self) -> None:
        """Hangs up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _send(self, request: Callable[[int], wire.Request], deadline: float) -> tuple[Connection, int]:
        if not self._sending.acquire(timeout=_seconds_until(deadline)):
            raise TimeoutError
        try:
            number = self._next = self._next + 1
            try:
                frame = wire.frame(request(number))
            except ValueError as error:
                raise PlatformError(str(error)) from error
            connection = self._connection  # another thread may hang up at any time
            if connection is None or connection.broken:
                connection = self._connection = Connection.open(self._address, deadline)
            connection.send(number, frame, deadline)
            return connection, number
        finally:
            self._sending.release()

    def _silent(self, seconds: float) -> RankTimeoutError:
        return RankTimeoutError(
            f"rank 0, which hosts the key-value store at {self._where}, has not answered for {seconds:.0f} s: its "
            "process is stopped, busy without a break, or cannot be reached any more. Look at its log. Later calls "
            "find it again if it goes on",
            [0],
        )

    def _gone(self) -> RankFailedError:
        return RankFailedError(
            f"rank 0, which hosts the key-value store at {self._where}, is gone: its process has ended, or has left "
            "this group",
            [0],
        )

    @property
    def _where(self) -> str:
        return f"{self._address.host}, port {self._address.port}"


def _seconds_until(deadline: float) -> float:
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
