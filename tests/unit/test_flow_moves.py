"""A running sequence leaves a draining decode worker: what comes from where, and what follows when it goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flow_run import (
    ABORT,
    ACK,
    D2,
    D3,
    FINISHED,
    KEY,
    PROMPT,
    REQUEST,
    START,
    D,
    P,
    Run,
    Sent,
    cut,
    failed,
    life,
    moved,
    resend,
    tokens,
)

from common.contract.errors import Cause
from common.contract.ids import RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Ack, Decode, Prefill, Resend, Suspicion
from gateway.serving.flow import FlowState
from gateway.serving.flow_actions import Want
from gateway.serving.generation import Fail

ABORT_2 = Abort(request=REQUEST, attempt=2)
ABORT_CHOICE = Abort(request=REQUEST, attempt=1, choice=0)
ACK_2 = Ack(request=REQUEST, attempt=2)


@pytest.fixture
def run() -> Iterator[Run]:
    """A request of which the decode worker has brought two tokens."""
    run = Run()
    run.on(P, tokens(START, 1))
    run.on(D, tokens(START, 1, 2))
    yield run
    if run.flow.running:
        run.do(run.flow.cancel())
    run.check_end()


def movable(run: Run, address: str = D) -> list[int]:
    return [choice.index for _, choice in run.flow.attempts.movable(address)]


# --- who can move ----------------------------------------------------------------------------------------------------


def test_what_runs_can_move() -> None:
    run = Run()
    assert movable(run) == [], "its prompt is not here yet"
    run.on(P, tokens(START, 1))
    assert movable(run) == []
    run.on(D, tokens(START, 1, 2))
    assert movable(run) == [0]
    assert movable(run, P) == movable(run, D2) == []
    run.on(D, tokens(START + 2, 3, end="stop"))
    assert movable(run) == []


def test_of_several_choices_each_moves_by_itself() -> None:
    run = Run(num_choices=3)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1), tokens(START, 9, choice=2, end="stop"))
    assert movable(run) == [0, 1]
    run.move(D2, 1)
    assert movable(run) == [0]
    run.move(D3, 0)
    assert movable(run) == []
    assert [(address, work.request, work.choices) for address, work in run.sent(Decode)] == [
        (D, "r1", (0, 1, 2)),
        (D2, "r2", (1,)),
        (D3, "r3", (0,)),
    ]
    run.on(D2, tokens(START + 1, 6, choice=1, end="stop"))
    assert run.sent(Ack) == [(D2, Ack(request="r2", attempt=1))], "the old worker still has the other one"  # type: ignore[arg-type]
    run.on(D3, tokens(START + 1, 2, choice=0))
    assert run.sent(Ack)[1:] == [(D, ACK)]
    run.on(D3, tokens(START + 2, 3, choice=0, end="stop"))
    assert [run.text(choice) for choice in range(3)] == [[1, 2, 3], [5, 6], [9]]
    run.check_end()


def test_a_decode_worker_is_told_where_the_sequence_runs(run: Run) -> None:
    run.move(D2)
    assert len(run.sent(Prefill)) == 1
    address, decode = run.sent(Decode)[-1]
    assert address == D2
    assert (decode.key, decode.choices, decode.moving) == (RequestKey(REQUEST, 2), (0,), True)
    assert (decode.source, decode.offered) == (life(D).source, KEY)
    assert (decode.token_ids, decode.prompt_len, decode.budget_s) == ((*PROMPT, 1, 2), START, 5)
    assert run.sent(Abort) == [], "it goes on where it is"


# --- a move that comes off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["nothing", "moved", "cut and moved", "the last token, cut and moved"])
def test_tokens_come_from_the_old_one_up_to_the_cut_and_from_the_new_one_after_it(run: Run, late: str) -> None:
    """The links of the two workers know nothing of each other: any order between them is possible."""
    run.move(D2)
    run.on(D, tokens(START + 2, 3))
    assert run.text() == [1, 2, 3], "it runs while its blocks are read"
    old = run.attempts[0]
    from_old: list[Message] = [tokens(START + 3, 4), cut(START + 4), moved()]
    num_late = {"nothing": 0, "moved": 1, "cut and moved": 2, "the last token, cut and moved": 3}[late]
    from_old = from_old[: 3 - num_late]
    run.on(D, *from_old, attempt=old)
    frame = tokens(START + 2, 3, 4, 5)
    run.on(D2, frame)
    assert run.text() == [1, 2, 3, 4, 5]
    assert run.flow.attempts == [run.attempts[1]]
    assert run.sent(Ack) == [(D, ACK)]
    assert run.flow.attempts.find(old.key, D) is None, "what is late of the old one is about nothing any more"
    run.on(D2, tokens(START + 5, 6, end="stop"), FINISHED)
    assert run.text() == [1, 2, 3, 4, 5, 6]
    assert run.sent(Ack) == [(D, ACK), (D2, ACK_2)]
    assert run.flow.state is FlowState.DONE
    assert run.flow.tally.failures == {}


def test_the_new_one_may_be_ahead_of_the_last_token_of_the_old_one(run: Run) -> None:
    run.move(D2)
    assert run.on(D2, tokens(START + 3, 4, 5)) == [Sent(D2, resend(START + 2, attempt=2))]
    run.on(D, tokens(START + 2, 3), cut(START + 3), moved(), attempt=run.attempts[0])
    assert run.text() == [1, 2, 3]
    assert len(run.flow.attempts) == 2
    run.on(D2, tokens(START + 2, 3, 4, 5, end="stop"))
    assert run.text() == [1, 2, 3, 4, 5]


def test_a_frame_that_brings_nothing_new_takes_nothing_over(run: Run) -> None:
    run.move(D2)
    run.on(D2, tokens(START + 1, 2))
    run.on(D, tokens(START + 2, 3), attempt=run.attempts[0])
    assert run.text() == [1, 2, 3]


def test_a_sequence_that_has_moved_can_move_again(run: Run) -> None:
    """A rolling restart drains one worker after the other."""
    run.move(D2)
    run.on(D, cut(START + 2), moved())
    assert movable(run, D2) == []
    run.on(D2, tokens(START + 2, 3))
    assert movable(run, D2) == [0]
    run.move(D3, source=D2)
    decode = run.sent(Decode)[-1][1]
    assert (decode.offered, decode.source) == (RequestKey(REQUEST, 2), life(D2).source)
    run.on(D2, tokens(START + 3, 4), cut(START + 4), moved(), attempt=run.attempts[1])
    run.on(D3, tokens(START + 4, 5, end="stop"))
    assert run.text() == [1, 2, 3, 4, 5]
    assert run.sent(Ack) == [(D, ACK), (D2, ACK_2), (D3, Ack(request=REQUEST, attempt=3))]


def test_a_sequence_does_not_move_again_before_it_has_arrived(run: Run) -> None:
    run.move(D2)
    run.on(D2, tokens(START + 3, 4))
    assert movable(run, D2) == [], "the old one's last token is still on its way"


def test_one_of_several_choices_moves_again_while_another_has_not_moved() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1))
    run.move(D2, 0)
    run.on(D2, tokens(START + 1, 2, choice=0))
    assert (movable(run, D), movable(run, D2)) == ([1], [0])


# --- the sequence ends on the way ------------------------------------------------------------------------------------


def test_a_sequence_that_ends_where_it_was_is_pulled_in_vain(run: Run) -> None:
    run.move(D2)
    run.on(D, tokens(START + 2, 3, end="stop"), attempt=run.attempts[0])
    assert run.sent(Ack) == [(D, ACK)]
    assert run.sent(Abort) == [(D2, ABORT_2)]
    assert run.flow.state is FlowState.DONE


def test_a_sequence_that_ends_where_it_was_does_not_end_the_others() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1))
    run.move(D2, 0)
    run.on(D, tokens(START + 1, 2, choice=0, end="stop"), attempt=run.attempts[0])
    assert run.sent(Abort) == [(D2, Abort(request="r2", attempt=1))]  # type: ignore[arg-type]
    assert run.flow.attempts == [run.attempts[0]]
    run.on(D, tokens(START + 1, 6, choice=1, end="stop"))
    run.check_end()


@pytest.mark.parametrize("end", ["client", "time"])
def test_whoever_leaves_on_the_way_frees_both(run: Run, end: str) -> None:
    run.move(D2)
    run.do(run.flow.cancel() if end == "client" else run.flow.fail(Fail(Cause.DEADLINE, "late")))
    assert {(address, message.attempt) for address, message in run.sent(Abort)} == {(P, 1), (D, 1), (D2, 2)}


# --- a move that does not --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["refused", "invalid", "lost", "crashed", "unknown"])
def test_a_failure_before_the_cut_leaves_the_sequence_where_it_is(run: Run, end: str) -> None:
    run.move(D2)
    match end:
        case "refused":
            run.on(D2, failed(Cause.CAPACITY))
        case "invalid":
            run.on(D2, failed(Cause.INVALID))
        case "lost":
            run.lose(D2)
        case "crashed":
            run.lose(D2, crashed=True)
        case "unknown":
            run.resync(D2, known=False)
    assert run.sent(Abort) == [(D2, ABORT_2)]
    assert run.flow.attempts == [run.attempts[0]]
    assert run.flow.wants == []
    assert run.flow.tally.failures == {}
    assert run.flow.tally.moves == {"stayed": 1}
    assert movable(run) == [0], "it may try again"
    run.on(D, tokens(START + 2, 3, end="stop"))
    assert run.text() == [1, 2, 3]


def test_a_failed_move_costs_no_attempt_and_makes_no_suspect(run: Run) -> None:
    for _ in range(20):
        run.move(D2)
        run.lose(D2, crashed=True)
    run.on(D, failed(Cause.LEASE_LOST))
    assert run.want.choices[0].suspicion is Suspicion.NONE
    assert run.want.delay_s == 0
    assert run.want.avoid == frozenset()


@pytest.mark.parametrize("end", ["failed", "lost"])
def test_a_failure_after_the_cut_begins_a_new_attempt(run: Run, end: str) -> None:
    run.move(D2)
    run.on(D, tokens(START + 2, 3), cut(START + 3), attempt=run.attempts[0])
    assert run.flow.wants == []
    if end == "failed":
        run.on(D2, failed(Cause.LEASE_LOST))
    else:
        run.lose(D2)
    assert set(run.sent(Abort)) == {(D2, ABORT_2), (D, ABORT)}, "the old one still keeps its blocks for somebody"
    assert run.flow.tally.moves == {}, "it did not stay"
    assert run.flow.attempts == []
    run.go(D3, P)
    work = run.sent(Decode)[-1][1]
    assert (work.key, work.token_ids) == (RequestKey(REQUEST, 3), (*PROMPT, 1, 2, 3))
    run.on(D3, tokens(START + 3, 4, end="stop"))
    assert run.text() == [1, 2, 3, 4]


def test_what_the_old_one_says_of_a_move_that_failed_after_the_cut_begins_no_second_attempt(run: Run) -> None:
    run.move(D2)
    run.on(D, cut(START + 2), attempt=run.attempts[0])
    run.on(D2, failed(Cause.LEASE_LOST))
    assert run.flow.attempts.find(KEY, D) is None
    assert len(run.flow.wants) == 1


def test_after_a_failure_after_the_cut_other_choices_go_on_where_they_are() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1))
    run.move(D2, 0)
    run.on(D, cut(START + 1, choice=0), attempt=run.attempts[0])
    run.on(D2, failed(Cause.LEASE_LOST))
    assert [choice.index for choice in run.want.choices] == [0]
    assert run.sent(Abort)[1:] == [(D, ABORT_CHOICE)], "the old one still keeps its blocks for somebody"
    run.on(D, moved(choice=0), tokens(START + 1, 6, choice=1, end="stop"), attempt=run.attempts[0])
    assert run.sent(Ack) == []
    assert (D, ABORT) in run.sent(Abort), "the first Abort may have been lost: an Ack of what goes on is ignored"
    run.go(D3, P)
    run.on(D3, tokens(START + 1, 2, choice=0, end="stop"))
    assert [run.text(0), run.text(1)] == [[1, 2], [5, 6]]
    run.check_end()


def test_a_choice_that_was_cut_in_vain_is_aborted_again_after_messages_were_lost() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1))
    run.move(D2, 0)
    run.on(D, cut(START + 1, choice=0), attempt=run.attempts[0])
    run.lose(D2)
    seen = run.resync(D, known=True, attempt=run.attempts[0])
    assert seen == [Sent(D, ABORT_CHOICE), Sent(D, resend(START + 1, choice=1))]
    run.do(run.flow.cancel())
    run.check_end()


@pytest.mark.parametrize("message", [cut(START + 3), moved()], ids=["cut", "moved"])
def test_a_cut_that_comes_after_the_failure_of_the_new_one_begins_a_new_attempt(run: Run, message: object) -> None:
    run.move(D2)
    run.lose(D2)
    run.on(D, tokens(START + 2, 3), attempt=run.attempts[0])
    aborted, want = run.on(D, message, attempt=run.attempts[0])
    assert aborted == Sent(D, ABORT)
    assert isinstance(want, Want)
    assert want.num_tokens == START + 3
    run.go(D3, P)
    run.on(D3, tokens(START + 3, 4, end="stop"))
    assert run.text() == [1, 2, 3, 4]


def test_a_cut_for_nobody_of_one_choice_leaves_the_others() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1))
    run.move(D2, 0)
    run.lose(D2)
    aborted, want = run.on(D, cut(START + 1, choice=0), attempt=run.attempts[0])
    assert aborted == Sent(D, ABORT_CHOICE)
    assert isinstance(want, Want)
    run.go(D3, P)
    assert run.sent(Decode)[-1][1].request not in (REQUEST, "r2"), "a request of its own"
    assert run.on(D, cut(START + 1, choice=0), attempt=run.attempts[0]) == [], "it is said once"
    run.do(run.flow.cancel())
    run.check_end()


def test_a_new_one_that_fails_after_it_has_spoken_is_followed_by_another(run: Run) -> None:
    """It had settled, so the old one has stopped, though the gateway has not heard of it yet."""
    run.move(D2)
    run.on(D2, tokens(START + 3, 4))
    run.lose(D2)
    assert set(run.sent(Abort)) == {(D2, ABORT_2), (D, ABORT)}
    assert run.flow.attempts == []
    assert len(run.flow.wants) == 1
    assert run.flow.attempts.find(KEY, D) is None, "what the old one still says begins no second attempt"


def test_a_new_one_that_fails_after_it_has_taken_over_is_followed_by_another(run: Run) -> None:
    run.move(D2)
    run.on(D2, tokens(START + 2, 3))
    run.lose(D2, crashed=True)
    assert run.want.choices[0].suspicion is Suspicion.GROUP
    assert run.want.num_tokens == START + 3


# --- the old one is lost on the way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("was_cut", [False, True])
def test_an_old_one_that_is_lost_on_the_way_is_the_new_one_s_concern(run: Run, was_cut: bool) -> None:
    run.move(D2)
    if was_cut:
        run.on(D, cut(START + 2), attempt=run.attempts[0])
    run.lose(D, crashed=True)
    assert run.flow.wants == []
    run.on(D2, tokens(START + 2, 3, 4, end="stop"))
    assert run.text() == [1, 2, 3, 4]
    assert run.flow.state is FlowState.DONE
    assert run.flow.tally.failures == {}


@pytest.mark.parametrize("was_cut", [False, True])
def test_a_new_one_that_lost_the_old_one_is_followed_by_another(run: Run, was_cut: bool) -> None:
    run.move(D2)
    if was_cut:
        run.on(D, cut(START + 2), attempt=run.attempts[0])
    run.lose(D)
    run.on(D2, failed(Cause.WORKER_LOST, "the source is gone"))
    assert run.want.avoid == {life(D)}
    assert run.flow.attempts == []
    run.go(D2, P)
    run.on(D2, tokens(START + 2, 3, end="stop"))
    assert run.text() == [1, 2, 3]


@pytest.mark.parametrize("was_cut", [False, True])
def test_an_old_one_that_gives_up_on_the_way_is_not_followed_by_two(run: Run, was_cut: bool) -> None:
    run.move(D2)
    if was_cut:
        run.on(D, cut(START + 2), attempt=run.attempts[0])
    run.on(D, failed(Cause.DRAINING, "the time for leaving is over"), attempt=run.attempts[0])
    assert run.flow.wants == []
    run.on(D2, failed(Cause.LEASE_LOST))
    assert len(run.flow.wants) == 1


def test_the_choices_of_a_lost_worker_that_do_not_move_are_wanted_from_others() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1))
    run.move(D2, 0)
    run.lose(D)
    assert [choice.index for choice in run.want.choices] == [1]
    run.on(D2, tokens(START + 1, 2, choice=0, end="stop"))
    run.go(D3, P)
    run.on(D3, tokens(START + 1, 6, choice=1, end="stop"))
    assert [run.text(0), run.text(1)] == [[1, 2], [5, 6]]
    run.check_end()


@pytest.mark.parametrize("was_cut", [False, True])
def test_an_old_one_that_knows_nothing_more_has_handed_over(run: Run, was_cut: bool) -> None:
    """After Moved it has forgotten the request; Moved, or Cut too, was lost."""
    run.move(D2)
    if was_cut:
        run.on(D, cut(START + 2), attempt=run.attempts[0])
    _ = run.resync(D, known=False, attempt=run.attempts[0])
    assert run.flow.wants == []
    run.on(D2, tokens(START + 2, 3, end="stop"))
    assert run.flow.state is FlowState.DONE


def test_missing_tokens_of_a_choice_that_has_moved_are_asked_of_the_new_one() -> None:
    run = Run(num_choices=2)
    run.on(D, tokens(START, 1, choice=0), tokens(START, 5, choice=1))
    run.move(D2, 0)
    run.on(D2, tokens(START + 1, 2, choice=0))
    run.resync(D, known=True, attempt=run.attempts[0])
    assert run.sent(Resend) == [(D, resend(START + 1, choice=1))]
    run.do(run.flow.cancel())
    run.check_end()


def test_who_is_about_to_leave_a_worker_that_crashes_is_a_suspect(run: Run) -> None:
    run.move(D2)
    run.on(D, cut(START + 2))
    run.lose(D, crashed=True)
    run.on(D2, failed(Cause.WORKER_LOST))
    assert run.want.choices[0].suspicion is Suspicion.GROUP
