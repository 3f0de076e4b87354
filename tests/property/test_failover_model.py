"""The gateway between clients and workers that crash, fall silent, refuse, drain and come back.

A real dispatcher, with its registry, placement and flows, serves a few requests with two prefill and three decode
workers. These answer by the protocol, as far as a gateway can see it: prefills and pulls, offers that stand, running
sequences that move; which token comes at which position of which choice is fixed. Links deliver late, each in its own
order; messages are lost, until the session is opened again. Time is the test's.

Whatever happens: each client gets each of its tokens once, in order, and one end; an attempt carries exactly what its
client has; what the registry counts is what is there; and in the end no worker holds anything any more.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Literal

import pytest
from dispatcher_bench import D2, D3, P2, D, Link, P, Time, forbid_calling_back, heartbeat, role_of, settle, welcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey, new_incarnation
from common.contract.messages.fields import Message
from common.contract.messages.gateway import TRIAL_TOKENS, Abort, Ack, Decode, Prefill, Resend, Suspicion
from common.contract.messages.session import Heartbeat, Phase, Role
from common.contract.messages.worker import Cancelled, Cut, Failed, Finished, Moved, StepTokens, Tokens, Trial
from common.contract.sampling import SamplingParams
from common.runtime.channel import RECONNECT_S
from common.runtime.clock import Pulse
from common.scheduling.trials import TrialFeed, Trials
from gateway.dispatch.ask import Ask as RouterAsk
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Delta, Generation, GenerationFailed
from gateway.workers.registry import Registry

ADDRESSES = (P, P2, D, D2, D3)
CAUSES = (Cause.CAPACITY, Cause.TRANSFER, Cause.LEASE_LOST, Cause.WORKER_LOST, Cause.INTERNAL, Cause.SUPERSEDED)
"""What a worker may give as its reason."""
BUDGET_S = 1000.0
SMALL_TOKENS = 100
"""Of a sequence, that a small worker can hold."""
CRASH_SHOWS_S = RECONNECT_S
GATEWAY = Incarnation("g")

REFUSALS = (("refused at the door", 10), ("no room for a move", 1), ("too large for one", 10))
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Ask:
    """A client's request: what it is given in the end is fixed."""

    number: int
    prompt_len: int
    lengths: tuple[int, ...]
    """Tokens of each choice."""
    poison: bool = False
    """Whether it crashes every worker that computes it."""
    large: bool = False
    """Whether a small worker cannot hold it."""

    def token(self, choice: int, position: int) -> int:
        if position < self.prompt_len:
            return self.number
        return 1000 * (self.number + 1) + 100 * choice + position

    def tokens(self, choice: int, start: int, stop: int) -> tuple[int, ...]:
        return tuple(self.token(choice, position) for position in range(start, stop))

    def end(self, choice: int) -> int:
        return self.prompt_len + self.lengths[choice]


@dataclass(eq=False)
class Job:
    """What a worker has of a request."""

    ask: Ask
    work: Prefill | Decode
    running: bool = False
    """Of a prefill: its offer is complete."""
    generated: dict[int, int] = field(default_factory=dict)
    """Choice → where the next token goes."""
    sent: dict[int, int] = field(default_factory=dict)
    """Choice → up to where the gateway was told."""
    cut: dict[int, RequestKey] = field(default_factory=dict)
    """Choice → who pulls it."""
    moved: set[int] = field(default_factory=set)
    """Those that others go on with, or that nobody has taken over."""
    given_up: set[int] = field(default_factory=set)
    finished: bool = False

    @property
    def start(self) -> int:
        return len(self.work.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.work.choices) - len(self.moved | self.given_up)

    def going_on(self, choice: int) -> bool:
        if not self.running or choice in self.cut or choice in self.given_up:
            return False
        return self.generated[choice] < self.ask.end(choice)

    def kept(self) -> list[int]:
        """Choices that were cut, and still have their blocks."""
        return [choice for choice in self.cut if choice not in self.moved]


@dataclass(frozen=True)
class Greeting:
    """A Hello in a session that is open, or its answer."""

    number: int
    open_requests: frozenset[RequestKey]


