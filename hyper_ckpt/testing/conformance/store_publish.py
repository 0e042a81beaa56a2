"""What `ByteStore.publish` promises: atomic, exclusive, by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hyper_ckpt.contracts.store import ByteStore, Expect
from hyper_ckpt.errors import CheckpointReplacedError
from hyper_ckpt.testing.conformance.check import Part, expect
from hyper_ckpt.testing.conformance.store_objects import holds, lists
from hyper_ckpt.testing.conformance.store_subject import StoreSubject, get, raises
from hyper_ckpt.testing.conformance.threads import at_once
from hyper_ckpt.testing.launch import launch

publishing = Part("publishing")
processes = Part("processes")

_WRITERS = 3
_TURNS = 15
_CHILD = "hyper_ckpt.testing.conformance.store_process"


@publishing
def published_objects_are_there(s: StoreSubject) -> None:
    """`publish` puts an object in place and returns its etag, with and without sync, over nothing and over another."""
    for sync in (False, True):
        name = f"dir/m{sync}"
        first = s.store.publish(name, b"first", Expect.ABSENT, sync=sync)
        info = s.store.stat(name)
        seen = None if info is None else (info.etag, info.size)
        expect(seen == (first, 5), f"stat gives ({first!r}, 5)", f"{info}", "return the etag that stat gives")
        second = s.store.publish(name, b"second", first, sync=sync)
        holds(s.store, name, b"second", "publish with the right etag replaces")
        third = s.store.publish(name, b"third", Expect.ANY, sync=sync)
        info = s.store.stat(name)
        expect(info is not None and info.etag == third, f"stat gives {third!r}", f"{info}", "see publish")
        expect(len({first, second, third}) == 3, "each content has its etag", f"{first, second, third}", "see etags")
        holds(s.store, name, b"third", "publish with ANY replaces")
    s.publish("other", b"")
    lists(s.store, ["dir/mFalse", "dir/mTrue", "other"], "publish leaves nothing beside the objects")


@publishing
def publish_refuses_what_is_not_expected(s: StoreSubject) -> None:
    """What is there is another than expected: CheckpointReplacedError, and it stays."""
    other = s.open()
    old = s.publish("m", b"old", Expect.ABSENT)
    new = other.publish("m", b"new", old, sync=False)
    for wrong in (Expect.ABSENT, old, "", "nonsense"):
        raises(
            lambda wrong=wrong: s.publish("m", b"mine", wrong),  # type: ignore[misc]
            CheckpointReplacedError,
            r"\bm\b",
            f"publish that expects {wrong!r} is refused",
        )
    holds(s.store, "m", b"new", "a refused publish changes nothing")
    lists(s.store, ["m"], "a refused publish leaves nothing beside the object")
    s.store.delete("m")
    raises(lambda: s.publish("m", b"mine", new), CheckpointReplacedError, "", "a deleted object has no etag any more")
    lists(s.store, [], "a refused publish makes nothing")


@publishing
def etags_change_with_every_publish(s: StoreSubject) -> None:
    """A new object has a new etag, also one with the same bytes, also within one tick of the clock."""
    etags = [s.publish("m", b"same") for _ in range(20)]
    expect(len(set(etags)) == len(etags), f"{len(etags)} etags", f"{len(set(etags))}", "add a counter or random bits")


@publishing
def facts_are_of_the_object(s: StoreSubject) -> None:
    """`stat` gives size, etag and the time of the last change, in seconds since the epoch."""
    s.publish("m", b"12345")
    info = s.store.stat("m")
    assert info is not None, "stat gives None for an object that was published"
    same = s.store.stat("m") == info
    recent = abs(info.modified - time.time()) < 24 * 3600
    fine = same and recent and info.size == 5 and isinstance(info.etag, str)
    expect(fine, "size 5, a str as etag, modified now in seconds, twice the same", f"{info}", "see ObjectInfo")


@publishing
def large_objects_are_published(s: StoreSubject) -> None:
    """8 MiB are published whole, and replaced by less."""
    data = bytes(range(256)) * (1 << 15)
    s.publish("m", data)
    holds(s.store, "m", data, "8 MiB are published")
    got = get(s.store, "m", len(data) - 3, 3)
    expect(got == data[-3:], "a range of a published object is read", f"{got!r}", "see read_into")
    s.publish("m", b"less")
    holds(s.store, "m", b"less", "less replaces more")


def one_wins(turns: Sequence[Sequence[str | Exception]], where: str) -> None:
    """Fails unless in each turn exactly one publisher got an etag and all others a CheckpointReplacedError."""
    for turn in turns:
        winners = [each for each in turn if isinstance(each, str)]
        losers = [each for each in turn if isinstance(each, CheckpointReplacedError)]
        expect(
            (len(winners), len(losers)) == (1, len(turn) - 1),
            f"of {len(turn)} publishers {where} at once one wins, the others get CheckpointReplacedError",
            f"{[each if isinstance(each, str) else repr(each) for each in turn]}",
            "compare and put in place in one step: a conditional put of the service, link(2), or a lock",
        )


def _race(stores: list[ByteStore], name: str, expected: Expect | str) -> list[str | Exception]:
    return at_once(
        [
            lambda i=i, store=store: store.publish(name, b"new%d" % i, expected, sync=False)  # type: ignore[misc]
            for i, store in enumerate(stores)
        ]
    )


def _race_in_turns(s: StoreSubject, *, by_token: bool) -> None:
    stores = [s.open() for _ in range(4)]
    for turn in range(20):
        expected = s.publish(f"m{turn:02}", b"old", Expect.ABSENT) if by_token else Expect.ABSENT
        results = _race(stores, f"m{turn:02}", expected)
        one_wins([results], "in threads")
        winner = next(i for i, each in enumerate(results) if isinstance(each, str))
        holds(s.store, f"m{turn:02}", b"new%d" % winner, "the winner's bytes are there")
    lists(s.store, [f"m{turn:02}" for turn in range(20)], "losers leave nothing")


@publishing
def of_publishers_of_a_new_object_one_wins(s: StoreSubject) -> None:
    """Of several publishers at once that expect ABSENT exactly one succeeds, and its bytes are there."""
    _race_in_turns(s, by_token=False)


@publishing
def of_publishers_by_token_one_wins(s: StoreSubject) -> None:
    """Of several publishers at once that expect one etag exactly one succeeds, and its bytes are there."""
    _race_in_turns(s, by_token=True)


@publishing
def readers_see_old_or_new(s: StoreSubject) -> None:
    """While an object is replaced, readers get the old bytes whole or the new bytes whole, never an error."""
    writer, reader = s.open(), s.open()
    contents = [bytes([i]) * (1000 * (1 + i % 3)) for i in range(100)]
    writer.publish("m", contents[0], Expect.ABSENT, sync=False)

    done = threading.Event()

    def write() -> None:
        try:
            for data in contents:
                writer.publish("m", data, Expect.ANY, sync=False)
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            got = reader.read("m")
            assert got in contents, f"{len(got)} bytes of {sorted(set(got))}"

    problems = [each for each in at_once([write, read, read]) if each is not None]
    expect(
        not problems,
        "readers see the old bytes whole or the new bytes whole",
        f"{problems[:1]}",
        "publish: put the bytes in place in one step (beside it, then rename); read: get the object in one request, "
        "or compare its etag before and after, as the inherited one does",
    )


@processes
def writers_in_several_processes(s: StoreSubject) -> None:
    """Several processes write objects below one root at the same time; all are there, whole."""
    results = launch(_WRITERS, f"{_CHILD}:write", [s.open(), _TURNS])
    names = sorted(name for each in results for name in each.result)
    lists(s.store, names, "what all processes have written is listed", "dir/")
    for name in names:
        holds(s.store, name, name.encode() * 100, "each object is whole")


@processes
def publishers_in_several_processes(s: StoreSubject) -> None:
    """Of publishers in several processes at once exactly one succeeds, by absence and by token."""
    for kind in ("new", "token"):
        names = [f"{kind}/{turn}" for turn in range(_TURNS)]
        etags = [s.publish(name, b"old") for name in names] if kind == "token" else None
        results = launch(_WRITERS, f"{_CHILD}:publish", [s.open(), names, etags])
        turns = [[each.result[turn] for each in results] for turn in range(_TURNS)]
        one_wins(turns, "in processes")
        for name, outcomes in zip(names, turns, strict=True):
            winner = next(rank for rank, each in enumerate(outcomes) if isinstance(each, str))
            holds(s.store, name, b"of %d" % winner, "the winner's bytes are there")
