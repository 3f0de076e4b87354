"""Placement: from a want of a request to an attempt at workers, and the account of what workers were given. Pure.

Life cycle of a want here:

    waits ──► looked at ──► placed: an attempt begins, or the request is refused
     ▲            │
     │            ▼
     └──────── parked: no worker takes it now, or all are full and others are coming back

`next` decides on one want or one leaving sequence, and returns what the flow decides. Nothing here calls out.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from common.contract.errors import Cause
from common.contract.messages.gateway import Decode, Prefill
from common.contract.messages.session import PULL_LATENCY_S, Profile, Role
from common.contract.tiers import Tier
from common.runtime.probes import counter, gauge
from gateway.dispatch.ask import Ask
from gateway.dispatch.leaving import Leaving
from gateway.dispatch.open_request import OpenRequest
from gateway.dispatch.router import Handoff, Local, LocalPrefill, Route, Router
from gateway.dispatch.ttft_limits import TtftLimits
from gateway.dispatch.waiting import Waiting
from gateway.serving.attempt import Assignment
from gateway.serving.flow_actions import FlowAction, Want
from gateway.serving.generation import Fail
from gateway.workers.load_table import Rows
from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.registry import Registry
from gateway.workers.worker_life import WorkerLife
from gateway.workers.worker_view import Given

log = logging.getLogger(__name__)

DEGRADED = "degraded: no prefill worker is usable, and decode workers compute the prompts"


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Action: no worker exists that could take a want now or later; the request's patience begins."""


Decided = Sequence[tuple[OpenRequest, FlowAction | Hopeless]]
"""What follows, in order, each with its request."""


