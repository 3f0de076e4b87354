"""Which decode workers a tier asks for, where some are packed for latency and some for throughput. Pure.

tier          workers: the first of these of which there are any
interactive   latency, at once; throughput, at once; latency, in time; throughput, in time; any
standard      throughput, in time; latency, in time; any
batch         throughput, in time; latency, in time; any

A worker is *in time* for a tier if it is expected to have room, and its turn for a prompt that it computes itself,
within the tier's TTFT target, and if the gaps between its tokens are within the tier's ITL target; it is in time *at
once* if that wait is at most a quarter of the TTFT target. So a request spills over to the other profile when the
workers of its own are full, slow or gone, and only if that helps. The small batches for latency are full soon, so an
interactive request spills over before it has waited long. If nobody is in time, whoever has room soonest takes it,
whatever the profile, so that no request waits for workers that may never come.
The same holds for a request that would be refused otherwise, because it may wait for less than its target.
A request of a lower tier keeps none of a higher tier from a worker with the profile latency: its place is taken.

Workers of one profile alone are not told apart.
"""

from __future__ import annotations

from typing import Final

from common.contract.messages.session import Profile
from common.contract.tiers import Target, Tier
from gateway.workers.load_table import Column, LoadTable, Rows

FIRST: Final = {Tier.INTERACTIVE: Profile.LATENCY, Tier.STANDARD: Profile.THROUGHPUT, Tier.BATCH: Profile.THROUGHPUT}
"""Tier → the profile of the workers that it is sent to as long as one is in time."""
_SHARES: Final = {Tier.INTERACTIVE: (0.25, 1.0), Tier.STANDARD: (1.0,), Tier.BATCH: (1.0,)}
"""Tier → parts of its TTFT target, ascending. A worker that is in time within one comes before all that are so only
within the next."""


def of_profile(table: LoadTable, rows: Rows, tier: Tier, target: Target, wait_s: Column) -> Rows:
    """Those of the decode workers `rows` among which a request of this tier is placed; none only if `rows` is empty.
    `wait_s` is the expected wait at each worker, in seconds."""
    latency = table.latency[rows] == 1
    if latency.all() or not latency.any():
        return rows
    keeps_up = table.itl_s[rows] <= target.itl_s
    first = latency if FIRST[tier] is Profile.LATENCY else ~latency
    for share in _SHARES[tier]:
        in_time = keeps_up & (wait_s[rows] <= share * target.ttft_s)
        for wanted in (first, ~first):
            found: Rows = rows[wanted & in_time]
            if len(found):
                return found
    return rows
