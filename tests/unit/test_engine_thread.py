"""The thread that works for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from time import sleep

import pytest

from common.engine.engine_thread import EngineThread


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    subject = EngineThread("worker")
    yield subject
    subject.close()


async def test_work_is_done_in_order_on_one_other_thread(thread: EngineThread) -> None:
    done: list[tuple[int, str]] = []
    futures = [
        thread.run(lambda number=number: done.append((number, threading.current_thread().name)))  # type: ignore[misc]
        for number in range(9)
    ]
    await asyncio.gather(*futures)
    assert done == [(number, "worker") for number in range(9)]


async def test_an_exception_is_raised_where_the_result_is_awaited(thread: EngineThread) -> None:
    def fail() -> None:
        raise ValueError("no")

    failing, after = thread.run(fail), thread.run(lambda: 3)
    with pytest.raises(ValueError, match="no"):
        await failing
    assert await after == 3


async def test_what_is_cancelled_is_done_all_the_same_and_harms_nobody(thread: EngineThread) -> None:
    begin, done = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait(10)
        done.set()

    cancelled = thread.run(work)
    cancelled.cancel()
    begin.set()
    assert await thread.run(lambda: 5) == 5
    assert done.is_set()
    assert cancelled.cancelled()


def test_closing_waits_for_work_whose_loop_is_gone() -> None:
    thread, done = EngineThread("worker"), threading.Event()

    def work() -> None:
        sleep(0.05)
        done.set()

    async def begin() -> None:
        thread.run(work)

    asyncio.run(begin())
    thread.close()
    assert done.is_set()


async def test_work_that_never_ends_does_not_keep_the_process() -> None:
    thread, device = EngineThread("worker"), threading.Event()
    thread.run(device.wait)
    assert not thread.close(0.05)
    device.set()
    assert thread.close()


async def test_a_closed_thread_refuses_work() -> None:
    thread = EngineThread("worker")
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(lambda: None)
