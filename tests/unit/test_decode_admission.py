"""The decode scheduler: who is let in, now or later, whose turn it is, and what it is charged."""

from __future__ import annotations

import pytest
from decode_bench import BLOCK_SIZE, EAGER, Bench, request, tokens

from common.contract.tiers import Tier
from decode_worker.admission import quantile_of
from decode_worker.entrance import _LOOK_AHEAD
from decode_worker.request import ChoiceStage, DecodeChoice

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
        pytest.param(8, 5, 3, 0, 3, id="choices that grow one after another"),
        pytest.param(6, 3, 3, 0, 2, id="no block for a copy of the partial one"),
        pytest.param(6, 4, 3, 0, 3, id="a block for one copy of two"),
        pytest.param(6, 30, 2, 0, 9, id="two choices that fill the cache"),
        pytest.param(8, 6, 1, 4, 3, id="what the client has already is not generated again"),
    ],
)
@pytest.mark.parametrize("local", [False, True])
def test_a_request_runs_to_its_end_in_as_many_blocks_as_its_longest_choice_holds(
    num_tokens: int, max_tokens: int, num_choices: int, num_output: int, needed: int, local: bool
) -> None:
    subject = request("a", num_tokens, max_tokens, num_choices=num_choices, num_output=num_output, local=local)
    assert needed == 1 or not Bench(num_blocks=needed - 1).scheduler.fits(subject.work)
    bench = Bench(num_blocks=needed)
    assert bench.scheduler.fits(subject.work)
    assert bench.scheduler.blocks_needed(subject.work) == needed
    bench.reserve(subject)
    if not local:
        bench.settle(subject)
    for _ in range(200):
        if subject.finished:
            break
        bench.step()
    lengths = [choice.sequence.num_tokens - len(subject.work.token_ids) for choice in subject.choices]
    assert lengths == [max(1, max_tokens - num_output)] * num_choices
    assert bench.pool.num_used == 0


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
        # It has a fifth block, of which it has not used much.
        ("running", 15, True),
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
    ("num_tokens", "num_expected"), [(40, 10 + 250), pytest.param(42, 12 + 249, id="the first one gives a copy back")]
)
def test_the_prompt_of_several_choices_is_expected_to_stay_until_the_last_of_them_ends(
    num_tokens: int, num_expected: int
) -> None:
    bench = Bench(2000)
    bench.profile(10)
    bench.profile(1000)
    subject = request("a", num_tokens, num_choices=2)
    bench.reserve(subject)
    forecast = bench.scheduler._admission._forecast
    assert [forecast.held((subject, choice))[0] for choice in (0, 1)] == [9, 999]
    bench.step()
    assert bench.scheduler.num_expected == num_expected, "999 tokens, a block for each 4, and the prompt's 10 blocks"


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
    assert bench.scheduler.batch.num_running == 0
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
    assert bench.scheduler.batch.num_running == 1
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
    # 2 blocks, and 10 of which 8 are cached; and 3 that both will grow by.
    assert bench.reserve(request("follow-up", tokens("first", 32) + tokens("more", 8))) == []


def with_lengths_up_to(num_lengths: int, quantile: float) -> tuple[Bench, DecodeChoice]:
    """Answers of 8, 16, 24 … tokens have been seen, each once; one that runs, of that quantile among them."""
    bench = Bench(500)
    for number in range(1, num_lengths + 1):
        bench.enter(request("seen", 8 * number, num_output=8 * number - 1, salt="seen"), "stop")
    [choice] = bench.enter(request("long", 4))
    choice.quantile = quantile
    return bench, choice


