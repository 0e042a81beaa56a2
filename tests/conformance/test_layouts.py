"""The suite finds layouts that are not what lies there, though all elements are somewhere."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_ckpt.box import cut
from hyper_ckpt.contracts.platform import LocalShard, Platform, TensorDescription, Tensors
from hyper_ckpt.dtypes import numpy_dtype
from hyper_ckpt.layout import Mesh, MeshLayout, Replicate, Shard
from hyper_ckpt.testing.conformance.numpy_probe import NumpyProbe
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, PlatformBench
from hyper_ckpt.testing.meshed import Meshed, MeshedStager, MeshedTensors, distribute
from hyper_ckpt.testing.world import run_world

CHECK = next(check for check in PLATFORM_CHECKS if check.name == "sharded_tensors_say_where_they_lie")


def fair(length: int, parts: int) -> tuple[int, ...]:
    return tuple(length // parts + (at < length % parts) for at in range(parts))


class MeshedProbe(NumpyProbe):
    """Tensors over a mesh of two dimensions. `fair`: the framework cuts into fair pieces, not into those of ceil."""

    def __init__(self, tensors: Callable[[], Tensors], *, fair: bool = False) -> None:
        super().__init__()
        self._tensors, self._fair = tensors, fair

    def run_world(self, world_size: int, fn: Callable[[Platform], Any], timeout: float) -> list[Any]:
        def made(ranks: Any) -> Platform:
            return Platform("meshed", ranks, self._tensors(), MeshedStager(self._tensors()))

        return run_world(world_size, fn, timeout=timeout, platform=made)

    def sharded(self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int) -> Any:
        whole = np.frombuffer(data, np.uint8).view(numpy_dtype(dtype)).reshape(shape)
        if self._fair:
            mesh = Mesh((world_size,), tuple(range(world_size)))
            return distribute(whole, MeshLayout(mesh, (Shard(0, fair(shape[0], world_size)),)), rank)
        mesh = Mesh((2, world_size // 2), tuple(range(world_size)))
        return distribute(whole, MeshLayout(mesh, (Shard(0), Shard(0)), order=(1, 0)), rank)

    def more_sharded(
        self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int
    ) -> Sequence[Any]:
        whole = np.frombuffer(data, np.uint8).view(numpy_dtype(dtype)).reshape(shape)
        mesh = Mesh((2, world_size // 2), tuple(range(world_size)))
        return [distribute(whole, MeshLayout(mesh, (Replicate(), Shard(0))), rank)]

    def local_raw(self, value: Meshed) -> bytes:
        assert value.local is not None
        return value.local.tobytes()


def saying(change: Callable[[MeshLayout], MeshLayout]) -> type[MeshedTensors]:
    """Knows its boxes, and describes another layout."""

    class Saying(MeshedTensors):
        def describe(self, value: Any) -> TensorDescription | None:
            got = super().describe(value)
            return got and replace(got, layout=change(got.layout))  # type: ignore[arg-type]

    return Saying


class HalfABox(MeshedTensors):
    """Only part of what lies here."""

    def local_shards(self, value: Any) -> list[LocalShard]:
        shards = super().local_shards(value)
        return [
            LocalShard(s.offsets, sizes, replace(s.data, local=cut(s.data.local, (0,) * len(sizes), sizes)))
            for s in shards
            for sizes in [(s.sizes[0] // 2, *s.sizes[1:])]
        ]


def reversed_ranks(layout: MeshLayout) -> MeshLayout:
    return replace(layout, mesh=Mesh(layout.mesh.shape, layout.mesh.ranks[::-1]))


def turned(layout: MeshLayout) -> MeshLayout:
    return replace(layout, order=())


def by_the_rule(layout: MeshLayout) -> MeshLayout:
    return replace(layout, placements=tuple(Shard(0) if isinstance(p, Shard) else p for p in layout.placements))


def test_layouts_that_are_right(tmp_path: Path) -> None:
    for number, uneven in enumerate((True, False)):
        with PlatformBench(MeshedProbe(MeshedTensors, fair=uneven), tmp_path / str(number), timeout=20) as bench:
            bench.run(CHECK)


@pytest.mark.parametrize(
    ("tensors", "uneven"),
    [(saying(reversed_ranks), False), (saying(turned), False), (saying(by_the_rule), True), (HalfABox, False)],
    ids=["ranks", "order", "rule of pieces", "half"],
)
def test_layouts_that_are_wrong(tmp_path: Path, tensors: type[Tensors], uneven: bool) -> None:
    with (
        PlatformBench(MeshedProbe(tensors, fair=uneven), tmp_path, timeout=10) as bench,
        pytest.raises(AssertionError, match=r"the layout puts .* here, local_shards says (.|\n)*check Mesh\.ranks"),
    ):
        bench.run(CHECK)
