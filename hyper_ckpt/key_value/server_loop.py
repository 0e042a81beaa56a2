"""What the server's thread does: accepts, reads requests, answers, and waits, all in one loop."""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from hyper_ckpt.key_value import wire
from hyper_ckpt.key_value.in_process import InProcessKeyValueStore, Watch

HELLO_SECONDS = 20.0
"""How long a peer may take to prove that it knows the token."""
MAX_STRANGERS = 1024
"""How many peers that have not proved it are kept; the oldest give way."""
_RECEIVE_BYTES = 1 << 18
_RETRY_ACCEPT_SECONDS = 0.1
_LONGEST_PAUSE = 3600.0


@dataclass(eq=False)
class _Waiting:
    """A get that waits."""

    peer: _Peer
    number: int
    watch: Watch
    deadline: float
    over: bool = False


@dataclass(eq=False)
class _Peer:
    """One connection."""

    socket: socket.socket
    nonce: bytes
    since: float
    proved: bool = False
    arrived: wire.FrameBuffer = field(default_factory=wire.FrameBuffer)
    unsent: bytearray = field(default_factory=bytearray)
    waiting: set[_Waiting] = field(default_factory=set)


class ServerLoop:
    """Serves a store to all who know the token.

    Nothing that a peer sends, or fails to send, ends the loop or holds it up: what is no valid request ends that
    peer's connection.

    Args:
        listener: accepts connections; closed at the end.
        store: what is served.
        token: what peers must know.
    """

    def __init__(self, listener: socket.socket, store: InProcessKeyValueStore, token: bytes) -> None:
        self._listener, self._store, self._token = listener, store, token
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: set[_Peer] = set()
        self._strangers: dict[_Peer, None] = {}  # in the order in which they came
        self._ready: deque[_Waiting] = deque()  # filled by any thread
        self._deadlines: list[tuple[float, int, _Waiting]] = []
        self._order = itertools.count()
        self._accept_again: float | None = None
        self._stopping = False
        self._changed = threading.Condition()

    def stop(self) -> None:
        """Ends the loop, from any thread."""
        self._stopping = True
        self._wake_up()

    def wait_alone(self, patience: float) -> None:
        """Waits until no peer is connected, at most `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._peers or self._stopping, patience)

    def reset_after_fork(self) -> None:
        """In a child: gives up its copies of the sockets, so that peers see it when the parent is gone."""
        self._stopping = True
        for each in (self._listener, self._wake, self._woken, *(peer.socket for peer in list(self._peers))):
            each.close()
        self._selector.close()

    def run(self) -> None:
        """Serves until `stop`."""
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._pause()):
                    self._handle(key.fileobj, key.data, events)
                self._answer_ready()
                self._answer_late()
                self._drop_silent()
        finally:
            self._stopping = True
            for peer in list(self._peers):
                self._drop(peer)
            for each in (self._listener, self._wake, self._woken):
                each.close()
            self._selector.close()

    def _handle(self, source: object, peer: _Peer | None, events: int) -> None:
        if source is self._listener:
            self._accept()
        elif peer is None:
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(1024):
                    pass
        else:
            # Whatever goes wrong with a peer ends its connection, and nothing else.
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(peer)
                if events & selectors.EVENT_READ:
                    self._receive(peer)
            except (OSError, ValueError, wire.WireError, msgspec.MsgspecError, MemoryError):
                self._drop(peer)

    def _pause(self) -> float:
        now, pause = time.monotonic(), _LONGEST_PAUSE
        if self._ready:
            return 0
        if self._deadlines:
            pause = min(pause, self._deadlines[0][0] - now)
        if self._strangers:
            pause = min(pause, next(iter(self._strangers)).since + HELLO_SECONDS - now)
        if self._accept_again is not None:
            pause = min(pause, self._accept_again - now)
        return max(pause, 0)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # No descriptor is left: a stranger gives way, and no peer is let in for a moment.
                if self._strangers:
                    self._drop(next(iter(self._strangers)))
                self._selector.unregister(self._listener)
                self._accept_again = time.monotonic() + _RETRY_ACCEPT_SECONDS
            return
        peer = _Peer(connection, wire.new_nonce(), time.monotonic())
        self._peers.add(peer)
        self._strangers[peer] = None
        try:
            wire.prepare(connection)
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._send(peer, wire.frame(peer.nonce))
        except OSError:
            self._drop(peer)
        if len(self._strangers) > MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _receive(self, peer: _Peer) -> None:
        data = peer.socket.recv(_RECEIVE_BYTES if peer.proved else wire.MAX_HELLO_BYTES)
        if not data:
            self._drop(peer)
            return
        peer.arrived.feed(data)
        while peer in self._peers and (payload := peer.arrived.next()) is not None:
            if peer.proved:
                self._answer(peer, wire.decode_request(payload))
            else:
                self._welcome(peer, wire.decode_hello(payload))

    def _welcome(self, peer: _Peer, hello: wire.Hello) -> None:
        if hello.version != wire.WIRE_VERSION or not wire.is_proof(hello.proof, self._token, b"client", peer.nonce):
            raise wire.WireError("a stranger")
        peer.proved = True
        del self._strangers[peer]
        peer.arrived.limit = wire.MAX_FRAME_BYTES
        self._send(peer, wire.frame(wire.proof(self._token, b"server", hello.nonce)))

    def _answer(self, peer: _Peer, request: wire.Request) -> None:
        found: dict[str, bytes] = {}
        total = 0
        if isinstance(request, wire.Set):
            self._store.set_many(request.items)
        elif isinstance(request, wire.Get):
            waiting = self._found_or_waiting(peer, request)
            if isinstance(waiting, _Waiting):
                return
            found = waiting
        elif isinstance(request, wire.Delete):
            self._store.delete(*request.keys)
        elif isinstance(request, wire.DeletePrefix):
            self._store.delete_prefix(request.prefix)
        else:
            total = self._store.add(request.key, request.amount)
        self._send(peer, wire.frame(wire.Reply(request.number, found, total)))

    def _found_or_waiting(self, peer: _Peer, request: wire.Get) -> dict[str, bytes] | _Waiting:
        waiting = _Waiting(peer, request.number, Watch((), lambda: None), time.monotonic() + request.timeout)
        waiting.watch = Watch(tuple(request.keys), lambda: self._mark_ready(waiting))
        waits = request.timeout > 0
        found = self._store.found_or_watched(waiting.watch, register=waits)
        if found or not waits:
            return found
        peer.waiting.add(waiting)
        heapq.heappush(self._deadlines, (waiting.deadline, next(self._order), waiting))
        return waiting

    def _mark_ready(self, waiting: _Waiting) -> None:
        """Called by whatever thread sets the key."""
        self._ready.append(waiting)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken already, or has ended
            self._wake.send(b"w")

    def _answer_ready(self) -> None:
        while self._ready:
            waiting = self._ready.popleft()
            if waiting.over:
                continue
            found = self._store.found_or_watched(waiting.watch)
            if found:  # else it has been deleted again, and the call waits on
                self._end_waiting(waiting, found)

    def _answer_late(self) -> None:
        now = time.monotonic()
        while self._deadlines and (self._deadlines[0][2].over or self._deadlines[0][0] <= now):
            _, _, waiting = heapq.heappop(self._deadlines)
            if not waiting.over:
                self._end_waiting(waiting, {})

    def _end_waiting(self, waiting: _Waiting, found: dict[str, bytes]) -> None:
        waiting.over = True
        waiting.peer.waiting.discard(waiting)
        self._store.forget(waiting.watch)
        try:
            self._send(waiting.peer, wire.frame(wire.Reply(waiting.number, found)))
        except (OSError, ValueError):
            self._drop(waiting.peer)

    def _drop_silent(self) -> None:
        """Strangers that take too long; and lets peers in again, if there was no room before."""
        now = time.monotonic()
        while self._strangers and (first := next(iter(self._strangers))).since + HELLO_SECONDS <= now:
            self._drop(first)
        if self._accept_again is not None and self._accept_again <= now:
            self._accept_again = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _send(self, peer: _Peer, data: bytes) -> None:
        if not peer.unsent:
            try:
                sent = peer.socket.send(data)
            except BlockingIOError:
                sent = 0
            data = data[sent:]
            if not data:
                return
            self._selector.modify(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        peer.unsent += data

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            sent = peer.socket.send(memoryview(peer.unsent)[: 1 << 20].tobytes())
            del peer.unsent[:sent]
        if not peer.unsent:
            self._selector.modify(peer.socket, selectors.EVENT_READ, peer)

    def _drop(self, peer: _Peer) -> None:
        for waiting in peer.waiting:
            waiting.over = True
            self._store.forget(waiting.watch)
        peer.waiting.clear()
        self._strangers.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        with self._changed:
            self._peers.discard(peer)
            self._changed.notify_all()
