"""Finds plugins, and chooses the platform and the store of a call. Imports no framework."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pluggy

from hyper_ckpt import hookspecs
from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.contracts.events import EventSpec
from hyper_ckpt.contracts.objects import MissingTensor, Objects
from hyper_ckpt.contracts.planner import LoadPlanner, SavePlanner
from hyper_ckpt.contracts.platform import Platform, PlatformSpec
from hyper_ckpt.contracts.store import ByteStore, StoreSpec
from hyper_ckpt.errors import (
    CheckpointError,
    MixedFrameworksError,
    NoPlatformError,
    PluginError,
    TargetError,
    UnknownSchemeError,
)
from hyper_ckpt.state import BUILTIN
from hyper_ckpt.state.classes import has_state, is_stateful, namespace_of
from hyper_ckpt.system_errors import refusal, require_files, system_errors
from hyper_ckpt.values import PerRank, ShardedTensor
from hyper_ckpt.version import VERSION

BUILTIN_MODULE = "hyper_ckpt.builtin"
PLATFORM_VARIABLE = "HYPER_CKPT_PLATFORM"


BLOCKED_VARIABLE = "HYPER_CKPT_BLOCK_PLUGINS"
"""Names of plugins that are not to be loaded, separated by commas."""


@dataclass(frozen=True)
class PluginInfo:
    """One plugin: its name, what it announces ("platform torch", "store memory://", ...), which distribution has it,
    and why it cannot be used, if it cannot."""

    name: str
    announces: tuple[str, ...]
    distribution: str
    version: str
    error: str | None


class Registry:
    """The plugins of this process, each loaded in its own try: a broken one does not hide the others."""

    def __init__(self) -> None:
        self.errors: dict[str, BaseException] = {}
        self.preferred: str | None = None
        self._origins: dict[str, tuple[str, str]] = {"builtin": ("hyper-ckpt", VERSION)}
        self._plugins = pluggy.PluginManager(hookspecs.PROJECT)
        self._plugins.add_hookspecs(hookspecs)
        self._plugins.register(importlib.import_module(BUILTIN_MODULE), "builtin")
        for name in filter(None, map(str.strip, os.environ.get(BLOCKED_VARIABLE, "").split(","))):
            self._plugins.set_blocked(name)
            self.errors[name] = PluginError(f"blocked by {BLOCKED_VARIABLE}")
        for entry in importlib.metadata.entry_points(group=hookspecs.PROJECT):
            if not self._plugins.is_blocked(entry.name):
                self._load(entry)
        self._announce()

    def _load(self, entry: importlib.metadata.EntryPoint) -> None:
        """Imports the entry module of a plugin; whatever it raises, the others stay usable."""
        origin = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
        try:
            if entry.name in self._origins:
                raise PluginError(
                    f"{self._origins[entry.name][0]} and {origin[0]} both have a plugin of this name: uninstall one"
                )
            self._origins[entry.name] = origin
            plugin = entry.load()
            _check_contract(plugin, origin)
            self._plugins.register(plugin, entry.name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a SystemExit too: the process is not a plugin's to end
            if refusal(error) is not None:
                raise  # it may load the next time
            self.errors[entry.name] = error

    def register(self, plugin: Any, name: str) -> None:
        """Adds a plugin that no distribution announces: a module or object with hook implementations.

        Raises:
            ValueError: a plugin of this name, or this very plugin, is there already.
        """
        self._plugins.register(plugin, name)
        self._origins[name] = ("this process", "")
        self._announce()

    def unregister(self, name: str) -> None:
        """Takes a plugin back; one that is not there is fine."""
        if self._plugins.has_plugin(name):
            self._plugins.unregister(name=name)
            self._origins.pop(name, None)
            self._announce()

    def plugins(self) -> list[PluginInfo]:
        """All plugins, usable or not, by name."""
        announces: dict[str, list[str]] = {}
        for plugin, spec in self._announced("hyper_ckpt_platforms"):
            announces.setdefault(plugin, []).append(f"platform {spec.name}")
        for plugin, spec in self._announced("hyper_ckpt_stores"):
            announces.setdefault(plugin, []).extend(f"store {f'{s}://' if s else 'paths'}" for s in spec.schemes)
        for plugin, spec in self._announced("hyper_ckpt_codecs"):
            announces.setdefault(plugin, []).append(f"codecs for {', '.join(spec.modules)}")
        for plugin, spec in self._announced("hyper_ckpt_planners"):
            announces.setdefault(plugin, []).append(f"planner {spec.name}")
        for plugin, spec in self._announced("hyper_ckpt_events"):
            announces.setdefault(plugin, []).append(f"observer {spec.name}")
        out = []
        for name in sorted({*self._origins, *self.errors}):
            error = self.errors.get(name)
            text = None if error is None else f"{type(error).__name__}: {error}"
            out.append(PluginInfo(name, tuple(announces.get(name, ())), *self._origins.get(name, ("", "")), text))
        return out

    def _announce(self) -> None:
        self._platforms: dict[str, PlatformSpec] = {}
        self._stores: dict[str, StoreSpec] = {}
        self._clashes: dict[str, PluginError] = {}
        owners: dict[str, str] = {}
        for plugin, spec in self._announced("hyper_ckpt_platforms"):
            self._claim(owners, f"platform {spec.name!r}", plugin)
            self._platforms[spec.name] = spec
        for plugin, spec in self._announced("hyper_ckpt_stores"):
            for scheme in spec.schemes:
                self._claim(owners, f"the store for {scheme}://", plugin)
                self._stores[scheme] = spec
        self._observers: list[EventSpec] = [spec for _, spec in self._announced("hyper_ckpt_events")]
        self._codecs: list[hookspecs.CodecSpec] = [spec for _, spec in self._announced("hyper_ckpt_codecs")]
        self._planners: dict[str, hookspecs.PlannerSpec] = {}
        for plugin, spec in self._announced("hyper_ckpt_planners"):
            self._claim(owners, f"planner {spec.name!r}", plugin)
            self._planners[spec.name] = spec

    def _claim(self, owners: dict[str, str], what: str, plugin: str) -> None:
        """Two plugins for one thing: neither is used, lest the order of installation decide."""
        if what in owners:
            one, other = (f"{name!r} of {self._origins[name][0]}" for name in (owners[what], plugin))
            self._clashes[what] = PluginError(
                f"{what} is announced by two plugins, {one} and {other}: uninstall one of "
                f"them, or set {BLOCKED_VARIABLE} to its name"
            )
        owners[what] = plugin

    def _announced(self, hook: str) -> list[tuple[str, Any]]:
        """Plugin and value for all that plugins return for a hook; one that raises does not hide the others."""
        found: list[tuple[str, Any]] = []
        for implementation in getattr(self._plugins.hook, hook).get_hookimpls():
            try:
                specs = list(implementation.function())
                _check_specs(hook, specs)
                found += [(implementation.plugin_name, spec) for spec in specs]
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if refusal(error) is not None:
                    raise
                self.errors[implementation.plugin_name] = error
        return found

    def codecs(self) -> tuple[Codec, ...]:
        """The built-in codecs, and those of plugins whose frameworks are imported.

        Raises:
            PluginError: a plugin cannot load its codecs.
        """
        out = list(BUILTIN)
        for spec in self._codecs:
            if any(m in sys.modules for m in spec.modules):
                with _blaming(f"the codecs for {', '.join(spec.modules)}", "upgrade the plugin that has them"):
                    out += spec.load()
        return tuple(out)

    def observers(self) -> tuple[EventSpec, ...]:
        """Who wants to know how saves and loads get on."""
        return tuple(self._observers)

    def store(self, checkpoint_id: str) -> ByteStore:
        """Opens the store that claims this path or URL by its scheme.

        Raises:
            UnknownSchemeError: none does.
            PluginError: the plugin that does cannot be loaded.
        """
        scheme = urlsplit(checkpoint_id).scheme if "://" in checkpoint_id else ""
        what = f"the store for {scheme}://"
        if what in self._clashes:
            raise self._clashes[what]
        if scheme in self._stores:
            module, name = self._stores[scheme].target.split(":")
            with _blaming(what, "install what it needs, or upgrade the plugin that has it"):
                store: ByteStore = getattr(importlib.import_module(module), name)(checkpoint_id)
            return store
        known = sorted(filter(None, self._stores))
        raise UnknownSchemeError(
            f"no store for {scheme}:// ({checkpoint_id}). Installed schemes: {', '.join(known)}, and plain paths. "
            f"Install a plugin that brings it, or write one (docs/plugins.md, Stores){self._broken()}"
        )

    def platform(self, name: str) -> Platform:
        """Loads a platform by name.

        Raises:
            NoPlatformError: there is none of this name.
            PluginError: it failed to load.
        """
        spec = self.platform_spec(name)
        with _blaming(f"platform {name!r}", spec.install):
            found: object = spec.load()
            if not isinstance(found, Platform):
                raise TypeError(f"its load gave a {type(found).__name__}, which is no Platform")
            return found

    def platform_spec(self, name: str) -> PlatformSpec:
        """What a plugin announces of a platform.

        Raises:
            NoPlatformError: there is none of this name.
            PluginError: two plugins announce it.
        """
        if name not in self._platforms:
            raise NoPlatformError(
                f"no platform {name!r}. Installed: {', '.join(sorted(self._platforms))}{self._broken()}"
            )
        if (what := f"platform {name!r}") in self._clashes:
            raise self._clashes[what]
        return self._platforms[name]

    def save_planner(self, name: str) -> SavePlanner:
        """Makes the save planner that a plugin announces under this name.

        Raises:
            PluginError: none does, two do, or it cannot be made.
        """
        what, make = f"planner {name!r}", self._planner(name).save
        if make is None:
            raise PluginError(f"{what} is for loads only: save with another one")
        with _blaming(what, "upgrade the plugin that has it"):
            return make()

    def load_planner(self, name: str) -> LoadPlanner:
        """Makes the load planner that a plugin announces under this name.

        Raises:
            PluginError: none does, two do, or it cannot be made.
        """
        what, make = f"planner {name!r}", self._planner(name).load
        if make is None:
            raise PluginError(f"{what} is for saves only: load with another one, or with none")
        with _blaming(what, "upgrade the plugin that has it"):
            return make()

    def _planner(self, name: str) -> hookspecs.PlannerSpec:
        what = f"planner {name!r}"
        if what in self._clashes:
            raise self._clashes[what]
        if name not in self._planners:
            known = ", ".join(sorted(self._planners)) or "none"
            raise PluginError(f"no plugin announces {what}. Announced: {known}{self._broken()}")
        return self._planners[name]

    def choose(self, state: Any) -> Platform:
        """The platform for a state, where the caller names none.

        Raises:
            MixedFrameworksError: tensors of two frameworks, or two active frameworks.
            NoPlatformError, PluginError: it is not there, or does not load.
        """
        named = self.preferred or os.environ.get(PLATFORM_VARIABLE)
        if named:
            return self.platform(named)
        votes, active = self._votes(state, inside=False), list[str]()
        if not votes:
            active = [*self.process_groups()]
        if not votes and not active:
            votes = self._votes(state, inside=True)
            imported = set() if votes else self._imported(state)
            if len(imported) > 1:
                return self._undecided(tuple(sorted(imported)))
            votes = votes or imported
        if len(votes) > 1:
            raise MixedFrameworksError(
                f"the state holds tensors of {' and '.join(sorted(votes))}: save each "
                "framework's part by itself, or pass platform="
            )
        if votes:
            return self.platform(votes.pop())
        if len(active) > 1:
            raise MixedFrameworksError(
                f"{' and '.join(active)} both have a process group and the state "
                "has no tensors of either: pass platform="
            )
        return self.platform(active[0] if active else "numpy")

    def process_groups(self) -> dict[str, int]:
        """The world sizes of the process groups that frameworks have, by platform.

        Raises:
            PluginError: a plugin cannot say.
        """
        sizes = {spec.name: _world_size(spec) for spec in self._platforms.values()}
        return {name: size for name, size in sizes.items() if size > 0}

    def _votes(self, state: Any, inside: bool) -> set[str]:
        types = set(leaf_types(state, inside))
        return {spec.name for cls in types for spec in self._platforms.values() if _is_of(cls, spec)}

    def _imported(self, state: Any) -> set[str]:
        """The frameworks that the program has imported, if objects in the state may be given tensors of one."""
        if not any(map(has_state, leaf_types(state))):
            return set()
        return {spec.name for spec in self._platforms.values() if _is_imported(spec)}

    def _undecided(self, names: tuple[str, ...]) -> Platform:
        """The numpy platform, for as long as no object needs a tensor of a framework."""
        base = self.platform("numpy")
        if str(names) not in base.kept:
            base.kept[str(names)] = Platform(base.name, base.ranks, base.tensors, base.stager, _Undecided(names))
        found: Platform = base.kept[str(names)]
        return found

    def _broken(self) -> str:
        return "".join(f". Plugin {name!r} failed to load: {type(e).__name__}: {e}" for name, e in self.errors.items())


_SPECS: dict[str, tuple[type, tuple[str, ...]]] = {
    "hyper_ckpt_platforms": (PlatformSpec, ("name",)),
    "hyper_ckpt_stores": (StoreSpec, ("target",)),
    "hyper_ckpt_codecs": (hookspecs.CodecSpec, ()),
    "hyper_ckpt_planners": (hookspecs.PlannerSpec, ("name",)),
    "hyper_ckpt_events": (EventSpec, ("name",)),
}
"""What each hook returns a list of, and which fields of it are text."""


class _Undecided(Objects):
    """Which framework's tensors objects are to be given is not known."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def make(self, owner: Any, missing: MissingTensor) -> Any:
        made = super().make(owner, missing)
        if made is None and missing.form != "array":
            raise TargetError(
                f"a {type(owner).__qualname__} in the state needs a tensor that it does not have; the state has no "
                f"tensors, and {' and '.join(self._names)} are imported: pass platform="
            )
        return made


