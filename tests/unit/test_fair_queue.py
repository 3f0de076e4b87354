"""The order in which waiting requests are served, and what it costs to find it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import pytest

from common.contract.tiers import Tier
from common.scheduling.fair_queue import FairQueue, VirtualTokenCounters
from common.scheduling.turns import AGED_SHARE

INTERACTIVE, STANDARD, BATCH = Tier


@dataclass(eq=False)
class Item:
    name: str
    tier: Tier = STANDARD
    tenant: str = "t"

    def __repr__(self) -> str:
        return self.name


class Bench:
    """A queue of items that are known by name."""

    def __init__(self, ageing_s: float = 30.0) -> None:
        self.queue: FairQueue[Item] = FairQueue(ageing_s=ageing_s)

    def add(self, name: str, tenant: str = "t", deadline: float = 0.0, tier: Tier = STANDARD, now: float = 0.0) -> Item:
        item = Item(name, tier, tenant)
        self.queue.add(item, tier=tier, tenant=tenant, deadline=deadline, now=now)
        self.queue.check_invariants()
        return item

    def first(self, num: int = 100, now: float = 0.0) -> str:
        return " ".join(item.name for item in self.queue.first(now, num))

    def take(self, now: float = 0.0, charge: float = 0.0) -> str:
        [item] = self.queue.first(now)
        self.queue.take(item, now)
        self.queue.charge(item.tier, item.tenant, charge)
        self.queue.check_invariants()
        return item.name


def test_an_empty_queue_has_no_first() -> None:
    queue: FairQueue[Item] = FairQueue(ageing_s=1.0)
    assert queue.first(0.0) == []
    assert len(queue) == 0
    assert list(queue) == []


def test_tiers_come_one_after_the_other() -> None:
    bench = Bench()
    bench.add("b", tier=BATCH, deadline=1.0)
    bench.add("s", tier=STANDARD, deadline=2.0)
    bench.add("i", tier=INTERACTIVE, deadline=3.0)
    assert bench.first() == "i s b"
    assert [bench.queue.num_in(tier) for tier in Tier] == [1, 1, 1]


def test_a_tenant_s_requests_come_by_deadline_and_those_of_one_deadline_by_arrival() -> None:
    bench = Bench()
    for name, deadline in [("late", 3.0), ("first", 1.0), ("second", 1.0), ("middle", 2.0)]:
        bench.add(name, deadline=deadline)
    assert bench.first() == "first second middle late"
    assert bench.first(2) == "first second"


def test_the_tenant_that_has_received_least_comes_first() -> None:
    bench = Bench()
    for tenant in ("x", "y"):
        for number in range(3):
            bench.add(f"{tenant}{number}", tenant, deadline=number)
    assert bench.first() == "x0 x1 x2 y0 y1 y2", "among equals the one who began to wait first"
    served = [bench.take(charge=charge) for charge in (100, 30, 30, 50, 1, 1)]
    assert served == ["x0", "y0", "y1", "y2", "x1", "x2"]
    assert bench.queue.counter(STANDARD, "x") == 102.0
    assert bench.queue.counter(STANDARD, "y") == 110.0


def test_what_a_tenant_receives_in_one_tier_does_not_count_in_another() -> None:
    bench = Bench()
    bench.queue.charge(INTERACTIVE, "x", 1000)
    bench.add("x0", "x")
    bench.add("y0", "y")
    assert bench.first() == "x0 y0"


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    bench = Bench()
    bench.add("x0", "x")
    bench.take(charge=10)  # x goes at 10, when nobody else is here
    for number in range(4):
        bench.add(f"y{number}", "y", deadline=number)
    bench.take(charge=500)
    assert bench.queue.counter(STANDARD, "y") == 500.0, "y began at 0: x was charged only after it had left"
    bench.add("x1", "x")
    bench.add("x2", "x")
    assert bench.queue.counter(STANDARD, "x") == 500.0, "x is lifted to the least of those who wait"
    assert [bench.take(charge=100) for _ in range(5)] == ["y1", "x1", "y2", "x2", "y3"], "they alternate"


def test_a_tenant_that_has_received_much_is_not_forgiven_when_it_comes_back() -> None:
    bench = Bench()
    bench.add("x0", "x")
    bench.add("y0", "y")
    bench.take(charge=1000)
    bench.add("x1", "x")
    assert bench.queue.counter(STANDARD, "x") == 1000.0
    assert bench.first() == "y0 x1"


def test_a_newcomer_to_an_empty_queue_begins_where_the_last_one_has_left() -> None:
    bench = Bench()
    bench.add("x0", "x")
    bench.queue.charge(STANDARD, "x", 70)
    bench.take()
    bench.add("y0", "y")
    assert bench.queue.counter(STANDARD, "y") == 70.0
    assert bench.queue.counter(STANDARD, "nobody") == 70.0


def test_service_that_flows_counts_with_every_step() -> None:
    bench = Bench()
    queue = bench.queue
    for name in ("x0", "y0"):
        bench.add(name, name[0])
    queue.flow(STANDARD, "x", 2.0, step=1)
    queue.advance(4)
    assert queue.counter(STANDARD, "x") == 6.0
    assert bench.first() == "y0 x0"
    queue.flow(STANDARD, "y", 6.0, step=4)
    queue.advance(5)
    assert (queue.counter(STANDARD, "x"), queue.counter(STANDARD, "y")) == (8.0, 6.0)
    assert bench.first() == "y0 x0"
    queue.advance(6)
    assert bench.first() == "x0 y0"
    queue.flow(STANDARD, "y", -6.0, step=6)
    queue.advance(9)
    assert (queue.counter(STANDARD, "x"), queue.counter(STANDARD, "y")) == (16.0, 12.0)
    assert bench.first() == "y0 x0"
    queue.check_invariants()


def test_a_tenant_that_is_served_without_waiting_saves_nothing_up() -> None:
    bench = Bench()
    queue = bench.queue
    bench.add("x0", "x")
    queue.flow(STANDARD, "x", 2.0, step=0)
    bench.take()
    bench.add("y0", "y")
    queue.charge(STANDARD, "y", 100)
    queue.advance(10)
    assert queue.counter(STANDARD, "x") == 20.0
    bench.add("x1", "x")
    assert queue.counter(STANDARD, "x") == 100.0, "x is lifted to the least of those who wait, which is y's"
    queue.advance(20)
    assert queue.counter(STANDARD, "x") == 120.0
    bench.add("z0", "z")
    assert queue.counter(STANDARD, "z") == 100.0
    assert bench.first() == "y0 z0 x1"


def test_a_newcomer_does_not_start_at_what_one_has_received_that_is_served_and_does_not_wait() -> None:
    bench = Bench()
    queue = bench.queue
    for tenant, charge in (("x", 0), ("y", 50)):
        bench.add(f"{tenant}0", tenant)
        queue.charge(STANDARD, tenant, charge)
        queue.flow(STANDARD, tenant, 2.0, step=0)
        bench.take()
    queue.advance(10)
    assert (queue.counter(STANDARD, "x"), queue.counter(STANDARD, "y")) == (20.0, 70.0)
    queue.flow(STANDARD, "x", -2.0, step=10)
    assert queue.counter(STANDARD, "z") == 50.0, "what y had when it stopped waiting"
    bench.add("z0", "z")
    assert queue.counter(STANDARD, "z") == 50.0


def test_who_is_served_is_remembered_although_a_newcomer_would_start_higher() -> None:
    """Its service per step counts until it ends, whoever else comes and goes meanwhile."""
    counters = VirtualTokenCounters()
    counters.flow("served", 2.0, 0)
    counters.charge("heavy", 10**6)
    for number in range(5000):
        tenant = f"t{number}"
        counters.begin_waiting(tenant)
        counters.charge(tenant, 10)
        counters.end_waiting(tenant)
    assert counters["t0"] == counters["somebody new"] == 50_000, "t0 was forgotten"
    counters.flow("served", -2.0, 100)
    assert counters["served"] == 200
    counters.begin_waiting("served")
    assert counters["served"] == 50_000
    assert counters["heavy"] == 10**6
    counters.check_invariants()


def test_a_lower_tier_that_has_waited_long_gets_one_turn_in_eight() -> None:
    bench = Bench(ageing_s=10.0)
    for number in range(30):
        bench.add(f"i{number}", tier=INTERACTIVE, deadline=number, now=50.0)
    for number in range(3):
        bench.add(f"b{number}", tier=BATCH, deadline=number, now=5.0 * number)
    assert bench.first(12, now=10.0).split() == [f"i{number}" for number in range(12)]
    order = [bench.take(now=60.0) for _ in range(24)]
    assert [index for index, name in enumerate(order) if name.startswith("b")] == [7, 15, 23]
    assert AGED_SHARE == 8


def test_no_turn_is_lost_while_the_aged_one_does_not_fit() -> None:
    bench = Bench(ageing_s=10.0)
    aged = bench.add("b", tier=BATCH)
    for number in range(20):
        bench.add(f"i{number}", tier=INTERACTIVE, deadline=number)
    for _ in range(7):
        bench.take(now=20.0)
    for _ in range(5):
        first, second = bench.queue.first(20.0, 2)
        assert first is aged
        bench.queue.take(second, 20.0)
    assert bench.take(now=20.0) == "b"


def test_an_aged_tier_is_preferred_only_while_its_oldest_is_old() -> None:
    bench = Bench(ageing_s=10.0)
    old = bench.add("old", tier=BATCH, deadline=2.0, now=0.0)
    bench.add("young", tier=BATCH, deadline=1.0, now=95.0)
    for number in range(20):
        bench.add(f"i{number}", tier=INTERACTIVE, deadline=number)
    assert not bench.queue.aged(BATCH, 10.0)
    assert bench.queue.aged(BATCH, 10.1)
    names = bench.first(20, now=100.0).split()
    assert (names[7], names[15]) == ("young", "old")
    bench.queue.discard(old)
    assert not bench.queue.aged(BATCH, 100.0)
    assert "young" not in bench.first(20, now=100.0)


def test_what_is_discarded_is_not_served() -> None:
    bench = Bench()
    items = [bench.add(f"x{number}", deadline=number) for number in range(4)]
    bench.queue.discard(items[0])
    bench.queue.discard(items[2])
    bench.queue.discard(items[2])
    bench.queue.check_invariants()
    assert items[0] not in bench.queue
    assert items[1] in bench.queue
    assert list(bench.queue) == [items[1], items[3]]
    assert bench.first() == "x1 x3"
    bench.queue.add(items[2], tier=STANDARD, tenant="t", deadline=9.0, now=1.0)
    assert bench.first() == "x1 x3 x2"


def test_tenants_who_went_away_are_forgotten_once_that_makes_no_difference() -> None:
    counters = VirtualTokenCounters()
    counters.charge("heavy", 10**9)
    for number in range(20_000):
        tenant = f"t{number}"
        counters.begin_waiting(tenant)
        counters.charge(tenant, 1)
        counters.end_waiting(tenant)
    counters.check_invariants()
    assert len(counters._accounts) < 2500
    assert counters["heavy"] == 10**9, "who has received more than a newcomer is remembered"
    assert counters["t0"] == counters["somebody new"] == 20_000


def test_tenants_with_one_request_each_are_not_remembered_for_ever() -> None:
    """As in a prefill worker that has nothing else to do: each has left the queue when it is served."""
    counters = VirtualTokenCounters()
    counters.charge("heavy", 10**9)
    for number in range(60_000):
        tenant = f"t{number}"
        counters.begin_waiting(tenant)
        counters.end_waiting(tenant)
        counters.charge(tenant, 500)
    counters.check_invariants()
    assert len(counters._accounts) < 25_000
    assert counters["heavy"] == 10**9, "who has received most is remembered"


# --- fairness ----------------------------------------------------------------------------------------------------

MEMORY = 64
"""Tokens that fit into the memory of the server below."""
MAX_PROMPT = 24


class Server:
    """Continuous batching: prompts are charged 1 a token when they come in, output 2 a token as it flows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = Bench()
        self.running: list[tuple[Item, int, int]] = []
        """(item, tokens of memory, step at which it ends)."""
        self.sizes: dict[Item, tuple[int, int]] = {}
        self.service: dict[str, float] = {}
        self.step = 0

    def submit(self, tenant: str, size: tuple[int, int] | None = None) -> None:
        """A request with so many tokens of prompt and output, or any numbers."""
        item = self.bench.add(f"{tenant}{len(self.sizes)}", tenant, deadline=self.step)
        self.sizes[item] = size or (self.random.randint(1, MAX_PROMPT), self.random.randint(1, MEMORY - MAX_PROMPT))

    def run_step(self) -> None:
        queue = self.bench.queue
        queue.advance(self.step)
        for item, _, end in [entry for entry in self.running if entry[2] == self.step]:
            queue.flow(STANDARD, item.tenant, -2.0, self.step)
            self.running = [entry for entry in self.running if entry[0] is not item or entry[2] != end]
        while len(queue):
            [item] = queue.first(0.0)
            num_prompt, num_output = self.sizes[item]
            if sum(tokens for _, tokens, _ in self.running) + num_prompt + num_output > MEMORY:
                break
            queue.take(item, 0.0)
            queue.charge(STANDARD, item.tenant, num_prompt)
            queue.flow(STANDARD, item.tenant, 2.0, self.step)
            self.service[item.tenant] = self.service.get(item.tenant, 0.0) + num_prompt
            self.running.append((item, num_prompt + num_output, self.step + num_output))
        for item, _, _ in self.running:
            self.service[item.tenant] += 2.0
        self.step += 1


