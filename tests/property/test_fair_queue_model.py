"""The fair queue against a model that looks through lists."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.contract.tiers import Tier
from common.scheduling.fair_queue import FairQueue
from common.scheduling.turns import AGED_SHARE

AGEING_S = 10.0
TENANTS = ["a", "b", "c", "d"]
tiers = st.sampled_from(list(Tier))
tenants = st.sampled_from(TENANTS)
deadlines = st.integers(0, 5).map(float)


@dataclass(eq=False)
class Item:
    tier: Tier
    tenant: str
    deadline: float
    added: float
    number: int = 0


@dataclass
class Line:
    """One tier, as the definition has it."""

    items: list[Item] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    began: dict[str, int] = field(default_factory=dict)
    last_departed: float = 0.0
    num_passed: int = 0

    def waiting(self) -> set[str]:
        return {item.tenant for item in self.items}

    def floor(self) -> float:
        return min((self.counters[t] for t in self.waiting()), default=self.last_departed)

    def know(self, tenant: str) -> None:
        self.counters.setdefault(tenant, self.floor())

    def order(self, item: Item) -> tuple[float, int, float, int]:
        return self.counters[item.tenant], self.began[item.tenant], item.deadline, item.number

    def aged(self, items: list[Item], now: float) -> bool:
        return any(now - item.added > AGEING_S for item in items)


class FairQueueMachine(RuleBasedStateMachine):
    """Arrivals, departures and service in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Item] = FairQueue(ageing_s=AGEING_S)
        self.lines = {tier: Line() for tier in Tier}
        self.now = 0.0
        self.step = 0
        self.num_added = 0

    def items(self) -> list[Item]:
        return [item for line in self.lines.values() for item in line.items]

    def expected(self, num: int) -> list[Item]:
        """The next `num`, by taking one after the other in thought."""
        left = {tier: sorted(line.items, key=line.order) for tier, line in self.lines.items()}
        passed = {tier: line.num_passed for tier, line in self.lines.items()}
        order: list[Item] = []
        while len(order) < num and any(left.values()):
            waiting = [tier for tier in Tier if left[tier]]
            turn = waiting[0]
            for tier in reversed(waiting[1:]):
                if passed[tier] >= AGED_SHARE - 1 and self.lines[tier].aged(left[tier], self.now):
                    turn = tier
            order.append(left[turn].pop(0))
            passed[turn] = 0
            for tier in list(Tier)[turn.rank + 1 :]:
                passed[tier] += self.lines[tier].aged(left[tier], self.now)
        return order

    def leave(self, item: Item) -> None:
        line = self.lines[item.tier]
        line.items.remove(item)
        if item.tenant not in line.waiting():
            line.last_departed = line.counters[item.tenant]

    def taken(self, item: Item) -> None:
        self.leave(item)
        self.lines[item.tier].num_passed = 0
        for tier in list(Tier)[item.tier.rank + 1 :]:
            self.lines[tier].num_passed += self.lines[tier].aged(self.lines[tier].items, self.now)

    def enter(self, item: Item) -> None:
        line = self.lines[item.tier]
        line.know(item.tenant)
        if item.tenant not in line.waiting():
            line.counters[item.tenant] = max(line.counters[item.tenant], line.floor())
            line.began[item.tenant] = self.num_added
        item.number = self.num_added
        self.num_added += 1
        line.items.append(item)
        self.queue.add(item, tier=item.tier, tenant=item.tenant, deadline=item.deadline, now=item.added)

    @rule(tier=tiers, tenant=tenants, deadline=deadlines, age_s=st.sampled_from([0.0, 0.0, 3.0, 11.0]))
    def add(self, tier: Tier, tenant: str, deadline: float, age_s: float) -> None:
        self.enter(Item(tier, tenant, deadline, self.now - age_s))

    @rule(tenant=tenants, num=st.integers(2, 10))
    def flood(self, tenant: str, num: int) -> None:
        for number in range(num):
            self.enter(Item(Tier.INTERACTIVE, tenant, float(number % 3), self.now))

    @precondition(lambda self: self.items())
    @rule(data=st.data(), deadline=deadlines)
    def come_back(self, data: st.DataObject, deadline: float) -> None:
        item = data.draw(st.sampled_from(self.items()))
        self.queue.discard(item)
        self.leave(item)
        item.deadline = deadline
        self.enter(item)

    @precondition(lambda self: self.items())
    @rule(data=st.data(), num=st.integers(1, 10))
    def take_the_first(self, data: st.DataObject, num: int) -> None:
        """What is named is what is served, as long as nobody is charged."""
        order = self.queue.first(self.now, num)
        for item in order:
            assert self.queue.first(self.now) == [item]
            self.queue.take(item, self.now)
            self.taken(item)

    @precondition(lambda self: self.items())
    @rule(data=st.data(), served=st.booleans())
    def lose_any(self, data: st.DataObject, served: bool) -> None:
        item = data.draw(st.sampled_from(self.items()))
        if served:
            self.queue.take(item, self.now)
            self.taken(item)
        else:
            self.queue.discard(item)
            self.leave(item)
        self.queue.discard(item)
        assert item not in self.queue

    @rule(tier=tiers, tenant=tenants, num_tokens=st.integers(0, 20))
    def charge(self, tier: Tier, tenant: str, num_tokens: int) -> None:
        self.lines[tier].know(tenant)
        self.lines[tier].counters[tenant] += num_tokens
        self.queue.charge(tier, tenant, num_tokens)

    @rule(tier=tiers, tenant=tenants, change=st.sampled_from([2.0, 4.0, -2.0]))
    def flow(self, tier: Tier, tenant: str, change: float) -> None:
        line = self.lines[tier]
        rate = line.rates.get(tenant, 0.0) + change
        if rate < 0:
            return
        line.know(tenant)
        line.rates[tenant] = rate
        self.queue.flow(tier, tenant, change, self.step)

    @rule(num_steps=st.integers(1, 5))
    def steps_pass(self, num_steps: int) -> None:
        self.step += num_steps
        for line in self.lines.values():
            for tenant, rate in line.rates.items():
                line.counters[tenant] += rate * num_steps
        self.queue.advance(self.step)

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.queue.check_invariants()
        items = self.items()
        assert len(self.queue) == len(items)
        assert set(self.queue) == set(items)
        for num in (1, 3, 24):
            assert self.queue.first(self.now, num) == self.expected(num)
        for tier, line in self.lines.items():
            assert self.queue.num_in(tier) == len(line.items)
            assert self.queue.aged(tier, self.now) == line.aged(line.items, self.now)
            for tenant in TENANTS:
                assert self.queue.counter(tier, tenant) == line.counters.get(tenant, line.floor())


TestFairQueueMachine = FairQueueMachine.TestCase
TestFairQueueMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
