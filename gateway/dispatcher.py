"""The shell around flows: links to the workers, a queue for each request's client, time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

import zmq.asyncio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.contract.errors import Cause, FingerprintMismatchError
from common.contract.ids import Incarnation, RequestId, RequestKey, new_request_id
from common.contract.messages import (
    MAX_OPEN_REQUESTS,
    Heartbeat,
    Hello,
    HelloRefused,
    Message,
    RequestMessage,
    Role,
    Tokens,
    Welcome,
)
from common.runtime.channel import ControlClient
from common.runtime.clock import Clock, Pulse
from gateway.flow import Action, Deliver, Done, Fail, Flow, FlowState, Send
from gateway.generation import Delta, Generation, GenerationFailed, Readiness
from gateway.prefix_index import PrefixIndex, Trail
from gateway.registry import Registry
from gateway.router import Handoff, Local, LocalPrefill, choose

log = logging.getLogger(__name__)

_BUDGET_GRACE_S = 1.0
"""The workers' own deadlines come first, since they can name the state; after this the gateway gives up by itself."""
_DEGRADED = "degraded: no prefill worker is usable, and decode workers compute the prompts"


@dataclass(slots=True, eq=False)
class _Client:
    """A flow and the client that waits for it."""

    flow: Flow
    busy: set[Role]
    """Roles whose part in the request is not over."""
    trail: Trail | None
    """Of the first choice; None where nothing is remembered."""
    queue: asyncio.Queue[Delta | Done | Fail] = field(default_factory=asyncio.Queue)
    """Bounded by the request: at most one delta for each token, and one end."""


