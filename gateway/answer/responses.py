"""Answers in the OpenAI API's two formats, whole and in chunks.

A choice's log probabilities have one entry for each token that the usage counts, the token that ends it included.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, TypeVar, cast

from common.contract.messages.worker import TokenLogprobs
from gateway.answer import answer_schemas as answers
from gateway.text.call_parser import CallDelta
from gateway.text.choice_text import AnswerEnd, Piece, StopReason, TokenReport

_Item = TypeVar("_Item")
PromptIds = Sequence[Sequence[int]] | None
"""The prompt of each choice, if token ids were asked for; else None."""


class TokenSpeller(Protocol):
    """The part of the tokenizer that this module needs."""

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        """A name for the token, and its bytes."""
        ...


def _one_by_one(items: Iterable[_Item]) -> Sequence[_Item]:
    """An array whose items are made when they are encoded."""
    return cast(Sequence[_Item], iter(items))


def usage_of(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    *,
    num_cached_tokens: int | None = None,
    num_reasoning_tokens: int | None = None,
    draft_outcomes: tuple[int, int] | None = None,
    timings: answers.AnswerTimings | None = None,
) -> answers.Usage:
    """Token counts of a request. None leaves out prompt tokens that were not computed, completion tokens up to the end
    of the reasoning, drafted tokens (those that were right, and those that were wrong), and where the request's time
    went."""
    usage: answers.Usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
    if num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
    details: answers.CompletionDetails = {}
    if num_reasoning_tokens is not None:
        details["reasoning_tokens"] = num_reasoning_tokens
    if draft_outcomes is not None:
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = draft_outcomes
    if details:
        usage["completion_tokens_details"] = details
    if timings is not None:
        usage["timings"] = timings
    return usage


@dataclass(slots=True)
class WholeChoice:
    """All pieces of one choice, collected. Texts are UTF-8, since a string for each piece takes many times the
    memory."""

    text: bytearray = field(default_factory=bytearray)
    reports: list[TokenReport] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Filled if token ids were asked for."""
    prompt_reports: list[TokenReport] = field(default_factory=list)
    finish_reason: AnswerEnd | None = None
    stop_reason: StopReason = None
    reasoning: bytearray = field(default_factory=bytearray)
    calls: list[tuple[CallDelta, bytearray]] = field(default_factory=list)
    """The first delta of each function call, and the text of its arguments."""

    def add(self, piece: Piece) -> None:
        """Append the choice's next piece."""
        self.text += piece.text.encode()
        self.reasoning += piece.reasoning.encode()
        if piece.call is not None:
            if piece.call.index == len(self.calls):
                self.calls.append((piece.call, bytearray()))
            self.calls[piece.call.index][1].extend(piece.call.arguments.encode())
        self.reports.extend(piece.reports)
        self.token_ids.extend(piece.token_ids)
        self.prompt_reports.extend(piece.prompt_reports)
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason


class Heading(NamedTuple):
    """Fields that all answers and chunks of one request share."""

    id: str
    created: int
    """Unix time."""
    model: str
    system_fingerprint: str | None

    @classmethod
    def draw(cls, prefix: str, created: int, model: str, system_fingerprint: str | None = None) -> Heading:
        """A heading with a new random id, which reveals no internal id."""
        drawn = f"{prefix}-{secrets.token_hex(16)}"
        return cls(id=drawn, created=created, model=model, system_fingerprint=system_fingerprint)


