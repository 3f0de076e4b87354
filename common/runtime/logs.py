"""Logging: one line for each event on standard error, as text for people or as JSON for machines.

The details of an event are attached as fields, which the text format may leave out. Fields hold counts, durations,
names and ids, never text of a prompt or an answer. Text from clients and peers can neither start a new line nor make a
line too long: control characters are escaped; messages, fields and exceptions are cut.
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
"""Longest message, field, or line of an exception."""
MAX_TRACE_CHARS = 16_384
"""Longest exception or stack; the beginning and the end of a longer one are kept."""
_FIELDS = "baton_fields"
_INDENT = "    "


def configure_logging(level: str, name: str, log_format: LogFormat = "text") -> None:
    """Write every line to standard error, with the process's name."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter(f"%(asctime)s %(levelname)s {name} %(message)s")
    handler.setFormatter(JsonFormatter(name) if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def about(event: str, **fields: Any) -> dict[str, Any]:
    """The `extra` argument for logging an event in a request's life with its fields."""
    return {_FIELDS: {"event": event, **fields}}


class TextFormatter(logging.Formatter):
    """Formats each event as one line of text. The lines of an exception follow it, indented, so that a line without
    indent always begins another event. Control characters, including line ends, are escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is given)
        """Format the line."""
        record.message = printable(record.message, MAX_MESSAGE_CHARS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the name is given)
        """Format the lines of an exception."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (the name is given)
        """Format the lines of a stack."""
        return _indented(super().formatStack(stack_info))


def _indented(trace: str) -> str:
    lines = _cut_trace(trace).splitlines()
    return "\n".join(_INDENT + printable(line, MAX_MESSAGE_CHARS) for line in lines)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}… ({len(text)} characters)"


def _cut_trace(trace: str) -> str:
    if len(trace) <= MAX_TRACE_CHARS:
        return trace
    half = MAX_TRACE_CHARS // 2
    return f"{trace[:half]}\n… ({len(trace)} characters)\n{trace[-half:]}"


def _cut_field(value: Any) -> Any:
    """`value`, or the beginning of its text if its text is too long."""
    if isinstance(value, str):
        return _cut(value)
    text = json.dumps(value, default=str)
    return value if len(text) <= MAX_MESSAGE_CHARS else _cut(text)


class JsonFormatter(logging.Formatter):
    """Formats a line as one JSON object: `time`, `level`, `process`, `logger`, `message`, then the fields. A value that
    is too long is cut, and ends with its original length."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = _cut_trace(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = _cut_trace(record.stack_info)
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        line |= {name: _cut_field(value) for name, value in fields.items() if name not in line}
        return json.dumps(line, default=str)
