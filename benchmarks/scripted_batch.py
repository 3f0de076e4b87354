"""A batch without an engine: its sequences get a token at fixed intervals, and the time of each step is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.runtime.clock import monotonic

Key = TypeVar("Key")

MAX_STEPS_AT_ONCE = 64
"""Most overdue steps that a late batch takes in one turn."""
SHORTEST_PAUSE_S = 0.001
"""Shortest pause between two turns; with a shorter step interval, one turn takes several steps."""


@dataclass(slots=True)
class Script:
    """The behaviour of all batches of a measurement; it may change while they run."""

    token_ids: tuple[int, ...]
    """The tokens of every answer, repeated."""
    interval_s: float | None = None
    """Seconds between the steps of a batch; None: it takes no steps."""
    short: bool = False
    """If true, a request is answered completely as soon as it arrives."""
    last_step: bool = False
    """If true, every sequence ends with its next token."""

    def token(self, index: int) -> int:
        """The output token at this index."""
        return self.token_ids[index % len(self.token_ids)]


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a batch."""

    prompt: tuple[int, ...]
    send: Callable[[int, int, bool], None]
    """Sends output tokens `[start, end)`; the flag says that they are the last ones."""
    num_sent: int = 0
    """Output tokens sent, including the first one."""
    first_step: int = 0
    """Number of the step that brought its second token."""


@dataclass(slots=True, eq=False)
class Batch(Generic[Key]):
    """Sequences that step together."""

    script: Script
    after_step: Callable[[], None] = lambda: None
    """Called when every sequence has sent its token of a step."""
    sequences: dict[Key, Sequence] = field(default_factory=dict)
    step_times: list[float] = field(default_factory=list)
    num_sent: int = 0
    """Tokens sent by steps."""

    def __len__(self) -> int:
        return len(self.sequences)

    async def run_steps(self, phase: float) -> None:
        """Take a step each interval, until cancelled; the steps are shifted by `phase`, a share of the interval."""
        due: float | None = None
        while True:
            interval_s = self.script.interval_s
            if interval_s is None:
                due = None
                await asyncio.sleep(0.005)
                continue
            now = monotonic()
            if due is None:
                due = now + phase * interval_s
            for _ in range(MAX_STEPS_AT_ONCE):
                if due > now:
                    break
                self._step()
                due += interval_s
            await asyncio.sleep(max(SHORTEST_PAUSE_S, due - monotonic()))

    def _step(self) -> None:
        """Send a token of each sequence. The first step of a sequence also sends its first token, unless that was sent
        before."""
        self.step_times.append(monotonic())
        self.num_sent += len(self.sequences)
        sequences, last = list(self.sequences.values()), self.script.last_step
        if last:
            self.sequences.clear()
        for sequence in sequences:
            start, end = sequence.num_sent, max(2, sequence.num_sent + 1)
            if start < 2:
                sequence.first_step = len(self.step_times) - 1
            sequence.num_sent = end
            sequence.send(start, end, last)
        self.after_step()
