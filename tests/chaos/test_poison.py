"""A request that ends every worker it touches, by a signal or by an exception, is refused after three at most; its
neighbours go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from stack import BLOCK_BYTES, answer, generation, prompt, until

from chaos.theatre import Theatre, theatre
from common.contract.errors import Cause
from common.contract.messages.session import Role
from gateway.serving.generation import GenerationFailed

pytestmark = needs("hosts")

POISON = 377
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(
    scope="module",
    params=[
        (Role.DECODE, "kill"),
        (Role.DECODE, "raise"),
        pytest.param((Role.PREFILL, "kill"), marks=pytest.mark.chaos),
        pytest.param((Role.PREFILL, "raise"), marks=pytest.mark.chaos),
    ],
    ids="-".join,
)
def stage(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Theatre]:
    size = ("--kv-cache-bytes", str(256 * BLOCK_BYTES))
    folder, scratch = checkpoint("llama"), tmp_path_factory.mktemp("poison")
    role, how = request.param
    # Decode workers compute prompts while no prefill worker is there.
    poison = dict.fromkeys({role, Role.DECODE}, POISON)
    with theatre(folder, scratch, "nixl", options=size, poison=poison, poison_how=how) as made:
        yield made


async def test_a_poisonous_request_is_refused_and_its_neighbours_go_on(stage: Theatre) -> None:
    deaths: list[str] = []

    async def supervise() -> None:
        """Start again who dies, as a cluster would."""
        while True:
            for actor in stage.actors:
                if actor.process.popen.poll() is not None:
                    deaths.append(actor.address)
                    actor.start()
                    await asyncio.to_thread(actor.ready)
            await asyncio.sleep(0.05)

    async with (
        stage.dispatcher(patience_s=60.0) as (dispatcher, registry),
        stage.dispatcher(patience_s=60.0) as (another, _),
    ):
        works = [generation(prompt(seed, 60 + seed), **LONG) for seed in range(8)]
        expected = [(await answer(dispatcher, work)).tokens for work in works]
        gateways = (dispatcher, another)
        neighbours = [asyncio.create_task(answer(gateways[i % 2], work)) for i, work in enumerate(works)]
        await until(lambda: sum(w.in_flight for w in registry.workers.values()) >= 4, "nobody is served")
        poisonous = asyncio.create_task(answer(dispatcher, generation([POISON, *prompt(99, 80)], **LONG)))
        supervisor = asyncio.create_task(supervise())
        with pytest.raises(GenerationFailed) as refused:
            await asyncio.wait_for(poisonous, 120)
        assert refused.value.cause is Cause.POISON
        found = await asyncio.wait_for(asyncio.gather(*neighbours), 120)
        assert [each.tokens for each in found] == expected
        await until(lambda: all(w.usable for w in registry.workers.values()), "a worker does not come back", 60)
        supervisor.cancel()
        with suppress(asyncio.CancelledError):
            await supervisor
        assert len(deaths) in (2, 3), "it went round the pool"  # three if others were tried together with it
    stage.wait_for_baseline()
