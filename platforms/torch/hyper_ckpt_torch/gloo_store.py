"""The store through which members of a gloo group find each other: our key-value store, in torch's form.

torch's own TCPStore would listen on all interfaces, and has no deadline that holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from hyper_ckpt.contracts.platform import KeyValueStore
from hyper_ckpt.errors import RankTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # type checkers don't see the public name
else:
    from torch.distributed import Store


class GlooStore(Store):
    """What gloo asks of a store while it connects: `set`, `get`, `wait`.

    torch keeps only its own half of this object: whoever made it must keep it while torch may call it.

    Args:
        store: where the values are.
        prefix: of this group's keys.
        seconds: how long a call waits for a member at most.
    """

    def __init__(self, store: KeyValueStore, prefix: str, seconds: Callable[[], float]) -> None:
        super().__init__()
        self._store, self._prefix, self._seconds = store, prefix, seconds

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._prefix + key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        value = self._store.get(self._prefix + key, self._seconds())
        if value is None:
            raise self._late([key])
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds() if timeout is None else min(self._seconds(), timeout.total_seconds())
        missing, deadline = {self._prefix + key for key in keys}, time.monotonic() + seconds
        while missing:
            found = self._store.get_many(missing, max(deadline - time.monotonic(), 0.0))
            if not found:
                raise self._late(keys)
            missing -= found.keys()

    def _late(self, keys: Sequence[str]) -> RankTimeoutError:
        ranks = [int(key.rpartition("/")[2]) for key in keys if key.rpartition("/")[2].isdigit()]
        return RankTimeoutError(f"members of a group did not come to connect within {self._seconds():g} s", ranks)
