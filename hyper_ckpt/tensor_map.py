"""Layouts that say by a device matrix and a tensor map how a tensor lies over ranks: MindSpore's and hyper-parallel's.

For platforms: both frameworks that hyper-parallel runs on have the same `Layout` and `DTensor`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import Mesh, MeshLayout, Placement, Replicate, Shard, expand

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class TensorMap:
    """How a tensor lies over ranks, in the framework's terms.

    Args:
        mesh: shape of the device matrix.
        tensor_map: per tensor dimension, the mesh dimensions that cut it, counted from the right, the major one first.
        ranks: the framework's ranks in the mesh, row-major.
        shape: of the whole tensor, where that is known.
    """

    mesh: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    def axes(self) -> list[list[int]]:
        """Per tensor dimension, the mesh dimensions that cut it, counted from the left, the major one first."""
        return [[len(self.mesh) - 1 - number for number in cuts] for cuts in self.tensor_map]

    def pieces(self) -> list[int]:
        """Per tensor dimension, into how many pieces it is cut."""
        return [math.prod(self.mesh[axis] for axis in axes) for axes in self.axes()]

    def check_dimensions(self, ndim: int) -> None:
        """Raises UnsupportedLayoutError for a tensor of another number of dimensions."""
        if len(self.tensor_map) != ndim:
            raise UnsupportedLayoutError(
                f"a layout for {len(self.tensor_map)} dimensions was given for a tensor of {ndim}: it needs one entry "
                "each"
            )


@dataclass(frozen=True)
class Sharding:
    """A tensor map in the platform's ranks, for one global shape; `box` is None on ranks outside the mesh."""

    shape: tuple[int, ...]
    layout: MeshLayout
    box: Box | None

    def own_box(self, part: Sequence[int], rank: int) -> Box | None:
        """(offsets, sizes) of this rank's part, None if the rank is not in the mesh. An empty part may have any shape.

        Args:
            part: shape of the part that this rank holds.
            rank: this rank's number, for messages.

        Raises:
            UnsupportedLayoutError: the part has another shape than the layout says.
        """
        part = tuple(part)
        if self.box is None or part == self.box[1] or (0 in part and 0 in self.box[1]):
            return self.box
        raise UnsupportedLayoutError(
            f"a tensor of shape {self.shape} has a part of shape {part} on rank {rank}, but its layout on a mesh of "
            f"{self.layout.mesh.shape} means {self.box[1]} there: compile the network before saving or loading, and "
            "give the layouts of this very network"
        )


class Shardings:
    """Translates tensor maps for the ranks of one group.

    Args:
        global_ranks: the framework's rank of each of the group's ranks.
        own: the framework's rank of this process.
    """

    def __init__(self, global_ranks: Sequence[int], own: int) -> None:
        self._number_of = {rank: number for number, rank in enumerate(global_ranks)}
        self._own = own
        self._known: dict[tuple[TensorMap, tuple[int, ...]], Sharding] = {}

    def of(self, found: TensorMap, shape: tuple[int, ...]) -> Sharding:
        """The sharding of a tensor of global shape `shape`.

        Raises:
            UnsupportedLayoutError: it cannot be stored as it lies.
        """
        key = (found, shape)
        if key not in self._known:
            layout = self._layout(found, shape)
            box = None
            if self._own in found.ranks:
                at = np.unravel_index(found.ranks.index(self._own), found.mesh) if found.mesh else ()
                coordinate = np.array(at, np.int64).reshape(-1, 1)
                offsets, sizes = expand(shape, found.mesh, layout.placements, layout.order, coordinate)
                box = (tuple(offsets[0].tolist()), tuple(sizes[0].tolist()))
            self._known[key] = Sharding(shape, layout, box)
        return self._known[key]

    def _layout(self, found: TensorMap, shape: tuple[int, ...]) -> MeshLayout:
        found.check_dimensions(len(shape))
        outside = [rank for rank in found.ranks if rank not in self._number_of]
        if outside:
            raise UnsupportedLayoutError(
                f"a tensor lies on ranks {outside[:8]}, which are not in the group that saves or loads: use a platform "
                "whose group has all ranks of the tensor"
            )
        for dim, (length, pieces) in enumerate(zip(shape, found.pieces(), strict=True)):
            if length % pieces:
                raise UnsupportedLayoutError(
                    f"dimension {dim} of a tensor of shape {shape} is cut into {pieces} pieces, which does not go "
                    "evenly: a tensor map has no such layout, so what each rank holds is unknown. Pad the tensor"
                )
        placements: list[Placement] = [Replicate()] * len(found.mesh)
        cuts = [(axis, dim) for dim, axes in enumerate(found.axes()) for axis in axes]
        for axis, dim in cuts:
            placements[axis] = Shard(dim)
        order: tuple[int, ...] = ()
        if any(axes != sorted(axes) for axes in found.axes()):
            cutting = [axis for axis, _ in cuts]
            order = (*cutting, *(axis for axis in range(len(found.mesh)) if axis not in cutting))
        return MeshLayout(
            Mesh(found.mesh, tuple(self._number_of[rank] for rank in found.ranks)), tuple(placements), order
        )


