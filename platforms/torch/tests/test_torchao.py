"""torchao's own quantised tensors, where it is installed."""

import contextlib
import importlib.util
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hyper_ckpt
from hyper_ckpt import errors

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def flattened(value):
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


CONFIGS = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig",
           "Int8DynamicActivationIntxWeightConfig"]  # fmt: skip


def quantised(config, seed):
    with quiet():
        from torchao import quantization

        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
        quantization.quantize_(model, getattr(quantization, config)())
    return model


@pytest.mark.parametrize("config", CONFIGS)
def test_quantised_models(config, tmp_path):
    model, other = quantised(config, 0), quantised(config, 1)
    x = torch.randn(3, 64)
    assert not torch.equal(model(x), other(x))
    hyper_ckpt.save({"model": model}, tmp_path / "c")
    hyper_ckpt.load({"model": other}, tmp_path / "c")
    assert torch.equal(model(x), other(x))
    unlike = quantised(CONFIGS[CONFIGS.index(config) - 1], 1)
    with pytest.raises(errors.StateMismatchError):
        hyper_ckpt.load({"model": unlike}, tmp_path / "c")


def test_nf4(tmp_path):
    with quiet():
        from torchao.quantization.quantize_.workflows import to_nf4

        first, second = (to_nf4(torch.randn(64, 64), 64, 8) for _ in range(2))
    hyper_ckpt.save({"w": first}, tmp_path / "c")
    hyper_ckpt.load({"w": second}, tmp_path / "c")
    assert all(torch.equal(value, flattened(second)[name]) for name, value in flattened(first).items())
    assert torch.equal(first.get_original_weight(), second.get_original_weight())


def optimizer_of_8_bits(rank, world_size, where):
    with quiet():
        from torchao.optim import AdamW8bit

    mesh = init_device_mesh("cpu", (world_size,))

    def trained(seed, cut):
        torch.manual_seed(seed)
        parameter = nn.Parameter(distribute_tensor(torch.randn(128, 64), mesh, [Shard(cut)]))
        optimizer = AdamW8bit([parameter])
        with quiet():
            for _ in range(2):
                parameter.grad = distribute_tensor(torch.randn(128, 64), mesh, [Shard(cut)])
                optimizer.step()
        return parameter, optimizer

    parameter, optimizer = trained(0, 0)
    moment = optimizer.state[parameter]["exp_avg"]
    assert isinstance(moment, DTensor)
    hyper_ckpt.save({"p": parameter, "o": optimizer.state_dict()}, where)
    other, again = trained(1, 0)
    target = {"p": other, "o": again.state_dict()}
    hyper_ckpt.load(target, where)
    loaded = again.state[other]["exp_avg"].to_local()
    for name, value in flattened(moment.to_local()).items():
        assert torch.equal(value, getattr(loaded, name))
    for p, o in ((parameter, optimizer), (other, again)):  # it goes on as if nothing had been
        torch.manual_seed(7)
        p.grad = distribute_tensor(torch.randn(128, 64), mesh, [Shard(0)])
        with quiet():
            o.step()
    assert torch.equal(parameter.to_local(), other.to_local())
    crosswise, third = trained(1, 1)
    with pytest.raises(errors.StateMismatchError, match="cut"):
        hyper_ckpt.load({"p": crosswise, "o": third.state_dict()}, where)


def test_optimizer_states_of_8_bits_over_ranks(gloo, tmp_path):
    gloo(optimizer_of_8_bits, str(tmp_path / "checkpoint"), world_size=2)