def test_one_that_outlives_what_was_expected_is_judged_anew_among_the_lengths_that_are_left() -> None:
    """By another quantile: with the old one, a low one, the next length would always be expected, and never reached."""
    bench, choice = with_lengths_up_to(40, quantile=0.0)
    step = bench.begin_step()
    first_end = bench.scheduler._admission._expected_ends[choice]
    bench.end_step(step)
    assert first_end == bench.scheduler.batch.step + 7, "it has the first of 8 tokens"
    bench.steps(7)
    num_left = 40 - choice.sequence.num_output // 8
    expected = 8 * (40 - num_left + int(quantile_of(0) * num_left) + 1)
    last_end = bench.scheduler._admission._expected_ends[choice]
    assert 8 + last_end - first_end == expected, "0.618 of the way through those that are left"


def test_one_that_goes_on_and_on_is_judged_anew_a_few_times() -> None:
    bench, choice = with_lengths_up_to(40, quantile=0.0)
    ends = set()
    for _ in range(8 * 40):
        bench.step()
        ends.add(bench.scheduler._admission._expected_ends[choice])
    assert len(ends) < 12, "not at every length that it outlives"


def test_what_is_expected_of_one_that_outlives_keeps_others_out() -> None:
    bench, choice = with_lengths_up_to(40, quantile=0.0)
    bench.step()
    before = bench.scheduler.num_expected
    bench.steps(8)
    assert bench.scheduler.num_expected > before + (40 * 8 * 0.6) // 4 - 8
    assert choice.quantile == quantile_of(0)


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


@pytest.mark.parametrize("tier", Tier)
def test_a_moving_sequence_comes_in_only_if_it_has_a_place_in_the_batch_at_once(tier: Tier) -> None:
    """A lower tier gives its place up."""
    bench = Bench(100, max_num_seqs=2, memory_reserve=EAGER)
    for name in "ab":
        bench.run(request(name, 4))
    mover = request("mover", 4, tier=tier, moving=True)
    assert bench.reserve(mover) == (["mover"] if tier is INTERACTIVE else [])
    if tier is INTERACTIVE:
        assert bench.scheduler.entrance.promise_place(mover)
        [choice] = bench.settle(mover)
        assert choice in bench.step().decodes


def test_a_place_that_is_not_given_up_since_its_sequence_had_waited_long_is_not_counted_on() -> None:
    bench = Bench(100, max_num_seqs=1, memory_reserve=EAGER, ageing_s=10.0)
    vip = bench.run(request("vip", 4, tier=INTERACTIVE))
    [aged] = bench.enter(request("aged", 4, tier=BATCH))
    bench.now += 11.0
    bench.step(ends=[vip])
    assert bench.step().decodes == [aged]
    assert bench.reserve(request("mover", 4, tier=INTERACTIVE, moving=True)) == []


def test_a_place_that_is_promised_to_a_moving_sequence_is_given_to_nobody_else() -> None:
    bench = Bench(100, max_num_seqs=1, memory_reserve=EAGER)
    mover, other = request("mover", 4, moving=True), request("other", 4)
    assert bench.reserve(mover) == ["mover"]
    assert bench.scheduler.entrance.promise_place(mover)
    assert bench.reserve(other) == [], "it might begin first"
    [choice] = bench.settle(mover)
    assert bench.step().decodes == [choice]
    assert list(bench.pulling) == ["other"], "it is ready when the place becomes free"


def test_a_promised_place_is_not_one_that_is_not_given_up() -> None:
    """An aged sequence has one of two places: who came in beside the promise might take the other one."""
    bench = Bench(100, max_num_seqs=2, memory_reserve=EAGER, ageing_s=10.0)
    vips = [bench.run(request(f"vip {number}", 4, tier=INTERACTIVE)) for number in range(2)]
    [aged] = bench.enter(request("aged", 4, tier=BATCH))
    bench.now += 11.0
    bench.step(ends=vips)
    assert bench.step().decodes == [aged]
    mover, other = (request(name, 4, tier=INTERACTIVE, moving=name == "mover") for name in ("mover", "other"))
    assert bench.reserve(mover) == ["mover"]
    assert bench.scheduler.entrance.promise_place(mover)
    assert bench.reserve(other) == []


