"""Types of request fields that take more than one kind of value, and the values that they become.

Each type is declared once; validation and `/openapi.json` use the same declaration. Validation of a list stops at its
first wrong item: there may be millions of items, and an error object for each would cost seconds and gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from common.contract.sampling import MAX_BIAS, MAX_LOGIT_BIAS, LogitBias, TokenId
from common.contract.tiers import Tier

MAX_PROMPTS: Final = 2048
"""Most prompts in one completions request. The sizes of the body and of the answers bound their total length."""
MAX_MESSAGES: Final = 10_000
"""Most messages of one conversation. Checking and rendering many small messages takes long."""
MAX_CALLS: Final = 4096
"""Most function calls in one conversation."""
MAX_ARGUMENTS_CHARS: Final = 2**20
"""Longest arguments of all function calls in one conversation together, in characters of their JSON."""
MAX_PARTS: Final = 16_384
"""Most message parts in one conversation."""
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 1024
"""Longest stop string in characters."""
MAX_TEXT_CHARS: Final = 2**16
"""Longest schema, expression or grammar in characters."""

TIERS: Final[Mapping[str, Tier]] = {tier.value: tier for tier in Tier} | {
    "auto": Tier.STANDARD,
    "default": Tier.STANDARD,
    "priority": Tier.INTERACTIVE,
    "fast": Tier.INTERACTIVE,
    "scale": Tier.STANDARD,
    "flex": Tier.BATCH,
}
"""Values of `service_tier`: the tiers by name, and OpenAI's names, mapped to the nearest tier."""

TokenPrompt: TypeAlias = tuple[int, ...]
Prompt: TypeAlias = str | TokenPrompt


def text(value: str) -> str:
    """Refuse a lone surrogate: JSON can spell one, but it is not valid text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "holds a lone surrogate, which is not text") from None
    return value


def _takes(given: Any, message: str, become: Callable[[Any], object]) -> PlainValidator:
    """Accept values of the type `given`, refuse others with `message`, and store what `become` returns."""
    adapter: TypeAdapter[Any] = TypeAdapter(given, config=ConfigDict(strict=True))

    def check(value: object) -> object:
        try:
            checked = adapter.validate_python(value)
        except ValidationError:
            raise PydanticCustomError("form", message) from None
        return become(checked)

    return PlainValidator(check, json_schema_input_type=given)


def _prompts(given: str | list[int] | list[str | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(given, str) or isinstance(given[0], int):
        return (_prompt(given),)
    return tuple(map(_prompt, given))


def _prompt(given: str | list[int]) -> Prompt:
    return text(given) if isinstance(given, str) else tuple(given)


def not_many_parts(messages: object) -> object:
    """Bound the calls, their arguments, and the parts of all messages together; each message's own limits do not bound
    the total work."""
    given = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    calls, parts = (
        [value for each in given if isinstance(value := each.get(field), list)] for field in ("tool_calls", "content")
    )
    for field, values, most in (("tool_calls", calls, MAX_CALLS), ("content", parts, MAX_PARTS)):
        if sum(map(len, values)) > most:
            raise PydanticCustomError("form", "more than {most} {field} in all", {"most": most, "field": field})
    if sum(_argument_chars(call) for each in calls for call in each) > MAX_ARGUMENTS_CHARS:
        chars = {"most": MAX_ARGUMENTS_CHARS}
        raise PydanticCustomError("form", "more than {most} characters of arguments in all", chars)
    return messages


def _argument_chars(call: object) -> int:
    match call:
        case {"function": {"arguments": str(arguments)}}:
            return len(arguments)
    return 0


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    return tuple(map(text, [given] if isinstance(given, str) else given or ()))


def _not_many(given: object) -> object:
    """Check the size of an object before its entries, because validation of an object does not stop at the first
    error."""
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("form", "too many entries")
    return given


def _logit_bias(given: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), bias) for token, bias in (given or {}).items())


def _model_name(given: str | None) -> str | None:
    """An empty name counts as absent: clients of servers with one model send it."""
    return text(given) if given else None


def _tier(given: object) -> Tier:
    tier = Tier.STANDARD if given is None else TIERS.get(given) if isinstance(given, str) else None
    if tier is None:
        raise PydanticCustomError("service_tier", "must be one of {names}", {"names": ", ".join(TIERS)})
    return tier


_Text = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Biases = Annotated[
    dict[_TokenName, LogitBias],
    Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}),
    BeforeValidator(_not_many),
]

Text = Annotated[str, AfterValidator(text)]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(text)]
ModelName = Annotated[Annotated[str, Field(max_length=256)] | None, AfterValidator(_model_name)]
GrammarText = Annotated[str, Field(max_length=MAX_TEXT_CHARS), AfterValidator(text)]

Prompts = Annotated[
    tuple[Prompt, ...],
    _takes(
        _Text | _Tokens | Annotated[list[_Text | _Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
        f"must be a string, an array of token ids, or an array of at most {MAX_PROMPTS} of either, none of them empty",
        _prompts,
    ),
]
Stops = Annotated[
    tuple[str, ...],
    _takes(
        _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None,
        f"must be a string or an array of at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_CHARS} characters",
        _stops,
    ),
]
LogitBiases = Annotated[
    tuple[tuple[int, float], ...],
    _takes(
        _Biases | None,
        f"must be an object of at most {MAX_LOGIT_BIAS} token ids in decimal digits, "
        f"each with a number from -{MAX_BIAS} to {MAX_BIAS}",
        _logit_bias,
    ),
]
ServiceTier = Annotated[Tier, PlainValidator(_tier), WithJsonSchema({"enum": [*TIERS, None]})]
