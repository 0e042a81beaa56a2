"""hyper_ckpt.key_maps with real layers and optimizers of both frameworks: what one has saved the other one loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn

import hyper_ckpt
from hyper_ckpt import LoadOptions, LoadReport, key_maps
from hyper_ckpt.errors import MissingKeyError, ShapeMismatchError

torch = pytest.importorskip("torch")
tnn = torch.nn

# Of each kind: the layer of MindSpore, that of PyTorch, and MindSpore's names where they differ, by PyTorch's.
GAMMA_BETA = {"weight": "gamma", "bias": "beta"}
MOVING = {**GAMMA_BETA, "running_mean": "moving_mean", "running_var": "moving_variance"}
LAYERS = {
    "dense": (lambda: nn.Dense(6, 4), lambda: tnn.Linear(6, 4), {}),
    "embedding": (lambda: nn.Embedding(9, 4), lambda: tnn.Embedding(9, 4), {"weight": "embedding_table"}),
    "layer_norm": (lambda: nn.LayerNorm((4,)), lambda: tnn.LayerNorm(4), GAMMA_BETA),
    "group_norm": (lambda: nn.GroupNorm(2, 4), lambda: tnn.GroupNorm(2, 4), GAMMA_BETA),
    "batch_norm_1d": (lambda: nn.BatchNorm1d(4), lambda: tnn.BatchNorm1d(4), MOVING),
    "batch_norm_2d": (lambda: nn.BatchNorm2d(4), lambda: tnn.BatchNorm2d(4), MOVING),
    "conv_2d": (lambda: nn.Conv2d(3, 4, (3, 5), has_bias=True), lambda: tnn.Conv2d(3, 4, (3, 5)), {}),
    "conv_2d_transpose": (
        lambda: nn.Conv2dTranspose(3, 4, 3, has_bias=True),
        lambda: tnn.ConvTranspose2d(3, 4, 3),
        {},
    ),
    "lstm": (lambda: nn.LSTM(3, 5), lambda: tnn.LSTM(3, 5), {}),
    "mint_linear": (lambda: mint.nn.Linear(6, 4), lambda: tnn.Linear(6, 4), {}),
    "mint_embedding": (lambda: mint.nn.Embedding(9, 4), lambda: tnn.Embedding(9, 4), {}),
    "mint_layer_norm": (lambda: mint.nn.LayerNorm(4), lambda: tnn.LayerNorm(4), {}),
    "mint_group_norm": (lambda: mint.nn.GroupNorm(2, 4), lambda: tnn.GroupNorm(2, 4), {}),
    "mint_batch_norm": (lambda: mint.nn.BatchNorm2d(4), lambda: tnn.BatchNorm2d(4), {}),
    "mint_conv_2d": (lambda: mint.nn.Conv2d(3, 4, 3), lambda: tnn.Conv2d(3, 4, 3), {}),
}  # fmt: skip
NOT_IN_NN = "num_batches_tracked"  # which the BatchNorm of mint has, and that of nn hasn't


class Both:
    """All layers in a cell of MindSpore and in a module of PyTorch, filled with random bits, different ones."""

    def __init__(self) -> None:
        self.cell, self.module = nn.CellDict(), tnn.ModuleDict()
        for kind, (ours, theirs, _) in LAYERS.items():
            self.cell[kind], self.module[kind] = ours(), theirs()
        rng = np.random.default_rng(0)
        self.ours, self.theirs = self.cell.parameters_dict(), self.module.state_dict()
        for value in self.ours.values():
            fill(value.asnumpy(), rng)
        for value in self.theirs.values():
            fill(value.numpy(), rng)


def fill(array: np.ndarray, rng: np.random.Generator) -> None:
    array.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, array.nbytes, np.uint8)


def ours_by_theirs() -> dict[str, str]:
    """MindSpore's names of all parameters, by PyTorch's."""
    names: dict[str, str] = {}
    for kind, (_, theirs, renamed) in LAYERS.items():
        for name in theirs().state_dict():
            if name != NOT_IN_NN or kind.startswith("mint"):
                names[f"{kind}.{name}"] = f"{kind}.{renamed.get(name, name)}"
    return names


def load(target: dict[str, Any], path: Path, map_keys: Any, **options: Any) -> LoadReport:
    return hyper_ckpt.load(target, path, no_dist=True, options=LoadOptions(map_keys=map_keys), **options)


def test_layers_to_torch(tmp_path: Path) -> None:
    both, names = Both(), ours_by_theirs()
    assert set(names.values()) == set(both.ours), "there are no others"
    hyper_ckpt.save({"net": both.ours}, tmp_path, no_dist=True)
    with pytest.raises(MissingKeyError, match=NOT_IN_NN):
        load({"model": both.theirs}, tmp_path, key_maps.from_mindspore({"model": "net"}))
    report = load({"model": both.theirs}, tmp_path, key_maps.from_mindspore({"model": "net"}), strict=False)
    assert report.mapped == {f"model/{theirs}": f"net/{ours}" for theirs, ours in names.items()}
    assert set(report.missing) == {f"model/batch_norm_{n}d.{NOT_IN_NN}" for n in (1, 2)}
    assert report.mismatched == report.unexpected == ()
    for theirs, ours in names.items():
        assert both.theirs[theirs].numpy().tobytes() == both.ours[ours].asnumpy().tobytes(), theirs


def test_layers_to_mindspore(tmp_path: Path) -> None:
    both, names = Both(), ours_by_theirs()
    hyper_ckpt.save({"model": both.theirs}, tmp_path, no_dist=True)
    report = load({"model": both.ours}, tmp_path, key_maps.from_torch(), strict=False)
    assert report.mapped == {f"model/{ours}": f"model/{theirs}" for theirs, ours in names.items() if ours != theirs}
    assert report.missing == report.mismatched == ()
    assert set(report.unexpected) == {f"model/batch_norm_{n}d.{NOT_IN_NN}" for n in (1, 2)}
    for theirs, ours in names.items():
        assert both.theirs[theirs].numpy().tobytes() == both.ours[ours].asnumpy().tobytes(), theirs


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    hyper_ckpt.save({"conv": nn.Conv1d(3, 4, 5).parameters_dict()}, tmp_path, no_dist=True)
    target = {"conv": tnn.Conv1d(3, 4, 5, bias=False).state_dict()}
    with pytest.raises(ShapeMismatchError, match=r"'conv/weight' was saved with shape \(4, 3, 1, 5\)"):
        load(target, tmp_path, key_maps.from_mindspore())
    assert len(load(target, tmp_path, key_maps.from_mindspore(), strict=False).mismatched) == 1


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.norm = nn.Embedding(9, 6), nn.Dense(6, 4), nn.LayerNorm((4,))


class TorchNet(tnn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.norm = tnn.Embedding(9, 6), tnn.Linear(6, 4), tnn.LayerNorm(4)


NAMES = {
    "embed.weight": "embed.embedding_table",
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "norm.weight": "norm.gamma",
    "norm.bias": "norm.beta",
}
Make = Callable[[Any], Any]
# MindSpore's optimizer, PyTorch's, and how MindSpore calls what PyTorch keeps of a parameter.
OPTIMIZERS: dict[str, tuple[Make, Make, dict[str, str]]] = {
    "Adam": (
        lambda p: nn.Adam(p, 0.01),
        lambda p: torch.optim.Adam(p, 0.01),
        {"exp_avg": "moment1", "exp_avg_sq": "moment2"},
    ),
    "Adam with amsgrad": (
        lambda p: nn.Adam(p, 0.01, use_amsgrad=True),
        lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "vhat"},
    ),
    "AdamWeightDecay": (
        lambda p: nn.AdamWeightDecay(p, 0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        {"exp_avg": "adam_m", "exp_avg_sq": "adam_v"},
    ),
    "Momentum": (
        lambda p: nn.Momentum(p, 0.01, 0.9),
        lambda p: torch.optim.SGD(p, 0.01, 0.9),
        {"momentum_buffer": "moments"},
    ),
    "SGD": (
        lambda p: nn.SGD(p, 0.01, 0.9),
        lambda p: torch.optim.SGD(p, 0.01, 0.9),
        {"momentum_buffer": "accum"},
    ),
    "mint AdamW": (
        lambda p: mint.optim.AdamW(p, 0.01),
        lambda p: torch.optim.AdamW(p, 0.01),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    "mint Adam": (
        lambda p: mint.optim.Adam(p, 0.01),
        lambda p: torch.optim.Adam(p, 0.01),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    "mint SGD": (
        lambda p: mint.optim.SGD(p, 0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.01, 0.9),
        {"momentum_buffer": "momentum_buf"},
    ),
    "experimental Adam": (
        lambda p: ms.experimental.optim.Adam(p, 0.01),
        lambda p: torch.optim.Adam(p, 0.01),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
}
# mint's AdamW has no kernel on the CPU; the second step of mint's SGD forgets the first one there.
STEPS = {"mint AdamW": 0, "mint SGD": 1}


class Pair:
    """The same optimizer in both frameworks, of equal parameters, after the same steps with the same gradients."""

    def __init__(self, kind: str, steps: int) -> None:
        make_ours, make_theirs, self.kinds = OPTIMIZERS[kind]
        self.net, self.module = Net(), TorchNet()
        ours, theirs = self.net.parameters_dict(), dict(self.module.named_parameters())
        optimizer, torch_optimizer = make_ours(self.net.trainable_params()), make_theirs(self.module.parameters())
        for name, value in theirs.items():
            value.data.copy_(torch.from_numpy(ours[NAMES[name]].asnumpy()))
        rng = np.random.default_rng(0)
        for _ in range(steps):
            grads = {name: rng.standard_normal(value.shape).astype(np.float32) for name, value in ours.items()}
            optimizer(tuple(ms.Tensor(grads[value.name]) for value in optimizer.parameters))
            for name, value in theirs.items():
                value.grad = torch.from_numpy(grads[NAMES[name]].copy())
            torch_optimizer.step()
        self.ours = optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        self.theirs = get_optimizer_state_dict(self.module, torch_optimizer)

    def moments(self) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
        """By both names, each in memory: MindSpore's and PyTorch's."""
        return {
            (f"{kind}.{ours}", f"state/{theirs}/{torch_kind}"): (
                self.ours[f"{kind}.{ours}"].asnumpy(),
                self.theirs["state"][theirs][torch_kind].numpy(),
            )
            for torch_kind, kind in self.kinds.items()
            for theirs, ours in NAMES.items()
        }


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_names_of_moments_mean_the_same(kind: str) -> None:
    for names, (ours, theirs) in Pair(kind, STEPS.get(kind, 2)).moments().items():
        assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-6), names
        assert STEPS.get(kind) == 0 or ours.any()


@pytest.mark.parametrize("to_torch", [True, False], ids=["to torch", "to mindspore"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_of_optimizers(kind: str, to_torch: bool, tmp_path: Path) -> None:
    pair, rng = Pair(kind, 0), np.random.default_rng(0)
    for ours, theirs in pair.moments().values():
        fill(ours, rng)
        fill(theirs, rng)
    source, target = (pair.ours, pair.theirs) if to_torch else (pair.theirs, pair.ours)
    hyper_ckpt.save({"optimizer": source}, tmp_path, no_dist=True)
    map_keys = key_maps.from_mindspore() if to_torch else key_maps.from_torch()
    report = load({"optimizer": target}, tmp_path, map_keys, strict=False)
    expected = {(b, a) if to_torch else (a, b) for a, b in pair.moments()}
    assert {(f"optimizer/{a}", f"optimizer/{b}") for a, b in expected} <= set(report.mapped.items())
    for names, (ours, theirs) in pair.moments().items():
        assert ours.tobytes() == theirs.tobytes(), names


def test_what_is_left_of_an_optimizer(tmp_path: Path) -> None:
    """Step counters and settings, which the frameworks keep otherwise."""
    pair = Pair("Adam", 1)
    hyper_ckpt.save({"optimizer": pair.ours}, tmp_path, no_dist=True)
    report = load({"optimizer": pair.theirs}, tmp_path, key_maps.from_mindspore(), strict=False)
    left = {name for name in report.missing if "param_groups" not in name}
    assert left == {f"optimizer/state/{name}/step" for name in NAMES}
    steps = hyper_ckpt.read(tmp_path, keys=["optimizer/global_step"])["optimizer"]["global_step"]
    assert steps.tolist() == [1]
    counters = {f"optimizer/{name}" for name in ("global_step", "learning_rate", "beta1_power", "beta2_power")}
    assert set(report.unexpected) == counters | {f"optimizer/{name}" for name in NAMES.values()}
