"""The control side of a source that a test plays by hand, over real ZeroMQ."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import zmq
import zmq.asyncio

from common.contract.codec import decode, encode
from common.contract.ids import Incarnation, new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages import Hello, Message, Role, Welcome

WAIT_S = 30.0
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="w", layout=LAYOUT)

Kind = TypeVar("Kind", bound=Message)


class PlayedSource:
    """A ROUTER that a sink links to. It says what it is told to say, and under which incarnation."""

    def __init__(self, sink: Incarnation) -> None:
        self.incarnation = new_incarnation()
        self._sink = sink
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.address = f"127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._heard: list[Message] = []

    async def expect(self, kind: type[Kind]) -> Kind:
        """The next message of this kind from the sink; others are skipped."""
        async with asyncio.timeout(WAIT_S):
            while True:
                while self._heard:
                    message = self._heard.pop(0)
                    if isinstance(message, kind):
                        return message
                _, frame = await self._socket.recv_multipart()
                self._heard += decode(frame)[1]

    async def hear_all(self, wait_s: float = 0.1) -> list[Message]:
        """What the sink has said by now."""
        while await self._socket.poll(round(wait_s * 1000)):
            _, frame = await self._socket.recv_multipart()
            self._heard += decode(frame)[1]
        heard, self._heard = self._heard, []
        return heard

    async def send(self, *messages: Message) -> None:
        """Send within one frame."""
        await self._socket.send_multipart([self._sink.encode(), encode(self.incarnation, messages)])

    async def welcome(self, transport: str = "zmq") -> Hello:
        """Answer the newest Hello."""
        hello = await self.expect(Hello)
        for message in await self.hear_all(0.05):
            hello = message if isinstance(message, Hello) else hello
        await self.send(
            Welcome(
                number=hello.number,
                role=Role.PREFILL,
                fingerprint=FINGERPRINT,
                max_sequence_tokens=1,
                transport=transport,
                transport_metadata=b"how to",
                open_requests=(),
            )
        )
        return hello

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
