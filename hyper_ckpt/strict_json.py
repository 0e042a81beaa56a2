"""JSON in which no object has a key twice."""

from __future__ import annotations

import json
from typing import Any


def refuse_duplicates(data: bytes | memoryview, again: bytes) -> None:
    """Refuses JSON that has a key twice in one object: decoders keep the last in silence.

    Args:
        data: JSON that was decoded.
        again: what came of it, encoded: mostly the same bytes, which proves that nothing was lost.

    Raises:
        ValueError: there is such a key; names it.
        RecursionError: it is nested too deeply to be looked through.
    """
    if again != data:
        json.loads(bytes(data), object_pairs_hook=_distinct, parse_int=str, parse_float=str, parse_constant=str)


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"an object has the key {key!r:.100} twice")
        seen.add(key)
