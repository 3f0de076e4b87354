"""Work that cannot be stopped does not pile up behind clients that have left."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading

import pytest
from gateway_fixtures import byte_level_backend, wrap

from common.runtime.daemon_threads import DaemonThreads
from gateway.bounded_threads import BoundedThreads, Interruptible


class Work:
    """Takes until it is let go, and knows how much of it there is."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_begun = 0

    def __call__(self) -> int:
        self.num_begun += 1
        assert self.go.wait(60)
        return self.num_begun


async def _until_begun(work: Work, count: int) -> None:
    async with asyncio.timeout(30):
        while work.num_begun < count:
            await asyncio.sleep(0.01)


async def test_work_of_clients_that_have_left_counts_until_it_is_done() -> None:
    threads, work = BoundedThreads(2, "test"), Work()
    for _ in range(3):
        asked = [asyncio.create_task(threads.run(work)) for _ in range(10)]
        await _until_begun(work, 2)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert all(task.cancelled() for task in asked)
    assert work.num_begun == 2
    last = asyncio.create_task(threads.run(work))
    await asyncio.sleep(0)
    assert work.num_begun == 2
    work.go.set()
    assert await asyncio.wait_for(last, 30) == 3
    assert await asyncio.gather(*(threads.run(lambda each=each: each) for each in range(20))) == list(range(20))  # type: ignore[misc]


async def test_long_texts_are_tokenised_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, work = wrap(byte_level_backend()), Work()
    backend = tokenizer._backend

    class Slow:
        def encode_batch_fast(self, *args: object, **options: object) -> object:
            work()
            return backend.encode_batch_fast(*args, **options)

    monkeypatch.setattr(tokenizer, "_backend", Slow())
    asked = [asyncio.create_task(tokenizer.encode("hello " * 2000)) for _ in range(50)]
    await _until_begun(work, 4)
    for task in asked[:40]:
        task.cancel()
    await asyncio.gather(*asked[:40], return_exceptions=True)
    assert work.num_begun == 4
    work.go.set()
    assert len({len(tokens) for tokens in await asyncio.gather(*asked[40:])}) == 1
    assert work.num_begun == 14


@pytest.mark.processes
def test_a_process_that_ends_does_not_wait_for_daemon_threads() -> None:
    program = """
import threading
from common.runtime.daemon_threads import DaemonThreads
threads = DaemonThreads(2, "t")
assert threads.submit(lambda: 6 * 7).result() == 42
begun = threading.Event()
for _ in range(3):
    threads.submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_daemon_threads_pass_errors_on_and_leave_out_what_was_cancelled() -> None:
    threads, go = DaemonThreads(1, "t"), threading.Event()
    held = threads.submit(go.wait)
    left_out = threads.submit(lambda: pytest.fail("it was cancelled"))
    broken = threads.submit(lambda: 1 // 0)
    assert left_out.cancel()
    go.set()
    with pytest.raises(ZeroDivisionError):
        broken.result(60)
    assert held.result(60)


async def test_work_without_an_end_is_ended_and_its_thread_goes_on() -> None:
    threads = BoundedThreads(1, "test")

    def endless() -> None:
        while True:
            with contextlib.suppress(Exception):  # as a library might
                sum(range(100))

    for _ in range(3):
        with pytest.raises(TimeoutError):
            await threads.run(endless, 0.05)
        assert await threads.run(lambda: 7, 60.0) == 7


async def test_brief_work_is_done_on_the_event_loops_thread() -> None:
    threads, here = BoundedThreads(1, "test"), threading.get_ident()
    assert await threads.run(threading.get_ident, 60.0, brief=True) == here
    assert await threads.run(threading.get_ident, 60.0) != here
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, 60.0, brief=True)


async def test_work_that_is_not_brief_goes_on_in_a_thread() -> None:
    threads, began = BoundedThreads(1, "test"), list[int]()

    def long() -> int:
        began.append(threading.get_ident())
        while len(began) < 2:
            with contextlib.suppress(Exception):  # as a library might
                sum(range(100))
        return 7

    assert await threads.run(long, 60.0, brief=True) == 7
    assert began[0] == threading.get_ident() != began[1]

    def endless() -> None:
        while True:
            pass

    with pytest.raises(TimeoutError):
        await threads.run(endless, 0.05, brief=True)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0), "nothing is interrupted afterwards"
    assert await threads.run(lambda: 8, 60.0, brief=True) == 8


async def test_work_that_loses_an_interruption_is_ended_by_another() -> None:
    """What comes in a destructor, or in a callback of the garbage collector, is only printed."""
    threads = BoundedThreads(1, "test")
    lost: list[BaseException] = []

    def endless() -> None:
        while not lost:
            try:
                while True:
                    pass
            except BaseException as error:  # noqa: BLE001 (as the interpreter does)
                lost.append(error)
        while True:
            pass

    with pytest.raises(TimeoutError):
        await threads.run(endless, 0.05)
    assert len(lost) == 1
    assert await threads.run(lambda: 7, 60.0) == 7


def test_an_interruption_ends_the_work_or_comes_too_late_and_never_meets_anything_else() -> None:
    """However both run into each other, the thread comes out of it unharmed."""
    ends = {True: 0, False: 0}
    for number in range(300):
        begun = threading.Event()

        def work(number: int = number, begun: threading.Event = begun) -> int:
            begun.set()
            return sum(range(number * 50))

        interruptible = Interruptible(work)

        def interrupt(begun: threading.Event = begun, interruptible: Interruptible[int] = interruptible) -> None:
            begun.wait(60)
            interruptible.interrupt()

        other = threading.Thread(target=interrupt)
        other.start()
        with contextlib.suppress(TimeoutError):
            ends[interruptible() == sum(range(number * 50))] += 1
        other.join()
        assert sum(range(1000)) == 499500
    assert not ends[False]
