"""A training that ckpt-chaos kills: `chaos_job.py FOLDER [--keep N]`, one process for each rank.

It saves through a CheckpointManager, goes on where that says, and leaves its last state in FOLDER/final.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_ckpt import CheckpointManager, PerRank, Retention

STEPS, EVERY = 8, 2
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def show_all_events() -> None:
    """The harness counts Python's audit events, by path: those with descriptors of directories, and hard links, it does
    not see by itself."""

    def relay(event: str, args: tuple[Any, ...]) -> None:
        if event in ("os.remove", "os.rmdir") and args[1] >= 0:
            sys.audit(event, os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), args[0]), -1)
        elif event == "os.link":
            sys.audit("os.rename", args[0], args[1], -1, -1)

    sys.addaudithook(relay)


def name_alike() -> None:
    """The harness knows a whole checkpoint by the names that a run without kills gives it, so that ids are counted. A
    run that goes on counts apart from the killed one: its files must not have the names of what that left."""
    count, killed = itertools.count(), int("CKPT_CHAOS_WATCH" in os.environ)
    secrets.token_hex = lambda nbytes=None: f"{killed:02x}{RANK:02x}{next(count):012x}"  # type: ignore[assignment]


def train(folder: Path, keep: int | None) -> dict[str, Any]:
    torch.manual_seed(RANK)
    model = torch.nn.Linear(64, 64)
    if WORLD > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    state = {"model": model, "optimizer": optimizer, "random": PerRank(torch.default_generator), "step": 0}
    with CheckpointManager(folder / "run", retention=Retention(last=keep)) as manager:
        manager.restore(state)
        if RANK == 0:
            print(f"resumed from step {state['step']}", flush=True)
        for step in range(state["step"] + 1, STEPS + 1):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            for parameter in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            state["step"] = step
            if step % EVERY == 0:
                save = manager.save if step % (2 * EVERY) else manager.async_save
                save(step, state, metrics={"loss": 1 / step})
    return state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", type=int)
    chosen = parser.parse_args()
    show_all_events()
    name_alike()
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("gloo")
    state = train(chosen.folder, chosen.keep)
    if RANK == 0:
        weights = [*state["model"].state_dict().values(), state["random"].value.get_state()]
        (chosen.folder / "final").write_bytes(b"".join(each.numpy().tobytes() for each in weights))
    if WORLD > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort while a process ends


if __name__ == "__main__":
    main()
