"""Whole models by the kernels: the tokens of greedy decoding, in float32, are those of the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, VOCAB_SIZE

from common.contract.sampling import SamplingParams
from common.engine.attention import ReferenceAttention
from common.engine.backend import Backend
from common.engine.batch import Sample, SampledToken, Slice
from common.engine.host_swap import HostSwap
from common.engine.kernels.backend import TritonBackend
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.runner import ModelRunner
from common.engine.weights import load_weights

BLOCK_SIZE = 16
CHUNK = 24
PARAMS = {
    "greedy": SamplingParams(max_tokens=9),
    "temperature": SamplingParams(max_tokens=9, temperature=1.3, seed=5),
    "top-k": SamplingParams(max_tokens=9, temperature=2.0, top_k=7, top_p=0.9, seed=6),
}


def runner_of(folder: Path, device: torch.device, backend: Backend) -> ModelRunner:
    """In float32."""
    config = ModelConfig.from_folder(folder)
    layout = config.layout(BLOCK_SIZE, "float32")
    weights = load_weights(config, folder, "float32", device)
    cache, swap = KVCache(layout, 24, device), HostSwap(layout, 0, device)
    return ModelRunner(Decoder(config, weights), cache, swap, backend)


def tokens_of(runner: ModelRunner, prompts: list[list[int]], num_steps: int) -> list[list[int]]:
    """A prompt joins at each step, in chunks that ride with the tokens of those before it."""
    tables = [list(range(6 * index, 6 * index + 6)) for index in range(len(prompts))]
    sequences = [list(prompt) for prompt in prompts]
    num_computed = [0] * len(prompts)
    for step in range(num_steps):
        slices, ends = [], []
        for index, (tokens, params) in enumerate(zip(sequences, PARAMS.values(), strict=True)):
            if index > step:
                continue
            start, end = num_computed[index], min(len(tokens), num_computed[index] + CHUNK)
            prompt_len = len(prompts[index])
            sample = Sample(
                params=params, choice=0, position=len(tokens), token_ids=tuple(tokens), prompt_len=prompt_len
            )
            samples = (sample,) if end == len(tokens) else ()
            slices.append(Slice(token_ids=tokens[start:end], start=start, block_table=tables[index], samples=samples))
            ends.append((index, end))
        for (index, end), outcomes in zip(ends, runner.step(slices), strict=True):
            num_computed[index] = end
            for outcome in outcomes:
                assert isinstance(outcome, SampledToken)
                sequences[index].append(outcome.token_id)
    return [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_reference(
    device: torch.device, checkpoint: Callable[[str], Path], family: str
) -> None:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(5, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (30, 17, 1)]
    folder = checkpoint(family)
    expected = tokens_of(runner_of(folder, torch.device("cpu"), ReferenceAttention()), prompts, 6)
    assert [len(each) for each in expected] == [5, 5, 4]
    assert tokens_of(runner_of(folder, device, TritonBackend(device)), prompts, 6) == expected
