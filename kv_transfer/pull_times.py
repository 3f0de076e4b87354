"""When a pull made which progress, by the sink's clock, and how long its reads took. Events and times in, durations
out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PullTimes:
    """The progress of one pull. Times are monotonic seconds; None for what has not happened."""

    told_at: float | None = None
    """When the first tokens became known. From then on, no computation of the source hides a read."""
    reserved_at: float | None = None
    read_at: float | None = None
    """When every block was read and the first tokens were known."""
    read_s: float = 0.0
    """Seconds during which at least one read was under way, up to the last read that has ended."""
    hidden_read_s: float = 0.0
    """The part of `read_s` before `told_at`."""
    num_bytes: int = 0
    """Bytes of all reads that have begun."""
    _num_open: int = 0
    _open_since: float = 0.0

    def told(self, now: float) -> None:
        """Record that the first tokens are known. A repetition changes nothing."""
        if self.told_at is None:
            self.told_at = now
            self.hidden_read_s = self.read_s + (now - self._open_since if self._num_open else 0.0)

    def read_begun(self, num_bytes: int, now: float) -> None:
        """Record that a read of `num_bytes` has begun."""
        if not self._num_open:
            self._open_since = now
        self._num_open += 1
        self.num_bytes += num_bytes

    def read_ended(self, now: float) -> None:
        """Record that a read has ended."""
        self._num_open -= 1
        if not self._num_open:
            self.read_s += now - self._open_since
