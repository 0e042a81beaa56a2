"""What a user writes for a place on local disks, as an absolute path."""

from __future__ import annotations

import os
from urllib.parse import unquote

from hyper_ckpt.errors import StoreError

FILE_SCHEME = "file://"


def local_path(path: str | os.PathLike[str]) -> str:
    """The absolute path that a path or `file://` URL means.

    `~` and `~user` at its beginning are a home directory, as in a shell; `./~` is a folder of that name. A URL's path
    is absolute, percent-encoding is undone, and its host is empty or `localhost`.

    Raises:
        StoreError: it names no directory.
    """
    text = os.fspath(path)
    if not text:
        raise StoreError("an empty path names no directory; use '.' for the current one")
    if text[: len(FILE_SCHEME)].lower() == FILE_SCHEME:
        text = _of_url(text)
    elif text.startswith("~"):
        text = _in_home(text)
    if "\0" in text:
        raise StoreError(f"{text!r} names no directory: a path cannot hold a NUL character")
    return os.path.abspath(text)


def _of_url(url: str) -> str:
    host, slash, path = url[len(FILE_SCHEME) :].partition("/")
    if not slash or host.lower() not in ("", "localhost"):
        raise StoreError(
            f"{url!r} names no directory of this machine: write file:///absolute/path, or the path as it is"
        )
    return "/" + unquote(path, errors="surrogateescape")


def _in_home(path: str) -> str:
    user = path.partition("/")[0]
    expanded = os.path.expanduser(path)
    # With HOME set to nothing, "~/x" would become "/x".
    if expanded.startswith("~") or not os.path.isabs(expanded) or (user == "~" and os.environ.get("HOME") == ""):
        why = "HOME is set to no absolute path" if user == "~" else f"there is no user {user[1:]!r}"
        raise StoreError(
            f"{path!r} names no directory: {why}. Write the whole path, or ./{user} for a folder of that name"
        )
    return expanded