def read_layout(entry: Any, shape: tuple[int, ...] | None = None) -> TensorMap:
    """Reads MindSpore's or hyper-parallel's `Layout`, or its `to_dict()`.

    Args:
        shape: of the whole tensor, where that is known.

    Raises:
        UnsupportedLayoutError: it means something that cannot be stored.
        TypeError: it is none of these.
    """
    fields = _fields(entry)
    mesh = (fields.get("mesh_shape") or fields.get("device_matrix")) if isinstance(fields, Mapping) else None
    if mesh is None or fields.get("tensor_map") is None:
        raise TypeError(f"a layout, called with the names of a tensor's dimensions, is needed, not {entry!r:.200}")
    if fields.get("interleaved_parallel") or "interleaved_parallel" in (fields.get("alias_name") or ()):
        raise UnsupportedLayoutError(
            "a layout with interleaved_parallel gives a rank several pieces that do not touch: this cannot be stored. "
            "Use a layout without it"
        )
    if any(part is not None for part in getattr(entry, "partial", None) or ()):
        raise _partial()
    ranks = fields.get("rank_list")
    return make_tensor_map(mesh, fields["tensor_map"], range(math.prod(mesh)) if ranks is None else ranks, shape)


def read_dtensor(value: Any) -> TensorMap:
    """Reads how a hyper-parallel `DTensor` lies: by its layout, or by its placements on a mesh.

    Raises:
        UnsupportedLayoutError: it has placements that cannot be stored.
    """
    placements = tuple(getattr(value, "placements", None) or ())
    for placement in placements:
        kind = type(placement).__name__
        if kind == "Partial":
            raise _partial()
        if kind not in ("Shard", "Replicate"):
            raise UnsupportedLayoutError(
                f"the placement {placement!r} cannot be stored: redistribute the DTensor first"
            )
    layout = getattr(value, "layout", None)
    if layout is not None and getattr(layout, "tensor_map", None) is not None:
        return read_layout(layout)
    mesh = value.device_mesh
    cuts: list[list[int]] = [[] for _ in value.shape]
    for axis, placement in enumerate(placements):
        if type(placement).__name__ == "Shard":
            cuts[placement.dim].append(len(mesh.mesh_shape) - 1 - axis)
    return make_tensor_map(mesh.mesh_shape, cuts, mesh.rank_list, None)


def make_tensor_map(
    mesh: Sequence[int], tensor_map: Sequence[Any], ranks: Sequence[int], shape: tuple[int, ...] | None
) -> TensorMap:
    """A tensor map of what a framework gives: per tensor dimension a mesh dimension or several, -1 for none.

    Raises:
        UnsupportedLayoutError: mesh dimensions are named that there are not, or twice.
    """
    cuts = (each if isinstance(each, list | tuple) else (each,) for each in tensor_map)
    made = TensorMap(
        tuple(int(n) for n in mesh),
        tuple(tuple(int(number) for number in numbers if number != -1) for numbers in cuts),
        tuple(int(rank) for rank in ranks),
        shape,
    )
    used = [axis for axes in made.axes() for axis in axes]
    if len(set(used)) != len(used) or any(not 0 <= axis < len(made.mesh) for axis in used):
        raise UnsupportedLayoutError(f"the tensor map {made.tensor_map} does not fit a device matrix of {made.mesh}")
    return made


def _fields(entry: Any) -> Any:
    """What a layout says, as a mapping."""
    names = ("mesh_shape", "tensor_map", "alias_name", "rank_list")
    if all(hasattr(entry, name) for name in names):  # hyper-parallel's to_dict() fails where its mesh has no names
        return {name: getattr(entry, name) for name in names}
    return entry.to_dict() if hasattr(entry, "to_dict") else entry


def _partial() -> UnsupportedLayoutError:
    return UnsupportedLayoutError(
        "a DTensor has a Partial placement: its value is only the sum over ranks. Redistribute it to Shard or Replicate"
    )
