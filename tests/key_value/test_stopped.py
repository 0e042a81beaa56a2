"""A server that is stopped, killed or forked: every call ends, and what can go on does."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_ckpt.errors import RankFailedError, RankTimeoutError
from hyper_ckpt.key_value import Address, KeyValueClient, KeyValueServer
from hyper_ckpt.key_value.connection import Connection

SERVED = str(Path(__file__).with_name("_served.py"))


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, SERVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(20)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def address_of(process: subprocess.Popen[bytes]) -> Address:
    assert process.stdout is not None
    return Address.decoded(process.stdout.readline())


def stop(process: subprocess.Popen[bytes]) -> None:
    """Returns when all its threads have stopped."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def calls(client: KeyValueClient) -> dict[str, Callable[[], object]]:
    return {
        "set": lambda: client.set("key", b"1"),
        "get": lambda: client.get("key"),
        "get that waits": lambda: client.get("never", 0.2),
        "get many": lambda: client.get_many(["key", "other"]),
        "delete": lambda: client.delete("other"),
        "delete prefix": lambda: client.delete_prefix("other"),
        "add": lambda: client.add("number", 1),
    }


def test_calls_on_a_stopped_server_end_and_later_ones_find_it_again(process: subprocess.Popen[bytes]) -> None:
    address = address_of(process)
    patience = 20.0
    client = KeyValueClient(address, lambda: patience)
    client.set("key", b"1")
    stop(process)
    patience = 0.3
    for name, call in calls(client).items():
        with pytest.raises(RankTimeoutError, match="has not answered") as caught:
            call()
        assert caught.value.ranks == (0,), name
    with pytest.raises(RankTimeoutError):
        KeyValueClient(address, lambda: 0.3).get("key")  # the kernel still takes connections
    patience = 1000.0  # but it is not waited for as long again: the test's own limit is far below
    with pytest.raises(RankTimeoutError):
        client.get("key")
    os.kill(process.pid, signal.SIGCONT)
    while True:  # the first may still come too early
        try:
            assert client.get("key") == b"1"
            break
        except RankTimeoutError:
            continue
    for call in calls(client).values():
        call()


def test_what_no_longer_fits_into_the_kernels_buffers_ends_too(process: subprocess.Popen[bytes]) -> None:
    client = KeyValueClient(address_of(process), lambda: 0.3)
    client.within(lambda: 20.0).set("key", b"1")
    stop(process)
    for _ in range(3):
        with pytest.raises(RankTimeoutError):
            client.set("large", bytes(30 << 20))
    os.kill(process.pid, signal.SIGCONT)
    assert client.within(lambda: 20.0).get("key", 20.0) == b"1"


def raised_by(call: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_the_death_of_the_server_ends_calls_that_wait(process: subprocess.Popen[bytes]) -> None:
    client = KeyValueClient(address_of(process), lambda: 1000.0)
    waiting = [raised_by(lambda: client.get("never", 1000.0)) for _ in range(3)]
    client.set("key", b"1")
    process.kill()
    for thread, raised in waiting:
        thread.join(30)
        assert [type(error) for error in raised] == [RankFailedError]
    with pytest.raises(RankFailedError, match="is gone"):
        client.get("key")


def test_a_client_that_hangs_up_ends_its_own_calls(process: subprocess.Popen[bytes]) -> None:
    client = KeyValueClient(address_of(process), lambda: 1000.0)
    client.set("key", b"1")
    thread, raised = raised_by(lambda: client.get("never", 1000.0))
    while thread.is_alive() and not raised:
        client.close()
        thread.join(0.05)
    assert [type(error) for error in raised] == [RankFailedError]


def in_child(action: Callable[[], bool]) -> bool:
    """What `action` returns in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if action() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_connection_of_its_own(process: subprocess.Popen[bytes]) -> None:
    client = KeyValueClient(address_of(process), lambda: 20.0)
    client.set("parent", b"1")
    assert in_child(lambda: client.get("parent") == b"1" and client.add("children", 1) == 1)
    assert client.get_many(["parent", "children"]) == {"parent": b"1", "children": b"1"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_do_not_keep_a_server_alive() -> None:
    server = KeyValueServer("127.0.0.1")
    client = KeyValueClient(server.address, lambda: 20.0)
    client.set("key", b"1")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # lives on, as data loaders do
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        assert client.get("key") == b"1"
        server.close()
        with pytest.raises(RankFailedError, match="is gone"):
            client.get("never", 20.0)
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(pid, 0)


def test_a_client_that_hangs_up_while_a_call_sends(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst moment: the connection is there, and nothing has been sent."""
    client = KeyValueClient(address_of(process), lambda: 20.0)
    client.set("key", b"1")
    send = Connection.send

    def closed_before(self: Connection, *args: Any) -> None:
        client.close()
        send(self, *args)

    monkeypatch.setattr(Connection, "send", closed_before)
    with pytest.raises(RankFailedError):
        client.get("key")
    monkeypatch.undo()
    assert client.get("key") == b"1"
