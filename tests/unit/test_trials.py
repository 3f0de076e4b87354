"""Suspects are tried apart from everybody else, as a group or alone, on either kind of worker. Steps are counted; how
long they take is given."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random

import decode_bench
import pytest
from decode_bench import EAGER, Bench

from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.gateway import TRIAL_TOKENS, Prefill, Suspicion
from common.contract.messages.worker import Trial
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from common.scheduling.trials import NOTICE_S, TRIAL_S, TrialFeed, Trials
from decode_worker.request import DecodeRequest
from decode_worker.step import Step
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler

A, B, C, D = (RequestKey(RequestId(name), 1) for name in "abcd")
GROUP, ALONE = Suspicion.GROUP, Suspicion.ALONE
STEP_S = 0.02


# --- the rule --------------------------------------------------------------------------------------------------------


def trials_of(**levels: Suspicion) -> Trials:
    """Suspects, in the order of their arrival."""
    trials = Trials()
    for name, level in levels.items():
        trials.add(RequestKey(RequestId(name), 1), level)
    return trials


def turns(trials: Trials, present: Collection[RequestKey], num_steps: int, start: float = 0.0) -> list[str]:
    """Who may be in each of so many steps, of equal length; news takes time, too."""
    now, seen = start, []
    told: tuple[RequestKey, ...] = ()
    for _ in range(num_steps):
        chosen = trials.choose(present, now)
        if trials.turn != told:
            told = trials.turn
            now += NOTICE_S
        now += STEP_S
        seen.append("".join(sorted(key.request for key in chosen)))
    return seen


def test_without_suspects_everybody_may() -> None:
    trials = Trials()
    trials.add(A, Suspicion.NONE)
    assert set(trials.choose({A, B}, 0)) == {A, B}
    assert not trials
    assert trials.turn == ()


def test_a_group_takes_turns_with_the_others_who_have_at_least_half_of_the_time() -> None:
    assert turns(trials_of(b=GROUP, c=GROUP), [A, B, C, D], 9) == ["bc", "ad", "ad"] * 3


def test_after_a_long_turn_of_the_group_the_others_have_as_long() -> None:
    """A step with chunks of prompts is longer than those of sequences that run."""
    trials = trials_of(b=GROUP)
    assert set(trials.choose([A, B], 0.0)) == {B}
    assert turns(trials, [A, B], 8, start=10 * STEP_S) == ["a"] * 8
    assert turns(trials, [A, B], 4, start=18 * STEP_S) == ["a", "a", "a", "b"]


def test_a_worker_that_was_stopped_in_a_turn_of_the_group_owes_the_others_so_much_and_no_more() -> None:
    trials = trials_of(b=GROUP)
    trials.choose([A, B], 0.0)
    assert set(trials.choose([A, B], 1000.0)) == {A}
    assert set(trials.choose([A, B], 1000.0 + TRIAL_S)) == {B}


def test_without_others_the_group_goes_on() -> None:
    assert turns(trials_of(b=GROUP, c=GROUP), [B, C], 3) == ["bc"] * 3


def test_who_comes_later_joins_the_group_and_who_is_cleared_leaves_it() -> None:
    trials = trials_of(b=GROUP, c=GROUP)
    assert turns(trials, [A, B], 3) == ["b", "a", "a"], "c waits for its blocks"
    assert turns(trials, [A, B, C], 3, start=1) == ["bc", "a", "a"]
    trials.add(D, GROUP)
    trials.discard(B)
    assert turns(trials, [A, B, C, D], 3, start=2) == ["cd", "ab", "ab"]


def test_a_group_goes_on_however_long_it_takes() -> None:
    """It makes nobody stand still."""
    steps = turns(trials_of(b=GROUP), [A, B], int(4 * TRIAL_S / STEP_S))
    assert steps == (["b", "a", "a"] * len(steps))[: len(steps)]


def test_a_single_suspect_has_the_engine_until_it_is_cleared() -> None:
    trials = trials_of(b=ALONE)
    assert turns(trials, [A, B, C], 2) == ["b", "b"]
    trials.discard(B)
    assert trials, "its turn is not over before the next step is chosen"
    assert turns(trials, [A, B, C], 2, start=1) == ["abc", "abc"]
    assert not trials


def test_single_suspects_have_their_turns_in_order_and_others_a_step_between() -> None:
    trials = trials_of(c=ALONE, b=ALONE)
    assert turns(trials, [A, B, C], 2) == ["c", "c"]
    trials.discard(C)
    assert turns(trials, [A, B, C], 3) == ["ac", "b", "b"], "b has not had its turn"


def test_where_there_are_no_others_the_next_suspect_follows_at_once() -> None:
    trials = trials_of(a=ALONE, b=ALONE)
    assert turns(trials, [A, B], 2) == ["a", "a"]
    trials.discard(A)
    assert turns(trials, [B], 1) == ["b"]


def test_groups_and_single_suspects_alternate() -> None:
    trials = trials_of(a=ALONE, b=GROUP, c=GROUP, d=ALONE)
    assert turns(trials, [A, B, C, D], 2) == ["bc", "a"]
    trials.discard(A)
    assert turns(trials, [B, C, D], 2) == ["bc", "d"]
    assert turns(trials, [B, C, D], 2) == ["d", "d"]
    trials.discard(D)
    assert turns(trials, [B, C], 2) == ["bc", "bc"]


def test_a_single_suspect_that_cannot_be_in_the_step_is_alone_no_more_and_has_another_turn() -> None:
    """It was preempted, say: whatever happens now is not its doing."""
    trials = trials_of(a=ALONE)
    assert turns(trials, [A, B], 1) == ["a"]
    assert turns(trials, [B], 1) == ["b"]
    assert trials.turn == ()
    assert turns(trials, [A, B], 1) == ["a"]


def test_everybody_else_stands_still_for_so_long_and_no_longer() -> None:
    trials = trials_of(a=ALONE)
    trials.choose([A, B], 10)
    assert set(trials.choose([A, B], 10 + TRIAL_S - 0.01)) == {A}
    assert set(trials.choose([A, B], 10 + TRIAL_S)) == {A, B}, "it runs with them"


def test_who_is_not_suspected_can_leave_at_any_time() -> None:
    trials = trials_of(a=ALONE)
    trials.choose([A, B], 0)
    trials.discard(B)
    assert list(trials._suspects) == [A]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_and_goes_suspects_are_apart_and_everybody_has_turns(seed: int) -> None:
    """Steps of any length; whoever may is in a step."""
    random = Random(seed)
    trials, now = Trials(), 0.0
    keys = [RequestKey(RequestId(f"r{number}"), 1) for number in range(8)]
    levels: dict[RequestKey, Suspicion] = {}
    others_s = group_s = still_s = 0.0
    for _ in range(400):
        key = random.choice(keys[2:])  # two are above suspicion
        if random.random() < 0.1 and key not in levels:
            levels[key] = random.choice([GROUP, GROUP, ALONE])
            trials.add(key, levels[key])
        elif random.random() < 0.1:
            levels.pop(key, None)
            trials.discard(key)
        present = [*keys[:2], *(key for key in keys[2:] if random.random() < 0.9)]
        chosen = set(trials.choose(present, now))
        assert chosen
        assert chosen <= set(present)
        now += (took_s := random.choice([0.005, 0.02, 0.1]))
        levels = {key: level for key, level in levels.items() if key in trials}  # one may have had its time
        if trials.turn:
            assert chosen == set(trials.turn)
            (level,) = {levels[key] for key in chosen}
            assert level is GROUP or len(chosen) == 1
            assert level is ALONE or chosen == {key for key in present if levels.get(key) is GROUP}
            group_s += took_s if level is GROUP else 0
        else:
            assert chosen == {key for key in present if key not in levels}
            others_s += took_s
        assert others_s >= group_s - 0.1, "but for the turn that has just been"
        still_s = 0.0 if keys[0] in chosen else still_s + took_s
        assert still_s <= TRIAL_S + 0.1


# --- what gateways are told ------------------------------------------------------------------------------------------


def test_each_gateway_is_told_whose_turn_it_is_and_which_are_its_own() -> None:
    told: list[tuple[str, int, str]] = []

    def send(gateway: Incarnation, message: Message) -> None:
        assert isinstance(message, Trial)
        told.append((gateway, message.num_requests, "".join(key.request for key in message.requests)))

    one, two, three = (Incarnation(name) for name in ("one", "two", "three"))
    trials = trials_of(a=GROUP, b=GROUP, c=GROUP)
    feed = TrialFeed(trials, {A: one, B: two}.get, send)  # c has left
    feed.begin(one)
    feed.begin(two)
    assert not feed.publish([one, two])
    assert told == [], "everybody's steps, as each gateway thinks"
    trials.choose([A, B, C, D], 0)
    assert feed.publish([one, two])
    assert told == [("one", 3, "a"), ("two", 3, "b")]
    assert not feed.publish([one, two]), "as before"
    feed.begin(three)
    assert told[2:] == [("three", 3, "")], "who comes is told at once"
    trials.choose([D], 1)
    assert feed.publish([one, three])
    assert told[3:] == [("one", 0, ""), ("three", 0, "")]


# --- on a decode worker ----------------------------------------------------------------------------------------------


def suspect(name: str, level: Suspicion, *, local: bool = False, num_tokens: int = 6) -> DecodeRequest:
    made = decode_bench.request(name, num_tokens, local=local)
    made.work = replace(made.work, suspicion=level)
    return made


def names(step: Step) -> list[str]:
    """Who is in it."""
    return [
        *(each.request.work.request for each in step.decodes),
        *(each.prompt.request.work.request for each in step.chunks),
    ]


class Timed:
    """Steps of a decode worker, each of `STEP_S`, and its news; suspects are cleared as the worker does it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._told: Collection[RequestKey] = ()

    def step(self) -> list[str]:
        bench, trials = self.bench, self.bench.scheduler.trials
        step = bench.begin_step()
        if trials.turn != self._told:
            self._told = trials.turn
            bench.now += NOTICE_S
        bench.now += STEP_S
        bench.end_step(step)
        bench.reserve()
        for request in bench.requests:
            if request.key in trials and request.num_new >= TRIAL_TOKENS:
                trials.discard(request.key)
        return names(step)

    def steps(self, num_steps: int) -> list[list[str]]:
        return [self.step() for _ in range(num_steps)]


