"""What the gateway knows of its workers, and whom it chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.contract.errors import FingerprintMismatchError
from common.contract.ids import Incarnation
from common.contract.kv_layout import PROTOCOL_VERSION, Fingerprint, KVLayout
from common.contract.messages import Heartbeat, Role, Welcome
from gateway.registry import Registry, WorkerView
from gateway.router import least_loaded_decode, least_loaded_prefill

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


def load(*, waiting_tokens: int = 0, used: int = 0, total: int = 10, draining: bool = False) -> Heartbeat:
    return Heartbeat(
        number=1,
        sent=0,
        steps=0,
        running=0,
        waiting=0,
        waiting_tokens=waiting_tokens,
        blocks_used=used,
        blocks_total=total,
        draining=draining,
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


def test_a_draining_worker_gets_nothing_new_until_it_says_otherwise(registry: Registry) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(draining=True))
    assert usable(registry) == set()
    registry.heartbeat(D1, load())
    assert usable(registry) == {D1}


def test_the_load_of_a_lost_life_is_forgotten(registry: Registry) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(draining=True))
    registry.lost(D1)
    registry.opened(D1, NEXT_LIFE, welcome(Role.DECODE))
    assert registry.workers[D1].load is None
    assert usable(registry) == {D1}


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
    worker = WorkerView(address, role, Incarnation(address), welcome(role))
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
