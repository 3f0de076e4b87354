"""A thread that works for an event loop: one hand-over there, and one back.

`run_in_executor` makes two futures for each call, one with a lock, and chains them; half of its time is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Work = tuple["asyncio.Future[Any]", Callable[[], Any]]

END_S = 10.0
"""Seconds that work which has begun gets to end when a thread is closed."""


class EngineThread:
    """Does one piece of work after the other, in the order of submission."""

    def __init__(self, name: str) -> None:
        """Starts no thread: the first `run` does."""
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._closed = False

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Do `work`; the future, of the running loop, gets its result or exception. Cancelling the future does not
        prevent the work. After `close` this raises `RuntimeError`."""
        if self._closed:
            raise RuntimeError(f"the thread {self._thread.name} is closed")
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._queue.put((future, work))
        if self._thread.ident is None:
            self._thread.start()
        return future

    def close(self, within_s: float = END_S) -> bool:
        """Wait until all work is done, and end the thread; returns whether it has ended within `within_s` seconds. A
        device may never come back: the process can end nevertheless."""
        self._closed = True
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001 (the future raises it in its waiter)
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(_resolve, future, result, error)
            del item, future, work, result, error


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