BOUND = 2 * max(1 * MAX_PROMPT, 2 * MEMORY)


@pytest.mark.parametrize("seed", range(5))
def test_a_tenant_that_floods_gets_no_more_than_one_that_does_not(seed: int) -> None:
    """OSDI 2024, theorem 4.4: at every moment in which both have been waiting."""
    server = Server(seed)
    for number in range(1100):
        server.submit("meek" if number % 11 == 0 else "flood")
    while waits(server, "meek") and waits(server, "flood"):
        server.run_step()
        difference = server.service.get("flood", 0.0) - server.service.get("meek", 0.0)
        assert abs(difference) <= BOUND, (server.step, seed)
    assert server.service["meek"] > 10 * BOUND, "the run was too short to say anything"


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_that_returns_gets_no_credit_for_its_absence(seed: int) -> None:
    server = Server(seed)
    for tenant in ["here"] * 400 + ["away"] * 5:
        server.submit(tenant)
    while server.step < 1500:
        server.run_step()
    assert not waits(server, "away")
    for _ in range(200):
        server.submit("away")
    before = dict(server.service)
    while waits(server, "here") and waits(server, "away"):
        server.run_step()
        here, away = (server.service[tenant] - before[tenant] for tenant in ("here", "away"))
        assert abs(here - away) <= BOUND, (server.step, seed)
    assert here > 4 * BOUND


