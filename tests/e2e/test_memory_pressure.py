"""Twice the KV that fits: every request finishes, with the output of an idle worker; what gives way comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from stack import BLOCK_SIZE, Answer, Process, Workers, answer, generation, prompt

from gateway.serving.generation import Delta, Generation

NUM_BLOCKS = 40
"""Of each of the small decode workers."""
Choices = list[list[int]]
"""The tokens of each choice."""


def crowd() -> list[Generation]:
    """Greedy and sampled requests, some with forks, some with a beginning in common.

    With these seeds no random number falls within 1e-5 of the border between two tokens: there, the last bits of the
    logits would decide, and these differ between batches of different shapes.
    """
    common = prompt(900, 70)
    works = []
    for index in range(24):
        ids = prompt(901 + index, 30 + 3 * index) if index % 4 else common + prompt(901 + index, index)
        sampling: dict[str, Any] = {} if index % 2 else {"temperature": 1.0, "top_k": 50, "seed": index}
        n = 3 if index % 6 == 0 else 1
        works.append(generation(ids, n=n, max_tokens=60 + index, ignore_eos=True, logprobs=1, **sampling))
    return works


def blocks_at_end(work: Generation) -> int:
    """What a request holds when it ends, each choice with blocks of its own after the prompt's full ones."""
    shared = len(work.token_ids) // BLOCK_SIZE
    stored = len(work.token_ids) + work.sampling.max_tokens - 1
    return shared + work.num_choices * (-(-stored // BLOCK_SIZE) - shared)


async def answers(workers: Workers, works: Sequence[Generation]) -> list[Answer]:
    """All of them at once."""
    async with workers.dispatcher() as dispatcher:
        return list(await asyncio.gather(*(answer(dispatcher, work) for work in works)))


@pytest.fixture(scope="module")
def works() -> list[Generation]:
    """The crowd, which wants more than twice the memory of one of the workers under test."""
    made = crowd()
    assert sum(map(blocks_at_end, made)) >= 2 * NUM_BLOCKS
    assert max(map(blocks_at_end, made)) <= NUM_BLOCKS
    return made


@pytest.fixture(scope="module")
def known() -> list[Choices]:
    """What `unloaded` has found out."""
    return []


@pytest.fixture
async def unloaded(main_pool: Workers, works: list[Generation], known: list[Choices]) -> list[Choices]:
    """The answers of workers with ample memory, one request after the other."""
    if not known:
        async with main_pool.dispatcher() as dispatcher:
            known += [(await answer(dispatcher, work)).tokens for work in works]
    return known


def preemptions(decode: Process) -> dict[str, float]:
    return {kind: decode.metric("baton_preemptions_total", kind=kind) for kind in ("swap", "recompute")}


@pytest.mark.parametrize("colocated", [False, True], ids=["disaggregated", "colocated"])
@pytest.mark.parametrize("policy", ["default", "swap", "recompute"])
async def test_a_crowd_gets_the_answers_of_an_idle_worker(
    main_pool: Workers,
    small_decode: dict[str, Process],
    works: list[Generation],
    unloaded: list[Choices],
    policy: str,
    colocated: bool,
) -> None:
    decode = small_decode[policy]
    workers = Workers(main_pool.folder, prefill=[] if colocated else main_pool.prefill, decode=[decode])
    assert decode.get("/ready")["blocks_total"] == NUM_BLOCKS
    before = preemptions(decode)
    salt = f"{policy} {colocated}"  # the prompts of each run are new to the worker
    result = await answers(workers, [replace(work, cache_salt=salt) for work in works])
    assert [each.tokens for each in result] == unloaded
    assert all(set(each.reasons) == {"length"} for each in result)
    preempted = {kind: number - before[kind] for kind, number in preemptions(decode).items()}
    print(f"{salt}: preempted {preempted}")
    if policy == "swap":
        assert preempted["swap"] > 0
    if policy == "recompute":
        assert preempted["recompute"] > 0
        assert preempted["swap"] == 0
        assert decode.metric("baton_tokens_recomputed_total") > 0
    workers.wait_for_baseline()
    assert decode.metric("baton_host_blocks_used") == 0


async def test_choices_that_each_fill_the_whole_cache_get_the_answers_of_an_idle_worker(
    main_pool: Workers, small_decode: dict[str, Process]
) -> None:
    """There is room for one of them at a time. They are seeded, so that no two are alike."""
    num_prompt = 2 * BLOCK_SIZE + 1
    work = generation(
        prompt(31, num_prompt),
        n=3,
        max_tokens=NUM_BLOCKS * BLOCK_SIZE + 1 - num_prompt,
        ignore_eos=True,
        temperature=1.0,
        seed=5,
    )
    assert blocks_at_end(work) > 2 * NUM_BLOCKS
    (expected,) = await answers(main_pool, [work])
    small = Workers(main_pool.folder, prefill=main_pool.prefill, decode=[small_decode["default"]])
    (found,) = await answers(small, [work])
    assert found.tokens == expected.tokens
    assert {len(tokens) for tokens in found.tokens} == {work.sampling.max_tokens}
    small.wait_for_baseline()


async def test_two_choices_without_max_tokens_are_served_where_one_context_fits(
    main_pool: Workers, small_decode: dict[str, Process]
) -> None:
    """Over HTTP. Each choice may fill the cache, and does: they are preempted, not refused."""
    decode = small_decode["default"]
    small = Workers(main_pool.folder, prefill=main_pool.prefill[:1], decode=[decode])
    before = sum(preemptions(decode).values())
    body = {
        "messages": [{"role": "user", "content": "Who hands the baton over?"}],
        "n": 2,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
    }
    with small.gateway() as gateway:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{gateway.facts['url']}/v1/chat/completions", json=body) as response,
        ):
            told = await response.json()
            assert response.status == 200, told
    assert [choice["finish_reason"] for choice in told["choices"]] == ["length", "length"]
    first, second = (choice["message"]["content"] for choice in told["choices"])
    assert first != second
    usage = told["usage"]
    each = usage["completion_tokens"] // 2
    assert usage["prompt_tokens"] + each > NUM_BLOCKS * BLOCK_SIZE - BLOCK_SIZE, "nothing else has ended them"
    assert sum(preemptions(decode).values()) > before
    small.wait_for_baseline()


@pytest.mark.parametrize("policy", ["swap", "recompute"])
async def test_aborts_at_random_moments_under_pressure_leave_nothing_behind(
    main_pool: Workers,
    small_decode: dict[str, Process],
    works: list[Generation],
    unloaded: list[Choices],
    policy: str,
) -> None:
    """And what is cached afterwards is right: the same requests are answered from it."""
    workers = Workers(main_pool.folder, prefill=main_pool.prefill, decode=[small_decode[policy]])
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    before = preemptions(workers.decode[0])[policy]
    num_cancelled = 0

    async def run(index: int, work: Generation, leaves_after: int) -> None:
        """Leave after so many deltas."""
        nonlocal num_cancelled
        tokens: list[list[int]] = [[] for _ in range(work.num_choices)]
        stream = dispatcher.generate(work)
        async for delta in stream:
            assert isinstance(delta, Delta)
            tokens[delta.choice] += delta.token_ids
            leaves_after -= 1
            if leaves_after == 0:
                num_cancelled += 1
                await stream.aclose()
                return
        assert tokens == unloaded[index]

    async with workers.dispatcher() as dispatcher:
        for _ in range(2):
            moments = [draw.choice([1, 5, 20, 50, 10**6]) for _ in works]
            await asyncio.gather(*(run(i, work, at) for i, (work, at) in enumerate(zip(works, moments, strict=True))))
            workers.wait_for_baseline()
        again = await asyncio.gather(*(answer(dispatcher, work) for work in works))
    assert num_cancelled >= 5
    assert preemptions(workers.decode[0])[policy] > before
    assert [each.tokens for each in again] == unloaded
