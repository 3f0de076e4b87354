"""Tokens a second of a worker, from the counters in its heartbeats. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

WINDOW_S: Final = 2.0
"""Seconds that a rate is over, where heartbeats come often enough."""
_MAX_READINGS: Final = 64


class _Reading(NamedTuple):
    at: float
    prompt_tokens: int
    output_tokens: int


class TokenRates:
    """A window over two counters that only grow; where one has shrunk it is another process's, and begins anew."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque(maxlen=_MAX_READINGS)

    def read(self, now: float, prompt_tokens: int, output_tokens: int) -> None:
        """The counters at this moment."""
        readings = self._readings
        if readings and (prompt_tokens < readings[-1].prompt_tokens or output_tokens < readings[-1].output_tokens):
            readings.clear()
        readings.append(_Reading(now, prompt_tokens, output_tokens))
        while len(readings) > 2 and readings[1].at <= now - WINDOW_S:
            readings.popleft()

    def forget(self) -> None:
        """The next reading is the first one."""
        self._readings.clear()

    @property
    def per_s(self) -> tuple[float, float] | None:
        """Prompt and output tokens a second; None while there are no two readings."""
        if len(self._readings) < 2 or self._readings[-1].at <= self._readings[0].at:
            return None
        first, last = self._readings[0], self._readings[-1]
        elapsed_s = last.at - first.at
        return (
            (last.prompt_tokens - first.prompt_tokens) / elapsed_s,
            (last.output_tokens - first.output_tokens) / elapsed_s,
        )
