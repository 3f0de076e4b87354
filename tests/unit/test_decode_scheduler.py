"""The decode scheduler: the batch, how choices fork, what is lent, and that whoever leaves keeps nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from decode_bench import EAGER, ENDLESS, Bench, request, tokens

from common.contract.messages.fields import FinishReason
from common.contract.messages.worker import TokenLogprobs
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from decode_worker import request as request_module
from decode_worker.request import ChoiceStage, DecodeRequest
from decode_worker.step import Step

INTERACTIVE, STANDARD, BATCH = Tier

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
    choices = bench.settle(subject)
    step = bench.begin_step()
    tables = [list(choice.sequence.block_table) for choice in choices]
    assert tables[0] == pulled
    assert [table[0] for table in tables] == [pulled[0]] * 3
    assert bench.pool.ref_count(pulled[0]) == 3
    assert len({table[1] for table in tables}) == 3, "each writes to a block of its own"
    assert step.decodes == choices
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
    choices = bench.enter(request("a", 6, choices=(5, 2)))
    assert [choice.sequence.choice for choice in choices] == [5, 2]


@pytest.mark.parametrize(
    "reasons",
    [("stop", None), (None, "stop"), ("stop", None, "length"), (None, None, "stop"), ("stop", "stop", None)],
    ids=lambda reasons: " ".join(reason or "on" for reason in reasons),
)
def test_copies_outlive_the_choices_that_end_with_their_first_token(reasons: tuple[FinishReason | None, ...]) -> None:
    """What a pending copy reads and writes belongs to nobody else until the step that makes it is over."""
    bench = Bench()
    choices = bench.enter(request("a", 6, num_choices=len(reasons)), *reasons)
    going_on = [choice for choice in choices if choice.finish_reason is None]
    step = bench.begin_step()
    assert step.decodes == going_on
    copied = {block for copy in step.copies for block in copy}
    elsewhere = bench.pool.allocate(bench.pool.num_free)
    assert not copied & set(elsewhere), "a block of a copy in flight is given away"
    bench.pool.release(elsewhere)
    for choice in going_on:
        assert choice.sequence.block_table[1] in copied
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


@pytest.mark.parametrize("num_ready", [0, 1])
def test_what_others_use_anyway_is_lent_even_when_nothing_is_free(num_ready: int) -> None:
    """It takes no block from those who are about to join."""
    bench = Bench(3 + num_ready, memory_reserve=EAGER)
    runs = request("runs", 8)
    bench.run(runs)
    for number in range(num_ready):
        bench.enter(request(f"joins {number}", 4))
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
    [choice] = subject.choices
    assert choice.stage is ChoiceStage.READY


def _preempting(bench: Bench, subject: DecodeRequest) -> Step:
    """Its contents are on their way to host memory, if that is where they go."""
    bench.run(request("senior", 12, tier=INTERACTIVE))
    bench.run(subject)
    step = bench.preempting_step()
    assert subject.choices[0].stage is ChoiceStage.PREEMPTED
    return step


def _preempted(bench: Bench, subject: DecodeRequest) -> None:
    bench.end_step(_preempting(bench, subject))
    bench.reserve()
    assert subject.choices[0].stage is ChoiceStage.PREEMPTED


def _back(bench: Bench, subject: DecodeRequest) -> None:
    """It has blocks again, and nothing in them."""
    _preempted(bench, subject)
    bench.forget(bench.requests[0])
    bench.evict()
    bench.reserve()
    assert subject.choices[0].stage in (ChoiceStage.READY, ChoiceStage.RECOMPUTING)


def _coming_back(bench: Bench, subject: DecodeRequest) -> Step:
    _back(bench, subject)
    step = bench.begin_step()
    assert step.swap_ins or step.chunks
    return step


def _computing(bench: Bench, subject: DecodeRequest) -> None:
    bench.reserve(subject)
    bench.step()
    assert len(bench.scheduler.prompts) == 1


def _computing_in_a_step(bench: Bench, subject: DecodeRequest) -> Step:
    _computing(bench, subject)
    return bench.begin_step()


def _sent_back(bench: Bench, subject: DecodeRequest) -> None:
    """A prompt that has lost its blocks again."""
    bench.run(request("senior", 12, tier=INTERACTIVE))
    bench.reserve(subject)
    bench.preempt()
    assert (len(bench.scheduler.prompts), bench.scheduler.num_waiting) == (0, 1)


SMALL_STEPS: dict[str, Any] = {"max_num_seqs": 2, "token_budget": 6, "prefill_tokens": 1}
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
    assert all(choice.stage is ChoiceStage.ENDED for choice in subject.choices)
    if step is not None:
        bench.end_step(step)
    for other in bench.requests:
        bench.forget(other)
    bench.step()  # lets go of copies that nobody needs any more
    scheduler = bench.scheduler
    assert (scheduler.batch.num_running, scheduler.num_waiting, len(scheduler.entrance.reserved)) == (0, 0, 0)
    assert (len(scheduler.prompts), len(scheduler.entrance.preempted)) == (0, 0)
    assert (bench.pool.num_free, scheduler.swap.num_used, scheduler.num_expected) == (8, 0, 0)
    served = [scheduler.entrance.waiting.counter(tier, "") for tier in Tier]
    bench.steps(3)
    assert [scheduler.entrance.waiting.counter(tier, "") for tier in Tier] == served, "its tenant goes on being charged"
    assert bench.reserve(request("next", 32)) == ["next"], "who comes next has the whole cache"


def test_what_has_ended_can_be_removed_again() -> None:
    bench = Bench()
    choice = bench.run(request("a", 6))
    bench.scheduler.sequences.remove(choice)
    bench.scheduler.sequences.remove(choice)
    bench.forget(choice.request)
    assert bench.pool.num_used == 0


# --- tokens for the gateway --------------------------------------------------------------------------------------


def test_the_first_frame_repeats_the_first_token() -> None:
    bench = Bench()
    choice = bench.run(request("a", 6))
    message = choice.tokens(choice.num_sent)
    assert (message.position, message.token_ids) == (6, (99, 7))


def test_tokens_are_sent_again_from_any_position_that_was_generated_here() -> None:
    bench = Bench()
    [choice] = bench.enter(request("a", 6, ENDLESS))
    bench.steps(3)
    assert (choice.tokens(8).position, choice.tokens(8).token_ids) == (8, (8, 9))
    assert (choice.tokens(0).position, choice.tokens(0).token_ids) == (6, (99, 7, 8, 9))


def test_many_tokens_are_sent_again_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have log probabilities with it: all at once, they would be no frame that anybody takes."""
    monkeypatch.setattr(request_module, "MAX_TOLD_TOKENS", 3)
    bench = Bench()
    [choice] = bench.enter(request("a", 6, ENDLESS))
    choice.sequence.sampling = SamplingParams(max_tokens=4, logprobs=0)
    choice.sequence.token_ids[6:] = [99, 7, 8, 9]
    choice.logprobs[:] = [TokenLogprobs(logprob=-float(index), top=()) for index in range(4)]
    choice.finish_reason = "length"
    told = [choice.tokens(position) for position in (6, 9)]
    assert [(each.position, each.token_ids, each.finish_reason) for each in told] == [
        (6, (99, 7, 8), None),
        (9, (9,), "length"),
    ]
    assert [each.logprobs for each in told] == [tuple(choice.logprobs[:3]), tuple(choice.logprobs[3:])]


