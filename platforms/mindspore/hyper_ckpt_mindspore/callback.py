"""Checkpoints of what `mindspore.train.Model` trains."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from mindspore.train import Callback

import hyper_ckpt
from hyper_ckpt.contracts.platform import ByteBuffer, Platform
from hyper_ckpt_mindspore.platform import default


class CheckpointCallback(Callback):  # type: ignore[misc]  # MindSpore has no types
    """Saves every few steps or minutes during `Model.train`, to `root/step-<number>`, and resumes from the newest one.

    checkpoints = CheckpointCallback("run", every_steps=100)
    step = checkpoints.restore(model)
    model.train(epochs, dataset, callbacks=[checkpoints], initial_epoch=step // dataset.get_dataset_size())

    Saved is the training network with the optimizer's state. Steps are counted over all runs; the batches of an epoch
    that was begun are not skipped. Saves are finished in the background; the end of the training waits for them.

    Args:
        root: a directory that all ranks see.
        every_steps: steps between saves.
        every_minutes: minutes between saves, as rank 0 counts them, which is asked every `ask_steps` steps.
        extra: more to save and to load, e.g. `{"seed": PerRank(seed)}`.
        platform: None is that of MindSpore's world group.
        ask_steps: see above.

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
        ask_steps: int = 10,
    ) -> None:
        super().__init__()
        given = [each for each in (every_steps, every_minutes) if each is not None]
        if not given or min(*given, ask_steps) <= 0:
            raise ValueError("give every_steps or every_minutes, and only positive numbers")
        self._root, self._extra = Path(root), extra
        self._every_steps, self._every_seconds = every_steps, None if every_minutes is None else every_minutes * 60
        self._ask_steps = ask_steps
        self._platform = platform
        self._before = self._last_step = 0
        self._last_time = time.monotonic()
        self._handles: list[hyper_ckpt.SaveHandle] = []

    def restore(self, model: Any) -> int:
        """Loads the newest complete checkpoint into what `model` trains, in place.

        Args:
            model: a `mindspore.train.Model` with an optimizer, as on the run that saved.

        Returns:
            Its step; 0 if there is none.
        """
        step: int = self._ranks.all_gather_object(self._newest())[0]  # on a shared disk ranks may see different ones
        if step:
            state = self._state(model.train_network, 0, 0)
            hyper_ckpt.load(state, self._path(step), platform=self.platform)
        self._before = self._last_step = step
        return step

    @property
    def platform(self) -> Platform:
        """The platform of the saves."""
        if self._platform is None:
            self._platform = default()
        return self._platform

    def on_train_begin(self, run_context: Any) -> None:
        """Starts the clock."""
        self._last_time = time.monotonic()

    def on_train_step_end(self, run_context: Any) -> None:
        """Saves, if it is time to."""
        now = run_context.original_args()
        step = self._before + int(now.cur_step_num)
        if self._is_due(step):
            state = self._state(now.train_network, step, int(now.cur_epoch_num))
            handle = hyper_ckpt.async_save(state, self._path(step), platform=self.platform)
            handle.wait_staged()
            self._handles = [*(each for each in self._handles if not each.done()), handle]
            self._last_time = time.monotonic()
        self._last_step = step

    def on_train_end(self, run_context: Any) -> None:
        """Waits for the saves that are not complete yet; raises what went wrong in them."""
        self._before = self._last_step
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.result()

    @property
    def _ranks(self) -> Any:
        return self.platform.ranks

    def _is_due(self, step: int) -> bool:
        # In sink mode several steps pass between two calls.
        by_steps = self._every_steps is not None and step // self._every_steps > self._last_step // self._every_steps
        if by_steps or self._every_seconds is None or step // self._ask_steps == self._last_step // self._ask_steps:
            return by_steps
        answer: ByteBuffer = np.array([time.monotonic() - self._last_time >= self._every_seconds], np.uint8)
        if self._ranks.world_size > 1:
            self._ranks.broadcast_into([answer], 0).wait()
        return bool(answer[0])

    def _state(self, train_network: Any, step: int, epoch: int) -> dict[str, Any]:
        state = {"train_network": train_network.parameters_dict(), "step": step, "epoch": epoch}
        return state if self._extra is None else {**state, "extra": self._extra}

    def _newest(self) -> int:
        found = (path.parent.name.partition("-")[2] for path in self._root.glob("step-*/manifest.json"))
        return max((int(number) for number in found if number.isdigit()), default=0)

    def _path(self, step: int) -> Path:
        return self._root / f"step-{step}"