class Process:
    """One life of a worker."""

    def __init__(self, world: World, address: str) -> None:
        self.world = world
        self.address = address
        self.incarnation: Incarnation = new_incarnation()
        self.role = role_of(address)
        self.alive = True
        self.frozen = False
        self.died_at = 0.0
        self.cut_off = False
        """Whether nothing passes between it and the gateway."""
        self.draining = False
        self.full = False
        """Whether it takes only those who were let in, and no running sequence."""
        self.places = world.choose([0, 1, 2]) if self.role is Role.DECODE else 0
        """Sequences that it says it has places for; 0 if it does not say."""
        self.num_beats = 0
        self.jobs: dict[RequestId, Job] = {}
        self.newest: dict[RequestId, int] = {}
        self.trials = Trials()
        self.feed = TrialFeed(self.trials, lambda key: GATEWAY, self.give_notice)
        self.notice: Trial | None = None
        """What it has said last of whose turn it is: that has left before their steps begin."""
        self.inbox: deque[Message | Greeting] = deque()
        self.outbox: deque[Message | Greeting] = deque()

    # --- messages ------------------------------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        self.outbox.append(message)

    def beat(self, used: int = 0) -> None:
        """Tell its load."""
        phase = Phase.DRAINING if self.draining else Phase.SERVING
        open_jobs = [job for job in self.jobs.values() if not job.finished]
        num_sequences = sum(job.num_sequences for job in open_jobs)
        num_running = sum(job.num_sequences for job in open_jobs if job.running)
        self.num_beats += 1  # the engine never hangs
        told = replace(heartbeat(phase, used=used, total=100), steps=self.num_beats, running=num_running)
        self.say(replace(told, places=self.places, sequences=(0, num_sequences, 0)))

    def give_notice(self, _: Incarnation, message: Message) -> None:
        assert isinstance(message, Trial)
        self.notice = message
        self.say(message)

    def hear(self) -> None:
        """The next message from the gateway."""
        message = self.inbox.popleft()
        match message:
            case Greeting(number=number, open_requests=listed):
                self.give_up_all_but(listed)
                self.outbox.append(Greeting(number, frozenset(job.work.key for job in self.jobs.values())))
                self.feed.begin(GATEWAY)
            case Prefill() | Decode():
                self.take(message)
            case Abort(choice=int() as choice):
                job = self.jobs.get(message.request)
                if job is not None and job.work.key == message.key and not job.finished:
                    self.give_up(job, choice)
            case Abort():
                if self.jobs.get(message.request) is not None and self.jobs[message.request].work.key == message.key:
                    finished = self.jobs.pop(message.request).finished
                    if not finished:
                        self.say(Cancelled(request=message.request, attempt=message.attempt))
            case Ack():
                job = self.jobs.get(message.request)
                if job is not None and job.work.key == message.key:
                    assert job.finished, "acknowledged, and not finished"
                    del self.jobs[message.request]
            case Resend():
                self.send_again(message)
            case _:
                raise AssertionError(message)

    def take(self, work: Prefill | Decode) -> None:
        ask = self.world.asks[work.token_ids[0]]
        assert work.prompt_len == ask.prompt_len
        for choice in work.choices if len(work.token_ids) == work.prompt_len else work.choices[:1]:
            assert work.token_ids == ask.tokens(choice, 0, len(work.token_ids)), "not what the client has"
        assert len(work.choices) == 1 or len(work.token_ids) == work.prompt_len
        assert work.key.attempt > self.newest.get(work.request, 0), "an attempt is not newer than the one before"
        self.newest[work.request] = work.attempt
        self.jobs.pop(work.request, None)
        if ask.large and self.address in self.world.small:
            self.fail(work.key, Cause.TOO_LARGE)
            self.world.count["too large for one"] += 1
        elif self.draining:
            self.fail(work.key, Cause.DRAINING)
        elif (not work.admitted or (isinstance(work, Decode) and work.moving)) and (
            self.full or self.world.may_fault(12)
        ):
            self.fail(work.key, Cause.CAPACITY)
            self.world.count["no room for a move"] += work.admitted
        elif not work.admitted and len(self.jobs) >= self.world.most_jobs:
            self.fail(work.key, Cause.CAPACITY)
            self.world.count["refused at the door"] += 1
        else:
            self.jobs[work.request] = Job(ask, work)
            self.trials.add(work.key, work.suspicion)

    def send_again(self, message: Resend) -> None:
        job = self.jobs.get(message.request)
        if job is None or job.work.key != message.key or not job.running:
            return
        if job.start - job.work.moving <= message.position < job.generated[message.choice]:  # type: ignore[union-attr]
            self.tell(job, message.choice, message.position)
        if message.choice in job.moved:
            self.say(Moved(request=message.request, attempt=message.attempt, choice=message.choice))
        elif message.choice in job.cut:
            self.tell_cut(job, message.choice)
        if job.finished:
            self.say(Finished(request=message.request, attempt=message.attempt))

    def tell(self, job: Job, choice: int, position: int) -> None:
        """Tokens of a choice, from `position` up to where it is."""
        stop = job.generated[choice]
        last = stop == job.ask.end(choice)
        if isinstance(job.work, Decode) and not last and stop == position + 1:
            handle = job.work.handles[job.work.choices.index(choice)]
            token_ids = job.ask.tokens(choice, position, stop)
            self.say(StepTokens(handles=(handle,), positions=(position,), token_ids=token_ids))
            job.sent[choice] = stop
            return
        self.say(
            Tokens(
                request=job.work.request,
                attempt=job.work.attempt,
                choice=choice,
                position=position,
                token_ids=job.ask.tokens(choice, position, stop),
                finish_reason="stop" if stop == job.ask.end(choice) else None,
            )
        )
        job.sent[choice] = stop

    def fail(self, key: RequestKey, cause: Cause) -> None:
        self.jobs.pop(key.request, None)
        self.say(Failed(request=key.request, attempt=key.attempt, cause=cause, message=f"at {self.address}"))

    def give_up_all_but(self, listed: frozenset[RequestKey]) -> None:
        self.jobs = {request: job for request, job in self.jobs.items() if job.work.key in listed}

    # --- work ----------------------------------------------------------------------------------------------------

    def step(self, job: Job) -> None:
        """Something is done for a request, or, if the engine is somebody else's now, for one of those."""
        if self.computes(job):
            job = self.next_in_the_engine(job)
        if self.role is Role.PREFILL:
            self.prefill(job)
        elif not job.running:
            self.pull(job)
        elif not job.finished:
            self.decode(job)

    def computes(self, job: Job) -> bool:
        """Whether its next step is the engine's."""
        if self.role is Role.PREFILL:
            return not job.running
        if not job.running:
            return isinstance(job.work, Decode) and job.work.source is None
        return any(job.going_on(choice) for choice in job.work.choices)

    def next_in_the_engine(self, job: Job) -> Job:
        jobs = {each.work.key: each for each in self.jobs.values()}
        for key in [key for key in self.trials._suspects if key not in jobs or self.cleared(jobs[key])]:
            self.trials.discard(key)
        chosen = self.trials.choose([key for key, each in jobs.items() if self.computes(each)], self.world.time.now)
        self.feed.publish([GATEWAY])
        return job if job.work.key in chosen else jobs[self.world.choose(list(chosen))]

    def cleared(self, job: Job) -> bool:
        if self.role is Role.PREFILL:
            return job.running
        going_on = [job.generated[choice] for choice in job.work.choices if job.going_on(choice)]
        return job.running and min(going_on, default=0) - job.start >= TRIAL_TOKENS

    def crashes_with(self, job: Job) -> bool:
        if job.ask.poison:
            self.world.killed_by[job.ask.number] += 1
            self.world.crash(self)
        return job.ask.poison

    def prefill(self, job: Job) -> None:
        if job.running or self.crashes_with(job):
            return
        job.running = True
        for choice in job.work.choices:
            job.generated[choice] = job.start + 1
            self.tell(job, choice, job.start)
        self.say(Finished(request=job.work.request, attempt=job.work.attempt))
        if all(job.generated[choice] == job.ask.end(choice) for choice in job.work.choices):
            del self.jobs[job.work.request]  # there is nothing to hand over
            for process in self.world.processes.values():
                for other in list(process.jobs.values()):
                    offered = other.work.offered if isinstance(other.work, Decode) else None
                    if offered == job.work.key and self.world.choose([True, False]):
                        del process.jobs[other.work.request]  # it had attached, and is told so

    def pull(self, job: Job) -> None:
        work = job.work
        assert isinstance(work, Decode)
        if work.source is None:
            if not self.crashes_with(job):
                self.begin(job, dict.fromkeys(work.choices, job.start + 1))
            return
        source = self.world.processes[work.source.address]
        assert work.offered is not None
        if source.incarnation != work.source.incarnation or not source.alive:
            self.fail(work.key, Cause.WORKER_LOST)
            return
        if source.frozen:
            if self.world.choose([False, False, True]):
                self.fail(work.key, Cause.WORKER_LOST)
            return
        offer = source.jobs.get(work.offered.request)
        if offer is None or offer.work.key != work.offered:
            coming = [m.key for m in source.inbox if isinstance(m, Prefill)]
            if work.offered not in coming or work.moving:
                self.fail(work.key, Cause.LEASE_LOST)
        elif work.moving:
            self.arrive(job, work, source, offer)
        elif offer.running:
            del source.jobs[work.offered.request]  # settled
            self.begin(job, dict(offer.generated))
            self.world.count["rebound"] += work.offered != work.key

    def arrive(self, job: Job, work: Decode, source: Process, old: Job) -> None:
        """A step of a move: the cut, then the end of the reads."""
        (choice,) = work.choices
        if old.cut.get(choice) == work.key and choice not in old.moved:
            source.let_go(old, choice)
            self.begin(job, {choice: old.generated[choice]})
            job.sent[choice] -= self.world.choose([0, 1])
            self.world.count["moved"] += 1
            source.finish_if_ended(old)
        elif old.going_on(choice) and old.generated[choice] >= job.start:
            old.cut[choice] = work.key
            source.tell_cut(old, choice)
        else:
            self.fail(work.key, Cause.LEASE_LOST)

    def tell_cut(self, job: Job, choice: int) -> None:
        request, attempt = job.work.key
        self.say(Cut(request=request, attempt=attempt, choice=choice, position=job.generated[choice]))

    def let_go(self, job: Job, choice: int) -> None:
        """The blocks of a choice that was cut are free."""
        job.moved.add(choice)
        self.say(Moved(request=job.work.request, attempt=job.work.attempt, choice=choice))

    def give_up(self, job: Job, choice: int) -> None:
        """The gateway wants no more of a choice."""
        if choice in job.kept():
            self.let_go(job, choice)
            self.world.count["cut choice given up"] += 1
        elif job.going_on(choice):
            job.given_up.add(choice)
            self.world.count["choice given up"] += 1
        else:
            return
        self.finish_if_ended(job)

    def lease_ends(self, job: Job, choice: int) -> None:
        """Nobody has come for a choice that was cut: it is the end of the job, unless others go on there."""
        others = set(job.work.choices) - job.moved - job.given_up - {choice}
        if any(job.generated[each] < job.ask.end(each) for each in others):
            self.let_go(job, choice)
        else:
            self.fail(job.work.key, Cause.LEASE_LOST)

    def begin(self, job: Job, generated: dict[int, int]) -> None:
        job.running = True
        job.generated = generated
        job.sent = dict.fromkeys(job.work.choices, job.start)

    def decode(self, job: Job) -> None:
        if self.crashes_with(job):
            return
        for choice in job.kept():  # after the sink has gone, until the gateway gives it up; seldom the lease ends first
            if not self.world.has(job.cut[choice]) and self.world.may_fault(40):
                self.lease_ends(job, choice)
                return
        for choice in job.work.choices:
            if job.going_on(choice):
                job.generated[choice] += 1
            if choice not in job.cut and choice not in job.given_up and job.sent[choice] < job.generated[choice]:
                self.tell(job, choice, job.sent[choice])
        self.finish_if_ended(job)

    def finish_if_ended(self, job: Job) -> None:
        if all(choice in job.moved for choice in job.work.choices):
            del self.jobs[job.work.request]
        elif all(
            choice in job.moved | job.given_up or (choice not in job.cut and job.sent[choice] == job.ask.end(choice))
            for choice in job.work.choices
        ):
            job.finished = True
            self.say(Finished(request=job.work.request, attempt=job.work.attempt))


