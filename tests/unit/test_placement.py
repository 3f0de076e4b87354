"""Whom a request avoids, and where one that has to leave may go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from dispatcher_bench import D2, D3, LAYOUT, P2, D, P, heartbeat, role_of, welcome
from flow_run import Run, place

from common.contract.messages import Phase, Role
from common.contract.tiers import Tier
from gateway.routing.placement import Placement, Rebind
from gateway.routing.router import Caution, Handoff, Local, LocalPrefill, Router
from gateway.serving.flow import Want
from gateway.workers.registry import Given, Registry

NEAR = [D, D2, D3]


class Pool:
    """Workers that are all usable."""

    def __init__(self, *, prefill: Sequence[str] = (P, P2), decode: Sequence[str] = (D, D2, D3)) -> None:
        self.registry = Registry(tuple(prefill), tuple(decode), "c")
        for address in (*prefill, *decode):
            self.registry.opened(address, place(address).incarnation, welcome(role_of(address)))
        self.placement = Placement(self.registry, Router(self.registry))

    def choose(self, *, avoid: Sequence[str] = (), offer: bool = False) -> tuple[str, ...] | None:
        """Where a request would go."""
        match self.placement.choose(self.want(avoid=avoid, offer=offer), Tier.STANDARD, {}, 0.0):
            case Handoff(prefill=prefill, decode=decode):
                return prefill.address, decode.address
            case Local(decode=decode) | Rebind(decode=decode):
                return (decode.address,)
        return None

    def want(self, *, avoid: Sequence[str] = (), offer: bool = False) -> Want:
        run = Run()
        run.lose(D)
        part = run.want.offer if offer else None
        return Want(run.want.key, run.want.choices, frozenset(place(each) for each in avoid), offer=part)


def views(pool: Pool, role: Role) -> list[Any]:
    return pool.registry.usable(role)


# --- those that have failed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("avoid", "expected"),
    [
        ((), (P, D)),
        ((D,), (P, D2)),
        ((P,), (P2, D)),
        ((P, D), (P2, D2)),
        ((D, D2, D3), (P, D)),
        ((P, P2), (D,)),
        ((P, P2, D), (D2,)),
    ],
    ids=str,
)
def test_a_worker_that_has_failed_is_avoided_where_there_is_another_way(
    avoid: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """Decode workers can do without prefill workers, but nothing does without a decode worker."""
    assert Pool().choose(avoid=avoid) == expected


def test_another_life_of_a_worker_that_has_failed_is_not_avoided() -> None:
    pool = Pool()
    pool.registry.lost(D)
    pool.registry.opened(D, place(D, 2).incarnation, welcome(Role.DECODE))
    assert pool.choose(avoid=(D,)) == (P, D)


def test_an_offer_wants_a_decode_worker_only() -> None:
    pool = Pool()
    assert pool.choose(offer=True) == (D,)
    assert pool.choose(offer=True, avoid=(D,)) == (D2,)
    assert Pool(decode=(D,)).choose(offer=True, avoid=(D,)) == (D,)


def test_without_a_decode_worker_everybody_waits() -> None:
    pool = Pool()
    for address in NEAR:
        pool.registry.lost(address)
    assert pool.choose() is None
    assert pool.choose(offer=True) is None


def test_an_offer_stands_as_long_as_its_worker() -> None:
    pool = Pool()
    want = pool.want(offer=True)
    assert pool.placement.stands(want)
    pool.registry.lost(P)
    assert not pool.placement.stands(want)
    pool.registry.opened(P, place(P, 2).incarnation, welcome(Role.PREFILL))
    assert not pool.placement.stands(want), "another life"


def test_no_caution_changes_nothing() -> None:
    pool = Pool()
    assert Caution().decode(views(pool, Role.DECODE)) == views(pool, Role.DECODE)
    assert Caution().prefill(views(pool, Role.PREFILL)) == views(pool, Role.PREFILL)


def test_where_all_prefill_workers_have_failed_that_is_said() -> None:
    pool = Pool()
    route = pool.placement.choose(pool.want(avoid=(P, P2)), Tier.STANDARD, {}, 0.0)
    assert isinstance(route, Local)
    assert route.reason is LocalPrefill.NO_PREFILL_WORKER


# --- refuges ---------------------------------------------------------------------------------------------------------


def refuge(pool: Pool, address: str, num_tokens: int) -> str | None:
    worker = pool.placement.refuge(address, num_tokens)
    return None if worker is None else worker.address


def test_a_refuge_is_another_usable_worker_with_room() -> None:
    pool = Pool()
    assert refuge(pool, D, 100) is None, "nothing is known of their room"
    for address in NEAR:
        pool.registry.heartbeat(address, heartbeat(used=0, total=10), 0.0)
    most = (10 - 1) * LAYOUT.block_size
    assert refuge(pool, D, most) == D2
    assert refuge(pool, D, most + 1) is None
    assert refuge(pool, D2, most) == D
    pool.registry.took(D2, Given(number=1, tier=Tier.STANDARD))
    assert refuge(pool, D, most) == D3, "the least loaded one"
    pool.registry.heartbeat(D3, heartbeat(Phase.DRAINING), 0.0)
    assert refuge(pool, D, most) == D2
    pool.registry.lost(D2)
    assert refuge(pool, D, most) is None
