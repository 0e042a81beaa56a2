"""A training with MindSpore's `Model.train` that is killed and goes on, and proofs that nothing was lost.

    python examples/train_mindspore/demo.py            # less than a minute and a half on two cores
    python examples/train_mindspore/demo.py --short    # fewer steps

Exit code 0 means that every proof holds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from job import QUIET, RANKS, Job, JobError, job

TO_TORCH = Path(__file__).with_name("to_torch.py")
ATTEMPTS = 5  # a run may have ended before the signal that was to kill it


class ProofError(Exception):
    """Something was lost."""


@dataclass(frozen=True)
class Demo:
    """The story, chapter by chapter."""

    folder: Path
    steps: int
    every: int
    kills: int
    timeout: float

    def run(self) -> None:
        with chapter(f"The reference: {RANKS} processes, {self.steps} steps, nobody interrupts"):
            reference = self.train("reference", "undisturbed")
            losses = reference.losses(0)
            print(f"  loss {losses[1]:.3f} → {losses[self.steps]:.3f}")
            prove(reference.diary()[0]["step"] == 0, "it began with step 1")
            prove(reference.digests(0) == reference.digests(1), "both ranks have the same weights and moments")
        run = ""
        for number in range(self.kills):
            with chapter(f"The same again, saved every {self.every} steps, and killed at a random moment"):
                run = self.train_and_kill(f"run-{number}", reference)
            with chapter("Started again, with other first weights"):
                self.resume(run, reference)
        with chapter("The weights in PyTorch, and back"):
            self.compare_with_torch(self.folder / run / f"step-{self.steps:010d}")
        print("\nAll proofs hold.")

    def train(self, name: str, run: str, seed: int = 1) -> Job:
        with self.job(name, run, seed) as started:
            started.wait()
        return started

    def train_and_kill(self, run: str, reference: Job) -> str:
        """Returns the name of the run that was killed."""
        for attempt in range(ATTEMPTS):
            name = f"{run}-{attempt}"
            with self.job(f"killed-{name}", name) as killed:
                codes = self.kill_at_random(killed, self.folder / name)
            if codes != [-signal.SIGKILL] * RANKS:
                continue
            found = len(complete(self.folder / name))
            begun = len(list((self.folder / name).glob("step-*"))) - found
            print(f"  after step {killed.step()}: exit codes {codes}; {found} complete checkpoints, {begun} only begun")
            same = killed.losses(0).items() <= reference.losses(0).items()
            prove(same, f"until then, all {len(killed.losses(0))} losses were the reference's")
            return name
        raise ProofError(f"{ATTEMPTS} runs ended before they were killed")

    def kill_at_random(self, running: Job, checkpoints: Path) -> list[int]:
        """Any moment between the first complete checkpoint and the last one but one. Returns the exit codes."""
        running.wait(lambda: bool(complete(checkpoints)))
        now = running.step()
        step = random.uniform(now, max(now, self.steps - self.every))
        running.wait(lambda: running.step() >= step)
        time.sleep(random.uniform(0, 0.02))
        return running.kill()

    def resume(self, run: str, reference: Job) -> None:
        newest = complete(self.folder / run)[-1]
        resumed = self.train(f"resumed-{run}", run, seed=1000)
        prove(resumed.diary()[0]["step"] == newest, f"it went on after step {newest}, the newest complete checkpoint")
        for rank in range(RANKS):
            expected = {step: loss for step, loss in reference.losses(rank).items() if step > newest}
            prove(resumed.losses(rank) == expected, f"rank {rank}: all {len(expected)} losses are the reference's")
            digests = reference.digests(rank)
            claim = f"rank {rank}: {len(digests)} tensors of network and optimizer, every SHA-256 is the reference's"
            prove(bool(digests) and resumed.digests(rank) == digests, claim)

    def compare_with_torch(self, checkpoint: Path) -> None:
        ended = subprocess.run(
            [sys.executable, str(TO_TORCH), str(checkpoint)],
            env={**os.environ, **QUIET},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            timeout=self.timeout,
        )
        print("".join(f"  {line}\n" for line in ended.stdout.splitlines()), end="")
        prove(ended.returncode == 0, "weights are the same bits in both, outputs within the tolerance")

    def job(self, name: str, run: str, seed: int = 1) -> contextlib.AbstractContextManager[Job]:
        arguments = [self.folder / run, "--steps", self.steps, "--every", self.every, "--seed", seed]
        return job(self.folder / name, arguments, self.timeout)


def complete(folder: Path) -> list[int]:
    """The steps of the complete checkpoints, in order."""
    return sorted(int(path.parent.name.partition("-")[2]) for path in folder.glob("step-*/manifest.json"))


def prove(holds: bool, claim: str) -> None:
    if not holds:
        raise ProofError(f"not true: {claim}")
    print(f"  ✓ {claim}", flush=True)


@contextlib.contextmanager
def chapter(title: str) -> Iterator[None]:
    print(f"\n{title}", flush=True)
    start = time.monotonic()
    yield
    print(f"  {time.monotonic() - start:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer steps")
    parser.add_argument("--kills", type=int, default=1, metavar="N", help="kill and resume N runs, one after the other")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave checkpoints and diaries in this folder")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each run")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error("--kills: 1 or more")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep: {args.keep} is not empty")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no rank is left behind
    steps, every = (100, 10) if args.short else (400, 40)
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hyper-ckpt-demo-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            Demo(folder.resolve(), steps, every, args.kills, args.timeout).run()
        except (ProofError, JobError, subprocess.TimeoutExpired) as error:
            for rank, output in enumerate(getattr(error, "outputs", [])):
                print(f"--- rank {rank} ---\n{output.strip() or '(printed nothing)'}")
            print(f"FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
