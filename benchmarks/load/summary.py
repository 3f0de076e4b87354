"""Computes every figure of a run from its records alone.

* TTFT: from sending a request to its first chunk with tokens. ITL: gaps between a request's chunks with tokens, over
  all requests. End-to-end: from sending to the last token, or to the notice that there are no more. TPOT:
  (end-to-end - TTFT) / (tokens - 1), for requests of two tokens or more. Only requests that succeeded have latencies
  and tokens.
* A quantile is the linear interpolation between the two nearest of the n ordered values, at position p (n - 1): type 7
  of Hyndman and Fan, the default of numpy and `vllm bench`. It is rounded once; so is the sum in a mean.
* Duration: from the first request sent to the last one ended. Goodput: requests per second that meet every target. All
  requests but interrupted ones count: refusals, errors, time-outs and turns never sent are misses.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from benchmarks.load.record import Outcome, Record

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The targets of a good request, in seconds; None means no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    """Target for the longest gap of a request."""

    @property
    def any(self) -> bool:
        """Whether there is at least one target."""
        return not (self.ttft_s is None and self.tpot_s is None and self.itl_s is None)

    def met_by(self, record: Record) -> bool:
        """Whether the request meets all targets; a request of one token meets those for which it has no figure."""
        if record.outcome is not Outcome.OK:
            return False
        pairs = (
            (self.ttft_s, ttft_s(record)),
            (self.tpot_s, tpot_s(record)),
            (self.itl_s, max(gaps_s(record), default=None)),
        )
        return all(target is None or figure is None or figure <= target for target, figure in pairs)


def ttft_s(record: Record) -> float:
    """Time to first token of a request that succeeded."""
    return record.chunk_s[0] - record.sent_s


def e2e_s(record: Record) -> float:
    """Time to the last token of a request that succeeded."""
    assert record.last_s is not None
    return record.last_s - record.sent_s


def tpot_s(record: Record) -> float | None:
    """Mean time for each token after the first; None if there is none."""
    return (e2e_s(record) - ttft_s(record)) / (record.num_tokens - 1) if record.num_tokens > 1 else None


def gaps_s(record: Record) -> list[float]:
    """Seconds between consecutive chunks with tokens."""
    return [later - earlier for earlier, later in itertools.pairwise(record.chunk_s)]


def percentile(values: Iterable[float], percent: int) -> float:
    """The percentile of at least one value; computed exactly, then rounded once."""
    ordered = sorted(values)
    index, part = divmod(percent * (len(ordered) - 1), 100)
    if part == 0:
        return ordered[index]
    return float((Fraction(ordered[index]) * (100 - part) + Fraction(ordered[index + 1]) * part) / 100)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    percentiles = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": math.fsum(ordered) / len(ordered)} | percentiles | {"max": ordered[-1]}


def summarize(records: Sequence[Record], targets: Targets, loop_lag_s: Sequence[float]) -> dict[str, Any]:
    """The figures, as JSON values."""
    counted = [record for record in records if record.outcome is not Outcome.INTERRUPTED]
    ok = [record for record in counted if record.outcome is Outcome.OK]
    sent = [record for record in counted if record.outcome is not Outcome.ABANDONED]
    duration_s = max(r.ended_s for r in sent) - min(r.sent_s for r in sent) if sent else 0.0
    return {
        "requests": len(counted),
        "succeeded": len(ok),
        "interrupted": len(records) - len(counted),
        "outcomes": dict(sorted(Counter(record.cause for record in records).items())),
        "duration_s": duration_s,
        "offered_rate": _offered_rate(counted),
        "ttft_s": spread(ttft_s(record) for record in ok),
        "tpot_s": spread(tpot for record in ok if (tpot := tpot_s(record)) is not None),
        "itl_s": spread(gap for record in ok for gap in gaps_s(record)),
        "e2e_s": spread(e2e_s(record) for record in ok),
        "throughput": _throughput(ok, duration_s),
        "tokens": _tokens(ok),
        "goodput": _goodput(counted, targets, duration_s),
        "lag": {
            "send_s": spread(record.sent_s - record.due_s for record in sent),
            "loop_s": spread(loop_lag_s),
            "wait_for_room_s": spread(record.due_s - record.planned_s for record in sent),
        },
    }


def _offered_rate(counted: Sequence[Record]) -> float | None:
    """Arrivals per second as planned; None if they are not spread over time."""
    planned = [record.planned_s for record in counted if record.turn == 0]
    span_s = max(planned) - min(planned) if planned else 0.0
    return (len(planned) - 1) / span_s if span_s > 0 else None


def _per_second(count: int, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None


def _throughput(ok: Sequence[Record], duration_s: float) -> dict[str, float | None]:
    output = sum(record.num_tokens for record in ok)
    total = output + sum(_num_prompt_tokens(record) for record in ok)
    return {
        "requests_per_s": _per_second(len(ok), duration_s),
        "output_tokens_per_s": _per_second(output, duration_s),
        "total_tokens_per_s": _per_second(total, duration_s),
    }


def _num_prompt_tokens(record: Record) -> int:
    return record.input_tokens if record.prompt_tokens is None else record.prompt_tokens


def _tokens(ok: Sequence[Record]) -> dict[str, Any]:
    """Token counts, and the numbers of requests whose tokens were counted by the server's usage and by chunks."""
    return {
        "prompt": sum(_num_prompt_tokens(record) for record in ok),
        "output": sum(record.num_tokens for record in ok),
        "chunks": sum(len(record.chunk_s) for record in ok),
        "counted_by_usage": sum(record.completion_tokens is not None for record in ok),
        "counted_by_chunks": sum(record.completion_tokens is None for record in ok),
        "prompt_not_as_asked": sum(_num_prompt_tokens(record) != record.input_tokens for record in ok),
        "output_not_as_asked": sum(record.num_tokens != record.output_tokens for record in ok),
    }


def _goodput(counted: Sequence[Record], targets: Targets, duration_s: float) -> dict[str, Any] | None:
    if not targets.any:
        return None
    good = sum(targets.met_by(record) for record in counted)
    return {
        "ttft_target_s": targets.ttft_s,
        "tpot_target_s": targets.tpot_s,
        "itl_target_s": targets.itl_s,
        "good": good,
        "attainment": good / len(counted) if counted else 0.0,
        "requests_per_s": _per_second(good, duration_s),
    }
