"""What the tests of torch.distributed.checkpoint ask of resharding: each placement on a mesh into each other one."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, zeros

import hyper_ckpt
from hyper_ckpt import FileSystemReader, FileSystemWriter, StandardLoadPlanner, StandardSavePlanner

Gloo = Callable[..., list[Any]]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
ONE: list[list[Placement]] = [[R], [S0], [S1]]
TWO: list[list[Placement]] = [[*pair] for pair in product((R, S0, S1), repeat=2)]
SHAPE = (5, 6)  # not even on any mesh


def whole(number: int) -> Tensor:
    return torch.arange(30, dtype=torch.float32).view(SHAPE) + 100 * number


def sharded(mesh: tuple[int, ...], kinds: list[list[Placement]], filled: bool) -> dict[str, DTensor]:
    """A tensor for each kind of placement on a mesh."""
    device_mesh = init_device_mesh("cpu", mesh)
    return {
        str(number): distribute_tensor(whole(number), device_mesh, kind)
        if filled
        else zeros(*SHAPE, device_mesh=device_mesh, placements=kind)
        for number, kind in enumerate(kinds)
    }


def save(rank: int, world_size: int, path: str, mesh: tuple[int, ...], kinds: list[list[Placement]]) -> None:
    state = sharded(mesh, kinds, filled=True)
    hyper_ckpt.save(state, storage_writer=FileSystemWriter(path), planner=StandardSavePlanner())


def load(
    rank: int, world_size: int, path: str, saved: list[list[Placement]], mesh: tuple[int, ...], kind: list[Placement]
) -> None:
    """Each tensor that was saved, into one placement."""
    state = sharded(mesh, [kind] * len(saved), filled=False)
    hyper_ckpt.load(state, storage_reader=FileSystemReader(path), planner=StandardLoadPlanner())
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor(), whole(int(name))), (name, saved[int(name)], kind)


def load_all(
    rank: int, world_size: int, path: str, saved: list[list[Placement]], mesh: tuple[int, ...], into: Any
) -> None:
    for kind in into:
        load(rank, world_size, path, saved, mesh, kind)


@pytest.mark.parametrize(
    ("saved_mesh", "saved", "mesh", "into"),
    [
        ((4,), ONE, (4,), ONE),
        ((2, 2), TWO, (2, 2), TWO),
        ((4,), ONE, (2, 2), TWO),
        ((2, 2), TWO, (4,), ONE),
        ((2, 2), TWO, (3,), ONE),  # and on another number of ranks, which torch's own tests leave open
        ((2,), ONE, (2, 2), TWO),
    ],
    ids=["1-D to 1-D", "2-D to 2-D", "1-D to 2-D", "2-D to 1-D", "4 ranks to 3", "2 ranks to 4"],
)
def test_each_placement_into_each(
    gloo: Gloo, tmp_path: Path, saved_mesh: Any, saved: Any, mesh: Any, into: Any
) -> None:
    path = str(tmp_path / "c")
    count = {(4,): 4, (2, 2): 4, (3,): 3, (2,): 2}
    gloo(save, path, saved_mesh, saved, world_size=count[saved_mesh])
    gloo(load_all, path, saved, mesh, into, world_size=count[mesh])


def save_submeshes(rank: int, world_size: int, path: str) -> None:
    """Each half of the ranks holds a tensor of its own, on a part of one mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = mesh["pp"].get_local_rank()
    tensor = distribute_tensor(whole(stage), mesh["tp"], [S0])
    hyper_ckpt.save({f"stage-{stage}": tensor}, path)
    target = {f"stage-{stage}": zeros(*SHAPE, device_mesh=mesh["tp"], placements=[S1])}
    hyper_ckpt.load(target, path)
    assert torch.equal(target[f"stage-{stage}"].full_tensor(), whole(stage))


def test_parts_of_a_mesh(gloo: Gloo, tmp_path: Path) -> None:
    gloo(save_submeshes, str(tmp_path / "c"), world_size=4)
    found = hyper_ckpt.read(tmp_path / "c", platform="torch")
    assert all(torch.equal(found[f"stage-{stage}"], whole(stage)) for stage in range(2))


def unlike(rank: int, world_size: int, path: str) -> None:
    """Replicas and plain tensors beside sharded ones; stored once each."""
    mesh = init_device_mesh("cpu", (world_size,))
    state = {
        "sharded": distribute_tensor(whole(0), mesh, [S0]),
        "replicated": distribute_tensor(whole(1), mesh, [R]),
        "plain": whole(2),
        "one element": distribute_tensor(torch.tensor([7.0]), mesh, [S0]),
        "empty": distribute_tensor(torch.zeros(0, 3), mesh, [S0]),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    hyper_ckpt.save(state, path)


def test_what_several_ranks_hold_is_stored_once(gloo: Gloo, tmp_path: Path) -> None:
    gloo(unlike, str(tmp_path / "c"), world_size=3)
    metadata = hyper_ckpt.read_metadata(tmp_path / "c")
    for name in ("sharded", "replicated", "plain", "one element", "scalar"):
        entry = metadata.state_dict_metadata[name]
        stored = sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
        assert stored == torch.Size(entry.size).numel(), name
    found = hyper_ckpt.read(tmp_path / "c", platform="torch")
    assert torch.equal(found["replicated"], whole(1))
    assert (found["one element"].item(), found["scalar"].item(), tuple(found["empty"].shape)) == (7.0, 3, (0, 3))
