"""The start of a session when the worker is slow: several Hellos lie in its queue before it answers the first."""

from __future__ import annotations

import asyncio

import zmq.asyncio

from common.contract.ids import Incarnation, RequestId, RequestKey, new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages import Abort, Heartbeat, Hello, HelloRefused, Message, Phase, Role, Welcome
from common.runtime.channel import ControlClient, ControlServer
from common.runtime.clock import Pulse, monotonic

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="w", layout=LAYOUT)
PULSE = Pulse(interval_s=0.1, timeout_s=20)


class SlowWorker:
    """Counts Hellos; knows the requests of the messages that it has received."""

    def __init__(self) -> None:
        self.hellos = 0
        self.known: list[RequestKey] = []

    def welcome(self) -> Welcome:
        return Welcome(
            role=Role.DECODE,
            fingerprint=FINGERPRINT,
            max_sequence_tokens=1,
            transport="zmq",
            transport_metadata=b"",
            open_requests=(),
        )

    def on_open(self, peer: Incarnation, role: Role) -> None: ...

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        self.hellos += 1
        return tuple(self.known)

    def on_message(self, peer: Incarnation, message: Message) -> None:
        assert isinstance(message, Abort)
        self.known.append(message.key)

    def on_peer_lost(self, peer: Incarnation) -> None:
        pass

    def heartbeat(self, number: int) -> Heartbeat:
        return Heartbeat(
            number=number,
            steps=0,
            running=0,
            waiting=0,
            blocks_used=0,
            blocks_total=1,
            phase=Phase.SERVING,
        )


class EagerClient:
    """Sends a message as soon as the session is open."""

    def __init__(self) -> None:
        self.opened = 0
        self.resyncs = 0
        self.heartbeats = asyncio.Queue[Message]()
        self.hellos = asyncio.Queue[Hello]()

    def hello(self, link: ControlClient) -> Hello:
        hello = Hello(role=Role.GATEWAY, fingerprint=None, open_requests=())
        self.hellos.put_nowait(hello)
        return hello

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        self.opened += 1
        link.send(Abort(request=RequestId("r"), attempt=1))

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        self.resyncs += 1

    def on_message(self, link: ControlClient, message: Message) -> None:
        self.heartbeats.put_nowait(message)

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        raise AssertionError(why)

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        raise AssertionError(refused)


async def test_answers_to_earlier_hellos_are_not_taken_for_a_loss() -> None:
    server = ControlServer(new_incarnation(), monotonic, PULSE)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    context = zmq.asyncio.Context()
    client, worker = EagerClient(), SlowWorker()
    link = ControlClient(context, address, new_incarnation(), client, monotonic, PULSE)
    linking = asyncio.create_task(link.run())
    for _ in range(3):  # the worker loads its model; the client repeats its Hello meanwhile
        await client.hellos.get()
    serving = asyncio.create_task(server.run(worker))
    try:
        async with asyncio.timeout(20):
            for _ in range(4):
                await client.heartbeats.get()
    finally:
        for task in (linking, serving):
            task.cancel()
        await asyncio.gather(linking, serving, return_exceptions=True)
        await server.close()
        context.destroy(linger=0)
    assert worker.hellos >= 2, "the client did not repeat its Hello: the test shows nothing"
    assert (client.opened, client.resyncs) == (1, 0)
    assert worker.known == [RequestKey(RequestId("r"), 1)]
