"""How DTensors lie over ranks, in the terms of hyper_ckpt.layout."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import Mesh, MeshLayout, Placement, Replicate, Shard, expand

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]


def as_dtensor(value: Any) -> DTensor | None:
    """The value, if it is a DTensor. Imports nothing: where DTensor isn't imported, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return value if module is not None and isinstance(value, module.DTensor) else None


def is_dtensor(kind: type) -> bool:
    """Whether a class is DTensor. Imports nothing, as `as_dtensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def local_tensor(value: DTensor) -> torch.Tensor:
    """This rank's part, complete and outside autograd."""
    if type(value._local_tensor) is torch.Tensor:  # what to_local() gives, five times faster
        return value._local_tensor.detach()
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with torch.no_grad():
        local = value.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return local.detach()


@dataclass(frozen=True)
class _KnownMesh:
    """A mesh in the platform's ranks, with what was worked out for it: thousands of tensors share a few layouts."""

    mesh: Mesh
    coordinate: tuple[int, ...] | None
    layouts: dict[Hashable, MeshLayout] = field(default_factory=dict)
    boxes: dict[tuple[int, tuple[int, ...]], Box] = field(default_factory=dict)

    def own_box(self, layout: MeshLayout, shape: tuple[int, ...]) -> Box:
        """The box at this rank's coordinate; `layout` is one of `layouts`."""
        key = (id(layout), shape)
        if key not in self.boxes:
            at = np.asarray(self.coordinate, np.int64).reshape(-1, 1)
            offsets, sizes = expand(shape, layout.mesh.shape, layout.placements, layout.order, at)
            self.boxes[key] = (tuple(offsets[0].tolist()), tuple(sizes[0].tolist()))
        return self.boxes[key]


class Layouts:
    """Translates layouts for the ranks of one process group.

    Args:
        global_ranks: torch's rank of each of the group's ranks.
    """

    def __init__(self, global_ranks: Sequence[int]) -> None:
        self._number_of = {rank: number for number, rank in enumerate(global_ranks)}
        self._meshes: weakref.WeakKeyDictionary[DeviceMesh, _KnownMesh] = weakref.WeakKeyDictionary()

    def of(self, value: DTensor) -> MeshLayout:
        """The layout of a DTensor.

        Raises:
            UnsupportedLayoutError: it cannot be stored as it lies.
        """
        return self._layout(value, self._mesh(value.device_mesh))

    def _layout(self, value: DTensor, known: _KnownMesh) -> MeshLayout:
        key = _identity(value)
        found = known.layouts.get(key)
        if found is None:
            placements = tuple(placement_of(each, value) for each in value.placements)
            found = known.layouts[key] = MeshLayout(known.mesh, placements, _cutting_order(value, known.mesh.shape))
        return found

    def signature(self, value: DTensor) -> tuple[object, ...]:
        """Equal for two DTensors only if their layouts are."""
        return (value._spec.mesh, *_identity(value))

    def own_box(self, value: DTensor, local: torch.Tensor) -> Box | None:
        """(offsets, sizes) of this rank's part `local`, None if the rank is not in the mesh.

        An empty part may have any shape: FSDP over tensor parallelism leaves (0, 0) where the placements mean (5, 0).

        Raises:
            UnsupportedLayoutError: the local tensor has another shape than its placements say.
        """
        known = self._mesh(value.device_mesh)
        layout = self._layout(value, known)
        if known.coordinate is None:
            return None
        box = known.own_box(layout, tuple(value.shape))
        if tuple(local.shape) != box[1] and not (0 in local.shape and 0 in box[1]):
            raise UnsupportedLayoutError(
                f"a DTensor of shape {tuple(value.shape)} has a local tensor of shape {tuple(local.shape)} at "
                f"coordinate {known.coordinate} of its mesh {layout.mesh.shape}, but {value.placements} means "
                f"{box[1]} there: redistribute it to plain Shard and Replicate placements before saving"
            )
        return box

    def _mesh(self, mesh: DeviceMesh) -> _KnownMesh:
        known = self._meshes.get(mesh)
        if known is None:
            ranks = mesh.mesh.flatten().tolist()
            outside = [rank for rank in ranks if rank not in self._number_of]
            if outside:
                raise UnsupportedLayoutError(
                    f"a DTensor lies on ranks {outside[:8]}, which are not in the process group that saves or loads: "
                    "use a TorchPlatform whose process_group has all ranks of the mesh"
                )
            coordinate = mesh.get_coordinate()
            known = _KnownMesh(
                Mesh(tuple(mesh.mesh.shape), tuple(self._number_of[rank] for rank in ranks)),
                None if coordinate is None else tuple(coordinate),
            )
            self._meshes[mesh] = known
        return known


