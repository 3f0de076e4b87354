"""How many tokens are drafted, of which sequences."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from decode_bench import BLOCK_SIZE, EAGER, Bench, request
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.messages.gateway import Suspicion
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.runtime.config import MAX_DRAFT_TOKENS
from common.scheduling.row_times import RowTimes
from decode_worker.lookup import Lookup
from decode_worker.request import ChoiceStage, DecodeChoice, rows_of
from decode_worker.speculation import Speculation
from decode_worker.step import Step
from decode_worker.view import DecodeTotals

FREE = RowTimes(rows=(1, 1000), seconds=(1.0, 1.01))
DEAR = RowTimes(rows=(1,), seconds=(1.0,))


def speculating(times: RowTimes = FREE, num_blocks: int = 64, **policy: Any) -> tuple[Bench, Speculation]:
    bench = Bench(num_blocks, memory_reserve=EAGER, **{"token_budget": 1024, **policy})
    speculation = bench.scheduler.speculation = Speculation(bench.policy, times)
    return bench, speculation


def running(bench: Bench, name: str, text: list[int], max_tokens: int = 100) -> DecodeChoice:
    """A sequence that has joined the batch; its first token is 99."""
    [choice] = bench.enter(request(name, text, max_tokens=max_tokens))
    return choice


REPEATING = [1, 2, 3, 99, 5, 6] * 2 + [1, 2, 3]
"""After which, and 99, comes 5."""


def test_what_followed_before_is_drafted() -> None:
    bench, _ = speculating()
    choice = running(bench, "repeating", REPEATING)
    plain = running(bench, "plain", [11, 12, 13, 14])
    step = bench.begin_step()
    assert step.decodes == [choice, plain]
    # The chance of a token is a half at first, and what has a chance below a tenth is not drafted.
    assert step.drafts == {choice: [5, 6, 1]}


@pytest.mark.parametrize(("num", "patience"), [(1, 1), (3, 1), (4, 2), (8, 3), (12, 4), (20, 4)])
def test_texts_that_expect_nothing_are_read_in_one_step_of_some(
    num: int, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the sequences are others. A text that begins to repeat itself is drafted that many steps later at most."""
    bench, speculation = speculating(num_blocks=512, max_num_seqs=num + 1)
    first, *others = [running(bench, f"{row}", [1000 * row + each for each in range(10)]) for row in range(num)]
    decodes = [first, *others]
    while any(choice.lookup is None for choice in decodes):  # only some are new in a step
        speculation.plan(decodes, 512)
    read: list[Lookup] = []
    own = Lookup.read

    def watched(lookup: Lookup) -> None:
        read.append(lookup)
        own(lookup)

    monkeypatch.setattr(Lookup, "read", watched)
    numbers = []
    for _ in range(12):
        read.clear()
        assert speculation.plan(decodes, 512).tokens == {}
        numbers.append(len(read))
    assert sorted(numbers) == [0] * (12 - 12 // patience) + [num] * (12 // patience)
    assert all(numbers[at] == numbers[at + patience] for at in range(12 - patience))
    first.sequence.token_ids += first.sequence.token_ids[:6]
    for _ in range(patience - 1):
        if speculation.plan(decodes, 512).tokens:
            break
    else:
        assert speculation.plan(decodes, 512).tokens.keys() == {first}
    read.clear()
    assert speculation.plan(decodes, 512).tokens.keys() == {first}
    assert read[0] is first.lookup, "it is read in every step now"
    read.clear()
    speculation.plan([*others, first], 512)
    assert {id(each) for each in read} >= {id(choice.lookup) for choice in decodes}, "in another order, as others are"


def test_a_text_is_read_in_every_step_for_a_while_after_it_has_departed() -> None:
    bench, speculation = speculating(num_blocks=512, max_num_seqs=20)
    decodes = [running(bench, f"{row}", [1000 * row + each for each in range(30)]) for row in range(12)]
    text = decodes[0].sequence.token_ids
    while any(choice.lookup is None for choice in decodes):
        speculation.plan(decodes, 512)
    text += text[:6]
    while not speculation.plan(decodes, 512).tokens:
        pass
    text += [*text[6:9], 7]  # which is expected, and what is not
    assert not speculation.plan(decodes, 512).tokens
    for token in text[10:13]:
        assert not speculation.plan(decodes, 512).tokens
        text.append(token)
    assert speculation.plan(decodes, 512).tokens.keys() == {decodes[0]}, "after three tokens, at once"


def test_nothing_is_drafted_that_costs_more_than_it_brings() -> None:
    bench, speculation = speculating(DEAR)
    running(bench, "repeating", REPEATING)
    assert bench.begin_step().drafts == {}
    assert not speculation.would_draft(bench.scheduler.batch.running(), lambda choice: 50)


def test_drafts_that_were_measured_to_be_free_are_made_only_as_long_as_they_pay() -> None:
    """As where a step of two rows took no longer than one of one row, by chance."""
    bench, speculation = speculating(RowTimes(rows=(1, 2), seconds=(1.0, 1.0)))
    plain = [running(bench, f"plain {index}", [20 + index] * 2) for index in range(6)]
    choice = running(bench, "repeating", REPEATING)
    decodes = [choice, *plain]
    drafts = speculation.plan(decodes, 100).tokens
    assert drafts == {choice: [5, 6, 1]}
    for _ in range(30):
        speculation.observe(Step(decodes=decodes, drafts=drafts), 1.5)
    assert speculation.plan(decodes, 100).tokens == {}


@pytest.mark.parametrize(("max_tokens", "draft"), [(2, []), (3, [5]), (4, [5, 6]), (9, [5, 6, 1])])
def test_nothing_is_drafted_beyond_the_end(max_tokens: int, draft: list[int]) -> None:
    """The last token of a sequence is sampled after the drafted ones."""
    bench, _ = speculating()
    choice = running(bench, "repeating", REPEATING, max_tokens)
    assert bench.begin_step().drafts.get(choice, []) == draft


def test_a_number_that_is_set_holds() -> None:
    bench, speculation = speculating(DEAR, draft_tokens=7)
    one, other = running(bench, "one", REPEATING), running(bench, "other", REPEATING, 4)
    running(bench, "plain", [11, 12, 13])
    step = bench.begin_step()
    assert list(step.drafts.items()) == [(one, [5, 6, 1, 2, 3, 99, 5]), (other, [5, 6])]
    assert sum(speculation._choose(step.decodes, 4, 0).nums.values()) == 4, "the budget holds, too"


def test_drafts_take_free_blocks_and_nobody_elses() -> None:
    """They leave those that the next tokens of all need, and are cut to what there is."""
    bench, _ = speculating(draft_tokens=9)
    choice = running(bench, "repeating", REPEATING[1:])
    growing = running(bench, "growing", [11] * (BLOCK_SIZE - 2))
    assert choice.sequence.num_tokens == 4 * BLOCK_SIZE - 1
    held = bench.pool.allocate(bench.pool.num_free - 1)
    assert bench.begin_step().drafts == {choice: [5, 6, 1, 2, 3]}, "a slot, and the one free block"
    assert bench.pool.num_free == 0
    assert len(choice.sequence.block_table) == 5
    assert growing.stage is ChoiceStage.RUNNING
    bench.pool.release(held)


def test_the_block_that_another_needs_next_is_not_taken() -> None:
    bench, _ = speculating(draft_tokens=9)
    choice = running(bench, "repeating", REPEATING)
    growing = running(bench, "growing", [11] * (BLOCK_SIZE - 1))
    bench.pool.allocate(bench.pool.num_free - 1)
    assert bench.begin_step().drafts == {}
    assert [choice.stage, growing.stage] == [ChoiceStage.RUNNING] * 2
    assert bench.pool.num_free == 1


def test_blocks_that_only_wrong_tokens_needed_are_given_back() -> None:
    bench, _ = speculating(draft_tokens=9)
    choice = running(bench, "repeating", REPEATING)
    num_free = bench.pool.num_free
    step = bench.begin_step()
    assert len(choice.sequence.block_table) == 7
    bench.end_step(step)
    before = choice.sequence.block_table
    bench.scheduler.sequences.drafted(choice, 0)
    bench.check()
    assert len(choice.sequence.block_table) == 5, "17 tokens"
    assert choice.sequence.block_table is not before, "who keeps a copy notices"
    assert bench.pool.num_free == num_free - 1
    assert bench.begin_step().decodes == [choice]


def test_prompts_come_first() -> None:
    """However much the drafts would bring."""
    bench, _ = speculating(draft_tokens=9, token_budget=12)
    choice = running(bench, "repeating", REPEATING)
    bench.reserve(request("prompt", 8, local=True))
    step = bench.begin_step()
    assert [chunk.end - chunk.start for chunk in step.chunks] == [8]
    assert {each: len(draft) for each, draft in step.drafts.items()} == {choice: 3}


def test_after_many_steps_with_drafts_comes_one_without() -> None:
    _, speculation = bench_and = speculating()
    choice = running(bench_and[0], "repeating", REPEATING)
    drafted = [bool(speculation.plan([choice], 100).tokens) for _ in range(70)]
    assert [index for index, each in enumerate(drafted) if not each] == [32, 65]


def test_steps_with_drafts_are_learnt_from_and_some_without() -> None:
    """Among them the first one after one with drafts, which is what that is compared with."""
    learnt = RowTimes(rows=(1, 1000), seconds=(1.0, 1.01))
    bench, speculation = speculating(learnt)
    choice = running(bench, "repeating", REPEATING)
    plain, drafting = Step(decodes=[choice]), Step(decodes=[choice], drafts={choice: [5]})
    seen = []
    for step in [*[plain] * 17, drafting, plain, plain]:
        before = learnt.scale, learnt.draft_scale
        speculation.observe(step, 2.0)
        seen.append((learnt.scale, learnt.draft_scale) != before)
    assert [index for index, each in enumerate(seen) if each] == [0, 8, 16, 17, 18]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_after_drafts_says_nothing_of_those_that_are_planned_ahead(runs_ahead: bool) -> None:
    """Of which the time before it is close to nothing. If none is planned ahead, it is as good as any."""
    learnt = RowTimes(rows=(1, 1000), seconds=(1.0, 1.01))
    bench, speculation = speculating(learnt, runs_ahead=runs_ahead)
    choice = running(bench, "repeating", REPEATING)
    plain, drafting = Step(decodes=[choice]), Step(decodes=[choice], drafts={choice: [5]})
    for _ in range(400):
        speculation.observe(plain, 1.0, 0.0)
    for _ in range(100):
        speculation.observe(drafting, 1.0, 0.5)
        speculation.observe(plain, 1.0, 0.5)
    assert learnt.plan_s == (0.0 if runs_ahead else pytest.approx(0.5, abs=0.01))
    assert learnt.step_s((1, 0), (1, 0)) - learnt.step_s((1, 0)) > (0.25 if runs_ahead else -0.01)


@pytest.mark.parametrize(("plan_s", "drafts"), [(0.0, True), (1.5, True), (1.8, False)])
def test_that_no_step_runs_ahead_of_drafts_is_part_of_their_price(plan_s: float, drafts: bool) -> None:
    """The three drafted tokens are worth 1.73 tokens, as long as a step with them takes less than 2.65 plain ones."""
    times = RowTimes(rows=(1, 1000), seconds=(1.0, 1.01), draft_plan_s=plan_s)
    bench, speculation = speculating(times)
    choice = running(bench, "repeating", REPEATING)
    speculation._lookup(choice).acceptance = 0.75
    assert bool(speculation.plan([choice], 3).tokens) == drafts


def test_whoever_is_beside_drafts_gets_its_token_within_the_target() -> None:
    """Where a step has a target; those that draft get several tokens in a longer step."""
    times = RowTimes(rows=(1, 101), seconds=(1.0, 3.0))
    bench, _ = speculating(times, step_target_s=1.065)
    one = running(bench, "repeating", REPEATING)
    assert len(bench.begin_step().drafts[one]) == 3, "it is alone"
    bench, _ = speculating(times, step_target_s=1.065)
    one = running(bench, "repeating", REPEATING)
    running(bench, "plain", [11, 12, 13, 14])
    assert len(bench.begin_step().drafts[one]) == 2


def test_few_texts_are_read_in_a_step() -> None:
    bench, _ = speculating()
    for index in range(6):
        running(bench, f"repeating {index}", REPEATING)
    first, second = bench.scheduler.schedule(0.0), bench.scheduler.schedule(0.0)
    assert len(first.decodes) == 6
    assert (len(first.drafts), len(second.drafts)) == (4, 6)


def test_without_room_for_drafts_steps_run_ahead() -> None:
    bench, _ = speculating()
    running(bench, "repeating", REPEATING)
    step = bench.scheduler.schedule(0.0, may_draft=False)
    assert not bench.scheduler.may_run_ahead(step)
    bench.pool.allocate(bench.pool.num_free)
    assert bench.scheduler.may_run_ahead(step)


def test_without_leave_nothing_is_drafted() -> None:
    bench, _ = speculating()
    choice = running(bench, "repeating", REPEATING)
    assert bench.scheduler.schedule(0.0, may_draft=False).drafts == {}
    first = bench.scheduler.schedule(0.0, may_draft=False)
    assert not bench.scheduler.may_run_ahead(first), "the next step would draft"
    assert bench.scheduler.schedule(0.0, first).drafts == {}, "nobody knows after which token"
    suspect = request("suspect", 5)
    suspect.work = replace(suspect.work, suspicion=Suspicion.GROUP)
    bench.enter(suspect)
    assert bench.scheduler.schedule(0.0).drafts == {}, "a suspect is on trial"
    bench.forget(suspect)
    assert bench.scheduler.schedule(0.0).drafts == {choice: [5, 6, 1]}


def test_no_step_runs_ahead_of_one_with_drafts_and_of_others_as_before() -> None:
    bench, _ = speculating()
    choice = running(bench, "repeating", REPEATING)
    step = bench.begin_step()
    assert step.drafts
    assert not bench.scheduler.may_run_ahead(step)
    bench.end_step(step)
    bench.forget(choice.request)
    running(bench, "plain", [11, 12, 13, 14])
    assert bench.scheduler.may_run_ahead(bench.begin_step())


def test_nothing_is_drafted_within_a_grammar() -> None:
    """Which tokens may follow a drafted one is not known in time."""
    bench, _ = speculating()
    for index in range(5):
        choice = running(bench, f"grammar {index}", REPEATING)
        choice.sequence.sampling = SamplingParams(max_tokens=100, grammar="start: /a*/")
    assert bench.scheduler.schedule(0.0).drafts == {}
    plain = running(bench, "plain", REPEATING)
    assert list(bench.scheduler.schedule(0.0).drafts) == [plain], "the others do not take its turn to be read"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 0.5), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_the_drafts_yield_the_most_tokens_per_second(chances: list[float], more: list[float], num_plain: int) -> None:
    """Of all numbers of tokens of all sequences, unless less than 3 % is gained."""
    seconds = list(itertools.accumulate([1.0, *more]))
    times = RowTimes(rows=tuple(range(1, len(seconds) + 1)), seconds=tuple(seconds), token_s=1e-3)
    bench, speculation = speculating(times)
    drafted = [running(bench, f"drafted {index}", REPEATING) for index in range(len(chances))]
    for index in range(num_plain):
        running(bench, f"plain {index}", [20 + index] * 2)
    decodes = [*drafted, *(choice for choice in bench.scheduler.batch.ready() if choice not in drafted)]
    for choice, chance in zip(drafted, chances, strict=True):
        speculation._lookup(choice).acceptance = chance
    plain = rows_of(decodes)

    def rate(nums: dict[DecodeChoice, int]) -> float:
        yielded = len(decodes) + sum(
            chance**place
            for choice, chance in zip(drafted, chances, strict=True)
            for place in range(1, nums.get(choice, 0) + 1)
        )
        drafts = sum(nums.values()), sum(choice.sequence.num_tokens * num for choice, num in nums.items())
        return yielded / times.step_s(plain, drafts)

    found = speculation._choose(decodes, 1000, 0).nums
    assert all(0 < num <= MAX_DRAFT_TOKENS for num in found.values())
    every = itertools.product(range(6), repeat=len(drafted))
    best = max(rate(dict(zip(drafted, nums, strict=True))) for nums in every)
    least = 1.03 * rate({}) if found else 0.0
    # What has a chance below a tenth is left out, though it may pay where rows cost less than that.
    assert rate(found) >= least
    assert rate(found) >= min(0.9 * best, best / 1.03) or best <= 1.03 * rate({})


