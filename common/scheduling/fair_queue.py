"""Order of waiting requests: by tier, then by the service that their tenant has received, then by deadline.

Tenants of a tier share a worker by virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024, algorithms 2 and 4). Each tenant has a counter of the service that it has received, and the tenant
with the least counter is served next. When a tenant begins to wait, its counter is raised to the least counter of the
tenants that wait. So nobody saves up service, neither while it is absent nor while it is served without waiting.
Between two tenants that always have work waiting, the difference of service is bounded by 2·max(w_p·L_in, w_q·M), where
w_p and w_q are the weights of a prompt token and an output token, L_in is the longest prompt, and M is the number of
tokens that fit into memory.

Tiers are strict, except for ageing: a lower tier whose oldest request has waited for more than `ageing_s` gets one turn
in eight.

Pure state: no clock, no I/O. An operation costs as much as the items that it touches, never as much as all that wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.contract.tiers import Tier
from common.scheduling.lazy_heap import LazyHeap
from common.scheduling.turns import AGED_SHARE, aged

T = TypeVar("T", bound=Hashable)

_MIN_SWEEP = 1024
"""Least number of remembered tenants at which absent ones are searched for those that can be forgotten."""
_MOST_AWAY = 8192
"""Most absent tenants that are remembered after such a search."""


@dataclass(slots=True, eq=False)
class _Account:
    """The service that a tenant has received: its counter at step `s` is `level + rate * s`."""

    level: float
    rate: float = 0.0
    """Service per step."""
    order: int = 0
    """Number of the tenant's last begin of waiting. Among equal counters, the lower number comes first."""
    waits: bool = False


class _Ranking:
    """Accounts by counter, the least first.

    Counters with one rate keep their order while steps pass. So there is one heap for each rate, ordered by level, and
    the least account of all is the least of the heaps' tops. n sequences in service make at most about sqrt(2n)
    different rates. A charge only raises a level, so an entry's level may be too low; it is corrected when it reaches
    the top.

    An account gets its entry only when `least` is called. Before that it may change, or be removed, any number of
    times.
    """

    def __init__(self) -> None:
        self._heaps: dict[float, list[tuple[float, int, int, str]]] = {}
        """Rate → (level, order, entry number, tenant)."""
        self._members: dict[str, tuple[_Account, int]] = {}
        """Tenant → its account, and the number of its only valid entry."""
        self._unranked: dict[str, None] = {}
        """Tenants that have no valid entry yet."""
        self._num_entries = 0
        self._last_number = 0

    def put(self, tenant: str, account: _Account) -> None:
        """Add `tenant` with its present rate. If it is here already, this replaces its entry."""
        self._last_number += 1
        self._members[tenant] = account, self._last_number
        self._unranked[tenant] = None

    def discard(self, tenant: str) -> None:
        """Remove `tenant`; inert if it is not here."""
        self._members.pop(tenant, None)
        self._unranked.pop(tenant, None)
        self._compact()

    def least(self, step: int, num: int = 1) -> list[str]:
        """The `num` tenants with the least counters at `step`, in ascending order; fewer if there are fewer."""
        self._rank_all()
        tops = [top for rate in list(self._heaps) if (top := self._top(rate, step)) is not None]
        if num == 1:  # by far the most frequent question: no entry has to be taken out to answer it
            return [self._heaps[min(tops)[2]][0][3]] if tops else []
        heapq.heapify(tops)
        taken: list[tuple[float, tuple[float, int, int, str]]] = []
        while tops and len(taken) < num:
            rate = heapq.heappop(tops)[2]
            taken.append((rate, heapq.heappop(self._heaps[rate])))
            self._num_entries -= 1
            top = self._top(rate, step)
            if top is not None:
                heapq.heappush(tops, top)
        for rate, entry in taken:
            self._push(rate, entry)
        return [entry[3] for _, entry in taken]

    def _rank_all(self) -> None:
        """Give an entry to every tenant that has none."""
        if not self._unranked:
            return
        for tenant in self._unranked:
            account, number = self._members[tenant]
            self._push(account.rate, (account.level, account.order, number, tenant))
        self._unranked.clear()
        self._compact()

    def _push(self, rate: float, entry: tuple[float, int, int, str]) -> None:
        heapq.heappush(self._heaps.setdefault(rate, []), entry)
        self._num_entries += 1

    def _top(self, rate: float, step: int) -> tuple[float, int, float] | None:
        """(counter, order, rate) of the least account with this rate. Without one, drops the heap and returns None."""
        heap = self._heaps[rate]
        while heap:
            level, order, number, tenant = heap[0]
            account, valid = self._members.get(tenant, (None, 0))
            if account is None or valid != number:
                heapq.heappop(heap)
                self._num_entries -= 1
            elif account.level > level:
                heapq.heapreplace(heap, (account.level, order, number, tenant))
            else:
                return level + rate * step, order, rate
        del self._heaps[rate]
        return None

    def _compact(self) -> None:
        """Rebuild the heaps with one entry per account, if there are more than twice as many entries (plus 16)."""
        if self._num_entries <= 2 * len(self._members) + 16:
            return
        self._heaps.clear()
        self._unranked.clear()
        self._num_entries = 0
        for tenant, (account, number) in self._members.items():
            self._push(account.rate, (account.level, account.order, number, tenant))

    def check_invariants(self) -> None:
        """Assert that every ranked account has one valid entry, in the heap of its rate, and at most at its level."""
        entries = [(rate, entry) for rate, heap in self._heaps.items() for entry in heap]
        assert len(entries) == self._num_entries <= 2 * len(self._members) + 16, "entries pile up"
        valid = {
            tenant: (rate, level)
            for rate, (level, _, number, tenant) in entries
            if tenant in self._members and self._members[tenant][1] == number
        }
        assert valid.keys() | self._unranked.keys() == self._members.keys(), "an account has no entry"
        assert valid.keys().isdisjoint(self._unranked), "an account would get a second entry"
        for tenant, (rate, level) in valid.items():
            account = self._members[tenant][0]
            assert rate == account.rate, f"{tenant!r} is in the heap of another rate"
            assert level <= account.level, f"{tenant!r} has an entry above its level"


