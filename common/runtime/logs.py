"""Logging: one line for each event on standard error, as text for people or as JSON for machines.

The details of an event are attached as fields, which the text format may leave out. Fields hold counts, durations,
names and ids, never text of a prompt or an answer. Text from clients and peers can neither start a new line nor make a
line too long: control characters are escaped; messages, fields and exceptions are cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from common.contract.printable import printable

LogFormat = Literal["text", "json"]
MAX_MESSAGE_CHARS = 4096
"""Longest message, field, or line of an exception."""
MAX_TRACE_CHARS = 16_384
"""Longest exception or stack; the beginning and the end of a longer one are kept."""
_FIELDS = "baton_fields"
_INDENT = "    "
_shows_fields = True
"""Whether the configured format shows the fields of an event."""


def configure_logging(level: str, name: str, log_format: LogFormat = "text") -> None:
    """Write every line to standard error, with the process's name."""
    global _shows_fields
    _shows_fields = log_format == "json"
    logging._srcfile = None  # a documented switch: no record looks for its caller
    logging.setLogRecordFactory(Record)
    handler = TurnHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(name) if log_format == "json" else TextFormatter(name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def about(event: str, more: Callable[[], Mapping[str, Any]] = dict, /, **fields: Any) -> dict[str, Any]:
    """The `extra` argument for logging an event in a request's life with its fields. `more` computes further fields,
    if the format shows any."""
    return {_FIELDS: {"event": event, **fields, **more()}} if _shows_fields else {}


class Record(logging.LogRecord):
    """A record without what no format shows: the place in the code, the thread and the process."""

    pathname = filename = module = funcName = ""
    lineno = 0
    threadName = processName = process = thread = None

    def __init__(
        self,
        name: str,
        level: int,
        pathname: str,
        lineno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        func: str | None = None,
        sinfo: str | None = None,
        **_: object,
    ) -> None:
        self.name, self.levelno, self.levelname = name, level, logging.getLevelName(level)
        self.msg = msg
        self.args = args[0] if args and len(args) == 1 and isinstance(args[0], Mapping) and args[0] else args
        self.exc_info, self.exc_text, self.stack_info = exc_info, None, sinfo
        self.created = time.time()
        self.msecs = int((self.created - int(self.created)) * 1000)
        self.relativeCreated = 0.0


class TurnHandler(logging.StreamHandler[TextIO]):
    """Writes the lines of one turn of the event loop together, which saves most system calls of a busy process. A
    warning, or anything more severe, is written at once with the lines before it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []
        self._scheduled = False

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; `handle` holds the lock."""
        try:
            self._lines.append(self.format(record) + self.terminator)
            loop = None if record.levelno >= logging.WARNING else asyncio._get_running_loop()
            if loop is None:
                self.flush()
            elif not self._scheduled:
                self._scheduled = True
                loop.call_soon(self.flush)
        except Exception:  # noqa: BLE001 (as every handler does)
            self.handleError(record)

    def flush(self) -> None:
        """Write the lines taken so far."""
        assert self.lock is not None
        with self.lock:
            self._scheduled = False
            if self._lines:
                lines, self._lines = self._lines, []
                self.stream.write("".join(lines))
                super().flush()


class TextFormatter(logging.Formatter):
    """Formats each event as one line of text. The lines of an exception follow it, indented, so that a line without
    indent always begins another event. Control characters, including line ends, are escaped."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._second = -1
        """The last second that was formatted, in Unix time."""
        self._time = ""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record: one line, and the lines of its exception and stack."""
        second = int(record.created)
        if second != self._second:
            self._second, self._time = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        message = printable(record.getMessage(), MAX_MESSAGE_CHARS)
        line = f"{self._time},{int(record.msecs):03d} {record.levelname} {self._process} {message}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return f"{line}\n{self.formatStack(record.stack_info)}" if record.stack_info else line

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
