"""Calls that cannot be meant, and states that do not fit: each its own error, the same on every rank."""

import os
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_ckpt import (
    CheckpointManager,
    FileSystemReader,
    LoadOptions,
    PerRank,
    SaveOptions,
    ShardedTensor,
    async_save,
    load,
    read,
    save,
    use,
    verify,
)
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.contracts.platform import Platform, PlatformSpec
from hyper_ckpt.contracts.store import StoreSpec
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
    ContainerMismatchError,
    DtypeMismatchError,
    MemoryBudgetError,
    MissingKeyError,
    MixedFrameworksError,
    NoPlatformError,
    PlanError,
    PluginError,
    RanksDisagreeError,
    ShapeMismatchError,
    StateMismatchError,
    StoreError,
    TargetError,
    UnexpectedKeyError,
    UnknownSchemeError,
    UnreadableFileError,
    UnsupportedDtypeError,
    UnsupportedTypeError,
)
from hyper_ckpt.hookspecs import CodecSpec, hookimpl
from hyper_ckpt.registry import Registry, registry
from hyper_ckpt.testing.world import run_world

from ._ranks import all_fail, untouched
from ._states import assert_holds, files_in, part, target

WORLDS = pytest.mark.parametrize("world_size", [1, 3])


def changed(**changes: Any) -> Callable[[int, int], dict[str, Any]]:
    """A target whose top level or `model` has other values; None removes a key."""

    def make(rank: int, world_size: int) -> dict[str, Any]:
        state = target(rank, world_size)
        for name, value in changes.items():
            inside = state["model"] if name in state["model"] or name.startswith("model_") else state
            inside.pop(name, None)
            if value is not None:
                inside[name] = value
        return state

    return make


def read_only() -> np.ndarray:
    array = np.zeros((70, 300), np.float32)
    array.setflags(write=False)
    return array


