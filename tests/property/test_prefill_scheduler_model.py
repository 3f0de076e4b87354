"""Chunked prefill under random traffic: budget, order, progress, and every block accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from common.contract.ids import Incarnation, RequestId
from common.contract.messages import Prefill
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from prefill_worker.scheduler import Chunk, PrefillRequest, PrefillScheduler

BLOCK_SIZE = 3
NUM_BLOCKS = 9
MAX_WAITING = 5


class Traffic:
    """A prefill worker's scheduler, with leases that keep blocks for a while and an engine that takes its time."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.chunk_size = data.draw(st.integers(1, 10), label="chunk size")
        self.token_budget = data.draw(st.integers(1, 14), label="token budget")
        self.pool = BlockPool(NUM_BLOCKS)
        self.scheduler = PrefillScheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            chunk_size=self.chunk_size,
            token_budget=self.token_budget,
            max_waiting=MAX_WAITING,
        )
        self.arrived: list[PrefillRequest] = []
        """In order of arrival; those that have neither finished nor been removed."""
        self.leases: dict[RequestId, tuple[int, ...]] = {}
        self.computed: dict[RequestId, int] = {}
        self.in_flight: tuple[int, list[Chunk]] | None = None
        self.num_done = 0

    def steps(self) -> list[Callable[[], None]]:
        steps = [self.admit]
        steps += [self.arrive] * 3 if not self.scheduler.full else []
        steps += [self.begin_step] * 5 if self.in_flight is None else [self.end_step] * 5
        steps += [self.remove] if self.arrived else []
        steps += [self.settle] * 2 if self.leases else []
        return steps

    def arrive(self) -> None:
        name = RequestId(f"r{len(self.computed)}")
        num_tokens = self.data.draw(st.integers(1, NUM_BLOCKS * BLOCK_SIZE))
        work = Prefill(
            request=name,
            attempt=1,
            token_ids=tuple(range(num_tokens)),
            prompt_len=num_tokens,
            choices=(0,),
            sampling=SamplingParams(max_tokens=1),
            budget_s=1.0,
        )
        request = PrefillRequest(work, Incarnation("g"), deadline=1.0)
        self.computed[name] = 0
        self.arrived.append(request)
        self.scheduler.add(request)

    def admit(self) -> None:
        waiting = [request for request in self.arrived if not request.block_table]
        admitted = self.scheduler.admit()
        assert admitted == waiting[: len(admitted)], "not first come, first served"
        for request in admitted:
            assert len(request.block_table) == -(-len(request.work.token_ids) // BLOCK_SIZE)
            assert all(self.pool.ref_count(block) == 1 for block in request.block_table), "a block of another"
            self.pool.share(request.block_table)
            self.leases[request.key.request] = tuple(request.block_table)
        left = waiting[len(admitted) :]
        missing = self.scheduler.blocks_for(left[0]) - self.pool.num_free if left else 0
        assert missing > 0 or not left, "a prompt that fits was left waiting"
        assert self.scheduler.blocks_missing() == missing

    def begin_step(self) -> None:
        chunks = self.scheduler.schedule()
        running = [request for request in self.arrived if request.block_table]
        assert bool(chunks) == bool(running), "the engine idles while there is work, or the reverse"
        assert sum(chunk.end - chunk.start for chunk in chunks) <= self.token_budget
        assert [chunk.request for chunk in chunks] == running[: len(chunks)], "not in order of arrival"
        left = self.token_budget
        for chunk in chunks:
            assert chunk.start == self.computed[chunk.request.key.request]
            uncomputed = len(chunk.request.work.token_ids) - chunk.start
            assert chunk.end - chunk.start == min(self.chunk_size, uncomputed, left), "less than there was room for"
            assert chunk.last == (chunk.end - chunk.start == uncomputed)
            left -= chunk.end - chunk.start
        assert left == 0 or len(chunks) == len(running), "room in the step, and prompts left out"
        self.in_flight = (self.pool.step_started(), chunks)

    def end_step(self) -> None:
        assert self.in_flight is not None
        (step, chunks), self.in_flight = self.in_flight, None
        self.pool.step_finished(step)
        here = [chunk for chunk in chunks if chunk.request in self.arrived]
        assert self.scheduler.step_done(chunks) == here
        for chunk in here:
            self.computed[chunk.request.key.request] = chunk.end
            if chunk.last:
                self.arrived.remove(chunk.request)
                self.num_done += 1

    def remove(self) -> None:
        """An abort or a deadline: the lease ends too."""
        request = self.data.draw(st.sampled_from(self.arrived))
        self.arrived.remove(request)
        self.scheduler.remove(request)
        self.pool.release(self.leases.pop(request.key.request, ()))

    def settle(self) -> None:
        """A sink has all it wants of a prompt that is done."""
        done = [name for name in self.leases if all(request.key.request != name for request in self.arrived)]
        if done:
            self.pool.release(self.leases.pop(self.data.draw(st.sampled_from(done))))

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.pool.check_invariants()
        running = {request.key.request: request for request in self.arrived if request.block_table}
        references = Counter(block for blocks in self.leases.values() for block in blocks)
        references.update(block for request in running.values() for block in request.block_table)
        assert all(self.pool.ref_count(block) == references[block] for block in range(NUM_BLOCKS))
        assert self.scheduler.num_running == len(running)
        assert self.scheduler.num_waiting == len(self.arrived) - len(running)
        assert sorted(map(id, self.scheduler.requests())) == sorted(map(id, self.arrived))
        uncomputed = sum(len(r.work.token_ids) - self.computed[r.key.request] for r in self.arrived)
        assert self.scheduler.num_uncomputed == uncomputed

    def drain(self) -> None:
        """Nobody leaves any more: every prompt that is here gets computed, in a bounded number of steps."""
        bound = 2 * self.scheduler.num_uncomputed + 2
        for _ in range(bound):
            if self.in_flight is not None:
                self.end_step()
            while self.leases and not any(request.block_table for request in self.arrived):
                before = len(self.leases)
                self.settle()
                assert len(self.leases) < before
            self.admit()
            if not self.arrived:
                break
            self.begin_step()
            self.check()
        assert not self.arrived, "a prompt starves"
        for blocks in self.leases.values():
            self.pool.release(blocks)
        assert self.pool.num_free == NUM_BLOCKS, "a block was lost"


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(5, 50))
def test_every_prompt_is_computed_in_order_within_the_budget(data: st.DataObject, num_events: int) -> None:
    traffic = Traffic(data)
    for _ in range(num_events):
        data.draw(st.sampled_from(traffic.steps()))()
        traffic.check()
    event(f"{min(3, traffic.num_done)} or more computed before the drain")
    traffic.drain()
