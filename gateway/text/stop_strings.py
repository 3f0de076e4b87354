"""Finds stop strings as the text arrives, however it is cut into pieces.

A match is complete at the first character at which the text so far ends with a stop string; if several end there, the
longest counts. The result depends on the text alone, not on its cut into tokens. Text is held back only while it could
be the beginning of a stop string.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopTables:
    """Stop strings, the longest first, with the table of each one's automaton. All choices of a request share them."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not contain empty strings, nor any of more than 65,535 characters."""
        assert all(stops)
        self.stops = tuple(sorted(stops, key=len, reverse=True))
        self.fallbacks = [_fallbacks(stop) for stop in self.stops]


class StopStrings:
    """Passes text on up to the first stop string (one Knuth-Morris-Pratt automaton for each string)."""

    def __init__(self, tables: StopTables) -> None:
        self._stops = tables.stops
        self._fallbacks = tables.fallbacks
        self._matched = [0] * len(self._stops)
        """For each stop string, how many of its leading characters the text so far ends with."""
        self._held = ""
        """The end of the text that is held back; its length is that of the longest partial match."""

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """Take more text. Returns the text to pass on, and the stop string that ended it; if there is one, do not call
        again. Unless `may_end`, a stop string that is complete within `text` is text like any other."""
        if not self._stops:
            return text, None
        known = self._held + text
        for end in range(len(self._held) + 1, len(known) + 1):
            complete = self._advance(known[end - 1])
            if complete is not None and may_end:
                self._held = ""
                return known[: end - len(complete)], complete
        keep = len(known) - max(self._matched)
        self._held = known[keep:]
        return known[:keep], None

    def flush(self) -> str:
        """End the text, and return what was held back, which is no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Advance every automaton by one character. Returns the longest stop string that ends here, if one does."""
        complete: str | None = None
        for index, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = fallbacks[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                complete = complete or stop
                matched = fallbacks[-1]
            self._matched[index] = matched
        return complete


def _fallbacks(stop: str) -> array[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is also a prefix of `stop`."""
    table = array("H", bytes(2 * len(stop)))
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        length += stop[index] == stop[length]
        table[index] = length
    return table
