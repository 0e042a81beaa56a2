"""How the platform suite looks at a framework from behind the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hyper_ckpt.contracts.platform import Platform


class PlatformProbe(ABC):
    """Makes tensors of a framework and reads them, by the framework's own means.

    Nothing here may use the plugin's `Tensors` or `Stager`: the suite compares what those say with what is here.
    Bytes are row-major, elements as in memory, little-endian. Made once per process.
    """

    @property
    @abstractmethod
    def dtypes(self) -> tuple[str, ...]:
        """Every dtype that tensors of this platform can have, as named in `hyper_ckpt.dtypes`."""

    @abstractmethod
    def platform(self) -> Platform:
        """The platform of this process alone, as `PlatformSpec.load` gives it where no process group is."""

    @abstractmethod
    def make(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        """A plain tensor with these bytes, in the memory that training uses, finished."""

    @abstractmethod
    def raw(self, value: Any) -> bytes:
        """The bytes of a plain tensor (of `make` or `strided`) once all work queued on it has run."""

    @abstractmethod
    def overwrite(self, value: Any, data: bytes) -> None:
        """Writes these bytes into a plain tensor in the way training would: queued on the caller's stream and not
        waited for, where the framework has streams."""

    def strided(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any | None:
        """Like `make`, but a view whose elements do not lie in one run (transposed, or every second of a larger
        tensor). None: the framework has no such views."""
        return None

    def tied(self, value: Any) -> Any | None:
        """Another tensor object over the same memory as `value`. None: the framework has none."""
        return None

    def meta(self, dtype: str, shape: tuple[int, ...]) -> Any | None:
        """A tensor without memory (torch's meta device). None: the framework has none."""
        return None

    @abstractmethod
    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        """In a fresh process: joins the framework's process group of `world_size` ranks, whose rank 0 may listen on
        `address`:`port`, and returns the platform of it."""

    def run_world(self, world_size: int, fn: Callable[[Platform], Any], timeout: float) -> list[Any] | None:
        """Calls `fn` with the platform of each of `world_size` ranks at once, inside this process, and returns what the
        ranks return, or raises what the first failing one raised; `timeout` in seconds for all of it.

        For platforms without processes of their own. None, without a call of `fn`: every rank is a fresh process that
        calls `join`."""
        return None

    def leave(self) -> None:
        """Undoes `join`, when this rank is done; ranks may be slow or gone."""
        return None

    def sharded(self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int) -> Any | None:
        """After `join`: the framework's own sharded tensor over all ranks, cut along some dimension as the framework
        cuts it, also where it does not divide evenly; `data` are the bytes of the whole. None: it has none."""
        return None

    def local_raw(self, value: Any) -> bytes:
        """The bytes of this rank's part of a tensor of `sharded`."""
        raise NotImplementedError
