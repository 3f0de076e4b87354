"""The answers of the API. `responses` and `api` build them, and `/openapi.json` is made from these types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired

from pydantic import ConfigDict, Json, with_config
from typing_extensions import TypedDict  # pydantic takes that of `typing` from Python 3.12 on

from common.contract.messages.fields import FinishReason
from gateway.serving.waterfall import Stage
from gateway.text.choice_text import AnswerEnd, StopReason


@with_config(ConfigDict(use_attribute_docstrings=True))
class _Answer(TypedDict):
    pass


class Error(_Answer):
    """An error."""

    message: str
    type: str
    param: str | None
    """The request's field at fault."""
    code: str | None


class ErrorAnswer(_Answer):
    """The body of every refusal and failure."""

    error: Error


class AnswerTimings(_Answer):
    """Where a request's time went."""

    e2e_ms: float
    """From the request's arrival to its last token."""
    ttft_ms: float | None
    """From arrival to first token; null if there was none."""
    stages_ms: dict[Stage, float]
    """The stages add up to `e2e_ms`; a stage that took no time is left out."""
    attempts: int
    pull_bytes: NotRequired[int]
    """KV bytes read from other workers, if any."""
    pull_ms: NotRequired[float]
    hidden_pull_ms: NotRequired[float]
    """The part of `pull_ms` that overlapped with computation."""


class PromptDetails(_Answer):
    """Details of the prompts' tokens."""

    cached_tokens: int
    """Prompt tokens whose KV came from a prefix cache: they were not computed for this request."""


class CompletionDetails(_Answer):
    """Details of the generated tokens."""

    reasoning_tokens: NotRequired[int]
    """Tokens up to the end of `</think>`, over all choices; present if the model reasons."""
    accepted_prediction_tokens: NotRequired[int]
    """Tokens that were drafted, by the request's `prediction` or otherwise, and were right; present with `prediction`
    and with `include_timings`."""
    rejected_prediction_tokens: NotRequired[int]
    """Tokens that were drafted and were wrong: no part of the answer, nor of `completion_tokens`."""


class Usage(_Answer):
    """Token counts of a request, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens up to and including the one that ended each choice."""
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]
    """Present in the final usage, absent from the usage so far."""
    completion_tokens_details: NotRequired[CompletionDetails]
    """Present in the final usage if it has any of its fields."""
    timings: NotRequired[AnswerTimings]
    """Present with `include_timings`."""


class TokenAlternative(_Answer):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: Sequence[int]


class AnswerToken(TokenAlternative):
    """A token that was chosen."""

    top_logprobs: Sequence[TokenAlternative]


class ChatLogprobs(_Answer):
    """Log probabilities, one entry for each token."""

    content: Sequence[AnswerToken]
    refusal: None


class CalledFunction(_Answer):
    """A function and the arguments of its call."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


class Call(_Answer):
    """A call of one of the request's functions."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(_Answer):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    """Null if the message consists of calls only."""
    refusal: None
    tool_calls: NotRequired[Sequence[Call]]
    reasoning_content: NotRequired[str]
    """The reasoning that precedes the answer."""
    reasoning: NotRequired[str]
    """Same as `reasoning_content`."""


class ChatChoice(_Answer):
    """One of the `n` answers."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd
    stop_reason: StopReason
    """The stop string that ended the choice, or the id of the token that did; null for the tokenizer's end-of-sequence
    token, and for any other end."""
    token_ids: NotRequired[Sequence[int]]
    """Present with `return_token_ids`."""


class RankedToken(_Answer):
    """A token of the prompt, or an alternative to it."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


class ChatCompletion(_Answer):
    """A complete answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """Unix time."""
    model: str
    system_fingerprint: str | None
    """A different value means that the same seed may give a different answer."""
    choices: Sequence[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[Sequence[int]]
    """Present with `return_token_ids`."""
    prompt_logprobs: NotRequired[Sequence[Mapping[str, RankedToken] | None]]
    """Present with the request's field of that name: by token id, for each token of the prompt; null for the first."""


class CalledFunctionDelta(_Answer):
    """The part of a call that a chunk adds."""

    name: NotRequired[str]
    arguments: NotRequired[str]


