"""A suspect's first steps are its own, on either kind of worker; between two trials the others have a step."""

from __future__ import annotations

from dataclasses import replace

import decode_bench
import pytest
from decode_bench import EAGER, Bench

from common.contract.ids import RequestId, RequestKey
from common.contract.messages import Prefill
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from common.engine.trials import TRIAL_S, TRIAL_TOKENS, Trials
from decode_worker.request import DecodeRequest
from decode_worker.step import Step
from prefill_worker.scheduler import PrefillRequest, PrefillScheduler

A, B, C, D = (RequestKey(RequestId(name), 1) for name in "abcd")


# --- the rule --------------------------------------------------------------------------------------------------------


def test_without_suspects_everybody_may() -> None:
    trials = Trials()
    assert trials.choose({A, B}, 0) == {A, B}
    assert trials.news() == []


def test_a_suspect_is_alone_until_it_is_cleared() -> None:
    trials = Trials()
    trials.add(B)
    assert set(trials.choose({A, B, C}, 0)) == {B}
    assert trials.news() == [(B, True)]
    assert set(trials.choose({A, B, C}, 1)) == {B}
    assert trials.news() == []
    trials.discard(B)
    assert trials.news() == [(B, False)]
    assert set(trials.choose({A, B, C}, 2)) == {A, B, C}


def test_suspects_have_their_turns_in_order_and_others_a_step_between() -> None:
    trials = Trials()
    for key in (C, B):
        trials.add(key)
    assert set(trials.choose({A, B, C}, 0)) == {C}
    trials.discard(C)
    assert set(trials.choose({A, B, C}, 0)) == {A, C}, "B has not had its turn"
    assert set(trials.choose({A, B, C}, 0)) == {B}
    trials.discard(B)
    assert trials.news() == [(C, True), (C, False), (B, True), (B, False)]


def test_where_there_are_no_others_the_next_suspect_follows_at_once() -> None:
    trials = Trials()
    for key in (A, B):
        trials.add(key)
    assert set(trials.choose({A, B}, 0)) == {A}
    trials.discard(A)
    assert set(trials.choose({B}, 0)) == {B}


def test_a_suspect_that_cannot_be_in_the_step_is_alone_no_more_and_has_another_turn() -> None:
    """It was preempted, say: whatever happens now is not its doing."""
    trials = Trials()
    trials.add(A)
    assert set(trials.choose({A, B}, 0)) == {A}
    assert set(trials.choose({B}, 1)) == {B}
    assert trials.news() == [(A, True), (A, False)]
    assert set(trials.choose({A, B}, 2)) == {A}
    assert trials.news() == [(A, True)]


def test_everybody_else_stands_still_for_so_long_and_no_longer() -> None:
    trials = Trials()
    trials.add(A)
    trials.choose({A, B}, 10)
    assert set(trials.choose({A, B}, 10 + TRIAL_S - 0.01)) == {A}
    assert set(trials.choose({A, B}, 10 + TRIAL_S)) == {A, B}, "it runs with them"
    assert trials.news() == [(A, True), (A, False)]


def test_who_is_not_suspected_can_leave_at_any_time() -> None:
    trials = Trials()
    trials.add(A)
    trials.choose({A, B}, 0)
    trials.discard(B)
    assert trials.alone == A
    assert len(trials) == 1


# --- on a decode worker ----------------------------------------------------------------------------------------------


def suspect(name: str, *, local: bool = False, num_tokens: int = 6) -> DecodeRequest:
    made = decode_bench.request(name, num_tokens, local=local)
    made.work = replace(made.work, suspect=True)
    return made


def names(step: Step) -> list[str]:
    """Who is in it."""
    return [each.request.work.request for each in step.decodes] + [
        each.prompt.request.work.request for each in step.chunks
    ]


def end_trial(bench: Bench, subject: DecodeRequest) -> None:
    """As the worker does, once there are enough tokens."""
    assert subject.num_new >= TRIAL_TOKENS
    bench.scheduler.trials.discard(subject.key)