def test_several_tokens_of_a_step_count_as_so_many_steps() -> None:
    """Of what is forecast, of what the tenant pays, and of when a block is due and the end is."""
    drafting, _ = speculating(draft_tokens=3)
    plain = Bench(64, memory_reserve=EAGER, token_budget=1024)
    seen = []
    for bench in (drafting, plain):
        [choice] = bench.enter(request("repeating", REPEATING, max_tokens=30, tenant="a"))
        bench.enter(request("other", [11, 12, 13], max_tokens=2, tenant="b"))
        drafted = bench.step().drafts
        for _ in range(3):
            if drafted:
                bench._advance(choice, ())
            else:
                bench.step()
        if drafted:
            bench.scheduler.sequences.drafted(choice, 3)
            bench.check()
        bench.begin_step()
        scheduler, batch = bench.scheduler, bench.scheduler.batch
        seen.append(
            {
                "tokens": choice.sequence.num_tokens,
                "service": scheduler.entrance.waiting.counter(Tier.STANDARD, "a"),
                "forecast": scheduler.num_expected,
                "expected to end in": scheduler._admission._expected_ends[choice] - batch.step,
                "needs a block in": batch._due[choice] - batch.step,
                "ends in": batch._ends[choice] - batch.step,
            }
        )
    assert seen[0] == seen[1]
    assert seen[0]["tokens"] == len(REPEATING) + 5
    assert seen[0]["service"] == 8.0


def test_what_became_of_drafts_is_counted() -> None:
    totals = DecodeTotals()
    totals.verified("lookup", 3, 2)
    totals.verified("draft", 5, 0)
    totals.verified("lookup", 2, 1)
    assert (totals.drafts, totals.drafted_by) == (3, {"lookup": 5, "draft": 5})
    assert totals.accepted_at["lookup"][:3] == [2, 1, 0]
    assert not any(totals.accepted_at["draft"])
