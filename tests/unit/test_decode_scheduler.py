"""The decode scheduler: who is let in, how choices fork, what is lent, and that whoever leaves keeps nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.contract.messages import FinishReason
from common.contract.tiers import Tier
from decode_bench import EAGER, ENDLESS, Bench, request, tokens
from decode_worker.request import DecodeRequest, Stage
from decode_worker.scheduler import _LOOK_AHEAD
from decode_worker.step import Step

INTERACTIVE, STANDARD, BATCH = Tier

# --- how much a request needs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "num_choices", "num_output", "needed"),
    [
        pytest.param(4, 1, 1, 0, 1, id="the only token is never stored"),
        pytest.param(4, 2, 1, 0, 2, id="a second token stores the first"),
        pytest.param(4, 5, 1, 0, 2, id="the last token is never stored"),
        pytest.param(4, 6, 1, 0, 3, id="one token more"),
        pytest.param(1, 1, 1, 0, 1, id="a prompt of one token"),
        pytest.param(8, 5, 3, 0, 2 + 3, id="full blocks are shared, growth is not"),
        pytest.param(6, 3, 3, 0, 1 + 3, id="a partial block is copied for each choice"),
        pytest.param(6, 4, 3, 0, 1 + 3 * 2, id="a partial block and growth for each choice"),
        pytest.param(8, 6, 1, 4, 3, id="what the client has already is not generated again"),
    ],
)
def test_the_most_blocks_that_a_request_can_hold(
    num_tokens: int, max_tokens: int, num_choices: int, num_output: int, needed: int
) -> None:
    bench = Bench()
    subject = request("a", num_tokens, max_tokens, num_choices=num_choices, num_output=num_output)
    assert bench.scheduler.blocks_needed(subject.work) == needed
    bench.reserve(subject)
    most = bench.pool.num_used
    bench.settle(subject, *["length"] * num_choices if max_tokens == 1 else [])
    while bench.scheduler.num_running + bench.scheduler.num_waiting:
        step = bench.begin_step()
        most = max(most, bench.pool.num_used)
        bench.end_step(step)
    assert most == needed


def test_a_sequence_grows_no_longer_than_the_model_allows() -> None:
    bench = Bench(max_sequence_tokens=9)
    assert bench.scheduler.blocks_needed(request("a", 5, 500).work) == 2


def test_what_can_never_fit_is_known() -> None:
    bench = Bench(num_blocks=3)
    assert bench.scheduler.fits(request("a", 4, 9).work)
    assert not bench.scheduler.fits(request("a", 4, 10).work)


# --- admission: what fits now and later --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "num_output", "comes_in"),
    [
        # Two prompts of 4 blocks; each grows by a block in 4 steps; 16 blocks in all.
        ("pulling", 17, True),
        ("pulling", 18, False),
        ("computing", 17, True),
        ("computing", 18, False),
        ("ready", 17, True),
        ("ready", 18, False),
        # It has a fifth block, and a step less to go.
        ("running", 16, True),
        ("running", 17, False),
    ],
)
def test_what_fits_now_comes_in_only_if_it_fits_when_all_have_grown(
    stage: str, num_output: int, comes_in: bool
) -> None:
    bench = Bench()
    bench.profile(num_output)
    first = request("first", 16, local=stage == "computing")
    assert bench.reserve(first) == ([] if first.pull is None else ["first"])
    if stage in ("ready", "running"):
        bench.settle(first)
    if stage == "running":
        bench.step()
    assert bench.pool.num_free >= 4 + 2
    assert bench.reserve(request("second", 16)) == (["second"] if comes_in else [])


@pytest.mark.parametrize(
    ("reserve", "num_output", "comes_in"),
    [(0.25, 9, True), (0.25, 10, False), (0.0, 17, True), (-0.25, 25, True), (-0.25, 26, False)],
)
def test_a_share_of_the_cache_is_kept_from_new_requests(reserve: float, num_output: int, comes_in: bool) -> None:
    bench = Bench(memory_reserve=reserve)
    bench.profile(num_output)
    bench.reserve(request("first", 16))
    assert bench.reserve(request("second", 16)) == (["second"] if comes_in else [])


@pytest.mark.parametrize("num_tokens", [1, 16, 64])
def test_one_alone_always_comes_in(num_tokens: int) -> None:
    bench = Bench(memory_reserve=0.9)
    assert bench.scheduler.num_expected == 0
    assert bench.reserve(request("a", num_tokens)) == ["a"]
    assert bench.scheduler.num_expected > bench.pool.num_blocks


def test_who_does_not_fit_waits_and_comes_in_when_there_is_room() -> None:
    bench = Bench()
    [first] = bench.enter(request("first", 40, 10))
    second = request("second", 40, 10)
    assert bench.scheduler.fits(second.work)
    assert bench.reserve(second) == []
    assert bench.scheduler.num_waiting == 1 + 1
    bench.step()
    assert not bench.pulling
    bench.step(ends=[first])
    assert list(bench.pulling) == ["second"]
    assert bench.scheduler.num_waiting == 0


@pytest.mark.parametrize(
    ("num_tokens", "comes_in"), [(4, True), pytest.param(5, False, id="the other one is for who runs")]
)
def test_blocks_that_the_next_step_needs_are_not_given_away(num_tokens: int, comes_in: bool) -> None:
    bench = Bench(4, memory_reserve=EAGER)
    bench.run(request("a", 7))  # the ninth token, with the next step, is the first of a third block
    assert bench.pool.num_free == 2
    assert bench.reserve(request("b", num_tokens)) == (["b"] if comes_in else [])


def test_blocks_that_those_who_are_about_to_join_need_are_not_given_away() -> None:
    bench = Bench(4, memory_reserve=EAGER)
    bench.enter(request("a", 8))
    assert bench.pool.num_free == 2
    assert bench.reserve(request("b", 8)) == []
    assert bench.reserve(request("c", 4)) == ["c"]


@pytest.mark.parametrize("num_steps", [0, 63])
@pytest.mark.parametrize("how", ["pulled", "computed"])
def test_growth_that_has_not_begun_is_expected_however_long_that_takes(how: str, num_steps: int) -> None:
    """Time that passes does not bring a sequence nearer to its end before it has begun, nor does it grow."""
    bench = Bench(45, token_budget=1)
    bench.profile(41)
    bench.reserve(request("slow", 64, local=how == "computed"))
    bench.steps(num_steps)
    assert bench.scheduler.num_running == 0
    # 16 + 16 blocks, and 10 more for each.
    assert bench.reserve(request("other", 64)) == []


@pytest.mark.parametrize("how", ["pulled", "computed"])
def test_growth_is_expected_of_one_that_begins_later_than_it_was_to_end(how: str) -> None:
    bench = Bench(45, token_budget=1)
    bench.profile(41)
    slow = request("slow", 64, local=how == "computed")
    bench.reserve(slow)
    bench.steps(64)
    if how == "pulled":
        bench.settle(slow)
    assert bench.scheduler.num_waiting == 1
    assert bench.reserve(request("other", 64)) == []
    bench.steps(8)
    assert not bench.pulling


def test_a_sequence_that_is_kept_out_of_the_batch_does_not_grow_meanwhile() -> None:
    bench = Bench(50, max_num_seqs=1)
    for tier, num_output in zip(Tier, (161, 5, 81), strict=True):
        bench.profile(num_output, tier)
    bench.run(request("runs", 4, tier=INTERACTIVE))
    bench.enter(request("kept out", 4))
    bench.steps(99)
    assert bench.scheduler.num_running == 1
    # Just before the one that runs ends, in 60 steps: 41 blocks, and 15 of the newcomer's, which go on growing. What
    # the other one gives back by then is a block or two.
    assert bench.reserve(request("newcomer", 4, tier=BATCH)) == []


@pytest.mark.parametrize("when", ["during the step", "after it"])
def test_a_prefix_that_is_used_again_counts_as_in_use(when: str) -> None:
    """Blocks that wait for the step in flight are neither free nor used; those of them that are shared are used."""
    bench = Bench(14)
    bench.profile(9)
    first = request("first", 32)
    bench.run(first)
    bench.run(request("other", 4))
    step = bench.begin_step()
    bench.forget(first)
    assert (bench.pool.num_used, bench.pool.num_limbo) == (2, 9)
    if when == "after it":
        bench.end_step(step)
    # 2 blocks and 9, of which 8 are cached; and more than 3 that both will grow by.
    assert bench.reserve(request("follow-up", tokens("first", 32) + tokens("more", 4))) == []


# --- admission: whose turn it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_num_seqs", "places"), [(1, 3), (8, 10), (16, 20)])
def test_a_few_more_are_let_in_than_can_run(max_num_seqs: int, places: int) -> None:
    """So that a place that falls free is taken at the next step."""
    bench = Bench(100, max_num_seqs=max_num_seqs, memory_reserve=EAGER)
    assert len(bench.reserve(*(request(f"r{number}", 4) for number in range(50)))) == places


def test_more_choices_than_places_come_in_alone() -> None:
    bench = Bench(100, max_num_seqs=1, memory_reserve=EAGER)
    other, many = request("other", 4), request("many", 4, num_choices=5)
    assert bench.reserve(other, many) == ["other"]
    bench.forget(other)
    assert bench.reserve() == ["many"]


def test_the_higher_tier_comes_first() -> None:
    bench = Bench(1)
    requests = [request(str(tier), 4, tier=tier, arrived=-tier.rank) for tier in (BATCH, STANDARD, INTERACTIVE)]
    assert bench.reserve(*requests) == ["interactive"]
    bench.forget(requests[2])
    assert bench.reserve() == ["standard"]


def test_within_a_tier_the_earlier_one_comes_first() -> None:
    bench = Bench(1)
    assert bench.reserve(request("late", 4, arrived=2.0), request("early", 4, arrived=1.0)) == ["early"]


def test_a_request_that_does_not_fit_is_passed_sixteen_times_and_no_more() -> None:
    bench = Bench(10, memory_reserve=EAGER)
    blocker, big = request("blocker", 20), request("big", 24, arrived=1.0)
    assert bench.reserve(blocker, big) == ["blocker"]
    for number in range(16):
        bench.enter(request(f"small {number}", 1, arrived=2.0), "stop")
    assert bench.pool.num_free == 5
    assert bench.reserve(request("one too many", 1, arrived=2.0)) == []
    bench.forget(blocker)
    assert bench.reserve() == ["big", "one too many"]


@pytest.mark.parametrize(("num_ahead", "comes_in"), [(_LOOK_AHEAD - 1, True), (_LOOK_AHEAD, False)])
def test_so_many_are_tried_when_the_first_does_not_fit(num_ahead: int, comes_in: bool) -> None:
    bench = Bench(10, memory_reserve=EAGER)
    bench.reserve(request("blocker", 20))
    ahead = [request(f"big {number}", 24, arrived=1.0) for number in range(num_ahead)]
    assert bench.reserve(*ahead, request("small", 1, arrived=2.0)) == (["small"] if comes_in else [])


# --- the batch ---------------------------------------------------------------------------------------------------


def test_a_settled_sequence_joins_at_the_next_step() -> None:
    bench = Bench(memory_reserve=EAGER)
    [a] = bench.enter(request("a", 4))
    assert bench.step().decodes == [a]
    [b] = bench.enter(request("b", 4))
    assert bench.step().decodes == [a, b]


def test_a_freed_place_is_taken_at_the_next_step() -> None:
    bench = Bench(max_num_seqs=2, memory_reserve=EAGER)
    a, b, c, d = [bench.enter(request(name, 4))[0] for name in "abcd"]
    assert bench.step(ends=[a]).decodes == [a, b]
    assert bench.step(ends=[b, c]).decodes == [b, c]
    assert bench.step().decodes == [d]
    assert bench.scheduler.num_waiting == 0


def test_blocks_of_a_sequence_that_ends_during_a_step_wait_for_it() -> None:
    bench = Bench(num_blocks=2)
    first = request("first", 4)
    bench.enter(first)
    step = bench.begin_step()
    bench.forget(first)
    assert bench.reserve(request("second", 4)) == [], "the step in flight still writes to them"
    bench.end_step(step)
    assert bench.reserve() == ["second"]


# --- forks -------------------------------------------------------------------------------------------------------


def test_choices_share_full_blocks_and_copy_the_partial_one_before_it_is_written() -> None:
    bench = Bench()
    subject = request("a", 6, num_choices=3)
    bench.reserve(subject)
    pulled = list(bench.pulling["a"].block_ids)
    generations = bench.settle(subject)
    step = bench.begin_step()
    tables = [generation.sequence.block_table for generation in generations]
    assert tables[0] == pulled
    assert [table[0] for table in tables] == [pulled[0]] * 3
    assert bench.pool.ref_count(pulled[0]) == 3
    assert len({table[1] for table in tables}) == 3, "each writes to a block of its own"
    assert step.decodes == generations
    assert step.copies == [(pulled[1], tables[1][1]), (pulled[1], tables[2][1])]
    bench.end_step(step)
    assert bench.step().copies == [], "copies are made once"


def test_a_full_last_block_is_not_copied() -> None:
    bench = Bench()
    one, other = bench.enter(request("a", 8, num_choices=2))
    assert bench.step().copies == []
    assert one.sequence.block_table[:2] == other.sequence.block_table[:2]
    assert one.sequence.block_table[2] != other.sequence.block_table[2]


def test_choices_keep_their_numbers() -> None:
    bench = Bench()
    generations = bench.enter(request("a", 6, choices=(5, 2)))
    assert [generation.sequence.choice for generation in generations] == [5, 2]


@pytest.mark.parametrize(
    "reasons",
    [("stop", None), (None, "stop"), ("stop", None, "length"), (None, None, "stop"), ("stop", "stop", None)],
    ids=lambda reasons: " ".join(reason or "on" for reason in reasons),
)
def test_copies_outlive_the_choices_that_end_with_their_first_token(reasons: tuple[FinishReason | None, ...]) -> None:
    """What a pending copy reads and writes belongs to nobody else until the step that makes it is over."""
    bench = Bench()
    generations = bench.enter(request("a", 6, num_choices=len(reasons)), *reasons)
    going_on = [generation for generation in generations if generation.finish_reason is None]
    step = bench.begin_step()
    assert step.decodes == going_on
    copied = {block for copy in step.copies for block in copy}
    elsewhere = bench.pool.allocate(bench.pool.num_free)
    assert not copied & set(elsewhere), "a block of a copy in flight is given away"
    bench.pool.release(elsewhere)
    for generation in going_on:
        assert generation.sequence.block_table[1] in copied
    bench.end_step(step, ends=going_on)
    assert bench.pool.num_used == 0


def test_copies_of_a_request_that_is_given_up_are_let_go_at_the_next_step() -> None:
    bench = Bench()
    subject = request("a", 6, num_choices=3)
    bench.enter(subject)
    bench.forget(subject)
    assert bench.step().decodes == []
    assert bench.pool.num_used == 0


def test_all_choices_end_with_their_first_token() -> None:
    bench = Bench()
    bench.enter(request("a", 6, 1, num_choices=2), "length", "length")
    bench.step()
    assert bench.pool.num_used == 0


# --- lending -----------------------------------------------------------------------------------------------------


def test_a_lent_prefix_stays_until_it_is_given_back() -> None:
    bench = Bench(4)
    first = request("first", 8)
    bench.run(first)
    bench.forget(first)
    lent = bench.scheduler.lend(first.chain.hashes)
    assert [bench.pool.ref_count(block) for block in lent] == [1, 1]
    assert bench.reserve(request("big", 12)) == []
    bench.pool.release(lent)
    assert bench.reserve() == ["big"]


def test_only_the_leading_blocks_that_are_here_are_lent() -> None:
    bench = Bench()
    first = request("first", 8)
    bench.run(first)
    longer = request("longer", tokens("first", 8) + tokens("other", 8))
    longer.chain.extend(longer.work.token_ids, 16)
    assert bench.scheduler.lend(longer.chain.hashes) == bench.scheduler.lend(first.chain.hashes) != []
    assert bench.scheduler.lend(longer.chain.hashes[2:]) == []


@pytest.mark.parametrize(
    ("num_tokens", "lends"),
    [pytest.param(6, True, id="nobody is due"), pytest.param(7, False, id="a block is due with the next step")],
)
def test_nothing_is_lent_that_running_sequences_will_lack(num_tokens: int, lends: bool) -> None:
    bench = Bench(4, memory_reserve=EAGER)
    old = request("old", 8)
    bench.run(old)
    bench.forget(old)
    bench.run(request("runs", num_tokens))
    assert bench.pool.num_free == 2
    assert bool(bench.scheduler.lend(old.chain.hashes)) == lends


def test_nothing_is_lent_that_those_who_are_about_to_join_will_lack() -> None:
    bench = Bench(4, memory_reserve=EAGER)
    old = request("old", 8)
    bench.run(old)
    bench.forget(old)
    bench.enter(request("joins", 8))
    assert bench.scheduler.lend(old.chain.hashes) == []


def test_what_others_use_anyway_is_lent_even_when_nothing_is_free() -> None:
    bench = Bench(3)
    runs = request("runs", 8)
    bench.run(runs)
    assert bench.pool.num_free == 0
    assert len(bench.scheduler.lend(runs.chain.hashes)) == 2


# --- the way out -------------------------------------------------------------------------------------------------


def _waiting(bench: Bench, subject: DecodeRequest) -> None:
    bench.reserve(request("blocker", 32))
    assert bench.reserve(subject) == []


def _pulling(bench: Bench, subject: DecodeRequest) -> None:
    assert bench.reserve(subject) == ["subject"]


def _ready(bench: Bench, subject: DecodeRequest) -> None:
    bench.enter(subject)


def _running(bench: Bench, subject: DecodeRequest) -> None:
    bench.run(subject)


def _in_a_step(bench: Bench, subject: DecodeRequest) -> Step:
    bench.enter(subject)
    return bench.begin_step()


def _stepped_aside(bench: Bench, subject: DecodeRequest) -> None:
    bench.run(subject)
    for number in range(2):
        bench.enter(request(f"vip {number}", 1, tier=INTERACTIVE))
    bench.step()
    [generation] = subject.generations
    assert generation.stage is Stage.READY


def _preempting(bench: Bench, subject: DecodeRequest) -> Step:
    """Its contents are on their way to host memory, if that is where they go."""
    bench.run(request("senior", 12, tier=INTERACTIVE))
    bench.run(subject)
    step = bench.preempting_step()
    assert subject.generations[0].stage is Stage.PREEMPTED
    return step


def _preempted(bench: Bench, subject: DecodeRequest) -> None:
    bench.end_step(_preempting(bench, subject))
    bench.reserve()
    assert subject.generations[0].stage is Stage.PREEMPTED


def _back(bench: Bench, subject: DecodeRequest) -> None:
    """It has blocks again, and nothing in them."""
    _preempted(bench, subject)
    bench.forget(bench.requests[0])
    bench.evict()
    bench.reserve()
    assert subject.generations[0].stage in (Stage.READY, Stage.RECOMPUTING)


def _coming_back(bench: Bench, subject: DecodeRequest) -> Step:
    _back(bench, subject)
    step = bench.begin_step()
    assert step.swap_ins or step.chunks
    return step


def _computing(bench: Bench, subject: DecodeRequest) -> None:
    bench.reserve(subject)
    bench.step()
    assert bench.scheduler.num_computing == 1


def _computing_in_a_step(bench: Bench, subject: DecodeRequest) -> Step:
    _computing(bench, subject)
    return bench.begin_step()


def _sent_back(bench: Bench, subject: DecodeRequest) -> None:
    """A prompt that has lost its blocks again."""
    bench.run(request("senior", 12, tier=INTERACTIVE))
    bench.reserve(subject)
    bench.preempt()
    assert (bench.scheduler.num_computing, bench.scheduler.num_waiting) == (0, 1)


SMALL_STEPS = {"max_num_seqs": 2, "token_budget": 6, "prefill_tokens": 1}
WAYS: dict[str, tuple[dict[str, object], Callable[[Bench, DecodeRequest], Step | None]]] = {
    "waiting": ({}, _waiting),
    "pulling": ({}, _pulling),
    "pulling, to be forked": ({"num_choices": 3}, _pulling),
    "ready": ({}, _ready),
    "ready, with copies to be made": ({"num_choices": 3}, _ready),
    "running": ({}, _running),
    "in a step": ({}, _in_a_step),
    "in a step, with copies": ({"num_choices": 3}, _in_a_step),
    "out of a full batch": ({"tier": BATCH}, _stepped_aside),
    "computing": ({"local": True}, _computing),
    "computing, to be forked": ({"local": True, "num_choices": 2}, _computing),
    "computing in a step": ({"local": True}, _computing_in_a_step),
    "computing no more": ({"local": True, "tier": BATCH}, _sent_back),
    "being preempted": ({}, _preempting),
    "preempted": ({}, _preempted),
    "back": ({}, _back),
    "coming back in a step": ({}, _coming_back),
}


@pytest.mark.parametrize("preempt_by", ["swap", "recompute"])
@pytest.mark.parametrize("stage", WAYS)
def test_a_request_that_is_given_up_keeps_nothing(stage: str, preempt_by: str) -> None:
    bench = Bench(8, memory_reserve=EAGER, num_host_blocks=8, preempt_by=preempt_by, **SMALL_STEPS)
    options, reach = WAYS[stage]
    subject = request("subject", 10, **options)  # type: ignore[arg-type]
    step = reach(bench, subject)
    bench.forget(subject)
    assert all(generation.stage is Stage.ENDED for generation in subject.generations)
    if step is not None:
        bench.end_step(step)
    for other in bench.requests:
        bench.forget(other)
    bench.step()  # lets go of copies that nobody needs any more
    scheduler = bench.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_pulling) == (0, 0, 0)
    assert (scheduler.num_computing, scheduler.num_preempted, scheduler.num_uncomputed) == (0, 0, 0)
    assert (bench.pool.num_free, scheduler.num_host_used, scheduler.num_expected) == (8, 0, 0)
    assert bench.reserve(request("next", 32)) == ["next"], "who comes next has the whole cache"


def test_what_has_ended_can_be_removed_again() -> None:
    bench = Bench()
    generation = bench.run(request("a", 6))
    bench.scheduler.remove(generation)
    bench.scheduler.remove(generation)
    bench.forget(generation.request)
    assert bench.pool.num_used == 0


# --- tokens for the gateway --------------------------------------------------------------------------------------


def test_the_first_frame_repeats_the_first_token() -> None:
    bench = Bench()
    generation = bench.run(request("a", 6))
    message = generation.tokens(generation.num_sent)
    assert (message.position, message.token_ids) == (6, (99, 7))


def test_tokens_are_sent_again_from_any_position_that_was_generated_here() -> None:
    bench = Bench()
    [generation] = bench.enter(request("a", 6, ENDLESS))
    bench.steps(3)
    assert (generation.tokens(8).position, generation.tokens(8).token_ids) == (8, (8, 9))
    assert (generation.tokens(0).position, generation.tokens(0).token_ids) == (6, (99, 7, 8, 9))
