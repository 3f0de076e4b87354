"""Decode workers of two profiles behind one gateway: who is sent where, and what becomes of it when one is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chaos.theatre import staged
from served import Stack
from stack import KV_CACHE, Process, Workers, answer, avoided, generation, prompt, until

from common.contract.errors import Cause
from common.contract.messages.session import Profile, Role
from common.contract.tiers import Target, Tier
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Generation

Pool = Callable[..., Workers]
MIRA = "The code of Mira is 4817. The code of Otto is 2093. What is the code of Mira?"
TARGETS = dict.fromkeys(Tier, Target(ttft_s=10.0, itl_s=10.0))
"""That a worker keeps which has room, however busy the machine is."""
FIRST = {Tier.INTERACTIVE: Profile.LATENCY, Tier.STANDARD: Profile.THROUGHPUT, Tier.BATCH: Profile.THROUGHPUT}
BOTH = [("--profile", profile.value, "--run-ahead", "off") for profile in Profile]


def works(salt: str) -> list[Generation]:
    """Of each tier; the answers repeat themselves, so that the worker for latency drafts."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5, "logit_bias": ((40, 100.0), (50, 100.0))}]
    return [
        replace(generation(prompt(900 + n, 40), max_tokens=60, ignore_eos=True, **kind), tier=tier, cache_salt=salt)
        for n, kind in enumerate(kinds)
        for tier in Tier
    ]


async def ask(dispatcher: Dispatcher, asked: list[Generation]) -> list[list[list[int]]]:
    return [each.tokens for each in await asyncio.gather(*(answer(dispatcher, work) for work in asked))]


def of(workers: Workers, profile: Profile) -> Process:
    return workers.decode[list(Profile).index(profile)]


def placed(dispatcher: Dispatcher) -> dict[tuple[str, str], float]:
    """The requests that went to a profile, by tier and profile."""
    [metric] = [each for each in dispatcher.collect() if each.name == "baton_gateway_placements"]
    return {(s.labels["tier"], s.labels["profile"]): s.value for s in metric.samples if s.value}


async def test_a_tier_goes_to_its_profile_and_to_the_other_one_if_that_is_full_or_gone(
    main_pool: Workers, pool: Pool
) -> None:
    async with main_pool.dispatcher() as dispatcher:
        expected = await ask(dispatcher, works("main"))
    workers = pool("profiles", decode=2, decode_options=BOTH, options=("--heartbeat-timeout-s", "10"))
    registry = workers.registry()
    async with workers.dispatcher(registry, targets=TARGETS) as dispatcher:
        for profile in Profile:
            assert registry.workers[of(workers, profile).fact("control")].profile is profile
        assert await ask(dispatcher, works("own")) == expected
        assert placed(dispatcher) == {(tier.value, FIRST[tier].value): 2 for tier in Tier}
        for profile in Profile:
            assert of(workers, profile).metric("baton_tokens_generated_total") > 0
        drafted = [p.metric("vllm:spec_decode_num_draft_tokens_total") for p in workers.decode]
        assert drafted[list(Profile).index(Profile.LATENCY)] > 0, "it drafts by default"
        assert drafted[list(Profile).index(Profile.THROUGHPUT)] == 0
    for gone in Profile:
        [other] = set(Profile) - {gone}
        async with workers.dispatcher(registry := workers.registry(), targets=TARGETS) as dispatcher:
            with avoided(registry, of(workers, gone)):
                assert await ask(dispatcher, works(f"without {gone}")) == expected
            assert placed(dispatcher) == {(tier.value, other.value): 2 for tier in Tier}


async def test_a_worker_that_bounds_its_batch_serves_everybody(main_pool: Workers, pool: Pool) -> None:
    """A target that no step can keep: one sequence after the other, and the same tokens."""
    async with main_pool.dispatcher() as dispatcher:
        expected = await ask(dispatcher, works("main"))
    tight = ("--profile", "latency", "--interactive-itl-s", "0.000001")
    workers = pool("one at a time", decode=1, decode_options=tight)
    async with workers.dispatcher() as dispatcher:
        asked = asyncio.create_task(ask(dispatcher, works("own")))
        worker = workers.decode[0]
        most = 0.0
        while not asked.done():
            state = await asyncio.to_thread(worker.get, "/ready")
            most = max(most, state["running"])
            await asyncio.sleep(0)
        assert await asked == expected
    assert worker.metric("baton_batch_bound") == 1
    assert most == 1


@pytest.mark.parametrize("lost", Profile)
async def test_answers_go_on_with_the_other_profile_when_a_worker_dies(
    main_pool: Workers, tmp_path: Path, lost: Profile
) -> None:
    """In the middle of its streams; the tokens are those that they would have been."""
    async with main_pool.dispatcher() as dispatcher:
        expected = await ask(dispatcher, works("main"))
    options = dict(zip(Profile, BOTH, strict=True))
    victim = staged(Role.DECODE, main_pool.folder, tmp_path, *KV_CACHE, *options.pop(lost))
    workers = Workers.start(main_pool.folder, decode_options=list(options.values()))
    try:
        victim.ready()
        workers.decode.append(victim.process)
        async with workers.dispatcher(targets=TARGETS, timeout_s=5.0) as dispatcher:
            victim.close("step", skip=3)  # no answer has all of its tokens after so few steps, whatever is drafted
            asked = asyncio.create_task(ask(dispatcher, works("own")))
            await until(lambda: victim.waiting("step") == 1, "nothing runs there")
            victim.process.kill()
            assert await asked == expected
            assert dispatcher.recovery.tally.failures[Cause.WORKER_LOST] > 0
        workers.wait_for_baseline()
    finally:
        workers.signal()
        workers.wait()


async def test_a_local_stack_has_both_profiles() -> None:
    """`baton serve --latency 1`: headers say who decodes; a worker that dies is replaced, and is used again."""
    body = {"messages": [{"role": "user", "content": MIRA}], "temperature": 0, "max_tokens": 8}
    with Stack("--prefill", "0", "--latency", "1", "--explain-routing") as stack:
        assert stack.ready.startswith("ready"), stack.wait()
        async with aiohttp.ClientSession(stack.url) as http:

            async def profiles() -> dict[str, str]:
                async with http.get("/pools") as response:
                    seen = await response.json()
                return {each["id"]: each["profile"] for each in seen["workers"] if each["usable"]}

            async def decoded_by(tier: str) -> str:
                async with http.post("/v1/chat/completions", json=body | {"service_tier": tier}) as response:
                    said = await response.json()
                    assert said["choices"][0]["message"]["content"].strip() == "4817"
                    return known[response.headers["x-baton-decode"]]

            async with asyncio.timeout(60):
                while sorted((await profiles()).values()) != ["latency", "throughput"]:
                    await asyncio.sleep(0.05)
            known = await profiles()
            assert {tier: await decoded_by(tier) for tier in ("interactive", "auto", "batch")} == {
                "interactive": "latency",
                "auto": "throughput",
                "batch": "throughput",
            }
            victim = stack.pid_of("--profile latency")
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            assert await decoded_by("interactive") in ("throughput", "latency"), "served in any case"
            async with asyncio.timeout(60):
                while await decoded_by("interactive") != "latency":
                    await asyncio.sleep(0.2)
            async with http.get("/metrics") as response:
                metrics = await response.text()
            assert 'baton_gateway_placements_total{profile="throughput",tier="batch"} 1.0' in metrics
        code, log = stack.end(signal.SIGTERM)
        assert code == 0, log
