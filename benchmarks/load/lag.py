"""Measures how late this process's event loop is, which limits the accuracy of every figure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from common.runtime.clock import Clock

_TICK_S = 0.05
LARGE_LAG_S = 0.010


@asynccontextmanager
async def loop_lag(clock: Clock, samples: list[float]) -> AsyncIterator[None]:
    """In this context, append to `samples`, 20 times per second, the seconds by which a timer of the event loop was
    late."""
    ticking = asyncio.create_task(_tick(clock, samples))
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)


async def _tick(clock: Clock, samples: list[float]) -> None:
    while True:
        due_s = clock() + _TICK_S
        await asyncio.sleep(_TICK_S)
        samples.append(max(0.0, clock() - due_s))


def lag_warnings(summary: Mapping[str, Any]) -> list[str]:
    """Warnings for the reader if the lag makes the figures doubtful."""
    lag = summary["lag"]
    named = (("requests were sent late", lag["send_s"]), ("the client's event loop was late", lag["loop_s"]))
    return [
        f"{what}: by {1000 * spread['p99']:.1f} ms (P99), {1000 * spread['max']:.1f} ms at worst; "
        "the client is a bottleneck, or its machine is"
        for what, spread in named
        if spread is not None and spread["p99"] > LARGE_LAG_S
    ]
