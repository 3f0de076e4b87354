"""The links to the workers: which workers there are, their sessions, and what each message of a worker changes.

Life cycle of a worker here:

    named or listed ──► linked: Hello is repeated ──► session open ──► session over: linked, or
                                                                   ──► forgotten, because it is listed no more

What a message says of the worker itself is kept here: its load in the registry, its cache in the prefix index, its
suspects in `_trials`. Everything about requests goes to their holder (`Dispatcher`), which never calls back meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

import zmq
from prometheus_client.metrics_core import Metric

from common.contract.errors import FingerprintMismatchError, OperatorError
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message, RequestMessage
from common.contract.messages.gateway import Abort, Drain, Resume
from common.contract.messages.session import Heartbeat, Hello, HelloRefused, Role, Welcome
from common.contract.messages.worker import CacheEvents, StepTokens, Trial
from common.runtime.channel import RECONNECT_S, ControlClient, Traffic, channel_context
from common.runtime.clock import Clock, Pulse
from common.runtime.curve import CurveKeys
from common.runtime.probes import counter, gauge
from common.runtime.resolver import Resolver
from gateway.serving.suspicion import Crash
from gateway.workers.discovery import Endpoint
from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.registry import Registry
from gateway.workers.worker_life import WorkerLife

if TYPE_CHECKING:
    from gateway.dispatch.dispatcher import Dispatcher

log = logging.getLogger(__name__)


class _Order(NamedTuple):
    """An operator's order to a worker."""

    message: Drain | Resume
    worker: Incarnation | None
    """The worker's process that it is for."""
    number: int
    """Its number within the session."""


