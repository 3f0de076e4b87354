"""The lease table against a model that knows, for every block, who pins it, and for every sink, what it waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from next_times import next_expiry

from common.contract.block_hashes import block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.handoff import (
    Attach,
    AttachPrefix,
    BlocksReady,
    Detach,
    OfferWithdrawn,
    PrefillDone,
    Settle,
    Settled,
)
from common.contract.messages.worker import Tokens
from kv_transfer.events import LeaseDropped, Released, Send, Unpinned
from kv_transfer.lease_table import LeaseAction, LeaseTable

TTL_S = 10.0
BUDGET_S = 40.0
LENT_S = 20.0
HASHES = tuple(block_hashes(range(4), 1))
REQUESTS = tuple(RequestId(f"r{number}") for number in range(2))
SINKS = tuple(Incarnation(f"d{number}") for number in range(3))

requests = st.sampled_from(REQUESTS)
sinks = st.sampled_from(SINKS)
attempts = st.integers(1, 3)


def sent(action: LeaseAction) -> Message:
    assert isinstance(action, Send)
    return action.message


@dataclass
class Held:
    """A lease, as the model sees it."""

    key: RequestKey
    blocks: tuple[int, ...]
    deadline: float
    unattached_since: float
    num_ready: int = 0
    complete: bool = False
    sink: Incarnation | None = None
    opened_attempt: int = 1
    lent: bool = False
    """A cached prefix: it is for the sink that has asked, and for nobody after it."""
    names: set[tuple[LeaseId, int]] = field(default_factory=set)
    """(lease, epoch), as sinks were told; one at most."""

    @property
    def expiry(self) -> float:
        if self.sink is not None or not self.complete:
            return self.deadline
        return min(self.deadline, self.unattached_since + TTL_S)


class LeaseMachine(RuleBasedStateMachine):
    """Sinks attach, detach, settle and vanish in any order; so do prefills begin, progress and end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(unattached_ttl_s=TTL_S, checksum=lambda blocks: [-block % 2**32 for block in blocks])
        self.now = 0.0
        self.held: dict[RequestId, Held] = {}
        self.waiting: set[tuple[Incarnation, RequestKey]] = set()
        """Sinks that have attached and have been told nothing final since."""
        self.offered: dict[tuple[Incarnation, RequestKey], int] = {}
        """The attempt of the Prefill that each pull wants the offer of."""
        self.expected: dict[RequestId, int] = {}
        """Requests that wait for blocks → attempt."""
        self.ended = dict.fromkeys(REQUESTS, 0)
        """The newest attempt whose offer has ended."""
        self.finished: dict[RequestId, Held] = {}
        """What the first tokens have ended, for who attaches afterwards."""
        self.reading: set[tuple[Incarnation, RequestKey]] = set()
        """Sinks that were given an offer and have neither settled nor detached."""
        self.lost: set[tuple[Incarnation, RequestKey]] = set()
        """What sinks were reading when they were lost."""
        self.seen: list[tuple[Incarnation, RequestKey, LeaseId, int]] = []
        """What sinks know to settle."""
        self.granted: set[tuple[Incarnation, RequestKey, LeaseId, int]] = set()
        self.num_blocks = 0
        self.last_epoch = 0

    # --- what the table decides ----------------------------------------------------------------------------------

    def check(self, actions: list[LeaseAction]) -> list[Settled]:
        """Follow the table's decisions; the verdicts among them."""
        verdicts = []
        for action in actions:
            match action:
                case Send(sink, BlocksReady() | PrefillDone() as message):
                    self.check_offer(sink, message)
                case Send(sink, OfferWithdrawn() as message):
                    assert (sink, message.key) in self.waiting, "told to a sink that waits for nothing"
                    self.waiting.remove((sink, message.key))
                case Send(_, Settled() as message):
                    verdicts.append(message)
                case Unpinned(key, block_ids, settled):
                    held = self.held.pop(key.request)
                    opened = RequestKey(held.key.request, held.opened_attempt)
                    assert (key, block_ids, held.lent) == (opened, held.blocks, False), "whoever opened it must know it"
                    assert settled == any(verdict.valid for verdict in verdicts)
                    self.ended[key.request] = max(self.ended[key.request], key.attempt)
                case Released(block_ids):
                    [held] = [held for held in self.held.values() if held.blocks == block_ids]
                    assert held.lent
                    del self.held[held.key.request]
                case LeaseDropped(key, _, _):
                    assert self.held[key.request].key == key
                    assert not self.held[key.request].lent, "nobody has asked for it here"
                case _:
                    raise AssertionError(action)
        return verdicts

    def check_last_words(self, sink: Incarnation, message: BlocksReady | PrefillDone) -> None:
        """A sink that came too late hears of the end: it has nothing to read, and waits for nothing."""
        finished = self.finished[message.request]
        assert (sink, message.key) in self.waiting, "told to a sink that waits for nothing"
        assert self.offered[sink, message.key] == finished.opened_attempt, "the end of another offer"
        if isinstance(message, BlocksReady):
            assert (message.start, message.block_ids, message.checksums) == (0, (), ()), "blocks of nobody are offered"
            assert message.num_blocks == len(finished.blocks)
        else:
            assert [token.finish_reason for token in message.first_tokens] == ["stop"]
            self.waiting.remove((sink, message.key))

    def check_offer(self, sink: Incarnation, message: BlocksReady | PrefillDone) -> None:
        if message.request not in self.held:
            self.check_last_words(sink, message)
            return
        held = self.held[message.request]
        assert (sink, message.key) in self.waiting, "an offer to a sink that is not attached"
        assert (held.sink, held.key) == (sink, message.key), "an offer to another sink than the attached one"
        held.names.add((message.lease, message.epoch))
        assert len(held.names) == 1, "one lease, one name"
        self.seen.append((sink, message.key, message.lease, message.epoch))
        if isinstance(message, BlocksReady):
            end = message.start + len(message.block_ids)
            assert end <= held.num_ready, "a block is offered that can still change"
            assert message.block_ids == held.blocks[message.start : end]
            assert message.checksums == tuple(-block % 2**32 for block in message.block_ids)
            assert message.num_blocks == len(held.blocks)
            assert not held.lent or message.start == 0 < end == len(held.blocks), "a part of a prefix"
        else:
            assert held.complete
            assert not held.lent

    def bind(self, sink: Incarnation, key: RequestKey) -> None:
        """What an attach to a held lease should do, before the table is asked."""
        held = self.held.get(key.request)
        if held is None or held.lent or self.offered[sink, key] != held.opened_attempt:
            return
        if key.attempt >= held.key.attempt:
            held.sink, held.key = sink, key
            self.reading.add((sink, key))

    # --- the prefill's side --------------------------------------------------------------------------------------

    @rule(request=requests, attempt=attempts, num=st.integers(1, 4))
    def open(self, request: RequestId, attempt: int, num: int) -> None:
        before = self.held.get(request)
        if before is not None and not before.lent:
            return
        if before is not None:  # a faulty sink has named a prefix after this request
            self.check(self.table.withdraw(request, Cause.SUPERSEDED, "the name is a request's"))
        blocks = self.fresh(num)
        key = RequestKey(request, attempt)
        self.expected.pop(request, None)
        self.held[request] = Held(key, blocks, self.now + BUDGET_S, self.now, opened_attempt=attempt)
        for sink, waits in self.waiting:
            if waits.request == request:
                self.held[request].key = waits if self.offered[sink, waits] == attempt else key
                self.bind(sink, waits)
        self.check(self.table.open(key, blocks, self.now + BUDGET_S, self.now))
        assert all(self.offered[each] >= attempt for each in self.waiting if each[1].request == request)

    @rule(request=requests, attempt=attempts)
    def expect(self, request: RequestId, attempt: int) -> None:
        """A prompt waits for blocks: who attaches may wait as long as it does."""
        if request in self.held:
            return
        self.expected[request] = attempt
        self.table.parked.expect(RequestKey(request, attempt), self.now + BUDGET_S)

    def fresh(self, num: int) -> tuple[int, ...]:
        """Blocks that nobody has seen."""
        self.num_blocks += num
        return tuple(range(self.num_blocks - num, self.num_blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[request]
        self.compute_to(request, data.draw(st.integers(held.num_ready, len(held.blocks))))

    @rule(request=requests, attempt=attempts)
    def prefill(self, request: RequestId, attempt: int) -> None:
        """A short prompt: one chunk, and the offer is complete."""
        if request in self.held:
            return
        self.open(request, attempt, 2)
        self.compute_to(request, len(self.held[request].blocks))
        self.complete(request, ended=False)

    def compute_to(self, request: RequestId, num_ready: int) -> None:
        held = self.held[request]
        start, held.num_ready = held.num_ready, num_ready
        if held.sink is None and held.num_ready > start:
            held.unattached_since = self.now
        sums = [-block % 2**32 for block in held.blocks[start : held.num_ready]]
        self.check(self.table.blocks_ready(request, held.num_ready, sums, now=self.now))

    @rule(request=requests, ended=st.booleans())
    def complete(self, request: RequestId, ended: bool) -> None:
        held = self.held.get(request)
        if held is None or held.complete or held.num_ready < len(held.blocks):
            return
        held.complete = True
        token = Tokens(
            request=request,
            attempt=held.key.attempt,
            choice=0,
            position=1,
            token_ids=(1,),
            finish_reason="stop" if ended else None,
        )
        self.check(self.table.complete(request, [token]))
        assert (request in self.held) is not ended
        if ended:
            self.finished[request] = held
        if ended and held.sink is not None:
            self.waiting.remove((held.sink, held.key))

    @rule(request=requests, cause=st.sampled_from([Cause.CANCELLED, Cause.SUPERSEDED]))
    def withdraw(self, request: RequestId, cause: Cause) -> None:
        """An abort, or a newer Prefill, ends what there is; who waits for a newer one goes on waiting."""
        held = self.held.get(request)
        over = self.expected.pop(request, 0) if held is None else held.opened_attempt
        waits = {each for each in self.waiting if each[1].request == request}
        kept = {each for each in waits if self.offered[each] > over}
        if held is not None and held.sink is not None:
            kept.discard((held.sink, held.key))
        if held is None:
            self.ended[request] = max(self.ended[request], over)
        self.check(self.table.withdraw(request, cause, "aborted"))
        assert request not in self.held
        assert {each for each in self.waiting if each[1].request == request} == kept

    @rule(num=st.integers(0, 6), age_s=st.sampled_from([0.0, 1.0, 5.0]))
    def reclaim(self, num: int, age_s: float) -> None:
        before = dict(self.held)
        self.check(self.table.reclaim(num, self.now - age_s))
        ended = [held for request, held in before.items() if request not in self.held]
        for held in ended:
            assert held.sink is None
            assert held.complete
            assert held.unattached_since <= self.now - age_s
        assert not any(held.lent for held in ended), "a sink is reading it"
        kept = [held for held in self.held.values() if held.sink is None and held.complete]
        assert all(gone.unattached_since <= stays.unattached_since for gone in ended for stays in kept), (
            "not the oldest"
        )
        freed = sum(len(held.blocks) for held in ended)
        assert freed - max((len(held.blocks) for held in ended), default=0) < max(num, 1), "more than was asked for"

    # --- the sinks' side -----------------------------------------------------------------------------------------

    @rule(request=requests, attempt=attempts, older=st.sampled_from([0, 0, 1, 2]), sink=sinks)
    def attach(self, request: RequestId, attempt: int, older: int, sink: Incarnation) -> None:
        """For the Prefill of the same attempt, or of an older one whose decode worker has failed."""
        key = RequestKey(request, attempt)
        offered = self.offered.setdefault((sink, key), max(1, attempt - older))
        self.waiting.add((sink, key))
        self.bind(sink, key)
        held = self.held.get(request)
        newer = held is None or (not held.lent and offered > held.opened_attempt)
        gone = newer and offered <= self.ended[request]
        actions = self.table.attach(Attach(request=request, attempt=attempt, offered=offered), sink, self.now)
        if gone and any((sink, key) == granted[:2] for granted in self.granted):
            assert actions == [], "its Settle is answered, and nothing else"
            self.waiting.remove((sink, key))
            return
        self.check(actions)
        assert gone <= ((sink, key) not in self.waiting), "waits for an offer that has ended"
        assert self.table.parked.awaits(RequestKey(request, offered)) <= (
            (sink, key) in self.waiting or bool(self.waiting)
        )
        if held is not None and (held.sink, held.key) == (sink, key):
            assert not held.lent or len(actions) == 1
            told = [action.message for action in actions if isinstance(action, Send) and action.peer == sink]
            [offer] = [message for message in told if isinstance(message, BlocksReady)]
            assert (offer.start, len(offer.block_ids)) == (0, held.num_ready), "not told everything"
            assert any(isinstance(message, PrefillDone) for message in told) == (held.complete and not held.lent)

    @rule(request=requests, attempt=attempts, sink=sinks, num=st.integers(1, 4))
    def attach_prefix(self, request: RequestId, attempt: int, sink: Incarnation, num: int) -> None:
        """A sink asks for a cached prefix, under a name that others may use by mistake."""
        key = RequestKey(request, attempt)
        held = self.held.get(request)
        attached = held is not None and (held.sink, held.key) == (sink, key)
        if request in self.expected or (held is not None and (sink, key) in self.waiting and not attached):
            return
        self.waiting.add((sink, key))
        self.offered.setdefault((sink, key), attempt)
        if held is not None:
            mine = (held.sink, held.key) == (sink, key)
            message = AttachPrefix(request=request, attempt=attempt, block_hashes=HASHES)
            [answer] = self.table.attach(message, sink, self.now)
            assert isinstance(sent(answer), BlocksReady if mine and held.lent else OfferWithdrawn)
            if not mine or held.lent:  # else it is refused the prefix, and keeps the offer that it is attached to
                self.check([answer])
            return
        blocks = self.fresh(num)
        deadline = self.now + LENT_S
        self.held[request] = Held(
            key, blocks, deadline, self.now, num_ready=num, complete=True, sink=sink, opened_attempt=attempt, lent=True
        )
        self.reading.add((sink, key))
        self.check(self.table.lend(key, blocks, sink, deadline, self.now))
        waiting = {(other, waits) for other, waits in self.waiting if waits.request == request}
        assert waiting == {(sink, key)}, "waits for a request that cannot come"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def attach_again(self, data: st.DataObject) -> None:
        sink, key = data.draw(st.sampled_from(sorted(self.waiting)))
        self.attach(key.request, key.attempt, 0, sink)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        sink, key = data.draw(st.sampled_from(sorted(self.waiting)))
        self.stray_detach(key.request, key.attempt, sink)

    @rule(request=requests, attempt=attempts, sink=sinks)
    def stray_detach(self, request: RequestId, attempt: int, sink: Incarnation) -> None:
        key = RequestKey(request, attempt)
        self.waiting.discard((sink, key))
        self.reading.discard((sink, key))
        held = self.held.get(request)
        lent = held is not None and held.lent and (held.sink, held.key) == (sink, key)
        if held is not None and not lent and (held.sink, held.key) == (sink, key):
            held.sink, held.unattached_since = None, self.now
        self.check(self.table.detach(Detach(request=request, attempt=attempt), sink, self.now))
        assert not lent or request not in self.held, "held for nobody"

    @rule(sink=sinks, data=st.data())
    def say_hello(self, sink: Incarnation, data: st.DataObject) -> None:
        """A session opens, perhaps again after a loss. What is not named has been given up. What is named and was being
        read still is."""
        known = sorted({key for other, key in self.waiting | self.reading | self.lost if other == sink})
        named = set(data.draw(st.lists(st.sampled_from(known), unique=True))) if known else set()
        self.reading |= {(other, key) for other, key in self.lost if other == sink}
        self.lost = {(other, key) for other, key in self.lost if other != sink}
        given_up = self.give_up(sink, named)
        self.check(self.table.sink_said_hello(sink, named, self.now))
        assert all(held.lent is (held.key.request not in self.held) for held in given_up)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """A sink that was lost says Hello."""
        self.say_hello(data.draw(st.sampled_from(sorted({sink for sink, _ in self.lost}))), data)

    @rule(sink=sinks)
    def lose(self, sink: Incarnation) -> None:
        """A session is over: its sink is dead, cut off, or stands still."""
        self.lost |= {(other, key) for other, key in self.reading if other == sink}
        given_up = self.give_up(sink, set())
        self.check(self.table.sink_lost(sink, self.now))
        assert all(held.lent is (held.key.request not in self.held) for held in given_up)

    def give_up(self, sink: Incarnation, named: set[RequestKey]) -> list[Held]:
        """What a sink does not name is not its any more. Returns the leases that it had."""
        self.waiting = {(other, key) for other, key in self.waiting if other != sink or key in named}
        self.reading = {(other, key) for other, key in self.reading if other != sink or key in named}
        given_up = [held for held in self.held.values() if held.sink == sink and held.key not in named]
        for held in given_up:
            if not held.lent:
                held.sink, held.unattached_since = None, self.now
        return given_up

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), asker=st.none() | sinks, attempt=st.none() | attempts, epoch=st.none() | st.integers(0, 9))
    def settle(self, data: st.DataObject, asker: Incarnation | None, attempt: int | None, epoch: int | None) -> None:
        """What a sink was told, at any later time, or something like it."""
        sink, key, lease, told_epoch = data.draw(st.sampled_from(self.seen))
        self.ask(
            sink if asker is None else asker,
            key if attempt is None else RequestKey(key.request, attempt),
            lease,
            told_epoch if epoch is None else epoch,
        )

    @precondition(lambda self: any(held.sink is not None and held.complete for held in self.held.values()))
    @rule(data=st.data(), stale=st.booleans())
    def settle_in_time(self, data: st.DataObject, stale: bool) -> None:
        """The attached sink asks; `stale`: for any lease that the request has ever had."""
        ready = [held for held in self.held.values() if held.sink is not None and held.complete]
        held = data.draw(st.sampled_from(ready))
        names = [(lease, epoch) for _, key, lease, epoch in self.seen if key.request == held.key.request]
        lease, epoch = data.draw(st.sampled_from(names if stale else sorted(held.names)))
        assert held.sink is not None
        self.ask(held.sink, held.key, lease, epoch)

    def ask(self, sink: Incarnation, key: RequestKey, lease: LeaseId, epoch: int) -> None:
        held = self.held.get(key.request)
        name = (sink, key, lease, epoch)
        good = name in self.granted or (
            held is not None and held.complete and (held.sink, held.key) == (sink, key) and (lease, epoch) in held.names
        )
        ends = good and name not in self.granted
        message = Settle(request=key.request, attempt=key.attempt, lease=lease, epoch=epoch)
        [verdict] = self.check(self.table.settle(message, sink))
        if held is None or (held.sink, held.key) != (sink, key):
            self.waiting.discard((sink, key))  # it has read everything: a verdict is all that it waited for
        assert (verdict.key, verdict.lease, verdict.epoch) == (key, lease, epoch)
        assert verdict.valid == good
        assert not ends or key.request not in self.held
        if ends:
            self.granted.add(name)
            self.waiting.remove((sink, key))
            self.reading.remove((sink, key))

    # --- time ----------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 45.0]), look=st.booleans())
    def wait(self, seconds: float, look: bool) -> None:
        """The worker need not look at the clock at once."""
        self.now += seconds
        if not look:
            return
        before = dict(self.held)
        self.check(self.table.expire(self.now))
        for request, held in before.items():
            assert (request not in self.held) == (held.expiry <= self.now)
        assert next_expiry(self.table) > self.now

    # --- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.check_invariants()
        assert len(self.table) == len(self.held)
        assert self.table.num_blocks == sum(len(held.blocks) for held in self.held.values())
        assert self.table.num_readers == len(self.reading)
        assert self.table.num_lent == sum(held.lent for held in self.held.values())
        assert self.table.num_lent_blocks == sum(len(held.blocks) for held in self.held.values() if held.lent)
        if len(self.table.parked) == 0:
            assert next_expiry(self.table) == min((held.expiry for held in self.held.values()), default=math.inf)

    @invariant()
    def no_sink_waits_in_vain(self) -> None:
        """Every attach that has had no final word is attached, or parked, of which there is one a request."""
        num_attached = sum(held.sink is not None for held in self.held.values())
        assert num_attached + len(self.table.parked) == len(self.waiting), sorted(self.waiting)

    @invariant()
    def epochs_only_grow(self) -> None:
        epochs = [epoch for held in self.held.values() for _, epoch in held.names]
        assert len(set(epochs)) == len(epochs)

    def teardown(self) -> None:
        self.now += 10 * BUDGET_S
        self.check(self.table.expire(self.now))
        assert not self.held, "pinned for ever"
        assert not self.waiting, "waits for ever"
        for sink, (request, attempt) in sorted(self.reading):
            self.check(self.table.detach(Detach(request=request, attempt=attempt), sink, self.now))
        assert (len(self.table), len(self.table.parked), self.table.num_readers) == (0, 0, 0)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
