"""How the platform suite looks at a framework from behind the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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

    def views(self, value: Any) -> Sequence[tuple[Any, Any]]:
        """Pairs of tensors over the memory of `value`, a square tensor of two dimensions with 4 elements or more. The
        two of a pair have one shape, and are not the same elements: a tensor and its transpose, its first rows and its
        last ones, every second row from 0 and from 1; or have other dtypes. Empty: the framework has no views."""
        return ()

    def overlapping(self, dtype: str, shape: tuple[int, ...]) -> Any | None:
        """A tensor of this shape, whose first dimension is repeated: all along it are the same memory (made by expand
        or broadcast). None: the framework has none."""
        return None

    def meta(self, dtype: str, shape: tuple[int, ...]) -> Any | None:
        """A tensor without memory (torch's meta device). None: the framework has none."""
        return None

    @abstractmethod
    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        """In a fresh process: joins the framework's process group of `world_size` ranks, and returns its platform.

        Rank 0 may listen on `address`:`port`; both are the same on all ranks, and one port is all there is. RANK,
        LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as launchers do, with another port."""

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
        cuts it, also where it does not divide evenly; `data` are the bytes of the whole. None: it has none.

        Called on every rank, in step. Shapes have one dimension or two, no length is 0; some are shorter than there are
        ranks. Where the framework refuses a shape (only even cuts, say), pad or answer with a `ShardedTensor`."""
        return None

    def more_sharded(
        self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int
    ) -> Sequence[Any]:
        """The same tensor sharded in every other way that the framework knows: along another dimension, over several
        mesh dimensions, one dimension cut twice and in either order, replicated in part, by some ranks only, in several
        pieces. As many, in the same order, on all ranks; those that do not fit the shape are left out."""
        return ()

    def misshapen(self, dtype: str, shape: tuple[int, ...], rank: int, world_size: int) -> Any | None:
        """A sharded tensor whose part here has another shape than its sharding says, as after a wrong resize. None: the
        framework cannot have one."""
        return None

    def local_raw(self, value: Any) -> bytes:
        """The bytes of this rank's part of a tensor of `sharded` or `more_sharded`, row-major; of several pieces one
        after the other, in the order of `Tensors.local_shards`; empty where it has none."""
        raise NotImplementedError
