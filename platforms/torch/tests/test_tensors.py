"""TorchTensors on one process: memory both ways, and what is refused."""

import numpy as np
import pytest
import torch

import hyper_ckpt
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import LocalShard, TensorDescription, sampled_fingerprint
from hyper_ckpt.dtypes import BY_NAME, TABLE
from hyper_ckpt.errors import TargetError, UnsupportedDtypeError, UnsupportedStateError
from hyper_ckpt.layout import Replicated
from hyper_ckpt.values import ShardedTensor
from hyper_ckpt_torch.platform import TorchPlatform
from hyper_ckpt_torch.tensors import NAMES, TorchTensors, bits, device_samples

TENSORS = TorchTensors((0,))
DTYPES = sorted(NAMES.values())


def random_tensor(name: str, *shape: int) -> torch.Tensor:
    """Any bits at all: NaN payloads and denormals have to survive."""
    row = BY_NAME[name]
    rng = np.random.default_rng(len(name))
    data = rng.integers(0, 2 if name == "bool" else 256, (*shape, row.itemsize), dtype=np.uint8)
    return torch.from_numpy(data.reshape(-1)).view(getattr(torch, name)).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bits(tensor.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def whole(tensor: torch.Tensor) -> LocalShard:
    (shard,) = TENSORS.local_shards(tensor)
    assert (shard.offsets, shard.sizes) == ((0,) * tensor.ndim, tuple(tensor.shape))
    return shard


def views_of(name: str) -> list[torch.Tensor]:
    base = random_tensor(name, 6, 5, 4)
    return [
        base,
        base[1:5, ::2],
        base.permute(2, 0, 1),
        base[2, 3, 1],
        base[:0],
        base[3:4].expand(3, 5, 4),
        base[..., 1],
    ]


def test_every_dtype_of_the_table_is_known():
    assert set(DTYPES) == {row.name for row in TABLE}


@pytest.mark.parametrize("name", DTYPES)
def test_host_view_shows_the_memory(name):
    for tensor in views_of(name):
        assert TENSORS.describe(tensor) == TensorDescription(name, tuple(tensor.shape), Replicated())
        view = TENSORS.host_view(whole(tensor))
        assert view.dtype == BY_NAME[name].carrier
        assert view.shape == tuple(tensor.shape)
        assert view.tobytes() == raw(tensor)
        if tensor.numel():
            assert view.__array_interface__["data"][0] == tensor.data_ptr(), "no copy was made"


@pytest.mark.parametrize("name", DTYPES)
def test_writing_changes_the_tensor_in_place(name):
    for tensor in views_of(name):
        if 0 in tensor.stride():
            continue
        wanted = random_tensor(name, *tensor.shape).flip(0) if tensor.ndim else random_tensor(name)
        TENSORS.writable(whole(tensor))[...] = TENSORS.host_view(whole(wanted))
        assert raw(tensor) == raw(wanted)


@pytest.mark.parametrize("name", DTYPES)
def test_staging_copies_both_ways(name):
    stager = TorchPlatform().stager
    for tensor in views_of(name):
        buffer = stager.buffer(tensor.nbytes)
        stager.copy_out(whole(tensor), buffer).wait()
        assert buffer[: tensor.nbytes].tobytes() == raw(tensor)
        target = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        stager.copy_in(buffer, whole(target)).wait()
        assert raw(target) == raw(tensor)
        stager.release(buffer)


def test_conjugated_and_negated_views_are_resolved():
    base = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (base.conj(), base.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        resolved = lazy.resolve_conj().resolve_neg()
        assert TENSORS.host_view(whole(lazy)).tobytes() == resolved.numpy().tobytes()
        buffer = TorchPlatform().stager.buffer(64)
        TorchPlatform().stager.copy_out(whole(lazy), buffer).wait()
        assert buffer[: lazy.nbytes].tobytes() == resolved.numpy().tobytes()
        with pytest.raises(TargetError, match="conjugated"):
            TENSORS.writable(whole(lazy))
    assert TENSORS.storage_key(whole(base)) != TENSORS.storage_key(whole(base.conj()))


@pytest.mark.parametrize("target", [torch.zeros(1, 3).expand(4, 3), torch.zeros(10).as_strided((4, 3), (1, 1))])
def test_overlapping_targets_are_refused(target):
    with pytest.raises(TargetError, match="share memory"):
        TENSORS.writable(whole(target))
    with pytest.raises(TargetError, match="share memory"):
        TorchPlatform().stager.copy_in(np.zeros(64, np.uint8), whole(target))


def test_autograd_notices_a_load():
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    TENSORS.writable(whole(weight))[...] = 5
    assert weight.tolist() == [5, 5, 5]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_are_targets_too():
    with torch.inference_mode():
        tensor = torch.zeros(4)
    TENSORS.writable(whole(tensor))[...] = 1
    stager = TorchPlatform().stager
    stager.copy_in(np.zeros(16, np.uint8), whole(tensor[:2])).wait()
    assert tensor.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8", "complex128", "bool"])
@pytest.mark.parametrize("length", [1000, (1 << 20) + 77])
def test_device_and_host_fingerprints_agree(name, length):
    for tensor in (random_tensor(name, length), random_tensor(name, length // 7 + 1, 14)[:, ::2]):
        expected = sampled_fingerprint([TENSORS.host_view(whole(tensor))])
        assert TENSORS.fingerprint([whole(tensor)]) == expected
        assert sampled_fingerprint([device_samples(tensor)]) == expected


def test_storage_keys():
    base = torch.arange(12.0)
    same = [base, base.detach(), base.view(12), base[:], torch.nn.Parameter(base)]
    assert len({TENSORS.storage_key(whole(t)) for t in same}) == 1
    other = [
        base,
        base[1:],
        base[:4],
        base.view(3, 4),
        base.view(4, 3),
        base.view(torch.int32),
        base.clone(),
        base[::2],
    ]
    assert len({TENSORS.storage_key(whole(t)) for t in other}) == len(other)
    assert TENSORS.storage_key(whole(base[:0])) is None
    meta = base.to("meta")
    assert TENSORS.storage_key(whole(meta)) == TENSORS.storage_key(whole(meta.detach()))
    assert TENSORS.storage_key(whole(meta)) != TENSORS.storage_key(whole(base.to("meta")))
    numpy = NumpyTensors()
    assert numpy.storage_key(numpy.local_shards(base.numpy())[0]) == TENSORS.storage_key(whole(base))


def test_signatures():
    base = torch.arange(12.0)
    one = TENSORS.signature(base)
    assert [TENSORS.signature(t) for t in (base, base.detach(), base.view(12), base[:])] == [one] * 4
    base.add_(1)
    assert TENSORS.signature(base) == one
    other = [base, base[1:], base[:4], base[::2], base.view(3, 4), base.view(4, 3), base.view(4, 1, 3)]
    other += [base.view(4, 3).t(), base.view(torch.int32), base.clone(), torch.nn.Parameter(base)]
    assert len({TENSORS.signature(t) for t in other}) == len(other)


def not_plainly_memory() -> list[torch.Tensor]:
    complex_ones = torch.ones(3, dtype=torch.complex64)
    return [
        torch.ones(3, device="meta"),
        complex_ones.conj(),
        complex_ones.conj().imag,
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nn.UninitializedParameter(),
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of its quantized and nested tensors
def test_what_is_not_plainly_memory_has_no_signature():
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    odd = not_plainly_memory()
    assert [TENSORS.signature(each) for each in odd] == [None] * len(odd)
    assert TENSORS.signature(quantized) != TENSORS.signature(quantized.int_repr())


def test_a_freed_tensor_is_not_taken_for_what_it_was():
    tensor = torch.ones(1000)
    before = TENSORS.signature(tensor)
    tensor.untyped_storage().resize_(0)
    assert TENSORS.signature(tensor) != before


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(40, 100).t(), lambda t: t[3000:]])
def test_memory_that_was_shrunk_is_refused(view):
    tensor = torch.arange(4000.0)
    shown = view(tensor)
    assert TENSORS.describe(shown) is not None
    before = TENSORS.signature(shown)
    tensor.untyped_storage().resize_(16)
    with pytest.raises(UnsupportedStateError, match="16 bytes of memory"):
        TENSORS.describe(shown)
    assert TENSORS.signature(shown) != before


@pytest.mark.parametrize("name", DTYPES)
def test_plain_tensors(name):
    base = random_tensor(name, 6, 5, 4)
    for tensor in (base, base[2:4], base[5, 4, 3], base.detach(), torch.empty(0, 3, dtype=base.dtype)):
        got = TENSORS.plain(tensor)
        view = TENSORS.writable(whole(tensor))
        assert (got is None) == (tensor.numel() == 0)
        if got is not None:
            assert got == (TENSORS.describe(tensor), view.ctypes.data, view.nbytes)
    assert TENSORS.plain(base.permute(2, 0, 1)) is None
    assert TENSORS.plain(base[:, 1:]) is None
    assert TENSORS.plain(base[:1].expand(3, 5, 4)) is None
    assert TENSORS.plain(base[:, :1, :1].transpose(1, 2)[:1]) is not None  # strides of single elements don't count


@pytest.mark.filterwarnings("ignore")  # torch warns of quantized and nested ones
def test_what_is_not_so_simple_is_not_plain():
    shrunk = torch.arange(4000.0)
    shrunk.untyped_storage().resize_(16)
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    unknown = [torch.zeros(3, dtype=torch.complex32), torch.zeros(4, dtype=torch.uint8).view(torch.bits8)]
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    odd = [*not_plainly_memory(), shrunk, freed(), fake(), quantized, *unknown, jagged, np.ones(3), 1.0, None]
    assert [TENSORS.plain(each) for each in odd] == [None] * len(odd)
    assert TENSORS.plain(torch.nn.Parameter(torch.ones(3))) is not None
    assert TENSORS.plain(torch.nn.Buffer(torch.ones(3))) is not None


def test_autograd_notices_a_load_into_a_plain_tensor(tmp_path):
    hyper_ckpt.save({"w": torch.ones(3)}, tmp_path / "ckpt", durable=False)
    weight = torch.full((3,), 2.0, requires_grad=True)
    loss = (weight * weight).sum()
    hyper_ckpt.load({"w": weight}, tmp_path / "ckpt")
    assert weight.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        frozen = torch.zeros(3)
    hyper_ckpt.load({"w": frozen}, tmp_path / "ckpt")
    assert frozen.tolist() == [1.0] * 3


def test_meta_tensors_have_no_memory():
    meta = torch.empty(3, 4, dtype=torch.bfloat16, device="meta")
    description = TENSORS.describe(torch.nn.Parameter(meta))
    assert description == TensorDescription("bfloat16", (3, 4), Replicated(), has_memory=False)
    assert TENSORS.host_view(whole(meta)) is None
    made = TENSORS.empty(description, meta)
    assert (made.dtype, made.shape, made.device.type) == (torch.bfloat16, (3, 4), "cpu")
    assert TENSORS.empty(description).shape == (3, 4)


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), UnsupportedStateError, "to_dense"),
        (freed, UnsupportedStateError, "freed"),
        (fake, UnsupportedStateError, "FakeTensor"),
        (lambda: torch.nn.UninitializedParameter(), UnsupportedStateError, "no shape yet"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), UnsupportedDtypeError, "uint8"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), UnsupportedDtypeError, "bits8"),
    ],
)
def test_what_cannot_be_stored_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        TENSORS.describe(make())