def test_a_running_suspect_steps_alone_and_the_others_stand_still() -> None:
    bench = Bench(num_blocks=64, memory_reserve=EAGER)
    other = bench.run(decode_bench.request("other", 5))
    before = other.sequence.num_tokens
    subject = suspect("suspect")
    bench.enter(subject)
    while subject.num_new < TRIAL_TOKENS:
        assert names(bench.step()) == ["suspect"]
    end_trial(bench, subject)
    assert other.sequence.num_tokens == before
    assert names(bench.step()) == ["other", "suspect"]
    for _ in range(30):
        bench.step()
    assert other.sequence.num_tokens == before + 31, "blocks for every token, whatever was missed"
    assert bench.num_preemptions == 0


def test_several_suspects_take_turns() -> None:
    bench = Bench(num_blocks=64, memory_reserve=EAGER)
    bench.run(decode_bench.request("other", 5))
    subjects = [suspect("first"), suspect("second")]
    for subject in subjects:
        bench.enter(subject)
    seen = []
    for _ in range(2 * TRIAL_TOKENS + 2):
        seen.append(names(bench.step()))
        for subject in subjects:
            if subject.key in bench.scheduler.trials and subject.num_new >= TRIAL_TOKENS:
                end_trial(bench, subject)
    num = TRIAL_TOKENS - 1  # the first one came from the prefill worker
    everybody = ["other", "first", "second"]
    assert seen[: 2 * num + 2] == [["first"]] * num + [["other", "first"]] + [["second"]] * num + [everybody]


@pytest.mark.parametrize("prefill_priority", [False, True])
def test_a_suspect_s_prompt_is_computed_alone(prefill_priority: bool) -> None:
    bench = Bench(
        num_blocks=64, memory_reserve=EAGER, token_budget=4, prefill_tokens=4, prefill_priority=prefill_priority
    )
    bench.run(decode_bench.request("other", 5))
    bench.reserve(suspect("suspect", local=True, num_tokens=14), decode_bench.request("late", 8, local=True))
    assert [names(bench.step()) for _ in range(4)] == [["suspect"]] * 4
    assert bench.scheduler.trials.news() == [(RequestKey(RequestId("suspect"), 1), True)]


def test_a_suspect_that_leaves_lets_the_others_go_on() -> None:
    bench = Bench(num_blocks=64, memory_reserve=EAGER)
    bench.run(decode_bench.request("other", 5))
    subject = suspect("suspect")
    bench.enter(subject)
    assert names(bench.step()) == ["suspect"]
    bench.forget(subject)
    assert names(bench.step()) == ["other"]
    assert len(bench.scheduler.trials) == 0


def test_a_suspect_without_room_holds_nobody_up() -> None:
    bench = Bench(num_blocks=8)
    other = bench.run(decode_bench.request("other", 20))
    assert bench.reserve(suspect("suspect", num_tokens=20)) == []
    for _ in range(3):
        assert names(bench.step()) == ["other"]
    bench.step(ends=[other])
    assert "suspect" in bench.pulling


# --- on a prefill worker ---------------------------------------------------------------------------------------------


def prompt(name: str, num_tokens: int, *, suspect: bool = False) -> PrefillRequest:
    work = Prefill(
        request=RequestId(name),
        attempt=1,
        token_ids=tuple(decode_bench.tokens(name, num_tokens)),
        prompt_len=num_tokens,
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        budget_s=1.0,
        suspect=suspect,
    )
    return PrefillRequest(work, decode_bench.AT.incarnation, arrived=0.0, deadline=100.0)


def test_a_suspect_s_chunks_are_alone_in_their_steps() -> None:
    scheduler = PrefillScheduler(
        BlockPool(64),
        block_size=4,
        chunk_size=8,
        token_budget=8,
        max_waiting=10,
        ageing_s=30.0,
        ttft_target_s=lambda tier: 1.0,
    )
    steps = []
    for each in (prompt("a", 4), prompt("x", 20, suspect=True), prompt("b", 4), prompt("y", 4, suspect=True)):
        scheduler.add(each)
    for _ in range(6):
        scheduler.admit(0.0)
        chunks = scheduler.schedule(0.0)
        steps.append([chunk.prompt.key.request for chunk in chunks])
        scheduler.step_done(chunks)
        scheduler.check_invariants()
    assert steps == [["x"], ["x"], ["x"], ["a", "b"], ["y"], []]
    assert len(scheduler.trials) == 0
