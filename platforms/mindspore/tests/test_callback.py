"""CheckpointCallback under Model.train: in PyNative and graph mode, alone and on several ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, Model

import hyper_ckpt
from hyper_ckpt import Retention
from hyper_ckpt_mindspore import CheckpointCallback

BATCHES = 5


@pytest.fixture(params=[ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    before = ms.get_context("mode")
    ms.set_context(mode=request.param)
    yield
    ms.set_context(mode=before)


def make_model(seed: int = 0) -> Model:
    ms.set_seed(seed)
    net = nn.SequentialCell(nn.Dense(4, 8), nn.Tanh(), nn.Dense(8, 2))
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.05)
    return Model(net, nn.MSELoss(), optimizer)


def make_data() -> NumpySlicesDataset:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((BATCHES * 4, 4)), rng.standard_normal((BATCHES * 4, 2))
    data = NumpySlicesDataset((x.astype(np.float32), y.astype(np.float32)), shuffle=False, num_parallel_workers=1)
    return data.batch(4)


def train(model: Model, epochs: int, callbacks: list[Any], initial_epoch: int = 0) -> None:
    model.train(epochs, make_data(), callbacks=callbacks, dataset_sink_mode=False, initial_epoch=initial_epoch)


def raw(model: Model) -> dict[str, bytes]:
    return {name: value.asnumpy().tobytes() for name, value in model.train_network.parameters_dict().items()}


def test_training_goes_on_where_it_was(mode: None, tmp_path: Path) -> None:
    first = make_model()
    train(first, 2, [CheckpointCallback(tmp_path, every_steps=4)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000004", "step-0000000008"]
    train(first, 1, [CheckpointCallback(tmp_path / "later", every_steps=5)])
    at_5 = raw(first)

    # Compiled with other weights before they are loaded.
    second = make_model(seed=1)
    checkpoints = CheckpointCallback(tmp_path / "two", every_steps=10)
    train(second, 1, [])
    whole = make_model(seed=2)
    train(whole, 2, [CheckpointCallback(tmp_path / "two", every_steps=10)])
    assert checkpoints.restore(second) == 10
    assert raw(second) == raw(whole)
    train(second, 3, [checkpoints], initial_epoch=checkpoints.restore(second) // BATCHES)
    train(whole, 1, [])
    assert raw(second) == raw(whole)
    assert raw(first) == at_5
    assert checkpoints.restore(second) == 10, "15 is no multiple of 10"
    train(second, 1, [checkpoints])
    train(second, 1, [checkpoints])
    assert hyper_ckpt.read(tmp_path / "two" / "step-0000000020")["step"] == 20
    assert hyper_ckpt.read(tmp_path / "two" / "step-0000000020")["epoch"] == 1


def test_nothing_to_restore_is_step_0(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()  # an interrupted save leaves no manifest
    (tmp_path / "step-x").mkdir()
    model = make_model()
    before = raw(model)
    assert CheckpointCallback(tmp_path, every_steps=1).restore(model) == 0
    assert raw(model) == before


def test_extra_values_come_along(tmp_path: Path) -> None:
    extra = {"seen": 3, "rng": np.random.default_rng(0)}
    model = make_model()
    train(model, 1, [CheckpointCallback(tmp_path, every_steps=5, extra=extra)])
    again = {"seen": 0, "rng": np.random.default_rng(1)}
    assert CheckpointCallback(tmp_path, every_steps=5, extra=again).restore(model) == 5
    assert again["seen"] == 3
    assert again["rng"].random() == extra["rng"].random()


def test_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0.0, 1e6, 7.0))  # each look at the clock is seven seconds later
    monkeypatch.setattr("hyper_ckpt.manager.schedule.time", SimpleNamespace(monotonic=lambda: next(clock)))
    train(make_model(), 4, [CheckpointCallback(tmp_path, every_minutes=0.25)])
    steps = sorted(int(path.name.partition("-")[2]) for path in tmp_path.iterdir())
    assert 3 <= len(steps) < 15


def test_retention_goes_by_metrics(tmp_path: Path) -> None:
    kept = CheckpointCallback(
        tmp_path,
        every_steps=5,
        retention=Retention(last=1, best=1, metric="distance"),
        metrics=lambda now: {"distance": abs(now.cur_step_num - 10), "loss": float(now.net_outputs.asnumpy())},
    )
    train(make_model(), 4, [kept])
    steps = kept.manager.steps()
    kept.close()
    assert [(info.step, info.metrics["distance"]) for info in steps] == [(10, 0.0), (20, 10.0)]
    assert all(info.metrics["loss"] is not None for info in steps)


class SigtermAt(Callback):
    """Sends this process a SIGTERM after some step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_sigterm_saves_and_stops(tmp_path: Path) -> None:
    whole, told = make_model(), make_model()
    train(whole, 3, [])
    before = signal.getsignal(signal.SIGTERM)
    checkpoints = CheckpointCallback(tmp_path, every_steps=100)
    train(told, 3, [SigtermAt(BATCHES), checkpoints])
    assert checkpoints.preempted
    assert signal.getsignal(signal.SIGTERM) == before
    again = make_model(seed=4)
    step = checkpoints.restore(again)
    assert step == BATCHES
    train(again, 3, [checkpoints], initial_epoch=step // BATCHES)
    assert not checkpoints.preempted
    assert raw(again) == raw(whole)


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    train(make_model(), 2, [CheckpointCallback(tmp_path, every_steps=5)])
    for file in (tmp_path / "step-0000000010").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    checkpoints = CheckpointCallback(tmp_path, every_steps=5)
    with pytest.warns(UserWarning, match="newer ones cannot be"):
        assert checkpoints.restore(make_model()) == 5
    checkpoints.close()


@pytest.mark.parametrize("wrong", [{}, {"every_steps": 0}, {"every_minutes": -1.0}, {"every_steps": 1, "lead": 0}])
def test_wrong_intervals_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"positive|above 0"):
        CheckpointCallback("run", **wrong)


def train_on_ranks(rank: int, world_size: int, root: str) -> tuple[int, bool]:
    import mccl_world

    from hyper_ckpt_mindspore.platform import MindSporePlatform

    platform = MindSporePlatform(mccl_world.group(world_size))
    model = make_model()
    train(model, 1, [CheckpointCallback(root, every_minutes=1e-9, platform=platform)])
    mccl_world.barrier(world_size)
    again = make_model(seed=3)
    step = CheckpointCallback(root, every_steps=1, platform=platform).restore(again)
    return step, raw(again) == raw(model)


def test_on_several_ranks(mccl: Any, tmp_path: Path) -> None:
    results = mccl(train_on_ranks, str(tmp_path), world_size=2)
    # In its second call rank 0 knows how far steps are apart, and names the second next.
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000004"]
    assert results == [(4, False)] * 2, "the training went on for a step after that"


def test_the_package_imports_no_mindspore() -> None:
    script = "import sys, hyper_ckpt_mindspore; assert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], timeout=50, check=True)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        __import__("hyper_ckpt_mindspore").nonsense  # noqa: B018
