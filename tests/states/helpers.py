"""States, equality by type and bits, and the glue to save and load them on any number of ranks."""

import copy
import random
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import PerRank

State = dict[Any, Any]


class Point(NamedTuple):
    x: Any
    y: Any


class Stateful:
    """An object with a state_dict."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = dict(state)


def fresh() -> str:
    return f"memory://tests/{uuid.uuid4().hex}"


def same(a: Any, b: Any) -> bool:
    """Equal in type and bits, all the way down; dicts in order too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        pairs = zip(a.items(), b.items(), strict=False)
        return factory and len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple | deque):
        bound = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return bound and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if type(a) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, PerRank):
        return same(a.value, b.value)
    if isinstance(a, Stateful):
        return same(a.state, b.state)
    if isinstance(a, random.Random):
        return a.getstate() == b.getstate()
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    return bool(a == b)


def blank(value: Any) -> Any:
    """A target that fits `value` and holds nothing of it."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {k: blank(v) for k, v in value.items()})
    if isinstance(value, dict):
        return type(value)({k: -7 if isinstance(value, Counter) else blank(v) for k, v in value.items()})
    if isinstance(value, Point):
        return Point(*map(blank, value))
    if isinstance(value, deque):
        return deque(map(blank, value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(map(blank, value))
    if isinstance(value, np.ndarray):
        out = np.empty_like(value)
        out.reshape(-1).view(np.uint8)[...] = 1
        return out
    if isinstance(value, PerRank):
        return PerRank("other")
    if isinstance(value, Stateful):
        return Stateful(**blank(value.state))
    if isinstance(value, random.Random):
        return random.Random(-1)
    return "other"


def on_ranks(world_size: int, job: Callable[[Platform, int], Any], **options: Any) -> list[Any]:
    return run_world(world_size, lambda platform: job(platform, platform.ranks.rank), **options)


def save_on(world_size: int, of_rank: Callable[[int], State], url: str, **options: Any) -> list[hyper_ckpt.Metadata]:
    return on_ranks(world_size, lambda p, rank: hyper_ckpt.save(of_rank(rank), url, platform=p, timeout=30, **options))


def load_on(
    world_size: int, of_rank: Callable[[int], State], url: str, **options: Any
) -> tuple[list[State], list[hyper_ckpt.LoadReport]]:
    def job(platform: Platform, rank: int) -> tuple[State, hyper_ckpt.LoadReport]:
        target = of_rank(rank)
        return target, hyper_ckpt.load(target, url, platform=platform, timeout=30, **options)

    rows = on_ranks(world_size, job)
    return [r[0] for r in rows], [r[1] for r in rows]


def plain_of(value: Any) -> Any:
    """What `read` makes of a state: objects with a state_dict come as what it gave."""
    if isinstance(value, Stateful):
        return plain_of(value.state)
    if isinstance(value, PerRank):
        return PerRank(plain_of(value.value))
    if isinstance(value, OrderedDict | defaultdict | Counter | Point | deque):
        return value
    if isinstance(value, dict):
        return {k: plain_of(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain_of, value))
    return value


def copied(state: State) -> State:
    return copy.deepcopy(state)
