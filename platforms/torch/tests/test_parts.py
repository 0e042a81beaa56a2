"""Tensors that are made of others (__tensor_flatten__), whole and sharded; attributes that would be lost."""

import copy
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hyper_ckpt
from hyper_ckpt import errors
from hyper_ckpt_torch.platform import TorchPlatform


class Mode(Enum):
    FAST = 1
    EXACT = 2


@dataclass(frozen=True)
class Options:
    mode: Mode = Mode.FAST
    bits: int = 8


class Meta(NamedTuple):
    device: torch.device
    requires_grad: bool
    block: int


class Wrapper(torch.Tensor):
    """A tensor from outside; its elements are in the tensors that `names` are the attributes of."""

    names = ("data_", "scale")

    def __new__(cls, inner, context, shape, dtype=torch.float32):
        device = next(iter(inner.values())).device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, inner, context, shape, dtype=torch.float32):
        for name, value in inner.items():
            setattr(self, name, value)
        self.inner_names, self.context = tuple(inner), context

    def __tensor_flatten__(self):
        return [*self.inner_names], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(inner, context, outer_size)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default) or (
            func is aten.view.default and tuple(args[1]) == args[0].shape
        ):
            self = args[0]
            return cls(self.inner(), self.context, self.shape, self.dtype)
        raise NotImplementedError(f"{func} of a {cls.__name__}")

    def inner(self):
        return {name: getattr(self, name) for name in self.inner_names}


class Other(Wrapper):
    pass


def quantised(fill=1.0, context=None, cls=Wrapper, rows=4, columns=6):
    inner = {"data_": torch.full((rows, columns), int(fill), dtype=torch.int8), "scale": torch.full((rows, 1), fill)}
    context = {"block": [1, columns], "dtype": torch.float32, "options": Options()} if context is None else context
    return cls(inner, context, (rows, columns))


def test_a_subclass_is_stored_as_its_inner_tensors(tmp_path):
    model = {"w": nn.Parameter(quantised(3.0), requires_grad=False), "b": torch.ones(2)}
    assert type(model["w"]) is Wrapper
    hyper_ckpt.save({"model": model}, tmp_path / "c")
    assert set(hyper_ckpt.read_metadata(tmp_path / "c").state_dict_metadata) == {
        "model/w/data_",
        "model/w/scale",
        "model/b",
    }
    found = hyper_ckpt.read(tmp_path / "c")["model"]["w"]
    assert type(found) is dict
    assert np.array_equal(found["data_"], np.full((4, 6), 3, np.int8))
    target = {"w": quantised(0.0), "b": torch.zeros(2)}
    value, memory = target["w"], target["w"].data_
    report = hyper_ckpt.load({"model": target}, tmp_path / "c")
    assert target["w"] is value
    assert value.data_ is memory
    assert (memory == 3).all()
    assert (value.scale == 3).all()
    assert set(report.loaded) == {"model/w/data_", "model/w/scale", "model/b"}


def test_wrappers_inside_wrappers(tmp_path):
    def nested(fill):
        return Other({"left": quantised(fill), "right": torch.full((2,), fill)}, ("nested", 3), (4, 6))

    hyper_ckpt.save({"w": nested(5.0), "all": [nested(6.0), torch.ones(1)]}, tmp_path / "c")
    target = {"w": nested(0.0), "all": [nested(0.0), torch.zeros(1)]}
    hyper_ckpt.load(target, tmp_path / "c")
    assert (target["w"].left.data_ == 5).all()
    assert (target["w"].right == 5).all()
    assert (target["all"][0].left.scale == 6).all()


CONTEXTS = [
    ({"block": [1, 6], "t": torch.int8, "o": Options()}, {"block": (1, 6), "t": torch.int8, "o": Options()}, None),
    ({"block": [1, 6]}, {"block": [2, 6]}, r"context block \[2, 6\] and \[1, 6\]"),
    ({"dtype": torch.float32}, {"dtype": torch.int8}, "context dtype"),
    ({"options": Options()}, {"options": Options(Mode.EXACT)}, "context options mode"),
    (Meta(torch.device("cuda:1"), True, 3), Meta(torch.device("cpu"), False, 3), None),
    (Meta(torch.device("cpu"), True, 3), Meta(torch.device("cpu"), True, 4), "context block"),
    ({"requires_grad": True}, {"requires_grad": False}, None),
    (None, {}, "context"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "wanted", "differs"), CONTEXTS)
