"""hyper-ckpt in PyTorch Lightning."""

from hyper_ckpt_lightning.callback import CheckpointCallback

__all__ = ["CheckpointCallback"]
