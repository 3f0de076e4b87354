"""Interprets the events of an answer's stream.

A chunk carries tokens if it has text (or reasoning, or log probabilities, or token ids). A chat chunk without any of
these announces the role. A completion chunk without any of these is a token whose text is not complete yet, or is
empty, as that of special tokens, since a server has no other reason to send it, unless it says that the answer ended.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.load.sse import Event, MalformedStreamError

_MAX_DETAIL_CHARS = 200


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, with the text that is complete so far; `finished`: they are the last tokens."""

    text: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer has ended; the event carries no tokens."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts from the server."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class StreamError:
    """The server reports an error in mid-stream."""

    message: str


@dataclass(frozen=True, slots=True)
class Done:
    """The stream is complete."""


Part = Text | Finished | Usage | StreamError | Done


def read_event(event: Event) -> list[Part]:
    """The parts of the event; empty for a role or a keep-alive. Raises `MalformedStreamError`."""
    if event.data == b"[DONE]":
        return [Done()]
    try:
        body = json.loads(event.data)
    except ValueError:
        body = event.data.decode("utf-8", "replace")
    if event.name == "error" or (isinstance(body, dict) and body.get("error")):
        return [StreamError(error_text(body))]
    if not isinstance(body, dict):
        raise MalformedStreamError(f"an event that is no JSON object: {str(body)[:_MAX_DETAIL_CHARS]!r}")
    try:
        parts = [part for choice in body.get("choices") or () if (part := _choice(choice)) is not None]
        usage = body.get("usage")
        if usage:
            parts.append(Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"])))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MalformedStreamError(f"a chunk of another form: {error!r}") from error
    return parts


def error_text(body: Any) -> str:
    """The message of an error object, in OpenAI's form or any other."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:_MAX_DETAIL_CHARS]


def _choice(choice: dict[str, Any]) -> Part | None:
    finished = choice.get("finish_reason") is not None
    proof = choice.get("logprobs") or choice.get("token_ids")
    if "delta" in choice:
        delta = choice["delta"] or {}
        text = delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        carries_tokens = bool(text or thought or proof)
    else:
        text = choice.get("text") or ""
        carries_tokens = bool(text or proof) or not finished
    if carries_tokens:
        return Text(text, finished)
    return Finished() if finished else None
