"""What a worker would take for a request: how long until its turn, and then. Pure functions of what workers report.

What a worker has been given since its last report counts, too, so a burst does not go where the report was good; what
it has probably done since then does not, so that one that is done is not passed over for a report that is old.
Requests of lower tiers do not count: they wait for higher ones.

("Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", FAST 2025, section 5: a prefill worker is
chosen by the time to the first token that is expected there, and load is what it will be when a request gets there.)
"""

from __future__ import annotations

from typing import Final

from common.contract.tiers import Tier
from gateway.workers.registry import WorkerView

_TRUSTED_S: Final = 0.5
"""So long after its last report a worker is believed to go on; one that is silent has perhaps stopped."""
_PULL_LATENCY_S: Final = 0.005
"""Of a pull of any size."""
_UNKNOWN_TOKEN_S: Final = 1e-3
"""Of a prompt token, where the worker has not reported yet."""
_UNKNOWN_PLACES: Final = 64
"""Sequences for which a decode worker that has not reported yet has room: those of a batch, by default."""
_UNKNOWN_SEQUENCE_S: Final = 1.0
"""Of a sequence, where none has ended yet: a full worker is full all the same."""


def queue_s(worker: WorkerView, tier: Tier, now: float) -> float:
    """Seconds until a worker has computed the prompts that come before a new one."""
    token_s, moment = _token_s(worker), worker.load_at
    now = min(now, worker.load_at + _TRUSTED_S)
    queued_s = token_s * sum(worker.load.queued_tokens[: tier.rank + 1]) if worker.load is not None else 0.0
    for given in worker.unseen:
        if given.tier.rank <= tier.rank:
            at = min(given.at, now)
            queued_s = max(0.0, queued_s - max(0.0, at - moment)) + token_s * given.num_tokens
            moment = max(moment, at)
    return max(0.0, queued_s - max(0.0, now - moment))


def prompt_s(worker: WorkerView, num_tokens: int, num_here: int, num_elsewhere: int = 0) -> float:
    """Seconds that a worker takes for a prompt of which it has the first `num_here` tokens cached, once it is its turn;
    another worker has the first `num_elsewhere`, which it pulls if that is cheaper."""
    token_s = _token_s(worker)
    computing_s = token_s * (num_tokens - num_here)
    if num_elsewhere <= num_here or worker.load is None:
        return computing_s
    pulling_s = _PULL_LATENCY_S + worker.load.pulled_token_s * (num_elsewhere - num_here)
    return min(computing_s, pulling_s + token_s * (num_tokens - num_elsewhere))


def room_s(worker: WorkerView, tier: Tier, num_sequences: int) -> float:
    """Seconds until a decode worker has places for so many new sequences: as many end in the time that one takes as
    there are places. More than fit at all begin when it is empty."""
    places = _UNKNOWN_PLACES if worker.load is None else worker.load.places
    if not places:
        return 0.0
    excess = sum(worker.sequences[: tier.rank + 1]) + min(num_sequences, places) - places
    sequence_s = worker.load.sequence_s if worker.load is not None else 0.0
    return (sequence_s or _UNKNOWN_SEQUENCE_S) * max(0, excess) / places


def occupancy(worker: WorkerView) -> float:
    """The share of a decode worker's blocks that will be in use at most, as it expects. One that was given something
    before it has said how many it has counts as full, until its first heartbeat."""
    if worker.load is None:
        return float(len(worker.unseen) > 0)
    return worker.blocks_expected / max(1, worker.load.blocks_total)


def _token_s(worker: WorkerView) -> float:
    return _UNKNOWN_TOKEN_S if worker.load is None else worker.load.token_s
