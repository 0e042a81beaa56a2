"""Values converted on load are those that MindSpore's own `astype` gives."""

import itertools
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.options import LoadOptions

FLOATS = ["float16", "bfloat16", "float32", "float64"]
CAST = LoadOptions(cast=True)


def values() -> np.ndarray:
    """Values about where narrow dtypes round and overflow; halves that are rounded twice."""
    rng = np.random.default_rng(0)
    near = np.concatenate([rng.normal(size=2000) * scale for scale in (1.0, 1e-5, 400.0, 60_000.0)])
    return np.concatenate([near, 1 + np.arange(512) * 2.0**-12 + rng.normal(size=512) * 1e-13, [np.inf, -0.0]])


@pytest.mark.parametrize(("dtype", "to"), [*itertools.permutations(FLOATS, 2)])
def test_as_mindspore_converts(tmp_path: Path, dtype: str, to: str) -> None:
    saved = ms.Tensor(values()).astype(getattr(ms, dtype))
    hyper_ckpt.save({"w": saved}, tmp_path / "c")
    target = {"w": ms.Parameter(ms.Tensor(np.zeros(len(saved)), getattr(ms, to)), name="w")}
    report = hyper_ckpt.load(target, tmp_path / "c", options=CAST)
    expected = saved.astype(getattr(ms, to)).astype(ms.float64).asnumpy()
    assert target["w"].astype(ms.float64).asnumpy().tobytes() == expected.tobytes()
    assert report.cast == {"w": (dtype, to)}


def test_integers(tmp_path: Path) -> None:
    hyper_ckpt.save({"step": ms.Tensor(7, ms.int32)}, tmp_path / "c")
    target = {"step": ms.Tensor(0, ms.int64)}
    hyper_ckpt.load(target, tmp_path / "c", options=CAST)
    assert target["step"].asnumpy() == 7
