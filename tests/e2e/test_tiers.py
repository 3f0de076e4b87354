"""Tier and tenant travel from HTTP to the workers, which serve by them when there is more work than room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest
from stack import Process, Workers, prompt, until

NUM_FLOOD = 40
NUM_TOKENS = 80
"""Of each answer: five requests fill the decode worker's memory."""
COMPUTED = "baton_prompt_tokens_computed_total"


@pytest.fixture(scope="module")
def seeds() -> Iterator[int]:
    """Of prompts that nobody has asked before."""
    return iter(range(100_000, 200_000))


@pytest.fixture
def workers(main_pool: Workers, small_decode: dict[str, Process]) -> Workers:
    """A prefill worker, and a decode worker that holds a few requests at once."""
    return Workers(main_pool.folder, prefill=main_pool.prefill[:1], decode=[small_decode["default"]])


@pytest.fixture(scope="module")
def gateways() -> Iterator[tuple[ExitStack, list[Process]]]:
    """The gateway of all tests here, once it was started, and what ends it."""
    with ExitStack() as stack:
        yield stack, []


@pytest.fixture
def gateway(workers: Workers, gateways: tuple[ExitStack, list[Process]]) -> Process:
    """A gateway that takes the tenant from a header."""
    stack, started = gateways
    if not started:
        started.append(stack.enter_context(workers.gateway("--tenant-header", "x-tenant")))
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
    workers: Workers,
    seeds: Iterator[int],
    flood: dict[str, Any],
    late: dict[str, Any],
    num_late: int = 1,
) -> list[int]:
    """How many requests of a flood had ended when each of those ended that came while most of it waited."""
    (decode,) = workers.decode
    async with aiohttp.ClientSession(gateway.fact("url")) as session:
        client = Client(session, seeds)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_FLOOD):
                tasks.create_task(client.ask("flood", **flood))
            await until(lambda: decode.get("/ready")["waiting"] >= NUM_FLOOD // 2, "the flood does not wait")
            assert len(client.ended) < NUM_FLOOD // 4
            for _ in range(num_late):
                tasks.create_task(client.ask("late", **late))
    assert client.ended.count("flood") == NUM_FLOOD
    return [client.ended[:place].count("flood") for place, name in enumerate(client.ended) if name == "late"]


async def test_an_interactive_request_passes_a_flood_of_batch_requests(
    gateway: Process, workers: Workers, seeds: Iterator[int]
) -> None:
    """And a batch request that comes as late does not."""
    flood = {"tenant": "", "service_tier": "batch"}
    (interactive,) = await under_a_flood(gateway, workers, seeds, flood, flood | {"service_tier": "priority"})
    (batch,) = await under_a_flood(gateway, workers, seeds, flood, flood)
    print(f"ended before an interactive request: {interactive} of {NUM_FLOOD}, before a batch request: {batch}")
    assert interactive < NUM_FLOOD // 2
    assert batch > NUM_FLOOD * 3 // 4


async def test_a_tenant_does_not_wait_behind_the_flood_of_another(
    gateway: Process, workers: Workers, seeds: Iterator[int]
) -> None:
    """And who floods waits behind its own."""
    others = await under_a_flood(gateway, workers, seeds, {"tenant": "flooding"}, {"tenant": "modest"}, 3)
    (own,) = await under_a_flood(gateway, workers, seeds, {"tenant": "flooding"}, {"tenant": "flooding"})
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
