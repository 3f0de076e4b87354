"""The shapes of answers, for `/openapi.json`. `responses` and `api` word them; tests hold one against the other.

A field with a default may be missing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Json, JsonValue

from common.contract.messages import FinishReason
from gateway.serving.waterfall import Stage
from gateway.text.choice_text import AnswerEnd


class _Answer(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Error(_Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The request's field at fault."""
    code: str | None


class ErrorAnswer(_Answer):
    """Every refusal and failure."""

    error: Error


class Timings(_Answer):
    """What a request's time was spent on."""

    e2e_ms: float
    """From its arrival to its last token."""
    ttft_ms: float | None
    """To its first one, if there was any."""
    stages_ms: dict[Stage, float]
    """Add up to all of it; a stage that took no time is left out."""
    attempts: int
    pull_bytes: int = 0
    """Read from other workers, where anything was."""
    pull_ms: float = 0.0
    hidden_pull_ms: float = 0.0
    """The part of `pull_ms` that something else hid."""


class PromptDetails(_Answer):
    """What became of the prompts' tokens."""

    cached_tokens: int
    """Whose KV a prefix cache had: not computed for this request."""


class CompletionDetails(_Answer):
    """What the generated tokens are."""

    reasoning_tokens: int
    """Up to the end of `</think>`, over all choices."""


class Usage(_Answer):
    """Tokens of a request, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    """Up to the token that ended each choice, that one included."""
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    """At the end, not in the usage so far."""
    completion_tokens_details: CompletionDetails | None = None
    """The same, where the model reasons."""
    timings: Timings | None = None
    """With `include_timings`."""


class TokenAlternative(_Answer):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenReport(TokenAlternative):
    """A token that was chosen."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(_Answer):
    """Log probabilities, one entry for each token."""

    content: list[TokenReport]
    refusal: None


class CalledFunction(_Answer):
    """What is called, and with what."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


class Call(_Answer):
    """A call of a function that the request has named."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(_Answer):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    """Null where it only calls functions."""
    refusal: None
    tool_calls: list[Call] = []
    reasoning_content: str = ""
    """What a model that reasons thought first."""
    reasoning: str = ""
    """The same."""


class ChatChoice(_Answer):
    """One of the `n` answers."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd
    token_ids: list[int] = []
    """With `return_token_ids`."""


class RankedToken(_Answer):
    """A token that is in the prompt, or could have been there."""

    logprob: float
    rank: int
    """1 for the most likely one."""
    decoded_token: str


class ChatCompletion(_Answer):
    """A whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """Unix time."""
    model: str
    system_fingerprint: str | None
    """Another one says that the same seed may give another answer."""
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []
    """With `return_token_ids`."""
    prompt_logprobs: list[dict[str, RankedToken] | None] = []
    """With the request's field of that name: by token id, for each token of the prompt; null for the first."""


class CalledFunctionDelta(_Answer):
    """What a chunk adds to a call."""

    name: str | None = None
    arguments: str = ""


class CallDelta(_Answer):
    """A call that begins, or goes on."""

    index: int
    id: str = ""
    """With the beginning, as `type` and the name are."""
    type: Literal["function"] = "function"
    function: CalledFunctionDelta


class ChatDelta(_Answer):
    """What a chunk adds to the message."""

    role: Literal["assistant"] = "assistant"
    """In a choice's first chunk."""
    content: str | None = ""
    tool_calls: list[CallDelta] = []
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChunkChoice(_Answer):
    """The part of a choice that has just been generated."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd | None
    """In a choice's last chunk."""
    token_ids: list[int] = []
    """With `return_token_ids`."""


class ChatCompletionChunk(_Answer):
    """What has just been generated."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] = []
    """With `return_token_ids`, in a choice's first chunk."""
    usage: Usage | None = None
    """With `stream_options.include_usage`: in the last chunk, which has no choices; null in the others, or what it is
    so far (`continuous_usage_stats`)."""


class ChatEvent(_Answer):
    """One event of a stream; what says `[DONE]` is the last one, and so is an error."""

    event: Literal["message", "error"] = "message"
    data: Literal["[DONE]"] | Json[ChatCompletionChunk | ErrorAnswer]


class CompletionLogprobs(_Answer):
    """Log probabilities, one entry of each list for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt, as in `top_logprobs`."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    """A text, or the part of it that has just been generated."""

    index: int
    """Choice `c` of prompt `p` is `p * n + c`."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    """Null in all but a choice's last chunk."""
    token_ids: list[int] = []
    """With `return_token_ids`."""
    prompt_token_ids: list[int] = []
    """The same; in a stream, in the choice's first chunk."""
    prompt_logprobs: list[dict[str, RankedToken] | None] = []
    """With the request's field of that name: by token id, for each token of the prompt; null for the first."""


class Completion(_Answer):
    """A whole answer, or what has just been generated."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """Of a whole answer; of a stream with `stream_options.include_usage`, in the last chunk, or in
    each with what it is so far (`continuous_usage_stats`)."""


class CompletionEvent(_Answer):
    """One event of a stream; what says `[DONE]` is the last one, and so is an error."""

    event: Literal["message", "error"] = "message"
    data: Literal["[DONE]"] | Json[Completion | ErrorAnswer]


class Model(_Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Most tokens of prompt and output together."""


class ModelList(_Answer):
    """The one model, by each of its names."""

    object: Literal["list"]
    data: list[Model]


class Tokens(_Answer):
    """A prompt's tokens."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizedText(_Answer):
    """The text of tokens, special ones spelt out."""

    prompt: str


class Health(_Answer):
    """The process answers."""

    status: Literal["ok"]


class Version(_Answer):
    """What is installed."""

    version: str


class Load(_Answer):
    """How much there is to do."""

    server_load: int
    """Requests in flight at this process."""


class Readiness(_Answer):
    """Whether a request that arrives now could be served."""

    ready: bool
    reason: str
    details: dict[str, JsonValue]
