"""A request that ends costs the others nothing: what is kept of all of them is neither gone through nor made anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from dispatcher_bench import D2, Bench, D, Time, settle

from gateway.dispatch.dispatcher import _MOST_A_TURN, Dispatcher

MANY = 100
KEPT = ("_open", "_by_id")
WAITING = ("_requests", "_new")


class Counted(dict[Any, Any]):
    """A table; counts the entries of all such tables that are gone through, however that is done."""

    num = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            Counted.num += 1
            yield each

    def keys(self) -> Any:
        return list(self)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def copy(self) -> Any:
        return Counted(self.items())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench((), (D, D2), clock=Time())
    yield bench
    await bench.close()
    bench.dispatcher.placement.waiting.check_invariants()


def watched(dispatcher: Dispatcher) -> dict[str, Counted]:
    """Put a table that counts in the place of each that has something of every request, or of all that wait."""
    waiting: Any = dispatcher.placement.waiting
    tables: dict[str, Counted] = {}
    for owner, names in ((dispatcher, KEPT), (waiting, WAITING)):
        for name in names:
            table = tables[f"{type(owner).__name__}.{name}"] = Counted(getattr(owner, name))
            setattr(owner, name, table)
    Counted.num = 0
    return tables


def assert_the_same(dispatcher: Dispatcher, tables: dict[str, Counted]) -> None:
    """Each table is still the one that was put there."""
    waiting: Any = dispatcher.placement.waiting
    for owner, names in ((dispatcher, KEPT), (waiting, WAITING)):
        for name in names:
            assert getattr(owner, name) is tables[f"{type(owner).__name__}.{name}"], name


@pytest.mark.parametrize("parked", [False, True])
async def test_who_ends_while_many_wait_costs_them_nothing(bench: Bench, parked: bool) -> None:
    """Those that wait are still to be looked at, or parked."""
    bench.lose(D2)
    asked = [await bench.request() for _ in range(MANY)]
    for key, _ in asked:
        bench.tokens(D, key, 0, 10)
    await settle()
    if parked:
        bench.lose(D)
        while bench.dispatcher.placement.waiting._new:
            await asyncio.sleep(0)
        await settle()
    leaving = [task for _, task in asked[-10:]]
    for task in leaving:
        task.cancel()  # which is noticed after this turn, and before the next few are looked at
    if not parked:
        bench.open(D2)
        bench.lose(D)
    dispatcher = bench.dispatcher
    waiting: Any = dispatcher.placement.waiting
    num = len(waiting)
    assert num >= MANY - _MOST_A_TURN
    assert len(waiting._new) == (0 if parked else num)
    tables = watched(dispatcher)
    await asyncio.sleep(0)
    assert len(dispatcher._open) == MANY - len(leaving)
    assert num - len(waiting) == len(leaving) + (0 if parked else _MOST_A_TURN)
    assert Counted.num < MANY, "not even once through one of the tables"
    assert_the_same(dispatcher, tables)
