"""Items come out in order, to a reader that waits, comes later, or has been cancelled."""

from __future__ import annotations

import asyncio

import pytest

from gateway.dispatch.mailbox import Mailbox


async def test_items_come_in_order_whether_they_are_waited_for_or_not() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.put(2)
    assert [await box.get(), await box.get()] == [1, 2]
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    box.put(3)
    box.put(4)
    assert [await waiting, await box.get()] == [3, 4]


async def test_a_cancelled_reader_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox()
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    waiting.cancel()
    box.put(1)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    box.put(2)
    assert [await box.get(), await box.get()] == [1, 2]
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(3)
    assert await waiting == 3


async def test_a_reader_that_is_cancelled_when_its_item_is_there_leaves_it() -> None:
    box: Mailbox[int] = Mailbox()
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await box.get() == 1
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(2)
    assert await waiting == 2
