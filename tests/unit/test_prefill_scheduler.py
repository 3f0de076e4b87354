"""Chunked prefill: order, budget, blocks, and what becomes of a request that leaves early."""

from __future__ import annotations

import pytest

from common.contract.ids import Incarnation, RequestId
from common.contract.messages import Prefill
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from prefill_worker.scheduler import PrefillRequest, PrefillScheduler

BLOCK_SIZE = 4
GATEWAY = Incarnation("g")


def request(name: str, num_tokens: int, attempt: int = 1) -> PrefillRequest:
    work = Prefill(
        request=RequestId(name),
        attempt=attempt,
        token_ids=tuple(range(num_tokens)),
        prompt_len=num_tokens,
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        budget_s=1.0,
    )
    return PrefillRequest(work, GATEWAY, deadline=1.0)


class Bench:
    """A scheduler and its pool; leases do not hold anything here."""

    def __init__(self, num_blocks: int = 16, chunk_size: int = 8, token_budget: int = 12, max_waiting: int = 4) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = PrefillScheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            chunk_size=chunk_size,
            token_budget=token_budget,
            max_waiting=max_waiting,
        )

    def add(self, *requests: PrefillRequest) -> list[PrefillRequest]:
        for each in requests:
            self.scheduler.add(each)
        return self.scheduler.admit()

    def step(self) -> list[tuple[str, int, int]]:
        """One step from beginning to end: (request, start, end) of its chunks."""
        chunks = self.scheduler.schedule()
        self.scheduler.step_done(chunks)
        self.scheduler.check_invariants()
        self.pool.check_invariants()
        return [(chunk.request.key.request, chunk.start, chunk.end) for chunk in chunks]


def test_a_prompt_is_computed_chunk_by_chunk() -> None:
    bench = Bench()
    prompt = request("a", 19)
    assert bench.add(prompt) == [prompt]
    assert len(prompt.block_table) == 5
    assert bench.scheduler.num_uncomputed == 19
    assert bench.step() == [("a", 0, 8)]
    assert bench.step() == [("a", 8, 16)]
    [last] = bench.scheduler.schedule()
    assert last.last
    assert bench.step() == [("a", 16, 19)]
    assert bench.step() == []
    assert (bench.scheduler.num_running, bench.scheduler.num_uncomputed, bench.pool.num_used) == (0, 0, 0)


def test_prompts_share_a_step_in_order_within_the_budget() -> None:
    bench = Bench()
    bench.add(request("a", 10), request("b", 3), request("c", 9))
    assert bench.step() == [("a", 0, 8), ("b", 0, 3), ("c", 0, 1)]
    assert bench.step() == [("a", 8, 10), ("c", 1, 9)]


def test_the_first_of_two_long_prompts_is_not_slowed_down() -> None:
    bench = Bench(num_blocks=64, chunk_size=8, token_budget=8)
    bench.add(request("a", 16), request("b", 16))
    assert [bench.step() for _ in range(4)] == [[("a", 0, 8)], [("a", 8, 16)], [("b", 0, 8)], [("b", 8, 16)]]


def test_a_short_prompt_behind_a_long_one_shares_its_steps() -> None:
    bench = Bench(num_blocks=64, chunk_size=8, token_budget=12)
    bench.add(request("long", 100), request("short", 4))
    assert bench.step() == [("long", 0, 8), ("short", 0, 4)]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_prompt_gets_every_block_at_once(num_tokens: int, num_blocks: int) -> None:
    bench = Bench()
    prompt = request("a", num_tokens)
    bench.add(prompt)
    assert len(prompt.block_table) == bench.scheduler.blocks_for(prompt) == num_blocks
    assert bench.pool.num_used == num_blocks


