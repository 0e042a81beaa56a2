"""The one place that names kinds of devices. Their streams are reached through `torch.get_device_module`."""

from __future__ import annotations

from typing import Any

import torch

# Accelerators whose use by this process decides whether host buffers are pinned. Copies to and from any
# other kind that torch knows work too, without its being named here.
ACCELERATORS = ("cuda", "npu", "xpu")


class Accelerator:
    """Streams and pinned memory of one kind of device.

    Args:
        module: what `torch.get_device_module` returns, e.g. `torch.cuda`.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def has_streams(self) -> bool:
        """Whether copies can run beside the caller's work. Some kinds (mps) have one queue only."""
        return hasattr(self._module, "Stream") and hasattr(self._module, "stream")

    def new_stream(self, device: torch.device) -> Any:
        """A stream beside the ones in use."""
        return self._module.Stream(device=device)

    def current_stream(self, device: torch.device) -> Any:
        """The stream that this thread's work on `device` is queued on."""
        return self._module.current_stream(device)

    def on(self, stream: Any) -> Any:
        """A context in which work is queued on `stream`."""
        return self._module.stream(stream)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the allocator from reusing the tensor's memory before `stream` is done with it."""
        tensor.record_stream(stream)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device copies to and from directly."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator that `device` belongs to; None where copies can't run beside other work."""
    if device.type == "cpu":
        return None
    accelerator = Accelerator(torch.get_device_module(device))
    return accelerator if accelerator.has_streams else None


def accelerator_in_use() -> Accelerator | None:
    """The accelerator that this process already works with. Never starts one: that takes device memory."""
    for kind in ACCELERATORS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            return Accelerator(module)
    return None


def current_device(kind: str) -> torch.device:
    """The device of a kind that new tensors of this process go to."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
