"""The shell around flows: links to the workers, a queue for each request's client, time."""

from __future__ import annotations

import asyncio
import logging
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
    Welcome,
)
from common.runtime.channel import ControlClient
from common.runtime.clock import Clock, Pulse
from gateway.flow import Action, Deliver, Done, Fail, Flow, Place, Send
from gateway.generation import Delta, Generation, GenerationFailed, Readiness
from gateway.registry import Registry, WorkerView
from gateway.router import least_loaded_decode, least_loaded_prefill

log = logging.getLogger(__name__)

_BUDGET_GRACE_S = 1.0
"""The workers' own deadlines come first, since they can name the state; after this the gateway gives up by itself."""


@dataclass(slots=True, eq=False)
class _Client:
    """A flow and the client that waits for it."""

    flow: Flow
    busy: set[Role]
    """Roles whose part in the request is not over."""
    queue: asyncio.Queue[Delta | Done | Fail] = field(default_factory=asyncio.Queue)
    """Bounded by the request: at most one delta for each token, and one end."""


class Dispatcher(Collector):
    """Serves generations with the workers of the registry (`gateway.generation.Generator`)."""

    def __init__(self, me: Incarnation, registry: Registry, clock: Clock, pulse: Pulse) -> None:
        self._me = me
        self._registry = registry
        self._clock = clock
        self._pulse = pulse
        self._context = zmq.asyncio.Context()
        self._links: dict[str, ControlClient] = {}
        self._clients: dict[RequestId, _Client] = {}
        self._listed: dict[str, frozenset[RequestKey]] = {}
        """What the last Hello to each worker listed: its answer judges these alone."""
        self._usable = asyncio.Event()
        self._misfit: asyncio.Future[None]
        """Fails, and `run` with it, when workers do not fit together before the gateway was ever ready."""
        self.num_stale_messages = 0
        """Messages about requests that had ended here."""
        self.num_duplicates = 0
        self.num_gaps = 0

    # --- the loops -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep links to every worker until cancelled.

        Raises `FingerprintMismatchError` when, before the gateway was ever ready, workers turn out not to fit
        together; a misfit that comes later is refused, and logged.
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
        """Wait until a prefill and a decode worker are usable."""
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
        prefill, decode = self._registry.usable(Role.PREFILL), self._registry.usable(Role.DECODE)
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
        missing = " and no ".join(role for role, group in (("prefill", prefill), ("decode", decode)) if not group)
        reason = f"no {missing} worker is usable" if missing else "ready"
        takes = [w.welcome.max_sequence_tokens for w in (*prefill, *decode) if w.welcome is not None]
        return Readiness(
            ready=not missing, reason=reason, details=details, max_sequence_tokens=min(takes, default=None)
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
        ):
            yield CounterMetricFamily(f"baton_gateway_{name}", text, value)

    # --- a request's life ----------------------------------------------------------------------------------------

    def _open(self, generation: Generation) -> _Client:
        readiness = self.ready()
        if not readiness.ready:
            raise GenerationFailed(Cause.WORKER_LOST, readiness.reason)
        if len(self._clients) >= MAX_OPEN_REQUESTS:
            raise GenerationFailed(Cause.CAPACITY, f"{MAX_OPEN_REQUESTS} generations in flight already")
        prefill = least_loaded_prefill(self._registry.usable(Role.PREFILL))
        decode = least_loaded_decode(self._registry.usable(Role.DECODE))
        key = RequestKey(new_request_id(), 1)
        flow = Flow(key, generation, _place(prefill), _place(decode))
        client = _Client(flow, set(flow.places))
        self._clients[key.request] = client
        for place in flow.places.values():
            self._registry.took(place.address, len(generation.token_ids))
        self._do(client, flow.start(generation.budget_s))
        log.info("request %s: %s", key.request, flow.story[-1])
        return client

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
            if self._usable.is_set():
                log.error("worker refused: %s", error)
            elif not self._misfit.done():  # the first of several says it all: the gateway ends with it
                self._misfit.set_exception(error)
            return
        log.info("%s worker at %s, transport %s", welcome.role, link.address, welcome.transport)
        if self.ready().ready:
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
                    if role is Role.PREFILL:  # whatever it says, its prompt is computed, or never will be
                        self._part_over(client, role)
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


def _place(worker: WorkerView) -> Place:
    assert worker.incarnation is not None
    return Place(worker.address, worker.incarnation)
