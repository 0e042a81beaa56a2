"""The entry module imports no torch, and torch's own types have codecs."""

import base64
import json
import subprocess
import sys

import pytest
import torch

import hyper_ckpt
from hyper_ckpt.receipt import ZERO_DIGEST, seal
from hyper_ckpt_torch import plugin
from hyper_ckpt_torch.codecs import CODECS


def test_the_entry_module_imports_no_torch():
    script = (
        "import sys; from hyper_ckpt_torch import plugin; (spec,) = plugin.hyper_ckpt_platforms(); "
        "plugin.hyper_ckpt_codecs(); assert spec.active() == 0; assert 'torch' not in sys.modules; print(spec.name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "torch\n"


def test_load_gives_a_platform():
    (spec,) = plugin.hyper_ckpt_platforms()
    assert spec.load() is spec.load()
    assert spec.load().name == spec.name == "torch"


def test_codecs_are_announced():
    (spec,) = plugin.hyper_ckpt_codecs()
    assert spec.modules == ("torch",)
    assert tuple(spec.load()) == CODECS


@pytest.mark.parametrize("value", [torch.Size([2, 0, 3]), torch.Size([]), torch.bfloat16, torch.device("cuda", 3)])
def test_codecs_round_trip(value):
    (codec,) = [c for c in CODECS if c.type is type(value)]
    again = codec.decode(codec.encode(value))
    assert type(again) is type(value)
    assert again == value


IMPORTS_NOTHING = """
import sys
import torch
import hyper_ckpt
from hyper_ckpt_torch.codecs import CODECS
from hyper_ckpt_torch.tensors import torch_dtype

(codec,) = [c for c in CODECS if c.type is torch.dtype]
before = set(sys.modules)
for name in ("_dynamo", "_inductor", "onnx", "has_cuda", "has_mps", "load", "dtype", "float", "Tensor", "nothing", ""):
    for decode, refusal in ((lambda: codec.decode(name.encode()), ValueError),
                            (lambda: torch_dtype(name), hyper_ckpt.errors.UnsupportedDtypeError)):
        try:
            print(name, "gave", decode())
        except refusal:
            pass
print(*set(sys.modules) - before)
"""


def test_the_name_of_a_dtype_imports_nothing():
    """torch imports some modules when they are asked for by name, and a checkpoint may name anything."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTS_NOTHING], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == ""


def test_a_manifest_that_names_another_attribute_of_torch_is_refused(tmp_path):
    hyper_ckpt.save({"dtype": torch.float32}, tmp_path / "c", platform="torch", no_dist=True)
    path = tmp_path / "c" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    (node,) = manifest["state"]["v"]
    node["v"] = base64.b64encode(b"load").decode()
    manifest["digest"] = ZERO_DIGEST
    path.write_bytes(seal(json.dumps(manifest, separators=(",", ":")).encode())[0])
    with pytest.raises(hyper_ckpt.errors.ManifestError, match="no dtype"):
        hyper_ckpt.read(tmp_path / "c", platform="torch")
    with pytest.raises(hyper_ckpt.errors.ManifestError, match="no dtype"):
        hyper_ckpt.load({"dtype": torch.float16}, tmp_path / "c", platform="torch", no_dist=True)


def test_a_generator_goes_on_where_it_was():
    (codec,) = [c for c in CODECS if c.type is torch.Generator]
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    data = codec.encode(generator)
    expected = torch.rand(5, generator=generator)
    target = torch.Generator()
    codec.assign(target, codec.decode(data))
    assert torch.equal(torch.rand(5, generator=target), expected)


@pytest.mark.parametrize(
    ("name", "data"),
    [("torch.Size", b'["a"]'), ("torch.Size", b"{"), ("torch.dtype", b"nn"), ("torch.device", b"no such"),
     ("torch.Generator", b"cpu\0short"), ("torch.Generator", b"")],
)  # fmt: skip
def test_damaged_bytes_are_refused(name, data):
    (codec,) = [c for c in CODECS if c.name == name]
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        codec.decode(data)
