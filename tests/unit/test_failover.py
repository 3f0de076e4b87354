"""What follows when an attempt at a request fails: who is asked next, for what, how often, and who is let go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from flow_run import (
    ABORT,
    D2,
    D3,
    KEY,
    P2,
    PROMPT,
    REQUEST,
    START,
    D,
    P,
    Run,
    Sent,
    failed,
    life,
    tokens,
)

from common.contract.errors import Cause
from common.contract.ids import RequestKey
from common.contract.messages.gateway import TRIAL_TOKENS, Abort, Ack, Decode, Prefill, Suspicion
from common.contract.messages.session import Role
from gateway.serving import blame
from gateway.serving.attempt import Deliver
from gateway.serving.flow import FlowState
from gateway.serving.flow_actions import FIRST_DELAY_S
from gateway.serving.generation import Delta, Fail
from gateway.serving.suspicion import MAX_CRASHES, Crash

FINAL = (Cause.INVALID, Cause.DEADLINE)
PASSING = [cause for cause in Cause if cause not in (*FINAL, Cause.POISON, Cause.CANCELLED)]
"""Causes with which another worker, or another moment, may do."""


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    if run.flow.running:
        run.do(run.flow.cancel())
    run.check_end()


def keys(run: Run) -> list[tuple[str, RequestKey]]:
    """Every part that was given: where, and under which name."""
    return [(each.address, each.message.key) for each in run.seen if isinstance(each, Sent) if is_work(each)]  # type: ignore[attr-defined]


def is_work(sent: Sent) -> bool:
    return isinstance(sent.message, Prefill | Decode)


# --- a retry ---------------------------------------------------------------------------------------------------------


def test_a_retry_goes_on_where_the_client_is(run: Run) -> None:
    run.on(P, tokens(START, 1))
    run.on(D, tokens(START, 1, 2, 3))
    run.lose(D)
    assert run.want.num_tokens == START + 3
    run.go(D2, P2, budget_s=4)
    prefill, decode = run.sent(Prefill)[-1][1], run.sent(Decode)[-1][1]
    for work in (prefill, decode):
        assert (work.token_ids, work.prompt_len) == ((*PROMPT, 1, 2, 3), START)
        assert (work.key, work.choices, work.budget_s) == (RequestKey(REQUEST, 2), (0,), 4)
    assert (decode.source, decode.offered) == (life(P2).source, RequestKey(REQUEST, 2))
    fourth = Delta(choice=0, token_ids=(4,), logprobs=None, finish_reason=None)
    assert run.on(P2, tokens(START + 3, 4)) == [Deliver(fourth, run.attempt.key, Role.PREFILL)]
    run.on(D2, tokens(START + 3, 4, 5, end="stop"))
    assert run.text() == [1, 2, 3, 4, 5]
    assert run.flow.state is FlowState.DONE
    assert run.sent(Ack) == [(D2, Ack(request=REQUEST, attempt=2))]
    assert run.flow.tally.failures == {Cause.WORKER_LOST: 1}


def test_attempts_are_numbered_upwards_whatever_they_were(run: Run) -> None:
    run.on(D, failed())
    run.go(D2)  # for the offer that stands
    run.on(D2, failed(Cause.LEASE_LOST))
    run.go(D, P)
    run.lose(P)
    run.go(D)  # computes the prompt itself
    assert keys(run) == [
        (P, KEY),
        (D, KEY),
        (D2, RequestKey(REQUEST, 2)),
        (P, RequestKey(REQUEST, 3)),
        (D, RequestKey(REQUEST, 3)),
        (D, RequestKey(REQUEST, 4)),
    ]


def test_late_tokens_of_an_older_attempt_are_about_nothing_under_way(run: Run) -> None:
    old, decode = run.last[D]
    run.on(P, tokens(START, 1))
    run.on(D, tokens(START, 1, 2), failed(Cause.LEASE_LOST))
    assert run.flow.attempts.find(decode.key, D) is None, "while workers are wanted"
    run.go(D, P)
    assert run.flow.attempts.find(decode.key, D) is None, "and while the same worker has the next attempt"
    assert run.flow.attempts.find(run.attempt.key, D) == (run.attempt, run.attempt.decode)
    assert run.flow.attempts.find(run.attempt.key, D2) is None
    assert old is not run.attempt


def test_without_a_new_token_a_retry_is_the_same_prompt_again(run: Run) -> None:
    run.lose(P)
    run.go(D, P2)
    (_, first), (_, second) = run.sent(Prefill)
    assert (first.token_ids, second.token_ids) == (PROMPT, PROMPT)


@pytest.mark.parametrize("address", [P, D])
@pytest.mark.parametrize("cause", PASSING)
def test_what_another_worker_may_do_is_tried_elsewhere(run: Run, address: str, cause: Cause) -> None:
    run.on(address, failed(cause))
    assert run.flow.running
    assert run.want.key.attempt == 2
    assert run.flow.tally.failures == {cause: 1}


@pytest.mark.parametrize("address", [P, D])
@pytest.mark.parametrize("cause", FINAL)
def test_what_would_be_the_same_elsewhere_is_not_tried_again(run: Run, address: str, cause: Cause) -> None:
    assert run.on(address, failed(cause, "why"))[-1] == Fail(cause, "why")
    assert {address for address, _ in run.sent(Abort)} == {P, D}
    assert run.flow.tally.failures == {}


# --- who is better avoided -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "avoided"),
    [
        (Cause.CAPACITY, (D,)),
        (Cause.DRAINING, ()),
        (Cause.TOO_LARGE, ()),
        (Cause.INTERNAL, (D,)),
        (Cause.TRANSFER, (D,)),
        (Cause.WORKER_LOST, (P, D)),
        (Cause.FINGERPRINT, (P, D)),
        (Cause.LEASE_LOST, ()),
    ],
)
def test_a_decode_worker_speaks_of_its_source_too(run: Run, cause: Cause, avoided: tuple[str, ...]) -> None:
    """And perhaps of itself: it may be the one that reaches nobody."""
    run.on(D, failed(cause))
    assert run.want.avoid == {life(address) for address in avoided}


def test_a_second_failed_transfer_in_a_row_is_blamed_on_the_source_and_on_its_reader(run: Run) -> None:
    run.on(D, failed(Cause.TRANSFER))
    assert run.want.offer is not None
    run.go(D2)
    run.on(D2, failed(Cause.TRANSFER))
    assert run.want.avoid == {life(D), life(P), life(D2)}
    assert run.want.offer is None


def test_the_first_failed_transfer_is_the_reader_s_whatever_has_failed_before(run: Run) -> None:
    """Else the prompt would be computed again for a connection of the new decode worker's own."""
    run.lose(D)
    run.go(D2)
    run.on(D2, failed(Cause.TRANSFER))
    assert run.want.avoid == {life(D), life(D2)}
    assert run.want.offer is not None


