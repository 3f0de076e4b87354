"""Parts of both ends of a control channel: a bounded outbox, turns of the event loop, and timers that detect stalls."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from common.contract.codec import encode_some
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message, RequestMessage
from common.contract.messages.gateway import Decode, Prefill
from common.contract.messages.worker import StepTokens
from common.runtime.clock import Pulse

MAX_OUTBOX_MESSAGES = 65_536
"""Most messages that wait for one peer that does not read; with one more the peer counts as lost. Each token in a
`StepTokens` counts as one."""
RECONNECT_S = 0.4
"""Seconds after a broken connection within which the peer must speak again; otherwise it counts as lost."""
BACKPRESSURE_RETRY_S = 0.01
GOODBYE = "said goodbye"
TURN_BYTES = 2**16
"""Bytes of a frame whose messages are handled in one turn of the event loop; a larger frame takes several turns."""
MAX_SOCKETS = 2**15
"""Most sockets of a context. A link takes three; by ZeroMQ's default, 1,023, the 342nd failed."""
_STALL_SHARE = 0.25
"""Share of the timeout: a timer that fires later than this shows that the event loop was blocked."""
_NUM_LOOKS = 4
"""Timers into which `RECONNECT_S` is divided, so that a stall shows wherever it begins and ends."""
_MAX_LOOKS = 12
"""Most such timers for one broken connection, so that an event loop whose every turn is long comes to an end, too."""
_LATE_S = 0.1
"""Such a timer that fires later than this shows that the event loop was blocked. An ordinary turn is much shorter."""


@dataclass(slots=True)
class Traffic:
    """Counters of one end of a channel."""

    frames_refused: int = 0
    """Frames that were malformed, and messages from a sender without a session."""
    sessions_lost: int = 0
    resyncs: int = 0
    """Number of times that a session was opened again because messages may have been lost."""

    def add(self, other: Traffic) -> None:
        """Add the counts of another end."""
        self.frames_refused += other.frames_refused
        self.sessions_lost += other.sessions_lost
        self.resyncs += other.resyncs


def channel_context() -> zmq.asyncio.Context:
    """A ZeroMQ context with room for links to thousands of peers."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class Outbox:
    """Messages for one peer, in order, that ZeroMQ has not accepted yet."""

    def __init__(self, me: Incarnation) -> None:
        self._me = me
        self._messages: deque[Message] = deque()
        self._weight = 0
        """Number of messages, each token in a `StepTokens` counted as one."""
        self._frame: tuple[bytes, int] | None = None
        """(the first messages, encoded; their number), kept so that a retry does not encode them again."""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def overfull(self) -> bool:
        """Whether more than `MAX_OUTBOX_MESSAGES` messages wait."""
        return self._weight > MAX_OUTBOX_MESSAGES

    @property
    def unsent_work(self) -> frozenset[RequestKey]:
        """The requests whose first message waits here, so that the peer cannot know them yet."""
        return frozenset(message.key for message in self._messages if isinstance(message, Prefill | Decode))

    @property
    def told(self) -> frozenset[RequestKey]:
        """The requests that messages are about which wait here."""
        return frozenset(message.key for message in self._messages if isinstance(message, RequestMessage))

    def append(self, message: Message) -> None:
        """Append a message."""
        self._messages.append(message)
        self._weight += _weight(message)

    def frame(self) -> bytes:
        """Encode the first messages, as many as one frame holds.

        Raises `ProtocolError` if the first one cannot be encoded.
        """
        if self._frame is None:
            self._frame = encode_some(self._me, self._messages)
        return self._frame[0]

    def left(self) -> int:
        """Remove the messages of the last `frame`, which ZeroMQ has accepted; return their number."""
        assert self._frame is not None
        (_, count), self._frame = self._frame, None
        for _ in range(count):
            self._weight -= _weight(self._messages.popleft())
        return count


def _weight(message: Message) -> int:
    return len(message.handles) if isinstance(message, StepTokens) else 1


def turns(messages: Sequence[Message], num_bytes: int) -> Iterator[Sequence[Message]]:
    """Split the messages of a frame of `num_bytes` bytes into parts of about `TURN_BYTES`, one for each turn."""
    size = max(1, TURN_BYTES * len(messages) // max(1, num_bytes))
    return (messages[start : start + size] for start in range(0, len(messages), size))


async def rest() -> None:
    """Let other tasks run between two turns. Twice, since a task that a timer wakes runs one turn after the timer."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def sleep(seconds: float, pulse: Pulse, until: asyncio.Event | None = None) -> float:
    """Sleep for `seconds`, or until the event is set; return the seconds for which the event loop was blocked at the
    end of the sleep, or 0.

    Messages that arrived while it was blocked lie unread, so that time does not count as a peer's silence.
    """
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds
    if until is None:
        await asyncio.sleep(seconds)
    else:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await until.wait()
    late_s = loop.time() - due
    return late_s if late_s > _STALL_SHARE * pulse.timeout_s else 0.0


def after_reconnect_time(judge: Callable[[], None]) -> None:
    """Call `judge` after `RECONNECT_S`; if the event loop was blocked meanwhile, the time begins anew.

    A stall of more than `_LATE_S` + `RECONNECT_S` / `_NUM_LOOKS` always shows. The last of `_MAX_LOOKS` timers calls
    `judge` in any case.
    """
    loop = asyncio.get_running_loop()
    interval_s = RECONNECT_S / _NUM_LOOKS

    def look(due: float, num_in_time: int, num_left: int) -> None:
        if loop.time() - due > _LATE_S:  # an answer may lie unread
            due, num_in_time = loop.time(), 0
        if num_in_time == _NUM_LOOKS or not num_left:
            judge()
            return
        due += interval_s
        loop.call_at(due, look, due, num_in_time + 1, num_left - 1)

    look(loop.time(), 0, _MAX_LOOKS)


def result(sent: Awaitable[object]) -> None:
    """Raise the exception of a send with `NOBLOCK`, if any: pyzmq returns a future that is already done."""
    assert isinstance(sent, asyncio.Future)
    sent.result()
