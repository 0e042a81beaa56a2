"""What a codec supplies: one type of value, to bytes and back. Knows nothing of trees, names or files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Codec:
    """Stores values of one type that are neither tensors nor plain Python values.

    Args:
        name: written into the checkpoint and looked up by it: unique, and never given another meaning.
        type: the type it stores, and with `subclasses` every type derived from it that has no codec of its own.
        encode: the value as bytes; equal values should give equal bytes, since ranks are compared by them.
        decode: the value again. The bytes may be damaged or hostile: it may raise anything, but must run
            no code and import no module that they name.
        subclasses: whether derived types are stored too. `encode` then has to store which one it is.
        assign: copies the state of a decoded value (second) into the target's own object (first) of the same
            exact type, so that others who hold that object see the load. None: the object is replaced.
    """

    name: str
    type: type[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    subclasses: bool = False
    assign: Callable[[Any, Any], None] | None = None
