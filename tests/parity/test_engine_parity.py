"""The engine against `transformers`, in one process: greedy tokens and logits in float32.

Every case runs several prompts of unequal lengths together: chunks of prompts and decode tokens share steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LINEAR_SCALING, LLAMA3_SCALING, VOCAB_SIZE, YARN_SCALING, make_checkpoint
from needs import require
from transformers import AutoModelForCausalLM

from common.contract.ids import RequestId, RequestKey
from common.contract.sampling import SamplingParams
from common.engine import native
from common.engine.backend import Backend, TorchBackend
from common.engine.batch import Sample, SampledToken, Slice
from common.engine.block_pool import BlockPool
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.native import Kernels
from common.engine.native.backend import NativeBackend
from common.engine.ragged import Rows
from common.engine.runner import ModelRunner, load_runner
from common.engine.sequence import TokenSequence, finish_reason
from common.engine.weights import load_weights

torch.set_num_threads(1)

CPU = torch.device("cpu")
BLOCK_SIZE = 16
CHUNK = 64
NUM_OUTPUT = 40
PROMPT_LENS = (1, 5, 16, 63, 64, 65, 150)
DYNAMIC_SCALING = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
"""Changes the frequencies of longer sequences than the context."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_SCALING}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN_SCALING}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_SCALING}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": DYNAMIC_SCALING, "max_position_embeddings": 190}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "mistral-window-24": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows-from-layer-1": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-layer-types-tied": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a variant, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(variant: str) -> Path:
        family, config = VARIANTS[variant]
        folder = root / variant
        return folder if folder.exists() else make_checkpoint(family, folder, seed=3, **config)

    return make


