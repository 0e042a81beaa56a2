"""The modules of hyper_ckpt import only upward, and never a framework. Read from the source: nothing is imported."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hyper_ckpt"

# A module imports from rows above its own, within a row from names further left, and freely inside its own package.
ROWS = [
    [
        "version",
        "text",
        "errors",
        "box",
        "dtypes",
        "casts",
        "latest",
        "host_memory",
        "system_errors",
        "fork_safety",
        "strict_json",
    ],
    ["layout", "tensor_map", "values", "description", "columns", "metadata", "items", "options", "key_maps"],
    ["receipt", "cells", "manifest", "manifest_writer"],
    ["contracts"],
    ["key_value"],
    ["state"],
    ["planning"],
    ["storage"],
    ["agreement"],
    ["engine"],
    ["hookspecs"],
    ["registry"],
    ["builtin"],
    ["api"],
    ["manager", "testing", "cli", "__main__"],
]
ORDER = [part for row in ROWS for part in row]
NEVER = {("engine", "planning")}  # (who, whom), although the rows would allow it

# `hyper_ckpt` itself, whose __init__ imports api: only what stands below api may import it.
SURFACE = "hyper_ckpt"

# (module, imported module) pairs that break the rows on purpose, each inside a function and with its reason.
ALLOWED_LAZY: set[tuple[str, str]] = set()

# What only some parts may import beyond the requirements of the distribution.
EXTRA_REQUIREMENTS = {"testing": {"hypothesis", "pytest"}}
# Drawing and commands: imported when used, so that `import hyper_ckpt` doesn't pay for them.
LAZY_ONLY = {"click", "rich"}

FRAMEWORKS = {
    "cupy", "flax", "jax", "jaxlib", "keras", "mindspore", "mlx", "oneflow", "paddle", "tensorflow", "tinygrad",
    "torch", "torch_npu",
}  # fmt: skip
BY_STRING = {"import_module", "__import__", "find_spec", "importorskip"}


class Import(NamedTuple):
    target: str
    line: int
    lazy: bool


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, name: str, is_package: bool) -> Iterator[Import]:
    """All that `source` imports, by absolute name; `from a import b` as a.b."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if is_package else name.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, lazy)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            # The registry names the built-ins by string, on purpose: strings count for frameworks only.
            target = node.args[0].value
            if called in BY_STRING and isinstance(target, str) and not target.startswith((".", "hyper_ckpt")):
                yield Import(target, node.lineno, lazy)
        inner = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    yield from visit(ast.parse(source), False)


def part_of(module: str) -> str:
    """hyper_ckpt.planning.save -> planning; hyper_ckpt itself, or a name taken from it -> the surface."""
    part = module.split(".")[1] if "." in module else SURFACE
    return part if part in ORDER else SURFACE


def place_of(part: str) -> int:
    return ORDER.index("api" if part == SURFACE else part)


def row_problem(name: str, found: Import) -> str | None:
    here, there = part_of(name), part_of(found.target)
    if here == there != SURFACE:
        return None
    if place_of(there) < place_of(here) and (here, there) not in NEVER:
        return None
    if found.lazy and any(name == who and f"{found.target}.".startswith(f"{whom}.") for who, whom in ALLOWED_LAZY):
        return None
    return f"{here} must not import {there} ({found.target})"


def outside_problem(name: str, found: Import, declared: set[str]) -> str | None:
    top = found.target.partition(".")[0]
    part = part_of(name)
    if FRAMEWORKS & set(found.target.split(".")):
        return f"the core never imports a framework ({found.target})"
    if top in sys.stdlib_module_names:
        return None
    if top not in declared | EXTRA_REQUIREMENTS.get(part, set()):
        return f"{top} is not a requirement of hyper-ckpt"
    if top in LAZY_ONLY and not found.lazy and part != "cli":
        return f"{top} is imported only inside the function that draws"
    return None


def problems(source: str, name: str, is_package: bool, declared: set[str]) -> list[str]:
    found = []
    for each in imports_of(source, name, is_package):
        ours = each.target.partition(".")[0] == "hyper_ckpt"
        problem = row_problem(name, each) if ours else outside_problem(name, each, declared)
        if problem:
            found.append(f"{name}:{each.line}: {problem}")
    return found


def declared_requirements() -> set[str]:
    lines = [line for line in requires("hyper-ckpt") or [] if "extra ==" not in line]
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].replace("-", "_") for line in lines}


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: module_name(path, PACKAGE))
def test_module_imports_only_upward(path: Path) -> None:
    name = module_name(path, PACKAGE)
    assert name.split(".")[1] in ORDER, f"{name} is in no row: enter it in the table of this test"
    found = problems(path.read_text(encoding="utf-8"), name, path.name == "__init__.py", declared_requirements())
    assert not found, "\n".join(found)


def test_the_surface_imports_no_framework() -> None:
    source = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    outside = [each for each in imports_of(source, "hyper_ckpt", True) if not each.target.startswith("hyper_ckpt.")]
    found = [outside_problem("hyper_ckpt", each, declared_requirements()) for each in outside]
    assert not any(found), found


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("hyper_ckpt.box", "from hyper_ckpt.dtypes import x"),  # right of it in its row
        ("hyper_ckpt.layout", "from hyper_ckpt import options"),
        ("hyper_ckpt.planning.save", "from ..storage import placement"),
        ("hyper_ckpt.planning.save", "def f():\n    from hyper_ckpt.engine.save import g"),
        ("hyper_ckpt.engine.save", "from hyper_ckpt.planning import balance"),
        ("hyper_ckpt.engine.save", "from hyper_ckpt import save"),  # the surface, not a module
        ("hyper_ckpt.engine.save", "import hyper_ckpt"),
        ("hyper_ckpt.api", "import hyper_ckpt"),
        ("hyper_ckpt.api", "from hyper_ckpt import save"),
        ("hyper_ckpt.registry", "from .builtin import specs"),
        ("hyper_ckpt.builtin.numpy", "import torch"),
        ("hyper_ckpt.builtin.numpy", "def f():\n    import torch.distributed as dist"),
        ("hyper_ckpt.builtin.numpy", "from safetensors.torch import save_file"),
        ("hyper_ckpt.builtin.numpy", "import importlib.util as u\nu.find_spec('mindspore')"),
        ("hyper_ckpt.state", "import pandas"),
        ("hyper_ckpt.engine.save", "import rich.progress"),
        ("hyper_ckpt.api", "import pytest"),
    ],
)
def test_the_rules_refuse(name: str, source: str) -> None:
    assert problems(source, name, False, {"numpy", "rich", "safetensors"})


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("hyper_ckpt.dtypes", "import numpy as np\nfrom .errors import CkptError"),
        ("hyper_ckpt.planning.save", "from .balance import level\nfrom . import share\nfrom ..box import Box"),
        ("hyper_ckpt.registry", "import importlib\nimportlib.import_module('hyper_ckpt.builtin.specs')"),
        ("hyper_ckpt.api", "from hyper_ckpt.engine.save import run\nfrom hyper_ckpt.planning import save"),
        ("hyper_ckpt.cli.main", "import rich\nimport hyper_ckpt\nfrom ..manager import CheckpointManager"),
        ("hyper_ckpt.engine.save", "def f():\n    from rich.progress import Progress"),
        ("hyper_ckpt.testing.strategies", "import hypothesis"),
    ],
)
def test_the_rules_accept(name: str, source: str) -> None:
    assert not problems(source, name, False, {"numpy", "rich", "safetensors"})
