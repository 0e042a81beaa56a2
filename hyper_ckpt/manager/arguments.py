"""What a manager is called with: checked on each rank, and the same on all."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, SupportsIndex

import msgspec

from hyper_ckpt.errors import RanksDisagreeError
from hyper_ckpt.text import clean


def check_kind(name: str, value: Any, kind: type, first: str) -> None:
    """Raises TypeError for what is neither None nor of this kind; the text shows how it is written.

    Args:
        first: the kind's parameter that a bare number was probably meant for.
    """
    if value is not None and not isinstance(value, kind):
        shown = value if type(value) is not bool and isinstance(value, Integral) else "..."
        raise TypeError(f"{name} must be {kind.__name__}({first}={shown}), not {_shown(value)}")


def check_count(name: str, value: object, hint: str = "") -> None:
    """Raises for what is no integer above 0.

    Args:
        hint: what to do instead, for the error's text.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, not {_shown(value)}{hint}")
    check_above_zero(name, value, hint)


def check_above_zero(name: str, value: Any, hint: str = "") -> None:
    """Raises for what is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {_shown(value)}{hint}")
    if not float(value) > 0:
        raise ValueError(f"{name} must be above 0, not {value}{hint}")


def check_metrics(value: object, metric: str) -> None:
    """Raises TypeError for metrics without names."""
    if value is not None and not isinstance(value, Mapping):
        example = value if isinstance(value, Real) else "..."
        raise TypeError(f'metrics must be {{"{metric}": {example}}}, not {_shown(value)}')


def step_number(step: object) -> int:
    """A step as a plain int; numpy's count, too."""
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise TypeError(f"step must be an integer from 0 on, not {_shown(step)}")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise ValueError(f"a step is a number from 0 on, not {number}")
    return number


def encode_arguments(values: Mapping[str, object]) -> bytes:
    """Arguments by name, to send to rank 0."""
    return msgspec.msgpack.encode({name: clean(str(value)) for name, value in values.items()})


def check_same(sent: Sequence[bytes]) -> None:
    """Compares the arguments of all ranks, at rank 0.

    Raises:
        RanksDisagreeError: names the argument, a rank and both values.
    """
    for rank, each in enumerate(sent):
        if each == sent[0]:
            continue
        first, other = (msgspec.msgpack.decode(e, type=dict[str, str]) for e in (sent[0], each))
        for name in first | other:
            if first.get(name) != other.get(name):
                raise RanksDisagreeError(
                    f"managers were made with different {name}: {first.get(name, 'nothing')} on rank 0 but "
                    f"{other.get(name, 'nothing')} on rank {rank}. Make them with the same arguments on every rank"
                )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
