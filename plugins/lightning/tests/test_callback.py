"""CheckpointCallback in one process: interrupted anywhere, a training ends with the bits of one that was not."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning_job
import pytest
from lightning.pytorch.callbacks import Callback
from lightning_job import BATCHES, Batches, fit, plain_loader, validation_loader

from hyper_ckpt import CheckpointManager, Retention
from hyper_ckpt_lightning import CheckpointCallback

pytestmark = [
    # Lightning's advice on speed, and what it uses of torch that torch is going to drop.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
]


class StopError(Exception):
    """Stands for whatever ends a job."""


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self._step:
            raise StopError


def saved_steps(root: Path) -> list[int]:
    with CheckpointManager(root, on_sigterm=False) as manager:
        return [info.step for info in manager.steps() if info.complete]


@pytest.mark.parametrize("stop_at", [4, 5, 6, 8, 13, 18])
def test_it_goes_on_where_it_was(tmp_path: Path, stop_at: int) -> None:
    expected, _ = fit(None, seed=1, every=4)
    with pytest.raises(StopError):
        fit(tmp_path, seed=1, every=4, callbacks=[StopAt(stop_at)])
    found = saved_steps(tmp_path)
    assert found[-1] == stop_at // 4 * 4
    got, made = fit(tmp_path, seed=2, every=4)
    assert made.checkpoint_callback.restored.step == found[-1]
    assert got == expected
    assert saved_steps(tmp_path) == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize("stop_at", [7, 12, 14])
def test_a_shuffled_loader_without_a_state_goes_on_after_epochs(tmp_path: Path, stop_at: int) -> None:
    expected, _ = fit(None, seed=1, every=BATCHES, loader=plain_loader)
    with pytest.raises(StopError):
        fit(tmp_path, seed=1, every=BATCHES, loader=plain_loader, callbacks=[StopAt(stop_at)])
    got, _ = fit(tmp_path, seed=2, every=BATCHES, loader=plain_loader)
    assert got == expected


@pytest.mark.parametrize("stop_at", [5, 7, 14])
def test_max_steps(tmp_path: Path, stop_at: int) -> None:
    limit: dict[str, Any] = {"epochs": None, "max_steps": 20}
    expected, _ = fit(None, seed=1, every=3, **limit)
    with pytest.raises(StopError):
        fit(tmp_path, seed=1, every=3, callbacks=[StopAt(stop_at)], **limit)
    got, _ = fit(tmp_path, seed=2, every=3, **limit)
    assert got == expected
    assert saved_steps(tmp_path)[-1] == 20, "the last step is saved, whatever the interval"


def test_accumulated_gradients(tmp_path: Path) -> None:
    expected, _ = fit(None, seed=1, every=1, accumulate_grad_batches=2)
    with pytest.raises(StopError):
        fit(tmp_path, seed=1, every=1, accumulate_grad_batches=2, callbacks=[StopAt(5)])
    assert saved_steps(tmp_path) == [1, 2, 3, 4, 5]
    got, _ = fit(tmp_path, seed=2, every=1, accumulate_grad_batches=2)
    assert got == expected


class SigtermAt(StopAt):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_sigterm_saves_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    expected, _ = fit(None, seed=1, every=100)
    _, told = fit(tmp_path, seed=1, every=100, callbacks=[SigtermAt(8)])
    assert told.checkpoint_callback.preempted
    assert saved_steps(tmp_path) == [9]
    assert signal.getsignal(signal.SIGTERM) == before
    got, made = fit(tmp_path, seed=2, every=100)
    assert not made.checkpoint_callback.preempted
    assert got == expected


def test_a_training_that_is_over_is_not_made_again(tmp_path: Path) -> None:
    expected, _ = fit(tmp_path, seed=1, every=5)
    got, made = fit(tmp_path, seed=2, every=5)
    assert made.global_step == 24
    assert {**got, "drawn": 0} == {**expected, "drawn": 0}


def test_retention_by_a_logged_metric(tmp_path: Path) -> None:
    kept = CheckpointCallback(tmp_path, every_steps=BATCHES, retention=Retention(last=1, best=1, metric="far"))
    trainer = lightning_job.trainer(kept, epochs=4)
    trainer.fit(lightning_job.Net(), Batches(), validation_loader())
    with CheckpointManager(tmp_path, on_sigterm=False) as manager:
        steps = manager.steps()
    assert 1 <= len(steps) <= 2
    assert all(set(info.metrics) == {"far"} for info in steps)
    with pytest.raises(RuntimeError, match="while the trainer fits"):
        _ = kept.manager


def test_resume_false_begins_anew(tmp_path: Path) -> None:
    fit(tmp_path, seed=1, every=6, epochs=1)
    anew = CheckpointCallback(tmp_path, every_steps=6, resume=False)
    trainer = lightning_job.trainer(anew, epochs=1)
    trainer.fit(lightning_job.Net(), Batches(), validation_loader())
    assert anew.restored is None
    assert trainer.global_step == 6


def test_wrong_intervals_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        CheckpointCallback("run", every_steps=0)
