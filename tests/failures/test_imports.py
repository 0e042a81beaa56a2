"""Importing chooses nothing: no framework is loaded before a platform of it is asked for."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

FRAMEWORKS = {"torch", "torch_npu", "mindspore", "jax", "tensorflow", "paddle", "cupy"}
LATER = {"click", "rich", "hypothesis", "pytest"}


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter that ran `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_importing_the_package_loads_next_to_nothing() -> None:
    found = loaded_by("import hyper_ckpt")
    assert not tops(found) & (FRAMEWORKS | LATER | {"numpy", "msgspec", "pluggy"})
    assert {m for m in found if m.startswith("hyper_ckpt.")} == {
        f"hyper_ckpt.{name}" for name in ("errors", "system_errors", "text", "version")
    }


@pytest.mark.parametrize(
    "code",
    [
        "from hyper_ckpt import *",
        "from hyper_ckpt import save, load, read, verify, read_metadata, use",
        "import hyper_ckpt.registry; hyper_ckpt.registry.registry()",
        "import hyper_ckpt, tempfile, os; p = os.path.join(tempfile.mkdtemp(), 'c'); "
        "hyper_ckpt.save({'a': 1}, p); hyper_ckpt.load({'a': 0}, p); hyper_ckpt.read(p); hyper_ckpt.verify(p)",
    ],
)
def test_using_it_without_a_framework_loads_none(code: str) -> None:
    assert not tops(loaded_by(code)) & (FRAMEWORKS | LATER)


def test_entry_modules_of_plugins_load_no_framework() -> None:
    entries = importlib.metadata.entry_points(group="hyper_ckpt")
    assert entries, "the development set-up installs plugins"
    for entry in entries:
        code = f"import importlib; importlib.import_module({entry.module!r})"
        assert not tops(loaded_by(code)) & FRAMEWORKS, entry


def test_a_class_that_a_checkpoint_names_runs_no_lazy_module() -> None:
    """importlib.util.LazyLoader runs a module when any attribute of it is asked for, its namespace too."""
    code = """
import importlib.util, sys
from hyper_ckpt.state.classes import find_class
spec = importlib.util.find_spec("wave")
spec.loader = loader = importlib.util.LazyLoader(spec.loader)
module = importlib.util.module_from_spec(spec)
sys.modules["lazy"] = module
loader.exec_module(module)
before = set(sys.modules)
assert find_class("lazy", "Wave_read") is None and find_class("lazy", "__class__.x") is None
assert set(sys.modules) == before, set(sys.modules) - before
assert find_class("collections", "OrderedDict") is sys.modules["collections"].OrderedDict
"""
    loaded_by(code)
