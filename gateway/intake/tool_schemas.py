"""Schemas of functions that a model may call, and of calls in earlier messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

MAX_TOOLS: Final = 128
"""Most functions of one request, and most calls of one message."""
MAX_PARAMETERS_CHARS: Final = 2**16
"""Longest JSON schema of one function's parameters, in characters."""
MAX_TOOLS_CHARS: Final = 2**18
"""Longest JSON of all functions of one request, in characters."""
MAX_SWITCHES: Final = 32
MAX_SWITCHES_CHARS: Final = 2**14
"""Longest JSON of `chat_template_kwargs`, in characters."""


def _json_chars(value: object) -> int:
    """Length of a value as JSON, in characters. Refuses a value that cannot be written as JSON text."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except RecursionError:
        raise PydanticCustomError("json", "is nested too deeply") from None
    except UnicodeEncodeError:
        raise PydanticCustomError("json", "holds a lone surrogate, which is not text") from None
    return len(text)


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    if _json_chars(value) > MAX_PARAMETERS_CHARS:
        most = {"most": MAX_PARAMETERS_CHARS}
        raise PydanticCustomError("parameters", "must be a JSON schema of at most {most} characters", most)
    if value.get("type", "object") != "object":
        raise PydanticCustomError("parameters", 'must be a JSON schema of type "object"')
    return value


def _switches(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_SWITCHES or _json_chars(value) > MAX_SWITCHES_CHARS:
        most = {"most": MAX_SWITCHES, "chars": MAX_SWITCHES_CHARS}
        raise PydanticCustomError("switches", "must be an object of at most {most} keys, {chars} characters", most)
    return value


def _arguments(value: object) -> dict[str, Any] | str:
    """Arguments as chat templates expect them: an object if the text is the JSON of one, else the text. An object with
    half a surrogate pair, which a model may have written as an escape, is no text for a template: it stays as it is."""
    if not isinstance(value, str):
        raise PydanticCustomError("arguments", "must be a string, the JSON of an object")
    try:
        parsed = json.loads(value) if value else {}
        if isinstance(parsed, dict):
            json.dumps(parsed, ensure_ascii=False).encode()
            return parsed
    except (ValueError, RecursionError):
        pass
    _json_chars(value)
    return value


class Schema(BaseModel):
    """Base of the schemas of bodies and their parts. A field's docstring is its description in `/openapi.json`."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Schema):
    """A function's name, description and parameters."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters)] | None = None
    strict: bool | None = None
    """Has no effect: arguments follow the schema whenever a call is enforced, and only then."""


class Tool(Schema):
    """A function that may be called."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _tools(tools: list[Tool]) -> list[Tool]:
    if _json_chars([tool.for_template() for tool in tools]) > MAX_TOOLS_CHARS:
        raise PydanticCustomError("tools", "must be at most {most} characters of JSON", {"most": MAX_TOOLS_CHARS})
    if len({tool.function.name for tool in tools}) < len(tools):
        raise PydanticCustomError("tools", "two functions have the same name")
    return tools


class NamedFunction(Schema):
    """A function, referred to by its name."""

    name: FunctionName


class NamedToolChoice(Schema):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Schema):
    """The functions of `tools` that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolChoice(Schema):
    """Acts as if the request had only these functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _tool_choice(value: object) -> str | NamedToolChoice | AllowedToolChoice | None:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case "any":
            return "required"
        case {"type": "allowed_tools"}:
            try:
                return AllowedToolChoice.model_validate(value)
            except ValidationError:
                raise PydanticCustomError("tool_choice", "must be {shape}", {"shape": _ALLOWED_SHAPE}) from None
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedToolChoice.model_construct(type="function", function=NamedFunction.model_construct(name=name))
        case _:
            raise PydanticCustomError(
                "tool_choice",
                'must be "none", "auto", "required", {shape} or {allowed}',
                {"shape": _NAMED_SHAPE, "allowed": _ALLOWED_SHAPE},
            )


_NAMED_SHAPE: Final = '{"type": "function", "function": {"name": …}}'
_ALLOWED_SHAPE: Final = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}'

Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_tools)]
ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice | None,
    PlainValidator(
        _tool_choice,
        json_schema_input_type=Literal["none", "auto", "required", "any"] | NamedToolChoice | AllowedToolChoice | None,
    ),
]
TemplateSwitches: TypeAlias = Annotated[dict[str, Any], AfterValidator(_switches)]


class FunctionCall(Schema):
    """The name of a called function and its arguments."""

    name: FunctionName
    arguments: Annotated[dict[str, Any] | str, PlainValidator(_arguments, json_schema_input_type=str)]


class ToolCall(Schema):
    """A call that the model has made."""

    id: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[ -~]*$")]
    type: Literal["function"]
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


ToolCalls: TypeAlias = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)]
