"""What a checkpoint of a Lightning training holds, taken from a trainer and given back to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Trainer

from hyper_ckpt import PerRank
from hyper_ckpt_torch import TrainState
from hyper_ckpt_torch.random_states import random_states

LOADERS = "combined_loader"
"""Where the state of a fit loop has those of data loaders, which belong to the rank."""


def target_of(trainer: Trainer) -> TrainState:
    """What is loaded in place. Where there is nothing to load, nothing changes."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    model, optimizers = trainer.lightning_module, trainer.optimizers
    return TrainState(model, optimizers, schedulers=schedulers, loaders=PerRank(None), rng=PerRank(None))


def state_of(trainer: Trainer, epoch_ended: bool) -> dict[str, Any]:
    """All that is saved."""
    loops = trainer.fit_loop.state_dict()
    loaders = loops["state_dict"].pop(LOADERS, [])
    callbacks = {callback.state_key: callback.state_dict() for callback in _callbacks(trainer)}
    progress = {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "epoch_ended": epoch_ended,
        "loops": loops,
        "callbacks": {key: state for key, state in callbacks.items() if state},
        "datamodule": {} if _datamodule(trainer) is None else _datamodule(trainer).state_dict(),
        "precision": trainer.precision_plugin.state_dict(),
    }
    rng = random_states(trainer.strategy.root_device)
    return {**target_of(trainer), "loaders": PerRank(loaders), "rng": PerRank(rng), "progress": progress}


def give_back(trainer: Trainer, loaded: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
    """What does not come in place.

    Args:
        loaded: a `target_of` that was loaded.
        progress: as it was saved.
    """
    loops = progress["loops"]
    if loaded["loaders"].value:
        loops["state_dict"][LOADERS] = loaded["loaders"].value
    trainer.fit_loop.load_state_dict(loops)
    if progress["epoch_ended"]:
        # With max_steps, Lightning takes an epoch that has ended for one to be ended again, and counts it twice.
        trainer.fit_loop._restarting = trainer.fit_loop.epoch_loop.restarting = False
    for callback in _callbacks(trainer):
        if callback.state_key in progress["callbacks"]:
            callback.load_state_dict(progress["callbacks"][callback.state_key])
    if progress["datamodule"] and _datamodule(trainer) is not None:
        _datamodule(trainer).load_state_dict(progress["datamodule"])
    if progress["precision"]:
        trainer.precision_plugin.load_state_dict(progress["precision"])


def _callbacks(trainer: Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def _datamodule(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
