"""Tier and tenant travel from HTTP to the workers, which serve by them when there is more work than room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chaos.theatre import Actor, staged
from stack import BLOCK_BYTES, Process, Workers, prompt, until

from common.contract.messages.session import Role

NUM_FLOOD = 40
NUM_BLOCKS = 40
NUM_TOKENS = 80
"""Of each answer: five requests fill the decode worker's memory."""
PATIENT = ("--heartbeat-timeout-s", "10")
COMPUTED = "baton_prompt_tokens_computed_total"


@pytest.fixture(scope="module")
def seeds() -> Iterator[int]:
    """Of prompts that nobody has asked before."""
    return iter(range(100_000, 200_000))


@pytest.fixture(scope="module")
def actor(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actor]:
    """A decode worker that holds a few requests at once, and stops where a test says."""
    size = ("--kv-cache-bytes", str(NUM_BLOCKS * BLOCK_BYTES))
    scratch = tmp_path_factory.mktemp("tiers")
    made = staged(Role.DECODE, checkpoint("llama"), scratch, "--checksums", *PATIENT, *size)
    made.ready()
    yield made
    made.process.signal()
    assert made.process.wait() == 0


@pytest.fixture
def workers(main_pool: Workers, actor: Actor) -> Iterator[Workers]:
    """A prefill worker, and that decode worker, which are left empty."""
    made = Workers(main_pool.folder, prefill=main_pool.prefill[:1], decode=[actor.process])
    yield made
    made.wait_for_baseline()


@pytest.fixture(scope="module")
def gateways(actor: Actor) -> Iterator[tuple[ExitStack, list[Process]]]:
    """The gateway of all tests here, once it was started, and what ends it."""
    with ExitStack() as stack:
        yield stack, []


@pytest.fixture
def gateway(workers: Workers, gateways: tuple[ExitStack, list[Process]]) -> Process:
    """A gateway that takes the tenant from a header."""
    stack, started = gateways
    if not started:
        started.append(stack.enter_context(workers.gateway("--tenant-header", "x-tenant", *PATIENT)))
    return started[0]


class Client:
    """Asks for completions over HTTP, and notes in which order they end."""

    def __init__(self, session: aiohttp.ClientSession, seeds: Iterator[int]) -> None:
        self._session = session
        self._seeds = seeds
        self.ended: list[str] = []

    async def ask(self, name: str, tenant: str, **fields: Any) -> None:
        """A request of `name`, which must be answered in full."""
        body = {"prompt": prompt(next(self._seeds), 40), "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
        async with self._session.post("/v1/completions", json=body, headers={"x-tenant": tenant}) as response:
            answer = await response.json()
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == NUM_TOKENS
        self.ended.append(name)


async def under_a_flood(
    gateway: Process,
    decode: Actor,
    seeds: Iterator[int],
    flood: dict[str, Any],
    late: dict[str, Any],
    num_late: int = 1,
) -> list[int]:
    """How many requests of a flood had ended when each of those ended that came while most of it waited."""

    def has(number: int) -> bool:
        """Whether so many requests have, or await, room at the decode worker: none awaits the prefill worker."""
        state = decode.state()
        return number == sum(int(state[name]) for name in ("waiting", "pulling", "computing", "running"))

    decode.close("step", skip=4)
    async with aiohttp.ClientSession(gateway.fact("url")) as session:
        client = Client(session, seeds)
        async with asyncio.TaskGroup() as tasks:
            try:
                for _ in range(NUM_FLOOD):
                    tasks.create_task(client.ask("flood", **flood))
                await until(lambda: has(NUM_FLOOD), "the flood does not come")
                for _ in range(num_late):
                    tasks.create_task(client.ask("late", **late))
                await until(lambda: has(NUM_FLOOD + num_late), "who is late does not come")
            finally:
                decode.open("step")
    assert client.ended.count("flood") == NUM_FLOOD
    return [client.ended[:place].count("flood") for place, name in enumerate(client.ended) if name == "late"]


async def test_an_interactive_request_passes_a_flood_of_batch_requests(
    gateway: Process, actor: Actor, seeds: Iterator[int]
) -> None:
    """And a batch request that comes as late does not."""
    flood = {"tenant": "", "service_tier": "batch"}
    (interactive,) = await under_a_flood(gateway, actor, seeds, flood, flood | {"service_tier": "priority"})
    (batch,) = await under_a_flood(gateway, actor, seeds, flood, flood)
    print(f"ended before an interactive request: {interactive} of {NUM_FLOOD}, before a batch request: {batch}")
    assert interactive < NUM_FLOOD // 2
    assert batch > NUM_FLOOD * 3 // 4


async def test_a_tenant_does_not_wait_behind_the_flood_of_another(
    gateway: Process, actor: Actor, seeds: Iterator[int]
) -> None:
    """And who floods waits behind its own."""
    others = await under_a_flood(gateway, actor, seeds, {"tenant": "flooding"}, {"tenant": "modest"}, 3)
    (own,) = await under_a_flood(gateway, actor, seeds, {"tenant": "flooding"}, {"tenant": "flooding"})
    print(f"ended before another tenant's requests: {others} of {NUM_FLOOD}, before the flooding tenant's: {own}")
    assert max(others) < NUM_FLOOD // 2
    assert own > NUM_FLOOD * 3 // 4


async def test_tenants_share_no_prefix(gateway: Process, workers: Workers, seeds: Iterator[int]) -> None:
    ids = prompt(next(seeds), 40)
    computed = []
    async with aiohttp.ClientSession(gateway.fact("url")) as session:
        client = Client(session, seeds)
        for tenant in ("one", "one", "other", "other"):
            before = workers.metric(COMPUTED)
            await client.ask("request", tenant, prompt=ids)
            computed.append(workers.metric(COMPUTED) - before)
    assert computed == [40, 8, 40, 8]