@pytest.mark.filterwarnings("ignore")  # torch warns of each of these kinds
def test_deprecated_kinds_are_refused():
    with pytest.raises(UnsupportedDtypeError, match="int_repr"):
        TENSORS.describe(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with pytest.raises(UnsupportedDtypeError, match="view_as_real"):
        TENSORS.describe(torch.zeros(3, dtype=torch.complex32))
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(UnsupportedStateError, match=r"nested|jagged"):
            TENSORS.describe(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_tensors_inside_a_transform_are_refused(transform):
    def inside(tensor):
        with pytest.raises(UnsupportedStateError, match="save and load outside it"):
            TENSORS.describe(tensor)
        assert TENSORS.plain(tensor) is None
        return tensor.sum()

    transform(inside)(torch.ones(3, 2))


def test_other_values_are_not_tensors():
    assert [TENSORS.describe(value) for value in (1, None, [torch.ones(1)], np.ones(1))] == [None] * 4


def test_a_platform_takes_numpy_and_shards_too():
    tensors = TorchPlatform().tensors
    assert tensors.describe(np.ones(3)).dtype == "float64"
    sharded = ShardedTensor([(torch.ones(2, 3), (4, 0)), (torch.ones(0, 3), (0, 0))], (6, 3))
    description = tensors.describe(sharded)
    assert (description.dtype, description.shape) == ("float32", (6, 3))
    shards = tensors.local_shards(sharded)
    assert [(s.offsets, s.sizes) for s in shards] == [((4, 0), (2, 3))]
    array, stager = np.arange(3), TorchPlatform().stager
    stager.copy_out(tensors.local_shards(array)[0], buffer := stager.buffer(24)).wait()
    stager.copy_in(buffer, tensors.local_shards(target := np.zeros(3, int))[0]).wait()
    assert target.tolist() == [0, 1, 2]
    tensors.writable(shards[0])[...] = 7
    assert sharded.shards[0][0].sum() == 42
    assert isinstance(tensors.empty(description, sharded).shards[0][0], torch.Tensor)
    assert isinstance(tensors.empty(TensorDescription("int4", (2,), Replicated())), torch.Tensor)
