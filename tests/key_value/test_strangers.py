"""Who may use the key-value store: those with the job's token. What others send does no harm."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_ckpt.errors import RankFailedError, RankTimeoutError
from hyper_ckpt.key_value import Address, KeyValueClient, KeyValueServer, server_loop, wire

SERVED = str(Path(__file__).with_name("_served.py"))


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    server = KeyValueServer("127.0.0.1")
    server.set("secret", b"value")
    yield server
    server.close()


def connected(address: Address) -> socket.socket:
    stranger = socket.create_connection((address.host, address.port), 20)
    stranger.settimeout(20)
    return stranger


def all_of(stranger: socket.socket) -> bytes:
    """What the server sends until it hangs up."""
    data = b""
    with stranger, contextlib.suppress(ConnectionResetError):
        while more := stranger.recv(4096):
            data += more
    return data


def hello(token: str, greeting: bytes, version: int = wire.WIRE_VERSION) -> bytes:
    proof = wire.proof(token.encode(), b"client", greeting)
    return wire.frame(wire.Hello(version, proof, wire.new_nonce()))


JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + os.urandom(200),
    os.urandom(4096),
    struct.pack(">I", 0),
    struct.pack(">I", 5) + b"\xc1" * 5,
    struct.pack(">I", 0xFFFFFFFF) + b"x" * 100_000,
    wire.frame(wire.Set(1, {"secret": b"changed"})),
    wire.frame(wire.Get(1, ["secret"], 0.0)),
    wire.frame(wire.DeletePrefix(1, "")),
    wire.frame(wire.Hello(wire.WIRE_VERSION, b"", b"")),
    hello("guessed", b"\0" * wire.NONCE_BYTES),
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_junk_ends_its_connection_and_nothing_else(server: KeyValueServer, junk: bytes) -> None:
    client = KeyValueClient(server.address, lambda: 20.0)
    assert client.get("secret") == b"value"
    stranger = connected(server.address)
    with contextlib.suppress(OSError):  # it may hang up while we still talk
        stranger.sendall(junk + wire.frame(wire.Set(2, {"secret": b"changed"})))
    assert len(all_of(stranger)) <= 4 + wire.NONCE_BYTES, "a stranger gets a greeting and nothing else"
    assert client.get("secret") == b"value"
    assert server.keys() == ["secret"]


def test_a_greeting_is_good_for_one_connection(server: KeyValueServer) -> None:
    """What a rank has sent is of no use to those who have overheard it."""
    first, second = connected(server.address), connected(server.address)
    said = hello(server.address.token, first.recv(36)[4:])
    second.sendall(said)
    assert len(all_of(second)) <= 36
    with first:
        first.sendall(said)
        assert len(first.recv(36)) == 36


def test_another_version_or_token_is_refused(server: KeyValueServer) -> None:
    stranger = connected(server.address)
    stranger.sendall(hello(server.address.token, stranger.recv(36)[4:], version=99))
    assert all_of(stranger) == b""
    client = KeyValueClient(Address(server.address.host, server.address.port, "guessed"), lambda: 20.0)
    with pytest.raises(RankFailedError, match="rank 0"):
        client.get("secret")


@pytest.mark.parametrize("junk", [b"\xc1", b"", b"\x93\xa3set\x01\x02", os.urandom(300)])
def test_junk_of_one_that_knows_the_token_ends_its_connection(server: KeyValueServer, junk: bytes) -> None:
    member = connected(server.address)
    member.sendall(hello(server.address.token, member.recv(36)[4:]))
    assert len(member.recv(36)) == 36
    member.sendall(wire.frame(junk))
    all_of(member)
    assert server.keys() == ["secret"]


def test_silent_and_slow_strangers_are_dropped(server: KeyValueServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_loop, "HELLO_SECONDS", 0.3)
    silent, slow = connected(server.address), connected(server.address)
    client = KeyValueClient(server.address, lambda: 20.0)

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for _ in range(400):
                slow.sendall(b"\0")
                time.sleep(0.05)

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    assert client.get("secret") == b"value"
    assert len(all_of(silent)) == len(all_of(slow)) == 36
    thread.join(20)
    assert client.get("secret") == b"value"


def test_strangers_give_way_to_later_ones(server: KeyValueServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_loop, "MAX_STRANGERS", 8)
    strangers = [connected(server.address) for _ in range(20)]
    assert len(all_of(strangers[0])) <= 36
    client = KeyValueClient(server.address, lambda: 20.0)
    assert client.get("secret") == b"value"
    for stranger in strangers:
        stranger.close()


def test_a_server_without_descriptors_serves_those_that_are_in() -> None:
    process = subprocess.Popen([sys.executable, SERVED, "40"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = Address.decoded(process.stdout.readline())
        first = KeyValueClient(address, lambda: 20.0)
        first.set("key", b"value")
        strangers = [connected(address) for _ in range(60)]
        assert first.get("key") == b"value"
        later = KeyValueClient(address, lambda: 20.0)
        for stranger in strangers:
            stranger.close()
        assert later.get("key") == b"value"
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


class Impostor:
    """Listens where rank 0 should be."""

    def __init__(self, says: bytes, then_hangs_up: bool) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self.socket.getsockname()[1])
        self._says, self._hangs_up, self._open = says, then_hangs_up, list[socket.socket]()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):  # macOS: not connected
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept, which a close alone does not
        self.socket.close()
        self._thread.join(20)
        for each in self._open:
            each.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
                connection.sendall(self._says)
            except OSError:
                return
            if self._hangs_up:
                connection.close()
            else:
                self._open.append(connection)


@pytest.mark.parametrize(
    ("says", "hangs_up"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"", True),
        (wire.frame(b"\0" * wire.NONCE_BYTES), True),
        (wire.frame(b"short"), False),
        (wire.frame(b"\0" * wire.NONCE_BYTES) + wire.frame(b"\0" * 32), False),
    ],
)
def test_what_is_not_this_jobs_server_is_not_believed(says: bytes, hangs_up: bool) -> None:
    impostor = Impostor(says, hangs_up)
    with pytest.raises(RankFailedError, match="rank 0"):
        KeyValueClient(impostor.address, lambda: 20.0).get("key")
    impostor.close()


def test_a_peer_that_says_nothing_is_given_up_in_time() -> None:
    impostor = Impostor(b"", False)
    client = KeyValueClient(impostor.address, lambda: 0.3)
    for _ in range(2):
        with pytest.raises(RankTimeoutError, match="has not answered") as caught:
            client.set("key", b"value")
        assert caught.value.ranks == (0,)
    impostor.close()
