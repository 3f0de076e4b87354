"""What the clients of a worker see when it ends: a Goodbye if it was told to end, else a crash."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import pytest
from channel_bench import FINGERPRINT, KEY, WAIT_S, Client, Net, abort, heartbeat, welcome
from prometheus_client.metrics_core import Metric

from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.session import Heartbeat, Hello, Phase, Role, Welcome
from common.runtime.config import DecodeSettings
from common.runtime.worker_host import WorkerHost


class PlayedWorker:
    """A worker without an engine, that fails where a test says: in `run`, in `on_message` or in `drain`."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.failing = asyncio.Event()
        """Set to let `run` fail."""
        self.may_close = asyncio.Event()
        self.is_closed = False

    def _fail(self, place: str) -> None:
        if self.fails_in == place:
            raise RuntimeError("CUDA error: device-side assert triggered")

    async def run(self) -> None:
        await self.failing.wait()
        self._fail("run")

    async def close(self) -> None:
        await self.may_close.wait()
        self.is_closed = True

    def drain(self) -> None:
        self._fail("drain")

    def give_up(self, why: str) -> None: ...

    @property
    def phase(self) -> Phase:
        return Phase.DRAINED

    def welcome(self) -> Welcome:
        return welcome(fingerprint=FINGERPRINT)

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        return (KEY,)

    def on_open(self, peer: Incarnation, role: Role) -> None: ...

    def on_message(self, peer: Incarnation, message: Message) -> None:
        self._fail("on_message")

    def on_peer_lost(self, peer: Incarnation) -> None: ...

    def heartbeat(self, number: int) -> Heartbeat:
        return heartbeat(number)

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        return True, {}

    def metrics(self) -> Iterable[Metric]:
        return ()


@asynccontextmanager
async def served(worker: PlayedWorker, stop: asyncio.Event) -> AsyncIterator[tuple[asyncio.Task[None], Client]]:
    """A host that serves the worker, and a client with a session."""
    net = Net()
    reader, writer = os.pipe()
    host = WorkerHost(DecodeSettings(announce_fd=writer))

    await host.bind()
    address = json.loads(os.read(reader, 4096))["control"]

    async def serve() -> None:
        try:
            await host.serve(worker, stop)
        finally:
            await host.close()

    serving = asyncio.create_task(serve())
    try:
        client = await net.client(address).opened()
        await client.beats(1)
        yield serving, client
    finally:
        worker.may_close.set()
        await asyncio.wait([serving], timeout=WAIT_S)
        await net.close()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("place", ["run", "on_message", "drain"])
async def test_a_worker_that_fails_has_crashed_before_anything_of_it_is_closed(place: str) -> None:
    """What is closed may take half a minute, in which nobody computes what the worker would accept."""
    worker, stop = PlayedWorker(place), asyncio.Event()
    async with served(worker, stop) as (serving, client):
        match place:
            case "run":
                worker.failing.set()
            case "on_message":
                client.link.send(abort(1))
            case "drain":
                stop.set()
        assert await client.loss() == ("its connection broke, and nobody answers", True)
        assert not worker.is_closed
        assert not serving.done()
        worker.may_close.set()
        await asyncio.wait([serving], timeout=WAIT_S)
        assert isinstance(serving.exception(), ExceptionGroup)
        assert worker.is_closed
        assert client.num_lost == 1


async def test_a_worker_that_is_told_to_end_says_goodbye() -> None:
    worker, stop = PlayedWorker(), asyncio.Event()
    async with served(worker, stop) as (serving, client):
        worker.may_close.set()
        stop.set()
        assert await client.loss() == ("said goodbye", False)
        await asyncio.wait([serving], timeout=WAIT_S)
        assert serving.exception() is None
        assert worker.is_closed
