"""The text of one choice: turns its tokens into text, and ends it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from common.contract.messages.fields import FinishReason
from common.contract.messages.worker import TokenLogprobs
from gateway.serving.generation import Delta
from gateway.text.call_parser import CallDelta
from gateway.text.detokenizer import Detokenizer, TokenDecoder
from gateway.text.stop_strings import StopStrings, StopTables

AnswerEnd: TypeAlias = FinishReason | Literal["tool_calls"]
"""Why a choice ended, as reported to the client."""
StopReason: TypeAlias = int | str | None
"""The token or the stop string that ended a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """A token with its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None only for the first token of a prompt, which has no predecessor."""
    text_offset: int
    """Characters of the choice's text before this token's text."""
    rank: int = 0
    """For a prompt token: how many tokens were at least as likely, itself included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTally:
    """Counts of function calls in one choice."""

    complete: int
    cut: int
    """Calls that have begun, but whose arguments are incomplete."""
    malformed: int
    """Apparent calls; all of each, or the rest of it, is in the text."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """The result of one delta. The text may lag behind the tokens, because its end may have to be held back. Nobody
    changes one; it is not frozen since there is one for each token, and that would double the time to make it."""

    choice: int
    """Index within the request."""
    text: str
    num_tokens: int
    reports: tuple[TokenReport, ...]
    """One for each token, if log probabilities were asked for."""
    finish_reason: AnswerEnd | None
    """Set on the choice's last piece."""
    stop_reason: StopReason = None
    """Set on the choice's last piece if a stop string ended it, or a token other than the tokenizer's end of
    sequence."""
    reasoning: str = ""
    """Text of the model's reasoning; `text` is then empty."""
    call: CallDelta | None = None
    """Part of a call; `text` is then empty."""
    tally: CallTally | None = None
    """Set on the choice's last piece if calls were looked for."""
    more: bool = False
    """Whether the next piece is available already, so that its chunk may be sent together with this one's."""
    joined: bool = False
    """Whether its tokens have come together with those of the choice's piece before it."""
    token_ids: tuple[int, ...] = ()
    """Ids of the tokens that `num_tokens` counts, if they were asked for."""
    num_reasoning_tokens: int = 0
    """How many more tokens of the choice are known to be reasoning."""
    prompt_reports: tuple[TokenReport, ...] = ()
    """Reports of further prompt tokens, if their log probabilities were asked for. They precede all generated
    tokens."""

    @property
    def plain(self) -> bool:
        """Whether the piece has text and nothing else to report."""
        told = self.token_ids or self.reports or self.prompt_reports or self.reasoning or self.call is not None
        return bool(self.text) and self.finish_reason is None and not told

    @property
    def told(self) -> bool:
        """Whether the piece has text, or anything else to report besides an end."""
        worded = self.text or self.reasoning or self.call is not None
        return bool(worded or self.token_ids or self.reports or self.prompt_reports)


class ChoiceText:
    """The text of one choice. Tokens are counted and reported up to the one that completes a stop string."""

    def __init__(
        self,
        choice: int,
        tokenizer: TokenDecoder,
        stops: StopTables,
        min_tokens: int,
        echo: str = "",
        num_before: int = 0,
        *,
        continues: Sequence[int] = (),
        with_token_ids: bool = False,
        eos_token_id: int | None = None,
    ) -> None:
        """The text begins with `echo`. It continues the text of the tokens `continues`, if there are any. Stop strings
        are not looked for in `echo`, and one that is complete within the text of the first `min_tokens` tokens does not
        count; the decoder's `stop_specials` are no text among these tokens. The token by which a worker ends the choice
        is no text; `eos_token_id` is the one that is no stop reason. `num_before` characters of the choice precede
        `echo` and are emitted elsewhere."""
        self.choice: Final = choice
        self.ended = False
        """Whether the last piece has been returned; further deltas are to be ignored."""
        self.offsets: Sequence[int] = ()
        """For each token of the last piece: characters of the text before it, `echo` not counted."""
        self._detokenizer = Detokenizer(tokenizer, continues)
        self._stop_specials = tokenizer.stop_specials
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._echo = echo
        self._eos_token_id = eos_token_id
        self._with_token_ids = with_token_ids
        self._num_tokens = 0
        self._num_chars = num_before
        """Characters of all settled text, including text held back."""
        self._num_passed = num_before
        """Characters of all text that was returned."""

    def pieces(self, delta: Delta) -> Sequence[Piece]:
        """Take the choice's next delta, and return the one piece that results."""
        return (self.push(delta),)

    def push(self, delta: Delta) -> Piece:
        """Take the choice's next delta, and return its piece."""
        assert not self.ended
        texts, self._echo = [self._echo], ""
        offsets: list[int] = []
        stop: StopReason = None
        for left, token_id in enumerate(delta.token_ids, 1 - len(delta.token_ids)):
            offsets.append(self._num_chars)
            self._num_tokens += 1
            if delta.finish_reason == "stop" and not left:
                break
            if self._num_tokens <= self._min_tokens and token_id in self._stop_specials:
                continue
            stop = self._pass_on(self._detokenizer.push(token_id), texts)
            if stop is not None:
                break
        if delta.finish_reason is not None and stop is None:
            stop = self._end(delta, texts)
        text = "".join(texts)
        self._num_passed += len(text)
        finish_reason: FinishReason | None = delta.finish_reason if stop is None else "stop"
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
            stop_reason=stop,
            more=delta.more and not self.ended,
            joined=delta.joined,
            token_ids=delta.token_ids[: len(offsets)] if self._with_token_ids else (),
        )

    def _end(self, delta: Delta, texts: list[str]) -> StopReason:
        """Append the rest of the text to `texts`. Returns what ended the choice."""
        stop = self._pass_on(self._detokenizer.flush(), texts)
        if stop is not None:
            return stop
        texts.append(self._stops.flush())
        last = delta.token_ids[-1]
        return last if delta.finish_reason == "stop" and last != self._eos_token_id else None

    def _pass_on(self, text: str, texts: list[str]) -> str | None:
        """Append the text that may be sent to `texts`. Returns the stop string that ended the choice, if one did."""
        self._num_chars += len(text)
        passed, stop = self._stops.push(text, may_end=self._num_tokens > self._min_tokens)
        texts.append(passed)
        return stop


def _reports(delta: Delta, offsets: Sequence[int]) -> tuple[TokenReport, ...]:
    return tuple(
        TokenReport(token_id=token_id, logprobs=logprobs, text_offset=offset)
        for token_id, logprobs, offset in zip(delta.token_ids, delta.logprobs or (), offsets, strict=False)
    )
