"""The dispatcher between clients and links: what it sends, whom it counts, and what a loss or a resync ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey, new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages import (
    Abort,
    Ack,
    Decode,
    FinishReason,
    HelloRefused,
    Message,
    Prefill,
    Role,
    Tokens,
    Welcome,
)
from common.contract.sampling import SamplingParams
from common.runtime.clock import Pulse, monotonic
from gateway import dispatcher
from gateway.dispatcher import Dispatcher
from gateway.generation import Delta, Generation, GenerationFailed
from gateway.registry import Registry

P, D = "p:1", "d:1"
PROMPT = (7, 8, 9)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="w", layout=LAYOUT)


def welcome(role: Role, *open_requests: RequestKey) -> Welcome:
    return Welcome(
        role=role,
        fingerprint=FINGERPRINT,
        max_sequence_tokens=50,
        transport="zmq",
        transport_metadata=b"",
        open_requests=open_requests,
    )


class Link:
    """Stands for a `ControlClient`: what was sent, and the worker's life."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.worker: Incarnation | None = new_incarnation()
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


class Bench:
    """A dispatcher with a prefill and a decode worker that the test plays."""

    def __init__(self) -> None:
        self.registry = Registry((P,), (D,), "c")
        self.dispatcher = Dispatcher(new_incarnation(), self.registry, monotonic, Pulse())
        self.links = {P: Link(P), D: Link(D)}
        self.dispatcher._links.update(self.links)  # type: ignore[arg-type]
        self.open(P)
        self.open(D)
        self.tasks: list[asyncio.Task[list[Delta]]] = []

    def open(self, address: str, *, restarted: bool = False) -> None:
        if restarted:
            self.links[address].worker = new_incarnation()
        role = Role.PREFILL if address == P else Role.DECODE
        self.dispatcher.on_open(self.link(address), welcome(role))

    def link(self, address: str) -> Any:
        return self.links[address]

    async def request(self, budget_s: float = 30.0) -> tuple[RequestKey, asyncio.Task[list[Delta]]]:
        """A client asks; its key, and what it is given."""

        async def collect() -> list[Delta]:
            return [delta async for delta in self.dispatcher.generate(generation)]

        generation = Generation(
            token_ids=PROMPT, num_choices=1, sampling=SamplingParams(max_tokens=9), budget_s=budget_s
        )
        before = len(self.links[D].sent)
        task = asyncio.create_task(collect())
        self.tasks.append(task)
        while len(self.links[D].sent) == before:
            await asyncio.sleep(0)
        prefill, decode = self.links[P].sent[-1], self.links[D].sent[-1]
        assert isinstance(prefill, Prefill)
        assert isinstance(decode, Decode)
        assert decode.key == prefill.key
        return decode.key, task

    def tokens(
        self, address: str, key: RequestKey, position: int, *ids: int, reason: FinishReason | None = None
    ) -> None:
        message = Tokens(
            request=key.request,
            attempt=key.attempt,
            choice=0,
            position=len(PROMPT) + position,
            token_ids=ids,
            finish_reason=reason,
        )
        self.dispatcher.on_message(self.link(address), message)

    def sent(self, address: str, kind: type[Message]) -> list[Message]:
        return [message for message in self.links[address].sent if isinstance(message, kind)]

    def in_flight(self) -> tuple[int, int, int, int]:
        """Requests and tokens at the prefill worker, and at the decode worker."""
        p, d = self.registry.workers[P], self.registry.workers[D]
        return p.in_flight, p.in_flight_tokens, d.in_flight, d.in_flight_tokens

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.dispatcher.ready().details["in_flight"] == 0
        self.dispatcher._context.destroy(linger=0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    subject = Bench()
    yield subject
    await subject.close()


async def failure(task: asyncio.Task[list[Delta]]) -> Cause:
    async with asyncio.timeout(5):
        with pytest.raises(GenerationFailed) as caught:
            await task
    return caught.value.cause


async def test_a_request_goes_through(bench: Bench) -> None:
    key, task = await bench.request()
    assert bench.in_flight() == (1, 3, 1, 3)
    bench.tokens(P, key, 0, 10)
    assert bench.in_flight() == (0, 0, 1, 3), "its prompt is computed"
    bench.tokens(D, key, 0, 10, 11)
    bench.tokens(D, key, 2, 12, reason="stop")
    assert [delta.token_ids for delta in await task] == [(10,), (11,), (12,)]
    assert [message.key for message in bench.sent(D, Ack)] == [key]  # type: ignore[attr-defined]
    assert bench.sent(P, Abort) == bench.sent(D, Abort) == []
    assert bench.in_flight() == (0, 0, 0, 0)
    bench.tokens(D, key, 2, 12)
    assert bench.dispatcher.num_stale_messages == 1


async def test_a_client_that_leaves_frees_both_workers(bench: Bench) -> None:
    key, task = await bench.request()
    bench.tokens(P, key, 0, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for address in (P, D):
        assert [message.key for message in bench.sent(address, Abort)] == [key]  # type: ignore[attr-defined]
    assert bench.in_flight() == (0, 0, 0, 0)


async def test_without_workers_a_request_fails_at_once(bench: Bench) -> None:
    bench.dispatcher.on_lost(bench.link(D), "dead")
    generation = Generation(token_ids=PROMPT, num_choices=1, sampling=SamplingParams(max_tokens=9), budget_s=1.0)
    with pytest.raises(GenerationFailed, match="no decode worker"):
        await anext(bench.dispatcher.generate(generation))


async def test_the_gateway_s_own_deadline_comes_last(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_BUDGET_GRACE_S", 0.01)
    _, task = await bench.request(budget_s=0.01)
    assert await failure(task) is Cause.DEADLINE
    assert len(bench.sent(P, Abort)) == len(bench.sent(D, Abort)) == 1


@pytest.mark.parametrize("address", [P, D])
async def test_a_lost_worker_ends_its_requests(bench: Bench, address: str) -> None:
    _, task = await bench.request()
    bench.dispatcher.on_lost(bench.link(address), "silent")
    assert await failure(task) is Cause.WORKER_LOST
    bench.open(address)
    assert bench.in_flight() == (0, 0, 0, 0)


async def test_a_lost_prefill_worker_is_not_missed_after_its_first_token(bench: Bench) -> None:
    key, task = await bench.request()
    bench.tokens(P, key, 0, 10)
    bench.dispatcher.on_lost(bench.link(P), "silent")
    bench.open(P)
    bench.tokens(D, key, 0, 10, 11, reason="length")
    assert [delta.token_ids for delta in await task] == [(10,), (11,)]
    assert bench.in_flight() == (0, 0, 0, 0)


@pytest.mark.parametrize("restarted", [False, True])
async def test_loads_balance_when_a_session_ends_and_opens_again(bench: Bench, restarted: bool) -> None:
    """The request outlives the prefill worker's session; it must not be taken from the next session's count."""
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10)
    bench.dispatcher.on_lost(bench.link(P), "silent")
    bench.open(P, restarted=restarted)
    bench.tokens(D, key, 1, 11, reason="stop")
    await task
    assert bench.in_flight() == (0, 0, 0, 0)
    await bench.request()
    assert bench.in_flight() == (1, 3, 1, 3)


async def test_a_resync_ends_what_the_worker_has_forgotten(bench: Bench) -> None:
    key, task = await bench.request()
    assert bench.dispatcher.hello(bench.link(D)).open_requests == (key,)
    bench.dispatcher.on_resync(bench.link(D), welcome(Role.DECODE))
    assert await failure(task) is Cause.WORKER_LOST


async def test_a_resync_keeps_what_the_worker_knows(bench: Bench) -> None:
    key, task = await bench.request()
    bench.dispatcher.hello(bench.link(D))
    bench.dispatcher.on_resync(bench.link(D), welcome(Role.DECODE, key))
    bench.tokens(D, key, 0, 10, reason="stop")
    assert [delta.token_ids for delta in await task] == [(10,)]


@pytest.mark.parametrize("address", [P, D])
async def test_a_request_that_began_during_a_resync_is_not_judged_by_it(bench: Bench, address: str) -> None:
    """The worker had not heard of it when it answered: its Prefill and Decode left after the Hello."""
    role = Role.PREFILL if address == P else Role.DECODE
    assert bench.dispatcher.hello(bench.link(address)).open_requests == ()
    key, task = await bench.request()
    bench.dispatcher.on_resync(bench.link(address), welcome(role))
    bench.tokens(P, key, 0, 10)
    bench.tokens(D, key, 0, 10, 11, reason="stop")
    assert [delta.token_ids for delta in await task] == [(10,), (11,)]


async def test_a_hello_does_not_list_what_has_ended_here(bench: Bench) -> None:
    """The client may not have been given its end yet; the worker is to forget the request at once."""
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10, reason="stop")
    assert bench.dispatcher.hello(bench.link(D)).open_requests == ()
    await task


async def test_messages_about_another_attempt_are_stale(bench: Bench) -> None:
    key, _ = await bench.request()
    bench.tokens(D, RequestKey(key.request, 2), 0, 10)
    assert bench.dispatcher.num_stale_messages == 1


async def test_a_worker_that_refuses_gets_no_work(bench: Bench) -> None:
    bench.dispatcher.on_refused(bench.link(P), HelloRefused(cause=Cause.CAPACITY, message="full"))
    assert not bench.dispatcher.ready().ready
    bench.open(P)
    assert bench.dispatcher.ready().ready
