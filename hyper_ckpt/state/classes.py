"""Classes that a checkpoint names: found where the program has imported them, never imported, never run."""

from __future__ import annotations

import enum
import functools
import operator
import sys
from collections import namedtuple
from types import SimpleNamespace
from typing import Any, Literal

from hyper_ckpt.errors import ManifestError, UnsupportedTypeError


def find_class(module: str, qualname: str) -> type[Any] | None:
    """The class of that name in an imported module, None if there is none.

    Looks into namespaces themselves: getattr would run a module's `__getattr__`, and vars() runs a module that
    importlib.util.LazyLoader made; both may import.
    """
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        try:
            found = object.__getattribute__(found, "__dict__").get(part)
        except AttributeError:
            return None
    return found if isinstance(found, type) else None


def is_namedtuple(value: Any) -> bool:
    """Whether all that `value` holds are the fields of a namedtuple."""
    cls = type(value)
    return issubclass(cls, tuple) and _fields(cls) is not None and not getattr(value, "__dict__", None)


def is_stateful(value: Any) -> bool:
    """Whether a value is an object with state_dict and load_state_dict."""
    # Asked of the class: an object may answer to any attribute, and a class is not itself in a state.
    return not isinstance(value, type) and has_state(type(value))


def has_state(kind: type) -> bool:
    """Whether objects of a class have state_dict and load_state_dict."""
    return all(callable(getattr(kind, each, None)) for each in ("state_dict", "load_state_dict"))


def namedtuple_class(module: str, qualname: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The namedtuple class of that name with these fields; a new one where the program has none.

    Raises:
        ManifestError: no namedtuple has such fields.
    """
    found = find_class(module, qualname)
    if found is not None and issubclass(found, tuple) and _fields(found) == fields:
        return found
    return _new_namedtuple(module, qualname.rpartition(".")[2], fields)


@functools.lru_cache(maxsize=256)
def _new_namedtuple(module: str, name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    try:
        # Checks that all are identifiers before it makes code of them. `rename` is how fields got names like "_1".
        cls = namedtuple(name, fields, rename=True)  # type: ignore[misc]
    except (ValueError, TypeError) as error:
        raise ManifestError(f"{name!r:.100} is not the name of a namedtuple: {error}") from error
    if cls._fields != fields:
        raise ManifestError(f"{fields!r:.200} are not the fields of a namedtuple")
    cls.__module__ = module
    return cls


def _fields(cls: type[Any]) -> tuple[str, ...] | None:
    fields = getattr(cls, "_fields", None)
    is_fields = isinstance(fields, tuple) and all(type(field) is str for field in fields)
    return fields if is_fields else None


def namespace_of(kind: type) -> Literal["argparse", "types"] | None:
    """Which class of namespaces this is, if it is one; a class derived from one is not."""
    if kind is SimpleNamespace:
        return "types"
    argparse = sys.modules.get("argparse")
    return "argparse" if argparse is not None and kind is argparse.Namespace else None


def make_namespace(of: Literal["argparse", "types"], attributes: dict[Any, Any]) -> Any:
    """A namespace.

    Raises:
        ManifestError: what stands for an attribute's name is no string.
    """
    if not all(type(name) is str for name in attributes):
        raise ManifestError("a namespace of the saved state has an attribute whose name is no string")
    if of == "types":
        return SimpleNamespace(**attributes)
    from argparse import Namespace  # only programs that have one pay for it

    made = Namespace()
    vars(made).update(attributes)
    return made


def is_bare_sequence(value: Any) -> bool:
    """Whether all that an instance of a class derived from list or tuple holds are its items."""
    if not isinstance(value, list | tuple):
        return False
    kind = type(value)
    # Those of C may hold more than their items: time.struct_time has a time zone.
    extra = hasattr(kind, "n_sequence_fields") or any(vars(each).get("__slots__") for each in kind.__mro__)
    return not extra and not getattr(value, "__dict__", None)


def member_name(value: enum.Enum) -> str:
    """How a member is found again by `find_member`: its name, or names joined with "|" for a combination of flags.

    Raises:
        UnsupportedTypeError: it can't be found again.
    """
    cls = type(value)
    name = value._name_
    if cls.__members__.get(name) is not value:
        name = "|".join(each for each, member in cls.__members__.items() if _is_bit_of(member, value))
    if find_class(cls.__module__, cls.__qualname__) is cls and _member(cls, name) is value:
        return name
    raise UnsupportedTypeError(
        f"{value!r} cannot be found again by name when it is loaded: define {cls.__qualname__} at the top level of "
        "its module, or store the member's value"
    )


def find_member(module: str, qualname: str, name: str) -> enum.Enum:
    """The member of an Enum class that the program has imported.

    Raises:
        UnsupportedTypeError: the class is not there; says what to import.
        ManifestError: the class has no such member.
    """
    cls = find_class(module, qualname)
    if cls is None or not issubclass(cls, enum.Enum):
        raise UnsupportedTypeError(
            f"the checkpoint holds a member of Enum {qualname!r:.100} of module {module!r:.100}, which is not there: "
            "import that module before loading (a checkpoint never imports anything by itself)"
        )
    member = _member(cls, name)
    if member is None:
        raise ManifestError(f"Enum {module}.{qualname} has no member {name!r:.100}")
    return member


def _is_bit_of(member: enum.Enum, value: enum.Enum) -> bool:
    bits = member._value_
    is_bit = isinstance(value, enum.Flag) and isinstance(bits, int) and bits > 0 and bits & (bits - 1) == 0
    return is_bit and bits & value._value_ != 0


def _member(cls: type[enum.Enum], name: str) -> enum.Enum | None:
    members = cls.__members__
    if name in members:
        return members[name]
    if not issubclass(cls, enum.Flag):
        return None
    parts = name.split("|") if name else []
    if not all(part in members for part in parts):
        return None
    return functools.reduce(operator.or_, (members[part] for part in parts), cls(0))
