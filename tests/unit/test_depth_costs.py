"""What a token costs that is deep in its prompt: who pays for it, and who does not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from decode_bench import EAGER, Bench
from decode_bench import request as decode_request
from test_prefill_scheduler import BLOCK_SIZE, INTERACTIVE, STANDARD, TARGETS_S, request

from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.scheduling.chunked_prefill import Chunk, ChunkQueue
from common.scheduling.costs import DEEP_TOKENS, Costs
from decode_worker.request import LocalPrompt
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler

TOKEN_S, DEPTH_S = 19e-6, 1.47e-9
"""About those of a model of 8 billion weights on a GPU: a token costs eleven times as much at a depth of 131,072."""
LONG, CHUNK = 131_072, 2048


def took_s(num_tokens: int, depth_sum: int) -> float:
    return num_tokens * TOKEN_S + depth_sum * DEPTH_S


# --- what is learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.5, 1.0, 2.0])
def test_a_long_prompt_makes_no_token_look_dear_or_cheap(factor: float) -> None:
    """Whether the cost of depth was measured too low at start, or up to twice too high."""
    costs = Costs(prefill_s_per_token=TOKEN_S, depth_s=factor * DEPTH_S, step_tokens=CHUNK)
    for start in [*range(0, LONG, CHUNK)] * 3:
        costs.observe_prefill(CHUNK, took_s(CHUNK, CHUNK * start), CHUNK * start)
        assert TOKEN_S / 1.3 < costs.prompt_s_per_token < 1.3 * TOKEN_S, start
    assert costs.depth_s == pytest.approx(DEPTH_S, rel=0.05)


@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("start", [500, 3000, 8000, LONG])
def test_where_depths_are_alike_a_token_costs_half_as_much_as_it_does_or_more(start: int, factor: float) -> None:
    """The cost of depth cannot be told from the token's own. At start it is bounded, as `measure_costs` does."""
    depth_s = min(factor * DEPTH_S, TOKEN_S / DEEP_TOKENS)
    costs = Costs(prefill_s_per_token=TOKEN_S, depth_s=depth_s, step_tokens=CHUNK)
    for _ in range(500):
        costs.observe_prefill(CHUNK, took_s(CHUNK, CHUNK * start), CHUNK * start)
        assert 0.5 * TOKEN_S < costs.prompt_s_per_token < 1.3 * TOKEN_S
    assert costs.token_s(start) == pytest.approx(TOKEN_S + start * DEPTH_S, rel=0.01)


def test_steps_with_decodes_lower_a_cost_of_depth_that_they_refute() -> None:
    costs = Costs(prefill_s_per_token=TOKEN_S, depth_s=10 * DEPTH_S, decode_s=0.01)
    for _ in range(50):
        costs.observe_step(256, 8, 0.01 + took_s(256, 256 * LONG), 256 * LONG)
    assert costs.depth_s < 1.5 * DEPTH_S


def test_from_prompts_of_one_chunk_the_same_is_learnt_as_without_depth() -> None:
    costs, without = (Costs(prefill_s_per_token=1e-4, depth_s=depth_s) for depth_s in (1e-8, 0.0))
    for number in range(100):
        for each in (costs, without):
            each.observe_prefill(300, 0.02 + 0.001 * (number % 7))
    assert costs.prefill_s_per_token == without.prefill_s_per_token
    assert (costs.depth_s, without.depth_s) == (1e-8, 0.0)


def test_one_deep_step_that_was_interrupted_moves_the_estimates_a_little() -> None:
    costs = Costs(prefill_s_per_token=TOKEN_S, depth_s=DEPTH_S)
    costs.observe_prefill(CHUNK, 3600.0, CHUNK * LONG)
    assert costs.prefill_s_per_token < 1.31 * TOKEN_S
    assert costs.depth_s < 1.4 * DEPTH_S


def test_no_step_makes_a_token_free() -> None:
    costs = Costs(prefill_s_per_token=TOKEN_S, depth_s=100 * DEPTH_S)
    for _ in range(1000):
        costs.observe_prefill(CHUNK, 0.0, CHUNK * 2048)
    assert costs.prefill_s_per_token == pytest.approx(TOKEN_S / 16)
    assert costs.depth_s >= 0


def test_what_depth_costs_beside_decodes_is_not_put_down_to_them() -> None:
    costs = Costs(prefill_s_per_token=TOKEN_S, depth_s=DEPTH_S, decode_s=0.01)
    for _ in range(50):
        costs.observe_step(256, 8, 0.01 + took_s(256, 256 * LONG), 256 * LONG)
    assert costs.decode_s == pytest.approx(0.01)
    assert (costs.prefill_s_per_token, costs.depth_s) == (TOKEN_S, DEPTH_S)


def test_a_step_without_decodes_tells_what_depth_costs_in_a_decode_worker_too() -> None:
    costs = Costs(prefill_s_per_token=TOKEN_S)
    costs.observe_step(CHUNK, 0, took_s(CHUNK, CHUNK * LONG), CHUNK * LONG)
    assert costs.depth_s > 0


