"""One rank of a training with DDP: `python ddp_job.py ROOT OUT SEED KILL_AT`. Kills itself at a step; 0: never."""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import trainer_job
from transformers import TrainerCallback


class KillAt(TrainerCallback):
    """SIGKILL once there is a newer checkpoint than that of the SIGTERM."""

    def __init__(self, root: Path, step: int) -> None:
        self._root, self._step = root, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            deadline = time.monotonic() + 20
            while len(list(self._root.glob("step-*/manifest.json"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class TermAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def main(root: Path, out: str, seed: int, kill_at: int) -> None:
    rank = int(os.environ["RANK"])
    ddp: dict[str, Any] = {"ddp_backend": "gloo", "num_train_epochs": 6, "eval_strategy": "epoch"}
    if kill_at:
        reference, _ = trainer_job.fit(None, f"{out}-hf", seed=seed, **ddp)
        # To one rank: both save and stop.
        _, told = trainer_job.fit(root, f"{out}-hf", seed=seed, every=100, callbacks=[TermAt(3)], **ddp)
        Path(f"{out}-reference-{rank}").write_text(json.dumps(reference))
        Path(f"{out}-told-{rank}").write_text(json.dumps(told.preempted))
        trainer_job.fit(root, f"{out}-hf", seed=seed, every=8, callbacks=[KillAt(root, kill_at)], **ddp)
    else:
        got, checkpoints = trainer_job.fit(root, f"{out}-hf", seed=seed, every=8, **ddp)
        Path(f"{out}-resumed-{rank}").write_text(json.dumps([got, checkpoints.restored.step]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # all is done: torch 2.13's gloo aborts a process at its exit now and then
