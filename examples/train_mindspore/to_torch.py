"""Loads what `Model.train` has saved into the same network in PyTorch, and back, and compares both.

    python to_torch.py my_run/step-0000000400

Exit code 0 means that the weights are equal bit for bit, and the outputs but for the order of sums.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import mindspore as ms
import numpy as np
import torch
from data import passages
from network import CONTEXT, EPSILON, HIDDEN, WIDTH, Network
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import hyper_ckpt
from hyper_ckpt import LoadOptions, key_maps

TOLERANCE = 1e-4  # of logits, absolute and relative: each framework adds up in an order of its own
ROOTS = {"model": "train_network", "optimizer": "train_network"}  # CheckpointCallback saves both under one key


class TorchNetwork(nn.Module):
    """`network.Network`, as one writes it with PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.mix = nn.Linear(CONTEXT * WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=EPSILON)
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, context: Tensor) -> Tensor:
        x = self.embed(context).flatten(1)
        return self.head(torch.relu(self.norm(self.mix(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    checkpoint = parser.parse_args().checkpoint
    ours = Network()
    load({"train_network": ours.parameters_dict()}, checkpoint)
    theirs = TorchNetwork()
    target = torch_state(theirs)
    mapped = load(target, checkpoint, key_maps.from_mindspore(ROOTS))

    saved = hyper_ckpt.read(checkpoint)["train_network"]
    nbytes = sum(compare(name, name_saved, target, saved) for name, name_saved in mapped.items())
    print(f"weights and moments: {len(mapped)} tensors, {nbytes:,} bytes, all equal")
    compare_outputs(ours, theirs, passages(10**6, 10**6 + 4).reshape(-1, CONTEXT + 1)[:, :-1])

    again = Network()
    with tempfile.TemporaryDirectory() as folder:
        hyper_ckpt.save({"model": theirs.state_dict()}, folder, no_dist=True)
        load({"model": again.parameters_dict()}, folder, key_maps.from_torch())
    for name, value in again.parameters_dict().items():
        expect(value.asnumpy().tobytes() == saved[name].tobytes(), f"{name!r} came back")
    print("saved by PyTorch and loaded by MindSpore again: all equal")


def torch_state(network: TorchNetwork) -> dict[str, Any]:
    """What PyTorch wants of the checkpoint: the weights, and the moments of an AdamW."""
    moments = get_optimizer_state_dict(network, torch.optim.AdamW(network.parameters()))
    del moments["param_groups"]  # learning rates and the like are named and kept otherwise by each framework
    for state in moments["state"].values():
        del state["step"]  # MindSpore counts once for all parameters
    return {"model": network.state_dict(), "optimizer": moments}


def load(target: dict[str, Any], checkpoint: str, map_keys: key_maps.KeyMapping | None = None) -> dict[str, str]:
    """Loads all that the target wants; what else is saved may stay there. Returns the names that were mapped."""
    options = LoadOptions(map_keys=map_keys)
    report = hyper_ckpt.load(target, checkpoint, strict=False, no_dist=True, options=options)
    left = report.missing + report.mismatched
    expect(not left, f"all is found, but {', '.join(left)}")
    return report.mapped


def compare(name: str, name_saved: str, target: dict[str, Any], saved: dict[str, np.ndarray]) -> int:
    """Compares a tensor of PyTorch with what MindSpore has saved, byte by byte. Returns how many."""
    value: Any = target
    for key in name.split("/"):
        value = value[key]
    expected = saved[name_saved.partition("/")[2]]
    expect(value.numpy().tobytes() == expected.tobytes(), f"{name!r} is {name_saved!r}")
    print(f"  {name:42} ← {name_saved}")
    return expected.nbytes


def compare_outputs(ours: Network, theirs: TorchNetwork, context: np.ndarray) -> None:
    one = ours(ms.Tensor(context)).asnumpy()
    with torch.no_grad():
        other = theirs(torch.from_numpy(context)).numpy()
    furthest = float(np.abs(one - other).max())
    expect(np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE), f"outputs are close, not {furthest} apart")
    expect(float(np.ptp(one)) > 1.0, "outputs say something")
    print(f"outputs: {one.size} logits, at most {furthest:.1e} apart, {TOLERANCE:g} allowed")


def expect(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"not true: {what}")


if __name__ == "__main__":
    main()
