"""How MindSpore's sharded tensors lie over ranks, in the terms of hyper_ckpt.layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms

from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.tensor_map import Box, Sharding, Shardings, TensorMap, make_tensor_map, read_dtensor, read_layout


def is_dtensor(value: Any) -> bool:
    """Whether a tensor is one of hyper-parallel's, which derive from MindSpore's."""
    return hasattr(value, "to_local") and (hasattr(value, "layout") or hasattr(value, "placements"))


def local_tensor(value: Any) -> Any:
    """This rank's part: the tensor itself, if it is a plain one."""
    return value.to_local() if is_dtensor(value) else value


class Layouts:
    """Finds out how tensors lie over the ranks of one group.

    Args:
        global_ranks: MindSpore's rank of each of the group's ranks.
        own: MindSpore's rank of this process.
        layouts: by name of the parameter, see `MindSporePlatform`.
    """

    def __init__(self, global_ranks: Sequence[int], own: int, layouts: Mapping[Any, Any] | None = None) -> None:
        self._own = own
        self._maps = {name: _named_map(name, entry) for name, entry in _of_this_rank(layouts or {}, own).items()}
        self._shardings = Shardings(global_ranks, own)

    def of(self, value: Any) -> Sharding | None:
        """How a tensor lies; None: whole, on every rank that has it.

        Raises:
            UnsupportedLayoutError: it cannot be stored as it lies.
        """
        if is_dtensor(value):
            return self._shardings.of(read_dtensor(value), tuple(value.shape))
        if not isinstance(value, ms.Parameter):
            return None
        found = self._maps.get(value.name)
        if found is None:
            _refuse_sliced(value)
            return None
        shape = found.shape
        if shape is None:
            found.check_dimensions(len(value.shape))
            shape = tuple(n * pieces for n, pieces in zip(value.shape, found.pieces(), strict=True))
        return self._shardings.of(found, shape)

    def own_box(self, value: Any, local: Any) -> Box | None:
        """(offsets, sizes) of this rank's part `local` of a sharded tensor, None if the rank is not in its mesh.

        Raises:
            UnsupportedLayoutError: the local tensor has another shape than its layout says.
        """
        sharding = self.of(value)
        return None if sharding is None else sharding.own_box(local.shape, self._own)


def read_entry(entry: Any, shape: tuple[int, ...] | None = None) -> TensorMap:
    """Reads what `MindSporePlatform(layouts=)` takes: a `Layout`, its `to_dict()`, `[layout, dtype, global shape]` as
    the strategy metadata have it, or an entry of `Cell.parameter_layout_dict`.

    Raises:
        UnsupportedLayoutError: it means something that cannot be stored.
        TypeError: it is none of these.
    """
    if not isinstance(entry, list | tuple):
        return read_layout(entry, shape)
    if len(entry) == 3 and not isinstance(entry[0], list | tuple):
        return read_entry(entry[0], tuple(int(n) for n in entry[2]))
    return _compiled_map(entry)


def _compiled_map(entry: Sequence[Any]) -> TensorMap:
    """Of (device matrix, tensor map, slice shape, field, uniform split, optimizer's group, full shape)."""
    if len(entry) < 7:
        raise TypeError(f"a layout is needed, not {entry!r:.200}")
    mesh, tensor_map, _, field, uniform, optimizer_group, shape = entry[:7]
    if field or not uniform or optimizer_group:
        raise UnsupportedLayoutError(
            "an entry of parameter_layout_dict that is cut by the optimizer, by field or not uniformly does not say "
            "what a rank holds: pass layouts=get_current_strategy_metadata(net) instead"
        )
    return make_tensor_map(mesh, tensor_map, range(math.prod(mesh)), tuple(int(n) for n in shape))


def _of_this_rank(layouts: Mapping[Any, Any], own: int) -> Mapping[Any, Any]:
    """Strategy metadata are by rank first, those of the current rank under 0."""
    if not layouts or not all(isinstance(key, int) for key in layouts):
        return layouts
    if own in layouts or set(layouts) == {0}:
        found: Mapping[Any, Any] = layouts.get(own, layouts.get(0, {}))
        return found
    raise ValueError(f"layouts= has entries for ranks {sorted(layouts)[:8]}, but none for this one, {own}")


def _named_map(name: str, entry: Any) -> TensorMap:
    try:
        return read_entry(entry)
    except (UnsupportedLayoutError, TypeError, ValueError) as error:
        raise type(error)(f"layouts[{name!r}]: {error}") from error


def _refuse_sliced(parameter: ms.Parameter) -> None:
    """A parameter that MindSpore has cut must not pass for a whole one."""
    if parameter.sliced and any(number != -1 for number in _flat(parameter.param_info.tensor_map or ())):
        raise UnsupportedLayoutError(
            f"the parameter {parameter.name!r} was cut by MindSpore, but not how it lies over ranks: pass "
            "platform=MindSporePlatform(layouts=get_current_strategy_metadata(net))"
        )


def _flat(values: Any) -> list[int]:
    return [each for value in values for each in (_flat(value) if isinstance(value, list | tuple) else [int(value)])]
