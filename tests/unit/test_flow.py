"""One request's handoff as the gateway sees it: every token once and in order, and exactly one end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    Abort,
    Ack,
    Cancelled,
    Decode,
    Failed,
    Finished,
    FinishReason,
    Message,
    Prefill,
    Resend,
    Role,
    TokenLogprobs,
    Tokens,
)
from common.contract.sampling import SamplingParams
from gateway.flow import Action, Deliver, Done, Fail, Flow, FlowState, Place, Send
from gateway.generation import Generation

KEY = RequestKey(RequestId("r1"), 1)
ABOUT = {"request": KEY.request, "attempt": KEY.attempt}
PROMPT = (1, 2, 3)
P, D = Place("p:1", Incarnation("p")), Place("d:1", Incarnation("d"))
OPEN, UNKNOWN = frozenset({KEY}), frozenset({RequestKey(KEY.request, 2)})
START = len(PROMPT)


def flow_of(num_choices: int = 1) -> Flow:
    """A flow that has been started."""
    generation = Generation(
        token_ids=PROMPT, num_choices=num_choices, sampling=SamplingParams(max_tokens=9, seed=5), budget_s=30.0
    )
    flow = Flow(KEY, generation, P, D)
    flow.start(30.0)
    return flow


@pytest.fixture
def flow():
    """A flow of one choice, whose invariants are checked at the end."""
    subject = flow_of()
    yield subject
    subject.check_invariants()


def tokens(
    position: int, *token_ids: int, choice: int = 0, reason: FinishReason | None = None, with_logprobs: bool = False
) -> Tokens:
    """Positions count from the first generated token."""
    logprobs = tuple(TokenLogprobs(logprob=-float(token), top=()) for token in token_ids) if with_logprobs else None
    return Tokens(
        **ABOUT, choice=choice, position=START + position, token_ids=token_ids, logprobs=logprobs, finish_reason=reason
    )


def delivered(actions: list[Action]) -> list[tuple[int, tuple[int, ...], FinishReason | None]]:
    """(choice, tokens, reason) of what the client is given."""
    deltas = [action.delta for action in actions if isinstance(action, Deliver)]
    return [(delta.choice, delta.token_ids, delta.finish_reason) for delta in deltas]


def sent(actions: list[Action]) -> list[tuple[Role, type[Message]]]:
    return [(action.role, type(action.message)) for action in actions if isinstance(action, Send)]


def resends(actions: list[Action]) -> list[tuple[int, int]]:
    """(choice, position from the first generated token) that the decode worker is asked for."""
    asked = [action for action in actions if isinstance(action, Send) and isinstance(action.message, Resend)]
    assert all(action.role is Role.DECODE for action in asked)
    return [(action.message.choice, action.message.position - START) for action in asked]


def failed(actions: list[Action]) -> Cause:
    """The cause, once both workers have been told."""
    assert sent(actions) == [(Role.PREFILL, Abort), (Role.DECODE, Abort)]
    assert all(action.message.key == KEY for action in actions[:2])
    [*_, end] = actions
    assert isinstance(end, Fail)
    return end.cause


# --- the way through ---------------------------------------------------------------------------------------------


def test_both_workers_get_their_part() -> None:
    generation = Generation(token_ids=PROMPT, num_choices=2, sampling=SamplingParams(max_tokens=9), budget_s=30.0)
    prefill, decode = Flow(KEY, generation, P, D).start(12.5)
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert isinstance(prefill.message, Prefill)
    assert isinstance(decode.message, Decode)
    for message in (prefill.message, decode.message):
        assert message.key == KEY
        assert (message.token_ids, message.prompt_len, message.choices) == (PROMPT, 3, (0, 1))
        assert (message.sampling, message.budget_s) == (generation.sampling, 12.5)
    assert (decode.message.source.address, decode.message.source.incarnation) == ("p:1", "p")


def test_the_life_of_a_flow(flow: Flow) -> None:
    assert delivered(flow.on_message(Role.PREFILL, tokens(0, 10))) == [(0, (10,), None)]
    assert delivered(flow.on_message(Role.DECODE, tokens(0, 10, 11))) == [(0, (11,), None)]
    assert delivered(flow.on_message(Role.DECODE, tokens(2, 12))) == [(0, (12,), None)]
    actions = flow.on_message(Role.DECODE, tokens(3, 13, reason="length"))
    assert delivered(actions) == [(0, (13,), "length")]
    assert sent(actions) == [(Role.DECODE, Ack)]
    assert isinstance(actions[-1], Done)
    assert flow.state is FlowState.DONE
    assert flow.on_message(Role.DECODE, Finished(**ABOUT)) == []


def test_the_decode_worker_may_be_first(flow: Flow) -> None:
    assert delivered(flow.on_message(Role.DECODE, tokens(0, 10, 11))) == [(0, (10, 11), None)]
    assert flow.on_message(Role.PREFILL, tokens(0, 10)) == []
    assert flow.num_duplicates == 1


def test_a_request_that_ends_with_its_first_token_is_aborted_at_the_decode_worker(flow: Flow) -> None:
    """It still waits there; it has nothing to be acknowledged."""
    actions = flow.on_message(Role.PREFILL, tokens(0, 10, reason="stop"))
    assert delivered(actions) == [(0, (10,), "stop")]
    assert sent(actions) == [(Role.DECODE, Abort)]
    assert isinstance(actions[-1], Done)
    assert flow.on_message(Role.PREFILL, Finished(**ABOUT)) == []


def test_a_decode_worker_that_has_spoken_is_acknowledged() -> None:
    flow = flow_of(2)
    flow.on_message(Role.DECODE, tokens(0, 10, choice=0, reason="stop"))
    actions = flow.on_message(Role.PREFILL, tokens(0, 20, choice=1, reason="stop"))
    assert sent(actions) == [(Role.DECODE, Ack)]


def test_choices_end_one_by_one() -> None:
    flow = flow_of(3)
    for choice, reason in ((0, None), (1, "stop"), (2, None)):
        actions = flow.on_message(Role.PREFILL, tokens(0, 10 + choice, choice=choice, reason=reason))
        assert delivered(actions) == [(choice, (10 + choice,), reason)]
        assert sent(actions) == []
    assert delivered(flow.on_message(Role.DECODE, tokens(0, 11, choice=1, reason="stop"))) == []
    assert delivered(flow.on_message(Role.DECODE, tokens(0, 12, 22, choice=2, reason="length"))) == [
        (2, (22,), "length")
    ]
    actions = flow.on_message(Role.DECODE, tokens(0, 10, 20, choice=0, reason="stop"))
    assert isinstance(actions[-1], Done)


def test_log_probabilities_stay_with_their_tokens(flow: Flow) -> None:
    flow.on_message(Role.PREFILL, tokens(0, 10, with_logprobs=True))
    [deliver] = flow.on_message(Role.DECODE, tokens(0, 10, 11, 12, with_logprobs=True))
    assert deliver.delta.token_ids == (11, 12)
    assert [report.logprob for report in deliver.delta.logprobs] == [-11.0, -12.0]


# --- duplicates and gaps -----------------------------------------------------------------------------------------


def test_duplicates_are_dropped(flow: Flow) -> None:
    flow.on_message(Role.DECODE, tokens(0, 10, 11, 12))
    for again in (tokens(0, 10), tokens(1, 11, 12), tokens(0, 10, 11, 12)):
        assert flow.on_message(Role.DECODE, again) == []
    assert flow.num_duplicates == 3
    assert delivered(flow.on_message(Role.DECODE, tokens(1, 11, 12, 13))) == [(0, (13,), None)]


def test_what_comes_after_a_choice_has_ended_is_dropped() -> None:
    flow = flow_of(2)
    flow.on_message(Role.DECODE, tokens(0, 10, reason="stop"))
    assert flow.on_message(Role.DECODE, tokens(1, 11)) == []
    assert flow.on_message(Role.DECODE, tokens(5, 15, reason="length")) == []


def test_a_gap_is_asked_for_once(flow: Flow) -> None:
    flow.on_message(Role.PREFILL, tokens(0, 10))
    assert resends(flow.on_message(Role.DECODE, tokens(2, 12))) == [(0, 1)]
    assert flow.on_message(Role.DECODE, tokens(3, 13)) == []
    assert flow.num_gaps == 2
    assert delivered(flow.on_message(Role.DECODE, tokens(1, 11, 12, 13))) == [(0, (11, 12, 13), None)]
    assert resends(flow.on_message(Role.DECODE, tokens(5, 15))) == [(0, 4)]


def test_gaps_of_choices_are_told_apart() -> None:
    flow = flow_of(2)
    assert resends(flow.on_message(Role.DECODE, tokens(1, 11, choice=0))) == [(0, 0)]
    assert resends(flow.on_message(Role.DECODE, tokens(1, 21, choice=1))) == [(1, 0)]


def test_a_gap_does_not_end_a_choice(flow: Flow) -> None:
    assert resends(flow.on_message(Role.DECODE, tokens(3, 13, reason="stop"))) == [(0, 0)]
    actions = flow.on_message(Role.DECODE, tokens(0, 10, 11, 12, 13, reason="stop"))
    assert delivered(actions) == [(0, (10, 11, 12, 13), "stop")]
    assert isinstance(actions[-1], Done)


def test_finished_with_tokens_missing_asks_for_them() -> None:
    flow = flow_of(3)
    flow.on_message(Role.DECODE, tokens(0, 10, choice=0, reason="stop"))
    flow.on_message(Role.DECODE, tokens(0, 20, 21, choice=1))
    assert resends(flow.on_message(Role.DECODE, Finished(**ABOUT))) == [(1, 2), (2, 0)]


def test_the_prefill_worker_s_finished_asks_for_nothing(flow: Flow) -> None:
    assert flow.on_message(Role.PREFILL, Finished(**ABOUT)) == []
    assert flow.state is FlowState.RUNNING


# --- failures ----------------------------------------------------------------------------------------------------


def before_any_token(flow: Flow) -> None:
    pass


def after_the_first_token(flow: Flow) -> None:
    flow.on_message(Role.PREFILL, tokens(0, 10))


def while_decoding(flow: Flow) -> None:
    flow.on_message(Role.PREFILL, tokens(0, 10))
    flow.on_message(Role.DECODE, tokens(0, 10, 11))


moments = pytest.mark.parametrize("prepare", [before_any_token, after_the_first_token, while_decoding])


@moments
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_s_failure_ends_the_request(flow: Flow, role: Role, prepare: Callable[[Flow], None]) -> None:
    prepare(flow)
    actions = flow.on_message(role, Failed(**ABOUT, cause=Cause.DEADLINE, message="late"))
    assert failed(actions) is Cause.DEADLINE
    assert actions[-1].message == "late"
    assert flow.state is FlowState.FAILED


@moments
def test_a_request_is_given_up_in_any_state(flow: Flow, prepare: Callable[[Flow], None]) -> None:
    prepare(flow)
    assert sent(flow.cancel()) == [(Role.PREFILL, Abort), (Role.DECODE, Abort)]
    assert flow.state is FlowState.CANCELLED


@moments
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_cancelled_that_nobody_asked_for_ends_the_request(
    flow: Flow, role: Role, prepare: Callable[[Flow], None]
) -> None:
    prepare(flow)
    assert failed(flow.on_message(role, Cancelled(**ABOUT))) is Cause.INTERNAL


@moments
def test_a_decode_worker_that_is_lost_ends_the_request(flow: Flow, prepare: Callable[[Flow], None]) -> None:
    prepare(flow)
    assert failed(flow.worker_lost(Role.DECODE, "silent")) is Cause.WORKER_LOST


def test_a_prefill_worker_is_needed_until_its_first_token(flow: Flow) -> None:
    assert failed(flow.worker_lost(Role.PREFILL, "silent")) is Cause.WORKER_LOST


@pytest.mark.parametrize("prepare", [after_the_first_token, while_decoding])
def test_a_prefill_worker_is_not_needed_after_its_first_token(flow: Flow, prepare: Callable[[Flow], None]) -> None:
    prepare(flow)
    assert flow.worker_lost(Role.PREFILL, "silent") == []
    assert flow.on_resync(Role.PREFILL, UNKNOWN) == []
    assert flow.state is FlowState.RUNNING


def test_a_prefill_worker_is_not_needed_once_the_decode_worker_has_spoken() -> None:
    """It speaks only after it has settled; the first tokens of the other choices are in its next frames."""
    flow = flow_of(2)
    flow.on_message(Role.DECODE, tokens(0, 10, 11, choice=0))
    assert flow.worker_lost(Role.PREFILL, "silent") == []
    assert flow.on_resync(Role.PREFILL, UNKNOWN) == []
    assert delivered(flow.on_message(Role.DECODE, tokens(0, 20, 21, choice=1))) == [(1, (20, 21), None)]


def test_a_choice_that_was_not_asked_for_ends_the_request(flow: Flow) -> None:
    assert failed(flow.on_message(Role.DECODE, tokens(0, 10, choice=1))) is Cause.INTERNAL


ENDS: dict[FlowState, Callable[[Flow], list[Action]]] = {
    FlowState.DONE: lambda flow: flow.on_message(Role.DECODE, tokens(0, 10, reason="stop")),
    FlowState.FAILED: lambda flow: flow.fail(Cause.DEADLINE, "late"),
    FlowState.CANCELLED: lambda flow: flow.cancel(),
}


@pytest.mark.parametrize("end", ENDS)
def test_after_the_end_nothing_happens(flow: Flow, end: FlowState) -> None:
    ENDS[end](flow)
    assert flow.state is end
    for role in (Role.PREFILL, Role.DECODE):
        assert flow.on_message(role, tokens(0, 10, 11)) == []
        assert flow.on_message(role, Failed(**ABOUT, cause=Cause.INTERNAL, message="")) == []
        assert flow.on_message(role, Finished(**ABOUT)) == []
        assert flow.on_message(role, Cancelled(**ABOUT)) == []
        assert flow.worker_lost(role, "silent") == []
        assert flow.on_resync(role, UNKNOWN) == []
    assert flow.fail(Cause.DEADLINE, "late") == []
    assert flow.cancel() == []
    assert flow.state is end


# --- lost messages -----------------------------------------------------------------------------------------------


def test_after_a_loss_the_decode_worker_is_asked_for_all_that_is_missing() -> None:
    flow = flow_of(3)
    flow.on_message(Role.DECODE, tokens(0, 10, 11, choice=0, reason="stop"))
    flow.on_message(Role.DECODE, tokens(0, 20, choice=1))
    for _ in range(2):
        assert resends(flow.on_resync(Role.DECODE, OPEN)) == [(1, 1), (2, 0)], "the last Resend may be lost too"


@moments
def test_a_decode_worker_that_has_forgotten_the_request_ends_it(flow: Flow, prepare: Callable[[Flow], None]) -> None:
    prepare(flow)
    assert failed(flow.on_resync(Role.DECODE, UNKNOWN)) is Cause.WORKER_LOST


def test_a_prefill_worker_that_still_has_the_request_goes_on(flow: Flow) -> None:
    assert flow.on_resync(Role.PREFILL, OPEN) == []


def test_a_prefill_worker_that_never_got_the_request_ends_it(flow: Flow) -> None:
    assert failed(flow.on_resync(Role.PREFILL, UNKNOWN)) is Cause.WORKER_LOST


# --- any order, loss and repetition ------------------------------------------------------------------------------


class Workers:
    """A prefill and a decode worker as the gateway sees them, and wires that lose and repeat.

    Output token `i` of choice `c` is `100 * c + i`. Messages of one worker arrive in order, unless they are lost: then
    the session is opened again before long.
    """

    def __init__(self, choose: Callable[[list[Any]], Any]) -> None:
        self.choose = choose
        self.lengths = [choose([1, 2, 3, 6, 12]) for _ in range(choose([1, 1, 2, 3]))]
        self.reasons = [choose(["stop", "length"]) for _ in self.lengths]
        self.flow = flow_of(len(self.lengths))
        self.generated = [1 for _ in self.lengths]
        self.sent = [0 for _ in self.lengths]
        self.settled = False
        self.given_up = all(length == 1 for length in self.lengths)
        self.wires: dict[Role, deque[Message]] = {Role.PREFILL: deque(), Role.DECODE: deque()}
        self.to_decode: deque[Message] = deque()
        self.lossy = False
        self.received: list[list[int]] = [[] for _ in self.lengths]
        self.ended: list[FinishReason | None] = [None for _ in self.lengths]
        self.done = False
        self.goodbyes: list[Message] = []
        for choice in range(len(self.lengths)):
            self.wires[Role.PREFILL].append(self.frame(choice, 0))
        if self.given_up:
            self.wires[Role.PREFILL].append(Finished(**ABOUT))

    def frame(self, choice: int, position: int) -> Tokens:
        """What has been generated of a choice, from `position` on."""
        generated = self.generated[choice]
        over = generated == self.lengths[choice]
        token_ids = (100 * choice + index for index in range(position, generated))
        return tokens(position, *token_ids, choice=choice, reason=self.reasons[choice] if over else None)

    @property
    def finished(self) -> bool:
        return self.generated == self.lengths

    # --- what may happen -----------------------------------------------------------------------------------------

    def steps(self) -> list[Callable[[], None]]:
        steps = [self.lose_or_repeat, self.lose_or_repeat, self.open_again]
        steps += [self.deliver(role) for role in self.wires if self.wires[role]] * 4
        steps += [self.hear] * 4 if self.to_decode else []
        steps += [self.decode] * 3 if not (self.finished or self.given_up) else []
        return steps

    def decode(self) -> None:
        """A step of the decode worker; before the first, it settles."""
        going_on = [choice for choice, length in enumerate(self.lengths) if self.generated[choice] < length]
        for choice in going_on:
            self.generated[choice] += 1
        for choice in range(len(self.lengths)) if not self.settled else going_on:
            self.wires[Role.DECODE].append(self.frame(choice, self.sent[choice]))
            self.sent[choice] = self.generated[choice]
        self.settled = True
        if self.finished:
            self.wires[Role.DECODE].append(Finished(**ABOUT))

    def deliver(self, role: Role) -> Callable[[], None]:
        return lambda: self.take(self.flow.on_message(role, self.wires[role].popleft()))

    def hear(self) -> None:
        message = self.to_decode.popleft()
        match message:
            case Resend(choice=choice, position=position) if self.settled:
                if position - START < self.generated[choice]:
                    self.wires[Role.DECODE].append(self.frame(choice, position - START))
                if self.finished:
                    self.wires[Role.DECODE].append(Finished(**ABOUT))
            case Ack() | Abort():
                assert self.done

    def lose_or_repeat(self) -> None:
        """The prefill worker's frames may come twice; the decode worker's, and those to it, may be lost too."""
        wire = self.choose([self.wires[Role.PREFILL], self.wires[Role.DECODE], self.to_decode])
        if not wire:
            return
        index = self.choose(list(range(len(wire))))
        if wire is self.wires[Role.PREFILL] or self.choose([True, False]):
            wire.insert(index, wire[index])
        else:
            del wire[index]
            self.lossy = True

    def open_again(self) -> None:
        """Both sides find out; a session that is opened again for nothing does no harm."""
        self.lossy = False
        self.take(self.flow.on_resync(Role.DECODE, OPEN))
        self.take(self.flow.on_resync(Role.PREFILL, OPEN))

    def take(self, actions: list[Action]) -> None:
        self.flow.check_invariants()
        for action in actions:
            assert not self.done, "something happens after the end"
            match action:
                case Deliver(delta):
                    assert self.ended[delta.choice] is None
                    self.received[delta.choice] += delta.token_ids
                    self.ended[delta.choice] = delta.finish_reason
                case Send(role, message):
                    assert role is Role.DECODE
                    self.to_decode.append(message)
                    self.goodbyes += [message] if isinstance(message, Ack | Abort) else []
                case Done():
                    self.done = True
                case _:
                    raise AssertionError(action)

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.choose(self.steps())()

    def settle_down(self) -> None:
        """Nothing is lost any more: the client gets everything."""
        while not (self.finished or self.given_up):
            self.decode()
        if self.lossy:
            self.open_again()
        while self.to_decode or any(self.wires.values()):
            for role in self.wires:
                while self.wires[role]:
                    self.deliver(role)()
            while self.to_decode:
                self.hear()

    def check(self) -> None:
        assert self.done
        assert self.received == [[100 * choice + index for index in range(n)] for choice, n in enumerate(self.lengths)]
        assert self.ended == self.reasons
        [goodbye] = self.goodbyes
        assert isinstance(goodbye, Abort | Ack)
        assert self.given_up == isinstance(goodbye, Abort) or all(length == 1 for length in self.lengths)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(0, 40))
def test_the_client_sees_each_token_once(data: st.DataObject, num_events: int) -> None:
    workers = Workers(lambda options: data.draw(st.sampled_from(options)))
    workers.run(num_events)
    workers.settle_down()
    workers.check()
    event(f"{'some' if workers.flow.num_gaps else 'no'} gaps")


def test_the_client_sees_each_token_once_in_many_long_runs() -> None:
    """Deeper than the runs that can be shrunk; a failure names the seed."""
    num_gaps = 0
    for seed in range(1000):
        workers = Workers(Random(seed).choice)
        try:
            workers.run(60)
            workers.settle_down()
            workers.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_gaps += workers.flow.num_gaps
    assert num_gaps > 100, "hardly a frame was lost: the runs show nothing"
