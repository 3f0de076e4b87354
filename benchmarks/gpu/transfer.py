"""NIXL between the memories of two processes on one GPU: the smallest case of NVLink.

A READ is what the protocol does. Blocks are as in a cache of Llama-3-8B: 2 MiB for 16 tokens, 8 MiB for 64.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from common.contract.ids import Incarnation, new_incarnation
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.regions import Region
from kv_transfer.transport import ReadState

BLOCK_BYTES = (2 * 2**20, 8 * 2**20)
NUM_BLOCKS = (1, 4, 16, 64, 256)
MOST_BYTES = 1024 * 2**20
REPEATS = 9
PATIENCE_S = 60.0
"""For a source that starts, and for a read: over TCP the largest takes seconds."""


def run() -> dict[str, Any]:
    """Every size; prints as it goes."""
    return {"reads": [each for block_bytes in BLOCK_BYTES for each in reads(block_bytes)]}


def region_of(memory: torch.Tensor, block_bytes: int) -> Region:
    """All of it."""
    return Region(
        address=memory.data_ptr(), num_blocks=memory.numel() // block_bytes, block_bytes=block_bytes, device="cuda"
    )


def serve(pipe: Connection, incarnation: Incarnation, block_bytes: int) -> None:
    """A source: tells its metadata, and gives reads progress until it hears anything."""
    memory = torch.arange(MOST_BYTES // 4, dtype=torch.int32, device="cuda").view(torch.uint8)
    torch.cuda.synchronize()
    transport = NixlTransport(region_of(memory, block_bytes), incarnation)
    pipe.send(transport.metadata())
    while not pipe.poll():
        transport.poll()
        time.sleep(0.0002)
    transport.close()


def reads(block_bytes: int) -> list[dict[str, Any]]:
    """Median seconds and rates of reads of some scattered blocks."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    source = new_incarnation()
    process = processes.Process(target=serve, args=(theirs, source, block_bytes), daemon=True)
    process.start()
    theirs.close()  # whatever the source dies of is then an end of file here
    memory = torch.zeros(MOST_BYTES, dtype=torch.uint8, device="cuda")
    transport = NixlTransport(region_of(memory, block_bytes), new_incarnation())
    if not ours.poll(PATIENCE_S):
        raise SystemExit("the source does not start")
    transport.add_source(source, ours.recv())
    num_all = MOST_BYTES // block_bytes
    order = torch.randperm(num_all, generator=torch.Generator().manual_seed(0)).tolist()
    made = []
    for num in [each for each in NUM_BLOCKS if each <= num_all]:
        taken = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            read = transport.start_read(source, order[:num], order[-num:])
            while read.state is ReadState.PENDING and time.perf_counter() < begin + PATIENCE_S:
                transport.poll()
            assert read.state is ReadState.DONE, read.error or "it does not end"
            taken.append(time.perf_counter() - begin)
        seconds = sorted(taken)[REPEATS // 2]
        rate = 1e-9 * num * block_bytes / seconds
        entry = {"block_bytes": block_bytes, "blocks": num, "us": 1e6 * seconds, "gb_per_s": rate}
        made.append(entry)
        print(f"READ {num:4} x {block_bytes >> 20} MiB: {1e6 * seconds:8.0f} us, {rate:.1f} GB/s", flush=True)
    check(memory, block_bytes, order, max(int(entry["blocks"]) for entry in made))
    transport.close()
    ours.send(None)
    process.join()
    return made


def check(memory: torch.Tensor, block_bytes: int, order: list[int], num: int) -> None:
    """What has arrived is what the source wrote."""
    words = block_bytes // 4
    arrived = memory.view(torch.int32).view(-1, words)
    for source_block, sink_block in zip(order[:num], order[-num:], strict=True):
        first = source_block * words
        assert arrived[sink_block, 0].item() == first, "another block has arrived"
        assert arrived[sink_block, -1].item() == first + words - 1, "another block has arrived"
