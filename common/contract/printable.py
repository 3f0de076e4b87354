"""Text from clients and peers, made safe for a line of a log or an error: bounded, and on one line."""

from __future__ import annotations


def printable(text: str, max_chars: int) -> str:
    """`text` cut to about `max_chars` characters, with line ends and other control characters escaped."""
    cut = text[:max_chars]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return cut if len(text) <= max_chars else f"{cut}… ({len(text)} characters)"
