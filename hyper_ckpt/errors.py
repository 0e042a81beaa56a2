"""The error tree. Every failure a user can meet is a `CheckpointError`.

    CheckpointError
    +-- CheckpointNotFoundError      no checkpoint at this path
    +-- CheckpointExistsError        a complete checkpoint is in the way and overwrite=False
    +-- CheckpointReplacedError      another saver published to this path meanwhile
    +-- CorruptCheckpointError       what is stored is not what was saved
    |   +-- ManifestError            the manifest is damaged, truncated or hostile
    |   +-- MissingFileError         a file that the manifest lists is gone
    |   +-- FileSizeError            a file has another size than recorded
    |   +-- HeaderError              a file's header is not the recorded one
    |   +-- DigestError              stored bytes differ from their digest
    |   +-- CoverageError            the stored boxes do not cover a tensor exactly once
    +-- VersionError                 written by a newer format version
    +-- StateMismatchError           the target and the checkpoint differ (several ways at once)
    |   +-- MissingKeyError          the target wants keys that were not saved
    |   +-- UnexpectedKeyError       saved keys that the target does not want (strict="exact")
    |   +-- ShapeMismatchError
    |   +-- DtypeMismatchError
    |   +-- ContainerMismatchError   another kind or length of container, or of plain value
    |   +-- ConflictError            ranks hold, or saved, different values under one name
    +-- UnsupportedStateError        this value cannot be saved or loaded
    |   +-- UnsupportedTypeError     no codec for this type
    |   +-- UnsupportedDtypeError
    |   +-- UnsupportedLayoutError   e.g. a Partial placement
    |   +-- TargetError              a target that cannot be written into
    +-- PlanError                    a plan breaks its contract (custom planners, wrong layouts)
    +-- MemoryBudgetError            max_host_bytes is too small for this plan
    +-- RanksDisagreeError           ranks called with different options or states
    +-- RankFailedError              another rank failed; names rank, file and first cause
    +-- RankTimeoutError             ranks that did not arrive in time, named
    +-- SaveInFlightError            an asynchronous save is not over in the time given
    +-- StoreError                   the byte store failed (disk full, permission), names the file
    |   +-- UnreadableFileError      what is there cannot be read: no permission, an I/O error, no regular file
    +-- PlatformError                the platform cannot be chosen or loaded
        +-- NoPlatformError
        +-- MixedFrameworksError
        +-- PluginError              a plugin failed to load or breaks the contract
        +-- UnknownSchemeError       no store for this URL scheme

CheckpointNotFoundError and MissingFileError are FileNotFoundErrors of Python, too.
A message says what happened, where, and what to do next; the cause is chained.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_ckpt.text import clean_lines


class CheckpointError(Exception):
    """Base of all errors of this library.

    Its text may hold names from files and words of other ranks: nothing in it moves a terminal's cursor or the like.
    """

    def __str__(self) -> str:
        return clean_lines(super().__str__())


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No complete checkpoint lies at this path."""


class CheckpointExistsError(CheckpointError):
    """A complete checkpoint lies at this path and `overwrite=True` was not given."""


class CheckpointReplacedError(CheckpointError):
    """Another saver published to the same path while this save was running."""


class CorruptCheckpointError(CheckpointError):
    """What is stored differs from what was saved."""


class ManifestError(CorruptCheckpointError):
    """The manifest (or a receipt) is damaged, truncated or hostile."""


class MissingFileError(CorruptCheckpointError, FileNotFoundError):
    """A file that the manifest lists does not exist."""


class FileSizeError(CorruptCheckpointError):
    """A file's size differs from the recorded one."""


class HeaderError(CorruptCheckpointError):
    """A file's header differs from the recorded one."""


class DigestError(CorruptCheckpointError):
    """Stored bytes differ from their recorded digest."""


class CoverageError(CorruptCheckpointError):
    """Boxes do not cover a tensor exactly once."""


class VersionError(CheckpointError):
    """The checkpoint has a newer format version than this release reads."""


class StateMismatchError(CheckpointError):
    """The target and the checkpoint do not fit; `problems` lists every difference found."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class MissingKeyError(StateMismatchError):
    """The target wants keys that were not saved."""


class UnexpectedKeyError(StateMismatchError):
    """The checkpoint holds keys that the target does not want (only with `strict="exact"`)."""


class ShapeMismatchError(StateMismatchError):
    """A tensor was saved with another global shape."""


class DtypeMismatchError(StateMismatchError):
    """A tensor was saved with another dtype."""


class ContainerMismatchError(StateMismatchError):
    """A container or plain value was saved as another kind, or with another length."""


class ConflictError(StateMismatchError):
    """Ranks hold different values under one name, and the save refuses that; or ranks saved different tensors under one
    name, and the load must say whose it wants."""


class UnsupportedStateError(CheckpointError):
    """A value of the state cannot be saved or loaded."""


class UnsupportedTypeError(UnsupportedStateError):
    """No codec is registered for a value's type."""


class UnsupportedDtypeError(UnsupportedStateError):
    """A tensor's dtype cannot be stored."""


class UnsupportedLayoutError(UnsupportedStateError):
    """A tensor's distribution over ranks cannot be stored."""


class TargetError(UnsupportedStateError):
    """A target of a load cannot be written into, or two saved values compete for it."""


class PlanError(CheckpointError):
    """A plan breaks its contract."""


class MemoryBudgetError(CheckpointError):
    """`max_host_bytes` is too small for what the plan needs at once."""


class RanksDisagreeError(CheckpointError):
    """Ranks called with different options."""


class RankFailedError(CheckpointError):
    """One or more ranks failed; `ranks` names them, the message has file and first cause."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankTimeoutError(CheckpointError):
    """Ranks that did not arrive before the deadline; `ranks` names them."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SaveInFlightError(CheckpointError):
    """An asynchronous save is still running after the time given to wait for it."""


class StoreError(CheckpointError):
    """The byte store failed; the message names the file."""


class UnreadableFileError(StoreError):
    """Something has this name and cannot be read: no permission, an I/O error, or it is no regular file."""


class PlatformError(CheckpointError):
    """A platform, store or plugin cannot be chosen or loaded."""


class NoPlatformError(PlatformError):
    """No platform fits."""


class MixedFrameworksError(PlatformError):
    """One state holds tensors of two frameworks, or two platforms are active."""


class PluginError(PlatformError):
    """A plugin failed to load or breaks its contract."""


class UnknownSchemeError(PlatformError):
    """No store is registered for a URL's scheme."""
