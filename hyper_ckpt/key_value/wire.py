"""What server and client of the key-value store send each other: frames of at most 64 MiB, decoded by msgspec.

The server greets with random bytes. The client proves with them that it knows the job's token, and the server proves
the same to the client, so that neither a stranger nor another job's server is taken for one of the job. The token
itself is never sent.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

import msgspec

MAX_FRAME_BYTES = 64 << 20
MAX_HELLO_BYTES = 256
"""What is read of a peer that has not proved that it knows the token."""
NONCE_BYTES = 32
WIRE_VERSION = 1
_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The peer does not speak this protocol, or not this version of it."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The client's answer to the server's greeting."""

    version: int
    proof: bytes
    nonce: bytes


class Set(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    number: int
    items: dict[str, bytes]


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Answered as soon as one of the keys is set, at the latest after `timeout` seconds."""

    number: int
    keys: list[str]
    timeout: float


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    number: int
    keys: list[str]


class DeletePrefix(msgspec.Struct, frozen=True, array_like=True, tag="prefix"):
    number: int
    prefix: str


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    number: int
    key: str
    amount: int


Request = Set | Get | Delete | DeletePrefix | Add


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the request of this number."""

    number: int
    found: dict[str, bytes] = {}
    total: int = 0


_encoder = msgspec.msgpack.Encoder()
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: object) -> bytes:
    """A message as it is sent.

    Raises:
        ValueError: it is too long.
    """
    payload = message if isinstance(message, bytes) else _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes: the key-value store takes {MAX_FRAME_BYTES} at most")
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Bytes that arrived, cut into frames.

    Args:
        limit: bytes of the largest frame that is taken.
    """

    def __init__(self, limit: int = MAX_HELLO_BYTES) -> None:
        self.limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes what arrived."""
        self._data += data

    def next(self) -> bytes | None:
        """The next whole frame, without its length; None until it has arrived.

        Raises:
            WireError: it is longer than the limit.
        """
        if len(self._data) < _LENGTH.size:
            return None
        size = _LENGTH.unpack_from(self._data)[0]
        if size > self.limit:
            raise WireError(f"a frame of {size} bytes, where {self.limit} are taken at most")
        end = _LENGTH.size + size
        if len(self._data) < end:
            return None
        payload = bytes(memoryview(self._data)[_LENGTH.size : end])
        del self._data[:end]
        return payload


def proof(token: bytes, role: bytes, nonce: bytes) -> bytes:
    """What only a peer that has the token can compute."""
    return hmac.digest(token, role + nonce, "sha256")


def is_proof(given: bytes, token: bytes, role: bytes, nonce: bytes) -> bool:
    """Whether a peer's proof is right; takes the same time for every wrong one."""
    return hmac.compare_digest(given, proof(token, role, nonce))


def new_nonce() -> bytes:
    """Random bytes that a peer must answer to."""
    return secrets.token_bytes(NONCE_BYTES)


def prepare(connection: socket.socket) -> None:
    """What every connection needs: no waiting in calls, no delay of small frames, and an end when the peer's host is
    gone without a word."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
