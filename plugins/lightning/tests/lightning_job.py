"""What the tests train: a small network with dropout, and loaders that know where they are or do not."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hyper_ckpt_lightning import CheckpointCallback

BATCHES = 6


class Net(pl.LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def loss(self, x: Tensor) -> Tensor:
        # Numbers of all three global generators go in.
        noise = torch.randn(len(x), 4) + np.random.standard_normal() * 0.01
        return self.layers(x + 0.1 * noise).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("far", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        by_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


def rows(rank: int = 0) -> Tensor:
    return torch.randn(BATCHES * 4, 4, generator=torch.Generator().manual_seed(rank))


def plain_loader(rank: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows(rank)), batch_size=4, shuffle=True)


def validation_loader(rank: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows(rank)[:8]), batch_size=4)


class Batches:
    """A loader with a state: it goes on inside an epoch. Lightning tells its sampler which epoch begins."""

    def __init__(self, rank: int = 0) -> None:
        self._rows, self._epoch, self._done = rows(rank), 0, 0

    def __len__(self) -> int:
        return BATCHES

    @property
    def sampler(self) -> "Batches":
        return self

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[Tensor]]:
        self._done %= BATCHES
        order = torch.randperm(len(self._rows), generator=torch.Generator().manual_seed(self._epoch))
        while self._done < BATCHES:
            self._done += 1
            yield [self._rows[order[4 * self._done - 4 : 4 * self._done]]]

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._done = state["done"]


class Count(Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def trainer(*callbacks: Callback, epochs: int = 4, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": epochs,
            "callbacks": list(callbacks),
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def digest(trainer: pl.Trainer) -> dict[str, Any]:
    """All that has to be equal: SHA-256 of every tensor, and the plain values."""
    out: dict[str, Any] = {"step": trainer.global_step, "epoch": trainer.current_epoch}
    optimizer = trainer.optimizers[0].state_dict()
    tensors = dict(trainer.lightning_module.state_dict())
    tensors |= {f"{i}.{name}": value for i, moments in optimizer["state"].items() for name, value in moments.items()}
    out |= {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in tensors.items()}
    out["schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    out["groups"] = optimizer["param_groups"]
    out["counts"] = [each.batches for each in trainer.callbacks if isinstance(each, Count)]
    out["drawn"] = [torch.rand(2).tolist(), np.random.random()]
    return out


def fit(root: Path | str | None, rank: int = 0, *, seed: int, every: int, **options: Any) -> tuple[Any, pl.Trainer]:
    """A training with checkpoints, or without. Returns what came of it."""
    mine = [] if root is None else [CheckpointCallback(root, every_steps=every)]
    more = options.pop("callbacks", [])
    loader = options.pop("loader", Batches)(rank)
    made = trainer(Count(), *more, *mine, enable_checkpointing=bool(mine), **options)
    module = Net(seed)
    torch.manual_seed(seed + rank)
    np.random.seed(seed + rank)
    made.fit(module, loader, validation_loader(rank))
    return digest(made), made
