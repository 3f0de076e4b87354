"""Masks are made elsewhere: who waits for whom, and for how long."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.contract.errors import Cause
from common.engine import masks as engine_masks
from common.engine.grammar import GaveUp, Grammars, GrammarState, Unread
from common.engine.masks import Masks
from common.runtime import grammar_limits

AMBIGUOUS = "start: e\ne: e e e | e e | /[ -~]/ |"


class Gated(Grammars):
    """Reading in a grammar that begins with `slow` waits for the gate; so does compiling one with `large`."""

    def __init__(self) -> None:
        super().__init__(LLTokenizer("byte"))
        self.gate = threading.Event()
        self.read_in: list[str] = []

    def compile(self, grammar: str) -> LLMatcher:
        if "large" in grammar:
            assert self.gate.wait(60)
        return super().compile(grammar)

    def read(self, *arguments: Any) -> bytes | Unread | GaveUp:
        result = super().read(*arguments)
        if isinstance(result, bytes) and result[ord("s") >> 3] >> (ord("s") & 7) & 1:
            assert self.gate.wait(60)
        return result


@pytest.fixture
def gated() -> Iterator[Gated]:
    grammars = Gated()
    yield grammars
    grammars.gate.set()


class Asker:
    """Of masks, and what came of that."""

    def __init__(self, masks: Masks, grammar: str) -> None:
        self.masks, self.grammar, self.state = masks, grammar, GrammarState()
        self.told: asyncio.Future[GaveUp | None] = asyncio.Future()

    def ask(self, output: str = "", *, expected: bool = False) -> asyncio.Future[GaveUp | None]:
        self.told = asyncio.get_running_loop().create_future()
        self.state.late = not expected
        self.masks.ask(self.grammar, self.state, list(output.encode()), 0, self.told.set_result)
        return self.told


async def soon(told: asyncio.Future[Any]) -> Any:
    return await asyncio.wait_for(told, 60)


async def test_a_slow_mask_holds_up_no_other_grammar(gated: Gated) -> None:
    masks = Masks(gated)
    slow = [Asker(masks, 'start: "slow"') for _ in range(16)]
    for each in slow:
        each.ask()
    for _ in range(3):
        assert await soon(Asker(masks, 'start: "quick"').ask()) is None
    assert not any(each.told.done() for each in slow)
    gated.gate.set()
    for each in slow:
        assert await soon(each.told) is None
    assert masks.num_made == 19


async def test_a_compilation_holds_up_no_mask(gated: Gated) -> None:
    masks = Masks(gated)
    quick = Asker(masks, 'start: "quick"')
    await soon(quick.ask())
    large = Asker(masks, 'start: "large"')
    large.ask()
    assert await soon(quick.ask("q")) is None
    assert not large.told.done()
    gated.gate.set()
    assert await soon(large.told) is None


async def test_a_step_waits_for_what_can_be_expected_and_once_for_what_is_late(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = Masks(gated)
    quick, slow = Asker(masks, 'start: "quick"'), Asker(masks, 'start: "slow"')
    monkeypatch.setattr(engine_masks, "GRACE_S", 60)
    quick.ask(expected=True)
    await masks.wait_for_expected()
    assert quick.told.done()
    monkeypatch.setattr(engine_masks, "GRACE_S", 0)
    slow.ask(expected=True)
    await masks.wait_for_expected()
    assert (masks.num_late, slow.told.done(), slow.state.late) == (1, False, True)
    monkeypatch.setattr(engine_masks, "GRACE_S", 60)
    await asyncio.wait_for(masks.wait_for_expected(), 30)
    gated.gate.set()
    await soon(slow.told)
    assert slow.state.allowed is not None
    assert not slow.state.late


async def test_who_is_given_up_is_told_nothing_and_keeps_nobody_waiting(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_masks, "GRACE_S", 60)
    masks = Masks(gated)
    slow = [Asker(masks, 'start: "slow"') for _ in range(4)]
    for each in slow:
        each.ask(expected=True)
    for each in slow:
        masks.forget(each.state)
    await asyncio.wait_for(masks.wait_for_expected(), 30)
    gated.gate.set()
    later = Asker(masks, 'start: "slow"')
    assert await soon(later.ask()) is None
    assert not any(each.told.done() for each in slow)
    assert masks.num_made == 1


async def test_a_text_that_has_grown_is_asked_for_anew_while_it_is_read(gated: Gated) -> None:
    """As that of a sequence that moves here: it is read while blocks are read, then with its newest tokens."""
    masks = Masks(gated)
    text = Asker(masks, 'start: "slow" /[0-9]*/')
    before = text.ask()
    async with asyncio.timeout(60):
        while text.state.matcher is None:
            await asyncio.sleep(0.001)
    masks.forget(text.state)
    told = text.ask("slow12")
    gated.gate.set()
    assert await soon(told) is None
    assert (text.state.num_read, masks.num_made, before.done()) == (6, 1, False)


class CountedSlices(list[int]):
    """Counts the tokens that are copied out of it."""

    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_copied += len(found) if isinstance(index, slice) else 0
        return found


async def test_for_a_mask_only_the_new_tokens_of_a_text_are_copied() -> None:
    """A text is asked for with each of its tokens."""
    masks, state, text = Masks(Grammars(LLTokenizer("byte"))), GrammarState(), CountedSlices(b"prompt")
    for _ in range(200):
        text.append(ord("a"))
        told: asyncio.Future[GaveUp | None] = asyncio.get_running_loop().create_future()
        masks.ask("start: /[a-z]*/", state, text, len(b"prompt"), told.set_result)
        assert await soon(told) is None
    assert state.num_read == text.num_copied == 200


class Panicking(Grammars):
    """Reading panics, as the library may: in a text, or wherever a matcher is copied from one that is broken."""

    def __init__(self, text: str) -> None:
        super().__init__(LLTokenizer("byte"))
        self._text = text
        self._broken: LLMatcher | None = None
        self.num_panics = 0

    def read(self, *arguments: Any) -> bytes | Unread | GaveUp:
        compiled, state, token_ids, prompt_len, _ = arguments
        text = bytes(token_ids[prompt_len:]).decode()
        if text == self._text or (compiled is not None and compiled is self._broken and state.matcher is None):
            self._broken = self._broken or compiled
            self.num_panics += 1
            raise BaseException("PanicException")
        return super().read(*arguments)


async def test_a_panic_of_the_library_ends_the_text_that_causes_it_and_no_other_of_its_grammar() -> None:
    grammars = Panicking("no")
    masks = Masks(grammars)
    asked = [Asker(masks, "start: /[a-z]*/") for _ in range(5)]
    for each, text in zip(asked, ("a", "no", "b", "c", "d"), strict=True):
        each.ask(text)
    told = [await soon(each.told) for each in asked]
    assert [gave_up is None for gave_up in told] == [True, False, True, True, True]
    assert (told[1].bound, told[1].cause) == ("none", Cause.INVALID)
    assert grammars.num_panics >= 2, "once with a matcher that others share, and once alone"
    assert await soon(Asker(masks, "start: /[a-z]*/").ask("e")) is None, "and it is compiled anew for others"


async def test_a_text_that_has_been_read_already_goes_on_though_what_it_shares_is_broken() -> None:
    """Two texts panic, the second one after nobody keeps the matcher that both were copied from."""
    grammars = Panicking("no")
    masks = Masks(grammars)
    texts = [Asker(masks, "start: /[a-z]*/") for _ in range(2)]
    for each in texts:
        assert await soon(each.ask("n")) is None
    for each in texts:
        gave_up = await soon(each.ask("no"))
        assert (gave_up.bound, gave_up.cause) == ("none", Cause.INVALID)
    assert await soon(Asker(masks, "start: /[a-z]*/").ask("e")) is None


async def test_a_panic_while_a_grammar_is_compiled_ends_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(LLTokenizer("byte"))
    masks = Masks(grammars)
    compile_grammar = grammars.compile

    def panic_once(grammar: str) -> LLMatcher:
        monkeypatch.setattr(grammars, "compile", compile_grammar)
        raise BaseException("PanicException")

    monkeypatch.setattr(grammars, "compile", panic_once)
    first, second = (Asker(masks, "start: /[a-z]*/") for _ in range(2))
    told = [await soon(told) for told in [first.ask("a"), second.ask("b")]]
    assert [gave_up is None for gave_up in told] == [False, True]
    assert told[0].cause is Cause.INVALID


async def test_that_no_thread_can_be_started_is_not_the_grammar_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks(Grammars(LLTokenizer("byte")))

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(masks._threads, "submit", refuse)
    gave_up = await soon(Asker(masks, "start: /[a-z]*/").ask("a"))
    assert gave_up.cause is Cause.INTERNAL


async def test_too_many_items_end_a_text_with_the_bound_and_no_other(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_limits, "MAX_ITEMS", 20)
    masks = Masks(gated)
    gated.gate.set()
    ambiguous, other = Asker(masks, AMBIGUOUS), Asker(masks, 'start: "quick"')
    gave_up = await soon(ambiguous.ask("x" * 10))
    assert gave_up is not None
    assert gave_up.bound == "items"
    assert "items" in gave_up.why
    assert await soon(other.ask()) is None
    assert masks.given_up == {"items": 1}


async def test_many_tokens_are_read_in_several_turns_to_the_same_mask(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on with a text elsewhere."""
    gated.gate.set()
    masks = Masks(gated)
    stepwise, at_once = (Asker(masks, "start: /([a-f]{4}-){12}[0-9]{9}/") for _ in range(2))
    text = "abcd-" * 9 + "ab"
    for end in range(len(text) + 1):
        assert await soon(stepwise.ask(text[:end])) is None
    monkeypatch.setattr(engine_masks, "_TURN_S", -1)
    assert await soon(at_once.ask(text)) is None
    assert at_once.state.allowed == stepwise.state.allowed
    assert at_once.state.num_read == len(text)


