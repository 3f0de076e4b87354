"""How much of everything there is in a run of the model, and what the model's numbers are."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.block_pool import BlockPool
from common.runtime.fence import AttemptFence
from decode_worker.migration import Departures
from decode_worker.sequences import Sequences
from kv_transfer.sink import Pull
from kv_transfer.source import LeaseTable

BLOCK_SIZE = 5
NUM_BLOCKS = 2
"""Blocks of the request, with every token that it may get."""
PROMPT = (100, 101, 102, 103, 104, 105)
DEADLINE = 100.0
"""When the request's budget ends, in seconds. The model's clock stands at 0, but for ticks."""
TTL_S = 10.0
"""Seconds that an offer waits for a decode worker."""


def token(position: int) -> int:
    """The token at a position: there is one right answer."""
    return 100 + position


@dataclass(frozen=True)
class Parts:
    """The protocol's own objects; a broken one in the place of one of them breaks a promise."""

    table: type[LeaseTable] = LeaseTable
    pull: type[Pull] = Pull
    pool: type[BlockPool] = BlockPool
    fence: type[AttemptFence] = AttemptFence
    departures: type[Departures] = Departures
    sequences: type[Sequences] = Sequences


@dataclass(frozen=True)
class Bounds:
    """How much of everything there is in a run."""

    prefill_workers: int = 1
    decode_workers: int = 1
    chunks: int = 1
    """Steps in which a prompt is computed: 1, or one for each block."""
    busy: bool = False
    """Whether decode workers have no room until others have left."""
    runs_ahead: bool = False
    """Whether workers plan a step while the one before it runs."""
    output_tokens: int = 2
    attempts: int = 8
    """At the request; if they are used up, it may fail. The flow gives up sooner, and may not."""
    disturbances: int = 1
    """Disturbances of all kinds together."""
    kinds: frozenset[str] = frozenset(
        {"lose", "repeat", "replay", "silence", "crash", "expire", "abort", "refuse", "fail_read", "deadline", "move"}
    )
    first: str | None = None
    """The kind of the first one; None for any."""
    links: frozenset[str] = frozenset({"g>p0", "g>d0", "g>d1", "d0>p0", "d1>p0", "d0>d1", "d1>d0"})
    """Links, without the lives of their ends, on which messages are lost or repeated, and sessions end."""
