"""What a grammar allows next, for a real tokenizer."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from common.engine import grammar as engine_grammar
from common.engine import masks as engine_masks
from common.engine.grammar import GaveUp, Grammars, GrammarState
from common.engine.masks import Masks
from common.engine.model_config import ModelConfig
from common.runtime import grammar_limits
from gateway.intake.structured_output import compile_grammar


def grammar(kind: str, text: str) -> str:
    made, error = compile_grammar(kind, text)
    assert not error
    return made


class Reader:
    """A checkpoint's tokenizer, and what its grammars allow, as a worker asks for it."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.from_folder(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = set(config.eos_token_ids)
        self.vocab_size = config.vocab_size
        made = Grammars.load(folder, config.vocab_size, config.eos_token_ids)
        assert made is not None
        self.grammars = made
        self.masks = Masks(made)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def allowed(self, text: str, state: GrammarState, output: list[int]) -> set[int]:
        """Nothing where it gave up."""
        told: asyncio.Future[GaveUp | None] = asyncio.get_running_loop().create_future()
        self.masks.ask(text, state, [1, *output], 1, told.set_result)
        if await told is not None:
            return set()
        assert state.allowed is not None
        bits = np.unpackbits(np.frombuffer(state.allowed, np.uint8), bitorder="little")
        assert len(bits) >= self.vocab_size
        return set(np.flatnonzero(bits).tolist())


@pytest.fixture
def reader(checkpoint: Callable[[str], Path]) -> Reader:
    return Reader(checkpoint("llama"))


async def test_what_may_follow_and_where_it_ends(reader: Reader) -> None:
    text, state = grammar("regex", "ab?[0-9]"), GrammarState()
    (a,), (b,), (five,) = (reader.tokens(each) for each in "ab5")
    first = await reader.allowed(text, state, [])
    assert a in first
    assert not first & {b, five, *reader.end}
    assert {b, five} <= await reader.allowed(text, state, [a])
    last = await reader.allowed(text, state, [a, b])
    assert five in last
    assert not last & {a, b, *reader.end}
    assert await reader.allowed(text, state, [a, b, five]) == reader.end


async def test_whoever_goes_on_reads_the_tokens_again(reader: Reader) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    text, kept = grammar("json_schema", schema), GrammarState()
    output = reader.tokens('{"a": 12')
    for end in range(len(output) + 1):
        here = await reader.allowed(text, kept, output[:end])
        assert here == await reader.allowed(text, GrammarState(), output[:end]), "on another worker"
        assert end == len(output) or output[end] in here


async def test_states_of_one_grammar_do_not_meet(reader: Reader) -> None:
    text = grammar("choice", '["ab", "cd"]')
    (a,), (c,) = reader.tokens("a"), reader.tokens("c")
    one, other = GrammarState(), GrammarState()
    before = await reader.allowed(text, one, [])
    assert await reader.allowed(text, one, [a]) != await reader.allowed(text, other, [c])
    assert await reader.allowed(text, GrammarState(), []) == before


async def test_only_so_many_are_kept(reader: Reader) -> None:
    states = {each: GrammarState() for each in range(50)}
    for each, state in states.items():
        assert reader.tokens("x")[0] in await reader.allowed(grammar("regex", f"x{{{each + 1}}}y"), state, [])
    assert len(reader.masks._compiled) == 32
    (x,), (y,) = reader.tokens("x"), reader.tokens("y")
    assert y in await reader.allowed(grammar("regex", "x{1}y"), states[0], [x]), "who uses one keeps it"


