"""Admission on a modelled clock: the product's registry, router, admission and prefill scheduler, and a worker whose
speed is modelled. What a clairvoyant would have refused of the same requests is there to compare with."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from dispatcher_bench import D, P, role_of, welcome

from common.contract.ids import Incarnation, RequestId
from common.contract.messages.gateway import Prefill
from common.contract.messages.session import Heartbeat, Phase
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier, by_tier
from common.engine.block_pool import BlockPool
from common.scheduling.chunked_prefill import Chunk
from common.scheduling.costs import Costs
from gateway.dispatch.ask import Ask
from gateway.dispatch.router import Expected, Handoff, Router
from gateway.dispatch.ttft_limits import TtftLimits
from gateway.workers.registry import Registry
from gateway.workers.worker_view import Given
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler

TARGET_S: Final = 0.5
HEARTBEAT_S: Final = 0.25
HOP_S: Final = 0.001
"""Of a message between gateway and worker."""
PULL_S: Final = 0.01
"""From the first token to the end of the prefill worker's part."""
STEP_S: Final = 0.005
"""Of any step, besides its tokens."""
PROMPT_TOKENS, PROMPT_S = 256, 0.15
"""Of the mean prompt, besides the step's own time."""
BLOCK_SIZE: Final = 16


@dataclass(frozen=True)
class Arrival:
    """One request, and what its prompt will take."""

    at: float
    num_tokens: int
    computing_s: float

    @property
    def limit_s(self) -> float:
        """Within which its first token is on time: a prompt that takes long by itself may still wait for half."""
        return max(TARGET_S, TARGET_S / 2 + STEP_S + self.computing_s)


def arrivals(seed: int, share: float, seconds: float, *, tail: float = 0.0, deviation: float = 0.2) -> list[Arrival]:
    """Poisson arrivals at a share of what the worker can compute. A prompt of 256 tokens takes 0.15 s on the average,
    give or take `deviation` (of the logarithm); lengths are log-normal with `tail`. The machine is faster or slower for
    a second at a time."""
    draw = random.Random(f"{seed} {share}")
    rate = share / (PROMPT_S + STEP_S)
    coming, now, speed = [], 0.0, [math.exp(draw.gauss(0.0, deviation / 2)) for _ in range(int(seconds) + 1)]
    while (now := now + draw.expovariate(rate)) < seconds:
        num_tokens = max(16, round(PROMPT_TOKENS * draw.lognormvariate(-tail * tail / 2, tail)))
        noise = draw.lognormvariate(-deviation * deviation / 2, deviation) * speed[int(now)]
        coming.append(Arrival(now, num_tokens, PROMPT_S * num_tokens / PROMPT_TOKENS * noise))
    return coming


def clairvoyant(coming: list[Arrival]) -> int:
    """How many must be refused where everybody else is served in turn and in time."""
    free_at, refused = 0.0, 0
    for each in coming:
        done_at = max(free_at, each.at) + STEP_S + each.computing_s
        if done_at - each.at > each.limit_s:
            refused += 1
        else:
            free_at = done_at
    return refused


@dataclass
class Outcome:
    """What became of the requests of some runs."""

    num: int = 0
    refused: int = 0
    on_time: int = 0
    unavoidable: int = 0
    """Refusals of the clairvoyant."""

    @property
    def false_refusals(self) -> float:
        """Share of all requests that were refused beyond those that had to be."""
        return (self.refused - self.unavoidable) / self.num

    @property
    def accepted_on_time(self) -> float:
        """Share of those that were let in."""
        return self.on_time / (self.num - self.refused)


