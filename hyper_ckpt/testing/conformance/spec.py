"""What `PlatformSpec` promises: how a platform is found, and when it is in use."""

from __future__ import annotations

import contextlib
from typing import Any

from hyper_ckpt import load, save
from hyper_ckpt.contracts.platform import PlatformSpec
from hyper_ckpt.errors import PluginError
from hyper_ckpt.registry import registry
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect
from hyper_ckpt.testing.conformance.subject import Subject, content

spec_alone = Part("spec")
spec_world = Part("world")

_NUMPY = "numpy"  # what is used where nothing else fits: it has no modules, and no process group


def active_now() -> dict[str, int]:
    """What `active` of each announced platform says now; of one that raises, nothing."""
    found = {}
    for spec in _announced():
        try:
            found[spec.name] = spec.active()
        except Exception:
            continue
    return found


def _announced() -> list[PlatformSpec]:
    announces = [text for plugin in registry().plugins() for text in plugin.announces]
    found = []
    for name in sorted({text.removeprefix("platform ") for text in announces if text.startswith("platform ")}):
        with contextlib.suppress(PluginError):  # two plugins announce it: nobody can use it
            found.append(registry().platform_spec(name))
    return found


def _spec(s: Subject) -> PlatformSpec:
    name = s.platform.name
    found = [spec for spec in _announced() if spec.name == name]
    if not found:
        raise NotApplicable(f"no installed plugin announces a platform called {name!r}, as Platform.name says")
    if name == _NUMPY:
        raise NotApplicable("numpy is used where no other platform fits")
    return found[0]


@spec_alone
def the_spec_names_the_modules_of_its_tensors(s: Subject) -> None:
    """The top-level module of the tensors' type, or of a base of it, is in `PlatformSpec.modules`."""
    spec = _spec(s)
    value = s.probe.make(s.dtype, (2, 3), content(s.dtype, (2, 3)))
    tops = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    expect(
        any(top in spec.modules for top in tops),
        f"a {type(value).__qualname__} is of one of the modules that the spec names",
        f"modules={spec.modules!r}, its type and bases are of {list(dict.fromkeys(tops))}",
        "name the top-level module in PlatformSpec.modules, e.g. ('torch',) for torch.Tensor",
    )


@spec_alone
def load_gives_the_same_platform_again(s: Subject) -> None:
    """`PlatformSpec.load` gives the same platform each time while no process group comes or goes."""
    spec = _spec(s)
    _check_load(spec, s)


@spec_alone
def a_state_finds_its_platform(s: Subject) -> None:
    """A state with tensors of the platform is saved and loaded without `platform=`."""
    spec = _spec(s)
    shape = (3, 4)
    data = content(s.dtype, shape)
    where = s.folder / "ckpt"
    target = {"w": s.probe.make(s.dtype, shape, content(s.dtype, shape, 1))}
    chosen = registry().choose(target)
    expect(
        chosen.name == spec.name,
        f"a state with a {type(target['w']).__qualname__} is of platform {spec.name!r}",
        f"platform {chosen.name!r} is chosen",
        "see PlatformSpec.modules, and `name` of the Platform that load returns",
    )
    save({"w": s.probe.make(s.dtype, shape, data)}, where)
    load(target, where)
    s.same(target["w"], data, "a state is saved and loaded without platform=", "see PlatformSpec.modules and load")


@spec_world
def active_says_how_many_ranks_there_are(s: Subject) -> None:
    """`PlatformSpec.active` gives 0 before the process group is joined, and its size afterwards."""
    spec, before = _spec(s), _before(s)
    expect(
        before.get(spec.name) == 0,
        "active() is 0 before PlatformProbe.join",
        f"{before.get(spec.name, 'it raised')}",
        "give 0 where the framework is not imported, and where its process group is not there yet",
    )
    now = spec.active()
    expect(
        now == s.ranks.world_size,
        f"active() is {s.ranks.world_size} on rank {s.ranks.rank}, the number of ranks",
        f"{now}",
        "ask the framework for its process group, through sys.modules",
    )


@spec_world
def load_gives_the_joined_group(s: Subject) -> None:
    """`PlatformSpec.load` gives the platform of the group that was joined, the same each time."""
    spec = _spec(s)
    _before(s)
    loaded = _check_load(spec, s)
    got, wanted = ((p.ranks.rank, p.ranks.world_size) for p in (loaded, s.platform))
    expect(
        got == wanted,
        f"load gives the platform of the group that was joined: (rank, world_size) = {wanted}",
        f"{got}",
        "look at the framework's process group in each call of load, not when the module is imported",
    )


def _before(s: Subject) -> dict[str, int]:
    if s.active_before is None:
        raise NotApplicable("the ranks of this platform are threads: no process joins a group")
    return s.active_before


def _check_load(spec: PlatformSpec, s: Subject) -> Any:
    one, other = spec.load(), spec.load()
    expect(
        one is other,
        "load gives the same instance while the process group lives",
        "two instances: each would connect, pool buffers and count saves for itself",
        "keep it per process group, in a dict (weak, or by the group)",
    )
    expect(one.name == s.platform.name, f"a Platform called {s.platform.name!r}", f"{one.name!r}", "see Platform.name")
    return one
