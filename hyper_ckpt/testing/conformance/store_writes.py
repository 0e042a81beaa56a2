"""What `ByteStore` promises of sinks: objects while they are written."""

from __future__ import annotations

from hyper_ckpt.errors import StoreError
from hyper_ckpt.testing.conformance.check import Part, expect
from hyper_ckpt.testing.conformance.store_objects import holds, lists
from hyper_ckpt.testing.conformance.store_subject import StoreSubject, put, raises
from hyper_ckpt.testing.conformance.threads import at_once

sinks = Part("sinks")


@sinks
def an_existing_name_is_not_created_again(s: StoreSubject) -> None:
    """Creating an object under a name that is taken is a StoreError, at the latest when it is closed."""
    put(s.store, "a", b"old")
    raises(lambda: put(s.store, "a", b"new"), StoreError, r"\ba\b", "an existing name is refused")
    holds(s.store, "a", b"old", "a refused create changes nothing")


@sinks
def writes_stay_inside(s: StoreSubject) -> None:
    """Writes that leave the object's size are refused, with its name; an empty one at the end is inside."""
    sink = s.store.create("dir/a", 4)
    for offset, data in [(-1, b"x"), (0, b"12345"), (4, b"x"), (5, b"")]:
        raises(
            lambda offset=offset, data=data: sink.write_at(offset, data),  # type: ignore[misc]
            StoreError,
            "dir/a",
            f"{len(data)} bytes at {offset} of 4 are refused",
        )
    sink.write_at(4, b"")
    sink.write_at(0, b"1234")
    sink.close(sync=False)
    holds(s.store, "dir/a", b"1234", "refused writes change nothing")


@sinks
def an_object_has_the_size_it_was_made_for(s: StoreSubject) -> None:
    """A closed object has exactly the size that `create` was told, whatever of it was written."""
    sink = s.store.create("a", 100)
    sink.write_at(10, b"middle")
    sink.close(sync=False)
    info = s.store.stat("a")
    expect(info is not None and info.size == 100, "100 bytes", f"{info}", "make room first, in create")
    read = s.store.read("a")
    expect(read[10:16] == b"middle" and len(read) == 100, "what was written, at its place", f"{read!r}", "see Sink")


@sinks
def a_closed_sink_takes_no_more(s: StoreSubject) -> None:
    """A closed sink refuses writes and a second close."""
    sink = s.store.create("a", 4)
    sink.write_at(0, b"1234")
    sink.close(sync=False)
    raises(lambda: sink.write_at(0, b"5678"), StoreError, r"\ba\b", "a closed sink refuses writes")
    raises(lambda: sink.close(sync=False), StoreError, "", "a closed sink refuses another close")
    holds(s.store, "a", b"1234", "what comes after close changes nothing")


@sinks
def abort_removes_the_object(s: StoreSubject) -> None:
    """`abort` removes what was written, may be called again, and touches nothing that came later."""
    sink = s.store.create("dir/a", 4)
    sink.write_at(0, b"12")
    sink.abort()
    sink.abort()
    lists(s.store, [], "abort removes the object")
    raises(lambda: sink.write_at(0, b"1234"), StoreError, "", "an aborted sink refuses writes")
    put(s.store, "dir/a", b"again")
    sink.abort()
    holds(s.store, "dir/a", b"again", "a late abort leaves a later object of the name alone")


@sinks
def abort_after_close_removes_the_object(s: StoreSubject) -> None:
    """`abort` may follow `close`: the object is removed."""
    sink = s.store.create("a", 4)
    sink.close(sync=False)
    sink.abort()
    lists(s.store, [], "abort after close removes the object")


@sinks
def abort_while_threads_write(s: StoreSubject) -> None:
    """`abort` may come while other threads write: they get a StoreError, and the object is gone."""
    sink = s.store.create("a", 1 << 20)

    def write() -> None:
        for _ in range(20):
            sink.write_at(0, bytes(1 << 20))

    results = at_once([write, write, sink.abort])
    wrong = [result for result in results if result is not None and not isinstance(result, StoreError)]
    expect(not wrong, "writers get a StoreError, abort nothing", f"{wrong}", "guard the sink's handle with a lock")
    lists(s.store, [], "the object is gone")


@sinks
def room_is_made_first(s: StoreSubject) -> None:
    """`create` of more than there is room for fails at once, and leaves nothing."""
    raises(lambda: s.store.create("dir/a", 1 << 60), StoreError, "dir/a", "create of 2**60 bytes is a StoreError")
    lists(s.store, [], "a failed create leaves nothing")


@sinks
def unfinished_objects_disturb_nobody(s: StoreSubject) -> None:
    """While an object is written its name may be listed or not; the others are, and it is once it is closed."""
    put(s.store, "before", b"1")
    sink = s.store.create("during", 4)
    sink.write_at(0, b"12")
    put(s.store, "other", b"2")
    got = s.store.list()
    finished = [name for name in got if name != "during"]
    expect(finished == ["before", "other"], "finished objects are listed, and only they", f"{got}", "see list")
    sink.write_at(2, b"34")
    sink.close(sync=False)
    lists(s.store, ["before", "during", "other"], "a closed object is listed")
    holds(s.store, "during", b"1234", "a closed object is read")
