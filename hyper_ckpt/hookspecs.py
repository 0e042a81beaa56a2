"""What a plugin may announce. Hooks return data; behaviour is in the contracts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pluggy

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.contracts.events import EventSpec
from hyper_ckpt.contracts.planner import LoadPlanner, SavePlanner
from hyper_ckpt.contracts.platform import PlatformSpec
from hyper_ckpt.contracts.store import StoreSpec

PROJECT = "hyper_ckpt"
"""Name of the entry-point group and of the pluggy project."""

CONTRACT_VERSION = 1
"""Of the hooks and of `hyper_ckpt.contracts`. The entry module of a plugin repeats the number it was written for."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class CodecSpec:
    """How a plugin announces codecs.

    Args:
        modules: top-level modules whose types they store; `load` is called once one of them is imported.
        load: the codecs.
    """

    modules: tuple[str, ...]
    load: Callable[[], Sequence[Codec]]


@dataclass(frozen=True)
class PlannerSpec:
    """How a plugin announces planners under a name.

    Args:
        name: unique; what `save(planner=name)` and `load(planner=name)` take.
        save: makes a save planner; None: the name is for loads only.
        load: makes a load planner; None: the name is for saves only.
    """

    name: str
    save: Callable[[], SavePlanner] | None = None
    load: Callable[[], LoadPlanner] | None = None


@hookspec
def hyper_ckpt_platforms() -> list[PlatformSpec]:  # type: ignore[empty-body]
    """Platforms of this plugin."""


@hookspec
def hyper_ckpt_stores() -> list[StoreSpec]:  # type: ignore[empty-body]
    """Byte stores of this plugin."""


@hookspec
def hyper_ckpt_codecs() -> list[CodecSpec]:  # type: ignore[empty-body]
    """Codecs of this plugin."""


@hookspec
def hyper_ckpt_events() -> list[EventSpec]:  # type: ignore[empty-body]
    """Observers of this plugin."""


@hookspec
def hyper_ckpt_planners() -> list[PlannerSpec]:  # type: ignore[empty-body]
    """Planners of this plugin."""
