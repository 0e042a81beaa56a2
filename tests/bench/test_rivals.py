"""Beside others: torch.distributed.checkpoint, safetensors, torch.save, mindspore, and torch-checkpointing where it is
installed. `make bench`; asserts no times.

All take turns in one run, after warm-ups, over the same tensors on the same disk; versions are printed. Saves: the best
of the repetitions after a file-system sync, not durable, since the others are not; loads: the median.
HYPER_CKPT_BENCH_DIR chooses the disk, HYPER_CKPT_BENCH_MIB the size.
"""

import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import hyper_ckpt

from ._places import DISK, fresh
from .test_speed import MIB, REPETITIONS, bare_read, bare_write, interleaved, timed

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]

TENSORS, SMALL_TENSORS = 64, 20_000
TORCH_CHECKPOINTING = (
    f"torch-checkpointing {version('torch-checkpointing')}" if find_spec("torch_checkpointing") else ""
)
State = dict[str, torch.Tensor]


@pytest.fixture
def place() -> Iterator[Path]:
    yield from fresh(DISK / "bench-rivals")


@pytest.fixture(scope="module")
def large() -> State:
    return {f"t{i}": torch.rand((MIB << 20) // TENSORS // 4) for i in range(TENSORS)}


@pytest.fixture(scope="module")
def small() -> State:
    return {f"layer.{i}.weight": torch.rand(4) for i in range(SMALL_TENSORS)}


def dcp_save(state: State, path: Path, threads: int = 1) -> None:
    writer = dcp.FileSystemWriter(path, thread_count=threads, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)


def hf_save(state: State, path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path=str(path)), no_dist=True)


def mindspore_save(state: State, path: Path) -> None:
    import mindspore as ms

    parameters = [{"name": k, "data": ms.Parameter(ms.Tensor.from_numpy(v.numpy()))} for k, v in state.items()]
    ms.save_checkpoint(parameters, str(path), format="safetensors")


def sync_manager() -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    # Its default, O_DIRECT, fails on files whose last write is no whole block; through the page cache as the others.
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return config.build()


def manager_save(state: State, path: Path) -> None:
    sync_manager().save(str(path), {"model": state})


def manager_load(target: State, path: Path) -> None:
    sync_manager().load(str(path), into={"model": target})


def arrays(state: State) -> dict[str, object]:
    return {name: tensor.numpy() for name, tensor in state.items()}


SAVES: dict[str, Callable[[State, Path], object]] = {
    "floor, 1 thread": lambda s, p: bare_write(p, arrays(s), 1, False),
    "floor, 2 threads": lambda s, p: bare_write(p, arrays(s), 2, False),
    "hyper-ckpt": lambda s, p: hyper_ckpt.save(s, p, durable=False),
    f"DCP {torch.__version__}": dcp_save,
    "DCP, 2 threads": lambda s, p: dcp_save(s, p, 2),
    "DCP, HF writer": hf_save,
    f"safetensors {safetensors.__version__}": lambda s, p: safetensors.torch.save_file(s, p),
    "torch.save": lambda s, p: torch.save(s, p),
    "mindspore": mindspore_save,
    **({TORCH_CHECKPOINTING: manager_save} if TORCH_CHECKPOINTING else {}),
    "floor again": lambda s, p: bare_write(p, arrays(s), 2, False),
}


def removed(path: Path) -> None:
    for each in path.parent.glob(path.name + "*"):
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def show(title: str, rows: dict[str, list[float]], pick: Callable[[list[float]], float]) -> None:
    best = {name: pick(seconds) for name, seconds in rows.items()}
    print(f"\n{title}, {REPETITIONS} repetitions, {pick.__name__}")
    for name, seconds in best.items():
        print(f"  {name:24} {seconds:8.3f} s   {seconds / best['hyper-ckpt']:6.2f} x hyper-ckpt")


def run_saves(place: Path, state: State, names: list[str]) -> dict[str, list[float]]:
    numbers = iter(range(1_000_000))

    def saving(save: Callable[[State, Path], object]) -> Callable[[], float]:
        def run() -> float:
            path = place / f"save-{next(numbers)}"
            os.sync()
            seconds = timed(lambda: save(state, path) and None)
            removed(path)
            return seconds

        return run

    return interleaved({name: saving(SAVES[name]) for name in names})


def test_large_saves(place: Path, large: State) -> None:
    show(f"save of {MIB} MiB in {TENSORS} tensors, not durable", run_saves(place, large, list(SAVES)), min)


def test_large_loads(place: Path, large: State) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in large.items()}
    bare_write(place / "bare", arrays(large), 1, False)
    hyper_ckpt.save(large, place / "ours", durable=False)
    dcp_save(large, place / "dcp")
    safetensors.torch.save_file(large, place / "one.safetensors")
    torch.save(large, place / "torch.pt")
    hf_save(large, place / "hf")
    if TORCH_CHECKPOINTING:
        manager_save(large, place / "manager")

    def hf_load() -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        dcp.load(target, storage_reader=HuggingFaceStorageReader(path=str(place / "hf")), no_dist=True)

    def filled(source: State) -> None:
        for name, tensor in target.items():
            tensor.copy_(source[name])

    actions: dict[str, Callable[[], object]] = {
        "floor, 1 thread": lambda: bare_read(place / "bare", arrays(target), 1),
        "floor, 2 threads": lambda: bare_read(place / "bare", arrays(target), 2),
        "hyper-ckpt": lambda: hyper_ckpt.load(target, place / "ours", verify="off"),
        "hyper-ckpt, verified": lambda: hyper_ckpt.load(target, place / "ours"),
        f"DCP {torch.__version__}": lambda: dcp.load(target, checkpoint_id=place / "dcp", no_dist=True),
        "DCP, HF reader": hf_load,
        "safetensors": lambda: filled(safetensors.torch.load_file(place / "one.safetensors")),
        "torch.load": lambda: filled(torch.load(place / "torch.pt", weights_only=True)),
        **({TORCH_CHECKPOINTING: lambda: manager_load(target, place / "manager")} if TORCH_CHECKPOINTING else {}),
        "floor again": lambda: bare_read(place / "bare", arrays(target), 2),
    }
    rows = interleaved({name: (lambda a=a: timed(lambda: a() and None)) for name, a in actions.items()})
    show(f"load of {MIB} MiB into tensors that are there", rows, statistics.median)


def test_small(place: Path, small: State) -> None:
    names = ["hyper-ckpt", f"DCP {torch.__version__}"]
    show(f"save of {SMALL_TENSORS} tensors of 16 bytes", run_saves(place, small, names), min)
    hyper_ckpt.save(small, place / "ours", durable=False)
    dcp_save(small, place / "dcp")
    print(f"  bytes on disk: {sum(f.stat().st_size for f in (place / 'ours').rglob('*') if f.is_file()):,}")
    target = {name: torch.zeros_like(tensor) for name, tensor in small.items()}
    rows = interleaved(
        {
            "hyper-ckpt": lambda: timed(lambda: hyper_ckpt.load(target, place / "ours") and None),
            "DCP": lambda: timed(lambda: dcp.load(target, checkpoint_id=place / "dcp", no_dist=True)),
        }
    )
    show(f"load of {SMALL_TENSORS} tensors of 16 bytes", rows, statistics.median)
