"""Values of MindSpore that are neither tensors nor plain Python values."""

from __future__ import annotations

from typing import Any

import mindspore.common.dtype as mstype

from hyper_ckpt.contracts.codec import Codec

# One class per kind of number, so a base of all: the value's text says which one it is.
_TYPE = mstype.typing.Type
_BY_TEXT = {str(value): value for value in vars(mstype).values() if isinstance(value, mstype.typing.Number)}


def _encode_dtype(value: Any) -> bytes:
    text = str(value)
    if _BY_TEXT.get(text) != value:
        raise ValueError(f"{text} is not a dtype of tensors, which is all that is stored of MindSpore's types")
    return text.encode()


def _decode_dtype(data: bytes) -> Any:
    found = _BY_TEXT.get(data.decode("ascii"))
    if found is None:
        raise ValueError(f"this release of MindSpore has no dtype {data[:80]!r}")
    return found


CODECS = (Codec("mindspore.dtype", _TYPE, _encode_dtype, _decode_dtype, subclasses=True),)