class VirtualTokenCounters:
    """The service that each tenant of one tier has received, and which tenants are served next."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._waiting = _Ranking()
        self._step = 0
        self._last_departed = 0.0
        """Counter of the tenant that stopped waiting last, at that time."""
        self._num_begun = 0
        self._sweep_at = _MIN_SWEEP

    def __getitem__(self, tenant: str) -> float:
        """The counter of `tenant`, which may be raised when it next begins to wait. For an unknown tenant, this is the
        counter at which it would start."""
        account = self._accounts.get(tenant)
        return self._floor() if account is None else self._counter(account)

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Record that `tenant` has received `num_tokens` of service."""
        assert num_tokens >= 0, num_tokens
        self._account(tenant).level += num_tokens

    def flow(self, tenant: str, change_of_tokens_per_step: float, step: int) -> None:
        """From `step` on, change the service that `tenant` receives per step by `change_of_tokens_per_step`."""
        self.advance(step)
        account = self._account(tenant)
        account.rate += change_of_tokens_per_step
        account.level -= change_of_tokens_per_step * step
        assert account.rate >= 0, (tenant, account.rate)
        if account.waits:
            self._waiting.put(tenant, account)

    def advance(self, step: int) -> None:
        """Set the present step. It must not lie before the last one."""
        assert step >= self._step, (step, self._step)
        self._step = step

    def begin_waiting(self, tenant: str) -> None:
        """Record that `tenant` has something waiting. Its counter is raised to the floor, if it is lower."""
        account = self._account(tenant)
        assert not account.waits, tenant
        account.level += max(0.0, self._floor() - self._counter(account))
        self._num_begun += 1
        account.waits, account.order = True, self._num_begun
        self._waiting.put(tenant, account)

    def end_waiting(self, tenant: str) -> None:
        """Record that `tenant` has nothing waiting any more."""
        account = self._accounts[tenant]
        account.waits = False
        self._waiting.discard(tenant)
        self._last_departed = self._counter(account)

    def least(self, num: int = 1) -> list[str]:
        """The `num` tenants to be served next, in order; fewer if fewer have something waiting."""
        return self._waiting.least(self._step, num)

    def _counter(self, account: _Account) -> float:
        return account.level + account.rate * self._step

    def _floor(self) -> float:
        """The least counter of the tenants that wait. If none waits, the counter that the tenant which stopped waiting
        last had then. (The paper takes its present counter, which is higher by what it has received since.) The floor
        never falls."""
        least = self._waiting.least(self._step)
        return self._counter(self._accounts[least[0]]) if least else self._last_departed

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep()
            account = self._accounts[tenant] = _Account(self._floor())
        return account

    def _sweep(self) -> None:
        """Forget absent tenants, which neither wait nor receive service per step, if their counter is not above the
        floor: it would be raised to the floor anyway. Of the other absent ones those are remembered that have received
        most. (Each request may be a tenant's only one, and a tenant alone may have received service that never lifts
        the floor.)"""
        floor = self._floor()
        kept = {t: a for t, a in self._accounts.items() if a.waits or a.rate > 0 or self._counter(a) > floor}
        away = sorted((t for t, a in kept.items() if not (a.waits or a.rate > 0)), key=lambda t: kept[t].level)
        for tenant in away[: max(0, len(away) - _MOST_AWAY)]:
            del kept[tenant]
        self._accounts = kept
        self._sweep_at = 2 * len(kept) + _MIN_SWEEP

    def check_invariants(self) -> None:
        """Assert that the ranking holds the tenants that wait, and that the number of accounts is bounded."""
        self._waiting.check_invariants()
        assert len(self._accounts) <= self._sweep_at
        assert {t for t, a in self._accounts.items() if a.waits} == set(self._waiting.least(self._step, 2**60))


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """The waiting items of one tier."""

    counters: VirtualTokenCounters = field(default_factory=VirtualTokenCounters)
    queues: dict[str, LazyHeap[T]] = field(default_factory=dict)
    """Tenant → its waiting items, by deadline."""
    arrivals: LazyHeap[T] = field(default_factory=LazyHeap)
    """Waiting items, the oldest first."""
    num_passed: int = 0
    """Turns of higher tiers since this tier's last turn, counted while this tier was aged."""

    def add(self, item: T, tenant: str, deadline: float, now: float) -> None:
        if tenant not in self.queues:
            self.queues[tenant] = LazyHeap()
            self.counters.begin_waiting(tenant)
        self.queues[tenant].add(item, deadline)
        self.arrivals.add(item, now)

    def discard(self, item: T, tenant: str) -> None:
        self.queues[tenant].discard(item)
        self.arrivals.discard(item)
        if not self.queues[tenant]:
            del self.queues[tenant]
            self.counters.end_waiting(tenant)

    def first(self, num: int) -> list[T]:
        """The next `num` items, as if this were the only tier."""
        items: list[T] = []
        for tenant in self.counters.least(num):
            items += self.queues[tenant].smallest(num - len(items))
        return items

    def check_invariants(self) -> None:
        self.counters.check_invariants()
        self.arrivals.check_invariants()
        for queue in self.queues.values():
            queue.check_invariants()
        assert set(self.queues) == set(self.counters.least(2**60))
        assert sorted(map(id, self.arrivals)) == sorted(id(item) for queue in self.queues.values() for item in queue)


