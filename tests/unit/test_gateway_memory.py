"""What requests keep in the gateway, and what is made once instead of again and again."""

from __future__ import annotations

import asyncio
import copy
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from dispatcher_bench import PROMPT, Bench, D, P, settle
from gateway_fixtures import BOS, CHAT_TEMPLATE, EOS, byte_level_backend, wrap

from common.contract.messages.worker import StepTokens
from common.contract.sampling import MAX_CHOICES, SamplingParams
from gateway.answer.responses import WholeChoice, _message
from gateway.observability import recent
from gateway.observability.recent import SLOT_S, Recent
from gateway.serving.flow import Flow
from gateway.serving.generation import Delta, Generation
from gateway.text.call_parser import CallDelta
from gateway.text.choice_text import Piece


def bytes_kept(make: Callable[[], object]) -> int:
    """Bytes of what `make` returns."""
    tracemalloc.start()
    try:
        kept = make()
        num_bytes, _ = tracemalloc.get_traced_memory()
        assert kept is not None
        return num_bytes
    finally:
        tracemalloc.stop()


# --- prompts --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_waits_is_kept_once_for_all_its_choices() -> None:
    generation = Generation(
        token_ids=tuple(range(10_000)), num_choices=MAX_CHOICES, sampling=SamplingParams(max_tokens=9), budget_s=9.0
    )

    def opened() -> Flow:
        flow = Flow(generation)
        flow.begin()
        return flow

    assert bytes_kept(opened) < 2 * 8 * len(generation.token_ids)


async def test_each_choice_goes_on_with_tokens_of_its_own() -> None:
    bench = Bench()
    key, _ = await bench.request(n=3)
    [request] = bench.dispatcher._open
    for choice in (0, 1):
        bench.tokens(P, key, 0, 10 + choice, choice=choice)
        bench.tokens(D, key, 0, 10 + choice, choice=choice)
        bench.tokens(D, key, 1, 20 + choice, choice=choice)
    request.flow.check_invariants()
    assert [choice.token_ids for choice in request.flow.choices] == [[*PROMPT, 10, 20], [*PROMPT, 11, 21], [*PROMPT]]
    await bench.close()


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, MAX_CHOICES])
async def test_tokens_that_a_client_does_not_read_are_joined(n: int) -> None:
    bench, num_steps = Bench(), 2000
    generation = Generation(token_ids=PROMPT, num_choices=n, sampling=SamplingParams(max_tokens=9999), budget_s=30.0)
    deltas = bench.dispatcher.generate(generation)
    reader = asyncio.ensure_future(anext(deltas))
    await settle()
    [key] = bench.work
    for choice in range(n):
        bench.tokens(P, key, 0, choice, choice=choice)
        bench.tokens(D, key, 0, choice, choice=choice)
    read = [await reader]
    [request] = bench.dispatcher._open
    handles = bench.decode(D).handles
    for step in range(1, num_steps):
        positions, token_ids = (len(PROMPT) + step,) * n, tuple(step * 100 + choice for choice in range(n))
        bench.say(D, StepTokens(handles=handles, positions=positions, token_ids=token_ids))
    assert len(request.mailbox) <= 100 + n * num_steps // 50
    for choice in range(n):
        bench.tokens(D, key, num_steps, 7, choice=choice, reason="length")
    read += [delta async for delta in deltas]
    found: dict[int, list[int]] = defaultdict(list)
    for delta in read:
        assert isinstance(delta, Delta)
        found[delta.choice] += delta.token_ids
    steps = range(1, num_steps)
    assert found == {choice: [choice, *(step * 100 + choice for step in steps), 7] for choice in range(n)}
    await bench.close()


async def test_a_few_unread_tokens_come_one_by_one() -> None:
    bench = Bench()
    key, task = await bench.request()
    bench.tokens(P, key, 0, 0)
    bench.tokens(D, key, 0, 0)
    for position in range(1, 30):
        bench.tokens(D, key, position, position)
    bench.tokens(D, key, 30, 30, reason="length")
    assert [delta.token_ids for delta in await task] == [(position,) for position in range(31)]
    await bench.close()


