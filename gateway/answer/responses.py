"""Answers in the OpenAI API's two formats, whole and in chunks.

A choice's log probabilities have one entry for each token that the usage counts, the token that ends it included.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gateway.text.call_parser import CallDelta
from gateway.text.choice_text import AnswerEnd, Piece, TokenReport

Json = dict[str, Any]
_Array = Callable[[Iterable[Any]], Iterable[Any]]
"""Constructor of a JSON array: `list`, or `iter` for items made one by one, which `encode_in_pieces` takes."""
PromptIds = Sequence[Sequence[int]] | None
"""The prompt of each choice, if token ids were asked for; else None."""


class TokenSpeller(Protocol):
    """The part of the tokenizer that this module needs."""

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        """A name for the token, and its bytes."""
        ...


class Usage(NamedTuple):
    """Token counts of a request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed; None while unknown."""
    num_reasoning_tokens: int | None = None
    """Completion tokens up to the end of the reasoning; None if reasoning is not looked for."""
    timings: Json | None = None
    """Where the request's time went, if the client asked for it."""

    def as_json(self) -> Json:
        """The usage object of the API."""
        usage: Json = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }
        if self.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        if self.num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage if self.timings is None else usage | {"timings": self.timings}


@dataclass(slots=True)
class WholeChoice:
    """All pieces of one choice, collected."""

    texts: list[str] = field(default_factory=list)
    reports: list[TokenReport] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Filled if token ids were asked for."""
    prompt_reports: list[TokenReport] = field(default_factory=list)
    finish_reason: AnswerEnd | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[list[CallDelta]] = field(default_factory=list)
    """The deltas of each function call."""

    def add(self, piece: Piece) -> None:
        """Append the choice's next piece."""
        self.texts.append(piece.text)
        if piece.reasoning:
            self.reasoning.append(piece.reasoning)
        if piece.call is not None:
            if piece.call.index == len(self.calls):
                self.calls.append([])
            self.calls[piece.call.index].append(piece.call)
        self.reports.extend(piece.reports)
        self.token_ids.extend(piece.token_ids)
        self.prompt_reports.extend(piece.prompt_reports)
        self.finish_reason = piece.finish_reason


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

    def as_json(self, kind: str) -> Json:
        """The leading fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class AnswerFormat(Protocol):
    """The format of one endpoint's answers."""

    operation: str
    """OpenTelemetry's name of the endpoint's operation."""

    @property
    def heading(self) -> Heading:
        """Fields that all answers and chunks share."""
        ...

    def chunk(self, piece: Piece, first: bool) -> Json:
        """A piece, the choice's `first` or a later one, as a chunk of a stream."""
        ...

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that reports usage."""
        ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        """The answer to a request that does not stream; arrays that can be long are iterators."""
        ...


class CompletionFormat:
    """`/v1/completions`."""

    operation = "text_completion"

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
        self._heading = heading
        self._speller = speller
        self._with_logprobs = with_logprobs
        self._prompt_ids = prompt_ids
        self._echoed = echoed
        self._prompted = prompted

    @property
    def heading(self) -> Heading:
        """Fields that every chunk begins with."""
        return self._heading

    def chunk(self, piece: Piece, first: bool) -> Json:
        """The piece's text; a choice's first chunk has its prompt's token ids, if they were asked for."""
        choice = self._choice(piece.choice, piece.text, piece.prompt_reports, piece.reports, piece.finish_reason)
        if self._prompt_ids is not None:
            choice["token_ids"] = piece.token_ids
            if first:
                choice["prompt_token_ids"] = self._prompt_ids[piece.choice]
        return self._heading.as_json("text_completion") | {"choices": [choice]}

    def usage_chunk(self, usage: Usage) -> Json:
        """A chunk with usage and no choices."""
        return self._heading.as_json("text_completion") | {"choices": [], "usage": usage.as_json()}

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        """All choices, in order."""
        return self._heading.as_json("text_completion") | {
            "choices": (
                self._choice(
                    index, "".join(choice.texts), choice.prompt_reports, choice.reports, choice.finish_reason, iter
                )
                | self._ids(index, choice)
                for index, choice in enumerate(choices)
            ),
            "usage": usage.as_json(),
        }

    def _ids(self, index: int, choice: WholeChoice) -> Json:
        if self._prompt_ids is None:
            return {}
        return {"token_ids": choice.token_ids, "prompt_token_ids": self._prompt_ids[index]}

    def _choice(
        self,
        index: int,
        text: str,
        prompt_reports: Sequence[TokenReport],
        reports: Sequence[TokenReport],
        finish_reason: AnswerEnd | None,
        array: _Array = list,
    ) -> Json:
        all_reports = reports if self._echoed is None else [*prompt_reports, *reports]
        logprobs = self._logprobs(all_reports, array) if self._with_logprobs else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._prompted is None:
            return choice
        return choice | _prompt_logprobs(prompt_reports, self._prompted, self._speller, array)

    def _logprobs(self, reports: Sequence[TokenReport], array: _Array) -> Json:
        return {
            "tokens": array(self._name(report.token_id) for report in reports),
            "token_logprobs": array(report.logprobs.logprob if report.logprobs else None for report in reports),
            "top_logprobs": array(self._alternatives(report) for report in reports),
            "text_offset": array(report.text_offset for report in reports),
        }

    def _alternatives(self, report: TokenReport) -> Mapping[str, float] | None:
        """The most likely tokens, and the chosen one even if it is not among them."""
        if report.logprobs is None:
            return None
        alternatives = {self._name(token_id): logprob for token_id, logprob in report.logprobs.top[: self._echoed]}
        return alternatives | {self._name(report.token_id): report.logprobs.logprob}

    def _name(self, token_id: int) -> str:
        return self._speller.spelling(token_id)[0]


