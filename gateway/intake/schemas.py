"""Schemas of requests as clients send them.

Types are strict, `null` counts as absent, and unknown fields are ignored: only the fields declared here reach a worker,
after validation. A field that would change the answer and is not implemented is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
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
    ModelName,
    Name,
    Prompts,
    ServiceTier,
    Stops,
    Text,
    not_many_parts,
)
from gateway.intake.field_types import text as _text
from gateway.intake.ignored_fields import IGNORED, IGNORED_FIELDS
from gateway.intake.tool_schemas import Schema, TemplateSwitches, ToolCalls, ToolChoice, Tools
from gateway.web.http_errors import invalid

_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
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
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields that are not implemented, each with its harmless values. A field that the request's schema declares is not
refused."""
_FORBIDS: Final = "; ignoring it could put what it forbids into the answer (logit_bias makes a token unlikely)"
_WHY_UNSUPPORTED: Final[Mapping[str, str]] = {"allowed_token_ids": _FORBIDS, "bad_words": _FORBIDS}
"""Reasons that are added to the refusal of some of these fields."""


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


def _no_prefix(value: object) -> None:
    if value is not None and value is not False:
        raise PydanticCustomError("prefix", "is not supported: continue_final_message continues the last message")


def _schema_text(value: object) -> str | None:
    """The text of a JSON schema, given as an object or as text."""
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
    """Describe refused fields that the schema does not declare in the OpenAPI document."""
    for name, harmless in _UNSUPPORTED.items():
        said: dict[str, Any] = {"enum": [*harmless, None]}
        why = "these values ask for nothing"
        if name == "best_of":
            said, why = schema["properties"].get("n", said), "1 and the value of `n` ask for nothing"
        schema["properties"].setdefault(name, said | {"description": f"Not supported; {why}."})


def _describe_ignored(schema: dict[str, Any]) -> None:
    _describe_refused(schema)
    for name, reason in IGNORED.items():
        schema["properties"].setdefault(name, {"description": f"Accepted, without effect: {reason}."})


class _Body(Schema):
    model_config = ConfigDict(json_schema_extra=_describe_refused)


class StreamOptions(Schema):
    """What a stream reports besides chunks of the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: report the usage so far in each chunk."""
    include_timings: bool | None = None
    """As the field of the same name beside `stream`."""


class JsonSchema(Schema):
    """A JSON schema that an answer must follow."""

    schema_: Annotated[
        str | None, PlainValidator(_schema_text, json_schema_input_type=_JsonSchema), Field(alias="schema")
    ]
    """As JSON."""


class ResponseFormat(Schema):
    """OpenAI's structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[
        str | None, PlainValidator(_schema_text, json_schema_input_type=_JsonSchema | None), Field(alias="schema")
    ] = None
    """For the type `json_object`: the schema that the object must follow, as in llama.cpp and other servers."""
    value: None = None
    """Other servers' name of a schema; `schema` is the one that is taken."""
    response_schema: None = None
    """As `value`."""


class StructuredOutputs(Schema):
    """vLLM's structured output, with at most one constraint. Unknown fields are refused, because they would change the
    answer, unless they ask for nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _asked_for(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        for name, each in value.items():
            if name not in declared and each is not None and each is not False:
                return {name: each}  # the first unknown field is enough: each one makes an error object
        return {name: each for name, each in value.items() if name in declared and each is not None}

    json_schema: Annotated[
        str | None, PlainValidator(_schema_text, json_schema_input_type=_JsonSchema | None), Field(alias="json")
    ] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class TextPart(Schema):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Prediction(Schema):
    """What the client expects the answer to be, such as a text of which little is to change. It changes no token; if
    workers draft tokens, the answer comes the sooner the more of it is right."""

    type: Literal["content"]
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[TextPart])]


class SamplingFields(_Body):
    """Fields of both generating endpoints. The bounds of sampling parameters are those of `common.contract`."""

    model_config = ConfigDict(json_schema_extra=_describe_ignored)

    model: ModelName = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """0 selects the most likely token."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None
    """0 keeps all tokens; so does -1, as in other servers."""
    min_p: MinP | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None
    """-1 means a random seed, as in other servers."""
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
    """Report in the usage where the time went."""
    return_token_ids: bool | None = None
    """Report the token ids of each choice and of its prompt, as in vLLM."""
    prompt_logprobs: NumLogprobs | None = None
    """Report log probabilities of the prompt's tokens, with this many alternatives; not with `stream`."""
    skip_special_tokens: bool | None = None
    """False: spell special tokens out in the text, except the one that ends it."""
    user: Text | None = None
    service_tier: ServiceTier = Tier.STANDARD
    prediction: Prediction | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_text)] | None = None
    """Requests share cached prefixes only with requests of the same salt."""


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """0 generates nothing, and needs a worker only for log probabilities of the prompt."""
    add_special_tokens: bool | None = None
    """False: the tokenizer adds no special tokens to a text, such as the one for its beginning, as in vLLM."""
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    """Begin each text with its prompt. Log probabilities, if asked for, then begin with those of the prompt's
    tokens."""


