"""How many prompt tokens a step with decodes takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from decode_bench import EAGER, Bench, request
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.tiers import Tier
from common.scheduling.costs import Costs
from decode_worker.local_prompts import _beside

TTFT_S = {Tier.INTERACTIVE: 0.5, Tier.STANDARD: 2.0, Tier.BATCH: 60.0}
ITL_S = {Tier.INTERACTIVE: 0.1, Tier.STANDARD: 0.2, Tier.BATCH: 1.0}


def chunk_beside(*tiers: Tier, costs: Costs, prompt: Tier = Tier.STANDARD, waited_s: float = 0.0, **policy: Any) -> int:
    """Tokens of a prompt of 4,000 tokens that a step with a decode of each of `tiers` takes. The prompt has waited for
    `waited_s`."""
    options: dict[str, Any] = {"token_budget": 2048, "ttft_target_s": TTFT_S.get, "itl_target_s": ITL_S.get}
    bench = Bench(2048, costs=costs, memory_reserve=EAGER, **options | policy)
    for number, tier in enumerate(tiers):
        bench.enter(request(f"decode {number}", 8, tier=tier))
    waiting = request("prompt", 4000, tier=prompt, local=True)
    bench.reserve(waiting)
    bench.now = waited_s
    step = bench.scheduler.schedule(bench.now)
    assert len(step.decodes) == len(tiers)
    (chunk,) = step.chunks
    return chunk.end - chunk.start


def chunks_of(lengths: Sequence[int], *, costs: Costs, waited_s: float = 0.0, num_decodes: int = 1) -> list[int]:
    """Tokens of prompts of so many tokens that a step with decodes takes; 0 for those of which it takes none. All
    prompts have waited for `waited_s`."""
    bench = Bench(2048, costs=costs, memory_reserve=EAGER, token_budget=2048, itl_target_s=ITL_S.get)
    for number in range(num_decodes):
        bench.enter(request(f"decode {number}", 8))
    waiting = [request(f"prompt {number}", length, local=True) for number, length in enumerate(lengths)]
    bench.reserve(*waiting)
    bench.now = waited_s
    step = bench.scheduler.schedule(bench.now)
    taken = {chunk.prompt.request: chunk.end - chunk.start for chunk in step.chunks}
    return [taken.get(each, 0) for each in waiting]


def costs(decode_s: float = 0.02, token_s: float = 1e-4) -> Costs:
    return Costs(decode_s=decode_s, prefill_s_per_token=token_s)


@pytest.mark.parametrize(
    ("tiers", "num_tokens"),
    [
        ((), 2048),
        ((Tier.STANDARD,), 1400),
        ((Tier.INTERACTIVE,), 600),
        ((Tier.BATCH, Tier.STANDARD, Tier.INTERACTIVE), 600),
        ((Tier.BATCH,), 2047),
    ],
)
def test_a_step_takes_four_fifths_of_the_shortest_target_of_who_decodes(
    tiers: tuple[Tier, ...], num_tokens: int
) -> None:
    assert chunk_beside(*tiers, costs=costs()) == pytest.approx(num_tokens, abs=1)


def test_it_takes_up_to_all_of_the_target_where_prompts_would_otherwise_be_late() -> None:
    # The deadline is 2 s and the time of its own 4,000 tokens, 4 s. At 140 tokens in 0.16 s they take 4.57 s.
    slow = costs(token_s=1e-3)
    assert chunk_beside(Tier.STANDARD, costs=slow) == pytest.approx(140, abs=1)
    assert chunk_beside(Tier.STANDARD, costs=slow, waited_s=1.4) == pytest.approx(140, abs=1)
    assert chunk_beside(Tier.STANDARD, costs=slow, waited_s=1.5) == pytest.approx(160, abs=1), "4.5 s suffice"
    assert chunk_beside(Tier.STANDARD, costs=slow, waited_s=1.6) == pytest.approx(180, abs=1), "4.4 s do not"
    assert chunk_beside(Tier.STANDARD, costs=slow, waited_s=100.0) == pytest.approx(180, abs=1), "it is late"


SLOW = Costs(least_step_s=0.1, decode_s=0.12, prefill_s_per_token=2e-3)
"""Beside the decodes the target of 0.2 s leaves 40 prompt tokens, and four fifths of it leave 20."""


def test_a_late_prompt_lets_a_step_take_seven_times_the_least_if_the_target_leaves_less() -> None:
    # At 40 tokens in 0.2 s its 4,000 tokens take 20 s. The deadline is 2 s and their own 8 s.
    assert chunk_beside(Tier.STANDARD, costs=SLOW) == pytest.approx(240, abs=1), "10 s suffice"
    assert chunk_beside(Tier.STANDARD, costs=SLOW, waited_s=0.05) == pytest.approx(247, abs=1), "9.95 s do, too"
    assert chunk_beside(Tier.STANDARD, costs=SLOW, waited_s=1.0) == pytest.approx(290, abs=1)
    assert chunk_beside(Tier.STANDARD, costs=SLOW, prompt=Tier.BATCH) == pytest.approx(20, abs=1), "nothing is late"
    assert chunk_beside(Tier.BATCH, costs=SLOW, waited_s=100.0) == pytest.approx(440, abs=1), "their target is 1 s"


@pytest.mark.parametrize(
    ("least_step_s", "step_s"),
    [(0.01, 0.2), (0.0167, 0.2), (0.03, 0.36), (0.035, 0.4), (0.05, 0.4), (0.07, 0.49), (0.08, 0.56)],
)
def test_a_step_with_a_late_prompt_takes_as_long_as_a_newcomer_can_wait_but_seven_to_twelve_times_the_least(
    least_step_s: float, step_s: float
) -> None:
    """A newcomer can wait for 0.4 s. The step never takes less than the target, which is 0.2 s."""
    learnt = Costs(least_step_s=least_step_s, decode_s=0.1, prefill_s_per_token=1e-3)
    late = chunk_beside(Tier.STANDARD, costs=learnt, waited_s=100.0)
    assert late == pytest.approx(1000 * (step_s - 0.1), abs=1)


def test_a_late_prompt_does_not_make_tokens_of_a_higher_tier_late() -> None:
    for tiers in [(Tier.INTERACTIVE,), (Tier.STANDARD, Tier.INTERACTIVE)]:
        assert chunk_beside(*tiers, costs=SLOW, waited_s=100.0) == 16, "at least so many"
    late = chunk_beside(Tier.INTERACTIVE, costs=SLOW, prompt=Tier.INTERACTIVE, waited_s=100.0)
    assert late == pytest.approx(290, abs=1)


def test_prompts_of_a_lower_tier_do_not_come_in_behind_a_late_one() -> None:
    """The step is longer for the one that is late alone."""
    targets: dict[str, Any] = {"ttft_target_s": TTFT_S.get, "itl_target_s": ITL_S.get}
    bench = Bench(2048, costs=SLOW, memory_reserve=EAGER, token_budget=2048, **targets)
    bench.enter(request("decode", 8, tier=Tier.INTERACTIVE))
    urgent, backlog = request("urgent", 100, tier=Tier.INTERACTIVE, local=True), request("backlog", 4000, local=True)
    bench.reserve(urgent, backlog)
    bench.now = 10.0
    chunks = {each.prompt.request: each.end - each.start for each in bench.scheduler.schedule(bench.now).chunks}
    assert chunks == {urgent: 100}


def test_a_worker_for_latency_keeps_to_the_target_however_late_a_prompt_is() -> None:
    late = chunk_beside(Tier.STANDARD, costs=SLOW, waited_s=100.0, step_target_s=0.1)
    assert late == pytest.approx(40, abs=1)


@pytest.mark.parametrize("token_s", [1e-3, 1.5e-3, 3e-3])
def test_a_step_with_late_prompts_comes_to_take_what_it_should_though_tokens_take_longer(token_s: float) -> None:
    """What they take too long counts as the decodes' time: fewer go into the next steps, but not less than a quarter of
    the time by their estimate."""
    learnt = Costs(least_step_s=0.1, decode_s=0.12, prefill_s_per_token=1e-3)
    for _ in range(60):
        num_tokens = chunk_beside(Tier.STANDARD, costs=learnt, waited_s=100.0)
        learnt.observe_step(num_tokens, 1, 0.1 + num_tokens * token_s)
    assert 0.1 + num_tokens * token_s <= 0.72
    assert num_tokens >= 174


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [
        ((512, 512, 512), [512, 0, 0]),
        ((200, 512), [200, 0]),
        ((150, 512), [150, 512]),
        ((50, 60, 70, 80, 90), [50, 60, 70, 80, 0]),
        ((50, 60, 70), [50, 60, 70]),
        ((10, 1500, 20), [10, 1370, 20]),
    ],
)
def test_a_step_ends_with_the_prompt_with_which_prompts_take_as_long_as_the_decodes(
    lengths: tuple[int, ...], taken: list[int]
) -> None:
    """Here as long as 200 tokens; and a step has at most 1,400. Shorter prompts are due earlier."""
    assert chunks_of(lengths, costs=costs()) == taken


def test_prompts_of_a_few_tokens_share_a_step_however_fast_its_decodes_are() -> None:
    assert chunks_of((5, 6, 7, 8), costs=costs(decode_s=0.0)) == [5, 6, 7, 0]
    assert chunks_of((5, 6, 7, 8), costs=costs(decode_s=0.01, token_s=0.0)) == [5, 6, 7, 8]


@pytest.mark.parametrize(("now", "taken"), [(1.0, [250]), (2.0, [250, 300])])
def test_a_prompt_of_a_lower_tier_shares_the_step_once_it_would_be_late(now: float, taken: list[int]) -> None:
    """It is due after 2.03 s, and a new prompt of a higher tier comes before each step."""
    targets: dict[str, Any] = {"ttft_target_s": TTFT_S.get, "itl_target_s": ITL_S.get}
    bench = Bench(2048, costs=costs(), memory_reserve=EAGER, token_budget=2048, **targets)
    bench.enter(request("decode", 8))
    bench.now = now
    bench.reserve(request("standard", 300, local=True))
    bench.reserve(request("interactive", 250, tier=Tier.INTERACTIVE, local=True, arrived=now))
    assert [chunk.end for chunk in bench.scheduler.schedule(now).chunks] == taken


def test_a_prompt_ends_with_its_step_beside_the_share_of_an_aged_tier() -> None:
    """Nobody is late: the batch prompt has a minute."""
    targets: dict[str, Any] = {"ttft_target_s": TTFT_S.get, "itl_target_s": ITL_S.get}
    bench = Bench(2048, costs=costs(), memory_reserve=EAGER, token_budget=2048, ageing_s=1.0, **targets)
    bench.enter(request("decode", 8))
    bench.reserve(request("batch", 800, tier=Tier.BATCH, local=True))
    bench.now = 5.0
    bench.reserve(request("interactive", 300, tier=Tier.INTERACTIVE, local=True, arrived=5.0))
    first, *_ = bench.scheduler.schedule(bench.now).chunks
    assert (first.prompt.request.key.request, first.last) == ("interactive", True)


@pytest.mark.parametrize("decodes", [(), (Tier.BATCH,)])
def test_prompts_that_can_wait_do_not_make_one_late(decodes: tuple[Tier, ...]) -> None:
    """The interactive prompt is due after 0.67 s, and its first token comes at the end of its step. Behind it are
    prompts of 13.6 s, which have a minute."""
    dear = Costs(step_s=0.005, decode_s=0.03, prefill_s_per_token=1.7e-3)
    targets: dict[str, Any] = {"ttft_target_s": TTFT_S.get, "itl_target_s": ITL_S.get}
    bench = Bench(2048, costs=dear, memory_reserve=EAGER, token_budget=2048, **targets)
    for tier in decodes:
        bench.enter(request("decode", 8, tier=tier))
    urgent = request("urgent", 100, tier=Tier.INTERACTIVE, local=True)
    bench.reserve(urgent, *(request(f"batch {number}", 1000, tier=Tier.BATCH, local=True) for number in range(8)))
    chunks = {each.prompt.request: each.end - each.start for each in bench.scheduler.schedule(bench.now).chunks}
    assert chunks == {urgent: 100}


def test_a_sequence_that_waits_for_its_mask_does_not_stand_still_for_a_long_step() -> None:
    targets: dict[str, Any] = {"ttft_target_s": TTFT_S.get, "itl_target_s": ITL_S.get}
    bench = Bench(2048, costs=costs(), memory_reserve=EAGER, token_budget=2048, **targets)
    (choice,) = bench.enter(request("decode", 8))
    bench.reserve(request("prompt", 4000, local=True))
    bench.scheduler.entrance.mask_awaited(choice)
    step = bench.scheduler.schedule(bench.now)
    assert step.decodes == []
    (chunk,) = step.chunks
    assert chunk.end - chunk.start == pytest.approx(1400, abs=1), "as if it decoded in this step"


def test_a_step_that_decodes_fill_has_no_prompts() -> None:
    bench = Bench(2048, costs=costs(), memory_reserve=EAGER, token_budget=1, itl_target_s=ITL_S.get)
    bench.enter(request("decode", 8))
    bench.reserve(request("prompt", 300, local=True))
    step = bench.scheduler.schedule(bench.now)
    assert (len(step.decodes), step.chunks) == (1, [])


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [((512, 512), [512, 0]), ((150, 512), [150, 512]), ((50, 60, 70, 80), [50, 60, 70, 0]), ((4000, 20), [2028, 20])],
)
def test_a_step_without_decodes_ends_with_the_prompt_with_which_it_has_enough_tokens(
    lengths: tuple[int, ...], taken: list[int]
) -> None:
    """Those that take eight times its fixed time, here 160."""
    alone = Costs(step_s=2e-3, prefill_s_per_token=1e-4, decode_s=0.1)
    assert chunks_of(lengths, costs=alone, num_decodes=0) == taken
    assert chunks_of((512, 512), costs=alone, num_decodes=0, waited_s=100.0) == [512, 512], "they are late"


@pytest.mark.parametrize("prefill_priority", [False, True])
@pytest.mark.parametrize("waited_s", [0.0, 100.0])
@pytest.mark.parametrize(
    ("token_s", "step_s", "num"),
    [(1e-4, 0.0, 2048), (1e-3, 0.0, 400), (1e-3, 0.1, 300), (6e-3, 0.0, 128), (0.1, 0.0, 128), (1e-3, 1.0, 128)],
)
def test_a_step_without_decodes_is_no_longer_than_a_newcomer_can_wait(
    token_s: float, step_s: float, num: int, waited_s: float, prefill_priority: bool
) -> None:
    """However late its prompts are: 0.4 s, if 128 tokens take no longer."""
    how: dict[str, Any] = {"prompt": Tier.BATCH, "waited_s": waited_s, "prefill_priority": prefill_priority}
    alone = Costs(prefill_s_per_token=token_s, step_s=step_s)
    assert chunk_beside(costs=alone, **how) == pytest.approx(num, abs=1)
    assert chunk_beside(costs=alone, token_budget=100, **how) == 100


def test_prompts_share_a_step_where_one_after_the_other_would_be_late() -> None:
    # The first is due after its target of 1 s and the time of its own 512 tokens, 0.05 s. All take 0.21 s in steps of
    # one prompt, with 0.02 s of decodes in each, and 0.17 s in steps of 1,400 tokens.
    prompts = (512, 512, 512)
    assert chunks_of(prompts, costs=costs(), waited_s=0.82) == [512, 0, 0]
    assert chunks_of(prompts, costs=costs(), waited_s=0.86) == [512, 512, 376]
    assert chunks_of(prompts, costs=costs(), waited_s=0.88) == [512, 512, 512], "up to the whole target, if need be"


@pytest.mark.parametrize(("decode_s", "num_tokens"), [(0.07, 90), (0.11, 50), (0.13, 40), (0.3, 40)])
def test_prompts_go_on_where_decodes_alone_miss_the_target(decode_s: float, num_tokens: int) -> None:
    """They get a quarter of the time that the step should take."""
    slow = costs(decode_s=decode_s, token_s=1e-3)
    assert chunk_beside(Tier.STANDARD, costs=slow, prompt=Tier.BATCH) == pytest.approx(num_tokens, abs=1)


def test_a_step_computes_some_tokens_however_dear_they_are() -> None:
    dear = costs(decode_s=0.0, token_s=1.0)
    assert chunk_beside(Tier.INTERACTIVE, costs=dear, prompt=Tier.BATCH) == 16


def test_a_target_without_an_end_leaves_the_budget() -> None:
    assert chunk_beside(Tier.BATCH, costs=costs(), itl_target_s=lambda tier: math.inf) == 2047


def test_a_number_that_is_set_holds() -> None:
    assert chunk_beside(Tier.STANDARD, costs=costs(), prefill_tokens=128) == 128
    assert chunk_beside(costs=costs(), prefill_tokens=128) == 2048, "without decodes"


@settings(max_examples=60, deadline=None)
@given(
    guess=st.floats(0.5, 3.0),
    decode_s=st.floats(1e-4, 0.15),
    token_s=st.floats(1e-5, 2e-3),
    sequences=st.sampled_from([1, 32]),
)
def test_steps_come_to_take_what_they_should(guess: float, decode_s: float, token_s: float, sequences: int) -> None:
    """Whatever was estimated, and although no step has decodes alone. The estimate of a token, by which gateways route,
    stays that of prompts alone."""
    learnt, prompts_s = Costs(prefill_s_per_token=guess * token_s, decode_s=decode_s / sequences), 0.0
    for _ in range(60):
        prompts_s = _beside(learnt.decode_s, 0.2)
        num_tokens = max(1, int(prompts_s / learnt.prefill_s_per_token))
        learnt.observe_step(num_tokens, sequences, decode_s + num_tokens * token_s)
    assert decode_s + num_tokens * token_s <= max(0.2, decode_s + 0.05 / guess) + token_s + 1e-3
    assert learnt.prefill_s_per_token == guess * token_s


def test_a_process_that_was_stopped_does_not_change_what_follows() -> None:
    learnt = costs()
    learnt.observe_step(0, 10, 3600.0)
    assert learnt.decode_s <= 0.02 + 0.25 * 0.06
    for _ in range(20):
        learnt.observe_step(0, 10, 0.02)
    assert learnt.decode_s == pytest.approx(0.02, rel=0.01)
    assert learnt.prefill_s_per_token == 1e-4


def test_prompts_alone_tell_what_a_token_takes() -> None:
    learnt = costs()
    for _ in range(100):
        learnt.observe_step(256, 0, 256 * 2e-4)
    assert learnt.prefill_s_per_token == pytest.approx(2e-4, rel=0.01)
    assert learnt.decode_s == 0.02