def test_a_sequence_that_is_computed_again_pays_for_its_depth() -> None:
    costs = Costs(prefill_s_per_token=TOKEN_S, depth_s=DEPTH_S)
    in_steps = sum(took_s(CHUNK, CHUNK * start) for start in range(0, LONG, CHUNK))
    assert costs.compute_s(0, LONG) == pytest.approx(in_steps, rel=0.02)
    num_cached = LONG // CHUNK // 2 * CHUNK
    in_steps = sum(took_s(CHUNK, CHUNK * start) for start in range(num_cached, LONG, CHUNK))
    assert costs.compute_s(num_cached, LONG) == pytest.approx(in_steps, rel=0.02)


@pytest.mark.parametrize(("depth_s", "num_tokens"), [(0.0, 10), (0.001, 9)])
def test_prompts_that_share_the_time_of_a_step_lose_no_token_by_rounding(depth_s: float, num_tokens: int) -> None:
    """At 10 ms a token, 7 tokens, 1, and 2 of the last prompt take 0.1 s; with the depth, the second takes 20 ms."""
    queue: ChunkQueue[PrefillRequest] = ChunkQueue(ageing_s=math.inf)
    for number, (num_computed, length) in enumerate([(0, 7), (10, 11), (0, 9)]):
        prompt = request(f"{number}", length)
        prompt.num_computed, prompt.urgency = num_computed, (0, 0.0, number)
        queue.add(prompt, 0.0)
    costs = Costs(prefill_s_per_token=0.01, depth_s=depth_s)
    assert queue.num_within(0.1, costs, 100, 100) == num_tokens


# --- a prefill worker on a modelled clock ----------------------------------------------------------------------------


def read_by(chunks: Sequence[Chunk[PrefillRequest]] | Sequence[Chunk[LocalPrompt]]) -> tuple[int, int]:
    """(tokens of the chunks, the sum of their depths)."""
    return sum(each.end - each.start for each in chunks), sum(each.start * (each.end - each.start) for each in chunks)


