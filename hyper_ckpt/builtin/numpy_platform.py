"""The numpy platform: one process, host memory, no framework."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.host_stager import HostStager
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import ByteBuffer, Done, Mailbox, Pending, Platform, Ranks


class DictMailbox(Mailbox):
    """A mailbox for ranks that share a process."""

    def __init__(self) -> None:
        self._messages: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._messages[key] = bytes(value)

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._messages.get(key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._messages.pop(key, None)


class SingleRank(Ranks):
    """A world of one: nothing travels."""

    def __init__(self) -> None:
        self._mailbox = DictMailbox()

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def mailbox(self) -> Mailbox:
        return self._mailbox

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        if parts is None or len(parts) != 1:
            raise ValueError("rank 0 of a world of one scatters exactly one part")
        return parts[0]

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        if src != 0:
            raise ValueError(f"a world of one has no rank {src}")
        return Done()

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        return [ranks if ranks == (0,) else None for ranks in rank_sets]


def numpy_platform(ranks: Ranks | None = None) -> Platform:
    """A Platform over numpy arrays and `ShardedTensor`s of them.

    Args:
        ranks: the ranks it belongs to; None is a world of one.
    """
    tensors = CompositeTensors([NumpyTensors()])
    return Platform("numpy", ranks or SingleRank(), tensors, HostStager(tensors))
