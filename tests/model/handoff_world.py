"""The model's world: one gateway, its workers, the links between them, and everything that can happen next.

An event is a name with arguments. `progress` are those that happen by themselves sooner or later, `disturbances` those
that need not, of which a run has a bounded number, `timers` what time brings once nothing else goes on.
"""

from __future__ import annotations

from typing import Any

from handoff_bounds import DEADLINE, Bounds
from handoff_gateway import Gateway
from handoff_ids import drawing
from handoff_links import DOWN, UP, Answer, Hi, Link, twice
from handoff_states import Kept, Workers
from handoff_worker import GATEWAY, View

from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Decode, Prefill
from gateway.serving.flow import FlowState
from kv_transfer.events import Connect, Send, SendToSource

Event = tuple[Any, ...]

FREE = frozenset({"repeat", "replay"})
"""Disturbances that may cost no attempt at the request. Nor may the loss of a message between source and sink."""
MOST = 99
"""Attempts that any other disturbance may cost: several parties notice it, each at a moment of its own."""


class World:
    """Everything. `apply` makes an event happen, after which every worker has checked what must hold."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.left = bounds.disturbances
        self.crashed = False
        """Whether a worker has: one with which two have crashed may be refused as poison."""
        self.allowed = 1
        """Attempts that the disturbances so far explain."""
        self.links: dict[str, Link] = {}
        self.states = Workers(bounds)
        self.workers: dict[str, Kept] = {}
        for role, num in (("p", bounds.prefill_workers), ("d", bounds.decode_workers)):
            for address in (f"{role}{index}" for index in range(num)):
                self.workers[address] = self.states.first(Incarnation(f"{address}.1"))
        self.gateway = Gateway(self)
        for address, worker in self.workers.items():
            self.links[f"{GATEWAY}>{address}"] = Link(GATEWAY, address, worker.view.me)
            self.gateway.lives[address] = worker.view.me

    def begin(self) -> None:
        """The request arrives."""
        with drawing(self.gateway):
            self.gateway.do(self.gateway.flow.begin())

    def link(self, client: Incarnation, address: str) -> Link:
        return self.links[f"{client}>{address}"]

    def let(self, address: str, *event: Any) -> None:
        """Something happens to a worker (`Worker`). What it sends is on its way then."""
        worker, sent = self.states.after(self.workers[address], *event)
        self.workers[address] = worker
        for each in sent:
            match each:
                case Send(peer, message):
                    link = self.links.get(f"{peer}>{address}")
                    if link is not None:
                        link.send_down(message)
                case SendToSource(source, message):
                    self.link(worker.view.me, source).send_up(message)
                case Connect(source):
                    self.connect(worker.view.me, address, source)

    def connect(self, sink: Incarnation, address: str, source: str) -> None:
        """A sink's link, opened when it is first needed."""
        name = f"{sink}>{source}"
        if name not in self.links:
            self.links[name] = Link(sink, source, self.workers[source].view.me)
            self.on_reopen(name)

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
            view = worker.view
            if view.in_step:
                events.append(("end_step", address))
            if view.is_crowded:
                events.append(("make_room", address))
            for index, (source, _, fenced) in enumerate(view.reads):
                readable = not fenced and self.view(source) is not None
                events.append(("end_read" if readable else "read_fails", address, index))
        return events

    def wanted(self, link: Link) -> bool:
        """Whether the client wants its session back: a sink only when it pulls from there."""
        if link.client == GATEWAY:
            return True
        sink = self.view(link.client)
        return sink is not None and link.address in sink.sources

    def view(self, me: Incarnation) -> View | None:
        """The worker that is this life of it, if it lives."""
        view = self.workers[address_of(me)].view
        return view if view.me == me else None

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
            view = worker.view
            if view.has_unclaimed:
                events.append(("expire", address))
            events += [("fail_read", address, index) for index in range(len(view.reads))]
            if view.num_revocable:
                events.append(("revoke", address))
            if not view.idle:
                events.append(("deadline", address))
        if self.gateway.flow.running:
            events.append(("abort",))
            events += [("move", address) for address in self.workers if self.gateway.can_move(address)]
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

    def timers(self) -> list[Event]:
        """What time brings when nothing else goes on: offers and attaches that nobody has come for."""
        views = {address: worker.view for address, worker in self.workers.items()}
        return [("expire", address) for address, view in views.items() if view.has_unclaimed or view.has_early]

    # --- making it happen --------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Let an event happen, and check what must hold."""
        with drawing(self.gateway):
            getattr(self, "on_" + event[0])(*event[1:])
        self.gateway.flow.check_invariants()

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

    def arrive_up(self, link: Link, entry: Any, how: str = "hear") -> None:
        match entry:
            case Hi(number, listed):
                if link.client_died:
                    return
                link.session = True
                self.let(link.address, "hello", link.client, listed)
                link.down.append(Answer(number, self.open_requests(link)))
            case _ if not link.session:
                link.torn = link.known  # HelloRequired
            case _:
                self.let(link.address, how, link.client, entry)

    def open_requests(self, link: Link) -> tuple[RequestKey, ...]:
        """What a worker's Welcome lists."""
        return self.workers[link.address].view.open_requests if link.client == GATEWAY else ()

    def arrive_down(self, link: Link, entry: Any) -> None:
        match entry:
            case Answer(number, known):
                if number != link.number or not link.asked:
                    return
                link.torn = link.asked = False
                if link.client == GATEWAY:
                    self.gateway.on_resync(link, known)
                else:
                    self.let(address_of(link.client), "open_source", link.address, link.worker)
            case _ if link.client == GATEWAY:
                self.gateway.hear(link.address, entry)
            case _:
                self.let(address_of(link.client), "hear_source", link.worker, entry)

    def on_hello(self, name: str) -> None:
        link = self.links[name]
        link.hello(self.listed(link))

    def listed(self, link: Link) -> tuple[RequestKey, ...]:
        if link.client == GATEWAY:
            return self.gateway.listed(link.address)
        return self.workers[address_of(link.client)].view.open_pulls.get(link.address, ())

    def on_client_notices(self, name: str) -> None:
        link = self.links[name]
        self.close(link, crashed=link.worker_died)
        link.worker_died = False

    def close(self, link: Link, *, crashed: bool) -> None:
        """The client takes the session for lost."""
        link.close()
        if link.client == GATEWAY:
            self.gateway.on_lost(link.address, crashed=crashed)
        else:
            self.let(address_of(link.client), "lose_source", link.address, link.worker)

    def on_worker_notices(self, name: str) -> None:
        link = self.links[name]
        link.session = False
        link.replayed.clear()
        if link.known:
            link.down.clear()
        self.let(link.address, "lose", link.client)
        if link.client_died:
            del self.links[name]

    def on_reopen(self, name: str) -> None:
        """Hello and Welcome: nothing else travels meanwhile."""
        link = self.links[name]
        self.let(link.address, "hello", link.client, self.listed(link))
        link.known = link.session = True
        link.torn = link.asked = False
        link.worker = self.workers[link.address].view.me
        link.down.clear()
        if link.client == GATEWAY:
            self.gateway.on_open(link.address, link.worker)
        else:
            self.let(address_of(link.client), "open_source", link.address, link.worker)

    def on_end_step(self, address: str) -> None:
        self.let(address, "end_step")

    def on_make_room(self, address: str) -> None:
        """A sequence that has nothing to do with this one ends."""
        self.let(address, "make_room")

    def on_end_read(self, address: str, index: int) -> None:
        source, blocks, _ = self.workers[address].view.reads[index]
        memory = self.workers[address_of(source)].view.memory
        self.let(address, "end_read", index, tuple(memory[block] for block in blocks))

    def on_read_fails(self, address: str, index: int) -> None:
        self.let(address, "fail_read", index)

    on_fail_read = on_read_fails

    def on_revoke(self, address: str) -> None:
        """A decode worker takes a reservation back."""
        self.let(address, "revoke")

    def on_replayed(self, name: str) -> None:
        link = self.links[name]
        self.let(link.address, "hear", link.client, link.replayed.pop(0))

    def on_lose(self, name: str, way: str) -> None:
        self.links[name].lose(way)

    def on_repeat(self, name: str, way: str) -> None:
        queue = self.links[name].queue(way)
        queue.insert(0, twice(queue[0]))

    def on_replay(self, name: str) -> None:
        link = self.links[name]
        link.replayed.append(twice(link.up[0]))  # type: ignore[arg-type]

    def on_refuse(self, name: str) -> None:
        link = self.links[name]
        self.arrive_up(link, link.up.pop(0), "refuse")

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
        old = self.workers[address].view.me
        self.workers[address] = self.states.first(Incarnation(f"{address}.{int(old.partition('.')[2]) + 1}"))
        for name, link in list(self.links.items()):
            if link.address == address:
                link.restart()
                if link.client_died:
                    del self.links[name]
            if link.client == old:
                link.client_died, link.known = True, False
                link.down.clear()
                if not link.session:
                    del self.links[name]

    def on_expire(self, address: str) -> None:
        """Nobody has come for what waits here, in time."""
        self.let(address, "tick", DEADLINE - 1)

    def on_deadline(self, address: str) -> None:
        """The request's time is up, and a worker is the first to see it."""
        self.gateway.excused = True
        self.let(address, "tick", DEADLINE + 1)

    def on_abort(self) -> None:
        """The client leaves."""
        self.gateway.cancel()

    def on_move(self, address: str) -> None:
        """A decode worker drains."""
        self.gateway.move(address)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check_final(self) -> None:
        """When nothing happens any more."""
        flow, gateway = self.gateway.flow, self.gateway
        assert flow.state is not FlowState.RUNNING, "the request never ends"
        assert gateway.ends == (flow.state is not FlowState.CANCELLED), "not exactly one end"
        assert not gateway.waiting, "leak: a choice waits for workers"
        for address, worker in self.workers.items():
            assert not worker.view.left, f"leak: {address} has {worker.view.left}"
        num_attempts = gateway.num_attempts
        if not gateway.excused:
            assert flow.state is FlowState.DONE, "an error although there were workers"
            assert num_attempts <= self.allowed, f"{num_attempts} attempts where {self.allowed} would have done"


def address_of(worker: Incarnation) -> str:
    """A worker's address: that of `d0.2` is `d0`."""
    return worker.partition(".")[0]


def without_lives(name: str) -> str:
    """A link's name: `d0.2>p0` is `d0>p0`."""
    client, _, address = name.partition(">")
    return f"{client.partition('.')[0]}>{address}"
