"""The routes of the HTTP API, and `/openapi.json`, their description in OpenAPI 3.1. It is made from the schemas that
check the requests and from the types of the answers.

A new path gets a row in `ROUTES`, by which it is served too. The document does not depend on settings: it is the same
for each gateway of one version.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from gateway.access.http_guard import OPEN_PATHS
from gateway.answer import answer_schemas as answers
from gateway.intake.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from gateway.web.http_errors import CLIENT_CLOSED_REQUEST, ApiError

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
PLAIN: Final = "text/plain"

Answers = Mapping[str, Any]
"""Media type → type of an answer, of each event for an event stream; None if JSON Schema cannot describe it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    """As aiohttp's router takes it."""
    handler: str
    """Name of the method of the API's handlers that serves it."""
    operation: str
    """Operation name for generators of clients."""
    tag: str
    summary: str
    body: type[BaseModel] | None = None
    answers: Answers
    errors: tuple[int, ...] = ()
    """Statuses with an error object, in addition to those of every path."""
    other: Mapping[int, Answers] = field(default_factory=dict)
    """Statuses other than 200 with another answer."""

    @property
    def canonical(self) -> str:
        """The path with names only in its braces."""
        return re.sub(r":[^}]*\}", "}", self.path)


_ERRORS: Final[Mapping[int, str]] = {
    400: "The request is wrong, or asks for what is not supported; `param` names the field.",
    401: "A valid API key is needed.",
    403: "This API key may not use that tier, or a web page of another site has sent this.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body has an encoding that is not taken.",
    429: "All capacity is taken for the moment.",
    CLIENT_CLOSED_REQUEST: "The request was cancelled.",
    500: "A failure inside.",
    503: "No worker can serve the request now.",
    504: "The request took longer than it may.",
}
_BODY_ERRORS: Final = (400, 403, 404, 408, 413, 415, 429)
_GENERATING_ERRORS: Final = (*_BODY_ERRORS, CLIENT_CLOSED_REQUEST, 503, 504)

ROUTES: Final = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler="chat_completions",
        operation="createChatCompletion",
        tag="generate",
        summary="Answer a chat, whole or streamed.",
        body=ChatRequest,
        answers={JSON: answers.ChatCompletion, EVENTS: answers.ChatEvent},
        errors=_GENERATING_ERRORS,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler="completions",
        operation="createCompletion",
        tag="generate",
        summary="Continue one or several prompts, as text or token ids, whole or streamed.",
        body=CompletionRequest,
        answers={JSON: answers.Completion, EVENTS: answers.CompletionEvent},
        errors=_GENERATING_ERRORS,
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler="tokenize",
        operation="tokenize",
        tag="tokens",
        summary="The tokens of either a text or a conversation.",
        body=TokenizeRequest,
        answers={JSON: answers.Tokenized},
        errors=_BODY_ERRORS,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler="detokenize",
        operation="detokenize",
        tag="tokens",
        summary="The text of tokens.",
        body=DetokenizeRequest,
        answers={JSON: answers.DetokenizedText},
        errors=_BODY_ERRORS,
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler="models",
        operation="listModels",
        tag="models",
        summary="The one model that is served.",
        answers={JSON: answers.ModelList},
    ),
    Route(
        method="GET",
        path="/v1/models/{name:.+}",
        handler="model",
        operation="retrieveModel",
        tag="models",
        summary="The model, by its name.",
        answers={JSON: answers.Model},
        errors=(404,),
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler="openapi",
        operation="describe",
        tag="models",
        summary="This document.",
        answers={JSON: None},
    ),
    Route(
        method="GET",
        path="/health",
        handler="health",
        operation="health",
        tag="probes",
        summary="Whether the process is alive.",
        answers={JSON: answers.Health},
    ),
    Route(
        method="GET",
        path="/ping",
        handler="health",
        operation="ping",
        tag="probes",
        summary="The same.",
        answers={JSON: answers.Health},
    ),
    Route(
        method="GET",
        path="/version",
        handler="version",
        operation="version",
        tag="probes",
        summary="What is installed.",
        answers={JSON: answers.Version},
    ),
    Route(
        method="GET",
        path="/load",
        handler="load",
        operation="load",
        tag="probes",
        summary="How many requests are in flight here.",
        answers={JSON: answers.Load},
    ),
    Route(
        method="GET",
        path="/ready",
        handler="ready",
        operation="ready",
        tag="probes",
        summary="Whether a request that arrives now could be served.",
        answers={JSON: answers.ReadyAnswer},
        other={503: {JSON: answers.ReadyAnswer}},
    ),
    Route(
        method="GET",
        path="/metrics",
        handler="metrics",
        operation="metrics",
        tag="probes",
        summary="Metrics in Prometheus' text format.",
        answers={PLAIN: None},
    ),
)


class SchemaMaker(GenerateJsonSchema):
    """pydantic's generator, without titles that repeat a field's name, and without defaults that only mean absence."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """False: no field has a title."""
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """The schema with its default, unless that is None or an empty list."""
        made = super().default_schema(schema)
        if made.get("default") in (None, []):
            made.pop("default", None)
        return made


@functools.cache
def document() -> bytes:
    """The encoded document."""
    return json.dumps(describe()).encode()


def describe() -> dict[str, Any]:
    """The document as a JSON object."""
    references, made = TypeAdapter.json_schemas(
        [(each, "validation", TypeAdapter(each)) for each in dict.fromkeys(_described())],
        ref_template="#/components/schemas/{model}",
        schema_generator=SchemaMaker,
    )
    schemas = _Schemas({each: reference for (each, _), reference in references.items()})
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.canonical, {})[route.method.lower()] = schemas.operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "v1",
            "description": "The OpenAI API for text, served with prefill and decode on separate pools of workers.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": made["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Needed where the operator has set keys."},
                "bareKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
            },
        },
    }


def _described() -> Iterator[Any]:
    yield answers.ErrorAnswer
    for route in ROUTES:
        held = [
            route.body,
            *route.answers.values(),
            *(each for other in route.other.values() for each in other.values()),
        ]
        yield from (each for each in held if each is not None)


class _Schemas:
    """Builds operations, with references to the schemas of bodies and answers."""

    def __init__(self, references: Mapping[Any, JsonSchemaValue]) -> None:
        self._references = references

    def operation(self, route: Route) -> dict[str, Any]:
        """The operation object of a route."""
        is_open = route.path in OPEN_PATHS
        errors = sorted({*route.errors, 500} | (set() if is_open else {401}))
        operation: dict[str, Any] = {
            "operationId": route.operation,
            "tags": [route.tag],
            "summary": route.summary,
            "security": [] if is_open else [{"key": []}, {"bareKey": []}, {}],
            "responses": {"200": {"description": "OK", "content": self._content(route.answers)}}
            | {str(status): self._error(status, held) for status, held in route.other.items()}
            | {str(status): self._error(status, {JSON: answers.ErrorAnswer}) for status in errors},
        }
        if names := [part[1:-1] for part in route.canonical.split("/") if part.startswith("{")]:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": self._content({JSON: route.body})}
        return operation

    def _content(self, held: Answers) -> dict[str, Any]:
        return {
            media_type: {} if model is None else {"schema": self._references[model]}
            for media_type, model in held.items()
        }

    def _error(self, status: int, held: Answers) -> dict[str, Any]:
        error = {"description": _ERRORS[status], "content": self._content(held)}
        if held.get(JSON) is answers.ErrorAnswer and "Retry-After" in ApiError(status, "").response().headers:
            error["headers"] = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
        return error