class Wire(Link):
    """The gateway's end of a link."""

    def __init__(self, world: World, address: str) -> None:
        super().__init__(address)
        self.world = world
        self.open = False
        self.num_hellos = 0
        self.answer: Greeting | None = None
        """To the Hello that is to open a session."""

    num_sent = 0
    """Nobody reports load here."""

    def send(self, message: Message) -> None:
        if not self.open:
            return
        process = self.world.processes[self.address]
        if process.alive and process.incarnation == self.worker:
            process.inbox.append(message)


class World:
    """Everything; `choose` decides what happens next."""

    def __init__(
        self,
        choose: Choose,
        *,
        num_faults: int,
        num_poisons: int = 0,
        faults: Literal["any", "moves", "outages"] = "any",
    ) -> None:
        """With `moves` most faults concern moves, and with `outages` each fault is one of all decode workers; requests
        have several long choices then."""
        self.choose = choose
        self.num_faults_left = num_faults
        self.faults: list[Callable[[], None]] = {
            "any": [self.fault],
            "moves": [self.fault_of_a_move] * 4,
            "outages": [self.outage],
        }[faults]
        """What may go wrong, as long as any fault is left."""
        self.moments_s = [0.03, 0.2, 4.0] if faults == "outages" else [0.03, 0.2]
        """Seconds that may pass at once: now and then more than others wait for a worker that may come back."""
        self.killed_by: Counter[int] = Counter()
        """Workers that have died of each request."""
        self.alone_at_a_crash: set[int] = set()
        """Requests that a worker had said to be alone, when it crashed."""
        self.count: Counter[str] = Counter()
        self.time = Time()
        self.errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.errors.append(context))
        self.beat_at = 0.0
        """When a heartbeat was last delivered."""
        self.registry = Registry((P, P2), (D, D2, D3), "c")
        options: dict[str, Any] = {"local_prefill_tokens": choose([0, 0, 2])}
        if faults == "outages":
            options["patience_s"] = BUDGET_S  # everybody comes back
        self.gateway = Dispatcher(new_incarnation(), self.registry, self.time, Pulse(), **options)
        forbid_calling_back(self.gateway)
        self.count_holds()
        self.wires = {address: Wire(self, address) for address in ADDRESSES}
        self.gateway.links._links.update(self.wires)  # type: ignore[arg-type]
        self.processes = {address: Process(self, address) for address in ADDRESSES}
        varied = num_faults > 0 and faults == "any"
        self.most_jobs = choose([1, 2, 9]) if varied else 9
        """Requests that a worker may have before it refuses those that nobody has let in."""
        self.small = choose([(), (D,), (P, D), (D, D2)]) if varied else ()
        self.small_ones_say_so = choose([False, True])
        num_choices, lengths = ([1, 1, 2, 3], [1, 3, 9, 15]) if faults == "any" else ([2, 3], [20, 40])
        self.asks = [
            Ask(
                number,
                choose([1, 2, 4]),
                tuple(choose(lengths) for _ in range(1 if num_poisons else choose(num_choices))),
                poison=number < num_poisons,
                large=choose([False, True]),
            )
            for number in range(num_poisons + choose([2, 3]) if num_poisons else choose([1, 2, 3]))
        ]
        self.received: list[list[list[int]]] = [[[] for _ in ask.lengths] for ask in self.asks]
        self.ended: list[list[bool]] = [[False for _ in ask.lengths] for ask in self.asks]
        self.generations: dict[int, Generation] = {}
        self.given_up: set[tuple[int, int]] = set()
        """Choices, by the number of their request, of which the client needs no more."""
        self.tasks: dict[int, asyncio.Task[Cause | None]] = {}
        self.left: set[int] = set()
        """Clients that have not waited for the end."""

    def count_holds(self) -> None:
        """Count how often a request waits for a worker that comes back, although others have told that they are
        full."""
        placement: Any = self.gateway.placement
        holds = placement._holds

        def counted(ask: Any, takers: Any) -> bool:
            held = bool(holds(ask, takers))
            told = any(worker.load is not None for worker in self.registry.table.views(takers))
            self.count["held by full workers"] += held and told
            return held

        placement._holds = counted

    def has(self, key: RequestKey) -> bool:
        """Whether a worker has this attempt."""
        return any(key == job.work.key for process in self.processes.values() for job in process.jobs.values())

    def may_fault(self, one_in: int) -> bool:
        """Whether something goes wrong here."""
        if self.num_faults_left <= 0 or self.choose([False] * (one_in - 1) + [True]) is False:
            return False
        self.num_faults_left -= 1
        return True

    # --- clients -------------------------------------------------------------------------------------------------

    async def client(self, ask: Ask) -> Cause | None:
        generation = Generation(
            token_ids=ask.tokens(0, 0, ask.prompt_len),
            num_choices=len(ask.lengths),
            sampling=SamplingParams(max_tokens=SMALL_TOKENS * (1 + ask.large) - 10),
            budget_s=BUDGET_S,
        )
        self.generations[ask.number] = generation
        try:
            async for delta in self.gateway.generate(generation):
                assert isinstance(delta, Delta)
                self.receive(ask, delta)
        except GenerationFailed as failure:
            return failure.cause
        return None

    def receive(self, ask: Ask, delta: Delta) -> None:
        received = self.received[ask.number][delta.choice]
        assert not self.ended[ask.number][delta.choice], "tokens after the end"
        start = ask.prompt_len + len(received)
        assert delta.token_ids == ask.tokens(delta.choice, start, start + len(delta.token_ids)), "not in order"
        received += delta.token_ids
        if delta.finish_reason is not None:
            assert len(received) == ask.lengths[delta.choice]
            self.ended[ask.number][delta.choice] = True

    # --- what may happen -----------------------------------------------------------------------------------------

    def steps(self) -> list[Callable[[], object]]:
        steps: list[Callable[[], object]] = [self.pass_time]
        for ask in self.asks:
            if ask.number not in self.tasks:
                steps += [partial(self.ask, ask)] * 3
        for wire in self.wires.values():
            process = self.processes[wire.address]
            connected = wire.open and process.incarnation == wire.worker
            if wire.open and not process.cut_off and process.outbox:
                steps += [partial(self.deliver, wire)] * 3
            if connected and process.alive and not process.cut_off and not process.frozen:
                steps += [process.hear] * 3 if process.inbox else []
                steps.append(partial(self.beat, process))
            if process.alive and not process.frozen:
                steps += [partial(process.step, job) for job in process.jobs.values()] * 2
            if wire.open and process.alive and process.cut_off:
                steps.append(partial(self.notice, wire))
            elif not wire.open:
                steps.append(partial(self.come_back, wire))
            if process.draining and process.alive:
                steps.append(partial(self.drain, process, draining=False))
            if process.full:
                steps.append(partial(self.fill, process, full=False))
        if self.num_faults_left > 0:
            steps += self.faults
        return steps

    def fault_of_a_move(self) -> None:
        """A worker drains; one that takes a sequence over fails, rather after the cut than before it; a message is
        lost."""
        self.num_faults_left -= 1
        workers = self.processes.values()
        arriving = [
            (worker, job.work.key)
            for worker in workers
            for job in worker.jobs.values()
            if isinstance(job.work, Decode) and job.work.moving and not job.running
        ]
        cut = {job.cut[choice] for worker in workers for job in worker.jobs.values() for choice in job.kept()}
        wire = self.wires[self.choose((D, D2, D3))]
        process = self.processes[wire.address]
        if arriving and self.choose([True, True, False]):
            sink, key = self.choose([each for each in arriving if each[1] in cut] or arriving)
            sink.fail(key, self.choose(CAUSES))
        elif wire.open and process.alive and self.choose([True, True, True, False]):
            self.drain(process, draining=True)
        elif wire.open and process.alive:
            self.lose_a_message(wire)

    def outage(self) -> None:
        """The decode workers are lost together."""
        self.num_faults_left -= 1
        for address in (D, D2, D3):
            process = self.processes[address]
            if self.wires[address].open and process.alive:
                self.choose([self.crash, self.crash, self.fall_silent])(process)

    def fault(self) -> None:
        self.num_faults_left -= 1
        wire = self.wires[self.choose(ADDRESSES)]
        process = self.processes[wire.address]
        kind = self.choose(["crash", "silence", "failure", "loss", "loss", *["drain"] * 4, "full", "full", "client"])
        needless = [(ask, choice) for ask in self.asks for choice in self.needless(ask)]
        if needless and self.choose([False, False, True]):
            self.give_up(*self.choose(needless))
        elif kind == "client":
            self.leave()
        elif not wire.open or not process.alive:
            return
        elif kind == "crash":
            self.crash(process)
        elif kind == "silence":
            self.fall_silent(process)
        elif kind == "drain":
            self.drain(process, draining=True)
        elif kind == "full":
            self.fill(process, full=True)
        elif kind == "loss":
            self.lose_a_message(wire)
        elif open_jobs := [job for job in process.jobs.values() if not job.finished]:
            process.fail(self.choose(open_jobs).work.key, self.choose(CAUSES))

    def ask(self, ask: Ask) -> None:
        if not self.gateway.ready().ready:
            return
        self.tasks[ask.number] = asyncio.get_running_loop().create_task(self.client(ask))

    def leave(self) -> None:
        number = self.choose(range(len(self.asks)))
        if number in self.tasks and not self.tasks[number].done():
            self.left.add(number)
            self.tasks[number].cancel()

    def give_up(self, ask: Ask, choice: int) -> None:
        """A stop string has come, and others of the request's choices go on."""
        self.given_up.add((ask.number, choice))
        give_up = self.generations[ask.number].give_up
        assert give_up is not None
        give_up(choice)

    def needless(self, ask: Ask) -> list[int]:
        """Choices of which the client may need no more."""
        if ask.number not in self.tasks or self.tasks[ask.number].done() or ask.number not in self.generations:
            return []
        ended = [
            has_ended or (ask.number, each) in self.given_up for each, has_ended in enumerate(self.ended[ask.number])
        ]
        begun = [each for each, received in enumerate(self.received[ask.number]) if received and not ended[each]]
        return begun if ended.count(False) > 1 and self.generations[ask.number].give_up is not None else []

    def crash(self, process: Process) -> None:
        if process.notice is not None and process.notice.num_requests == 1:
            (key,) = process.notice.requests
            self.alone_at_a_crash |= {job.ask.number for job in process.jobs.values() if job.work.key == key}
        process.alive, process.died_at = False, self.time.now
        wire = self.wires[process.address]
        if wire.open:
            wire.num_hellos += 1  # no answer to an earlier one counts
            self.gateway.links.on_broken(wire)  # type: ignore[arg-type]
        process.jobs.clear()
        process.inbox.clear()
        for _ in range(self.choose(range(len(process.outbox) + 1))):
            if process.outbox[-1] is process.notice:
                break
            process.outbox.pop()  # what has not left

    def fall_silent(self, process: Process) -> None:
        process.cut_off = True
        process.frozen = self.choose([False, True])

    def drain(self, process: Process, *, draining: bool) -> None:
        others = [p for p in self.processes.values() if p.role is process.role and p is not process]
        if draining and not any(p.alive and not p.draining for p in others):
            return
        process.draining = draining
        if not process.cut_off:
            self.beat(process)

    def fill(self, process: Process, *, full: bool) -> None:
        process.full = full

    def beat(self, process: Process) -> None:
        process.beat(self.choose([0, 0, 99]))

    def lose_a_message(self, wire: Wire) -> None:
        """The session finds out, and is opened again."""
        process = self.processes[wire.address]
        box = self.choose([process.inbox, process.outbox])
        lossy = [index for index, message in enumerate(box) if not isinstance(message, Greeting)]
        if lossy:
            del box[self.choose(lossy)]
        wire.num_hellos += 1
        listed = frozenset(self.gateway.links.hello(wire).open_requests)  # type: ignore[arg-type]
        process.inbox.append(Greeting(wire.num_hellos, listed))

    def deliver(self, wire: Wire) -> None:
        message = self.processes[wire.address].outbox.popleft()
        self.beat_at = self.time.now if isinstance(message, Heartbeat) else self.beat_at
        if not isinstance(message, Greeting):
            self.gateway.links.on_message(wire, message)  # type: ignore[arg-type]
        elif message.number == wire.num_hellos:
            self.gateway.links.on_resync(wire, welcome(role_of(wire.address), message.open_requests))  # type: ignore[arg-type]

    def notice(self, wire: Wire) -> None:
        process = self.processes[wire.address]
        while not process.alive and not process.cut_off and process.outbox:
            self.deliver(wire)  # what has left is here long before its end is certain
        wire.open = False
        wire.num_hellos += 1
        process.inbox.clear()
        process.outbox.clear()
        why = "its process died" if not process.alive else "silent"
        self.gateway.links.on_lost(wire, why, crashed=not process.alive)  # type: ignore[arg-type]

    def come_back(self, wire: Wire) -> None:
        """A worker that was lost is greeted, as the one that it was or another one; or has answered."""
        process = self.processes[wire.address]
        if wire.answer is not None and process.alive:
            wire.open, wire.worker = True, process.incarnation
            answer, wire.answer = wire.answer, None
            process.outbox.clear()  # what was said without a session is lost
            small = wire.address in self.small and self.small_ones_say_so
            says = welcome(
                process.role, answer.open_requests, max_sequence_tokens=SMALL_TOKENS if small else 4 * SMALL_TOKENS
            )
            self.gateway.links.on_open(wire, says)  # type: ignore[arg-type]
            process.feed.begin(GATEWAY)
            return
        if not process.alive or (process.cut_off and self.choose([True, False, False])):
            process = self.processes[wire.address] = Process(self, wire.address)
        process.cut_off = process.frozen = False
        if self.choose([True, False]):
            process.jobs.clear()  # it had noticed, too
        process.give_up_all_but(frozenset(self.gateway.links.hello(wire).open_requests))  # type: ignore[arg-type]
        wire.answer = Greeting(0, frozenset(job.work.key for job in process.jobs.values()))

    def pass_time(self, seconds: float | None = None) -> None:
        """A crash shows when the channel is sure of it, neither sooner nor later."""
        until = self.time.now + (self.choose(self.moments_s) if seconds is None else seconds)
        while True:
            dead = [wire for wire in self.wires.values() if wire.open and not self.processes[wire.address].alive]
            wire = min(dead, key=lambda wire: self.processes[wire.address].died_at, default=None)
            shows_at = until if wire is None else self.processes[wire.address].died_at + CRASH_SHOWS_S
            self.time.now = max(self.time.now, min(until, shows_at))
            if wire is None or shows_at > until:
                return
            self.notice(wire)

    # --- the run -------------------------------------------------------------------------------------------------

    async def play(self, num_steps: int) -> None:
        for address in ADDRESSES:
            while not self.wires[address].open:
                self.come_back(self.wires[address])
            self.beat(self.processes[address])
        for _ in range(num_steps):
            await self.do(self.choose(self.steps()))

    async def settle_down(self) -> None:
        """Nothing goes wrong any more: everybody comes back, and every client gets its end."""
        self.num_faults_left = 0
        for ask in self.asks:
            if ask.number not in self.tasks:
                self.ask(ask)
        for _ in range(600):
            for wire in self.wires.values():
                process = self.processes[wire.address]
                if wire.open and not process.alive:
                    await self.do(partial(self.pass_time, CRASH_SHOWS_S))
                elif wire.open and process.cut_off:
                    await self.do(partial(self.notice, wire))
                while not wire.open:
                    await self.do(partial(self.come_back, wire))
                process = self.processes[wire.address]
                process.draining = process.full = False
                process.beat()
                while process.alive and (process.inbox or process.outbox):
                    await self.do(process.hear if process.inbox else partial(self.deliver, wire))
                for job in list(process.jobs.values()):
                    if process.jobs.get(job.work.request) is job:
                        await self.do(partial(process.step, job))
            self.pass_time(0.1)
            for ask in self.asks:
                if ask.number not in self.tasks:
                    self.ask(ask)
            if self.quiet:
                return
        raise AssertionError(f"they are not done: {[request.flow.story for request in self.gateway._open]}")

    @property
    def quiet(self) -> bool:
        busy = any(
            process.inbox or process.outbox or process.cut_off or not process.alive
            for process in self.processes.values()
        )
        return not busy and len(self.tasks) == len(self.asks) and all(task.done() for task in self.tasks.values())

    async def do(self, step: Callable[[], object]) -> None:
        step()
        self.check()
        await settle()
        self.check()
        self.check_nobody_is_held_too_long()

    def check_nobody_is_held_too_long(self) -> None:
        """Who waits for a worker that comes back does so until the first heartbeat after the time for it."""
        if self.beat_at < self.registry.coming_back_until():
            return
        placement: Any = self.gateway.placement
        for want, request in placement.waiting._requests.items():
            takers = placement._router.takers(RouterAsk.of(want, request.flow, fingerprint=request.fingerprint))
            assert not request.flow.admitted or not len(takers), f"{request.flow.story} could go on"

    def check(self) -> None:
        """What holds between any two events."""
        assert not self.errors, self.errors
        self.gateway.placement.waiting.check_invariants()
        in_flight: Counter[str] = Counter()
        for request in self.gateway._open:
            request.flow.check_invariants()
            parts = [part for attempt in request.flow.attempts for part in attempt.assignments]
            parts += [want.offer for want in request.flow.wants if want.offer is not None]
            for part in parts:
                if not part.over and self.registry.workers[part.life.address].last_incarnation == part.life.incarnation:
                    in_flight[part.life.address] += 1
        for address, worker in self.registry.workers.items():
            assert worker.in_flight == in_flight[address], address

    def check_end(self) -> None:
        """Each client has had one end, and nothing is left of any."""
        for ask in self.asks:
            task = self.tasks[ask.number]
            if ask.number in self.left and task.cancelled():
                continue
            cause = task.result()
            if cause is None:
                for choice, received in enumerate(self.received[ask.number]):
                    assert len(received) <= ask.lengths[choice]
                    assert len(received) == ask.lengths[choice] or (ask.number, choice) in self.given_up
            elif cause is Cause.POISON:
                assert ask.number in self.alone_at_a_crash, "it is convicted, and was not alone"
            else:
                assert not any(self.received[ask.number]), f"{cause}, though it was let in"
                assert cause is Cause.CAPACITY or (cause is Cause.TOO_LARGE and ask.large and self.small), cause
        assert not self.gateway._open
        assert not self.gateway._by_id
        assert not self.gateway.placement.waiting
        for process in self.processes.values():
            assert not process.jobs, (process.address, [job.work.key for job in process.jobs.values()])
        recovery = self.gateway.recovery
        self.count["retried"] += sum(recovery.tally.failures.values())
        self.count["tried in a group"] += recovery.trials[Suspicion.GROUP]
        self.count["tried alone"] += recovery.trials[Suspicion.ALONE]
        self.count["stayed"] += recovery.tally.moves["stayed"]
        self.count["refused as poison"] += sum(
            not task.cancelled() and task.result() is Cause.POISON for task in self.tasks.values()
        )

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.gateway.links._context.destroy(linger=0)