class Dispatcher(Collector):
    """Serves generations with the workers of the registry (`gateway.generation.Generator`)."""

    def __init__(
        self,
        me: Incarnation,
        registry: Registry,
        clock: Clock,
        pulse: Pulse,
        *,
        local_prefill_tokens: int = 0,
        prefix_index_blocks: int = 0,
    ) -> None:
        """A prompt of which a decode worker has at most `local_prefill_tokens` to compute is computed there; 0 has no
        such prompt, since the last token is never cached. `prefix_index_blocks` bounds what is remembered of the
        workers' caches; 0 remembers nothing."""
        self._me = me
        self._registry = registry
        self._clock = clock
        self._pulse = pulse
        self._local_prefill_tokens = local_prefill_tokens
        self._index = PrefixIndex(prefix_index_blocks) if prefix_index_blocks else None
        self._context = zmq.asyncio.Context()
        self._links: dict[str, ControlClient] = {}
        self._clients: dict[RequestId, _Client] = {}
        self._listed: dict[str, frozenset[RequestKey]] = {}
        """What the last Hello to each worker listed: its answer judges these alone."""
        self._usable = asyncio.Event()
        self._misfit: asyncio.Future[None]
        """Fails, and `run` with it, when workers do not fit together from the start."""
        self.num_stale_messages = 0
        """Messages about requests that had ended here."""
        self.num_duplicates = 0
        self.num_gaps = 0
        self.num_prefix_hints = 0
        self.num_local_prefills: Counter[LocalPrefill] = Counter()
        self._degraded = False
        """Whether a request has met the present lack of prefill workers."""

    # --- the loops -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep links to every worker until cancelled.

        Raises `FingerprintMismatchError` when, before each role had a usable worker, workers turn out not to fit
        together; a misfit that comes later, or while requests are served, is refused, and logged.
        """
        self._misfit = asyncio.get_running_loop().create_future()
        tasks = []
        try:
            for address in self._registry.workers:
                link = ControlClient(self._context, address, self._me, self, self._clock, self._pulse)
                self._links[address] = link
                tasks.append(asyncio.create_task(link.run()))
            await asyncio.wait([self._misfit, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for done in (self._misfit, *tasks):
                if done.done():
                    done.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._context.destroy(linger=100)

    async def wait_usable(self) -> None:
        """Wait until a worker of each role is usable."""
        await self._usable.wait()

    # --- the Generator -------------------------------------------------------------------------------------------

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Run one generation; see `gateway.generation.Generator`."""
        client = self._open(generation)
        flow = client.flow
        timer = asyncio.get_running_loop().call_later(generation.budget_s + _BUDGET_GRACE_S, self._time_out, client)
        try:
            while True:
                match await client.queue.get():
                    case Delta() as delta:
                        yield delta
                    case Done():
                        return
                    case Fail(cause, message):
                        raise GenerationFailed(cause, message)
        finally:
            timer.cancel()
            self._do(client, flow.cancel())
            self._close(client)

    def ready(self) -> Readiness:
        """Whether a request that arrives now could be served."""
        missing = self._registry.missing()
        details = {
            "workers": [
                {
                    "address": worker.address,
                    "role": worker.role.value,
                    "usable": worker.usable,
                    "transport": worker.welcome.transport if worker.welcome else None,
                    "refused": worker.refused,
                    "in_flight": worker.in_flight,
                }
                for worker in self._registry.workers.values()
            ],
            "in_flight": len(self._clients),
        }
        usable = [worker for worker in self._registry.workers.values() if worker.usable]
        takes = [worker.welcome.max_sequence_tokens for worker in usable if worker.welcome is not None]
        reason = "ready"
        if missing:
            reason = f"no {' and no '.join(missing)} worker is usable" if Role.DECODE in missing else _DEGRADED
        return Readiness(
            ready=Role.DECODE not in missing,
            reason=reason,
            details=details,
            max_sequence_tokens=min(takes, default=None),
        )

    def collect(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment (`prometheus_client.registry.Collector`)."""
        usable = GaugeMetricFamily("baton_gateway_workers_usable", "Workers that may be given work.", labels=["role"])
        for role in (Role.PREFILL, Role.DECODE):
            usable.add_metric([role], len(self._registry.usable(role)))
        yield usable
        yield GaugeMetricFamily("baton_gateway_flows", "Requests between workers and clients.", len(self._clients))
        for name, text, value in (
            ("stale_messages", "Messages about requests that had ended.", self.num_stale_messages),
            ("duplicates", "Token frames that repeated what was known.", self.num_duplicates),
            ("gaps", "Token frames that came before an earlier one.", self.num_gaps),
            ("prefix_hints", "Prefills told of a worker that has the prompt's beginning.", self.num_prefix_hints),
        ):
            yield CounterMetricFamily(f"baton_gateway_{name}", text, value)
        local = CounterMetricFamily(
            "baton_gateway_local_prefills", "Requests whose prompt a decode worker computes.", labels=["reason"]
        )
        for reason in LocalPrefill:
            local.add_metric([reason], self.num_local_prefills[reason])
        yield local

    # --- a request's life ----------------------------------------------------------------------------------------

    def _open(self, generation: Generation) -> _Client:
        readiness = self.ready()
        if not readiness.ready:
            raise GenerationFailed(Cause.WORKER_LOST, readiness.reason)
        if len(self._clients) >= MAX_OPEN_REQUESTS:
            raise GenerationFailed(Cause.CAPACITY, f"{MAX_OPEN_REQUESTS} generations in flight already")
        trail = self._trail(generation)
        route = self._route(generation, trail)
        prefill = route.prefill.place if isinstance(route, Handoff) else None
        prefix = route.prefix if isinstance(route, Handoff) else None
        key = RequestKey(new_request_id(), 1)
        flow = Flow(key, generation, prefill, route.decode.place)
        client = _Client(flow, set(flow.places), trail)
        self._clients[key.request] = client
        for place in flow.places.values():
            self._registry.took(place.address, len(generation.token_ids))
        self._do(client, flow.start(generation.budget_s, prefix))
        log.info("request %s: %s", key.request, flow.story[-1])
        return client

    def _trail(self, generation: Generation) -> Trail | None:
        if self._index is None:
            return None
        welcome = self._registry.usable(Role.DECODE)[0].welcome
        assert welcome is not None
        block_size = welcome.fingerprint.layout.block_size  # every usable worker's
        return Trail(self._index, block_size, generation.cache_salt, generation.token_ids)

    def _route(self, generation: Generation, trail: Trail | None) -> Handoff | Local:
        """Choose, and count what was chosen."""
        cached = {} if trail is None else trail.cached()
        route = choose(self._registry, len(generation.token_ids), cached, self._local_prefill_tokens)
        if isinstance(route, Local):
            self.num_local_prefills[route.reason] += 1
        elif route.prefix is not None:
            self.num_prefix_hints += 1
        degraded = Role.PREFILL in self._registry.missing()
        if degraded and not self._degraded:
            log.warning("%s", _DEGRADED)
        elif self._degraded and not degraded:
            log.info("a prefill worker is usable again")
        self._degraded = degraded
        return route

    def _time_out(self, client: _Client) -> None:
        message = f"the request's time ran out at the gateway; last: {client.flow.story[-1]}"
        self._do(client, client.flow.fail(Cause.DEADLINE, message))

    def _close(self, client: _Client) -> None:
        flow = client.flow
        del self._clients[flow.key.request]
        self.num_duplicates += flow.num_duplicates
        self.num_gaps += flow.num_gaps
        for role in flow.places:
            self._part_over(client, role)
        if client.trail is not None and flow.decode_has_spoken and flow.state is not FlowState.FAILED:
            client.trail.decoded(flow.places[Role.DECODE])
        log.info("request %s: %s", flow.key.request, flow.story[-1])

    def _part_over(self, client: _Client, role: Role) -> None:
        if role in client.busy:
            client.busy.remove(role)
            place = client.flow.places[role]
            self._registry.left(place.address, place.incarnation, len(client.flow.generation.token_ids))

    def _do(self, client: _Client, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(role, message):
                    self._links[client.flow.places[role].address].send(message)
                case Deliver(delta):
                    if client.trail is not None and delta.choice == 0:
                        client.trail.append(delta.token_ids)
                    client.queue.put_nowait(delta)
                case Done() | Fail():
                    client.queue.put_nowait(action)
                    for role in client.flow.places:
                        self._part_over(client, role)

    # --- events from workers (`common.runtime.channel.ClientHandler`) ----------------------------------------------

    def hello(self, link: ControlClient) -> Hello:
        """This gateway and the requests that this worker holds for it."""
        listed = frozenset(client.flow.key for client, _ in self._clients_at(link.address) if client.flow.running)
        self._listed[link.address] = listed
        return Hello(role=Role.GATEWAY, fingerprint=None, open_requests=tuple(listed))

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        """A worker's session opens."""
        assert link.worker is not None
        try:
            self._registry.opened(link.address, link.worker, welcome)
        except FingerprintMismatchError as error:
            if self._usable.is_set() or self._clients:
                log.error("worker refused: %s", error)
            elif not self._misfit.done():  # the first of several says it all: the gateway ends with it
                self._misfit.set_exception(error)
            return
        log.info("%s worker at %s, transport %s", welcome.role, link.address, welcome.transport)
        if not self._registry.missing():
            self._usable.set()

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        """Messages to or from a worker were lost."""
        open_requests = frozenset(welcome.open_requests)
        for client, role in self._clients_at(link.address):
            if client.flow.key in self._listed[link.address]:
                self._do(client, client.flow.on_resync(role, open_requests))

    def on_message(self, link: ControlClient, message: Message) -> None:
        """A message from a worker."""
        if isinstance(message, Heartbeat):
            self._registry.heartbeat(link.address, message)
        elif isinstance(message, RequestMessage):
            client = self._clients.get(message.request)
            if client is None or client.flow.key != message.key:
                self.num_stale_messages += 1
                return
            for role, place in client.flow.places.items():
                if place.address == link.address:
                    if role is Role.PREFILL and role in client.busy:
                        if isinstance(message, Tokens) and client.trail is not None:
                            client.trail.prompt_computed(place)
                        self._part_over(client, role)  # whatever it says, its prompt is computed, or never will be
                    self._do(client, client.flow.on_message(role, message))

    def on_lost(self, link: ControlClient, why: str) -> None:
        """A worker's session is over."""
        for client, role in self._clients_at(link.address):
            self._do(client, client.flow.worker_lost(role, why))
        self._registry.lost(link.address)

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        """A worker refuses this gateway."""
        log.error("%s refuses this gateway: %s", link.address, refused.message)
        self._registry.workers[link.address].refused = refused.message

    def _clients_at(self, address: str) -> list[tuple[_Client, Role]]:
        return [
            (client, role)
            for client in self._clients.values()
            for role, place in client.flow.places.items()
            if place.address == address
        ]
