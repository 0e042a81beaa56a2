"""Codecs for values of the standard library: paths, exact numbers, UUIDs, buffers of bytes."""

from __future__ import annotations

import io
import pathlib
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hyper_ckpt.contracts.codec import Codec

_PATHS: dict[type[pathlib.PurePath], type[pathlib.PurePath]] = {
    # Saved as the first; loaded as the second where the first belongs to another operating system.
    pathlib.PurePosixPath: pathlib.PurePosixPath,
    pathlib.PureWindowsPath: pathlib.PureWindowsPath,
    pathlib.PosixPath: pathlib.PurePosixPath,
    pathlib.WindowsPath: pathlib.PureWindowsPath,
}


def _path_codec(cls: type[pathlib.PurePath], elsewhere: type[pathlib.PurePath]) -> Codec:
    is_foreign = issubclass(cls, pathlib.Path) and not isinstance(pathlib.Path(), cls)
    target = elsewhere if is_foreign else cls
    return Codec(
        f"pathlib.{cls.__name__}",
        type=cls,
        encode=lambda path: str(path).encode(errors="surrogatepass"),
        decode=lambda data: target(data.decode(errors="surrogatepass")),
    )


def _decode_fraction(data: bytes) -> Fraction:
    numerator, denominator = data.decode("ascii").split("/")
    return Fraction(int(numerator, 16), int(denominator, 16))


def _encode_fraction(value: Fraction) -> bytes:
    return f"{value.numerator:x}/{value.denominator:x}".encode()


def _encode_uuid(value: Any) -> bytes:
    return bytes(value.bytes)


def _encode_bytes_io(value: io.BytesIO) -> bytes:
    return f"{value.tell():x}\n".encode() + value.getbuffer()


def _decode_bytes_io(data: bytes) -> io.BytesIO:
    position, separator, contents = data.partition(b"\n")
    if not separator:
        raise ValueError("no position stands before the contents of a BytesIO")
    value = io.BytesIO(contents)
    value.seek(int(position, 16))
    return value


CODECS = (
    *(_path_codec(cls, elsewhere) for cls, elsewhere in _PATHS.items()),
    Codec("decimal.Decimal", Decimal, lambda value: str(value).encode(), lambda data: Decimal(data.decode("ascii"))),
    Codec("fractions.Fraction", Fraction, _encode_fraction, _decode_fraction),
    Codec("uuid.UUID", uuid.UUID, _encode_uuid, lambda data: uuid.UUID(bytes=data)),
    Codec("io.BytesIO", io.BytesIO, _encode_bytes_io, _decode_bytes_io),
)
