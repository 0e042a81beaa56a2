"""Real processes, killed at any moment: a restart goes on from a complete step and ends as if nothing had happened."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest

import hyper_ckpt
from hyper_ckpt.testing.launch import LaunchError, launch

pytest.importorskip("hyper_ckpt_sample", reason="needs the ranks of the sample accelerator")

from ._jobs import EVERY, STEPS, logged, preempted, train

WORLD = 2


def killed_job(root: Path, log: Path, chance: random.Random) -> dict[int, float]:
    """Runs a job until it dies: both ranks at nearly the same moment, or one, which the other one notices."""
    delay = chance.uniform(0.0, 0.8)
    victims = chance.choice([(0, 1), (0, 1), (0,), (1,)])
    delays = {rank: delay + chance.uniform(0, 0.03) for rank in victims}
    launch(WORLD, train, (str(root), str(log), delays), timeout=50, expect=dict.fromkeys(victims, signal.SIGKILL))
    return delays


def survives(tmp_path: Path, kills: int, seed: int) -> None:
    tmp_path.mkdir(exist_ok=True)
    chance, root = random.Random(seed), tmp_path / "run"
    newest = 0
    for attempt in range(kills):
        log = tmp_path / f"attempt-{attempt}"
        try:
            delays = killed_job(root, log, chance)
        except LaunchError as error:
            raise AssertionError(f"seed {seed}, attempt {attempt}: {error}") from error
        began = set(logged(log, "begin"))
        assert len(began) <= 1, f"seed {seed}: ranks go on from different steps: {began}"
        # What was saved before the last save was begun is complete.
        assert all(newest - EVERY < first for first in began), f"seed {seed}: {newest} was saved, {began} comes next"
        newest = max([newest, *logged(log, "save")])
        print(f"seed {seed}: killed {delays} after save {newest}, began at {began}")
        for step in hyper_ckpt.CheckpointManager(root, on_sigterm=False).steps():
            assert step.state in ("complete", "incomplete"), step
            assert not step.complete or hyper_ckpt.verify(step.path).ok
    results = launch(WORLD, train, (str(root), str(tmp_path / "last"), {}), timeout=50)
    assert all(newest - EVERY < first for first in logged(tmp_path / "last", "begin"))
    wanted = launch(WORLD, train, (str(tmp_path / "unkilled"), str(tmp_path / "unkilled-log"), {}), timeout=50)
    assert [r.result for r in results] == [r.result for r in wanted]
    left = hyper_ckpt.CheckpointManager(root, on_sigterm=False).steps()
    assert [step.step for step in left if step.complete] == [STEPS - EVERY, STEPS]


@pytest.mark.timeout(180)
def test_kills(tmp_path: Path) -> None:
    survives(tmp_path, kills=5, seed=random.randrange(1 << 32))


@pytest.mark.soak
def test_many_kills(tmp_path: Path) -> None:
    for seed in range(10):
        survives(tmp_path / str(seed), kills=5, seed=seed)


@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)])
def test_sigterm_with_a_save_in_flight(tmp_path: Path, told: tuple[int, ...]) -> None:
    first, second = (r.result for r in launch(WORLD, preempted, (str(tmp_path), told, 6, 0.5), timeout=50))
    assert first["saved"] == second["saved"] == [5, first["step"]]
    assert first["step"] == second["step"] <= 9
    assert [len(r["heard"]) for r in (first, second)] == [int(rank in told) for rank in range(WORLD)]
    assert not first["left"]
    assert not second["left"]
    found: Any = hyper_ckpt.read(tmp_path / f"step-{first['step']:010d}")
    assert found["weights"].tobytes() == first["weights"] + second["weights"]
    assert found["step"] == first["step"]
