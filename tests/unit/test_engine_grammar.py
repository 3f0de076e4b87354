"""What a grammar allows next, for a real tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.engine.grammar import Grammars, GrammarState
from common.engine.model_config import ModelConfig
from gateway.structured_output import compile_grammar


def grammar(kind: str, text: str) -> str:
    made, error = compile_grammar(kind, text)
    assert not error
    return made


class Reader:
    """A checkpoint's tokenizer, and what its grammars allow."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.from_folder(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = set(config.eos_token_ids)
        self.vocab_size = config.vocab_size
        made = Grammars.load(folder, config.vocab_size, config.eos_token_ids)
        assert made is not None
        self.grammars = made

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def allowed(self, text: str, state: GrammarState, output: list[int]) -> set[int]:
        bits = np.unpackbits(np.frombuffer(self.grammars.allowed(text, state, output), np.uint8), bitorder="little")
        assert len(bits) >= self.vocab_size
        return set(np.flatnonzero(bits).tolist())


@pytest.fixture(scope="module")
def reader(checkpoint: Callable[[str], Path]) -> Reader:
    return Reader(checkpoint("llama"))


def test_what_may_follow_and_where_it_ends(reader: Reader) -> None:
    text, state = grammar("regex", "ab?[0-9]"), GrammarState()
    (a,), (b,), (five,) = (reader.tokens(each) for each in "ab5")
    first = reader.allowed(text, state, [])
    assert a in first
    assert not first & {b, five, *reader.end}
    assert {b, five} <= reader.allowed(text, state, [a])
    last = reader.allowed(text, state, [a, b])
    assert five in last
    assert not last & {a, b, *reader.end}
    assert reader.allowed(text, state, [a, b, five]) == reader.end


def test_whoever_goes_on_reads_the_tokens_again(reader: Reader) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    text, kept = grammar("json_schema", schema), GrammarState()
    output = reader.tokens('{"a": 12')
    for end in range(len(output) + 1):
        here = reader.allowed(text, kept, output[:end])
        assert here == reader.allowed(text, GrammarState(), output[:end]), "on another worker"
        assert end == len(output) or output[end] in here


def test_states_of_one_grammar_do_not_meet(reader: Reader) -> None:
    text = grammar("choice", '["ab", "cd"]')
    (a,), (c,) = reader.tokens("a"), reader.tokens("c")
    one, other = GrammarState(), GrammarState()
    before = reader.allowed(text, one, [])
    assert reader.allowed(text, one, [a]) != reader.allowed(text, other, [c])
    assert reader.allowed(text, GrammarState(), []) == before


def test_only_so_many_are_kept(reader: Reader) -> None:
    states = {each: GrammarState() for each in range(50)}
    for each, state in states.items():
        assert reader.tokens("x")[0] in reader.allowed(grammar("regex", f"x{{{each + 1}}}y"), state, [])
    assert len(reader.grammars._compiled) == 32
    (x,), (y,) = reader.tokens("x"), reader.tokens("y")
    assert y in reader.allowed(grammar("regex", "x{1}y"), states[0], [x]), "who uses one keeps it"


@pytest.mark.parametrize("text", ["start: foo", "start: /[0-9]{3}/"], ids=["broken", "left"])
def test_nothing_follows_what_is_wrong_and_no_text_is_logged(
    reader: Reader, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    output = reader.tokens("secret")
    with caplog.at_level(logging.WARNING):
        assert reader.allowed(text, GrammarState(), output) == set()
    (record,) = caplog.records
    assert "gave up after" in record.getMessage()
    assert not any(secret in record.getMessage() for secret in ("secret", "foo", "0-9"))


@pytest.mark.parametrize("content", [None, "{}", "not JSON"], ids=["absent", "empty", "rubbish"])
def test_a_model_without_a_tokenizer_has_none(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert Grammars.load(tmp_path, 100, [2]) is None
    assert "no structured output" in caplog.text
