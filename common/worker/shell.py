"""The shell of a worker: one inbox for whatever happens, and the hands that carry out what the core decides.

Everything that happens, from a gateway's message to the end of a read, becomes an event in the inbox. The core decides
on one event at a time (`Core.handle`), and the shell carries out its actions in order. An event that an action causes
waits its turn. The inbox is empty before the callback that filled it returns, so that a Hello is answered from the
present state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric

from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.session import Heartbeat, Hello, Phase, Profile, Role, Welcome
from common.engine.engine import Engine, Started
from common.engine.grammar import GaveUp, GrammarState
from common.engine.masks import Masks
from common.runtime.channel import ControlServer
from common.runtime.clock import Clock
from common.runtime.config import WorkerSettings
from common.runtime.counting import step_tokens
from common.runtime.probes import counter, gauge
from common.scheduling.trials import NOTICE_S
from common.worker.agenda import Inbox
from common.worker.events import (
    Action,
    AskMask,
    DrainEnded,
    DrainWanted,
    Event,
    ForgetMask,
    HelloReceived,
    MaskMade,
    PeerLost,
    PlannedStep,
    Received,
    SessionOpened,
    StepEnded,
    StepWanted,
    Ticked,
)
from common.worker.front import Front
from kv_transfer.events import Send
from kv_transfer.regions import Region
from kv_transfer.transfers import Transfers
from kv_transfer.transport import Transport

TICK_S = 0.1
"""Seconds between two looks at deadlines, while the core holds anything."""


class Core(Protocol):
    """The decisions of a role, as pure state. Only `handle` changes it."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide on an event, to the end of all its consequences; returns the actions, in order. `now` is in monotonic
        seconds."""

    @property
    def role(self) -> Role:
        """The worker's role."""

    @property
    def profile(self) -> Profile:
        """What the worker is packed for, if it decodes."""

    @property
    def front(self) -> Front[Any]:
        """What does not depend on the role."""

    def heartbeat(self, number: int) -> Heartbeat:
        """The present load."""

    def counts(self) -> Mapping[str, object]:
        """What the worker holds. At rest all counts but `blocks_total` and `blocks_cached` are zero."""

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was handed to the engine."""

    work: PlannedStep
    submitted: asyncio.Future[Started]
    checksums: asyncio.Future[list[tuple[int, ...]]] | None


class WorkerShell:
    """Connects a core with the network, the engine and the mover. Runs on the event loop's thread."""

    def __init__(
        self,
        core: Core,
        settings: WorkerSettings,
        me: Incarnation,
        server: ControlServer,
        engine: Engine,
        region: Region,
        make_transport: Callable[[], Transport],
        clock: Clock,
    ) -> None:
        self.core = core
        self._settings = settings
        self._server = server
        self._engine = engine
        self._region = region
        self._clock = clock
        self._inbox: Inbox[Event] = Inbox(self._handle)
        self._transfers = Transfers(
            settings,
            me,
            core.role,
            engine.fingerprint,
            region,
            make_transport,
            clock,
            report=self._inbox.put,
            open_pulls=core.front.pulls.open_pulls,
        )
        self._masks = Masks(engine.runner.grammars)
        self._planned: PlannedStep | None = None
        """The step that the core wants next."""
        self._wake = asyncio.Event()
        """Set after each event: there may be something to compute."""
        self._busy = asyncio.Event()
        """Set while the core holds something that a tick could end."""
        self._runs_ahead = settings.runs_ahead
        self._step_tokens = step_tokens(settings.model)
        self._steps_ahead = 0
        """Number of steps that were planned while another one ran."""
        self._num_submitted = 0
        """Steps that are with the engine."""
        self._step_since = 0.0
        """When the engine was given the first of them, if no step has ended since; else when the last one ended."""

    # --- the pump ------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        try:
            for action in self.core.handle(event, self._clock()):
                self._carry_out(action)
        except Exception as error:
            self._transfers.on_died(error)  # a bug: the worker ends, whoever's callback this is
            raise
        self._wake.set()
        if not self.core.front.idle:
            self._busy.set()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(peer, message):
                self._server.send(peer, message)
            case PlannedStep():
                self._planned = action
            case AskMask(grammar, state, token_ids, prompt_len):
                self._masks.ask(grammar, state, token_ids, prompt_len, partial(self._on_mask, state))
            case ForgetMask(state):
                self._masks.forget(state)
            case _:
                self._transfers.carry_out(action)

    def _on_mask(self, state: GrammarState, gave_up: GaveUp | None) -> None:
        self._inbox.put(MaskMade(state, gave_up))

    # --- the loops -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the transport. Raises `TransferError` if it cannot work on this machine."""
        await self._transfers.start()

    async def run(self) -> None:
        """Work until cancelled. Raises the exception of a step, of the core, or of the transfers."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._step_loop())
            tasks.create_task(self._tick_loop())
            tasks.create_task(self._transfers.run())

    async def close(self) -> None:
        """End every read, every link, and the engine's thread, after `run`."""
        await self._transfers.close()
        self._engine.close()

    async def _step_loop(self) -> None:
        """Hand steps to the engine. If it runs ahead, the next step is planned while the last one runs."""
        before: _InFlight | None = None
        while True:
            if before is None:
                await self._masks.wait_for_expected()
            work = self._plan(None if before is None else before.work)
            step = None if work is None else await self._submit(work)
            if before is not None:
                self._steps_ahead += step is not None
                await self._finish(before)
            elif step is None:
                self._wake.clear()
                await self._wake.wait()
            before = step
            if before is not None and not self._runs_ahead:
                await self._finish(before)
                before = None

    def _plan(self, before: PlannedStep | None) -> PlannedStep | None:
        self._planned = None
        self._inbox.put(StepWanted(before))
        return self._planned

    async def _submit(self, work: PlannedStep) -> _InFlight:
        if work.noticed:
            await asyncio.sleep(NOTICE_S)
        if not self._num_submitted:
            self._step_since = self._clock()
        self._num_submitted += 1
        submitted = self._engine.submit(
            work.slices, work.copies, work.swap_outs, work.swap_ins, work.decodes, work.drafting
        )
        checksums = None
        if work.completed:  # computed before another step begins
            checksums = self._engine.call(lambda: [self._region.crc32(blocks) for blocks in work.completed])
        return _InFlight(work, submitted, checksums)

    async def _finish(self, step: _InFlight) -> None:
        """Wait for the end of a step, and report it."""
        work = step.work
        result = await self._engine.finish(step.submitted)
        self._num_submitted -= 1
        self._step_since = self._clock()
        checksums = () if step.checksums is None else await step.checksums
        num_decodes = 0 if work.decodes is None else len(work.decodes)
        self._step_tokens.observe(num_decodes + sum(len(each.token_ids) for each in work.slices))
        self._inbox.put(StepEnded(work, result, checksums))

    async def _tick_loop(self) -> None:
        while True:
            await self._busy.wait()
            await asyncio.sleep(TICK_S)
            self._inbox.put(Ticked())
            if self.core.front.idle:
                self._busy.clear()

    # --- events from clients -------------------------------------------------------------------------------------

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """A message from a gateway, or from a worker that pulls from this one."""
        self._inbox.put(Received(peer, message))

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session opens or reopens: end the requests that the peer does not list. Returns those that go on."""
        self._inbox.put(HelloReceived(peer, frozenset(hello.open_requests)))
        return self.core.front.open_requests(peer)

    def on_open(self, peer: Incarnation, role: Role) -> None:
        """Messages can be sent to the peer."""
        self._inbox.put(SessionOpened(peer, role))

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A session is over."""
        self._inbox.put(PeerLost(peer))

    # --- leaving -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new work. Gateways learn it by the next heartbeat."""
        self._inbox.put(DrainWanted())

    def give_up(self, why: str) -> None:
        """The time for draining is over: fail the requests that are still here."""
        self._inbox.put(DrainEnded(why))

    @property
    def phase(self) -> Phase:
        """Whether the worker takes work, and whether it holds any."""
        return self.core.front.phase

    # --- what others see -----------------------------------------------------------------------------------------

    def welcome(self) -> Welcome:
        """This worker's message in a handshake."""
        runner = self._engine.runner
        return Welcome(
            role=self.core.role,
            fingerprint=self._engine.fingerprint,
            max_sequence_tokens=min(runner.config.max_sequence_tokens, runner.cache.num_slots),
            transport=self._settings.transport,
            transport_metadata=self._transfers.metadata,
            open_requests=(),
            phase=self.core.front.phase,
            profile=self.core.profile,
        )

    def heartbeat(self, number: int) -> Heartbeat:
        """The present load."""
        return self.core.heartbeat(number)

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Whether the worker takes work, and counts of what it holds."""
        phase, products = self.core.front.phase, self._engine.runner.cpu_products
        return phase is Phase.SERVING, {
            "role": self.core.role.value,
            "phase": phase.value,
            "safe_to_delete": phase is Phase.DRAINED,
            "transport": self._settings.transport,
            "ranks": self._settings.tensor_parallel,
            "cpu_kernels": self._engine.runner.cpu_kernels,
            "cpu_products": None if products is None else products._asdict(),
            **self._transfers.mover.bandwidths.state(),
            **self.core.counts(),
        }

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics with their present values."""
        engine, masks, traffic = self._engine, self._masks, self._server.traffic
        yield from self.core.metrics()
        yield from self._transfers.metrics()
        yield from self._step_tokens.collect()
        yield gauge("baton_serving", "1 if the worker takes work, 0 if it drains.", self.phase is Phase.SERVING)
        yield counter("baton_engine_steps", "Engine steps.", engine.num_steps)
        age_s = self._clock() - self._step_since if self._num_submitted else 0.0
        yield gauge("baton_engine_step_age_seconds", "Time that the engine's present step has taken; 0: none.", age_s)
        yield counter("baton_engine_busy_seconds", "Time in engine steps.", engine.busy_s)
        yield counter("baton_steps_ahead", "Steps planned while another one ran.", self._steps_ahead)
        yield gauge("baton_ranks", "Ranks of this worker.", self._settings.tensor_parallel)
        if (products := engine.runner.cpu_products) is not None:
            how = {(products.by, str(products.widened).lower()): bool(engine.runner.cpu_kernels)}
            help_text = "1 if the CPU computes with the kernels in C, 0 if with torch."
            yield gauge("baton_cpu_kernels", help_text, how, "products", "widened")
        yield counter("baton_grammar_masks", "Masks made for texts that follow a grammar.", masks.num_made)
        yield counter("baton_grammar_masks_late", "Masks that a step has waited for in vain.", masks.num_late)
        yield counter("baton_grammars_given_up", "Texts that could not go on, by bound.", masks.given_up, "bound")
        yield counter("baton_frames_refused", "Control frames refused.", traffic.frames_refused)
        yield counter("baton_sessions_lost", "Clients lost.", traffic.sessions_lost)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.core.check_invariants()
