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
    prefill: WorkerView
    decode: WorkerView
    queue: asyncio.Queue[Delta | Done | Fail] = field(default_factory=asyncio.Queue)
    """Bounded by the request: at most one delta for each token, and one end."""

    def place(self, role: Role) -> WorkerView:
        return self.prefill if role is Role.PREFILL else self.decode


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
                handler = _WorkerLink(self, address)
                link = ControlClient(self._context, address, self._me, handler, self._clock, self._pulse)
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
        return Readiness(ready=not missing, reason=reason, details=details)

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
        prefill = least_loaded_prefill(self._registry.usable(Role.PREFILL))
        decode = least_loaded_decode(self._registry.usable(Role.DECODE))
        key = RequestKey(new_request_id(), 1)
        flow = Flow(key, generation, _place(prefill), _place(decode))
        client = _Client(flow, prefill, decode)
        self._clients[key.request] = client
        for worker in (prefill, decode):
            worker.in_flight += 1
            worker.in_flight_tokens += len(generation.token_ids)
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
        for role, worker in ((Role.PREFILL, client.prefill), (Role.DECODE, client.decode)):
            if worker.incarnation == flow.places[role].incarnation:
                worker.in_flight -= 1
                worker.in_flight_tokens -= len(flow.generation.token_ids)
        log.info("request %s: %s", flow.key.request, flow.story[-1])

    def _do(self, client: _Client, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(role, message):
                    self._links[client.place(role).address].send(message)
                case Deliver(delta):
                    client.queue.put_nowait(delta)
                case Done() | Fail():
                    client.queue.put_nowait(action)

    # --- events from workers -------------------------------------------------------------------------------------

    def open_requests(self, address: str) -> tuple[RequestKey, ...]:
        """Requests that this worker holds for us."""
        return tuple(c.flow.key for c in self._clients.values() if address in (c.prefill.address, c.decode.address))

    def on_open(self, address: str, incarnation: Incarnation, welcome: Welcome) -> None:
        """A worker's session opens."""
        try:
            self._registry.opened(address, incarnation, welcome)
        except FingerprintMismatchError as error:
            if self._usable.is_set() or self._misfit.done():
                log.error("worker refused: %s", error)
            else:
                self._misfit.set_exception(error)
            return
        log.info("%s worker at %s, transport %s", welcome.role, address, welcome.transport)
        if self.ready().ready:
            self._usable.set()

    def on_resync(self, address: str, welcome: Welcome) -> None:
        """Messages to or from a worker were lost."""
        open_requests = frozenset(welcome.open_requests)
        for client, role in self._clients_at(address):
            self._do(client, client.flow.on_resync(role, open_requests))

    def on_message(self, address: str, message: Message) -> None:
        """A message from a worker."""
        if isinstance(message, Heartbeat):
            self._registry.heartbeat(address, message)
        elif isinstance(message, RequestMessage):
            client = self._clients.get(message.request)
            if client is None or client.flow.key != message.key:
                self.num_stale_messages += 1
                return
            for role in (Role.PREFILL, Role.DECODE):
                if client.place(role).address == address:
                    self._do(client, client.flow.on_message(role, message))

    def on_lost(self, address: str, why: str) -> None:
        """A worker's session is over."""
        self._registry.lost(address)
        for client, role in self._clients_at(address):
            self._do(client, client.flow.worker_lost(role, why))

    def on_refused(self, address: str, refused: HelloRefused) -> None:
        """A worker refuses this gateway."""
        log.error("%s refuses this gateway: %s", address, refused.message)
        self._registry.workers[address].refused = refused.message

    def _clients_at(self, address: str) -> list[tuple[_Client, Role]]:
        return [
            (client, role)
            for client in self._clients.values()
            for role in (Role.PREFILL, Role.DECODE)
            if client.place(role).address == address
        ]


class _WorkerLink:
    """What a `ControlClient` tells, with the worker's address."""

    def __init__(self, dispatcher: Dispatcher, address: str) -> None:
        self._dispatcher = dispatcher
        self._address = address

    def hello(self) -> Hello:
        return Hello(role=Role.GATEWAY, fingerprint=None, open_requests=self._dispatcher.open_requests(self._address))

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        assert link.worker is not None
        self._dispatcher.on_open(self._address, link.worker, welcome)

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        self._dispatcher.on_resync(self._address, welcome)

    def on_message(self, link: ControlClient, message: Message) -> None:
        self._dispatcher.on_message(self._address, message)

    def on_lost(self, link: ControlClient, why: str) -> None:
        self._dispatcher.on_lost(self._address, why)

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        self._dispatcher.on_refused(self._address, refused)


def _place(worker: WorkerView) -> Place:
    assert worker.incarnation is not None
    return Place(worker.address, worker.incarnation)
