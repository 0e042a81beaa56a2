"""Checks of byte ranges and the buffers that belong to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hyper_ckpt.contracts.store import Bytes
from hyper_ckpt.errors import PlanError


def as_bytes(data: Bytes) -> memoryview:
    """A flat view of bytes. A memoryview must be C-contiguous."""
    view = memoryview(data)
    # An empty view of several dimensions can't be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def runs(ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Pairs ranges with buffers, as flat views, and joins those that follow each other without a gap.

    Yields:
        Where a run starts, and the buffers that it fills.

    Raises:
        PlanError: a buffer is not as long as its range, or a range is negative.
    """
    if len(ranges) != len(buffers):
        raise PlanError(f"{len(ranges)} ranges to read into {len(buffers)} buffers")
    begin, end, run = 0, 0, list[memoryview]()
    for (start, length), buffer in zip(ranges, buffers, strict=True):
        if start < 0 or length != buffer.nbytes:
            raise PlanError(f"the range ({start}, {length}) does not fit a buffer of {buffer.nbytes} bytes")
        if not length:
            continue
        if run and start != end:
            yield begin, run
            run = []
        if not run:
            begin = start
        run.append(as_bytes(buffer))
        end = start + length
    if run:
        yield begin, run
