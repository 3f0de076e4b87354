"""One choice on its way to the client: tokens become text, and a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from common.contract.messages import FinishReason, TokenLogprobs
from gateway.serving.generation import Delta
from gateway.text.call_parser import CallDelta
from gateway.text.detokenizer import Detokenizer, TokenDecoder
from gateway.text.stop_strings import StopStrings

AnswerEnd: TypeAlias = FinishReason | Literal["tool_calls"]
"""Why a choice ended, as the client is told it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """A token with its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None of a prompt's first token alone, which comes after nothing."""
    text_offset: int
    """Characters of the choice's text before the token's."""
    rank: int = 0
    """Of a prompt's token: how many were at least as likely, itself included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTally:
    """Calls of functions in one choice."""

    complete: int
    cut: int
    """Begun, but its arguments are not whole."""
    malformed: int
    """What looked like a call; it, or the rest of it, is in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What came of one delta. The text may lag behind the tokens: the end of a text can need holding back."""

    choice: int
    """Index within the request."""
    text: str
    num_tokens: int
    reports: tuple[TokenReport, ...]
    """One for each token where log probabilities were asked for."""
    finish_reason: AnswerEnd | None
    """Set on the choice's last piece."""
    reasoning: str = ""
    """What the model thinks before it answers, instead of text."""
    call: CallDelta | None = None
    """Part of a call, instead of text."""
    tally: CallTally | None = None
    """On the choice's last piece, where calls were looked for."""
    more: bool = False
    """Whether the next one is there already, so that its chunk may travel with this one's."""
    token_ids: tuple[int, ...] = ()
    """Those that `num_tokens` counts, where they were asked for."""
    num_reasoning_tokens: int = 0
    """How many more tokens of the choice are known to be reasoning."""
    prompt_reports: tuple[TokenReport, ...] = ()
    """Of more of the prompt's tokens, where their log probabilities were asked for: before all that is generated."""

    @property
    def plain(self) -> bool:
        """Whether there is text, and nothing to be told besides."""
        told = self.token_ids or self.reports or self.prompt_reports or self.reasoning or self.call is not None
        return bool(self.text) and self.finish_reason is None and not told


class ChoiceText:
    """The text of one choice. Tokens count, and are reported, up to the one that completes a stop string."""

    def __init__(
        self,
        choice: int,
        tokenizer: TokenDecoder,
        stops: tuple[str, ...],
        min_tokens: int,
        echo: str = "",
        ends_unspelt: TokenDecoder | None = None,
        num_before: int = 0,
        *,
        with_token_ids: bool = False,
    ) -> None:
        """The text begins with `echo`; no stop string is looked for there, or in that of the first `min_tokens`. The
        token that ends the choice is no text if it has none for `ends_unspelt`. Others have passed on `num_before`
        characters before all that."""
        self.choice: Final = choice
        self.ended = False
        """The last piece is out; further deltas are to be ignored."""
        self.offsets: Sequence[int] = ()
        """Of each token of the last piece: characters of the text before it, but for `echo`."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._echo = echo
        self._ends_unspelt = ends_unspelt
        self._with_token_ids = with_token_ids
        self._num_tokens = 0
        self._num_chars = num_before
        """Characters of all settled text, held back or not."""
        self._num_passed = num_before
        """Characters passed on."""

    def pieces(self, delta: Delta) -> Sequence[Piece]:
        """Take the choice's next delta; the one piece that comes of it."""
        return (self.push(delta),)

    def push(self, delta: Delta) -> Piece:
        """Take the choice's next delta."""
        assert not self.ended
        texts, self._echo = [self._echo], ""
        offsets: list[int] = []
        stopped = False
        for left, token_id in enumerate(delta.token_ids, 1 - len(delta.token_ids)):
            offsets.append(self._num_chars)
            self._num_tokens += 1
            if delta.finish_reason == "stop" and not left and self._is_unspelt(token_id):
                break
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
        self.offsets = offsets
        if self.ended:
            offsets = [min(offset, self._num_passed) for offset in offsets]
        return Piece(
            choice=self.choice,
            text=text,
            num_tokens=len(offsets),
            reports=_reports(delta, offsets) if delta.logprobs else (),
            finish_reason=finish_reason,
            more=delta.more and not self.ended,
            token_ids=delta.token_ids[: len(offsets)] if self._with_token_ids else (),
        )

    def _is_unspelt(self, token_id: int) -> bool:
        return self._ends_unspelt is not None and not self._ends_unspelt.has_text(token_id)

    def _pass_on(self, text: str, texts: list[str]) -> bool:
        """Add what may go out to `texts`; whether a stop string ended it."""
        self._num_chars += len(text)
        if self._num_tokens <= self._min_tokens:
            texts.append(text)
            return False
        passed, stopped = self._stops.push(text)
        texts.append(passed)
        return stopped


def _reports(delta: Delta, offsets: Sequence[int]) -> tuple[TokenReport, ...]:
    return tuple(
        TokenReport(token_id=token_id, logprobs=logprobs, text_offset=offset)
        for token_id, logprobs, offset in zip(delta.token_ids, delta.logprobs or (), offsets, strict=False)
    )