def test_a_single_suspect_steps_alone_and_the_others_stand_still() -> None:
    timed = Timed(bench := Bench(num_blocks=64, memory_reserve=EAGER))
    other = bench.run(decode_bench.request("other", 5))
    before = other.sequence.num_tokens
    bench.enter(suspect("suspect", ALONE))
    num = TRIAL_TOKENS - 1  # the first one came from the prefill worker
    assert timed.steps(num) == [["suspect"]] * num
    assert other.sequence.num_tokens == before
    assert timed.steps(31) == [["other", "suspect"]] * 31
    assert other.sequence.num_tokens == before + 31, "blocks for every token, whatever was missed"
    assert bench.num_preemptions == 0


def test_several_single_suspects_take_turns() -> None:
    timed = Timed(bench := Bench(num_blocks=64, memory_reserve=EAGER))
    bench.run(decode_bench.request("other", 5))
    for name in ("first", "second"):
        bench.enter(suspect(name, ALONE))
    num = TRIAL_TOKENS - 1
    seen = timed.steps(2 * num + 2)
    assert seen == [["first"]] * num + [["other", "first"]] + [["second"]] * num + [["other", "first", "second"]]


def test_a_group_steps_together_and_the_others_between() -> None:
    timed = Timed(bench := Bench(num_blocks=64, memory_reserve=EAGER))
    bench.run(decode_bench.request("other", 5))
    for name in ("first", "second"):
        bench.enter(suspect(name, GROUP))
    seen = timed.steps(8)
    assert seen == [["first", "second"], ["other"], ["other"]] * 2 + [["first", "second"], ["other", "first", "second"]]
    assert bench.num_preemptions == 0


