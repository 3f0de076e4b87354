"""What the tests of the transports share: caches of plain memory, source processes, and a sink on a real mover."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common.contract.errors import TransferError
from common.contract.ids import Incarnation, new_incarnation
from kv_transfer.mover import Mover
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.regions import Region
from kv_transfer.transport import ReadId, Transport
from kv_transfer.zmq_transport import ZmqTransport

POISON = 0xEE
END_BOUND_S = 5.0
"""Within this time every read in these tests has ended, whatever happened to its source."""


def make_transport(kind: str, region: Region, incarnation: Incarnation) -> Transport:
    """The transport that `kind` ("nixl" or "zmq") names."""
    return NixlTransport(region, incarnation) if kind == "nixl" else ZmqTransport(region, incarnation, "127.0.0.1")


class Cache:
    """Host memory in the shape of a KV cache, poisoned."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.blocks_NB = np.full((num_blocks, block_bytes), POISON, dtype=np.uint8)
        self.region = Region(address=self.blocks_NB.ctypes.data, num_blocks=num_blocks, block_bytes=block_bytes)

    def fill(self, seed: int) -> None:
        """Write seeded bytes, none of them POISON."""
        random_B = np.random.default_rng(seed).integers(0, POISON, self.region.block_bytes, dtype=np.uint8)
        for index, block_B in enumerate(self.blocks_NB):
            block_B[:] = np.roll(random_B, index)

    def poison(self) -> None:
        """Write POISON everywhere."""
        self.blocks_NB[:] = POISON

    def is_poisoned(self, block_ids: Iterable[int]) -> bool:
        """Whether nobody has written to these blocks."""
        return bool((self.blocks_NB[list(block_ids)] == POISON).all())

    def num_landed(self) -> int:
        """Blocks whose first byte has been written."""
        return int(np.count_nonzero(self.blocks_NB[:, 0] != POISON))


class SourceProcess:
    """tests/transport_source.py, running."""

    def __init__(self, kind: str, num_blocks: int, block_bytes: int, seed: int) -> None:
        self.incarnation = new_incarnation()
        command = [kind, self.incarnation, str(num_blocks), str(block_bytes), str(seed)]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("transport_source.py")), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.metadata = b""
        self.checksums: tuple[int, ...] = ()

    def wait_ready(self) -> SourceProcess:
        """Wait for its metadata and checksums."""
        assert self._process.stdout is not None
        ready = json.loads(self._process.stdout.readline())
        self.metadata = bytes.fromhex(ready["metadata"])
        self.checksums = tuple(ready["checksums"])
        return self

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> SourceProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Sink:
    """A cache that is read into by a mover of its own."""

    def __init__(self, kind: str, num_blocks: int, block_bytes: int) -> None:
        self.cache = Cache(num_blocks, block_bytes)
        self.fatal: list[Exception] = []
        self.mover = Mover(
            lambda: make_transport(kind, self.cache.region, new_incarnation()), self._on_read, self.fatal.append
        )
        self._ends: dict[ReadId, asyncio.Future[TransferError | None]] = {}
        self._next_read = 0

    def read(
        self, source: Incarnation, source_blocks: Sequence[int], sink_blocks: Sequence[int]
    ) -> asyncio.Future[TransferError | None]:
        """Start a read; the future tells how it ended."""
        self._next_read += 1
        read_id = ReadId(self._next_read)
        end = self._ends[read_id] = asyncio.get_running_loop().create_future()
        self.mover.read(read_id, source, source_blocks, sink_blocks)
        return end

    async def end_of(self, read: asyncio.Future[TransferError | None]) -> TransferError | None:
        """How the read ended; TimeoutError after END_BOUND_S."""
        return await asyncio.wait_for(asyncio.shield(read), END_BOUND_S)

    def assert_equal(self, source: SourceProcess, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> None:
        """The blocks that were read are the source's."""
        assert self.cache.region.crc32(sink_blocks) == tuple(source.checksums[block] for block in source_blocks)

    def _on_read(self, read_id: ReadId, error: TransferError | None) -> None:
        self._ends.pop(read_id).set_result(error)

    async def __aenter__(self) -> Sink:
        await self.mover.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.mover.close()
        assert not self.fatal
        assert not self._ends
        assert self.mover.num_open_reads == 0
