"""Parts of an answer: splits the text of a choice into reasoning, text and function calls.

This stage stands between `choice_text`, which turns tokens into text, and `responses`, which formats it. Only answers
that can have such parts pass through it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from gateway.serving.generation import Delta
from gateway.text.call_parser import CallParser, Event
from gateway.text.choice_text import AnswerEnd, CallTally, ChoiceText, Piece
from gateway.text.detokenizer import TokenDecoder
from gateway.text.reasoning import Part, ReasoningSplitter

_Field: TypeAlias = dict[str, Any]
"""Some fields of a piece, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """The parts to look for in the choices of one request."""

    decoder: TokenDecoder
    """Decoder that also gives the text of the special tokens by which parts are recognised, or that are stop
    strings."""
    calls: type[CallParser] | None
    names: frozenset[str]
    """Names of the functions that may be called."""
    most_calls: int | None
    reasons: bool
    opened: bool
    """Whether the prompt has opened the reasoning."""
    include_reasoning: bool
    formatted: bool = False
    """Whether the answer follows a grammar, which counts its white space."""
    within: bool = False
    """Whether the prompt has part of the reasoning."""


class AnswerParts:
    """Splits the pieces of one `ChoiceText` and offers its interface; each resulting piece has at most one part."""

    def __init__(self, text: ChoiceText, plan: AnswerPlan) -> None:
        self.ended = False
        """Whether the last piece has been returned; further deltas are to be ignored."""
        self._text: Final = text
        self._include_reasoning = plan.include_reasoning
        self._splitter = ReasoningSplitter(plan.opened, plan.formatted, plan.within) if plan.reasons else None
        self._undecided: list[int] | None = [] if plan.reasons else None
        """Text offsets of tokens that may yet turn out to be reasoning; None once no further token can be."""
        self._calls = plan.calls(plan.names, plan.most_calls) if plan.calls is not None else None
        self._by_token = plan.most_calls is not None

    def pieces(self, delta: Delta) -> Sequence[Piece]:
        """Take the choice's next delta, and return its pieces."""
        if not self._by_token or len(delta.token_ids) <= 1:
            return self._pieces(delta)
        pieces: list[Piece] = []
        for each in _token_by_token(delta):  # the choice may end with any of them
            pieces += self._pieces(each)
            if self.ended:
                break
        return pieces

    def _pieces(self, delta: Delta) -> Sequence[Piece]:
        whole = self._text.push(delta)
        fields = self._fields(
            [(Part.ANSWER, whole.text)] if self._splitter is None else self._splitter.push(whole.text)
        )
        if whole.finish_reason is not None:
            if self._splitter is not None:
                fields += self._fields(self._splitter.finish())
            if self._calls is not None:
                fields += map(_of_event, self._calls.finish())
        num_reasoning_tokens = self._reasoning_tokens()
        finish_reason = self._end(whole.finish_reason)
        self.ended = finish_reason is not None
        blank = replace(whole, text="", num_tokens=0, reports=(), finish_reason=None, stop_reason=None, token_ids=())
        pieces = [replace(blank, **field) for field in fields] or [blank]
        pieces[0] = replace(
            pieces[0],
            num_tokens=whole.num_tokens,
            reports=whole.reports,
            token_ids=whole.token_ids,
            num_reasoning_tokens=num_reasoning_tokens,
        )
        if self.ended:
            pieces[-1] = replace(
                pieces[-1],
                finish_reason=finish_reason,
                stop_reason=whole.stop_reason,
                tally=self._tally(),
                more=False,
            )
        return pieces

    def _fields(self, parts: Sequence[tuple[Part, str]]) -> list[_Field]:
        fields: list[_Field] = []
        for part, text in parts:
            if part is Part.REASONING:
                fields += [{"reasoning": text}] if self._include_reasoning else []
            elif self._calls is not None:
                fields += map(_of_event, self._calls.push(text))
            elif text:
                fields.append({"text": text})
        return fields

    def _reasoning_tokens(self) -> int:
        """How many more tokens are known to be reasoning: those that begin before the end of the closing tag."""
        if self._splitter is None or self._undecided is None:
            return 0
        starts = [*self._undecided, *self._text.offsets]
        num_tokens = bisect_left(starts, self._splitter.num_reasoning_chars)
        self._undecided = None if self._splitter.reasoning_over else starts[num_tokens:]
        return num_tokens

    def _end(self, finish_reason: AnswerEnd | None) -> AnswerEnd | None:
        """The finish reason. It is `tool_calls` after a natural end, or at the most calls, if there is a call and all
        are complete."""
        calls = self._calls
        if calls is None or not calls.num_complete or calls.num_complete < calls.num_begun:
            return finish_reason
        return "tool_calls" if calls.full or finish_reason == "stop" else finish_reason

    def _tally(self) -> CallTally | None:
        calls = self._calls
        if calls is None:
            return None
        return CallTally(
            complete=calls.num_complete, cut=calls.num_begun - calls.num_complete, malformed=calls.num_malformed
        )


def _token_by_token(delta: Delta) -> Iterator[Delta]:
    last = len(delta.token_ids) - 1
    for index, token_id in enumerate(delta.token_ids):
        yield Delta(
            choice=delta.choice,
            token_ids=(token_id,),
            logprobs=None if delta.logprobs is None else delta.logprobs[index : index + 1],
            finish_reason=delta.finish_reason if index == last else None,
            more=delta.more or index < last,
            joined=delta.joined or index > 0,
        )


def _of_event(event: Event) -> _Field:
    return {"text": event} if isinstance(event, str) else {"call": event}