# --- sequences that wait for what their grammars allow ------------------------------------------------------------


def test_a_sequence_whose_mask_is_late_sits_steps_out_and_takes_no_block_meanwhile() -> None:
    bench = Bench(num_blocks=16, memory_reserve=EAGER)
    [late], [other] = bench.enter(request("late", 5)), bench.enter(request("other", 5))
    assert bench.step().decodes == [late, other]
    bench.scheduler.entrance.mask_awaited(late)
    num_blocks = len(late.sequence.block_table)
    for _ in range(20):
        assert bench.step().decodes == [other]
        bench.check()
    assert bench.scheduler.num_idle == 1
    assert len(late.sequence.block_table) == num_blocks
    bench.scheduler.entrance.mask_known(late)
    assert bench.step().decodes == [late, other]
    assert len(late.sequence.block_table) == num_blocks, "it lacks none yet"


def test_a_preempted_sequence_comes_back_when_its_mask_is_there() -> None:
    bench = Bench(num_blocks=8, memory_reserve=EAGER, preempt_by="recompute")
    older, newer = bench.run(request("older", 5)), bench.run(request("newer", 5))
    bench.scheduler.entrance.mask_awaited(newer)
    borrowed = bench.pool.allocate(bench.pool.num_free)
    while newer.stage is not ChoiceStage.PREEMPTED:
        bench.step()
    bench.pool.release(borrowed)
    for _ in range(3):
        bench.reserve()
        bench.step()
        assert newer.stage is ChoiceStage.PREEMPTED
    bench.scheduler.entrance.mask_known(newer)
    bench.reserve()
    assert (older.stage, newer.stage) == (ChoiceStage.RUNNING, ChoiceStage.RECOMPUTING)


@pytest.mark.parametrize("preempted", [False, True])
def test_whoever_ends_while_its_mask_is_awaited_leaves_nothing(preempted: bool) -> None:
    bench = Bench(num_blocks=8, memory_reserve=EAGER, preempt_by="recompute")
    bench.run(request("older", 5))
    subject = request("subject", 5)
    choice = bench.run(subject)
    bench.scheduler.entrance.mask_awaited(choice)
    if preempted:
        bench.pool.allocate(bench.pool.num_free)
        while choice.stage is not ChoiceStage.PREEMPTED:
            bench.step()
    bench.forget(subject)
    assert bench.scheduler.num_idle == 0
    bench.scheduler.entrance.mask_known(choice)
    bench.step()
    bench.check()
