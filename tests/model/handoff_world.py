"""The model's world: one gateway, its workers, the links between them, and everything that can happen next.

An event is a name with arguments. `progress` are those that happen by themselves sooner or later, `disturbances` those
that need not, of which a run has a bounded number, `timers` what time brings once nothing else goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from handoff_decode import DecodeShell
from handoff_links import DOWN, UP, Answer, Hi, Link, twice
from handoff_prefill import PrefillShell
from handoff_workers import DEADLINE, NUM_BLOCKS, TTL_S, token

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import (
    Abort,
    Decode,
    Message,
    Prefill,
    RequestMessage,
    Role,
    Source,
)
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from common.runtime.fence import AttemptFence
from gateway.serving import flow as flows
from gateway.serving.attempt import Deliver, Send, WorkerLife
from gateway.serving.flow import Flow, FlowState, PlacementRequest
from gateway.serving.generation import Generation
from gateway.serving.suspicion import Crash
from kv_transfer.sink import Pull
from kv_transfer.source import LeaseTable

PROMPT = (100, 101)
Event = tuple[Any, ...]


@dataclass(frozen=True)
class Parts:
    """The protocol's own objects; a broken one in the place of one of them breaks a promise."""

    table: type[LeaseTable] = LeaseTable
    pull: type[Pull] = Pull
    pool: type[BlockPool] = BlockPool
    fence: type[AttemptFence] = AttemptFence


@dataclass(frozen=True)
class Bounds:
    """How much of everything there is in a run."""

    prefill_workers: int = 1
    decode_workers: int = 1
    num_blocks: int = NUM_BLOCKS
    """Of each worker."""
    chunks: int = 1
    """Steps in which a prompt is computed: 1, or one for each block."""
    busy: bool = False
    """Whether decode workers have no room until others have left."""
    output_tokens: int = 2
    first_ends: bool = False
    """Whether a prefill worker's token may be the last one. If not, the decode worker generates at least one."""
    attempts: int = 8
    """At the request; if they are used up, it may fail. The flow gives up sooner, and may not."""
    disturbances: int = 1
    """Of all kinds together."""
    kinds: frozenset[str] = frozenset(
        {"lose", "repeat", "replay", "silence", "crash", "expire", "abort", "refuse", "fail_read", "deadline", "move"}
    )
    first: str | None = None
    """The kind of the first one; None for any."""
    links: frozenset[str] = frozenset({"g>p0", "g>d0", "g>d1", "d0>p0", "d1>p0", "d0>d1", "d1>d0"})
    """Links, without the lives of their ends, on which messages are lost or repeated, and sessions end."""


FREE = frozenset({"repeat", "replay"})
"""Disturbances that may cost no attempt at the request. Nor may the loss of a message between source and sink."""
MOST = 99
"""Attempts that any other disturbance may cost: several parties notice it, each at a moment of its own."""


