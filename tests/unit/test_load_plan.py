"""What the load generator plans: the same for the same seed, and with the statistics that it promises."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.load.arrivals import arrival_times, jittered, scaled
from benchmarks.load.encode import BodyEncoder, answer_message
from benchmarks.load.lengths import WORKLOADS, Clipped, Fixed
from benchmarks.load.plan import Plan, make_plan, warmup_plan
from benchmarks.load.settings import LoadSettings
from common.contract.errors import OperatorError

MANY = 40_000


def plan(**options: Any) -> Plan:
    return make_plan(LoadSettings(**options))


def bodies(load: Plan, **options: Any) -> list[bytes]:
    encoder = BodyEncoder(LoadSettings(**options), "m")
    return [body.bytes() for conversation in load.conversations for body in encoder.encode(conversation.turns)]


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma", 2.5), ("gamma", 0.5), ("constant", 0.0)])
def test_gaps_have_the_rate_and_the_variation_asked_for(process: Any, cv: float) -> None:
    times_s = arrival_times(process, 4.0, MANY, cv or 1.0, Random(f"arrivals {process} {cv}"))
    gaps = [later - earlier for earlier, later in pairwise(times_s)]
    assert times_s[0] == 0.0
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.06, abs=1e-6)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times("poisson", math.inf, 3, 1.0, Random(0)) == [0.0, 0.0, 0.0]


def test_jitter_spreads_a_tick_over_the_time_until_the_next() -> None:
    times_s = jittered([0.0] * 300 + [3.0] * 300 + [6.0] * 300, Random("jitter"))
    assert times_s == sorted(times_s)
    assert times_s[0] == 0.0
    assert len(set(times_s)) == 900
    assert all(
        3.0 * (index // 300) - 0.1 <= time_s < 3.0 * (index // 300) + 3.0 for index, time_s in enumerate(times_s)
    )
    assert jittered([7.0, 7.0], Random(0)) == [0.0, 0.0]


def test_scaling_keeps_the_pattern() -> None:
    assert scaled([0.0, 1.0, 4.0], 0.25) == [0.0, 2.0, 8.0]
    assert scaled([0.0, 1.0], None) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("workload", "mean_in", "sd_in", "mean_out", "sd_out"),
    [("azure-code", 2048, 1973, 28, 60), ("azure-conv", 1155, 1109, 211, 163)],
)
def test_azure_lengths_have_the_published_moments(
    workload: str, mean_in: int, sd_in: int, mean_out: int, sd_out: int
) -> None:
    for lengths, mean, sd in zip(WORKLOADS[workload], (mean_in, mean_out), (sd_in, sd_out), strict=True):
        random = Random(f"lengths {workload}")
        drawn = [lengths.draw(random) for _ in range(4 * MANY)]
        assert min(drawn) >= 1
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
        assert statistics.pstdev(drawn) == pytest.approx(sd, rel=0.12)


@pytest.mark.parametrize(
    ("workload", "which", "mean", "quantiles"),
    [
        ("sharegpt", 0, 306, {50: 74, 95: 1484}),
        ("sharegpt", 1, 500, {50: 487, 95: 988}),
        ("mooncake-conv", 0, 12035, {50: 6909, 99: 85400}),
        ("mooncake-conv", 1, 343, {50: 350, 99: 1118}),
    ],
)
def test_other_lengths_have_the_published_mean_and_quantiles(
    workload: str, which: int, mean: int, quantiles: dict[int, int]
) -> None:
    lengths = WORKLOADS[workload][which]
    assert lengths.mean == pytest.approx(mean, rel=0.02)  # type: ignore[attr-defined]
    random = Random(f"lengths {workload} {which}")
    drawn = [lengths.draw(random) for _ in range(2 * MANY)]
    cuts = statistics.quantiles(drawn, n=100)
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
    for percent, value in quantiles.items():
        assert cuts[percent - 1] == pytest.approx(value, rel=0.05)


def test_lengths_are_cut_where_told() -> None:
    assert Clipped(Fixed(9), 4).draw(Random(0)) == 4
    load = plan(workload="azure-conv", requests=300, max_input_tokens=64, max_output_tokens=16)
    turns = [conversation.turns[0] for conversation in load.conversations]
    assert max(turn.input_tokens for turn in turns) == 64
    assert max(turn.output_tokens for turn in turns) == 16
    assert all(len(json.loads(turn.prompt)) == turn.input_tokens for turn in turns)


@pytest.mark.parametrize("options", [{}, {"api": "chat", "turns": 3, "think_time_s": 1.0}, {"text": True}])
def test_the_same_seed_is_the_same_load_byte_for_byte(options: dict[str, Any]) -> None:
    common = {"requests": 20, "workload": "sharegpt", "arrivals": "gamma", "cv": 3.0, "rate": 5.0} | options
    one, again, other = plan(seed=3, **common), plan(seed=3, **common), plan(seed=4, **common)
    assert one == again
    assert bodies(one, **common) == bodies(again, **common)
    assert one.digest() == again.digest() != other.digest()


def test_the_seeds_draws_are_those_that_were_recorded() -> None:
    """Recorded results name a seed and this digest: whoever changes how loads are drawn must change the format too."""
    load = plan(requests=5, workload="azure-conv", rate=2.0, seed=1)
    assert load.digest() == "fc65175afa7f2c30a566c89679adc1aff5c65c7f53a56c0d6c8d89319ee6f913"


def test_another_rate_or_process_changes_no_prompt() -> None:
    slow, fast = plan(requests=9, rate=1.0), plan(requests=9, arrivals="constant", rate=100.0)
    assert [c.turns for c in slow.conversations] == [c.turns for c in fast.conversations]
    assert [c.time_s for c in slow.conversations] != [c.time_s for c in fast.conversations]


def test_warm_up_sends_other_prompts_than_the_run() -> None:
    settings = LoadSettings(requests=8, warmup=8)
    measured, warm = make_plan(settings), warmup_plan(settings)
    assert warm.num_requests == 8
    assert not {c.turns[0].prompt for c in measured.conversations} & {c.turns[0].prompt for c in warm.conversations}


def test_bodies_say_what_was_planned() -> None:
    options = {"requests": 2, "input_tokens": 12, "output_tokens": 5, "extra_body": {"top_k": 3, "temperature": 1}}
    body = json.loads(bodies(plan(**options), **options)[0])
    assert len(body.pop("prompt")) == 12
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "ignore_eos": True,
        "max_tokens": 5,
        "top_k": 3,
    }


def test_token_ids_stay_in_their_range() -> None:
    load = plan(requests=3, input_tokens=500, token_low=20, token_high=22)
    assert {token for c in load.conversations for token in json.loads(c.turns[0].prompt)} == {20, 21, 22}


def test_words_follow_from_the_tokens_in_one() -> None:
    load = plan(requests=1, input_tokens=60, text=True, tokens_per_word=1.5)
    assert len(json.loads(load.conversations[0].turns[0].prompt).split()) == 40


def test_a_turn_holds_the_conversation_so_far() -> None:
    settings = LoadSettings(api="chat", turns=2, requests=1, input_tokens=4)
    (conversation,) = make_plan(settings).conversations
    first, second = BodyEncoder(settings, "m").encode(conversation.turns)
    said = [first.new, answer_message('it said "so"\n')]
    messages = json.loads(second.bytes(said))["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0] == json.loads(first.bytes())["messages"][0]
    assert messages[1]["content"] == 'it said "so"\n'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests that begin alike for 600 tokens' worth of blocks, one that begins otherwise, one a tick later."""
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 3]},
        {"timestamp": 0, "input_length": 513, "output_length": 7, "hash_ids": [9, 1]},
        {"timestamp": 3000, "input_length": 300, "output_length": 8, "hash_ids": [0]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_equal_hashes_are_equal_tokens(trace: Path) -> None:
    load = plan(arrivals="trace", workload="trace", trace=trace, requests=4)
    prompts = [json.loads(c.turns[0].prompt) for c in load.conversations]
    assert [len(prompt) for prompt in prompts] == [1100, 1030, 513, 300]
    assert [c.turns[0].output_tokens for c in load.conversations] == [5, 6, 7, 8]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][1024:1030] != prompts[1][1024:]
    assert prompts[2][:8] != prompts[0][:8]
    assert prompts[3] == prompts[0][:300]
    other = plan(arrivals="trace", workload="trace", trace=trace, requests=4, seed=1)
    assert json.loads(other.conversations[0].turns[0].prompt)[:512] != prompts[0][:512]


