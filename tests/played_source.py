"""The control side of a source that a test plays by hand, over real ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

import zmq
import zmq.asyncio

from common.contract.codec import decode, encode
from common.contract.ids import Incarnation, new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.fields import Message
from common.contract.messages.session import Hello, Role, Welcome

WAIT_S = 30.0
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="w", layout=LAYOUT)

Kind = TypeVar("Kind", bound=Message)


class PlayedSource:
    """A ROUTER that a sink links to. It says what it is told to say, and under which incarnation."""

    def __init__(self, sink: Incarnation) -> None:
        self.incarnation = new_incarnation()
        self.hello: Hello | None = None
        """The newest one that was answered."""
        self._answers: str | None = None
        """The transport with which further Hellos are answered; None if they are the test's to answer."""
        self._sink = sink
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.address = f"127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._heard: asyncio.Queue[Message] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            _, frame = await self._socket.recv_multipart()
            for message in decode(frame)[1]:
                if isinstance(message, Hello) and self._answers is not None:
                    await self._welcome(message, self._answers)
                else:
                    self._heard.put_nowait(message)

    async def expect(self, kind: type[Kind]) -> Kind:
        """The next message of this kind from the sink; others are skipped."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self._heard.get()
                if isinstance(message, kind):
                    return message

    async def hear_all(self, wait_s: float = 0.1) -> list[Message]:
        """What the sink has said by now."""
        heard: list[Message] = []
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(wait_s):
                    heard.append(await self._heard.get())
        return heard

    async def send(self, *messages: Message) -> None:
        """Send within one frame."""
        self._answers = None
        await self._send(*messages)

    async def _send(self, *messages: Message) -> None:
        await self._socket.send_multipart([self._sink.encode(), encode(self.incarnation, messages)])

    async def welcome(self, transport: str = "zmq") -> Hello:
        """Answer the newest Hello, and those that come before something else is sent: a sink that is slow to read an
        answer says Hello again, and then only the answer to that one counts."""
        hello = await self.expect(Hello)
        self._answers = transport
        while not self._heard.empty():
            message = self._heard.get_nowait()
            hello = message if isinstance(message, Hello) else hello
        await self._welcome(hello, transport)
        return hello

    async def _welcome(self, hello: Hello, transport: str) -> None:
        self.hello = hello
        await self._send(self.answer(hello, transport))

    def answer(self, hello: Hello, transport: str = "zmq") -> Welcome:
        """What is said to a Hello."""
        return Welcome(
            number=hello.number,
            role=Role.PREFILL,
            fingerprint=FINGERPRINT,
            max_sequence_tokens=1,
            transport=transport,
            transport_metadata=b"how to",
            open_requests=(),
        )

    def close(self) -> None:
        """Close the socket."""
        self._listening.cancel()
        self._context.destroy(linger=0)