@pytest.mark.parametrize("num_light", [1, 100], ids=["one", "many"])
def test_a_tenant_that_uses_less_while_nobody_has_to_wait_gets_no_credit_for_that(num_light: int) -> None:
    """At every moment one request of a light tenant is served, beside six of a heavy one."""
    server = Server(0)
    for index in range(100):
        server.submit(f"light{index % num_light}", (1, 7))
        server.run_step()
        for _ in range(6):
            server.submit("heavy", (1, 7))
        for _ in range(6):
            server.run_step()
        assert len(server.bench.queue) == 0, "there is room for all"
    for _ in range(100):
        server.submit("heavy")
        server.submit("light0")
    before = dict(server.service)
    while waits(server, "heavy") and waits(server, "light0"):
        server.run_step()
        heavy, light = (server.service[tenant] - before[tenant] for tenant in ("heavy", "light0"))
        assert abs(heavy - light) <= BOUND, server.step
    assert min(heavy, light) > 4 * BOUND


def waits(server: Server, tenant: str) -> bool:
    return any(item.tenant == tenant for item in server.bench.queue)


# --- what it costs -----------------------------------------------------------------------------------------------


class Deadline(float):
    """A float that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: float) -> bool:
        Deadline.num_compared += 1
        return float.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        Deadline.num_compared += 1
        return float.__eq__(self, other)

    __hash__ = float.__hash__


P = ParamSpec("P")


def work(act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> int:
    """Calls and comparisons of deadlines that `act` makes: a measure of its work that no clock disturbs."""
    num_calls = 0

    def count(*event: object) -> None:
        nonlocal num_calls
        num_calls += event[1] in ("call", "c_call")

    before = Deadline.num_compared
    sys.setprofile(count)
    try:
        act(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return num_calls + Deadline.num_compared - before


def most_work(num_items: int, num_tenants: int) -> dict[str, float]:
    """Work of each operation on a queue of this size, averaged over many, since heaps are cleaned up now and then."""
    rng = random.Random(1)
    queue: FairQueue[Item] = FairQueue(ageing_s=30.0)
    items = []
    for number in range(num_items):
        item = Item(f"{number}", rng.choice(list(Tier)), f"t{number % num_tenants}")
        items.append(item)
        queue.add(item, tier=item.tier, tenant=item.tenant, deadline=Deadline(rng.random()), now=number / num_items)
    for step in range(1, 1001):  # as many tenants are being served
        queue.flow(STANDARD, f"t{rng.randrange(num_tenants)}", 2.0, step)
    rng.shuffle(items)
    total = dict.fromkeys(("first", "take", "charge", "flow", "discard", "add"), 0)
    num_rounds = 500
    for number in range(num_rounds):
        now = 100.0 * (number % 2)  # everything is aged, or nothing
        [item] = queue.first(now)
        total["first"] += work(queue.first, now, 16)
        total["take"] += work(queue.take, item, now)
        total["charge"] += work(queue.charge, item.tier, item.tenant, rng.randrange(1000))
        total["flow"] += work(queue.flow, item.tier, item.tenant, 2.0, 2000 + number)
        gone = items.pop()
        total["discard"] += work(queue.discard, gone)
        if gone is not item:
            total["add"] += work(queue.add, gone, tier=gone.tier, tenant="new", deadline=Deadline(0.5), now=1.0)
    return {name: count / num_rounds for name, count in total.items()}


@pytest.mark.long
def test_no_operation_costs_as_much_as_what_waits() -> None:
    small, large = most_work(1000, 100), most_work(100_000, 10_000)
    for name, amount in large.items():
        assert amount < 3000, (name, small[name], amount)
        assert amount < 4 * small[name] + 50, f"{name}: 100 times the requests make {small[name]} into {amount}"
