"""Trains the network with `Model.train` as one rank of a data-parallel job, saving and resuming with hyper-ckpt.

    msrun --worker_num=2 --local_worker_num=2 --join=True train.py my_run
    python train.py my_run

Started again with the same folder it goes on after the newest complete checkpoint. What that takes are the three lines
with `checkpoints`, and data that can be had from any step on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import mindspore as ms
from data import batches
from mindspore import nn
from mindspore.train import Callback, Model
from network import Network
from world import join, leave

from hyper_ckpt_mindspore import CheckpointCallback


def make_model(seed: int, steps: int) -> Model:
    """The network with its optimizer, whose learning rate falls with the steps that are part of its state."""
    ms.set_seed(seed)
    network = Network()
    rates = nn.cosine_decay_lr(1e-4, 3e-3, total_step=steps, step_per_epoch=1, decay_epoch=steps)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=rates, weight_decay=0.01)
    return Model(network, nn.CrossEntropyLoss(), optimizer)


def main() -> None:
    args = _arguments()
    # Graph mode computes the same bits in every run, and a step takes a tenth of the time it takes in PyNative mode.
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    rank, world_size = join()
    if world_size > 1:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    model = make_model(args.seed, args.steps)

    checkpoints = CheckpointCallback(args.folder, every_steps=args.every)
    done = checkpoints.restore(model)
    diary = Diary(args.diary and Path(f"{args.diary}-{rank}.jsonl"), done)
    if done < args.steps:
        data = batches(done, args.steps, rank, world_size)
        model.train(1, data, callbacks=[checkpoints, diary], dataset_sink_mode=False)
    diary.note(event="ended", step=args.steps, digests=digests(model))
    leave()


class Diary(Callback):
    """Tells what happens, for people and as JSON lines for the proofs."""

    def __init__(self, path: Path | None, done: int) -> None:
        super().__init__()
        self._path, self._before = path, done
        self.note(event="restored", step=done)

    def on_train_step_end(self, run_context: Any) -> None:
        now = run_context.original_args()
        self.note(event="step", step=self._before + now.cur_step_num, loss=float(now.net_outputs.asnumpy()))

    def note(self, **event: Any) -> None:
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(event) + "\n")
        elif event["event"] != "step" or event["step"] % 20 == 0:
            print(*(f"{key} {value}" for key, value in event.items() if key != "digests"), flush=True)


def digests(model: Model) -> dict[str, str]:
    """SHA-256 of every parameter of the network and of its optimizer."""
    parameters = model.train_network.parameters_dict()
    return {name: hashlib.sha256(value.asnumpy().tobytes()).hexdigest() for name, value in parameters.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=400, help="of the whole training")
    parser.add_argument("--every", type=int, default=40, metavar="STEPS", help="between two checkpoints")
    parser.add_argument("--seed", type=int, default=1, help="of the first weights")
    parser.add_argument("--diary", metavar="PREFIX", help="write what happens to PREFIX-<rank>.jsonl, digests too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
