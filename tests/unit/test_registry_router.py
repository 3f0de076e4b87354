"""What the gateway knows of its workers, and whom it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.contract.errors import FingerprintMismatchError
from common.contract.ids import Incarnation
from common.contract.kv_layout import PROTOCOL_VERSION, Fingerprint, KVLayout
from common.contract.messages import Heartbeat, Phase, PrefixHint, Role, Source, Welcome
from gateway.attempt import Place
from gateway.registry import Registry, WorkerView
from gateway.router import Handoff, Local, LocalPrefill, choose, least_loaded_decode, least_loaded_prefill

P1, P2, D1, D2 = "p1:1", "p2:1", "d1:1", "d2:1"
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="weights-a", layout=LAYOUT)
OTHER_WEIGHTS = replace(FINGERPRINT, weights_hash="weights-b")
LIFE, NEXT_LIFE = Incarnation("life-1"), Incarnation("life-2")


def welcome(role: Role, fingerprint: Fingerprint = FINGERPRINT) -> Welcome:
    return Welcome(
        role=role,
        fingerprint=fingerprint,
        max_sequence_tokens=1,
        transport="zmq",
        transport_metadata=b"",
        open_requests=(),
    )


def load(
    *,
    waiting_tokens: int = 0,
    used: int = 0,
    total: int = 10,
    phase: Phase = Phase.SERVING,
    running: int = 0,
    steps: int = 0,
) -> Heartbeat:
    return Heartbeat(
        number=1,
        sent=0,
        steps=steps,
        running=running,
        waiting=0,
        waiting_tokens=waiting_tokens,
        blocks_used=used,
        blocks_total=total,
        phase=phase,
    )


@pytest.fixture
def registry() -> Registry:
    return Registry((P1, P2), (D1, D2), "c")


def usable(registry: Registry) -> set[str]:
    return {worker.address for role in (Role.PREFILL, Role.DECODE) for worker in registry.usable(role)}


# --- sessions --------------------------------------------------------------------------------------------------------


def test_a_worker_is_usable_while_its_session_is_open(registry: Registry) -> None:
    assert usable(registry) == set()
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    assert usable(registry) == {P1, D1}
    assert [worker.address for worker in registry.usable(Role.PREFILL)] == [P1]
    registry.lost(P1)
    assert usable(registry) == {D1}
    registry.lost(P1)
    assert usable(registry) == {D1}


def test_a_worker_that_drains_when_its_session_opens_gets_nothing_new(registry: Registry) -> None:
    """A gateway that had lost it must not send it work until the first heartbeat."""
    registry.lost(D1)
    registry.opened(D1, Incarnation("again"), replace(welcome(Role.DECODE), phase=Phase.DRAINING))
    assert not registry.workers[D1].usable
    registry.heartbeat(D1, load(phase=Phase.SERVING), 0.0)
    assert registry.workers[D1].usable


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.DRAINED])
def test_a_draining_worker_gets_nothing_new_until_it_says_otherwise(registry: Registry, phase: Phase) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(phase=phase), 0.0)
    assert usable(registry) == set()
    registry.heartbeat(D1, load(), 0.0)
    assert usable(registry) == {D1}


def test_the_load_of_a_lost_life_is_forgotten(registry: Registry) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(phase=Phase.DRAINING), 0.0)
    registry.lost(D1)
    registry.opened(D1, NEXT_LIFE, welcome(Role.DECODE))
    assert registry.workers[D1].load is None
    assert usable(registry) == {D1}


def test_a_worker_whose_engine_hangs_is_not_used_until_it_steps() -> None:
    registry = Registry((P1,), (D1,), "c", stall_s=30)
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    assert not registry.heartbeat(D1, load(running=1, steps=5), 0.0)
    assert not registry.heartbeat(D1, load(running=1, steps=5), 30.0)
    assert usable(registry) == {D1}
    assert registry.heartbeat(D1, load(running=1, steps=5), 30.1)
    assert usable(registry) == set()
    assert not registry.heartbeat(D1, load(running=1, steps=5), 31.0), "it is said once"
    assert usable(registry) == set()
    assert not registry.heartbeat(D1, load(running=1, steps=6), 32.0)
    assert usable(registry) == {D1}


@pytest.mark.parametrize("again", [load(running=1, steps=6), load(running=0, steps=5)], ids=["steps", "is idle"])
def test_an_engine_that_steps_or_is_idle_does_not_hang(again: Heartbeat) -> None:
    registry = Registry((P1,), (D1,), "c", stall_s=30)
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(running=1, steps=5), 0.0)
    registry.heartbeat(D1, again, 29.0)
    registry.heartbeat(D1, replace(again, running=1), 58.0)
    assert usable(registry) == {D1}
    assert registry.heartbeat(D1, replace(again, running=1), 89.0)


def test_another_session_knows_nothing_of_an_engine_that_hung() -> None:
    registry = Registry((P1,), (D1,), "c", stall_s=30)
    for life in (LIFE, NEXT_LIFE, NEXT_LIFE):
        registry.opened(D1, life, welcome(Role.DECODE))
        assert usable(registry) == {D1}
        assert not registry.heartbeat(D1, load(running=1, steps=5), 1000.0)
        assert registry.heartbeat(D1, load(running=1, steps=5), 1031.0)
        registry.lost(D1)


@pytest.mark.parametrize(
    ("num_tokens", "used", "room"), [(16, 8, True), (16, 9, False), (17, 7, True), (17, 8, False), (1, 10, False)]
)
def test_a_sequence_has_room_where_its_blocks_and_the_next_one_are_free(
    registry: Registry, num_tokens: int, used: int, room: bool
) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    assert not registry.workers[D1].has_room(num_tokens), "nothing is known of it yet"
    registry.heartbeat(D1, load(used=used, total=10), 0.0)
    assert registry.workers[D1].has_room(num_tokens) == room
    registry.lost(D1)
    assert not registry.workers[D1].has_room(num_tokens)


# --- what is in flight -----------------------------------------------------------------------------------------------


def in_flight(registry: Registry, address: str) -> tuple[int, int]:
    return registry.workers[address].in_flight, registry.workers[address].in_flight_tokens


def test_took_and_left_balance(registry: Registry) -> None:
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    registry.took(P1, 100)
    registry.took(P1, 7)
    assert in_flight(registry, P1) == (2, 107)
    assert in_flight(registry, P2) == (0, 0)
    registry.left(P1, LIFE, 100)
    registry.left(P1, LIFE, 7)
    assert in_flight(registry, P1) == (0, 0)


def test_what_a_lost_life_held_is_not_taken_from_its_successor(registry: Registry) -> None:
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    registry.took(P1, 100)
    registry.lost(P1)
    registry.left(P1, LIFE, 100)  # between the lives
    registry.opened(P1, NEXT_LIFE, welcome(Role.PREFILL))
    assert in_flight(registry, P1) == (0, 0)
    registry.took(P1, 5)
    registry.left(P1, LIFE, 100)
    assert in_flight(registry, P1) == (1, 5)
    registry.left(P1, NEXT_LIFE, 5)
    assert in_flight(registry, P1) == (0, 0)


def test_a_session_that_opens_again_in_the_same_life_never_counts_below_zero(registry: Registry) -> None:
    """The network was cut for longer than the timeout; a request of before ends late: its client reads slowly."""
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.took(D1, 100)
    registry.lost(D1)
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.took(D1, 5)
    registry.left(D1, LIFE, 100)
    assert in_flight(registry, D1) == (1, 5)


# --- roles -----------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_what_there_should_be(registry: Registry) -> None:
    assert not registry.colocated
    assert registry.missing() == [Role.PREFILL, Role.DECODE]
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    assert registry.missing() == [Role.PREFILL]
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    assert registry.missing() == []
    registry.heartbeat(P1, load(phase=Phase.DRAINING), 0.0)
    assert registry.missing() == [Role.PREFILL]


def test_without_prefill_workers_none_is_missing() -> None:
    registry = Registry((), (D1,), "c")
    assert registry.colocated
    assert registry.missing() == [Role.DECODE]
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    assert registry.missing() == []


# --- misfits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (welcome(Role.DECODE), ("prefill", "decode", P1)),
        (welcome(Role.PREFILL, replace(FINGERPRINT, config_hash="other")), ("config_hash", "c", "other", P1)),
        (
            welcome(Role.PREFILL, replace(FINGERPRINT, protocol_version=PROTOCOL_VERSION + 1)),
            ("protocol_version", str(PROTOCOL_VERSION), str(PROTOCOL_VERSION + 1), P1),
        ),
        (welcome(Role.PREFILL, OTHER_WEIGHTS), ("weights_hash", "weights-a", "weights-b", P1, D1)),
        (
            welcome(Role.PREFILL, replace(FINGERPRINT, layout=replace(LAYOUT, block_size=32))),
            ("layout.block_size", "16", "32", P1, D1),
        ),
    ],
    ids=["role", "config", "protocol", "weights", "layout"],
)
def test_a_misfit_is_refused_with_both_values(registry: Registry, answer: Welcome, named: tuple[str, ...]) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    with pytest.raises(FingerprintMismatchError) as refusal:
        registry.opened(P1, LIFE, answer)
    for name in named:
        assert name in str(refusal.value)
    assert registry.workers[P1].refused == str(refusal.value)
    assert usable(registry) == {D1}


def test_a_misfit_does_not_judge_others(registry: Registry) -> None:
    with pytest.raises(FingerprintMismatchError):
        registry.opened(P1, LIFE, welcome(Role.PREFILL, replace(OTHER_WEIGHTS, config_hash="other")))
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.opened(P2, LIFE, welcome(Role.PREFILL))
    assert usable(registry) == {P2, D1}


def test_a_fitting_successor_takes_the_place_of_a_misfit(registry: Registry) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    with pytest.raises(FingerprintMismatchError):
        registry.opened(P1, LIFE, welcome(Role.PREFILL, OTHER_WEIGHTS))
    registry.lost(P1)
    registry.opened(P1, NEXT_LIFE, welcome(Role.PREFILL))
    assert registry.workers[P1].refused is None
    assert usable(registry) == {P1, D1}


def test_a_lost_worker_judges_nobody(registry: Registry) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.lost(D1)
    registry.opened(P1, LIFE, welcome(Role.PREFILL, OTHER_WEIGHTS))
    assert usable(registry) == {P1}
    with pytest.raises(FingerprintMismatchError):
        registry.opened(D1, NEXT_LIFE, welcome(Role.DECODE))


def test_a_misfit_fits_once_all_that_it_disagreed_with_are_gone() -> None:
    """New weights are rolled out, worker by worker, under a gateway that stays."""
    registry = Registry((P1,), (D1,), "c")
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.lost(P1)
    with pytest.raises(FingerprintMismatchError):
        registry.opened(P1, NEXT_LIFE, welcome(Role.PREFILL, OTHER_WEIGHTS))
    registry.lost(D1)
    registry.opened(D1, NEXT_LIFE, welcome(Role.DECODE, OTHER_WEIGHTS))
    assert usable(registry) == {P1, D1}, f"refused for ever: {registry.workers[P1].refused}"


# --- routing ---------------------------------------------------------------------------------------------------------


def view(address: str, role: Role, *, requests: int = 0, tokens: int = 0, load: Heartbeat | None = None) -> WorkerView:
    worker = WorkerView(address, role, Incarnation(address), welcome=welcome(role))
    worker.in_flight, worker.in_flight_tokens, worker.load = requests, tokens, load
    return worker


def prefill_choice(*workers: WorkerView) -> str:
    forward, backward = least_loaded_prefill([*workers]), least_loaded_prefill([*reversed(workers)])
    assert forward is backward, "the choice depends on the order"
    return forward.address


def decode_choice(*workers: WorkerView) -> str:
    forward, backward = least_loaded_decode([*workers]), least_loaded_decode([*reversed(workers)])
    assert forward is backward, "the choice depends on the order"
    return forward.address


def test_prefill_goes_by_tokens_then_reports_then_requests_then_address() -> None:
    p = Role.PREFILL
    assert prefill_choice(view("a", p, tokens=9, requests=1), view("b", p, tokens=8, requests=5)) == "b"
    assert prefill_choice(view("a", p, load=load(waiting_tokens=1)), view("b", p, load=load())) == "b"
    assert prefill_choice(view("a", p, load=load(waiting_tokens=1)), view("b", p)) == "b"
    assert prefill_choice(view("a", p, requests=1), view("b", p)) == "b"
    assert prefill_choice(view("b", p), view("a", p)) == "a"


def test_decode_goes_by_requests_then_blocks_then_address() -> None:
    d = Role.DECODE
    assert decode_choice(view("a", d, requests=2), view("b", d, requests=1, load=load(used=9))) == "b"
    assert decode_choice(view("a", d, load=load(used=5, total=10)), view("b", d, load=load(used=6, total=100))) == "b"
    assert decode_choice(view("a", d, load=load(used=1)), view("b", d)) == "b"
    assert decode_choice(view("b", d, load=load(total=0)), view("a", d, load=load(total=0))) == "a"


def test_equal_workers_share_the_work(registry: Registry) -> None:
    for address in (D1, D2):
        registry.opened(address, LIFE, welcome(Role.DECODE))
    taken = []
    for _ in range(6):
        worker = least_loaded_decode(registry.usable(Role.DECODE))
        registry.took(worker.address, 1)
        taken.append(worker.address)
    assert taken == [D1, D2] * 3


# --- routes ----------------------------------------------------------------------------------------------------------

WORKERS = (P1, P2, D1, D2)


def opened(*addresses: str, prefill: Sequence[str] = (P1, P2)) -> Registry:
    registry = Registry(tuple(prefill), (D1, D2), "c")
    for address in addresses:
        registry.opened(address, LIFE, welcome(Role.PREFILL if address in prefill else Role.DECODE))
    return registry


def held(**tokens: int) -> dict[Place, int]:
    """Cached tokens by worker, `d1=32`."""
    return {Place(f"{name}:1", LIFE): count for name, count in tokens.items()}


def handoff(registry: Registry, num_tokens: int, cached: dict[Place, int], threshold: int = 0) -> Handoff:
    route = choose(registry, num_tokens, cached, threshold)
    assert isinstance(route, Handoff)
    return route


def local(registry: Registry, num_tokens: int, cached: dict[Place, int], threshold: int = 0) -> tuple[str, str]:
    route = choose(registry, num_tokens, cached, threshold)
    assert isinstance(route, Local)
    return route.decode.address, route.reason


def hint(address: str, num_tokens: int) -> PrefixHint:
    return PrefixHint(source=Source(address=address, incarnation=LIFE), num_tokens=num_tokens)


def test_a_handoff_is_between_the_least_loaded() -> None:
    registry = opened(*WORKERS)
    registry.took(P1, 5)
    registry.took(D1, 5)
    route = handoff(registry, 100, held(p1=16, d1=16))
    assert (route.prefill.address, route.decode.address) == (P2, D2)


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ({}, None),
        ({"d2": 32}, (D2, 32)),
        ({"p2": 32, "d2": 16}, (P2, 32)),
        ({"d1": 32, "d2": 32}, (D2, 32)),
        ({"p1": 32, "d2": 32}, None),
        ({"p1": 16, "d2": 32}, (D2, 32)),
        ({"p1": 48, "d2": 32}, None),
        ({"elsewhere": 64}, None),
    ],
    ids=str,
)
def test_the_hint_names_who_holds_more_than_the_chosen_one(
    cached: dict[str, int], expected: tuple[str, int] | None
) -> None:
    registry = opened(*WORKERS)
    registry.took(P2, 5)
    registry.took(D1, 5)
    route = handoff(registry, 100, held(**cached))
    assert route.prefill.address == P1
    assert route.prefix == (None if expected is None else hint(*expected))


def test_a_hint_names_no_life_that_has_ended_and_no_worker_that_leaves() -> None:
    registry = opened(*WORKERS)
    cached = {Place(D1, NEXT_LIFE): 64} | held(d2=32)
    assert handoff(registry, 100, cached).prefix == hint(D2, 32)
    registry.heartbeat(D2, load(phase=Phase.DRAINING), 0.0)
    assert handoff(registry, 100, cached).prefix is None


@pytest.mark.parametrize(("threshold", "is_local"), [(0, False), (9, False), (10, True), (11, True)])
def test_a_prompt_is_short_by_what_is_left_to_compute(threshold: int, is_local: bool) -> None:
    for num_tokens, cached in ((10, {}), (42, held(d1=32))):
        route = choose(opened(*WORKERS), num_tokens, cached, threshold)
        assert route is not None
        assert isinstance(route, Local) == is_local
        assert route.decode.address == D1


def test_what_a_prefill_worker_holds_makes_no_prompt_short() -> None:
    assert handoff(opened(*WORKERS), 42, held(p1=32), 10).prefix is None


def test_of_the_workers_for_which_a_prompt_is_short_the_least_loaded_computes_it() -> None:
    registry = opened(*WORKERS)
    registry.took(D1, 1)
    assert local(registry, 42, held(d1=32, d2=32), 10) == (D2, LocalPrefill.SHORT)
    assert local(registry, 42, held(d1=32, d2=16), 10) == (D1, LocalPrefill.SHORT)


def test_a_crowded_worker_is_not_sought_for_its_cache() -> None:
    registry = opened(*WORKERS)
    registry.took(D2, 1)
    for _ in range(6):
        registry.took(D1, 1)
    assert local(registry, 42, held(d1=32), 10) == (D1, LocalPrefill.SHORT), "2 * 1 + 4 requests"
    registry.took(D1, 1)
    route = handoff(registry, 42, held(d1=32), 10)
    assert (route.decode.address, route.prefix) == (D2, hint(D1, 32))


def test_where_prefill_workers_exist_and_none_is_usable_a_decode_worker_computes() -> None:
    registry = opened(D1, D2)
    assert local(registry, 100, {}) == (D1, LocalPrefill.NO_PREFILL_WORKER)
    assert local(registry, 100, {}, 100) == (D1, LocalPrefill.SHORT), "it would have been computed there anyway"
    assert local(registry, 100, held(d2=16)) == (D2, LocalPrefill.NO_PREFILL_WORKER), "it has less to compute"


def test_where_there_are_no_prefill_workers_decode_workers_compute() -> None:
    registry = opened(D1, D2, prefill=())
    assert local(registry, 100, {}) == (D1, LocalPrefill.COLOCATED)
    assert local(registry, 10, {}, 64) == (D1, LocalPrefill.COLOCATED)
    assert local(registry, 100, held(d1=16, d2=32)) == (D2, LocalPrefill.COLOCATED)
    for _ in range(5):
        registry.took(D2, 1)
    assert local(registry, 100, held(d1=16, d2=32)) == (D1, LocalPrefill.COLOCATED)
