"""Which file holds what: placement when saving, location when loading. Pure, but for one read of the manifest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_ckpt.columns import Columns, Located, Placed
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.manifest import Manifest


@dataclass(frozen=True)
class FilePlan:
    """A data file to write: its header comes first, then the data section.

    `payload_starts` are the bytes from the data section to those payloads that this file holds, by name.
    """

    name: str
    header: bytes
    data_bytes: int
    payload_starts: dict[str, int]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.data_bytes


class StorageWriter(ABC):
    """Places chunks in files. Holds no I/O options: those are `save`'s.

    Args:
        checkpoint_id: the path or URL to write to; None until `at` gives one.
    """

    checkpoint_id: str | None

    @abstractmethod
    def at(self, checkpoint_id: str) -> StorageWriter:
        """The same writer for another checkpoint."""

    @abstractmethod
    def identity(self) -> str:
        """Class and options, equal on all ranks that write one checkpoint."""

    @abstractmethod
    def place(self, columns: Columns, save_id: str) -> Placed:
        """Gives every chunk a place.

        Each rank places its own chunks and rank 0 places all: what a rank's chunks get must depend on
        that rank's chunks only, and files must be one rank's.
        """

    @abstractmethod
    def files(
        self, columns: Columns, placed: Placed, rank: int, save_id: str, payloads: Sequence[tuple[str, int]]
    ) -> list[FilePlan]:
        """The files that `rank` writes; `payloads` are named byte strings of known size to hold besides."""


class StorageReader(ABC):
    """Finds chunks in a checkpoint. Readers of foreign formats implement this alone.

    Args:
        checkpoint_id: the path or URL to read from; None until `at` gives one.
    """

    checkpoint_id: str | None

    @abstractmethod
    def at(self, checkpoint_id: str) -> StorageReader:
        """The same reader for another checkpoint."""

    @abstractmethod
    def identity(self) -> str:
        """Class and options, equal on all ranks that read together."""

    @abstractmethod
    def load_metadata(self, store: ByteStore) -> Manifest:
        """What the checkpoint holds. One rank calls it and shares `Manifest.data`.

        Raises:
            CheckpointNotFoundError: no complete checkpoint here.
            CorruptCheckpointError: it cannot be trusted.
        """

    def load_partial(self, store: ByteStore) -> Manifest:
        """As `load_metadata`, but of a save by ranks that did not talk also what is there, where parts are missing:
        `Manifest.absent` names their ranks. Inherited: what is not complete is no checkpoint."""
        return self.load_metadata(store)

    @abstractmethod
    def locate(self, manifest: Manifest, wanted: Columns, rank: int) -> Located:
        """Stored pieces for the wanted boxes, which together fill each exactly once. `rank` may prefer its own copies.

        Raises:
            CoverageError: a wanted box is not stored whole.
        """
