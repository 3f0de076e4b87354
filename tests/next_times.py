"""When a lease table or a prefill scheduler has something to end next."""

from __future__ import annotations

import math

from kv_transfer.source import LeaseTable
from prefill_worker.scheduler import PrefillScheduler


def next_expiry(table: LeaseTable) -> float:
    """Time at which `table.expire` has something to do next; infinity if never."""
    leases = [table._expiry(lease) for lease in table._leases.values()]
    return min([*leases, *(parked.until for parked in table.parked._parked.values())], default=math.inf)


def next_deadline(scheduler: PrefillScheduler) -> float:
    """Time at which the first request's budget ends; infinity without requests."""
    request = scheduler._deadlines.first()
    return math.inf if request is None else request.deadline
