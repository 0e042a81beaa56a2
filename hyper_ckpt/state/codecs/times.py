"""Codecs for dates and times. Fields are kept as they are, fold and time zone included, and never converted."""

from __future__ import annotations

import re
import zoneinfo
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Any

import msgspec

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.errors import UnsupportedTypeError


class _Zone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time zone by its key, or else a fixed offset that may have a name."""

    key: str | None = None
    offset: tuple[int, int, int] | None = None
    name: str | None = None


class _Moment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fields: tuple[int, ...]
    fold: int
    zone: _Zone | None


_KEY = re.compile(r"[\w+-]+(/[\w+-]+)*", re.ASCII)


def _fields(delta: timedelta) -> tuple[int, int, int]:
    return delta.days, delta.seconds, delta.microseconds


def _zone_of(value: tzinfo | None) -> _Zone | None:
    if value is None:
        return None
    if type(value) is zoneinfo.ZoneInfo and value.key is not None:
        return _Zone(key=value.key)
    if type(value) is timezone:
        name = value.tzname(None)
        offset = value.utcoffset(None)
        return _Zone(offset=_fields(offset), name=None if name == timezone(offset).tzname(None) else name)
    raise UnsupportedTypeError(
        f"time zone {value!r} cannot be stored: use datetime.timezone, or a zoneinfo.ZoneInfo that has a key"
    )


def _tzinfo_of(zone: _Zone | None) -> tzinfo | None:
    if zone is None:
        return None
    if zone.key is not None:
        # ZoneInfo opens a file of that name: nothing but a zone's name may reach it.
        if not _KEY.fullmatch(zone.key):
            raise ValueError(f"{zone.key!r:.100} is not the key of a time zone")
        return zoneinfo.ZoneInfo(zone.key)
    if zone.offset is None:
        raise ValueError("a time zone without key and offset")
    offset = timedelta(*zone.offset)
    return timezone(offset) if zone.name is None else timezone(offset, zone.name)


def _encode_datetime(value: datetime) -> bytes:
    fields = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    return msgspec.json.encode(_Moment(fields, value.fold, _zone_of(value.tzinfo)))


def _decode_datetime(data: bytes) -> datetime:
    moment = msgspec.json.decode(data, type=_Moment)
    year, month, day, hour, minute, second, microsecond = moment.fields
    zone = _tzinfo_of(moment.zone)
    return datetime(year, month, day, hour, minute, second, microsecond, tzinfo=zone, fold=moment.fold)


def _encode_time(value: time) -> bytes:
    fields = (value.hour, value.minute, value.second, value.microsecond)
    return msgspec.json.encode(_Moment(fields, value.fold, _zone_of(value.tzinfo)))


def _decode_time(data: bytes) -> time:
    moment = msgspec.json.decode(data, type=_Moment)
    hour, minute, second, microsecond = moment.fields
    return time(hour, minute, second, microsecond, tzinfo=_tzinfo_of(moment.zone), fold=moment.fold)


def _decode_date(data: bytes) -> date:
    year, month, day = msgspec.json.decode(data, type=tuple[int, int, int])
    return date(year, month, day)


def _decode_timedelta(data: bytes) -> timedelta:
    return timedelta(*msgspec.json.decode(data, type=tuple[int, int, int]))


def _encode_zone(value: tzinfo) -> bytes:
    return msgspec.json.encode(_zone_of(value))


def _decode_zone(data: bytes) -> Any:
    return _tzinfo_of(msgspec.json.decode(data, type=_Zone))


CODECS = (
    Codec("datetime.datetime", datetime, _encode_datetime, _decode_datetime),
    Codec("datetime.date", date, lambda value: msgspec.json.encode((value.year, value.month, value.day)), _decode_date),
    Codec("datetime.time", time, _encode_time, _decode_time),
    Codec("datetime.timedelta", timedelta, lambda value: msgspec.json.encode(_fields(value)), _decode_timedelta),
    Codec("datetime.tzinfo", tzinfo, _encode_zone, _decode_zone, subclasses=True),
)
