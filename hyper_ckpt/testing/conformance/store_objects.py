"""What `ByteStore` promises of objects: written, read, listed, removed."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable

from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.errors import FileSizeError, MissingFileError, StoreError
from hyper_ckpt.testing.conformance.check import Part, expect, fail
from hyper_ckpt.testing.conformance.store_subject import StoreSubject, get, put, raises
from hyper_ckpt.testing.conformance.threads import at_once, spread

objects = Part("objects")

NAMES = (
    "a",
    "dir/b",
    "deep/er/c.safetensors",
    "ünïcødé-名前-😀",
    "with space and 'quotes'",
    "new\nline",
    "-dash",
    ".dot",
)
BAD_NAMES = ("", "/absolute", "../outside", "a/../b", "a//b", "a/", "./a", "a/.", "nul\0", "lone\ud800")


def holds(store: ByteStore, name: str, data: bytes, promised: str) -> None:
    got = store.read(name)
    expect(got == data, promised, f"{got[:60]!r} in place of {data[:60]!r}", f"see how {name!r} is written and read")


def lists(store: ByteStore, wanted: list[str], promised: str, prefix: str = "") -> None:
    got = store.list(prefix)
    expect(got == wanted, f"{promised}: list({prefix!r}) gives {wanted}", f"{got}", "correct list, or what it shows")
    sizes = store.list_sizes() if not prefix else None
    if sizes is not None:
        there = {name: info.size for name in wanted if (info := store.stat(name)) is not None}
        expect(sizes == there, f"{promised}: list_sizes() gives {there}", f"{sizes}", "correct it, or return None")


@objects
def an_unused_root_is_empty(s: StoreSubject) -> None:
    """Nothing is in a root that nobody has used, and asking for it is no error."""
    lists(s.store, [], "an unused root is empty")
    facts = s.store.stat("a")
    expect(facts is None, "stat gives None for an absent object", f"{facts}", "return None")
    s.store.delete("a")
    s.store.sync()
    lists(s.store, [], "delete and sync make nothing")


@objects
def what_was_written_is_read(s: StoreSubject) -> None:
    """An object that was written through a sink is listed, has its size, and is read byte for byte; any name."""
    for name in NAMES:
        put(s.store, name, b"0123456789", sync=True)
        s.store.sync()
        info = s.store.stat(name)
        expect(info is not None and info.size == 10, f"stat({name!r}) says 10 bytes", f"{info}", "see stat")
        holds(s.store, name, b"0123456789", f"{name!r} is read as it was written")
    lists(s.store, sorted(NAMES), "names are listed as they were given, sorted")


@objects
def bad_names_are_refused(s: StoreSubject) -> None:
    """A name that is absolute, leaves the root, has empty parts or cannot be encoded is refused by every call."""
    for name in BAD_NAMES:
        calls: dict[str, Callable[[], object]] = {
            "create": lambda name=name: s.store.create(name, 1),  # type: ignore[misc]
            "publish": lambda name=name: s.publish(name, b""),  # type: ignore[misc]
            "read": lambda name=name: s.store.read(name),  # type: ignore[misc]
            "read_into": lambda name=name: get(s.store, name, 0, 1),  # type: ignore[misc]
            "stat": lambda name=name: s.store.stat(name),  # type: ignore[misc]
            "delete": lambda name=name: s.store.delete(name),  # type: ignore[misc]
        }
        for what, call in calls.items():
            raises(call, StoreError, "", f"{what}({name!r}) is refused", "call hyper_ckpt.storage.names.check_name")
    lists(s.store, [], "refused names leave nothing")


@objects
def another_store_of_the_same_root_sees_it(s: StoreSubject) -> None:
    """Two stores that were opened over one root see the same objects, at once."""
    put(s.store, "a", b"1")
    other = s.open()
    expect(other.url == s.store.url, "stores of one root have one url", f"{s.store.url}, {other.url}", "set url")
    holds(other, "a", b"1", "another store reads what one has written")
    put(other, "b", b"2")
    lists(s.store, ["a", "b"], "one store lists what another has written")


@objects
def ranges_are_read(s: StoreSubject) -> None:
    """`read_into` fills each buffer with its own range: out of order, overlapping, empty, the whole."""
    put(s.store, "a", bytes(range(100)))
    ranges = [(10, 5), (15, 5), (0, 1), (99, 1), (50, 0), (15, 30), (0, 100)]
    buffers = [bytearray(length) for _, length in ranges]
    s.store.read_into("a", ranges, [memoryview(buffer) for buffer in buffers])
    wanted = [bytearray(range(start, start + length)) for start, length in ranges]
    wrong = [r for r, got, want in zip(ranges, buffers, wanted, strict=True) if got != want]
    expect(not wrong, "each buffer holds its range", f"wrong for (start, length) {wrong}", "see read_into")


@objects
def what_stays_open_is_read_alike(s: StoreSubject) -> None:
    """By a `reader`, and inside `reading`, also entered twice, every object is read as by `read_into` outside, and so
    it is again behind it."""
    objects = {f"dir/{i}": bytes(range(i, i + 10)) for i in range(100)}
    for name, data in objects.items():
        put(s.store, name, data)

    def wrong() -> list[str]:
        return [name for name, data in objects.items() for _ in range(2) if get(s.store, name, 2, 7) != data[2:9]]

    for name, data in [*objects.items(), *[*objects.items()][:3]]:
        with s.store.reader(name) as read:
            for _ in range(2):
                buffers = [bytearray(3), bytearray(4), bytearray(10), bytearray(0)]
                filled = [read([memoryview(each)], at) for each, at in zip(buffers, (4, 6, 0, 10), strict=True)]
                filled.append(read([memoryview(each) for each in buffers[:2]], 2))
                expect(
                    filled == [3, 4, 10, 0, 7] and [*map(bytes, buffers)] == [data[2:5], data[5:9], data, b""],
                    "a reader fills buffers from where it is asked to, and returns how many bytes it has filled",
                    f"{filled} bytes of 3, 4, 10, 0 and 7, or others",
                    "see reader",
                )
            with contextlib.suppress(OSError, FileSizeError):  # or it fills less
                count = read([memoryview(bytearray(3))], 8)
                expect(count < 3, "what leaves the object is not filled", f"{count} bytes of 2", "see reader")

    def read_gone() -> None:
        with s.store.reader("gone") as read:
            read([memoryview(bytearray(1))], 0)

    raises(read_gone, MissingFileError, "gone", "a reader of an absent object is a MissingFileError")

    with s.store.reading():
        expect(not wrong(), "each object is read inside `reading`", f"wrong are {wrong()[:5]}", "see reading")
        with s.store.reading():
            spread(lambda _: expect(not wrong(), "by 4 threads too", "other bytes", "see reading"), range(4), 4)
        expect(not wrong(), "after it was entered and left inside", f"wrong are {wrong()[:5]}", "count the entries")
        raises(lambda: get(s.store, "gone", 0, 1), MissingFileError, "gone", "an absent object is a MissingFileError")
    s.store.delete("dir/0")
    put(s.store, "dir/0", b"another one")
    holds(s.store, "dir/0", b"another one", "nothing is left open behind it")
    got = get(s.store, "dir/0", 0, 11)
    expect(got == b"another one", "ranges of what was replaced since are read", f"{got!r}", "close it at the end")


@objects
def many_adjacent_ranges_are_read(s: StoreSubject) -> None:
    """Thousands of small ranges one behind the other are read in one call."""
    data = os.urandom(15_000)
    put(s.store, "a", data)
    buffers = [bytearray(5) for _ in range(3000)]
    s.store.read_into("a", [(5 * i, 5) for i in range(3000)], [memoryview(buffer) for buffer in buffers])
    expect(b"".join(buffers) == data, "3,000 ranges are read", "other bytes", "mind limits on the number of pieces")


@objects
def buffers_may_have_any_shape(s: StoreSubject) -> None:
    """What is written, and what is read into, may be memoryviews of several dimensions and any item size."""
    sink = s.store.create("a", 24)
    sink.write_at(0, memoryview(bytes(range(24))).cast("I", (2, 3)))
    sink.close(sync=False)
    data = bytearray(24)
    s.store.read_into("a", [(0, 24)], [memoryview(data).cast("q", (3, 1))])
    expect(data == bytes(range(24)), "bytes in memory order", f"{bytes(data).hex()}", "use memoryview.cast('B')")


@objects
def ranges_must_fit_their_buffers(s: StoreSubject) -> None:
    """A range with another length than its buffer, or a negative start, is refused."""
    put(s.store, "a", b"0123456789")
    for start, length in [(0, 3), (0, 5), (-1, 4)]:
        raises(
            lambda start=start, length=length: s.store.read_into(  # type: ignore[misc]
                "a", [(start, length)], [memoryview(bytearray(4))]
            ),
            Exception,
            "",
            f"read_into of ({start}, {length}) into 4 bytes is refused",
        )


@objects
def a_short_read_is_an_error(s: StoreSubject) -> None:
    """A range that leaves the object is a FileSizeError that names it; it is never filled up with anything."""
    put(s.store, "dir/a", b"0123456789")
    for start, length in [(8, 3), (10, 1), (11, 1), (0, 11), (1 << 40, 1)]:
        call = lambda start=start, length=length: get(s.store, "dir/a", start, length)  # noqa: E731
        raises(call, FileSizeError, "dir/a", f"({start}, {length}) of 10 bytes is a FileSizeError")


@objects
def a_missing_object_is_an_error(s: StoreSubject) -> None:
    """Reading an absent object is a MissingFileError that names it; to delete or stat one is fine."""
    put(s.store, "file", b"1")
    for name in ["gone", "dir/gone"]:
        facts = s.store.stat(name)
        expect(facts is None, f"stat({name!r}) is None", f"{facts}", "return None for an absent object")
        s.store.delete(name)
        calls: list[Callable[[], object]] = [
            lambda name=name: s.store.read(name),  # type: ignore[misc]
            lambda name=name: get(s.store, name, 0, 1),  # type: ignore[misc]
            lambda name=name: s.store.read_into(name, [], []),  # type: ignore[misc]
        ]
        for call in calls:
            raises(call, MissingFileError, name, f"reading {name!r} is a MissingFileError")


@objects
def an_empty_object_is_an_object(s: StoreSubject) -> None:
    """An object of no bytes can be written, listed, looked up and read."""
    put(s.store, "a", b"")
    info = s.store.stat("a")
    expect(info is not None and info.size == 0, "stat says 0 bytes", f"{info}", "see stat")
    holds(s.store, "a", b"", "an empty object is read")
    s.store.read_into("a", [(0, 0)], [memoryview(bytearray())])
    lists(s.store, ["a"], "an empty object is listed")


@objects
def large_objects_by_several_threads(s: StoreSubject) -> None:
    """A sink takes writes from several threads in any order, and `read_into` serves several threads; 32 MiB."""
    block, blocks = 1 << 20, 32
    data = os.urandom(block * blocks)
    sink = s.store.create("a", len(data))
    parts = reversed(range(blocks))
    spread(lambda i: sink.write_at(i * block, memoryview(data)[i * block : (i + 1) * block]), parts, 8)
    sink.close(sync=False)
    read = spread(lambda i: get(s.store, "a", i * block, block), range(blocks), 8)
    wrong = [i for i in range(blocks) if read[i] != data[i * block : (i + 1) * block]]
    expect(not wrong, "32 MiB are written and read by 8 threads", f"MiB {wrong} differ", "see Sink.write_at")


@objects
def lists_by_prefix(s: StoreSubject) -> None:
    """`list(prefix)` gives the names that start with it, letter by letter and sorted; no directories."""
    for name in ["b", "a/2", "a/1", "a-b", "ab/c"]:
        put(s.store, name, b"")
    lists(s.store, ["a-b", "a/1", "a/2", "ab/c", "b"], "all names, sorted")
    lists(s.store, ["a-b", "a/1", "a/2", "ab/c"], "a prefix is letters, not a directory", "a")
    lists(s.store, ["a/1", "a/2"], "a prefix may end in /", "a/")
    lists(s.store, ["a/2"], "a prefix may be a whole name", "a/2")
    for prefix in ("c", "../", "/"):
        lists(s.store, [], "a prefix of nothing", prefix)


@objects
def long_lists_are_complete(s: StoreSubject) -> None:
    """More than a thousand names are listed: services that list in pages are asked for all pages."""
    names = [f"many/{i:04}" for i in range(1050)]
    spread(lambda name: s.publish(name, b"x"), names, 16)
    got = s.store.list("many/")
    expect(got == names, f"{len(names):,} names", f"{len(got):,} names", "ask for the next page until there is none")


@objects
def deleted_objects_are_gone(s: StoreSubject) -> None:
    """`delete` removes one object, not those below its name; it may be written again."""
    put(s.store, "dir/a", b"1")
    put(s.store, "dir/b", b"2")
    s.store.delete("dir")
    s.store.delete("dir/a")
    lists(s.store, ["dir/b"], "delete removes one object")
    gone = s.store.stat("dir/a")
    expect(gone is None, "stat of a deleted object is None", f"{gone}", "see delete")
    s.store.delete("dir/b")
    s.store.delete("dir/b")
    lists(s.store, [], "all are deleted")
    put(s.store, "dir/a", b"3")
    holds(s.store, "dir/a", b"3", "a deleted name is free again")


@objects
def creating_beside_deleting(s: StoreSubject) -> None:
    """Objects may be created while others beside them are deleted: parents that vanish are no error."""

    def churn(name: str) -> None:
        for _ in range(50):
            put(s.store, f"dir/{name}", b"1")
            s.store.delete(f"dir/{name}")

    got = at_once([lambda i=i: churn(str(i)) for i in range(4)])  # type: ignore[misc]
    errors = [each for each in got if each is not None]
    if errors:
        fail("objects are created while others are deleted", f"{errors[0]!r}", "make missing parents again")
    lists(s.store, [], "all are deleted")


@objects
def it_can_be_pickled(s: StoreSubject) -> None:
    """A pickled store opens the same root."""
    put(s.store, "a", b"1")
    try:
        twin = pickle.loads(pickle.dumps(s.store))
    except Exception as error:
        fail("a store can be pickled", f"{error!r}", "rebuild it from its url: define __reduce__")
    expect(twin.url == s.store.url, "a pickled store has the same url", f"{twin.url}", "rebuild it from its url")
    holds(twin, "a", b"1", "a pickled store reads the same objects")
