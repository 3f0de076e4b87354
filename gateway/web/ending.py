"""How a gateway ends: what is under way gets its time, and what is not done by then is told so, not just cut off."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web

GOODBYE_S: Final = 2.0
"""For requests that have been told, to pass it on to clients that read; `aiohttp` grants it twice."""


class Ending:
    """The requests under way. Those that are left when the time is over are cancelled, once, and can find out why."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[Any]] = set()
        self._told: set[asyncio.Task[Any]] = set()
        """Of `_open`: cancelled, and not aware of the reason yet."""
        self._none_open = asyncio.Event()
        self._none_open.set()

    def follow(self) -> None:
        """The current task has a request under way, which the end waits for until the task is done: its answer is
        written then."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self._none_open.clear()
        task.add_done_callback(self._done)

    def is_reason(self) -> bool:
        """Whether the `CancelledError` that the current task has caught is the gateway's end. To be asked once: then
        the task is no longer cancelled, and has `GOODBYE_S`."""
        task = asyncio.current_task()
        if task is None or task not in self._told:
            return False
        self._told.discard(task)
        task.uncancel()
        return True

    async def wait(self, grace_s: float) -> None:
        """Return once nothing is under way, or after so many seconds; what is left then is told."""
        try:
            async with asyncio.timeout(grace_s):
                await self._none_open.wait()
        except TimeoutError:
            for task in self._open:
                self._told.add(task)
                task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._open.discard(task)
        self._told.discard(task)
        if not self._open:
            self._none_open.set()


ENDING: Final = web.AppKey("ending", Ending)
"""Where an application has it."""
