"""When a pull came how far, by the sink's clock, and how long its reads took. Events and times in, durations out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PullTimes:
    """The course of one pull. Times are monotonic seconds; None for what has not happened."""

    told_at: float | None = None
    """The first tokens were known: the source's computation hides nothing any more."""
    reserved_at: float | None = None
    read_at: float | None = None
    """Every block was read, and the first tokens were known."""
    read_s: float = 0.0
    """While at least one read was under way, up to the last one that ended."""
    hidden_read_s: float = 0.0
    """Of that, before `told_at`."""
    num_bytes: int = 0
    """Asked of the source."""
    _num_open: int = 0
    _open_since: float = 0.0

    def told(self, now: float) -> None:
        """The source has told the first tokens, for the first time or again."""
        if self.told_at is None:
            self.told_at = now
            self.hidden_read_s = self.read_s + (now - self._open_since if self._num_open else 0.0)

    def read_begun(self, num_bytes: int, now: float) -> None:
        """A read is under way."""
        if not self._num_open:
            self._open_since = now
        self._num_open += 1
        self.num_bytes += num_bytes

    def read_ended(self, now: float) -> None:
        """A read has ended."""
        self._num_open -= 1
        if not self._num_open:
            self.read_s += now - self._open_since