def test_who_has_refused_a_request_is_asked_again_once_it_is_let_in(run: Run) -> None:
    """Its first token may come from a prefill worker. A refusal is no failure."""
    run.on(D, failed(Cause.CAPACITY, "full"))
    assert run.want.avoid == {life(D)}
    run.go(D2)
    run.on(P, tokens(START, 1))
    run.on(D2, failed(Cause.LEASE_LOST))
    assert run.want.avoid == frozenset()


def test_who_has_refused_a_request_is_asked_again_once_a_failure_lets_it_in(run: Run) -> None:
    """Three that were full would count as three that could not be read."""
    run.on(P, failed(Cause.CAPACITY, "full"))
    assert run.want.avoid == {life(P)}
    assert not run.flow.admitted
    run.go(D, P2)
    run.on(D, failed(Cause.LEASE_LOST))
    assert run.want.avoid == frozenset()
    assert run.flow.admitted


def test_a_reader_of_a_source_that_the_gateway_has_lost_too_is_not_avoided(run: Run) -> None:
    run.on(P, tokens(START, 1))
    assert run.lose(P) == [], "the decode worker may have read everything"
    run.on(D, failed(Cause.WORKER_LOST))
    assert run.want.avoid == {life(P)}


def test_a_decode_worker_that_reaches_nobody_is_avoided_until_another_one_has_spoken(run: Run) -> None:
    run.on(P, tokens(START, 1))
    run.on(D, failed(Cause.WORKER_LOST, "no answer"))
    assert life(D) in run.want.avoid
    run.go(D2, P2)
    run.on(P2, tokens(START + 1, 2))
    run.on(D2, failed(Cause.LEASE_LOST))
    assert run.want.avoid == {life(P), life(D)}, "a token of a prefill worker does not show who can read from it"
    run.go(D2, P2)
    run.on(D2, tokens(START + 2, 3), failed(Cause.LEASE_LOST))
    assert run.want.avoid == frozenset()