class AnswerFormat(ABC):
    """The format of one endpoint's answers. Arrays that can be long are iterators."""

    operation: ClassVar[str]
    """OpenTelemetry's name of the endpoint's operation."""

    def __init__(
        self,
        heading: Heading,
        speller: TokenSpeller,
        with_logprobs: bool,
        *,
        prompt_ids: PromptIds = None,
        echoed: int | None = None,
        prompted: int | None = None,
    ) -> None:
        """`echoed` and `prompted` are numbers of alternatives. `echoed` puts the prompt's tokens into `logprobs`,
        `prompted` into `prompt_logprobs`; None leaves them out."""
        self.heading = heading
        self._speller = speller
        self._with_logprobs = with_logprobs
        self._prompt_ids = prompt_ids
        self._echoed = echoed
        self._prompted = prompted

    @abstractmethod
    def chunk(self, piece: Piece, first: bool) -> answers.ChatCompletionChunk | answers.Completion:
        """A piece, the choice's `first` or a later one, as a chunk of a stream. A choice's first chunk has its prompt's
        token ids, if they were asked for."""

    @abstractmethod
    def usage_chunk(self, usage: answers.Usage) -> answers.ChatCompletionChunk | answers.Completion:
        """The last chunk of a stream that reports usage, which has no choices."""

    @abstractmethod
    def whole(
        self, choices: Sequence[WholeChoice], usage: answers.Usage
    ) -> answers.ChatCompletion | answers.Completion:
        """The answer to a request that does not stream: all choices, in order."""

    def _prompt_logprobs(
        self, reports: Iterable[TokenReport], num: int
    ) -> Sequence[Mapping[str, answers.RankedToken] | None]:
        """`prompt_logprobs` in vLLM's form: for each token of the prompt but the first, an object by token id with that
        token and the `num` most likely ones; null for the first."""

        def entry(token_id: int, logprob: float, rank: int) -> dict[str, answers.RankedToken]:
            name, _ = self._speller.spelling(token_id)
            return {str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": name}}

        def entries(report: TokenReport) -> Mapping[str, answers.RankedToken] | None:
            if report.logprobs is None:
                return None
            told = entry(report.token_id, report.logprobs.logprob, report.rank)
            for rank, (token_id, logprob) in enumerate(report.logprobs.top[:num], 1):
                told |= entry(token_id, logprob, rank)
            return told

        return _one_by_one(map(entries, reports))


class CompletionFormat(AnswerFormat):
    """`/v1/completions`."""

    operation = "text_completion"

    def chunk(self, piece: Piece, first: bool) -> answers.Completion:
        choice = self._choice(piece.choice, piece.text, piece)
        if self._prompt_ids is not None:
            choice["token_ids"] = piece.token_ids
            if first:
                choice["prompt_token_ids"] = self._prompt_ids[piece.choice]
        return self._completion([choice])

    def usage_chunk(self, usage: answers.Usage) -> answers.Completion:
        return {**self._completion([]), "usage": usage}

    def whole(self, choices: Sequence[WholeChoice], usage: answers.Usage) -> answers.Completion:
        return {**self._completion(_one_by_one(map(self._whole_choice, range(len(choices)), choices))), "usage": usage}

    def _completion(self, choices: Sequence[answers.CompletionChoice]) -> answers.Completion:
        return {
            "id": self.heading.id,
            "object": "text_completion",
            "created": self.heading.created,
            "model": self.heading.model,
            "system_fingerprint": self.heading.system_fingerprint,
            "choices": choices,
        }

    def _whole_choice(self, index: int, whole: WholeChoice) -> answers.CompletionChoice:
        choice = self._choice(index, whole.text.decode(), whole)
        if self._prompt_ids is not None:
            choice["token_ids"] = whole.token_ids
            choice["prompt_token_ids"] = self._prompt_ids[index]
        return choice

    def _choice(self, index: int, text: str, said: Piece | WholeChoice) -> answers.CompletionChoice:
        assert said.finish_reason != "tool_calls"
        reports = said.reports if self._echoed is None else [*said.prompt_reports, *said.reports]
        logprobs = self._logprobs(reports) if self._with_logprobs else None
        choice: answers.CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": said.finish_reason,
            "stop_reason": said.stop_reason,
        }
        if self._prompted is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(said.prompt_reports, self._prompted)
        return choice

    def _logprobs(self, reports: Sequence[TokenReport]) -> answers.CompletionLogprobs:
        return {
            "tokens": _one_by_one(self._name(report.token_id) for report in reports),
            "token_logprobs": _one_by_one(report.logprobs.logprob if report.logprobs else None for report in reports),
            "top_logprobs": _one_by_one(self._alternatives(report) for report in reports),
            "text_offset": _one_by_one(report.text_offset for report in reports),
        }

    def _alternatives(self, report: TokenReport) -> Mapping[str, float] | None:
        """The most likely tokens, and the chosen one even if it is not among them."""
        if report.logprobs is None:
            return None
        alternatives = {self._name(token_id): logprob for token_id, logprob in report.logprobs.top[: self._echoed]}
        return alternatives | {self._name(report.token_id): report.logprobs.logprob}

    def _name(self, token_id: int) -> str:
        return self._speller.spelling(token_id)[0]


