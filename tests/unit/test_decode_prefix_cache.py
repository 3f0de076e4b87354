"""The decode scheduler's prefix cache, and prompts that are computed in its batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decode_bench import EAGER, Bench, request, tokens

from common.contract.tiers import Tier
from common.scheduling.costs import Costs
from decode_worker.request import DecodeRequest
from decode_worker.step import Step

INTERACTIVE, STANDARD, BATCH = Tier


def chunks(step: Step) -> list[tuple[str, int, int]]:
    """(request, start, end) of each."""
    return [(chunk.prompt.request.work.request, chunk.start, chunk.end) for chunk in step.chunks]


def reservation(bench: Bench, subject: DecodeRequest) -> tuple[list[int], int]:
    """Blocks, and how many of them hold the right KV already."""
    bench.reserve(subject)
    granted = bench.pulling[subject.work.request]
    return granted.block_ids, granted.num_held


# --- what is shared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [8, 10])
def test_a_pull_shares_every_full_block_that_is_cached_and_allocates_the_rest(num_tokens: int) -> None:
    bench = Bench(memory_reserve=EAGER)
    table = list(bench.run(request("first", 8)).sequence.block_table)
    num_used = bench.pool.num_used
    blocks, num_held = reservation(bench, request("second", tokens("first", 8) + tokens("more", num_tokens - 8)))
    assert (blocks[:2], num_held) == (table[:2], 2)
    assert len(blocks) == -(-num_tokens // 4)
    assert bench.pool.num_used - num_used == len(blocks) - 2
    assert [bench.pool.ref_count(block) for block in blocks[:2]] == [2, 2]


@pytest.mark.parametrize(
    ("num_tokens", "first_chunk"),
    [pytest.param(10, 8, id="its own end"), pytest.param(8, 4, id="the last token is computed for its logits")],
)
def test_a_prompt_that_is_computed_here_begins_after_what_is_cached(num_tokens: int, first_chunk: int) -> None:
    bench = Bench(memory_reserve=EAGER)
    table = list(bench.run(request("first", 8)).sequence.block_table)
    second = request("second", tokens("first", 8) + tokens("more", num_tokens - 8), local=True)
    bench.reserve(second)
    step = bench.begin_step()
    assert chunks(step) == [("second", first_chunk, num_tokens)]
    num_shared = first_chunk // 4
    [chunk] = step.chunks
    assert chunk.prompt.block_table[:num_shared] == table[:num_shared]
    assert not set(chunk.prompt.block_table[num_shared:]) & set(table), "what is computed again is written elsewhere"
    bench.end_step(step)


def test_a_prompt_whose_tokens_are_scored_is_computed_whatever_is_cached() -> None:
    bench = Bench(memory_reserve=EAGER)
    table = list(bench.run(request("first", 8)).sequence.block_table)
    scored = request("second", tokens("first", 10), local=True)
    scored.work = replace(scored.work, prompt_logprobs=1)
    bench.reserve(scored)
    step = bench.begin_step()
    assert chunks(step) == [("second", 0, 10)]
    assert not set(step.chunks[0].prompt.block_table) & set(table)
    (chunk,) = step.slices()
    assert (chunk.scored, chunk.num_alternatives) == (tuple(tokens("first", 10)[1:]), 1)
    bench.end_step(step)


def test_only_the_common_beginning_is_shared() -> None:
    bench = Bench(memory_reserve=EAGER)
    bench.run(request("first", 16))
    text = tokens("first", 5) + tokens("other", 1) + tokens("first", 16)[6:]
    assert reservation(bench, request("second", text))[1] == 1


def test_what_is_cached_outlives_its_sequence() -> None:
    bench = Bench(memory_reserve=EAGER)
    first = request("first", 10)
    table = list(bench.run(first).sequence.block_table)
    bench.forget(first)
    assert bench.pool.num_used == 0
    blocks, num_held = reservation(bench, request("second", tokens("first", 10)))
    assert (blocks[:2], num_held) == (table[:2], 2)


def test_cached_blocks_that_are_shared_again_cost_room() -> None:
    """They are free as long as nobody uses them: six that are free do not hold four of these and three more."""
    bench = Bench(8, memory_reserve=EAGER)
    first = request("first", 16)
    bench.run(first)
    bench.forget(first)
    bench.reserve(request("blocker", 8))
    assert bench.pool.num_free == 6
    assert bench.reserve(request("too long", tokens("first", 16) + tokens("more", 12))) == []
    assert bench.reserve(request("fits", tokens("first", 16) + tokens("more", 8))) == ["fits"]


def test_hits_are_counted_in_tokens() -> None:
    bench = Bench(memory_reserve=EAGER)
    bench.run(request("first", 11))
    assert (bench.scheduler.entrance.num_prefix_queried, bench.scheduler.entrance.num_prefix_hit) == (11, 0)
    bench.reserve(request("pulled", tokens("first", 11)))
    assert (bench.scheduler.entrance.num_prefix_queried, bench.scheduler.entrance.num_prefix_hit) == (22, 8)
    bench.reserve(request("computed", tokens("first", 8), local=True))
    assert (bench.scheduler.entrance.num_prefix_queried, bench.scheduler.entrance.num_prefix_hit) == (30, 12)


def test_who_waits_is_not_counted_before_it_comes_in() -> None:
    bench = Bench(4)
    bench.reserve(request("blocker", 16))
    for _ in range(3):
        assert bench.reserve(request("waits", 8)) == []
    assert bench.scheduler.entrance.num_prefix_queried == 16


@pytest.mark.parametrize(("salt", "num_held"), [("mine", 2), ("yours", 0), ("", 0)])
def test_salts_do_not_share(salt: str, num_held: int) -> None:
    bench = Bench(memory_reserve=EAGER)
    bench.run(request("first", 8, salt="mine"))
    assert reservation(bench, request("second", tokens("first", 8), salt=salt))[1] == num_held


def test_tenants_and_tiers_do_share() -> None:
    bench = Bench(memory_reserve=EAGER)
    bench.run(request("first", 8, tenant="a", tier=BATCH))
    assert reservation(bench, request("second", tokens("first", 8), tenant="b"))[1] == 2


@pytest.mark.parametrize("num_shared", [0, 3, 4, 8, 15, 20, 24])
def test_what_a_prompt_that_waits_has_to_compute_is_what_was_not_cached_when_it_was_looked_up(num_shared: int) -> None:
    bench = Bench(8, memory_reserve=EAGER)
    first = request("first", 20)
    bench.run(first)
    bench.forget(first)
    bench.reserve(request("blocker", 12))
    assert (bench.pool.num_free, bench.pool.num_cached) == (5, 5)
    text = tokens("first", num_shared) + tokens("more", 28 - num_shared)
    waits = request("waits", text, local=True)
    assert bench.reserve(waits) == []
    assert bench.scheduler.num_uncomputed_of(waits) == 28 - min(num_shared, 20) // 4 * 4
    bench.evict()
    assert bench.reserve(request("later", 28)) == [], "and it is looked up again"
    assert bench.scheduler.num_uncomputed_of(waits) == 28


# --- what others compute meanwhile -------------------------------------------------------------------------------


def half_computed(
    num_tokens: int = 16, num_choices: int = 1, *, scored: bool = False
) -> tuple[Bench, Step, DecodeRequest, list[int]]:
    """A step computes "a" whole, 10 tokens, and 2 tokens of "b", which begins with the same 9; the blocks of "a"."""
    bench = Bench(64, memory_reserve=EAGER, token_budget=12)
    a = request("a", 10, local=True)
    b = request("b", tokens("a", 9) + tokens("more", num_tokens - 9), num_choices=num_choices, local=True)
    if scored:
        b.work = replace(b.work, prompt_logprobs=1)
    bench.reserve(a, b)
    step = bench.begin_step()
    assert chunks(step) == [("a", 0, 10), ("b", 0, 2)]
    return bench, step, b, list(bench.scheduler.prompts.of_requests[a].block_table)


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("num_tokens", [16, 17, 18])
def test_a_prompt_gets_blocks_that_another_one_has_filled_meanwhile_for_its_own(
    num_tokens: int, num_choices: int
) -> None:
    """What others hold, too, does not become free with it. The copies of its last block are its own."""
    bench, step, b, table = half_computed(num_tokens, num_choices)
    own = list(bench.scheduler.prompts.of_requests[b].block_table)
    num_free, num_copies = bench.pool.num_free, 0 if num_tokens == 16 else 1
    bench.end_step(step)
    assert bench.pool.num_free == num_free + 2
    held = [bench.scheduler._admission._forecast.held((b, choice))[1] for choice in range(num_choices)]
    assert sorted(held) == [num_copies] * (num_choices - 1) + [2 + num_copies]
    assert (b.num_cached, bench.scheduler.entrance.num_prefix_hit) == (6, 6)
    step = bench.begin_step()
    assert chunks(step) == [("b", 8, num_tokens)]
    assert list(step.chunks[0].prompt.block_table) == [*table[:2], *own[2:]]
    bench.end_step(step)
    assert [list(each.sequence.block_table[:2]) for each in b.choices] == [table[:2]] * num_choices


def test_a_prompt_that_finds_nothing_new_keeps_its_own_blocks() -> None:
    bench, step, b, _ = half_computed()
    bench.end_step(step)
    bench.scheduler.entrance.match_again()
    assert (b.num_cached, bench.scheduler.num_uncomputed_of(b)) == (6, 8)


def test_a_prompt_that_finds_blocks_is_due_as_soon_as_what_is_left_of_it() -> None:
    bench = Bench(128, memory_reserve=EAGER, token_budget=100, costs=Costs(prefill_s_per_token=0.01))
    bench.reserve(
        request("first", 100, local=True),
        request("alike", tokens("first", 100) + tokens("more", 4), local=True),
        request("long", 101, local=True),
    )
    assert chunks(bench.step()) == [("first", 0, 100)]
    assert [each.request.work.request for each in bench.scheduler.prompts] == ["alike", "long"]


def test_a_prompt_whose_tokens_are_scored_gets_no_block_of_others() -> None:
    bench, step, b, _ = half_computed(scored=True)
    bench.end_step(step)
    assert (b.num_cached, bench.scheduler.num_uncomputed_of(b)) == (0, 14)
    assert chunks(bench.step()) == [("b", 2, 13)], "beside the other one, which decodes"


def test_a_prompt_that_is_given_up_releases_the_blocks_that_it_has_found() -> None:
    bench, step, b, table = half_computed()
    bench.end_step(step)
    assert [bench.pool.ref_count(block) for block in table[:2]] == [2, 2]
    bench.forget(b)
    assert [bench.pool.ref_count(block) for block in table[:2]] == [1, 1]


# --- what is named, and when -------------------------------------------------------------------------------------


def test_a_pull_that_is_given_up_leaves_no_name() -> None:
    bench = Bench()
    subject = request("a", 8)
    bench.reserve(subject)
    bench.forget(subject)
    assert bench.pool.num_cached == 0


def test_a_pull_on_its_way_is_not_shared() -> None:
    bench = Bench(memory_reserve=EAGER)
    first, second = request("first", 8), request("second", tokens("first", 8))
    blocks, _ = reservation(bench, first)
    others, num_held = reservation(bench, second)
    assert num_held == 0
    assert not set(blocks) & set(others)
    bench.settle(second)
    bench.settle(first)
    assert bench.pool.num_cached == 2, "one name, one block"


def test_a_settled_pull_is_shared_at_once() -> None:
    bench = Bench(memory_reserve=EAGER)
    bench.enter(request("first", 8))
    assert reservation(bench, request("second", tokens("first", 8)))[1] == 2


def test_a_prompt_that_is_given_up_half_computed_leaves_no_name_of_what_is_not() -> None:
    bench = Bench(token_budget=8)
    subject = request("a", 16, local=True)
    bench.reserve(subject)
    bench.step()
    step = bench.begin_step()
    assert chunks(step) == [("a", 8, 16)]
    bench.forget(subject)
    assert len(bench.pool.match(subject.chain.hashes)) <= 2
    bench.end_step(step)
    assert len(bench.pool.match(subject.chain.hashes)) <= 2


def test_a_token_that_the_step_in_flight_computes_completes_no_block() -> None:
    bench = Bench()
    subject = request("a", 6)
    [choice] = bench.enter(subject)
    bench.step()
    step = bench.begin_step()
    assert choice.sequence.num_computed == 7, "the step computes the eighth"
    bench.forget(subject)
    assert bench.pool.num_cached == 1
    bench.end_step(step)


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_the_next_turn_finds_what_was_generated(end: str) -> None:
    bench = Bench(memory_reserve=EAGER)
    first = request("first", 6)
    choice = bench.run(first)
    bench.steps(7)
    table = list(choice.sequence.block_table)
    bench.step(ends=[choice] if end == "stop" else [])
    bench.forget(first)
    text = choice.sequence.token_ids
    assert len(text) == 16
    blocks, num_held = reservation(bench, request("second", [*text, *tokens("more", 5)]))
    assert (blocks[:3], num_held) == (table[:3], 3), "all but the last token had been computed"


def test_each_turn_of_a_conversation_computes_its_new_tokens_alone() -> None:
    bench = Bench(64)
    text: list[int] = []
    for turn in range(8):
        num_before = len(text)
        subject = request(f"turn {turn}", text + tokens(f"question {turn}", 7), max_tokens=9, local=True)
        bench.reserve(subject)
        num_computed = 0
        while not subject.finished:
            num_computed += sum(end - start for _, start, end in chunks(bench.step()))
        # The last token of an answer was not computed when it ended, and the block that it is in is computed again.
        assert num_computed == 7 + (num_before - (num_before - 1) // 4 * 4 if turn else 0)
        assert num_computed <= 7 + 4
        text = list(subject.choices[0].sequence.token_ids)
    assert len(text) == 8 * 16


# --- prompts that are computed here ------------------------------------------------------------------------------


def test_a_prompt_rides_with_the_decodes_in_small_chunks() -> None:
    """1,024 tokens are 896 that decode and 128 of prompts; here it is 8, 5 and 3."""
    bench = Bench(64, memory_reserve=EAGER, token_budget=8, prefill_tokens=3)
    running = [bench.run(request(f"r{number}", 2)) for number in range(5)]
    bench.reserve(request("a", 7, local=True))
    for expected in ([("a", 0, 3)], [("a", 3, 6)], [("a", 6, 7)]):
        step = bench.step()
        assert step.decodes == running
        assert chunks(step) == expected
    assert len(bench.step().decodes) == 6


def test_a_prompt_gets_no_more_than_the_decodes_leave() -> None:
    bench = Bench(64, memory_reserve=EAGER, token_budget=8, prefill_tokens=5)
    for number in range(6):
        bench.run(request(f"r{number}", 2))
    bench.reserve(request("a", 7, local=True))
    assert chunks(bench.step()) == [("a", 0, 2)]


def test_prompts_use_the_whole_budget_when_nothing_decodes() -> None:
    bench = Bench(64, memory_reserve=EAGER, token_budget=16, prefill_tokens=2)
    bench.reserve(request("a", 13, local=True), request("b", 20, local=True))
    assert chunks(bench.step()) == [("a", 0, 13), ("b", 0, 3)]


def test_with_prefill_priority_prompts_are_computed_before_anything_decodes() -> None:
    bench = Bench(64, memory_reserve=EAGER, token_budget=8, prefill_tokens=1, prefill_priority=True)
    runs = bench.run(request("runs", 4))
    bench.reserve(request("a", 20, local=True))
    for expected in ([("a", 0, 8)], [("a", 8, 16)], [("a", 16, 20)]):
        step = bench.step()
        assert step.decodes == []
        assert chunks(step) == expected
    step = bench.step()
    assert step.decodes[0] is runs
    assert len(step.decodes) == 2


def test_steps_of_prompts_alone_do_not_age_those_who_wait_for_them() -> None:
    """With prefill priority a sequence grows when it decodes, and its next block is there then."""
    bench = Bench(64, memory_reserve=EAGER, token_budget=8, prefill_priority=True)
    runs = bench.run(request("runs", 3))
    bench.reserve(request("a", 48, local=True))
    bench.steps(6)
    assert runs.sequence.num_tokens == 5
    for _ in range(12):
        step = bench.begin_step()
        assert runs in step.decodes
        assert len(runs.sequence.block_table) * 4 >= runs.sequence.num_tokens
        bench.end_step(step)


def test_a_short_prompt_overtakes_a_long_one_that_came_a_little_earlier() -> None:
    costs = Costs(prefill_s_per_token=0.01)
    bench = Bench(64, memory_reserve=EAGER, token_budget=16, costs=costs)
    long, short = request("long", 100, local=True, arrived=0.0), request("short", 10, local=True, arrived=0.5)
    late = request("late", 10, local=True, arrived=1.5)
    bench.reserve(long, short, late)
    assert chunks(bench.step()) == [("short", 0, 10), ("long", 0, 6)]
    assert chunks(bench.step()) == [("long", 6, 21)], "one that came much later does not"


def test_the_cost_of_a_prompt_is_its_uncached_tokens() -> None:
    bench = Bench(64, memory_reserve=EAGER, token_budget=16, costs=Costs(prefill_s_per_token=0.01))
    first = request("first", 100)
    bench.run(first)
    bench.forget(first)
    cached = request("cached", tokens("first", 100) + tokens("more", 4), local=True, arrived=0.1)
    bench.reserve(request("fresh", 20, local=True), cached)
    assert chunks(bench.step()) == [("cached", 100, 104), ("fresh", 0, 12)]


def test_a_higher_tier_is_computed_first() -> None:
    bench = Bench(64, memory_reserve=EAGER, token_budget=8)
    bench.reserve(request("batch", 8, tier=BATCH, local=True))
    bench.reserve(request("vip", 8, tier=INTERACTIVE, local=True, arrived=5.0))
    assert chunks(bench.step()) == [("vip", 0, 8)]


def test_a_chunk_of_a_request_that_was_given_up_counts_no_more() -> None:
    bench = Bench(token_budget=8)
    subject = request("a", 8, local=True)
    bench.reserve(subject)
    step = bench.begin_step()
    bench.forget(subject)
    assert bench.scheduler.chunks_done(step.chunks) == []
    assert len(bench.scheduler.prompts) == 0
    bench.pool.step_finished(1)
    assert bench.pool.num_free == bench.pool.num_blocks


def test_what_is_computed_here_goes_on_like_anything_else() -> None:
    bench = Bench(memory_reserve=EAGER)
    subject = request("a", 6, num_choices=2, local=True)
    bench.reserve(subject)
    assert (len(bench.scheduler.prompts), bench.scheduler.num_uncomputed_of(subject)) == (1, 6)
    bench.step()
    one, other = subject.choices
    step = bench.step()
    assert step.decodes == [one, other]
    assert step.copies == [(one.sequence.block_table[1], other.sequence.block_table[1])]
    assert one.sequence.token_ids == other.sequence.token_ids == [*subject.work.token_ids, 99, 7]
    assert reservation(bench, request("b", tokens("a", 8)))[1] == 1