# --- what holds the interpreter --------------------------------------------------------------------------------------

_Result = TypeVar("_Result")
MANY_PROPERTIES = LLMatcher.grammar_from_json_schema(
    json.dumps({"type": "object", "properties": {f"p{i}": {"type": "number"} for i in range(300)}})
)


class OtherThread(threading.Thread):
    """Counts how often it gets the interpreter, and lets go of it each time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_turns = 0
        self.ends = False

    def run(self) -> None:
        while not self.ends:
            self.num_turns += 1
            time.sleep(1e-5)

    def turns_during(self, call: Callable[[], _Result]) -> tuple[int, _Result]:
        before = self.num_turns
        result = call()
        return self.num_turns - before, result


@pytest.fixture
def other() -> Iterator[OtherThread]:
    """Nothing makes a thread let go of the interpreter: who has it meanwhile was let in by the call itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    thread = OtherThread()
    thread.start()
    try:
        while thread.num_turns < 10:
            time.sleep(0.001)
        yield thread
    finally:
        thread.ends = True
        thread.join()
        sys.setswitchinterval(interval)


class WatchedMatcher:
    """A matcher that notes the turns which another thread gets during its calls."""

    def __init__(self, matcher: LLMatcher, other: OtherThread, turns: Counter[str]) -> None:
        self._matcher, self._other, self._turns = matcher, other, turns
        self.consume_token, self.is_error, self.get_error = matcher.consume_token, matcher.is_error, matcher.get_error

    def deep_copy(self) -> WatchedMatcher:
        return WatchedMatcher(self._matcher.deep_copy(), self._other, self._turns)

    def compute_bitmask(self) -> bytes:
        turns, bits = self._other.turns_during(self._matcher.compute_bitmask)
        self._turns["mask"] += turns
        return bits


