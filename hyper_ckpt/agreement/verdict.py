"""Votes and verdicts: how an error of one rank becomes the same error on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from hyper_ckpt import errors
from hyper_ckpt.errors import RankFailedError, RankTimeoutError, StateMismatchError
from hyper_ckpt.text import clean, clean_lines

MAX_ERROR_TEXT = 4096
MAX_RANKS_NAMED = 3


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """How a step ended for everybody: a value, or an error with its class, message and ranks."""

    value: bytes = b""
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()


class Vote(msgspec.Struct, frozen=True, array_like=True):
    value: bytes = b""
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()


def names(ranks: Sequence[int]) -> str:
    """Ranks as words."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def is_interrupt(error: BaseException | None) -> bool:
    """Whether it ends the process, like Ctrl-C, and must not become an error that somebody catches."""
    return error is not None and not isinstance(error, Exception)


def vote_of(error: BaseException) -> Vote:
    """The vote of a rank that cannot go on."""
    name, text = type(error).__name__, clean_lines(str(error))
    if class_of(name) is type(error):
        return Vote(error=name, message=text[:MAX_ERROR_TEXT], ranks=getattr(error, "ranks", ()))
    return Vote(error="RankFailedError", message=f"{name}: {text}"[:MAX_ERROR_TEXT])


T = TypeVar("T")


def unpack(data: bytes, kind: type[T], sender: int) -> T:
    """The message that a rank has sent.

    Raises:
        RankFailedError: it is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        text = f"rank {sender} sent no valid message ({clean(str(error))}): do all ranks run the same version?"
        raise RankFailedError(text, [sender]) from error


def report(step: str, bad: dict[int, Vote]) -> Verdict:
    """The report of the first failing ranks; its class is the first one's."""
    shown = list(bad.items())[:MAX_RANKS_NAMED]
    messages = list(dict.fromkeys(v.message for _, v in shown))
    if len(messages) == 1:
        text = f"{names(list(bad))}: {messages[0]}"
    else:
        text = "; ".join(f"rank {r}: {v.message}" for r, v in shown)
        text += f"; and {len(bad) - len(shown)} more ranks" if len(bad) > len(shown) else ""
    first = shown[0][1]
    return Verdict(error=first.error, message=f"{step}: {text}", ranks=first.ranks or tuple(bad))


def class_of(name: str) -> type[Exception]:
    """The class that an error of this name has on every rank: itself if users know it, else RankFailedError."""
    kind: Any = {"ValueError": ValueError, "TypeError": TypeError}.get(name) or getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RankFailedError


def rebuild(verdict: Verdict, own: BaseException | None) -> Exception:
    """The error that a verdict stands for; `own` is this rank's, of which it keeps what does not travel."""
    kind, message = class_of(verdict.error), clean_lines(verdict.message)
    if issubclass(kind, RankFailedError | RankTimeoutError):
        return kind(message, verdict.ranks)
    if issubclass(kind, StateMismatchError):
        return kind(message, own.problems if isinstance(own, StateMismatchError) else ())
    return kind(message)
