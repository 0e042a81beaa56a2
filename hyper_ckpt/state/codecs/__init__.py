"""The codecs that come with the library. Their bytes are part of the format: never change what one writes."""

from __future__ import annotations

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.state.codecs import generators, numpy_values, standard, times

BUILTIN: tuple[Codec, ...] = (*standard.CODECS, *times.CODECS, *numpy_values.CODECS, *generators.CODECS)
"""Paths, Decimal, Fraction, UUID, BytesIO, dates and times, numpy scalars and dtypes, random generators."""
