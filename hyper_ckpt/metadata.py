"""What a checkpoint holds, in the words that users of torch's distributed checkpoint know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hyper_ckpt.box import ints_if_all

V = TypeVar("V")


@dataclass(frozen=True)
class MetadataIndex:
    """Names one stored chunk: `offset` in elements; `index` counts the tensor's chunks. Both None: a whole value.

    Two that differ only in `index` are equal: it is a hint, which a caller need not know.
    """

    fqn: str
    offset: tuple[int, ...] | None = None
    index: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.offset is not None:
            object.__setattr__(self, "offset", ints_if_all(self.offset))


@dataclass(frozen=True)
class ChunkStorageMetadata:
    """A box of a tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorProperties:
    """`dtype` is a name of `hyper_ckpt.dtypes`."""

    dtype: str


@dataclass(frozen=True)
class TensorStorageMetadata:
    """A tensor: global shape and the chunks it is stored in, in row-major order of their offsets."""

    properties: TensorProperties
    size: tuple[int, ...]
    chunks: tuple[ChunkStorageMetadata, ...]


@dataclass(frozen=True)
class BytesStorageMetadata:
    """A value that is not a tensor. `kind` says how it is kept: plain, per_rank, blob, ranks, ..."""

    kind: str


@dataclass(frozen=True)
class StorageInfo:
    """Where a chunk lies: file inside the checkpoint, bytes from the file's beginning, bytes, number of its copy."""

    relative_path: str
    offset: int
    length: int
    copy: int = 0


class LazyMapping(Mapping[str, V], Generic[V]):
    """A mapping whose values are made when asked for."""

    def __init__(self, keys: Mapping[str, Any], make: Callable[[str], V]) -> None:
        self._keys, self._make = keys, make

    def __getitem__(self, key: str) -> V:
        if key not in self._keys:
            raise KeyError(key)
        return self._make(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<{len(self)} entries>"


@dataclass(frozen=True, eq=False)
class Metadata:
    """What a checkpoint holds.

    Args:
        state_dict_metadata: by name; made lazily, as are the others.
        planner_data: the nested state without tensors, see docs/format.md.
        storage_data: by tensor name, the chunks and where each lies, copies included.
        version: of the format.
        save_id: 16 hex digits, unique per save.
        world_size: ranks that saved.
        created: seconds since the epoch.
        files: bytes by file name.
        user_metadata: what `save(user_metadata=...)` was given.
        conflicts: by names under which ranks saved different tensors, the ranks of each and the name that it is stored
            under, by which the mappings above have it.
    """

    state_dict_metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: Any
    storage_data: Mapping[str, tuple[tuple[MetadataIndex, StorageInfo], ...]]
    version: int
    save_id: str
    world_size: int
    created: float
    files: Mapping[str, int]
    user_metadata: Any
    conflicts: Mapping[str, tuple[tuple[tuple[int, ...], str], ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<Metadata of save {self.save_id}: {len(self.storage_data)} tensors, {sum(self.files.values()):,} "
            f"bytes in {len(self.files)} files, {self.world_size} rank{'s' * (self.world_size > 1)}>"
        )
