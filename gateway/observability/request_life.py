"""One generating HTTP request as its operator sees it: its latencies, a log line for each event, and at the end an
account of its time for metrics, traces, the log and, on request, the client. Counts and durations only, never text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiohttp import web

from common.contract.errors import Cause
from common.contract.tiers import Target
from common.runtime.logs import about
from gateway.answer.responses import AnswerFormat
from gateway.intake.request_intake import Job
from gateway.observability.metrics import GatewayMetrics
from gateway.text.choice_text import Piece
from gateway.web.request_ids import ACCEPTED, HEADER, REQUEST_ID

TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""W3C Trace Context headers, which name the trace that a request belongs to."""

_LOG = logging.getLogger(__name__)


class Traces(Protocol):
    """A receiver of ended requests, which it records as spans."""

    def record(self, life: RequestLife) -> None:
        """Record an ended request. Never raises."""


@dataclass(slots=True, eq=False)
class _ChoiceTimes:
    """The tokens of one choice so far."""

    first_s: float
    """When its first token came."""
    last_s: float
    num_tokens: int = 0


class RequestLife:
    """One request, from its validation to its end. `now` is a reading of the gateway's monotonic clock in seconds."""

    def __init__(
        self,
        request: web.Request,
        job: Job,
        answer: AnswerFormat,
        arrived_at: float,
        now: float,
        *,
        metrics: GatewayMetrics,
        target: Target = Target(),  # noqa: B008 (frozen)
        traces: Traces | None = None,
    ) -> None:
        """The request is valid and will be generated. `arrived_at` is its arrival time, on the clock of `now`. If it
        meets `target`, it counts as goodput."""
        request[ACCEPTED] = True
        self._metrics = metrics
        self._traces = traces
        self._target = target
        self._met = True
        self._choices: dict[int, _ChoiceTimes] = {}
        """Choices that have a token, by index."""
        self._over = False
        self.job = job
        self.operation = answer.operation
        self.heading = answer.heading
        self.request_id = request.get(REQUEST_ID, "")
        self.arrived_unix_ns = time.time_ns() - round(1e9 * (now - arrived_at))
        self.trace_headers: Mapping[str, str] = {
            name: request.headers[name] for name in TRACE_HEADERS if name in request.headers
        }
        self.ttft_s: float | None = None
        """Seconds from arrival to first token; None before it."""
        self.num_tokens = 0
        """Tokens generated, over all choices."""
        self.num_reasoning_tokens = 0
        """Tokens generated so far that are known to be reasoning."""
        self.finish_reasons: list[str] = []
        self.cause: Cause | None = None
        """Why the request did not finish; None if it did, or has not ended."""
        self.waterfall = job.generations[0].waterfall
        """Once the request has ended: the waterfall of the generation whose last token came latest."""
        for generation in job.generations:
            generation.waterfall.arrived(self.heading.id, arrived_at)
        self._accepted()

    def _accepted(self) -> None:
        job, first = self.job, self.job.generations[0]
        self._log(
            logging.INFO,
            "accepted",
            f"{job.num_prompt_tokens} tokens, {first.tier} tier, {HEADER} {self.request_id}",
            operation=self.operation,
            prompt_tokens=job.num_prompt_tokens,
            prompts=len(job.generations),
            n=first.num_choices,
            max_tokens=first.sampling.max_tokens,
            tier=first.tier.value,
            tenant=first.tenant,
            stream=job.stream,
        )

    @property
    def begun(self) -> bool:
        """Whether anything of it was computed: a token, or log probabilities of its prompts."""
        return self.num_tokens > 0 or self.job.generations[0].admittance.taken

    def observe(self, piece: Piece, now: float) -> None:
        """Record a piece that has just arrived, and is about to be sent to the client."""
        choice = self._take_tokens(piece, now) if piece.num_tokens else self._choices.get(piece.choice)
        self.num_reasoning_tokens += piece.num_reasoning_tokens
        metrics = self._metrics
        if piece.tally is not None:
            metrics.called(piece.tally)
        if piece.finish_reason is not None:
            self.finish_reasons.append(piece.finish_reason)
            metrics.finished(piece.finish_reason)
            if choice is not None and choice.num_tokens > 1:
                token_s = (choice.last_s - choice.first_s) / (choice.num_tokens - 1)
                metrics.time_per_output_token.observe(token_s)
                self._met = self._met and token_s <= self._target.itl_s

    def finished(self, now: float) -> None:
        """Record that every choice has ended."""
        metrics = self._metrics
        metrics.request_latency.observe(now - self.waterfall.arrived_at)
        metrics.request_finished(self.job.generations[0].tier, now, met=self._met)
        self._end(now, finished=True)
        stages_ns = self.waterfall.stages_ns()
        metrics.of_finished.times(self.waterfall, stages_ns)
        num_tokens = {index: choice.num_tokens for index, choice in self._choices.items()}
        metrics.of_finished.sizes(self.job, num_tokens)
        spent = ", ".join(f"{stage} {duration / 1e6:.1f}" for stage, duration in stages_ns.items())
        self._log(
            logging.INFO,
            "finished",
            f"{self.num_tokens} tokens in {self.waterfall.e2e_ns / 1e6:.1f} ms: {spent}",
            self.timings,
            completion_tokens=self.num_tokens,
            finish_reasons=self.finish_reasons,
        )

    def failed(self, cause: Cause, message: str, now: float) -> None:
        """Record that the request did not finish, or that its end has not reached the client."""
        self._metrics.failed(cause)
        if self._over:
            return
        self.cause = cause
        if cause is Cause.CANCELLED and self._late(now):
            self._metrics.left_late(self.job.generations[0].tier)
        self._end(now, finished=False)
        event = "failed"
        if cause is Cause.CANCELLED:
            event = "cancelled"
        elif cause is Cause.CAPACITY and not self.begun:
            event = "refused"
        self._log(
            logging.WARNING if event == "failed" else logging.INFO,
            event,
            f"{cause}: {message}",
            self.timings,
            cause=cause.value,
            why=message,
            completion_tokens=self.num_tokens,
        )

    def _late(self, now: float) -> bool:
        """Whether a request that has not ended yet has missed a target already."""
        waited_s = now - self.waterfall.arrived_at if self.ttft_s is None else self.ttft_s
        slow = (c for c in self._choices.values() if c.last_s - c.first_s > (c.num_tokens - 1) * self._target.itl_s)
        return not self._met or waited_s > self._target.ttft_s or any(slow)

    def timings(self) -> dict[str, Any]:
        """The account of the request's time in milliseconds; the stages add up to `e2e_ms`. Valid after the end
        only."""
        waterfall, pulls = self.waterfall, self.waterfall.pulls
        timings: dict[str, Any] = {
            "e2e_ms": _ms(waterfall.e2e_ns),
            "ttft_ms": None if self.ttft_s is None else _ms(self.ttft_s * 1e9),
            "stages_ms": {stage.value: _ms(spent) for stage, spent in waterfall.stages_ns().items()},
            "attempts": len(waterfall.legs),
        }
        if pulls:
            timings["pull_bytes"] = sum(each.pull_bytes for each in pulls)
            timings["pull_ms"] = _ms(1e9 * sum(each.read_s for each in pulls))
            timings["hidden_pull_ms"] = _ms(1e9 * sum(each.hidden_read_s for each in pulls))
        return timings

    def _take_tokens(self, piece: Piece, now: float) -> _ChoiceTimes:
        metrics, gap_s = self._metrics, None
        if self.ttft_s is None:
            self._first_token(now)
        choice = self._choices.get(piece.choice)
        if choice is None:
            choice = self._choices[piece.choice] = _ChoiceTimes(now, now)
        elif not piece.joined:
            gap_s = now - choice.last_s
            metrics.inter_token_latency.observe(gap_s)
        choice.last_s = now
        choice.num_tokens += piece.num_tokens
        self.num_tokens += piece.num_tokens
        metrics.recent.tokens(piece.num_tokens, gap_s, now)
        metrics.generation_tokens.inc(piece.num_tokens)
        return choice

    def _first_token(self, now: float) -> None:
        ttft_s = self.ttft_s = now - self.waterfall.arrived_at
        self._met = ttft_s <= self._target.ttft_s
        self._metrics.time_to_first_token.observe(ttft_s)
        self._metrics.recent.first_token(ttft_s, now)
        self._metrics.prompt_tokens.inc(self.job.num_prompt_tokens)
        ttft_ms = _ms(1e9 * ttft_s)
        self._log(logging.INFO, "first_token", f"after {ttft_ms:.1f} ms", ttft_ms=ttft_ms)

    def _end(self, now: float, *, finished: bool) -> None:
        self._over = True
        if len(self.job.generations) > 1:
            waterfalls = (generation.waterfall for generation in self.job.generations)
            self.waterfall = max(waterfalls, key=lambda each: each.last_token_at)
        self.waterfall.ended(now, finished=finished)
        if self.waterfall.excess_ns:
            excess_ms = self.waterfall.excess_ns / 1e6
            _LOG.debug("request %s: workers claim %.3f ms too much", self.heading.id, excess_ms)
        if self._traces is not None:
            self._traces.record(self)

    def _log(
        self,
        level: int,
        event: str,
        message: str,
        more: Callable[[], Mapping[str, object]] = dict,
        **fields: object,
    ) -> None:
        if _LOG.isEnabledFor(level):
            extra = about(event, more, id=self.heading.id, x_request_id=self.request_id, **fields)
            _LOG.log(level, "request %s %s: %s", self.heading.id, event.replace("_", " "), message, extra=extra)


def _ms(duration_ns: float) -> float:
    return round(duration_ns / 1e6, 3)
