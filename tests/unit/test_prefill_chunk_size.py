"""How many tokens of a prompt a step of a prefill worker computes: no more than a prompt that arrives can wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_prefill_scheduler import BATCH, BLOCK_SIZE, INTERACTIVE, STANDARD, TARGETS_S, request

import prefill_worker.scheduler
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from prefill_worker.scheduler import LEAST_CHUNK_TOKENS, SHARED_STEP_S, PrefillScheduler

MOST = 512
LONGEST_STEP_S = TARGETS_S[INTERACTIVE] / 2


def scheduler(
    costs: Costs, *, chunk_size: int = MOST, ttft_target_s: Callable[[Tier], float] = TARGETS_S.__getitem__
) -> PrefillScheduler:
    return PrefillScheduler(
        BlockPool(50_000, prefix_cache=False),
        block_size=BLOCK_SIZE,
        chunk_size=chunk_size,
        token_budget=2 * chunk_size,
        max_waiting=1000,
        ageing_s=math.inf,
        ttft_target_s=ttft_target_s,
        costs=costs,
    )


def first_chunk(made: PrefillScheduler, tier: Tier = BATCH) -> int:
    """Tokens of a prompt of 4,000 tokens that the first step computes."""
    made.add(request("prompt", 4000, tier=tier))
    made.admit(0.0)
    (chunk,) = made.schedule(0.0)
    return chunk.end - chunk.start


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(
    ("token_s", "step_s", "num_tokens"),
    [
        (0.0, 0.0, MOST),
        (0.0, 1.0, MOST),
        (1e-4, 0.0, MOST),
        (LONGEST_STEP_S / MOST, 0.0, MOST),
        (1e-3, 0.0, 250),
        (1e-3, 0.05, 200),
        (1e-2, 0.0, LEAST_CHUNK_TOKENS),
        (1e-3, 1.0, LEAST_CHUNK_TOKENS),
    ],
)
def test_a_step_takes_half_of_the_shortest_target(tier: Tier, token_s: float, step_s: float, num_tokens: int) -> None:
    """Whatever tier the prompt has: one of the tier with the shortest target may arrive next."""
    chunk = first_chunk(scheduler(Costs(prefill_s_per_token=token_s, step_s=step_s)), tier)
    assert chunk == pytest.approx(num_tokens, abs=1)


def test_the_setting_bounds_a_chunk_however_few_tokens_it_names() -> None:
    assert first_chunk(scheduler(Costs(prefill_s_per_token=1.0), chunk_size=8)) == 8


def test_targets_without_an_end_leave_the_setting() -> None:
    assert first_chunk(scheduler(Costs(prefill_s_per_token=1.0), ttft_target_s=lambda tier: math.inf)) == MOST


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [
        ((200, 200, 200), [200]),
        ((150, 200, 200), [150, 200]),
        ((70, 80, 90, 100), [70, 80, 90]),
        ((70, 80), [70, 80]),
        ((900, 900), [512, 488]),
        ((100, 900), [100, 512]),
    ],
)
def test_a_step_with_enough_tokens_takes_no_prompt_after_one_that_ends(
    lengths: Sequence[int], computed: list[int]
) -> None:
    """Tokens that take eight times its fixed time, here 160. A step is to take 0.1 s, here of 1,000 tokens."""
    made = scheduler(Costs(prefill_s_per_token=1e-4, step_s=2e-3))
    for number, length in enumerate(lengths):
        made.add(request(f"p{number}", length))
    made.admit(0.0)
    assert [chunk.end for chunk in made.schedule(0.0)] == computed


@pytest.mark.parametrize(("now", "computed"), [(0.0, [200]), (100.0, [200, 200, 200])])
def test_prompts_share_a_step_once_they_are_late(now: float, computed: list[int]) -> None:
    made = scheduler(Costs(prefill_s_per_token=1e-4, step_s=2e-3))
    for number in range(3):
        made.add(request(f"p{number}", 200))
    made.admit(0.0)
    assert [chunk.end for chunk in made.schedule(now)] == computed


def test_prompts_of_a_few_tokens_share_a_step_whatever_its_fixed_time_is() -> None:
    made = scheduler(Costs(prefill_s_per_token=1e-4))
    for number in range(10):
        made.add(request(f"p{number}", 20))
    made.admit(0.0)
    assert [chunk.end for chunk in made.schedule(0.0)] == [20] * 4


def test_prompts_share_no_longer_step_than_one_may_take() -> None:
    made = scheduler(Costs(prefill_s_per_token=1e-3, step_s=0.01), ttft_target_s=lambda tier: 0.1)
    for number in range(10):
        made.add(request(f"p{number}", 40))
    made.admit(0.0)
    assert [chunk.end for chunk in made.schedule(0.0)] == [40, 10]


# --- a queue on a modelled clock -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    at: float
    num_tokens: int
    tier: Tier


def ttfts_s(coming: Sequence[Arrival], costs: Costs) -> tuple[list[float], int]:
    """(seconds from each arrival to its first token, number of steps)."""
    made, now, num_steps, arrived = scheduler(costs), 0.0, 0, 0
    done_at = [math.inf] * len(coming)
    while arrived < len(coming) or made.num_uncomputed:
        if not made.num_uncomputed:
            now = max(now, coming[arrived].at)
        while arrived < len(coming) and coming[arrived].at <= now:
            each = coming[arrived]
            made.add(request(str(arrived), each.num_tokens, tier=each.tier, arrived=each.at, deadline=math.inf))
            arrived += 1
        made.admit(now)
        chunks = made.schedule(now)
        assert chunks, "no progress"
        now += costs.step_s + sum(chunk.end - chunk.start for chunk in chunks) * costs.prefill_s_per_token
        num_steps += 1
        for chunk in made.step_done(chunks):
            if chunk.last:
                done_at[int(chunk.prompt.key.request)] = now
                made.holdings.end(chunk.prompt.key)
    made.check_invariants()
    return [done - each.at for done, each in zip(done_at, coming, strict=True)], num_steps


def traffic(*, short: st.SearchStrategy[int]) -> st.SearchStrategy[list[Arrival]]:
    """Interactive prompts of `short` tokens, beside long ones of other tiers."""
    kinds = st.one_of(
        st.tuples(short, st.just(INTERACTIVE)), st.tuples(st.integers(200, 3000), st.sampled_from([STANDARD, BATCH]))
    )
    arrivals = st.builds(lambda at, kind: Arrival(at, *kind), st.floats(0.0, 20.0), kinds)
    return st.lists(arrivals, min_size=1, max_size=20).map(lambda some: sorted(some, key=lambda each: each.at))


def fixed(patch: pytest.MonkeyPatch) -> None:
    """Let costs shorten no chunk."""
    patch.setattr(prefill_worker.scheduler, "LEAST_CHUNK_TOKENS", MOST)


@settings(max_examples=60, deadline=None)
@given(traffic(short=st.integers(1, LEAST_CHUNK_TOKENS)), st.floats(1e-4, 3.5e-3), st.floats(0.0, 0.02))
@example(  # fixed chunks are done just before the last prompt comes, which then shares no step
    [
        *(Arrival(0.0, num, INTERACTIVE) for num in (1, 1, 1, 1, 35, 53)),
        *(Arrival(0.0, num, STANDARD) for num in (1084, 1249)),
        *(Arrival(at, num, BATCH) for at, num in ((5.0, 1849), (7.0, 446), (13.0, 540), (14.0, 1031), (17.0, 561))),
        Arrival(18.82590716113657, 11, INTERACTIVE),
    ],
    0.002660860803563374,
    0.01953125,
)
def test_a_prompt_on_time_with_fixed_chunks_is_on_time(coming: list[Arrival], token_s: float, step_s: float) -> None:
    """Except for less than half of the target, and for tokens of other prompts that share its step: a prompt that finds
    a long step at its very end, or nobody else's tokens, was lucky. All steps together take little longer: each but the
    last one of a prompt has a whole chunk."""
    costs = Costs(prefill_s_per_token=token_s, step_s=step_s)
    chosen_s, num_steps = ttfts_s(coming, costs)
    with pytest.MonkeyPatch.context() as patch:
        fixed(patch)
        fixed_s, _ = ttfts_s(coming, costs)
    for each, chosen, otherwise in zip(coming, chosen_s, fixed_s, strict=True):
        if each.tier is INTERACTIVE:
            assert chosen <= otherwise + LONGEST_STEP_S + SHARED_STEP_S + 1e-6
    chunk = min(MOST, int((LONGEST_STEP_S - step_s) / token_s))
    assert chunk >= LEAST_CHUNK_TOKENS
    assert num_steps <= sum(each.num_tokens / chunk + 1 for each in coming)


def beside_long_prompts(token_s: float) -> tuple[list[Arrival], Costs]:
    """An interactive prompt every 2.03 s beside two long prompts, and what they cost."""
    long = [Arrival(0.0, 8000, tier) for tier in (STANDARD, BATCH)]
    short = [Arrival(0.1 + 2.03 * number, 32, INTERACTIVE) for number in range(int(8000 * token_s))]
    return long + short, Costs(prefill_s_per_token=token_s, step_s=0.002)


def num_late(coming: Sequence[Arrival], took_s: Sequence[float], costs: Costs) -> int:
    """Interactive prompts whose first token came after the target and the time of their own tokens."""
    due_s = [TARGETS_S[INTERACTIVE] + each.num_tokens * costs.prefill_s_per_token for each in coming]
    return sum(t > d for t, d, each in zip(took_s, due_s, coming, strict=True) if each.tier is INTERACTIVE)


@pytest.mark.parametrize("token_s", [1.5e-3, 3.5e-3])
def test_long_prompts_make_no_interactive_one_late(token_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    coming, costs = beside_long_prompts(token_s)
    chosen_s, num_steps = ttfts_s(coming, costs)
    assert num_late(coming, chosen_s, costs) == 0
    fixed(monkeypatch)
    fixed_s, num_fixed = ttfts_s(coming, costs)
    assert num_late(coming, fixed_s, costs) > len(coming) / 5, "or there is nothing to be gained"
    took_s = [num * costs.step_s + sum(each.num_tokens for each in coming) * token_s for num in (num_steps, num_fixed)]
    assert took_s[0] < 1.02 * took_s[1]
