"""Counts and latencies of the last five minutes, in a ring of short slots, for the dashboard.

Pure: the time is an argument of each call. Each event costs a look at the newest slot and one or two increments;
percentiles are computed only on request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

SLOT_S: Final = 2.0
"""Seconds in a slot."""
NUM_SLOTS: Final = 150
"""Slots kept: five minutes."""
SUMMARY_SLOTS: Final = 15
"""Slots in the summary, the current one included."""
_PER_DOUBLING: Final = 4
"""Buckets from a duration to its double; the error of a percentile is below one fifth."""
_EDGES_S: Final[tuple[float, ...]] = tuple(
    2.0 ** (-12 + step / _PER_DOUBLING) for step in range(22 * _PER_DOUBLING + 1)
)
"""Bucket `i` holds durations in [edge `i - 1`, edge `i`), from 0.24 ms to 1024 s; the first and last are unbounded."""


def _buckets() -> list[int]:
    return [0] * (len(_EDGES_S) + 1)


@dataclass(slots=True)
class Slot:
    """Events of `SLOT_S` seconds."""

    number: int
    """Slots since the clock's zero."""
    finished: int = 0
    met: int = 0
    """Finished requests that met their tier's targets."""
    refused: int = 0
    failed: int = 0
    output_tokens: int = 0
    ttft: list[int] = field(default_factory=_buckets)
    """Requests with a first token, by bucket of their TTFT."""
    itl: list[int] = field(default_factory=_buckets)
    """Gaps between tokens, by bucket of their length."""
    description: dict[str, object] | None = None
    """Made at the first look after the slot's end."""


class Recent:
    """Requests and latencies of the last five minutes. An event older than the newest slot counts in the newest
    slot."""

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=NUM_SLOTS)

    def first_token(self, ttft_s: float, now_s: float) -> None:
        """Record a request's first token."""
        self._slot(now_s).ttft[bisect_right(_EDGES_S, ttft_s)] += 1

    def tokens(self, num_tokens: int, gap_s: float | None, now_s: float) -> None:
        """Record new tokens, `gap_s` after the previous ones of their choice; None for a choice's first tokens."""
        slot = self._slot(now_s)
        slot.output_tokens += num_tokens
        if gap_s is not None:
            slot.itl[bisect_right(_EDGES_S, gap_s)] += 1

    def finished(self, now_s: float, *, met: bool) -> None:
        """Record a request that finished. `met`: within its tier's targets."""
        slot = self._slot(now_s)
        slot.finished += 1
        slot.met += met

    def refused(self, now_s: float) -> None:
        """Record a request that was refused and may be retried later."""
        self._slot(now_s).refused += 1

    def failed(self, now_s: float) -> None:
        """Record a request that was accepted and ended with an error."""
        self._slot(now_s).failed += 1

    def slots(self, now_s: float, last: int = NUM_SLOTS) -> dict[str, object]:
        """The `last` slots, the current one included, without those that have no event. JSON values only."""
        current = _number(now_s)
        shown = [self._description(slot) for slot in self._since(current - last)]
        return {"slot_s": SLOT_S, "num_slots": NUM_SLOTS, "current": current, "slots": shown}

    def summary(self, now_s: float) -> dict[str, object]:
        """Rates and latencies of the last half minute. JSON values only."""
        current = _number(now_s)
        slots = self._since(current - SUMMARY_SLOTS)
        over_s = max(now_s - (current - SUMMARY_SLOTS + 1) * SLOT_S, SLOT_S)
        finished = sum(slot.finished for slot in slots)
        met = sum(slot.met for slot in slots)
        refused = sum(slot.refused for slot in slots)
        failed = sum(slot.failed for slot in slots)
        ended = finished + refused + failed
        return {
            "over_s": round(over_s, 3),
            "requests_per_s": _rounded(finished / over_s),
            "refused_per_s": _rounded(refused / over_s),
            "failed_per_s": _rounded(failed / over_s),
            "output_tokens_per_s": _rounded(sum(slot.output_tokens for slot in slots) / over_s),
            "goodput_per_s": _rounded(met / over_s),
            "goodput_share": _rounded(met / ended) if ended else None,
            **_latencies([slot.ttft for slot in slots], [slot.itl for slot in slots]),
        }

    def _slot(self, now_s: float) -> Slot:
        number = _number(now_s)
        slots = self._slots
        if not slots or number > slots[-1].number:
            slots.append(Slot(number))
        return slots[-1]

    def _description(self, slot: Slot) -> dict[str, object]:
        """What a look shows of a slot. Only the newest one changes, so each of the others is described once."""
        if slot is self._slots[-1]:
            return _describe(slot)
        if slot.description is None:
            slot.description = _describe(slot)
        return slot.description

    def _since(self, number: int) -> list[Slot]:
        """Slots after slot number `number`."""
        return [slot for slot in self._slots if slot.number > number]


def percentile(buckets: list[int], share: float) -> float | None:
    """The duration in seconds below which a fraction `share` of the buckets' counts lies; None if all are empty."""
    rank = share * sum(buckets)
    if rank == 0:
        return None
    below = 0
    for index, count in enumerate(buckets):
        if count and below + count >= rank:
            low = _EDGES_S[max(index - 1, 0)]
            high = _EDGES_S[min(index, len(_EDGES_S) - 1)]
            return low + (high - low) * (rank - below) / count
        below += count
    return _EDGES_S[-1]


def _describe(slot: Slot) -> dict[str, object]:
    return {
        "number": slot.number,
        "finished": slot.finished,
        "met": slot.met,
        "refused": slot.refused,
        "failed": slot.failed,
        "output_tokens": slot.output_tokens,
        **_latencies([slot.ttft], [slot.itl]),
    }


def _latencies(ttft: Iterable[list[int]], itl: Iterable[list[int]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, rows in (("ttft", ttft), ("itl", itl)):
        buckets = [sum(column) for column in zip(*rows, strict=True)]
        for percent in (50, 95):
            found[f"{name}_p{percent}_s"] = _rounded(percentile(buckets, percent / 100))
    return found


def _number(now_s: float) -> int:
    return int(now_s // SLOT_S)


def _rounded(value: float | None) -> float | None:
    """The value rounded to four digits, which is more than a plot shows."""
    return None if value is None else float(f"{value:.4g}")