@pytest.mark.parametrize("prefill_priority", [False, True])
def test_a_single_suspect_s_prompt_is_computed_alone(prefill_priority: bool) -> None:
    bench = Bench(
        num_blocks=64, memory_reserve=EAGER, token_budget=4, prefill_tokens=4, prefill_priority=prefill_priority
    )
    bench.run(decode_bench.request("other", 5))
    bench.reserve(suspect("suspect", ALONE, local=True, num_tokens=14), decode_bench.request("late", 8, local=True))
    assert [names(bench.step()) for _ in range(4)] == [["suspect"]] * 4
    assert bench.scheduler.trials.turn == (RequestKey(RequestId("suspect"), 1),)


def test_a_group_s_prompts_are_computed_in_its_turns() -> None:
    timed = Timed(bench := Bench(num_blocks=64, memory_reserve=EAGER, token_budget=16, prefill_tokens=4))
    bench.run(decode_bench.request("other", 5))
    for name in ("first", "second"):
        bench.reserve(suspect(name, GROUP, local=True, num_tokens=12))
    bench.reserve(decode_bench.request("late", 8, local=True))
    seen = timed.steps(8)
    assert seen[0] == ["first", "second"], "12 tokens of one, and 4 of the other"
    assert seen[1:3] == [["other", "late"]] * 2
    assert seen[3] == ["first", "second"], "a token of one, and the rest of the other"
    assert seen[4:6] == [["other", "late"]] * 2
    assert seen[6] == ["first", "second"]


@pytest.mark.parametrize("level", [GROUP, ALONE])
def test_a_suspect_that_leaves_lets_the_others_go_on(level: Suspicion) -> None:
    timed = Timed(bench := Bench(num_blocks=64, memory_reserve=EAGER))
    bench.run(decode_bench.request("other", 5))
    subject = suspect("suspect", level)
    bench.enter(subject)
    assert timed.step() == ["suspect"]
    bench.forget(subject)
    assert timed.step() == ["other"]
    assert not bench.scheduler.trials


@pytest.mark.parametrize("level", [GROUP, ALONE])
def test_a_suspect_without_room_holds_nobody_up(level: Suspicion) -> None:
    bench = Bench(num_blocks=8)
    other = bench.run(decode_bench.request("other", 20))
    assert bench.reserve(suspect("suspect", level, num_tokens=20)) == []
    for _ in range(3):
        assert names(bench.step()) == ["other"]
    bench.step(ends=[other])
    assert "suspect" in bench.pulling


