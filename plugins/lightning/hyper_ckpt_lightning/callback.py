"""Checkpoints of what a Lightning trainer fits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from hyper_ckpt import CheckpointManager, LoadOptions, Restored, Retention, SaveInterval, read
from hyper_ckpt_lightning.training import give_back, state_of, target_of
from hyper_ckpt_torch.random_states import set_random_states


class CheckpointCallback(Checkpoint):
    """Saves every few steps or minutes, at the end and at a SIGTERM, and resumes from the newest checkpoint.

    trainer = Trainer(callbacks=[CheckpointCallback("run", every_steps=100)], max_epochs=10)
    trainer.fit(model, loader)

    A `hyper_ckpt.CheckpointManager` of `root`, made once the ranks are there, does the work. Saves are finished in the
    background; the end of the training waits for them. A save that falls on the last batch of an epoch is made when
    the epoch has ended, after its validation. Takes the place of the trainer's default `ModelCheckpoint`.

    At a SIGTERM to any rank, all save at the same step and the trainer stops: `preempted` is then true.

    Args:
        root: path or URL of the run, the same on all ranks.
        every_steps: optimizer steps (`trainer.global_step`) between saves.
        every_minutes: minutes between saves, by the clock of rank 0.
        retention: which checkpoints stay; None: all. Its metric is a name in `trainer.callback_metrics`.
        resume: load the newest checkpoint when `fit` begins. It never does if the trainer has made steps already, or
            is given a `ckpt_path`.
        lead: see `hyper_ckpt.SaveInterval`.
        on_sigterm: False: a SIGTERM is left to Lightning.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        retention: Retention | None = None,
        resume: bool = True,
        lead: int = 2,
        on_sigterm: bool = True,
    ) -> None:
        super().__init__()
        self._root, self._retention, self._resume = root, retention or Retention(), resume
        self._interval = SaveInterval(steps=every_steps, minutes=every_minutes, lead=lead)
        self._on_sigterm = on_sigterm
        self._manager: CheckpointManager | None = None
        self._handler: Any = None
        self._rng: Mapping[str, Any] | None = None
        self._seen = self._saved = 0
        self._is_due = False
        self._restored: Restored | None = None
        self._preempted = False

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the run, while the trainer fits.

        Raises:
            RuntimeError: it does not.
        """
        if self._manager is None:
            raise RuntimeError("the manager is there while the trainer fits: make one of the same root to look at it")
        return self._manager

    @property
    def restored(self) -> Restored | None:
        """What the last `fit` went on from; None: it began anew."""
        return self._restored

    @property
    def preempted(self) -> bool:
        """Whether the last `fit` was told to end by a SIGTERM, and has saved."""
        return self._preempted

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the manager and resumes. Model, optimizers and ranks are there, the loops have not begun."""
        self._manager = CheckpointManager(
            self._root,
            interval=self._interval,
            retention=self._retention,
            platform="torch",
            on_sigterm=self._on_sigterm,
        )
        self._handler = signal.getsignal(signal.SIGTERM)
        self._rng, self._restored, self._preempted, self._is_due = None, None, False, False
        if self._resume and trainer.global_step == 0 and trainer.ckpt_path is None:
            self._restored = self._go_on(trainer)
        self._seen = self._saved = trainer.global_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets what Lightning has changed since: the random states, by beginning to iterate; the signal handler."""
        if self._rng is not None:
            set_random_states(self._rng, trainer.strategy.root_device)
            self._rng = None
        # Lightning's own broadcasts inside of the handler and ends at once; ours calls those that were there before.
        if self._on_sigterm and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves, if it is time to."""
        step = trainer.global_step
        if step == self._seen:  # gradients are still accumulated
            return
        passed = self._interval.comes(self._seen, step)  # several optimizers make several steps
        self._is_due = self.manager.should_save(step) or passed or self._is_due
        self._seen = step
        if self._is_due and not trainer.is_last_batch:
            self._save(trainer, epoch_ended=False)
        if self.manager.preempted:
            self._preempted = trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what was due at the last batch."""
        if self._is_due:
            self._save(trainer, epoch_ended=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step."""
        if trainer.global_step != self._saved:
            self._save(trainer, epoch_ended=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the saves that are not complete yet; raises what went wrong in them."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Waits for them, and leaves it to the exception to be raised."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.__exit__(type(exception), exception, exception.__traceback__)

    def _go_on(self, trainer: Trainer) -> Restored | None:
        target = target_of(trainer)
        found = self.manager.restore(target, options=LoadOptions(ignore=["progress"]))  # read below
        if found is None:
            return None
        path = next(info.path for info in self.manager.steps() if info.step == found.step)
        progress = read(path, keys=["progress"], platform="torch")["progress"]
        give_back(trainer, target, progress)
        rng = target["rng"].value
        if rng is not None:
            # Where an epoch had ended, to begin the next one draws numbers; within one, nothing was drawn.
            set_random_states(rng, trainer.strategy.root_device)
            self._rng = None if progress["epoch_ended"] else rng
        return found

    def _save(self, trainer: Trainer, epoch_ended: bool) -> None:
        self._is_due, self._saved = False, trainer.global_step
        metrics: dict[str, float] | None = {name: value.item() for name, value in trainer.callback_metrics.items()}
        if self._retention.best is not None and self._retention.metric not in (metrics or {}):
            metrics = None  # it was not logged yet
        state = state_of(trainer, epoch_ended)
        self.manager.async_save(trainer.global_step, state, metrics=metrics).wait_staged()
