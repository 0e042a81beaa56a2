"""How sharded tensors lie over ranks, in the terms of hyper_ckpt.layout."""

from __future__ import annotations

import functools
import math

import numpy as np

from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import Mesh, MeshLayout, Placement, Replicate, Shard
from hyper_ckpt_sample.framework import Box, Sharded, Sharding


@functools.lru_cache(maxsize=1024)  # thousands of tensors share a few shardings
def layout_of(sharding: Sharding, shape: tuple[int, ...], world_size: int) -> MeshLayout:
    """Translates a sharding: one mesh dimension per tensor dimension that is cut, and one for all other axes.

    Several axes that cut one tensor dimension are merged into one mesh dimension: this framework divides once by
    their product. Where yours divides by one axis after the other, give each a mesh dimension and say which is
    first by `MeshLayout.order`.

    Raises:
        UnsupportedLayoutError: the sharding does not fit the tensor or the ranks.
    """
    lengths = dict(sharding.axes)
    if len(sharding.spec) != len(shape):
        raise UnsupportedLayoutError(f"{sharding.spec} gives axes for {len(sharding.spec)} dimensions of {shape}")
    cuts = [(dim, sharding.names(dim)) for dim in range(len(shape)) if sharding.names(dim)]
    used = [name for _, names in cuts for name in names]
    if len(set(used)) != len(used) or not set(used) <= lengths.keys():
        raise UnsupportedLayoutError(f"{sharding.spec} may name each of the axes {tuple(lengths)} once, and no others")
    count = math.prod(lengths.values())
    if sharding.first_rank < 0 or sharding.first_rank + count > world_size:
        raise UnsupportedLayoutError(
            f"ranks {sharding.first_rank} to {sharding.first_rank + count - 1} are not all in the process group of "
            f"{world_size} ranks that saves or loads"
        )
    rest = [name for name in lengths if name not in used]
    order = [list(lengths).index(name) for name in used + rest]
    ranks = sharding.first_rank + np.arange(count).reshape(tuple(lengths.values())).transpose(order)
    mesh_shape = [math.prod(lengths[name] for name in names) for _, names in cuts]
    placements: list[Placement] = [Shard(dim) for dim, _ in cuts]
    mesh = Mesh((*mesh_shape, math.prod(lengths[name] for name in rest)), tuple(ranks.reshape(-1).tolist()))
    return MeshLayout(mesh, (*placements, Replicate()))


def own_box(value: Sharded, rank: int) -> Box | None:
    """(offsets, sizes) of this rank's part, None if it takes no part.

    Raises:
        UnsupportedLayoutError: the part has another shape than the sharding says.
    """
    box = value.sharding.box(value.shape, rank)
    if box is not None and value.local.shape != box[1]:
        raise UnsupportedLayoutError(
            f"rank {rank} has a part of shape {value.local.shape}, but {value.sharding} means {box[1]} of {value.shape}"
        )
    return box
