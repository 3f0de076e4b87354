"""The prompt's part of an answer with log probabilities: its text, if asked for, and a report for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from common.contract.messages.worker import TokenLogprobs
from gateway.serving.generation import PromptDelta
from gateway.text.choice_text import Piece, TokenReport
from gateway.text.detokenizer import Detokenizer, SpecialDecoder

_PIECE_TOKENS: Final = 256
"""Most prompt tokens in one piece; other tasks can run between two pieces."""


class PromptText:
    """The prompt of some choices, all of which begin with it."""

    def __init__(self, choices: Sequence[int], token_ids: Sequence[int], tokenizer: SpecialDecoder, echo: str) -> None:
        """`echo` is the prompt's text, or empty if the answer does not repeat it."""
        self._choices = choices
        self._token_ids = token_ids
        self._echo = echo
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._num_told = 0
        """Leading tokens that were reported."""
        self._num_chars = 0
        """Characters of the reported tokens' text."""
        self._num_passed = 0
        """Characters that were returned."""

    def pieces(self, delta: PromptDelta | None) -> Iterator[Piece]:
        """Take more log probabilities, or None for their end; returns pieces for each choice. The first call also
        reports the first token, which has none."""
        if self._num_told == 0:
            yield from self._tell([None], [0])
        if delta is not None:
            for start in range(0, len(delta.scores), _PIECE_TOKENS):
                part = delta.scores.part(start, start + _PIECE_TOKENS)
                yield from self._tell(part.each(), part.ranks)

    def _tell(self, logprobs: Sequence[TokenLogprobs | None], ranks: Sequence[int]) -> Iterator[Piece]:
        end = self._num_told + len(logprobs)
        reports = []
        for token_id, each, rank in zip(self._token_ids[self._num_told : end], logprobs, ranks, strict=True):
            offset = min(self._num_chars, len(self._echo))
            reports.append(TokenReport(token_id=token_id, logprobs=each, text_offset=offset, rank=rank))
            if self._echo:
                self._num_chars += self._num_chars_of(token_id)
        self._num_told = end
        num_passed = self._num_chars if end < len(self._token_ids) else len(self._echo)
        text, told = self._echo[self._num_passed : num_passed], tuple(reports)
        self._num_passed = num_passed
        for choice in self._choices:
            yield Piece(choice=choice, text=text, num_tokens=0, reports=(), finish_reason=None, prompt_reports=told)

    def _num_chars_of(self, token_id: int) -> int:
        """How many characters of the echo are this token's. A special one has some only where the echo spells it out:
        not if the tokenizer has added it, nor if it is left out."""
        if self._tokenizer.has_text(token_id):
            return len(self._detokenizer.push(token_id))
        spelt = self._tokenizer.decode_all([token_id])
        return len(spelt) if self._echo.startswith(spelt, self._num_chars) else 0