def test_a_traces_times_are_jittered_and_scaled(trace: Path) -> None:
    own = [c.time_s for c in plan(arrivals="trace", trace=trace, requests=4).conversations]
    assert own == sorted(own)
    assert own[0] == 0.0
    assert len(set(own)) == 4
    fast = [c.time_s for c in plan(arrivals="trace", trace=trace, requests=4, rate=30.0).conversations]
    assert fast[-1] == pytest.approx(0.1)
    assert [a / fast[-1] for a in fast] == pytest.approx([a / own[-1] for a in own])


def test_a_traces_prompts_may_arrive_otherwise(trace: Path) -> None:
    load = plan(workload="trace", trace=trace, requests=3, rate=10.0)
    assert [c.turns[0].input_tokens for c in load.conversations] == [1100, 1030, 513]


def test_a_duration_is_so_many_arrivals(trace: Path) -> None:
    assert plan(rate=5.0, duration_s=4.0).num_requests == 20
    whole = plan(arrivals="trace", trace=trace, duration_s=100.0)
    times_s = [c.time_s for c in whole.conversations]
    assert len(times_s) == 4
    first = plan(arrivals="trace", trace=trace, duration_s=(times_s[1] + times_s[2]) / 2)
    assert [c.time_s for c in first.conversations] == times_s[:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("nonsense\n", "line 1 is not"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1 is not"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}\n', "not 2 blocks of 512"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "at least 1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n', "holds 1 requests, and 2"),
    ],
)
def test_a_trace_at_fault_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(OperatorError, match=message):
        plan(workload="trace", trace=path, requests=2)


def test_a_trace_that_goes_backwards_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    line = '{"timestamp": %d, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    path.write_text(line % 3000 + line % 0)
    with pytest.raises(OperatorError, match="backwards"):
        plan(workload="trace", trace=path, requests=2)
