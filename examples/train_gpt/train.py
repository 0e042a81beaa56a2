"""Trains the GPT as one rank of a job, saving and resuming with hyper-ckpt.

    torchrun --nproc-per-node 4 train.py --save my_checkpoint --save-at 20
    torchrun --nproc-per-node 2 train.py --load my_checkpoint
    python train.py --load my_checkpoint

`Trainer.state`, `Trainer.save` and `Trainer.load` are all there is to saving and loading.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import Sampler, standard_library
from digests import digests
from model import GPT, Config
from throughput import measure
from torch.distributed.fsdp import fully_shard

import hyper_ckpt
from hyper_ckpt_torch import TrainState

TINY = Config(width=64, depth=2, heads=2, context=32)
BATCH = 8  # rows of all ranks together


class Trainer:
    """One rank's model, optimizer and data.

    Args:
        steps: of the whole training; the learning rate falls to its end.
        seed: of the first weights, of dropout and of the data.
    """

    def __init__(self, config: Config, steps: int, seed: int) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(seed)
        self.model = GPT(config)
        if self.world_size > 1:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        self.sampler = Sampler(standard_library(), batch=BATCH, length=config.context + 1, seed=seed)
        self.step = 0
        torch.manual_seed(seed + self.rank)  # from here on every rank drops out other activations

    def state(self) -> TrainState:
        """All that has to survive: what another job needs to go on as if nothing had happened."""
        return TrainState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,  # objects with state_dict() and load_state_dict() go in as they are
            sampler=self.sampler,
            rng=hyper_ckpt.PerRank(torch.default_generator),  # every rank has its own
            step=self.step,
        )

    def save(self, path: str) -> None:
        hyper_ckpt.save(self.state(), path)

    def load(self, path: str) -> hyper_ckpt.LoadReport:
        state = self.state()
        report = hyper_ckpt.load(state, path)  # fills tensors where they lie; objects get their states
        self.step = state["step"]
        return report

    def train_step(self) -> float:
        """One step. Returns the loss of the whole batch, the same on all ranks."""
        rows = self.sampler.draw(self.rank, self.world_size)
        loss = self.model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        mean = loss.detach()
        if self.world_size > 1:
            dist.all_reduce(mean)
        return mean.item() / self.world_size


def main() -> None:
    args = _arguments()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    trainer = Trainer(TINY if args.tiny else Config(), args.steps, args.seed)
    if args.load:
        start = time.perf_counter()
        report = trainer.load(args.load)
        _log(trainer, args.events, event="loaded", seconds=time.perf_counter() - start, bytes=report.bytes_read)
    while trainer.step < (args.until or args.steps):
        if trainer.step == args.save_at:
            if args.events:  # only a proof needs these
                _log(trainer, args.events, event="digests", digests=digests(trainer.model, trainer.optimizer))
            if args.save:
                start = time.perf_counter()
                trainer.save(args.save)
                _log(trainer, args.events, event="saved", seconds=time.perf_counter() - start)
        loss = trainer.train_step()
        _log(trainer, args.events, event="step", loss=loss)
    if args.measure:
        folder = Path(args.measure)
        _log(trainer, args.events, event="measured", **measure(trainer.state(), folder, 1 if args.tiny else 9))
    if dist.is_initialized():
        dist.barrier()  # ranks leave together, none while another is in its last call
        dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="length of the whole training")
    parser.add_argument("--until", type=int, help="stop after this step already")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", metavar="DIR", help="go on from this checkpoint")
    parser.add_argument("--save", metavar="DIR", help="make this checkpoint")
    parser.add_argument("--save-at", type=int, default=-1, metavar="STEP", help="after this step")
    parser.add_argument("--events", metavar="FILE", help="write what happens here as JSON lines, digests too")
    parser.add_argument("--measure", metavar="DIR", help="at the end, measure how fast saving into DIR and loading are")
    parser.add_argument("--tiny", action="store_true", help="a model for tests")
    return parser.parse_args()


def _log(trainer: Trainer, path: str | None, **event: Any) -> None:
    """Rank 0 tells what happened."""
    if trainer.rank != 0:
        return
    event = {"step": trainer.step, **event}
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(event) + "\n")
    event.pop("digests", None)
    print(*(f"{key} {value}" for key, value in event.items()), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # all is done: torch 2.13's gloo aborts a process at its exit now and then