class WatchedGrammars(Grammars):
    """Compiles to watched matchers."""

    def __init__(self, other: OtherThread) -> None:
        super().__init__(LLTokenizer("byte"))
        self.turns: Counter[str] = Counter()
        self._other = other

    def compile(self, grammar: str) -> LLMatcher:
        compile_it = super().compile
        turns, matcher = self._other.turns_during(lambda: compile_it(grammar))
        self.turns["compile"] += turns
        return WatchedMatcher(matcher, self._other, self.turns)  # type: ignore[return-value]


def test_a_call_that_holds_the_interpreter_shows(other: OtherThread) -> None:
    assert other.turns_during(lambda: sum(range(10**6)))[0] == 0


@pytest.mark.parametrize(
    ("grammar", "text"), [(AMBIGUOUS, "x" * 80), (MANY_PROPERTIES, '{"p1')], ids=["ambiguous", "many properties"]
)
async def test_others_have_the_interpreter_while_a_hostile_grammar_is_followed(
    other: OtherThread, grammar: str, text: str
) -> None:
    """Not while it reads a token, which is bounded by the items."""
    grammars = WatchedGrammars(other)
    for _ in range(100):  # on busy cores the other thread may wake too late for a call
        asker = Asker(Masks(grammars), grammar)
        for end in range(len(text) + 1):
            assert await soon(asker.ask(text[:end])) is None
        if grammars.turns["compile"] and grammars.turns["mask"]:
            break
    print(grammars.turns)
    assert grammars.turns["compile"] > 0
    assert grammars.turns["mask"] > 0
