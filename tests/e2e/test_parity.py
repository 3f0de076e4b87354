"""Greedy output of the real processes equals what `transformers` generates, token for token, in float32."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
import torch
from checkpoints import FAMILIES, VOCAB_SIZE
from stack import Workers, answer, generation
from transformers import AutoModelForCausalLM

NUM_REQUESTS = 64
NEW_TOKENS = 48


def mixed_prompts(seed: int, count: int = NUM_REQUESTS, longest: int = 700) -> list[list[int]]:
    """Prompts of 1 to `longest` random tokens, both ends included."""
    draw = random.Random(seed)
    lengths = [1, longest, 16, 17, 64, 65, *(draw.randint(1, longest) for _ in range(count - 6))]
    return [[draw.randrange(8, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def transformers_greedy(workers: Workers, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What `generate` gives, in left-padded batches of prompts of similar length."""
    model = AutoModelForCausalLM.from_pretrained(workers.folder, dtype=torch.float32)
    outputs: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), 16):
        batch = order[start : start + 16]
        longest = max(len(prompts[index]) for index in batch)
        ids = torch.tensor([[0] * (longest - len(prompts[index])) + prompts[index] for index in batch])
        mask = torch.tensor([[0] * (longest - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
        with torch.inference_mode():
            model.generation_config.eos_token_id = None
            output = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
            )
        for index, row in zip(batch, output[:, longest:].tolist(), strict=True):
            assert len(row) == new_tokens
            outputs[index] = row
    return [outputs[index] for index in range(len(prompts))]


@pytest.mark.parametrize("family", FAMILIES)
async def test_64_requests_in_flight_together_equal_transformers(
    family: str, pool: Callable[..., Workers], request: pytest.FixtureRequest
) -> None:
    main = family == "llama"
    workers = request.getfixturevalue("main_pool") if main else pool(family, family, options=("--checksums",))
    prompts = mixed_prompts(seed=3)
    async with workers.dispatcher() as dispatcher:
        works = [generation(prompt, max_tokens=NEW_TOKENS, ignore_eos=True) for prompt in prompts]
        answers = await asyncio.gather(*(answer(dispatcher, work) for work in works))
    expected = transformers_greedy(workers, prompts, NEW_TOKENS)
    assert [each.tokens[0] for each in answers] == expected
    assert max(len(set(tokens)) for tokens in expected) > 10, "the checkpoint repeats itself: the test shows nothing"
    assert sum(p.metric("baton_transfer_bytes_total") for p in workers.decode) > 0
    if main:
        for process in workers.all:
            ended = process.metric("baton_requests_ended_total")
            assert ended > 0 or process in workers.prefill
        prefilled = [p.metric("baton_prompt_tokens_computed_total") for p in workers.prefill]
        generated = [p.metric("baton_tokens_generated_total") for p in workers.decode]
        assert min(prefilled) > 0, "the load is not shared"
        assert min(generated) > 0, "the load is not shared"
