"""How MindSpore's sharded tensors lie over ranks, in the terms of hyper_ckpt.layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np

from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import Mesh, MeshLayout, Placement, Replicate, Shard, expand

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Spec:
    """A sharding in MindSpore's terms.

    Args:
        mesh: shape of the device matrix.
        tensor_map: per tensor dimension, the mesh dimensions that cut it, counted from the right, the major one first.
        ranks: MindSpore's ranks in the mesh, row-major.
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


@dataclass(frozen=True)
class Sharding:
    """A spec in the platform's ranks, for one global shape; `box` is None on ranks outside the mesh."""

    shape: tuple[int, ...]
    layout: MeshLayout
    box: Box | None


def is_dtensor(value: Any) -> bool:
    """Whether a tensor is one of hyper-parallel's, which derive from MindSpore's."""
    return hasattr(value, "to_local") and (hasattr(value, "layout") or hasattr(value, "placements"))


def local_tensor(value: Any) -> Any:
    """This rank's part: the tensor itself, if it is a plain one."""
    return value.to_local() if is_dtensor(value) else value


class Layouts:
    """Finds out how tensors lie over the ranks of one group.

    Args:
        global_ranks: MindSpore's rank of each of the group's ranks.
        own: MindSpore's rank of this process.
        layouts: by name of the parameter, see `MindSporePlatform`.
    """

    def __init__(self, global_ranks: Sequence[int], own: int, layouts: Mapping[Any, Any] | None = None) -> None:
        self._number_of = {rank: number for number, rank in enumerate(global_ranks)}
        self._own = own
        self._specs = {name: _named_spec(name, entry) for name, entry in _of_this_rank(layouts or {}, own).items()}
        self._known: dict[tuple[Spec, tuple[int, ...]], Sharding] = {}

    def of(self, value: Any) -> Sharding | None:
        """How a tensor lies; None: whole, on every rank that has it.

        Raises:
            UnsupportedLayoutError: it cannot be stored as it lies.
        """
        if is_dtensor(value):
            return self._sharding(dtensor_spec(value), tuple(value.shape))
        if not isinstance(value, ms.Parameter):
            return None
        spec = self._specs.get(value.name)
        if spec is None:
            _refuse_sliced(value)
            return None
        shape = spec.shape
        if shape is None:
            _check_dimensions(spec, len(value.shape))
            shape = tuple(n * pieces for n, pieces in zip(value.shape, spec.pieces(), strict=True))
        return self._sharding(spec, shape)

    def own_box(self, value: Any, local: Any) -> Box | None:
        """(offsets, sizes) of this rank's part `local` of a sharded tensor, None if the rank is not in its mesh.

        An empty part may have any shape.

        Raises:
            UnsupportedLayoutError: the local tensor has another shape than its layout says.
        """
        sharding = self.of(value)
        if sharding is None or sharding.box is None:
            return None
        if tuple(local.shape) != sharding.box[1] and not (0 in local.shape and 0 in sharding.box[1]):
            raise UnsupportedLayoutError(
                f"a tensor of shape {sharding.shape} has a part of shape {tuple(local.shape)} on rank {self._own}, but "
                f"its layout on a mesh of {sharding.layout.mesh.shape} means {sharding.box[1]} there: compile the "
                "network before saving or loading, and give the layouts of this very network"
            )
        return sharding.box

    def _sharding(self, spec: Spec, shape: tuple[int, ...]) -> Sharding:
        key = (spec, shape)
        if key not in self._known:
            layout = self._translate(spec, shape)
            box = None
            if self._own in spec.ranks:
                at = np.unravel_index(spec.ranks.index(self._own), spec.mesh) if spec.mesh else ()
                coordinate = np.array(at, np.int64).reshape(-1, 1)
                offsets, sizes = expand(shape, spec.mesh, layout.placements, layout.order, coordinate)
                box = (tuple(offsets[0].tolist()), tuple(sizes[0].tolist()))
            self._known[key] = Sharding(shape, layout, box)
        return self._known[key]

    def _translate(self, spec: Spec, shape: tuple[int, ...]) -> MeshLayout:
        _check_dimensions(spec, len(shape))
        outside = [rank for rank in spec.ranks if rank not in self._number_of]
        if outside:
            raise UnsupportedLayoutError(
                f"a tensor lies on ranks {outside[:8]}, which are not in the group that saves or loads: use a "
                "MindSporePlatform whose group has all ranks of the tensor"
            )
        for dim, (length, pieces) in enumerate(zip(shape, spec.pieces(), strict=True)):
            if length % pieces:
                raise UnsupportedLayoutError(
                    f"dimension {dim} of a tensor of shape {shape} is cut into {pieces} pieces, which does not go "
                    "evenly: MindSpore has no such layout, so what each rank holds is unknown. Pad the tensor"
                )
        placements: list[Placement] = [Replicate()] * len(spec.mesh)
        cuts = [(axis, dim) for dim, axes in enumerate(spec.axes()) for axis in axes]
        for axis, dim in cuts:
            placements[axis] = Shard(dim)
        order: tuple[int, ...] = ()
        if any(axes != sorted(axes) for axes in spec.axes()):
            cutting = [axis for axis, _ in cuts]
            order = (*cutting, *(axis for axis in range(len(spec.mesh)) if axis not in cutting))
        mesh = Mesh(spec.mesh, tuple(self._number_of[rank] for rank in spec.ranks))
        return MeshLayout(mesh, tuple(placements), order)


