"""Which worker holds which blocks, as reported by the workers. Pure state.

A worker reports the content of its cache when a session opens, and its changes from then on (`CacheEvents`). So every
gateway knows it, whichever gateway's requests filled the cache. The index lags by a message's transit, and block names
are truncated hashes, so it is a hint. A wrong hint costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.contract.block_hashes import SHORT_NAME_BYTES, BlockHash
from common.contract.messages import CacheEvents
from gateway.serving.attempt import Place


class PrefixIndex:
    """The blocks of each connected worker; each cached block takes about a hundred bytes here."""

    def __init__(self) -> None:
        self._held: dict[Place, set[bytes]] = {}

    def apply(self, place: Place, events: CacheEvents) -> None:
        """Apply a worker's report of its cache."""
        held = self._held.get(place)
        if held is None or events.begins:
            held = self._held[place] = set()
        held.difference_update(_split(events.removed))
        held.update(_split(events.stored))

    def forget(self, place: Place) -> None:
        """Forget a worker's blocks, because its process or its session has ended."""
        self._held.pop(place, None)

    @property
    def num_blocks(self) -> int:
        """Blocks of all workers; a block that several workers hold counts once for each."""
        return sum(map(len, self._held.values()))

    def longest(self, block_hashes: Sequence[BlockHash]) -> dict[Place, int]:
        """Number of leading blocks of a sequence that each worker holds; a block counts only if the worker holds all
        before it. Workers that hold none are left out."""
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
