"""Who decodes in which step: continuous batching beside the static kind, on one trace, step by step."""

from __future__ import annotations

from benchmarks.baselines import BatchAtATime
from benchmarks.driver import Arrival, Driver, Modelled, Story, Timing
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from decode_worker.policy import Policy
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step

BATCH = 4
LENGTHS = (5, 200, 3, 150)
"""Tokens that each of the first four generates here, after the first token, which came with its prompt."""
MORE = (7, 11)
"""Of those that wait behind them, over and over."""


def run(lengths: tuple[int, ...], *, static: bool) -> tuple[list[Story], list[list[int]]]:
    """The stories, and for each step the requests that got a token in it."""
    policy = Policy(block_size=16, max_num_seqs=BATCH, max_sequence_tokens=1024)
    pool = BlockPool(1024)
    scheduler = DecodeScheduler(pool, policy, Costs())
    timeline: list[list[int]] = []

    def note(driver: Driver, step: Step) -> None:
        timeline.append(sorted(int(generation.request.work.request[1:]) for generation in step.decodes))

    driver = Driver(
        pool,
        BatchAtATime(scheduler, BATCH) if static else scheduler,
        Modelled(Timing()),
        block_size=16,
        max_sequence_tokens=1024,
        after_step=note,
    )
    arrivals = [
        Arrival(time_s=0.0, prompt=(1, 2, 3), num_output=length + 1, max_tokens=length + 1, handoff=True)
        for length in lengths
    ]
    return driver.run(arrivals), timeline


def test_static_batching_uses_less_than_half_of_its_slots() -> None:
    _, timeline = run(LENGTHS, static=True)
    assert len(timeline) == 200
    assert sum(map(len, timeline)) / (BATCH * len(timeline)) == 0.4475


def test_static_batching_lets_nobody_in_before_its_longest_has_ended() -> None:
    _, timeline = run(LENGTHS + MORE * 2, static=True)
    assert all(max(step) < BATCH for step in timeline[:200])
    assert timeline[200] == [4, 5, 6, 7]


def test_continuous_batching_fills_each_place_at_the_next_step() -> None:
    waiting = MORE * 40
    stories, timeline = run(LENGTHS + waiting, static=False)
    # Step by step: request 2 has its 3 tokens after step 3, request 0 its 5 after step 5, and so on.
    assert timeline[0] == timeline[2] == [0, 1, 2, 3]
    assert timeline[3] == timeline[4] == [0, 1, 3, 4]
    assert timeline[5] == [1, 3, 4, 5]
    assert timeline[9] == [1, 3, 4, 5]
    assert timeline[10] == [1, 3, 5, 6]
    # Requests 1 and 3 are there from the first to the last of their steps, without a pause.
    for request, length in ((1, 200), (3, 150)):
        assert [step for step, batch in enumerate(timeline) if request in batch] == list(range(length))
    # As long as anyone waits, no place is empty in any step: each is taken again at the step after it fell free.
    last_to_join = len(LENGTHS + waiting) - 1
    busy = next(step for step, batch in enumerate(timeline) if last_to_join in batch)
    assert all(len(batch) == BATCH for batch in timeline[: busy + 1])
    assert [len(story.token_ids) - 1 for story in stories] == list(LENGTHS + waiting)


def test_on_the_same_trace_continuous_batching_needs_fewer_steps() -> None:
    lengths = LENGTHS * 4
    _, static = run(lengths, static=True)
    _, continuous = run(lengths, static=False)
    assert sum(map(len, static)) == sum(map(len, continuous)) == sum(lengths)
    assert len(static) == 800
    assert len(continuous) < 0.6 * len(static)
