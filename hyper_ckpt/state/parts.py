"""Tensors that are made of others: what of them must be equal."""

from __future__ import annotations

from hyper_ckpt.state.digests import canonical
from hyper_ckpt.state.tree import CodecNode, DictNode, Node, PartsNode, SequenceNode, encode_tree


def differing_parts(one: PartsNode, other: PartsNode) -> str | None:
    """What differs between two such tensors, in words for `one` and `other`; None: nothing.

    Of the class only the package and the name count: classes move between modules of one package.
    """
    if _class(one.kind) != _class(other.kind):
        return f"{one.kind} and {other.kind}"
    if set(one.k) != set(other.k):
        return f"parts {', '.join(sorted(one.k))} and {', '.join(sorted(other.k))}"
    return _differing(one.context, other.context)


def _class(kind: str) -> tuple[str, str]:
    module, _, name = kind.rpartition(".")
    return module.partition(".")[0], name


def _differing(one: Node, other: Node) -> str | None:
    if isinstance(one, DictNode) and isinstance(other, DictNode) and set(one.k) == set(other.k):
        others = dict(zip(other.k, other.v, strict=True))
        for key, value in zip(one.k, one.v, strict=True):
            inner = _differing(value, others[key])
            if inner is not None:
                return f"{key} {inner}"
        return None
    if encode_tree(canonical(one)) == encode_tree(canonical(other)):
        return None
    return f"{_text(one):.100} and {_text(other):.100}"


def _text(node: Node) -> str:
    if isinstance(node, SequenceNode):
        return f"[{', '.join(map(_text, node.v))}]"
    if isinstance(node, CodecNode):
        return f"{node.name}({ascii(node.v)[2:-1]})"
    return encode_tree(node).decode()
