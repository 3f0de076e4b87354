"""Expected times of a request at a worker: until its turn, and for its prompt. Pure functions of the workers' reports.

Work given since a worker's last report counts too, so that a burst does not go to one worker whose report was good.
Work that it has probably done since that report is subtracted, so that an idle worker is not passed over because its
report is old. Requests of lower tiers do not count, because they wait for higher ones.

("Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", FAST 2025, section 5: it chooses the prefill
worker with the least expected time to first token, and takes load as it will be when the request gets there.)
"""

from __future__ import annotations

from typing import Final

from common.contract.tiers import Tier
from gateway.workers.registry import WorkerView

_TRUSTED_S: Final = 0.5
"""Seconds after its last report for which a worker is assumed to go on; a silent one may have stopped."""
_PULL_LATENCY_S: Final = 0.005
"""Fixed latency of a pull in seconds."""
_UNKNOWN_TOKEN_S: Final = 1e-3
"""Seconds per prompt token at a worker that has not reported yet."""
_UNKNOWN_PLACES: Final = 64
"""Assumed places for sequences at a decode worker that has not reported yet: the default batch size."""
_UNKNOWN_SEQUENCE_S: Final = 1.0
"""Assumed seconds per sequence at a worker where none has ended yet, so that a full worker has a wait above 0."""


def queue_s(worker: WorkerView, tier: Tier, now: float) -> float:
    """Seconds until a worker has computed the prompts that precede a new one of this tier."""
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
    """Seconds that a worker takes for a prompt of `num_tokens` from its turn on. It has the first `num_here` tokens
    cached; another worker has the first `num_elsewhere`, which it pulls if that is cheaper."""
    token_s = _token_s(worker)
    computing_s = token_s * (num_tokens - num_here)
    if num_elsewhere <= num_here or worker.load is None:
        return computing_s
    pulling_s = _PULL_LATENCY_S + worker.load.pulled_token_s * (num_elsewhere - num_here)
    return min(computing_s, pulling_s + token_s * (num_tokens - num_elsewhere))


def room_s(worker: WorkerView, tier: Tier, num_sequences: int) -> float:
    """Seconds until a decode worker has places for `num_sequences` new sequences, assuming that a full batch ends in
    the time of one sequence. More sequences than places begin when the worker is empty."""
    places = _UNKNOWN_PLACES if worker.load is None else worker.load.places
    if not places:
        return 0.0
    excess = sum(worker.sequences[: tier.rank + 1]) + min(num_sequences, places) - places
    sequence_s = worker.load.sequence_s if worker.load is not None else 0.0
    return (sequence_s or _UNKNOWN_SEQUENCE_S) * max(0, excess) / places


def occupancy(worker: WorkerView) -> float:
    """The share of a decode worker's blocks that are expected to be in use. Before its first heartbeat, a worker that
    was given work counts as full, and any other as empty."""
    if worker.load is None:
        return float(len(worker.unseen) > 0)
    return worker.blocks_expected / max(1, worker.load.blocks_total)


def _token_s(worker: WorkerView) -> float:
    return _UNKNOWN_TOKEN_S if worker.load is None else worker.load.token_s
