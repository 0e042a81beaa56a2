"""A training that is killed and goes on, on as many processes as there are, and proofs that nothing was lost.

    python examples/train_gpt/demo.py            # about two minutes on two cores
    python examples/train_gpt/demo.py --tiny     # a smaller model and fewer steps

Exit code 0 means that every proof holds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ranks import Events, Ranks, RunError
from report import MB, Report

import hyper_ckpt

RANKS = 4  # of the training that is killed
RESUMED_ON = (4, 2, 1)
BEYOND = 200  # steps after the last one that a training could still do before it is killed
TOLERANCE = 0.05  # of a loss on another number of ranks: other dropout, other order of sums


class ProofError(Exception):
    """Something was lost."""


@dataclass(frozen=True)
class Setting:
    folder: Path
    steps: int
    tiny: bool
    timeout: float

    @property
    def save_at(self) -> int:
        return self.steps * 2 // 3

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"


class Demo:
    """The story, chapter by chapter."""

    def __init__(self, setting: Setting, report: Report) -> None:
        self.setting, self.report = setting, report

    def run(self) -> None:
        at, steps = self.setting.save_at, self.setting.steps
        self.report.title(
            "hyper-ckpt",
            f"A small GPT learns to write Python with FSDP on {RANKS} processes. It is saved after step {at} of "
            f"{steps} and killed soon after. Then it goes on: on 4 processes, on 2 and on 1.",
        )
        reference = self.train_undisturbed()
        saved = self.train_save_and_kill(reference)
        resumed = {ranks: self.resume(ranks, saved, reference) for ranks in RESUMED_ON}
        self.compare(reference, {ranks: events.losses for ranks, events in resumed.items()})
        self.look_at_checkpoint()
        self.show_throughput(resumed[RANKS])
        self.report.verdict(
            [
                f"{len(saved.digests)} tensors came back bit for bit on 4, 2 and 1 processes.",
                "On 4 processes training went on as if it had not been killed, bit for bit.",
                "On 2 and 1 it went on with the same data from the same state.",
            ]
        )

    def train_undisturbed(self) -> Events:
        at, steps = self.setting.save_at, self.setting.steps
        with self.chapter(f"The reference: {RANKS} ranks, {steps} steps, nobody interrupts"):
            with self.ranks("reference", RANKS, "--save-at", at) as ranks:
                events = ranks.wait()
            self.report.done(f"loss {events.losses[1]:.3f} → {events.losses[steps]:.3f}")
        return events

    def train_save_and_kill(self, reference: Events) -> Events:
        at, steps = self.setting.save_at, self.setting.steps
        arguments = ["--save", self.setting.checkpoint, "--save-at", at, "--until", steps + BEYOND]
        with self.chapter(f"The same again, saved after step {at}, then killed"):
            with self.ranks("killed", RANKS, *arguments) as ranks:
                ranks.wait_for_step(at + 2)
                codes = ranks.kill()
                events = ranks.events()
            nbytes = sum(hyper_ckpt.read_metadata(self.setting.checkpoint).files.values())
            self.report.done(f"saved {nbytes / MB:.1f} MB in {events.facts['saved']['seconds']:.2f} s")
            self.report.done(f"killed after step {max(events.losses)}: exit codes {codes}")
            self.prove(codes == [-signal.SIGKILL] * RANKS, f"all {RANKS} processes ended by SIGKILL")
            self.prove_same_tensors(events, reference, "when it was saved, every tensor was that of the reference")
        return events

    def resume(self, world_size: int, saved: Events, reference: Events) -> Events:
        at, steps = self.setting.save_at, self.setting.steps
        # Another seed: what is equal afterwards can only have come from the checkpoint.
        arguments = ["--load", self.setting.checkpoint, "--save-at", at, "--seed", 1000 + world_size]
        if world_size == RANKS:
            arguments += ["--measure", self.setting.folder]
        who = f"{world_size} ranks" if world_size > 1 else "1 process, without FSDP or a process group"
        with self.chapter(f"Resume on {who}"):
            with self.ranks(f"resumed-on-{world_size}", world_size, *arguments) as ranks:
                events = ranks.wait()
            self.report.done(f"loaded in {events.facts['loaded']['seconds']:.2f} s, trained to step {steps}")
            self.prove_same_tensors(events, saved, "every parameter and optimizer tensor is what was saved")
            expected = {step: loss for step, loss in reference.losses.items() if step > at}
            self.prove(events.losses.keys() == expected.keys(), f"training went on with step {at + 1}")
            if world_size == RANKS:
                self.prove(events.losses == expected, f"all {len(expected)} losses are the reference's, bit for bit")
            else:
                furthest = max(abs(loss - expected[step]) for step, loss in events.losses.items())
                claim = f"losses stay within {TOLERANCE} of the reference's (furthest: {furthest:.5f})"
                self.prove(furthest < TOLERANCE, claim)
        return events

    def compare(self, reference: Events, resumed: dict[int, dict[int, float]]) -> None:
        self.report.chapter("The losses side by side")
        self.report.losses(reference.losses, resumed, self.setting.save_at)

    def look_at_checkpoint(self) -> None:
        with self.chapter("What lies on the disk"):
            self.command("show", "--limit", "10")
            self.command("verify")

    def show_throughput(self, events: Events) -> None:
        metadata = hyper_ckpt.read_metadata(self.setting.checkpoint)
        measured = events.facts["measured"]
        planning, reading = (measured["phases of a load"][phase] * 1e3 for phase in ("plan", "read"))
        self.report.chapter(f"How fast, on {RANKS} ranks and {os.cpu_count()} processors")
        self.report.throughput(
            sum(metadata.files.values()),
            {name: measured[name] for name in ("save", "load")},
            "Measured in chapter 3. save: durable, best time. load: from the page cache, every block checked, median. "
            "bare loop: the same bytes through fallocate, pwrite and fsync, or through preadv, on the same ranks, in "
            "turns. loop : loop is the bare loop beside itself: far from 1, the machine was too busy to measure. Not "
            f"all is input and output: a load planned {len(metadata.storage_data)} tensors in {planning:.0f} ms, then "
            f"read and checked them in {reading:.0f} ms.",
        )

    @contextlib.contextmanager
    def chapter(self, title: str) -> Iterator[None]:
        self.report.chapter(title)
        start = time.monotonic()
        with self.report.console.status("running ..."):  # shown by terminals only
            yield
        self.report.done(f"[dim]{time.monotonic() - start:.1f} s[/]")

    def ranks(self, name: str, world_size: int, *arguments: object) -> Ranks:
        tiny = ["--tiny"] if self.setting.tiny else []
        return Ranks(
            world_size,
            self.setting.folder / f"{name}.jsonl",
            ["--steps", self.setting.steps, *tiny, *arguments],
            self.setting.timeout,
        )

    def command(self, name: str, *options: str) -> None:
        """Runs `hyper-ckpt name` on the checkpoint, as one would by hand."""
        ended = subprocess.run(
            [sys.executable, "-m", "hyper_ckpt.cli", name, str(self.setting.checkpoint), *options],
            env={**os.environ, "COLUMNS": str(self.report.console.width - 3)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.setting.timeout,
        )
        self.report.output(" ".join(["hyper-ckpt", name, "checkpoint", *options]), ended.stdout)
        if ended.returncode:
            raise ProofError(f"`hyper-ckpt {name}` ended with exit code {ended.returncode}")

    def prove(self, holds: bool, claim: str) -> None:
        if not holds:
            raise ProofError(f"not true: {claim}")
        self.report.proved(claim)

    def prove_same_tensors(self, one: Events, other: Events, claim: str) -> None:
        names = one.digests.keys() | other.digests.keys()
        different = sorted(name for name in names if one.digests.get(name) != other.digests.get(name))
        if different:
            raise ProofError(f"not true: {claim}. {len(different)} of {len(names)} differ, first {different[0]!r}")
        self.prove(bool(names), f"{claim}: {len(names)} SHA-256 agree")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="length of the training; it is saved after two thirds")
    parser.add_argument("--tiny", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the checkpoint and all events in this folder")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each of the five runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no rank is left behind
    steps = args.steps or (6 if args.tiny else 24)
    if steps < 3:
        parser.error("--steps: 3 or more")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep: {args.keep} is not empty")
    report = Report()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hyper-ckpt-demo-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            Demo(Setting(folder.resolve(), steps, args.tiny, args.timeout), report).run()
        except (ProofError, RunError) as error:
            report.failed(str(error), getattr(error, "outputs", []))
            return 1
        if args.keep:
            report.console.print(f"The checkpoint is in {args.keep}/checkpoint", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
