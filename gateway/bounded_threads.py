"""Work in threads: only so much of it at once, whether or not anybody still waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class BoundedThreads:
    """A few threads. Who has to wait for one, and leaves, leaves nothing behind; work that has begun is done."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._places = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, once it has had its turn."""
        await self._places.acquire()
        done = asyncio.get_running_loop().run_in_executor(self._threads, work)
        done.add_done_callback(lambda _: self._places.release())
        return await asyncio.shield(done)
