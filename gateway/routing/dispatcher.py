"""The shell around flows: links to the workers, a mailbox for each request's client, and timers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.contract.block_hashes import BlockChain, BlockHash
from common.contract.errors import Cause, FingerprintMismatchError
from common.contract.ids import Handle, Incarnation, RequestId, RequestKey
from common.contract.kv_layout import Fingerprint
from common.contract.messages import (
    MAX_OPEN_REQUESTS,
    Abort,
    CacheEvents,
    Decode,
    Drain,
    Failed,
    Heartbeat,
    Hello,
    HelloRefused,
    Message,
    Phase,
    Prefill,
    RequestMessage,
    Resume,
    Role,
    StepTokens,
    Timings,
    Tokens,
    Trial,
    Welcome,
)
from common.contract.tiers import Tier
from common.runtime.channel import RECONNECT_S, ControlClient
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys
from common.runtime.logs import about
from gateway.routing.admission import Admission
from gateway.routing.leaving import Leaving
from gateway.routing.mailbox import Mailbox
from gateway.routing.placement import Placement, Rebind, Route
from gateway.routing.recovery_metrics import RecoveryMetrics
from gateway.routing.router import Cached, Expected, Handoff, Local, LocalPrefill, Router, Routing
from gateway.routing.waiting import Waiting
from gateway.serving.attempt import Assignment, Attempt, Choice, Deliver, DeliverPrompt, Send, WorkerLife
from gateway.serving.flow import Action, AssignmentOver, Done, Fail, Flow, PlacementRequest
from gateway.serving.generation import Delta, Details, Generation, GenerationFailed, PromptDelta, Readiness, Refusal
from gateway.serving.suspicion import Crash
from gateway.serving.waterfall import Leg
from gateway.workers.discovery import Endpoint
from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.registry import Registry
from gateway.workers.worker_view import Given, WorkerView

log = logging.getLogger(__name__)

_BUDGET_GRACE_S = 1.0
"""Seconds after the request's budget before the gateway gives up. The workers' own deadlines come first, because
workers can name the state."""
_MOST_A_TURN = 8
"""Choices placed in one turn of the event loop, those that leave a draining worker included. Placing a prompt of 8,000
tokens takes 0.3 ms."""
_DEGRADED = "degraded: no prefill worker is usable, and decode workers compute the prompts"


@dataclass(slots=True, eq=False)
class _Row:
    """A choice that a decode worker generates, as its handle leads to it."""

    client: _Client
    attempt: Attempt
    choice: Choice
    leg: Leg


@dataclass(slots=True, eq=False)
class _Client:
    """A flow, and the client task that waits for it."""

    flow: Flow
    deadline: float
    """Monotonic seconds at which the request's budget ends."""
    block_size: int
    block_hashes: Sequence[BlockHash]
    """Hashes of the full blocks of the prompt without its last token, which is computed in any case."""
    fingerprint: Fingerprint | None = None
    """Fingerprint of the workers that the request began on; it continues only on workers with the same one."""
    cached: Cached = field(default_factory=dict)
    """Leading prompt tokens that each worker had cached when the request was last placed."""
    given: dict[Assignment, Given] = field(default_factory=dict)
    """Work given to workers for this request and not over yet."""
    failed_at: dict[int, float] = field(default_factory=dict)
    """Choice → when its attempt failed, until its next token."""
    delivered_at: dict[int, float] = field(default_factory=dict)
    """Choice → when it last got tokens."""
    over_at: float = 0.0
    """When the gateway gives the request up, on the event loop's clock."""
    timer: asyncio.TimerHandle | None = None
    """Timer that checks whether the request's time is over, or it has got no token for too long."""
    expected: Expected | None = None
    """Times expected when the request was admitted; None after its first token."""
    retry_after_s: int | None = None
    """Seconds after which the client may retry, if the request is refused."""
    mailbox: Mailbox[Delta | PromptDelta | Done | Fail] = field(default_factory=Mailbox)
    """Events for the client, bounded by the request: at most one delta for each prompt and output token, and one
    end."""

    def about(
        self, event: str, key: RequestKey, more: Callable[[], Mapping[str, object]] = dict, /, **fields: object
    ) -> dict[str, Any]:
        """Extra fields of a log line about an attempt. `id` is the request's id as the client knows it."""
        request_id = self.flow.generation.waterfall.request_id
        return about(event, more, id=request_id, request=key.request, attempt=key.attempt, **fields)


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
        routing: Routing = "expected",
        max_prefix_names: int = 2_000_000,
        admission: Admission | None = None,
        patience_s: float = 10.0,
        silence_s: float = math.inf,
        keys: CurveKeys | None = None,
    ) -> None:
        """`local_prefill_tokens`: a decode worker computes a prompt of which it has at most so many tokens to compute.
        With 0 there is none, because the last token is never cached. `max_prefix_names` bounds the prefix index.
        Without `admission` no request is refused because of expected times. An admitted request waits up to
        `patience_s` while no suitable worker exists. A request that gets no token for `silence_s` fails.
        """
        self._me = me
        self._registry = registry
        self._clock = clock
        self._pulse = pulse
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._keys = keys
        self._placement = Placement(
            registry, Router(registry, local_prefill_tokens=local_prefill_tokens, routing=routing)
        )
        self._admission = admission
        self._index = PrefixIndex(max_prefix_names)
        self._context = zmq.asyncio.Context()
        self._links: dict[str, ControlClient] = {}
        self._open_clients: dict[_Client, None] = {}
        self._clients: dict[RequestId, _Client] = {}
        """Request id as workers know it → client. A request may have several ids."""
        self._rows: dict[Handle, _Row] = {}
        """Handle → choice, of the decode workers' parts that are not over."""
        self._waiting: Waiting[_Client] = Waiting()
        """Choices that wait for workers."""
        self._impatient: dict[PlacementRequest, asyncio.TimerHandle] = {}
        """Waiting choices for which no worker exists; they give up when their timers fire."""
        self._leaving: Leaving[_Client] = Leaving()
        """Running sequences that are to leave draining decode workers."""
        self._looked_at = 0
        """The registry's epoch at the last look at all waiting choices."""
        self._looking = False
        self._left_of_turn = _MOST_A_TURN
        self._listed: dict[str, frozenset[RequestKey]] = {}
        """Worker → requests in the last Hello to it; its Welcome says which of these, and only these, it knows."""
        self._trials: dict[str, Trial] = {}
        """Worker → its last `Trial`: the suspects, if any, for which the engine computes its steps."""
        self._usable = asyncio.Event()
        self._linking: dict[asyncio.Task[None], ControlClient] = {}
        self._follows = False
        """Whether workers are discovered. Discovered workers may be of another version for a while, and are refused."""
        self._broken: asyncio.Future[None] | None = None
        """Set while `run` is running. It fails, and `run` with it, if a link ends because of a bug, or if workers do
        not fit together from the start."""
        self.num_stale_messages = 0
        """Messages about requests that had ended here."""
        self.num_duplicates = 0
        self.num_gaps = 0
        self.num_prefix_hints = 0
        self.num_local_prefills: Counter[LocalPrefill] = Counter()
        self.num_refused: Counter[tuple[Role, Tier]] = Counter()
        """Requests refused by admission, by the role that they would have waited for, and tier."""
        self.handoffs: Counter[tuple[str, str]] = Counter()
        """Sequences that a decode worker took over, by (address of the prefill worker, its own address)."""
        self.recovery = RecoveryMetrics()
        self._details = Details(workers=self.workers, in_flight=lambda: len(self._open_clients))
        self._degraded = False
        """Whether a request has been routed while no prefill worker was usable, and none has been usable since."""

    # --- the loops -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep links to every worker until cancelled.

        Raises `FingerprintMismatchError` if workers turn out not to fit together before each role had a usable worker.
        A misfit that is discovered, comes later, or occurs while requests are open is logged, and the worker is
        refused.
        """
        self._broken = asyncio.get_running_loop().create_future()
        for address in self._registry.workers:
            self._link(address)
        try:
            await self._broken
        finally:
            self._broken = None
            tasks = list(self._linking)
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._context.destroy(linger=100)

    def follow(self, role: Role, endpoints: Collection[Endpoint]) -> None:
        """Replace the list of all workers of a role (`gateway.workers.discovery.Tell`). A worker that is no longer
        listed gets no new work, may finish what it has, and is forgotten when its session ends."""
        self._follows = True
        listed = {each.address: each for each in endpoints}
        for address, endpoint in listed.items():
            worker = self._registry.workers.get(address)
            if worker is not None and (worker.role, worker.identity) != (role, endpoint.identity):
                self._forget(address, "its address is another worker's now")
                worker = None
            if worker is None:
                self._registry.add(role, endpoint)
                if self._broken is not None:
                    self._link(address)
        self._registry.relist(role, {each.address: each.serving for each in endpoints})
        for worker in list(self._registry.workers.values()):
            if not worker.listed and worker.incarnation is None:
                self._forget(worker.address, "it is not listed any more")
        self._look_again()

    def _link(self, address: str) -> None:
        link = ControlClient(self._context, address, self._me, self, self._clock, self._pulse, self._keys)
        self._links[address] = link
        task = asyncio.create_task(link.run())
        self._linking[task] = link
        task.add_done_callback(self._on_link_end)

    def _on_link_end(self, task: asyncio.Task[None]) -> None:
        link = self._linking.pop(task)
        if self._broken is not None and not self._broken.done() and not task.cancelled():
            self._broken.set_exception(task.exception() or AssertionError(f"the link to {link.address} has ended"))

    def _forget(self, address: str, why: str) -> None:
        """Remove a worker that no longer exists."""
        link = self._links.pop(address, None)
        if link is not None:
            if self._registry.workers[address].incarnation is not None:
                self._session_over(link, why, crashed=False)
            link.retire()
            next(task for task, of in self._linking.items() if of is link).cancel()
        self._registry.remove(address)

    async def wait_usable(self) -> None:
        """Wait until a worker of each role is usable."""
        await self._usable.wait()

    # --- the Generator -------------------------------------------------------------------------------------------

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        """Run one generation; see `gateway.serving.generation.Generator`."""
        client = self._open(generation)
        flow = client.flow
        client.over_at = asyncio.get_running_loop().time() + generation.budget_s + _BUDGET_GRACE_S
        self._watch(client)
        try:
            while True:
                match await client.mailbox.get():
                    case Delta() as delta:
                        delta.more = generation.num_choices == 1 and len(client.mailbox) > 0
                        yield delta
                    case PromptDelta() as delta_of_prompt:
                        yield delta_of_prompt
                    case Done():
                        return
                    case Fail(cause, message):
                        raise GenerationFailed(cause, message, retry_after_s=client.retry_after_s)
        finally:
            if client.timer is not None:
                client.timer.cancel()
            self._do(client, flow.cancel())
            self._close(client)

    def ready(self) -> Readiness:
        """Whether a request that arrives now could be served."""
        missing = self._registry.missing()
        reason = "ready"
        if missing:
            reason = f"no {' and no '.join(missing)} worker is usable" if Role.DECODE in missing else _DEGRADED
        return Readiness(
            ready=Role.DECODE not in missing,
            reason=reason,
            max_sequence_tokens=self._registry.max_sequence_tokens,
            details=self._details,
        )

    def workers(self) -> list[dict[str, object]]:
        """State of each worker for operators; JSON values only."""
        return [
            {
                "id": worker.address,
                "role": worker.role.value,
                "phase": worker.load.phase.value if worker.load else None,
                "safe_to_delete": worker.load is not None and worker.load.phase is Phase.DRAINED,
                "usable": worker.usable,
                "transport": worker.welcome.transport if worker.welcome else None,
                "refused": worker.refused,
                "restarts": worker.restarts,
                "in_flight": worker.in_flight,
                "blocks_used": worker.load.blocks_used if worker.load else None,
                "blocks_total": worker.load.blocks_total if worker.load else None,
            }
            for worker in self._registry.workers.values()
        ]

    def worker_views(self) -> Collection[WorkerView]:
        """All workers of the registry."""
        return self._registry.workers.values()

    def open_flows(self) -> list[tuple[Flow, float]]:
        """The open requests, oldest first, with their arrival times."""
        return [(client.flow, client.deadline - client.flow.generation.budget_s) for client in self._open_clients]

    def tell(self, address: str, *, drain: bool) -> bool:
        """Tell a worker to drain, or to serve again. False if it cannot be reached."""
        if self._registry.workers[address].incarnation is None:
            return False
        self._links[address].send(Drain() if drain else Resume())
        return True

    def collect(self) -> Iterable[Metric]:
        """Current values of the Prometheus metrics (`prometheus_client.registry.Collector`)."""
        usable = GaugeMetricFamily("baton_gateway_workers_usable", "Workers that may be given work.", labels=["role"])
        for role in (Role.PREFILL, Role.DECODE):
            usable.add_metric([role], len(self._registry.usable(role)))
        yield usable
        restarts = CounterMetricFamily(
            "baton_gateway_worker_restarts", "Times that a worker's address was another process's.", labels=["role"]
        )
        for role in (Role.PREFILL, Role.DECODE):
            restarts.add_metric([role], self._registry.num_restarts[role])
        yield restarts
        yield GaugeMetricFamily(
            "baton_gateway_prefix_blocks", "Cached blocks that workers have told of.", self._index.num_blocks
        )
        yield GaugeMetricFamily(
            "baton_gateway_prefix_names", "Blocks in the prefix index, whoever holds them.", self._index.num_names
        )
        yield GaugeMetricFamily("baton_gateway_flows", "Requests between workers and clients.", len(self._open_clients))
        for name, text, value in (
            ("stale_messages", "Messages about requests that had ended.", self.num_stale_messages),
            ("duplicates", "Token frames that repeated what was known.", self.num_duplicates),
            ("gaps", "Token frames that came before an earlier one.", self.num_gaps),
            ("prefix_names_forgotten", "Blocks dropped from the full prefix index.", self._index.num_forgotten),
            ("prefix_hints", "Prefills told of a worker that has the prompt's beginning.", self.num_prefix_hints),
            ("handoffs", "Sequences that a decode worker took over from a prefill worker.", self.handoffs.total()),
        ):
            yield CounterMetricFamily(f"baton_gateway_{name}", text, value)
        local = CounterMetricFamily(
            "baton_gateway_local_prefills", "Requests whose prompt a decode worker computes.", labels=["reason"]
        )
        for reason in LocalPrefill:
            local.add_metric([reason], self.num_local_prefills[reason])
        yield local
        refused = CounterMetricFamily(
            "baton_gateway_refused",
            "Requests refused for what they would have had to wait, by what there was too little of.",
            labels=["role", "tier"],
        )
        for role, tier in itertools.product((Role.PREFILL, Role.DECODE), Tier):
            refused.add_metric([role, tier], self.num_refused[role, tier])
        yield refused
        if self._admission is not None:
            margins = GaugeMetricFamily(
                "baton_gateway_admission_margin", "Share of the time allowed that may be waited for.", labels=["tier"]
            )
            for tier in Tier:
                margins.add_metric([tier], self._admission.margin(tier, self._clock()))
            yield margins
        yield from self.recovery.collect()

    # --- life cycle of a request ---------------------------------------------------------------------------------

    def _open(self, generation: Generation) -> _Client:
        readiness = self.ready()
        if not readiness.ready:
            raise GenerationFailed(Cause.WORKER_LOST, readiness.reason)
        if len(self._open_clients) >= MAX_OPEN_REQUESTS:
            raise GenerationFailed(Cause.CAPACITY, f"{MAX_OPEN_REQUESTS} generations in flight already")
        block_size = self._registry.block_size
        chain = BlockChain(block_size, generation.cache_salt)
        # The last token is computed in any case, because its logits are needed.
        chain.extend(generation.token_ids, len(generation.token_ids) - 1)
        now = self._clock()
        generation.waterfall.opened(now)
        client = _Client(Flow(generation), now + generation.budget_s, block_size, chain.hashes)
        self._open_clients[client] = None
        self._do(client, client.flow.begin())
        return client

    def _watch(self, client: _Client) -> None:
        """Fail a request whose time is over, or that has got no token for too long; else set a timer for the earliest
        moment that this may be so. Tokens do not touch the timer."""
        loop = asyncio.get_running_loop()
        opened_at = client.deadline - client.flow.generation.budget_s
        last_at = max(client.delivered_at.values(), default=opened_at)
        time_s, silence_s = client.over_at - loop.time(), last_at + self._silence_s - self._clock()
        if time_s > 0 and silence_s > 0:
            client.timer = loop.call_later(min(time_s, silence_s), self._watch, client)
            return
        why = (
            "the request's time ran out at the gateway"
            if time_s <= 0
            else f"no token has come for {self._silence_s:g} s"
        )
        self._do(client, client.flow.fail(Cause.DEADLINE, f"{why}; last: {client.flow.story[-1:]}"))

    def _close(self, client: _Client) -> None:
        flow = client.flow
        del self._open_clients[client]
        self._observe(client, self._clock())
        for request in flow.requests:
            self._clients.pop(request, None)
        for want in self._waiting.of(client):
            self._stop_waiting(want)
        self.num_duplicates += flow.num_duplicates
        self.num_gaps += flow.num_gaps
        for cause, number in flow.failures.items():
            self.recovery.failovers[cause] += number
        log.debug("request %s: %s", next(iter(flow.requests)), flow.story[-1])

    def _do(self, client: _Client, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(assignment, message):
                    if (link := self._links.get(assignment.place.address)) is None:
                        continue  # the worker is forgotten: its assignments are over
                    link.send(message)
                    if isinstance(message, Prefill | Decode):
                        given = client.given[assignment] = self._given(client, assignment, message)
                        self._registry.took(assignment.place.address, given)
                        self.recovery.trials[message.suspicion] += 1
                case Deliver():
                    self._deliver(client, action)
                case DeliverPrompt(delta):
                    client.mailbox.put(delta)
                case PlacementRequest():
                    self._want(client, action)
                case AssignmentOver(assignment):
                    had = client.given.pop(assignment, None)
                    self._registry.left(assignment.place.address, assignment.place.incarnation, had, self._clock())
                    for handle in assignment.handles:
                        self._rows.pop(handle, None)
                case Done() | Fail():
                    client.mailbox.put(action)

    def _given(self, client: _Client, assignment: Assignment, work: Prefill | Decode) -> Given:
        """The work that a message, just sent, gives to a worker."""
        computes = isinstance(work, Prefill) or work.source is None
        decodes = isinstance(work, Decode)
        return Given(
            number=self._links[assignment.place.address].num_sent,
            tier=work.tier,
            num_tokens=len(work.token_ids) - client.cached.get(assignment.place, 0) if computes else 0,
            num_sequences=len(work.choices) if decodes else 0,
            num_blocks=-(-len(work.token_ids) // client.block_size) if decodes else 0,
            at=self._clock(),
        )

    def _deliver(self, client: _Client, deliver: Deliver) -> None:
        delta = deliver.delta
        now = self._clock()
        self._observe(client, now)
        if delta.choice in client.failed_at:
            self.recovery.resume.observe(now - client.failed_at.pop(delta.choice))
        client.delivered_at[delta.choice] = now
        client.flow.generation.waterfall.tokens(deliver.attempt, delta.choice, deliver.role, now)
        client.mailbox.put(delta)

    def _observe(self, client: _Client, now: float) -> None:
        """Report to admission that an admitted request has its first token, or will never have one."""
        expected, client.expected = client.expected, None
        if expected is not None and self._admission is not None:
            generation = client.flow.generation
            came_at = generation.waterfall.arrived_at or generation.waterfall.opened_at or now
            self._admission.observe(generation.tier, expected, now - came_at, now)

    # --- workers for a request -----------------------------------------------------------------------------------

    def _want(self, client: _Client, want: PlacementRequest) -> None:
        """Choices want workers; place them now, or after `want.delay_s`."""
        if client.fingerprint is not None:  # they had workers before
            choices = [choice.index for choice in want.choices]
            why = client.flow.story[-1]
            client.expected = None
            fields = client.about("failed_over", want.key, choices=choices, why=why)
            log.warning("request %s goes on elsewhere: %s", want.key.request, why, extra=fields)
            now = self._clock()
            client.flow.generation.waterfall.failed(choices, now)
            for choice in choices:
                client.failed_at.setdefault(choice, now)
        if want.delay_s > 0:
            asyncio.get_running_loop().call_later(want.delay_s, self._wait, client, want)
        else:
            self._wait(client, want)

    def _wait(self, client: _Client, want: PlacementRequest) -> None:
        """Let choices wait for workers, and look at the waiting choices."""
        if client.flow.running:
            self._waiting.add(want, client)
            self._look_again()

    def _stop_waiting(self, want: PlacementRequest) -> None:
        self._waiting.discard(want)
        if (timer := self._impatient.pop(want, None)) is not None:
            timer.cancel()

    def _look_again(self) -> None:
        """Place waiting choices and move leaving sequences, a few in each turn of the event loop, so that other tasks
        need not wait for all of them. Costs nothing while nothing has changed, however many choices wait."""
        if self._looking:
            return  # a caller further up the stack is looking
        self._looking = True
        try:
            self._go_on()
        finally:
            self._looking = False

    def _go_on(self) -> None:
        if self._looked_at != self._registry.epoch:
            self._looked_at = self._registry.epoch
            self._waiting.look_again()
            if not self._registry.missing():
                self._usable.set()
        while self._left_of_turn:
            waiting = self._waiting.next(self._registry.takes)
            if waiting is None and not self._leaving:
                break
            if self._left_of_turn == _MOST_A_TURN:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._left_of_turn -= 1
            if waiting is None or (self._leaving and self._left_of_turn % 2 == 0):  # alternate if there are both
                self._move_one()
            else:
                self._place(*waiting)

    def _next_turn(self) -> None:
        self._left_of_turn = _MOST_A_TURN
        self._look_again()

    def _place(self, want: PlacementRequest, client: _Client) -> None:
        """Begin an attempt, let the choices wait, or end the request, depending on the workers there are."""
        generation, fits = client.flow.generation, client.fingerprint
        places = self._placement.places(want, fits)
        if not client.flow.running:
            self._stop_waiting(want)
        elif not places and want.refusal is not None and not want.admitted:
            self._stop_waiting(want)
            self._do(client, client.flow.fail(want.refusal.cause, want.refusal.message))
        elif not places or (want.admitted and all(worker.full for worker in places)):
            self._waiting.park(want, generation.tier.rank, frozenset(worker.place for worker in places))
            self._be_patient(want, want.admitted and self._placement.hope(want, fits))
        elif want.offer is not None and not self._placement.stands(want):
            self._stop_waiting(want)
            self._do(client, client.flow.without_offer(want))
        else:
            self._stop_waiting(want)
            self._route(want, client)

    def _be_patient(self, want: PlacementRequest, hope: bool) -> None:
        """Let choices wait: for `patience_s` at most if no suitable worker exists, else until the request's
        deadline."""
        if not hope and want not in self._impatient:
            loop = asyncio.get_running_loop()
            self._impatient[want] = loop.call_later(self._patience_s, self._out_of_patience, want)
        elif hope and (timer := self._impatient.pop(want, None)) is not None:
            timer.cancel()

    def _route(self, want: PlacementRequest, client: _Client) -> None:
        # A prompt whose log probabilities are wanted is computed from its first token, so cached prefixes do not count.
        num_blocks = self._index.longest(client.block_hashes) if client.flow.report.complete else {}
        client.cached = {place: num * client.block_size for place, num in num_blocks.items()}
        generation = client.flow.generation
        beside = client.flow.beside(want)
        route = self._placement.choose(want, generation.tier, client.cached, self._clock(), client.fingerprint, beside)
        assert route is not None, "there are decode workers for it"
        route, refusal = self._let_in(client, want, route)
        if generation.waterfall.route is dict and not isinstance(route, Rebind):
            generation.waterfall.route = route.explain
        if refusal is None:
            self._go(client, want, route)
        else:
            client.retry_after_s = refusal.retry_after_s
            self._do(client, client.flow.fail(Cause.CAPACITY, refusal.message))

    def _let_in(self, client: _Client, want: PlacementRequest, route: Route) -> tuple[Route, Refusal | None]:
        """Where a request goes, and why it is refused, if it is. Admission is decided once for each request: its other
        prompts follow the first, and failovers are admitted. The best route may be one with a wait, so before a refusal
        the route with the least wait is tried."""
        generation = client.flow.generation
        admittance = generation.admittance
        if self._admission is None or admittance.decided or isinstance(route, Rebind):
            admittance.decided = True
            return route, admittance.refusal
        admittance.decided = True
        now, tier = self._clock(), generation.tier
        admittance.refusal = self._admission.refusal(tier, route.expected, now)
        if admittance.refusal is not None:
            other = self._placement.choose(want, tier, client.cached, now, client.fingerprint, least_wait=True)
            if isinstance(other, Handoff | Local) and self._admission.refusal(tier, other.expected, now) is None:
                route, admittance.refusal = other, None
        if admittance.refusal is None:
            client.expected = route.expected
            return route, None
        turn = isinstance(route, Handoff) and route.expected.waits_for_turn
        self.num_refused[Role.PREFILL if turn else Role.DECODE, tier] += 1
        return route, admittance.refusal

    def _out_of_patience(self, want: PlacementRequest) -> None:
        """End a request that has waited `patience_s` while no suitable worker existed."""
        client = self._waiting.client(want)
        flow = client.flow
        why = f"no decode worker has been usable for {self._patience_s:.1f} s"
        if flow.story:  # none yet if a new request has only waited to be looked at
            why = f"{why}; before: {flow.story[-1]}"
        end = Fail(Cause.WORKER_LOST, why)
        if want.refusal is not None and self._placement.all_too_small(want, client.fingerprint):
            end = want.refusal
        self._stop_waiting(want)
        self._do(client, flow.fail(end.cause, end.message))

    def _go(self, client: _Client, want: PlacementRequest, route: Route) -> None:
        flow = client.flow
        self._clients[want.key.request] = client
        prefill = route.prefill.place if isinstance(route, Handoff) else None
        prefix = route.prefix if isinstance(route, Handoff) else None
        if isinstance(route, Local):
            self.num_local_prefills[route.reason] += 1
        elif prefix is not None:
            self.num_prefix_hints += 1
        self._note_degradation()
        if client.fingerprint is None and route.decode.welcome is not None:
            client.fingerprint = route.decode.welcome.fingerprint
        now = self._clock()
        budget_s = max(0.001, client.deadline - now)
        source = prefill if want.offer is None else want.offer.place
        at, source_at = route.decode.place.address, None if source is None else source.address
        choices = [choice.index for choice in want.choices]
        flow.generation.waterfall.began(
            want.key, choices, now, decode=at, prefill=source_at, takes_over=want.offer is not None
        )
        self._do(client, flow.go(want, route.decode.place, prefill, budget_s, prefix, now=now))
        self._add_rows(client, flow.attempts[-1])
        why = flow.generation.waterfall.route
        fields = client.about("routed", want.key, lambda: {"why": why()}, prefill=source_at, decode=at)
        log.info("request %s: %s", want.key.request, flow.story[-1], extra=fields)

    def _add_rows(self, client: _Client, attempt: Attempt) -> None:
        waterfall = client.flow.generation.waterfall
        for handle, choice in zip(attempt.decode.handles, attempt.choices.values(), strict=True):
            self._rows[handle] = _Row(client, attempt, choice, waterfall.leg(attempt.key, choice.index))

    def _note_degradation(self) -> None:
        degraded = Role.PREFILL in self._registry.missing()
        if degraded and not self._degraded:
            log.warning("%s", _DEGRADED)
        elif self._degraded and not degraded:
            log.info("a prefill worker is usable again")
        self._degraded = degraded

    def _move_one(self) -> None:
        """Let a decode worker pull a running sequence from a draining one, if a worker with room exists."""
        leaver = self._leaving.next(self._placement.may_leave)
        if leaver is None:
            return
        client, choice = leaver.client, leaver.choice
        generation = client.flow.generation
        most_tokens = len(generation.token_ids) + generation.sampling.max_tokens
        address = leaver.attempt.decode.place.address
        refuge = self._placement.refuge(address, choice, most_tokens, client.fingerprint)
        if refuge is None:
            return  # there may be room for a shorter sequence
        now = self._clock()
        budget_s = max(0.001, client.deadline - now)
        self._do(client, client.flow.move(leaver.attempt, choice, refuge.place, budget_s, now=now))
        moving = client.flow.attempts[-1]
        generation.waterfall.began(moving.key, [choice.index], now, decode=refuge.address, moving=True)
        self._add_rows(client, moving)
        for request in client.flow.requests:
            self._clients[request] = client

    # --- events from workers (`common.runtime.channel.ClientHandler`) ----------------------------------------------

    def hello(self, link: ControlClient) -> Hello:
        """The Hello to a worker: this gateway, and the requests that the worker holds for it. Requests that it has not
        been sent yet are left out."""
        listed = frozenset(key for client in self._open_clients for key in client.flow.keys_at(link.address))
        self._listed[link.address] = listed = listed - link.unsent_work
        return Hello(role=Role.GATEWAY, fingerprint=None, open_requests=tuple(listed))

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        """Handle the opening of a worker's session."""
        assert link.worker is not None
        try:
            self._registry.opened(link.address, link.worker, welcome)
        except FingerprintMismatchError as error:
            if self._follows or self._usable.is_set() or self._clients:
                log.error("worker refused: %s", error)
            elif self._broken is not None and not self._broken.done():  # the first of several misfits is enough
                self._broken.set_exception(error)
            return
        log.info("%s worker at %s, transport %s", welcome.role, link.address, welcome.transport)
        held = {key for client in self._open_clients for key in client.flow.keys_at(link.address)}
        for request, attempt in set(welcome.open_requests) - held:  # the request has ended here since the Hello
            link.send(Abort(request=request, attempt=attempt))
        self._look_again()

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        """Handle the loss of messages to or from a worker."""
        self._registry.resynced(link.address)
        self._trials.pop(link.address, None)
        open_requests = frozenset(welcome.open_requests)
        for client in list(self._open_clients):
            for attempt, assignment in client.flow.assignments_at(link.address):
                if assignment.key in self._listed[link.address]:
                    self._do(client, client.flow.on_resync(attempt, assignment, known=assignment.key in open_requests))

    def on_message(self, link: ControlClient, message: Message) -> None:
        """Handle a message from a worker."""
        if isinstance(message, Heartbeat):
            if self._registry.heartbeat(link.address, message, self._clock()):
                log.error("the engine of %s makes no progress: what it has goes elsewhere", link.address)
                self._lose(link.address, "its engine makes no progress", crashed=False)
            if self._placement.may_leave(link.address):
                self._leaving.begin(link.address, self._open_clients)
            self._look_again()
        elif isinstance(message, StepTokens):
            self._on_step(link.address, message)
        elif isinstance(message, RequestMessage):
            self._on_request(link.address, message)
        elif isinstance(message, Trial):
            self._trials[link.address] = message
        elif isinstance(message, CacheEvents) and link.worker is not None:
            self._index.apply(WorkerLife(link.address, link.worker), message)

    def _on_step(self, address: str, message: StepTokens) -> None:
        """Give each sequence its token: most need nothing else, the others are handled as if told by `Tokens`."""
        now = self._clock()
        for handle, position, token_id in zip(message.handles, message.positions, message.token_ids, strict=True):
            row = self._rows.get(handle)
            if row is None or row.attempt.decode.place.address != address:
                self.num_stale_messages += 1
                continue
            client, choice = row.client, row.choice
            if choice.index not in client.failed_at and row.attempt.take(choice, position, token_id):
                row.leg.last_at = client.delivered_at[choice.index] = now
                delta, shortcut = Delta(choice.index, (token_id,)), client.flow.generation.shortcut
                if shortcut is None or not client.mailbox.waited_for or not shortcut(delta):
                    client.mailbox.put(delta)
                continue
            key = row.attempt.key
            self._on_request(
                address,
                Tokens(
                    request=key.request,
                    attempt=key.attempt,
                    choice=choice.index,
                    position=position,
                    token_ids=(token_id,),
                ),
            )

    def _on_request(self, address: str, message: RequestMessage) -> None:
        client = self._clients.get(message.request)
        found = None if client is None else client.flow.find(message.key, address)
        if client is None or found is None:
            self.num_stale_messages += 1
            return
        if isinstance(message, Timings):
            client.flow.generation.waterfall.measured(found[0].key, message)
        else:
            self._on_part(client, *found, message)

    def _is_early(self, attempt: Attempt, message: RequestMessage) -> bool:
        """Whether a decode worker reports its source lost before this gateway has decided that itself."""
        if not isinstance(message, Failed) or message.cause is not Cause.WORKER_LOST:
            return False
        source = attempt.moving or attempt.prefill
        link = None if source is None else self._links.get(source.place.address)
        return link is not None and link.broken

    def _on_part(self, client: _Client, attempt: Attempt, assignment: Assignment, message: RequestMessage) -> None:
        if self._is_early(attempt, message):
            # Wait for the gateway's own verdict on that worker: if it has crashed, its requests are suspects.
            asyncio.get_running_loop().call_later(RECONNECT_S, self._on_request, assignment.place.address, message)
            return
        if isinstance(message, Tokens) and assignment.role is Role.DECODE:
            if attempt.prefill is not None and not attempt.decode_has_spoken:
                self.handoffs[attempt.prefill.place.address, assignment.place.address] += 1
            if attempt.moving is not None and not attempt.decode_has_spoken:
                self.recovery.moves["moved"] += 1
                fields = client.about("moved", assignment.key, choice=message.choice, decode=assignment.place.address)
                log.info("request %s: choice %d has moved", assignment.key.request, message.choice, extra=fields)
                self.recovery.pause.observe(self._clock() - client.delivered_at.get(message.choice, self._clock()))
        elif isinstance(message, Failed) and attempt.moving is not None and not attempt.decode_has_spoken:
            self.recovery.moves["stayed"] += 1
        if isinstance(message, Failed):
            self._note_refusal(attempt, assignment, message.cause)
        self._do(client, client.flow.on_message(attempt, assignment, message))

    def _note_refusal(self, attempt: Attempt, assignment: Assignment, cause: Cause) -> None:
        """Apply a refusal to the worker's other requests too, if it concerns them. Two do not: no room for a sequence
        that already runs elsewhere, and too many waiting for one more to be admitted."""
        if cause is Cause.DRAINING or (cause is Cause.CAPACITY and attempt.admitted and attempt.moving is None):
            self._registry.declined(assignment.place.address, cause)

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        """Handle the end of a worker's session."""
        self._session_over(link, why, crashed=crashed)
        if not self._registry.workers[link.address].listed:
            self._forget(link.address, why)
        self._look_again()

    def _session_over(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        self._registry.lost(link.address)
        if link.worker is not None:
            self._index.forget(WorkerLife(link.address, link.worker))
        self._lose(link.address, why, crashed=crashed)

    def _lose(self, address: str, why: str, *, crashed: bool) -> None:
        trial = self._trials.pop(address, Trial(num_requests=0, requests=()))
        # The channel has noticed the loss only now. Work sent in the meantime has never reached the worker.
        at = self._clock() - RECONNECT_S
        crash = Crash(at, trial.num_requests, frozenset(trial.requests)) if crashed else None
        for client in list(self._open_clients):
            self._do(client, client.flow.worker_lost(address, why, crash))

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        """Handle a worker's refusal of this gateway."""
        log.error("%s refuses this gateway: %s", link.address, refused.message)
        # This refusal has ended the session, and with it the worker may have been forgotten.
        if self._links.get(link.address) is link:
            self._registry.refuses(link.address, refused.message)
