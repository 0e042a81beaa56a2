"""Peak memory beyond the state, of a save and a load of host tensors, each in a process of its own. `make bench`."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

MIB = int(os.environ.get("HYPER_CKPT_BENCH_MIB", "512"))
SCRIPT = """
    import sys
    import numpy as np
    import hyper_ckpt
    from pathlib import Path

    def peak():
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) >> 10

    what, path, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    state = {f"t{i}": np.ones((mib << 20) // 16 // 4, np.float32) for i in range(16)}
    if what == "columns":
        state = {name: array.reshape(1024, -1)[:, ::2] for name, array in state.items()}
    tiny = {"x": np.ones(3)}
    hyper_ckpt.save(tiny, path + "-tiny", overwrite=True)  # what importing and starting takes
    hyper_ckpt.load(tiny, path + "-tiny")
    before = peak()
    if what == "load":
        hyper_ckpt.load(state, path)
    else:
        hyper_ckpt.save(state, path, durable=False, overwrite=True)
    print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory(tmp_path: Path) -> None:
    print(f"\nMiB at the peak beyond a state of {MIB} MiB")
    for what in ("save", "load", "columns"):
        path = str(tmp_path / ("columns" if what == "columns" else "state"))
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), what, path, str(MIB)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"  {what:8} {done.stdout.strip():>6}")
