"""NIXL between the memories of two processes on one GPU: the smallest case of NVLink.

The protocol uses READ. WRITE is measured beside it, to see whether the direction matters. Blocks have the sizes of a
Llama-3-8B cache: 2 MiB for 16 tokens, 8 MiB for 64.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from common.contract.ids import Incarnation, new_incarnation
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.regions import RankPart, Region
from kv_transfer.transport import ReadState

BLOCK_BYTES = (2 * 2**20, 8 * 2**20)
NUM_BLOCKS = (1, 4, 16, 64, 256)
MOST_BYTES = 1024 * 2**20
REPEATS = 9
PATIENCE_S = 60.0
"""Seconds to wait for the source to start, and for a transfer: over TCP the largest takes seconds."""


def run() -> Iterator[dict[str, Any]]:
    """Rows of reads and writes of every size."""
    yield {"kind": "environment", "ucx": {name: value for name, value in os.environ.items() if name.startswith("UCX_")}}
    for block_bytes in BLOCK_BYTES:
        yield from transfers(block_bytes, MOST_BYTES, "cuda")


def region_of(memory: torch.Tensor, block_bytes: int) -> Region:
    """The whole memory as a region."""
    return Region(
        parts=(RankPart(memory.data_ptr(), 0, block_bytes),),
        num_blocks=memory.numel() // block_bytes,
        block_bytes=block_bytes,
        device="cuda" if memory.is_cuda else "cpu",
    )


def transport_over(memory: torch.Tensor, block_bytes: int, incarnation: Incarnation) -> NixlTransport:
    """A transport made as a worker makes it."""

    def synchronize() -> None:
        if memory.is_cuda:
            torch.cuda.synchronize()

    return NixlTransport(region_of(memory, block_bytes), incarnation, synchronize)


def serve(pipe: Connection, incarnation: Incarnation, block_bytes: int, num_bytes: int, device: str) -> None:
    """The source process: sends its metadata, then gives transfers progress until it receives anything."""
    memory = torch.arange(num_bytes // 4, dtype=torch.int32, device=device).view(torch.uint8)
    transport = transport_over(memory, block_bytes, incarnation)
    pipe.send(transport.metadata())
    while not pipe.poll():
        transport.poll()
        time.sleep(0.0002)
    transport.close()


def transfers(block_bytes: int, num_bytes: int, device: str) -> Iterator[dict[str, Any]]:
    """Median times and rates of reads of scattered blocks, and of writes of the same number of blocks back."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    source = new_incarnation()
    process = processes.Process(target=serve, args=(theirs, source, block_bytes, num_bytes, device), daemon=True)
    process.start()
    theirs.close()  # so the end of the source is an end of file here
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    transport = transport_over(memory, block_bytes, new_incarnation())
    if not ours.poll(PATIENCE_S):
        raise SystemExit("the source does not start")
    transport.add_source(source, ours.recv())
    num_all = num_bytes // block_bytes
    order = torch.randperm(num_all, generator=torch.Generator().manual_seed(0)).tolist()
    sizes = [each for each in NUM_BLOCKS if 2 * each <= num_all]
    for num in sizes:
        read = median_s(partial(read_blocks, transport, source, order[:num], order[-num:]))
        yield entry("reads", block_bytes, num, read)
    check(memory, block_bytes, order, max(sizes))
    for num in sizes:
        write = median_s(partial(write_blocks, transport, source, order[:num], order[-num:]))
        yield entry("writes", block_bytes, num, write)
    transport.drop_source(source)  # as a worker does
    free = torch.cuda.mem_get_info()[0] if memory.is_cuda else 0
    ours.send(None)
    process.join(PATIENCE_S)
    if process.exitcode != 0:
        raise SystemExit(f"the source ended with {process.exitcode}")
    if memory.is_cuda:  # UCX may keep the memory of a process that has ended, for as long as this one lives
        given_back = torch.cuda.mem_get_info()[0] - free
        yield {"kind": "given back", "block_bytes": block_bytes, "source_bytes": num_bytes, "bytes": given_back}
    transport.close()


def median_s(transfer: Callable[[], None]) -> float:
    """Median seconds of `REPEATS` transfers."""
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        transfer()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def read_blocks(
    transport: NixlTransport, source: Incarnation, source_blocks: Sequence[int], sink_blocks: Sequence[int]
) -> None:
    """Read blocks as a worker does."""
    end = time.perf_counter() + PATIENCE_S
    read = transport.start_read(source, source_blocks, sink_blocks)
    while read.state is ReadState.PENDING and time.perf_counter() < end:
        transport.poll()
    assert read.state is ReadState.DONE, read.error or "it does not end"


def write_blocks(
    transport: NixlTransport, source: Incarnation, source_blocks: Sequence[int], sink_blocks: Sequence[int]
) -> None:
    """Write own blocks over those of the source, which no worker does."""
    link = transport._links[source]
    end = time.perf_counter() + PATIENCE_S
    places = np.asarray(sink_blocks, dtype=np.int32), np.asarray(source_blocks, dtype=np.int32)
    handle = link._agent.make_prepped_xfer("WRITE", link._sink_blocks, places[0], link._source_blocks, places[1])
    status = link._agent.transfer(handle)
    while status == "PROC" and time.perf_counter() < end:
        status = link._agent.check_xfer_state(handle)
    assert status == "DONE", status
    handle.release()


def entry(kind: str, block_bytes: int, num: int, seconds: float) -> dict[str, Any]:
    """A row."""
    rate = 1e-9 * num * block_bytes / seconds
    return {"kind": kind, "block_bytes": block_bytes, "blocks": num, "us": 1e6 * seconds, "gb_per_s": rate}


def check(memory: torch.Tensor, block_bytes: int, order: list[int], num: int) -> None:
    """Check that the blocks which arrived are those of the source."""
    words = block_bytes // 4
    arrived = memory.view(torch.int32).view(-1, words)
    for source_block, sink_block in zip(order[:num], order[-num:], strict=True):
        first = source_block * words
        assert arrived[sink_block, 0].item() == first, "another block has arrived"
        assert arrived[sink_block, -1].item() == first + words - 1, "another block has arrived"
