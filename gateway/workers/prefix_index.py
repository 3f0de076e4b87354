"""Which worker holds which blocks, as the workers tell it. Pure state.

A worker tells what its cache holds when a session opens, and from then on what changes (`CacheEvents`). So every
gateway knows it, whoever's requests filled the cache. It is out of date by as long as a message takes, and names are
told by their leading bytes: a hint. A wrong one costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.contract.block_hashes import SHORT_NAME_BYTES, BlockHash
from common.contract.messages import CacheEvents
from gateway.serving.attempt import Place


class PrefixIndex:
    """The blocks of each worker that is connected: about a hundred bytes for each that is cached there."""

    def __init__(self) -> None:
        self._held: dict[Place, set[bytes]] = {}

    def apply(self, place: Place, events: CacheEvents) -> None:
        """A worker tells what it holds."""
        held = self._held.get(place)
        if held is None or events.begins:
            held = self._held[place] = set()
        held.difference_update(_split(events.removed))
        held.update(_split(events.stored))

    def forget(self, place: Place) -> None:
        """That life of a worker is over, or nothing is heard of it any more."""
        self._held.pop(place, None)

    @property
    def num_blocks(self) -> int:
        """Blocks that all workers hold; one that several hold counts as often."""
        return sum(map(len, self._held.values()))

    def longest(self, block_hashes: Sequence[BlockHash]) -> dict[Place, int]:
        """How many of these blocks, the leading ones of a sequence, each worker holds; those that hold none are left
        out. A block counts only where all before it are, too."""
        longest: dict[Place, int] = {}
        holders = list(self._held.items())
        for num_before, block_hash in enumerate(block_hashes):
            name = block_hash[:SHORT_NAME_BYTES]
            still = [(place, held) for place, held in holders if name in held]
            if not still:
                break
            for place, _ in still:
                longest[place] = num_before + 1
            holders = still
        return longest


def _split(names: bytes) -> list[bytes]:
    return [names[start : start + SHORT_NAME_BYTES] for start in range(0, len(names), SHORT_NAME_BYTES)]
