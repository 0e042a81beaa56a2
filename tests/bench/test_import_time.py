"""How long imports take. The aims: at most 60 ms more than numpy alone; all plugins found and loaded in 30 ms."""

import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.bench

RUNS = 9

CASES = {
    "nothing": "",
    "numpy": "import numpy",
    "hyper_ckpt": "import hyper_ckpt",
    "numpy, hyper_ckpt": "import numpy, hyper_ckpt",
    "save and load": "from hyper_ckpt import save, load",
    "all names": "from hyper_ckpt import *",
    "registry and plugins": "from hyper_ckpt.registry import registry; registry()",
}
PLUGINS = "plugins alone"
TIMED = "import time\n{before}\nt = time.perf_counter()\n{code}\nprint((time.perf_counter() - t) * 1000)"


def milliseconds(code: str, before: str = "") -> float:
    """One fresh interpreter."""
    script = TIMED.format(code=code, before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_import_time() -> None:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS):  # in turn, so that what else the machine does hits all alike
        for name, code in CASES.items():
            times[name].append(milliseconds(code))
        times.setdefault(PLUGINS, []).append(milliseconds("registry()", "from hyper_ckpt.registry import registry"))
    numpy = statistics.median(times["numpy"])
    print(f"{'import':<22}{'median ms':>10}{'best ms':>9}{'over numpy':>12}")
    for name, found in times.items():
        median = statistics.median(found)
        over = "" if name == PLUGINS else f"{median - numpy:+.1f}"
        print(f"{name:<22}{median:>10.1f}{min(found):>9.1f}{over:>12}")
