"""Requests as clients send them, checked for form.

Types are strict, `null` counts as absent, and unknown fields are ignored: nothing of a request reaches a worker but
the fields declared here, after validation. What would change the answer, and is not implemented, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from common.contract.tiers import Tier
from gateway.http_errors import invalid

_LOG = logging.getLogger(__name__)
_MAX_LISTED_FIELDS = 20

_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that are not implemented, with the values that ask for nothing."""

_TIERS: Final[Mapping[str, Tier]] = {tier.value: tier for tier in Tier} | {
    "auto": Tier.STANDARD,
    "default": Tier.STANDARD,
    "priority": Tier.INTERACTIVE,
    "flex": Tier.BATCH,
}
"""Values of `service_tier`: the tiers by name, and OpenAI's names for what comes nearest."""

TokenPrompt: TypeAlias = tuple[int, ...]
Prompt: TypeAlias = str | TokenPrompt


def _text(value: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "holds a lone surrogate, which is not text") from None
    return value


def _prompt(value: object) -> Prompt | None:
    if isinstance(value, str):
        return _text(value) or None
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _prompts(value: object) -> tuple[Prompt, ...]:
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    prompts = [_prompt(item) for item in value] if isinstance(value, list) and several else [_prompt(value)]
    checked = tuple(prompt for prompt in prompts if prompt is not None)
    if len(checked) != len(prompts):
        raise PydanticCustomError(
            "prompt", "must be a string, an array of token ids, or an array of either, none of them empty"
        )
    return checked


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise PydanticCustomError("stop", "must be a string or an array of strings, none of them empty")
    return tuple(_text(stop) for stop in stops)


def _content(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    texts = []
    for part in value if isinstance(value, list) else [None]:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(_text(text))
            case _:
                raise PydanticCustomError("content", "must be a string or an array of parts of type text")
    return "\n".join(texts)


def _tier(value: object) -> Tier:
    tier = Tier.STANDARD if value is None else _TIERS.get(value) if isinstance(value, str) else None
    if tier is None:
        raise PydanticCustomError("service_tier", "must be one of {names}", {"names": ", ".join(_TIERS)})
    return tier


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_text)]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Schema):
    """What a stream carries besides."""

    include_usage: bool | None = None


class SamplingFields(_Schema):
    """Fields of both generating endpoints. Bounds of sampling parameters are the contract's, checked later."""

    model: Name | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and, as others have it, -1 keep all."""
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    service_tier: Annotated[Tier, PlainValidator(_tier)] = Tier.STANDARD
    cache_salt: Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_text)] | None = None
    """Requests share cached prefixes only with those that say the same."""


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
    logprobs: int | None = None


class ChatMessage(_Schema):
    """One turn of a conversation; text only."""

    role: Name
    content: Annotated[str, PlainValidator(_content)]
    name: Name | None = None


class ChatRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeRequest(_Schema):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None


class DetokenizeRequest(_Schema):
    """Body of `POST /detokenize`."""

    model: Name | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


SchemaT = TypeVar("SchemaT", bound=_Schema)


def parse(schema: type[SchemaT], body: object) -> SchemaT:
    """Validate a decoded JSON body. Raises `ApiError`, a 400 that names the first field at fault."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object")
    _refuse_unsupported(body)
    if _LOG.isEnabledFor(logging.DEBUG) and (unknown := body.keys() - schema.model_fields.keys() - _UNSUPPORTED.keys()):
        _LOG.debug("ignored unknown fields: %r", sorted(unknown)[:_MAX_LISTED_FIELDS])
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = field_path(first["loc"])
        raise invalid(param, f"{param}: {first['msg']}") from error


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path.removeprefix(".")


def _refuse_unsupported(body: dict[Any, object]) -> None:
    for name, harmless in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise invalid(name, f"{name} is not supported", code="unsupported_parameter")