def test_a_lost_worker_is_avoided_and_a_decode_worker_s_token_forgets_it(run: Run) -> None:
    run.lose(P)
    assert run.want.avoid == {life(P)}
    run.go(D, P2)
    run.on(P2, tokens(START, 1))
    run.on(D, failed(Cause.LEASE_LOST))
    assert run.want.avoid == {life(P)}
    run.go(D, P2)
    run.on(D, tokens(START + 1, 2), failed(Cause.LEASE_LOST))
    assert run.want.avoid == frozenset()


# --- an offer that stands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heard", [False, True], ids=["nothing heard", "first token"])
@pytest.mark.parametrize("end", ["lost", "refused", "unknown"])
def test_another_decode_worker_takes_over_what_was_computed(run: Run, heard: bool, end: str) -> None:
    if heard:
        run.on(P, tokens(START, 1))
    match end:
        case "lost":
            run.lose(D)
        case "refused":
            run.on(D, failed(Cause.CAPACITY))
        case "unknown":
            run.resync(D, known=False)
    assert run.sent(Abort) == [(D, ABORT)], "the prefill worker goes on"
    assert run.want.num_tokens == START
    run.go(D2)
    assert len(run.sent(Prefill)) == 1
    decode = run.sent(Decode)[-1][1]
    assert (decode.key, decode.offered) == (RequestKey(REQUEST, 2), KEY)
    assert (decode.source, decode.token_ids) == (life(P).source, PROMPT)
    run.on(P, tokens(START, 1))
    assert run.text() == [1]
    run.on(D2, tokens(START, 1, 2, end="stop"))
    assert run.text() == [1, 2]
    assert run.flow.state is FlowState.DONE


def test_an_offer_is_taken_over_as_often_as_need_be(run: Run) -> None:
    for address in (D, D2):
        run.on(address, failed(Cause.CAPACITY))
        run.go(D2 if address == D else D3)
        assert run.sent(Decode)[-1][1].offered == KEY
    assert [part.key.attempt for part in run.attempt.assignments] == [1, 3]
    assert len(run.sent(Prefill)) == 1


def test_of_several_choices_all_are_taken_over_with_the_offer() -> None:
    run = Run(num_choices=2)
    run.on(P, tokens(START, 1, choice=0, end="stop"), tokens(START, 5, choice=1))
    run.lose(D)
    run.go(D2)
    decode = run.sent(Decode)[-1][1]
    assert (decode.choices, decode.token_ids) == ((0, 1), PROMPT), "as they were prefilled"
    run.on(D2, tokens(START, 1, choice=0, end="stop"), tokens(START, 5, 6, choice=1, end="stop"))
    assert [run.text(0), run.text(1)] == [[1], [5, 6]]
    run.check_end()


def test_a_decode_worker_that_has_spoken_leaves_no_offer(run: Run) -> None:
    """It speaks after it has settled, and a settled lease is over."""
    run.on(D, tokens(START, 1))
    run.lose(D)
    assert run.want.offer is None
    assert {address for address, _ in run.sent(Abort)} == {P, D}


def test_a_lost_lease_leaves_no_offer(run: Run) -> None:
    run.on(D, failed(Cause.LEASE_LOST))
    assert run.want.offer is None
    assert {address for address, _ in run.sent(Abort)} == {P, D}


def test_a_decode_worker_that_has_lost_its_source_leaves_no_offer(run: Run) -> None:
    run.on(D, failed(Cause.WORKER_LOST, "nobody answers there"))
    assert run.want.offer is None
    assert life(P) in run.want.avoid
    run.go(D, P2)
    assert run.sent(Decode)[-1][1].source == life(P2).source


def test_a_decode_worker_alone_leaves_no_offer() -> None:
    run = Run(local=True)
    run.on(D, failed(Cause.CAPACITY))
    assert run.want.offer is None


