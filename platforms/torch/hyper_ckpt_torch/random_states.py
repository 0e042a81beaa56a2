"""The global random states that a training in PyTorch draws from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device | None = None) -> dict[str, Any]:
    """The states of the global generators of torch, Python and numpy, and of that of `device`, as plain values and
    tensors. They belong to the rank: `PerRank(random_states())`.

    Args:
        device: an accelerator; None or one without generators of its own adds nothing.
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
    }
    generator = _generator_of(device)
    return states if generator is None else {**states, "device": generator.get_state()}


def set_random_states(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Sets what `random_states` gave. Where only one of the two knew an accelerator, its generator stays as it is."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy_state = states["numpy"]
    key = np.array(numpy_state["state"]["key"], np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    generator = _generator_of(device)
    if generator is not None and "device" in states:
        generator.set_state(states["device"])


def _generator_of(device: torch.device | None) -> torch.Generator | None:
    if device is None:
        return None
    module: Any = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", ())  # cuda, npu, xpu: empty before their first use
    if not generators:
        return None
    index: Any = device.index  # typed as a number, but may be None
    found: torch.Generator = generators[module.current_device() if index is None else index]
    return found