async def run_world(choose: Choose, num_steps: int, **options: Any) -> World:
    world = World(choose, **options)
    try:
        await world.play(num_steps)
        await world.settle_down()
        world.check_end()
    finally:
        await world.close()
    return world


def in_own_loop(run: Coroutine[Any, Any, World]) -> World:
    """Without a debugger's help: time stands still in this loop."""
    loop = asyncio.SelectorEventLoop()
    try:
        return loop.run_until_complete(run)
    finally:
        loop.close()


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(data=st.data())
def test_every_client_gets_its_tokens_whatever_happens_to_the_workers(data: st.DataObject) -> None:
    in_own_loop(run_world(lambda options: data.draw(st.sampled_from(options)), 60, num_faults=4))


def test_every_client_gets_its_tokens_in_many_long_runs() -> None:
    """A failure names the seed."""
    count: Counter[str] = Counter()
    for seed in range(160):
        try:
            count += in_own_loop(run_world(Random(seed).choice, 150, num_faults=5)).count
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    shown = (
        ("retried", 50),
        ("rebound", 10),
        ("tried in a group", 10),
        ("moved", 5),
        ("stayed", 1),
        ("choice given up", 10),
    )
    for what, least in (*shown, *REFUSALS):
        assert count[what] >= least, f"the runs show too little: {count}"


