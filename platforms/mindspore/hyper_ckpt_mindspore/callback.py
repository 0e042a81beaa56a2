"""Checkpoints of what `mindspore.train.Model` trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from mindspore.train import Callback

from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.manager.manager import CheckpointManager
from hyper_ckpt.manager.retention import Retention
from hyper_ckpt.manager.schedule import SaveInterval
from hyper_ckpt_mindspore.platform import default


class CheckpointCallback(Callback):  # type: ignore[misc]  # MindSpore has no types
    """Saves every few steps or minutes during `Model.train`, and at a SIGTERM, and resumes from the newest checkpoint.

    checkpoints = CheckpointCallback("run", every_steps=100)
    step = checkpoints.restore(model)
    model.train(epochs, dataset, callbacks=[checkpoints], initial_epoch=step // dataset.get_dataset_size())

    A `hyper_ckpt.CheckpointManager` of `root` does the work. Saved is the training network with the optimizer's state.
    Steps are counted over all runs; the batches of an epoch that was begun are not skipped. Saves are finished in the
    background; the end of the training waits for them.

    At a SIGTERM to any rank, all save at the same step and stop: `preempted` is then true.

    Args:
        root: path or URL of the run, the same on all ranks.
        every_steps: steps between saves.
        every_minutes: minutes between saves, by the clock of rank 0.
        extra: more to save and to load, e.g. `{"seed": PerRank(seed)}`.
        platform: None is that of MindSpore's world group.
        retention: which checkpoints stay; None: all.
        metrics: numbers by name of a step that is saved, e.g. to choose the best by, made of what `Model.train` gives
            its callbacks: `lambda now: {"loss": float(now.net_outputs)}`.
        lead: see `hyper_ckpt.SaveInterval`; it counts calls of the callback.
        on_sigterm: False: a SIGTERM is not looked at.

    Raises:
        ValueError: neither steps nor minutes are given, or not positive.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        extra: dict[Any, Any] | None = None,
        platform: Platform | None = None,
        retention: Retention | None = None,
        metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        lead: int = 2,
        on_sigterm: bool = True,
    ) -> None:
        super().__init__()
        if every_steps is None and every_minutes is None:
            raise ValueError("give every_steps or every_minutes, and only positive numbers")
        self._interval = SaveInterval(steps=every_steps, minutes=every_minutes, lead=lead)
        self._root, self._extra, self._platform = root, extra, platform
        self._retention, self._metrics, self._on_sigterm = retention, metrics, on_sigterm
        self._manager: CheckpointManager | None = None
        self._before = self._last_step = 0
        self._preempted = False

    def restore(self, model: Any) -> int:
        """Loads the newest complete checkpoint into what `model` trains, in place. Every rank calls it.

        A damaged one is skipped with a warning.

        Args:
            model: a `mindspore.train.Model` with an optimizer, as on the run that saved.

        Returns:
            Its step; 0 if there is none.

        Raises:
            CorruptCheckpointError: there are checkpoints, and all are damaged.
        """
        found = self.manager.restore(self._state(model.train_network, 0, 0))
        self._before = self._last_step = 0 if found is None else found.step
        return self._before

    @property
    def platform(self) -> Platform:
        """The platform of the saves."""
        if self._platform is None:
            self._platform = default()
        return self._platform

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the run; a new one after each training."""
        if self._manager is None:
            self._manager = CheckpointManager(
                self._root,
                interval=self._interval,
                retention=self._retention,
                platform=self.platform,
                on_sigterm=self._on_sigterm,
            )
        return self._manager

    @property
    def preempted(self) -> bool:
        """Whether the last training was told to end by a SIGTERM, and has saved."""
        return self._preempted

    def on_train_begin(self, run_context: Any) -> None:
        """Makes the manager, if `restore` did not, and starts the clock."""
        self._preempted = False
        _ = self.manager

    def on_train_step_end(self, run_context: Any) -> None:
        """Saves, if it is time to."""
        now = run_context.original_args()
        step = self._before + int(now.cur_step_num)
        if self._is_due(step):
            state = self._state(now.train_network, step, int(now.cur_epoch_num))
            metrics = None if self._metrics is None else self._metrics(now)
            self.manager.async_save(step, state, metrics=metrics).wait_staged()
        self._last_step = step
        if self.manager.preempted:
            self._preempted = True
            run_context.request_stop()

    def on_train_end(self, run_context: Any) -> None:
        """Waits for the saves that are not complete yet; raises what went wrong in them."""
        self._before = self._last_step
        self.close()

    def close(self) -> None:
        """As the end of a training, for one that did not come to it."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _is_due(self, step: int) -> bool:
        # In sink mode several steps pass between two calls.
        passed = self._interval.comes(self._last_step, step)
        return self.manager.should_save(step) or passed

    def _state(self, train_network: Any, step: int, epoch: int) -> dict[str, Any]:
        state = {"train_network": train_network.parameters_dict(), "step": step, "epoch": epoch}
        return state if self._extra is None else {**state, "extra": self._extra}
