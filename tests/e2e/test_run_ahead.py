"""Workers that hand the engine a step while the one before it runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from stack import BLOCK_BYTES, Answer, Workers, answer, generation, prompt

from gateway.serving.generation import Generation

Pool = Callable[..., Workers]


def works(stop_token: int) -> list[Generation]:
    """Everything by which a step may depend on the one before it."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9},
        {"stop_token_ids": (stop_token,)},
        {"stop_token_ids": (stop_token,), "min_tokens": 12},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"temperature": 1.2, "seed": 8, "n": 3},
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 9, "grammar": "start: /([a-f]{3}-){20}/"},
        {"temperature": 1.0, "seed": 10, "logit_bias": ((stop_token, -100.0), (7, 5.0))},
    ]
    return [
        generation(prompt(index, 30 + 11 * index), **{"max_tokens": max_tokens, "ignore_eos": True, **kind})
        for index, kind in enumerate(kinds)
        for max_tokens in (1, 2, 40)
    ]


def logprobs_of(each: Answer) -> list[float]:
    """Of its first choice: of each token, and of the most likely ones. Their last bits depend on the chunks."""
    reports = [report for delta in each.deltas for report in delta.logprobs or () if delta.choice == 0]
    return [value for report in reports for value in (report.logprob, *(value for _, value in report.top))]


@pytest.mark.parametrize("room", ["enough", "little"])
async def test_planning_ahead_changes_nothing_that_clients_see(main_pool: Workers, pool: Pool, room: str) -> None:
    """With little room sequences are preempted all the time, and come back."""
    little = ("--kv-cache-bytes", str(40 * BLOCK_BYTES), "--memory-reserve", "-1")
    ahead = pool(
        f"ahead with {room} room",
        options=("--run-ahead", "on", "--checksums"),
        prefill_options=("--chunk-size", "16", "--token-budget", "24"),
        decode_options=little if room == "little" else (),
    )
    draw = random.Random(room)
    async with main_pool.dispatcher() as dispatcher:
        [greedy] = (await answer(dispatcher, generation(prompt(2, 52), max_tokens=40, ignore_eos=True))).tokens
        asked = works(stop_token=greedy[9])
        expected = [await answer(dispatcher, work) for work in asked]
    assert any(each.reasons == ["stop"] and 1 < len(each.tokens[0]) < 40 for each in expected)

    async def given_up(work: Generation) -> None:
        try:
            async with asyncio.timeout(draw.choice([0.0, 0.01, 0.03, 0.1])):
                await answer(dispatcher, work)
        except TimeoutError:
            pass

    async with ahead.dispatcher() as dispatcher:
        for _ in range(3):
            order = draw.sample(range(len(asked)), len(asked))
            disturbing = [asyncio.create_task(given_up(asked[index])) for index in order[:8]]
            got = await asyncio.gather(*(answer(dispatcher, asked[index]) for index in order))
            await asyncio.gather(*disturbing)
            for index, each in zip(order, got, strict=True):
                assert (each.tokens, each.reasons) == (expected[index].tokens, expected[index].reasons), index
                assert logprobs_of(each) == pytest.approx(logprobs_of(expected[index]), abs=1e-4), index
        for index in (2, 14):  # without penalties, and with some
            before = sum(worker.metric("baton_steps_ahead_total") for worker in ahead.decode)
            assert (await answer(dispatcher, asked[index])).tokens == expected[index].tokens
            # Alone: but for the first one, and the look after the last, every step is planned ahead.
            assert sum(worker.metric("baton_steps_ahead_total") for worker in ahead.decode) - before >= 35
    assert sum(worker.metric("baton_steps_ahead_total") for worker in ahead.prefill) > 20, "chunks follow each other"
    if room == "little":
        assert sum(worker.metric("baton_preemptions_total") for worker in ahead.decode) > 0