def test_sequences_that_are_cut_for_workers_that_fail_leave_nothing_behind() -> None:
    """A source keeps what it has cut until it is told that nobody takes it over, also while other choices go on."""
    count: Counter[str] = Counter()
    for seed in range(40):
        try:
            count += in_own_loop(run_world(Random(seed).choice, 500, num_faults=60, faults="moves")).count
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for what, least in (("moved", 20), ("stayed", 20), ("cut choice given up", 3)):
        assert count[what] >= least, f"the runs show too little: {count}"


def test_streams_of_workers_that_are_lost_together_wait_for_those_that_come_back() -> None:
    """They have crashed or are silent, and the first one that is back may have too few places."""
    count: Counter[str] = Counter()
    for seed in range(30):
        try:
            count += in_own_loop(run_world(Random(seed).choice, 150, num_faults=3, faults="outages")).count
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for what, least in (("held by full workers", 10), ("tried in a group", 10)):
        assert count[what] >= least, f"the runs show too little: {count}"


@pytest.mark.parametrize("num_poisons", [1, 2])
def test_a_poison_costs_three_workers_at_most_and_its_neighbours_nothing(num_poisons: int) -> None:
    """Also if a decode worker misses its source before the gateway is sure of the crash."""
    killed: Counter[int] = Counter()
    for seed in range(60):
        try:
            world = in_own_loop(run_world(Random(seed).choice, 60, num_faults=0, num_poisons=num_poisons))
            causes = [task.result() for _, task in sorted(world.tasks.items())]
            assert causes == [Cause.POISON] * num_poisons + [None] * (len(causes) - num_poisons)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        killed.update(world.killed_by.values())
    assert killed.keys() <= {1, 2, 3}
    assert min(killed[2], killed[3]) >= 5, f"the runs show too little: {killed}"


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_loss_of_one_worker_at_any_moment_is_not_noticed(address: str) -> None:
    """One request, step by step; after each number of steps a worker dies."""
    for num_steps in range(0, 100, 3):

        async def lose_one(num_steps: int = num_steps) -> World:
            world = World(Random(7).choice, num_faults=0)
            await world.play(num_steps)
            await world.do(partial(world.crash, world.processes[address]))
            await world.settle_down()
            world.check_end()
            await world.close()
            return world

        world = in_own_loop(lose_one())
        assert [task.result() for task in world.tasks.values()] == [None] * len(world.asks), num_steps
