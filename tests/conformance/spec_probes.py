"""Announced platforms, whose specs keep their promises or break one. Imported by name, so that ranks find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.host_stager import HostStager
from hyper_ckpt.builtin.numpy_platform import OfflineRanks, SingleRank
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import Platform, PlatformSpec, Ranks
from hyper_ckpt.hookspecs import hookimpl
from hyper_ckpt.registry import registry
from hyper_ckpt.testing.conformance.numpy_probe import NumpyProbe


class Own(np.ndarray):
    """The tensors of this platform."""


def platform_of(ranks: Ranks) -> Platform:
    tensors = CompositeTensors([NumpyTensors()])
    return Platform("spec", ranks, tensors, HostStager(tensors))


class Good(NumpyProbe):
    """A probe that is the plugin too."""

    modules: ClassVar[tuple[str, ...]] = ("spec_probes",)

    def __init__(self) -> None:
        super().__init__()
        self._here = platform_of(SingleRank())
        registry().unregister("spec_probes")
        registry().register(self, "spec_probes")

    @hookimpl
    def hyper_ckpt_platforms(self) -> list[PlatformSpec]:
        return [PlatformSpec("spec", self.modules, self.active, self.load, "pip install spec")]

    def active(self) -> int:
        return 0 if isinstance(self._here.ranks, SingleRank) else self._here.ranks.world_size

    def load(self) -> Platform:
        return self._here

    def platform(self) -> Platform:
        return self._here

    def make(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        return super().make(dtype, shape, data).view(Own)

    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        self._here = platform_of(OfflineRanks(rank, world_size))
        return self._here

    def run_world(self, world_size: int, fn: Callable[[Platform], Any], timeout: float) -> Any:
        return None


class OtherModules(Good):
    modules = ("specs",)


class AlwaysInactive(Good):
    def active(self) -> int:
        return 0


class ANewOneEachTime(Good):
    def load(self) -> Platform:
        return platform_of(self._here.ranks)


class LoadsWhatWasThereFirst(Good):
    def __init__(self) -> None:
        super().__init__()
        self._first = self._here

    def load(self) -> Platform:
        return self._first