class ChatFormat:
    """`/v1/chat/completions`."""

    operation = "chat"

    def __init__(
        self,
        heading: Heading,
        speller: TokenSpeller,
        with_logprobs: bool,
        *,
        prompt_ids: PromptIds = None,
        prompted: int | None = None,
    ) -> None:
        """`prompted` is as in `CompletionFormat`."""
        self._heading = heading
        self._speller = speller
        self._with_logprobs = with_logprobs
        self._prompt_ids = prompt_ids
        self._prompted = prompted

    @property
    def heading(self) -> Heading:
        """Fields that every chunk begins with."""
        return self._heading

    def chunk(self, piece: Piece, first: bool) -> Json:
        """The piece's text; a choice's first chunk also has the role, and the prompt's token ids, if they were asked
        for."""
        delta: Json = {"role": "assistant"} if first else {}
        if piece.reasoning:
            delta |= _reasoning(piece.reasoning)
        if piece.call is not None:
            delta["tool_calls"] = [_call_delta(piece.call)]
        if piece.text:
            delta["content"] = piece.text
        elif first:
            delta["content"] = None if len(delta) > 1 else ""
        choice = {
            "index": piece.choice,
            "delta": delta,
            "logprobs": self._logprobs(piece.reports),
            "finish_reason": piece.finish_reason,
        }
        chunk = self._heading.as_json("chat.completion.chunk") | {"choices": [choice]}
        if self._prompt_ids is not None:
            choice["token_ids"] = piece.token_ids
            if first:
                chunk["prompt_token_ids"] = self._prompt_ids[0]
        return chunk

    def usage_chunk(self, usage: Usage) -> Json:
        """A chunk with usage and no choices."""
        return self._heading.as_json("chat.completion.chunk") | {"choices": [], "usage": usage.as_json()}

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Json:
        """All choices, in order."""
        with_ids = self._prompt_ids is not None
        answer = self._heading.as_json("chat.completion") | {
            "choices": (
                {
                    "index": index,
                    "message": _message(choice),
                    "logprobs": self._logprobs(choice.reports, iter),
                    "finish_reason": choice.finish_reason,
                }
                | ({"token_ids": choice.token_ids} if with_ids else {})
                for index, choice in enumerate(choices)
            ),
            "usage": usage.as_json(),
        }
        if self._prompt_ids is not None:
            answer["prompt_token_ids"] = self._prompt_ids[0]
        if self._prompted is not None:
            answer |= _prompt_logprobs(choices[0].prompt_reports, self._prompted, self._speller, iter)
        return answer

    def _logprobs(self, reports: Iterable[TokenReport], array: _Array = list) -> Json | None:
        if not self._with_logprobs:
            return None
        return {
            "content": array(
                self._entry(report.token_id, report.logprobs.logprob)
                | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in report.logprobs.top]}
                for report in reports
                if report.logprobs is not None
            ),
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        name, content = self._speller.spelling(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(content)}


def _prompt_logprobs(reports: Iterable[TokenReport], num: int, speller: TokenSpeller, array: _Array) -> Json:
    """`prompt_logprobs` in vLLM's form: for each token of the prompt but the first, an object by token id with that
    token and the `num` most likely ones; null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        return {str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": speller.spelling(token_id)[0]}}

    def entries(report: TokenReport) -> Json | None:
        if report.logprobs is None:
            return None
        told = entry(report.token_id, report.logprobs.logprob, report.rank)
        for rank, (token_id, logprob) in enumerate(report.logprobs.top[:num], 1):
            told |= entry(token_id, logprob, rank)
        return told

    return {"prompt_logprobs": array(map(entries, reports))}


def _message(choice: WholeChoice) -> Json:
    text = "".join(choice.texts)
    message: Json = {"role": "assistant", "content": None if choice.calls and not text else text, "refusal": None}
    if choice.reasoning:
        message |= _reasoning("".join(choice.reasoning))
    if choice.calls:
        message["tool_calls"] = [_call(deltas) for deltas in choice.calls]
    return message


def _reasoning(text: str) -> Json:
    """The reasoning under two names: DeepSeek's, which most clients read, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(deltas: Sequence[CallDelta]) -> Json:
    arguments = "".join(delta.arguments for delta in deltas)
    return {"id": deltas[0].id, "type": "function", "function": {"name": deltas[0].name, "arguments": arguments}}


def _call_delta(delta: CallDelta) -> Json:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"index": delta.index} | _call([delta])
