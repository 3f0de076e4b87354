"""Requests as clients send them, checked for form.

Types are strict, `null` counts as absent, and unknown fields are ignored: nothing of a request reaches a worker but
the fields declared here, after validation. What would change the answer, and is not implemented, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from common.contract.sampling import (
    MAX_CHOICES,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MaxTokens,
    MinP,
    MinTokens,
    NumLogprobs,
    OutputPenalty,
    RepetitionPenalty,
    Temperature,
    TokenId,
)
from common.contract.tiers import Tier
from gateway.intake.field_types import (
    MAX_MESSAGES,
    MAX_TEXT_CHARS,
    GrammarText,
    LogitBiases,
    Name,
    Prompts,
    ServiceTier,
    Stops,
    Text,
    not_many_parts,
)
from gateway.intake.field_types import text as _text
from gateway.intake.ignored_fields import IGNORED, IgnoredFields, unknown_fields
from gateway.intake.tool_schemas import TemplateSwitches, ToolCalls, ToolChoice, Tools
from gateway.web.http_errors import invalid

_IGNORED_FIELDS = IgnoredFields()

_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (),
    "web_search_options": (),
}
"""Fields that are not implemented, but where a schema has them, with the values that ask for nothing."""
_FORBIDS: Final = "; ignoring it could put what it forbids into the answer (logit_bias makes a token unlikely)"
_WHY_UNSUPPORTED: Final[Mapping[str, str]] = {"allowed_token_ids": _FORBIDS, "bad_words": _FORBIDS}
"""What the refusal of some of them adds."""


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


def _schema_text(value: object) -> str | None:
    """A JSON schema, as an object or as its text."""
    if value is None or isinstance(value, str):
        return None if value is None else _text(value)
    if not isinstance(value, dict):
        raise PydanticCustomError("schema", "must be a JSON schema, or the text of one")
    try:
        return _text(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise PydanticCustomError("schema", "is nested too deeply") from None


Choices = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=1024, fail_fast=True)]
_JsonSchema: TypeAlias = dict[str, Any] | Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


def _describe_refused(schema: dict[str, Any]) -> None:
    """Fields that no schema has, and that are refused, belong into the document, too."""
    for name, harmless in _UNSUPPORTED.items():
        said = {"enum": [*harmless, None], "description": "Not supported; these values ask for nothing."}
        schema["properties"].setdefault(name, said)


def _describe_ignored(schema: dict[str, Any]) -> None:
    _describe_refused(schema)
    for name, reason in IGNORED.items():
        schema["properties"].setdefault(name, {"description": f"Accepted, without effect: {reason}."})


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)


class _Body(_Schema):
    model_config = ConfigDict(json_schema_extra=_describe_refused)


class StreamOptions(_Schema):
    """What a stream carries besides."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: each chunk has the usage so far."""
    include_timings: bool | None = None
    """As the field of the same name beside `stream`."""


class JsonSchema(_Schema):
    """A schema that an answer must follow."""

    schema_: Annotated[
        str | None, PlainValidator(_schema_text, json_schema_input_type=_JsonSchema), Field(alias="schema")
    ]
    """As JSON."""


class ResponseFormat(_Schema):
    """OpenAI's structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Schema):
    """vLLM's; at most one of them. What is not here would change the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_schema: Annotated[
        str | None, PlainValidator(_schema_text, json_schema_input_type=_JsonSchema | None), Field(alias="json")
    ] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class SamplingFields(_Body):
    """Fields of both generating endpoints. Bounds of sampling parameters are the contract's."""

    model_config = ConfigDict(json_schema_extra=_describe_ignored)

    model: Name | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """0 takes the most likely token."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None
    """0 and, as others have it, -1 keep all."""
    min_p: MinP | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None
    """-1, as others have it, is drawn."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stops = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: OutputPenalty | None = None
    frequency_penalty: OutputPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBiases = ()
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[str | None, PlainValidator(_schema_text, json_schema_input_type=_JsonSchema | None)] = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_timings: bool | None = None
    """Say in the usage what the time was spent on."""
    return_token_ids: bool | None = None
    """Each choice has the ids of its tokens, and of its prompt's; vLLM's."""
    prompt_logprobs: NumLogprobs | None = None
    """Report log probabilities of the prompt's tokens, with this many alternatives; not in a stream."""
    skip_special_tokens: bool | None = None
    """False: special tokens are spelt out in the text, but for the one that ends it."""
    user: Text | None = None
    service_tier: ServiceTier = Tier.STANDARD
    cache_salt: Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_text)] | None = None
    """Requests share cached prefixes only with those that say the same."""


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """0 generates nothing, and needs no worker but for log probabilities of the prompt."""
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    """Begin each text with its prompt; and the log probabilities, if they are asked for, with its tokens'."""


