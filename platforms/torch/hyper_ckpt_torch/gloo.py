"""Gloo groups of our own, over a store of our own.

Not made by `torch.distributed.new_group`: without `use_local_synchronization` all ranks of the job have to
call it, and with it the group's name depends on how many groups a process has made before, so that
members with different histories (pipeline stages) wait for each other under different names.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hyper_ckpt.contracts.platform import ByteBuffer, KeyValueStore, packed, unpacked
from hyper_ckpt.errors import PlatformError, RankFailedError
from hyper_ckpt_torch.gloo_store import GlooStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupGloo  # hidden from type checkers elsewhere
else:
    from torch.distributed import ProcessGroupGloo

# Named everywhere: the user may have set another default device.
_HOST = torch.device("cpu")
# gloo's own limit, for groups of ranks that have met in the key-value store just before.
COLLECTIVE_TIMEOUT = timedelta(seconds=1800)


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError("a collective failed: a rank has ended, or cannot be reached (see the cause)") from error


@dataclass(frozen=True)
class Works:
    """Collectives under way, and the memory they use."""

    works: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    timeout: timedelta

    def wait(self) -> None:
        with _failures_named():
            for work in self.works:
                work.wait(self.timeout)


class GlooGroup:
    """Collectives of some ranks; members count from 0 in the order of `ranks`.

    Args:
        gloo: does the work.
        member: this process's place in the group.
        size: members.
        timeout: seconds that a collective may take, asked for each anew.
        found: through which the members found each other; kept for torch.
    """

    def __init__(
        self,
        gloo: ProcessGroupGloo,
        member: int,
        size: int,
        timeout: Callable[[], float],
        found: GlooStore | None = None,
    ) -> None:
        self.size = size
        self.member = member
        self._seconds = timeout
        self._gloo: Any = gloo
        self._found = found

    @classmethod
    def connect(
        cls, store: KeyValueStore, own_address: str, ranks: Sequence[int], member: int, timeout: Callable[[], float]
    ) -> GlooGroup:
        """A group of our own. Its members connect, who all do so; nobody else takes part.

        Args:
            store: where members find each other.
            own_address: this host's, under which the other members reach it.
            ranks: names the group: one group per set of ranks and store.
            timeout: seconds that connecting may take, and later each collective.
        """
        name = hashlib.sha256(np.asarray(ranks, "<i8").tobytes()).hexdigest()[:32]
        seconds = min(timeout(), COLLECTIVE_TIMEOUT.total_seconds())
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=seconds)
        with _failures_named():
            # Here gloo could be told to connect only pairs that talk (lazy_init): all connect to all now.
            options._devices = [_device(own_address)]
            found = GlooStore(store, f"group/{name}/", timeout)
            gloo = ProcessGroupGloo(found, member, len(ranks), options)
            gloo.set_timeout(COLLECTIVE_TIMEOUT)  # from here on each collective's own wait counts
        return cls(gloo, member, len(ranks), timeout, found)

    @classmethod
    def of_caller(cls, group: dist.ProcessGroup, timeout: Callable[[], float]) -> GlooGroup:
        """A group that the caller made.

        Raises:
            PlatformError: it cannot move host memory.
        """
        backend: Any = None
        with contextlib.suppress(RuntimeError):  # it has no backend for this device
            backend = group._get_backend(_HOST)
        if not isinstance(backend, ProcessGroupGloo):
            raise PlatformError("groups= must move host memory: make them with dist.new_group(..., backend='gloo')")
        return cls(backend, dist.get_rank(group), dist.get_world_size(group), timeout)

    @_failures_named()
    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's value. Each is padded to the largest."""
        data = _bytes_tensor(packed(value))
        sizes = self._all_gather_sizes(data.numel())
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_HOST)
        padded[: data.numel()] = data
        gathered = [torch.empty_like(padded, device=_HOST) for _ in sizes]
        self._wait(self._gloo.allgather(gathered, padded))
        return [unpacked(each[:size].numpy().tobytes()) for each, size in zip(gathered, sizes, strict=True)]

    @_failures_named()
    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Everybody's bytes at member 0, each sent as it is."""
        sizes = self._all_gather_sizes(len(data))
        if self.member != 0:
            self._send([(0, data)])
            return None
        return [data, *self._receive([(member, sizes[member]) for member in range(1, self.size)])]

    @_failures_named()
    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        """Part m of member 0's `parts` at member m, each sent as it is."""
        size = torch.zeros(1, dtype=torch.int64, device=_HOST)
        self._wait(self._gloo.scatter(size, [torch.tensor([len(part)], device=_HOST) for part in parts or ()], 0))
        if self.member == 0 and parts is not None:
            self._send(list(enumerate(parts))[1:])
            return bytes(parts[0])
        return self._receive([(0, int(size))])[0]

    @_failures_named()
    def broadcast(self, buffers: Sequence[ByteBuffer], source: int) -> Works:
        """Member `source`'s buffers into everybody's, in place."""
        tensors = tuple(_as_tensor(buffer) for buffer in buffers if buffer.size)
        return Works(
            tuple(self._gloo.broadcast(tensor, source) for tensor in tensors),
            tensors,
            timedelta(seconds=self._seconds()),
        )

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=self._seconds()))

    def _all_gather_sizes(self, size: int) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64, device=_HOST) for _ in range(self.size)]
        self._wait(self._gloo.allgather(sizes, torch.tensor([size], device=_HOST)))
        return [int(each) for each in sizes]

    def _send(self, parts: Sequence[tuple[int, bytes]]) -> None:
        tensors = [(to, _bytes_tensor(data)) for to, data in parts if data]
        for work in [self._gloo.send([tensor], to, 0) for to, tensor in tensors]:
            self._wait(work)

    def _receive(self, sizes: Sequence[tuple[int, int]]) -> list[bytes]:
        parts = [(source, torch.empty(size, dtype=torch.uint8, device=_HOST)) for source, size in sizes]
        for work in [self._gloo.recv([part], source, 0) for source, part in parts if part.numel()]:
            self._wait(work)
        return [part.numpy().tobytes() for _, part in parts]


def _device(own_address: str) -> Any:
    """Listens on the address by which this host is reached and on no other; GLOO_SOCKET_IFNAME chooses instead."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_default_device()
    return ProcessGroupGloo.create_device(hostname=own_address)


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _as_tensor(buffer: ByteBuffer) -> torch.Tensor:
    # torch has no read-only tensors and warns of read-only memory, which only a source may be.
    return torch.from_numpy(buffer if buffer.flags.writeable else np.array(buffer))
