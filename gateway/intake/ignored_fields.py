"""Request fields that are accepted without effect: a table of those ignored on purpose, and a log of all that occur."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

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


IGNORED_FIELDS = IgnoredFields()
"""Those of all requests to this process."""