class ChatMessage(Schema):
    """One message of a conversation: text, function calls, or the result of a call."""

    role: Name
    name: Name | None = None
    tool_calls: ToolCalls | None = None
    """For messages of the role `assistant` only, which then need no content."""
    content: str | None = Field(None, validate_default=True)
    tool_call_id: Annotated[Name | None, Field(validate_default=True)] = None
    """For messages of the role `tool`: the id of the call that the message answers."""
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """The assistant's reasoning; the two names are equivalent."""
    function_call: None = None
    """OpenAI's former name of a call. The templates of models do not know it."""
    prefix: Annotated[None, PlainValidator(_no_prefix, json_schema_input_type=Literal[False] | None)] = None
    """Other servers' request to continue a message; `continue_final_message` is the one that is taken."""

    @field_validator("tool_calls", mode="after")
    @classmethod
    def _assistants_call(cls, calls: ToolCalls | None, info: ValidationInfo) -> ToolCalls | None:
        if calls and info.data.get("role") != "assistant":
            raise PydanticCustomError("tool_calls", "only messages of the role assistant have calls")
        return calls or None

    @field_validator("content", mode="plain", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _content_where_needed(cls, content: object, info: ValidationInfo) -> str | None:
        # Clients in Go leave an empty result of a function out.
        may_lack = info.data.get("role") in ("assistant", "tool")
        return None if content is None and may_lack else _content(content)

    @field_validator("tool_call_id", mode="after")
    @classmethod
    def _tools_answer(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if call_id is None and info.data.get("role") == "tool":
            raise PydanticCustomError("tool_call_id", "messages of the role tool say which call they answer")
        return call_id

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: without null values, always with content, and with arguments as
        objects."""
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
    """False allows at most one call."""
    chat_template_kwargs: TemplateSwitches | None = None
    """Variables of the model's chat template, such as `enable_thinking`."""
    reasoning_effort: Name | None = None
    """Sets the variable of `chat_template_kwargs` of this name; `none` also sets `enable_thinking` to false."""
    verbosity: Name | None = None
    """Sets the variable of `chat_template_kwargs` of this name."""
    continue_final_message: bool | None = None
    """The answer continues the last message, whose turn is left open."""
    add_generation_prompt: bool | None = None
    """False: no turn is opened for the answer. The same holds with `continue_final_message`."""
    include_reasoning: bool | None = None
    """False omits the reasoning from the answer."""

    @property
    def continued(self) -> str:
        """The text that the answer continues: the last message's with `continue_final_message`, else none."""
        return (self.messages[-1].content or "") if self.continue_final_message else ""

    def switches(self) -> dict[str, Any]:
        """Variables of the chat template. `chat_template_kwargs` takes precedence over the other fields."""
        efforts = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        said: dict[str, Any] = {name: value for name, value in efforts.items() if value is not None}
        if self.reasoning_effort == "none":
            said["enable_thinking"] = False
        return said | (self.chat_template_kwargs or {})


class TokenizeRequest(_Body):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: ModelName = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """As the field of completions; of a conversation it can only be false, since its template writes them."""
    tools: Tools | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    return_token_strs: bool | None = None
    """Also report each token as the vocabulary spells it, as in vLLM."""


class DetokenizeRequest(_Body):
    """Body of `POST /detokenize`."""

    model: ModelName = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


SchemaT = TypeVar("SchemaT", bound=Schema)


def parse(schema: type[SchemaT], body: object) -> SchemaT:
    """Validate a decoded JSON body. Raises `ApiError`, a 400 that names the first field at fault."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object")
    _refuse_unsupported(body, schema)
    IGNORED_FIELDS.note(body.keys() - schema.model_fields.keys() - _UNSUPPORTED.keys())
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = field_path(first["loc"])
        raise invalid(param, f"{param}: {first['msg']}") from error


def field_path(location: tuple[int | str, ...]) -> str:
    """Format a field's location: `("messages", 0, "content")` becomes `messages[0].content`."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path.removeprefix(".")


def _refuse_unsupported(body: dict[Any, object], schema: type[Schema]) -> None:
    if _UNSUPPORTED.keys().isdisjoint(body):
        return
    for name, harmless in _UNSUPPORTED.items():
        value = body.get(name)
        if value is None or name in schema.model_fields:
            continue
        if name == "best_of":
            harmless = (*harmless, body.get("n"))
        if not any(value == each and type(value) is type(each) for each in harmless):  # 1 == True
            why = _WHY_UNSUPPORTED.get(name, "")
            raise invalid(name, f"{name} is not supported{why}", code="unsupported_parameter")