class Run:
    """One run: events in the order of their time."""

    def __init__(self, coming: list[Arrival], outcome: Outcome) -> None:
        self._events: list[tuple[float, int, Callable[[float], object]]] = []
        self._numbers = itertools.count(1)
        self._costs = Costs()
        self._scheduler = PrefillScheduler(
            BlockPool(8192, prefix_cache=False),
            block_size=BLOCK_SIZE,
            chunk_size=512,
            token_budget=1024,
            max_waiting=65536,
            ageing_s=30.0,
            ttft_target_s=lambda tier: TARGET_S,
            costs=self._costs,
        )
        self._told: dict[RequestId, tuple[Given, Expected]] = {}
        self._registry = Registry((P,), (D,), "c")
        for address in (P, D):
            self._registry.opened(address, Incarnation(address), welcome(role_of(address)))
        self._router = Router(self._registry)
        self._ttft_limits = TtftLimits(dict.fromkeys(Tier, TARGET_S))
        self._arrivals: dict[RequestId, Arrival] = {}
        self._stepping = False
        self._received = 0
        self._steps = 0
        self._coming = coming
        self._outcome = outcome

    def run(self) -> None:
        """From the first arrival to the last first token."""
        for number, each in enumerate(self._coming):
            self._at(each.at, partial(self._arrive, number, each))
        end = self._coming[-1].at + 5.0
        for number in range(int(end / HEARTBEAT_S)):
            self._at(number * HEARTBEAT_S, self._heartbeat)
        while self._events:
            now, _, what = heapq.heappop(self._events)
            what(now)
        assert not self._told, "somebody has no first token"

    def _at(self, moment: float, what: Callable[[float], object]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), what))

    # --- the gateway ---

    def _arrive(self, number: int, arrival: Arrival, now: float) -> None:
        route = self._router.choose(Ask(num_tokens=arrival.num_tokens, tier=Tier.INTERACTIVE, now=now), {})
        assert isinstance(route, Handoff)
        if self._ttft_limits.refusal(Tier.INTERACTIVE, route.expected, now) is not None:
            self._outcome.refused += 1
            return
        given = Given(number=number, tier=Tier.INTERACTIVE, num_tokens=arrival.num_tokens, at=now)
        self._registry.took(P, given)
        work = Prefill(
            request=RequestId(f"r{number}"),
            attempt=1,
            token_ids=(7,) * arrival.num_tokens,
            prompt_len=arrival.num_tokens,
            choices=(0,),
            sampling=SamplingParams(max_tokens=32),
            budget_s=600.0,
            tier=Tier.INTERACTIVE,
        )
        self._arrivals[work.request] = arrival
        self._at(now + HOP_S, lambda at: self._take(work, given, route.expected, at))

    def _first_token(self, arrival: Arrival, given: Given, expected: Expected, now: float) -> None:
        ttft_s = now - arrival.at
        self._outcome.on_time += ttft_s <= arrival.limit_s
        self._ttft_limits.observe(Tier.INTERACTIVE, expected, ttft_s, now)
        self._at(now + PULL_S, lambda at: self._registry.left(P, Incarnation(P), given, at))

    # --- the worker ---

    def _take(self, work: Prefill, given: Given, expected: Expected, now: float) -> None:
        self._received = given.number
        self._told[work.request] = given, expected
        self._scheduler.add(PrefillRequest(work, Incarnation("g"), arrived=now, deadline=math.inf))
        if not self._stepping:
            self._step(now)

    def _step(self, now: float) -> None:
        self._scheduler.admit(now)
        chunks = self._scheduler.schedule(now)
        self._stepping = bool(chunks)
        if chunks:
            took_s = STEP_S
            for chunk in chunks:
                arrival = self._arrivals[chunk.prompt.work.request]
                took_s += arrival.computing_s * (chunk.end - chunk.start) / arrival.num_tokens
            self._at(now + took_s, partial(self._step_done, chunks, took_s))

    def _step_done(self, chunks: list[Chunk[PrefillRequest]], took_s: float, now: float) -> None:
        self._steps += 1
        self._costs.observe_prefill(sum(chunk.end - chunk.start for chunk in chunks), took_s)
        for chunk in self._scheduler.step_done(chunks):
            if chunk.last:
                request = chunk.prompt.work.request
                given, expected = self._told.pop(request)
                arrival = self._arrivals.pop(request)
                self._scheduler.holdings.end(chunk.prompt.key)
                self._at(now + HOP_S, partial(self._first_token, arrival, given, expected))
        self._step(now)

    def _heartbeat(self, now: float) -> None:
        load = Heartbeat(
            number=1,
            sent=0,
            steps=self._steps,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks_used=0,
            blocks_total=8192,
            phase=Phase.SERVING,
            queued_tokens=by_tier((r.tier, r.num_uncomputed) for r in self._scheduler.requests()),
            token_s=self._costs.prompt_s_per_token,
            received=self._received,
        )
        self._at(now + HOP_S, lambda at: self._registry.heartbeat(P, load, at))


def measure(share: float, seeds: range, seconds: float = 120.0, *, tail: float = 0.0) -> Outcome:
    """All runs of these seeds, counted together."""
    found = Outcome()
    for seed in seeds:
        coming = arrivals(seed, share, seconds, tail=tail)
        found.num += len(coming)
        found.unavoidable += clairvoyant(coming)
        Run(coming, found).run()
    return found
