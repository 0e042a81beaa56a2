"""What one rank reads for several: boxes in messages that are broadcast once they are filled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Carrier
from hyper_ckpt.engine.workers import Task

if TYPE_CHECKING:
    from hyper_ckpt.engine.load import Loader

PACK_BYTES = 1 << 20
"""Boxes below this are passed on in one message."""


@dataclass(eq=False)
class Message:
    """One buffer to pass on, and the boxes in it: row, where it belongs, where it lies in the buffer."""

    buffer: ByteBuffer
    boxes: list[tuple[int, Carrier, Carrier]]
    pooled: ByteBuffer | None = None


class SharedPart:
    """What one rank of a group reads of a batch and passes on: large boxes as they lie, small ones packed.

    Which boxes travel together follows from the plan alone: all ranks of the group must agree on it.
    """

    def __init__(self, loader: Loader, reader: int, members: list[int]) -> None:
        self.reader, self._loader = reader, loader
        sizes = loader.nbytes
        rows = [r for r in members if int(loader.job.columns.rank[r]) == reader]
        large = [r for r in rows if sizes[r] >= PACK_BYTES]
        small = [r for r in rows if sizes[r] < PACK_BYTES]
        self._messages = [self._message([r], int(sizes[r])) for r in large]
        if small:
            self._messages.append(self._message(small, int(sizes[small].sum())))

    def _message(self, rows: list[int], nbytes: int) -> Message:
        if len(rows) == 1:
            destination = self._loader.destination(rows[0])
            if destination.flags.c_contiguous:
                return Message(destination.reshape(-1).view(np.uint8), [(rows[0], destination, destination)])
        pooled = self._loader.take(nbytes)
        message, at = Message(pooled[:nbytes], [], pooled), 0
        for row in rows:
            destination = self._loader.destination(row)
            n = destination.size * destination.itemsize
            view = message.buffer[at : at + n].view(destination.dtype).reshape(destination.shape)
            message.boxes.append((row, destination, view))
            at += n
        return message

    def tasks(self) -> Iterator[Task]:
        """Reads this part into its messages."""
        yield from self._loader.all_tasks([(row, view) for m in self._messages for row, _, view in m.boxes])

    def exchange(self, group: object) -> None:
        """Sends or receives this part, then unpacks it."""
        ranks = self._loader.job.ranks
        buffers = [m.buffer for m in self._messages]
        if buffers:
            ranks.broadcast_into(buffers, self.reader, group).wait()
        counts = self._loader.counts
        counts.broadcasts += len(buffers)
        counts.shared_boxes += sum(len(m.boxes) for m in self._messages)
        counts.packed_boxes += sum(len(m.boxes) for m in self._messages if len(m.boxes) > 1)
        if self.reader != ranks.rank:
            received = sum(len(b) for b in buffers)
            counts.received += received
            self._loader.job.progress(received)
        for message in self._messages:
            if message.pooled is not None:
                for _, destination, view in message.boxes:
                    destination[...] = view
                self._loader.give(message.pooled)
