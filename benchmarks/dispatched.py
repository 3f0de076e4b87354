"""A gateway's dispatcher in this process, at the workers of a local stack: for what clients of HTTP do not see."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.local import local_stack
from common.contract.ids import new_incarnation
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.runtime.checkpoint import config_hash
from common.runtime.clock import Pulse, monotonic
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Delta, Generation
from gateway.workers.registry import Registry

Found = TypeVar("Found")


@asynccontextmanager
async def connected(url: str, folder: Path) -> AsyncIterator[Dispatcher]:
    """A context with a dispatcher that is connected to the workers of the stack whose gateway is at `url`."""
    with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:
        workers = json.loads(answer.read())["details"]["workers"]
    at = {role: tuple(w["id"] for w in workers if w["role"] == role) for role in ("prefill", "decode")}
    registry = Registry(at["prefill"], at["decode"], config_hash(folder))
    dispatcher = Dispatcher(new_incarnation(), registry, monotonic, Pulse(timeout_s=60))
    running = asyncio.create_task(dispatcher.links.run())
    await dispatcher.links.wait_usable()
    try:
        yield dispatcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def on_stack(
    options: Sequence[str], env: Mapping[str, str], folder: Path, measure: Callable[[Dispatcher], Awaitable[Found]]
) -> Found:
    """What `measure` finds at a stack of its own that serves the model in `folder`."""

    async def body(url: str) -> Found:
        async with connected(url, folder) as dispatcher:
            return await measure(dispatcher)

    with local_stack(["--model", str(folder), *options], env) as local:
        return asyncio.run(body(local.url))


def greedy(prompt: Sequence[int], max_tokens: int, tier: Tier = Tier.STANDARD, salt: str = "") -> Generation:
    """A greedy generation of exactly `max_tokens` tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Generation(
        token_ids=tuple(prompt), num_choices=1, sampling=sampling, budget_s=3600, tier=tier, cache_salt=salt
    )


async def stream(dispatcher: Dispatcher, generation: Generation, times: list[float]) -> list[int]:
    """Run a generation: append the arrival time of each of its tokens to `times`, and return the tokens."""
    tokens: list[int] = []
    async for delta in dispatcher.generate(generation):
        assert isinstance(delta, Delta)
        tokens += delta.token_ids
        times += [time.perf_counter()] * len(delta.token_ids)
    return tokens
