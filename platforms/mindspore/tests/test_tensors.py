"""MindSporeTensors: every dtype and kind of view, seen and written in place in memory that MindSpore owns."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn
from mindspore.common.api import _pynative_executor
from mindspore.nn.utils import no_init_parameters

import hyper_ckpt
from hyper_ckpt.contracts.platform import TensorDescription
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt.errors import TargetError, UnsupportedDtypeError, UnsupportedStateError
from hyper_ckpt.layout import Replicated
from hyper_ckpt_mindspore.platform import MindSporePlatform
from hyper_ckpt_mindspore.probe import Probe
from hyper_ckpt_mindspore.tensors import DTYPES, MindSporeTensors, ms_dtype

# What each does to a tensor of shape (3, 4) or to an array.
VIEWS = {
    "whole": (lambda t: t, lambda a: a),
    "rows": (lambda t: t[1:3], lambda a: a[1:3]),
    "first rows": (lambda t: t[0:2], lambda a: a[0:2]),
    "columns": (lambda t: t[:, 1:3], lambda a: a[:, 1:3]),
    "every second": (lambda t: t[::2], lambda a: a[::2]),
    "every second column": (lambda t: t[:, ::2], lambda a: a[:, ::2]),
    "transposed": (lambda t: t.T, lambda a: a.T),
    "permuted": (lambda t: mint.permute(t, (1, 0)), lambda a: a.T),
    "flat": (lambda t: t.view(12), lambda a: a.reshape(12)),
    "reshaped": (lambda t: t.reshape(2, 6), lambda a: a.reshape(2, 6)),
    "narrowed": (lambda t: mint.narrow(t, 1, 1, 2), lambda a: a[:, 1:3]),
    "split": (lambda t: mint.split(t, 2, 1)[1], lambda a: a[:, 2:]),
    "row": (lambda t: t[1], lambda a: a[1]),
    "element": (lambda t: t[1, 2], lambda a: a[1, 2:3].reshape(())),
    "unsqueezed": (lambda t: mint.unsqueeze(t, 1), lambda a: a[:, None]),
}


@pytest.fixture(scope="module")
def probe() -> Probe:
    return Probe()


@pytest.fixture(scope="module")
def tensors(probe: Probe) -> MindSporeTensors:
    return probe.platform().tensors


def content(dtype: str, shape: tuple[int, ...], seed: int = 0) -> bytes:
    high = 2 if dtype == "bool" else 256
    n = math.prod(shape) * BY_NAME[dtype].itemsize
    return np.random.default_rng(seed).integers(0, high, n, np.uint8).tobytes()


def carriers(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    return np.frombuffer(data, BY_NAME[dtype].carrier).reshape(shape).copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 3), (2, 0), (5,), (1, 1, 2)])
def test_every_dtype_and_shape(probe, tensors, dtype, shape):
    data = content(dtype, shape)
    value = probe.make(dtype, shape, data)
    assert tensors.describe(value) == TensorDescription(dtype, shape, Replicated())
    (shard,) = tensors.local_shards(value)
    assert (shard.offsets, shard.sizes) == ((0,) * len(shape), shape)
    view = tensors.host_view(shard)
    assert view.dtype == BY_NAME[dtype].carrier
    assert view.tobytes() == data
    new = content(dtype, shape, 1)
    tensors.writable(shard)[...] = carriers(dtype, shape, new)
    assert probe.raw(value) == new
    made = tensors.empty(tensors.describe(value))
    assert tensors.describe(made) == tensors.describe(value)


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_read_and_written_in_place(probe, tensors, dtype, parameter):
    if parameter and BY_NAME[dtype].code.startswith("F8"):
        pytest.skip("MindSpore has no Parameter of this dtype on the CPU")
    for name, (of_tensor, of_array) in VIEWS.items():
        expected = carriers(dtype, (3, 4), content(dtype, (3, 4)))
        base = probe.make(dtype, (3, 4), expected.tobytes())
        base = ms.Parameter(base, name="p") if parameter else base
        (shard,) = tensors.local_shards(of_tensor(base))
        assert shard.sizes == of_array(expected).shape, name
        assert tensors.host_view(shard).tobytes() == of_array(expected).tobytes(), name
        new = carriers(dtype, shard.sizes, content(dtype, shard.sizes, 2))
        tensors.writable(shard)[...] = new
        of_array(expected)[...] = new
        assert probe.raw(base) == expected.tobytes(), f"{name}: the base has it too, and nothing else has changed"


def test_views_keep_the_memory_alive(tensors):
    view = tensors.host_view(tensors.local_shards(mint.ones((1000,))[10:20])[0])
    for _ in range(20):
        mint.zeros((1000,))
    assert view.tolist() == [1.0] * 10


def test_work_queued_before_is_in_the_view(tensors):
    value = product = ms.Tensor(np.eye(400, dtype=np.float32))
    for _ in range(20):
        product = mint.matmul(product, value) * 2.0
    value.copy_(product)
    assert np.array_equal(tensors.host_view(tensors.local_shards(value)[0]), np.eye(400) * 2.0**20)


def test_elements_that_share_memory_are_no_target(tensors):
    value = mint.broadcast_to(ms.Tensor(np.arange(3.0)), (2, 3))
    (shard,) = tensors.local_shards(value)
    assert tensors.host_view(shard).tolist() == [[0.0, 1.0, 2.0]] * 2
    with pytest.raises(TargetError, match="share memory"):
        tensors.writable(shard)


def test_compiled_functions_see_what_is_loaded(tmp_path):
    """A load goes into the memory that is there; MindSpore's own loaders replace it, and compiled code goes on with the
    old weights."""
    net = nn.Dense(3, 2)
    x = ms.Tensor(np.eye(3, dtype=np.float32))

    @ms.jit
    def compiled(x):
        return net(x)

    hyper_ckpt.save({"net": net.parameters_dict()}, tmp_path / "c")
    before = compiled(x).asnumpy().copy()
    net.weight.copy_(net.weight + 1.0)
    net.bias.copy_(net.bias * 3.0)
    pointer = net.weight.data_ptr()
    assert not np.array_equal(compiled(x).asnumpy(), before)
    hyper_ckpt.load({"net": net.parameters_dict()}, tmp_path / "c")
    assert np.array_equal(compiled(x).asnumpy(), before)
    assert net.weight.data_ptr() == pointer


def test_a_cell_in_the_state_is_loaded_in_place(tmp_path):
    net = nn.SequentialCell(nn.Dense(3, 2), nn.BatchNorm1d(2))
    hyper_ckpt.save({"net": net, "epoch": 3}, tmp_path / "c")
    x = ms.Tensor(np.eye(3, dtype=np.float32))
    dense = net[0]

    @ms.jit
    def compiled(x):
        return dense(x)

    before = compiled(x).asnumpy().copy()
    dense.weight.copy_(dense.weight + 1.0)
    state = {"net": net, "epoch": 0}
    hyper_ckpt.load(state, tmp_path / "c")
    assert state["net"] is net
    assert state["epoch"] == 3
    assert np.array_equal(compiled(x).asnumpy(), before)


def test_lazy_parameters_get_their_values_in_place(tensors):
    with no_init_parameters():
        net = nn.Dense(3, 4)
    weight = net.weight
    assert weight.has_init
    assert tensors.describe(weight) == TensorDescription("float32", (4, 3), Replicated())
    assert weight.has_init, "describing leaves it as it is"
    (shard,) = tensors.local_shards(weight)
    assert not weight.has_init
    assert shard.data is weight
    tensors.writable(shard)[...] = 2.0
    assert (net.weight.asnumpy() == 2.0).all()


def test_a_network_without_values_is_loaded(tmp_path):
    saved = nn.Dense(3, 4)
    hyper_ckpt.save({"net": saved.parameters_dict()}, tmp_path / "c")
    with no_init_parameters():
        net = nn.Dense(3, 4)
    hyper_ckpt.load({"net": net.parameters_dict()}, tmp_path / "c")
    assert np.array_equal(net.weight.asnumpy(), saved.weight.asnumpy())


def test_meta_tensors_are_replaced(tmp_path):
    hyper_ckpt.save({"w": ms.Tensor(np.arange(6.0))}, tmp_path / "c")
    state = {"w": mint.empty((6,), dtype=ms.float64, device="meta")}
    with pytest.raises(UnsupportedStateError, match="meta"):
        hyper_ckpt.save(state, tmp_path / "d")
    hyper_ckpt.load(state, tmp_path / "c")
    assert state["w"].asnumpy().tolist() == list(range(6))


def test_storage_keys(tensors):
    def key(value):
        return tensors.storage_key(tensors.local_shards(value)[0])

    base = ms.Tensor(np.arange(12.0).reshape(3, 4))
    parameter = ms.Parameter(ms.Tensor(np.ones(4, np.float32)), name="p")
    assert key(base) == key(base.view(3, 4)) == key(base[0:3])
    assert key(parameter) == key(parameter.data)
    others = [
        base[1:3],
        base[0:2],
        base.T,
        base.view(12),
        base.view(ms.int64),
        ms.Tensor(np.arange(12.0).reshape(3, 4)),
    ]
    assert len({key(value) for value in [base, *others]}) == 7
    assert key(mint.zeros((0, 3))) is None
    array = np.arange(4.0)
    numpy_shard = MindSporePlatform().tensors
    over = ms.Tensor.from_numpy(array)
    one, two = (numpy_shard.storage_key(numpy_shard.local_shards(v)[0]) for v in (array, over))
    assert one == two, "the same memory, whoever shows it"


def test_ties_are_stored_once(tmp_path):
    net = nn.Dense(3, 2, has_bias=False)
    optimizer = nn.Adam(net.trainable_params())
    state = {"model": net.parameters_dict(), "optimizer": optimizer.state_dict(), "again": net.weight}
    metadata = hyper_ckpt.save(state, tmp_path / "c")
    places = {name: found for name, ((_, found),) in metadata.storage_data.items()}
    assert places["again"] == places["model/weight"] == places["optimizer/weight"]
    assert len(set(places.values())) == len(places) - 2
    expected = net.weight.asnumpy().copy()
    net.weight.copy_(net.weight + 1.0)
    hyper_ckpt.load(state, tmp_path / "c")
    assert np.array_equal(net.weight.asnumpy(), expected)


def test_other_dtypes_are_refused(tensors):
    with pytest.raises(UnsupportedDtypeError, match="HiFloat8"):
        tensors.describe(mint.empty((2,), dtype=ms.hifloat8))
    with pytest.raises(UnsupportedDtypeError, match="no dtype float8_e8m0fnu"):
        ms_dtype("float8_e8m0fnu")
    with pytest.raises(UnsupportedDtypeError, match="supported are"):
        ms_dtype("nonsense")


def test_other_values_are_none_of_ours(tensors):
    for value in (np.zeros(3), [1.0], 3, None, ms.float32, ms.Tensor):
        assert MindSporeTensors.describe(tensors._parts[0], value) is None


def test_the_random_state_is_a_tensor(tmp_path):
    ms.manual_seed(7)
    expected = ms.get_rng_state().asnumpy().tolist()
    hyper_ckpt.save({"rng": ms.get_rng_state()}, tmp_path / "c")
    ms.manual_seed(8)
    state = {"rng": ms.get_rng_state()}
    assert state["rng"].asnumpy().tolist() != expected
    hyper_ckpt.load(state, tmp_path / "c")
    ms.set_rng_state(state["rng"])
    assert ms.get_rng_state().asnumpy().tolist() == expected


def test_errors_of_queued_work_are_raised(tensors):
    value = ms.Tensor(np.zeros((4, 4), np.float32))
    view = value[0:2]
    view.copy_(ms.Tensor(np.ones((2, 4), np.float32)))  # MindSpore refuses a copy into such a view, but only later
    with pytest.raises(RuntimeError):
        tensors.host_view(tensors.local_shards(value)[0])
    _pynative_executor.sync()


def test_views_of_one_memory_load_into_the_same(tmp_path):
    def state(first):
        flat = ms.Tensor(np.arange(24, dtype=np.float32) + first)
        return {"all": flat, "one": flat[:10], "two": flat[5:15].view(2, 5), "square": flat.view(4, 6).T}

    hyper_ckpt.save(state(0), tmp_path / "c")
    target = state(100)
    hyper_ckpt.load(target, tmp_path / "c")
    assert target["all"].asnumpy().tolist() == list(range(24))
    hyper_ckpt.save({**state(0), "two": ms.Tensor(np.ones((2, 5), np.float32))}, tmp_path / "d")
    target = state(100)
    with pytest.raises(TargetError, match="different values were saved"):
        hyper_ckpt.load(target, tmp_path / "d")
    assert target["all"].asnumpy().tolist() == list(range(100, 124))
