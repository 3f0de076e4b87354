"""Threads with a bound on concurrent work, which holds even if nobody waits for the work any more.

Work that takes less than a switch to a thread and back may be tried on the event loop's thread first.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_TURNS: Final = 100_000
"""Iterations of an empty loop within which an exception sent to a thread certainly arrives."""


_AGAIN_S: Final = 0.1
"""Seconds between attempts to interrupt work that has taken too long."""
_BRIEF_S: Final = 0.01
"""Seconds of processor time that brief work may take on the event loop's thread."""


class BoundedThreads:
    """A few threads. A caller that leaves while it waits for a thread leaves nothing behind; work that has begun is
    completed."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._places = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[[], T], most_s: float | None = None, *, brief: bool = False) -> T:
        """Run `work` in a thread, and return what it returns or raise what it raises.

        Raises `TimeoutError` if its Python code is not done within `most_s` seconds, and ends it. Work that is probably
        `brief` is tried on the event loop's thread first; if it is not done within `_BRIEF_S`, it is ended, and begins
        anew in a thread.
        """
        if brief and threading.current_thread() is threading.main_thread():
            try:
                return _do_briefly(work)
            except _Interrupted:
                pass
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        interruptible = Interruptible(work)
        done = loop.run_in_executor(self._threads, interruptible)
        timer: asyncio.TimerHandle | None = None

        def interrupt() -> None:
            nonlocal timer
            interruptible.interrupt()
            timer = loop.call_later(_AGAIN_S, interrupt)  # a destructor, for example, may have swallowed the exception

        def release(_: object) -> None:
            self._places.release()
            if timer is not None:
                timer.cancel()

        if most_s is not None:
            timer = loop.call_later(most_s, interrupt)

        done.add_done_callback(release)
        return await asyncio.shield(done)


class _Interrupted(BaseException):
    """Sent to a thread to interrupt it. It is no `Exception`, so that no handler for those catches it and goes on."""


class _Alarm:
    """The handler of the timer's signal, which Python calls in the main thread only."""

    armed = False
    """Whether brief work is being done, so that the signal interrupts nothing else."""
    installed = False

    @classmethod
    def ring(cls, *_: object) -> None:
        """Interrupt the work."""
        if cls.armed:
            raise _Interrupted


def _do_briefly(work: Callable[[], T]) -> T:
    """Do the work in the main thread. Raises `_Interrupted` if it is not done within `_BRIEF_S`."""
    if not _Alarm.installed:
        signal.signal(signal.SIGVTALRM, _Alarm.ring)
        _Alarm.installed = True
    try:
        try:
            _Alarm.armed = True
            signal.setitimer(signal.ITIMER_VIRTUAL, _BRIEF_S, _AGAIN_S)
            return work()
        finally:
            _Alarm.armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Interrupted:  # it may have arrived in the `finally` clause
        _Alarm.armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        raise


class Interruptible(Generic[T]):
    """A piece of work that another thread can interrupt; within C code, only at the end of that code."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: int | None = None
        """Id of the thread that runs the work; None if none does."""
        self._interrupted = False

    def __call__(self) -> T:
        """Do the work. Raises `TimeoutError` if it was interrupted."""
        try:
            with self._lock:
                self._thread = threading.get_ident()
            try:
                result = self._work()
            finally:
                self._leave()
            if self._interrupted:  # the exception must arrive here, not in the thread's next work
                for _ in range(_TURNS):
                    pass
        except _Interrupted:
            self._leave()  # repeated, because the exception may have arrived in the middle of it
            raise TimeoutError("it took too long") from None
        return result

    def _leave(self) -> None:
        with self._lock:
            self._thread = None

    def interrupt(self) -> None:
        """Interrupt the work if it is running."""
        with self._lock:
            if self._thread is not None:
                self._interrupted = True
                sent = ctypes.py_object(_Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), sent)