class _Preview(Generic[T]):
    """The future of a line, simulated: `take` takes an item from the preview and leaves the line unchanged."""

    def __init__(self, line: _Line[T], num: int) -> None:
        self._line = line
        self._num = num
        self._items: list[T] | None = None
        self._taken: set[T] = set()
        self.num_passed = line.num_passed
        """Here all turns of higher tiers count: a tier that is not aged now does not become aged before the preview
        ends."""

    @property
    def num_left(self) -> int:
        return len(self._line.arrivals) - len(self._taken)

    def aged(self, before: float) -> bool:
        """Whether the oldest item that is left arrived before the time `before`."""
        return aged(self._line.arrivals, before, self._taken) is not None

    def take(self) -> T:
        """Take the next item."""
        if self._items is None:
            self._items = self._line.first(self._num)
        item = self._items[len(self._taken)]
        self._taken.add(item)
        self.num_passed = 0
        return item


class FairQueue(Generic[T]):
    """Waiting requests, in the order in which they should be served.

    Items are told apart by identity (`eq=False`), or are hashable by value and distinct.
    """

    def __init__(self, *, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._lines: dict[Tier, _Line[T]] = {tier: _Line() for tier in Tier}
        self._places: dict[T, tuple[Tier, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        return iter(self._places)

    def num_in(self, tier: Tier) -> int:
        """Number of items that wait in `tier`."""
        return len(self._lines[tier].arrivals)

    def aged(self, tier: Tier, now: float) -> bool:
        """Whether the oldest item in `tier` has waited for more than `ageing_s`, so that the tier gets its share of
        turns whatever waits in higher tiers."""
        return aged(self._lines[tier].arrivals, now - self._ageing_s) is not None

    def counter(self, tier: Tier, tenant: str) -> float:
        """The service that counts as received by `tenant` in `tier`."""
        return self._lines[tier].counters[tenant]

    def add(self, item: T, *, tier: Tier, tenant: str, deadline: float, now: float) -> None:
        """Add `item`, which must not be in the queue; it waits from `now` on. If it is the tenant's only one in `tier`,
        the tenant's counter may be raised (see module)."""
        assert item not in self._places, item
        self._places[item] = tier, tenant
        self._lines[tier].add(item, tenant, deadline, now)

    def discard(self, item: T) -> None:
        """Remove `item` unserved; inert if it is not here."""
        place = self._places.pop(item, None)
        if place is not None:
            tier, tenant = place
            self._lines[tier].discard(item, tenant)

    def first(self, now: float, num: int = 1) -> list[T]:
        """The next `num` items, or all if there are fewer, in the order in which they would be taken if nobody were
        charged meanwhile. Takes none."""
        if not self._places:
            return []
        lines = [line for line in self._lines.values() if line.queues]
        if len(lines) == 1:
            return lines[0].first(num)
        order: list[T] = []
        previews = [_Preview(line, num) for line in self._lines.values()]
        before = now - self._ageing_s
        for _ in range(min(num, len(self))):
            waiting = [preview for preview in previews if preview.num_left]
            due = (p for p in waiting[1:] if p.num_passed >= AGED_SHARE - 1 and p.aged(before))
            turn = next(due, waiting[0])
            order.append(turn.take())
            for lower in previews[previews.index(turn) + 1 :]:
                lower.num_passed += 1
        return order

    def take(self, item: T, now: float) -> None:
        """Remove `item`, which need not be the first, because it is served now."""
        tier, _ = self._places[item]
        self.discard(item)
        self._lines[tier].num_passed = 0
        for lower in list(self._lines)[tier.rank + 1 :]:
            self._lines[lower].num_passed += self.aged(lower, now)

    def charge(self, tier: Tier, tenant: str, num_tokens: float) -> None:
        """Record that `tenant` has received service: 1 for a computed prompt token, 2 for an output token."""
        self._lines[tier].counters.charge(tenant, num_tokens)

    def flow(self, tier: Tier, tenant: str, change_of_tokens_per_step: float, step: int) -> None:
        """From `step` on, change the service that `tenant` receives per step by `change_of_tokens_per_step`."""
        self._lines[tier].counters.flow(tenant, change_of_tokens_per_step, step)

    def advance(self, step: int) -> None:
        """Set the present step. Service per step (see `flow`) counts as received until then."""
        for line in self._lines.values():
            line.counters.advance(step)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        for tier, line in self._lines.items():
            line.check_invariants()
            assert all(self._places[item] == (tier, t) for t, queue in line.queues.items() for item in queue)
        assert sum(self.num_in(tier) for tier in Tier) == len(self._places)
