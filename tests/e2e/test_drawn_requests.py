"""Crowds of requests that hypothesis draws: workers that draft tokens, and lack memory, answer as a plain one does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stack import BLOCK_BYTES, FEW, Answer, Process, Workers, answer, generation, logprobs_of, prompt

from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Generation

NUM_BLOCKS = 40
"""Of each worker that drafts: some ten requests need twice as many."""
WORKERS = {
    "looked up, swapped": ("--speculation", "lookup", "--draft-tokens", "5", "--preempt-by", "swap"),
    "right, computed again": ("--speculation", "auto", "--draft-tokens", "4", "--preempt-by", "recompute"),
    "wrong, where it pays": ("--speculation", "auto"),
}
"""Who tells drafted tokens, and what becomes of the sequences for which there is no room."""
DRAWN = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def requests(draw: st.DrawFn) -> Generation:
    """A request of any kind: what it asks for concerns each token, and none, a part or all of them are expected."""
    seed = draw(st.integers(0, 99))
    ids = prompt(seed, draw(st.integers(1, 60))) + [40, 50, 60] * draw(st.integers(0, 8))
    asked: dict[str, Any] = {"max_tokens": draw(st.integers(1, 90)), "ignore_eos": draw(st.booleans())}
    if draw(st.booleans()):
        asked |= {"temperature": draw(st.sampled_from((0.3, 1.0, 1.5))), "seed": seed, "n": draw(st.integers(1, 3))}
        asked |= draw(st.sampled_from(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1})))
    if draw(st.booleans()):
        asked |= {"grammar": "start: /([a-f]{3}-){20}/"} if draw(st.booleans()) else {"logit_bias": FEW}
    if draw(st.booleans()):
        kind = draw(st.sampled_from(("presence_penalty", "frequency_penalty", "repetition_penalty")))
        asked[kind] = draw(st.sampled_from((0.2, 1.1, 2.0)))
    asked["logprobs"] = draw(st.sampled_from((None, 0, 2)))
    if draw(st.booleans()):
        asked |= {"stop_token_ids": (40,), "min_tokens": min(asked["max_tokens"], draw(st.integers(0, 20)))}
    work = generation(ids, **asked)
    work.prediction = tuple(draw(st.sampled_from(((), (), prompt(seed, 30), [40, 50, 60] * 9))))
    return work


crowds = st.lists(requests(), min_size=6, max_size=14)


@pytest.fixture
def drafting(pool: Callable[..., Workers], checkpoint: Callable[[str], Path], tmp_path: Path) -> dict[str, Process]:
    """The workers under test; each computes prompts, too."""
    models = {"right": checkpoint("llama"), "wrong": make_checkpoint("llama", tmp_path, seed=8)}
    little = ("--kv-cache-bytes", str(NUM_BLOCKS * BLOCK_BYTES), "--memory-reserve", "-1")
    options = []
    for name, drafts in WORKERS.items():
        told = models.get(name.split(",")[0])
        options.append((*little, *drafts, *(() if told is None else ("--draft-model", str(told)))))
    workers = pool("drawn", prefill=0, decode=len(WORKERS), options=("--checksums",), decode_options=options)
    return dict(zip(WORKERS, workers.decode, strict=True))


async def answers(dispatcher: Dispatcher, crowd: list[Generation]) -> list[Answer]:
    """All of them at once."""
    return list(await asyncio.gather(*(answer(dispatcher, work) for work in crowd)))


def test_workers_that_draft_answer_as_a_plain_one(main_pool: Workers, drafting: dict[str, Process]) -> None:
    pools = {name: Workers(main_pool.folder, decode=[worker]) for name, worker in drafting.items()}
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        known = runner.run(stack.enter_async_context(main_pool.dispatcher()))
        tried = {name: runner.run(stack.enter_async_context(pool.dispatcher())) for name, pool in pools.items()}

        @DRAWN
        @given(crowds)
        def compare(crowd: list[Generation]) -> None:
            expected = runner.run(answers(known, crowd))
            for name, dispatcher in tried.items():
                found = runner.run(answers(dispatcher, crowd))
                for work, plain, drafted in zip(crowd, expected, found, strict=True):
                    assert (drafted.tokens, drafted.reasons) == (plain.tokens, plain.reasons), (name, work)
                    assert logprobs_of(drafted) == pytest.approx(logprobs_of(plain), abs=1e-4), (name, work)

        try:
            compare()
        finally:
            runner.run(stack.aclose())
    swapped, right, wrong = drafting.values()
    assert swapped.metric("baton_preemptions_total", kind="swap") > 0
    assert right.metric("baton_preemptions_total", kind="recompute") > 0
    for worker in (swapped, right):
        num_drafted = worker.metric("vllm:spec_decode_num_draft_tokens_total")
        assert 200 < worker.metric("vllm:spec_decode_num_accepted_tokens_total") < num_drafted - 200
    assert right.metric("baton_draft_tokens_total", proposer="draft") > 200
    assert wrong.metric("vllm:spec_decode_num_draft_tokens_total") > 0
