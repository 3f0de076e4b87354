"""What a decode worker tells of a choice's time: stages that follow each other, on the worker's own clock."""

from __future__ import annotations

from typing import Any

from decode_bench import EAGER, Bench, request

from common.contract.messages.worker import DecodeTimes, PromptTimes
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest
from decode_worker.times import prompt_times_of, timings_of
from kv_transfer.pull_times import PullTimes

TOLD = PromptTimes(queue_s=1.0, prefix_pull_s=2.0, prefill_s=4.0)


def times(**spent: float) -> DecodeTimes:
    stages = ("wait", "reserve", "pull", "settle", "queue", "decode", "preempted", "read", "hidden_read")
    seconds: dict[str, Any] = {f"{stage}_s": spent.get(stage, 0.0) for stage in stages}
    return DecodeTimes(**seconds, pull_bytes=int(spent.get("bytes", 0)))


def pulled(subject: DecodeRequest, *, told: float, reserved: float, read: float) -> None:
    """As the pulls and the source would have told."""
    assert subject.pull is not None
    subject.pull.times = PullTimes(told_at=told, reserved_at=reserved, read_at=read, read_s=3.0, hidden_read_s=2.0)
    subject.pull.times.num_bytes = 640
    subject.prompt_times = TOLD


def step(bench: Bench, seconds: float = 1.0) -> None:
    bench.step()
    bench.now += seconds


def step_until(bench: Bench, choice: DecodeChoice, stage: ChoiceStage) -> None:
    while choice.stage is not stage:
        step(bench)


def decoded(choice: DecodeChoice, now: float) -> DecodeTimes:
    decode = timings_of(choice, now).decode
    assert decode is not None
    return decode


def test_a_pull_that_is_read_before_the_first_tokens_are_told() -> None:
    bench = Bench()
    subject = request("a", 6, arrived=10.0)
    pulled(subject, told=15.0, reserved=12.0, read=15.5)
    bench.now = 16.0
    [choice] = bench.enter(subject)
    bench.now = 18.0
    step(bench)
    told = timings_of(choice, bench.now)
    assert (told.choice, told.prompt) == (0, TOLD)
    assert told.decode == times(
        wait=5.0, pull=0.5, settle=0.5, queue=2.0, decode=1.0, read=3.0, hidden_read=2.0, bytes=640
    )


def test_room_that_comes_after_the_first_tokens() -> None:
    bench = Bench()
    subject = request("a", 6, arrived=10.0)
    pulled(subject, told=11.0, reserved=14.0, read=16.0)
    bench.now = 16.0
    [choice] = bench.enter(subject)
    step(bench)
    assert decoded(choice, 17.0) == times(
        wait=1.0, reserve=3.0, pull=2.0, decode=1.0, read=3.0, hidden_read=2.0, bytes=640
    )


def test_what_was_read_before_a_sequence_stood_still_is_hidden() -> None:
    bench = Bench()
    subject = request("a", 6)
    pulled(subject, told=1.0, reserved=1.0, read=1.0)
    subject.ahead = PullTimes(read_s=8.0, num_bytes=64)
    [choice] = bench.enter(subject)
    told = decoded(choice, 1.0)
    assert (told.read_s, told.hidden_read_s, told.pull_bytes) == (11.0, 10.0, 704)


def test_a_prompt_that_is_computed_here() -> None:
    bench = Bench(token_budget=4, prefill_tokens=4)
    subject = request("a", 6, local=True)
    bench.now = 2.0
    bench.reserve(subject)
    step(bench)
    step(bench)
    (choice,) = subject.choices
    assert timings_of(choice, bench.now).decode is None, "there is nothing behind the first token yet"
    prompt = prompt_times_of(subject, bench.now)
    assert prompt == PromptTimes(queue_s=2.0, prefix_pull_s=0.0, prefill_s=2.0)
    bench.now += 1.0
    step(bench)
    assert decoded(choice, bench.now) == times(queue=2.0, decode=1.0)


def test_what_was_cached_of_a_prompt_that_is_computed_here() -> None:
    bench = Bench(token_budget=8, prefill_tokens=8)
    for name, num_cached in (("a", 0), ("b", 4)):
        subject = request(name, range(6), local=True)
        bench.reserve(subject)
        step(bench)
        assert prompt_times_of(subject, bench.now).num_cached == num_cached
        bench.scheduler.forget(subject)


def test_the_time_out_of_the_batch_is_told_apart() -> None:
    bench = Bench(num_blocks=9, memory_reserve=EAGER, preempt_by="recompute")
    old, new = request("old", 13), request("new", 13)
    for subject in (old, new):
        pulled(subject, told=0.0, reserved=0.0, read=0.0)
        bench.enter(subject)
    (first,), (second,) = old.choices, new.choices
    step_until(bench, second, ChoiceStage.PREEMPTED)
    joined, lost = second.joined_at, second.paused_at
    assert joined is not None
    assert lost is not None
    waiting = decoded(second, lost + 5.0)
    assert (waiting.decode_s, waiting.preempted_s) == (lost - joined, 5.0)
    bench.forget(old)
    assert first.stage is ChoiceStage.ENDED
    step_until(bench, second, ChoiceStage.RUNNING)
    assert second.paused_at is None
    back = decoded(second, bench.now)
    assert back.preempted_s == second.paused_s > 0
    assert back.decode_s + back.preempted_s == bench.now - joined


def test_reads_that_overlap_count_once() -> None:
    subject = PullTimes()
    subject.read_begun(10, 1.0)
    subject.read_begun(20, 2.0)
    subject.read_ended(3.0)
    subject.told(3.5)
    subject.told(9.0)
    subject.read_ended(4.0)
    subject.read_begun(30, 6.0)
    subject.read_ended(6.25)
    assert (subject.read_s, subject.hidden_read_s, subject.num_bytes, subject.told_at) == (3.25, 2.5, 60, 3.5)
