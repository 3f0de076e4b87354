"""Metrics of recovery: failed attempts, moved sequences, repeated or missing frames, and how long streams pause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from common.contract.errors import Cause
from common.contract.messages.gateway import Suspicion
from common.runtime.counting import PlainHistogram
from common.runtime.probes import counter
from gateway.serving.attempt import Tally

_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class RecoveryMetrics:
    """Recovery counters of one gateway."""

    def __init__(self) -> None:
        self.tally = Tally()
        """Counted by the flows of all requests."""
        self.trials: Counter[Suspicion] = Counter()
        """Prompts and sequences given to workers, by how they are tried."""
        text = "From the failure of an attempt to the stream's next token."
        self.resume = PlainHistogram("baton_gateway_resume_seconds", text, _BUCKETS_S)
        text = "Between a stream's last token from one worker and the next from another."
        self.pause = PlainHistogram("baton_gateway_move_pause_seconds", text, _BUCKETS_S)

    def collect(self) -> Iterable[Metric]:
        """Current values of the metrics."""
        tally = self.tally
        failovers = {cause.value: tally.failures[cause] for cause in Cause}
        text = "Attempts that failed and were followed by another."
        yield counter("baton_gateway_failovers", text, failovers, "cause")
        moves = {end: tally.moves[end] for end in ("moved", "stayed")}
        text = "Moves of running sequences from draining workers, by how they ended."
        yield counter("baton_gateway_moves", text, moves, "end")
        trials = {level.value: self.trials[level] for level in (Suspicion.GROUP, Suspicion.ALONE)}
        yield counter(
            "baton_gateway_trials", "Suspects that workers were given, by how they are tried.", trials, "level"
        )
        text = "Token frames that repeated what was known."
        yield counter("baton_gateway_duplicates", text, tally.num_duplicates)
        yield counter("baton_gateway_gaps", "Token frames that came before an earlier one.", tally.num_gaps)
        yield from self.resume.collect()
        yield from self.pause.collect()
