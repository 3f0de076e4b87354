"""Tokens per second of a worker, from the counters in its heartbeats. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

WINDOW_S: Final = 2.0
"""Seconds over which a rate is measured, if heartbeats come often enough."""
_MAX_READINGS: Final = 64


class _Reading(NamedTuple):
    at: float
    prompt_tokens: int
    output_tokens: int


class TokenRates:
    """A window over two counters that only grow. If one has shrunk, the counters are a new process's, and the window
    restarts."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque(maxlen=_MAX_READINGS)

    def read(self, now: float, prompt_tokens: int, output_tokens: int) -> None:
        """Take a reading of the counters."""
        readings = self._readings
        if readings and (prompt_tokens < readings[-1].prompt_tokens or output_tokens < readings[-1].output_tokens):
            readings.clear()
        readings.append(_Reading(now, prompt_tokens, output_tokens))
        while len(readings) > 2 and readings[1].at <= now - WINDOW_S:
            readings.popleft()

    def forget(self) -> None:
        """Discard all readings."""
        self._readings.clear()

    @property
    def per_s(self) -> tuple[float, float] | None:
        """Prompt and output tokens per second; None before there are two readings."""
        if len(self._readings) < 2 or self._readings[-1].at <= self._readings[0].at:
            return None
        first, last = self._readings[0], self._readings[-1]
        elapsed_s = last.at - first.at
        return (
            (last.prompt_tokens - first.prompt_tokens) / elapsed_s,
            (last.output_tokens - first.output_tokens) / elapsed_s,
        )
