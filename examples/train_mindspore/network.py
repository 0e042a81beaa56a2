"""Guesses the next byte of a text from those before it: a network whose weights PyTorch calls otherwise."""

from __future__ import annotations

from mindspore import Tensor, nn, ops

CONTEXT = 16  # bytes
WIDTH = 32
HIDDEN = 256
EPSILON = 1e-5  # a checkpoint doesn't hold it: MindSpore's own is 1e-7, PyTorch's 1e-5


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.mix = nn.Dense(CONTEXT * WIDTH, HIDDEN)
        self.norm = nn.LayerNorm((HIDDEN,), epsilon=EPSILON)
        self.head = nn.Dense(HIDDEN, 256)

    def construct(self, context: Tensor) -> Tensor:
        """(rows, CONTEXT) bytes to (rows, 256) logits of the next one."""
        x = self.embed(context).reshape(context.shape[0], -1)
        return self.head(ops.relu(self.norm(self.mix(x))))
