"""What the tests train: a tiny GPT-2 with random weights on random tokens."""

import hashlib
import os
import random
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from hyper_ckpt_transformers import CheckpointCallback

ROWS, BATCH = 24, 4
STEPS = ROWS // BATCH  # of an epoch in one process


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int = ROWS) -> None:
        self._tokens = torch.randint(50, (rows, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Noisy(Trainer):
    """Numbers of all global generators go in."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        noise = 1 + 0.1 * torch.rand(()).item() + 0.1 * float(np.random.random()) + 0.1 * random.random()
        return (loss[0] * noise, *loss[1:]) if isinstance(loss, tuple) else loss * noise


def model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    )


def make(out: Path | str, *callbacks: TrainerCallback, seed: int = 1, **options: Any) -> Trainer:
    given = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        "logging_steps": 3,
        **options,
    }
    args = TrainingArguments(output_dir=str(out), **given)
    trainer = Noisy(model(seed), args, train_dataset=Tokens(), eval_dataset=Tokens(4), callbacks=[*callbacks])
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed + trainer.args.process_index)
    return trainer


def digest(trainer: Trainer) -> dict[str, Any]:
    """All that has to be equal: SHA-256 of every tensor, and the plain values."""
    optimizer = trainer.optimizer.state_dict()
    tensors = dict(trainer.model.state_dict())
    tensors |= {f"{i}.{name}": value for i, moments in optimizer["state"].items() for name, value in moments.items()}
    out: dict[str, Any] = {n: hashlib.sha256(v.numpy().tobytes()).hexdigest() for n, v in tensors.items()}
    out["groups"] = optimizer["param_groups"]
    out["scheduler"] = trainer.lr_scheduler.state_dict()["last_epoch"]
    out["state"] = [trainer.state.global_step, trainer.state.epoch]
    out["logged"] = [each["step"] for each in trainer.state.log_history if "loss" in each]
    out["drawn"] = [torch.rand(2).tolist(), np.random.random(), random.random()]
    return out


def fit(root: Path | str | None, out: Path | str, *, seed: int, every: int = 4, **options: Any) -> tuple[Any, Any]:
    """A training with checkpoints, or without. Returns what came of it, and the callback."""
    checkpoints = None if root is None else CheckpointCallback(root, every_steps=every)
    more = options.pop("callbacks", [])
    trainer = make(out, *more, *([] if checkpoints is None else [checkpoints]), seed=seed, **options)
    try:
        trainer.train(resume_from_checkpoint=None if checkpoints is None else checkpoints.resume(trainer))
    finally:
        if checkpoints is not None:
            checkpoints.close()  # callbacks are not told of exceptions
    return digest(trainer), checkpoints
