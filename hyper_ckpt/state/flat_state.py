"""What a nested state becomes when it is taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_ckpt.contracts.platform import TensorParts
from hyper_ckpt.state.ask import Substate
from hyper_ckpt.state.tree import Node

PartsOf = Callable[[Any], TensorParts | None]
"""What a tensor is made of; None: it is none such."""

ToHost = Callable[[Any], tuple[str, tuple[int, ...], bytes]]
"""A tensor as the name of its dtype, its shape, and its little-endian row-major bytes."""


Given = Mapping[str | None, Substate]
"""By name, the objects that were asked for their states."""


@dataclass(frozen=True, eq=False)
class Composed:
    """A tensor that is made of others, and of which."""

    value: Any
    parts: TensorParts


@dataclass(frozen=True, eq=False)
class FlatState:
    """A state taken apart. Everything is keyed by name, in the order in which it was met.

    `root` is the given state itself and the values of `tensors` its own tensors: nothing is copied. Of a tensor that is
    made of others these are among `tensors`, and itself is in `composed`. `whole` names what takes the saved state as
    it was saved: see `adopt`.
    """

    root: Mapping[Any, Any]
    tree: Node
    tensors: dict[str, Any]
    payloads: dict[str, bytes]
    blobs: dict[str, bytes]
    substates: dict[str, Substate]
    composed: dict[str, Composed]
    whole: frozenset[str] = frozenset()
