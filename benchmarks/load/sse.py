"""Decodes server-sent events from a stream of bytes, which the network may split anywhere."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT_BYTES = 16 * 2**20


class MalformedStreamError(Exception):
    """The received bytes are not a stream of events."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    name: str
    data: bytes


class EventDecoder:
    """Collects bytes until they form events."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes. Raises `MalformedStreamError` for one larger than 16 MiB."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise MalformedStreamError(f"a line of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            event = self._line(line.removesuffix(b"\r"))
            if event is not None:
                events.append(event)
        return events

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> Event | None:
        name, data, self._name, self._data = self._name, self._data, "", []
        return Event(name, b"\n".join(data)) if data else None
