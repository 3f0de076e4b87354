"""The gateway's shutdown: open requests get a grace period, and those left then end with an error instead of a cut.

If the gateway ends because a part of it has failed, there is no grace period: their tokens may never come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from aiohttp import web

GOODBYE_S: Final = 2.0
"""Seconds for told requests to report the end to clients that read; `aiohttp` grants it twice."""
_LOG = logging.getLogger(__name__)


class Ending:
    """The open requests. Those left at the end of the grace period are cancelled once, and can find out the reason."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[Any] | asyncio.BaseProtocol] = set()
        """Open requests, and connections that are held."""
        self._told: set[asyncio.Task[Any]] = set()
        """Members of `_open` that were cancelled and have not asked for the reason yet."""
        self._num_done = 0
        """Followed requests that are done."""
        self._has_failed = False
        self._over = asyncio.Event()
        """Set while nothing is to be waited for: `_open` is empty, or a part of the gateway has failed."""
        self._over.set()

    def follow(self) -> None:
        """Count the current task as an open request until the task is done, because its answer is written by then."""
        task = asyncio.current_task()
        assert task is not None
        self.hold(task)
        task.add_done_callback(self._done)

    def hold(self, held: asyncio.Task[Any] | asyncio.BaseProtocol) -> None:
        """Wait for a request, or for a connection on which one is to come or an answer to be read, until `release`."""
        self._open.add(held)
        if not self._has_failed:
            self._over.clear()

    def release(self, held: asyncio.Task[Any] | asyncio.BaseProtocol) -> None:
        """Wait no longer for what `hold` was called with; inert for anything else."""
        self._open.discard(held)
        if not self._open:
            self._over.set()

    def fail(self) -> None:
        """A part of the gateway has failed: end the grace period, present or to come."""
        self._has_failed = True
        self._over.set()

    def is_reason(self) -> bool:
        """Whether the `CancelledError` that the current task has caught comes from the shutdown. Ask only once: if so,
        the task is no longer cancelled, and has `GOODBYE_S` left."""
        task = asyncio.current_task()
        if task is None or task not in self._told:
            return False
        self._told.discard(task)
        task.uncancel()
        return True

    async def wait(self, grace_s: float) -> None:
        """Return once nothing is open, after `grace_s`, or at `fail`; requests left then are cancelled.

        The log has the totals, because nobody can ask the gateway for its metrics any more."""
        num_before = self._num_done
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._over.wait()
        left = [each for each in self._open if isinstance(each, asyncio.Task)]
        for task in left:
            self._told.add(task)
            task.cancel()
        num_ended = self._num_done - num_before
        _LOG.info("requests that have ended in the grace period: %d; cut off: %d", num_ended, len(left))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._num_done += 1
        self._told.discard(task)
        self.release(task)


ENDING: Final = web.AppKey("ending", Ending)
"""Application key of the `Ending`."""