def test_contexts_are_compared(saved, wanted, differs, tmp_path):
    def state(fill, context):
        value = quantised(fill, {})
        value.context = context
        return {"a": torch.full((2,), fill), "w": value}

    hyper_ckpt.save(state(3.0, saved), tmp_path / "c")
    target = state(0.0, wanted)
    if differs is None:
        hyper_ckpt.load(target, tmp_path / "c")
        assert (target["w"].data_ == 3).all()
        return
    with pytest.raises(errors.ContainerMismatchError, match=f"'w'.*different kinds.*{differs}"):
        hyper_ckpt.load(target, tmp_path / "c")
    assert not target["a"].any()
    report = hyper_ckpt.load(target, tmp_path / "c", strict=False)
    assert (target["a"] == 3).all()
    assert not target["w"].data_.any(), "a part of another kind of tensor is worth nothing"
    assert report.mismatched


def renamed(cls, module):
    return type(cls.__name__, (cls,), {"__module__": module, "__qualname__": cls.__qualname__})


def test_the_class_is_compared_and_never_one_that_the_checkpoint_names(tmp_path):
    here = renamed(Wrapper, "quantizers.old.tensors")
    hyper_ckpt.save({"w": quantised(3.0, cls=here)}, tmp_path / "c")
    moved = {"w": quantised(0.0, cls=renamed(Wrapper, "quantizers.new"))}
    hyper_ckpt.load(moved, tmp_path / "c")  # within a package, classes move
    assert (moved["w"].data_ == 3).all()
    for cls in (renamed(Other, "quantizers.old.tensors"), renamed(Wrapper, "elsewhere")):
        target = {"w": quantised(0.0, cls=cls)}
        with pytest.raises(
            errors.ContainerMismatchError, match=r"different kinds.* and quantizers\.old\.tensors\.Wrapper"
        ):
            hyper_ckpt.load(target, tmp_path / "c")
        assert not target["w"].data_.any()


def test_other_kinds_of_targets(tmp_path):
    hyper_ckpt.save({"w": quantised(3.0)}, tmp_path / "c")
    by_hand = {"w": {"data_": torch.zeros(4, 6, dtype=torch.int8), "scale": torch.zeros(4, 1)}}
    hyper_ckpt.load(by_hand, tmp_path / "c")
    assert (by_hand["w"]["data_"] == 3).all()
    for target in (torch.zeros(4, 6), [torch.zeros(2)], 3):
        with pytest.raises(errors.ContainerMismatchError, match=r"a tensor of class .*Wrapper"):
            hyper_ckpt.load({"w": target}, tmp_path / "c")
    hyper_ckpt.save({"w": {"data_": torch.zeros(4, 6, dtype=torch.int8), "scale": torch.zeros(4, 1)}}, tmp_path / "d")
    with pytest.raises(errors.ContainerMismatchError, match=r"a tensor of class .*Wrapper, the checkpoint a dict"):
        hyper_ckpt.load({"w": quantised(0.0)}, tmp_path / "d")
    without = quantised(0.0)
    without.inner_names = ("data_",)
    with pytest.raises(errors.ContainerMismatchError, match="parts data_ and data_, scale"):
        hyper_ckpt.load({"w": without}, tmp_path / "c")


def test_names_that_are_mapped_keep_the_comparison(tmp_path):
    hyper_ckpt.save({"old": {"w": quantised(3.0)}}, tmp_path / "c")
    options = hyper_ckpt.LoadOptions(map_keys=lambda name: name.replace("new", "old"))
    target = {"new": {"w": quantised(0.0)}}
    hyper_ckpt.load(target, tmp_path / "c", options=options)
    assert (target["new"]["w"].data_ == 3).all()
    with pytest.raises(errors.ContainerMismatchError, match="different kinds"):
        hyper_ckpt.load({"new": {"w": quantised(0.0, {"block": 9})}}, tmp_path / "c", options=options)