def _check_specs(hook: str, specs: list[Any]) -> None:
    """Refuses what a hook must not return."""
    kind, texts = _SPECS[hook]
    for spec in specs:
        if not isinstance(spec, kind):
            raise PluginError(f"{hook} returned a {type(spec).__name__} where a {kind.__name__} is wanted")
        for name in texts:
            if not isinstance(getattr(spec, name), str):
                raise PluginError(f"{hook} returned a {kind.__name__} whose {name} is no text")
        lists = [getattr(spec, name, ()) for name in ("modules", "schemes")]
        if any(isinstance(each, str) or not all(isinstance(text, str) for text in each) for each in lists):
            raise PluginError(f"{hook} returned a {kind.__name__} whose modules or schemes are no list of texts")


def _world_size(spec: PlatformSpec) -> int:
    with _blaming(f"platform {spec.name!r}", spec.install):
        return spec.active()


def _is_imported(spec: PlatformSpec) -> bool:
    own = getattr(spec.load, "__module__", "").partition(".")[0]  # the plugin, which is here in any case
    return any(module in sys.modules and module != own for module in spec.modules)


def _check_contract(plugin: Any, origin: tuple[str, str]) -> None:
    """Refuses a plugin that was written for other contracts than this release has."""
    version = getattr(plugin, "CONTRACT_VERSION", None)
    if version != hookspecs.CONTRACT_VERSION:
        raise PluginError(
            f"{' '.join(origin)} was written for version {version} of the plugin contracts, this release of hyper-ckpt "
            f"has {hookspecs.CONTRACT_VERSION}: install releases of both that fit (see CONTRACT_VERSION in its module)"
        )


