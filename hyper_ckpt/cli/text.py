"""Text for a terminal: nothing in it that a terminal would obey, and no line that is too long."""

from __future__ import annotations

import json
import shutil
import textwrap
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from hyper_ckpt.text import clean

MIN_WIDTH = 40
MIN_FLEXIBLE, MIN_COLUMN = 24, 8
GAP = "  "


def width() -> int:
    """Columns of the terminal, or of COLUMNS; 80 where neither says."""
    return max(shutil.get_terminal_size((80, 24)).columns, MIN_WIDTH)


def cells(text: str) -> int:
    """Columns that `text` takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def middle(text: str, room: int) -> str:
    """`text`, its middle left out if it takes more than `room` columns."""
    if cells(text) <= room:
        return text
    head = _fitting(text, (room - 1) // 2)
    return f"{head}…{_fitting(text[::-1], room - 1 - cells(head))[::-1]}"


def shortened(text: str, room: int) -> str:
    """`text`, its end left out if it takes more than `room` columns."""
    return text if cells(text) <= room else f"{_fitting(text, room - 1)}…"


def _fitting(text: str, room: int) -> str:
    """The longest start of `text` that takes at most `room` columns."""
    start = text[: max(room, 0)]
    while cells(start) > room:
        start = start[:-1]
    return start


def paragraph(text: str, indent: str = "") -> str:
    """`text` wrapped between words; a name that is longer than a line stays whole."""
    return textwrap.fill(
        clean(text),
        width(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def count(number: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """About how long, in one unit."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (1e10, 86_400, "d")):
        if seconds < limit:
            return f"{max(seconds, 0) / unit:.0f} {name}"
    return "?"


def moment(seconds: float) -> str:
    """A time in the zone of the reader."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s since 1970"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in brief: 0-3,7."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def table(header: Sequence[str], rows: Collection[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Lines of a table no wider than the terminal. What does not fit is left out in the middle of cells, of the
    first column before the others.

    Args:
        right: numbers of the columns that are aligned to the right.
    """
    cleaned = [header, *([clean(cell) for cell in row] for row in rows)]
    widths = [max(cells(row[i]) for row in cleaned) for i in range(len(header))]
    _narrow(widths, width() - len(GAP) * (len(header) - 1))
    for row in cleaned:
        yield GAP.join(_padded(c, w, i in right) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()


def _narrow(widths: list[int], room: int) -> None:
    widths[0] -= max(min(sum(widths) - room, widths[0] - MIN_FLEXIBLE), 0)
    while sum(widths) > room and max(widths) > MIN_COLUMN:
        widest = widths.index(max(widths))
        widths[widest] -= 1


def _padded(text: str, room: int, right: bool) -> str:
    text = middle(text, room)
    padding = " " * (room - cells(text))
    return padding + text if right else text + padding


def as_json(value: Any) -> str:
    """JSON in ASCII, one value to a line, so that nothing in it reaches a terminal as it is."""
    return json.dumps(value, allow_nan=False)