class ChatFormat(AnswerFormat):
    """`/v1/chat/completions`."""

    operation = "chat"

    def chunk(self, piece: Piece, first: bool) -> answers.ChatCompletionChunk:
        delta: answers.ChatDelta = {"role": "assistant"} if first else {}
        if piece.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = piece.reasoning
        if piece.call is not None:
            delta["tool_calls"] = [_call_delta(piece.call)]
        if piece.text:
            delta["content"] = piece.text
        elif first:
            delta["content"] = None if len(delta) > 1 else ""
        choice: answers.ChatChunkChoice = {
            "index": piece.choice,
            "delta": delta,
            "logprobs": self._logprobs(piece.reports),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        chunk = self._chunk([choice])
        if self._prompt_ids is not None:
            choice["token_ids"] = piece.token_ids
            if first:
                chunk["prompt_token_ids"] = self._prompt_ids[0]
        return chunk

    def usage_chunk(self, usage: answers.Usage) -> answers.ChatCompletionChunk:
        return {**self._chunk([]), "usage": usage}

    def whole(self, choices: Sequence[WholeChoice], usage: answers.Usage) -> answers.ChatCompletion:
        answer: answers.ChatCompletion = {
            "id": self.heading.id,
            "object": "chat.completion",
            "created": self.heading.created,
            "model": self.heading.model,
            "system_fingerprint": self.heading.system_fingerprint,
            "choices": _one_by_one(map(self._whole_choice, range(len(choices)), choices)),
            "usage": usage,
        }
        if self._prompt_ids is not None:
            answer["prompt_token_ids"] = self._prompt_ids[0]
        if self._prompted is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(choices[0].prompt_reports, self._prompted)
        return answer

    def _chunk(self, choices: Sequence[answers.ChatChunkChoice]) -> answers.ChatCompletionChunk:
        return {
            "id": self.heading.id,
            "object": "chat.completion.chunk",
            "created": self.heading.created,
            "model": self.heading.model,
            "system_fingerprint": self.heading.system_fingerprint,
            "choices": choices,
        }

    def _whole_choice(self, index: int, whole: WholeChoice) -> answers.ChatChoice:
        assert whole.finish_reason is not None
        choice: answers.ChatChoice = {
            "index": index,
            "message": _message(whole),
            "logprobs": self._logprobs(whole.reports),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }
        if self._prompt_ids is not None:
            choice["token_ids"] = whole.token_ids
        return choice

    def _logprobs(self, reports: Iterable[TokenReport]) -> answers.ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        told = (self._report(report.token_id, report.logprobs) for report in reports if report.logprobs is not None)
        return {"content": _one_by_one(told), "refusal": None}

    def _report(self, token_id: int, logprobs: TokenLogprobs) -> answers.AnswerToken:
        alternatives = [self._entry(other, logprob) for other, logprob in logprobs.top]
        return {**self._entry(token_id, logprobs.logprob), "top_logprobs": alternatives}

    def _entry(self, token_id: int, logprob: float) -> answers.TokenAlternative:
        name, content = self._speller.spelling(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(content)}


def _message(choice: WholeChoice) -> answers.ChatAnswerMessage:
    text, reasoning = choice.text.decode(), choice.reasoning.decode()
    message: answers.ChatAnswerMessage = {
        "role": "assistant",
        "content": None if choice.calls and not text else text,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if choice.calls:
        message["tool_calls"] = [_call(first, arguments.decode()) for first, arguments in choice.calls]
    return message


def _call(first: CallDelta, arguments: str) -> answers.Call:
    assert first.id is not None
    assert first.name is not None
    return {"id": first.id, "type": "function", "function": {"name": first.name, "arguments": arguments}}


def _call_delta(delta: CallDelta) -> answers.AnswerCallDelta:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    call = _call(delta, delta.arguments)
    return {"index": delta.index, "id": call["id"], "type": "function", "function": {**call["function"]}}
