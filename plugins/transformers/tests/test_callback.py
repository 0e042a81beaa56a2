"""CheckpointCallback in one process: interrupted anywhere, a training ends with the bits of one that was not."""

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import trainer_job
from trainer_job import STEPS, fit
from transformers import TrainerCallback

from hyper_ckpt import CheckpointManager, Retention
from hyper_ckpt_transformers import CheckpointCallback


class StopError(Exception):
    """Stands for whatever ends a job."""


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise StopError


def saved_steps(root: Path) -> list[int]:
    with CheckpointManager(root, on_sigterm=False) as manager:
        return [info.step for info in manager.steps() if info.complete]


@pytest.mark.parametrize(
    ("evaluate", "stop_at"), [("no", 4), ("no", 13), ("epoch", 7), ("epoch", 13), ("steps", 4), ("steps", 9)]
)
def test_it_goes_on_where_it_was(tmp_path: Path, evaluate: str, stop_at: int) -> None:
    options = {"eval_strategy": evaluate, "eval_steps": 4}
    expected, _ = fit(None, tmp_path / "out", seed=1, **options)
    with pytest.raises(StopError):
        fit(tmp_path / "run", tmp_path / "out", seed=1, callbacks=[StopAt(stop_at)], **options)
    found = saved_steps(tmp_path / "run")
    assert found[-1] == stop_at // 4 * 4
    got, checkpoints = fit(tmp_path / "run", tmp_path / "out", seed=2, **options)
    assert checkpoints.restored.step == found[-1]
    assert got == expected
    assert saved_steps(tmp_path / "run") == [4, 8, 12, 16, 18]


def test_accumulated_gradients(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2}
    expected, _ = fit(None, tmp_path / "out", seed=1, **options)
    with pytest.raises(StopError):
        fit(tmp_path / "run", tmp_path / "out", seed=1, every=1, callbacks=[StopAt(5)], **options)
    assert saved_steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    got, _ = fit(tmp_path / "run", tmp_path / "out", seed=2, every=1, **options)
    assert got == expected


class SigtermAt(StopAt):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_sigterm_saves_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    expected, _ = fit(None, tmp_path / "out", seed=1)
    _, told = fit(tmp_path / "run", tmp_path / "out", seed=1, every=100, callbacks=[SigtermAt(7)])
    assert told.preempted
    assert saved_steps(tmp_path / "run") == [8]
    assert signal.getsignal(signal.SIGTERM) == before
    got, again = fit(tmp_path / "run", tmp_path / "out", seed=2, every=100)
    assert not again.preempted
    assert got == expected


def test_nothing_is_left_behind_and_no_false_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    fit(tmp_path / "run", tmp_path / "out", seed=1, num_train_epochs=1)
    logger = logging.getLogger("transformers.trainer")
    logger.addHandler(caplog.handler)
    try:
        _, checkpoints = fit(tmp_path / "run", tmp_path / "out", seed=1)
    finally:
        logger.removeHandler(caplog.handler)
    assert checkpoints.restored.step == STEPS
    assert not logger.filters
    assert "missing keys" not in caplog.text
    assert not list((tmp_path / "temporary").glob("hyper-ckpt*"))


def test_retention_by_an_evaluation(tmp_path: Path) -> None:
    best = Retention(last=1, best=1, metric="eval_loss")
    kept = CheckpointCallback(tmp_path / "run", every_steps=STEPS, retention=best)
    trainer_job.make(tmp_path / "out", kept, eval_strategy="epoch").train()
    with CheckpointManager(tmp_path / "run", on_sigterm=False) as manager:
        steps = manager.steps()
    assert 1 <= len(steps) <= 2
    assert all("eval_loss" in info.metrics for info in steps)


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    trainer = trainer_job.make(tmp_path / "out")
    trainer.model_init = lambda: trainer_job.model(1)
    with pytest.raises(ValueError, match="model_init"):
        CheckpointCallback(tmp_path / "run", every_steps=1).resume(trainer)
    with pytest.raises(ValueError, match="above 0"):
        CheckpointCallback(tmp_path / "run", every_steps=0)