class Placement:
    """The wants that wait, the sequences that leave, and the work given to workers."""

    def __init__(
        self, registry: Registry, router: Router, index: PrefixIndex, ttft_limits: TtftLimits | None = None
    ) -> None:
        """Without `ttft_limits` no request is refused because of expected times."""
        self._registry = registry
        self._router = router
        self._index = index
        self._ttft_limits = ttft_limits
        self.waiting = Waiting()
        """Choices that wait for workers."""
        self.leaving = Leaving(registry, router)
        """Running sequences that are to leave draining decode workers."""
        self._given: dict[Assignment, Given] = {}
        """Work given to workers and not over yet."""
        self._looked_at = 0
        """The registry's epoch at the last look at all waiting choices."""
        self._held_until = math.inf
        """When choices are to be looked at again that were parked because other decode workers are coming back."""
        self._moved_last = False
        self._degraded = False
        """Whether a request has been routed while no prefill worker was usable, and none has been usable since."""
        self.num_prefix_hints = 0
        self.num_local_prefills: Counter[LocalPrefill] = Counter()
        self._num_by_profile: Counter[tuple[Tier, Profile]] = Counter()
        """Choices of workers, by tier and the decode worker's profile."""
        self._num_refused: Counter[tuple[Role, Tier]] = Counter()
        """Requests refused for their expected times, by the role that they would have waited for, and tier."""

    # --- decisions -----------------------------------------------------------------------------------------------

    def next(self, now: float) -> Decided | None:
        """Decide on the next waiting choices or the next leaving sequence, in turns if there are both; None if there is
        nothing to decide. Costs nothing while nothing has changed, however many choices wait."""
        if self._looked_at != self._registry.epoch or now >= self._held_until:
            self._looked_at = self._registry.epoch
            self._held_until = math.inf
            self.waiting.look_again()
        waiting = self.waiting.next()
        if waiting is None and not self.leaving:
            return None
        self._moved_last = waiting is None or (bool(self.leaving) and not self._moved_last)
        if waiting is None or self._moved_last:
            return self._move_one(now)
        want, request = waiting
        return [(request, action) for action in self._decide(want, request, now)]

    def fail_hopeless(self, want: Want, request: OpenRequest, patience_s: float) -> list[FlowAction]:
        """End a request that has waited `patience_s` while no suitable worker existed."""
        flow, ask = request.flow, Ask.of(want, request.flow, fingerprint=request.fingerprint)
        if flow.refusal is not None and self._router.all_too_small(ask):
            return flow.fail(flow.refusal)
        why = f"no decode worker has been usable for {patience_s:.1f} s"
        return flow.fail(Fail(Cause.WORKER_LOST, f"{why}; before: {flow.failure}" if flow.failure else why))

    def answered(self, request: OpenRequest, now: float) -> None:
        """Learn from an accepted request that has its first token, or will never have one."""
        expected, request.expected = request.expected, None
        if expected is not None and self._ttft_limits is not None:
            # Not from its arrival: a client may take its time to send the body, for which nobody waits.
            self._ttft_limits.observe(request.flow.generation.tier, expected, now - request.came_at, now)

    # --- assignments ---------------------------------------------------------------------------------------------

    def gave(
        self, request: OpenRequest, assignment: Assignment, work: Prefill | Decode, number: int, now: float
    ) -> None:
        """Record the work that message `number` of a session, just sent, gives to a worker."""
        computes = isinstance(work, Prefill) or work.source is None
        decodes = isinstance(work, Decode)
        given = self._given[assignment] = Given(
            number=number,
            tier=work.tier,
            num_tokens=self._num_to_compute(request, assignment.life, work) if computes else 0,
            num_sequences=len(work.choices) if decodes else 0,
            num_blocks=-(-len(work.token_ids) // request.block_size) if decodes else 0,
            at=now,
        )
        self._registry.took(assignment.life.address, given)

    def over(self, assignment: Assignment, now: float) -> None:
        """Record that a worker has nothing more to do for an assignment."""
        given = self._given.pop(assignment, None)
        self._registry.left(assignment.life.address, assignment.life.incarnation, given, now)

    def handoff_failed(self, source: Assignment, reader: Assignment, why: str, now: float) -> None:
        """Record that a decode worker could not read from a prefill worker that is well."""
        pause_s = self._router.paths.failed(source.life, reader.life, now)
        if pause_s:
            text = "no handoffs from %s to %s for %g s, as the last one has failed: %s"
            log.warning(text, source.life.address, reader.life.address, pause_s, why)

    # --- internal steps ------------------------------------------------------------------------------------------

    def _num_to_compute(self, request: OpenRequest, life: WorkerLife, work: Prefill | Decode) -> int:
        """Prompt tokens that a worker probably computes: neither cached there nor cheaper to pull from another one."""
        num_held, load = request.cached.get(life, 0), self._registry.workers[life.address].load
        if isinstance(work, Prefill) and work.prefix is not None and load is not None:
            num_pulled = work.prefix.num_tokens - num_held
            if PULL_LATENCY_S + load.pulled_token_s * num_pulled < load.token_s * num_pulled:
                num_held += num_pulled
        return len(work.token_ids) - num_held

    def _decide(self, want: Want, request: OpenRequest, now: float) -> Sequence[FlowAction | Hopeless]:
        """Begin an attempt, let the choices wait, or end the request, depending on the workers there are."""
        flow = request.flow
        ask = Ask.of(want, flow, now, request.fingerprint)
        takers = self._router.takers(ask)
        if not len(takers) and self._offers_in_vain(want, request):
            return flow.give_up_offer(want)
        held = self._holds(ask, takers)
        if held or (not len(takers) and (flow.refusal is None or flow.admitted)):
            if held:
                self._held_until = self._registry.coming_back_until()
            self.waiting.park(want)
            return self._note_hope(want, ask)
        self.waiting.discard(want)
        if not len(takers):
            assert flow.refusal is not None
            return flow.fail(flow.refusal)
        return self._route(want, request, ask)

    def _holds(self, ask: Ask, takers: Rows) -> bool:
        """Whether an admitted request waits although decode workers may take it: none of those from which one would be
        chosen has room, and others are coming back. Else the first one back would get all requests that wait, and those
        that find no room would stay there. They are looked at again when another one is back, or with the first
        heartbeat after the time for it."""
        if not ask.admitted or not len(takers) or ask.now >= self._registry.coming_back_until():
            return False
        return not self._router.has_room(ask, ask.decode_rows(self._registry.table, takers))

    def _offers_in_vain(self, want: Want, request: OpenRequest) -> bool:
        """Whether an offer holds a request back: the usable decode workers have another fingerprint than the worker
        that offers, and could begin the request anew."""
        if want.offer is None or request.told or not len(self._registry.usable_rows(Role.DECODE)):
            return False
        return self._registry.workers[want.offer.life.address].refused is not None

    def _note_hope(self, want: Want, ask: Ask) -> Sequence[Hopeless]:
        """Let choices wait until the request's deadline, or, if no suitable worker exists, as long as its patience
        lasts."""
        if ask.admitted and self._router.hope(ask):
            want.hopeless_at = None
        elif want.hopeless_at is None:
            want.hopeless_at = ask.now
            return [Hopeless()]
        return []

    def _route(self, want: Want, request: OpenRequest, ask: Ask) -> Sequence[FlowAction]:
        flow, generation = request.flow, request.flow.generation
        request.hash_prompt(self._registry.usable_now.block_size)
        # A prompt whose log probabilities are wanted is computed from its first token, so cached prefixes do not count.
        num_blocks = self._index.longest(request.block_hashes) if flow.report.complete else {}
        request.cached = {life: num * request.block_size for life, num in num_blocks.items()}
        if want.offer is not None:
            return self._go(want, request, self._router.rebind(want.offer.life, ask, request.cached), ask.now)
        route = self._within_limits(request, self._router.choose(ask, request.cached), ask)
        if generation.waterfall.route is None:
            generation.waterfall.route = route.explain
        if generation.admittance.refusal is not None:
            return flow.fail(generation.admittance.refusal)
        return self._go(want, request, route, ask.now)

    def _within_limits(self, request: OpenRequest, route: Handoff | Local, ask: Ask) -> Handoff | Local:
        """Where a request goes, if it is accepted; else its admittance has the refusal. That is decided once for each
        request: its other prompts follow the first, and failovers are let in. The best route may be one with a wait, so
        before a refusal the route with the least wait is tried."""
        admittance, limits = request.flow.generation.admittance, self._ttft_limits
        decided, admittance.decided = admittance.decided, True
        if limits is None or decided:
            return route
        refusal = limits.refusal(ask.tier, route.expected, ask.now)
        if refusal is not None:
            sooner = self._router.choose(ask._replace(least_wait=True), request.cached)
            if limits.refusal(ask.tier, sooner.expected, ask.now) is None:
                route, refusal = sooner, None
        if refusal is None:
            request.expected = route.expected
        else:
            turn = isinstance(route, Handoff) and route.expected.waits_for_turn
            self._num_refused[Role.PREFILL if turn else Role.DECODE, ask.tier] += 1
        admittance.refusal = refusal
        return route

    def _go(self, want: Want, request: OpenRequest, route: Route, now: float) -> Sequence[FlowAction]:
        flow = request.flow
        prefill = route.prefill.life if isinstance(route, Handoff) else None
        prefix = route.prefix if isinstance(route, Handoff) else None
        if isinstance(route, Local):
            self.num_local_prefills[route.reason] += 1
        elif prefix is not None:
            self.num_prefix_hints += 1
        self._num_by_profile[flow.generation.tier, route.decode.profile] += 1
        self._note_degradation()
        if request.fingerprint is None and route.decode.welcome is not None:
            request.fingerprint = route.decode.welcome.fingerprint
        actions = flow.go(want, route.decode.life, prefill, request.budget_s(now), prefix, now=now)
        source = prefill if want.offer is None else want.offer.life
        if source is not None:
            self._router.paths.tries(source, route.decode.life, now)
        fields = request.about(
            "routed",
            want.key,
            lambda: {"why": flow.generation.waterfall.explain_route()},
            prefill=None if source is None else source.address,
            decode=route.decode.address,
        )
        answer_id = flow.generation.waterfall.request_id
        log.info("request %s of %s: %s", want.key.request, answer_id, flow.story[-1], extra=fields)
        return actions

    def _note_degradation(self) -> None:
        degraded = Role.PREFILL in self._registry.missing()
        if degraded and not self._degraded:
            log.warning("%s", DEGRADED)
        elif self._degraded and not degraded:
            log.info("a prefill worker is usable again")
        self._degraded = degraded

    def _move_one(self, now: float) -> Decided:
        """Let a decode worker pull a running sequence from a draining one, if a worker with room exists."""
        leaver = self.leaving.next()
        if leaver is None:
            return []
        request, choice, generation = leaver.request, leaver.choice, leaver.request.flow.generation
        address = leaver.attempt.decode.life.address
        refuge = self.leaving.refuge(address, choice, generation.most_tokens, request.fingerprint, generation.tier, now)
        if refuge is None:
            return []  # there may be room for a shorter sequence
        actions = request.flow.move(leaver.attempt, choice, refuge.life, request.budget_s(now), now=now)
        return [(request, action) for action in actions]

    # --- results -------------------------------------------------------------------------------------------------

    def collect(self, now: float) -> Iterable[Metric]:
        """Metrics of routes and refusals."""
        text = "Pairs of a prefill and a decode worker of which the last handoff has failed, although both are well."
        yield gauge("baton_gateway_broken_paths", text, self._router.paths.num_broken(now))
        text = "Prefills told of a worker that has the prompt's beginning."
        yield counter("baton_gateway_prefix_hints", text, self.num_prefix_hints)
        local = {reason.value: self.num_local_prefills[reason] for reason in LocalPrefill}
        text = "Requests whose prompt a decode worker computes."
        yield counter("baton_gateway_local_prefills", text, local, "reason")
        by_profile = {(t.value, p.value): self._num_by_profile[t, p] for t, p in itertools.product(Tier, Profile)}
        text = "Placements, by the request's tier and the decode worker's profile."
        yield counter("baton_gateway_placements", text, by_profile, "tier", "profile")
        short_of = itertools.product((Role.PREFILL, Role.DECODE), Tier)
        refused = {(role.value, tier.value): self._num_refused[role, tier] for role, tier in short_of}
        text = "Requests refused for what they would have had to wait, by what there was too little of."
        yield counter("baton_gateway_refused", text, refused, "role", "tier")
        if self._ttft_limits is not None:
            margins = {tier.value: self._ttft_limits.margin(tier, now) for tier in Tier}
            text = "Share of the time allowed that may be waited for."
            yield gauge("baton_gateway_admission_margin", text, margins, "tier")
