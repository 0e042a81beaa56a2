"""Does the target fit the checkpoint? Names, kinds, shapes, dtypes and ties, before any data is read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash

from hyper_ckpt import errors
from hyper_ckpt.api.common import brief, state_of
from hyper_ckpt.api.objects import Completer
from hyper_ckpt.casts import may_cast
from hyper_ckpt.columns import Columns, TensorTable
from hyper_ckpt.contracts.objects import Objects
from hyper_ckpt.contracts.planner import LoadPlanner, PlanContext
from hyper_ckpt.contracts.platform import TensorDescription
from hyper_ckpt.engine.cast import Cast
from hyper_ckpt.errors import CoverageError, StateMismatchError, TargetError
from hyper_ckpt.manifest import Manifest, TensorRow
from hyper_ckpt.options import KeyMap, LoadOptions, Strict
from hyper_ckpt.planning.describe import describe_all, find_ties, own_boxes
from hyper_ckpt.planning.load import plan_alone
from hyper_ckpt.state import FlatState, Node, Selection, compare, fit_groups, select, variants_of
from hyper_ckpt.state.names import expand, is_below
from hyper_ckpt.state.rename import Renamed, rename
from hyper_ckpt.state.tree import KeyedNode
from hyper_ckpt.state.walk import all_names

SAY_WHOSE = (
    "Say whose tensor all ranks get: options=LoadOptions(conflicts=0) takes rank 0's, conflicts='lowest' that of the "
    "lowest rank that saved one"
)


@dataclass(eq=False)
class Match:
    """How this rank's target and the checkpoint fit.

    Args:
        saved: the saved state as this rank sees it.
        flat: the target; its objects hold what was saved, where they take that as it was saved.
        made: names of the tensors in it that were made for them.
        borrowed: names of values that this rank did not save and gets from the lowest rank that did.
        conflicts: names in the target of tensors that differ between ranks, with the ranks whose tensor this one gets.
        unshared: those of any target that are another tensor on each rank; the same on all ranks that mapped alike.
        missing, mismatched: of this rank's target. `unexpected`: saved names that this rank does not want, and
            `forgotten`: top-level keys of which its target has nothing, until `hear` leaves those of all ranks.
        uncovered: names of which parts are missing in the checkpoint that this rank wants.
        wanted: the targets to fill by name, sorted, new ones where they had no memory; a `Cast` each of `cast`.
        cast: the saved dtype and the target's of those.
        replaced: those of them that are not the tensors that stand in the target.
        ties: names that are the memory of another name; `alike_ties` those of them that are stored as its bytes, too.
        own: every name in the target, of leaves and containers.
        names: every saved name, the same on all ranks.
        manifest: the checkpoint's, under the target's names.
        mapped: the saved names of those of the target's that `map_keys` found under another one.
        alike: whether all ranks mapped alike, so that a name means the same on each.
        ignored: saved names that are meant to be left out, with what is below them.
    """

    saved: Node
    flat: FlatState | None = None
    borrowed: tuple[str, ...] = ()
    conflicts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unshared: frozenset[str] = frozenset()
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    wanted: dict[str, Any] = field(default_factory=dict)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    alike_ties: dict[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    manifest: Manifest | None = None
    mapped: Mapping[str, str] = field(default_factory=dict)
    alike: bool = True
    made: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()

    @property
    def checkpoint(self) -> str:
        """How messages call the checkpoint."""
        assert self.manifest is not None
        return self.manifest.checkpoint

    def left_out(self) -> list[str]:
        """Unexpected names inside something that the target has: it wants that, but not all of it."""
        assert self.flat is not None
        assert isinstance(self.flat.tree, KeyedNode)
        roots = set(self.flat.tree.k)
        inside = [name for name in self.unexpected if "/" in name and name.partition("/")[0] in roots]
        return [name for name in inside if not self.is_ignored(name)]

    def vote(self) -> bytes:
        """A digest of how names were mapped, and one bit for every saved name: whether this rank does not want it."""
        unwanted = {*self.unexpected, *self.forgotten}
        digest = xxhash.xxh3_64_digest(msgspec.msgpack.encode(sorted(self.mapped.items())))
        return digest + bytes(np.packbits(np.array([name in unwanted for name in self.names], bool)))

    def hear(self, verdict: bytes) -> None:
        """Takes what came of all votes."""
        self.alike = verdict[:1] == b"1"
        self._keep_unwanted(verdict[1:])

    def _keep_unwanted(self, unwanted: bytes) -> None:
        """Of the unexpected names, keeps those that no rank wants: other ranks want other stages of a pipeline."""
        bits = np.unpackbits(np.frombuffer(unwanted, np.uint8), count=len(self.names))
        found = {name: None for name, bit in zip(self.names, bits, strict=True) if bit}
        own = set(self.unexpected)
        self.unexpected = [name for name in found if name in own]
        self.forgotten = [name for name in self.forgotten if name in found]

    def ignore(self, keys: Sequence[str]) -> None:
        """Notes what is meant to be left out: the names that `keys` stand for, and what is below them."""
        self.ignored = frozenset(expand(keys, self.names))
        self.forgotten = [name for name in self.forgotten if not self.is_ignored(name)]

    def is_ignored(self, name: str) -> bool:
        """Whether an unexpected name is meant to be left out."""
        return is_below(name, self.ignored)


def count_votes(votes: list[bytes]) -> bytes:
    """Whether all mapped names alike, and the saved names that nobody wants."""
    alike = len({vote[:8] for vote in votes}) == 1
    unwanted = np.bitwise_and.reduce([np.frombuffer(vote[8:], np.uint8) for vote in votes])
    return (b"1" if alike else b"0") + bytes(unwanted)


class Matcher:
    """Compares one rank's target with a checkpoint.

    Args:
        strict, options: see `load`.
        objects: what the platform knows of objects.
        check_files: checks files by number, before memory is taken for what they hold.
    """

    def __init__(
        self,
        flat: FlatState,
        manifest: Manifest,
        context: PlanContext,
        strict: Strict,
        options: LoadOptions,
        objects: Objects,
        check_files: Callable[[Sequence[int]], None],
    ) -> None:
        self._flat, self._manifest, self._context = flat, manifest, context
        self._strict, self._options = strict, options
        self._objects, self._check_files = objects, check_files
        self._problems: dict[str, list[str]] = {}
        self._casts: frozenset[str] | None = None  # names in the target, as far as they were asked for

    def run(self, planner: LoadPlanner, locate: Callable[[Manifest, Columns], object]) -> Match:
        """The match.

        Args:
            locate: finds what is stored of wanted boxes; raises CoverageError where it is not.

        Raises:
            StateMismatchError: what `strict` refuses, all in one; but for unexpected names, see `refuse_unexpected`.
            TargetError: a target cannot be filled.
        """
        tree = state_of(self._manifest)
        saved_by_these = self._context.world_size == self._manifest.world_size
        chosen = select(tree, self._context.rank, whose=self._options.conflicts, saved_by_these=saved_by_these)
        fitted = fit_groups(chosen.tree, self._flat.tree)
        renamed = self._rename(fitted.tree)
        stored = {name: chosen.stored.get(source, source) for name, source in renamed.moved.items()}
        self._manifest = self._manifest.renamed({**chosen.stored, **stored})
        completer = Completer(self._objects, self._manifest, self._context, self._check_files)
        self._flat = completer.run(self._flat, renamed.tree)
        match = Match(
            renamed.tree,
            self._flat,
            chosen.borrowed,
            unexpected=[*renamed.hidden, *fitted.unwanted],
            forgotten=self._forgotten(tree, renamed),
            own=frozenset(all_names(self._flat.tree)),
            names=tuple(all_names(tree)),
            manifest=self._manifest,
            mapped=renamed.moved,
            made=completer.made,
        )
        misfits = self._compare_trees(match, renamed)
        for each in fitted.unfit:
            self._problems.setdefault("missing" if each.missing else "container", []).append(each.text)
            match.mismatched.append(each.text)
            misfits |= {name for name in self._flat.tensors if name.startswith(f"{each.name}/")}
        self._note_conflicts(match, chosen, misfits)
        if self._options.conflicts == "own":
            match.unshared = frozenset(_called(variants_of(tree), renamed.moved))
        self._compare_tensors(match, misfits)
        if self._manifest.absent:  # expected, and told
            self._problems.pop("missing", None)
        if self._strict:
            raise_problems(self._problems, self._manifest.checkpoint)
        self._leave_uncovered(match, locate)
        self._acquire(match, planner)
        return match

    def _leave_uncovered(self, match: Match, locate: Callable[[Manifest, Columns], object]) -> None:
        """Wants nothing of which a part is missing here."""
        for name, value in [*match.wanted.items()] if self._manifest.absent else ():
            (row,) = self._manifest.rows([name])
            table = TensorTable.of([(name, row.dtype, row.shape)])
            boxes = own_boxes({name: value}, self._context)
            try:
                locate(self._manifest, plan_alone(table, self._context.rank, boxes))
            except CoverageError:
                if is_below(name, self._flat.whole):
                    raise TargetError(
                        f"a part of {name!r} is missing in {self._manifest.checkpoint}, and an object takes its state "
                        "whole: load what is there into a dict, or leave the object out"
                    ) from None
                match.uncovered.append(name)
                del match.wanted[name]
                match.cast.pop(name, None)

    def _forgotten(self, saved: Node, renamed: Renamed) -> list[str]:
        """Top-level keys of which the target wants nothing, under whatever name."""
        assert isinstance(saved, KeyedNode)
        assert isinstance(self._flat.tree, KeyedNode)
        wanted = {*self._flat.tree.k, *(source.partition("/")[0] for source in renamed.moved.values())}
        return [key for key in saved.k if key not in wanted]

    def _rename(self, saved: Node) -> Renamed:
        map_keys = self._options.map_keys
        if map_keys is None:
            return Renamed(saved, {})
        known = set(all_names(saved))

        def source_of(name: str) -> str | None:
            candidates = _candidates(map_keys, name)
            return next((each for each in candidates if each in known), candidates[0] if candidates else None)

        found = self._flat.substates.items()
        whole = [name for name, each in found if self._objects.fixed(each.object, each.state) is None]
        return rename(saved, self._flat.tree, source_of, whole)

    def _compare_trees(self, match: Match, renamed: Renamed) -> set[str]:
        """Notes what differs; returns the names where kinds differ."""
        misfits = set()
        if renamed.stuck:
            text = f"map_keys finds {renamed.absent[renamed.stuck[0]]!r} for {renamed.stuck[0]!r}, which was not saved"
            raise errors.MissingKeyError(f"{text}, and a list or tuple cannot be loaded without it", [text])
        for d in compare(self._flat.tree, match.saved):
            if d.kind == "unexpected":
                match.unexpected.append(d.name)
                continue
            source = renamed.absent.get(d.name)
            text = d.text if source is None else f"{d.text} (map_keys looks for {source!r})"
            if d.kind == "missing" and source is None:
                text += self._guess(d.name, match)
            self._problems.setdefault(d.kind, []).append(text)
            if d.kind == "missing":
                match.missing.append(d.name)
            else:
                match.mismatched.append(d.text)
                misfits.add(d.name)
        return misfits

    def _note_conflicts(self, match: Match, chosen: Selection, misfits: set[str]) -> None:
        """Which rank's tensor this one gets where they differ; where that is not clear it is a misfit."""
        wanted = self._flat.tensors.keys() - misfits
        for name, source in _called(chosen.stored, match.mapped).items():
            if name not in wanted:
                continue
            if source not in chosen.undecided:
                match.conflicts[name] = chosen.ranks[source]
                continue
            holders = brief(chosen.undecided[source])
            text = f"{name!r} was another tensor on ranks {holders}, and {self._whose()}"
            self._problems.setdefault("conflict", []).append(text)
            match.mismatched.append(text)
            misfits.add(name)
            if name in match.made:  # made for an object, which would get it unfilled
                raise_problems({"conflict": [text]}, self._manifest.checkpoint)

    def _whose(self) -> str:
        rank, world_size, saved = self._context.rank, self._context.world_size, self._manifest.world_size
        if self._options.conflicts != "own":
            return f"rank {self._options.conflicts} saved none"
        return f"rank {rank} saved none" if world_size == saved else f"{saved} ranks saved it, but {world_size} load it"

    def _compare_tensors(self, match: Match, misfits: set[str]) -> None:
        """Wants those of equal shape and of equal dtype, or one to be cast, and notes the others."""
        tensors, saved = self._flat.tensors, self._manifest.tensors
        both = {name: tensors[name] for name in sorted(tensors) if name in saved and not is_below(name, misfits)}
        rows, described = self._manifest.rows([*both]), describe_all(both, self._context)
        for (name, value), row, description in zip(both.items(), rows, described, strict=True):
            if description.shape == row.shape and description.dtype == row.dtype:
                match.wanted[name] = value
            elif description.shape == row.shape and self._may_cast(name, row.dtype, description.dtype, match):
                match.wanted[name], match.cast[name] = value, (row.dtype, description.dtype)
        if len(match.wanted) < len(both):
            pairs = dict(zip(both, zip(described, rows, strict=True), strict=True))
            unlike = [name for name in tensors if name in both and name not in match.wanted]
            match.mismatched += [self._tensor_problem(name, *pairs[name]) for name in unlike]

    def _may_cast(self, name: str, dtype: str, to: str, match: Match) -> bool:
        if self._casts is None:
            self._casts = frozenset(expand(self._options.cast_keys, sorted(match.own)))
        return is_below(name, self._casts) and may_cast(dtype, to)

    def _guess(self, name: str, match: Match) -> str:
        """The saved name that was probably meant, for the first few that are missing."""
        if len(match.missing) >= 3 or len(match.names) > 20_000:
            return ""
        wanted = set(self._flat.tensors)
        free = [each for each in match.names if each not in wanted]
        ends = [each for each in free if each.endswith(f"/{name}") or name.endswith((f"/{each}", f".{each}"))]
        close = ends or difflib.get_close_matches(name, free, 1, 0.8)
        return f" (did you mean {close[0]!r}?)" if close else ""

    def _tensor_problem(self, name: str, description: TensorDescription, stored: TensorRow) -> str:
        if description.shape != stored.shape:
            text = f"{name!r} was saved with shape {stored.shape}, the target has {description.shape}"
            self._problems.setdefault("shape", []).append(text)
        else:
            text = f"{name!r} was saved as {stored.dtype}, the target is {description.dtype}"
            self._problems.setdefault("dtype", []).append(text)
        return text

    def _acquire(self, match: Match, planner: LoadPlanner) -> None:
        """Which names are one memory, and new tensors for targets without memory: one for all names of it."""
        match.ties = find_ties(match.wanted, self._context)
        same_bytes = self._manifest.same_bytes
        match.alike_ties = {name: first for name, first in match.ties.items() if same_bytes(name, first)}
        for name, value in [*match.wanted.items()]:  # the first of tied names comes first
            known = match.replaced.get(match.ties[name]) if name in match.ties else None
            acquired = known if known is not None else planner.acquire_tensor(match.wanted, name, self._context)
            if acquired is not value:
                self._refuse_inside_object(name)
                match.wanted[name] = match.replaced[name] = acquired
        for name, (dtype, to) in match.cast.items():
            match.wanted[name] = Cast(match.wanted[name], dtype, to)

    def _refuse_inside_object(self, name: str) -> None:
        """What stands in an object's state_dict() would be replaced there, and not in the object."""
        for inside in self._flat.substates:
            if name == inside or name.startswith(f"{inside}/"):
                raise TargetError(
                    f"{name!r} has no memory (it is on the meta device): give the object at {inside!r} memory first, "
                    "e.g. with to_empty(), or load into its state_dict() and assign that"
                )


