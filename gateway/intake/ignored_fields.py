"""Request fields that are accepted without effect: a table of those ignored on purpose, and a log of all that occur."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Final, get_args

from pydantic import BaseModel

_LOG = logging.getLogger(__name__)
_MAX_NAMES: Final = 256
_MAX_NAME_CHARS: Final = 64
_MOST_LOOKED_AT: Final = 10_000

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
"""Fields of the OpenAI API and of vLLM that have no effect, with the reason. A field that the request's schema declares
does have an effect, even if it is listed here."""


def unknown_fields(given: object, schema: type[BaseModel]) -> Iterator[str]:
    """Fields that `schema` and its nested schemas do not declare, a nested one as `messages.name`. Only the first
    10,000 fields and parts are examined."""
    left: deque[tuple[object, tuple[type[BaseModel], ...], str]] = deque([(given, (schema,), "")])
    num_looked_at = 0
    while left:
        given, schemas, path = left.popleft()
        known = _known(schemas)
        for part in given if isinstance(given, list) else (given,):
            num_looked_at += 1
            for name, value in part.items() if isinstance(part, dict) else ():
                num_looked_at += 1
                if name not in known:
                    yield path + name
                elif known[name] and isinstance(value, (dict, list)):
                    left.append((value, known[name], f"{path}{name}."))
                if num_looked_at >= _MOST_LOOKED_AT:
                    return
            if num_looked_at >= _MOST_LOOKED_AT:
                return


@cache
def _known(schemas: tuple[type[BaseModel], ...]) -> dict[str, tuple[type[BaseModel], ...]]:
    """Field name → schemas nested in it, over all fields of these schemas."""
    fields = [item for schema in schemas for item in schema.model_fields.items()]
    return {field.alias or name: tuple(_models_in(field.annotation)) for name, field in fields}


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)


class IgnoredFields:
    """Logs each ignored field once, by name and never with a value. Clients choose the names, so the number of logged
    names and their length are bounded; unprintable characters are escaped."""

    def __init__(self) -> None:
        self._listed: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log the names that are new. `names` is not iterated if the log level is above `info`, or if the maximum
        number of names has been logged."""
        if len(self._listed) == _MAX_NAMES or not _LOG.isEnabledFor(logging.INFO):
            return
        new: set[str] = set()
        for name in names:
            new |= {name[:_MAX_NAME_CHARS]} - self._listed
            if len(self._listed) + len(new) == _MAX_NAMES:
                break
        if new:
            self._listed |= new
            _LOG.info("ignored fields: %r", sorted(new))
            if len(self._listed) == _MAX_NAMES:
                _LOG.info("no other field that is ignored will be named: %d have been", _MAX_NAMES)
