"""A process whose blocks are read: fills a region with seeded bytes, serves it, and ends when its stdin does.

Prints one line of JSON: the transport's metadata (hex) and the CRC-32 of each block.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from transport_harness import Cache, make_transport

from common.contract.ids import Incarnation
from kv_transfer.mover import Mover


async def serve(kind: str, incarnation: Incarnation, num_blocks: int, block_bytes: int, seed: int) -> None:
    """Serve until stdin is closed."""
    cache = Cache(num_blocks, block_bytes)
    cache.fill(seed)

    def unexpected(*event: object) -> None:
        raise AssertionError(event)

    mover = Mover(lambda: make_transport(kind, cache.region, incarnation), unexpected, unexpected)
    metadata = await mover.start()
    mover.set_serving(True)
    checksums = cache.region.crc32(range(num_blocks))
    print(json.dumps({"metadata": metadata.hex(), "checksums": checksums}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await mover.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("incarnation")
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("seed", type=int)
    args = parser.parse_args()
    asyncio.run(serve(args.kind, Incarnation(args.incarnation), args.num_blocks, args.block_bytes, args.seed))
