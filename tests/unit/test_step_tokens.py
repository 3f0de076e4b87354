"""The tokens of a step as columns: what the worker puts into them, and what the gateway makes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from dispatcher_bench import D2, P2, PROMPT, Bench, D, P, settle, text
from flow_run import START, Run, failed, life, of_prompt, tokens

from common.contract.errors import Cause
from common.contract.ids import Handle, Incarnation, RequestKey
from common.contract.messages.fields import MAX_STEP_TOKENS, Message
from common.contract.messages.gateway import Ack, Decode, Resend, Suspicion
from common.contract.messages.worker import StepTokens
from decode_worker.step_tokens import StepReport
from gateway.serving.generation import Delta


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    subject = Bench(prefill=(P, P2), decode=(D, D2))
    yield subject
    await subject.close()


def workers(bench: Bench, key: RequestKey) -> tuple[str, str]:
    """Where its prompt is computed, and where it is decoded."""
    prefill, decode = bench.work[key]
    return prefill, decode


def handle(bench: Bench, key: RequestKey, choice: int = 0) -> Handle:
    [work] = [work for work in bench.work[key].values() if isinstance(work, Decode)]
    return work.handles[work.choices.index(choice)]


def step(bench: Bench, *rows: tuple[RequestKey, int, int, int]) -> StepTokens:
    """Of (request, choice, position in the output, token)."""
    return StepTokens(
        handles=tuple(handle(bench, key, choice) for key, choice, _, _ in rows),
        positions=tuple(len(PROMPT) + position for _, _, position, _ in rows),
        token_ids=tuple(token for _, _, _, token in rows),
    )


# --- the gateway -------------------------------------------------------------------------------------------------


async def test_each_sequence_of_a_step_gets_its_token(bench: Bench) -> None:
    """Two requests, one of them with two choices; the last tokens come by themselves."""
    one, first = await bench.request()
    two, second = await bench.request(n=2)
    for key, choices in ((one, (0,)), (two, (0, 1))):
        prefill, decode = workers(bench, key)
        for choice in choices:
            bench.tokens(prefill, key, 0, 10 + choice, choice=choice)
            bench.tokens(decode, key, 0, 10 + choice, 20 + choice, choice=choice)
    for position in (2, 3):
        for address in (D, D2):
            rows = [
                (key, choice, position, 100 * position + choice)
                for key, choice in ((one, 0), (two, 1), (two, 0))
                if workers(bench, key)[1] == address
            ]
            if rows:
                bench.say(address, step(bench, *rows))
    for key, choices in ((one, (0,)), (two, (1, 0))):
        for choice in choices:
            bench.tokens(workers(bench, key)[1], key, 4, 5, choice=choice, reason="stop")
    assert await text(first) == [10, 20, 200, 300, 5]
    deltas: list[Delta] = await second
    for choice in (0, 1):
        got = [token for delta in deltas if delta.choice == choice for token in delta.token_ids]
        assert got == [10 + choice, 20 + choice, 200 + choice, 300 + choice, 5]
    assert (
        bench.dispatcher.recovery.tally.num_duplicates
        == bench.dispatcher.recovery.tally.num_gaps
        == bench.dispatcher.num_stale_messages
        == 0
    )
    assert [len(bench.sent(workers(bench, key)[1], Ack)) for key in (one, two)] in ([1, 1], [2, 2])


async def test_tokens_of_a_sequence_that_come_in_one_step_are_joined(bench: Bench) -> None:
    """All but the first, which came after a gap."""
    key, task = await bench.request(n=2)
    prefill, decode = workers(bench, key)
    for choice in (0, 1):
        bench.tokens(prefill, key, 0, 10, choice=choice)
        bench.tokens(decode, key, 0, 10, 11, choice=choice)
    bench.say(decode, step(bench, *((key, choice, place, 20) for choice in (0, 1) for place in (2, 3, 4))))
    bench.say(decode, step(bench, *((key, choice, 5, 20) for choice in (0, 1))))
    for choice in (0, 1):
        bench.tokens(decode, key, 6, 5, choice=choice, reason="stop")
    deltas: list[Delta] = await task
    for choice in (0, 1):
        joined = [delta.joined for delta in deltas if delta.choice == choice]
        assert joined == [False, False, False, True, True, False, False]


async def test_handles_are_never_used_again(bench: Bench) -> None:
    seen: list[Handle] = []
    for _ in range(3):
        key, task = await bench.request(n=2)
        seen += [handle(bench, key, choice) for choice in (0, 1)]
        for choice in (0, 1):
            bench.tokens(workers(bench, key)[1], key, 0, 10, choice=choice, reason="stop")
        await task
    assert len(set(seen)) == 6


async def test_a_token_that_is_known_is_dropped_and_one_too_many_is_a_gap(bench: Bench) -> None:
    key, task = await bench.request()
    prefill, decode = workers(bench, key)
    bench.tokens(prefill, key, 0, 10)
    bench.tokens(decode, key, 0, 10, 11)
    bench.say(decode, step(bench, (key, 0, 1, 11)))
    for position in (3, 4):
        bench.say(decode, step(bench, (key, 0, position, 10 + position)))
    asked = [each for each in bench.link(decode).sent if isinstance(each, Resend)]
    assert [each.position for each in asked] == [len(PROMPT) + 2], "a gap is asked for once"
    assert (bench.dispatcher.recovery.tally.num_duplicates, bench.dispatcher.recovery.tally.num_gaps) == (1, 2), (
        "while the request goes on"
    )
    bench.tokens(decode, key, 2, 12, 13, 14)
    bench.say(decode, step(bench, (key, 0, 5, 15)))
    bench.tokens(decode, key, 6, 16, reason="stop")
    assert await text(task) == [10, 11, 12, 13, 14, 15, 16]
    assert (bench.dispatcher.recovery.tally.num_duplicates, bench.dispatcher.recovery.tally.num_gaps) == (1, 2)


async def test_what_nobody_waits_for_is_stale(bench: Bench) -> None:
    """Of a worker that does not have it, of an attempt that is over, and of no attempt at all."""
    key, task = await bench.request()
    prefill, decode = workers(bench, key)
    bench.tokens(prefill, key, 0, 10)
    bench.tokens(decode, key, 0, 10, 11)
    late = step(bench, (key, 0, 2, 12))
    other = D2 if decode == D else D
    bench.say(other, late)
    bench.say(decode, StepTokens(handles=(Handle(2**63),), positions=(9,), token_ids=(1,)))
    assert bench.dispatcher.num_stale_messages == 2
    bench.fail(decode, key, Cause.INTERNAL)
    await settle()
    bench.say(decode, late)
    assert bench.dispatcher.num_stale_messages == 3
    newest, work = bench.newest(key)
    assert newest != key
    bench.tokens([*work][-1], newest, 2, 12, reason="stop")
    assert await text(task) == [10, 11, 12]
    assert not bench.dispatcher._rows, "handles of what has ended are kept"


async def test_a_client_that_left_has_no_rows(bench: Bench) -> None:
    key, task = await bench.request(n=3)
    assert len(bench.dispatcher._rows) == 3
    task.cancel()
    await settle()
    assert not bench.dispatcher._rows
    bench.say(workers(bench, key)[1], step(bench, (key, 1, 2, 12)))
    assert bench.dispatcher.num_stale_messages == 1


# --- when an attempt takes a token without further thought -------------------------------------------------------


@pytest.fixture
def going() -> Run:
    """A choice that goes on, and has two tokens."""
    run = Run()
    run.on(P, tokens(START, 1))
    run.on(D, tokens(START, 1, 2))
    return run


def test_the_next_token_is_taken(going: Run) -> None:
    choice = going.flow.choices[0]
    assert going.attempt.take(choice, START + 2, 3)
    assert going.attempt.take(choice, START + 3, 4)
    assert choice.token_ids[START:] == [1, 2, 3, 4]
    going.flow.check_invariants()


def _failed_before(run: Run) -> None:
    run.flow.choices[0].num_failures = 1


def _had_a_bug(run: Run) -> None:
    run.flow.choices[0].num_bugs = 1


def _avoids(run: Run) -> None:
    run.flow.choices[0].avoid.add(life("x"))


def _suspected(run: Run) -> None:
    run.flow.choices[0].suspicion = Suspicion.GROUP


def _ended(run: Run) -> None:
    run.on(D, tokens(START + 2, 3, end="stop"))
    run.flow.choices[0].token_ids.pop()


def _asked(run: Run) -> None:
    run.on(D, tokens(START + 4, 5))


@pytest.mark.parametrize("trouble", [_failed_before, _had_a_bug, _avoids, _suspected, _ended, _asked])
def test_a_token_from_which_something_follows_is_not_taken(going: Run, trouble: Callable[[Run], None]) -> None:
    attempt, choice = going.attempt, going.flow.choices[0]
    trouble(going)
    before = list(choice.token_ids)
    assert not attempt.take(choice, len(before), 3)
    assert choice.token_ids == before


@pytest.mark.parametrize("position", [START + 1, START + 3, 0])
def test_another_token_than_the_next_is_not_taken(going: Run, position: int) -> None:
    choice = going.flow.choices[0]
    assert not going.attempt.take(choice, position, 3)
    assert choice.token_ids[START:] == [1, 2]


def test_the_first_word_of_a_decode_worker_is_not_taken() -> None:
    run = Run()
    run.on(P, tokens(START, 1))
    assert not run.attempt.take(run.flow.choices[0], START + 1, 2)


def test_no_token_is_taken_before_all_of_the_prompt_is_told() -> None:
    run = Run(prompt_logprobs=1, local=True)
    run.on(D, of_prompt(1))
    run.attempt.decode_has_spoken = True
    assert not run.attempt.take(run.flow.choices[0], START, 2)


def test_a_failure_afterwards_finds_what_was_taken(going: Run) -> None:
    going.attempt.take(going.flow.choices[0], START + 2, 3)
    going.on(D, failed(Cause.INTERNAL))
    [want] = going.flow.wants
    assert want.choices[0].token_ids[START:] == [1, 2, 3]


# --- the worker --------------------------------------------------------------------------------------------------


def test_each_gateway_is_told_of_its_own_sequences() -> None:
    report, said = StepReport(), []
    one, two = Incarnation("g1"), Incarnation("g2")
    report.add(one, Handle(1), 7, 70)
    report.add(two, Handle(1), 8, 80)
    report.add(one, Handle(2), 9, 90)

    def send(gateway: Incarnation, message: Message) -> None:
        said.append((gateway, message))

    report.send_all(send)
    report.send_all(send)
    assert said == [
        (one, StepTokens(handles=(Handle(1), Handle(2)), positions=(7, 9), token_ids=(70, 90))),
        (two, StepTokens(handles=(Handle(1),), positions=(8,), token_ids=(80,))),
    ]


def test_a_step_of_very_many_sequences_is_told_in_parts() -> None:
    report, said = StepReport(), []
    for number in range(MAX_STEP_TOKENS + 2):
        report.add(Incarnation("g"), Handle(number), 1, 1)
    report.send_all(lambda gateway, message: said.append(message))
    assert [len(message.handles) for message in said] == [MAX_STEP_TOKENS, 2]  # type: ignore[attr-defined]
    assert said[1].handles == (MAX_STEP_TOKENS, MAX_STEP_TOKENS + 1)  # type: ignore[attr-defined]
