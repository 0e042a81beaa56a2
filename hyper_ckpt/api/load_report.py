"""What a load says that it did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank.

    Args:
        loaded: names of the tensors that were filled.
        unfilled: names of those that were left as they were, all or a part of each: by the planner, or since parts of
            the checkpoint are missing (`LoadOptions(partial=True)`).
        missing: names that the target wants and the checkpoint does not have; left as they were.
        unexpected: names that the checkpoint has and the target does not want.
        forgotten: top-level keys of the checkpoint of which no rank's target has anything, without those that
            `LoadOptions(ignore=)` names.
        mismatched: what was left as it was because kind, shape or dtype differ, each with the reason.
        kept: `PerRank` names that kept the target's value, because no such rank saved one.
        bytes_read: bytes of tensors that this rank read from the store.
        bytes_received: bytes of tensors that other ranks read for it.
        peak_host_bytes: the most host memory held besides the target.
        seconds: per phase.
        shared_reads: whether reads were shared.
        shared_boxes, broadcasts, packed_boxes: how many boxes this rank read for others or got from them, in how many
            messages, and how many of them travelled together with others.
        changed: tensors of which an object's load_state_dict made another dtype, each with both.
        mapped: names of the target that `map_keys` found, with the saved names.
        cast: names of tensors whose values were converted, with the saved dtype and the target's.
        conflicts: names under which ranks saved different tensors, with the ranks whose tensor this rank got.
    """

    loaded: tuple[str, ...]
    unfilled: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    forgotten: tuple[str, ...]
    mismatched: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_read: int
    bytes_received: int
    peak_host_bytes: int
    seconds: dict[str, float]
    mapped: dict[str, str]
    cast: dict[str, tuple[str, str]]
    shared_reads: bool
    shared_boxes: int
    broadcasts: int
    packed_boxes: int
    conflicts: dict[str, tuple[int, ...]]
    changed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = ("loaded", "unfilled", "missing", "unexpected", "mismatched", "kept", "changed", "conflicts")
        counts = [f"{len(getattr(self, name)):,} {name}" for name in names if getattr(self, name)]
        read = f"{self.bytes_read:,} bytes read, {self.bytes_received:,} received"
        return f"<LoadReport: {', '.join(counts) or 'nothing loaded'}; {read}, {sum(self.seconds.values()):.3g} s>"