class Links:
    """A link to each worker of the registry (`common.runtime.channel.ClientHandler`)."""

    def __init__(
        self,
        me: Incarnation,
        registry: Registry,
        index: PrefixIndex,
        requests: Dispatcher,
        clock: Clock,
        pulse: Pulse,
        keys: CurveKeys | None = None,
    ) -> None:
        self._me = me
        self._registry = registry
        self._index = index
        self._requests = requests
        self._clock = clock
        self._pulse = pulse
        self._keys = keys
        self._resolver = Resolver(pulse.timeout_s)
        self._context = channel_context()
        self._links: dict[str, ControlClient] = {}
        self._traffic_before = Traffic()
        """Counts of the links to workers that no longer exist."""
        self._linking: dict[asyncio.Task[None], ControlClient] = {}
        self._listed: dict[str, frozenset[RequestKey]] = {}
        """Worker → requests in the last Hello to it; its Welcome says which of these, and only these, it knows."""
        self._trials: dict[str, Trial] = {}
        """Worker → its last `Trial`: the suspects, if any, for which the engine computes its steps."""
        self._orders: dict[str, _Order] = {}
        """Worker → the operator's last order, until a heartbeat shows that it has arrived."""
        self._usable = asyncio.Event()
        self._follows = False
        """Whether workers are discovered. Discovered workers may be of another version for a while, and are refused."""
        self._failure: asyncio.Future[None] | None = None
        """Set while `run` is running. It fails, and `run` with it, if a link ends because of a bug, or if workers do
        not fit together from the start."""

    # --- the workers there are -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep links to every worker until cancelled.

        Raises `OperatorError` if there are no file descriptors for the links to the workers that are known from the
        start, and `FingerprintMismatchError` if workers turn out not to fit together before each role had a usable one.
        A misfit that is discovered, comes later, or occurs while requests are served is logged, and the worker is
        refused.
        """
        self._failure = asyncio.get_running_loop().create_future()
        for address in self._registry.workers:
            if not self._link(address):
                raise OperatorError(f"no link to the worker at {address} can be made: are there file descriptors left?")
        try:
            await self._failure
        finally:
            self._failure = None
            tasks = list(self._linking)
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._resolver.close()
                self._context.destroy(linger=100)

    async def wait_usable(self) -> None:
        """Wait until a worker of each role is usable."""
        await self._usable.wait()

    def follow(self, role: Role, endpoints: Collection[Endpoint]) -> None:
        """Replace the list of all workers of a role (`gateway.workers.discovery.Tell`). A worker that is no longer
        listed gets no new work, may finish what it has, and is forgotten when its session ends."""
        self._follows = True
        listed = {each.address: each for each in endpoints}
        for address, endpoint in listed.items():
            worker = self._registry.workers.get(address)
            if worker is not None and worker.role is not role and worker.serving and not endpoint.serving:
                continue  # its address was a worker's of this role, whose pod ends and is still listed
            if worker is not None and (worker.role, worker.identity) != (role, endpoint.identity):
                self._forget(address, "its address is another worker's now")
                worker = None
            if worker is None and (self._failure is None or self._link(address)):
                self._registry.add(role, endpoint)
        self._registry.relist(role, {each.address: each.serving for each in endpoints})
        for worker in list(self._registry.workers.values()):
            if not worker.listed and worker.incarnation is None:
                self._forget(worker.address, "it is not listed any more")
        self._workers_changed()

    def _link(self, address: str) -> bool:
        """Begin to link with a worker. False if that cannot be now: the next list of the workers has it again."""
        try:
            link = ControlClient(
                self._context,
                address,
                self._me,
                self,
                self._clock,
                self._pulse,
                self._keys,
                resolver=self._resolver,
                on_broken=self.on_broken,
            )
        except zmq.ZMQError as error:  # no file descriptor is left
            log.error("no link to %s can be made: %s", address, error)
            return False
        self._links[address] = link
        task = asyncio.create_task(link.run())
        self._linking[task] = link
        task.add_done_callback(self._on_link_end)
        return True

    def _on_link_end(self, task: asyncio.Task[None]) -> None:
        link = self._linking.pop(task)
        if self._failure is not None and not self._failure.done() and not task.cancelled():
            self._failure.set_exception(task.exception() or AssertionError(f"the link to {link.address} has ended"))

    def _forget(self, address: str, why: str) -> None:
        """Remove a worker that no longer exists."""
        link = self._links.pop(address, None)
        if link is not None:
            if self._registry.workers[address].incarnation is not None:
                self._session_over(link, why, crashed=False)
            link.retire()
            self._traffic_before.add(link.traffic)
            next(task for task, of in self._linking.items() if of is link).cancel()
        self._listed.pop(address, None)
        self._orders.pop(address, None)
        self._registry.remove(address)
        self._requests.on_forgotten(address)

    def _workers_changed(self) -> None:
        if not self._registry.missing():
            self._usable.set()
        self._requests.look_again()

    # --- sending -------------------------------------------------------------------------------------------------

    def send(self, address: str, message: Message) -> int | None:
        """Send a message; returns its number within the session. None if the worker is forgotten."""
        link = self._links.get(address)
        if link is None:
            return None
        link.send(message)
        return link.num_sent

    def tell(self, address: str, *, drain: bool) -> bool:
        """Tell a worker to drain, or to serve again. False if it cannot be reached."""
        if self._registry.workers[address].incarnation is None:
            return False
        self._order(address, Drain() if drain else Resume())
        return True

    def _order(self, address: str, message: Drain | Resume) -> None:
        """Send an operator's order; if messages are lost before it has arrived, it is sent again."""
        link = self._links[address]
        link.send(message)
        self._orders[address] = _Order(message, link.worker, link.num_sent)

    def may_have_crashed(self, address: str) -> bool:
        """Whether a worker's connection has broken, and it is not known yet whether it has crashed."""
        worker = self._registry.workers.get(address)
        return worker is not None and worker.broken_at is not None

    # --- events from workers (`common.runtime.channel.ClientHandler`) ----------------------------------------------

    def hello(self, link: ControlClient) -> Hello:
        """The Hello to a worker: this gateway, and the requests that the worker holds for it. Requests that it has not
        been sent yet are left out."""
        self._listed[link.address] = listed = frozenset(self._requests.keys_at(link.address)) - link.unsent_work
        return Hello(role=Role.GATEWAY, fingerprint=None, open_requests=tuple(listed))

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        """Handle the opening of a worker's session."""
        assert link.worker is not None
        order = self._orders.pop(link.address, None)
        if order is not None and order.worker == link.worker:  # it may have been lost with the session before
            self._order(link.address, order.message)
        all_fit = self._registry.misfit() is None
        try:
            self._registry.opened(link.address, link.worker, welcome, self._clock())
        except FingerprintMismatchError as error:
            if not self._ends_start(str(error)):
                log.error("worker refused: %s", error)
            return
        misfit = self._registry.misfit()
        if all_fit and misfit is not None and self._ends_start(misfit):  # a prefill worker, beside a new decode worker
            return
        log.info("%s worker at %s, transport %s", welcome.role, link.address, welcome.transport)
        for request, attempt in set(welcome.open_requests) - self._requests.keys_at(link.address):
            link.send(Abort(request=request, attempt=attempt))  # it has ended here since the Hello
        self._workers_changed()

    def _ends_start(self, misfit: str) -> bool:
        """Whether workers do not fit together from the start, which ends `run`."""
        serves = any(worker.in_flight for worker in self._registry.workers.values())
        if self._follows or self._usable.is_set() or serves:
            return False
        if self._failure is not None and not self._failure.done():  # the first of several misfits is enough
            self._failure.set_exception(FingerprintMismatchError(misfit))
        return True

    def on_broken(self, link: ControlClient) -> None:
        """Handle a broken connection. Whether the worker has crashed is not known yet."""
        self._registry.broken(link.address, self._clock())

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        """Handle the loss of messages to or from a worker."""
        self._registry.resynced(link.address)
        self._trials.pop(link.address, None)
        if link.address in self._orders:
            self._order(link.address, self._orders[link.address].message)
        self._requests.on_resync(link.address, self._listed[link.address], frozenset(welcome.open_requests))

    def on_message(self, link: ControlClient, message: Message) -> None:
        """Handle a message from a worker."""
        if isinstance(message, StepTokens):
            self._requests.on_step(link.address, message)
        elif isinstance(message, RequestMessage):
            self._requests.on_request(link.address, message)
        elif isinstance(message, Heartbeat):
            if (order := self._orders.get(link.address)) is not None and message.received >= order.number:
                del self._orders[link.address]
            if self._registry.heartbeat(link.address, message, self._clock()):
                log.error("the engine of %s makes no progress: what it has goes elsewhere", link.address)
                self._lose(link.address, "its engine makes no progress")
            self._requests.on_load(link.address)
            self._workers_changed()
        elif isinstance(message, Trial):
            self._trials[link.address] = message
        elif isinstance(message, CacheEvents) and link.worker is not None:
            self._index.apply(WorkerLife(link.address, link.worker), message)

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        """Handle the end of a worker's session, or that it still does not answer."""
        worker = self._registry.workers[link.address]
        had_session = worker.incarnation is not None
        if had_session:
            self._session_over(link, why, crashed=crashed)
        if not worker.listed:
            self._forget(link.address, why)
        elif not had_session:
            return
        self._workers_changed()

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        """Handle a worker's refusal of this gateway."""
        log.error("%s refuses this gateway: %s", link.address, refused.message)
        # This refusal has ended the session, and with it the worker may have been forgotten.
        if self._links.get(link.address) is link:
            self._registry.refuses(link.address, refused.message)

    def _session_over(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        now, crashed_at = self._clock(), self._registry.workers[link.address].broken_at
        # Work given since the connection broke, or in the time that the channel takes to notice, never reached it.
        crashed_at = now - RECONNECT_S if crashed_at is None else crashed_at
        self._registry.lost(link.address, now)
        if link.worker is not None:
            self._index.forget(WorkerLife(link.address, link.worker))
        self._lose(link.address, why, crashed_at if crashed else None)

    def _lose(self, address: str, why: str, crashed_at: float | None = None) -> None:
        trial = self._trials.pop(address, Trial(num_requests=0, requests=()))
        crash = None if crashed_at is None else Crash(crashed_at, trial.num_requests, frozenset(trial.requests))
        self._requests.on_loss(address, why, crash)

    # --- results -------------------------------------------------------------------------------------------------

    def workers(self) -> list[dict[str, object]]:
        """State of each worker for operators; JSON values only."""
        return [worker.described() for worker in self._registry.workers.values()]

    def collect(self) -> Iterable[Metric]:
        """Metrics of the workers, of the channel to them, and of what they tell of their caches."""
        roles, index = (Role.PREFILL, Role.DECODE), self._index
        usable = {role.value: len(self._registry.usable(role)) for role in roles}
        yield gauge("baton_gateway_workers_usable", "Workers that may be given work.", usable, "role")
        restarts = {role.value: self._registry.num_restarts[role] for role in roles}
        text = "Times that a worker's address was another process's."
        yield counter("baton_gateway_worker_restarts", text, restarts, "role")
        traffic = self._traffic()
        for name, text, value in (
            ("sessions_lost", "Sessions with workers that were lost.", traffic.sessions_lost),
            ("resyncs", "Sessions opened again because messages may have been lost.", traffic.resyncs),
            ("frames_refused", "Control frames of workers that were refused.", traffic.frames_refused),
        ):
            yield counter(f"baton_gateway_{name}", text, value)
        yield gauge("baton_gateway_prefix_blocks", "Cached blocks that workers have told of.", index.num_blocks)
        yield gauge("baton_gateway_prefix_names", "Blocks in the prefix index, whoever holds them.", index.num_names)
        text = "Blocks dropped from the full prefix index."
        yield counter("baton_gateway_prefix_names_forgotten", text, index.num_forgotten)

    def _traffic(self) -> Traffic:
        """Counts of all links so far."""
        traffic = Traffic()
        for each in (self._traffic_before, *(link.traffic for link in self._links.values())):
            traffic.add(each)
        return traffic
