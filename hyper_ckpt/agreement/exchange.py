"""What all ranks described, made one: structures broadcast once each, rank parts gathered compactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from hyper_ckpt.agreement.verdict import Verdict, rebuild, report, vote_of
from hyper_ckpt.box import IntArray
from hyper_ckpt.contracts.platform import ByteBuffer, Ranks
from hyper_ckpt.description import (
    Description,
    ExplicitBoxes,
    RankPart,
    Structure,
    World,
    unpack_ranks,
)
from hyper_ckpt.planning.replicas import Said, cell, differing, groups_of
from hyper_ckpt.state.variants import Groups


class _Facts(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 condenses of all rank parts: meshes by structure and number, ties, and what to compare."""

    meshes: list[list[list[list[int]]]]
    ties: dict[str, str]
    compare: bool


class _Conflicts(msgspec.Struct, frozen=True, array_like=True):
    """Which ranks hold equal replicas of tensors that differ: the distinct answers, and the number of each tensor's."""

    distinct: list[Groups]
    groups: dict[str, int]


@dataclass(eq=False)
class Exchange:
    """One exchange, on one rank."""

    ranks: Ranks
    description: Description
    _structures: tuple[Structure, ...] = ()

    def run(self) -> World:
        """The world; collective."""
        structure = self.description.encoded
        record = self.description.digest + len(structure).to_bytes(8, "little")
        records = [bytes(r) for r in self.ranks.all_gather_object(record)]
        digests = list(dict.fromkeys(r[:16] for r in records))
        class_of = np.array([digests.index(r[:16]) for r in records], np.int64)
        firsts = [int(np.flatnonzero(class_of == c)[0]) for c in range(len(digests))]
        sizes = [int.from_bytes(records[r][16:], "little") for r in firsts]
        self._structures = self._broadcast_structures(structure, firsts, sizes)
        parts = self.ranks.gather_bytes(msgspec.msgpack.encode(self.description.rank_part))
        boxes = ExplicitBoxes()

        def condense() -> bytes:
            nonlocal boxes
            decoded = [msgspec.msgpack.decode(p, type=RankPart) for p in parts or ()]
            boxes = self._boxes(decoded, class_of)
            meshes = self._meshes(decoded, class_of)
            facts = _Facts(
                [[m.tolist() for m in row] for row in meshes],
                self._common_ties(decoded, class_of),
                self._suspicious(decoded, class_of),
            )
            return msgspec.msgpack.encode(facts)

        facts = msgspec.msgpack.decode(self._told(condense), type=_Facts)
        arrays = tuple(tuple(np.array(m, np.int64) for m in row) for row in facts.meshes)
        said = msgspec.msgpack.encode((digests, class_of.tolist(), facts.meshes, sorted(facts.ties.items())))
        key = xxhash.xxh3_128_digest(said)
        world = World(self.ranks.world_size, self._structures, class_of, arrays, boxes, facts.ties, key=key)
        return self._with_conflicts(world) if facts.compare else world

    def _told(self, compute: Callable[[], bytes]) -> bytes:
        """What rank 0 computes, on every rank; if that fails, its error."""
        data, cause = b"", None
        if self.ranks.rank == 0:
            try:
                verdict = Verdict(compute())
            except Exception as error:
                verdict, cause = report("comparing what ranks described", {0: vote_of(error)}), error
            data = msgspec.msgpack.encode(verdict)
        verdict = msgspec.msgpack.decode(broadcast_bytes(self.ranks, data), type=Verdict)
        if verdict.error:
            raise rebuild(verdict, None) from cause
        return verdict.value

    def _broadcast_structures(self, own: bytes, firsts: list[int], sizes: list[int]) -> tuple[Structure, ...]:
        if self.ranks.world_size == 1:
            return (self.description.structure,)
        buffers = [broadcast_sized(self.ranks, src, own, size) for src, size in zip(firsts, sizes, strict=True)]
        return tuple(msgspec.msgpack.decode(b.data, type=Structure) for b in buffers)

    def _meshes(self, parts: list[RankPart], class_of: IntArray) -> list[list[IntArray]]:
        """Per structure and mesh number, the distinct meshes: (meshes, mesh size)."""
        out = []
        for number, structure in enumerate(self._structures):
            shapes = {x.mesh: x.mesh_shape for x in structure.layouts if x.mesh >= 0}
            members = [parts[r] for r in np.flatnonzero(class_of == number)]
            row = []
            for mesh in range(len(shapes)):
                packed = sorted({part.meshes[mesh] for part in members})
                row.append(np.stack([unpack_ranks(p, shapes[mesh]) for p in packed]))
            out.append(row)
        return out

    def _boxes(self, parts: list[RankPart], class_of: IntArray) -> ExplicitBoxes:
        names, ranks, offsets, sizes = [], [], [], []
        for rank, part in enumerate(parts):
            tensors = self._structures[class_of[rank]].tensors
            for number, o, s in part.boxes:
                names.append(tensors[number].name)
                ranks.append(rank)
                offsets.append(o)
                sizes.append(s)
        return ExplicitBoxes(tuple(names), np.array(ranks, np.int64), tuple(offsets), tuple(sizes))

    def _common_ties(self, parts: list[RankPart], class_of: IntArray) -> dict[str, str]:
        """Ties on which every rank that holds any element of the tensor agrees."""
        said: dict[str, set[str]] = {}
        for part in parts:
            for name, first in part.ties:
                said.setdefault(name, set()).add(first)
        if not said:
            return {}
        names = [{t.name for t in structure.tensors} for structure in self._structures]
        for rank, part in enumerate(parts):
            silent = said.keys() & names[class_of[rank]] - dict(part.ties).keys() - set(part.empty)
            for name in silent:
                said[name].add("")
        return {name: firsts.pop() for name, firsts in said.items() if len(firsts) == 1}

    def _suspicious(self, parts: list[RankPart], class_of: IntArray) -> bool:
        """Whether fingerprints must be compared tensor by tensor."""
        if any(part.boxes for part in parts):
            return True
        seen: dict[tuple[int, ...], bytes] = {}
        for rank, part in enumerate(parts):
            structure = self._structures[class_of[rank]]
            for mesh, dims, digest in part.fingerprints:
                key = (int(class_of[rank]), mesh, *cell(structure, part, mesh, dims, rank))
                if seen.setdefault(key, digest) != digest:
                    return True
        # Structures that share names may hold replicas of each other.
        names = [t.name for structure in self._structures for t in structure.tensors]
        return len(set(names)) != len(names)

    def _with_conflicts(self, world: World) -> World:
        """Compares fingerprints tensor by tensor, at rank 0, and tells all which differ."""
        own = msgspec.msgpack.encode((self.description.fingerprints, self.description.rank_part))
        gathered = self.ranks.gather_bytes(own)

        def compare() -> bytes:
            said = [msgspec.msgpack.decode(g, type=Said) for g in gathered or ()]
            groups = groups_of(said, world, sorted(differing(said, world)))
            distinct = list(dict.fromkeys(groups.values()))
            return msgspec.msgpack.encode(_Conflicts(distinct, {name: distinct.index(g) for name, g in groups.items()}))

        told = self._told(compare)
        found = msgspec.msgpack.decode(told, type=_Conflicts)
        groups = {name: found.distinct[number] for name, number in found.groups.items()}
        key = xxhash.xxh3_128_digest(world.key + told)
        return dataclasses.replace(world, conflicts=frozenset(groups), groups=groups, key=key, memo={})


def broadcast_bytes(ranks: Ranks, data: bytes) -> bytes:
    """Rank 0's bytes, of any length, on every rank."""
    length = broadcast_sized(ranks, 0, len(data).to_bytes(8, "little"), 8)
    return broadcast_sized(ranks, 0, data, int.from_bytes(length.tobytes(), "little")).tobytes()


def broadcast_sized(ranks: Ranks, src: int, data: bytes, nbytes: int) -> ByteBuffer:
    """Rank `src`'s bytes, of a length that all know, on every rank; `data` is looked at on that one only."""
    buffer: ByteBuffer = np.empty(nbytes, np.uint8)
    if ranks.rank == src:
        buffer[:] = np.frombuffer(data, np.uint8)
    ranks.broadcast_into([buffer], src).wait()
    return buffer
