"""What `Tensors` promises of new tensors. After the stager, which fills and reads them here."""

from __future__ import annotations

from hyper_ckpt.contracts.platform import TensorDescription
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt.errors import UnsupportedDtypeError
from hyper_ckpt.layout import Replicated
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect, fail
from hyper_ckpt.testing.conformance.subject import Subject, content, same_bytes

making = Part("tensors")


@making
def empty_makes_what_was_described(s: Subject) -> None:
    """`empty(description)` makes a tensor of that dtype and shape, with memory that can be written."""
    for dtype, shape, data in s.cases():
        wanted = TensorDescription(dtype, shape, Replicated())
        value = s.tensors.empty(wanted)
        got = s.tensors.describe(value)
        expect(got == wanted, f"empty makes {wanted}", f"{got}", "make the tensor that is described in Tensors.empty")
        s.put(value, data)
        got_bytes = s.copied_out(value, len(data))
        same_bytes(got_bytes, data, f"a new {dtype} tensor of {shape} keeps what is written", "see Tensors.empty")


@making
def empty_like_a_tensor(s: Subject) -> None:
    """`empty(description, like=value)` makes a tensor as `value` is, in memory of its own."""
    shape = (3, 4)
    data, new = content(s.dtype, shape), content(s.dtype, shape, 1)
    like = s.probe.make(s.dtype, shape, data)
    wanted = s.tensors.describe(like)
    assert wanted is not None
    value = s.tensors.empty(wanted, like)
    got = s.tensors.describe(value)
    expect(got == wanted, f"empty(description, like) makes {wanted}", f"{got}", "take layout and device from `like`")
    on_host = [s.tensors.host_view(s.shard(each)) is not None for each in (like, value)]
    expect(on_host[0] == on_host[1], "the new tensor is on like's device", "it is not", "make it on the device of like")
    s.put(value, new)
    s.same(like, data, "the new tensor has memory of its own", "do not return `like` or a view of it")
    s.same(value, new, "the new tensor keeps what is written", "make it a plain tensor of the framework")


@making
def meta_tensors(s: Subject) -> None:
    """A tensor without memory says so, and `empty` makes one with memory from it."""
    shape = (3, 4)
    for dtype in s.probe.dtypes:
        meta = s.probe.meta(dtype, shape)
        if meta is None:
            raise NotApplicable("the framework has no tensors without memory (PlatformProbe.meta)")
        got = s.tensors.describe(meta)
        wanted = TensorDescription(dtype, shape, Replicated(), has_memory=False)
        expect(got == wanted, f"describe gives {wanted}", f"{got}", "say has_memory=False in Tensors.describe")
        made = s.tensors.describe(s.tensors.empty(wanted, meta))
        expect(
            made == TensorDescription(dtype, shape, Replicated()),
            "empty(description, like=meta) makes a tensor with memory",
            f"{made}",
            "where `like` has no memory, make the tensor on the default device",
        )


@making
def empty_refuses_unknown_dtypes(s: Subject) -> None:
    """`empty` raises UnsupportedDtypeError for a dtype that the framework has not."""
    missing = [name for name in BY_NAME if name not in s.probe.dtypes]
    if not missing:
        raise NotApplicable("the platform has every dtype of hyper_ckpt.dtypes")
    for dtype in missing:
        wanted = TensorDescription(dtype, (2, 2), Replicated())
        try:
            got = s.tensors.describe(s.tensors.empty(wanted))
        except UnsupportedDtypeError:
            continue
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            fail(f"empty of {dtype} is an UnsupportedDtypeError", seen, "look the dtype up in your own table first")
        # The framework may have it, though the probe cannot make such tensors.
        expect(
            got == wanted,
            f"empty of {dtype}, which PlatformProbe.dtypes has not, is an UnsupportedDtypeError",
            f"it made {got}",
            "refuse it, or add it to PlatformProbe.dtypes: a tensor of another dtype is a wrong load",
        )