@pytest.mark.parametrize("end", ["client", "time"])
@pytest.mark.parametrize("heard", [False, True])
def test_who_leaves_while_an_offer_stands_frees_the_prefill_worker(run: Run, end: str, heard: bool) -> None:
    """No attempt is under way then, and still there is somebody to let go."""
    if heard:
        run.on(P, tokens(START, 1))
    run.lose(D)
    assert run.flow.keys_at(P) == [run.want.offer.key]  # type: ignore[union-attr]
    assert run.flow.keys_at(D) == []
    seen = run.do(run.flow.cancel() if end == "client" else run.flow.fail(Fail(Cause.DEADLINE, "late")))
    assert seen[0] == Sent(P, ABORT)
    assert run.flow.keys_at(P) == []


def test_an_offer_whose_worker_is_gone_is_replaced_by_all_that_it_was_for(run: Run) -> None:
    run.on(P, tokens(START, 1))
    run.lose(D)
    seen = run.lose(P)
    assert seen == [Sent(P, ABORT), run.want]
    assert (run.want.offer, run.want.num_tokens, run.want.key) == (None, START + 1, run.flow.wants[0].key)
    run.go(D2, P2)
    assert run.sent(Prefill)[-1][1].token_ids == (*PROMPT, 1)
    assert run.sent(Prefill)[-1][1].attempt > 2


@pytest.mark.parametrize("how", ["lost", "lost with the messages to it"])
def test_a_prefill_worker_that_was_gone_before_leaves_no_offer(run: Run, how: str) -> None:
    """The decode worker went on without it."""
    run.on(P, tokens(START, 1))
    assert (run.lose(P) if how == "lost" else run.resync(P, known=False)) == []
    run.lose(D)
    assert run.want.offer is None


def test_a_failure_that_is_one_too_many_frees_the_prefill_worker_too(run: Run) -> None:
    run.on(D, failed(Cause.INVALID))
    assert {address for address, _ in run.sent(Abort)} == {P, D}


# --- several choices -------------------------------------------------------------------------------------------------


def test_choices_that_have_tokens_go_on_each_by_itself() -> None:
    run = Run(num_choices=3)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, 6, choice=1), tokens(START, 9, choice=2, end="stop"))
    run.lose(D)
    first, second = run.flow.wants
    run.go(D2, P, want=second)
    run.go(D3, P2, want=first)
    assert [(address, work.request, work.attempt, work.choices, work.token_ids) for address, work in run.sent(Decode)][
        1:
    ] == [
        (D2, "r2", 1, (1,), (*PROMPT, 5, 6)),
        (D3, "r3", 1, (0,), (*PROMPT, 1)),
    ]
    run.on(D2, tokens(START + 2, 7, choice=1, end="stop"))
    assert run.sent(Ack) == [(D2, Ack(request="r2", attempt=1))]  # type: ignore[arg-type]
    run.on(D3, tokens(START + 1, 2, choice=0, end="length"))
    assert [run.text(choice) for choice in range(3)] == [[1, 2], [5, 6, 7], [9]]
    assert run.flow.state is FlowState.DONE
    run.check_end()


def test_a_choice_that_is_the_last_keeps_its_request() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1, end="stop"))
    run.lose(D)
    run.go(D2, P)
    assert (run.attempt.key.attempt, run.sent(Decode)[-1][1].request) == (2, REQUEST)


def test_choices_without_tokens_stay_together() -> None:
    run = Run(num_choices=3)
    run.lose(P)
    run.go(D, P2)
    work = run.sent(Prefill)[-1][1]
    assert (work.choices, work.key) == ((0, 1, 2), RequestKey(REQUEST, 2))


def test_a_choice_that_fails_does_not_disturb_the_others() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1))
    run.lose(D)
    first, second = run.flow.wants
    run.go(D2, P, want=first)
    run.go(D3, P2, want=second)
    run.lose(D2)
    assert [choice.index for choice in run.want.choices] == [0]
    run.on(D3, tokens(START + 1, 6, choice=1, end="stop"))
    assert run.flow.running
    run.go(D, P)
    run.on(D, tokens(START + 1, 2, choice=0, end="stop"))
    assert [run.text(0), run.text(1)] == [[1, 2], [5, 6]]
    run.check_end()