async def test_a_token_of_another_step_joined_to_a_drafted_one_keeps_its_gap() -> None:
    """The drafted one, whose gap is no gap, is the newest delta when the client begins to lag behind."""
    bench = Bench()
    key, task = await bench.request()
    bench.tokens(P, key, 0, 0)
    bench.tokens(D, key, 0, 0)
    [handle], [request], position = bench.decode(D).handles, bench.dispatcher._open, len(PROMPT)

    def step(num_tokens: int) -> Delta:
        """The newest delta after a step of the sequence."""
        nonlocal position
        positions = tuple(range(position + 1, position + 1 + num_tokens))
        position += num_tokens
        bench.say(D, StepTokens(handles=(handle,) * num_tokens, positions=positions, token_ids=positions))
        [newest] = request.mailbox.newest(1)
        assert isinstance(newest, Delta)
        return newest

    while len(request.mailbox) < 62:
        step(1)
    drafted = step(2)
    assert (drafted.token_ids, drafted.joined) == ((position,), True)
    assert step(1) is drafted
    assert (drafted.token_ids, drafted.joined) == ((position - 1, position), False)
    bench.tokens(D, key, position - len(PROMPT) + 1, 7, reason="length")
    await task
    await bench.close()


def piece(text: str, *, reasoning: str = "", call: CallDelta | None = None) -> Piece:
    return Piece(choice=0, text=text, num_tokens=1, reports=(), finish_reason=None, reasoning=reasoning, call=call)


def begun(index: int, call_id: str, name: str) -> CallDelta:
    return CallDelta(index=index, id=call_id, name=name)


@pytest.mark.parametrize("kind", ["text", "reasoning", "call"])
def test_a_whole_answer_is_kept_as_its_text(kind: str) -> None:
    num_pieces = 50_000

    def collected() -> WholeChoice:
        choice = WholeChoice()
        choice.add(piece("", call=begun(0, "id", "f")))
        for number in range(num_pieces):
            text = f"{number:5d}"
            if kind == "call":
                choice.add(piece("", call=CallDelta(index=0, arguments=text)))
            else:
                choice.add(piece(text) if kind == "text" else piece("", reasoning=text))
        return choice

    assert bytes_kept(collected) < 3 * 5 * num_pieces


def test_a_whole_answer_has_all_its_parts() -> None:
    choice = WholeChoice()
    for each in (
        *(piece("", reasoning="a"), piece("", reasoning="b"), piece("c\r\n"), piece("d")),
        *(piece("", call=begun(0, "x", "f")), piece("", call=CallDelta(index=0, arguments="{")), piece("")),
        *(piece("", call=CallDelta(index=0, arguments="}")), piece("", call=begun(1, "y", "g"))),
    ):
        choice.add(each)
    calls = [("x", "f", "{}"), ("y", "g", "")]
    assert _message(choice) == {
        "role": "assistant",
        "content": "c\r\nd",
        "refusal": None,
        "reasoning_content": "ab",
        "reasoning": "ab",
        "tool_calls": [
            {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, name, arguments in calls
        ],
    }


# --- once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "num_copies"), [(CHAT_TEMPLATE, 1), (None, 0)])
async def test_the_tokenizer_is_copied_before_the_first_request(
    template: str | None, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[object] = []

    def counted(value: object) -> object:
        copied.append(value)
        return copy.deepcopy(value)

    monkeypatch.setattr("gateway.text.tokenizer.copy", SimpleNamespace(deepcopy=counted))
    kind = wrap(byte_level_backend(), template)
    assert len(copied) == num_copies
    if template is not None:
        text = kind.render_chat([{"role": "user", "content": "</s>"}])
        for _ in range(2):
            token_ids = await kind.encode(text, add_special_tokens=False)
            assert [token for token in token_ids if token in (BOS, EOS)] == [BOS]
    assert len(copied) == num_copies


def test_a_slot_that_is_over_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    describe = recent._describe

    def counted(slot: recent.Slot) -> dict[str, object]:
        described.append(slot.number)
        return describe(slot)

    monkeypatch.setattr(recent, "_describe", counted)
    ring = Recent()
    for number in range(5):
        ring.first_token(0.1, number * SLOT_S)
    first = ring.slots(4 * SLOT_S)
    assert described == [0, 1, 2, 3, 4]
    ring.failed(4 * SLOT_S)
    second = ring.slots(4 * SLOT_S)
    assert described == [0, 1, 2, 3, 4, 4]
    assert first != second
    ring.failed(5 * SLOT_S)
    ring.slots(5 * SLOT_S)
    ring.slots(6 * SLOT_S)
    assert described == [0, 1, 2, 3, 4, 4, 4, 5, 5]