def test_a_place_that_others_have_taken_is_not_promised() -> None:
    bench = Bench(100, max_num_seqs=1, memory_reserve=EAGER)
    mover, other = request("mover", 4, moving=True), request("other", 4)
    assert bench.reserve(mover) == ["mover"]
    assert bench.reserve(other) == ["other"]
    assert not bench.scheduler.entrance.promise_place(mover)
    bench.forget(other)
    assert bench.scheduler.entrance.promise_place(mover)
    bench.forget(mover)
    assert bench.reserve(request("next", 4), request("after next", 4)) == ["next", "after next"], "nothing is kept"


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


# --- what a tenant is charged ------------------------------------------------------------------------------------


def test_a_tenant_is_charged_two_for_each_step_of_each_sequence_and_one_for_each_prompt_token() -> None:
    bench = Bench(64, memory_reserve=EAGER, max_num_seqs=3)
    charged = [0.0]

    def more() -> float:
        charged.append(bench.scheduler.entrance.waiting.counter(STANDARD, "a"))
        return charged[-1] - charged[-2]

    a, b = [bench.enter(request(name, 4, tenant="a"))[0] for name in "ab"]
    bench.step()
    assert more() == 0.0, "what a step gives is charged when the next one begins"
    bench.steps(3)
    assert more() == 3 * 2 * 2
    bench.reserve(request("computed", 10, tenant="a", local=True))
    bench.step()
    assert more() == 2 * 2 + 10
    for number in range(2):
        bench.enter(request(f"vip {number}", 4, tenant="a", tier=INTERACTIVE))
    bench.step()
    more()
    bench.step()
    assert more() == 2, "one of three has a place"
    bench.forget(a.request)
    bench.forget(b.request)
    more()
    bench.steps(3)
    assert more() == 2 * 2, "the one that was computed here has taken their place"


def test_who_was_refused_for_a_sequence_about_to_join_comes_in_once_it_has_joined() -> None:
    """It might have needed a block, and did not; no block has become free."""
    bench = Bench(2, memory_reserve=EAGER)
    bench.enter(request("a", 2, max_tokens=9))
    assert bench.reserve(request("b", 2, max_tokens=9)) == []
    bench.end_step(bench.begin_step())
    assert bench.reserve() == ["b"]


def test_who_was_refused_by_the_forecast_comes_in_before_anybody_has_ended() -> None:
    """Just before the first one ends there are 18 blocks in use, and one more for each 4 steps that it has left."""
    bench = Bench(22)
    bench.profile(40)
    first = bench.run(request("first", 16))
    assert bench.reserve(request("second", 16)) == []
    bench.steps(20)
    assert not bench.pulling
    bench.steps(8)
    assert list(bench.pulling) == ["second"]
    assert first.stage is ChoiceStage.RUNNING


def test_who_does_not_fit_is_looked_at_once_in_as_many_steps_as_a_block_has_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, looked_at = Bench(8, memory_reserve=EAGER), list[object]()
    bench.run(request("a", 2))
    assert bench.reserve(request("b", 32)) == []

    def match(hashes: object) -> list[int]:
        looked_at.append(hashes)
        return []

    monkeypatch.setattr(bench.pool, "match", match)
    bench.steps(5 * BLOCK_SIZE)
    assert len(looked_at) == 5


def test_a_mask_of_a_running_sequence_has_nobody_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one in each step for each sequence with a grammar, and it makes no room."""
    bench, looked_at = Bench(2, memory_reserve=EAGER), list[object]()
    choice = bench.run(request("a", 2))
    assert bench.reserve(request("b", 8)) == []

    def match(hashes: object) -> list[int]:
        looked_at.append(hashes)
        return []

    monkeypatch.setattr(bench.pool, "match", match)
    for _ in range(10):
        bench.scheduler.entrance.mask_awaited(choice)
        bench.scheduler.entrance.mask_known(choice)
        assert bench.reserve() == []
    assert not looked_at
