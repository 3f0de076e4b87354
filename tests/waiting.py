"""Time in tests: waiting for what must come, and a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool]) -> None:
    """Let other tasks go on until `condition` holds; fails after half a minute."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


class StandingClock:
    """A clock that shows `now`, which only the test changes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