def layout_spec(entry: Any, shape: tuple[int, ...] | None = None) -> Spec:
    """Reads a layout: MindSpore's or hyper-parallel's `Layout`, its `to_dict()`, `[layout, dtype, global shape]` as
    the strategy metadata have it, or an entry of `Cell.parameter_layout_dict`.

    Raises:
        UnsupportedLayoutError: it means something that cannot be stored.
        TypeError: it is none of these.
    """
    if isinstance(entry, list | tuple):
        if len(entry) == 3 and not isinstance(entry[0], list | tuple):
            return layout_spec(entry[0], tuple(int(n) for n in entry[2]))
        return _compiled_spec(entry)
    fields = entry.to_dict() if hasattr(entry, "to_dict") else entry
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
    return _spec(mesh, fields["tensor_map"], range(math.prod(mesh)) if ranks is None else ranks, shape)


def dtensor_spec(value: Any) -> Spec:
    """The spec of a hyper-parallel `DTensor`.

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
        return layout_spec(layout)
    mesh = value.device_mesh
    cuts: list[list[int]] = [[] for _ in value.shape]
    for axis, placement in enumerate(placements):
        if type(placement).__name__ == "Shard":
            cuts[placement.dim].append(len(mesh.mesh_shape) - 1 - axis)
    return _spec(mesh.mesh_shape, cuts, mesh.rank_list, None)


def _spec(mesh: Sequence[int], tensor_map: Sequence[Any], ranks: Sequence[int], shape: tuple[int, ...] | None) -> Spec:
    cuts = (each if isinstance(each, list | tuple) else (each,) for each in tensor_map)
    spec = Spec(
        tuple(int(n) for n in mesh),
        tuple(tuple(int(number) for number in numbers if number != -1) for numbers in cuts),
        tuple(int(rank) for rank in ranks),
        shape,
    )
    used = [axis for axes in spec.axes() for axis in axes]
    if len(set(used)) != len(used) or any(not 0 <= axis < len(spec.mesh) for axis in used):
        raise UnsupportedLayoutError(f"the tensor map {spec.tensor_map} does not fit a device matrix of {spec.mesh}")
    return spec


def _compiled_spec(entry: Sequence[Any]) -> Spec:
    """Of (device matrix, tensor map, slice shape, field, uniform split, optimizer's group, full shape)."""
    if len(entry) < 7:
        raise TypeError(f"a layout is needed, not {entry!r:.200}")
    mesh, tensor_map, _, field, uniform, optimizer_group, shape = entry[:7]
    if field or not uniform or optimizer_group:
        raise UnsupportedLayoutError(
            "an entry of parameter_layout_dict that is cut by the optimizer, by field or not uniformly does not say "
            "what a rank holds: pass layouts=get_current_strategy_metadata(net) instead"
        )
    return _spec(mesh, tensor_map, range(math.prod(mesh)), tuple(int(n) for n in shape))


def _of_this_rank(layouts: Mapping[Any, Any], own: int) -> Mapping[Any, Any]:
    """Strategy metadata are by rank first, those of the current rank under 0."""
    if not layouts or not all(isinstance(key, int) for key in layouts):
        return layouts
    if own in layouts or set(layouts) == {0}:
        found: Mapping[Any, Any] = layouts.get(own, layouts.get(0, {}))
        return found
    raise ValueError(f"layouts= has entries for ranks {sorted(layouts)[:8]}, but none for this one, {own}")


def _named_spec(name: str, entry: Any) -> Spec:
    try:
        return layout_spec(entry)
    except (UnsupportedLayoutError, TypeError, ValueError) as error:
        raise type(error)(f"layouts[{name!r}]: {error}") from error


def _check_dimensions(spec: Spec, ndim: int) -> None:
    if len(spec.tensor_map) != ndim:
        raise UnsupportedLayoutError(
            f"a layout for {len(spec.tensor_map)} dimensions was given for a tensor of {ndim}: it needs one entry each"
        )


def _refuse_sliced(parameter: ms.Parameter) -> None:
    """A parameter that MindSpore has cut must not pass for a whole one."""
    if parameter.sliced and any(number != -1 for number in _flat(parameter.param_info.tensor_map or ())):
        raise UnsupportedLayoutError(
            f"the parameter {parameter.name!r} was cut by MindSpore, but not how it lies over ranks: pass "
            "platform=MindSporePlatform(layouts=get_current_strategy_metadata(net))"
        )


def _flat(values: Any) -> list[int]:
    return [each for value in values for each in (_flat(value) if isinstance(value, list | tuple) else [int(value)])]


def _partial() -> UnsupportedLayoutError:
    return UnsupportedLayoutError(
        "a DTensor has a Partial placement: its value is only the sum over ranks. Redistribute it to Shard or Replicate"
    )
