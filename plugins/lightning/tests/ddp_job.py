"""One rank of a training with DDP: `python ddp_job.py ROOT OUT SEED KILL_AT`. Kills itself at a step; 0: never."""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning_job
from lightning.pytorch.callbacks import Callback


class KillAt(Callback):
    """SIGKILL once a checkpoint is complete."""

    def __init__(self, root: Path, step: int) -> None:
        self._root, self._step = root, step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self._step:
            deadline = time.monotonic() + 20
            while not list(self._root.glob("step-*/manifest.json")) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class TermAt(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self._step and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def main(root: str, out: str, seed: int, kill_at: int) -> None:
    rank = int(os.environ["RANK"])
    ddp: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    if kill_at:
        reference, _ = lightning_job.fit(None, rank, seed=seed, every=4, **ddp)
        # To one rank: both save and stop. Then a second one of them is killed.
        _, told = lightning_job.fit(root, rank, seed=seed, every=4, callbacks=[TermAt(5)], **ddp)
        Path(f"{out}-reference-{rank}").write_text(json.dumps(reference))
        Path(f"{out}-told-{rank}").write_text(json.dumps([told.checkpoint_callback.preempted, told.global_step]))
        lightning_job.fit(root, rank, seed=seed, every=4, callbacks=[KillAt(Path(root), kill_at)], **ddp)
    else:
        got, made = lightning_job.fit(root, rank, seed=seed, every=4, **ddp)
        restored = made.checkpoint_callback.restored
        Path(f"{out}-resumed-{rank}").write_text(json.dumps([got, restored and restored.step]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # all is done: torch 2.13's gloo aborts a process at its exit now and then
