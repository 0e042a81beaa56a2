"""The folder that a Trainer is told to resume from: its position and random states, and no weights."""

from __future__ import annotations

import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

_LOGGER = "transformers.trainer"


class ResumeFolder:
    """What the Trainer reads by itself, in its own form, in a temporary folder of this process.

    The Trainer asks for a file of weights. It gets one without any: they are in place already. The warning which it
    then logs is held back until `loaded` is called.

    Args:
        trainer_state: JSON of a `TrainerState`.
        distributed: whether the Trainer has several ranks; `rank` is then its own.

    The random states are those that are set when this is made.
    """

    def __init__(self, trainer_state: str, *, distributed: bool, rank: int, device: torch.device) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hyper-ckpt-resume-")
        path = Path(self._folder.name)
        (path / "trainer_state.json").write_text(trainer_state)
        save_file({}, path / "model.safetensors", metadata={"format": "pt"})
        name = f"rng_state_{rank}.pth" if distributed else "rng_state.pth"
        torch.save(_random_states(device, distributed), path / name)
        logging.getLogger(_LOGGER).addFilter(_no_missing_keys)

    @property
    def path(self) -> str:
        """Where it is."""
        return self._folder.name

    def loaded(self) -> None:
        """The Trainer has looked at the weights."""
        logging.getLogger(_LOGGER).removeFilter(_no_missing_keys)

    def remove(self) -> None:
        """Removes it; may be called again."""
        self.loaded()
        self._folder.cleanup()


def _no_missing_keys(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("There were missing keys in the checkpoint model loaded")


def _random_states(device: torch.device, distributed: bool) -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        module: Any = getattr(torch, device.type).random
        states[device.type] = module.get_rng_state_all() if distributed else module.get_rng_state()
    return states
