"""The reader of examples/ reads what save wrote, and so does the plain safetensors library."""

import importlib.util
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.testing.world import run_world

READER = Path(__file__).resolve().parents[1] / "examples" / "read_checkpoint.py"


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_checkpoint", READER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def state_of(rank: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(8, 6))
    return {
        "model": {"w": rng.normal(size=(700, 500)), "s": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.int8)},
        "table": hyper_ckpt.ShardedTensor([(table[rank * 2 : rank * 2 + 2], (rank * 2, 0))], (8, 6)),
        "half": rng.normal(size=9).astype(ml_dtypes.bfloat16),
        "complex": rng.normal(size=(3, 2)) + 1j,
        "mask": np.array([True, False]),
        "step": 7,
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step-7"

    def save(platform: Platform) -> None:
        hyper_ckpt.save(state_of(platform.ranks.rank), path, platform=platform)

    run_world(4, save)
    return path


def test_the_example_reads_every_tensor(reader: ModuleType, checkpoint: Path) -> None:
    expected = hyper_ckpt.read(checkpoint)
    flat = {**{f"model/{k}": v for k, v in expected["model"].items()}, **expected}
    arrays = reader.read_checkpoint(checkpoint)
    assert set(arrays) == {"model/w", "model/s", "model/empty", "table", "half", "complex", "mask"}
    for name, array in arrays.items():
        assert array.tobytes() == flat[name].tobytes(), name


def test_the_example_is_short_and_needs_only_numpy() -> None:
    lines = READER.read_text().splitlines()
    assert len(lines) <= 60
    assert {line.split()[1] for line in lines if line.startswith(("import", "from"))} == {"json", "struct", "numpy"}


def test_safetensors_opens_every_data_file(checkpoint: Path) -> None:
    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        with safetensors.safe_open(file, "numpy") as opened:
            keys = set(opened.keys())
            assert keys
            assert opened.metadata()["format"] == "pt"
        if "half" not in keys:  # numpy alone has no bfloat16
            assert keys == set(safetensors.numpy.load_file(file))
