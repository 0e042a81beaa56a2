"""Server and client of the key-value store: what they promise while all goes well."""

import gc
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from hyper_ckpt.contracts.platform import KeyValueStore, packed, unpacked
from hyper_ckpt.errors import PlatformError, RankFailedError
from hyper_ckpt.key_value import Address, InProcessKeyValueStore, KeyValueClient, KeyValueServer, own_address, wire
from hyper_ckpt.key_value.addresses import LISTEN_VARIABLE


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    server = KeyValueServer("127.0.0.1")
    yield server
    server.close()


def client_of(server: KeyValueServer, patience: float = 30.0) -> KeyValueClient:
    return KeyValueClient(Address.decoded(server.address.encoded()), lambda: patience)


@pytest.fixture(params=["in process", "rank 0", "another rank"])
def store(request: pytest.FixtureRequest, server: KeyValueServer) -> KeyValueStore:
    if request.param == "in process":
        return InProcessKeyValueStore()
    return server if request.param == "rank 0" else client_of(server)


def test_values_are_seen_and_forgotten(store: KeyValueStore) -> None:
    store.set_many({"a": b"\0\xff", "empty": b"", "b": b"1"})
    store.set("b", b"2")
    assert store.get_many(["a", "absent", "empty", "b"]) == {"a": b"\0\xff", "empty": b"", "b": b"2"}
    assert store.get("absent") is None
    store.delete("a", "absent")
    store.delete()
    assert store.get_many(["a", "b"]) == {"b": b"2"}
    assert store.get_many([]) == {}


def test_thousands_of_keys_and_their_prefix(store: KeyValueStore) -> None:
    many = {f"many/{n}": b"%d" % n for n in range(5000)}
    store.set_many({**many, "many": b"stays", "manyfold/1": b"stays"})
    assert store.get_many(many) == many
    store.delete_prefix("many/")
    assert store.get_many(many) == {}
    assert len(store.get_many(["many", "manyfold/1"])) == 2


def test_a_get_waits_for_any_of_its_keys(store: KeyValueStore) -> None:
    assert store.get("never", 0.05) is None
    answers: list[dict[str, bytes]] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(store.get_many([f"never/{n}", "first", "second"], 30.0)))
        for n in range(10)
    ]
    for thread in threads:
        thread.start()
    store.set("other", b"")  # a call that waits holds up no other one
    store.set_many({"first": b"1", "second": b"2"})
    for thread in threads:
        thread.join(30)
    assert answers == [{"first": b"1", "second": b"2"}] * 10


def test_a_value_that_is_gone_again_does_not_end_a_wait(store: KeyValueStore) -> None:
    answers: list[bytes | None] = []
    thread = threading.Thread(target=lambda: answers.append(store.get("key", 30.0)))
    thread.start()
    for _ in range(50):
        store.set("key", b"gone")
        store.delete("key")
    store.set("key", b"gone")
    thread.join(30)
    assert answers == [b"gone"]


def test_numbers_are_counted_once(server: KeyValueServer) -> None:
    clients = [client_of(server) for _ in range(4)]
    sums: list[int] = []
    threads = [threading.Thread(target=lambda c=c: sums.extend(c.add("n", 2) for _ in range(50))) for c in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(sums) == list(range(2, 402, 2))
    assert server.add("n", 0) == 400


def test_many_clients_at_once(server: KeyValueServer) -> None:
    clients = [client_of(server) for _ in range(300)]
    threads = [threading.Thread(target=c.set, args=(f"from/{n}", b"%d" % n)) for n, c in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert server.get_many([f"from/{n}" for n in range(300)]) == {f"from/{n}": b"%d" % n for n in range(300)}
    assert threading.active_count() < 100, "one thread serves them all"


def test_large_values_travel_and_too_large_ones_are_refused(server: KeyValueServer) -> None:
    client, large = client_of(server), bytes(range(256)) * (20 << 12)
    client.set("large", large)
    assert client.get("large") == server.get("large") == large
    with pytest.raises(PlatformError, match="takes 67108864 at most"):
        client.set("larger", bytes(wire.MAX_FRAME_BYTES))
    assert client.get_many(["larger"]) == {}


def test_an_interrupted_call_does_no_harm(server: KeyValueServer) -> None:
    client = client_of(server)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                client.get("never", 30.0)
            client.set("key", b"value")
            assert client.get("key") == b"value"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server = KeyValueServer("::1")
    client = client_of(server)
    client.set("key", b"value")
    assert server.get("key") == b"value"
    assert client.own_address == "::1"
    server.close()


def test_it_listens_on_the_address_that_it_tells_and_on_no_other(
    server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.address.port), 5).close()
    with pytest.raises(PlatformError, match=LISTEN_VARIABLE):
        KeyValueServer("192.0.2.1")  # not an address of this host
    monkeypatch.setenv(LISTEN_VARIABLE, "0.0.0.0")
    with pytest.warns(UserWarning, match="listens on all interfaces"):
        wide = KeyValueServer("127.0.0.1")
    socket.create_connection(("127.0.0.2", wide.address.port), 5).close()
    wide.close()


def test_own_address_is_loopback_only_where_the_peer_is() -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"
    assert own_address("no-such-host.invalid")
    assert own_address(None)


@pytest.mark.parametrize("data", [b"", b"junk", b"{}", b'{"host": 1, "port": 2}', b"\xff" * 50])
def test_what_is_no_address_is_a_documented_error(data: bytes) -> None:
    with pytest.raises(RankFailedError, match="no address"):
        Address.decoded(data)


def test_the_token_is_not_shown() -> None:
    address = Address("host", 5)
    assert address.token not in repr(address)
    assert address.token != Address("host", 5).token


def test_values_of_ranks_are_decoded_never_run() -> None:
    values = [None, True, -5, 2.5, "ünïcødé", b"\0", [1, [2]], {"a": [b"1"]}]
    assert unpacked(packed(values)) == values
    assert unpacked(packed((1, (2,)))) == [1, [2]]
    for junk in (
        b"",
        b"\xc1",
        packed(values)[:-1],
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"cos\nsystem\n(S'x'\ntR.",
    ):
        with pytest.raises(RankFailedError, match="no value"):
            unpacked(junk)


def test_a_server_that_is_forgotten_ends() -> None:
    server = KeyValueServer("127.0.0.1")
    client = client_of(server)
    client.set("key", b"value")
    del server
    gc.collect()
    with pytest.raises(RankFailedError, match="rank 0") as caught:
        client.get("never", 30.0)
    assert caught.value.ranks == (0,)


def test_a_server_waits_for_its_clients_to_leave() -> None:
    server = KeyValueServer("127.0.0.1")
    client = client_of(server)
    client.set("key", b"value")
    threading.Timer(0.2, client.close).start()
    server.close(patience=30.0)
