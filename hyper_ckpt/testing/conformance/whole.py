"""Saves and loads by one process, from the framework's tensors to the framework's tensors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from hyper_ckpt import load, read, save
from hyper_ckpt.contracts.platform import TensorDescription
from hyper_ckpt.layout import Replicated
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect
from hyper_ckpt.testing.conformance.subject import LARGE, SHAPES, STRIDED_SHAPES, Subject, content, same_bytes

whole = Part("whole")

_SEE = "the checks of tensors and stager say which part of the platform is wrong; if they pass, report a bug"


def _contents(s: Subject, seed: int = 0) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    cases = [(d, shape) for d in s.probe.dtypes for shape in SHAPES] + [(s.wide, LARGE)]
    return {f"{d} {shape}": (d, shape, content(d, shape, seed)) for d, shape in cases}


def _state(s: Subject, seed: int = 0) -> dict[str, Any]:
    return {name: s.probe.make(*each) for name, each in _contents(s, seed).items()}


def _read_bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@whole
def a_state_survives(s: Subject) -> None:
    """Every dtype and shape is saved, and loaded into the very tensors of the target."""
    where = s.folder / "ckpt"
    save({"model": _state(s), "step": 7}, where, platform=s.platform)
    targets = _state(s, seed=1)
    target: dict[str, Any] = {"model": dict(targets), "step": 0}
    load(target, where, platform=s.platform)
    expect(target["step"] == 7, "plain values are loaded", f"step {target['step']}", _SEE)
    for name, (_, _, data) in _contents(s).items():
        kept = target["model"][name] is targets[name]
        expect(kept, "a load writes into the tensors of its target", f"{name} was replaced", "see Tensors.writable")
        s.same(targets[name], data, f"{name} is loaded as it was saved", _SEE)


@whole
def a_state_is_read_elsewhere(s: Subject) -> None:
    """`hyper_ckpt.read` gives the saved bytes without this platform."""
    where = s.folder / "ckpt"
    save(_state(s), where, platform=s.platform)
    found = read(where)
    for name, (_, shape, data) in _contents(s).items():
        expect(found[name].shape == shape, f"{name} has shape {shape}", f"{found[name].shape}", _SEE)
        same_bytes(_read_bytes(found[name]), data, f"{name} is stored as it was", _SEE)


@whole
def strided_tensors_survive(s: Subject) -> None:
    """Strided tensors are saved by their elements, and loaded into."""
    names = {f"{d} {shape}": (d, shape) for d in s.probe.dtypes for shape in STRIDED_SHAPES}
    where = s.folder / "ckpt"
    save({n: s.strided(d, shape, content(d, shape)) for n, (d, shape) in names.items()}, where, platform=s.platform)
    target = {n: s.strided(d, shape, content(d, shape, 1)) for n, (d, shape) in names.items()}
    loaded = dict(target)
    load(loaded, where, platform=s.platform)
    for name, (dtype, shape) in names.items():
        same_bytes(s.probe.raw(target[name]), content(dtype, shape), f"{name} is loaded into a strided tensor", _SEE)


@whole
def work_before_a_save_is_in_it(s: Subject) -> None:
    """What training queued before `save` is saved; what it queues after `load` comes after it."""
    where = s.folder / "ckpt"
    value = s.probe.make(s.wide, LARGE, content(s.wide, LARGE))
    data = content(s.wide, LARGE, 1)
    s.probe.overwrite(value, data)
    save({"w": value}, where, platform=s.platform)
    same_bytes(_read_bytes(read(where)["w"]), data, "a save has what was queued before it", _SEE)
    s.probe.overwrite(value, content(s.wide, LARGE, 2))
    load({"w": value}, where, platform=s.platform)
    s.same(value, data, "a load comes after what was queued before it", _SEE)
    load({"w": value}, where, platform=s.platform)
    last = content(s.wide, LARGE, 3)
    s.probe.overwrite(value, last)
    s.same(value, last, "work after a load comes after it", _SEE)


@whole
def tied_tensors_are_stored_once(s: Subject) -> None:
    """Two names for one tensor cost its bytes once, and both are loaded."""
    data, new = content(s.wide, LARGE), content(s.wide, LARGE, 1)
    value = s.probe.make(s.wide, LARGE, data)
    tied = s.probe.tied(value)
    if tied is None:
        raise NotApplicable("the framework has no two tensors over one memory (PlatformProbe.tied)")
    where = s.folder / "ckpt"
    save({"a": value, "b": tied}, where, platform=s.platform)
    stored = sum(os.path.getsize(file) for file in where.rglob("*") if file.is_file())
    expect(
        stored < 1.5 * len(data),
        f"two names for one tensor of {len(data):,} bytes cost its bytes once",
        f"{stored:,} bytes",
        "give equal keys in Tensors.storage_key",
    )
    s.probe.overwrite(value, new)
    load({"a": value, "b": tied}, where, platform=s.platform)
    for each in (value, tied):
        s.same(each, data, "both names of a tied tensor are loaded", _SEE)


@whole
def targets_without_memory_are_replaced(s: Subject) -> None:
    """A load replaces a target without memory by a tensor that has it."""
    data = content(s.dtype, (3, 4))
    meta = s.probe.meta(s.dtype, (3, 4))
    if meta is None:
        raise NotApplicable("the framework has no tensors without memory (PlatformProbe.meta)")
    where = s.folder / "ckpt"
    save({"w": s.probe.make(s.dtype, (3, 4), data)}, where, platform=s.platform)
    target = {"w": meta}
    load(target, where, platform=s.platform)
    made = s.tensors.describe(target["w"])
    wanted = TensorDescription(s.dtype, (3, 4), Replicated())
    expect(made == wanted, f"the target is replaced by {wanted}", f"{made}", "see Tensors.empty with `like`")
    got = s.copied_out(target["w"], len(data))
    same_bytes(got, data, "a target without memory is replaced by a loaded tensor", "see Tensors.empty with `like`")
