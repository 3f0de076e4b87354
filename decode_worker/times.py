"""Tells how long each stage of a choice took at this worker, by the times noted at its request and its pull; and what
was drafted of it."""

from __future__ import annotations

from common.contract.messages.worker import DecodeTimes, PromptTimes, Timings
from decode_worker.request import DecodeChoice, DecodeRequest


def timings_of(choice: DecodeChoice, now: float) -> Timings:
    """Timings of a choice. They are sent before the tokens that are sent at `now`."""
    request = choice.request
    decode = _decode_times(choice, now)
    return Timings(
        request=request.key.request,
        attempt=request.key.attempt,
        choice=choice.sequence.choice,
        prompt=request.prompt_times,
        decode=decode,
    )


def prompt_times_of(request: DecodeRequest, now: float) -> PromptTimes:
    """Times of a prompt that was computed here and whose first tokens are sent at `now`."""
    assert request.started_at is not None, request.key
    queue_s = request.started_at - request.arrived
    prefill_s = now - request.started_at
    return PromptTimes(queue_s=queue_s, prefix_pull_s=0.0, prefill_s=prefill_s, num_cached=request.num_cached)


def _decode_times(choice: DecodeChoice, now: float) -> DecodeTimes | None:
    """Times after the prompt; None if the choice has only its first token, computed here."""
    request = choice.request
    pull = None if request.pull is None else request.pull.times
    joined_at = choice.joined_at
    if pull is None and joined_at is None:
        return None
    assert request.begun_at is not None, request.key
    queue_s = decode_s = preempted_s = 0.0
    if joined_at is not None:
        preempted_s = choice.paused_s
        if choice.paused_at is not None:
            preempted_s += now - choice.paused_at
        queue_s = joined_at - request.begun_at
        decode_s = max(0.0, now - joined_at - preempted_s)  # the sum of pauses has rounding errors
    if pull is None:
        return DecodeTimes(
            queue_s=queue_s,
            decode_s=decode_s,
            preempted_s=preempted_s,
            num_drafted=choice.num_drafted,
            num_accepted=choice.num_accepted,
        )
    assert pull.told_at is not None, request.key
    assert pull.reserved_at is not None, request.key
    assert pull.read_at is not None, request.key
    free_at = max(pull.told_at, pull.reserved_at)
    ahead = request.ahead
    return DecodeTimes(
        wait_s=pull.told_at - request.arrived,
        reserve_s=free_at - pull.told_at,
        pull_s=pull.read_at - free_at,
        settle_s=request.begun_at - pull.read_at,
        queue_s=queue_s,
        decode_s=decode_s,
        preempted_s=preempted_s,
        read_s=pull.read_s + (0.0 if ahead is None else ahead.read_s),
        hidden_read_s=pull.hidden_read_s + (0.0 if ahead is None else ahead.read_s),
        pull_bytes=pull.num_bytes + (0 if ahead is None else ahead.num_bytes),
        num_drafted=choice.num_drafted,
        num_accepted=choice.num_accepted,
    )