def test_targets_without_memory_are_rebuilt_of_their_own_class(tmp_path):
    hyper_ckpt.save({"w": quantised(3.0), "t": torch.ones(1)}, tmp_path / "c")
    meta = quantised(0.0)
    target = {
        "w": Wrapper({n: t.to("meta") for n, t in meta.inner().items()}, meta.context, meta.shape),
        "t": torch.zeros(1),
    }
    old = target["w"]
    hyper_ckpt.load(target, tmp_path / "c")
    assert type(target["w"]) is Wrapper
    assert target["w"] is not old
    assert (target["w"].data_ == 3).all()
    assert target["w"].shape == (4, 6)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("context", "reason"),
    [(Opaque(), "Opaque"), ({"t": torch.ones(1)}, "has a tensor"), ({"f": lambda: 0}, "function")],
)
def test_contexts_that_cannot_be_stored_are_refused(context, reason, tmp_path):
    value = quantised(1.0, {})
    value.context = context
    for options in (None, hyper_ckpt.SaveOptions(allow_pickle=True)):
        with pytest.raises(errors.UnsupportedStateError, match=f"'w': what a .*Wrapper says of itself.*{reason}"):
            hyper_ckpt.save({"w": value}, tmp_path / "c", options=options)


def test_no_place_where_it_would_have_to_be_made_anew(tmp_path):
    with pytest.raises(errors.UnsupportedStateError, match="never makes a class that a checkpoint names"):
        hyper_ckpt.save({"w": hyper_ckpt.PerRank(quantised())}, tmp_path / "c")


class Broken(Wrapper):
    def __tensor_flatten__(self):
        raise KeyError("gone")


def test_a_class_that_fails_is_named(tmp_path):
    with pytest.raises(errors.UnsupportedStateError, match=r"'w': a Broken cannot be taken apart: KeyError\('gone'\)"):
        hyper_ckpt.save({"w": quantised(cls=Broken)}, tmp_path / "c")


def test_objects_keep_their_own_tensor(tmp_path):
    def module(fill):
        made = nn.Module()
        made.weight = nn.Parameter(quantised(fill), requires_grad=False)
        return made

    hyper_ckpt.save({"model": module(3.0)}, tmp_path / "c")
    model = module(0.0)
    memory = model.weight.data_
    state = {"model": model.state_dict()}
    hyper_ckpt.load(state, tmp_path / "c")
    assert (memory == 3).all()


