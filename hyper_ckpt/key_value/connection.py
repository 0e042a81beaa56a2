"""One connection to the server of the key-value store. Several threads may wait for answers at once."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
import weakref

import msgspec

from hyper_ckpt.key_value import wire
from hyper_ckpt.key_value.addresses import Address

_RECEIVE_BYTES = 1 << 18
_LONGEST_WAIT = 3600.0
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # takes no descriptor of its own


class NotServedError(Exception):
    """What answers at an address is no server of this job."""


class Connection:
    """A connection that the server has welcomed. One thread sends at a time; of those that wait for answers one reads,
    for all.

    Args:
        connected: a socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._arrived = wire.FrameBuffer()
        self._expected: set[int] = set()
        self._replies: dict[int, wire.Reply] = {}
        self._failure: Exception | None = None
        self._reader: threading.Thread | None = None
        self._changed = threading.Condition()
        self.own_address: str = connected.getsockname()[0]
        weakref.finalize(self, connected.close)

    @classmethod
    def open(cls, address: Address, deadline: float) -> Connection:
        """Connects, and has the server prove that it is this job's.

        Raises:
            TimeoutError, OSError, NotServedError: it does not answer, is not there, is another one.
        """
        if time.monotonic() >= deadline:
            raise TimeoutError
        # A timeout of 0 would mean not to wait for the connection at all.
        connected = socket.create_connection((address.host, address.port), max(_remaining(deadline), 0.001))
        try:
            wire.prepare(connected)
            made = cls(connected)
            made._shake_hands(address.token.encode(), deadline)
            return made
        except BaseException:
            connected.close()
            raise

    @property
    def broken(self) -> bool:
        """Whether it can be used no more."""
        return self._failure is not None

    def close(self) -> None:
        """Hangs up."""
        self._fail(ConnectionAbortedError("closed"))

    def send(self, number: int, frame: bytes, deadline: float) -> None:
        """Sends a request; one at a time."""
        with self._changed:
            self._expected.add(number)
        try:
            self._send(frame, deadline)
        except BaseException as error:  # half a frame may have gone
            self._fail(error)
            raise

    def reply(self, number: int, deadline: float) -> wire.Reply:
        """The answer to a request that was sent.

        Raises:
            TimeoutError: it has not come. One that comes later is dropped.
            OSError, NotServedError: it cannot come any more.
        """
        try:
            while not self._has_reply(number):
                if time.monotonic() >= deadline:
                    raise TimeoutError
                if self._takes_over(deadline):
                    self._read(deadline)
            return self._replies[number]
        finally:
            with self._changed:
                self._expected.discard(number)
                self._replies.pop(number, None)
                if self._reader is threading.current_thread():
                    self._reader = None
                self._changed.notify_all()

    def _has_reply(self, number: int) -> bool:
        with self._changed:
            if number not in self._replies and self._failure is not None:
                raise self._failure
            return number in self._replies

    def _takes_over(self, deadline: float) -> bool:
        """Whether this thread is the one that reads; where another is, waits until something has changed."""
        with self._changed:
            here = threading.current_thread()
            if self._reader is not None and self._reader is not here and self._reader.is_alive():
                self._changed.wait(_remaining(deadline))
                return False
            self._reader = here
            return True

    def _read(self, deadline: float) -> None:
        """Takes what arrives next, if anything does before the deadline."""
        try:
            payload = self._next_frame(deadline)
            reply = wire.decode_reply(payload)
        except TimeoutError:
            return
        except (msgspec.MsgspecError, wire.WireError) as error:
            self._fail(NotServedError(str(error)))
        except BaseException as error:  # bytes may be lost
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            with self._changed:
                if reply.number in self._expected:
                    self._replies[reply.number] = reply
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error if isinstance(error, Exception) else ConnectionAbortedError("interrupted")
                if isinstance(error, TimeoutError):  # the next call makes another connection
                    self._failure = TimeoutError("the server takes no more requests")
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits at it
            self._socket.close()
            self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: closes this copy of the socket, and leaves the parent's connection as it is."""
        self._socket.close()

    def _shake_hands(self, token: bytes, deadline: float) -> None:
        nonce = wire.new_nonce()
        try:
            greeting = self._next_frame(deadline)
            if len(greeting) != wire.NONCE_BYTES:
                raise NotServedError("what answers there does not greet as a key-value store does")
            hello = wire.Hello(wire.WIRE_VERSION, wire.proof(token, b"client", greeting), nonce)
            self._send(wire.frame(hello), deadline)
            if not wire.is_proof(self._next_frame(deadline), token, b"server", nonce):
                raise NotServedError("what answers there does not know the job's token")
        except wire.WireError as error:
            raise NotServedError(str(error)) from error
        self._arrived.limit = wire.MAX_FRAME_BYTES

    def _next_frame(self, deadline: float) -> bytes:
        while (payload := self._arrived.next()) is None:
            self._wait(selectors.EVENT_READ, deadline)
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                continue
            if not data:
                raise ConnectionResetError("the server hung up")
            self._arrived.feed(data)
        return payload

    def _send(self, frame: bytes, deadline: float) -> None:
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._wait(selectors.EVENT_WRITE, deadline)

    def _wait(self, event: int, deadline: float) -> None:
        with _Selector() as selector:
            try:
                selector.register(self._socket, event)
            except ValueError as error:
                raise ConnectionAbortedError("closed by another thread") from error
            if not selector.select(_remaining(deadline)) and time.monotonic() >= deadline:
                raise TimeoutError


def _remaining(deadline: float) -> float:
    return min(max(deadline - time.monotonic(), 0.0), _LONGEST_WAIT)
