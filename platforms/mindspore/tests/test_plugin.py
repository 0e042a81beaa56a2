"""The entry module imports no MindSpore, refuses numpy 2, and the framework whose tensors are there is chosen."""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.errors import MixedFrameworksError, NoPlatformError, PlatformError
from hyper_ckpt.registry import Registry
from hyper_ckpt_mindspore import plugin
from hyper_ckpt_mindspore.codecs import CODECS
from hyper_ckpt_mindspore.platform import MindSporePlatform


def test_the_entry_module_imports_no_mindspore():
    script = (
        "import sys; from hyper_ckpt_mindspore import plugin; (spec,) = plugin.hyper_ckpt_platforms(); "
        "plugin.hyper_ckpt_codecs(); assert spec.active() == 0; assert 'mindspore' not in sys.modules; print(spec.name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "mindspore\n"


def test_load_gives_a_platform():
    (spec,) = plugin.hyper_ckpt_platforms()
    assert spec.load() is spec.load()
    assert spec.load().name == spec.name == "mindspore"
    assert spec.active() == 0


@pytest.mark.parametrize("version", ["2.0.0", "2.3.5", "3.0.0.dev0"])
def test_numpy_2_is_refused_with_the_command_that_mends_it(monkeypatch, version):
    monkeypatch.setattr(np, "__version__", version)
    with pytest.raises(PlatformError, match=rf"numpy {version}. Run: pip install 'numpy>=1.25,<2'"):
        plugin.load()
    with pytest.raises(PlatformError, match="pip install"):
        Registry().platform("mindspore")


@pytest.mark.parametrize("version", ["1.25.0", "1.26.4"])
def test_numpy_1_is_welcome(version):
    plugin.check_numpy(version)


def test_active_looks_only_at_what_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "mindspore.mint.distributed")
    assert plugin.active() == 0
    assert "mindspore.mint.distributed" not in sys.modules


def test_the_framework_of_the_state_is_chosen_beside_torch():
    torch = pytest.importorskip("torch")
    registry = Registry()
    one, other = ms.Tensor(np.ones(2)), torch.ones(2)
    assert registry.choose({"a": [one, np.ones(2)]}).name == "mindspore"
    assert registry.choose({"p": ms.Parameter(one, name="p"), "n": 1}).name == "mindspore"
    assert registry.choose({"a": other}).name == "torch"
    assert registry.choose({"a": np.ones(2)}).name == "numpy"
    with pytest.raises(MixedFrameworksError, match="mindspore and torch"):
        registry.choose({"a": one, "b": other})
    with pytest.raises(NoPlatformError, match="mindspore"):
        registry.platform("nonsense")


def test_a_group_needs_a_world():
    with pytest.raises(PlatformError, match="no group 'g'"):
        MindSporePlatform("g")


def test_codecs_are_announced():
    (spec,) = plugin.hyper_ckpt_codecs()
    assert spec.modules == ("mindspore",)
    assert tuple(spec.load()) == CODECS


@pytest.mark.parametrize(
    "value", [ms.float32, ms.bfloat16, ms.bool_, ms.int8, ms.complex64, ms.float8_e4m3fn, ms.uint64]
)
def test_dtypes_are_stored(value, tmp_path):
    (codec,) = CODECS
    assert codec.decode(codec.encode(value)) == value
    hyper_ckpt.save({"dtype": value}, tmp_path / "c")
    state = {"dtype": None if value is ms.int8 else ms.int8}
    hyper_ckpt.load(state, tmp_path / "c", strict=False)
    assert hyper_ckpt.read(tmp_path / "c")["dtype"] == value


@pytest.mark.parametrize("data", [b"nonsense", b"", b"\xff", b"Tensor"])
def test_damaged_bytes_are_refused(data):
    (codec,) = CODECS
    with pytest.raises(ValueError):
        codec.decode(data)


def test_other_types_of_mindspore_are_refused():
    (codec,) = CODECS
    with pytest.raises(ValueError, match="not a dtype of tensors"):
        codec.encode(ms.common.dtype.type_none)