def test_a_choice_that_fails_for_good_ends_them_all() -> None:
    run = Run(num_choices=3)
    run.on(D, *(tokens(START, 1, choice=choice) for choice in range(3)))
    run.lose(D)
    first, second, _ = run.flow.wants
    run.go(D2, P, want=first)
    run.go(D3, P2, want=second)
    run.on(D3, failed(Cause.INVALID))
    assert run.failure is Cause.INVALID
    assert run.flow.wants == [], "the third one waits for nothing any more"
    run.check_end()


# --- how often -------------------------------------------------------------------------------------------------------


def fail_again(run: Run, cause: Cause) -> None:
    """One more attempt that fails before it has brought anything."""
    if run.flow.wants:
        run.go(D, P)
    run.on(P, failed(cause, "again"))


@pytest.mark.parametrize(
    ("cause", "most"), [(Cause.TRANSFER, blame.MAX_FAILURES), (Cause.INTERNAL, blame.MAX_BUGS)], ids=str
)
def test_failures_in_a_row_are_bounded(run: Run, cause: Cause, most: int) -> None:
    for _ in range(most):
        fail_again(run, cause)
        assert run.flow.running
    fail_again(run, cause)
    assert run.terminals == [Fail(cause, "again")]
    assert run.flow.tally.failures == {cause: most}


def test_a_decode_worker_s_token_begins_the_count_again(run: Run) -> None:
    for position in range(3):
        for _ in range(blame.MAX_FAILURES - 1):
            fail_again(run, Cause.TRANSFER)
        run.go(D, P)
        run.on(D, tokens(START + position, position), failed(Cause.LEASE_LOST))
    assert run.flow.running
    assert run.text() == [0, 1, 2]


def test_tokens_of_prefill_workers_do_not_begin_the_count_again(run: Run) -> None:
    """Else a stream whose prompts nobody can read would go on by one token for each of them."""
    for number in range(blame.MAX_FAILURES):
        run.on(P, tokens(START + number, number))
        run.on(D, failed(Cause.WORKER_LOST, "no answer"))
        assert run.flow.running
        run.go(D, P)
    run.on(P, tokens(START + blame.MAX_FAILURES, 9))
    run.on(D, failed(Cause.WORKER_LOST, "no answer"))
    assert run.terminals == [Fail(Cause.WORKER_LOST, "no answer")]


def test_bugs_are_counted_apart(run: Run) -> None:
    for _ in range(blame.MAX_FAILURES - blame.MAX_BUGS):
        fail_again(run, Cause.TRANSFER)
    for _ in range(blame.MAX_BUGS):
        fail_again(run, Cause.INTERNAL)
    assert run.flow.running, "as many as there may be of each"
    fail_again(run, Cause.INTERNAL)
    assert run.failure is Cause.INTERNAL


def test_a_decode_worker_s_token_begins_the_count_of_bugs_again(run: Run) -> None:
    for position in range(3):
        for _ in range(blame.MAX_BUGS):
            fail_again(run, Cause.INTERNAL)
        run.go(D, P)
        run.on(D, tokens(START + position, position), failed(Cause.LEASE_LOST))
    assert run.flow.running


def test_each_further_failure_in_a_row_makes_the_next_attempt_wait_longer(run: Run) -> None:
    delays = []
    for _ in range(blame.MAX_FAILURES):
        fail_again(run, Cause.TRANSFER)
        delays.append(run.want.delay_s)
    assert delays[0] == 0, "the first failure is nobody's habit"
    assert delays[1] == FIRST_DELAY_S
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(delays[1:]))


# --- who does not take it --------------------------------------------------------------------------------------------


def let_in(run: Run) -> None:
    """A worker had it, and is lost; the client has a token."""
    run.on(D, tokens(START, 1))
    run.lose(D)


def test_who_was_let_in_is_refused_by_those_who_drain_as_often_as_need_be(run: Run) -> None:
    let_in(run)
    for _ in range(3 * blame.MAX_FAILURES):
        assert (run.flow.admitted, run.flow.refusal, run.want.delay_s) == (True, None, 0.0)
        run.go(D2, P)
        run.on(D2, failed(Cause.DRAINING))
    assert run.want.avoid == {life(D)}, "who drains may serve again"
    assert run.flow.tally.failures == {Cause.WORKER_LOST: 1, Cause.DRAINING: 3 * blame.MAX_FAILURES}