class TextPart(_Schema):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Schema):
    """One turn of a conversation; text, calls of functions and what they gave."""

    role: Name
    name: Name | None = None
    tool_calls: ToolCalls | None = None
    """Of an assistant's message, which needs no content."""
    content: str | None = Field(None, validate_default=True)
    tool_call_id: Annotated[Name | None, Field(validate_default=True)] = None
    """Of a message of the role `tool`: which call it answers."""
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """What an assistant thought, under either name."""

    @field_validator("tool_calls", mode="after")
    @classmethod
    def _assistants_call(cls, calls: ToolCalls | None, info: ValidationInfo) -> ToolCalls | None:
        if calls and info.data.get("role") != "assistant":
            raise PydanticCustomError("tool_calls", "only messages of the role assistant have calls")
        return calls or None

    @field_validator("content", mode="plain", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _content_unless_assistants(cls, content: object, info: ValidationInfo) -> str | None:
        return None if content is None and info.data.get("role") == "assistant" else _content(content)

    @field_validator("tool_call_id", mode="after")
    @classmethod
    def _tools_answer(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if call_id is None and info.data.get("role") == "tool":
            raise PydanticCustomError("tool_call_id", "messages of the role tool say which call they answer")
        return call_id

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: nothing is null, there is always a content, and arguments are objects."""
        message = self.model_dump(exclude_none=True, exclude={"tool_calls", "reasoning"})
        message.setdefault("content", "")
        if self.tool_calls is not None:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        return message if reasoning is None else message | {"reasoning_content": reasoning}


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(not_many_parts),
]


class ChatRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    """False: no more than one call."""
    chat_template_kwargs: TemplateSwitches | None = None
    """Variables of the model's chat template, such as `enable_thinking`."""
    reasoning_effort: Name | None = None
    """As `chat_template_kwargs` would set it; `none` turns `enable_thinking` off besides."""
    verbosity: Name | None = None
    """As `chat_template_kwargs` would set it."""
    continue_final_message: bool | None = None
    """The answer goes on with the last message, whose turn is left open."""
    add_generation_prompt: bool | None = None
    """False: nobody's turn is opened for the answer; so it is with `continue_final_message`, too."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""

    def switches(self) -> dict[str, Any]:
        """Variables of the chat template; those that are named as such go before the others."""
        efforts = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        said: dict[str, Any] = {name: value for name, value in efforts.items() if value is not None}
        if self.reasoning_effort == "none":
            said["enable_thinking"] = False
        return said | (self.chat_template_kwargs or {})


class TokenizeRequest(_Body):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateSwitches | None = None


class DetokenizeRequest(_Body):
    """Body of `POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


SchemaT = TypeVar("SchemaT", bound=_Schema)


def parse(schema: type[SchemaT], body: object) -> SchemaT:
    """Validate a decoded JSON body. Raises `ApiError`, a 400 that names the first field at fault."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object")
    _refuse_unsupported(body, schema)
    _IGNORED_FIELDS.note(name for name in unknown_fields(body, schema) if name not in _UNSUPPORTED)
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


def _refuse_unsupported(body: dict[Any, object], schema: type[_Schema]) -> None:
    for name, harmless in _UNSUPPORTED.items():
        value = body.get(name)
        if value is None or name in schema.model_fields:
            continue
        if not any(value == each and type(value) is type(each) for each in harmless):  # True is no 1
            why = _WHY_UNSUPPORTED.get(name, "")
            raise invalid(name, f"{name} is not supported{why}", code="unsupported_parameter")
