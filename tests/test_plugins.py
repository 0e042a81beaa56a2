"""Discovery: each plugin in its own try; clashes, old contracts and blocked names are refused, not resolved."""

import importlib.metadata
import json
import subprocess
import sys
import types
from typing import Any

import pytest
from click.testing import CliRunner

from hyper_ckpt import NumpyPlatform
from hyper_ckpt.cli.app import cli
from hyper_ckpt.contracts.platform import PlatformSpec
from hyper_ckpt.contracts.store import StoreSpec
from hyper_ckpt.errors import PluginError
from hyper_ckpt.hookspecs import CONTRACT_VERSION, PlannerSpec, hookimpl
from hyper_ckpt.planning.standard import StandardLoadPlanner, StandardSavePlanner
from hyper_ckpt.registry import BLOCKED_VARIABLE, Registry, registry


def plugin(platform: str | None = None, scheme: str | None = None, contract: int | None = CONTRACT_VERSION) -> Any:
    module = types.SimpleNamespace()
    if contract is not None:
        module.CONTRACT_VERSION = contract
    if platform is not None:
        spec = PlatformSpec(platform, (), lambda: 0, NumpyPlatform, "pip install it")
        module.hyper_ckpt_platforms = hookimpl(lambda: [spec])
    if scheme is not None:
        module.hyper_ckpt_stores = hookimpl(
            lambda: [StoreSpec((scheme,), "hyper_ckpt.storage.memory_store:MemoryStore")]
        )
    return module


class FakeEntry:
    """An entry point of a distribution that is not installed."""

    def __init__(self, name: str, distribution: str, module: Any) -> None:
        self.name, self._module = name, module
        self.dist = types.SimpleNamespace(name=distribution, version="1.2")

    def load(self) -> Any:
        if isinstance(self._module, BaseException):
            raise self._module
        return self._module


def registry_with(monkeypatch: pytest.MonkeyPatch, *entries: FakeEntry) -> Registry:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    return Registry()


def test_a_broken_plugin_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry_with(
        monkeypatch, FakeEntry("bad", "bad-dist", OSError("libbad.so")), FakeEntry("good", "good-dist", plugin("good"))
    )
    assert found.platform("numpy").name == "numpy"
    assert isinstance(found.platform("good"), NumpyPlatform)
    by_name = {p.name: p for p in found.plugins()}
    assert by_name["bad"].error == "OSError: libbad.so"
    assert (by_name["good"].announces, by_name["good"].distribution) == (("platform good",), "good-dist")
    assert by_name["good"].error is None


@pytest.mark.parametrize("contract", [None, 0, CONTRACT_VERSION + 1])
def test_another_contract_version_is_refused(monkeypatch: pytest.MonkeyPatch, contract: int | None) -> None:
    found = registry_with(monkeypatch, FakeEntry("old", "old-dist", plugin("old", contract=contract)))
    assert isinstance(found.errors["old"], PluginError)
    assert "old-dist 1.2" in str(found.errors["old"])
    assert "old" not in found._platforms


def test_two_distributions_with_one_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry_with(
        monkeypatch, FakeEntry("a", "dist-a", plugin("same")), FakeEntry("b", "dist-b", plugin("same", "mem2"))
    )
    with pytest.raises(PluginError, match=r"'a' of dist-a and 'b' of dist-b"):
        found.platform("same")
    assert "mem2" in found._stores  # what is not in dispute stays usable


def test_two_distributions_with_one_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry_with(
        monkeypatch, FakeEntry("a", "dist-a", plugin(scheme="s9")), FakeEntry("b", "dist-b", plugin(scheme="s9"))
    )
    with pytest.raises(PluginError, match=r"s9://.*dist-a.*dist-b"):
        found.store("s9://x")


def test_two_distributions_with_one_plugin_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry_with(monkeypatch, FakeEntry("a", "dist-a", plugin("one")), FakeEntry("a", "dist-b", plugin("two")))
    assert "dist-a and dist-b" in str(found.errors["a"])


def planners(*specs: PlannerSpec) -> Any:
    module = plugin()
    module.hyper_ckpt_planners = hookimpl(lambda: list(specs))
    return module


def test_planners_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = PlannerSpec("both", StandardSavePlanner, StandardLoadPlanner), PlannerSpec("saves", StandardSavePlanner)
    found = registry_with(monkeypatch, FakeEntry("p", "dist-p", planners(*specs)))
    assert isinstance(found.save_planner("both"), StandardSavePlanner)
    assert isinstance(found.load_planner("both"), StandardLoadPlanner)
    assert found.save_planner("both") is not found.save_planner("both")
    with pytest.raises(PluginError, match="'saves' is for saves only"):
        found.load_planner("saves")
    with pytest.raises(PluginError, match=r"no plugin announces planner 'other'. Announced: both, saves"):
        found.save_planner("other")
    by_name = {p.name: p for p in found.plugins()}
    assert by_name["p"].announces == ("planner both", "planner saves")


