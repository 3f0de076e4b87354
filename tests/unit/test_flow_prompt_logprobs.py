"""Log probabilities of a prompt on their way through a flow: each position once, all before the first token, and none
computed again once the client has them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from flow_run import D2, FINISHED, P2, PROMPT, START, D, P, Run, failed, of_prompt, resend, tokens

from common.contract.errors import Cause
from common.contract.messages.gateway import Decode, Prefill, Resend
from gateway.serving.attempt import Deliver
from gateway.serving.flow import FlowState
from gateway.serving.generation import PromptDelta

ALL = list(range(1, START))


@pytest.fixture(params=[False, True], ids=["handoff", "local"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    yield from _run(local=request.param)


@pytest.fixture
def handoff() -> Iterator[Run]:
    yield from _run(local=False)


def _run(*, local: bool) -> Iterator[Run]:
    run = Run(prompt_logprobs=2, local=local)
    yield run
    if run.flow.running:
        run.do(run.flow.cancel())
    run.check_end()


def computing(run: Run) -> str:
    """Where the prompt is computed."""
    return D if run.attempt.prefill is None else P


def asked(run: Run) -> list[int | None]:
    """With how many alternatives workers were asked for the prompt's log probabilities: one number an attempt."""
    prefills = [work.prompt_logprobs for _, work in run.sent(Prefill)]
    decodes = [(work.source, work.prompt_logprobs) for _, work in run.sent(Decode)]
    assert all(num is None for source, num in decodes if source is not None), "who pulls does not compute"
    return prefills or [num for _, num in decodes]


def test_who_computes_the_prompt_is_asked_and_told_of_at_once(run: Run) -> None:
    assert asked(run) == [2]
    for position in ALL:
        (delivered,) = run.on(computing(run), of_prompt(position))
        assert isinstance(delivered, PromptDelta)
    assert run.told() == ALL
    run.on(computing(run), tokens(START, 1))
    run.on(D, tokens(START, 1, 2, end="stop"))
    assert run.flow.state is FlowState.DONE
    assert run.text() == [1, 2]


def test_what_nobody_asked_for_is_dropped() -> None:
    run = Run()
    assert run.on(P, of_prompt(1), of_prompt(2)) == []
    assert run.flow.tally.failures == {}
    run.on(P, tokens(START, 1, end="stop"))
    run.check_end()


@pytest.mark.parametrize("message", [of_prompt(START), of_prompt(1, 2, 3)], ids=["after", "beyond"])
def test_what_is_not_of_the_prompt_is_a_workers_fault(run: Run, message: Any) -> None:
    run.on(computing(run), message)
    assert run.told() == []
    assert run.flow.tally.failures == {Cause.INTERNAL: 1}


def test_who_pulls_may_not_tell_of_the_prompt(handoff: Run) -> None:
    handoff.on(D, of_prompt(1))
    assert handoff.told() == []
    assert handoff.flow.tally.failures == {Cause.INTERNAL: 1}


def test_a_prompt_that_is_computed_again_is_told_of_from_where_the_client_is(run: Run) -> None:
    run.on(computing(run), of_prompt(1))
    run.lose(computing(run))
    run.go(D2, P2)
    assert asked(run)[-1] == 2
    run.on(P2, of_prompt(1))
    assert run.told() == [1]
    run.on(P2, of_prompt(1, 2), of_prompt(2))
    assert run.told() == ALL
    run.on(P2, tokens(START, 1, end="stop"))
    assert run.flow.state is FlowState.DONE


def test_once_it_is_told_nobody_is_asked_again(run: Run) -> None:
    run.on(computing(run), of_prompt(*ALL), tokens(START, 1))
    run.on(D, tokens(START, 1, 2))
    run.lose(D)
    run.go(D2, P2)
    assert run.sent(Prefill)[-1][1].prompt_logprobs is None
    assert run.sent(Decode)[-1][1].prompt_logprobs is None
    run.on(P2, tokens(START + 2, 3, end="stop"))
    assert (run.told(), run.text()) == (ALL, [1, 2, 3])


def test_nor_if_no_token_has_come_yet(run: Run) -> None:
    run.on(computing(run), of_prompt(*ALL))
    run.lose(computing(run))
    run.go(D2, P2)
    assert run.sent(Prefill)[-1][1].prompt_logprobs is None


def test_an_offer_does_not_stand_while_it_is_to_tell_of_the_prompt(handoff: Run) -> None:
    """Between two decode workers nobody listens to the prefill worker."""
    handoff.on(P, of_prompt(1))
    handoff.on(D, failed())
    assert handoff.want.offer is None
    handoff.go(D2, P2)
    handoff.on(P2, of_prompt(*ALL))
    assert handoff.told() == ALL
    handoff.on(D2, failed())
    assert handoff.want.offer is not None, "it has told all of it"


