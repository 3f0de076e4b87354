"""The dispatcher: it holds the open requests, and carries out what is decided about them.

A client comes or leaves, a worker says something or is lost (`gateway.dispatch.links`), or a time is over. The flow of
the request decides what follows (`gateway.serving.flow`), and `gateway.dispatch.placement` which workers it gets. Both
are plain state and return actions. `_carry_out_all` carries out the flow's actions in order; then `look_again` those of
the placement, some in each turn of the event loop, until it has nothing to decide. To carry out an action is to queue
something for a worker or a client, or to note it in the placement. Nothing of that calls back, so no event comes in the
middle of another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from operator import attrgetter, itemgetter

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.fields import MAX_OPEN_REQUESTS, Message, RequestMessage
from common.contract.messages.gateway import Decode, Prefill
from common.contract.messages.session import Role
from common.contract.messages.worker import Failed, StepTokens, Timings, Tokens
from common.contract.tiers import NO_TARGETS, Target, Tier
from common.runtime.channel import RECONNECT_S
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys
from common.runtime.logs import about
from common.runtime.probes import counter, gauge
from gateway.dispatch.links import Links
from gateway.dispatch.open_request import OpenRequest
from gateway.dispatch.placement import DEGRADED, Hopeless, Placement
from gateway.dispatch.recovery_metrics import RecoveryMetrics
from gateway.dispatch.router import Router
from gateway.dispatch.token_rows import TokenRows
from gateway.dispatch.ttft_limits import TtftLimits
from gateway.serving.attempt import Assignment, Attempt, Deliver, SendToWorker
from gateway.serving.flow import Flow
from gateway.serving.flow_actions import AssignmentOver, AttemptBegan, Done, FlowAction, Unwanted, Want
from gateway.serving.generation import Delta, Fail, Generation, GenerationFailed, PromptDelta, Readiness
from gateway.serving.suspicion import Crash
from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.registry import Registry
from gateway.workers.worker_view import WorkerView

log = logging.getLogger(__name__)

_BUDGET_GRACE_S = 1.0
"""Seconds after the request's budget before the gateway gives up. The workers' own deadlines come first, because
workers can name the state."""
_MOST_A_TURN = 8
"""Choices placed in one turn of the event loop, those that leave a draining worker included. Placing a prompt of 8,000
tokens takes 0.3 ms."""


class Dispatcher(Collector):
    """Serves generations with the workers of the registry (`gateway.serving.generation.Generator`)."""

    def __init__(
        self,
        me: Incarnation,
        registry: Registry,
        clock: Clock,
        pulse: Pulse,
        *,
        local_prefill_tokens: int = 0,
        targets: Mapping[Tier, Target] = NO_TARGETS,
        max_prefix_names: int = 2_000_000,
        ttft_limits: TtftLimits | None = None,
        patience_s: float = 10.0,
        silence_s: float = math.inf,
        keys: CurveKeys | None = None,
    ) -> None:
        """`local_prefill_tokens`: a decode worker computes a prompt of which it has at most so many tokens to compute.
        With 0 it computes none, because the last token is never cached. `targets`: by them a decode worker's profile is
        chosen. `max_prefix_names` bounds the prefix index. Without `ttft_limits` no request is refused because of
        expected times. A request waits up to `patience_s` while no suitable worker exists. A request that
        gets no token for `silence_s` fails.
        """
        index = PrefixIndex(max_prefix_names)
        self._registry = registry
        self._router = Router(registry, local_prefill_tokens=local_prefill_tokens, targets=targets)
        self._clock = clock
        self._patience_s = patience_s
        self._silence_s = silence_s
        self.links = Links(me, registry, index, self, clock, pulse, keys)
        self.placement = Placement(registry, self._router, index, ttft_limits)
        self._open: dict[OpenRequest, None] = {}
        self._num_choices = 0
        """Choices of the open requests. Each may have an attempt of its own at a worker, whose Hello then lists it."""
        self._by_id: dict[RequestId, OpenRequest] = {}
        """Request id as workers know it → request. A request may have several ids."""
        self._at: dict[str, dict[OpenRequest, None]] = {}
        """Worker → the open requests that it has, or had."""
        self._rows = TokenRows()
        self._left_of_turn = _MOST_A_TURN
        self._num_stale_messages = 0
        self.handoffs: Counter[tuple[str, str]] = Counter()
        """Prompts that a decode worker took over, by (address of the prefill worker, its own address), of the workers
        that exist. Each is one handoff, however many choices it has."""
        self._num_handoffs = 0
        self.recovery = RecoveryMetrics()

    # --- the Generator -------------------------------------------------------------------------------------------

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        """Run one generation; see `gateway.serving.generation.Generator`."""
        request = self._begin(generation)
        generation.give_up = lambda choice: self._carry_out_all(request, request.flow.give_up(choice))
        try:
            while True:
                match await request.mailbox.get():
                    case Delta() as delta:
                        delta.more = generation.num_choices == 1 and len(request.mailbox) > 0
                        yield delta
                    case PromptDelta() as delta_of_prompt:
                        yield delta_of_prompt
                    case Done():
                        return
                    case Fail(cause, message, retry_after_s):
                        raise GenerationFailed(cause, message, retry_after_s=retry_after_s)
        finally:
            generation.give_up = None  # it holds the request that the generation belongs to
            self._end(request)

    def ready(self) -> Readiness:
        """Whether a request that arrives now could be served."""
        missing = self._registry.missing()
        reason = "ready"
        if missing:
            reason = f"no {' and no '.join(missing)} worker is usable" if Role.DECODE in missing else DEGRADED
        return Readiness(
            ready=Role.DECODE not in missing,
            reason=reason,
            max_sequence_tokens=self._registry.usable_now.max_sequence_tokens,
            usual_sequence_tokens=self._registry.usable_now.usual_sequence_tokens,
            details=lambda: {"workers": self.links.workers(), "in_flight": len(self._open)},
        )

    def _begin(self, generation: Generation) -> OpenRequest:
        admittance, now = generation.admittance, self._clock()
        readiness = self.ready()
        if not (readiness.ready or admittance.taken):
            raise GenerationFailed(Cause.WORKER_LOST, readiness.reason)
        if self._num_choices + generation.num_choices > MAX_OPEN_REQUESTS:
            raise GenerationFailed(Cause.CAPACITY, f"{self._num_choices} choices in flight already")
        if admittance.opened_at is None:
            admittance.opened_at = now
        elif now >= admittance.opened_at + generation.budget_s:
            raise GenerationFailed(Cause.DEADLINE, "the request's time ran out before this prompt's turn")
        request = OpenRequest(Flow(generation, admitted=admittance.taken, tally=self.recovery.tally), now)
        if self._registry.usable_now.block_size:  # else once there is a worker
            request.hash_prompt(self._registry.usable_now.block_size)
        generation.waterfall.opened(admittance.opened_at)
        self._open[request] = None
        self._num_choices += generation.num_choices
        self._watch(request)
        self._carry_out_all(request, request.flow.begin())
        return request

    def _end(self, request: OpenRequest) -> None:
        """The client reads no more."""
        flow = request.flow
        if request.timer is not None:
            request.timer.cancel()
        self._carry_out_all(request, flow.cancel())
        self.placement.answered(request, self._clock())
        del self._open[request]
        self._num_choices -= flow.generation.num_choices
        for request_id in flow.requests:
            self._by_id.pop(request_id, None)
        for address in request.addresses:
            self._at[address].pop(request)
            if not self._at[address]:
                del self._at[address]
        log.debug("request %s: %s", next(iter(flow.requests)), flow.story[-1])

    def _watch(self, request: OpenRequest) -> None:
        """Fail a request whose time is over, that has got no token for too long, or whose patience is over; else set a
        timer for the earliest moment that this may be so. Tokens do not touch the timer."""
        if request not in self._open:
            return
        if request.timer is not None:
            request.timer.cancel()
        now, flow = self._clock(), request.flow
        over_at = request.deadline + _BUDGET_GRACE_S
        silent_at = max(request.came_at, flow.generation.waterfall.last_token_at) + self._silence_s
        hopeless = [(want.hopeless_at, want) for want in flow.wants if want.hopeless_at is not None]
        hopeless_at, want = min(hopeless, key=itemgetter(0), default=(math.inf, None))
        left_s = min(over_at, silent_at, hopeless_at + self._patience_s) - now
        if left_s > 0:
            request.timer = asyncio.get_running_loop().call_later(left_s, self._watch, request)
        elif want is not None and hopeless_at + self._patience_s <= now:
            self._carry_out_all(request, self.placement.fail_hopeless(want, request, self._patience_s))
        else:
            why = f"no token has come for {self._silence_s:g} s"
            if over_at <= now:
                why = "the request's time ran out at the gateway"
            self._carry_out_all(request, flow.fail(Fail(Cause.DEADLINE, f"{why}; {flow.attempts.whereabouts}")))

    # --- what the links report (`gateway.dispatch.links`) ----------------------------------------------------------

    def keys_at(self, address: str) -> set[RequestKey]:
        """The requests that a worker holds, as far as they know."""
        return {key for request in self._at.get(address, ()) for key in request.flow.keys_at(address)}

    def on_step(self, address: str, message: StepTokens) -> None:
        """Give each sequence its token."""
        for tokens in self._rows.deliver(address, message, self._clock()):
            self.on_request(address, tokens)

    def on_request(self, address: str, message: RequestMessage, late: bool = False) -> None:
        """Handle a message about one request. `late`: it has waited for a verdict on a worker."""
        request = self._by_id.get(message.request)
        found = None if request is None else request.flow.attempts.find(message.key, address)
        if request is None or found is None:
            self._num_stale_messages += request is None or not self._on_offer(request, address, message)
            return
        attempt, assignment = found
        if isinstance(message, Timings):
            request.flow.generation.waterfall.measured(attempt.key, message)
        elif assignment is attempt.decode and self._is_early(attempt, message, late):
            # Wait for the gateway's own verdict on that worker: if it has crashed, its requests are suspects.
            asyncio.get_running_loop().call_later(RECONNECT_S, self.on_request, address, message, True)
        else:
            self._note(request, attempt, assignment, message)
            self._carry_out_all(request, request.flow.on_message(attempt, assignment, message))

    def _on_offer(self, request: OpenRequest, address: str, message: RequestMessage) -> bool:
        """Handle a message of a prefill worker whose offer waits for a decode worker. Returns whether it is one."""
        want = request.flow.wants.find(message.key, address)
        if want is None:
            return False
        if isinstance(message, Failed) and message.cause is Cause.DRAINING:
            self._registry.declined(address)
        self._carry_out_all(request, request.flow.on_offer(want, message))
        return True

    def on_resync(self, address: str, listed: frozenset[RequestKey], known: frozenset[RequestKey]) -> None:
        """Handle the loss of messages to or from a worker."""
        for request in self._oldest_at(address):
            self._carry_out_all(request, request.flow.on_resync(address, listed, known))

    def on_loss(self, address: str, why: str, crash: Crash | None) -> None:
        """Handle the loss of what a worker has."""
        self._router.paths.forget(address)
        for request in self._oldest_at(address):
            self._carry_out_all(request, request.flow.worker_lost(address, why, crash))

    def on_load(self, address: str) -> None:
        """Let sequences leave a worker that drains."""
        if self.placement.leaving.may_leave(address):
            self.placement.leaving.begin(address, self._oldest_at(address))

    def on_forgotten(self, address: str) -> None:
        """Keep nothing of a worker that no longer exists."""
        for pair in [pair for pair in self.handoffs if address in pair]:
            del self.handoffs[pair]

    def _oldest_at(self, address: str) -> list[OpenRequest]:
        """The open requests that a worker has, or had, oldest first."""
        return sorted(self._at.get(address, ()), key=attrgetter("came_at"))

    # --- the pump ------------------------------------------------------------------------------------------------

    def _carry_out_all(self, request: OpenRequest, actions: Iterable[FlowAction]) -> None:
        """Carry out what a flow has decided, and all that follows."""
        for action in actions:
            self._carry_out(request, action)
        self.look_again()

    def look_again(self) -> None:
        """Let the placement decide, a few times in each turn of the event loop, so that other tasks need not wait for
        all that wait or leave. Costs nothing while nothing has changed, however many there are."""
        while self._left_of_turn and (decided := self.placement.next(self._clock())) is not None:
            if self._left_of_turn == _MOST_A_TURN:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._left_of_turn -= 1
            for request, action in decided:
                self._carry_out(request, action)

    def _next_turn(self) -> None:
        self._left_of_turn = _MOST_A_TURN
        self.look_again()

    def _carry_out(self, request: OpenRequest, action: FlowAction | Hopeless) -> None:
        match action:
            case SendToWorker(assignment, message):
                number = self.links.send(assignment.life.address, message)
                if number is not None and isinstance(message, Prefill | Decode):
                    self.placement.gave(request, assignment, message, number, self._clock())
                    self.recovery.trials[message.suspicion] += 1
            case Deliver():
                self._deliver(request, action)
            case PromptDelta():
                request.flow.generation.admittance.taken = True
                request.mailbox.put(action)
            case Want():
                self._want(request, action)
            case Unwanted(want):
                self.placement.waiting.discard(want)
            case AttemptBegan(attempt):
                self._began(request, attempt)
            case AssignmentOver(assignment):
                self.placement.over(assignment, self._clock())
                self._rows.remove(assignment.handles)
            case Hopeless():
                asyncio.get_running_loop().call_soon(self._watch, request)
            case Done() | Fail():
                story = request.flow.story
                if isinstance(action, Fail) and len(story) > 1:  # clients are told no addresses
                    work_id, answer_id = next(iter(request.flow.requests)), request.flow.generation.waterfall.request_id
                    fields = about("story", id=answer_id, request=work_id)
                    log.info("request %s of %s failed: %s", work_id, answer_id, "; ".join(story), extra=fields)
                request.mailbox.put(action)

    def _deliver(self, request: OpenRequest, deliver: Deliver) -> None:
        delta, now = deliver.delta, self._clock()
        request.flow.generation.admittance.taken = True
        self.placement.answered(request, now)
        failed_at = request.flow.generation.waterfall.tokens(deliver.key, delta.choice, deliver.role, now)
        if failed_at is not None:
            self.recovery.resume.observe(now - failed_at)
        request.mailbox.put(delta)

    def _want(self, request: OpenRequest, want: Want) -> None:
        """Let choices wait for workers, from now on or after `want.delay_s`."""
        if request.fingerprint is not None:  # they had workers before
            choices = [choice.index for choice in want.choices]
            why = request.flow.story[-1]
            request.expected = None
            fields = request.about("failed_over", want.key, choices=choices, why=why)
            log.warning("request %s goes on elsewhere: %s", want.key.request, why, extra=fields)
            request.flow.generation.waterfall.failed(choices, self._clock())
            request.unbind()
        if want.delay_s > 0:
            asyncio.get_running_loop().call_later(want.delay_s, self._delay_over, request, want)
        else:
            self.placement.waiting.add(want, request)

    def _delay_over(self, request: OpenRequest, want: Want) -> None:
        if want in request.flow.wants:
            self.placement.waiting.add(want, request)
            self.look_again()

    def _began(self, request: OpenRequest, attempt: Attempt) -> None:
        self._by_id[attempt.key.request] = request
        for assignment in attempt.assignments:
            request.addresses.add(assignment.life.address)
            self._at.setdefault(assignment.life.address, {})[request] = None
        prefill = attempt.prefill
        request.flow.generation.waterfall.began(
            attempt.key,
            attempt.choices,
            attempt.decode.given_at,
            decode=attempt.decode.life.address,
            prefill=None if prefill is None else prefill.life.address,
            moving=attempt.moving is not None,
            takes_over=prefill is not None and prefill.key != attempt.key,
        )
        self._rows.add(request, attempt)

    # --- what messages show --------------------------------------------------------------------------------------

    def _is_early(self, attempt: Attempt, message: RequestMessage, late: bool) -> bool:
        """Whether a decode worker reports its source lost, or a read from it failed, before this gateway has decided
        what has become of the source. A read fails as soon as its connection breaks, perhaps before the link has."""
        if not isinstance(message, Failed) or message.cause not in (Cause.WORKER_LOST, Cause.TRANSFER):
            return False
        source = attempt.source
        if source is None:
            return False
        return self.links.may_have_crashed(source.life.address) or (message.cause is Cause.TRANSFER and not late)

    def _note(self, request: OpenRequest, attempt: Attempt, assignment: Assignment, message: Message) -> None:
        """Count a handoff or a move that succeeds with this message, and note what a refusal says of the worker."""
        address = assignment.life.address
        first = assignment is attempt.decode and not attempt.decode_has_spoken
        if isinstance(message, Tokens) and first and message.choice in attempt.choices:
            if attempt.prefill is not None:
                self._router.paths.works(attempt.prefill.life, assignment.life)
                self._num_handoffs += 1
                if attempt.prefill.life.address in self._registry.workers:
                    self.handoffs[attempt.prefill.life.address, address] += 1
            if attempt.moving is not None:
                self.recovery.tally.moves["moved"] += 1
                fields = request.about("moved", assignment.key, choice=message.choice, decode=address)
                log.info("request %s: choice %d has moved", assignment.key.request, message.choice, extra=fields)
                last_at = request.flow.generation.waterfall.last_token_of(message.choice)
                self.recovery.pause.observe(self._clock() - last_at)
        elif isinstance(message, Failed):
            source = attempt.unread_source(assignment, message.cause)
            if source is not None:
                self.placement.handoff_failed(source, assignment, message.message, self._clock())
            if message.cause is Cause.CAPACITY and attempt.moving is not None:
                self._registry.no_room(address, assignment.num_tokens, self._clock())
            elif message.cause is Cause.DRAINING:
                self._registry.declined(address)

    # --- results -------------------------------------------------------------------------------------------------

    def worker_views(self) -> Collection[WorkerView]:
        """All workers of the registry."""
        return self._registry.workers.values()

    def open_flows(self) -> list[Flow]:
        """The open requests, oldest first."""
        return [request.flow for request in self._open]

    @property
    def num_stale_messages(self) -> int:
        """Messages about requests that had ended here."""
        return self._num_stale_messages + self._rows.num_stale

    def collect(self) -> Iterable[Metric]:
        """Current values of the Prometheus metrics (`prometheus_client.registry.Collector`)."""
        yield from self.links.collect()
        yield gauge("baton_gateway_flows", "Requests between workers and clients.", len(self._open))
        for name, text, value in (
            ("stale_messages", "Messages about requests that had ended.", self.num_stale_messages),
            ("handoffs", "Prompts that a decode worker took over from a prefill worker.", self._num_handoffs),
        ):
            yield counter(f"baton_gateway_{name}", text, value)
        yield from self.placement.collect(self._clock())
        yield from self.recovery.collect()