def test_to_be_too_full_for_who_was_let_in_is_a_failure(run: Run) -> None:
    """No worker may be: with one that is, it would be tried again and again."""
    let_in(run)
    for _ in range(blame.MAX_FAILURES - 1):
        run.go(D2, P)
        run.on(D2, failed(Cause.CAPACITY))
        assert run.want.avoid == {life(D), life(D2)}
    assert run.want.delay_s > 0
    run.go(D2, P)
    run.on(D2, failed(Cause.CAPACITY))
    assert run.failure is Cause.CAPACITY


@pytest.mark.parametrize("heard", ["a token", "a lost worker", "a failed transfer"])
def test_who_has_been_anywhere_says_so_to_every_other_worker(run: Run, heard: str) -> None:
    assert not any(work.admitted for _, work in (*run.sent(Prefill), *run.sent(Decode)))
    match heard:
        case "a token":
            run.on(P, tokens(START, 1))
            run.on(D, failed(Cause.CAPACITY))
        case "a lost worker":
            run.lose(D)
        case "a failed transfer":
            run.on(D, failed(Cause.TRANSFER))
    run.go(D2)
    assert run.sent(Decode)[-1][1].admitted


def test_who_has_been_nowhere_asks_each_full_worker_once(run: Run) -> None:
    run.on(D, failed(Cause.CAPACITY, "full"))
    run.go(D2)
    run.on(D2, failed(Cause.DRAINING, "leaving"))
    assert not run.flow.admitted
    assert run.want.avoid == {life(D)}
    assert run.flow.refusal == Fail(Cause.CAPACITY, "full"), "should nobody else be left"


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("address", [P, D])
def test_who_is_too_large_for_a_worker_never_goes_there_again(run: Run, address: str, heard: bool) -> None:
    if heard:
        let_in(run)
        run.go(D, P)
    run.on(address, failed(Cause.TOO_LARGE, "20 blocks"))
    assert (run.want.too_small, run.flow.refusal) == (frozenset({life(address)}), Fail(Cause.TOO_LARGE, "20 blocks"))
    run.go(D2, P2)
    run.on(D2, tokens(START + heard, 9))
    run.lose(D2)
    assert run.want.too_small == {life(address)}, "a new token does not make it smaller"


# --- suspects --------------------------------------------------------------------------------------------------------

NONE, GROUP, ALONE = Suspicion
"""How a request is tried."""


def crashed_once(*heard: int) -> Run:
    """A suspect that wants workers: its decode worker has crashed."""
    run = Run()
    run.on(D, tokens(START, 1, *heard))
    run.lose(D, crashed=True)
    return run


def level(run: Run, decode: str = D3, prefill: str | None = None) -> Suspicion:
    """What the next attempt tells its workers."""
    seen = len(run.sent(Decode))
    run.go(decode, prefill)
    (work,) = [message for _, message in run.sent(Decode)[seen:]]
    told: Suspicion = work.suspicion
    return told


def test_who_was_on_a_worker_when_it_crashed_is_a_suspect() -> None:
    run = crashed_once()
    run.go(D2, P2)
    told = [message.suspicion for _, message in (*run.sent(Prefill), *run.sent(Decode))]
    assert told == [NONE, GROUP, NONE, GROUP]


@pytest.mark.parametrize("address", [P, D])
def test_silence_makes_nobody_a_suspect(run: Run, address: str) -> None:
    run.lose(address, "silent", crashed=False)
    assert level(run) is NONE


def test_who_had_left_a_prefill_worker_when_it_crashed_is_no_suspect(run: Run) -> None:
    run.on(P, tokens(START, 1))
    assert run.lose(P, crashed=True) == []
    run.on(D, failed(Cause.LEASE_LOST))
    assert level(run) is NONE


@pytest.mark.parametrize("heard", [False, True])
def test_a_prompt_whose_offer_stands_is_suspected_if_its_worker_crashes_while_it_computes_it(
    run: Run, heard: bool
) -> None:
    if heard:
        run.on(P, tokens(START, 1))
    run.lose(D)
    run.lose(P, crashed=True)
    assert level(run, D2, P2) is (NONE if heard else GROUP)