def _identity(value: DTensor) -> tuple[Hashable, ...]:
    """Equal only for DTensors that lie alike on their meshes."""
    spec = value._spec
    # The classes count too: a subclass of Shard may compare equal and mean something else.
    return (spec.placements, tuple(map(type, spec.placements)), getattr(spec, "shard_order", None))


def placement_of(placement: Any, value: DTensor) -> Placement:
    """One placement of a DTensor.

    Raises:
        UnsupportedLayoutError: it cannot be stored.
    """
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    if type(placement) is TorchReplicate:
        return Replicate()
    if type(placement) in (TorchShard, _StridedShard):
        return Shard(placement.dim)
    if isinstance(placement, Partial):
        raise UnsupportedLayoutError(
            f"a DTensor of shape {tuple(value.shape)} has a Partial placement: its value is only the sum over ranks. "
            "Redistribute it to Shard or Replicate first"
        )
    raise UnsupportedLayoutError(
        f"the placement {placement!r} of a DTensor of shape {tuple(value.shape)} is not supported: "
        "redistribute it to Shard or Replicate first"
    )


def _explicit_order(value: DTensor) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """(tensor dimension, its mesh dimensions in cutting order), where the spec says so itself: since torch 2.9."""
    order = getattr(value._spec, "shard_order", None)
    if order is None or any(hasattr(placement, "split_factor") for placement in value.placements):
        return None
    return tuple((tensor_dim, tuple(mesh_dims)) for tensor_dim, mesh_dims in order)


def _cutting_order(value: DTensor, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The mesh dimensions in the order in which they cut; () where that is left to right."""
    explicit = _explicit_order(value)
    if explicit is not None:
        by_dim: dict[int, list[int]] | None = {tensor_dim: list(mesh_dims) for tensor_dim, mesh_dims in explicit}
    else:
        by_dim = _strided_order(value.placements, mesh_shape)
    if by_dim is None:
        raise UnsupportedLayoutError(
            f"the strided placements {value.placements} on a mesh of shape {mesh_shape} mean no order of cuts, as a "
            "view of a sharded tensor may have: redistribute it to plain Shard placements first"
        )
    if all(dims == sorted(dims) for dims in by_dim.values()):
        return ()
    cuts = [mesh_dim for tensor_dim in sorted(by_dim) for mesh_dim in by_dim[tensor_dim]]
    return (*cuts, *(dim for dim in range(len(mesh_shape)) if dim not in cuts))


def _strided_order(placements: Sequence[Any], mesh_shape: tuple[int, ...]) -> dict[int, list[int]] | None:
    """Per tensor dimension, the mesh dimensions in the order of their cuts, or None if there is no such order.

    The split factor of a strided shard is the number of pieces that mesh dimensions further right have
    cut before it; a plain Shard has 1, so it cuts before all of these.
    """
    orders: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if not hasattr(placement, "dim"):
            continue
        order = orders.setdefault(placement.dim, [])
        factor = getattr(placement, "split_factor", 1)
        pieces = [math.prod(mesh_shape[dim] for dim in order[:place]) for place in range(len(order) + 1)]
        if factor not in pieces:
            return None
        order.insert(pieces.index(factor), mesh_dim)
    return orders