@contextlib.contextmanager
def _blaming(what: str, remedy: str) -> Iterator[None]:
    """Whatever a plugin raises, its user gets one of our errors, with the cause."""
    try:
        with system_errors(f"loading {what}"):
            yield
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"{what} cannot be loaded: {text}. Try: {remedy}") from error


@functools.cache
def registry() -> Registry:
    """The registry of this process, made on first use.

    Raises:
        StoreError: files of plugins cannot be opened now.
    """
    with system_errors("looking for plugins"):
        require_files()
        return Registry()


def use(platform_name: str | None) -> None:
    """Chooses the platform of all later calls that name none; None takes the choice back.

    Raises:
        NoPlatformError, PluginError: there is no such platform, or it does not load.
    """
    if platform_name is not None:
        registry().platform(platform_name)
    registry().preferred = platform_name


def _is_of(cls: type, spec: PlatformSpec) -> bool:
    return any(base.__module__.partition(".")[0] in spec.modules for base in cls.__mro__)


_HOLDERS = (Mapping, list, tuple, deque, PerRank, ShardedTensor)


def leaf_types(value: Any, inside: bool = False) -> Iterator[type]:
    """The types of all leaves of a nested state; some may come twice.

    Args:
        inside: look into what objects give by state_dict().
    """
    stack, seen = [value], set()
    given: list[Any] = []  # kept, so that no number is given to a second object
    while stack:
        item = stack.pop()
        below: Collection[Any]
        if isinstance(item, Mapping) and (type(item) is dict or not is_stateful(item)):
            below = item.values()
        elif isinstance(item, list | tuple | deque):
            below = item
        elif namespace_of(type(item)) is not None:
            below = vars(item).values()
        elif isinstance(item, PerRank):
            below = [item.value]
        elif isinstance(item, ShardedTensor):
            below = [data for data, _ in item.shards]
        elif inside and is_stateful(item):
            below = []
            if id(item) not in seen:
                given.append(item.state_dict())
                below = given[-1:]
        else:
            yield type(item)
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        # Told by their types, of which there are few where tensors are very many.
        kinds = set(map(type, below))
        holders = {kind for kind in kinds if issubclass(kind, _HOLDERS) or namespace_of(kind) is not None}
        leaves = {kind for kind in kinds - holders if not (inside and has_state(kind))}
        yield from leaves
        if kinds != leaves:
            stack += [each for each in below if type(each) not in leaves]