def test_two_distributions_with_one_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PlannerSpec("same", None, StandardLoadPlanner)
    found = registry_with(
        monkeypatch, FakeEntry("a", "dist-a", planners(spec)), FakeEntry("b", "dist-b", planners(spec))
    )
    for get in (found.save_planner, found.load_planner):
        with pytest.raises(PluginError, match=r"'same' is announced by .*'a' of dist-a and 'b' of dist-b"):
            get("same")


def test_a_planner_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise OSError("no licence")

    found = registry_with(monkeypatch, FakeEntry("p", "dist-p", planners(PlannerSpec("bad", fails, None))))
    with pytest.raises(PluginError, match=r"planner 'bad' cannot be loaded: OSError: no licence"):
        found.save_planner("bad")
    with pytest.raises(PluginError, match="for saves only"):
        found.load_planner("bad")


def test_a_blocked_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLOCKED_VARIABLE, "a, other")
    found = registry_with(monkeypatch, FakeEntry("a", "dist-a", plugin("one")))
    assert "one" not in found._platforms
    assert "blocked" in str(found.errors["a"])


def test_the_command_lists_them() -> None:
    listed = CliRunner().invoke(cli, ["plugins", "--json"])
    by_name = {p["name"]: p for p in json.loads(listed.stdout)["plugins"]}
    assert by_name["builtin"]["announces"] == [
        "platform numpy", "store paths", "store file://", "store memory://", "observer log lines",
        "observer progress bar",
    ]  # fmt: skip
    assert by_name["torch"]["distribution"] == "hyper-ckpt-torch"
    assert by_name["torch"]["error"] is None
    shown = CliRunner().invoke(cli, ["plugins"]).stdout
    assert "torch  (hyper-ckpt-torch 0.1.0)\n  platform torch\n" in shown
    assert {p.name for p in registry().plugins()} == set(by_name)


def test_finding_plugins_imports_no_framework() -> None:
    script = (
        "import sys; from hyper_ckpt.registry import registry; found = registry().plugins();"
        "print(*(m for m in ('torch', 'mindspore', 'rich', 'click') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("hyper_ckpt_platforms", ["x"]),
        ("hyper_ckpt_platforms", [None]),
        ("hyper_ckpt_platforms", 5),
        ("hyper_ckpt_platforms", [PlatformSpec("bad", "torch", lambda: 0, lambda: None, "")]),  # type: ignore[arg-type,return-value]
        ("hyper_ckpt_stores", ["memory"]),
        ("hyper_ckpt_stores", [StoreSpec((5,), "x:y")]),  # type: ignore[arg-type]
        ("hyper_ckpt_codecs", [object()]),
        ("hyper_ckpt_planners", [PlannerSpec(["a"])]),  # type: ignore[arg-type]
        ("hyper_ckpt_events", [len]),
    ],
)
def test_a_hook_that_returns_something_else_stops_only_its_plugin(
    monkeypatch: pytest.MonkeyPatch, hook: str, value: Any
) -> None:
    bad = plugin()
    setattr(bad, hook, hookimpl(lambda: value))
    found = registry_with(
        monkeypatch, FakeEntry("bad", "bad-dist", bad), FakeEntry("good", "good-dist", plugin("good"))
    )
    assert found.errors.keys() == {"bad"}
    assert found.choose({"x": 1}).name == "numpy"
    assert [p.name for p in found.plugins() if p.error] == ["bad"]


def test_a_plugin_cannot_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry_with(monkeypatch, FakeEntry("bad", "bad-dist", SystemExit(3)))
    assert "SystemExit" in {p.name: p for p in found.plugins()}["bad"].error


def test_what_a_platform_spec_does_wrong_is_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = plugin()
    wrong = PlatformSpec("wrong", ("nothing",), lambda: 1 // 0, lambda: 5, "pip install it")  # type: ignore[arg-type,return-value]
    module.hyper_ckpt_platforms = hookimpl(lambda: [wrong])
    found = registry_with(monkeypatch, FakeEntry("wrong", "wrong-dist", module))
    with pytest.raises(PluginError, match=r"'wrong'.*ZeroDivisionError"):
        found.choose({"x": 1})
    with pytest.raises(PluginError, match=r"'wrong'.*no Platform"):
        found.platform("wrong")
