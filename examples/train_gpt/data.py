"""Text to train on that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def standard_library() -> Tensor:
    """The modules at the top of the standard library, one after the other."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Sampler:
    """Draws batches of random passages.

    Every rank draws the same global batch and takes its own rows of it: which text is seen next
    does not depend on the number of ranks, and one small state serves all of them.
    """

    def __init__(self, text: Tensor, *, batch: int, length: int, seed: int) -> None:
        self._text, self._batch, self._length = text, batch, length
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, rank: int, world_size: int) -> Tensor:
        """This rank's rows of the next batch, (rows, length) token numbers."""
        starts = torch.randint(len(self._text) - self._length, (self._batch, 1), generator=self._generator)
        mine = starts[rank::world_size]
        return self._text[mine + torch.arange(self._length)].long()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
