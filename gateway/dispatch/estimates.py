"""Expected times of a request at each worker: until its turn, and for its prompt. Pure functions of the workers' loads.

Work given since a worker's last report counts too, so that a burst does not go to one worker whose report was good.
Work that it has probably done since that report is subtracted, so that an idle worker is not passed over because its
report is old. Requests of lower tiers do not count, because they wait for higher ones.

Each function returns a column: a value for each row of the table.

("Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", FAST 2025, section 5: it chooses the prefill
worker with the least expected time to first token, and takes load as it will be when the request gets there.)
"""

from __future__ import annotations

import numpy as np

from common.contract.messages.session import PULL_LATENCY_S
from common.contract.tiers import Tier
from gateway.workers.load_table import Column, LoadTable


def queue_s(table: LoadTable, tier: Tier, now: float) -> Column:
    """Seconds until each worker has computed the prompts that precede a new one of this tier. `now` is not before any
    event that the table knows of."""
    done_s = np.minimum(table.trusted_until, now) - table.backlog_at_TN[tier.rank]
    left_s: Column = np.maximum(table.backlog_s_TN[tier.rank] - np.maximum(done_s, 0.0), 0.0)
    return left_s


def prompt_s(table: LoadTable, num_tokens: int, here: Column, num_elsewhere: float = 0.0) -> Column:
    """Seconds that each worker takes for a prompt of `num_tokens` from its turn on. It has the first `here` tokens
    cached; another worker has the first `num_elsewhere`, which it pulls if that is cheaper."""
    computing_s: Column = table.token_s * (num_tokens - here)
    if not num_elsewhere:
        return computing_s
    pulls = (here < num_elsewhere) & (table.pulled_token_s < np.inf)
    if not pulls.any():
        return computing_s
    pulling_s = np.where(pulls, table.pulled_token_s, 0.0) * (num_elsewhere - here) + PULL_LATENCY_S
    pulling_s += table.token_s * (num_tokens - num_elsewhere)
    return np.where(pulls, np.minimum(computing_s, pulling_s), computing_s)


def room_s(table: LoadTable, tier: Tier, num_sequences: int) -> Column:
    """Seconds until each decode worker has places for `num_sequences` new sequences, assuming that a full batch ends in
    the time of one sequence. More sequences than places begin when the worker is empty."""
    places = table.places
    excess = table.sequences_TN[tier.rank] + np.minimum(places, num_sequences) - places
    free_in_s: Column = table.sequence_s * np.maximum(excess, 0.0) / np.maximum(places, 1.0)
    return free_in_s
