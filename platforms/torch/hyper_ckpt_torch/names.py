"""Parameters under the names that they have in a model, whatever it is wrapped in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_INNER = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Under which torch.compile, activation checkpointing and FSDP1 keep the module that they wrap."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile."""
    inner: Any = module
    while True:
        if _is_parallel(inner):
            inner = inner.module
        elif "_orig_mod" in getattr(inner, "_modules", {}):
            inner = inner._orig_mod
        else:
            return inner  # type: ignore[no-any-return]


def named_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters, tied ones under each of their names; parts of names that wrappers add are left out."""
    return _below(module, "")


def _below(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            added = name in _INNER or (name == "module" and _is_parallel(module))
            yield from _below(child, prefix if added else f"{prefix}{name}.")


def _is_parallel(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
