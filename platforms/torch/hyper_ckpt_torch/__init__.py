"""The PyTorch platform of hyper-ckpt. Importing this package does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_ckpt_torch.platform import TorchPlatform
    from hyper_ckpt_torch.train_state import TrainState

__all__ = ["TorchPlatform", "TrainState"]

_HOME = {"TorchPlatform": "platform", "TrainState": "train_state"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
