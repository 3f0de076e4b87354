"""Fields of a request that are accepted without effect: which ones on purpose, and a log of all that come."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, get_args

from pydantic import BaseModel

_LOG = logging.getLogger(__name__)
_MAX_NAMES: Final = 256
_MAX_NAME_CHARS: Final = 64

_NOT_STORED = "answers are not stored"
_NO_IMAGES = "there is nothing but text"
_INTERNAL = "ids inside are not the client's to choose"
_NO_TEMPLATE = "only chat templates read it"

IGNORED: Final[Mapping[str, str]] = {
    "ec_transfer_params": _INTERNAL,
    "guided_decoding_backend": "there is one",
    "kv_transfer_params": _INTERNAL,
    "length_penalty": "it is for beam search, which is refused",
    "media_io_kwargs": _NO_IMAGES,
    "metadata": _NOT_STORED,
    "mm_payload": _NO_IMAGES,
    "mm_processor_kwargs": _NO_IMAGES,
    "prediction": "it changes how long an answer takes, never the answer",
    "priority": "the order is by service_tier",
    "prompt_cache_key": "prefixes are found by their tokens; cache_salt separates them",
    "prompt_cache_options": "what is cached is not the client's to choose",
    "prompt_cache_retention": "what is cached is not the client's to choose",
    "reasoning_effort": _NO_TEMPLATE,
    "request_id": _INTERNAL,
    "return_mm_kwargs": _NO_IMAGES,
    "routed_experts_prompt_start": "experts are not reported",
    "safety_identifier": _NOT_STORED,
    "session_id": _INTERNAL,
    "spaces_between_special_tokens": "special tokens are not part of the text",
    "store": _NOT_STORED,
    "stream_interval": "tokens are sent as they come",
    "truncation_side": "prompts are not truncated",
    "user": _NOT_STORED,
    "verbosity": _NO_TEMPLATE,
}
"""Fields of the OpenAI API and of vLLM that would not change the answer, and why; but where a schema has them."""


def unknown_fields(given: object, *schemas: type[BaseModel], path: str = "") -> Iterator[str]:
    """Fields that none of `schemas` has, and that their parts do not have: those as `messages.name`."""
    fields = [item for schema in schemas for item in schema.model_fields.items()]
    known = {field.alias or name: field.annotation for name, field in fields}
    for part in given if isinstance(given, list) else [given]:
        for name, value in part.items() if isinstance(part, dict) else ():
            if name not in known:
                yield path + name
            elif inner := list(_models_in(known[name])):
                yield from unknown_fields(value, *inner, path=f"{path}{name}.")


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)


class IgnoredFields:
    """Lists ignored fields in the log, each once: by name, never with a value. Clients choose the names, so there is a
    bound on how many are listed, and on how much of each."""

    def __init__(self) -> None:
        self._listed: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """These have come with a request. Nothing happens unless the log is at level `debug`."""
        if not _LOG.isEnabledFor(logging.DEBUG):
            return
        new = {name[:_MAX_NAME_CHARS] for name in names} - self._listed
        listed = sorted(new)[: _MAX_NAMES - len(self._listed)]
        if listed:
            self._listed.update(listed)
            _LOG.debug("ignored fields: %r", listed)