def test_a_suspect_is_convicted_though_only_its_offer_is_at_the_worker_that_crashes() -> None:
    run = crashed_once()
    run.go(D2, P2)
    run.lose(D2, "silent")
    run.lose(P2, "its process died", crashed=True, beside=0)
    assert run.failure is Cause.POISON
    run.check_end()


def test_a_worker_s_crash_concerns_what_it_was_given_before_even_if_another_takes_over_the_offer(run: Run) -> None:
    run.now = 1.1
    run.on(D, failed(Cause.DRAINING))
    run.go(D2)
    run.do(run.flow.worker_lost(P, "its process died", Crash(1.0)))
    assert level(run, D3, P2) is GROUP


@pytest.mark.parametrize("address", [P2, D2])
def test_a_suspect_whose_worker_crashes_while_it_is_alone_is_refused(address: str) -> None:
    """It was the only one of its group."""
    run = crashed_once()
    run.go(D2, P2)
    run.lose(address, "its process died", crashed=True, beside=0)
    assert run.failure is Cause.POISON
    (terminal,) = run.terminals
    assert isinstance(terminal, Fail)
    assert "workers have crashed" in terminal.message
    assert "its process died" in terminal.message
    assert {each for each, message in run.sent(Abort) if message.attempt == 2} == {P2, D2}
    run.check_end()


@pytest.mark.parametrize("address", [P2, D2])
def test_a_suspect_whose_group_crashes_its_worker_is_tried_alone_next(address: str) -> None:
    run = crashed_once()
    run.go(D2, P2)
    run.lose(address, crashed=True, beside=63)
    assert not run.terminals
    assert level(run) is ALONE
    run.lose(D3, crashed=True, beside=0)
    assert run.failure is Cause.POISON
    run.check_end()


@pytest.mark.parametrize("address", [P2, D2])
def test_a_suspect_whose_worker_crashes_in_everybody_s_steps_is_one_still(address: str) -> None:
    """It waited for its turn, or its time was up and it ran with the others."""
    run = crashed_once()
    run.go(D2, P2)
    run.lose(address, crashed=True)
    assert not run.terminals
    assert level(run) is GROUP


@pytest.mark.parametrize("before", list(Suspicion))
def test_who_stood_by_when_others_crashed_the_worker_is_as_suspect_as_before(before: Suspicion) -> None:
    run = Run(begin=False)
    if before is not NONE:
        run = crashed_once()
    if before is ALONE:
        run.go(D2)
        run.lose(D2, crashed=True, beside=1)
    run.go(D3)
    run.do(run.flow.worker_lost(D3, "dead", Crash(run.now, 2, frozenset({RequestKey(REQUEST, 99)}))))
    assert level(run, D2) is before


def test_crashes_in_the_steps_of_a_group_and_of_others_do_not_count_towards_refusal() -> None:
    run = crashed_once()
    run.go(D2)
    run.lose(D2, crashed=True, beside=5)
    for _ in range(max(MAX_CRASHES, blame.MAX_FAILURES) + 2):
        assert run.want.delay_s == 0
        assert level(run, D3) is ALONE
        run.do(run.flow.worker_lost(D3, "dead", Crash(run.now, 1, frozenset({RequestKey(REQUEST, 99)}))))
    assert not run.terminals
    run.do(run.flow.cancel())
    run.check_end()


def test_the_first_tokens_end_a_prefill_worker_s_part_in_it() -> None:
    run = crashed_once()
    run.go(D2, P2)
    run.on(P2, tokens(START + 1, 2))
    assert run.lose(P2, crashed=True, beside=0) == []
    run.on(D2, failed(Cause.LEASE_LOST))
    assert level(run) is GROUP, "of the first crash"


@pytest.mark.parametrize("beside", [0, 1])
def test_who_is_on_trial_and_no_suspect_is_not_convicted(run: Run, beside: int) -> None:
    """It has just been cleared, and the worker has not said so yet."""
    run.lose(D, crashed=True, beside=beside)
    assert not run.terminals
    assert level(run) is GROUP


