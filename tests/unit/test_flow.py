"""One attempt at a request: every token once and in order, and exactly one end, whatever comes and goes.

What follows when an attempt fails is told in `test_failover`, how a sequence moves in `test_flow_moves`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from flow_run import (
    ABORT,
    ACK,
    CANCELLED,
    D2,
    FINISHED,
    KEY,
    PROMPT,
    REQUEST,
    START,
    D,
    P,
    Run,
    Seen,
    Sent,
    cut,
    failed,
    life,
    moved,
    resend,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.errors import Cause
from common.contract.ids import Incarnation
from common.contract.messages.fields import FinishReason, Message
from common.contract.messages.gateway import Abort, Ack, Decode, Prefill, PrefixHint, Resend, Source
from common.contract.messages.session import Role
from common.contract.messages.worker import TokenLogprobs, Tokens
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from gateway.serving.attempt import Deliver
from gateway.serving.flow import FlowState
from gateway.serving.flow_actions import Done, Want
from gateway.serving.generation import Delta, Fail


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    if not run.flow.running:
        run.check_end()


# --- the start -------------------------------------------------------------------------------------------------------


def test_both_workers_are_given_their_part_at_once() -> None:
    run = Run(num_choices=3)
    assert [(type(each.message), each.address) for each in run.seen if isinstance(each, Sent)] == [
        (Prefill, P),
        (Decode, D),
    ]
    (_, prefill), (_, decode) = run.sent(Prefill)[0], run.sent(Decode)[0]
    for work in (prefill, decode):
        assert (work.key, work.token_ids, work.prompt_len) == (KEY, PROMPT, START)
        assert (work.choices, work.budget_s) == ((0, 1, 2), 9)
        assert work.sampling == SamplingParams(max_tokens=50)
        assert (work.tier, work.tenant, work.cache_salt) == (Tier.BATCH, "acme", "salt")
    assert prefill.prefix is None
    assert decode.source == life(P).source
    assert (decode.offered, decode.moving) == (KEY, False)


def test_a_hint_goes_to_the_prefill_worker() -> None:
    hint = PrefixHint(source=Source(address="d:2", incarnation=Incarnation("E")), num_tokens=16)
    run = Run(prefix=hint)
    ((_, prefill),) = run.sent(Prefill)
    assert prefill.prefix == hint
    assert "16 tokens" in run.flow.story[0]


def test_clients_are_told_where_a_request_is_without_addresses() -> None:
    assert Run().flow.attempts.whereabouts == "a prefill and a decode worker had it"
    assert Run(local=True).flow.attempts.whereabouts == "a decode worker had it"
    assert Run(begin=False).flow.attempts.whereabouts == "it waits for workers"


def test_nothing_is_sent_before_workers_are_chosen() -> None:
    run = Run(begin=False)
    assert run.seen == [run.want]
    assert (run.want.num_tokens, run.want.delay_s) == (START, 0)
    assert (run.want.avoid, run.want.offer) == (frozenset(), None)


@pytest.mark.parametrize("end", ["time", "client"])
def test_a_request_may_end_before_workers_are_chosen(end: str) -> None:
    run = Run(begin=False)
    run.do(run.flow.cancel() if end == "client" else run.flow.fail(Fail(Cause.DEADLINE, "late")))
    assert run.flow.wants == []
    run.check_end()


# --- a decode worker alone -------------------------------------------------------------------------------------------


@pytest.fixture
def local() -> Iterator[Run]:
    run = Run(local=True)
    yield run
    if not run.flow.running:
        run.check_end()


def test_a_decode_worker_alone_gets_a_prompt_and_no_source() -> None:
    run = Run(num_choices=2, local=True)
    assert [(type(each.message), each.address) for each in run.seen if isinstance(each, Sent)] == [(Decode, D)]
    ((_, decode),) = run.sent(Decode)
    assert (decode.key, decode.token_ids, decode.prompt_len, decode.choices) == (KEY, PROMPT, START, (0, 1))
    assert (decode.source, decode.offered, decode.moving) == (None, None, False)
    assert (decode.tier, decode.tenant, decode.cache_salt) == (Tier.BATCH, "acme", "salt")


def test_every_token_comes_from_the_decode_worker_alone(local: Run) -> None:
    local.on(D, tokens(START, 1), tokens(START + 2, 3))
    assert local.sent(Resend) == [(D, resend(START + 1))]
    local.on(D, tokens(START + 1, 2, 3, end="stop"), FINISHED)
    assert local.text() == [1, 2, 3]
    assert local.sent(Ack) == [(D, ACK)]


def test_a_request_that_ends_with_its_first_token_is_acknowledged_to_a_decode_worker_alone(local: Run) -> None:
    local.on(D, tokens(START, 1, end="length"))
    assert local.sent(Ack) == [(D, ACK)]
    assert local.sent(Abort) == []


@pytest.mark.parametrize("spoken", [False, True])
@pytest.mark.parametrize("end", ["failed", "lost", "unknown", "time", "client"])
def test_every_end_concerns_the_decode_worker_alone(local: Run, spoken: bool, end: str) -> None:
    if spoken:
        local.on(D, tokens(START, 1))
    match end:
        case "failed":
            local.on(D, failed())
        case "lost":
            local.lose(D)
        case "unknown":
            local.resync(D, known=False)
        case "time":
            local.do(local.flow.fail(Fail(Cause.DEADLINE, "late")))
        case "client":
            local.do(local.flow.cancel())
    assert local.sent(Abort) == [(D, ABORT)]
    assert local.flow.attempts == []
    if local.flow.running:
        assert (local.want.offer, local.want.key.attempt) == (None, 2)


def test_a_decode_worker_alone_that_knows_the_request_is_asked_for_all_of_it(local: Run) -> None:
    assert local.resync(D, known=True) == [Sent(D, resend(START))]


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_the_first_token_comes_from_prefill_and_its_repeat_is_dropped(run: Run) -> None:
    first = Delta(choice=0, token_ids=(1,), logprobs=None, finish_reason=None)
    assert run.on(P, tokens(START, 1)) == [Deliver(first, run.attempt.key, Role.PREFILL)]
    assert run.on(D, tokens(START, 1)) == []
    assert run.flow.tally.num_duplicates == 1
    run.on(D, tokens(START, 1, 2, 3), tokens(START + 3, 4, end="stop"), FINISHED)
    assert run.text() == [1, 2, 3, 4]
    assert run.flow.state is FlowState.DONE
    assert run.sent(Ack) == [(D, ACK)]
    assert run.sent(Abort) == []
    assert run.deltas()[-1].finish_reason == "stop"
    assert run.flow.tally.num_duplicates == 1


def test_decode_may_be_heard_before_prefill(run: Run) -> None:
    run.on(D, tokens(START, 1, 2))
    assert run.on(P, tokens(START, 1)) == []
    run.on(D, tokens(START + 2, 3, end="length"))
    assert run.text() == [1, 2, 3]
    assert run.flow.state is FlowState.DONE


def test_all_of_a_request_may_come_from_decode_before_prefill_is_heard(run: Run) -> None:
    run.on(D, tokens(START, 1, 2, end="stop"))
    assert run.sent(Ack) == [(D, ACK)]


def test_log_probabilities_are_cut_with_their_tokens(run: Run) -> None:
    one, two, three = (TokenLogprobs(logprob=-float(n), top=((n, -float(n)),)) for n in (1, 2, 3))
    message = Tokens(request=REQUEST, attempt=1, choice=0, position=START, token_ids=(1,), logprobs=(one,))
    run.on(P, message)
    message = Tokens(
        request=REQUEST, attempt=1, choice=0, position=START, token_ids=(1, 2, 3), logprobs=(one, two, three)
    )
    run.on(D, message)
    assert [delta.logprobs for delta in run.deltas()] == [(one,), (two, three)]


def test_a_frame_that_begins_within_the_prompt_gives_only_what_is_new(run: Run) -> None:
    run.on(D, tokens(0, *PROMPT, 1, 2))
    assert run.text() == [1, 2]
    assert run.on(D, tokens(0, *PROMPT)) == []


def test_a_gap_is_asked_for_once(run: Run) -> None:
    run.on(P, tokens(START, 1))
    assert run.on(D, tokens(START + 2, 3)) == [Sent(D, resend(START + 1))]
    assert run.on(D, tokens(START + 3, 4), tokens(START + 4, 5)) == []
    assert run.flow.tally.num_gaps == 3
    run.on(D, tokens(START + 1, 2, 3, 4, 5))
    assert run.text() == [1, 2, 3, 4, 5]
    assert run.on(D, tokens(START + 7, 8)) == [Sent(D, resend(START + 5))], "another gap is asked for anew"


def test_a_gap_that_is_filled_only_in_part_is_asked_for_again(run: Run) -> None:
    run.on(P, tokens(START, 1))
    run.on(D, tokens(START + 3, 4))
    run.on(D, tokens(START + 1, 2))
    assert run.on(D, tokens(START + 3, 4)) == [Sent(D, resend(START + 2))]


def test_an_end_beyond_a_gap_does_not_end_the_choice(run: Run) -> None:
    run.on(P, tokens(START, 1))
    run.on(D, tokens(START + 2, 3, end="stop"))
    assert run.flow.running
    run.on(D, tokens(START + 1, 2, 3, end="stop"))
    assert run.text() == [1, 2, 3]
    assert run.flow.state is FlowState.DONE


def test_finished_before_its_tokens_asks_for_what_is_missing() -> None:
    run = Run(num_choices=3)
    run.on(D, tokens(START, 1, choice=0, end="stop"), tokens(START, 1, 2, choice=2))
    assert run.on(D, FINISHED) == [Sent(D, resend(START, 1)), Sent(D, resend(START + 2, 2))]
    assert run.flow.running


def test_finished_after_an_answer_that_brought_nothing_is_not_asked_again(run: Run) -> None:
    """It comes with each answer; if the answer was lost, the session will say so."""
    run.on(D, tokens(START, 1))
    assert run.on(D, FINISHED) == [Sent(D, resend(START + 1))]
    assert run.on(D, FINISHED) == []
    assert run.resync(D, known=True) == [Sent(D, resend(START + 1))]
    run.on(D, tokens(START + 1, 2))
    assert run.on(D, FINISHED) == [Sent(D, resend(START + 2))]


def test_finished_from_prefill_ends_nothing(run: Run) -> None:
    run.on(P, tokens(START, 1))
    assert run.on(P, FINISHED) == []
    assert run.flow.running


def test_choices_go_each_at_its_own_pace() -> None:
    run = Run(num_choices=3)
    run.on(P, *(tokens(START, 10 * choice, choice=choice) for choice in (0, 1)))
    run.on(P, tokens(START, 20, choice=2, end="stop"))
    run.on(
        D, tokens(START, 0, 1, choice=0), tokens(START + 3, 13, choice=1), tokens(START + 2, 2, choice=0, end="stop")
    )
    assert run.sent(Resend) == [(D, resend(START + 1, 1))]
    assert run.flow.running
    assert run.on(D, tokens(START, 20, choice=2, end="stop")) == []
    run.on(D, tokens(START + 1, 11, 12, 13, choice=1, end="length"))
    assert [run.text(choice) for choice in range(3)] == [[0, 1, 2], [10, 11, 12, 13], [20]]
    assert run.flow.state is FlowState.DONE
    run.check_end()


def test_a_request_that_ends_with_its_first_token_frees_decode_by_an_abort(run: Run) -> None:
    assert run.on(P, tokens(START, 1, end="stop"))[1:] == [Sent(D, ABORT), Done()]
    assert run.sent(Ack) == []


def test_all_choices_may_end_with_their_first_tokens() -> None:
    run = Run(num_choices=2)
    run.on(P, tokens(START, 1, choice=0, end="stop"))
    assert run.flow.running
    run.on(P, tokens(START, 1, choice=1, end="length"))
    assert run.sent(Abort) == [(D, ABORT)]
    run.check_end()


def test_tokens_after_the_end_of_a_choice_are_dropped() -> None:
    run = Run(num_choices=2)
    run.on(P, tokens(START, 1, choice=0, end="stop"))
    assert run.on(D, tokens(START + 1, 2, choice=0)) == []
    assert run.on(D, tokens(START + 5, 2, choice=0)) == []
    assert run.text() == [1]
    assert run.sent(Resend) == []


def test_a_choice_that_is_given_up_is_aborted_alone_and_the_others_go_on() -> None:
    run = Run(num_choices=3)
    run.on(P, *(tokens(START, 1, choice=choice) for choice in range(3)))
    run.on(D, tokens(START, 1, 2, choice=0), tokens(START, 1, 2, choice=1))
    assert run.do(run.flow.give_up(1)) == [Sent(D, replace(ABORT, choice=1))]
    assert run.do(run.flow.give_up(1)) == []
    assert run.on(D, tokens(START + 2, 3, choice=1), tokens(START + 9, 3, choice=1)) == []
    assert (run.flow.tally.num_duplicates, run.flow.tally.num_gaps) == (0, 0), "nobody counts what is not read"
    assert run.resync(D, known=True)[:1] == [Sent(D, replace(ABORT, choice=1))], "it may be lost"
    run.on(D, tokens(START + 2, 3, choice=0, end="stop"))
    assert run.flow.running
    assert run.on(D, tokens(START + 1, 2, choice=2, end="length"))[1:] == [Sent(P, ABORT), Sent(D, ABORT), Done()]
    run.check_end()


def test_a_choice_that_is_given_up_before_decode_has_begun_is_aborted_with_its_first_token() -> None:
    """It does not know the choices before."""
    run = Run(num_choices=2)
    run.on(P, *(tokens(START, 1, choice=choice) for choice in range(2)))
    assert run.do(run.flow.give_up(0)) == []
    assert run.on(D, tokens(START, 1, 2, choice=0)) == [Sent(D, replace(ABORT, choice=0))]
    assert run.on(D, tokens(START + 2, 3, choice=0)) == [], "once is enough"
    run.on(D, tokens(START, 1, 2, choice=1, end="stop"))
    run.check_end()


def test_a_choice_that_is_given_up_is_aborted_at_whoever_takes_the_offer_over() -> None:
    run = Run(num_choices=2)
    run.on(P, *(tokens(START, 1, choice=choice) for choice in range(2)))
    run.do(run.flow.give_up(0))
    run.lose(D)
    assert run.want.offer is not None
    run.go(D2)
    told = run.on(D2, tokens(START, 1, 2, choice=0), tokens(START, 1, 2, choice=1))
    assert [(each.address, each.message.choice) for each in told if isinstance(each, Sent)] == [(D2, 0)]  # type: ignore[attr-defined]


def test_tokens_of_others_go_the_short_way_after_a_choice_with_a_gap_was_given_up() -> None:
    run = Run(num_choices=2)
    run.on(P, *(tokens(START, 1, choice=choice) for choice in range(2)))
    run.on(D, tokens(START, 1, 2, choice=0), tokens(START, 1, 2, choice=1))
    run.on(D, tokens(START + 9, 3, choice=0))
    assert not run.attempt.take(run.flow.choices[1], START + 2, 7), "a gap is asked for"
    run.do(run.flow.give_up(0))
    run.on(D, tokens(START + 2, 3, choice=0))
    assert run.attempt.take(run.flow.choices[1], START + 2, 7)


def test_a_choice_that_is_given_up_is_wanted_nowhere_else() -> None:
    run = Run(num_choices=2)
    run.on(P, *(tokens(START, 1, choice=choice) for choice in range(2)))
    run.on(D, tokens(START, 1, 2, choice=0), tokens(START, 1, 2, choice=1))
    run.do(run.flow.give_up(0))
    run.lose(D, crashed=True)
    assert [choice.index for choice in run.want.choices] == [1]
    run.go(D2)
    (decode,) = [message for address, message in run.sent(Decode) if address == D2]
    assert decode.choices == (1,)


def test_a_choice_that_is_given_up_while_it_moves_is_given_up_at_both_workers() -> None:
    run = Run(num_choices=2)
    run.on(P, *(tokens(START, 1, choice=choice) for choice in range(2)))
    run.on(D, tokens(START, 1, 2, choice=0), tokens(START, 1, 2, choice=1))
    run.move(D2, choice=0)
    told = run.do(run.flow.give_up(0))
    assert [(each.address, each.message.choice) for each in told] == [(D, 0), (D2, None)]  # type: ignore[union-attr]
    assert run.on(D, cut(START + 2)) == [], "it was cut before"
    run.on(D, tokens(START + 2, 3, choice=1, end="stop"))
    assert run.flow.state is FlowState.DONE
    run.check_end()


def test_with_the_last_open_choice_the_request_is_done() -> None:
    """Its client may not have seen the end of the other one yet."""
    run = Run(num_choices=2)
    run.on(P, *(tokens(START, 1, choice=choice) for choice in range(2)))
    run.on(D, tokens(START, 1, 2, choice=0), tokens(START, 1, 2, choice=1, end="stop"))
    assert run.do(run.flow.give_up(0)) == [Sent(P, ABORT), Sent(D, ABORT), Done()]
    run.check_end()


def test_a_choice_is_given_up_while_its_request_waits() -> None:
    run = Run(num_choices=2)
    run.on(P, *(tokens(START, 1, choice=choice) for choice in range(2)))
    run.on(D, tokens(START, 1, 2, choice=0), tokens(START, 1, 2, choice=1))
    run.lose(D)
    assert len(run.flow.wants) == 2
    run.do(run.flow.give_up(0))
    assert [choice.index for choice in run.want.choices] == [1]


# --- what a worker has no right to say -------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [P, D])
@pytest.mark.parametrize(
    "message", [tokens(START, 1, choice=1), cut(START, choice=1), moved(choice=1), CANCELLED], ids=repr
)
def test_what_was_not_asked_for_is_the_worker_s_own_fault(run: Run, address: str, message: Message) -> None:
    run.on(address, message)
    assert run.flow.tally.failures == {Cause.INTERNAL: 1}
    assert run.want.avoid == {life(address)}


def test_a_prefill_worker_has_no_sequence_to_stop(run: Run) -> None:
    run.on(P, cut(START))
    assert run.flow.tally.failures == {Cause.INTERNAL: 1}


# --- ends ------------------------------------------------------------------------------------------------------------

STATES: dict[str, tuple[tuple[str, Message], ...]] = {
    "nothing heard": (),
    "first token": ((P, tokens(START, 1)),),
    "decoding": ((P, tokens(START, 1)), (D, tokens(START, 1, 2))),
    "gap": ((P, tokens(START, 1)), (D, tokens(START + 2, 3))),
    "finished with a gap": ((P, tokens(START, 1)), (D, tokens(START + 2, 3, end="stop")), (D, FINISHED)),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("address", [P, D])
@pytest.mark.parametrize("end", ["failed for good", "failed", "cancelled by worker", "time", "client"])
def test_every_end_in_every_state_aborts_both_once(run: Run, state: str, address: str, end: str) -> None:
    for sender, message in STATES[state]:
        run.on(sender, message)
    match end:
        case "failed for good":
            assert run.on(address, failed(Cause.INVALID, "no"))[-1] == Fail(Cause.INVALID, "no")
        case "failed":
            assert run.on(address, failed(Cause.LEASE_LOST))[-1] == run.want
        case "cancelled by worker":
            assert run.on(address, CANCELLED)[-1] == run.want
            run.do(run.flow.cancel())
        case "time":
            assert run.do(run.flow.fail(Fail(Cause.DEADLINE, "late")))[-1] == Fail(Cause.DEADLINE, "late")
        case "client":
            assert run.do(run.flow.cancel()) == [Sent(P, ABORT), Sent(D, ABORT)]
            assert run.flow.state is FlowState.CANCELLED
    assert sorted(run.sent(Abort), key=lambda each: each[0]) == [(D, ABORT), (P, ABORT)]


@pytest.mark.parametrize("state", STATES)
def test_a_lost_decode_worker_ends_the_attempt_in_every_state(run: Run, state: str) -> None:
    for sender, message in STATES[state]:
        run.on(sender, message)
    assert isinstance(run.lose(D, "restarted")[-1], Want)
    assert run.flow.attempts == []
    assert "decode" in run.flow.story[-1]
    assert "restarted" in run.flow.story[-1]
    assert run.flow.tally.failures == {Cause.WORKER_LOST: 1}


@pytest.mark.parametrize("state", STATES)
def test_a_lost_prefill_worker_matters_only_until_its_first_tokens(run: Run, state: str) -> None:
    for sender, message in STATES[state]:
        run.on(sender, message)
    seen = run.lose(P)
    if state == "nothing heard":
        assert isinstance(seen[-1], Want)
        assert run.flow.tally.failures == {Cause.WORKER_LOST: 1}
    else:
        assert seen == []
        run.on(D, tokens(START, 1, 2, 3, end="stop"))
        assert run.text() == [1, 2, 3]
        assert run.flow.state is FlowState.DONE


def test_a_prefill_worker_that_is_lost_before_the_last_of_its_first_tokens_ends_the_attempt() -> None:
    run = Run(num_choices=2)
    run.on(P, tokens(START, 1, choice=0))
    run.lose(P)
    assert run.flow.attempts == []
    assert run.flow.tally.failures == {Cause.WORKER_LOST: 1}


def test_after_decode_has_spoken_of_each_choice_prefill_may_go_though_it_was_never_heard(run: Run) -> None:
    run.on(D, tokens(START, 1))
    assert run.lose(P) == []


def test_after_decode_has_spoken_at_all_prefill_may_go() -> None:
    """It speaks only after it has settled; the first tokens of the other choices are in its next frames."""
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, 2, choice=0))
    assert run.lose(P) == []
    assert run.resync(P, known=False) == []
    run.on(D, tokens(START, 1, 2, choice=1))
    assert run.text(1) == [1, 2]


# --- losses on the way -----------------------------------------------------------------------------------------------


def test_a_decode_worker_that_knows_the_request_is_asked_for_what_may_be_missing() -> None:
    run = Run(num_choices=2)
    run.on(P, tokens(START, 1, choice=0, end="stop"), tokens(START, 1, choice=1))
    assert run.resync(D, known=True) == [Sent(D, resend(START + 1, 1))]
    assert run.resync(D, known=True) == [Sent(D, resend(START + 1, 1))], "this too may be lost"


def test_a_lost_resend_is_asked_for_again_after_a_resync(run: Run) -> None:
    run.on(P, tokens(START, 1))
    run.on(D, tokens(START + 2, 3))
    assert run.resync(D, known=True) == [Sent(D, resend(START + 1))]


@pytest.mark.parametrize("state", STATES)
def test_a_decode_worker_that_does_not_know_the_request_has_lost_it(run: Run, state: str) -> None:
    for sender, message in STATES[state]:
        run.on(sender, message)
    assert isinstance(run.resync(D, known=False)[-1], Want)
    assert run.flow.tally.failures == {Cause.WORKER_LOST: 1}
    assert run.want.avoid == frozenset(), "messages were lost, the worker is well"


def test_a_prefill_worker_must_know_the_request_until_its_first_tokens(run: Run) -> None:
    assert run.resync(P, known=True) == []
    run.on(P, tokens(START, 1))
    assert run.resync(P, known=False) == []
    assert run.resync(P, known=True) == []
    assert run.flow.tally.failures == {}


def test_a_prefill_worker_that_never_got_the_request_ends_the_attempt(run: Run) -> None:
    run.resync(P, known=False)
    assert run.flow.attempts == []
    assert run.flow.tally.failures == {Cause.WORKER_LOST: 1}


# --- any interleaving ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_client_sees_every_token_once_whatever_is_lost_or_repeated(data: st.DataObject) -> None:
    num_choices = data.draw(st.integers(1, 3), label="choices")
    lengths = [data.draw(st.integers(1, 9), label=f"tokens of {choice}") for choice in range(num_choices)]
    truth = [[100 * choice + index for index in range(length)] for choice, length in enumerate(lengths)]
    local = data.draw(st.booleans(), label="a decode worker alone")
    run = Run(num_choices, local=local)

    def frame(choice: int, start: int, stop: int) -> Tokens:
        end: FinishReason | None = "stop" if stop == lengths[choice] else None
        return tokens(START + start, *truth[choice][start:stop], choice=choice, end=end)

    def answers() -> list[Tokens]:
        asked = [message for _, message in run.sent(Resend)][num_answered:]
        return [frame(m.choice, m.position - START, lengths[m.choice]) for m in asked]

    first = [] if local else [(P, frame(choice, 0, 1)) for choice in range(num_choices)]
    rest = []
    for choice, length in enumerate(lengths):
        cuts = sorted(data.draw(st.sets(st.integers(1, length)), label=f"cuts of {choice}") | {0, length})
        rest += [(D, frame(choice, a, b)) for a, b in itertools.pairwise(cuts)]
    num_answered = 0
    for address, message in data.draw(st.permutations(first + rest), label="order"):
        for _ in range(data.draw(st.sampled_from((0, 1, 1, 2)), label="copies")):
            run.on(address, message)
        if data.draw(st.booleans(), label="answered at once"):
            pending, num_answered = answers(), len(run.sent(Resend))
            for answer in pending:
                if data.draw(st.booleans(), label="answer arrives"):
                    run.on(D, answer)
    num_answered = len(run.sent(Resend))
    run.resync(D, known=True)  # the channel has noticed whatever was lost
    for answer in answers():
        run.on(D, answer)
    run.on(D, FINISHED)
    assert [run.text(choice) for choice in range(num_choices)] == truth
    for choice in range(num_choices):
        reasons = [delta.finish_reason for delta in run.deltas() if delta.choice == choice]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert run.flow.state is FlowState.DONE
    run.check_end()


# --- workers that answer, over wires that lose and repeat ------------------------------------------------------------


class Workers:
    """A prefill and a decode worker, or a decode worker alone, as the gateway sees them; wires that lose and repeat.

    Output token `i` of choice `c` is `100 * c + i`. Messages of one worker arrive in order, unless they are lost: then
    the session is opened again before long.
    """

    def __init__(self, choose: Callable[[list[Any]], Any]) -> None:
        self.choose = choose
        self.lengths = [choose([1, 2, 3, 6, 12]) for _ in range(choose([1, 1, 2, 3]))]
        self.reasons = [choose(["stop", "length"]) for _ in self.lengths]
        self.local = choose([False, False, True])
        self.run = Run(len(self.lengths), local=self.local)
        self.generated = [0 if self.local else 1 for _ in self.lengths]
        self.sent = [0 for _ in self.lengths]
        self.settled = False
        self.given_up = not self.local and all(length == 1 for length in self.lengths)
        self.wires: dict[str, deque[Message]] = {P: deque(), D: deque()}
        self.to_decode: deque[Message] = deque()
        self.lossy = False
        self.received: list[list[int]] = [[] for _ in self.lengths]
        self.ended: list[FinishReason | None] = [None for _ in self.lengths]
        self.done = False
        self.goodbyes: list[Message] = []
        for choice in range(0 if self.local else len(self.lengths)):
            self.wires[P].append(self.frame(choice, 0))
        if self.given_up:
            self.wires[P].append(FINISHED)

    def frame(self, choice: int, position: int) -> Tokens:
        """What has been generated of a choice, from `position` on."""
        generated = self.generated[choice]
        over = generated == self.lengths[choice]
        token_ids = (100 * choice + index for index in range(position, generated))
        return tokens(START + position, *token_ids, choice=choice, end=self.reasons[choice] if over else None)

    @property
    def finished(self) -> bool:
        return self.generated == self.lengths

    # --- what may happen -----------------------------------------------------------------------------------------

    def steps(self) -> list[Callable[[], None]]:
        steps = [self.lose_or_repeat, self.lose_or_repeat, self.open_again]
        steps += [self.deliver(address) for address in self.wires if self.wires[address]] * 4
        steps += [self.hear] * 4 if self.to_decode else []
        steps += [self.decode] * 3 if not (self.finished or self.given_up) else []
        return steps

    def decode(self) -> None:
        """A step of the decode worker; before the first, it settles, or computes the prompt."""
        going_on = [choice for choice, length in enumerate(self.lengths) if self.generated[choice] < length]
        for choice in going_on:
            self.generated[choice] += 1
        for choice in range(len(self.lengths)) if not self.settled else going_on:
            self.wires[D].append(self.frame(choice, self.sent[choice]))
            self.sent[choice] = self.generated[choice]
        self.settled = True
        if self.finished:
            self.wires[D].append(FINISHED)

    def deliver(self, address: str) -> Callable[[], None]:
        return lambda: self.take(self.run.on(address, self.wires[address].popleft()))

    def hear(self) -> None:
        message = self.to_decode.popleft()
        match message:
            case Resend(choice=choice, position=position) if self.settled:
                if position - START < self.generated[choice]:
                    self.wires[D].append(self.frame(choice, position - START))
                if self.finished:
                    self.wires[D].append(FINISHED)
            case Ack() | Abort():
                assert self.done

    def lose_or_repeat(self) -> None:
        """The prefill worker's frames may come twice; the decode worker's, and those to it, may be lost too."""
        wire = self.choose([self.wires[P], self.wires[D], self.to_decode])
        if not wire:
            return
        index = self.choose(list(range(len(wire))))
        if wire is self.wires[P] or self.choose([True, False]):
            wire.insert(index, wire[index])
        else:
            del wire[index]
            self.lossy = True

    def open_again(self) -> None:
        """Both sides find out; a session that is opened again for nothing does no harm."""
        self.lossy = False
        self.take(self.run.resync(D, known=True))
        if not self.local:
            self.take(self.run.resync(P, known=True))

    def take(self, seen: list[Seen]) -> None:
        for each in seen:
            assert not self.done, "something happens after the end"
            match each:
                case Deliver(delta):
                    assert self.ended[delta.choice] is None
                    self.received[delta.choice] += delta.token_ids
                    self.ended[delta.choice] = delta.finish_reason
                case Sent(address, message):
                    assert address == D
                    self.to_decode.append(message)
                    self.goodbyes += [message] if isinstance(message, Ack | Abort) else []
                case Done():
                    self.done = True
                case _:
                    raise AssertionError(each)

    def play(self, num_events: int) -> None:
        for _ in range(num_events):
            self.choose(self.steps())()

    def settle_down(self) -> None:
        """Nothing is lost any more: the client gets everything."""
        while not (self.finished or self.given_up):
            self.decode()
        if self.lossy:
            self.open_again()
        while self.to_decode or any(self.wires.values()):
            for address in self.wires:
                while self.wires[address]:
                    self.deliver(address)()
            while self.to_decode:
                self.hear()

    def check(self) -> None:
        assert self.done
        assert self.received == [[100 * choice + index for index in range(n)] for choice, n in enumerate(self.lengths)]
        assert self.ended == self.reasons
        [goodbye] = self.goodbyes
        assert isinstance(goodbye, Abort | Ack)
        assert self.given_up == isinstance(goodbye, Abort) or all(length == 1 for length in self.lengths)


def test_the_client_sees_every_token_once_in_many_long_runs() -> None:
    """The workers answer as they do, however late; a failure names the seed."""
    num_gaps = 0
    for seed in range(500):
        workers = Workers(Random(seed).choice)
        try:
            workers.play(60)
            workers.settle_down()
            workers.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_gaps += workers.run.flow.tally.num_gaps
    assert num_gaps > 100, "hardly a frame was lost: the runs show nothing"
