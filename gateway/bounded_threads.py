"""Work in threads: only so much of it at once, whether or not anybody still waits for it."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_TURNS: Final = 100_000
"""Of a loop, within which an exception that was sent to a thread surely arrives."""


_AGAIN_S: Final = 0.1
"""Between two attempts to end work that has taken too long."""


class BoundedThreads:
    """A few threads. Who has to wait for one, and leaves, leaves nothing behind; work that has begun is done."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._places = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[[], T], most_s: float | None = None) -> T:
        """What `work` returns or raises, once it has had its turn.

        Raises `TimeoutError` if Python code of it is not done in `most_s`, and ends it.
        """
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        interruptible = Interruptible(work)
        done = loop.run_in_executor(self._threads, interruptible)
        timer: asyncio.TimerHandle | None = None

        def interrupt() -> None:
            nonlocal timer
            interruptible.interrupt()
            timer = loop.call_later(_AGAIN_S, interrupt)  # a destructor, say, may have met it, and lost it

        def release(_: object) -> None:
            self._places.release()
            if timer is not None:
                timer.cancel()

        if most_s is not None:
            timer = loop.call_later(most_s, interrupt)

        done.add_done_callback(release)
        return await asyncio.shield(done)


class _Interrupted(BaseException):
    """Sent to a thread. No error, so that nothing on the way takes it for one and goes on."""


class Interruptible(Generic[T]):
    """A piece of work that another thread may end; where it is in the middle of C code, at the end of that."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: int | None = None
        """Where it is under way."""
        self._interrupted = False

    def __call__(self) -> T:
        """Do it. Raises `TimeoutError` if it was interrupted."""
        try:
            with self._lock:
                self._thread = threading.get_ident()
            try:
                result = self._work()
            finally:
                self._leave()
            if self._interrupted:  # it was done just then: the thread must not meet it in somebody else's work
                for _ in range(_TURNS):
                    pass
        except _Interrupted:
            self._leave()  # again, for it may have come in the middle of that
            raise TimeoutError("it took too long") from None
        return result

    def _leave(self) -> None:
        with self._lock:
            self._thread = None

    def interrupt(self) -> None:
        """End it, if it is under way."""
        with self._lock:
            if self._thread is not None:
                self._interrupted = True
                sent = ctypes.py_object(_Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), sent)
