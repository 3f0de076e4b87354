"""State of the pools and of open requests for the dashboard. Pure; JSON values only.

Whoever may send requests may see it. So it shows where requests are and how far they are, but neither their content nor
whose they are.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap, deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from common.contract.ids import RequestId
from gateway.serving.attempt import Attempt
from gateway.serving.flow import Flow
from gateway.workers.worker_view import WorkerView

MAX_REQUESTS: Final = 64
"""Most requests listed one by one; the others are only counted."""
_LOOKS: Final = 4
"""Looks for which a pair of workers is listed after a handoff, so that a watcher may miss some."""


class Progress(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    """It has no workers yet."""
    PREFILL = "prefill"
    """Its prompt waits at a worker or is being computed."""
    HANDOFF = "handoff"
    """It has its first token, and its KV is on the way to the decode worker."""
    DECODE = "decode"
    MOVING = "moving"
    """A draining decode worker still generates it while another one pulls it."""
    RECOVERING = "recovering"
    """A worker has failed it; another one is sought, or has begun."""


class Names:
    """Public names of requests, which reveal no internal id."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of(self, request: RequestId) -> str:
        """The name of a request, the same at each call."""
        return hashlib.blake2b(request.encode(), key=self._secret, digest_size=4).hexdigest()


class LatestHandoffs:
    """The pairs of workers that had handoffs in the last few looks. Tens of thousands of pairs may have had one at some
    time, too many for each event."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        """The counts at the last look."""
        self._changes: deque[dict[tuple[str, str], int]] = deque(maxlen=_LOOKS)
        """For each of the last looks, oldest first: the pairs whose counts had changed, with the counts before."""

    def begin(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Begin to look at the counts by (prefill worker, decode worker): no handoff until now will be listed."""
        self._counts = dict(counts)
        self._changes.clear()

    def look(self, counts: Mapping[tuple[str, str], int]) -> list[dict[str, object]]:
        """Each pair that had handoffs in the last `_LOOKS` looks: its count, and the count `before` these looks."""
        known = self._counts
        self._changes.append({pair: known.get(pair, 0) for pair, num in counts.items() if num != known.get(pair, 0)})
        self._counts = dict(counts)
        return [
            {"prefill": pair[0], "decode": pair[1], "before": before, "count": counts[pair]}
            for pair, before in ChainMap(*self._changes).items()
            if pair in counts
        ]


def request_view(flow: Flow, now: float, names: Names) -> dict[str, object]:
    """One open request."""
    attempt = _shown(flow)
    opened_at = flow.generation.waterfall.opened_at
    prompt_len = len(flow.generation.token_ids)
    prefill = None if attempt is None or attempt.prefill is None else attempt.prefill.life.address
    moving = None if attempt is None or attempt.moving is None else attempt.moving.life.address
    return {
        "id": names.of(next(iter(flow.requests))),
        "stage": progress_of(flow).value,
        "prefill": prefill,
        "decode": None if attempt is None else attempt.decode.life.address,
        "moving_from": moving,
        "tokens": sum(choice.next_position - prompt_len for choice in flow.choices),
        "tier": flow.generation.tier.value,
        "age_s": 0.0 if opened_at is None else round(max(0.0, now - opened_at), 2),
    }


def progress_of(flow: Flow) -> Progress:
    """Where a request is; with several choices, where its attempt that is furthest behind is."""
    attempt = _shown(flow)
    if attempt is None:
        return Progress.RECOVERING if flow.admitted and flow.story else Progress.QUEUED
    if attempt.decode_has_spoken:
        return Progress.DECODE
    if attempt.moving is not None:
        return Progress.MOVING
    if _has_failed(flow):
        return Progress.RECOVERING
    return Progress.HANDOFF if attempt.prefill is not None and attempt.prefill.over else Progress.PREFILL


def pool_view(
    workers: Iterable[WorkerView],
    flows: Iterable[Flow],
    handoffs: Mapping[tuple[str, str], int],
    now: float,
    names: Names,
) -> dict[str, object]:
    """The state of workers and open requests. `handoffs` counts completed handoffs by (prefill worker, decode
    worker)."""
    under_way = [flow for flow in flows if flow.running]
    listed = [request_view(flow, now, names) for flow in under_way[:MAX_REQUESTS]]
    return {
        "workers": [worker.described() for worker in workers],
        "in_flight": len(under_way),
        "requests": listed,
        "handoffs": [
            {"prefill": prefill, "decode": decode, "count": count} for (prefill, decode), count in handoffs.items()
        ],
    }


def _shown(flow: Flow) -> Attempt | None:
    """The attempt to show: the newest without a token from its decode worker, else the newest. None while workers are
    wanted."""
    if flow.wants or not flow.attempts:
        return None
    behind = [attempt for attempt in flow.attempts if not attempt.decode_has_spoken]
    return (behind or flow.attempts)[-1]


def _has_failed(flow: Flow) -> bool:
    """Whether an attempt has failed since the last token of an unfinished choice."""
    return any(choice.num_failures for choice in flow.choices if not choice.ended)
