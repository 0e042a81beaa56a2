"""How names and amounts are shown to people."""

from __future__ import annotations


def clean(text: str) -> str:
    """`text` with everything escaped that is no visible character: controls, bidirectional marks, surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def clean_lines(text: str) -> str:
    """`text` cleaned line by line: of all controls only line ends remain."""
    return text if text.isprintable() else "\n".join(map(clean, text.split("\n")))


def size(nbytes: int) -> str:
    """Bytes, in three digits and a unit."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if amount < 1000 or (amount < 1023.5 and unit == "B"):
            break
        amount, unit = amount / 1024, larger
    return (
        f"{nbytes} B" if unit == "B" else f"{amount:.{0 if amount >= 99.95 else 1 if amount >= 9.995 else 2}f} {unit}"
    )
