"""Logging: one line for each event on standard error, as text for people or as JSON for machines.

What a line is about goes along as fields, which the text may leave out. Fields hold counts, durations, names and ids,
never text of a prompt or an answer. Whatever comes from outside (a peer's words, a client's) can neither begin a line
nor make one endless.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from common.contract.printable import printable

LogFormat = Literal["text", "json"]
MAX_MESSAGE_CHARS = 4096
"""Longest message, or line of an exception."""
_FIELDS = "baton_fields"
_INDENT = "    "


def configure_logging(level: str, name: str, log_format: LogFormat = "text") -> None:
    """Send every line to standard error, with the process's name."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter(f"%(asctime)s %(levelname)s {name} %(message)s")
    handler.setFormatter(JsonFormatter(name) if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def about(event: str, **fields: Any) -> dict[str, Any]:
    """The `extra` of a line about an event in a request's life."""
    return {_FIELDS: {"event": event, **fields}}


class TextFormatter(logging.Formatter):
    """A line of text for each event. Those of an exception follow it, indented: what is not indented is another event.
    Control characters, line ends among them, are spelt out."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is given)
        """The line."""
        record.message = printable(record.message, MAX_MESSAGE_CHARS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the name is given)
        """The lines of an exception."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (the name is given)
        """The lines of a stack."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(_INDENT + printable(line, MAX_MESSAGE_CHARS) for line in text.splitlines())


class JsonFormatter(logging.Formatter):
    """A line as one JSON object: `time`, `level`, `process`, `logger`, `message`, then the fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in it."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage()[:MAX_MESSAGE_CHARS],
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        return json.dumps(line | {name: value for name, value in fields.items() if name not in line}, default=str)
