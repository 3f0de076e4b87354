"""Decode workers between which running sequences move, without processes: what is real, and what is played.

Real: the workers with their schedulers, pools, leases, pulls and step loops. Played: the engine, whose memory says of
each slot which tokens its KV was computed from; the wires between the workers; the reads of a transport, each of whose
blocks is copied at a moment of its own; and the gateway, which knows by heart what every choice must generate.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from played_source import FINGERPRINT
from slow_slices import slices_of
from step_tokens import Reader, handles

from common.contract.codec import decode, encode
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Ack, Decode, Drain, Resume, Source
from common.contract.messages.session import Hello, Phase, Role
from common.contract.messages.worker import (
    Cancelled,
    Cut,
    Failed,
    Finished,
    Moved,
    Timings,
    TokenLogprobs,
    Tokens,
    TokenScores,
)
from common.contract.sampling import SamplingParams
from common.engine.batch import Chosen, Decodes, SampledToken, Slice, StepResult
from common.engine.grammar import GaveUp, GrammarState
from common.engine.masks import Tell
from common.runtime.config import DecodeSettings
from common.scheduling.costs import Costs
from common.worker.events import Ticked
from common.worker.shell import WorkerShell
from decode_worker.core import DecodeCore
from decode_worker.request import DecodeChoice
from decode_worker.step import Step
from kv_transfer import transfers
from kv_transfer.bandwidths import Bandwidths
from kv_transfer.events import (
    AddSource,
    DropRead,
    DropSource,
    MoverAction,
    ReadEnded,
    SourceLost,
    SourceOpened,
    SourceReceived,
    StartRead,
    TransferEvent,
)
from kv_transfer.transport import ReadId

BLOCK_SIZE = 4
GATEWAY = Incarnation("g")
MAX_TOKENS = 400
BUDGET_S = 1000.0


# --- what the model generates ------------------------------------------------------------------------------------


def kv(before: int, token: int) -> int:
    """The KV of a token: it depends on every token before it."""
    return hash((before, token))


def chain(token_ids: Iterable[int]) -> list[int]:
    """The KV of each of these tokens."""
    states, state = [], 1
    for token in token_ids:
        state = kv(state, token)
        states.append(state)
    return states


def next_token(state: int, choice: int) -> int:
    """What follows the token whose KV is `state`."""
    return hash((state, choice)) % 997


def report(state: int, choice: int) -> TokenLogprobs:
    """Its log probability."""
    return TokenLogprobs(logprob=-(hash((choice, state)) % 64) / 8, top=())


# --- a worker's surroundings -------------------------------------------------------------------------------------


class Pause:
    """What the step loop waits for: it is given the answer when it is to go on."""

    def __init__(self, step: tuple[Any, ...] | None) -> None:
        self.step = step

    def __await__(self) -> Generator[Pause, Any, Any]:
        return (yield self)


class Flag:
    """An `asyncio.Event` for a loop that is driven by hand."""

    def __init__(self) -> None:
        self.up = False

    def set(self) -> None:
        """Somebody has something to do."""
        self.up = True

    def clear(self) -> None:
        """Nobody has."""
        self.up = False

    def wait(self) -> Pause:
        """Until `set`."""
        return Pause(None)


class Engine:
    """It computes what it is told when the test says so, and finds out when the KV before a token is not its own."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.runner = SimpleNamespace(
            config=SimpleNamespace(max_sequence_tokens=MAX_TOKENS, eos_token_ids=frozenset(), vocab_size=1000),
            objection=lambda token_ids, sampling, prediction=(): None,
            grammars=None,
            layout=SimpleNamespace(block_size=BLOCK_SIZE),
            cache=SimpleNamespace(num_blocks=num_blocks),
            num_host_blocks=num_host_blocks,
            cpu_kernels=True,
            cpu_products=None,
        )
        self.costs = Costs()
        self.row_times = None
        self.fingerprint = FINGERPRINT
        self.num_steps = 0
        self.memory: dict[int, dict[int, int]] = {}
        """Block → slot → KV."""
        self.host: dict[int, dict[int, int]] = {}
        self.computed: Counter[int] = Counter()
        """How often each KV was computed here."""
        self.last_tokens: list[int] = []
        """Chosen by the samples of the last step."""
        self.plan: Callable[[], Step]
        """The plan of the step that is being submitted."""

    def submit(self, *step: Any) -> Pause:
        """Begin a step: what `execute` takes."""
        self.num_steps += 1
        return Pause((*step, self.plan()))

    async def finish(self, step: Pause) -> StepResult:
        """Wait for it."""
        return cast("StepResult", await step)

    def close(self) -> None:
        """Nothing to do."""

    def execute(
        self,
        slices: Sequence[Slice],
        copies: Sequence[tuple[int, int]],
        swap_outs: Sequence[tuple[int, int]],
        swap_ins: Sequence[tuple[int, int]],
        decodes: Decodes | None,
        drafting: None,
        plan: Step,
    ) -> StepResult:
        """What the step does. No prompt is scored."""
        assert drafting is None, "there is no draft model"
        for block, copy in copies:
            self.memory[copy] = dict(self.memory.get(block, {}))
        for block, slot in swap_outs:
            self.host[slot] = dict(self.memory.get(block, {}))
        for slot, block in swap_ins:
            self.memory[block] = dict(self.host[slot])
        decoded = [outcome for each in slices_of(decodes, plan) for outcome in self._compute(each)]
        outcomes = [self._compute(each) for each in slices]
        self.last_tokens = [outcome.token_id for each in (decoded, *outcomes) for outcome in each]
        told = {row: outcome for row, outcome in enumerate(decoded) if outcome.logprobs is not None}
        chosen = Chosen([outcome.token_id for outcome in decoded], {**told})
        scores = [TokenScores() for _ in slices]
        return StepResult(outcomes=outcomes, scores=scores, chosen=chosen, duration_s=0.01, between_s=0.0)

    def at(self, table: Sequence[int], position: int) -> int | None:
        """The KV at this position of a sequence."""
        return self.memory.get(table[position // BLOCK_SIZE], {}).get(position % BLOCK_SIZE)

    def _compute(self, work: Slice) -> tuple[SampledToken, ...]:
        token_ids = work.token_ids if work.follows is None else [self.last_tokens[work.follows]]
        for position, token in enumerate(token_ids, work.start):
            before = 1 if position == 0 else self.at(work.block_table, position - 1)
            assert before is not None, "computes a token after one that has no KV"
            state = kv(before, token)
            self.memory.setdefault(work.block_table[position // BLOCK_SIZE], {})[position % BLOCK_SIZE] = state
            self.computed[state] += 1
        outcomes = []
        for sample in work.samples:
            states = chain(sample.token_ids)
            for position, state in enumerate(states):
                assert self.at(work.block_table, position) == state, f"decodes from the KV of others at {position}"
            asked = sample.params.logprobs is not None
            outcomes.append(
                SampledToken(
                    next_token(states[-1], sample.choice), report(states[-1], sample.choice) if asked else None
                )
            )
        return tuple(outcomes)


@dataclass(eq=False)
class Read:
    """A read under way: each block is copied at a moment of its own."""

    read_id: ReadId
    source: Incarnation
    source_blocks: tuple[int, ...]
    sink_blocks: tuple[int, ...]
    copied: int = 0
    fenced: bool = False
    """It can only fail."""
    dropped: bool = False
    """Nobody wants it any more, and nothing of it has begun."""


class Reads:
    """The mover of a site (`kv_transfer.mover.Mover`): what it is to read, and how that goes, the test says."""

    def __init__(self, site: Site, report: Callable[[ReadEnded], None]) -> None:
        self.site = site
        self.report = report
        self.open: list[Read] = []
        self.sources: set[Incarnation] = set()
        self.num_blocks_read = 0
        self.num_registrations = 0
        self.bandwidths = Bandwidths("cpu")

    def carry_out(self, action: MoverAction) -> None:
        """What the core has decided."""
        match action:
            case AddSource(source, _):
                self.sources.add(source)
            case DropSource(source):
                self.sources.discard(source)
                for read in self.open:
                    read.fenced |= read.source == source
            case DropRead(read_id):
                for read in self.open:
                    read.dropped |= read.read_id == read_id and not read.copied
            case StartRead(read_id, source, source_blocks, sink_blocks, _):
                self.open.append(Read(read_id, source, source_blocks, sink_blocks, fenced=source not in self.sources))

    def copy(self, read: Read) -> None:
        """The next block arrives: what the source's memory holds now."""
        core, block = self.site.core, read.sink_blocks[read.copied]
        assert core.pool.ref_count(block) > 0, "a read writes to a free block"
        tables = [g.sequence.block_table for r in core.book.requests.values() for g in r.choices]
        assert not any(block in table for table in tables), "a read writes to a sequence's block"
        assert sum(block in other.sink_blocks for other in self.open) == 1, "two reads, one block"
        theirs = self.site.world.sites[read.source].engine.memory
        self.site.engine.memory[block] = dict(theirs.get(read.source_blocks[read.copied], {}))
        read.copied += 1
        self.num_blocks_read += 1

    def end(self, read: Read, error: str | None = None, *, dropped: bool = False) -> None:
        """It is done, has failed, or was dropped."""
        assert error is not None or read.copied == len(read.sink_blocks)
        self.open.remove(read)
        self.report(ReadEnded(read.read_id, error, dropped=dropped))

    def go_on(self, read: Read) -> None:
        """One step towards its end."""
        if read.fenced or not self.site.world.sites[read.source].alive:
            self.end(read, "the connection broke")
        elif read.dropped:
            self.end(read, "dropped", dropped=True)
        elif read.copied < len(read.sink_blocks):
            self.copy(read)
        else:
            self.end(read)


@dataclass(eq=False)
class Link:
    """One sink's link to one source. What each side has sent, and the other has not heard yet."""

    to_source: deque[Message] = field(default_factory=deque)
    to_sink: deque[Message | int] = field(default_factory=deque)
    """A number stands for the Welcome that answers the Hello of this number."""
    number: int = 0
    """Of the last Hello."""
    open: bool = False
    lossy: bool = False
    """Messages were lost, and nobody has said Hello since."""


class Links:
    """The links of a site to its sources (`kv_transfer.source_links.SourceLinks`)."""

    def __init__(
        self,
        site: Site,
        report: Callable[[TransferEvent], None],
        open_pulls: Callable[[str], Collection[RequestKey]],
    ) -> None:
        self.site = site
        self.report = report
        self.open_pulls = open_pulls
        self.links: dict[str, Link] = {}

    def need(self, address: str) -> None:
        """Make sure that there is a link."""
        if address not in self.links:
            self.links[address] = Link()
            self.greet(address)

    def greet(self, address: str) -> None:
        """Say Hello, the first time or again."""
        link = self.links[address]
        link.number += 1
        link.lossy = False
        pulls = tuple(self.open_pulls(address))
        hello = Hello(number=link.number, role=Role.DECODE, fingerprint=FINGERPRINT, open_requests=pulls)
        link.to_source.append(hello)

    def send(self, address: str, message: Message) -> None:
        """Within the session; inert without one."""
        link = self.links.get(address)
        if link is not None and link.open:
            link.to_source.append(message)

    def hear(self, address: str) -> None:
        """The next message of a source arrives."""
        link, source = self.links[address], self.site.world.site_at(address).name
        message = link.to_sink.popleft()
        if isinstance(message, Message):
            if link.open:
                self.report(SourceReceived(source, message))
        elif message == link.number:
            link.open = True
            welcome: Any = SimpleNamespace(transport="zmq", transport_metadata=b"")
            self.report(SourceOpened(address, source, welcome))

    def lose(self, address: str, why: str) -> None:
        """The source is gone, or seems so."""
        link = self.links.pop(address)
        source = self.site.world.site_at(address)
        self.report(SourceLost(address, source.name if link.open else None, Cause.WORKER_LOST, why))


class CountedMasks:
    """In place of `Masks`: each is there when the test says so, and it is counted how much was read for it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.at_once = False
        self.awaited: dict[GrammarState, tuple[int, Tell]] = {}
        self.num_read: list[int] = []
        site.worker._masks = self  # type: ignore[assignment]

    def ask(self, grammar: str, state: GrammarState, token_ids: Sequence[int], prompt_len: int, tell: Tell) -> None:
        """A text waits for its mask."""
        assert state not in self.awaited, "it waits for one already"
        self.awaited[state] = len(token_ids) - prompt_len, tell
        if self.at_once:
            self._tell(state, None)

    def forget(self, state: GrammarState) -> None:
        """Nobody waits for it any more."""
        self.awaited.pop(state, None)

    async def wait_for_expected(self) -> None:
        """None is."""

    def give(self, gave_up: GaveUp | None = None, state: GrammarState | None = None) -> None:
        """All masks that are awaited are there, or only that of `state`; or their grammars give up."""
        for each in list(self.awaited) if state is None else [state]:
            if each in self.awaited:  # else an earlier one was the end of its request
                self._tell(each, gave_up)
        self.site.wake()

    def _tell(self, state: GrammarState, gave_up: GaveUp | None) -> None:
        num_output, tell = self.awaited.pop(state)
        self.num_read.append(num_output - state.num_read)
        state.num_read, state.allowed = num_output, b""
        tell(gave_up)


class Site:
    """One decode worker and what surrounds it."""

    def __init__(self, world: World, name: str, num_blocks: int, num_host_blocks: int, **options: Any) -> None:
        self.world = world
        self.name = Incarnation(name)
        self.address = f"{name}:1"
        self.alive = True
        self.engine = Engine(num_blocks, num_host_blocks)
        self.to_gateway: deque[Message] = deque()
        self.reader = Reader()
        self.from_gateway: deque[Message] = deque()
        self.sessions: set[Incarnation] = set()
        """Sinks that it takes for connected."""
        decided = {"transport": "zmq", "memory_reserve": -1.0, "max_num_seqs": 8, **options}
        region = SimpleNamespace(block_bytes=64, crc32=None)
        settings = DecodeSettings(**decided).on("cpu")
        self.core = DecodeCore(settings, self.engine, region)  # type: ignore[arg-type]
        with (
            patch.object(transfers, "Mover", lambda region, make, report, *_: Reads(self, report)),
            patch.object(transfers, "SourceLinks", lambda *options: Links(self, *options[7:9])),
        ):
            self.worker = WorkerShell(
                self.core,
                settings,
                self.name,
                self,  # type: ignore[arg-type]  # as the control server
                self.engine,  # type: ignore[arg-type]
                region,  # type: ignore[arg-type]
                lambda: None,  # type: ignore[arg-type,return-value]
                lambda: world.now,
            )
        self.engine.plan = lambda: self.worker._planned.plan  # type: ignore[union-attr]
        self.reads: Reads = self.worker._transfers.mover  # type: ignore[assignment]
        self.links: Links = self.worker._transfers._links  # type: ignore[assignment]
        self.flag = Flag()
        self.worker._wake = self.flag  # type: ignore[assignment]
        self.loop = self.worker._step_loop()
        self.pause: Pause = self.loop.send(None)

    @property
    def source(self) -> Source:
        """As others are told of it."""
        return Source(address=self.address, incarnation=self.name)

    @property
    def pool(self) -> Any:
        """The worker's pool."""
        return self.core.pool

    @property
    def in_step(self) -> bool:
        """Whether the engine has a step in flight."""
        return self.pause.step is not None

    def send(self, peer: Incarnation, message: Message) -> None:
        """As the control server does."""
        if peer == GATEWAY:
            self.to_gateway += self.reader.read(message)
        elif peer in self.sessions and (link := self.world.sites[peer].links.links.get(self.address)) is not None:
            link.to_sink.append(message)

    def wake(self) -> None:
        """Let the loop go on if it waits and has been woken."""
        while not self.in_step and self.flag.up:
            self.pause = self.loop.send(None)

    def end_step(self) -> None:
        """The step in flight is done; the next one begins, if there is anything to do."""
        assert self.pause.step is not None
        self.pause = self.loop.send(self.engine.execute(*self.pause.step))
        self.wake()

    def step(self, times: int = 1) -> None:
        """So many steps."""
        self.wake()
        for _ in range(times):
            self.end_step()

    def hear(self, sink: Incarnation) -> None:
        """The next message of a sink arrives."""
        link = self.world.sites[sink].links.links[self.address]
        message = link.to_source.popleft()
        if isinstance(message, Hello):
            self.sessions.add(sink)
            self.worker.on_hello(sink, message)
            link.to_sink.append(message.number)
        elif sink in self.sessions:
            self.worker.on_message(sink, message)
        else:
            link.lossy = True  # it is told to say Hello
        self.wake()

    def hear_gateway(self) -> None:
        """The next message of the gateway arrives."""
        self.worker.on_message(GATEWAY, self.from_gateway.popleft())
        self.wake()

    def lose_sink(self, sink: Incarnation) -> None:
        """It takes a sink for lost."""
        if not self.alive:
            return
        self.sessions.discard(sink)
        self.worker.on_peer_lost(sink)
        self.wake()

    def tick(self) -> None:
        """It looks at the clock."""
        self.worker._inbox.put(Ticked())
        self.wake()

    def drain(self) -> None:
        """An operator lets it take no new work."""
        self.worker.on_message(GATEWAY, Drain())

    def resume(self) -> None:
        """It takes work again."""
        self.worker.on_message(GATEWAY, Resume())

    def choice(self, key: RequestKey, choice: int = 0) -> DecodeChoice:
        """A choice that it generates."""
        choices = self.core.book.requests[key.request].choices
        return next(each for each in choices if each.sequence.choice == choice)

    def check(self) -> None:
        """What holds between any two events."""
        if self.alive:
            self.worker.check_invariants()
            for subject in self.core._masks.subjects():
                request = subject.request if isinstance(subject, DecodeChoice) else subject
                assert self.core.book.requests.get(request.work.request) is request, "a mask for a request that is over"

    def left(self) -> dict[str, Any]:
        """What it holds."""
        core, lender = self.core, self.core.lender
        counts = {
            "used": self.pool.num_used,
            "limbo": self.pool.num_limbo,
            "requests": sorted(core.book.requests),
            "unacknowledged": sorted(core.book.finished),
            "pulls": core.pulls.num_pulls,
            "reads": core.pulls.num_reads + len(self.reads.open),
            "quarantined": core.pulls.num_quarantined,
            "leases": lender.num_leases,
            "readers": lender.num_readers,
            "parked": lender.num_parked,
            "expected": sorted(lender._leases.parked._expected),
            "wanted": [message.key for message in core.departures._wanted.values()],
            "cut": sorted(core.departures._cut),
            "arrivals": [request.key for request in core.arrivals._arrivals],
            "host": core.scheduler.swap.num_used,
            "masks": len(core._masks),
        }
        return {name: count for name, count in counts.items() if count}


# --- the gateway -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Choice:
    """A choice as its client has it."""

    index: int
    token_ids: list[int]
    """The prompt, and what the client has."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: bool = False


@dataclass(eq=False)
class Leg:
    """One attempt at some choices of a request, on one worker."""

    key: RequestKey
    site: Site
    ask: Ask
    choices: dict[int, Choice]
    moving: Leg | None = None
    cut: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    spoken: set[int] = field(default_factory=set)
    """Choices of which it has brought tokens."""
    ends: list[Message] = field(default_factory=list)
    """Its terminals, but for Moved."""
    aborted: bool = False

    @property
    def over(self) -> bool:
        """Whether its worker is done with it."""
        return bool(self.ends) or self.moved == set(self.choices) or not self.site.alive

    def brings(self, choice: Choice) -> bool:
        """Whether more of this choice may come from here."""
        return choice.index in self.choices and choice.index not in self.cut and not self.over and not self.aborted


@dataclass(eq=False)
class Ask:
    """What one client wants."""

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    choices: list[Choice]
    legs: list[Leg] = field(default_factory=list)
    ended: bool = False


class Gateway:
    """It moves choices, begins again what has failed, and knows what every token must be."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asks: list[Ask] = []
        self.num_requests = 0
        self.num_moved = 0
        self.num_begun_again = 0

    @property
    def legs(self) -> list[Leg]:
        """Every leg there has been."""
        return [leg for ask in self.asks for leg in ask.legs]

    def ask(
        self,
        site: Site,
        prompt: Sequence[int],
        max_tokens: int = 50,
        num_choices: int = 1,
        *,
        logprobs: bool = False,
        grammar: str | None = None,
    ) -> Leg:
        """A new request, whose prompt `site` computes itself."""
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=0 if logprobs else None, grammar=grammar)
        choices = [Choice(index, list(prompt)) for index in range(num_choices)]
        ask = Ask(f"ask {len(self.asks)}", tuple(prompt), sampling, choices)
        self.asks.append(ask)
        return self._begin(Leg(self._new_key(), site, ask, dict(enumerate(choices))))

    def move(self, leg: Leg, to: Site, choice: int = 0) -> Leg:
        """Let another worker take a choice over."""
        ask = leg.ask
        key = self._new_key() if len(ask.choices) > 1 else self._next_key(ask)
        return self._begin(Leg(key, to, ask, {choice: ask.choices[choice]}, moving=leg))

    def abort(self, leg: Leg) -> None:
        """The worker is to give it up."""
        leg.aborted = True
        leg.site.from_gateway.append(Abort(request=leg.key.request, attempt=leg.key.attempt))

    def give_up(self, ask: Ask, choice: int) -> None:
        """The client needs no more of a choice, and goes on with others."""
        ask.choices[choice].ended = True
        for leg in ask.legs:
            if choice not in leg.choices or leg.over or leg.aborted:
                continue
            if len(leg.choices) == 1:
                self.abort(leg)
            else:
                leg.site.from_gateway.append(Abort(request=leg.key.request, attempt=leg.key.attempt, choice=choice))

    def end(self, ask: Ask) -> None:
        """The client has everything, or has gone."""
        ask.ended = True
        for leg in ask.legs:
            ends_by_itself = all(each.ended for each in leg.choices.values()) and leg.spoken == set(leg.choices)
            if not leg.over and not leg.aborted and not (ends_by_itself and leg.cut == leg.moved):
                self.abort(leg)

    def hear(self, site: Site) -> None:
        """The next message of a worker arrives."""
        message = site.to_gateway.popleft()
        assert isinstance(message, Timings | Tokens | Finished | Failed | Cancelled | Cut | Moved), message
        [leg] = [leg for leg in self.legs if leg.site is site and leg.key == message.key]
        match message:
            case Timings():
                assert decode(encode(Incarnation("w"), [message]))[1] == [message], "durations out of bounds"
            case Tokens():
                self._take(leg, message)
            case Cut():
                assert message.choice not in leg.cut, "cut twice"
                assert leg.choices[message.choice].token_ids is not None
                leg.cut.add(message.choice)
            case Moved():
                assert not leg.ends, "a terminal after the terminal"
                assert message.choice in leg.cut, "moved, and never cut"
                assert message.choice not in leg.moved, "moved twice"
                leg.moved.add(message.choice)
                self.num_moved += 1
            case _:
                assert not leg.ends, f"{message} after {leg.ends}"
                assert leg.moved != set(leg.choices), f"{message} though every choice has moved"
                leg.ends.append(message)
                if isinstance(message, Finished):
                    site.from_gateway.append(Ack(request=message.request, attempt=message.attempt))
        self.look_after(leg.ask)

    def look_after(self, ask: Ask) -> None:
        """Begin again with what nobody brings any more."""
        for choice in ask.choices:
            waits = any(
                leg.moving and not leg.over and not leg.aborted and choice.index in leg.choices for leg in ask.legs
            )
            if ask.ended or choice.ended or waits or any(leg.brings(choice) for leg in ask.legs):
                continue
            sites = [s for s in self.world.sites.values() if s.alive and s.worker.phase is Phase.SERVING]
            if sites:
                self.num_begun_again += 1
                site = sites[self.num_begun_again % len(sites)]
                self._begin(Leg(self._new_key(), site, ask, {choice.index: choice}))

    def _take(self, leg: Leg, message: Tokens) -> None:
        choice = leg.choices[message.choice]
        leg.spoken.add(message.choice)
        assert message.position <= len(choice.token_ids), "a gap"
        assert (message.logprobs is None) == (leg.ask.sampling.logprobs is None)
        states = chain(choice.token_ids)
        for index, (position, token) in enumerate(enumerate(message.token_ids, message.position)):
            state = states[position - 1]
            assert token == next_token(state, choice.index), f"another token at {position}"
            if message.logprobs is not None:
                assert message.logprobs[index] == report(state, choice.index), f"another logprob at {position}"
            if position == len(choice.token_ids):
                assert not choice.ended, "a token after the last"
                choice.token_ids.append(token)
                choice.logprobs += [] if message.logprobs is None else [message.logprobs[index]]
                states.append(kv(state, token))
        choice.ended |= message.finish_reason is not None
        if all(each.ended for each in leg.ask.choices) and not leg.ask.ended:
            self.end(leg.ask)

    def _new_key(self) -> RequestKey:
        self.num_requests += 1
        return RequestKey(RequestId(f"r{self.num_requests}"), 1)

    def _next_key(self, ask: Ask) -> RequestKey:
        request = ask.legs[-1].key.request
        return RequestKey(request, 1 + max(leg.key.attempt for leg in self.legs if leg.key.request == request))

    def _begin(self, leg: Leg) -> Leg:
        leg.ask.legs.append(leg)
        [first, *_] = leg.choices.values()
        work = Decode(
            request=leg.key.request,
            attempt=leg.key.attempt,
            token_ids=tuple(first.token_ids),
            prompt_len=len(leg.ask.prompt),
            choices=tuple(leg.choices),
            handles=handles(len(leg.choices)),
            sampling=leg.ask.sampling,
            budget_s=BUDGET_S,
            source=None if leg.moving is None else leg.moving.site.source,
            offered=None if leg.moving is None else leg.moving.key,
            moving=leg.moving is not None,
        )
        leg.site.from_gateway.append(work)
        leg.site.reader.sent(work)
        return leg


# --- the world ---------------------------------------------------------------------------------------------------


class World:
    """Some workers, the gateway, and time."""

    def __init__(
        self, names: Collection[str] = ("d0", "d1"), num_blocks: int = 32, num_host_blocks: int = 0, **options: Any
    ):
        self.now = 0.0
        self.sites: dict[Incarnation, Site] = {}
        for name in names:
            self.sites[Incarnation(name)] = Site(self, name, num_blocks, num_host_blocks, **options)
        self.gateway = Gateway(self)

    def site_at(self, address: str) -> Site:
        """Who is there."""
        return next(site for site in self.sites.values() if site.address == address)

    def wires(self) -> list[Callable[[], None]]:
        """Of each wire with something on it: what delivers the next message."""
        deliver: list[Callable[[], None]] = []
        for site in self.sites.values():
            deliver += [lambda site=site: self.gateway.hear(site)] if site.to_gateway else []  # type: ignore[misc]
            if not site.alive:
                continue
            deliver += [site.hear_gateway] if site.from_gateway else []
            for address, link in site.links.links.items():
                source = self.site_at(address)
                if link.to_source and source.alive:
                    deliver.append(lambda source=source, sink=site.name: source.hear(sink))  # type: ignore[misc]
                if link.to_sink:
                    deliver.append(lambda site=site, address=address: self._hear(site, address))  # type: ignore[misc]
        return deliver

    def _hear(self, site: Site, address: str) -> None:
        site.links.hear(address)
        site.wake()

    def deliver(self, *, reads: bool = True) -> None:
        """Every message arrives, and what it leads to; reads end, unless they are not to."""
        while True:
            if (wires := self.wires()) != []:
                wires[0]()
            elif reads and (site := next((s for s in self.sites.values() if s.alive and s.reads.open), None)):
                self.go_on_reading(site, site.reads.open[0])
            else:
                break
            self.check()

    def go_on_reading(self, site: Site, read: Read) -> None:
        """One step of a read."""
        site.reads.go_on(read)
        site.wake()

    def kill(self, site: Site) -> None:
        """The process dies; everybody else notices. Messages that it had sent may still arrive."""
        site.alive = False
        site.loop.close()
        for other in self.sites.values():
            if other is site or not other.alive:
                continue
            if site.address in other.links.links:
                other.links.lose(site.address, "killed")
            if site.name in other.sessions:
                other.lose_sink(site.name)
            other.wake()
        site.to_gateway.clear()
        for ask in self.gateway.asks:
            self.gateway.look_after(ask)
        self.check()

    def run(self, max_steps: int = 2000) -> None:
        """Everything goes on until nobody has anything to do."""
        for _ in range(max_steps):
            self.deliver()
            stepping = [site for site in self.sites.values() if site.alive and site.in_step]
            if not stepping:
                return
            for site in stepping:
                site.end_step()
            self.check()
        raise AssertionError("it does not come to an end")

    def check(self) -> None:
        """What holds between any two events."""
        for site in self.sites.values():
            site.check()

    def check_end(self) -> None:
        """Everybody has everything, every leg has its one end, and every block is back."""
        for ask in self.gateway.asks:
            assert ask.ended, f"{ask.name} waits for ever: {[(leg.key, leg.site.name, leg.ends) for leg in ask.legs]}"
        for leg in self.gateway.legs:
            assert leg.over, f"{leg.key} at {leg.site.name} has no terminal"
        for site in self.sites.values():
            assert not site.alive or site.left() == {}, f"{site.name} holds {site.left()}"
