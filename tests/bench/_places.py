"""Where benches write."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# Read at import: the tests' own conftest hides it later.
DISK = Path(os.environ.get("HYPER_CKPT_BENCH_DIR", "out")).absolute()


def fresh(path: Path) -> Iterator[Path]:
    """An empty folder for as long as a fixture lives."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path)