@pytest.mark.parametrize("num_long", [1, 2, 3])
@pytest.mark.parametrize("tier", [INTERACTIVE, STANDARD])
def test_short_prompts_do_not_wait_for_long_ones(num_long: int, tier: Tier) -> None:
    """A prompt of 100 tokens every second, beside long ones of the tier standard that came together. A long one that
    is due sooner than it can be done would keep those of its tier waiting to its end."""
    costs = Costs(prefill_s_per_token=TOKEN_S, depth_s=DEPTH_S, step_s=2e-3, step_tokens=CHUNK)
    made = PrefillScheduler(
        BlockPool((num_long + 1) * LONG // BLOCK_SIZE, prefix_cache=False),
        block_size=BLOCK_SIZE,
        chunk_size=CHUNK,
        token_budget=2 * CHUNK,
        max_waiting=100,
        ageing_s=math.inf,
        ttft_target_s=TARGETS_S.__getitem__,
        costs=costs,
    )
    now, num_short, waited_s = 0.0, 0, []
    for number in range(num_long):
        made.add(request(f"long {number}", LONG, deadline=math.inf))
    while made.num_uncomputed:
        while num_short <= now:
            arrived = float(num_short)
            made.add(request(f"short {num_short}", 100, tier=tier, arrived=arrived, deadline=math.inf))
            num_short += 1
        made.admit(now)
        chunks = made.schedule(now)
        step_s = costs.step_s + took_s(*read_by(chunks))
        assert step_s <= TARGETS_S[INTERACTIVE] / 2 + 1e-9, "who comes meanwhile waits for its end"
        now += step_s
        num_tokens, depth_sum = read_by(chunks)
        costs.observe_prefill(num_tokens, step_s, depth_sum)
        for chunk in made.step_done(chunks):
            if chunk.last:
                made.holdings.end(chunk.prompt.key)
                waited_s += [now - chunk.prompt.arrived] if len(chunk.prompt.token_ids) == 100 else []
        assert costs.prompt_s_per_token < 1.3 * TOKEN_S, "what gateways are told"
    assert num_short > 10 * num_long
    assert max(waited_s) < TARGETS_S[tier] + 0.5


def cached_turns(costs: Costs) -> tuple[PrefillScheduler, list[PrefillRequest]]:
    """Three prompts of 100 tokens after the same 1,000 cached ones."""
    made = PrefillScheduler(
        BlockPool(1000, prefix_cache=True),
        block_size=BLOCK_SIZE,
        chunk_size=200,
        token_budget=200,
        max_waiting=100,
        ageing_s=math.inf,
        ttft_target_s=TARGETS_S.__getitem__,
        costs=costs,
    )
    history = list(range(1000))
    made.add(request("history", 1000, token_ids=history))
    while made.num_uncomputed:
        made.admit(0.0)
        made.step_done(made.schedule(0.0))
    turns = [request(f"{number}", 1100, token_ids=[*history, *[10**5 + number] * 100]) for number in range(3)]
    for each in turns:
        made.add(each)
        made.admit(0.0)
    made.check_invariants()
    return made, turns


def test_tokens_after_cached_ones_count_by_their_depth() -> None:
    """In what others wait for, and in the metric by which the pool is scaled."""
    made, turns = cached_turns(Costs(prefill_s_per_token=1e-3, depth_s=1e-6, step_s=0.01, step_tokens=100))
    assert [each.num_uncomputed for each in turns] == [100] * 3
    each_s = 0.1 + 100 * 1049.5e-6
    assert made.queued_s == pytest.approx(3 * (each_s + 100 * 1e-4))
    admitted = [each.urgency[1] for each in turns if each in made.running]
    assert admitted == pytest.approx([TARGETS_S[STANDARD] + number * each_s for number in range(1, 1 + len(admitted))])
    assert len(admitted) > 1
    made.step_done(made.schedule(0.0))
    made.check_invariants()


def test_what_a_pull_did_not_bring_makes_a_prompt_due_later_by_its_depth_too() -> None:
    costs = Costs(prefill_s_per_token=1e-3, depth_s=1e-6)
    made, _ = cached_turns(costs)
    prompt = request("pulled", 1000)
    made.add(prompt)
    assert made.admit(0.0) == [prompt]
    rank, due_at_s, number = prompt.urgency
    made.hold(prompt, 800, expected_by=1.0)
    made.resume(prompt, 400, 100.0)
    assert prompt.urgency[::2] == (rank, number)
    assert prompt.urgency[1] == pytest.approx(due_at_s + costs.compute_s(400, 800))
    made.check_invariants()


@pytest.mark.parametrize(("now", "sizes"), [(1.9, [100]), (1.98, [100, 100])])
def test_whether_somebody_will_be_late_is_told_with_depth(now: float, sizes: list[int]) -> None:
    """All take 0.06 s, which were half as much without depth, and the first is due after 2.02 s."""
    made, _ = cached_turns(Costs(prefill_s_per_token=1e-4, depth_s=1e-7, step_s=1e-3))
    assert made.running.due_at == pytest.approx(2.02, abs=1e-3)
    assert [each.end - each.start for each in made.schedule(now)] == sizes


# --- a decode worker -------------------------------------------------------------------------------------------------

DEEP = Costs(decode_s=0.02, prefill_s_per_token=1e-4, depth_s=1e-6)
"""A token costs eleven times as much at a depth of 1,000."""


def decode_bench(*, decodes: bool) -> Bench:
    """A worker that computes a prompt of 4,000 tokens, perhaps while a sequence decodes."""
    bench = Bench(2048, costs=DEEP, memory_reserve=EAGER, token_budget=2048, ttft_target_s=TARGETS_S.get)
    if decodes:
        bench.enter(decode_request("decode", 8))
    bench.reserve(decode_request("long", 4000, local=True))
    return bench


def prompts_s(chunks: Sequence[Chunk[LocalPrompt]]) -> float:
    num_tokens, depth_sum = read_by(chunks)
    return num_tokens * DEEP.prefill_s_per_token + depth_sum * DEEP.depth_s


@pytest.mark.parametrize(("decodes", "most_s"), [(True, 0.14), (False, 0.4)])
def test_a_step_of_a_decode_worker_takes_as_long_deep_in_a_prompt_as_at_its_beginning(
    decodes: bool, most_s: float
) -> None:
    """Four fifths of a target, less what the decodes take; also with the end of a short prompt before the deep one."""
    bench = decode_bench(decodes=decodes)
    for number in range(6):
        step = bench.begin_step()
        assert sum(chunk.start > 1000 for chunk in step.chunks) == (number > 0)
        if number:
            assert 0.95 * most_s < prompts_s(step.chunks) <= most_s * (1 + 1e-9)
        bench.end_step(step)
        bench.reserve(decode_request(f"short {number}", 20, 1, tier=INTERACTIVE, local=True))


def test_a_prompt_is_due_after_the_time_that_its_depth_takes() -> None:
    (prompt,) = decode_bench(decodes=False).scheduler.prompts
    assert prompt.urgency[1] == pytest.approx(TARGETS_S[STANDARD] + 4000 * 1e-4 + 4000 * 3999 / 2 * 1e-6)


@pytest.mark.parametrize(("waited_s", "num_tokens"), [(1.8, 1400), (2.1, 1800)])
def test_a_deep_prompt_that_is_late_is_computed_as_fast_as_any(waited_s: float, num_tokens: int) -> None:
    """It takes 8.4 s, and is due 2 s after that. The target between tokens is 0.2 s, of which four fifths are used
    unless somebody is late."""
    bench = decode_bench(decodes=True)
    bench.now = waited_s
    (chunk,) = bench.begin_step().chunks
    assert chunk.end == pytest.approx(num_tokens, abs=1)
