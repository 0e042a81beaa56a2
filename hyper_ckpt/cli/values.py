"""Values that are no tensors, as text. Nothing is rebuilt: no class is looked up, no pickle opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from hyper_ckpt.cli.text import count, ranges
from hyper_ckpt.state import BUILTIN
from hyper_ckpt.state.scalars import complex_of, float_of, str_of
from hyper_ckpt.state.tree import (
    BlobNode,
    ByteArrayNode,
    BytesNode,
    CodecNode,
    ComplexNode,
    CounterNode,
    DefaultDictNode,
    DequeNode,
    DictNode,
    EnumNode,
    FloatNode,
    FrozenSetNode,
    IntNode,
    KeyedNode,
    ListNode,
    NamedTupleNode,
    NamespaceNode,
    Node,
    OrderedDictNode,
    PerRankNode,
    PickleNode,
    RangeNode,
    RanksNode,
    RawNode,
    SequenceNode,
    SetNode,
    SliceNode,
    StatefulNode,
    StrNode,
    TensorNode,
    TupleNode,
    children,
    is_plain,
    unwrap,
)
from hyper_ckpt.text import size

_MAX_DIGITS = 1000
"""Hexadecimal digits up to which an int is shown as decimal: Python limits the conversion."""
_SHOWN = ("numpy.generic", "numpy.str_", "decimal.Decimal", "uuid.UUID", "pathlib.", "datetime.date", "datetime.time")
"""Codecs of values whose repr is short and says all."""


@dataclass(frozen=True)
class ValueFacts:
    """A value. `kind` is as in `BytesStorageMetadata`; `value` is what JSON can say of it exactly, else None."""

    name: str
    kind: str
    type: str
    repr: str
    value: Any


def describe_values(tree: Node) -> list[ValueFacts]:
    """All values of a state, in its order; a list of plain values is one."""
    return list(_walk(tree, None))


def describe_value(node: Node, name: str | None) -> ValueFacts:
    """One value, whatever it is."""
    kinds: dict[type, str] = {PerRankNode: "per_rank", BlobNode: "blob", RanksNode: "ranks"}
    return ValueFacts(
        "" if name is None else name, kinds.get(type(node), "plain"), _type(node), _text(node), _json(node)
    )


def _walk(node: Node, name: str | None) -> Iterator[ValueFacts]:
    node = unwrap(node)
    if isinstance(node, TensorNode):
        return
    if isinstance(node, KeyedNode | SequenceNode) and node.v and not _is_line(node):
        for child_name, child in children(node, name):
            yield from _walk(child, child_name)
    elif name is not None:
        yield describe_value(node, name)


def _is_line(node: Node) -> bool:
    """Whether a list or the like holds plain values only."""
    if isinstance(node, SequenceNode):
        return all(map(_is_line, node.v))
    return not isinstance(node, KeyedNode | TensorNode | PerRankNode | BlobNode | RanksNode | StatefulNode | RawNode)


def _type(node: Node | KeyedNode | SequenceNode) -> str:
    if isinstance(node, BlobNode):
        return node.kind or "value"
    if isinstance(node, CodecNode):
        return node.name
    if isinstance(node, EnumNode | NamedTupleNode):
        return f"{node.module}.{node.name}"
    return str(node.__struct_config__.tag) if isinstance(node, msgspec.Struct) else type(node).__name__


def _json(node: Node) -> Any:
    try:
        return _exact(node)
    except TypeError:
        return None


def _exact(node: Node) -> Any:
    if isinstance(node, ListNode | TupleNode):
        return [_exact(item) for item in node.v]
    if isinstance(node, KeyedNode) and not any("~" in part for part in node.k):
        return dict(zip(node.k, map(_exact, node.v), strict=True))
    if isinstance(node, IntNode) and len(node.v) <= _MAX_DIGITS:
        return int(node.v, 16)
    if isinstance(node, msgspec.Struct):
        raise TypeError("JSON has no such value")
    return node


def _text(node: Node) -> str:
    write = _WRITERS.get(type(node))
    if isinstance(node, KeyedNode | SequenceNode) and not is_plain(node):
        return f"{_type(node)} of {count(len(node.v), 'item')}"
    return repr(node) if write is None else write(node)


def _keyed(node: KeyedNode) -> str:
    # Keys other than strings stand in their escaped form.
    keys = [part if "~" in part else repr(part) for part in node.k]
    return f"{{{', '.join(f'{k}: {_text(v)}' for k, v in zip(keys, node.v, strict=True))}}}"


def _namespace(node: NamespaceNode) -> str:
    kind = "SimpleNamespace" if node.of == "types" else "Namespace"
    return f"{kind}({', '.join(f'{k}={_text(v)}' for k, v in zip(node.k, node.v, strict=True))})"


def _sequence(left: str, right: str) -> Callable[[Any], str]:
    return lambda node: f"{left}{', '.join(map(_text, node.v))}{',' * (left == '(' and len(node.v) == 1)}{right}"


def _namedtuple(node: NamedTupleNode) -> str:
    return f"{node.name}({', '.join(f'{k}={_text(v)}' for k, v in zip(node.fields, node.v, strict=True))})"


def _int(node: IntNode) -> str:
    digits = node.v.lstrip("-")
    return str(int(node.v, 16)) if len(digits) <= _MAX_DIGITS else f"{'-' * (node.v[0] == '-')}0x{digits}"


def _codec(node: CodecNode) -> str:
    if node.name.startswith(_SHOWN):
        for codec in BUILTIN:
            if codec.name == node.name:
                try:
                    value = codec.decode(node.v)
                    # numpy 2 would say np.float32(1.5).
                    return str(value) if node.name == "numpy.generic" else repr(value)
                except Exception:  # bytes from anywhere: what cannot be decoded is not shown
                    break
    return f"<{node.name}, {size(len(node.v))}>"


def _blob(node: BlobNode) -> str:
    what = node.kind or "value"
    items = "" if node.count is None else f" of {count(node.count, 'item')}"
    where = "" if node.rank is None else f", in a file of rank {node.rank}"
    return f"<large {what}{items}, {size(node.size)}{where}>"


def _ranks(node: RanksNode) -> str:
    return "; ".join(f"{_text(variant)} on {'rank' if len(r) == 1 else 'ranks'} {ranges(r)}" for r, variant in node.v)


_WRITERS: dict[type, Callable[[Any], str]] = {
    IntNode: _int,
    FloatNode: lambda node: repr(float_of(node)),
    ComplexNode: lambda node: repr(complex_of(node)),
    StrNode: lambda node: repr(str_of(node)),
    BytesNode: lambda node: repr(node.v),
    ByteArrayNode: lambda node: f"bytearray({node.v!r})",
    RangeNode: lambda node: f"range({', '.join(map(_text, node.v))})",
    SliceNode: lambda node: f"slice({', '.join(map(_text, node.v))})",
    SetNode: lambda node: f"{{{', '.join(map(_text, node.v))}}}" if node.v else "set()",
    FrozenSetNode: lambda node: f"frozenset({{{', '.join(map(_text, node.v))}}})",
    ListNode: _sequence("[", "]"),
    DequeNode: _sequence("deque([", "])"),
    TupleNode: _sequence("(", ")"),
    **dict.fromkeys((DictNode, OrderedDictNode, CounterNode, DefaultDictNode), _keyed),
    NamedTupleNode: _namedtuple,
    NamespaceNode: _namespace,
    EnumNode: lambda node: f"{node.name}.{node.member}",
    CodecNode: _codec,
    PickleNode: lambda node: f"<pickle, {size(len(node.v))}>",
    BlobNode: _blob,
    RanksNode: _ranks,
    PerRankNode: lambda node: "<one of each rank>",
    StatefulNode: lambda node: _text(node.v),
    TensorNode: lambda node: "<tensor>" if node.rank is None else f"<tensor ~r{node.rank}>",
    RawNode: lambda node: f"<tensor {node.dtype} {list(node.shape)}>",
}
