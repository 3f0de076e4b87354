"""A sink on a real mover."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transport_source import END_BOUND_S, Cache, SourceProcess, make_transport

from common.contract.ids import Incarnation, new_incarnation
from kv_transfer.events import Polled, ReadEnded, StartRead
from kv_transfer.mover import Mover
from kv_transfer.transport import ReadId


class Sink:
    """A cache that is read into by a mover of its own."""

    def __init__(self, kind: str, num_blocks: int, block_bytes: int) -> None:
        self.cache = Cache(num_blocks, block_bytes)
        self.fatal: list[Exception] = []
        self.mover = Mover(
            self.cache.region,
            lambda: make_transport(kind, self.cache.region, new_incarnation()),
            self._on_event,
            self.fatal.append,
        )
        self._ends: dict[ReadId, asyncio.Future[str | None]] = {}
        self._next_read = 0

    def read(
        self,
        source: Incarnation,
        source_blocks: Sequence[int],
        sink_blocks: Sequence[int],
        checksums: Sequence[int] | None = None,
    ) -> asyncio.Future[str | None]:
        """Start a read; the future tells why it failed, or None if it is done."""
        self._next_read += 1
        read_id = ReadId(self._next_read)
        end = self._ends[read_id] = asyncio.get_running_loop().create_future()
        sums = None if checksums is None else tuple(checksums)
        self.mover.carry_out(StartRead(read_id, source, tuple(source_blocks), tuple(sink_blocks), sums))
        return end

    async def end_of(self, read: asyncio.Future[str | None]) -> str | None:
        """Why the read failed; None if it is done. TimeoutError after END_BOUND_S."""
        return await asyncio.wait_for(asyncio.shield(read), END_BOUND_S)

    def assert_equal(self, source: SourceProcess, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> None:
        """The blocks that were read are the source's."""
        assert self.cache.region.crc32(sink_blocks) == tuple(source.checksums[block] for block in source_blocks)

    def _on_event(self, event: ReadEnded | Polled) -> None:
        assert isinstance(event, ReadEnded), "nobody has asked for a poll"
        self._ends.pop(event.read_id).set_result(event.error)

    async def __aenter__(self) -> Sink:
        await self.mover.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.mover.close()
        assert not self.fatal
        assert not self._ends
        assert self.mover.num_open_reads == 0