def test_a_prompt_that_does_not_fit_now_waits_and_nobody_overtakes_it() -> None:
    bench = Bench(num_blocks=4, token_budget=100, chunk_size=100)
    first, big, small = request("first", 8), request("big", 12), request("small", 1)
    assert bench.add(first, big, small) == [first]
    assert bench.scheduler.blocks_missing() == 1
    assert bench.scheduler.num_waiting == 2
    bench.step()
    assert bench.scheduler.blocks_missing() == 0
    assert bench.scheduler.admit() == [big, small]
    assert bench.scheduler.blocks_missing() == 0


def test_blocks_in_limbo_are_not_handed_out() -> None:
    bench = Bench(num_blocks=2)
    first, second = request("first", 8), request("second", 8)
    bench.add(first)
    step = bench.pool.step_started()
    bench.scheduler.schedule()
    bench.scheduler.remove(first)
    assert bench.add(second) == []
    assert bench.scheduler.blocks_missing() == 2
    bench.pool.step_finished(step)
    assert bench.scheduler.admit() == [second]


def test_one_waiting_request_too_many_is_the_caller_s_to_refuse() -> None:
    bench = Bench(num_blocks=1, max_waiting=2)
    bench.add(request("running", 1))
    assert not bench.scheduler.full
    bench.add(request("a", 1), request("b", 1))
    assert bench.scheduler.full
    with pytest.raises(AssertionError):
        bench.scheduler.add(request("c", 1))


def test_what_can_never_fit_is_the_caller_s_to_refuse() -> None:
    with pytest.raises(AssertionError):
        Bench(num_blocks=2).scheduler.add(request("a", 9))


@pytest.mark.parametrize("when", ["waiting", "running", "in a step", "half done"])
def test_a_request_that_is_removed_gives_everything_back(when: str) -> None:
    bench = Bench(num_blocks=4)
    other = request("other", 8)
    prompt = request("a", 16)
    if when == "waiting":
        bench.add(other)
    bench.add(prompt)
    assert bool(prompt.block_table) == (when != "waiting")
    if when == "half done":
        bench.step()
    chunks = bench.scheduler.schedule()
    bench.scheduler.remove(prompt)
    if when != "waiting":
        assert bench.scheduler.step_done(chunks) == []
    assert bench.scheduler.get(prompt.key.request) is None
    assert prompt not in bench.scheduler.requests()
    assert bench.pool.num_used == (2 if when == "waiting" else 0)
    bench.scheduler.check_invariants()
    bench.pool.check_invariants()


def test_a_newer_attempt_is_not_taken_for_the_one_in_the_step() -> None:
    bench = Bench()
    old, new = request("a", 16, attempt=1), request("a", 16, attempt=2)
    bench.add(old)
    chunks = bench.scheduler.schedule()
    bench.scheduler.remove(old)
    bench.add(new)
    assert bench.scheduler.step_done(chunks) == []
    assert new.num_computed == 0
    assert bench.step() == [("a", 0, 8)]


def test_finished_chunks_are_told_apart_from_abandoned_ones() -> None:
    bench = Bench()
    gone, stays = request("gone", 4), request("stays", 4)
    bench.add(gone, stays)
    chunks = bench.scheduler.schedule()
    bench.scheduler.remove(gone)
    assert [chunk.request for chunk in bench.scheduler.step_done(chunks)] == [stays]


def test_the_lease_keeps_the_blocks_of_a_prompt_that_is_done() -> None:
    bench = Bench()
    prompt = request("a", 8)
    bench.add(prompt)
    leased = tuple(prompt.block_table)
    bench.pool.share(leased)
    bench.step()
    assert bench.pool.num_used == 2
    bench.pool.release(leased)
    assert bench.pool.num_used == 0


def test_it_is_known_what_is_here() -> None:
    bench = Bench(num_blocks=2)
    running, waiting = request("running", 8), request("waiting", 8)
    bench.add(running, waiting)
    assert bench.scheduler.get(RequestId("running")) is running
    assert bench.scheduler.get(RequestId("waiting")) is waiting
    assert bench.scheduler.get(RequestId("other")) is None
    assert bench.scheduler.requests() == [waiting, running]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
