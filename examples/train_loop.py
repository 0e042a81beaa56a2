"""A training loop in plain PyTorch that goes on where it was, whatever ended it. Copy it.

    torchrun --nproc-per-node 2 train_loop.py my_run
    python train_loop.py my_run

Started again with the same folder, it goes on after the newest checkpoint, also on another number of processes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hyper_ckpt import CheckpointManager, PerRank, Retention, SaveInterval
from hyper_ckpt_torch import TrainState


def train(folder: str, steps: int, every: int) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 32))
    data = TensorDataset(torch.randn(512, 32))
    if size > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    sampler = DistributedSampler(data, size, rank, seed=0)
    # A generator of its own: to begin an epoch draws a number, and the global one is part of the state.
    loader = DataLoader(data, batch_size=64 // size, sampler=sampler, generator=torch.Generator())
    torch.manual_seed(1 + rank)  # each rank drops out other activations

    state = TrainState(model, optimizer, scheduler=scheduler, rng=PerRank(torch.default_generator), step=0)
    with CheckpointManager(folder, interval=SaveInterval(steps=every), retention=Retention(last=3)) as manager:
        manager.restore(state)  # where there is no checkpoint yet, nothing is changed
        step = state["step"]
        while step < steps and not manager.preempted:
            epoch, done = divmod(step, len(loader))
            sampler.set_epoch(epoch)
            for (batch,) in itertools.islice(loader, done, done + steps - step):
                loss = (model(batch) - batch).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                if manager.should_save(step) or step == steps:
                    state["step"] = step
                    manager.async_save(step, state).wait_staged()
                if rank == 0 and step % every == 0:
                    print(f"step {step} loss {loss.item():.4f}", flush=True)
                if manager.preempted:  # a SIGTERM, to any rank: all have saved this step
                    break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=400, help="of the whole training")
    parser.add_argument("--every", type=int, default=20, metavar="STEPS", help="between two checkpoints")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    train(args.folder, args.steps, args.every)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # all is done: torch 2.13's gloo aborts a process at its exit now and then
