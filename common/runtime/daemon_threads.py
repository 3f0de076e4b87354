"""Work in threads that cannot be stopped, and that a process which ends does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """A few threads for work that may take for ever: a process that ends does not wait for it."""

    def __init__(self, num_threads: int, name: str) -> None:
        """The threads begin with the first work, so that a process may be forked before."""
        self._num_threads = num_threads
        self._name = name
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._num_begun = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """What `work` returns or raises; it is not begun once that has been cancelled."""
        future: Future[T] = Future()
        self._queue.put((future, work))
        if self._num_begun < self._num_threads:
            self._num_begun += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._num_begun}", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            future, work = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 (who waits raises it)
                    future.set_exception(error)
            del future, work
