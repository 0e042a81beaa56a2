"""Checkpoints of what a Hugging Face Trainer trains."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hyper_ckpt import CheckpointManager, LoadOptions, PerRank, Restored, Retention, SaveInterval, read
from hyper_ckpt_torch import TrainState
from hyper_ckpt_torch.random_states import random_states, set_random_states
from hyper_ckpt_transformers.folder import ResumeFolder


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed, it is too large
    """Saves every few steps or minutes, at the end and at a SIGTERM, and resumes from the newest checkpoint.

    checkpoints = CheckpointCallback("run", every_steps=100)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))

    A `hyper_ckpt.CheckpointManager` of `root` does the work. Saves are finished in the background; the end of the
    training waits for them. A save that falls on a step that is logged or evaluated, or on the last one of an epoch,
    is made after that. Set `save_strategy="no"`, unless the Trainer shall save as well.

    At a SIGTERM to any rank, all save at the same step and the Trainer stops: `preempted` is then true.

    Args:
        root: path or URL of the run, the same on all ranks.
        every_steps: optimizer steps (`state.global_step`) between saves.
        every_minutes: minutes between saves, by the clock of rank 0.
        retention: which checkpoints stay; None: all. Metrics are the numbers of the newest entry of
            `state.log_history` that has the one to go by.
        lead: see `hyper_ckpt.SaveInterval`.
        on_sigterm: False: a SIGTERM is not looked at.

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
        lead: int = 2,
        on_sigterm: bool = True,
    ) -> None:
        super().__init__()
        self._root, self._retention = root, retention or Retention()
        self._interval = SaveInterval(steps=every_steps, minutes=every_minutes, lead=lead)
        self._on_sigterm = on_sigterm
        self._manager: CheckpointManager | None = None
        self._folder: ResumeFolder | None = None
        self._restored: Restored | None = None
        self._scheduler: Any = None
        self._groups: list[dict[str, Any]] = []
        self._saved = 0
        self._after: str | None = None
        self._preempted = False

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the run; a new one after each training."""
        if self._manager is None:
            self._manager = CheckpointManager(
                self._root,
                interval=self._interval,
                retention=self._retention,
                platform="torch",
                on_sigterm=self._on_sigterm,
            )
        return self._manager

    @property
    def restored(self) -> Restored | None:
        """What the last `resume` loaded; None: nothing."""
        return self._restored

    @property
    def preempted(self) -> bool:
        """Whether the last training was told to end by a SIGTERM, and has saved."""
        return self._preempted

    def resume(self, trainer: Trainer) -> str | None:
        """Loads the newest checkpoint into the Trainer's model and optimizer, in place. Every rank calls it.

        Returns:
            A folder for `trainer.train(resume_from_checkpoint=...)`, from which it takes its position and random
            states, and which is then removed; None: there is no checkpoint yet.

        Raises:
            ValueError: the Trainer makes its model anew (`model_init`), or shards it (FSDP, DeepSpeed).
            CorruptCheckpointError: there are checkpoints, and all are damaged.
        """
        if trainer.model_init is not None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("a Trainer with model_init, FSDP or DeepSpeed cannot be resumed in place")
        optimizer = _inner(trainer.create_optimizer())
        target = TrainState(trainer.model, optimizer, rng=PerRank(None))
        others = ["scheduler", "trainer_state"]  # read below
        self._restored = self.manager.restore(target, options=LoadOptions(ignore=others))
        if self._restored is None:
            return None
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        step = self._restored.step
        path = next(info.path for info in self.manager.steps() if info.step == step)
        plain = read(path, keys=others, platform="torch")
        self._scheduler, self._saved = plain["scheduler"], step
        if target["rng"].value is not None:
            set_random_states(target["rng"].value, trainer.args.device)
        self._folder = ResumeFolder(
            plain["trainer_state"],
            distributed=trainer.args.world_size > 1,
            rank=trainer.args.process_index,
            device=trainer.args.device,
        )
        return self._folder.path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gives the scheduler its state, which the Trainer has only made now."""
        _ = self.manager
        self._preempted, self._after = False, None
        if self._folder is None:
            self._saved = state.global_step
            return
        self._folder.loaded()
        kwargs["lr_scheduler"].load_state_dict(self._scheduler)
        # To make a scheduler sets the learning rate of the first step.
        for group, saved in zip(kwargs["optimizer"].param_groups, self._groups, strict=True):
            group.update(saved)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What was put off for something that did not happen."""
        self._save_after(self._after, state, args, kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saves, if it is time to, or puts it off until the Trainer is done with this step."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self.manager.should_save(state.global_step):
            ends_epoch = state.epoch is not None and state.epoch == int(state.epoch)
            self._after = "epoch" if ends_epoch else _what_comes(control)
            self._save_after("step", state, args, kwargs)
        if self.manager.preempted:
            self._preempted = control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See `on_step_end`."""
        if self._after == "epoch":
            self._after = _what_comes(control)
            self._save_after("step", state, args, kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See `on_step_end`."""
        self._save_after("log", state, args, kwargs)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See `on_step_end`."""
        self._save_after("evaluate", state, args, kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Saves the last step, and waits for the saves that are not complete yet; raises what went wrong in them."""
        if state.global_step != self._saved:
            self._save(state, args, kwargs)
        self.close()

    def close(self) -> None:
        """As the end of a training, for one that did not come to it."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _save_after(self, what: str | None, state: TrainerState, args: TrainingArguments, kwargs: Any) -> None:
        if what is not None and self._after == what:
            self._save(state, args, kwargs)

    def _save(self, state: TrainerState, args: TrainingArguments, kwargs: Any) -> None:
        self._after, self._saved = None, state.global_step
        saved = TrainState(
            kwargs["model"],
            _inner(kwargs["optimizer"]),
            scheduler=kwargs["lr_scheduler"].state_dict(),
            rng=PerRank(random_states(args.device)),
            trainer_state=_json_of(state),
        )
        self.manager.async_save(state.global_step, saved, metrics=self._metrics(state)).wait_staged()

    def _metrics(self, state: TrainerState) -> dict[str, float] | None:
        wanted = self._retention.metric
        if self._retention.best is None:
            return None
        entry = next((each for each in reversed(state.log_history) if wanted in each), None)
        return None if entry is None else {k: v for k, v in entry.items() if isinstance(v, int | float)}


def _inner(optimizer: Any) -> Any:
    """What accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _what_comes(control: TrainerControl) -> str:
    """What the Trainer is going to do before the next step."""
    return "evaluate" if control.should_evaluate else "log" if control.should_log else "step"


def _json_of(state: TrainerState) -> str:
    """The same on all ranks."""
    plain = {**dataclasses.asdict(state), "is_local_process_zero": True, "is_world_process_zero": True}
    return json.dumps(plain, sort_keys=True)
