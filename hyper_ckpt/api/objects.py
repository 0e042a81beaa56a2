"""The objects in a load's target: tensors that they lack are made, and what they change of their states is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hyper_ckpt.api.common import few
from hyper_ckpt.contracts.objects import MissingTensor, Objects
from hyper_ckpt.contracts.planner import PlanContext
from hyper_ckpt.contracts.platform import TensorDescription
from hyper_ckpt.errors import PlatformError, TargetError, UnsupportedStateError
from hyper_ckpt.layout import Replicated
from hyper_ckpt.manifest import Manifest, TensorRow
from hyper_ckpt.state import FlatState, Loaded, Node, Place, adopt, escape_key, join


class Completer:
    """Gives the objects of a target the tensors that were saved in their states, before anything is read.

    Args:
        manifest: the checkpoint's, under the target's names.
        check_files: checks files by number: no memory is taken for what they do not hold.
    """

    def __init__(
        self, objects: Objects, manifest: Manifest, context: PlanContext, check_files: Callable[[Sequence[int]], None]
    ) -> None:
        self._objects, self._manifest, self._context = objects, manifest, context
        self._check_files = check_files
        self._twins: dict[tuple[object, ...], Any] = {}
        self._neighbours: dict[str, Any] = {}
        self.made: frozenset[str] = frozenset()

    def run(self, flat: FlatState, saved: Node) -> FlatState:
        """The target with the saved states in the place of those that its objects have.

        Raises:
            TargetError: a sharded tensor cannot be made; names all of them.
        """
        adopted = adopt(flat, saved, self._objects.fixed)
        places, tensors = adopted.places, adopted.flat.tensors
        rows = dict(zip(places, self._manifest.rows([*places]), strict=True))
        first_of: dict[int, str] = {}
        absent = [name for name, row in rows.items() if not self._fits(tensors.get(name), name, row, first_of)]
        if not absent:
            return adopted.flat
        where = self._check_stored(absent)
        for owner in {places[name].owner_name for name in absent}:
            self._neighbours[owner] = self._beside([flat.tensors[name] for name in adopted.own[owner]])
        refused = []
        for name in absent:
            made = self._made(name, rows[name], places[name], where[name])
            if made is None:
                refused.append(name)
            tensors[name] = made
        if refused:
            raise TargetError(_refusal(refused, places[refused[0]], self._manifest.checkpoint))
        self.made = frozenset(absent)
        return adopted.flat

    def _fits(self, own: Any, name: str, row: TensorRow, first_of: dict[int, str]) -> bool:
        """Whether an object's own tensor can be filled: not if it stands under another name that has other bytes."""
        if own is None:
            return False
        try:
            found = self._context.tensors.describe(own)
        except UnsupportedStateError:
            return False
        if found is None or not found.has_memory or (found.dtype, found.shape) != (row.dtype, row.shape):
            return False
        first = first_of.setdefault(id(own), name)
        return first == name or self._manifest.same_bytes(first, name)

    def _check_stored(self, names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Checks the files that hold tensors; returns what `Manifest.pieces` says of each."""
        file, start = self._manifest.pieces(names)
        others = [self._manifest.tensor(names[i]).copies[0].file for i in np.flatnonzero(file < 0).tolist()]
        distinct = {id(each): each for each in others}  # many may be of one grid
        self._check_files(np.unique(np.concatenate([file[file >= 0], *distinct.values()])).tolist())
        return dict(zip(names, zip(file.tolist(), start.tolist(), strict=True), strict=True))

    def _made(self, name: str, row: TensorRow, place: Place, where: tuple[int, int]) -> Any:
        """A new tensor; None: it was sharded, and the object does not say how. What was one tensor is one again."""
        key = (place.owner_name, where, row.dtype, row.shape, place.node.form)
        if key in self._twins:
            return self._twins[key]
        made = self._objects.make(place.owner, MissingTensor(place.path, row.dtype, row.shape, place.node.form))
        if made is not None:
            self._check(made, name, row, place)
        elif place.node.form != "sharded":
            like = np.empty(0) if place.node.form == "array" else self._neighbours.get(place.owner_name)
            made = self._context.tensors.empty(TensorDescription(row.dtype, row.shape, Replicated()), like)
        if where[0] >= 0 and 0 not in row.shape:
            self._twins[key] = made
        return made

    def _check(self, made: Any, name: str, row: TensorRow, place: Place) -> None:
        found = self._context.tensors.describe(made)
        if found is None or (found.dtype, found.shape) != (row.dtype, row.shape):
            what = type(made).__qualname__ if found is None else f"a tensor of {found.dtype} {found.shape}"
            raise PlatformError(
                f"{name!r} was saved as {row.dtype} {row.shape}, but for {type(place.owner).__qualname__} {what} was "
                "made: its make_state_tensor, or that of the platform's Objects, must make what was saved"
            )

    def _beside(self, own: Sequence[Any]) -> Any:
        """One of an object's tensors that is whole, for the device of others; None: there is none."""
        for value in own:
            if not isinstance(value, np.ndarray):
                found = self._context.tensors.describe(value)
                if found is not None and isinstance(found.layout, Replicated):
                    return value
        return None


def _refusal(names: Sequence[str], place: Place, checkpoint: str) -> str:
    owner = type(place.owner).__qualname__
    return (
        f"{few([*map(repr, names)])} {'were' if len(names) > 1 else 'was'} saved in parts of several ranks, and the "
        f"{owner} at {place.owner_name!r} has no such tensor and does not say how one lies over these ranks. Nothing "
        f"was loaded from {checkpoint}. Let the {owner} make it before the load, or give its class a method "
        "make_state_tensor, or load into a dict with tensors that lie as you need them and hand that to load_state_dict"
    )


def with_floats(loads: Sequence[Loaded], context: PlanContext) -> list[str]:
    """The names of objects that are handed floating tensors as these were saved. Only of such are dtypes looked at: a
    state_dict() may have effects, and others are not cast."""
    whole = [each for each in loads if each.whole and each.name is not None]
    return [
        str(each.name)
        for each in whole
        if any(_is_floating(description) for _, (_, description) in _tensors(each.state, each.name, context))
    ]


def changed_dtypes(loaded: Sequence[Loaded], context: PlanContext) -> list[str]:
    """What objects have now as another dtype than they were handed, each with both. All ranks ask the same objects, in
    the same order, as a state_dict() may talk to other ranks."""
    out: list[str] = []
    for each in loaded:
        handed = dict(_tensors(each.state, each.name, context))
        try:
            state = each.object.state_dict()
        except Exception:  # what was loaded is loaded: whether it was changed is then unknown
            continue
        for name, (value, now) in _tensors(state, each.name, context):
            given, before = handed.get(name, (value, now))
            if value is not given and before.shape == now.shape and before.dtype != now.dtype:
                out.append(f"{name!r} was saved as {before.dtype}, its object made {now.dtype} of it")
    return out


def _is_floating(description: TensorDescription) -> bool:
    return description.dtype.startswith(("float", "bfloat", "complex"))


def _tensors(value: Any, name: str | None, context: PlanContext) -> Iterator[tuple[str, tuple[Any, TensorDescription]]]:
    """The tensors of an object's state, by name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, join(name, escape_key(key)), context)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, join(name, str(index)), context)
    elif name is not None and not isinstance(value, str | int | float | bool | None):
        try:
            found = context.tensors.describe(value)
        except UnsupportedStateError:
            return
        if found is not None:
            yield name, (value, found)
