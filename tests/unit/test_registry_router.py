"""What the gateway knows of its workers, and whom it chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contract.codec import decode, encode
from common.contract.errors import FingerprintMismatchError
from common.contract.ids import Incarnation
from common.contract.kv_layout import PROTOCOL_VERSION, Fingerprint, KVLayout
from common.contract.messages.gateway import PrefixHint, Source
from common.contract.messages.session import Heartbeat, Phase, Role, Welcome
from common.contract.tiers import Tier
from gateway.dispatch.ask import Ask
from gateway.dispatch.router import Handoff, Local, LocalPrefill, Router
from gateway.workers.registry import Registry
from gateway.workers.worker_life import WorkerLife
from gateway.workers.worker_view import Given, WorkerView

P1, P2, D1, D2 = "p1:1", "p2:1", "d1:1", "d2:1"
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="weights-a", layout=LAYOUT)
OTHER_WEIGHTS = replace(FINGERPRINT, weights_hash="weights-b")
LIFE, NEXT_LIFE = Incarnation("life-1"), Incarnation("life-2")


def welcome(role: Role, fingerprint: Fingerprint = FINGERPRINT) -> Welcome:
    return Welcome(
        role=role,
        fingerprint=fingerprint,
        max_sequence_tokens=10**6,
        transport="zmq",
        transport_metadata=b"",
        open_requests=(),
    )


def load(
    *,
    queued: tuple[int, int, int] = (0, 0, 0),
    token_s: float = 0.001,
    pulled_token_s: float = 0.001,
    sequences: tuple[int, int, int] = (0, 0, 0),
    places: int = 0,
    sequence_s: float = 0.0,
    received: int = 0,
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
        blocks_used=used,
        blocks_total=total,
        phase=phase,
        queued_tokens=queued,
        sequences=sequences,
        places=places,
        token_s=token_s,
        pulled_token_s=pulled_token_s,
        sequence_s=sequence_s,
        received=received,
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
    assert not registry.heartbeat(D1, load(running=0, steps=5), 31.5), "what it had was taken away"
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
    assert not registry.workers[D1].has_room(num_tokens, Tier.STANDARD), "nothing is known of it yet"
    registry.heartbeat(D1, load(used=used, total=10), 0.0)
    assert registry.workers[D1].has_room(num_tokens, Tier.STANDARD) == room
    registry.lost(D1)
    assert not registry.workers[D1].has_room(num_tokens, Tier.STANDARD)


def test_one_that_has_no_room_for_a_sequence_may_have_some_for_a_shorter_one(registry: Registry) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(total=10), 0.0)
    registry.no_room(D1, 40, 0.0)
    registry.no_room(D1, 50, 0.0)
    assert [registry.workers[D1].has_room(num_tokens, Tier.STANDARD) for num_tokens in (39, 40, 50)] == [
        True,
        False,
        False,
    ]
    registry.heartbeat(D1, load(total=10), 2.0)
    assert registry.workers[D1].has_room(50, Tier.STANDARD)


@pytest.mark.parametrize(
    ("sequences", "tier", "room"),
    [
        ((0, 4, 0), Tier.STANDARD, False),
        ((0, 3, 0), Tier.STANDARD, True),
        ((0, 3, 9), Tier.STANDARD, True),
        ((1, 3, 0), Tier.STANDARD, False),
        ((0, 4, 0), Tier.INTERACTIVE, True),
        ((0, 4, 0), Tier.BATCH, False),
    ],
)
def test_a_sequence_has_room_where_the_batch_has_a_place_for_it(
    registry: Registry, sequences: tuple[int, int, int], tier: Tier, room: bool
) -> None:
    """Lower tiers give way. A worker would refuse the others."""
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(sequences=sequences, running=sum(sequences), places=4, total=100), 0.0)
    assert registry.workers[D1].has_room(1, tier) == room


@pytest.mark.parametrize(
    ("running", "num_given", "room"), [(5, 0, True), (63, 0, True), (64, 0, False), (5, 59, False)]
)
def test_a_sequence_whose_prompt_waits_at_a_prefill_worker_takes_no_place(
    registry: Registry, running: int, num_given: int, room: bool
) -> None:
    """A decode worker counts it from its Decode on. It does not keep a running sequence from a draining worker out."""
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(sequences=(0, 300, 0), running=running, places=64, total=100), 0.0)
    registry.took(D1, Given(number=1, tier=Tier.STANDARD, num_sequences=num_given))
    assert registry.workers[D1].has_room(1, Tier.STANDARD) == room


def test_a_sequence_has_no_room_where_the_connection_is_broken(registry: Registry) -> None:
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(total=100), 0.0)
    registry.broken(D1)
    assert not registry.workers[D1].has_room(1, Tier.STANDARD)
    assert usable(registry) == {D1}, "it may be back in a moment"
    registry.resynced(D1)
    assert registry.workers[D1].has_room(1, Tier.STANDARD)
    registry.broken(D1)
    registry.lost(D1)
    assert not registry.table.broken, "whoever comes next has a connection of its own"


def test_of_several_sequences_that_end_the_heartbeat_has_counted_off_all_but_the_last(registry: Registry) -> None:
    """What was counted off already would be taken for the end of others."""
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    work = Given(number=1, tier=Tier.STANDARD, num_sequences=16)
    registry.took(D1, work)
    assert registry.workers[D1].sequences == [0, 16, 0]
    registry.heartbeat(D1, load(sequences=(0, 5, 0), places=8, received=2), 1.0)
    registry.left(D1, LIFE, work, 2.0)
    assert registry.workers[D1].sequences == [0, 4, 0]


# --- what is in flight -----------------------------------------------------------------------------------------------


def in_flight(registry: Registry, address: str) -> int:
    return registry.workers[address].in_flight


def took(registry: Registry, address: str, num_tokens: int = 0) -> None:
    """A request is given to a worker, which it never reports."""
    registry.took(address, Given(number=2**62, tier=Tier.STANDARD, num_tokens=num_tokens))


def test_took_and_left_balance(registry: Registry) -> None:
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    took(registry, P1)
    took(registry, P1)
    assert in_flight(registry, P1) == 2
    assert in_flight(registry, P2) == 0
    registry.left(P1, LIFE)
    registry.left(P1, LIFE)
    assert in_flight(registry, P1) == 0


def test_what_a_lost_life_held_is_not_taken_from_its_successor(registry: Registry) -> None:
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    took(registry, P1)
    registry.lost(P1)
    registry.left(P1, LIFE)  # between the lives
    registry.opened(P1, NEXT_LIFE, welcome(Role.PREFILL))
    assert in_flight(registry, P1) == 0
    took(registry, P1)
    registry.left(P1, LIFE)
    assert in_flight(registry, P1) == 1
    registry.left(P1, NEXT_LIFE)
    assert in_flight(registry, P1) == 0


def test_a_session_that_opens_again_in_the_same_life_never_counts_below_zero(registry: Registry) -> None:
    """The network was cut for longer than the timeout; a request of before ends late: its client reads slowly."""
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    took(registry, D1)
    registry.lost(D1)
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    took(registry, D1)
    registry.left(D1, LIFE)
    assert in_flight(registry, D1) == 1


def test_a_restart_is_another_life_at_the_same_address(registry: Registry) -> None:
    def restarts() -> tuple[int, int, int]:
        return registry.workers[D1].restarts, registry.num_restarts[Role.DECODE], registry.num_restarts[Role.PREFILL]

    registry.opened(D1, LIFE, welcome(Role.DECODE))
    assert restarts() == (0, 0, 0), "the first life is no restart"
    registry.lost(D1)
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    assert restarts() == (0, 0, 0), "it was only out of reach"
    registry.lost(D1)
    assert restarts() == (0, 0, 0), "nobody has come back yet"
    registry.opened(D1, NEXT_LIFE, welcome(Role.DECODE))
    assert restarts() == (1, 1, 0)
    registry.remove(D1)
    assert registry.num_restarts == {Role.DECODE: 1}, "the metric never goes down"


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
        registry.opened(P2, LIFE, welcome(Role.PREFILL))


def test_a_prefill_worker_that_differs_keeps_no_decode_worker_out() -> None:
    """The weights have changed under their name, and the decode worker was the first to restart."""
    registry = Registry((P1,), (D1,), "c")
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    assert registry.misfit() is None
    registry.lost(D1)
    registry.opened(D1, NEXT_LIFE, welcome(Role.DECODE, OTHER_WEIGHTS))
    assert usable(registry) == {D1}
    assert registry.missing() == [Role.PREFILL]
    assert registry.misfit() == "fingerprint mismatch: weights_hash: weights-b at d1:1, weights-a at p1:1"
    registry.heartbeat(D1, load(phase=Phase.DRAINING), 0.0)
    assert registry.workers[D1].refused is None, "it may serve again"
    registry.heartbeat(D1, load(), 0.0)
    registry.lost(P1)
    registry.opened(P1, NEXT_LIFE, welcome(Role.PREFILL, OTHER_WEIGHTS))
    assert usable(registry) == {P1, D1}
    assert registry.misfit() is None


def test_prefill_workers_that_come_and_go_do_not_change_what_is_served(registry: Registry) -> None:
    open_beside(registry, P1, LIFE, OTHER_WEIGHTS)
    open_beside(registry, P2, LIFE, FINGERPRINT)
    open_beside(registry, D1, LIFE, FINGERPRINT)
    open_beside(registry, D2, LIFE, OTHER_WEIGHTS)
    assert usable(registry) == {P2, D1}
    for phase in (Phase.DRAINING, Phase.SERVING):
        for address in (P1, P2):
            registry.heartbeat(address, load(phase=phase), 0.0)
            assert {worker.address for worker in registry.usable(Role.DECODE)} == {D1}
    registry.lost(P2)
    assert usable(registry) == {D1}


def test_a_worker_of_a_later_version_is_refused_by_its_version(registry: Registry) -> None:
    """Whatever else it says that is not known here."""
    later = replace(FINGERPRINT, protocol_version=PROTOCOL_VERSION + 1)
    frame = msgpack.unpackb(encode(LIFE, [welcome(Role.DECODE, later)]))
    fields = frame[1][0][1]
    for part in (fields, fields["fingerprint"], fields["fingerprint"]["layout"]):
        part["later"] = 1
    _, [answer] = decode(msgpack.packb(frame))
    assert isinstance(answer, Welcome)
    with pytest.raises(FingerprintMismatchError, match="protocol_version"):
        registry.opened(D1, LIFE, answer)


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


def open_beside(registry: Registry, address: str, life: Incarnation, fingerprint: Fingerprint) -> None:
    """Its session opens, whether it fits or not."""
    with contextlib.suppress(FingerprintMismatchError):
        registry.opened(address, life, welcome(registry.workers[address].role, fingerprint))


@pytest.mark.parametrize("how", ["not ready", "not listed", "draining", "hung"])
def test_one_that_is_usable_again_is_not_used_beside_one_that_differs(how: str) -> None:
    """Old pods blink while one with other weights connects, and come back: they were here first."""
    registry = Registry((), (D1, D2), "c", stall_s=30)
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    registry.heartbeat(D1, load(running=1), 0.0)
    match how:
        case "not ready":
            registry.relist(Role.DECODE, {D1: False, D2: True})
        case "not listed":
            registry.relist(Role.DECODE, {D2: True})
        case "draining":
            registry.heartbeat(D1, load(phase=Phase.DRAINING), 31.0)
        case "hung":
            registry.heartbeat(D1, load(running=1), 31.0)
    assert usable(registry) == set()
    registry.opened(D2, LIFE, welcome(Role.DECODE, OTHER_WEIGHTS))
    assert usable(registry) == {D2}, "nobody else could serve"
    registry.relist(Role.DECODE, {D1: True, D2: True})
    registry.heartbeat(D1, load(running=1, steps=1), 32.0)
    assert usable(registry) == {D1}
    assert "weights-b at d2:1" in (registry.workers[D2].refused or "")
    registry.lost(D1)
    assert usable(registry) == {D2}


def test_new_weights_are_used_as_soon_as_all_old_workers_drain() -> None:
    """Their sessions go on for as long as their last sequences."""
    registry = Registry((P1,), (D1, D2), "c")
    registry.opened(P1, LIFE, welcome(Role.PREFILL))
    registry.opened(D1, LIFE, welcome(Role.DECODE))
    with pytest.raises(FingerprintMismatchError):
        registry.opened(D2, LIFE, welcome(Role.DECODE, OTHER_WEIGHTS))
    registry.heartbeat(P1, load(phase=Phase.DRAINING), 0.0)
    assert usable(registry) == {D1}
    registry.relist(Role.DECODE, {D1: False, D2: True})
    assert usable(registry) == {D2}
    registry.heartbeat(D1, load(phase=Phase.DRAINING), 0.0)
    assert usable(registry) == {D2}


def weights_of(worker: WorkerView) -> Fingerprint:
    assert worker.welcome is not None
    return worker.welcome.fingerprint


EVENTS = st.tuples(
    st.sampled_from(("open", "open as other", "open misfit", "lose", "draining", "serving", "hung", "listed")),
    st.sampled_from((P1, P2, D1, D2)),
    st.sets(st.sampled_from((D1, D2))),
    st.booleans(),
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens_the_usable_workers_agree(events: list[tuple[str, str, set[str], bool]]) -> None:
    registry = Registry((P1, P2), (D1, D2), "c", stall_s=30)
    weights = {
        "open": FINGERPRINT,
        "open as other": OTHER_WEIGHTS,
        "open misfit": replace(FINGERPRINT, config_hash="x"),
    }
    for number, (event, address, listed, serving) in enumerate(events):
        worker = registry.workers[address]
        now = 100.0 * number
        if event in weights:
            registry.lost(address)
            open_beside(registry, address, Incarnation(str(number)), weights[event])
        elif event == "lose":
            registry.lost(address)
        elif event == "listed":
            registry.relist(Role.DECODE, dict.fromkeys(listed, serving))
        elif worker.incarnation is not None:
            phase = Phase.DRAINING if event == "draining" else Phase.SERVING
            steps = worker.load.steps if worker.load else 0
            running = event == "hung"
            registry.heartbeat(address, load(phase=phase, running=running, steps=steps + (not running)), now)
        used = [each for each in registry.workers.values() if each.usable]
        could = [each for each in registry.workers.values() if each.available and weights_of(each).config_hash == "c"]
        oldest = min(could, key=lambda each: (each.role is Role.PREFILL, each.session), default=None)
        assert used == [each for each in could if oldest is not None and weights_of(each) == weights_of(oldest)]


# --- routing ---------------------------------------------------------------------------------------------------------


def view(address: str, role: Role, *, requests: int = 0, load: Heartbeat | None = None) -> WorkerView:
    worker = WorkerView(address, role, Incarnation(address), welcome=welcome(role))
    worker.in_flight, worker.load = requests, load
    return worker


def prefill_choice(*workers: WorkerView, num_tokens: int = 1000, cached: dict[str, int] | None = None) -> str:
    """Which prefill worker gets a prompt, in whatever order they are listed."""
    choices = set()
    for listed in (workers, workers[::-1]):
        registry = Registry(tuple(worker.address for worker in listed), ("d", "e"), "c")
        registry.workers = {worker.address: worker for worker in [*listed, view("d", Role.DECODE)]}
        lives = {registry.workers[address].life: number for address, number in (cached or {}).items()}
        route = Router(registry).choose(Ask(num_tokens=num_tokens), lives)
        assert isinstance(route, Handoff)
        choices.add(route.prefill.address)
    (choice,) = choices
    return choice


def least_loaded(workers: Sequence[WorkerView], ask: Ask, cached: dict[WorkerLife, int]) -> WorkerView:
    registry = Registry((), tuple(worker.address for worker in workers), "c")
    registry.workers = {worker.address: worker for worker in workers}
    return Router(registry).taker(np.arange(len(workers)), ask, cached)


def decode_choice(*workers: WorkerView, cached: dict[str, int] | None = None, tier: Tier = Tier.STANDARD) -> str:
    lives = {worker.life: (cached or {}).get(worker.address, 0) for worker in workers}
    ask = Ask(num_tokens=100, tier=tier)
    forward = least_loaded([*workers], ask, lives)
    assert forward is least_loaded([*reversed(workers)], ask, lives), "the choice depends on the order"
    return forward.address


def test_prefill_goes_by_the_time_to_the_first_token() -> None:
    p = Role.PREFILL
    busy, idle = load(queued=(0, 3000, 0)), load()
    assert prefill_choice(view("a", p, load=busy), view("b", p, load=idle)) == "b"
    assert prefill_choice(view("a", p, load=idle, requests=9), view("b", p, load=busy)) == "a"
    assert prefill_choice(view("a", p, load=load(queued=(0, 0, 3000))), view("b", p, load=load())) == "a", "batch waits"
    slow = load(token_s=0.01)
    assert prefill_choice(view("a", p, load=slow), view("b", p, load=busy)) == "b", "4 s, and not 10"
    assert prefill_choice(view("a", p, load=slow), view("b", p, load=busy), cached={"a": 900}) == "a", "1 s, and not 4"
    dear = load(pulled_token_s=1.0)
    assert prefill_choice(view("a", p, load=dear), view("b", p, load=dear), cached={"b": 500}) == "b"
    cheap = load(pulled_token_s=0.0)
    assert prefill_choice(view("a", p, load=cheap), view("b", p, load=busy), cached={"b": 900}) == "a"


def test_of_prefill_workers_that_are_about_equal_the_one_with_more_of_it_then_fewer_requests_then_the_first() -> None:
    p = Role.PREFILL
    equal = load(token_s=0.001)
    close = load(token_s=0.00105)
    assert prefill_choice(view("a", p, load=close, requests=1), view("b", p, load=equal, requests=2)) == "a"
    free = load(token_s=0.0001, pulled_token_s=0.0)
    assert prefill_choice(view("a", p, load=free), view("b", p, load=free, requests=3), cached={"b": 40}) == "b"
    assert prefill_choice(view("b", p), view("a", p)) == "a"
    assert prefill_choice(view("a", p, requests=1), view("b", p)) == "b"


def test_decode_goes_by_room_then_occupancy_then_cache_then_requests_then_address() -> None:
    d = Role.DECODE
    full = load(sequences=(0, 4, 0), places=4, sequence_s=1.0)
    assert decode_choice(view("a", d, load=full), view("b", d, load=load(used=9))) == "b"
    assert decode_choice(view("a", d, load=full), view("b", d, load=load(used=9)), tier=Tier.INTERACTIVE) == "a"
    assert decode_choice(view("a", d, load=load(used=5, total=10)), view("b", d, load=load(used=6, total=100))) == "b"
    assert decode_choice(view("a", d, load=load(used=1, total=99)), view("b", d, load=load(used=5, total=99))) == "a"
    even = [view("a", d, load=load(used=5, total=99)), view("b", d, load=load(used=1, total=99), requests=1)]
    assert decode_choice(*even) == "a", "their occupancies are about equal"
    assert decode_choice(*even, cached={"b": 16}) == "b"
    even[1].in_flight = 5
    assert decode_choice(*even, cached={"b": 16}) == "a", "it is crowded: 5 is more than 2 * 0 + 4"
    assert decode_choice(view("b", d, load=load(total=0)), view("a", d, load=load(total=0))) == "a"


def test_equal_workers_share_the_work(registry: Registry) -> None:
    for address in (D1, D2):
        registry.opened(address, LIFE, welcome(Role.DECODE))
    taken = []
    for _ in range(6):
        worker = least_loaded(registry.usable(Role.DECODE), Ask(num_tokens=1), {})
        took(registry, worker.address)
        taken.append(worker.address)
    assert taken == [D1, D2] * 3


# --- routes ----------------------------------------------------------------------------------------------------------

WORKERS = (P1, P2, D1, D2)


def opened(*addresses: str, prefill: Sequence[str] = (P1, P2)) -> Registry:
    registry = Registry(tuple(prefill), (D1, D2), "c")
    for address in addresses:
        registry.opened(address, LIFE, welcome(Role.PREFILL if address in prefill else Role.DECODE))
    return registry


def held(**tokens: int) -> dict[WorkerLife, int]:
    """Cached tokens by worker, `d1=32`."""
    return {WorkerLife(f"{name}:1", LIFE): count for name, count in tokens.items()}


def handoff(registry: Registry, num_tokens: int, cached: dict[WorkerLife, int], threshold: int = 0) -> Handoff:
    route = Router(registry, local_prefill_tokens=threshold).choose(Ask(num_tokens=num_tokens), cached)
    assert isinstance(route, Handoff)
    return route


def local(registry: Registry, num_tokens: int, cached: dict[WorkerLife, int], threshold: int = 0) -> tuple[str, str]:
    route = Router(registry, local_prefill_tokens=threshold).choose(Ask(num_tokens=num_tokens), cached)
    assert isinstance(route, Local)
    return route.decode.address, route.reason


def hint(address: str, num_tokens: int) -> PrefixHint:
    return PrefixHint(source=Source(address=address, incarnation=LIFE), num_tokens=num_tokens)


def test_a_handoff_is_between_the_least_loaded() -> None:
    registry = opened(*WORKERS)
    took(registry, P1, 5000)
    took(registry, D1)
    route = handoff(registry, 100, held(p1=16))
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
    took(registry, P2, 5000)
    took(registry, D1)
    route = handoff(registry, 100, held(**cached))
    assert route.prefill.address == P1
    assert route.prefix == (None if expected is None else hint(*expected))


def test_a_hint_names_no_life_that_has_ended_and_no_worker_that_leaves() -> None:
    registry = opened(*WORKERS)
    cached = {WorkerLife(D1, NEXT_LIFE): 64} | held(d2=32)
    assert handoff(registry, 100, cached).prefix == hint(D2, 32)
    registry.heartbeat(D2, load(phase=Phase.DRAINING), 0.0)
    assert handoff(registry, 100, cached).prefix is None


@pytest.mark.parametrize(("threshold", "is_local"), [(0, False), (9, False), (10, True), (11, True)])
def test_a_prompt_is_short_by_what_is_left_to_compute(threshold: int, is_local: bool) -> None:
    for num_tokens, cached in ((10, {}), (42, held(d1=32))):
        route = Router(opened(*WORKERS), local_prefill_tokens=threshold).choose(Ask(num_tokens=num_tokens), cached)
        assert route is not None
        assert isinstance(route, Local) == is_local
        assert route.decode.address == D1


def test_what_a_prefill_worker_holds_makes_no_prompt_short() -> None:
    assert handoff(opened(*WORKERS), 42, held(p1=32), 10).prefix is None


def test_of_the_workers_for_which_a_prompt_is_short_the_least_loaded_computes_it() -> None:
    registry = opened(*WORKERS)
    took(registry, D1, 1)
    assert local(registry, 42, held(d1=32, d2=32), 10) == (D2, LocalPrefill.SHORT)
    assert local(registry, 42, held(d1=32, d2=16), 10) == (D1, LocalPrefill.SHORT)


def test_a_crowded_worker_is_not_sought_for_its_cache() -> None:
    registry = opened(*WORKERS)
    took(registry, D2, 1)
    for _ in range(6):
        took(registry, D1, 1)
    assert local(registry, 42, held(d1=32), 10) == (D1, LocalPrefill.SHORT), "2 * 1 + 4 requests"
    took(registry, D1, 1)
    route = handoff(registry, 42, held(d1=32), 10)
    assert (route.decode.address, route.prefix) == (D2, hint(D1, 32))


def test_a_short_prompt_does_not_wait_for_a_worker_that_is_full() -> None:
    """D1 has it in its cache, and no room for 8 seconds; whatever else is free is better."""
    full = load(sequences=(0, 4, 0), places=4, sequence_s=32.0)
    registry = opened(*WORKERS)
    registry.heartbeat(D1, full, 0.0)
    registry.heartbeat(D2, load(places=4, queued=(0, 15, 0)), 0.0)
    assert local(registry, 30, {}, 64) == (D2, LocalPrefill.SHORT), "15 ms of others' prompts, and not 8 s"
    route = handoff(registry, 960, held(d1=944), 64)
    assert (route.decode.address, route.prefix) == (D2, hint(D1, 944))
    registry = opened(D1, D2, prefill=())
    registry.heartbeat(D1, full, 0.0)
    registry.heartbeat(D2, load(places=4, queued=(0, 40, 0)), 0.0)
    assert local(registry, 30, held(d1=16)) == (D2, LocalPrefill.COLOCATED)


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
        took(registry, D2, 1)
    assert local(registry, 100, held(d1=16, d2=32)) == (D1, LocalPrefill.COLOCATED)


# --- explained -------------------------------------------------------------------------------------------------------


def test_a_route_can_be_explained() -> None:
    registry = opened(*WORKERS)
    for address in WORKERS:
        registry.heartbeat(address, load(queued=(0, 10, 0), token_s=0.001, pulled_token_s=0.0), 0.0)
    told = handoff(registry, 100, held(p1=16, d2=32)).explain()
    assert told == {
        "route": "handoff",
        "prefill": P1,
        "decode": D2,
        "cached-tokens": "16",
        "expected-ttft-ms": "83.0",
        "prefix-from": D2,
        "prefix-tokens": "32",
    }
    route = Router(registry, local_prefill_tokens=200).choose(Ask(num_tokens=100), {})
    assert route is not None
    assert route.explain() == {"route": "short", "decode": D1, "cached-tokens": "0", "expected-ttft-ms": "110.0"}
