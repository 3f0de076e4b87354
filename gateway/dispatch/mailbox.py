"""A mailbox from the dispatcher to a client's task: like an unbounded `asyncio.Queue` with one reader, but cheaper."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items in order. One task reads them; the writer bounds their number."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Future that the reader waits for; it may have been cancelled."""

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def newest(self, num: int) -> Iterator[Item]:
        """At most the `num` newest unread items, the newest one first."""
        return islice(reversed(self._items), num)

    @property
    def waited_for(self) -> bool:
        """Whether the reader has read every item, and waits."""
        return self._reader is not None and not self._reader.done()

    async def get(self) -> Item:
        """Wait for the next item and remove it."""
        if not self._items:
            assert self._reader is None or self._reader.done(), "one task reads"
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._reader = None
        return self._items.popleft()
