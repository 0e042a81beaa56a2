"""Writes the golden checkpoint of the current format version: `python -m golden.make` in tests/. Made once each."""

import warnings
from pathlib import Path

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.manifest import VERSION
from hyper_ckpt.testing.world import run_world

from . import states

DATA = Path(__file__).resolve().parents[1] / "data"


def save(platform: Platform) -> None:
    state = getattr(states, f"version_{VERSION}")(platform.ranks.rank)
    hyper_ckpt.save(state, DATA / f"version-{VERSION}", platform=platform, user_metadata={"golden": VERSION})


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a value differs on purpose
        run_world(2, save)
