"""What is saved and loaded, and by whom."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_ckpt.columns import Columns
from hyper_ckpt.contracts.platform import LocalShard, Tensors
from hyper_ckpt.description import Description, World
from hyper_ckpt.manifest import Manifest

OwnBoxes = list[tuple[str, tuple[int, ...], tuple[int, ...]]]
"""Boxes that a rank itself wants: name, offsets, sizes."""


@dataclass(frozen=True)
class PlanContext:
    """What a planner may know of its rank. `memo` is kept from save to save of a platform, for planners to remember."""

    tensors: Tensors
    rank: int
    world_size: int
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


class SavePlanner(ABC):
    """Decides what a rank saves and how boxes are shared between ranks."""

    @abstractmethod
    def identity(self) -> str:
        """Class and options, equal on all ranks."""

    @abstractmethod
    def build_local_plan(self, tensors: Mapping[str, Any], skeleton: bytes, context: PlanContext) -> Description:
        """Describes this rank's tensors (by name). `skeleton` is the canonical form of the state around them."""

    @abstractmethod
    def build_global_plan(self, world: World) -> Columns:
        """Every rank's chunks. Pure; runs on rank 0.

        Raises:
            PlanError: the world cannot be saved whole and once.
        """

    @abstractmethod
    def finalize_plan(self, world: World, loose: Columns, rank: int) -> Columns:
        """One rank's own chunks; `loose` are those of them that only rank 0 could know. Pure, and equal to
        the rank's part of `build_global_plan`."""

    @abstractmethod
    def loose_plan(self, world: World) -> Columns:
        """The part of the global plan that only rank 0 can make: boxes listed one by one. Pure."""

    @abstractmethod
    def get_data(self, tensors: Mapping[str, Any], name: str, context: PlanContext) -> list[LocalShard]:
        """The shards that the chunks of `name` are cut from."""


class LoadPlanner(ABC):
    """Decides what a rank loads, and into what."""

    @abstractmethod
    def identity(self) -> str:
        """Class and options, equal on all ranks."""

    @abstractmethod
    def build_local_plan(
        self, tensors: Mapping[str, Any], skeleton: bytes, manifest: Manifest, context: PlanContext
    ) -> Description:
        """Describes the targets of this rank that are to be filled.

        Args:
            tensors: by name. Where a load casts, one may be a stand-in of the saved dtype: ask `context.tensors` what
                it is. `acquire_tensor` and `apply_tensor` are given the target itself.
        """

    @abstractmethod
    def build_global_plan(self, world: World, rank: int, boxes: OwnBoxes, max_bytes: int) -> Columns:
        """What `rank` reads and receives where ranks share reads. Pure.

        Args:
            boxes: the (name, offsets, sizes) that the rank itself wants.
            max_bytes: the most that a shared box may have.
        """

    @abstractmethod
    def finalize_plan(self, description: Description, rank: int, boxes: OwnBoxes) -> Columns:
        """What `rank` reads where every rank reads for itself. Pure."""

    @abstractmethod
    def acquire_tensor(self, tensors: Mapping[str, Any], name: str, context: PlanContext) -> Any:
        """The tensor to fill: the target itself, or a new one in its place."""

    @abstractmethod
    def apply_tensor(self, name: str, tensor: Any) -> Any:
        """What stands in the state after `tensor` was filled; usually it itself."""

    def apply_bytes(self, name: str, data: bytes) -> bytes:
        """A payload that was read, before it is decoded."""
        return data
