"""A control link as the model has it: two queues in order, and what each side believes of the session.

What `common.runtime.channel` does with counters, heartbeats and timeouts is here a choice of the search: a message at
the head of a queue may be lost, and the client may notice that (`hello`) at any later moment; either side may take the
other for dead; a worker that has crashed is noticed at any moment after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message


class Hi(NamedTuple):
    """Hello: the client's number, and what it holds open."""

    number: int
    listed: tuple[RequestKey, ...]


class Answer(NamedTuple):
    """Welcome: the number of the Hello, and what is left open."""

    number: int
    known: tuple[RequestKey, ...]


Entry = Message | Hi | Answer
UP, DOWN = "up", "down"
"""Towards the worker; towards its client."""


@dataclass(eq=False)
class Link:
    """A client's link to the worker at an address."""

    client: Incarnation
    address: str
    worker: Incarnation
    """The life of the worker that the session is, or last was, with."""
    up: list[Entry] = field(default_factory=list)
    down: list[Entry] = field(default_factory=list)
    known: bool = True
    """Whether the client takes the session for open."""
    session: bool = True
    """Whether the worker does."""
    client_died: bool = False
    worker_died: bool = False
    """And the other side has not noticed."""
    torn: bool = False
    """Messages were lost: the client is to say Hello again."""
    number: int = 0
    """Number of the last Hello; `torn` stays until its answer comes."""
    asked: bool = False
    """Whether the answer to it is under way."""
    listed: tuple[RequestKey, ...] = ()
    replayed: list[Message] = field(default_factory=list)
    """Copies of messages to the worker that will arrive once more, at any moment."""

    @property
    def name(self) -> str:
        """For traces."""
        return f"{self.client}>{self.address}"

    def send_up(self, message: Message) -> None:
        """The client sends; inert without a session."""
        if self.known:
            self.up.append(message)

    def send_down(self, message: Message) -> None:
        """The worker sends; inert without a session."""
        if self.session and not self.client_died:
            self.down.append(message)

    def queue(self, way: str) -> list[Entry]:
        """The messages in flight, one way."""
        return self.up if way == UP else self.down

    def lose(self, way: str) -> None:
        """The next message is lost. Whoever waits for the answer to a Hello says it again."""
        self.queue(way).pop(0)
        self.torn, self.asked = True, False

    def hello(self, listed: tuple[RequestKey, ...]) -> None:
        """The client says Hello again, in the same session."""
        self.number += 1
        self.listed, self.asked = listed, True
        self.up.append(Hi(self.number, listed))

    def close(self) -> None:
        """The client takes the session for lost; what it has sent may still arrive."""
        self.known = self.torn = self.asked = False
        self.down.clear()

    def restart(self) -> None:
        """The worker's process has died: whatever was on its way there is gone."""
        self.worker_died = self.known
        self.session = False
        self.up.clear()
        self.replayed.clear()


def twice(entry: Entry) -> Entry:
    """A second copy of a message."""
    return replace(entry) if isinstance(entry, Message) else entry
