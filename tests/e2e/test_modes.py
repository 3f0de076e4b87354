"""Decode workers that compute prompts too: the same answers, wherever and in whatever pieces a prompt is computed."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from stack import Answer, Process, Workers, answer, generation, prompt, until

from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.router import LocalPrefill
from gateway.serving.generation import Delta, Generation

CHUNK = 16
TOKEN_BUDGET = 80
COMPUTED = "baton_prompt_tokens_computed_total"
MODES = {"chunked": (), "priority": ("--prefill-priority",)}


def mixed(cache_salt: str) -> list[Generation]:
    """Greedy and sampled, with and without forks; nobody else has the salt, so every prompt is computed.

    With these seeds no random number falls within 1e-5 of the border between two tokens: there, the last bits of the
    logits would decide, and these differ between batches of different shapes.
    """
    works = []
    for index, length in enumerate((1, 15, 16, 17, 33, 64, 81, 100, 160, 161, 240, 400)):
        sampling: dict[str, Any] = {} if index % 2 else {"temperature": 1.0, "top_p": 0.9, "seed": 300 + index}
        n = 3 if index % 4 == 0 else 1
        works.append(generation(prompt(700 + index, length), n=n, max_tokens=40, ignore_eos=True, **sampling))
    return [replace(work, cache_salt=cache_salt) for work in works]


NUM_STREAMED = 1000
"""Tokens of a stream beside which a prompt is computed: for longer than anything takes to be sent."""
NUM_TOKENS = sum(len(work.token_ids) for work in mixed(""))


async def ask(dispatcher: Dispatcher, works: Sequence[Generation]) -> list[list[list[int]]]:
    """The tokens of all of them, at once."""
    return [each.tokens for each in await asyncio.gather(*(answer(dispatcher, work) for work in works))]


@pytest.fixture(scope="module")
def known() -> list[list[list[int]]]:
    """What `disaggregated` has found out."""
    return []


@pytest.fixture
async def disaggregated(main_pool: Workers, known: list[list[list[int]]]) -> list[list[list[int]]]:
    """The answers of prefill and decode workers."""
    if not known:
        computed = [process.metric(COMPUTED) for process in main_pool.decode]
        async with main_pool.dispatcher() as dispatcher:
            known += await ask(dispatcher, mixed("disaggregated"))
        assert [process.metric(COMPUTED) for process in main_pool.decode] == computed
    return known


@pytest.fixture
def local(pools: dict[str, Workers], main_pool: Workers) -> Workers:
    """Decode workers that compute prompts in small pieces, one of them before anything is decoded; and a prefill worker
    that need not live."""
    if "local" not in pools:
        pieces = ("--prefill-tokens", str(CHUNK), "--token-budget", str(TOKEN_BUDGET))
        pools["local"] = Workers.start(
            main_pool.folder,
            decode=len(MODES),
            options=("--heartbeat-timeout-s", "10"),
            decode_options=[(*pieces, *options) for options in MODES.values()],
        )
    return pools["local"]


def alone(local: Workers, mode: str) -> Workers:
    """The decode worker of a mode."""
    return Workers(local.folder, decode=[local.decode[list(MODES).index(mode)]])


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_that_does_both_gives_the_same_answers(
    local: Workers, disaggregated: list[list[list[int]]], mode: str
) -> None:
    workers = alone(local, mode)
    computed = workers.metric(COMPUTED)
    async with workers.dispatcher() as dispatcher:
        assert (dispatcher.ready().ready, dispatcher.ready().reason) == (True, "ready")
        assert await ask(dispatcher, mixed(mode)) == disaggregated
        assert dispatcher.placement.num_local_prefills[LocalPrefill.COLOCATED] == len(disaggregated)
        assert workers.metric(COMPUTED) - computed == NUM_TOKENS
        # Once more: what is cached now is not computed again, but for a last token's logits.
        assert await ask(dispatcher, mixed(mode)) == disaggregated
    assert workers.metric(COMPUTED) - computed < 1.5 * NUM_TOKENS
    assert workers.metric("baton_transfer_bytes_total") == 0
    workers.wait_for_baseline()


@pytest.mark.parametrize("mode", MODES)
async def test_a_prompt_rides_with_the_decodes_in_pieces_or_goes_before_them(local: Workers, mode: str) -> None:
    """Counted in steps: while one sequence decodes, the prompt of another needs none, or has them to itself."""
    workers = alone(local, mode)
    num_pieces = -(-300 // CHUNK)
    steps = workers.metric("baton_engine_steps_total")
    stream = generation(prompt(750, 10), max_tokens=NUM_STREAMED, ignore_eos=True, cache_salt=f"stream {mode}")
    other = generation(prompt(751, 300), max_tokens=1, cache_salt=f"other {mode}")
    num_streamed = 0
    streamed_meanwhile: list[int] = []

    async def ask_other() -> Answer:
        before = num_streamed
        result = await answer(dispatcher, other)
        streamed_meanwhile.append(num_streamed - before)
        return result

    async with workers.dispatcher() as dispatcher:
        asked: asyncio.Task[Answer] | None = None
        async for delta in dispatcher.generate(stream):
            assert isinstance(delta, Delta)
            num_streamed += len(delta.token_ids)
            if num_streamed == 5:
                asked = asyncio.create_task(ask_other())
        assert asked is not None
        assert asked.done(), "the stream was over too early"
        assert len(asked.result().tokens[0]) == 1
    steps = workers.metric("baton_engine_steps_total") - steps
    if mode == "chunked":
        assert steps == NUM_STREAMED
        assert streamed_meanwhile[0] >= num_pieces - 1, "the prompt was computed in larger pieces"
    else:
        assert steps == NUM_STREAMED + -(-300 // TOKEN_BUDGET)
    workers.wait_for_baseline()


async def test_without_prefill_workers_the_decode_workers_go_on_alone(
    local: Workers, disaggregated: list[list[list[int]]]
) -> None:
    """The gateway says so, and its answers are the same."""
    (p,) = local.prefill
    with local.gateway("--heartbeat-timeout-s", "10") as gateway:  # the end of a process is known at once
        async with local.dispatcher(timeout_s=10.0) as dispatcher:
            assert await ask(dispatcher, mixed("before")) == disaggregated
            assert p.metric(COMPUTED) == NUM_TOKENS
            assert gateway.get("/ready")["reason"] == "ready"
            p.kill()
            await until(lambda: "degraded" in gateway.get("/ready")["reason"], "the gateway has not noticed")
            await until(lambda: "degraded" in dispatcher.ready().reason, "the dispatcher has not noticed")
            assert gateway.get("/ready")["ready"]
            before = local.metric(COMPUTED)
            assert await ask(dispatcher, mixed("after")) == disaggregated
            assert local.metric(COMPUTED) - before == NUM_TOKENS
            assert dispatcher.placement.num_local_prefills[LocalPrefill.NO_PREFILL_WORKER] == len(disaggregated)
        completion = await asyncio.to_thread(complete, gateway, prompt(760, 100))
        assert completion["usage"]["completion_tokens"] == 7
        assert gateway.metric("baton_gateway_local_prefills_total", reason="no_prefill_worker") == 1
    local.wait_for_baseline()


def complete(gateway: Process, ids: list[int]) -> dict[str, dict[str, int]]:
    """A completion over HTTP."""
    body = {"prompt": ids, "max_tokens": 7, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    url = f"{gateway.fact('url')}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        completion: dict[str, dict[str, int]] = json.load(response)
        return completion