# --- on a prefill worker ---------------------------------------------------------------------------------------------


def prompt(name: str, num_tokens: int, level: Suspicion = Suspicion.NONE) -> PrefillRequest:
    work = Prefill(
        request=RequestId(name),
        attempt=1,
        token_ids=tuple(decode_bench.tokens(name, num_tokens)),
        prompt_len=num_tokens,
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        budget_s=1.0,
        suspicion=level,
    )
    return PrefillRequest(work, decode_bench.AT.incarnation, arrived=0.0, deadline=100.0)


def prefill_scheduler(num_blocks: int = 64, chunk_size: int = 8, token_budget: int = 8) -> PrefillScheduler:
    return PrefillScheduler(
        BlockPool(num_blocks),
        block_size=4,
        chunk_size=chunk_size,
        token_budget=token_budget,
        max_waiting=1000,
        ageing_s=30.0,
        ttft_target_s=lambda tier: 1.0,
        costs=Costs(prefill_s_per_token=0.0),
    )


def prefill_steps(scheduler: PrefillScheduler, num_steps: int) -> list[list[str]]:
    """Whose chunks are in each, when each takes `STEP_S`."""
    now = 0.0
    told: tuple[RequestKey, ...] = ()
    steps: list[list[str]] = []
    for _ in range(num_steps):
        scheduler.admit(now)
        chunks = scheduler.schedule(now)
        if scheduler.trials.turn != told:
            told = scheduler.trials.turn
            now += NOTICE_S
        now += STEP_S
        steps.append([chunk.prompt.key.request for chunk in chunks])
        scheduler.step_done(chunks)
        scheduler.check_invariants()
    return steps


def test_a_single_suspect_s_chunks_are_alone_in_their_steps() -> None:
    scheduler = prefill_scheduler()
    for each in (prompt("a", 4), prompt("x", 20, ALONE), prompt("b", 4), prompt("y", 4, ALONE)):
        scheduler.add(each)
    assert prefill_steps(scheduler, 6) == [["x"], ["x"], ["x"], ["a", "b"], ["y"], []]
    assert not scheduler.trials


def test_a_group_s_chunks_are_in_steps_together() -> None:
    scheduler = prefill_scheduler()
    for each in (prompt("x", 4, GROUP), prompt("a", 28), prompt("y", 8, GROUP)):
        scheduler.add(each)
        scheduler.admit(0.0)
    assert prefill_steps(scheduler, 7) == [["x", "y"], ["a"], ["a"], ["y"], ["a"], ["a"], []]
    assert not scheduler.trials


# --- many of them ----------------------------------------------------------------------------------------------------

NUM_STREAMS = 256


def test_hundreds_of_streams_go_on_within_a_second_and_the_others_at_half_their_speed_at_least() -> None:
    """With steps of 20 ms: the prompts, cached but for their last block, on a prefill worker that has a long prompt to
    compute; then the first tokens on a decode worker, beside 64 running sequences."""
    scheduler = prefill_scheduler(32 * NUM_STREAMS, chunk_size=512, token_budget=1024)
    scheduler.add(prompt("other", 40 * 512))
    for number in range(NUM_STREAMS):
        scheduler.add(prompt(f"suspect {number}", 16, GROUP))
    steps = prefill_steps(scheduler, 40)
    turns = [index for index, step in enumerate(steps) if step[0] != "other"]
    assert sum(len(steps[index]) for index in turns) == NUM_STREAMS
    num_prefill_steps = turns[-1] + 1
    check_shares(steps[:num_prefill_steps])

    timed = Timed(
        bench := Bench(num_blocks=16 * NUM_STREAMS, memory_reserve=EAGER, max_num_seqs=512, token_budget=1024)
    )
    for number in range(64):
        bench.enter(decode_bench.request(f"other {number}", 5))
    bench.step()
    began = bench.now
    for number in range(NUM_STREAMS):
        bench.enter(suspect(f"suspect {number}", GROUP))
    steps = []
    while bench.scheduler.trials._suspects:
        steps.append(timed.step())
    assert len(timed.step()) == 64 + NUM_STREAMS
    check_shares(steps)
    assert num_prefill_steps * (STEP_S + NOTICE_S) + bench.now - began < 0.5


def check_shares(steps: list[list[str]]) -> None:
    """Nobody is in a step of a suspect but suspects, and of any three steps in a row two at least are the others'."""
    groups = [{name.split()[0] for name in step} for step in steps]
    assert all(len(group) == 1 for group in groups)
    for window in zip(groups, groups[1:], groups[2:], strict=False):
        assert sum(group == {"other"} for group in window) >= 2