def _candidates(map_keys: KeyMap, name: str) -> list[str]:
    """The saved names that a mapping has for one of the target's.

    Raises:
        ValueError: it has something else.
    """
    found: object = map_keys.get(name) if isinstance(map_keys, Mapping) else map_keys(name)
    out = [found] if isinstance(found, str) else list(found) if isinstance(found, list | tuple) else []
    if (found is not None and not isinstance(found, str | list | tuple)) or not all(isinstance(n, str) for n in out):
        raise ValueError(f"map_keys has {found!r} for {name!r}: it must be a name, several names, or None")
    return out


def _called(saved: Collection[str], moved: Mapping[str, str]) -> dict[str, str]:
    """What the target calls some saved names, with these."""
    found = {name: source for name, source in moved.items() if source in saved}
    return {**{name: name for name in saved if name not in moved}, **found}


_KINDS: dict[str, type[StateMismatchError]] = {
    "missing": errors.MissingKeyError,
    "container": errors.ContainerMismatchError,
    "shape": errors.ShapeMismatchError,
    "dtype": errors.DtypeMismatchError,
    "conflict": errors.ConflictError,
    "unexpected": errors.UnexpectedKeyError,
}


def raise_problems(problems: dict[str, list[str]], what: str) -> None:
    """Raises one error for all problems, by kind; of a class of its own if they are of one kind."""
    if not problems:
        return
    texts = [t for v in problems.values() for t in v]
    shown = "; ".join(texts[:10]) + (f"; and {len(texts) - 10} more (see .problems)" if len(texts) > 10 else "")
    kind = _KINDS[next(iter(problems))] if len(problems) == 1 else StateMismatchError
    raise kind(f"{what} does not fit the state: {shown}. Nothing was loaded. {_remedy(problems, what)}", texts)


def _remedy(problems: Mapping[str, list[str]], what: str) -> str:
    if problems.keys() == {"unexpected"}:
        return (
            "Give the target a place for it, name it in LoadOptions(ignore=[...]) if that is meant, or load with "
            "strict=True"
        )
    if problems.keys() == {"dtype"}:
        return (
            "Make the target as it was saved, or convert what is loaded: LoadOptions(cast=True) does, between floats "
            "and to wider integers; strict=False would leave the target as it is"
        )
    if problems.keys() == {"conflict"}:
        return SAY_WHOSE
    if problems.keys() <= {"dtype", "shape"}:
        return "Make the target as it was saved, or read() it and convert; strict=False would leave it as it is"
    return f"See `hyper-ckpt show {what}`; strict=False loads what matches and leaves the rest as it is"


def refuse_unexpected(names: list[str], what: str) -> None:
    """Raises for saved names that no rank wants."""
    raise_problems(
        {"unexpected": [f"{name!r} is in the checkpoint, but not in the target" for name in names]} if names else {},
        what,
    )
