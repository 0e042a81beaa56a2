"""Object names: what a store accepts, and how temporary objects are recognised."""

from __future__ import annotations

import re
import secrets

from hyper_ckpt.errors import StoreError

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}\Z")


def check_name(name: str) -> str:
    """Returns `name` if it is a plain name below the root.

    Raises:
        StoreError: it is absolute, leaves the root, has an empty part, or cannot be encoded.
    """
    if not name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise StoreError(f"{name!r} is not an object name: parts must be non-empty, and none may be '.' or '..'")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StoreError(f"{name!r} is not an object name: it cannot be encoded as UTF-8") from None
    return name


def is_name(name: str) -> bool:
    """Whether `check_name` accepts it."""
    try:
        check_name(name)
    except StoreError:
        return False
    return True


def temporary_name(name: str) -> str:
    """A fresh name beside `name`, for bytes that will be renamed to it."""
    return f"{name}.tmp-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Whether `name` was made by `temporary_name`: after a crash it is a leftover, whatever it holds."""
    return _TEMPORARY.search(name) is not None
