"""How many prompt tokens a step with decodes takes."""

from __future__ import annotations

from typing import Any

import pytest
from decode_bench import EAGER, Bench, request

from common.contract.tiers import Tier
from common.scheduling.costs import Costs

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


def costs(step_s: float = 0.02, sequence_s: float = 0.0, token_s: float = 1e-4) -> Costs:
    return Costs(step_s=step_s, decode_s_per_sequence=sequence_s, prefill_s_per_token=token_s)


@pytest.mark.parametrize(
    ("tiers", "num_tokens"),
    [
        ((), 2048),
        ((Tier.STANDARD,), 1800),
        ((Tier.INTERACTIVE,), 800),
        ((Tier.BATCH, Tier.STANDARD, Tier.INTERACTIVE), 800),
        ((Tier.BATCH,), 2047),
    ],
)
def test_a_step_takes_the_shortest_target_of_who_decodes(tiers: tuple[Tier, ...], num_tokens: int) -> None:
    assert chunk_beside(*tiers, costs=costs()) == pytest.approx(num_tokens, abs=1)


def test_what_the_decodes_take_is_left_to_them() -> None:
    assert chunk_beside(*4 * [Tier.STANDARD], costs=costs(sequence_s=0.02)) == pytest.approx(1000, abs=1)


def test_prompts_get_half_of_a_step_that_cannot_meet_the_target() -> None:
    assert chunk_beside(Tier.STANDARD, costs=costs(step_s=0.3, token_s=1e-3), prompt=Tier.BATCH) == pytest.approx(
        300, abs=1
    )


def test_a_prompt_that_would_be_late_may_take_one_target_more() -> None:
    # Its deadline is 2 s and the time of its own 4,000 tokens. At 180 tokens a step it is done after 23 steps of 0.2 s.
    slow = costs(token_s=1e-3)
    assert chunk_beside(Tier.STANDARD, costs=slow) == pytest.approx(180, abs=1)
    assert chunk_beside(Tier.STANDARD, costs=slow, waited_s=1.3) == pytest.approx(180, abs=1)
    assert chunk_beside(Tier.STANDARD, costs=slow, waited_s=1.5) == pytest.approx(380, abs=1)


def test_a_step_computes_some_tokens_however_dear_they_are() -> None:
    assert chunk_beside(Tier.INTERACTIVE, costs=costs(step_s=0.0, token_s=1.0), prompt=Tier.BATCH) == 16


def test_a_number_that_is_set_holds() -> None:
    assert chunk_beside(Tier.STANDARD, costs=costs(), prefill_tokens=128) == 128
    assert chunk_beside(costs=costs(), prefill_tokens=128) == 2048, "without decodes"


def test_the_time_of_a_sequence_is_learnt_from_steps_of_decodes() -> None:
    learnt = costs()
    learnt.observe_step(0, 10, 0.05)
    assert learnt.decode_s(10) == pytest.approx(0.05)
    for _ in range(100):
        learnt.observe_step(0, 20, 0.04)
    assert learnt.decode_s(20) == pytest.approx(0.04, rel=0.01)
    learnt.observe_step(0, 20, 3600.0)
    assert learnt.decode_s(20) < 0.06, "the process was stopped for an hour"
    assert learnt.prefill_s_per_token == 1e-4


def test_the_time_of_a_token_is_learnt_beside_decodes() -> None:
    learnt = costs(sequence_s=0.001)
    for _ in range(100):
        learnt.observe_step(256, 30, 0.02 + 30 * 0.001 + 256 * 2e-4)
    assert learnt.prefill_s_per_token == pytest.approx(2e-4, rel=0.01)
    assert learnt.decode_s_per_sequence == 0.001
