"""Whom a request avoids, and where one that has to leave may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from dispatcher_bench import D2, D3, LAYOUT, P2, D, P, heartbeat, role_of, welcome
from flow_run import Run, life

from common.contract.kv_layout import Fingerprint
from common.contract.messages.session import Phase, Role
from common.contract.tiers import Tier
from gateway.dispatch.ask import Ask
from gateway.dispatch.leaving import Leaving
from gateway.dispatch.router import Handoff, Local, LocalPrefill, Rebind, Route, Router
from gateway.serving.choice import Choice
from gateway.workers.registry import Registry
from gateway.workers.worker_view import Given

P3, P4 = "p:3", "p:4"
NEAR = [D, D2, D3]


class Pool:
    """Workers that are all usable."""

    def __init__(self, *, prefill: Sequence[str] = (P, P2), decode: Sequence[str] = (D, D2, D3)) -> None:
        self.registry = Registry(tuple(prefill), tuple(decode), "c")
        for address in (*prefill, *decode):
            self.registry.opened(address, life(address).incarnation, welcome(role_of(address)))
        self.router = Router(self.registry)
        self.leaving = Leaving(self.registry, self.router)

    def route(self, *, offer: bool = False, **wanted: Any) -> Route | None:
        """The route of a request, or of an offer that stands; None if no decode worker takes it."""
        ask = self.ask(**wanted)
        if not len(self.router.takers(ask)):
            return None
        return self.router.rebind(life(P), ask, {}) if offer else self.router.choose(ask, {})

    def choose(self, **wanted: Any) -> tuple[str, ...] | None:
        """Where a request would go."""
        match self.route(**wanted):
            case Handoff(prefill=prefill, decode=decode):
                return prefill.address, decode.address
            case Local(decode=decode) | Rebind(decode=decode):
                return (decode.address,)
        return None

    def ask(
        self,
        *,
        avoid: Sequence[str] = (),
        too_small: Sequence[str] = (),
        admitted: bool = True,
        most_tokens: int = 100,
        fingerprint: Fingerprint | None = None,
    ) -> Ask:
        """What a request asks for that has lost its decode worker."""
        run = Run()
        run.lose(D)
        run.flow.admitted = admitted
        generation = run.flow.generation
        generation.sampling = replace(generation.sampling, max_tokens=most_tokens - len(generation.token_ids))
        want = replace(
            run.want,
            avoid=frozenset(life(each) for each in avoid),
            too_small=frozenset(life(each) for each in too_small),
        )
        return Ask.of(want, run.flow, fingerprint=fingerprint)


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


def test_after_three_failed_prefill_workers_the_prompt_is_computed_where_it_is_decoded() -> None:
    """Perhaps no decode worker reaches any of them. Who was let in nowhere asks each of them: they are only full."""
    pool = Pool(prefill=(P, P2, P3, P4))
    assert pool.choose(avoid=(P, P2, D)) == (P3, D2)
    assert pool.choose(avoid=(P, P2, P3, D)) == (D2,)
    assert pool.choose(avoid=(P, P2, P3, D), admitted=False) == (P4, D2)
    pool.registry.lost(P2)
    assert pool.choose(avoid=(P, P2, P3, D)) == (P4, D2), "who is gone has not failed to be read"


def test_another_life_of_a_worker_that_has_failed_is_not_avoided() -> None:
    pool = Pool()
    pool.registry.lost(D)
    pool.registry.opened(D, life(D, 2).incarnation, welcome(Role.DECODE))
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


def test_no_restriction_changes_nothing() -> None:
    registry = Pool().registry
    ask, prefill, decode = Ask(num_tokens=3), registry.usable_rows(Role.PREFILL), registry.usable_rows(Role.DECODE)
    assert ask.decode_rows(registry.table, decode).tolist() == decode.tolist() == [2, 3, 4]
    assert ask.prefill_rows(registry.table, prefill).tolist() == prefill.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("wanted", "lost", "reason"),
    [
        ({"avoid": (P, P2)}, (), LocalPrefill.REFUSED),
        ({"too_small": (P,), "avoid": (P2,)}, (), LocalPrefill.REFUSED),
        ({"avoid": (P,)}, (P2,), LocalPrefill.REFUSED),
        ({}, (P, P2), LocalPrefill.NO_PREFILL_WORKER),
    ],
    ids=["failed", "too small and failed", "failed and lost", "lost"],
)
def test_why_no_prefill_worker_takes_a_prompt_is_said(
    wanted: dict[str, Any], lost: tuple[str, ...], reason: LocalPrefill
) -> None:
    pool = Pool()
    for address in lost:
        pool.registry.lost(address)
    route = pool.route(**wanted)
    assert isinstance(route, Local)
    assert route.reason is reason


# --- those that do not take it ---------------------------------------------------------------------------------------


class Sizes(Pool):
    """Decode workers that hold 100, 200 and 100 tokens of a sequence, and prefill workers that hold 2 and 1000."""

    def __init__(self) -> None:
        super().__init__()
        for address, num_tokens in {P: 2, P2: 1000, D: 100, D2: 200, D3: 100}.items():
            incarnation, role = life(address).incarnation, role_of(address)
            self.registry.opened(address, incarnation, welcome(role, max_sequence_tokens=num_tokens))

    def occupy(self, address: str) -> None:
        self.registry.took(address, Given(number=1, tier=Tier.STANDARD, num_sequences=9, num_blocks=9))


def test_a_sequence_goes_where_it_can_end() -> None:
    pool = Sizes()
    assert pool.choose(most_tokens=100) == (P2, D)
    assert pool.choose(most_tokens=101) == (P2, D2)
    pool.occupy(D2)
    assert pool.choose(most_tokens=101) == (P2, D2), "however empty the others are"
    assert pool.choose(most_tokens=201) == (P2, D), "what no worker says to hold is for the workers to refuse"
    assert pool.choose(most_tokens=101, offer=True) == (D2,)
    assert pool.choose(most_tokens=101, avoid=(D2,)) == (P2, D2), "though it has failed"


def test_who_has_said_that_it_is_too_small_is_not_asked_again() -> None:
    pool = Sizes()
    assert pool.choose(too_small=(D,)) == (P2, D2)
    assert pool.choose(too_small=(D, D2, D3)) is None
    assert pool.choose(too_small=(D, D2, D3), offer=True) is None
    assert pool.choose(too_small=(P2,)) == (D,), "a decode worker computes it"


def test_a_full_worker_is_asked_by_those_whom_it_has_not_refused_yet() -> None:
    pool = Pool()
    assert pool.choose(admitted=False, avoid=(D, P)) == (P2, D2)
    assert pool.choose(admitted=False, avoid=NEAR) is None


def test_a_worker_that_refuses_since_it_leaves_is_not_usable_until_it_says_otherwise() -> None:
    pool = Pool()
    epoch = pool.registry.epoch
    pool.registry.declined(D)
    assert pool.choose() == (P, D2)
    assert pool.registry.epoch > epoch
    epoch = pool.registry.epoch
    pool.registry.heartbeat(D, heartbeat(), 0.0)
    assert pool.choose() == (P, D)
    assert pool.registry.epoch > epoch


def test_there_is_hope_as_long_as_somebody_is_there_who_can_hold_it() -> None:
    pool = Sizes()
    ask = pool.ask(too_small=(D, D3), most_tokens=150)
    assert pool.router.hope(ask)
    pool.registry.declined(D2)
    assert len(pool.router.takers(ask)) == 0
    assert pool.router.hope(ask), "it may serve again"
    assert pool.router.all_too_small(ask)
    pool.registry.lost(D2)
    assert not pool.router.hope(ask)


def test_there_is_no_hope_in_a_draining_worker_of_another_fingerprint() -> None:
    pool = Pool(decode=(D,))
    [worker] = pool.registry.usable(Role.DECODE)
    assert worker.welcome is not None
    pool.registry.declined(D)
    assert pool.router.hope(pool.ask(fingerprint=worker.welcome.fingerprint))
    assert not pool.router.hope(pool.ask(fingerprint=replace(worker.welcome.fingerprint, weights_hash="other")))


# --- refuges ---------------------------------------------------------------------------------------------------------


def refuge(pool: Pool, address: str, num_tokens: int) -> str | None:
    choice = Choice(0, [1] * num_tokens)
    worker = pool.leaving.refuge(address, choice, num_tokens, fingerprint=None, tier=Tier.STANDARD, now=0.0)
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


def test_a_refuge_can_hold_the_sequence_to_its_end() -> None:
    pool = Sizes()
    for address in NEAR:
        pool.registry.heartbeat(address, heartbeat(used=0, total=10), 0.0)
    choice = Choice(0, [1, 2, 3])
    worker = pool.leaving.refuge(D, choice, 150, fingerprint=None, tier=Tier.STANDARD, now=0.0)
    assert worker is not None
    assert worker.address == D2
    choice.too_small.add(life(D2))
    worker = pool.leaving.refuge(D, choice, 50, fingerprint=None, tier=Tier.STANDARD, now=0.0)
    assert worker is not None
    assert worker.address == D3
