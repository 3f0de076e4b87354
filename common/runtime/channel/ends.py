"""What both ends of a control channel have: a bounded outbox, turns of the event loop, and patience after a stall."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from common.contract.codec import encode_some
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import Decode, Message, Prefill
from common.runtime.clock import Pulse

MAX_OUTBOX_MESSAGES = 65_536
"""Messages waiting for one peer that does not read; one more and the peer counts as lost."""
RECONNECT_S = 0.4
"""Time in which a peer must say something again after its connection has broken: a process that has died never does."""
BACKPRESSURE_RETRY_S = 0.01
GOODBYE = "said goodbye"
TURN_BYTES = 2**16
"""Of a frame, whose messages are handled in one turn of the event loop."""
_STALL_SHARE = 0.25
"""Of the timeout: a timer that comes later than this shows that the event loop has stood still."""


@dataclass(slots=True)
class Traffic:
    """Counters of one end of a channel."""

    frames_refused: int = 0
    """Frames that were malformed, or from a sender with no session."""
    sessions_lost: int = 0
    resyncs: int = 0
    """Sessions that were opened again because messages had been lost."""


class Outbox:
    """Messages for one peer, in order, until ZeroMQ has taken them."""

    def __init__(self, me: Incarnation) -> None:
        self._me = me
        self._messages: deque[Message] = deque()
        self._frame: tuple[bytes, int] | None = None
        """The first messages, encoded and counted: once, however often they are tried."""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def overfull(self) -> bool:
        """Whether the peer has left more unread than anybody may."""
        return len(self._messages) > MAX_OUTBOX_MESSAGES

    @property
    def unsent_work(self) -> frozenset[RequestKey]:
        """The requests that the peer cannot know of yet."""
        return frozenset(message.key for message in self._messages if isinstance(message, Prefill | Decode))

    def append(self, message: Message) -> None:
        """Put a message behind the others."""
        self._messages.append(message)

    def frame(self) -> bytes:
        """The first messages, as many as one frame holds. Raises `ProtocolError` if the first one cannot travel."""
        if self._frame is None:
            self._frame = encode_some(self._me, self._messages)
        return self._frame[0]

    def left(self) -> int:
        """ZeroMQ has taken that frame; how many messages it held."""
        assert self._frame is not None
        (_, count), self._frame = self._frame, None
        for _ in range(count):
            self._messages.popleft()
        return count


def turns(messages: Sequence[Message], num_bytes: int) -> Iterator[Sequence[Message]]:
    """The messages of a frame of so many bytes, in as many parts as let others run between them."""
    size = max(1, TURN_BYTES * len(messages) // max(1, num_bytes))
    return (messages[start : start + size] for start in range(0, len(messages), size))


async def rest() -> None:
    """Let others run between two turns: also the task of a timer that is due, which runs a turn after the timer."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def sleep(seconds: float, pulse: Pulse, until: asyncio.Event | None = None) -> float:
    """Sleep, or until an event; for how long the event loop has stood still at the end of it, or 0. What others have
    sent meanwhile lies unread, so nobody may be judged silent for that time."""
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds
    if until is None:
        await asyncio.sleep(seconds)
    else:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await until.wait()
    return _stall_s(loop.time() - due, pulse)


def after_reconnect_time(pulse: Pulse, judge: Callable[[], None]) -> None:
    """Call `judge` when a peer whose connection has broken should have spoken again; later, should the event loop
    stand still meanwhile."""
    loop = asyncio.get_running_loop()
    due = loop.time() + RECONNECT_S

    def look() -> None:
        if _stall_s(loop.time() - due, pulse):
            after_reconnect_time(pulse, judge)
        else:
            judge()

    loop.call_at(due, look)


def _stall_s(late_s: float, pulse: Pulse) -> float:
    return late_s if late_s > _STALL_SHARE * pulse.timeout_s else 0.0


def result(sent: Awaitable[object]) -> None:
    """The outcome of a send that does not wait: pyzmq answers with a future that is done. Raises what it holds."""
    assert isinstance(sent, asyncio.Future)
    sent.result()