@pytest.mark.parametrize("suspect", [False, True])
def test_what_was_sent_to_a_dead_worker_is_not_what_killed_it(suspect: bool) -> None:
    """Two workers die at once, by another's hand: the second one's end has only not shown yet."""
    run = crashed_once() if suspect else Run(begin=False)
    run.now = 5.0
    run.go(D2, P2)
    run.do(run.flow.worker_lost(P2, "its process died", Crash(4.9)))
    assert level(run, D3, P) is (GROUP if suspect else NONE)
    run.do(run.flow.worker_lost(D3, "its process died", Crash(5.0)))
    assert level(run, D2) is GROUP


def test_a_suspect_whose_worker_falls_silent_is_tried_again() -> None:
    run = crashed_once()
    run.go(D2, P2)
    run.lose(D2, "silent", crashed=False)
    assert level(run) is GROUP
    run.do(run.flow.cancel())
    run.check_end()


def test_a_suspect_is_cleared_some_tokens_past_the_place_of_the_crash() -> None:
    run = crashed_once(2, 3)
    run.go(D2, P2)
    run.on(P2, tokens(START + 3, 4))
    for number in range(1, TRIAL_TOKENS):
        run.on(D2, tokens(START + 3 + number, 4 + number))
    run.lose(D2, crashed=False)
    assert level(run, D3, P) is NONE
    run.lose(D3, crashed=True, beside=0)
    assert not run.terminals
    assert level(run, D2, P2) is GROUP, "and suspected anew"
    run.on(D2, tokens(START + 3 + TRIAL_TOKENS, 9, end="stop"))
    assert run.flow.state is FlowState.DONE
    run.check_end()


def test_tokens_before_the_place_of_the_crash_clear_nobody() -> None:
    run = Run(num_choices=2)
    run.on(D, *(tokens(START + n, n, choice=choice) for n in range(4) for choice in range(2)))
    run.lose(D, crashed=True)
    for want, address in zip(list(run.flow.wants), (D2, D3), strict=True):
        run.go(address, want=want)
    run.on(D2, *(tokens(START + 4 + n, n, choice=0) for n in range(TRIAL_TOKENS)))
    run.lose(D2, crashed=True, beside=0)
    assert not run.terminals
    run.lose(D3, crashed=True, beside=0)
    assert run.failure is Cause.POISON
    run.check_end()


def test_suspects_of_one_request_go_where_others_of_it_are() -> None:
    """Spread over the pool they would crash one worker each."""
    run = Run(num_choices=3)
    run.on(D, *(tokens(START, 7, choice=choice) for choice in range(3)))
    assert run.flow.beside(run.flow._want(run.flow.choices, KEY)) == frozenset(), "nobody is suspected"
    run.flow.wants.clear()
    run.lose(D, crashed=True)
    first, second, third = run.flow.wants
    assert run.flow.beside(first) == frozenset()
    run.go(D2, P2, want=first)
    assert run.flow.beside(second) == run.flow.beside(third) == {life(D2), life(P2)}
    run.on(D2, *(tokens(START + 1 + n, n, choice=0) for n in range(TRIAL_TOKENS)))
    assert run.flow.beside(second) == frozenset(), "the first one is cleared"
    run.do(run.flow.cancel())
    run.check_end()


def test_who_crashes_too_many_workers_in_all_is_refused_though_it_was_cleared_each_time() -> None:
    run = Run(local=True)
    position = START
    for number in range(MAX_CRASHES):
        address = (D, D2)[number % 2]
        run.on(address, *(tokens(position + n, n) for n in range(TRIAL_TOKENS + 1)))
        position += TRIAL_TOKENS + 1
        run.lose(address, crashed=True)
        assert not run.terminals
        run.go((D, D2)[(number + 1) % 2])
    run.lose((D, D2)[MAX_CRASHES % 2], crashed=True)
    assert run.failure is Cause.POISON
    run.check_end()


def test_a_suspect_takes_over_an_offer_as_a_suspect(run: Run) -> None:
    run.on(P, tokens(START, 1))
    run.lose(D, crashed=True)
    assert run.want.offer is not None
    assert level(run, D2) is GROUP
    run.lose(D2, crashed=True, beside=0)
    assert run.failure is Cause.POISON
    assert {address for address, _ in run.sent(Abort)} == {P, D, D2}