def test_tokens_that_come_before_the_end_of_the_prompt_are_asked_for_again(handoff: Run) -> None:
    """The decode worker may be quicker than what the prefill worker has told."""
    handoff.on(P, of_prompt(1))
    assert handoff.on(D, tokens(START, 1, 2)) == []
    assert handoff.on(D, tokens(START + 2, 3, end="stop")) == []
    assert handoff.on(D, FINISHED) == []
    _, again = handoff.on(P, of_prompt(2))
    assert handoff.sent(Resend) == [(D, resend(START))]
    assert again.message == resend(START)  # type: ignore[union-attr]
    handoff.on(P, tokens(START, 1))
    handoff.on(D, tokens(START, 1, 2, 3, end="stop"), FINISHED)
    assert handoff.text() == [1, 2, 3]
    assert handoff.flow.state is FlowState.DONE


def test_a_prefill_worker_is_needed_until_it_has_told_of_the_prompt(handoff: Run) -> None:
    handoff.on(P, of_prompt(1))
    handoff.on(D, tokens(START, 1))
    handoff.lose(P)
    assert handoff.flow.tally.failures == {Cause.WORKER_LOST: 1}


@pytest.mark.parametrize("how", ["gap", "token", "resync"])
def test_what_was_lost_is_computed_again(run: Run, how: str) -> None:
    """Nobody keeps it."""
    at = computing(run)
    if how == "gap":
        run.on(at, of_prompt(2))
    elif how == "token":
        run.on(at, of_prompt(1), tokens(START, 1))
    else:
        run.resync(at, known=True)
    assert run.flow.tally.failures == {Cause.WORKER_LOST: 1}
    assert run.want.avoid == frozenset(), "nobody is to blame"
    run.go(D2, P2)
    run.on(P2, of_prompt(*ALL), tokens(START, 1, end="stop"))
    assert (run.told(), run.text()) == (ALL, [1])


def test_lost_messages_harm_nobody_once_it_is_told(run: Run) -> None:
    run.on(computing(run), of_prompt(*ALL))
    run.resync(computing(run), known=True)
    assert run.flow.tally.failures == {}


def test_choices_share_it() -> None:
    run = Run(3, prompt_logprobs=0)
    run.on(P, of_prompt(*ALL))
    assert run.told() == ALL
    run.on(P, *(tokens(START, 1, choice=choice, end="stop") for choice in range(3)))
    assert run.flow.state is FlowState.DONE
    run.check_end()


def test_a_prompt_of_one_token_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flow_run.PROMPT", PROMPT[:1])
    run = Run(prompt_logprobs=3)
    assert asked(run) == [None]
    run.on(P, tokens(1, 5, end="stop"))
    assert run.flow.state is FlowState.DONE


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_each_position_comes_once_and_before_the_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers tell in chunks, are lost, fail, are too quick, lose messages; there is one token."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    length = chance.randint(1, 12)
    monkeypatch.setattr("flow_run.PROMPT", tuple(range(100, 100 + length)))
    local = chance.random() < 0.4
    run = Run(prompt_logprobs=1, local=local)
    workers = iter(range(1000))
    at, decode = (D if local else P), D
    told = 0
    while run.flow.running:
        event = chance.random()
        if event < 0.6 and told + 1 < length:
            end = chance.randint(told + 2, length)
            run.on(at, of_prompt(*range(told + 1, end)))
            told = end - 1
        elif event < 0.65 and told + 2 < length:
            run.on(at, of_prompt(*range(told + 2, length)))  # something was lost
        elif event < 0.7:
            run.lose(chance.choice([at, decode]))
        elif event < 0.75:
            run.on(chance.choice([at, decode]), failed(Cause.TRANSFER))
        elif event < 0.8 and at != decode:
            run.on(decode, tokens(length, 5, end="stop"))
        elif event < 0.85:
            run.resync(chance.choice([at, decode]), known=True)
        elif told + 1 >= length:
            run.on(at, tokens(length, 5, end="stop"))
        for want in list(run.flow.wants):
            number = next(workers)
            decode, prefill = f"d{number}:1", None if chance.random() < 0.4 else f"p{number}:1"
            if want.offer is not None:
                run.go(decode, want=want)
                continue
            run.go(decode, prefill, want=want)
            at, told = prefill or decode, 0
    if run.flow.state is FlowState.DONE:
        assert run.told() == list(range(1, length))
    assert run.told() == list(range(1, 1 + len(run.told())))
    kinds = [type(each) for each in run.seen if isinstance(each, Deliver | PromptDelta)]
    assert kinds == sorted(kinds, key=[PromptDelta, Deliver].index)
    run.check_end()
