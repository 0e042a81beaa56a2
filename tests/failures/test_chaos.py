"""ckpt-chaos, a public crash harness: it kills a training at file events of its saves, lets it go on, and judges."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("ckpt_chaos")
pytest.importorskip("torch")

JOB = Path(__file__).with_name("chaos_job.py")
BAD = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
POINTS = 100  # all


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "killed"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("keep", [None, 1])
def test_killed_at_every_file_event(tmp_path: Path, ranks: int, killed: int, keep: int | None) -> None:
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(tmp_path), "--timeout", "120", "--fail-on", BAD]
    command += ["--modes", "before", "--max-points", str(POINTS), "--ranks", str(ranks)]
    command += ["--crash-rank", str(killed), "--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final"]
    if keep is None:  # what retention removes, the harness takes for lost
        command += ["--checkpoint-glob", "{out}/run/step-*", "--ckpt-ignore-size"]
    command += ["--", sys.executable, str(JOB), "{out}", *(["--keep", str(keep)] if keep else [])]
    # Release 0.1.8 arms the rank of --crash-rank only if this variable names it, too.
    environment = {**os.environ, "CKPT_CHAOS_CRASH_RANK": str(killed)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    print(done.stdout, done.stderr)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("pt_*/result.json")]
    kills = [each for each in found if each["order"]]
    resumed = Counter(each["outcome"]["resumed_from_step"] for each in kills)
    lost = sum(each["outcome"]["resumed_from_step"] < each["outcome"]["newest_complete_step"] for each in kills)
    print(f"{ranks} ranks, {killed} killed, keep={keep}: {len(kills)} kills, resumed at {dict(resumed)}, {lost} lost")
    assert done.returncode == 0
    assert len(kills) > 10
    assert all(each["crashed"] for each in kills)
