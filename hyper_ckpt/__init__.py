"""hyper-ckpt: saves and loads the state of a distributed training job.

Names are imported when they are first used: `import hyper_ckpt` loads no framework and next to nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyper_ckpt.system_errors import system_errors
from hyper_ckpt.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from hyper_ckpt import errors, key_maps
    from hyper_ckpt.api.async_save import async_save
    from hyper_ckpt.api.handle import SaveHandle
    from hyper_ckpt.api.load import LoadReport, load
    from hyper_ckpt.api.read import read, read_metadata
    from hyper_ckpt.api.save import save
    from hyper_ckpt.api.verify import verify
    from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
    from hyper_ckpt.engine.verify import VerifyReport
    from hyper_ckpt.errors import CheckpointError
    from hyper_ckpt.items import LoadPlan, ReadItem, SavePlan, WriteItem
    from hyper_ckpt.manager.manager import CheckpointManager
    from hyper_ckpt.manager.restoring import Restored
    from hyper_ckpt.manager.retention import Retention
    from hyper_ckpt.manager.run import StepInfo
    from hyper_ckpt.manager.schedule import SaveInterval
    from hyper_ckpt.metadata import Metadata, MetadataIndex
    from hyper_ckpt.options import LoadOptions, SaveOptions
    from hyper_ckpt.planning.items import ItemLoadPlanner, ItemSavePlanner
    from hyper_ckpt.planning.standard import StandardLoadPlanner, StandardSavePlanner
    from hyper_ckpt.registry import use
    from hyper_ckpt.storage.filesystem import FileSystemReader, FileSystemWriter
    from hyper_ckpt.storage.plain_reader import PlainSafetensorsReader
    from hyper_ckpt.values import PerRank, ShardedTensor

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "FileSystemReader",
    "FileSystemWriter",
    "ItemLoadPlanner",
    "ItemSavePlanner",
    "LoadOptions",
    "LoadPlan",
    "LoadReport",
    "Metadata",
    "MetadataIndex",
    "NumpyPlatform",
    "PerRank",
    "PlainSafetensorsReader",
    "ReadItem",
    "Restored",
    "Retention",
    "SaveHandle",
    "SaveInterval",
    "SaveOptions",
    "SavePlan",
    "ShardedTensor",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "StepInfo",
    "VerifyReport",
    "WriteItem",
    "__version__",
    "async_save",
    "errors",
    "key_maps",
    "load",
    "read",
    "read_metadata",
    "save",
    "use",
    "verify",
]

_HOME = {
    "CheckpointError": "errors",
    "CheckpointManager": "manager.manager",
    "FileSystemReader": "storage.filesystem",
    "FileSystemWriter": "storage.filesystem",
    "ItemLoadPlanner": "planning.items",
    "ItemSavePlanner": "planning.items",
    "LoadOptions": "options",
    "LoadPlan": "items",
    "LoadReport": "api.load",
    "Metadata": "metadata",
    "MetadataIndex": "metadata",
    "NumpyPlatform": "builtin.numpy_platform",
    "PerRank": "values",
    "PlainSafetensorsReader": "storage.plain_reader",
    "ReadItem": "items",
    "Restored": "manager.restoring",
    "Retention": "manager.retention",
    "SaveInterval": "manager.schedule",
    "SaveOptions": "options",
    "SavePlan": "items",
    "ShardedTensor": "values",
    "StandardLoadPlanner": "planning.standard",
    "StandardSavePlanner": "planning.standard",
    "StepInfo": "manager.run",
    "VerifyReport": "engine.verify",
    "WriteItem": "items",
    "SaveHandle": "api.handle",
    "async_save": "api.async_save",
    "load": "api.load",
    "read": "api.read",
    "read_metadata": "api.read",
    "save": "api.save",
    "use": "registry",
    "verify": "api.verify",
}


def __getattr__(name: str) -> Any:
    if name in ("errors", "key_maps"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with system_errors(f"importing hyper_ckpt.{name}"):
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
