"""Batching without iteration-level scheduling, on the product's own scheduler and engine: for comparison only.

A batch is admitted as a whole, and the next batch when its last sequence has ended. Sequences that have ended leave
their place empty but, unlike in a naive implementation, cost no compute, so that only the scheduling is compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from decode_worker.entrance import Reservation
from decode_worker.request import DecodeRequest
from decode_worker.scheduler import DecodeScheduler


class BatchAtATime:
    """A decode scheduler that receives its requests in batches; everything else is the product's scheduler.

    With `window_s` infinite a batch waits until it is full (static batching); otherwise until it is full, or its first
    request has waited that long (windowed dynamic batching).
    """

    def __init__(self, scheduler: DecodeScheduler, batch_size: int, window_s: float = math.inf) -> None:
        self._scheduler = scheduler
        self._batch_size = batch_size
        self._window_s = window_s
        self._queue: deque[tuple[float, DecodeRequest]] = deque()
        self._no_more = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def want(self, request: DecodeRequest, now: float) -> None:
        """Queue the request until its batch is admitted."""
        self._queue.append((now, request))

    def no_more(self) -> None:
        """The trace is over: the last batch need not be full."""
        self._no_more = True

    def opens_at(self) -> float:
        """The time at which a batch that is not full is admitted."""
        if not self._queue:
            return math.inf
        return 0.0 if self._no_more else self._queue[0][0] + self._window_s

    def reserve(self, now: float) -> Sequence[Reservation]:
        """Admit the next batch if the last one has ended; then reserve as the product's scheduler does."""
        inner = self._scheduler
        entrance = inner.entrance
        busy = inner.batch.num_running or inner.num_waiting or entrance.reserved or inner.prompts or entrance.preempted
        if not busy and (len(self._queue) >= self._batch_size or self.opens_at() <= now):
            for _ in range(min(self._batch_size, len(self._queue))):
                inner.want(self._queue.popleft()[1], now)
        return inner.reserve(now)