def prompts(lengths: tuple[int, ...] = PROMPT_LENS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@functools.cache
def transformers_greedy(folder: Path, lengths: tuple[int, ...] = PROMPT_LENS, **options: Any) -> list[list[int]]:
    """What `generate` makes of each of the `prompts` by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generated = []
    for prompt in prompts(lengths):
        ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.int64)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_OUTPUT, **options)
        generated.append(out[0, len(prompt) :].tolist())
    return generated


def generate(runner: ModelRunner, requests: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """Run `requests` to their ends: each step decodes what can decode and fills `CHUNK` tokens with prompts."""
    pool = BlockPool(runner.cache.num_blocks)
    sequences = [
        TokenSequence(RequestKey(RequestId(f"r{index}"), 1), 0, list(prompt), len(prompt), sampling)
        for index, prompt in enumerate(requests)
    ]
    running = list(sequences)
    while running:
        budget, scheduled = CHUNK, []
        for sequence in running:
            remaining = sequence.num_tokens - sequence.num_computed
            num = min(remaining, budget) if remaining > 1 else 1
            if num:
                budget -= num if remaining > 1 else 0
                scheduled.append((sequence, num))
        step = pool.step_started()
        slices = [slice_of(runner, pool, sequence, num) for sequence, num in scheduled]
        for (sequence, num), outcome in zip(scheduled, runner.step(slices), strict=True):
            sequence.num_computed += num
            for sampled in outcome:
                assert isinstance(sampled, SampledToken)
                sequence.token_ids.append(sampled.token_id)
                if finish_reason(
                    sampled.token_id,
                    sequence.num_output,
                    sampling,
                    runner.config.eos_token_ids,
                    sequence.num_tokens,
                    runner.config.max_sequence_tokens,
                ):
                    running.remove(sequence)
                    pool.release(sequence.block_table)
        pool.step_finished(step)
        pool.check_invariants()
    assert pool.num_free == pool.num_blocks
    return [sequence.token_ids[sequence.prompt_len :] for sequence in sequences]


def slice_of(runner: ModelRunner, pool: BlockPool, sequence: TokenSequence, num: int) -> Slice:
    start, end = sequence.num_computed, sequence.num_computed + num
    needed = runner.layout.blocks_for(end) - len(sequence.block_table)
    sequence.block_table.extend(pool.allocate(needed))
    sample = Sample(
        params=sequence.sampling,
        choice=sequence.choice,
        position=end,
        token_ids=sequence.token_ids,
        prompt_len=sequence.prompt_len,
    )
    return Slice(
        token_ids=sequence.token_ids[start:end],
        start=start,
        block_table=sequence.block_table,
        samples=(sample,) if end == sequence.num_tokens else (),
    )


def runner_of(folder: Path, dtype: str = "float32", cpu_kernels: bool = True) -> ModelRunner:
    return load_runner(folder, kv_cache_bytes=8 * 2**20, block_size=BLOCK_SIZE, dtype=dtype, cpu_kernels=cpu_kernels)


@pytest.mark.parametrize("cpu_kernels", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Callable[[str], Path], variant: str, cpu_kernels: bool
) -> None:
    folder = checkpoint(variant)
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
    ours = generate(runner_of(folder, cpu_kernels=cpu_kernels), prompts(), sampling)
    assert ours == transformers_greedy(folder)
    assert all(len(set(tokens)) >= min(10, len(tokens) // 2) for tokens in ours), "too repetitive to prove anything"


def test_penalised_greedy_tokens_are_those_of_transformers(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, repetition_penalty=1.7, min_tokens=NUM_OUTPUT)
    ours = generate(runner_of(folder), prompts((5, 63)), sampling)
    expected = transformers_greedy(folder, (5, 63), repetition_penalty=1.7, min_new_tokens=NUM_OUTPUT)
    assert ours == expected


Backends = Callable[[Kernels | None], Backend]


def in_torch(kernels: Kernels | None) -> Backend:
    return TorchBackend()


def in_c(kernels: Kernels | None) -> Backend:
    assert kernels is not None
    return NativeBackend(kernels)


def compiled(backend: Backends) -> Kernels | None:
    """The kernels, for a backend that has some."""
    if backend is not in_c:
        return None
    require("compiler")
    found = native.kernels()
    assert found is not None
    return found


def logits_of_chunks(
    folder: Path, prompt: list[int], chunk: int, backend: Backends, garbage: float = 0.0, dtype: str = "float32"
) -> torch.Tensor:
    """Logits of the last token of `prompt`, computed `chunk` tokens at a time in a cache full of `garbage`."""
    kernels = compiled(backend)
    config = ModelConfig.from_folder(folder)
    weights = load_weights(config, folder, dtype, CPU, kernels=kernels, batch_invariant=kernels is not None)
    decoder = Decoder(config, weights)
    cache = KVCache(config.layout(BLOCK_SIZE, dtype), 32, CPU)
    for block in range(config.num_layers):
        cache.layer(block).fill_(garbage)
    table = torch.randperm(32, generator=torch.Generator().manual_seed(5)).tolist()
    sample = Sample(params=SamplingParams(max_tokens=1), choice=0, position=0, token_ids=(), prompt_len=0)
    logits = torch.empty(0)
    for start in range(0, len(prompt), chunk):
        piece = Slice(token_ids=prompt[start : start + chunk], start=start, block_table=table, samples=(sample,))
        logits = decoder.forward(Rows.of([piece], BLOCK_SIZE).on(cache.device), cache, backend(kernels))
    return logits[0]


@pytest.mark.parametrize("variant", ["llama-llama3-rope", "qwen2-windows-from-layer-1", "qwen3-layer-types-tied"])
@pytest.mark.parametrize("backend", [in_torch, in_c])
def test_logits_do_not_depend_on_chunks(checkpoint: Callable[[str], Path], variant: str, backend: Backends) -> None:
    folder = checkpoint(variant)
    (prompt,) = prompts((150,))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
        for chunk in (150, 64, 16, 7, 1):
            ours = logits_of_chunks(folder, prompt, chunk, backend)
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "pairs"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_c_logits_have_the_same_bits_in_chunks_of_any_size(
    checkpoint: Callable[[str], Path], variant: str, dtype: str, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step is a chunk of one token. So a worker that continues an answer, and computes the tokens so far as a
    prompt, goes on with the same numbers."""
    monkeypatch.setattr(compiled(in_c), "multiplies_pairs", pairs)
    (prompt,) = prompts((150,))
    whole = logits_of_chunks(checkpoint(variant), prompt, 150, in_c, dtype=dtype)
    for chunk in (64, 16, 7, 1):
        assert torch.equal(logits_of_chunks(checkpoint(variant), prompt, chunk, in_c, dtype=dtype), whole), chunk


@pytest.mark.parametrize("backend", [in_torch, in_c])
@pytest.mark.parametrize("chunk", [150, 7, 1])
def test_what_an_earlier_owner_left_in_a_block_does_not_matter(
    checkpoint: Callable[[str], Path], chunk: int, backend: Backends
) -> None:
    folder = checkpoint("mistral-window-24")
    (prompt,) = prompts((150,))
    clean = logits_of_chunks(folder, prompt, chunk, backend)
    assert torch.equal(logits_of_chunks(folder, prompt, chunk, backend, garbage=float("nan")), clean)


def test_an_invalid_sequence_does_not_spoil_the_others(checkpoint: Callable[[str], Path]) -> None:
    runner = runner_of(checkpoint("llama"))
    short, long = prompts((20, 30))
    params = SamplingParams(max_tokens=9, temperature=0.0)

    def slices(token_ids: list[int], table: list[int]) -> tuple[Slice, Slice]:
        """All but the last token, then the last one."""
        sample = Sample(
            params=params, choice=0, position=len(token_ids), token_ids=token_ids, prompt_len=len(token_ids)
        )
        prefix = Slice(token_ids=token_ids[:-1], start=0, block_table=table)
        return prefix, Slice(token_ids=token_ids[-1:], start=len(token_ids) - 1, block_table=table, samples=(sample,))

    (first, last), (other_first, other_last) = slices(short, [3, 4]), slices(long, [1, 2])
    runner.step([first, other_first])
    alone = runner.step([last])
    runner.cache.layer(0)[1:3] = float("nan")
    together = runner.step([last, other_last])
    assert together[0] == alone[0]
    (spoiled,) = together[1]
    assert not isinstance(spoiled, SampledToken)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("backend", "pairs", "worse_at_most"), [(in_torch, False, 1.5), (in_c, False, 1.0), (in_c, True, 1.0)]
)
def test_bfloat16_is_close_to_transformers(
    checkpoint: Callable[[str], Path],
    variant: str,
    backend: Backends,
    pairs: bool,
    worse_at_most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint(variant)
    (prompt,) = prompts((40,))
    kernels = compiled(backend)
    if kernels is not None:
        monkeypatch.setattr(kernels, "multiplies_pairs", pairs)
    config = ModelConfig.from_folder(folder)
    decoder = Decoder(config, load_weights(config, folder, "bfloat16", torch.device("cpu"), kernels=kernels))
    cache = KVCache(config.layout(BLOCK_SIZE, "bfloat16"), 4, torch.device("cpu"))
    sample = Sample(params=SamplingParams(max_tokens=1), choice=0, position=0, token_ids=(), prompt_len=0)
    piece = Slice(token_ids=prompt, start=0, block_table=[2, 0, 3], samples=(sample,))
    ours = decoder.forward(Rows.of([piece], BLOCK_SIZE).on(cache.device), cache, backend(kernels))[0]
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([prompt])).logits[0, -1]
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(torch.tensor([prompt]))
    error, their_error = (ours.float() - exact).norm(), (theirs.logits[0, -1].float() - exact).norm()
    assert error < worse_at_most * their_error, (error, their_error)
