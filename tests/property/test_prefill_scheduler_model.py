"""Chunked prefill under random traffic: budget, order, progress, and every block accounted for and rightly filled.

Prompts begin alike, come from several tenants in several tiers, and end at any moment. Some wait for blocks that others
are about to fill. Leases keep blocks for a while, prefixes are fetched from elsewhere, sometimes by reads that nobody
waits for any more, and the engine takes its time; the next step may be planned, and begin, meanwhile.
A model of the device's memory holds, for every slot, all the tokens that its KV depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from next_times import next_deadline

from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.gateway import Prefill
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier, by_tier
from common.engine.block_pool import BlockPool
from common.scheduling.chunked_prefill import Chunk
from common.scheduling.costs import Costs
from common.scheduling.turns import MAX_PASSED
from prefill_worker.request import PrefillRequest
from prefill_worker.room import MOST_OF_POOL
from prefill_worker.scheduler import SHARED_STEP_S, STEPS_AHEAD, PrefillScheduler

BLOCK_SIZE = 3
NUM_BLOCKS = 16
MAX_WAITING = 12
AGEING_S = 20.0
DOCUMENTS = [tuple(range(base, base + NUM_BLOCKS * BLOCK_SIZE)) for base in (0, 1000)]
GARBAGE = (-1,)


class Traffic:
    """A prefill worker's scheduler, and all that happens around it."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.chunk_size = data.draw(st.integers(1, 16), label="chunk size")
        self.token_budget = data.draw(st.sampled_from([16, 24, 9, 3, 1]), label="token budget")
        self.token_s = data.draw(st.sampled_from([0.0, 0.01, 0.1]), label="seconds per token")
        self.pool = BlockPool(NUM_BLOCKS)
        self.scheduler = PrefillScheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            chunk_size=self.chunk_size,
            token_budget=self.token_budget,
            max_waiting=MAX_WAITING,
            ageing_s=AGEING_S,
            ttft_target_s=lambda tier: 1.0 + tier.rank,
            costs=Costs(prefill_s_per_token=self.token_s),
            expected_pull=self.expected_pull,
        )
        self.now = 0.0
        self.elsewhere: dict[RequestId, int] = {}
        """Leading tokens of prompts that another worker holds."""
        self.memory: list[list[tuple[int, ...]]] = [[GARBAGE] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.here: list[PrefillRequest] = []
        """Requests that have neither finished nor been removed."""
        self.leases: dict[RequestKey, tuple[PrefillRequest, list[int]]] = {}
        self.on_hold: dict[PrefillRequest, float] = {}
        """Requests whose prefix is being fetched, and when it is expected."""
        self.reads: list[list[int]] = []
        """Blocks that a read, abandoned but not ended, may still write to; it has a reference on each."""
        self.runs_ahead = data.draw(st.booleans(), label="runs ahead")
        self.in_flight: list[tuple[int, list[tuple[Chunk[PrefillRequest], list[int]]]]] = []
        """Steps, with the blocks of each chunk's prompt."""
        self.num_arrived = 0
        self.num_done = 0
        self.queried = 0
        self.hit = 0
        self.num_passed = 0
        self.num_missing = 0
        self.num_waits = 0

    def steps(self) -> list[Callable[[], None]]:
        steps = [self.admit, self.time_passes]
        steps += [self.arrive] * 4 if not self.scheduler.full() else []
        steps += [self.begin_step] * 8 if len(self.in_flight) <= self.runs_ahead else []
        steps += [self.end_step] * 8 if self.in_flight else []
        steps += [self.remove] if self.here else []
        steps += [self.settle] * 2 if self.leases else []
        steps += [self.resume, self.give_up] if self.on_hold else []
        steps += [self.end_read] if self.reads else []
        return steps

    # --- requests come and go ------------------------------------------------------------------------------------

    def arrive(self) -> None:
        draw = self.data.draw
        num_alike = draw(st.sampled_from([0, 2, 3, 6, 9, 10, 15, 30, 40]), label="tokens alike")
        num_own = draw(st.integers(num_alike == 0, 8), label="tokens of its own")
        first = 10_000 * (1 + self.num_arrived)
        tokens = DOCUMENTS[draw(st.integers(0, 1), label="document")][:num_alike] + tuple(range(first, first + num_own))
        work = Prefill(
            request=RequestId(f"r{self.num_arrived}"),
            attempt=1,
            token_ids=tokens,
            prompt_len=len(tokens),
            choices=(0,),
            sampling=SamplingParams(max_tokens=1),
            budget_s=1.0,
            tier=draw(st.sampled_from(list(Tier))),
            tenant=draw(st.sampled_from(["x", "y"])),
            cache_salt=draw(st.sampled_from(["", "", "salt"])),
        )
        self.elsewhere[work.request] = draw(st.sampled_from([0, 0, 6, 12, 30]), label="tokens elsewhere")
        budget_s = draw(st.sampled_from([1e6, 1e6, 30.0]))
        request = PrefillRequest(work, Incarnation("g"), arrived=self.now, deadline=self.now + budget_s)
        self.num_arrived += 1
        self.here.append(request)
        self.scheduler.add(request)

    def expected_pull(self, request: PrefillRequest, num_here: int, now: float) -> int:
        """As `PrefixPulls.expected`."""
        most = (len(request.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        num_there = min(self.elsewhere[request.key.request], most)
        return num_there if num_there > num_here and not request.prefix_tried else 0

    def admit(self) -> None:
        held = {tier: self.held_by(tier) for tier in MOST_OF_POOL}
        tiers = {request.tier for request, _ in self.holders()}
        first = self.first_that_nothing_keeps_waiting()
        admitted = self.scheduler.admit(self.now)
        assert first is None or first in admitted, "a prompt waits, and nobody knows why"
        asked = False
        for request in admitted:
            assert len(request.block_table) == self.scheduler.blocks_for(request)
            assert len(set(request.block_table)) == len(request.block_table)
            assert request.num_computed == request.num_cached < len(request.token_ids)
            self.check_contents(request, request.block_table, request.num_cached)
            if not request.prefix_tried:  # else it was admitted before
                self.queried += len(request.token_ids)
                self.hit += request.num_cached
            # A tier takes no more than its share, unless it had nothing.
            tables = set(request.block_table)
            for tier in MOST_OF_POOL:
                if request.tier.rank >= tier.rank:
                    held[tier] |= tables
                    alone = request.tier not in tiers
                    assert len(held[tier]) <= int(MOST_OF_POOL[tier] * NUM_BLOCKS) or alone
            tiers.add(request.tier)
            num_coming = self.expected_pull(request, request.num_computed, self.now)
            request.prefix_tried = True
            asked = asked or num_coming > 0
            if num_coming and self.data.draw(st.sampled_from([True, True, False]), label="fetch more"):
                expected_by = self.now + self.data.draw(st.sampled_from([0.5, 1e6]), label="seconds to fetch it")
                self.scheduler.hold(request, num_coming, expected_by)
                self.on_hold[request] = expected_by
            else:
                self.open_lease(request)
        assert all(request.num_passed <= MAX_PASSED for request in self.here)
        self.num_passed += any(request.num_passed for request in self.here)
        self.num_missing += self.scheduler.blocks_missing(self.now)
        self.num_waits += self.anybody_waits_for_another()
        if asked:
            self.admit()  # it was not known who is put on hold, and who is computed
        else:
            assert self.scheduler.admit(self.now) == [], "somebody was left out"

    def first_that_nothing_keeps_waiting(self) -> PrefillRequest | None:
        """The first waiting prompt, if there is room, the next steps have few tokens to compute, none of them for
        blocks that it needs, and it is not to be put on hold behind others."""
        computed = [request for request in self.here if request.block_table and request not in self.on_hold]
        num_left, num_held = (
            sum(min(len(each.token_ids) - each.num_computed, self.chunk_size) for each in prompts)
            for prompts in (computed, [each for each, until in self.on_hold.items() if self.now < until])
        )
        for request in self.scheduler.waiting.first(self.now):
            cached = request.cached(self.pool, BLOCK_SIZE)
            num_new = self.scheduler.blocks_for(request) - len(cached)
            may_hold = self.expected_pull(request, len(cached) * BLOCK_SIZE, self.now) > 0
            if (
                num_left < STEPS_AHEAD * self.token_budget
                and not any(request.num_alike(other, len(cached)) for other in computed)
                and not (may_hold and num_held >= STEPS_AHEAD * self.token_budget)
                and num_new + self.pool.num_unreferenced(cached) <= self.pool.num_free
                and self.scheduler.holdings.has_room(request.tier, cached, num_new)
            ):
                return request
        return None

    def anybody_waits_for_another(self) -> bool:
        """Whether a prompt lacks blocks that one with blocks is about to fill."""
        waiting, admitted = ([r for r in self.here if bool(r.block_table) is here] for here in (False, True))
        return any(
            each.num_alike(other, other.num_computed // BLOCK_SIZE)
            for each in waiting
            for other in admitted
            if len(each.cached(self.pool, BLOCK_SIZE)) == other.num_computed // BLOCK_SIZE
        )

    def open_lease(self, request: PrefillRequest) -> None:
        self.pool.share(request.block_table)
        self.leases[request.key] = request, list(request.block_table)

    def end_lease(self, key: RequestKey) -> None:
        _, blocks = self.leases.pop(key)
        self.pool.release(blocks)
        self.scheduler.holdings.end(key)

    def remove(self) -> None:
        """An abort: the lease ends too; what is being fetched arrives nevertheless."""
        self.end(self.data.draw(st.sampled_from(self.here)))

    def end(self, request: PrefillRequest) -> None:
        self.here.remove(request)
        if request in self.on_hold:
            del self.on_hold[request]
            self.abandon_read(request)
        self.scheduler.remove(request)
        if request.key in self.leases:
            self.end_lease(request.key)

    def settle(self) -> None:
        """A sink has all it wants of a prompt that is done."""
        done = [key for key, (request, _) in self.leases.items() if request not in self.here]
        if done:
            key = self.data.draw(st.sampled_from(done))
            request, blocks = self.leases[key]
            self.check_contents(request, blocks, len(request.token_ids))
            self.end_lease(key)

    def time_passes(self) -> None:
        self.now += self.data.draw(st.sampled_from([1.0, 10.0]))
        late = {request for request in self.here if request.deadline <= self.now}
        assert set(self.scheduler.expired(self.now)) == late
        for request in late:
            self.end(request)
        assert next_deadline(self.scheduler) == min((request.deadline for request in self.here), default=float("inf"))

    # --- prefixes from elsewhere ---------------------------------------------------------------------------------

    def fetched(self) -> PrefillRequest:
        """One that was on hold."""
        request = self.data.draw(st.sampled_from(list(self.on_hold)))
        del self.on_hold[request]
        return request

    def resume(self) -> None:
        request = self.fetched()
        most = (len(request.token_ids) - 1) // BLOCK_SIZE
        num_blocks = self.data.draw(st.integers(request.num_computed // BLOCK_SIZE, most))
        self.write(request, request.block_table, request.num_computed, num_blocks * BLOCK_SIZE)
        self.scheduler.resume(request, num_blocks * BLOCK_SIZE, self.now)
        self.open_lease(request)

    def give_up(self) -> None:
        request = self.fetched()
        if self.data.draw(st.booleans(), label="the read goes on"):
            self.abandon_read(request)
            self.scheduler.requeue(request)
        else:
            self.scheduler.resume(request, request.num_computed, self.now)
            self.open_lease(request)

    def abandon_read(self, request: PrefillRequest) -> None:
        blocks = request.block_table[request.num_computed // BLOCK_SIZE :]
        self.pool.share(blocks)
        self.reads.append(blocks)

    def end_read(self) -> None:
        blocks = self.reads.pop(self.data.draw(st.integers(0, len(self.reads) - 1)))
        for block in blocks:
            self.memory[block] = [GARBAGE] * BLOCK_SIZE
        self.pool.release(blocks)

    # --- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        scheduled = {chunk.prompt: chunk.end for _, chunks in self.in_flight for chunk, _ in chunks}
        runnable = [r for r in self.here if r.block_table and r not in self.on_hold]
        starts = {request: scheduled.get(request, request.num_computed) for request in runnable}
        runnable = [request for request in runnable if starts[request] < len(request.token_ids)]
        chunks = self.scheduler.schedule(self.now)
        sizes = [chunk.end - chunk.start for chunk in chunks]
        most = sum(min(self.chunk_size, len(request.token_ids) - starts[request]) for request in runnable)
        first = min(runnable, key=lambda request: request.urgency, default=None)
        alone = 0 if first is None else min(self.chunk_size, len(first.token_ids) - starts[first])
        budget = (
            min(self.token_budget, max(alone, int(SHARED_STEP_S / self.token_s))) if self.token_s else self.token_budget
        )
        assert sum(sizes) == min(budget, most), "over the budget, or idle while there is work"
        assert all(1 <= size <= self.chunk_size for size in sizes)
        assert len({chunk.prompt for chunk in chunks}) == len(chunks)
        assert [c.prompt.urgency for c in chunks] == sorted(c.prompt.urgency for c in chunks)
        for chunk in chunks:
            assert chunk.prompt in runnable
            assert chunk.start == starts[chunk.prompt]
            assert chunk.last == (chunk.end == len(chunk.prompt.token_ids))
        if not any(self.now - request.arrived > AGEING_S for request in runnable):
            served = {chunk.prompt: chunk.end - chunk.start for chunk in chunks}
            order = sorted(runnable, key=lambda request: request.urgency)[: len(chunks)]
            assert list(served) == order, "a more urgent one was left out"
        tables = [(chunk, list(chunk.prompt.block_table)) for chunk in chunks]
        self.in_flight.append((self.pool.step_started(), tables))

    def end_step(self) -> None:
        step, chunks = self.in_flight.pop(0)
        for chunk, table in chunks:
            self.check_contents(chunk.prompt, table, chunk.start)
            self.write(chunk.prompt, table, chunk.start, chunk.end)
        self.pool.step_finished(step)
        live = [chunk for chunk, _ in chunks if chunk.prompt in self.here]
        assert self.scheduler.step_done([chunk for chunk, _ in chunks]) == live
        for chunk in live:
            assert chunk.prompt.num_computed == chunk.end
            if chunk.last:
                self.here.remove(chunk.prompt)
                self.num_done += 1

    def write(self, request: PrefillRequest, table: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            slot = self.memory[table[position // BLOCK_SIZE]]
            slot[position % BLOCK_SIZE] = tuple(request.token_ids[: position + 1])

    def check_contents(self, request: PrefillRequest, table: list[int], num_tokens: int) -> None:
        for position in range(num_tokens):
            slot = self.memory[table[position // BLOCK_SIZE]]
            assert slot[position % BLOCK_SIZE] == tuple(request.token_ids[: position + 1]), "another's KV"

    # --- what must hold ------------------------------------------------------------------------------------------

    def holders(self) -> list[tuple[PrefillRequest, list[int]]]:
        """Requests with their blocks, each once: those that are here, and those whose lease is."""
        holders = {request.key: (request, request.block_table) for request in self.here if request.block_table}
        return list((holders | self.leases).values())

    def held_by(self, tier: Tier) -> set[int]:
        return {b for request, blocks in self.holders() if request.tier.rank >= tier.rank for b in blocks}

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.pool.check_invariants()
        running = [request for request in self.here if request.block_table]
        references = Counter(block for _, blocks in self.leases.values() for block in blocks)
        references.update(block for request in running for block in request.block_table)
        references.update(block for blocks in self.reads for block in blocks)
        assert all(self.pool.ref_count(block) == references[block] for block in range(NUM_BLOCKS))
        assert len(self.scheduler.running) + len(self.scheduler.on_hold) == len(running)
        assert len(self.scheduler.waiting) == len(self.here) - len(running)
        assert set(self.scheduler.holdings.keys()) == {request.key for request, _ in self.holders()}
        assert set(self.scheduler.requests()) == set(self.here)
        queued = by_tier((request.tier, request.num_uncomputed) for request in self.here)
        assert (self.scheduler.queued_tokens, self.scheduler.num_uncomputed) == (queued, sum(queued))
        assert (self.scheduler.num_prefix_queried, self.scheduler.num_prefix_hit) == (self.queried, self.hit)

    def drain(self) -> None:
        """Nobody comes or leaves any more, and what is fetched arrives: every prompt that is here gets computed."""
        bound = 2 * sum(len(request.token_ids) for request in self.here) + 2 * len(self.here) + 2
        for _ in range(bound):
            while self.in_flight:
                self.end_step()
            while self.reads:
                self.end_read()
            while self.on_hold:
                self.resume()
            for key in [key for key, (request, _) in self.leases.items() if request not in self.here]:
                self.end_lease(key)
            self.admit()
            if not self.here:
                break
            self.begin_step()
            self.check()
        assert not self.here, "a prompt starves"
        assert self.pool.num_free == NUM_BLOCKS, "a block was lost"
        assert not self.scheduler.holdings.keys()


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(40, 80))
def test_every_prompt_is_computed_in_order_within_the_budget(data: st.DataObject, num_events: int) -> None:
    traffic = Traffic(data)
    for _ in range(num_events):
        data.draw(st.sampled_from(traffic.steps()))()
        traffic.check()
    event(f"{min(5, traffic.num_done)} or more computed before the drain")
    event(f"prefix hits: {traffic.hit > 0}")
    event(f"passed: {traffic.num_passed > 0}")
    event(f"out of blocks: {traffic.num_missing > 0}")
    event(f"waiting for another's blocks: {traffic.num_waits > 0}")
    traffic.drain()
