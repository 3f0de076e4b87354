"""A chunk whose surroundings were encoded once is, byte for byte, the one that is encoded whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_fixtures import logprobs_of, tokenizer

from common.contract.sampling import SamplingParams
from gateway.answer.chunk_encoder import ChunkEncoder, encode
from gateway.answer.responses import ChatFormat, CompletionFormat, Heading
from gateway.serving.generation import Generation
from gateway.text.choice_text import Piece, TokenReport

TEXTS = [
    "a",
    " the",
    '"',
    "\\",
    "\n\n",
    "\u2028",
    "\u2029日\x85",
    "é",
    "日本",
    "😀",
    "\x00",
    "</script>",
    "0" * 32,
    '"text":"',
]


def piece(text: str, choice: int = 0, **other: Any) -> Piece:
    fields: dict[str, Any] = {"choice": choice, "text": text, "num_tokens": 1, "reports": (), "finish_reason": None}
    return Piece(**(fields | other))


def report() -> TokenReport:
    generation = Generation(
        token_ids=(1,), num_choices=1, sampling=SamplingParams(max_tokens=1, logprobs=1), budget_s=1.0
    )
    logprobs = logprobs_of(generation, 5)
    assert logprobs is not None
    return TokenReport(token_id=5, logprobs=logprobs, text_offset=0)


@pytest.mark.parametrize("usage_follows", [False, True])
@pytest.mark.parametrize("answer_format", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_chunks_are_those_of_the_format(answer_format: type, with_logprobs: bool, usage_follows: bool) -> None:
    answer = answer_format(Heading.draw("id", 1, 'a "model" 日本'), tokenizer(), with_logprobs)
    chunks = ChunkEncoder(answer, usage_follows=usage_follows)
    pieces = [piece(text, choice) for text in TEXTS for choice in (0, 3)]
    pieces += [piece("last", finish_reason="stop"), piece("", finish_reason="length"), piece("x", reports=(report(),))]
    pieces += [piece(""), piece("y")]
    for number, each in enumerate(pieces):
        whole = json.loads(json.dumps(answer.chunk(each, number < 2), default=list))
        whole |= {"usage": None} if usage_follows else {}
        encoded = chunks.encode(each, number < 2)
        assert encoded == encode(whole), each
        assert json.loads(encoded) == whole
        assert len(encoded.decode().splitlines()) == 1, "some clients cut lines so"
