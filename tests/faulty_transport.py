"""A transport whose reads end when, and whose methods raise what, a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from common.contract.ids import Incarnation
from kv_transfer.routes import ReadRoute
from kv_transfer.transport import Read, ReadState


class Faulty:
    """A transport whose reads end when, and whose methods raise what, a test says."""

    num_registrations = 0
    num_evicted = 0

    def __init__(self, serves_by_polling: bool = True) -> None:
        self.serves_by_polling = serves_by_polling
        self.reads: list[Read] = []
        self.read_blocks: list[tuple[int, ...]] = []
        """The blocks that each of `reads` reads into."""
        self.waits = False
        """Whether nothing of a new read begins until the test says so."""
        self.raising: dict[str, Exception] = {}
        self.calls: list[tuple[str, Incarnation]] = []
        """Sources that were added and dropped, in order."""
        self.routes: dict[Incarnation, ReadRoute] = {}
        self.num_polls = 0
        self.threads: set[int] = set()

    def _enter(self, method: str) -> None:
        self.threads.add(threading.get_ident())
        if method in self.raising:
            raise self.raising[method]

    def metadata(self) -> bytes:
        """Always the same."""
        self._enter("metadata")
        return b"metadata"

    def watch(self, on_died: Callable[[Exception], None]) -> None:
        """Keep it for the test."""
        self.died = on_died

    def add_source(self, source: Incarnation, metadata: bytes) -> None:
        """Accept."""
        self._enter("add_source")
        self.calls.append(("add", source))

    def start_read(self, source: Incarnation, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> Read:
        """A read that is under way until the test, or the fence, ends it."""
        self._enter("start_read")
        read = Read(source)
        read.waiting = self.waits
        self.reads.append(read)
        self.read_blocks.append(tuple(sink_blocks))
        return read

    def drop_read(self, read: Read) -> bool:
        """Drop it if it waits."""
        self._enter("drop_read")
        if read.waiting:
            read.fail("dropped")
        return read.waiting

    def route(self, source: Incarnation) -> ReadRoute:
        """What the test says."""
        return self.routes.get(source, ReadRoute())

    def poll(self) -> None:
        """Count."""
        self.num_polls += 1
        self._enter("poll")

    def drop_source(self, source: Incarnation) -> None:
        """End its reads."""
        self._enter("drop_source")
        self.calls.append(("drop", source))
        for read in self.reads:
            if read.source == source and read.state is ReadState.PENDING:
                read.fail("dropped")

    def close(self) -> None:
        """End every read."""
        self._enter("close")
        for read in self.reads:
            if read.state is ReadState.PENDING:
                read.fail("closed")
