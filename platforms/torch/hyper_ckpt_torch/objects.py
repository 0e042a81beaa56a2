"""Modules and optimizers in a state: which of them take what was saved, and how new moments lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from hyper_ckpt.contracts.objects import MissingTensor, Objects
from hyper_ckpt.errors import TargetError
from hyper_ckpt_torch.layouts import as_dtensor, local_tensor
from hyper_ckpt_torch.tensors import bits, torch_dtype

_EXTRA_STATE = "_extra_state"  # torch's own suffix for what a module's get_extra_state() gives
_ANY_SHAPE = ("Adafactor", "LBFGS", "SparseAdam")  # of torch.optim, those whose state has other shapes than parameters


class TorchObjects(Objects):
    """A module's weights must fit; its extra state, and what is no tensor there, comes as it was saved. An optimizer
    gets all of its state, new moments like their parameters, with the dtypes that were saved."""

    def fixed(self, owner: Any, state: Any) -> Collection[Any] | None:
        if not isinstance(owner, torch.nn.Module):
            return super().fixed(owner, state)
        return weights_of(state)

    def make(self, owner: Any, missing: MissingTensor) -> Any:
        if not isinstance(owner, torch.optim.Optimizer):
            return super().make(owner, missing)
        parameter = _parameter(owner, missing.path)
        return None if parameter is None else like_parameter(parameter, missing)

    def check(self, owner: Any, state: Any) -> None:
        if isinstance(owner, torch.optim.Optimizer):
            check_optimizer(owner, state)
        else:
            super().check(owner, state)

    def load(self, owner: Any, state: Any) -> None:
        if isinstance(owner, torch.optim.Optimizer):
            load_optimizer(owner, state)
        else:
            super().load(owner, state)


def weights_of(state: Any) -> Collection[Any] | None:
    """The keys of a module's weights in its state_dict(). None: it is no dict."""
    if not isinstance(state, dict):
        return None
    # Modules may hold lists of tensors, too: metrics do, of what they have collected so far.
    tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
    return {key: None for key in tensors if not (isinstance(key, str) and key.endswith(_EXTRA_STATE))}


def like_parameter(parameter: torch.Tensor, missing: MissingTensor) -> torch.Tensor | None:
    """A new tensor for an optimizer's state of a parameter: of its shape, on its device and sharded like it; another
    shape is whole there, and a `step` on the host, as torch makes it. None: how it was sharded is not known."""
    dtype, dtensor = torch_dtype(missing.dtype), as_dtensor(parameter)
    if missing.shape == tuple(parameter.shape) and missing.path[-1] != "step":
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if dtensor is None:
        return torch.empty(missing.shape, dtype=dtype, device=parameter.device if missing.shape else "cpu")
    if missing.form == "sharded":
        return None
    if missing.form == "replicated" or missing.shape:  # what is computed from DTensors is one, if not of one number
        from torch.distributed import tensor

        whole = [tensor.Replicate()] * dtensor.device_mesh.ndim
        return tensor.empty(missing.shape, dtype=dtype, device_mesh=dtensor.device_mesh, placements=whole)
    return torch.empty(missing.shape, dtype=dtype)


def check_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Refuses what `load_state_dict` refuses only when all else has been loaded, and what it takes, to fail later.

    Raises:
        TargetError: other groups or parameters than the optimizer has, or moments of other shapes.
    """
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return  # a class of its own, with a load_state_dict of its own
    own, saved = optimizer.param_groups, state["param_groups"]
    counts = [len(group["params"]) for group in own], [len(group["params"]) for group in saved]
    if counts[0] != counts[1]:
        raise TargetError(
            f"the {type(optimizer).__qualname__} has {_said(counts[0])}, the checkpoint {_said(counts[1])}: make it "
            "with the groups that were saved"
        )
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__qualname__ in _ANY_SHAPE:
        return
    for number, parameter, values in _by_parameter(optimizer, state):
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
                raise TargetError(
                    f"{key!r} of parameter {number} has the shape {tuple(value.shape)}, the parameter "
                    f"{tuple(parameter.shape)}: make the {kind.__qualname__} with the parameters that were saved, in "
                    "the same order"
                )


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Calls `load_state_dict`, and puts dtypes back that it changed: it casts moments to their parameters'."""
    optimizer.load_state_dict(state)
    if isinstance(state, dict) and {"state", "param_groups"} <= state.keys():
        for _, parameter, values in _by_parameter(optimizer, state):
            if parameter in optimizer.state:
                optimizer.state[parameter] = _as_handed(optimizer.state[parameter], values)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """In the order in which state_dict() numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter(optimizer: torch.optim.Optimizer, path: tuple[Any, ...]) -> torch.Tensor | None:
    """The parameter whose state a place is in."""
    number = path[1] if len(path) > 2 and path[0] == "state" else None
    if type(number) is not int or number < 0:
        return None
    for group in optimizer.param_groups:
        if number < len(group["params"]):
            found: torch.Tensor = group["params"][number]
            return found
        number -= len(group["params"])
    return None


def _by_parameter(optimizer: torch.optim.Optimizer, state: Any) -> list[tuple[Any, torch.Tensor, Mapping[Any, Any]]]:
    """The name or number, the parameter and the saved state of each that has one."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    pairs = zip(names, _parameters(optimizer), strict=False)
    return [(name, parameter, state["state"][name]) for name, parameter in pairs if name in state["state"]]


def _as_handed(now: Any, handed: Any) -> Any:
    """A value as `load_state_dict` left it, with tensors that it only cast as they were handed to it."""
    if isinstance(now, torch.Tensor) and isinstance(handed, torch.Tensor):
        return handed.to(now.device) if now.dtype != handed.dtype and _is_cast(handed, now) else now
    if isinstance(now, dict) and isinstance(handed, dict):
        for key in now.keys() & handed.keys():
            now[key] = _as_handed(now[key], handed[key])
    if isinstance(now, list) and isinstance(handed, list) and len(now) == len(handed):
        now[:] = [_as_handed(*pair) for pair in zip(now, handed, strict=True)]
    return now


def _is_cast(handed: torch.Tensor, now: torch.Tensor) -> bool:
    one, other = (local_tensor(d) if (d := as_dtensor(each)) is not None else each for each in (handed, now))
    cast = one.to(dtype=other.dtype, device=other.device)
    return cast.shape == other.shape and torch.equal(bits(cast.contiguous()), bits(other.contiguous()))


def _said(counts: list[int]) -> str:
    shown = ", ".join(map(str, counts[:5])) + ", ..." * (len(counts) > 5)
    return f"{len(counts)} group{'s' * (len(counts) != 1)} of {shown} parameters"
