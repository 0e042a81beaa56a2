"""The page for those who come from another distributed checkpoint: complete, and its names are there."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import hyper_ckpt
from hyper_ckpt import LoadOptions, MetadataIndex, SaveHandle, SaveOptions
from hyper_ckpt.contracts.placement import StorageReader, StorageWriter

PAGE = (Path(__file__).parents[1] / "docs/how-to/from-dcp.md").read_text()
ROWS = [row.split("|")[1:-1] for row in PAGE.splitlines() if row.startswith("| ")]
CALLS = [hyper_ckpt.save, hyper_ckpt.async_save, hyper_ckpt.load, hyper_ckpt.FileSystemWriter]

HYPER_PARALLEL = re.findall(
    r"\w+",
    """
save async_save AsyncSaveResponse load Metadata MetadataIndex TensorStorageMetadata
BytesStorageMetadata ChunkStorageMetadata TensorProperties CHUNK_INFO ChunkInfo SavePlanner
LoadPlanner SavePlan LoadPlan WriteItem ReadItem WriteItemType LoadItemType StandardSavePlanner
StandardLoadPlanner StorageWriter StorageReader StorageInfo WriteResult FileSystemWriter
FileSystemReader get_current_layout save_layout load_layout combine_layout get_global_layout
save_checkpoint load_checkpoint ReshardHandler BroadcastSource DataCopier checkpoint_id
storage_writer storage_reader planner no_dist use_collectives use_gloo callback
broadcast_replicated_tensors broadcast_groups broadcast_batch_bytes enable_plan_caching
remove_redundancy save_to_minimum_rank configure_planner build_local_plan build_global_plan
finalize_plan get_data acquire_tensor apply_tensor apply_bytes initialize_writer configure_writer
optimize_local_plan optimize_global_plan execute_write finalize_checkpoint initialize_reader
configure_reader load_metadata execute_read
""",
)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", " ".join(re.findall("`([^`]*)`", text))))


OLD = words(" ".join(cell for row in ROWS for cell in row[:2]))


@pytest.mark.parametrize("name", HYPER_PARALLEL)
def test_every_name_of_hyper_parallel_is_on_the_page(name: str) -> None:
    assert name in OLD | {word for row in ROWS if "the same" in row[1] for word in words(row[0])}


def test_every_name_of_torch_is_on_the_page() -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    staging = pytest.importorskip("torch.distributed.checkpoint.staging")
    names = {name for name, value in vars(dcp).items() if not name.startswith("_") and not inspect.ismodule(value)}
    names |= set(staging.__all__)
    for call in (
        dcp.save,
        dcp.load,
        dcp.async_save,
        dcp.FileSystemWriter,
        dcp.DefaultSavePlanner,
        dcp.DefaultLoadPlanner,
    ):
        names |= {name for name in inspect.signature(call).parameters if not name.startswith("_")}
    for hooks in (dcp.SavePlanner, dcp.LoadPlanner, dcp.StorageWriter, dcp.StorageReader):
        names |= {name for name in vars(hooks) if not name.startswith("_")}
    for module in pkgutil.iter_modules(dcp.__path__, f"{dcp.__name__}."):
        if not module.name.rpartition(".")[2].startswith("_"):
            found = importlib.import_module(module.name)
            public = {name: getattr(found, name) for name in getattr(found, "__all__", ())}
            names |= {name for name, value in public.items() if inspect.isclass(value) or inspect.isroutine(value)}
    assert names - OLD <= {"state_dict"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2].strip()[:40])
def test_what_stands_for_them_is_there(row: list[str]) -> None:
    """Calls, classes and options of the last column, which are named in code, exist."""
    options = {name for call in CALLS for name in inspect.signature(call).parameters}
    for code in re.findall("`([^`]*)`", row[2]):
        call = re.fullmatch(r"(\w+)\((\w+)=.*\)", code)
        if call and call[1] != "TorchPlatform":
            assert call[2] in inspect.signature(getattr(hyper_ckpt, call[1])).parameters, code
        elif re.fullmatch(r"\w+=", code):
            assert code[:-1] in options, code
        elif re.fullmatch(r"hyper_ckpt\.[\w.]+\.[A-Z]\w+", code):
            module, _, name = code.rpartition(".")
            assert hasattr(__import__(module, fromlist=[name]), name), code
        elif (place := re.fullmatch(r"(SaveHandle|StorageReader|Metadata)\.(\w+)(\(\))?", code)) is not None:
            owner = {"SaveHandle": SaveHandle, "StorageReader": StorageReader, "Metadata": hyper_ckpt.Metadata}[
                place[1]
            ]
            assert place[2] in dir(owner) or place[2] in getattr(owner, "__dataclass_fields__", {}), code
        elif re.fullmatch(r"[A-Z]\w+", code) and code not in ("TorchPlatform", "TrainState"):
            assert hasattr(hyper_ckpt, code) or hasattr(hyper_ckpt.contracts.planner, code), code


def test_hooks_are_there() -> None:
    assert {"at", "place", "files"} <= set(vars(StorageWriter))
    assert {"at", "load_metadata", "locate"} <= set(vars(StorageReader))
    assert {"create_local_plan", "create_global_plan", "get_data"} <= set(dir(hyper_ckpt.ItemSavePlanner))
    assert {"create_local_plan", "acquire_tensor", "apply_tensor", "apply_bytes"} <= set(
        dir(hyper_ckpt.ItemLoadPlanner)
    )
    assert {"sizes", "index", "reader", "sharers"} == set(hyper_ckpt.ReadItem.__dataclass_fields__)
    assert LoadOptions(broadcast_batch_bytes=0).broadcast_batch_bytes == 0
    assert SaveOptions(executor="process").executor == "process"


def test_the_number_of_a_chunk_is_a_hint() -> None:
    first, second = MetadataIndex("w", (0, 8)), MetadataIndex("w", (0, 8), index=3)
    assert first == second
    assert hash(first) == hash(second)
    assert {second: "found"}[first] == "found"
    assert first != MetadataIndex("w", (8, 0), index=3)
