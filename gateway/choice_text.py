"""One choice on its way to the client: tokens become text, and a stop string ends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.contract.messages import FinishReason, TokenLogprobs
from gateway.detokenizer import Detokenizer, TokenDecoder
from gateway.generation import Delta
from gateway.stop_strings import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """A generated token with its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int
    """Characters of the choice's text before the token's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What came of one delta. The text may lag behind the tokens: the end of a text can need holding back."""

    choice: int
    """Index within the request."""
    text: str
    num_tokens: int
    reports: tuple[TokenReport, ...]
    """One for each token where log probabilities were asked for."""
    finish_reason: FinishReason | None
    """Set on the choice's last piece."""


class ChoiceText:
    """The text of one choice. Tokens count, and are reported, up to the one that completes a stop string."""

    def __init__(self, choice: int, tokenizer: TokenDecoder, stops: tuple[str, ...], min_tokens: int) -> None:
        """No stop string is looked for in the text of the first `min_tokens` tokens."""
        self.choice: Final = choice
        self.ended = False
        """The last piece is out; further deltas are to be ignored."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_chars = 0
        """Characters of all settled text, held back or not."""
        self._num_passed = 0
        """Characters passed on."""

    def push(self, delta: Delta) -> Piece:
        """Take the choice's next delta."""
        assert not self.ended
        texts: list[str] = []
        offsets: list[int] = []
        stopped = False
        for token_id in delta.token_ids:
            offsets.append(self._num_chars)
            self._num_tokens += 1
            stopped = self._pass_on(self._detokenizer.push(token_id), texts)
            if stopped:
                break
        if delta.finish_reason is not None and not stopped:
            stopped = self._pass_on(self._detokenizer.flush(), texts)
            if not stopped:
                texts.append(self._stops.flush())
        text = "".join(texts)
        self._num_passed += len(text)
        finish_reason: FinishReason | None = "stop" if stopped else delta.finish_reason
        self.ended = finish_reason is not None
        if self.ended:
            offsets = [min(offset, self._num_passed) for offset in offsets]
        return Piece(
            choice=self.choice,
            text=text,
            num_tokens=len(offsets),
            reports=tuple(
                TokenReport(token_id=token_id, logprobs=logprobs, text_offset=offset)
                for token_id, logprobs, offset in zip(delta.token_ids, delta.logprobs or (), offsets, strict=False)
            ),
            finish_reason=finish_reason,
        )

    def _pass_on(self, text: str, texts: list[str]) -> bool:
        """Add what may go out to `texts`; whether a stop string ended it."""
        self._num_chars += len(text)
        if self._num_tokens <= self._min_tokens:
            texts.append(text)
            return False
        passed, stopped = self._stops.push(text)
        texts.append(passed)
        return stopped
