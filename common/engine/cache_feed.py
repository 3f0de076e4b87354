"""Tells gateways which blocks a worker's prefix cache holds: all of them at first, then the changes.

Gateways use this only as a hint for routing, so a name is sent as its leading bytes. A lost message is noticed as any
other lost message is (`common.runtime.channel`): the gateway says Hello again, and is told everything anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from common.contract.block_hashes import SHORT_NAME_BYTES, BlockHash
from common.contract.ids import Incarnation
from common.contract.messages.fields import MAX_CACHE_EVENTS, Message
from common.contract.messages.worker import CacheEvents
from common.engine.block_pool import BlockPool


class CacheFeed:
    """Sends the names of one block pool, and their changes, to gateways."""

    def __init__(self, pool: BlockPool, send: Callable[[Incarnation, Message], None]) -> None:
        self._pool = pool
        self._send = send

    def begin(self, gateway: Incarnation) -> None:
        """A session with a gateway has opened, perhaps again: send it every name."""
        self._tell([gateway], self._pool.named(), (), begins=True)

    def publish(self, gateways: Collection[Incarnation]) -> None:
        """Send the changes since the last call to `gateways`, those with a session. Call this once per step, after the
        step's tokens are sent."""
        changes = self._pool.take_changes()
        if changes and gateways:
            stored = [name for name, is_there in changes.items() if is_there]
            removed = [name for name, is_there in changes.items() if not is_there]
            self._tell(gateways, stored, removed, begins=False)

    def _tell(
        self,
        gateways: Collection[Incarnation],
        stored: Sequence[BlockHash],
        removed: Sequence[BlockHash],
        *,
        begins: bool,
    ) -> None:
        for start in range(0, max(len(stored), len(removed), 1), MAX_CACHE_EVENTS):
            part = slice(start, start + MAX_CACHE_EVENTS)
            events = CacheEvents(
                begins=begins and start == 0, stored=_short(stored[part]), removed=_short(removed[part])
            )
            for gateway in gateways:
                self._send(gateway, events)


def _short(names: Sequence[BlockHash]) -> bytes:
    return b"".join([name[:SHORT_NAME_BYTES] for name in names])