class Gateway:
    """`gateway.routing.dispatcher.Dispatcher` for one request."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.me = Incarnation("g")
        bounds = world.bounds
        self.flow = Flow(
            Generation(
                token_ids=PROMPT,
                num_choices=1,
                sampling=SamplingParams(max_tokens=bounds.output_tokens),
                budget_s=1.0,
            )
        )
        self.waiting: list[PlacementRequest] = []
        self.places: dict[str, Incarnation] = {}
        """Workers with an open session."""
        self.num_tokens = len(PROMPT)
        self.num_attempts = 0
        """Attempts that have begun."""
        self.ends = 0
        self.excused = False
        """Whether the request may fail: its time was up."""

    def do(self, actions: Iterable[flows.Action]) -> None:
        """Carry out what the flow decided."""
        for action in actions:
            match action:
                case Send(part, message):
                    self.world.link(self.me, part.place.address).send_up(message)
                case Deliver(delta):
                    for given in delta.token_ids:
                        assert given == token(self.num_tokens), "the client's tokens are not each once and in order"
                        self.num_tokens += 1
                    assert self.ends == 0, "a token after the end"
                case PlacementRequest():
                    self.waiting.append(action)
                    self.look_again()
                case flows.Done() | flows.Fail():
                    self.ends += 1
                    assert self.ends == 1, "two ends"

    def look_again(self) -> None:
        """Place what waits, as far as there are workers."""
        for want in list(self.waiting):
            if want not in self.waiting:
                continue
            if self.num_attempts == self.world.bounds.attempts:
                self.waiting.remove(want)
                self.excused = True
                self.do(self.flow.fail(Cause.WORKER_LOST, "tried often enough"))
            elif want.offer is not None and self.places.get(want.offer.place.address) != want.offer.place.incarnation:
                self.waiting.remove(want)
                self.do(self.flow.without_offer(want))
            else:
                self.place(want)

    def place(self, want: PlacementRequest) -> None:
        """As `gateway.routing.router` and `gateway.routing.placement` would, with no load anywhere."""
        decodes = self.usable(Role.DECODE)
        prefills = [place for place in self.usable(Role.PREFILL) if place not in want.avoid]
        if not decodes or not self.flow.running:
            return
        decode = next((place for place in decodes if place not in want.avoid), decodes[0])
        prefill = prefills[0] if prefills and want.offer is None else None
        self.waiting.remove(want)
        self.num_attempts += 1
        self.do(self.flow.go(want, decode, prefill, 1.0, now=0.0))

    def usable(self, role: Role) -> list[WorkerLife]:
        first = "p" if role is Role.PREFILL else "d"
        return [WorkerLife(f"{a}", self.places[a]) for a in sorted(self.places) if a.startswith(first)]

    def hear(self, address: str, message: Message) -> None:
        assert isinstance(message, RequestMessage)
        found = self.flow.find(message.key, address)
        if found is not None:
            self.do(self.flow.on_message(*found, message))

    def listed(self, address: str) -> tuple[RequestKey, ...]:
        return tuple(part.key for _, part in self.flow.assignments_at(address))

    def on_resync(self, link: Link, known: tuple[RequestKey, ...]) -> None:
        for attempt, part in self.flow.assignments_at(link.address):
            if part.key in link.listed:
                self.do(self.flow.on_resync(attempt, part, known=part.key in known))

    def on_lost(self, address: str, *, crashed: bool) -> None:
        self.places.pop(address, None)
        self.do(self.flow.worker_lost(address, "lost", Crash(at=0.0) if crashed else None))

    def on_open(self, address: str, worker: Incarnation) -> None:
        self.places[address] = worker
        self.look_again()


class World:
    """Everything. `apply` makes an event happen; `check` holds between any two."""

    def __init__(self, bounds: Bounds, parts: Parts = Parts()) -> None:
        self.bounds = bounds
        self.parts = parts
        self.left = bounds.disturbances
        self.crashed = False
        """Whether a worker has: one with which two have crashed may be refused as poison."""
        self.num_drawn = 0
        """Ids drawn so far."""
        self.allowed = 1
        """Attempts that the disturbances so far explain."""
        self.refusing = False
        """While a worker hears what it will refuse."""
        self.links: dict[str, Link] = {}
        self.gateway = Gateway(self)
        self.workers: dict[str, PrefillShell | DecodeShell] = {}
        for index in range(bounds.prefill_workers):
            self.workers[f"p{index}"] = PrefillShell(self, f"p{index}", 1)
        for index in range(bounds.decode_workers):
            self.workers[f"d{index}"] = DecodeShell(self, f"d{index}", 1)
        for address, worker in self.workers.items():
            self.links[f"g>{address}"] = Link(self.gateway.me, address, worker.me)
            self.gateway.places[address] = worker.me

    def begin(self) -> None:
        """The request arrives."""
        with drawing_for(self):
            self.gateway.do(self.gateway.flow.begin())

    # --- what parts of it ask of it ----------------------------------------------------------------------------------

    def draw(self) -> str:
        """An id that nobody has."""
        self.num_drawn += 1
        return f"id{self.num_drawn}"

    def enough(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens ends."""
        return num_tokens >= len(PROMPT) + self.bounds.output_tokens

    def link(self, client: Incarnation, address: str) -> Link:
        return self.links[f"{client}>{address}"]

    def link_to_source(self, sink: DecodeShell, source: Source) -> Link:
        """A sink's link, opened when it is first needed."""
        name = f"{sink.me}>{source.address}"
        if name not in self.links:
            worker = self.workers[source.address]
            self.links[name] = Link(sink.me, source.address, worker.me)
        return self.links[name]

    # --- what can happen ---------------------------------------------------------------------------------------------

    def progress(self) -> list[Event]:
        """What happens by itself."""
        events: list[Event] = []
        for name, link in self.links.items():
            if link.up:
                events.append(("deliver", name, UP))
            if link.down and link.known:
                events.append(("deliver", name, DOWN))
            if link.replayed and link.session:
                events.append(("replayed", name))
            if link.known and link.torn and not link.asked and not link.worker_died and not link.client_died:
                events.append(("hello", name))
            if link.known and (link.worker_died or not link.session) and not link.client_died:
                events.append(("client_notices", name))
            if link.session and not link.up and (link.client_died or (not link.known and not self.wanted(link))):
                events.append(("worker_notices", name))
            if not link.known and not link.up and not link.client_died and self.wanted(link):
                events.append(("reopen", name))
        for address, worker in self.workers.items():
            if worker.step is not None:
                events.append(("end_step", address))
            if isinstance(worker, DecodeShell):
                if worker.others:
                    events.append(("make_room", address))
                for index, read in enumerate(worker.reads):
                    readable = self.readable(worker, read.pull.source)
                    events.append(("end_read" if readable else "read_fails", address, index))
        return events

    def wanted(self, link: Link) -> bool:
        """Whether the client wants its session back: a sink only when it pulls from there."""
        if link.client == self.gateway.me:
            return True
        worker = self.life(link.client)
        return worker is not None and bool(worker.pulling_from(link.address))

    def life(self, me: Incarnation) -> DecodeShell | None:
        """The worker that is this life of it."""
        worker = self.workers[me.partition(".")[0]]
        return worker if worker.me == me and isinstance(worker, DecodeShell) else None

    def readable(self, sink: DecodeShell, source: Source) -> bool:
        """Whether the source lives, and the sink has not cut its agent off from it."""
        link = self.link_to_source(sink, source)
        return link.known and link.worker == source.incarnation == self.workers[source.address].me

    def disturbances(self) -> list[Event]:
        """What need not happen."""
        if not self.left:
            return []
        events: list[Event] = []
        for name, link in self.links.items():
            if link.client_died or link.worker_died:
                continue
            if without_lives(name) not in self.bounds.links:
                continue
            events += self.on_wire(name, link)
            if link.known and link.session:
                events += [("silence", name, UP), ("silence", name, DOWN)]
        for address, worker in self.workers.items():
            if not self.crashed:
                events.append(("crash", address))
            if any(lease.complete and lease.sink is None for lease in worker.table._leases.values()):
                events.append(("expire", address))
            if isinstance(worker, DecodeShell):
                events += [("fail_read", address, index) for index in range(len(worker.reads))]
                events += [("revoke", address) for _ in worker.revocable()]
            if len(worker.table) or worker.table.num_parked:
                events.append(("deadline", address))
        if self.gateway.flow.running:
            events.append(("abort",))
            events += [("move", a) for a, w in self.workers.items() if isinstance(w, DecodeShell) and self.can_move(a)]
        first = self.bounds.first if self.left == self.bounds.disturbances else None
        return [event for event in events if event[0] in self.bounds.kinds and first in (None, event[0])]

    def on_wire(self, name: str, link: Link) -> list[Event]:
        events: list[Event] = []
        for way in (UP, DOWN):
            queue = link.queue(way)
            if not queue or not link.known:
                continue
            events.append(("lose", name, way))
            if isinstance(queue[0], Message):
                events.append(("repeat", name, way))
            if isinstance(queue[0], Prefill | Decode | Abort):
                events.append(("replay", name))
            if isinstance(queue[0], Prefill | Decode):
                events.append(("refuse", name))
        return events

    def can_move(self, address: str) -> bool:
        others = [place for place in self.gateway.usable(Role.DECODE) if place.address != address]
        return bool(others) and bool(self.gateway.flow.movable(address))

    def timers(self) -> list[Event]:
        """What time brings when nothing else goes on: offers and attaches that nobody has come for."""
        return [("expire", a) for a, worker in self.workers.items() if worker.table.next_expiry() < DEADLINE]

    # --- making it happen --------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Let an event happen, and check what must hold."""
        with drawing_for(self):
            getattr(self, "on_" + event[0])(*event[1:])
        self.check()

    def disturb(self, event: Event) -> None:
        """Let a disturbance happen."""
        self.left -= 1
        self.allowed += self.cost(event)
        self.apply(event)

    def cost(self, event: Event) -> int:
        """Attempts that it may cost."""
        between_workers = event[0] == "lose" and not event[1].startswith("g>")
        return 0 if event[0] in FREE or between_workers else MOST

    def on_deliver(self, name: str, way: str) -> None:
        link = self.links[name]
        entry = link.queue(way).pop(0)
        if way == UP:
            self.arrive_up(link, entry)
        else:
            self.arrive_down(link, entry)

    def arrive_up(self, link: Link, entry: Any) -> None:
        worker = self.workers[link.address]
        match entry:
            case Hi(number, listed):
                if link.client_died:
                    return
                link.session = True
                known = worker.on_hello(link.client, listed)
                link.down.append(Answer(number, known))
            case _ if not link.session:
                link.torn = link.known  # HelloRequired
            case _:
                worker.hear(link.client, entry)

    def arrive_down(self, link: Link, entry: Any) -> None:
        sink = None if link.client == self.gateway.me else self.life(link.client)
        match entry:
            case Answer(number, known):
                if number != link.number or not link.asked:
                    return
                link.torn = link.asked = False
                if sink is None:
                    self.gateway.on_resync(link, known)
                else:
                    sink.on_source_open(link.address, link.worker)
            case _ if sink is None:
                self.gateway.hear(link.address, entry)
            case _:
                sink.from_source(entry, link.worker)

    def on_hello(self, name: str) -> None:
        link = self.links[name]
        link.hello(self.listed(link))

    def listed(self, link: Link) -> tuple[RequestKey, ...]:
        if link.client == self.gateway.me:
            return self.gateway.listed(link.address)
        sink = self.life(link.client)
        assert sink is not None
        return sink.open_pulls(link.address)

    def on_client_notices(self, name: str) -> None:
        link = self.links[name]
        self.close(link, crashed=link.worker_died)
        link.worker_died = False

    def close(self, link: Link, *, crashed: bool) -> None:
        """The client takes the session for lost."""
        link.close()
        if link.client == self.gateway.me:
            self.gateway.on_lost(link.address, crashed=crashed)
        else:
            sink = self.life(link.client)
            assert sink is not None
            sink.on_source_lost(link.address)

    def on_worker_notices(self, name: str) -> None:
        link = self.links[name]
        link.session = False
        link.replayed.clear()
        if link.known:
            link.down.clear()
        self.workers[link.address].on_peer_lost(link.client)
        if link.client_died:
            del self.links[name]

    def on_reopen(self, name: str) -> None:
        """Hello and Welcome: nothing else travels meanwhile."""
        link = self.links[name]
        worker = self.workers[link.address]
        worker.on_hello(link.client, self.listed(link))
        link.known = link.session = True
        link.torn = link.asked = False
        link.worker = worker.me
        link.down.clear()
        if link.client == self.gateway.me:
            self.gateway.on_open(link.address, worker.me)
        else:
            sink = self.life(link.client)
            assert sink is not None
            sink.on_source_open(link.address, worker.me)

    def on_end_step(self, address: str) -> None:
        self.workers[address].end_step()

    def on_make_room(self, address: str) -> None:
        """A sequence that has nothing to do with this one ends."""
        worker: Any = self.workers[address]
        blocks, worker.others = worker.others, []
        worker.release(blocks)

    def on_end_read(self, address: str, index: int) -> None:
        sink: Any = self.workers[address]
        sink.end_read(index, self.workers[sink.reads[index].pull.source.address].memory)

    def on_read_fails(self, address: str, index: int) -> None:
        sink: Any = self.workers[address]
        sink.end_read(index, None)

    on_fail_read = on_read_fails

    def on_revoke(self, address: str) -> None:
        """A decode worker takes a reservation back."""
        worker: Any = self.workers[address]
        [job] = worker.revocable()
        worker.revoke(job)

    def on_replayed(self, name: str) -> None:
        link = self.links[name]
        self.workers[link.address].hear(link.client, link.replayed.pop(0))

    def on_lose(self, name: str, way: str) -> None:
        self.links[name].lose(way)

    def on_repeat(self, name: str, way: str) -> None:
        queue = self.links[name].queue(way)
        queue.insert(0, twice(queue[0]))

    def on_replay(self, name: str) -> None:
        link = self.links[name]
        link.replayed.append(twice(link.up[0]))  # type: ignore[arg-type]

    def on_refuse(self, name: str) -> None:
        self.refusing = True
        self.on_deliver(name, UP)
        self.refusing = False

    def on_silence(self, name: str, way: str) -> None:
        """One side takes the other for dead."""
        link = self.links[name]
        if way == UP:
            self.close(link, crashed=False)
        else:
            self.on_worker_notices(name)

    def on_crash(self, address: str) -> None:
        """The process dies, and another one is started."""
        self.crashed = True
        old = self.workers[address]
        life = int(old.me.partition(".")[2]) + 1
        self.workers[address] = type(old)(self, address, life)
        for name, link in list(self.links.items()):
            if link.address == address:
                link.restart()
                if link.client_died:
                    del self.links[name]
            if link.client == old.me:
                link.client_died, link.known = True, False
                link.down.clear()
                if not link.session:
                    del self.links[name]

    def on_expire(self, address: str) -> None:
        """Nobody has come for what waits here, in time."""
        self.workers[address].expire(TTL_S if not self.workers[address].table.num_parked else DEADLINE - 1)

    def on_deadline(self, address: str) -> None:
        """The request's time is up, and a worker is the first to see it."""
        self.gateway.excused = True
        self.workers[address].expire(DEADLINE + 1)

    def on_abort(self) -> None:
        """The client leaves."""
        self.gateway.excused = True
        self.gateway.do(self.gateway.flow.cancel())
        self.gateway.waiting.clear()

    def on_move(self, address: str) -> None:
        """A decode worker drains."""
        gateway = self.gateway
        for attempt, choice in gateway.flow.movable(address):
            refuge = next(place for place in gateway.usable(Role.DECODE) if place.address != address)
            gateway.do(gateway.flow.move(attempt, choice, refuge, 1.0, now=0.0))

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Between any two events."""
        self.gateway.flow.check_invariants()
        for worker in self.workers.values():
            worker.pool.check_invariants()
            worker.table.check_invariants()
            worker.check()

    def check_final(self) -> None:
        """When nothing happens any more."""
        flow, gateway = self.gateway.flow, self.gateway
        assert flow.state is not FlowState.RUNNING, "the request never ends"
        assert gateway.ends == (flow.state is not FlowState.CANCELLED), "not exactly one end"
        assert not gateway.waiting, "leak: a choice waits for workers"
        for worker in self.workers.values():
            worker.check_idle()
            table, pool = worker.table, worker.pool
            held = (len(table), table.num_parked, table.num_readers)
            assert held == (0, 0, 0), f"leak: {worker.address} has {held} leases, parked attaches and readers"
            assert pool.num_free == pool.num_blocks, f"leak: {worker.address} has lost blocks"
        num_attempts = gateway.num_attempts
        if not gateway.excused:
            assert flow.state is FlowState.DONE, "an error although there were workers"
            assert num_attempts <= self.allowed, f"{num_attempts} attempts where {self.allowed} would have done"

    def forget_stories(self) -> None:
        """What is only for traces is no part of the state."""
        self.gateway.flow.story.clear()
        for worker in self.workers.values():
            for lease in worker.table._leases.values():
                lease.story.clear()
            if isinstance(worker, DecodeShell):
                pulls = [*worker.pulls.values(), *worker.quarantine, *(read.pull for read in worker.reads)]
                for pull in pulls + [job.pull for job in worker.jobs.values() if job.pull is not None]:
                    pull.story.clear()


def without_lives(name: str) -> str:
    """A link's name: `d0.2>p0` is `d0>p0`."""
    client, _, address = name.partition(">")
    return f"{client.partition('.')[0]}>{address}"


# --- ids ---------------------------------------------------------------------------------------------------------


class _Draw:
    """Where new ids come from: the world in which something happens."""

    world: World | None = None


class drawing_for:  # noqa: N801
    """Ids are drawn by this world."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __enter__(self) -> None:
        _Draw.world = self.world

    def __exit__(self, *_: object) -> None:
        _Draw.world = None


def draw_id() -> Any:
    """In the place of `new_lease_id` and `new_request_id`."""
    assert _Draw.world is not None
    return _Draw.world.draw()
