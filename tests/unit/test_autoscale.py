"""Pools grow when they have to, and do not flap: the manifests' rules and behaviour, on a modelled clock."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
from needs import needs

from benchmarks.autoscale import (
    NEEDED,
    STEP_AT_S,
    TARGET_S,
    Story,
    autoscaler,
    changes,
    evaluate,
    figures,
    rules,
    simulate,
    step,
)
from benchmarks.horizontal import Autoscaler

promtool = needs("promtool")
ROLES = ("prefill", "decode")


def scaler(**behavior: Any) -> Autoscaler:
    """Prefill's, with parts of its behaviour changed."""
    spec = copy.deepcopy(autoscaler("prefill"))
    for direction, changed in behavior.items():
        spec["behavior"][direction] |= changed
    return Autoscaler(spec)


# --- Kubernetes' algorithm, by examples of its documentation ---------------------------------------------------------


def test_as_many_as_the_metric_says_rounded_up() -> None:
    assert scaler().replicas(0.0, 2, 2.3) == 3
    assert scaler().replicas(0.0, 2, 2.19) == 2, "within the tolerance"
    assert scaler().replicas(0.0, 2, None) == 2, "no metric changes nothing"
    assert scaler().replicas(0.0, 2, 0.0) == 2, "down only after a while"


def test_growth_has_a_pace() -> None:
    pool, replicas = scaler(), [1]
    for number in range(10):
        replicas.append(pool.replicas(number * 15.0, replicas[-1], 100.0))
    assert replicas == [1, 5, 5, 5, 5, 8, 8, 8, 8, 8, 8], "four more, or double, in a minute; at most 8"


def test_only_what_nothing_has_needed_for_ten_minutes_goes() -> None:
    pool = scaler()
    replicas = [pool.replicas(now, 6, 5.5 if now == 300.0 else 1.0) for now in (n * 15.0 for n in range(62))]
    assert replicas == [6] * 61 + [5], "after 900 s, and not sooner"


def test_it_goes_down_one_at_a_time() -> None:
    pool, replicas = scaler(scaleDown={"stabilizationWindowSeconds": 0}), [4]
    for number in range(17):
        replicas.append(pool.replicas(number * 15.0, replicas[-1], 1.0))
    assert replicas == [4] + [3] * 8 + [2] * 8 + [1]


@pytest.mark.parametrize("role", ROLES)
def test_a_pool_shrinks_slower_than_a_worker_drains(role: str) -> None:
    behavior = autoscaler(role)["behavior"]
    drain_s = {"prefill": 75, "decode": 345}[role]
    assert all(
        policy["periodSeconds"] >= drain_s and policy["value"] == 1 for policy in behavior["scaleDown"]["policies"]
    )


def test_changes_of_direction_are_counted() -> None:
    def story(*replicas: int) -> Story:
        return Story(times_s=[15.0 * n for n in range(len(replicas))], replicas=list(replicas))

    assert story(1, 1, 2, 4, 4, 6).reversals() == 0
    assert story(1, 2, 4, 4, 3).reversals() == 1
    assert story(1, 2, 2, 1, 2, 1).reversals() == 3
    assert story(1, 2, 1, 2, 1).reversals(after_s=45.0) == 0


def test_so_many_are_asked_for_after_so_long() -> None:
    story = Story(times_s=[15.0, 30.0, 45.0, 60.0, 75.0], replicas=[4, 1, 2, 5, 4])
    assert story.first(4, since_s=30.0) == 30.0, "five are four, too, and what was before does not count"
    assert story.first(2, since_s=45.0) == 0.0
    assert story.first(6, since_s=30.0) == math.inf


def test_nine_in_ten_of_those_who_came_in_between() -> None:
    story = Story(ttft_s=[(float(n), 20.0 - n) for n in range(20)])
    assert story.p90_ttft_s(0.0, 20.0) == 18.1
    assert story.p90_ttft_s(5.0, 15.0) == 14.1, "the later moment is not in it"
    assert math.isnan(story.p90_ttft_s(20.0, 30.0))


def test_the_target_is_met_from_the_first_minute_in_which_it_is() -> None:
    """Too late until 130 s; then nobody comes for two minutes, which meets nothing."""
    late = [(float(t), 9.0) for t in range(0, 130, 2)]
    in_time = [(float(t), 1.0) for t in range(250, 400, 2)]
    times_s = [15.0 * n for n in range(1, 27)]
    story = Story(times_s=times_s, ttft_s=late + in_time)
    assert story.met_after_s(2.0, since_s=30.0) == 165.0, "the minute from 195 s on is the first with any of these"
    assert story.met_after_s(0.5, since_s=30.0) == math.inf
    assert Story(times_s=times_s, ttft_s=in_time).met_after_s(2.0, since_s=360.0) == math.inf, "no whole minute is left"


