"""Saves and is killed, again and again: one process that forks another for every kill, so that imports cost once.

Run as a script with JSON cases [[path, world_size, k, when], ...] on stdin; prints the signal of each (0: survived).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from failures._states import part  # the parent puts tests/ on the path
from failures._stores import through
from hyper_ckpt import save
from hyper_ckpt.registry import registry
from hyper_ckpt.testing.faults import KillAt
from hyper_ckpt.testing.world import run_world


def save_and_die(path: str, world_size: int, k: int, when: Any) -> None:
    killer = KillAt(registry().store(path), k, when=when)  # one for all ranks: the whole node dies
    url = through(path, lambda _: killer)
    if world_size == 1:
        save(part(2), url, overwrite=True, no_dist=True)
    else:
        run_world(
            world_size,
            lambda p: save(part(2, p.ranks.rank, world_size), url, platform=p, overwrite=True),
        )


def main() -> None:
    outcomes = []
    for path, world_size, k, when in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            try:
                save_and_die(path, world_size, k, when)
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        outcomes.append(os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
