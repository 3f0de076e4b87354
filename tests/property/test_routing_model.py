"""The router against a scan that looks at one worker after the other (`full_scan`), whatever has happened to them."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import full_scan
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from common.contract.errors import FingerprintMismatchError
from common.contract.ids import Incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.session import Heartbeat, Phase, Profile, Role, Welcome
from common.contract.tiers import Target, Tier
from gateway.dispatch.ask import Ask
from gateway.dispatch.router import Router
from gateway.workers.discovery import Endpoint
from gateway.workers.load_table import LoadTable
from gateway.workers.registry import Registry
from gateway.workers.worker_life import WorkerLife
from gateway.workers.worker_view import Given, WorkerView

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
OLD = Fingerprint(config_hash="c", weights_hash="old", layout=LAYOUT)
NEW = replace(OLD, weights_hash="new")
MISFIT = replace(OLD, config_hash="another")
PREFILL = tuple(f"p{number}:1" for number in (0, 10, 2, 3))
DECODE = tuple(f"d{number}:1" for number in (4, 0, 10, 2, 3))
EXTRA = "d7:1"
ROLES = dict.fromkeys(PREFILL, Role.PREFILL) | dict.fromkeys((*DECODE, EXTRA), Role.DECODE)
STALL_S = 1.0
TARGETS = {
    Tier.INTERACTIVE: Target(ttft_s=0.4, itl_s=0.1),
    Tier.STANDARD: Target(ttft_s=1.0, itl_s=0.2),
    Tier.BATCH: Target(ttft_s=5.0),
}

addresses = st.sampled_from(tuple(ROLES))
tiers = st.sampled_from(Tier)
few = st.sampled_from((0, 0, 1, 2, 3, 7))
by_tier = st.tuples(few, few, few)
tokens = st.sampled_from((0, 16, 32, 100, 1000, 5000))
loads = st.builds(
    Heartbeat,
    number=st.just(1),
    steps=st.integers(0, 2),
    running=st.integers(0, 1),
    waiting=st.just(0),
    blocks_used=st.integers(0, 40),
    blocks_total=st.sampled_from((0, 16, 40)),
    phase=st.sampled_from((Phase.SERVING, Phase.SERVING, Phase.SERVING, Phase.DRAINING)),
    queued_tokens=st.tuples(tokens, tokens, tokens),
    sequences=by_tier,
    places=st.sampled_from((0, 1, 2, 4, 8)),
    token_s=st.sampled_from((0.0, 1e-4, 1.05e-4, 1.2e-4, 1e-3, 0.1)),
    pulled_token_s=st.sampled_from((0.0, 1e-5, 1e-3, 1.0)),
    sequence_s=st.sampled_from((0.0, 0.5, 3.0, 10.0)),
    itl_s=st.sampled_from((0.0, 0.1, 0.15, 0.5)),
    received=st.integers(0, 30),
)
asks = st.builds(
    Ask,
    num_tokens=st.sampled_from((1, 17, 100, 1001, 6000)),
    tier=tiers,
    num_choices=st.sampled_from((1, 1, 1, 2, 5, 16)),
    most_tokens=st.sampled_from((0, 100, 1001, 10_000)),
    least_wait=st.booleans(),
)


class RoutingMachine(RuleBasedStateMachine):
    """Everything that happens to workers, in any order, and requests in between."""

    @initialize(
        colocated=st.booleans(),
        local_prefill_tokens=st.sampled_from((0, 16, 64, 1000)),
        profiles=st.sampled_from(({}, {DECODE[0]: Profile.LATENCY})),
    )
    def begin(self, colocated: bool, local_prefill_tokens: int, profiles: dict[str, Profile]) -> None:
        self.profiles = profiles
        self.now = 0.0
        self.number = 0
        self.given: list[tuple[WorkerLife, Given]] = []
        self.local_prefill_tokens = local_prefill_tokens
        self.registry = Registry(() if colocated else PREFILL, DECODE, "c", stall_s=STALL_S)
        self.router = Router(self.registry, local_prefill_tokens=local_prefill_tokens, targets=TARGETS)
        for address in tuple(self.registry.workers):
            profile = self.profiles.get(address, Profile.THROUGHPUT)
            self.registry.opened(address, self.life(), self.welcome(ROLES[address], OLD, 10_000, profile), self.now)

    # --- what happens to workers ---------------------------------------------------------------------------------

    def life(self) -> Incarnation:
        self.number += 1
        return Incarnation(f"life-{self.number}")

    def welcome(self, role: Role, fingerprint: Fingerprint, max_sequence_tokens: int, profile: Profile) -> Welcome:
        return Welcome(
            role=role,
            fingerprint=fingerprint,
            max_sequence_tokens=max_sequence_tokens,
            transport="zmq",
            transport_metadata=b"",
            open_requests=(),
            profile=profile,
        )

    def worker(self, address: str) -> WorkerView | None:
        """The worker with a session at an address, if there is one."""
        worker = self.registry.workers.get(address)
        return None if worker is None or worker.incarnation is None else worker

    @rule(
        address=addresses,
        fingerprint=st.sampled_from((OLD, OLD, NEW, MISFIT)),
        holds=st.sampled_from((0, 100, 1001, 10_000)),
        again=st.booleans(),
        profile=st.sampled_from(Profile),
    )
    def open(self, address: str, fingerprint: Fingerprint, holds: int, again: bool, profile: Profile) -> None:
        """A session opens; with `again`, that of a process that had one before."""
        worker = self.registry.workers.get(address)
        if worker is not None:
            life = worker.last_incarnation if again and worker.last_incarnation is not None else self.life()
            says = self.welcome(ROLES[address], fingerprint, holds, profile)
            self.registry.lost(address, self.now)
            with contextlib.suppress(FingerprintMismatchError):
                self.registry.opened(address, life, says, self.now)

    @rule(address=addresses)
    def lose(self, address: str) -> None:
        if address in self.registry.workers:
            self.registry.lost(address, self.now)

    @rule(address=addresses, load=loads)
    def report(self, address: str, load: Heartbeat) -> None:
        if self.worker(address) is not None:
            self.registry.heartbeat(address, load, self.now)

    @rule(load=loads, same=st.booleans())
    def report_all(self, load: Heartbeat, same: bool) -> None:
        """Every worker reports the same load or, except for its blocks, about the same."""
        for number, address in enumerate(self.registry.workers):
            if self.worker(address) is not None:
                own = load if same else replace(load, blocks_used=load.blocks_used + number)
                self.registry.heartbeat(address, own, self.now)

    @rule(address=addresses, tier=tiers, num_tokens=tokens, num_sequences=few, num_blocks=few, times=st.integers(1, 6))
    def give(self, address: str, tier: Tier, num_tokens: int, num_sequences: int, num_blocks: int, times: int) -> None:
        worker = self.worker(address)
        if worker is None:
            return
        for _ in range(times):
            self.number += 1
            given = Given(
                number=self.number,
                tier=tier,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                num_blocks=num_blocks,
                at=self.now,
            )
            self.registry.took(address, given)
            self.given.append((worker.life, given))

    @rule(address=st.sampled_from(DECODE), load=loads, tier=tiers, more=st.integers(4, 6))
    def crowd(self, address: str, load: Heartbeat, tier: Tier, more: int) -> None:
        """All report the same load, and the one that holds the prompt has many requests that take nothing."""
        self.report_all(load=replace(load, phase=Phase.SERVING), same=True)
        worker = self.worker(address)
        if worker is not None:
            fewest = min(each.in_flight for each in self.registry.workers.values() if each.role is Role.DECODE)
            times = 2 * fewest + more - worker.in_flight
            self.give(address=address, tier=tier, num_tokens=0, num_sequences=0, num_blocks=0, times=times)
            self.compare(Ask(num_tokens=1001, tier=tier, now=self.now), {worker.life: 992})

    @rule(data=st.data(), confirmed=st.booleans())
    def leave(self, data: st.DataObject, confirmed: bool) -> None:
        if self.given:
            life, given = self.given.pop(data.draw(st.integers(0, len(self.given) - 1)))
            self.registry.left(life.address, life.incarnation, None if confirmed else given, self.now)

    @rule(address=addresses)
    def decline(self, address: str) -> None:
        if self.worker(address) is not None:
            self.registry.declined(address)

    @rule(address=addresses)
    def refuse(self, address: str) -> None:
        """A worker refuses this gateway, which has ended its session."""
        if address in self.registry.workers:
            self.registry.lost(address, self.now)
            self.registry.refuses(address, "full")

    @rule(address=addresses)
    def resync(self, address: str) -> None:
        if self.worker(address) is not None:
            self.registry.resynced(address)

    @rule(address=addresses)
    def break_connection(self, address: str) -> None:
        if self.worker(address) is not None:
            self.registry.broken(address, self.now)

    @rule(listed=st.sets(st.sampled_from(DECODE), min_size=3), serving=st.booleans())
    def list_anew(self, listed: set[str], serving: bool) -> None:
        self.registry.relist(Role.DECODE, {address: serving or address == min(listed) for address in listed})

    @rule(come=st.booleans())
    def come_or_go(self, come: bool) -> None:
        """A worker goes, and another one may come at its address."""
        if EXTRA in self.registry.workers:
            self.registry.remove(EXTRA)
        if come:
            self.registry.add(Role.DECODE, Endpoint(address=EXTRA))
            says = self.welcome(Role.DECODE, OLD, 10_000, Profile.LATENCY)
            with contextlib.suppress(FingerprintMismatchError):
                self.registry.opened(EXTRA, self.life(), says, self.now)

    @rule(source=st.sampled_from(PREFILL), readers=st.sets(st.sampled_from((*DECODE, EXTRA)), min_size=1), ask=asks)
    def fail_to_read(self, source: str, readers: set[str], ask: Ask) -> None:
        """Some decode workers cannot read from a prefill worker; a request comes."""
        unread = self.worker(source)
        if unread is None:
            return
        for reader in map(self.worker, sorted(readers)):
            if reader is not None:
                self.router.paths.failed(unread.life, reader.life, self.now)
        ask = ask._replace(now=self.now)
        if self.compare(ask, {}):
            self.compare_rebind(unread.life, ask, {})

    @rule(seconds=st.sampled_from((0.01, 0.1, 0.3, 0.6, 2.0, 11.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # --- the choice ----------------------------------------------------------------------------------------------

    def lives(self) -> list[WorkerLife]:
        """The workers, and one process that is over."""
        lives = [worker.life for worker in self.registry.workers.values() if worker.incarnation is not None]
        return [*lives, WorkerLife(DECODE[0], Incarnation("over"))]

    def some_lives(self, data: st.DataObject) -> frozenset[WorkerLife]:
        """A few of them."""
        return frozenset(data.draw(st.lists(st.sampled_from(self.lives()), max_size=4)))

    @rule(data=st.data(), ask=asks, fingerprint=st.sampled_from((None, None, OLD, NEW)), admitted=st.booleans())
    def choose(self, data: st.DataObject, ask: Ask, fingerprint: Fingerprint | None, admitted: bool) -> None:
        ask = ask._replace(now=self.now, fingerprint=fingerprint, admitted=admitted)
        if data.draw(st.booleans()):
            avoid, beside, too_small = (self.some_lives(data) for _ in range(3))
            ask = ask._replace(avoid=avoid, beside=beside, too_small=too_small)
        held = st.sampled_from([num for num in (16, 32, 96, 992) if num < ask.num_tokens] or [0])
        cached = {life: data.draw(held) for life in sorted(self.some_lives(data), key=str)}
        if self.compare(ask, cached):
            self.compare_rebind(data.draw(st.sampled_from(self.lives())), ask, cached)

    def compare_rebind(self, source: WorkerLife, ask: Ask, cached: dict[WorkerLife, int]) -> None:
        """Choose a decode worker for an offer of `source`, in both ways."""
        expected = full_scan.rebind(source, self.registry, ask, cached, self.router.paths, TARGETS)
        assert self.router.rebind(source, ask, cached) == expected

    def compare(self, ask: Ask, cached: dict[WorkerLife, int]) -> bool:
        """Choose, in both ways. Returns whether there are workers to choose from."""
        takers = self.router.takers(ask)
        could = full_scan.able(ask, full_scan.usable(self.registry, Role.DECODE))
        assert self.registry.table.views(takers) == could
        assert self.router.has_room(ask, takers) == full_scan.has_room(could, ask)
        assert self.router.hope(ask) == full_scan.hope(self.registry, ask)
        if could:
            assert self.router.taker(takers, ask, cached) is full_scan.taker(could, ask, cached, TARGETS)
            assert self.router.choose(ask, cached) == full_scan.choose(
                self.registry,
                ask,
                cached,
                self.router.paths,
                local_prefill_tokens=self.local_prefill_tokens,
                targets=TARGETS,
            )
        return bool(could)

    @rule()
    def look(self) -> None:
        """The table is that of the workers, and so are the lists of usable ones, and until when others come back."""
        for role in (Role.PREFILL, Role.DECODE):
            assert self.registry.usable(role) == full_scan.usable(self.registry, role)
        assert self.registry.coming_back_until() == full_scan.coming_back_until(self.registry)
        fresh = LoadTable(self.registry.workers.values())
        assert self.registry.table.workers == fresh.workers
        np.testing.assert_array_equal(self.registry.table._cells, fresh._cells)
        assert self.registry.table.broken == fresh.broken

    def teardown(self) -> None:
        self.look()


RoutingMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestRouting = RoutingMachine.TestCase
