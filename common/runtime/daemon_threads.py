"""Runs work in daemon threads: the work cannot be stopped, and a process that exits does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_STACKS = threading.Lock()
"""Held while a thread starts: the size of its stack is a setting of the process."""


class DaemonThreads:
    """At most `num_threads` daemon threads, for work that may never end."""

    def __init__(self, num_threads: int, name: str, stack_bytes: int = 0) -> None:
        """Starts no thread: each `submit` starts one until there are `num_threads`. With `stack_bytes` = 0 they have
        the system's usual stack."""
        self._num_threads = num_threads
        self._name = name
        self._stack_bytes = stack_bytes
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._num_begun = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread; the future gets its result or exception. Cancelling it prevents a start. Raises
        `RuntimeError` if there is no thread and none can be started."""
        future: Future[T] = Future()
        self._queue.put((future, work))
        if self._num_begun < self._num_threads:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._num_begun + 1}", daemon=True)
            with _STACKS:
                usual = threading.stack_size(self._stack_bytes)
                try:
                    thread.start()
                    self._num_begun += 1
                except RuntimeError:  # there is no memory for its stack
                    if not self._num_begun:  # else another thread does the work
                        future.cancel()
                        raise
                finally:
                    threading.stack_size(usual)
        return future

    def close(self) -> None:
        """End the threads after the work that was submitted."""
        for _ in range(self._num_begun):
            self._queue.put(None)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 (the future raises it in its waiter)
                    future.set_exception(error)
            del job, future, work