class AnswerCallDelta(_Answer):
    """The beginning of a call, or more of it."""

    index: int
    id: NotRequired[str]
    """Present at the beginning of a call, as `type` and the function's name are."""
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class ChatDelta(_Answer):
    """The part of the message that a chunk adds."""

    role: NotRequired[Literal["assistant"]]
    """Present in a choice's first chunk."""
    content: NotRequired[str | None]
    tool_calls: NotRequired[Sequence[AnswerCallDelta]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatChunkChoice(_Answer):
    """The newly generated part of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd | None
    """Set in a choice's last chunk."""
    stop_reason: StopReason
    """In a choice's last chunk: the stop string that ended it, or the id of the token that did; null for the
    tokenizer's end-of-sequence token, and for any other end."""
    token_ids: NotRequired[Sequence[int]]
    """Present with `return_token_ids`."""


class ChatCompletionChunk(_Answer):
    """A chunk of a streamed answer to a chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: Sequence[ChatChunkChoice]
    prompt_token_ids: NotRequired[Sequence[int]]
    """Present with `return_token_ids`, in a choice's first chunk."""
    usage: NotRequired[Usage | None]
    """With `stream_options.include_usage`: in the last chunk, which has no choices; in the others null, or with
    `continuous_usage_stats` the usage so far."""


class ChatEvent(_Answer):
    """One event of a stream. The last event is `[DONE]`, or an error."""

    data: Literal["[DONE]"] | Json[ChatCompletionChunk | ErrorAnswer]


class CompletionLogprobs(_Answer):
    """Log probabilities; each list has one entry for each token."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    """Null for the first token of a prompt; so is its entry in `top_logprobs`."""
    top_logprobs: Sequence[Mapping[str, float] | None]
    text_offset: Sequence[int]


class CompletionChoice(_Answer):
    """A text, or the newly generated part of one."""

    index: int
    """Choice `c` of prompt `p` is `p * n + c`."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    """Null except in a choice's last chunk."""
    stop_reason: StopReason
    """The stop string that ended the choice, or the id of the token that did; null for the tokenizer's end-of-sequence
    token, and for any other end."""
    token_ids: NotRequired[Sequence[int]]
    """Present with `return_token_ids`."""
    prompt_token_ids: NotRequired[Sequence[int]]
    """Present with `return_token_ids`; in a stream, in the choice's first chunk."""
    prompt_logprobs: NotRequired[Sequence[Mapping[str, RankedToken] | None]]
    """Present with the request's field of that name: by token id, for each token of the prompt; null for the first."""


class Completion(_Answer):
    """A complete answer, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: Sequence[CompletionChoice]
    usage: NotRequired[Usage | None]
    """In a complete answer; with `stream_options.include_usage` in a stream's last chunk, and with
    `continuous_usage_stats` in each chunk, as the usage so far."""


class CompletionEvent(_Answer):
    """One event of a stream. The last event is `[DONE]`, or an error."""

    data: Literal["[DONE]"] | Json[Completion | ErrorAnswer]


class Model(_Answer):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The first of the model's names. Where the model lies is not told."""
    max_model_len: int
    """The model's context, or the operator's limit: most tokens of prompt and output together. Workers with small KV
    caches take less."""


class ModelList(_Answer):
    """The one served model, listed once for each of its names."""

    object: Literal["list"]
    data: Sequence[Model]


class Tokenized(_Answer):
    """Token ids of a text or a conversation."""

    tokens: Sequence[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[Sequence[str]]
    """Each token as the vocabulary spells it, if that was asked for."""


class DetokenizedText(_Answer):
    """The text of tokens, with special tokens spelt out."""

    prompt: str


class Health(_Answer):
    """The process is alive."""

    status: Literal["ok"]


class Version(_Answer):
    """The installed version."""

    version: str


class Load(_Answer):
    """Current load."""

    server_load: int
    """Requests in flight at this process."""


class ReadyAnswer(_Answer):
    """Whether a request that arrives now could be served."""

    ready: bool
    reason: str
    details: Mapping[str, object]
    """Empty without a valid key, if the operator has set keys."""