@pytest.mark.parametrize("text", ["start: foo", "start: /[0-9]{3}/"], ids=["broken", "left"])
async def test_nothing_follows_what_is_wrong_and_no_text_is_logged(
    reader: Reader, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    output = reader.tokens("secret")
    with caplog.at_level(logging.WARNING):
        assert await reader.allowed(text, GrammarState(), output) == set()
    (record,) = caplog.records
    assert "gave up after" in record.getMessage()
    assert not any(secret in record.getMessage() for secret in ("secret", "foo", "0-9"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled from now on, each as often as it is."""
    seen = []

    def compile_it(tokenizer: LLTokenizer, text: str, **options: Any) -> LLMatcher:
        seen.append(text)
        return LLMatcher(tokenizer, text, **options)

    monkeypatch.setattr(engine_grammar, "LLMatcher", compile_it)
    return seen


TOO_LARGE = json.dumps(
    {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(6)]}
)
"""Six choices of one of four, so 4,096 objects."""


@pytest.mark.parametrize("text", ["start: bar", LLMatcher.grammar_from_json_schema(TOO_LARGE)], ids=["broken", "large"])
async def test_what_cannot_be_compiled_is_not_compiled_again(reader: Reader, text: str, compiled: list[str]) -> None:
    """Each choice of each request asks."""
    for _ in range(20):
        assert await reader.allowed(text, GrammarState(), []) == set()
    assert compiled == [text]


WORDS = ("error", "warning", "failed", "x")
MANY_STATES = "(?s:.*)(error|warning).{5,60}failed.{5,60}"
"""A text that repeats its words has some 700 states of its own."""


async def follows(reader: Reader, text: str, output: list[int], state: GrammarState) -> None:
    """Token after token, as an engine does it."""
    for end in range(len(output)):
        assert output[end] in await reader.allowed(text, state, output[:end]), f"after {end} tokens"


def words(reader: Reader, seed: int) -> list[int]:
    draw = random.Random(seed)
    return reader.tokens("".join(draw.choice(WORDS) for _ in range(40)))[:100]


async def test_texts_that_follow_one_grammar_do_not_use_up_each_others_states(
    reader: Reader, compiled: list[str]
) -> None:
    text = grammar("regex", MANY_STATES)
    running = GrammarState()
    await follows(reader, text, words(reader, 0)[:50], running)
    for seed in range(1, 100):
        await follows(reader, text, words(reader, seed), GrammarState())
    assert 1 < compiled.count(text) < 20, "what is full is left, and only then"
    await follows(reader, text, words(reader, 0), running)


async def test_texts_that_fill_a_grammar_together_each_go_on_alone(
    reader: Reader, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds the shared states full when nobody keeps them any more."""
    monkeypatch.setattr(grammar_limits, "MAX_LEXER_STATES", 1000)
    monkeypatch.setattr(engine_masks, "_TURN_S", -1.0)
    text = grammar("regex", MANY_STATES)
    async with asyncio.timeout(60):
        await asyncio.gather(*(follows(reader, text, words(reader, seed), GrammarState()) for seed in (0, 1)))
    assert compiled == [text] * 3, "once for both, and once for each"
    assert reader.masks.given_up == {}


async def test_a_text_that_shares_what_was_full_leaves_a_newer_matcher_to_others(
    reader: Reader, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_limits, "MAX_LEXER_STATES", 1000)
    text, running = grammar("regex", MANY_STATES), [GrammarState(), GrammarState()]
    for state in running:
        await follows(reader, text, words(reader, 0)[:70], state)
    await follows(reader, text, words(reader, 1), GrammarState())
    assert compiled == [text] * 2, "the third was alone at its end"
    await follows(reader, text, words(reader, 2)[:5], GrammarState())
    kept = reader.masks._compiled[text]
    for state in running:
        assert await reader.allowed(text, state, words(reader, 0)[:71])
    assert reader.masks._compiled[text] is kept


async def test_one_text_has_only_so_many_states(
    reader: Reader, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read again once, and then it ends."""
    monkeypatch.setattr(grammar_limits, "MAX_LEXER_STATES", 100)
    text, state, output = grammar("regex", MANY_STATES + "!"), GrammarState(), words(reader, 1)
    sets = [await reader.allowed(text, state, output[:end]) for end in range(len(output))]
    assert sets[5]
    assert not sets[-1]
    assert compiled == [text, text]
    assert "gave up after" in caplog.text


@pytest.mark.parametrize("content", [None, "{}", "not JSON"], ids=["absent", "empty", "rubbish"])
def test_a_model_without_a_tokenizer_has_none(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert Grammars.load(tmp_path, 100, [2]) is None
    assert "no structured output" in caplog.text
