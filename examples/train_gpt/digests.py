"""Digests of whole tensors, made without any part of hyper-ckpt: what a checkpoint has to keep."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of every parameter and of every tensor of the optimizer. All ranks call it and get the same."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model {name}"] = _digest(parameter)
        for kind, value in optimizer.state[parameter].items():
            found[f"{kind} {name}"] = _digest(value)
    return found


def _digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    described = f"{whole.dtype} {tuple(whole.shape)} ".encode()
    return hashlib.sha256(described + whole.detach().contiguous().numpy().tobytes()).hexdigest()
