"""A worker of the model: the product's core, and what the model plays in the place of its shell.

`Worker` follows `common.worker.shell.WorkerShell`: it reports events to the core, carries out the actions that the core
decides on, and asks for a step whenever the engine is free. Played are the engine, whose memory says of each token slot
whose KV it holds, and the mover, whose reads are under way until the search lets them end.

A slot holds the KV of the token at one position, or nothing. It is the right one: it was computed from the right KV of
every token before it, as the engine verifies. Memory that is free is written to by others at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from handoff_bounds import BLOCK_SIZE, DEADLINE, NUM_BLOCKS, TTL_S, Bounds, token
from slow_slices import slices_of

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Decode, Prefill
from common.contract.messages.session import Role, Welcome
from common.contract.messages.worker import CacheEvents, Timings, TokenScores, Trial
from common.engine.batch import Chosen, SampledToken, Slice, StepResult
from common.runtime.config import DecodeSettings, PrefillSettings
from common.scheduling.costs import Costs
from common.worker.events import (
    Action,
    Event,
    HelloReceived,
    PeerLost,
    PlannedStep,
    Received,
    StepEnded,
    StepWanted,
    Ticked,
)
from decode_worker.core import DecodeCore
from decode_worker.step import Step
from kv_transfer.events import (
    AddSource,
    Connect,
    DropRead,
    DropSource,
    Poll,
    ReadEnded,
    Send,
    SendToSource,
    Serve,
    SourceLost,
    SourceOpened,
    SourceReceived,
    StartRead,
)
from kv_transfer.transport import ReadId
from prefill_worker.core import PrefillCore

GATEWAY = Incarnation("g")
Block = tuple[int | None, ...]
"""For each slot, the position of the token whose KV it holds."""
EMPTY: Block = (None,) * BLOCK_SIZE
Sent = Send | SendToSource | Connect
"""What leaves a worker."""
_NOT_SENT = (Timings, CacheEvents, Trial)
"""Messages that tell a gateway something, and change no attempt at a request."""

# --- facts about the model -----------------------------------------------------------------------------------------


class Facts:
    """What a core reads from an engine. None of it changes."""

    def __init__(self, num_blocks: int) -> None:
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")
        self.costs = Costs()
        self.num_steps = 0
        self.row_times = None
        self.fingerprint = Fingerprint(config_hash="c", weights_hash="w", layout=layout)
        self.runner = SimpleNamespace(
            config=SimpleNamespace(
                max_sequence_tokens=2 * num_blocks * BLOCK_SIZE, eos_token_ids=frozenset(), vocab_size=1000
            ),
            objection=lambda token_ids, sampling, prediction=(): None,
            layout=layout,
            cache=SimpleNamespace(num_blocks=num_blocks),
            num_host_blocks=0,
        )


FACTS = Facts(NUM_BLOCKS)
_REGION = SimpleNamespace(block_bytes=1, crc32=None)
_NEVER_S = 1e6
"""A bound in seconds that is not reached."""
_BOTH: dict[str, Any] = {
    "transport": "zmq",
    "prefix_cache": False,
    "quarantine_bound_s": _NEVER_S,
    "read_bound_s": _NEVER_S,
}
PREFILL = {
    1: PrefillSettings(unattached_ttl_s=TTL_S, **_BOTH).on("cpu"),
    NUM_BLOCKS: PrefillSettings(unattached_ttl_s=TTL_S, chunk_size=BLOCK_SIZE, **_BOTH).on("cpu"),
}
"""Settings by the number of chunks of a prompt."""
DECODE = DecodeSettings(memory_reserve=-1.0, **_BOTH).on("cpu")
_FULL = DECODE.model_copy(update={"max_waiting": 0, "max_num_seqs": 0})
_WELCOME = Welcome(
    role=Role.PREFILL,
    fingerprint=FACTS.fingerprint,
    max_sequence_tokens=1,
    transport="zmq",
    transport_metadata=b"",
    open_requests=(),
)
"""What a source says of itself."""


def slices_in(work: PlannedStep) -> list[Slice]:
    """What a step computes: its decodes and its slices."""
    return [*slices_of(work.decodes, work.plan), *work.slices]


# --- the worker ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Read:
    """A read under way: its blocks may change at any moment until it ends."""

    read_id: ReadId
    source: Incarnation
    source_blocks: tuple[int, ...]
    sink_blocks: tuple[int, ...]
    fenced: bool
    """Whether it can only fail: the sink has cut itself off from the source."""


@dataclass(frozen=True, slots=True)
class View:
    """What the world sees of a worker."""

    me: Incarnation
    memory: tuple[Block, ...]
    in_step: bool
    reads: tuple[tuple[Incarnation, tuple[int, ...], bool], ...]
    """The source of each read, its blocks there, and whether the read is fenced."""
    is_crowded: bool
    """Whether another sequence has its blocks."""
    num_revocable: int
    """Reservations that could be taken back."""
    has_unclaimed: bool
    """Whether it has a complete offer that no sink has attached to."""
    has_early: bool
    """Whether an attach waits for an offer that is not expected."""
    idle: bool
    open_requests: tuple[RequestKey, ...]
    """Requests of the gateway that are open here."""
    open_pulls: dict[str, tuple[RequestKey, ...]]
    """Address → what a Hello to it lists."""
    sources: frozenset[str]
    """Addresses that it pulls from."""
    left: dict[str, Any]
    """What it holds; empty at rest."""


class Worker:
    """A core and its surroundings. Each public method is something that happens to it."""

    def __init__(self, bounds: Bounds, me: Incarnation) -> None:
        self.me = me
        self.num_drawn = 0
        role = Role.PREFILL if me.startswith("p") else Role.DECODE
        self.core: Any
        if role is Role.PREFILL:
            self.core = PrefillCore(PREFILL[bounds.chunks], me, FACTS, _REGION)  # type: ignore[arg-type]
        else:
            self.core = DecodeCore(DECODE, FACTS, _REGION)  # type: ignore[arg-type]
        self.memory: list[Block] = [EMPTY] * NUM_BLOCKS
        self.runs_ahead = bounds.runs_ahead
        self.steps: list[PlannedStep] = []
        """Steps in flight, the oldest first: one, or two if the next step is planned while one runs."""
        self.followed: PlannedStep | None = None
        """The step in flight for which the core was asked for the next one."""
        self.reads: list[Read] = []
        self.agents: set[Incarnation] = set()
        """Sources that can be read from."""
        crowded = bounds.busy and role is Role.DECODE and me.endswith(".1")
        self.others: list[int] = self.core.pool.allocate(NUM_BLOCKS) if crowded else []
        """Blocks of a sequence that has nothing to do with the request."""
        self.sent: list[Sent] = []

    @property
    def name(self) -> str:
        """For ids that it draws."""
        return self.me

    # --- what happens to it --------------------------------------------------------------------------------------

    def hear(self, peer: Incarnation, message: Message) -> None:
        """A message of a gateway or a sink arrives."""
        self._happens(Received(peer, message))

    def refuse(self, peer: Incarnation, message: Prefill | Decode) -> None:
        """A gateway's work arrives while the worker is full, or drains if it may not refuse this for its queue."""
        core = self.core
        full: Any = patch.object(core, "settings", _FULL)
        if core.role is Role.PREFILL:
            full = patch.object(core.scheduler, "_max_waiting", 0)
        with full, patch.object(core.front, "draining", message.admitted):
            self._happens(Received(peer, message))

    def hello(self, peer: Incarnation, listed: Collection[RequestKey]) -> None:
        """A session opens, perhaps again."""
        self._happens(HelloReceived(peer, listed))

    def lose(self, peer: Incarnation) -> None:
        """The session with a client is over."""
        self._happens(PeerLost(peer))

    def open_source(self, address: str, source: Incarnation) -> None:
        """A source can be attached to, for the first time or again."""
        self._happens(SourceOpened(address, source, _WELCOME))

    def hear_source(self, source: Incarnation, message: Message) -> None:
        """A message of a source arrives."""
        self._happens(SourceReceived(source, message))

    def lose_source(self, address: str, source: Incarnation) -> None:
        """The session with a source is over."""
        self._happens(SourceLost(address, source, Cause.WORKER_LOST, "lost"))

    def tick(self, now: float) -> None:
        """It looks at the clock."""
        self._happens(Ticked(), now)

    def end_step(self) -> None:
        """The device is done with the oldest step: it has written every block, whatever happened meanwhile."""
        work, self.followed = self.steps.pop(0), None
        for each in slices_in(work):
            self._verify(each)
            for position in range(each.start, each.start + len(each.token_ids)):
                block, slot = each.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.memory[block] = (*self.memory[block][:slot], position, *self.memory[block][slot + 1 :])
        decoded = [token(sample.position) for each in slices_of(work.decodes, work.plan) for sample in each.samples]
        result = StepResult(
            outcomes=[tuple(SampledToken(token(sample.position)) for sample in each.samples) for each in work.slices],
            scores=[TokenScores() for _ in work.slices],
            chosen=Chosen(decoded, {}),
            duration_s=0.0,
            between_s=0.0,
        )
        self._happens(StepEnded(work, result, ()))

    def end_read(self, index: int, brought: tuple[Block, ...]) -> None:
        """A read ends: it has brought what was in the source's blocks at this moment."""
        read = self.reads.pop(index)
        for block, content in zip(read.sink_blocks, brought, strict=True):
            self.memory[block] = content
        self._happens(ReadEnded(read.read_id, None))

    def fail_read(self, index: int) -> None:
        """A read ends, and may have brought nothing."""
        self._happens(ReadEnded(self.reads.pop(index).read_id, "the connection broke"))

    def make_room(self) -> None:
        """The other sequence ends."""
        self.core.pool.release(self.others)
        self.others = []
        self._happens(Ticked())

    def revoke(self) -> None:
        """A reservation is taken back for a moment, as for a request of a higher tier."""
        [request, *_] = self._revocable()
        self.core.scheduler.preemption.preempt(request, Step(), 0.0)
        self._happens(Ticked())

    # --- carrying out --------------------------------------------------------------------------------------------

    def _happens(self, event: Event, now: float = 0.0) -> None:
        self._carry_out(self.core.handle(event, now))
        if not self.steps:
            self._carry_out(self.core.handle(StepWanted(None), 0.0))
        if self.runs_ahead and self.steps and self.followed is None:
            [self.followed] = self.steps
            self._carry_out(self.core.handle(StepWanted(self.followed), 0.0))
        for block in self.core.pool._free:
            self.memory[block] = EMPTY
        self._check()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(_, message) if isinstance(message, _NOT_SENT):
                    pass
                case Send() | SendToSource() | Connect():
                    self.sent.append(action)
                case PlannedStep():
                    self.steps.append(action)
                    for each in slices_in(action) if len(self.steps) == 1 else ():
                        self._verify(each)
                case StartRead(read_id, source, source_blocks, sink_blocks, _):
                    fenced = source not in self.agents
                    self.reads.append(Read(read_id, source, source_blocks, sink_blocks, fenced))
                    for block in sink_blocks:
                        self.memory[block] = EMPTY
                case AddSource(source, _):
                    self.agents.add(source)
                case DropSource(source):
                    self.agents.discard(source)
                    for read in self.reads:
                        read.fenced |= read.source == source
                case Serve() | Poll() | DropRead():
                    pass  # a read begins at once, so that none can be dropped
                case _:
                    raise AssertionError(action)

    def _verify(self, each: Slice) -> None:
        """What a step computes follows right tokens and right KV."""
        tokens = [token(position) for position in range(each.start, each.start + len(each.token_ids))]
        known = each.follows is None  # else it is the token that the step before has sampled
        assert not known or list(each.token_ids) == tokens, f"computes {each.token_ids} instead of {tokens}"
        held = [self.memory[block] for block in each.block_table]
        flat = [slot for content in held for slot in content]
        assert flat[: each.start] == list(range(each.start)), f"unverified KV: decodes from {held}"

    # --- what must hold ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """No block has two owners."""
        free = set(self.core.pool._free)
        written = [block for read in self.reads for block in read.sink_blocks]
        assert len(set(written)) == len(written), "two owners: two reads write to one block"
        assert free.isdisjoint(written), "two owners: a read under way writes to a free block"
        owned = self._owned()
        assert len(set(owned)) == len(owned), "two owners: two sequences"
        assert set(owned).isdisjoint(written), "two owners: a read under way writes to a sequence's block"
        named = {block for work in self.steps for each in slices_in(work) for block in each.block_table}
        assert named.isdisjoint(free), "two owners: a step in flight names a free block"
        assert named.isdisjoint(written), "two owners: a read writes to a block that a step in flight names"
        cut = self._cut()
        assert cut.isdisjoint(owned), "two owners: a sequence goes on after its cut"
        assert named.isdisjoint(cut), "two owners: a step in flight names a block of a sequence that was cut"
        self.core.check_invariants()

    def _owned(self) -> list[int]:
        """Blocks of sequences, those of the others included."""
        owned = list(self.others)
        if self.core.role is Role.PREFILL:
            tables = [request.block_table for request in self._requests()]
        else:
            tables = [each.block_table for each in self.core.scheduler.prompts]
            tables += [each.sequence.block_table for request in self._requests() for each in request.choices]
        return owned + [block for table in tables for block in table]

    def _cut(self) -> set[int]:
        """Blocks that a decode worker offers."""
        leases = self.core.lender._leases._leases.values() if self.core.role is Role.DECODE else ()
        return {block for lease in leases for block in lease.block_ids}

    # --- what others see -----------------------------------------------------------------------------------------

    def view(self) -> View:
        """What the world sees of it."""
        core, table = self.core, self.core.lender._leases
        pulls = [pull for pull, _ in core.pulls._pulls.values()]
        addresses = {pull.source.address for pull in (*pulls, *core.pulls._quarantine)}
        return View(
            me=self.me,
            memory=tuple(self.memory),
            in_step=bool(self.steps),
            reads=tuple((read.source, read.source_blocks, read.fenced) for read in self.reads),
            is_crowded=bool(self.others),
            num_revocable=len(self._revocable()),
            has_unclaimed=any(lease.complete and lease.sink is None for lease in table._leases.values()),
            has_early=any(parked.until < DEADLINE for parked in table.parked._parked.values()),
            idle=core.front.idle,
            open_requests=core.front.open_requests(GATEWAY),
            open_pulls={address: tuple(core.front.pulls.open_pulls(address)) for address in sorted(addresses)},
            sources=frozenset(pull.source.address for pull in pulls),
            left=self._left(),
        )

    def _requests(self) -> list[Any]:
        core = self.core
        return list((core.requests if core.role is Role.PREFILL else core.book.requests).values())

    def _revocable(self) -> list[Any]:
        if self.core.role is Role.PREFILL:
            return []
        return [each for each in self._requests() if each.pull and each.pull.revocable and not each.work.moving]

    def _left(self) -> dict[str, Any]:
        core, lender = self.core, self.core.lender
        counts: dict[str, Any] = {
            "requests": len(self._requests()),
            "pulls": core.pulls.num_pulls,
            "reads": core.pulls.num_reads + len(self.reads),
            "blocks in quarantine": core.pulls.num_quarantined,
            "leases": lender.num_leases,
            "readers": lender.num_readers,
            "parked attaches": lender.num_parked,
            "expected offers": len(lender._leases.parked._expected),
            "blocks": core.pool.num_blocks - core.pool.num_free,
        }
        if core.role is Role.DECODE:
            counts |= {
                "unacknowledged requests": sorted(core.book.finished),
                "wanted sequences": len(core.departures._wanted),
                "cut sequences": len(core.departures._cut),
                "arrivals": len(core.arrivals._arrivals),
            }
        return {name: count for name, count in counts.items() if count}
