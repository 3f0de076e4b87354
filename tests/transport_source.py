"""Processes whose blocks are read, and the caches of plain memory on both sides of a transport."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from common.contract.ids import Incarnation, new_incarnation
from kv_transfer.events import Serve
from kv_transfer.mover import Mover
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.regions import RankPart, Region
from kv_transfer.transport import Transport
from kv_transfer.zmq_transport import ZmqTransport

POISON = 0xEE
END_BOUND_S = 30.0
"""Within this time every read in these tests has ended, whatever happened to its source."""


def make_transport(kind: str, region: Region, incarnation: Incarnation) -> Transport:
    """The transport that `kind` ("nixl" or "zmq") names."""
    return NixlTransport(region, incarnation) if kind == "nixl" else ZmqTransport(region, incarnation, "127.0.0.1")


class Cache:
    """Host memory in the shape of a KV cache, poisoned."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.blocks_NB = np.full((num_blocks, block_bytes), POISON, dtype=np.uint8)
        part = RankPart(self.blocks_NB.ctypes.data, 0, block_bytes)
        self.region = Region(parts=(part,), num_blocks=num_blocks, block_bytes=block_bytes)

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


_processes = multiprocessing.get_context("forkserver")
# Importing nixl takes 1.5 s (it imports torch to find the CUDA version): once, in the server that forks the sources.
_processes.set_forkserver_preload(["nixl._api", "transport_source"])


class SourceProcess:
    """A process that serves seeded blocks."""

    def __init__(self, kind: str, num_blocks: int, block_bytes: int, seed: int, environment: dict[str, str]) -> None:
        self.incarnation = new_incarnation()
        self._ready, theirs = _processes.Pipe()
        shape = (num_blocks, block_bytes)
        self._process = _processes.Process(
            target=serve, args=(theirs, environment, kind, self.incarnation, shape, seed), daemon=True
        )
        self._process.start()
        theirs.close()
        self.metadata = b""
        self.checksums: tuple[int, ...] = ()

    def wait_ready(self) -> SourceProcess:
        """Wait for its metadata and checksums. Raises EOFError if it ends instead."""
        self.metadata, self.checksums = self._ready.recv()
        return self

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def has_aborted(self) -> bool:
        """Whether it has ended by SIGABRT."""
        return self._process.exitcode == -signal.SIGABRT

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self._signal(signal.SIGSTOP)
        state = Path(f"/proc/{self._process.pid}/stat")
        give_up_s = time.monotonic() + END_BOUND_S
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < give_up_s

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def hold(self) -> None:
        """Stop every thread of Python's, but none of its libraries': connections stay alive, and nobody serves them."""
        self._signal(signal.SIGUSR1)
        assert self._ready.poll(END_BOUND_S)
        assert self._ready.recv() == "held"

    def let_go(self) -> None:
        """End `hold`."""
        self._signal(signal.SIGUSR2)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def __enter__(self) -> SourceProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._ready.close()


def serve(
    ready: Connection,
    environment: dict[str, str],
    kind: str,
    incarnation: Incarnation,
    shape: tuple[int, int],
    seed: int,
) -> None:
    """Fill a cache of (blocks, bytes per block) with seeded bytes; serve it until the other end of `ready` is closed.

    Sends the transport's metadata and the CRC-32 of each block.
    """
    os.environ.update(environment)
    asyncio.run(_serve(ready, kind, incarnation, shape, seed))


async def _serve(ready: Connection, kind: str, incarnation: Incarnation, shape: tuple[int, int], seed: int) -> None:
    cache = Cache(*shape)
    cache.fill(seed)

    def unexpected(*event: object) -> None:
        raise AssertionError(event)

    mover = Mover(cache.region, lambda: make_transport(kind, cache.region, incarnation), unexpected, unexpected)
    metadata = await mover.start()
    mover.carry_out(Serve(serving=True))
    libc = ctypes.PyDLL(None)  # its functions run with the interpreter's lock held

    def hold(*_: object) -> None:
        ready.send("held")
        libc.pause()

    signal.signal(signal.SIGUSR1, hold)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    ready.send((metadata, cache.region.crc32(range(cache.region.num_blocks))))
    await asyncio.to_thread(ready.poll, None)
    await mover.close()
