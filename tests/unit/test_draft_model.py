"""What a decode worker lets its draft model do, and what it learns of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

import pytest
from decode_bench import request
from draft_bench import FREE, DraftBench
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.engine.batch import Drafted
from common.runtime.config import MAX_DRAFT_TOKENS
from common.scheduling.row_times import RowTimes
from decode_worker.draft_model import MOST_BEHIND
from decode_worker.request import ChoiceStage, DecodeChoice, rows_of

LIKE_TEXT = [1, 2, 3, 99, 5, 6] * 2 + [1, 2, 3]
"""After which, and 99, comes 5."""


def running(bench: DraftBench, name: str, text: int | list[int], max_tokens: int = 200) -> DecodeChoice:
    """A sequence that has joined the batch."""
    [choice] = bench.enter(request(name, text, max_tokens=max_tokens))
    return choice


def table_of(choice: DecodeChoice) -> list[int]:
    assert choice.draft is not None
    return choice.draft.block_table


def test_a_prompt_is_computed_then_every_step_is_drafted() -> None:
    bench = DraftBench()
    choice = running(bench, "a", 40, 1000)
    first = bench.step()
    assert not first.drafts
    assert first.draft_work is not None
    assert first.draft_work.chunks == {choice: (0, 40)}, "all but the token that the step computes"
    second = bench.step()
    assert len(second.drafts[choice]) == 4, "at 0.6 the fifth has less than a chance of a tenth"
    assert second.draft_work is not None
    assert second.draft_work.chunks == {choice: (40, 41)}
    assert choice.sequence.num_tokens == 42 + 1 + 4
    third = bench.step()
    assert third.draft_work is not None
    assert third.draft_work.chunks == {choice: (45, 46)}, "the last drafted token has no KV yet"
    bench.steps(30)
    assert bench.model.num_caught_up == 40
    assert choice.draft is not None
    assert choice.draft.acceptance > 0.95
    assert max(len(step.drafts.get(choice, ())) for step in bench.steps(2)) == MAX_DRAFT_TOKENS


@pytest.mark.parametrize(("max_tokens", "pays"), [(16, False), (1000, True)])
def test_catching_up_is_an_investment(max_tokens: int, pays: bool) -> None:
    """A prompt of 2,048 tokens takes the time of 200 steps; drafts make steps fewer by more than half."""
    draft_times = RowTimes(rows=(1, 2048), seconds=(0.02, 20.0))
    times = RowTimes(rows=(1, 1000), seconds=(0.1, 0.101))
    bench = DraftBench(times=times, draft_times=draft_times)
    bench.profile(max_tokens)
    choice = running(bench, "long prompt", 2048, max_tokens)
    steps = bench.steps(8)
    assert any(step.draft_work for step in steps) == pays
    assert (bench.model.num_caught_up > 0) == pays
    assert bool(table_of(choice)) == pays


def test_a_draft_model_that_takes_as_long_as_the_model_never_drafts() -> None:
    bench = DraftBench(draft_times=FREE)
    running(bench, "a", 40)
    assert not any(step.draft_work for step in bench.steps(100))


def test_who_is_never_right_costs_nothing_soon_and_is_asked_again_much_later() -> None:
    bench = DraftBench(600, times=RowTimes(rows=(1, 100), seconds=(1.0, 3.0)), is_right=lambda choice: False)
    choice = running(bench, "a", 40, 100_000)
    drafting = [bool(step.draft_work) for step in bench.steps(400)]
    assert drafting[:3] == [True] * 3
    assert not any(drafting[60:300])
    assert bench.model.acceptance < 0.6
    assert choice.draft is not None
    for _ in range(20):
        running(bench, f"other {len(bench.requests)}", 10, 50)
        drafting += [bool(step.draft_work) for step in bench.steps(50)]
    assert any(drafting[400:]), "what was learnt of one sequence does not count for all and for ever"
    assert sum(drafting[400:]) < 200


def test_chunks_keep_the_target_between_tokens() -> None:
    """A step takes 0.1 s, a token of the draft model 0.2 ms: with a target of 0.2 s there is room for 300."""
    draft_times = RowTimes(rows=(1, 10_000), seconds=(0.0002, 2.0))
    times = RowTimes(rows=(1, 1000), seconds=(0.1, 0.101))
    targets = {Tier.INTERACTIVE: 0.2, Tier.STANDARD: 1.0, Tier.BATCH: 9.0}
    bench = DraftBench(
        3000, num_draft_blocks=3000, times=times, draft_times=draft_times, itl_target_s=targets.__getitem__
    )
    choices = [running(bench, f"long {index}", 1000, 5000) for index in range(2)]
    [hurried] = bench.enter(request("hurried", 2, tier=Tier.INTERACTIVE, max_tokens=5000))
    sizes = []
    while any(choice.draft is None or choice.draft.num_computed < 1000 for choice in choices):
        step = bench.step()
        assert hurried in step.decodes
        chunks = {} if step.draft_work is None else step.draft_work.chunks
        sizes.append(sum(end - start for choice, (start, end) in chunks.items() if choice in choices))
        assert len(sizes) < 50
    assert max(sizes) <= 300
    assert min(sizes) >= 100


def test_without_room_in_its_cache_it_computes_nobody() -> None:
    bench = DraftBench(num_draft_blocks=12)
    choice, large = running(bench, "a", 20), running(bench, "large", 60)
    for step in bench.steps(3):
        assert large not in step.drafts
    assert 6 <= len(table_of(choice)) <= 12
    for step in bench.steps(7):  # the first one outgrows the cache meanwhile
        assert large not in step.drafts
    assert not table_of(large)
    bench.forget(choice.request)
    assert bench.model.cache.num_used == 0


def test_who_has_room_only_without_the_others_takes_none_from_them() -> None:
    """Sequences of up to 105 tokens are drafted. The first one has room for 36 of 120 tokens, the second one needs room
    for 116, and would be computed some ten tokens at a time."""
    bench = DraftBench(
        num_draft_blocks=30,
        draft_times=RowTimes(rows=(1, 10_000), seconds=(0.0002, 2.0)),
        itl_target_s=lambda tier: 0.02,
        draft_tokens=1,
    )
    first = running(bench, "first", 20)
    assert first in bench.steps(4)[-1].drafts
    second = running(bench, "second", 100)
    for step in bench.steps(20):
        assert first in step.drafts
        assert second in step.decodes
    assert not table_of(second)


def test_who_has_no_room_is_computed_once_the_others_have_ended() -> None:
    bench = DraftBench(num_draft_blocks=100, draft_tokens=1)
    first, second = running(bench, "first", 250), running(bench, "second", 130)
    assert all(second not in step.drafts for step in bench.steps(5))
    bench.forget(first.request)
    drafted = [second in step.drafts for step in bench.steps(80)]
    assert not any(drafted[:50]), "not before it has 64 tokens more"
    assert drafted[-1]


def test_of_two_that_fill_its_cache_one_goes_on() -> None:
    """Both have 40 tokens, which is all that there is room for, after some ten steps."""
    bench = DraftBench(num_draft_blocks=20, draft_tokens=1)
    choices = [running(bench, f"{index}", 20) for index in range(2)]
    assert set(bench.steps(5)[-1].drafts) == set(choices)
    [going_on] = bench.steps(12)[-1].drafts
    [other] = [choice for choice in choices if choice is not going_on]
    assert len(table_of(going_on)) > 10
    assert not table_of(other)


def test_a_context_of_its_own_ends_its_drafts() -> None:
    bench = DraftBench(context=64)
    choice = running(bench, "a", 30)
    steps = bench.steps(60)
    lengths = [len(step.drafts.get(choice, ())) for step in steps]
    assert lengths[1] > 0
    assert choice.sequence.num_tokens > 64
    assert not any(lengths[-20:])
    assert not table_of(choice), "its blocks are for others"


def test_a_sequence_that_outgrows_the_context_is_not_computed_further() -> None:
    bench = DraftBench(context=64)
    choice = running(bench, "a", 70)
    table = bench.model.table(choice)
    table.wanted = True  # as it was judged when the sequence was shorter
    assert bench.model.chunks([choice], {}, 0.0) == {}
    assert not table.wanted
    assert not table_of(choice)


def test_who_loses_its_blocks_loses_those_of_the_draft_model() -> None:
    bench = DraftBench(16, num_draft_blocks=1000, max_sequence_tokens=60)
    choices = [running(bench, f"{index}", 13, 40) for index in range(2)]
    bench.preempt()
    [preempted] = [choice for choice in choices if choice.stage is not ChoiceStage.RUNNING]
    assert preempted.draft is None
    for _ in range(60):
        bench.step()
    assert {choice.stage for choice in choices} == {ChoiceStage.ENDED}
    assert bench.model.cache.num_used == 0


def test_nothing_is_computed_of_a_sequence_with_a_grammar() -> None:
    bench = DraftBench()
    choice = running(bench, "grammar", 30)
    choice.sequence.sampling = SamplingParams(max_tokens=100, grammar="start: /a*/")
    assert not any(step.draft_work for step in bench.steps(5))


@pytest.mark.parametrize("better", ["text", "model"])
def test_whoever_is_right_more_often_drafts(better: str) -> None:
    bench = DraftBench(looks_up=True)
    choice, other = running(bench, "repeating", LIKE_TEXT), running(bench, "other", 15)
    of_text, of_model = (0.9, 0.5) if better == "text" else (0.5, 0.9)
    bench.speculation._lookup(choice).acceptance = of_text
    bench.model.table(choice).acceptance = of_model
    step = bench.begin_step()
    assert set(step.drafts) == {choice, other}
    assert step.draft_work is not None
    assert set(step.draft_work.drafts) == ({other} if better == "text" else {choice, other})


def test_no_step_runs_ahead_where_it_drafts_and_every_step_does_where_it_never_pays() -> None:
    bench = DraftBench()
    running(bench, "a", 40)
    for _ in range(4):
        step = bench.begin_step()
        assert not bench.scheduler.may_run_ahead(step)
        bench.end_step(step)
    dear = DraftBench(draft_times=FREE)
    running(dear, "a", 40)
    for _ in range(200):
        step = dear.begin_step()
        assert dear.scheduler.may_run_ahead(step), "asking whether to catch up stops nobody"
        dear.end_step(step)


def test_nobody_drafts_for_who_has_ended() -> None:
    """It is still in the step that runs: that was planned before the tokens of the step before it were known."""
    bench = DraftBench(looks_up=True)
    ended, other = running(bench, "repeating", LIKE_TEXT), running(bench, "other", 40)
    bench.model.table(other).acceptance = 0.0
    step = bench.scheduler.schedule(bench.now, may_draft=False)
    assert step.decodes == [ended, other]
    assert not bench.scheduler.may_run_ahead(step), "drafts pay for the first one"
    bench.scheduler.sequences.remove(ended)
    assert bench.scheduler.may_run_ahead(step)
    assert ended.lookup is None
    assert ended.draft is None
    bench.check()


def test_a_number_that_is_set_is_drafted_whatever_it_costs() -> None:
    bench = DraftBench(draft_times=FREE, draft_tokens=3, is_right=lambda choice: False)
    choice = running(bench, "a", 40)
    assert [len(step.drafts.get(choice, ())) for step in bench.steps(40)] == [0, *[3] * 39]


def test_passes_that_take_longer_than_measured_are_noticed() -> None:
    bench = DraftBench()
    running(bench, "a", 40)
    bench.step()
    draft = bench.draft
    bench.draft = lambda step: Drafted(draft(step).token_ids, 50.0)  # type: ignore[method-assign]
    assert [bool(step.drafts) for step in bench.steps(400)].count(True) < 60
    assert bench.model.times.scale > 3


def test_tokens_beside_those_of_the_draft_model_count_only_once_they_came() -> None:
    """More than 16 tokens behind, and it is an investment again."""
    bench = DraftBench()
    choice = running(bench, "a", 40)
    bench.step()
    plan = bench.scheduler.schedule
    bench.scheduler.schedule = lambda now: plan(now, may_draft=False)  # type: ignore[method-assign, misc, assignment]
    bench.steps(MOST_BEHIND + 5)
    bench.scheduler.schedule = plan  # type: ignore[method-assign]
    assert choice.draft is not None
    choice.draft.judge_at = 0
    step = bench.step()
    assert not step.drafts
    assert step.draft_work is not None
    assert step.draft_work.chunks == {choice: (40, choice.sequence.num_tokens - 2)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, MOST_BEHIND)), min_size=1, max_size=3),
    st.floats(0.01, 0.3),
    st.floats(0.001, 0.05),
    st.floats(0.01, 0.3),
    st.integers(0, 3),
)
@example([(0.5, 1), (0.875, 1)], 0.03125, 0.015625, 0.28125, 0)  # few passes, shared by both, are best
@example([(0.0, 1), (0.5, 11), (0.75, 10)], 0.03125, 0.03125, 0.015625, 0)  # one alone is best
def test_the_passes_count_among_what_drafts_cost(
    chances: list[tuple[float, int]], row_s: float, pass_row_s: float, pass_s: float, num_plain: int
) -> None:
    """Of all numbers of tokens of all sequences those are drafted whose tokens per second are close to the most, unless
    less than 3 % is gained. Tokens are taken by their chances, whatever a sequence that lags behind costs at its first
    one, so with such sequences they are less close."""
    times = RowTimes(rows=(1, 101), seconds=(1.0, 1 + 100 * row_s), token_s=1e-4)
    draft_times = RowTimes(rows=(1, 101), seconds=(pass_s, pass_s + 100 * pass_row_s), token_s=1e-5)
    bench = DraftBench(times=times, draft_times=draft_times)
    drafted = [running(bench, f"drafted {index}", 30) for index in range(len(chances))]
    plain = [running(bench, f"plain {index}", 10) for index in range(num_plain)]
    decodes = [*drafted, *plain]
    bench.model.to_judge(decodes)
    for choice, (chance, num_behind) in zip(drafted, chances, strict=True):
        assert choice.draft is not None
        choice.draft.acceptance = chance
        choice.draft.num_computed = choice.sequence.num_tokens - num_behind
    for choice in plain:
        assert choice.draft is not None
        choice.draft.acceptance = 0.0

    def rate(nums: tuple[int, ...]) -> float:
        yielded = len(decodes) + sum(
            chance**place for (chance, _), num in zip(chances, nums, strict=True) for place in range(1, num + 1)
        )
        seconds = times.step_s(
            rows_of(decodes),
            (sum(nums), sum(c.sequence.num_tokens * num for c, num in zip(drafted, nums, strict=True))),
        )
        for place in range(max(nums)):
            rows = [
                (behind if place == 0 else 1, choice.sequence.num_tokens)
                for choice, (_, behind), num in zip(drafted, chances, nums, strict=True)
                if num > place
            ]
            seconds += draft_times.step_s((sum(n for n, _ in rows), sum(n * length for n, length in rows)))
        return yielded / seconds

    nums = bench.speculation._choose(decodes, 1000, 0).nums
    found = tuple(nums.get(choice, 0) for choice in drafted)
    best = max(map(rate, itertools.product(range(7), repeat=len(drafted))))
    nothing = rate((0,) * len(drafted))
    assert rate(found) >= (1.03 * nothing if any(found) else nothing)
    close = 0.9 if all(num_behind <= 2 for _, num_behind in chances) else 0.75
    assert rate(found) >= close * best or best <= 1.03 * nothing


@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 40, 10)], ids=str)
def test_it_attends_to_the_tokens_of_each_sequence(seeds: Sequence[int]) -> None:
    """Whatever comes and goes, with too little memory on both sides: checked slot by slot in every pass."""
    benches = [at_random(seed) for seed in seeds]
    assert sum(bench.num_drafted for bench in benches) > 300
    assert sum(bench.model.num_caught_up for bench in benches) > 300
    assert sum(bench.num_preemptions for bench in benches) > 10


def at_random(seed: int) -> DraftBench:
    """What the draft model does for random traffic."""
    draw = Random(seed)
    cheap = RowTimes(rows=(1, 100), seconds=(0.001, 0.05))
    bench = DraftBench(
        draw.choice([14, 40]),
        num_draft_blocks=draw.choice([8, 12, 30]),
        draft_times=cheap,
        is_right=lambda choice: draw.random() < 0.7,
        looks_up=draw.random() < 0.5,
        max_sequence_tokens=48,
        max_num_seqs=4,
        draft_tokens=draw.choice([0, 3]),
        num_host_blocks=draw.choice([0, 12]),
    )
    for _ in range(150):
        bench.now += 1.0
        alive = [each for each in bench.requests if any(c.stage is not ChoiceStage.ENDED for c in each.choices)]
        event = draw.choice(["arrive", *["step"] * 5, "forget"])
        if event == "arrive" and len(alive) < 6:
            text: int | list[int] = LIKE_TEXT if draw.random() < 0.5 else draw.randint(1, 30)
            num_choices, max_tokens = draw.choice([1, 1, 2]), draw.randint(2, 17)
            subject = request(f"{len(bench.requests)}", text, max_tokens=max_tokens, num_choices=num_choices)
            if bench.scheduler.fits(subject.work):
                bench.want(subject)
        elif event == "forget" and alive and draw.random() < 0.3:
            bench.forget(draw.choice(alive))
        else:
            bench.step()
        bench.reserve()
        for reserved in list(bench.pulling.values()):
            bench.settle(reserved.request)
    for each in bench.requests:
        bench.forget(each)
    assert bench.model.cache.num_used == 0
    return bench
