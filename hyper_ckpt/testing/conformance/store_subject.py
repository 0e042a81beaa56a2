"""What the checks of a store work on, and what they do with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from hyper_ckpt.contracts.store import Bytes, ByteStore, Expect
from hyper_ckpt.testing.conformance.blame import where
from hyper_ckpt.testing.conformance.check import fail


@dataclass(frozen=True)
class StoreSubject:
    """A root that nobody has used.

    Args:
        open: opens a store over it, each time a new one.
    """

    open: Callable[[], ByteStore]

    @cached_property
    def store(self) -> ByteStore:
        """The store for checks that need only one."""
        return self.open()

    def publish(self, name: str, data: bytes, expect: Expect | str = Expect.ANY) -> str:
        """Publishes without sync. Returns the new etag."""
        return self.store.publish(name, data, expect, sync=False)


def put(store: ByteStore, name: str, data: Bytes, *, sync: bool = False) -> None:
    """Writes a whole object through a sink."""
    sink = store.create(name, memoryview(data).nbytes)
    sink.write_at(0, data)
    sink.close(sync=sync)


def get(store: ByteStore, name: str, start: int, length: int) -> bytes:
    """Reads one range."""
    data = bytearray(length)
    store.read_into(name, [(start, length)], [memoryview(data)])
    return bytes(data)


def raises(call: Callable[[], object], kind: type[Exception], text: str, promised: str, change: str = "") -> None:
    """Fails unless the call raises an error of this kind, with `text` (a regular expression) in its message.

    Args:
        change: what to change, if it does not; empty: to raise `kind`.
    """
    try:
        result = call()
    except kind as error:
        if not re.search(text, str(error)):
            fail(f"{promised}; the message has {text!r}", f"the message {str(error)!r}", "say it, and name the object")
        return
    except Exception as error:
        seen = "\n".join([f"{type(error).__name__}: {error}", *where(error)])
        fail(promised, seen, change or f"raise {kind.__name__}, with this as its cause")
    fail(promised, f"it returned {result!r:.60}", change or f"raise {kind.__name__}")
