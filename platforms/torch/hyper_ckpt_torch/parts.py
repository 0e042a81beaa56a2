"""Tensor subclasses that can be flattened (`__tensor_flatten__`), such as quantised ones: the tensors they are made of.

Where a DTensor's local part is one of these, each inner tensor is a DTensor of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from hyper_ckpt.contracts.platform import TensorParts
from hyper_ckpt.errors import UnsupportedStateError
from hyper_ckpt_torch.kinds import can_be_flattened
from hyper_ckpt_torch.layouts import as_dtensor, placement_of


def parts_of(value: Any) -> TensorParts | None:
    """What a tensor is made of; None where it is stored as it is."""
    dtensor = as_dtensor(value)
    local = value if dtensor is None else dtensor._local_tensor
    kind: Any = type(local)
    if kind is torch.Tensor or not can_be_flattened(kind):
        return None
    try:
        return _parts(local, local.shape) if dtensor is None else _Sharded(dtensor, local).parts()
    except UnsupportedStateError:
        raise
    except Exception as error:  # code of the class ran
        raise UnsupportedStateError(f"a {kind.__qualname__} cannot be taken apart: {error!r}") from error


def _parts(value: Any, shape: Sequence[int]) -> TensorParts:
    """The parts of a tensor on this rank, of global shape `shape`."""
    kind = type(value)
    names, own = value.__tensor_flatten__()
    size, stride = value.shape, value.stride()

    def rebuild(inner: Mapping[str, Any]) -> Any:
        return kind.__tensor_unflatten__(dict(inner), own, size, stride)

    context = {"shape": [int(length) for length in shape], "dtype": value.dtype, "context": _plain(own)}
    return TensorParts(
        {name: getattr(value, name) for name in names}, f"{kind.__module__}.{kind.__qualname__}", context, rebuild
    )


class _Sharded:
    """A DTensor whose local part is made of other tensors."""

    def __init__(self, dtensor: Any, local: Any) -> None:
        self._dtensor, self._local = dtensor, local
        self._mesh_shape = tuple(dtensor.device_mesh.shape)
        for placement in dtensor.placements:
            placement_of(placement, dtensor)  # refuses those that cannot be stored
        cutting = [m for m, n in enumerate(self._mesh_shape) if n > 1 and hasattr(dtensor.placements[m], "dim")]
        self._cuts = {m: dtensor.placements[m].dim for m in cutting}

    def parts(self) -> TensorParts:
        if self._dtensor.device_mesh.get_coordinate() is None:
            raise UnsupportedStateError(
                "a sharded tensor of a class that is made of others is not in its mesh on this rank: leave it out of "
                "the state here"
            )
        local = _parts(self._local, self._dtensor.shape)
        inner: dict[str, Any] = {}
        back: dict[str, Callable[[Any], Any]] = {}
        for name, value in local.inner.items():
            inner[name], back[name] = self._distributed(value)
        context = local.context
        if any(take is _only_row for take in back.values()):
            # One row for each piece: they mean nothing where the tensor is cut otherwise.
            cut = [[self._mesh_shape[m], str(self._dtensor.placements[m])] for m in self._cuts]
            context = {**context, "cut": cut}

        def rebuild(made: Mapping[str, Any]) -> Any:
            whole = local.rebuild({name: back[name](_local_of(value)) for name, value in made.items()})
            return self._dtensor_of(whole, self._dtensor.placements, self._dtensor.shape, self._dtensor.stride())

        return TensorParts(inner, local.kind, context, rebuild)

    def _distributed(self, inner: Any) -> tuple[Any, Callable[[Any], Any]]:
        """An inner tensor of this rank's part as a DTensor, and how a local tensor of that becomes an inner one."""
        from torch.distributed.tensor import Replicate, Shard

        if as_dtensor(inner) is not None:
            raise UnsupportedStateError("a DTensor inside a DTensor cannot be stored")
        found = self._along(inner)
        if found is not None:
            placements, shape = found
            return self._dtensor_of(inner, placements, shape), _as_it_is
        pieces = math.prod(self._mesh_shape[m] for m in self._cuts)
        rows = [Shard(0) if m in self._cuts else Replicate() for m in range(len(self._mesh_shape))]
        return self._dtensor_of(inner.unsqueeze(0), rows, (pieces, *inner.shape)), _only_row

    def _along(self, inner: Any) -> tuple[list[Any], tuple[int, ...]] | None:
        """Placements and global shape of an inner tensor that is cut along with the outer one; None if it isn't.

        A dimension that the outer tensor is cut along may have the same length, one element for each block of a
        size that all cuts keep whole, or one for all, which all pieces then hold alike.
        """
        from torch.distributed.tensor import Replicate

        placements, shape = [*self._dtensor.placements], [*inner.shape]
        if inner.ndim != self._local.ndim:
            return None
        for dim in set(self._cuts.values()):
            whole, own, here = self._dtensor.shape[dim], self._local.shape[dim], inner.shape[dim]
            axes = [m for m, cut in self._cuts.items() if cut == dim]
            if here == own:
                shape[dim] = whole
            elif here == 1:
                for m in axes:
                    placements[m] = Replicate()
            elif here and own % here == 0 and whole == own * math.prod(self._mesh_shape[m] for m in axes):
                shape[dim] = whole // (own // here)
            else:
                return None
        return placements, tuple(shape)

    def _dtensor_of(
        self, local: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int] | None = None
    ) -> Any:
        from torch.distributed.tensor import DTensor

        if stride is None:
            stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        with torch.no_grad():
            return DTensor.from_local(
                local,
                self._dtensor.device_mesh,
                list(placements),
                run_check=False,
                shape=torch.Size(shape),
                stride=tuple(stride),
            )


def _local_of(value: Any) -> Any:
    """The local tensor of one of the DTensors that `_Sharded` made."""
    with torch.no_grad():
        return value.to_local()


def _as_it_is(local: Any) -> Any:
    return local


def _only_row(local: Any) -> Any:
    return local.squeeze(0)


def _plain(context: Any) -> Any:
    """A context as plain values to compare. Where its tensors live, and whether they are trained, does not belong to
    it; of classes and members of enums only the names count."""
    if isinstance(context, torch.device):
        return None
    if isinstance(context, dict):
        return {key: _plain(value) for key, value in context.items() if key != "requires_grad"}
    if dataclasses.is_dataclass(context) and not isinstance(context, type):
        fields = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
        return {"class": type(context).__qualname__, **_plain(fields)}
    if isinstance(context, tuple) and hasattr(context, "_asdict"):
        return {"class": type(context).__qualname__, **_plain(context._asdict())}
    if isinstance(context, list | tuple):
        return [_plain(value) for value in context]
    if isinstance(context, Enum):
        return f"{type(context).__qualname__}.{context.name}"
    if isinstance(context, torch.layout | torch.memory_format):
        return str(context)
    return context
