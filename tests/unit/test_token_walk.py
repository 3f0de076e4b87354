"""Grammars that only tokens of several characters make too much."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gateway.intake.schemas import CompletionRequest, parse
from gateway.intake.structured_output import grammar_of
from gateway.text.tokenizer import ModelTokenizer
from gateway.web.http_errors import ApiError

AMBIGUOUS = "start: e\ne: e e e | e e | /[ -~]/ |"
"""129 bytes of a request that held up all streams of a worker for eight seconds."""


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    """Of bytes, words, and rules to draw."""
    words = ["word"[: 1 + i % 4] + "abcdefghij"[i // 4 % 10] * (1 + i // 40) for i in range(200)]
    words += ["-" * length for length in range(2, 64)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {each: index for index, each in enumerate(dict.fromkeys([*alphabet, *words]))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    return ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


async def test_an_ambiguous_grammar_is_refused_before_any_worker_has_it(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(ApiError) as caught:
        await grammar_of(parse(CompletionRequest, {"prompt": "a", "guided_grammar": AMBIGUOUS}), tokenizer)
    assert (caught.value.status, caught.value.param) == (400, "guided_grammar")
    assert "items" in caught.value.message


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_grammar": 'start: e\ne: e "+" e | e "*" e | "(" e ")" | NUM\nNUM: /[0-9]+/'},
        {"guided_grammar": "start: <[7]> /[a-z]+/"},
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "[a-z]{3}-[0-9]+"},
        {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}},
    ],
    ids=["sums", "tokens", "choice", "expression", "properties"],
)
async def test_what_can_be_followed_is_taken(tokenizer: ModelTokenizer, asked: dict[str, object]) -> None:
    assert await grammar_of(parse(CompletionRequest, {"prompt": "a"} | asked), tokenizer)
