"""What an exception of a plugin was about, and where in the plugin it came from."""

from __future__ import annotations

import os
import traceback
from types import FrameType

import hyper_ckpt

_CORE = os.path.join(os.path.dirname(hyper_ckpt.__file__), "")
_SUITE = os.path.join(os.path.dirname(__file__), "")
# What nobody who writes a plugin can change: the core and Python itself.
_NOT_THEIRS = (_CORE, os.path.join(os.path.dirname(os.__file__), ""), "<")
_INPUT = ("dtype", "shape", "name", "start", "length", "members")


def where(error: BaseException) -> list[str]:
    """Lines for a message: the input of the check, and the place in the plugin, as far as each is known."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = []
    given = next(filter(None, (_input(frame) for frame, _ in reversed(frames))), "")
    if given:
        lines.append(f"with: {given}")
    theirs = [(frame, line) for frame, line in frames if _is_theirs(frame.f_code.co_filename)]
    ends = dict.fromkeys([*theirs[-1:], *theirs[:1]])  # the first is where the suite, or the core, called the plugin
    for word, (frame, line) in zip(("at", "through"), ends, strict=False):
        lines.append(f"{word}: {frame.f_code.co_filename}:{line}, in {_name(frame)}")
    return lines


def _is_theirs(file: str) -> bool:
    return not file.startswith(_NOT_THEIRS) or "site-packages" in file.removeprefix(_CORE)


def _input(frame: FrameType) -> str:
    """What a check of the suite was working on in this frame; empty where it is none."""
    if not frame.f_code.co_filename.startswith(_SUITE):
        return ""
    names = [name for name in _INPUT if name in frame.f_locals]
    return ", ".join(f"{name} {frame.f_locals[name]!r:.80}" for name in names)


def _name(frame: FrameType) -> str:
    owner = frame.f_locals.get("self")
    return f"{type(owner).__name__}.{frame.f_code.co_name}" if owner is not None else frame.f_code.co_name