MISFITS: dict[str, tuple[Any, dict[str, Any], type[CheckpointError], str]] = {
    "shape": (changed(wide=np.zeros((70, 301), np.float32)), {}, ShapeMismatchError, r"\(70, 300\).*\(70, 301\)"),
    "dims": (changed(wide=np.zeros(21000, np.float32)), {}, ShapeMismatchError, "strict=False"),
    "dtype": (changed(wide=np.zeros((70, 300), np.int32)), {}, DtypeMismatchError, "float32.*int32"),
    "width": (changed(wide=np.zeros((70, 300), np.float64)), {}, DtypeMismatchError, "float32.*float64"),
    "missing tensor": (changed(model_more=np.zeros(2)), {}, MissingKeyError, "model_more"),
    "missing value": (changed(more=3), {}, MissingKeyError, "more"),
    "unexpected": (changed(wide=None), {"strict": "exact"}, UnexpectedKeyError, "wide"),
    "container": (changed(seed=[1, 2]), {}, StateMismatchError, "seed"),
    "tensor for a value": (changed(step=np.zeros(2)), {}, ContainerMismatchError, "step"),
    "value for a tensor": (changed(wide=1), {}, ContainerMismatchError, "wide"),
    "several": (changed(wide=np.zeros(3), small=np.zeros((5, 3), np.int8)), {}, StateMismatchError, "wide.*small"),
    "read only": (changed(wide=read_only()), {}, TargetError, "wide"),
    "object array": (changed(wide=np.array([object()])), {}, UnsupportedDtypeError, "wide"),
    "unknown type": (changed(more=object()), {}, UnsupportedTypeError, "more"),
    "little memory": (lambda r, w: target(r, w), {"max_host_bytes": 1000}, MemoryBudgetError, "max_host_bytes"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "ckpt"
    run_world(3, lambda p: save(part(1, p.ranks.rank, 3), path, platform=p))
    return path


@WORLDS
@pytest.mark.parametrize("name", MISFITS)
def test_a_target_that_does_not_fit(saved: Path, tmp_path: Path, name: str, world_size: int) -> None:
    make, options, kind, text = MISFITS[name]

    def refused(platform: Platform) -> None:
        into = make(platform.ranks.rank, world_size)
        untouched(into, lambda: load(into, saved, platform=platform, **options))

    error = all_fail(world_size, refused, tmp_path / "scratch")
    assert type(error) is kind or (kind is StateMismatchError and isinstance(error, kind)), error
    assert_matches(text, error)


@WORLDS
def test_one_rank_s_target_does_not_fit(saved: Path, tmp_path: Path, world_size: int) -> None:
    last = world_size - 1

    def refused(platform: Platform) -> None:
        rank = platform.ranks.rank
        into = MISFITS["shape"][0](rank, world_size) if rank == last else target(rank, world_size)
        untouched(into, lambda: load(into, saved, platform=platform))

    error = all_fail(world_size, refused, tmp_path / "scratch")
    assert type(error) is ShapeMismatchError
    assert f"rank {last}" in str(error) or world_size == 1


def test_two_saved_values_for_one_tied_target(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save({"a": np.zeros(3), "b": np.ones(3)}, path, no_dist=True)
    one = np.full(3, 7.0)
    into = {"a": one, "b": one}
    with pytest.raises(TargetError, match="untie them"):
        untouched(into, lambda: load(into, path, no_dist=True))


REFUSED: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "unknown type": (lambda rank: {"a": {"b": object()}}, UnsupportedTypeError, "a.b"),
    "object array": (lambda rank: {"a": np.array([object()])}, UnsupportedDtypeError, "'a'"),
    "hole": (
        lambda rank: {"a": ShardedTensor([(np.ones(2), (3 * rank,))], (9,))},
        PlanError,
        "'a'",
    ),
    "overlap": (lambda rank: {"a": ShardedTensor([(np.ones(4), (3 * rank,))], (10,))}, PlanError, "'a'"),
    "outside": (lambda rank: {"a": ShardedTensor([(np.ones(4), (8,))], (9,))}, CheckpointError, "'a'"),
    "shapes": (lambda rank: {"a": np.ones(3 + rank)}, PlanError, "'a'"),
    "dtypes": (lambda rank: {"a": np.ones(3, [np.int8, np.int16, np.int32][rank])}, PlanError, "'a'"),
}


@pytest.mark.filterwarnings("ignore:ranks hold different")
@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_cannot_be_saved(tmp_path: Path, name: str) -> None:
    make, kind, text = REFUSED[name]
    path = tmp_path / "ckpt"
    error = all_fail(3, lambda p: save(make(p.ranks.rank), path, platform=p), tmp_path / "scratch")
    assert isinstance(error, kind), error
    assert_matches(text, error)
    assert not files_in(path)


def test_conflicting_values_where_that_is_an_error(tmp_path: Path) -> None:
    def refused(platform: Platform) -> None:
        options = SaveOptions(conflicts="error")
        save({"x": platform.ranks.rank}, tmp_path / "ckpt", platform=platform, options=options)

    error = all_fail(3, refused, tmp_path / "scratch")
    assert type(error) is ConflictError
    assert_matches("'x'.*PerRank", error)


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "overwrite": lambda rank: {"overwrite": rank == 1},
    "durable": lambda rank: {"durable": rank != 1},
    "max_host_bytes": lambda rank: {"max_host_bytes": (1 << 28) + (rank == 2)},
    "planner": lambda rank: {"remove_redundancy": rank != 1},
    "options": lambda rank: {"options": SaveOptions(conflicts="error" if rank == 1 else "warn")},
    "checkpoint_id": lambda rank: {"checkpoint_id": f"other-{rank}"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_rank_with_other_options(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(platform: Platform) -> None:
        rank = platform.ranks.rank
        save(part(1, rank, 3), platform=platform, **{"checkpoint_id": "ckpt", **OPTIONS[name](rank)})

    error = all_fail(3, refused, tmp_path / "scratch")
    assert type(error) is RanksDisagreeError
    assert_matches(f"{name}.*rank [12].*same arguments", error)
    assert not files_in(tmp_path / "ckpt")


def test_a_rank_that_loads_while_others_save(saved: Path, tmp_path: Path) -> None:
    def refused(platform: Platform) -> None:
        rank = platform.ranks.rank
        if rank == 1:
            load(target(rank, 3), saved, platform=platform)
        else:
            save(part(1, rank, 3), saved, platform=platform)

    error = all_fail(3, refused, tmp_path / "scratch")
    assert type(error) is RanksDisagreeError
    assert_matches("call.*save.*load", error)


@WORLDS
def test_an_existing_checkpoint(saved: Path, tmp_path: Path, world_size: int) -> None:
    before = files_in(saved)
    error = all_fail(
        world_size, lambda p: save(part(2, p.ranks.rank, world_size), saved, platform=p), tmp_path / "scratch"
    )
    assert type(error) is CheckpointExistsError
    assert_matches("overwrite=True", error)
    assert files_in(saved) == before
    assert_holds(saved, 1)


@WORLDS
@pytest.mark.parametrize(
    ("where", "kind", "text"),
    [
        ("nowhere://bucket/ckpt", UnknownSchemeError, "Installed schemes: .*Install a plugin"),
        ("memory://", StoreError, "memory://bucket/path"),
        ("", StoreError, "'.' for the current"),
        ("/dev/null/ckpt", UnreadableFileError, "another path"),
        ("a\0b", StoreError, "NUL"),
        ("x" * 300, StoreError, "shorter"),
        (os.fsdecode(b"/proc/\xff/x"), StoreError, "another path"),
    ],
)
def test_a_place_where_nothing_can_be(tmp_path: Path, where: str, kind: type, text: str, world_size: int) -> None:
    error = all_fail(world_size, lambda p: save({"a": 1}, where, platform=p), tmp_path / "scratch")
    assert type(error) is kind, error
    assert_matches(text, error)


def test_a_scheme_that_only_one_rank_lacks(tmp_path: Path) -> None:
    def refused(platform: Platform) -> None:
        where = "nowhere://x" if platform.ranks.rank == 2 else str(tmp_path / "ckpt")
        save(part(1, platform.ranks.rank), where, platform=platform)

    error = all_fail(3, refused, tmp_path / "scratch")
    assert type(error) is UnknownSchemeError
    assert "rank 2" in str(error)


@WORLDS
def test_arguments_that_cannot_be_meant(saved: Path, tmp_path: Path, world_size: int) -> None:
    for action in (
        lambda p: save(part(1), platform=p),
        lambda p: load(part(1), platform=p),
        lambda p: load(part(1), saved, platform=p, strict="very"),
        lambda p: load(part(1), saved, platform=p, verify="later"),
    ):
        error = all_fail(world_size, action, tmp_path / "scratch", known=False)
        assert type(error) is ValueError


WITH_TIMEOUT: dict[str, Callable[[Platform, Path, Any], Any]] = {
    "save": lambda p, path, timeout: save(part(1), path / "new", platform=p, timeout=timeout),
    "async_save": lambda p, path, timeout: async_save(part(1), path / "new", platform=p, timeout=timeout).result(),
    "load": lambda p, path, timeout: load(part(1), path / "ckpt", platform=p, timeout=timeout),
    "a manager's save": lambda p, path, timeout: CheckpointManager(path / "run", platform=p).save(
        1, part(1), timeout=timeout
    ),
    "a manager's restore": lambda p, path, timeout: CheckpointManager(path / "run", platform=p).restore(
        part(1), timeout=timeout
    ),
}


@pytest.mark.parametrize(("timeout", "kind"), [(-1, ValueError), (float("nan"), ValueError), ("5", TypeError)])
@pytest.mark.parametrize("name", WITH_TIMEOUT)
def test_a_timeout_that_one_rank_cannot_mean_is_everybodys_error(
    tmp_path: Path, name: str, timeout: Any, kind: type[Exception]
) -> None:
    def refused(platform: Platform) -> None:
        WITH_TIMEOUT[name](platform, tmp_path, timeout if platform.ranks.rank == 1 else 20)

    error = all_fail(2, refused, tmp_path / "scratch", known=False)
    assert type(error) is kind
    assert_matches("rank 1: timeout must be", error)


def test_a_manager_whose_save_is_not_to_talk_on_one_rank(tmp_path: Path) -> None:
    def refused(platform: Platform) -> None:
        manager = CheckpointManager(tmp_path / "run", platform=platform)
        manager.save(1, part(1), timeout=20, use_collectives=platform.ranks.rank != 1)

    error = all_fail(2, refused, tmp_path / "scratch", known=False)
    assert type(error) is ValueError
    assert_matches("rank 1: a manager needs ranks that talk", error)


def test_a_reader_of_another_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        load({"a": 1}, storage_reader=FileSystemReader(str(tmp_path / "no")), no_dist=True)
    for call in (read, verify):
        with pytest.raises(CheckpointNotFoundError):
            call(tmp_path / "no")


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """Two frameworks that look imported, with a plugin for each. Neither works."""
    modules = {name: types.ModuleType(name) for name in ("fakeflow", "fakegrad")}
    for name, module in modules.items():
        module.Tensor = type("Tensor", (), {"__module__": name})
        monkeypatch.setitem(sys.modules, name, module)

    def load_broken() -> Platform:
        raise OSError("libfake.so.12: cannot open shared object file")

    class Plugin:
        @hookimpl
        def hyper_ckpt_platforms(self) -> list[PlatformSpec]:
            return [PlatformSpec(n, (n,), lambda: 0, load_broken, f"pip install {n}") for n in modules]

    registry().register(Plugin(), "fakes")
    yield modules
    registry().unregister("fakes")


def test_tensors_of_two_frameworks(frameworks: dict[str, Any], tmp_path: Path) -> None:
    state = {"a": frameworks["fakeflow"].Tensor(), "b": PerRank([frameworks["fakegrad"].Tensor()])}
    with pytest.raises(MixedFrameworksError, match=r"fakeflow and fakegrad.*platform="):
        save(state, tmp_path / "ckpt")


def test_a_platform_that_cannot_be_loaded(frameworks: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"libfake.*pip install fakeflow"):
        save({"a": frameworks["fakeflow"].Tensor()}, tmp_path / "ckpt")
    with pytest.raises(PluginError, match="pip install fakegrad"):
        use("fakegrad")
    assert registry().preferred is None


def test_no_such_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPlatformError, match=r"'nope'\. Installed: .*numpy"):
        save({"a": 1}, tmp_path / "ckpt", platform="nope")
    monkeypatch.setenv("HYPER_CKPT_PLATFORM", "nope")
    with pytest.raises(NoPlatformError, match="'nope'"):
        load({"a": 1}, tmp_path / "ckpt")
    with pytest.raises(NoPlatformError):
        use("nope")


def test_a_broken_plugin_does_not_hide_the_others(tmp_path: Path) -> None:
    def broken() -> list[Codec]:
        raise RuntimeError("codecs are broken")

    class Broken:
        @hookimpl
        def hyper_ckpt_platforms(self) -> list[PlatformSpec]:
            raise RuntimeError("built for another release")

        @hookimpl
        def hyper_ckpt_stores(self) -> list[StoreSpec]:
            return [StoreSpec(("fake",), "no_such_module_at_all:open")]

        @hookimpl
        def hyper_ckpt_codecs(self) -> list[CodecSpec]:
            return [CodecSpec(("no_such_module_at_all",), broken), CodecSpec(("numpy",), broken)]

    found = Registry()
    found.register(Broken(), "broken")
    assert found.platform("numpy").name == "numpy"
    with pytest.raises(NoPlatformError, match=r"Plugin 'broken' failed to load: RuntimeError: built for another"):
        found.platform("nope")
    with pytest.raises(PluginError, match=r"fake://.*no_such_module_at_all"):
        found.store("fake://x")
    with pytest.raises(PluginError, match=r"numpy.*codecs are broken"):
        found.codecs()
    with pytest.raises(ValueError):
        found.register(Broken(), "broken")
    found.unregister("broken")
    assert found.codecs()
    with pytest.raises(UnknownSchemeError):
        found.store("fake://x")


def test_load_options_do_not_leak_between_calls(saved: Path, tmp_path: Path) -> None:
    """A failed call changes nothing for the next one on the same platform."""
    platform = NumpyPlatform()
    with pytest.raises(CheckpointNotFoundError):
        load({"a": 1}, tmp_path / "no", platform=platform, options=LoadOptions(broadcast_batch_bytes=1))
    into = target()
    load(into, saved, platform=platform)


def assert_matches(pattern: str, error: BaseException) -> None:
    with pytest.raises(type(error), match=f"(?s){pattern}"):
        raise error


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_ranks_that_missed_calls_find_back_whatever_they_missed(skipped: int) -> None:
    """Rank 2 misses calls that rank 0 makes alone, or with rank 1; the next call of all works, at once."""
    url = f"memory://skips/{time.monotonic_ns()}"
    barrier = threading.Barrier(3)

    def job(platform: Platform) -> float:
        rank = platform.ranks.rank
        save({"x": 1}, f"{url}/good", platform=platform, timeout=30)
        for i in range(skipped):
            if rank <= i % 2:
                with pytest.raises(CheckpointError):
                    save({"x": 1}, f"{url}/missed-{i}", platform=platform, timeout=0.4)
        if rank != 0:
            barrier.wait(60)
        else:
            threading.Timer(0.3, barrier.wait, (60,)).start()  # the others call before rank 0 does
            time.sleep(0.6)
        begin = time.monotonic()
        for i in range(3):
            save({"x": 1}, f"{url}/after-{i}", platform=platform, timeout=20)
        return time.monotonic() - begin

    assert max(run_world(3, job)) < 15


def test_what_is_no_checkpoint_is_told_with_the_way_out(tmp_path: Path) -> None:
    for step in (1, 9, 10):
        save({"x": 1}, tmp_path / "run" / f"step-{step}", no_dist=True)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").write_bytes(b"")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    (tmp_path / "file.pt").write_bytes(b"")
    expected = {
        "run": "step-10.*CheckpointManager", "plain": "PlainSafetensorsReader", "dcp": "torch.distributed.checkpoint",
        "file.pt": "it is a file", "absent": "nothing is there",
    }  # fmt: skip
    for name, text in expected.items():
        with pytest.raises(CheckpointNotFoundError, match=text):
            load({"x": 0}, tmp_path / name, no_dist=True)


def test_names_that_were_probably_meant(tmp_path: Path) -> None:
    save({"model": {"layer.weight": np.ones(3)}, "step": 1}, tmp_path / "c", no_dist=True)
    for wanted, guess in (
        ({"layer.weight": np.ones(3)}, "model/layer.weight"),
        ({"model": {"module.layer.weight": np.ones(3)}}, "model/layer.weight"),
        ({"steps": 1}, "step"),
    ):
        with pytest.raises(MissingKeyError, match=f"did you mean '{guess}'"):
            load(wanted, tmp_path / "c", no_dist=True)
