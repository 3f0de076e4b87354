"""Which prefill and which decode worker a request goes to. Pure functions of the registry's state."""

from __future__ import annotations

from gateway.registry import WorkerView


def least_loaded_prefill(workers: list[WorkerView]) -> WorkerView:
    """The worker with the fewest prompt tokens in flight from here, then the fewest that it reported."""
    return min(
        workers,
        key=lambda w: (w.in_flight_tokens, w.load.waiting_tokens if w.load else 0, w.in_flight, w.address),
    )


def least_loaded_decode(workers: list[WorkerView]) -> WorkerView:
    """The worker with the fewest requests in flight from here, then the smallest share of its blocks spoken for."""
    return min(
        workers,
        key=lambda w: (w.in_flight, w.load.blocks_used / max(1, w.load.blocks_total) if w.load else 0.0, w.address),
    )