class Holder:
    """An object that has a quantised tensor only after its first step."""

    def __init__(self, moment=None):
        self.state = {"step": 0} if moment is None else {"step": 1, "moment": moment, "plain": torch.ones(2)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_objects_that_take_their_whole_state(tmp_path):
    hyper_ckpt.save({"o": Holder(quantised(3.0))}, tmp_path / "c")
    target = Holder(quantised(0.0))
    own = target.state["moment"]
    hyper_ckpt.load({"o": target}, tmp_path / "c")
    assert target.state["moment"] is own
    assert (own.data_ == 3).all()
    for strict in (True, False):
        fresh = Holder()
        with pytest.raises(
            errors.TargetError, match=r"'o/moment' was saved as a tensor of class .*Wrapper.*never makes"
        ):
            hyper_ckpt.load({"o": fresh}, tmp_path / "c", strict=strict)
        assert fresh.state == {"step": 0}
        other = Holder(quantised(0.0, {"block": 9}))
        with pytest.raises(errors.ContainerMismatchError, match=r"'o/moment'.*different kinds: context"):
            hyper_ckpt.load({"o": other}, tmp_path / "c", strict=strict)
        assert not other.state["moment"].data_.any()


# Attributes that would be lost


class Tagged(torch.Tensor):
    pass


class Slotted(torch.Tensor):
    __slots__ = ("scale",)


class OwnParameter(nn.Parameter):
    pass


def of_class(cls, **attributes):
    value = torch.ones(3).as_subclass(cls) if cls is not OwnParameter else OwnParameter(torch.ones(3))
    for name, each in attributes.items():
        setattr(value, name, each)
    return value


@pytest.mark.parametrize("cls", [Tagged, Slotted, OwnParameter])
def test_a_subclass_with_attributes_is_refused_when_saved(cls, tmp_path):
    plain = of_class(cls)
    hyper_ckpt.save({"w": plain}, tmp_path / "c")
    plain.scale = torch.ones(3)
    with pytest.raises(
        errors.UnsupportedStateError, match=f"'w': a {cls.__name__} has attributes.*lost: scale.*__tensor_flatten__"
    ):
        hyper_ckpt.save({"w": plain}, tmp_path / "d")
    with torch.no_grad():
        plain.zero_()
    hyper_ckpt.load({"w": plain}, tmp_path / "c")
    assert (torch.Tensor(plain) == 1).all()
    assert (plain.scale == 1).all()


def test_attributes_that_are_set_between_saves_are_seen(tmp_path):
    value = of_class(Tagged)
    hyper_ckpt.save({"w": value}, tmp_path / "c")
    value.scale = 2
    with pytest.raises(errors.UnsupportedStateError, match="lost: scale"):
        hyper_ckpt.save({"w": value}, tmp_path / "c", overwrite=True)


def test_attributes_of_torchs_own_classes_are_nobodys_concern(tmp_path):
    parameter = nn.Parameter(torch.ones(3))
    parameter.tensor_model_parallel = True
    tensor = torch.ones(3)
    tensor.note = "x"
    hyper_ckpt.save({"p": parameter, "t": tensor}, tmp_path / "c")


# Sharded


def cut(whole, mesh, placements):
    """A DTensor whose local part is a wrapper: what the whole wrapper's inner tensors have there."""

    def of(value):
        return [p if value.shape[getattr(p, "dim", 0)] > 1 else Replicate() for p in placements]

    inner = {name: distribute_tensor(value, mesh, of(value)) for name, value in whole.inner().items()}
    local = {name: value.to_local() for name, value in inner.items()}
    shape = distribute_tensor(torch.zeros(whole.shape), mesh, placements).to_local().shape
    return DTensor.from_local(Wrapper(local, whole.context, shape), mesh, placements, run_check=False,
                              shape=whole.shape, stride=(whole.shape[1], 1))  # fmt: skip


def numbered(rows=16, columns=8, block=1):
    data = torch.arange(rows * columns).reshape(rows, columns).to(torch.int8)
    return Wrapper(
        {"data_": data, "scale": torch.arange(float(rows // block)).reshape(-1, 1)},
        {"block": [block, columns]},
        (rows, columns),
    )


def zeroed(value):
    local = value.to_local() if isinstance(value, DTensor) else value
    for each in local.inner().values():
        each.zero_()
    return value


def sharded(rank, world_size, where):
    mesh, flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), init_device_mesh("cpu", (4,))
    cuts = {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),  # one scale for a row: each rank has all
        "both": (mesh, [Shard(0), Shard(1)]),
        "half": (mesh, [Replicate(), Shard(0)]),
        "nested": (mesh, [Shard(0), Shard(0)]),
    }
    for block in (1, 2):
        whole, path = numbered(block=block), f"{where}-{block}"
        hyper_ckpt.save({name: cut(whole, *each) for name, each in cuts.items()}, path)
        names = list(cuts)
        for shift in range(2):
            target = {name: zeroed(cut(whole, *cuts[names[(n + shift) % 5]])) for n, name in enumerate(names)}
            hyper_ckpt.load(target, path)
            for n, name in enumerate(names):
                expected = cut(whole, *cuts[names[(n + shift) % 5]]).to_local()
                for part, value in target[name].to_local().inner().items():
                    assert torch.equal(value, expected.inner()[part]), (name, part, shift, block)
        alone = {name: zeroed(copy.copy(numbered(block=block))) for name in names}
        hyper_ckpt.load(alone, path)
        for value in alone.values():
            assert torch.equal(value.data_, whole.data_)
            assert torch.equal(value.scale, whole.scale)


def test_sharded_ones_reshard_where_their_parts_are_cut_along(gloo, tmp_path):
    gloo(sharded, str(tmp_path / "checkpoint"))


def in_rows(rank, world_size, where):
    """Parts of other dimensions than the tensor: a row for each piece, which mean nothing where it is cut otherwise."""

    def made(mesh, placements, fill):
        shape = distribute_tensor(torch.zeros(8, 4), mesh, placements).to_local().shape
        inner = {"data_": torch.full(shape, fill, dtype=torch.int8), "scale": torch.tensor([fill, fill + 1.0]),
                 "mean": torch.tensor(fill)}  # fmt: skip
        return DTensor.from_local(Wrapper(inner, {}, shape), mesh, placements, run_check=False,
                                  shape=torch.Size((8, 4)), stride=(4, 1))  # fmt: skip

    flat, mesh = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    hyper_ckpt.save({"w": made(flat, [Shard(0)], float(rank))}, where)
    target = {"w": made(flat, [Shard(0)], -1.0)}
    hyper_ckpt.load(target, where)
    local = target["w"].to_local()
    assert (local.data_ == rank).all()
    assert local.scale.tolist() == [rank, rank + 1.0]
    assert local.mean.item() == rank
    for other in (made(flat, [Shard(1)], -1.0), made(mesh, [Shard(0), Replicate()], -1.0)):
        with pytest.raises(errors.StateMismatchError, match=r"cut .*Shard|S\("):
            hyper_ckpt.load({"w": other}, where)
        assert (other.to_local().data_ == -1).all()


def test_sharded_ones_with_other_parts_load_only_where_they_are_cut_alike(gloo, tmp_path):
    gloo(in_rows, str(tmp_path / "checkpoint"))


def subclass_of_dtensors(rank, world_size, where):
    """The other way round: a wrapper whose inner tensors are DTensors."""
    flat = init_device_mesh("cpu", (4,))

    def made(value, placement):
        inner = {name: distribute_tensor(each, flat, [placement]) for name, each in value.inner().items()}
        return Wrapper(inner, value.context, value.shape)

    hyper_ckpt.save({"w": made(numbered(), Shard(0))}, where)
    target = {"w": made(zeroed(numbered()), Replicate())}
    hyper_ckpt.load(target, where)
    assert torch.equal(target["w"].data_.to_local(), numbered().data_)
    meta = made(numbered(), Shard(0))
    meta = Wrapper({name: each.to("meta") for name, each in meta.inner().items()}, meta.context, meta.shape)
    target = {"w": meta}
    hyper_ckpt.load(target, where)
    assert type(target["w"]) is Wrapper
    assert torch.equal(target["w"].data_.full_tensor(), numbered().data_)


def test_a_wrapper_of_dtensors(gloo, tmp_path):
    gloo(subclass_of_dtensors, str(tmp_path / "checkpoint"))


def contexts_that_differ(rank, world_size, where):
    """Ranks whose tensors are of different kinds under one name: each gets its own back."""
    platform = TorchPlatform()
    state = {"w": quantised(3.0, {"block": 1 + rank})}
    if rank == 0:
        with pytest.warns(UserWarning, match="different values of 'w'"):
            hyper_ckpt.save(state, where, platform=platform)
    else:
        hyper_ckpt.save(state, where, platform=platform)
    target = {"w": quantised(0.0, {"block": 1 + rank})}
    hyper_ckpt.load(target, where, platform=platform)
    assert (target["w"].data_ == 3).all()
    with pytest.raises(errors.StateMismatchError, match="context block"):
        hyper_ckpt.load({"w": quantised(0.0, {"block": 2 - rank})}, where, platform=platform)


def test_ranks_whose_contexts_differ(gloo, tmp_path):
    gloo(contexts_that_differ, str(tmp_path / "checkpoint"), world_size=2)


def test_parts_of_ordinary_tensors_are_never_asked_for():
    tensors = TorchPlatform().tensors
    assert not any(map(tensors.may_have_parts, (torch.Tensor, nn.Parameter, np.ndarray, Tagged, torch.nn.Buffer)))
    assert tensors.may_have_parts(Wrapper)
    assert tensors.parts(torch.ones(2)) is None
