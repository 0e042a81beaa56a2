"""Writes golden checkpoints of the current format version where there are none: `python -m golden.make` in tests/."""

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


def save_alone(rank: int) -> None:
    """By ranks that do not talk."""
    hyper_ckpt.save(
        getattr(states, f"version_{VERSION}")(rank),
        DATA / f"version-{VERSION}-alone",
        platform=hyper_ckpt.NumpyPlatform(rank=rank, world_size=2),
        use_collectives=False,
        options=hyper_ckpt.SaveOptions(save_token="golden"),
        user_metadata={"golden": VERSION},
    )


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a value differs on purpose
        if not (DATA / f"version-{VERSION}").exists():
            run_world(2, save)
        if not (DATA / f"version-{VERSION}-alone").exists():
            save_alone(0)
            save_alone(1)
