"""The MindSpore platform of hyper-ckpt. Importing this package does not import MindSpore."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_ckpt_mindspore.callback import CheckpointCallback
    from hyper_ckpt_mindspore.platform import MindSporePlatform

__all__ = ["CheckpointCallback", "MindSporePlatform"]

_HOME = {"CheckpointCallback": "callback", "MindSporePlatform": "platform"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