def test_what_is_told_of_a_run() -> None:
    times_s = [STEP_AT_S + 60.0 * n for n in range(-1, 9)]
    story = Story(
        times_s=times_s,
        replicas=[1, 1, 3, NEEDED + 2, NEEDED, NEEDED, NEEDED, NEEDED, NEEDED, NEEDED],
        ttft_s=[(STEP_AT_S - 1, 99.0), (STEP_AT_S, 8.0), (STEP_AT_S + 100, 0.5), (STEP_AT_S + 310, 0.25)],
        refused=[STEP_AT_S + 7, STEP_AT_S + 40],
    )
    found = figures(story, STEP_AT_S + 480)
    told = found.pop("replicas")
    assert found == {
        "seconds_until_needed_are_asked_for": 120.0,
        "seconds_until_the_target_is_met": 45.0,
        "most_replicas": NEEDED + 2,
        "last_replicas": NEEDED,
        "changes_of_direction": 1,
        "p90_ttft_s_in_the_first_five_minutes_of_the_step": 7.25,
        "p90_ttft_s_after": 0.25,
        "refused": 2,
        "last_refusal_after_the_step_s": 40.0,
    }
    assert told == list(zip(times_s, story.replicas, strict=True))
    moments = [(after[0] - STEP_AT_S, before[1], after[1]) for before, after in changes(told)]
    assert moments == [(60.0, 1, 3), (120.0, 3, NEEDED + 2), (180.0, NEEDED + 2, NEEDED)]


def test_nobody_was_refused() -> None:
    story = Story(times_s=[STEP_AT_S], replicas=[1])
    found = figures(story, STEP_AT_S)
    assert (found["refused"], found["last_refusal_after_the_step_s"]) == (0, 0.0)


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@promtool
def test_a_step_of_the_load_is_followed_and_nothing_flaps() -> None:
    """From half of one worker to what four can do, for half an hour."""
    story = simulate(step(2.0, 11.0, STEP_AT_S), STEP_AT_S + 1800, 1, rules())
    before = [n for t, n in zip(story.times_s, story.replicas, strict=True) if t <= STEP_AT_S]
    assert set(before) == {1}, "half of one worker needs one"
    assert story.first(NEEDED, STEP_AT_S) <= 120
    assert len(story.refused) < 0.05 * len(story.ttft_s)
    assert story.met_after_s(TARGET_S, STEP_AT_S) <= 240
    assert story.p90_ttft_s(STEP_AT_S + 300, math.inf) < TARGET_S
    assert story.reversals() <= 1, "up, and down to what is needed"
    settled = [n for t, n in zip(story.times_s, story.replicas, strict=True) if t >= STEP_AT_S + 300]
    assert min(settled) >= NEEDED
    assert max(settled) <= NEEDED + 2
    assert max(story.refused, default=0.0) <= STEP_AT_S + 120


@pytest.mark.processes
@promtool
def test_what_is_needed_no_more_goes() -> None:
    story = simulate(step(2.0, 11.0, 60.0, 240.0), 1800.0, 0, rules())
    assert max(story.replicas) >= NEEDED
    assert story.replicas[-1] == 1
    assert story.reversals() == 1
    assert story.p90_ttft_s(300.0, 1800.0) < TARGET_S, "nothing is lost by shrinking"


@pytest.mark.processes
@promtool
def test_the_decode_pool_is_what_its_loads_add_up_to(tmp_path: Path) -> None:
    def wanted(*loads: float, refused: float = 0.0, served: float = 15.0, profile: str = "throughput") -> float | None:
        """`loads` are of the workers for throughput; of those for latency there are two, with 0.8 and 1.6."""
        pods = {
            f'namespace="baton", pod="{profile[0]}{n}", component="decode", profile="{profile}"': load
            for profile, loads in (("throughput", loads), ("latency", (0.8, 1.6)))
            for n, load in enumerate(loads)
        }
        gateway = 'namespace="baton", pod="g", component="gateway"'
        samples: dict[str, list[float | None]] = {f"up{{{pod}}}": [1.0] * 8 for pod in pods}
        samples |= {f"baton_decode_load{{{pod}}}": [load] * 8 for pod, load in pods.items()}
        name = f'baton_gateway_refused_total{{{gateway}, role="decode", tier="standard"}}'
        samples[name] = [refused * n for n in range(8)]
        samples[f"vllm:time_to_first_token_seconds_count{{{gateway}}}"] = [served * n for n in range(8)]
        return evaluate([samples], f'baton:decode_workers:wanted{{profile="{profile}"}}', tmp_path, rules())[0]

    assert wanted(0.4, 0.4) == pytest.approx(1.0)
    assert wanted(0.9, 1.5) == pytest.approx(3.0)
    assert wanted(1.0, 1.0, refused=15.0) == pytest.approx(5.0), "half of what is asked for is refused"
    assert wanted() is None
    assert wanted(0.4, profile="latency") == pytest.approx(3.0), "each profile by itself"
    assert wanted(0.4, refused=15.0, profile="latency") == pytest.approx(6.0)
