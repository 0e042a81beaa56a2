"""How a tensor lies over ranks, as data. Platforms translate their framework's sharding into these.

Only the inputs of a distribution travel between ranks; `expand` turns them into boxes anywhere, with
the same arithmetic.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

from hyper_ckpt.box import IntArray, plain_ints
from hyper_ckpt.errors import UnsupportedLayoutError


@dataclass(frozen=True)
class Replicate:
    """Every coordinate along this mesh dimension holds the same."""


@dataclass(frozen=True)
class Shard:
    """This mesh dimension cuts tensor dimension `dim`.

    `sizes` gives the length of each piece; None is the rule of `torch.chunk`: pieces of
    ceil(length / n), the last ones shorter or empty.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", operator.index(self.dim))
        object.__setattr__(self, "sizes", None if self.sizes is None else plain_ints(self.sizes))


Placement = Replicate | Shard


@dataclass(frozen=True)
class Mesh:
    """Ranks in a row-major N-d arrangement: `ranks[i]` stands at row-major position i of `shape`."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", plain_ints(self.shape))
        object.__setattr__(self, "ranks", plain_ints(self.ranks))
        if int(np.prod(self.shape, dtype=np.int64)) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise UnsupportedLayoutError(f"a mesh of shape {self.shape} needs that many distinct ranks: {self.ranks}")


@dataclass(frozen=True)
class Replicated:
    """The whole tensor, on every rank whose state has it."""


@dataclass(frozen=True)
class MeshLayout:
    """One placement per mesh dimension.

    `order` lists mesh dimensions in the order in which they cut the tensor (default: left to
    right). Where two mesh dimensions cut one tensor dimension, the earlier one makes the larger pieces:
    FSDP over tensor parallelism is `order=(1, 0)` on a (dp, tp) mesh.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        dims = tuple(range(len(self.mesh.shape)))
        object.__setattr__(self, "order", plain_ints(self.order))
        if len(self.placements) != len(dims) or (self.order and tuple(sorted(self.order)) != dims):
            raise UnsupportedLayoutError(
                f"{self.placements} in order {self.order} does not fit a mesh of shape {self.mesh.shape}: "
                "give one placement per mesh dimension and a permutation of the dimensions"
            )


@dataclass(frozen=True)
class Boxes:
    """Exactly these boxes, (offsets, sizes) in elements, in the order of the rank's local shards."""

    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        boxes = tuple([(plain_ints(offsets), plain_ints(sizes)) for offsets, sizes in self.boxes])
        object.__setattr__(self, "boxes", boxes)


Layout = Replicated | MeshLayout | Boxes


def sharded_dims(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """The mesh dimensions along which ranks hold different boxes."""
    return tuple(m for m, p in enumerate(placements) if isinstance(p, Shard) and mesh_shape[m] > 1)


def expand(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    order: tuple[int, ...] = (),
    coordinates: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """The box at each mesh coordinate.

    Args:
        shape: global shape of the tensor, D dimensions.
        mesh_shape: M mesh dimensions.
        placements: one per mesh dimension.
        order: see `MeshLayout`.
        coordinates: (M, n) mesh coordinates; None is all of them in row-major order.

    Returns:
        offsets and sizes, (n, D), in elements.

    Raises:
        UnsupportedLayoutError: a placement does not fit the shape.
    """
    if coordinates is None:
        count = int(np.prod(mesh_shape, dtype=np.int64))
        coordinates = np.indices(mesh_shape, dtype=np.int64).reshape(len(mesh_shape), count)
    n = coordinates.shape[1]
    offsets = np.zeros((n, len(shape)), np.int64)
    sizes = np.tile(np.asarray(shape, np.int64).reshape(1, -1), (n, 1))
    for m in order or range(len(mesh_shape)):
        placement = placements[m]
        if isinstance(placement, Replicate):
            continue
        dim, parts, at = placement.dim, mesh_shape[m], coordinates[m]
        if not 0 <= dim < len(shape):
            raise UnsupportedLayoutError(f"Shard({dim}) does not fit a tensor of shape {shape}")
        length = sizes[:, dim]
        if placement.sizes is None:
            piece = -(-length // parts)
            start = np.minimum(at * piece, length)
            sizes[:, dim] = np.minimum(piece, length - start)
        else:
            cuts = np.concatenate([[0], np.cumsum(np.asarray(placement.sizes, np.int64))])
            if len(placement.sizes) != parts or min(placement.sizes) < 0 or (length != cuts[-1]).any():
                raise UnsupportedLayoutError(
                    f"Shard({dim}, sizes={placement.sizes}) must give {parts} sizes that sum to the length "
                    f"{sorted(set(length.tolist()))} it cuts (tensor of shape {shape})"
                )
            start = cuts[at]
            sizes[:, dim] = cuts[at + 1] - start
        offsets[:, dim] += start
    return offsets, sizes
