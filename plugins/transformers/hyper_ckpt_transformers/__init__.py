"""hyper-ckpt in the Hugging Face Trainer."""

from hyper_ckpt_transformers.callback import CheckpointCallback

__all__ = ["CheckpointCallback"]
