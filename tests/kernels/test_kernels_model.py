"""Whole models by the kernels: the tokens of greedy decoding, in float32, are those of the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, VOCAB_SIZE

from common.contract.sampling import SamplingParams
from common.engine.backend import Backend, TorchBackend
from common.engine.batch import Sample, Sampled, SampledToken, Slice
from common.engine.executor import Executor
from common.engine.graphs import Computed, ladder
from common.engine.host_swap import HostSwap
from common.engine.kernels.backend import TritonBackend
from common.engine.kernels.skinny import SkinnyTiling, skinny
from common.engine.kernels.tuning import Tuning
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.ragged import Rows
from common.engine.runner import ModelRunner, Submitted, load_runner
from common.engine.weights import load_weights
from kernels.eager_graphs import EagerGraphs
from kernels.tuned import keep_rows, skinny_entries

BLOCK_SIZE = 16
CHUNK = 24
PARAMS = {
    "greedy": SamplingParams(max_tokens=9, temperature=0.0),
    "temperature": SamplingParams(max_tokens=9, temperature=1.3, seed=5),
    "top-k": SamplingParams(max_tokens=9, temperature=2.0, top_k=7, top_p=0.9, seed=6),
}

ANY = Sample(params=SamplingParams(max_tokens=9), choice=0, position=1, token_ids=(), prompt_len=1)
GREEDY = Sample(params=PARAMS["greedy"], choice=0, position=1, token_ids=(), prompt_len=1)


def runner_of(folder: Path, device: torch.device, backend: Backend, dtype: str = "float32") -> ModelRunner:
    config = ModelConfig.from_folder(folder)
    layout = config.layout(BLOCK_SIZE, dtype)
    weights = load_weights(config, folder, dtype, device)
    cache, swap = KVCache(layout, 24, device), HostSwap(layout, 0, device)
    return ModelRunner(Executor(Decoder(config, weights), cache, swap, backend))


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
    expected = tokens_of(runner_of(folder, torch.device("cpu"), TorchBackend()), prompts, 6)
    assert [len(each) for each in expected] == [5, 5, 4]
    assert tokens_of(runner_of(folder, device, TritonBackend(device)), prompts, 6) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_products_of_few_rows_by_the_kernel_give_the_same_tokens(
    device: torch.device, checkpoint: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias and without one."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(5, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (30, 17, 1)]
    folder = checkpoint(family)
    expected = tokens_of(runner_of(folder, torch.device("cpu"), TorchBackend()), prompts, 4)
    backend = TritonBackend(device)
    keep_rows(monkeypatch)
    runner = runner_of(folder, device, backend)
    tilings = {1: SkinnyTiling(columns=32, depth=32), 4: SkinnyTiling(columns=16, depth=16, splits=3)}
    entries = skinny_entries(
        runner.executor.decoder._weights, 4, tilings | {2: tilings[1], 8: tilings[4], 16: tilings[1]}
    )
    backend._tuning = Tuning("tuned", 0, {"tuned": entries})
    calls: list[tuple[int, ...]] = []

    def counted(x_MK: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(tuple(x_MK.shape))
        return skinny(x_MK, *args, **options)

    monkeypatch.setattr("common.engine.kernels.backend.skinny", counted)
    assert tokens_of(runner, prompts, 4) == expected
    per_step = 4 * runner.config.num_layers + 1
    # The first two steps have more than 16 tokens, and the first of them no logits.
    assert len(calls) == 1 + 2 * per_step
    assert calls[0] == (2, runner.config.hidden_size)
    assert {rows for rows, _ in calls[1:]} == {3}


def test_a_batch_fills_the_first_places_of_a_graph_and_the_others_are_nobodys(
    device: torch.device, checkpoint: Callable[[str], Path]
) -> None:
    """A small batch after a large one: what that has left in the buffers does nothing."""
    runner = runner_of(checkpoint("llama"), device, TritonBackend(device))
    graphs = EagerGraphs(runner.executor.decoder, runner.cache, runner.executor.backend, max_num_seqs=6, max_blocks=4)
    token_ids = torch.randint(5, VOCAB_SIZE, (5, 40), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[4 * row + column for column in range(4)] for row in range(5)]
    lens = [20, 33, 1, 17, 16]
    for row, length in enumerate(lens):
        runner.step([Slice(token_ids=token_ids[row][:length], start=0, block_table=tables[row])])
    before = runner.cache.blocks.clone()

    def batch(rows: list[int]) -> Rows:
        slices = [
            Slice(token_ids=[token_ids[row][lens[row]]], start=lens[row], block_table=tables[row], samples=(ANY,))
            for row in rows
        ]
        return Rows.of(slices, BLOCK_SIZE)

    nothing = torch.empty(0, dtype=torch.int64, device=device)
    for rows, places in (([0, 1, 2, 3, 4], 6), ([3, 0, 2], 4), ([1], 1)):
        runner.cache.blocks.copy_(before)
        expected = runner.executor.decoder.forward(batch(rows).on(device), runner.cache, runner.executor.backend)
        written = runner.cache.blocks.clone()
        runner.cache.blocks.copy_(before)
        computed = graphs.compute(batch(rows), nothing)
        assert graphs.replayed == places
        assert computed is not None
        logits = computed.logits_NV
        # Torch sums a row of a product in another order when other rows are beside it.
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(runner.cache.blocks, written, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_ends_with_logits_in_float32_and_the_likeliest_tokens_bit_for_bit(
    device: torch.device, checkpoint: Callable[[str], Path], dtype: str
) -> None:
    runner = runner_of(checkpoint("llama"), device, TritonBackend(device), dtype)
    graphs = EagerGraphs(runner.executor.decoder, runner.cache, runner.executor.backend, max_num_seqs=4, max_blocks=4)
    slices = [Slice(token_ids=[7 + row], start=0, block_table=[row], samples=(ANY,)) for row in range(3)]
    computed = graphs.compute(Rows.of(slices, BLOCK_SIZE), torch.empty(0, dtype=torch.int64, device=device))
    assert computed is not None
    logits = runner.executor.decoder.forward(graphs._places(4), runner.cache, runner.executor.backend)[:3]
    assert logits.dtype == runner.cache.blocks.dtype
    assert computed.logits_NV.dtype == torch.float32
    assert torch.equal(computed.logits_NV, logits.float())
    values, tokens = logits.float().max(-1)
    assert torch.equal(computed.likeliest.tokens_N, tokens)
    assert torch.equal(computed.likeliest.best_N, values)


def test_a_greedy_step_asks_for_nothing_after_its_graph(
    device: torch.device, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(checkpoint("llama"), device, TritonBackend(device))
    graphs = EagerGraphs(runner.executor.decoder, runner.cache, runner.executor.backend, max_num_seqs=4, max_blocks=4)
    runner.executor.graphs = graphs
    computed: list[Computed] = []

    def compute(rows: Rows, chosen_N: torch.Tensor) -> Computed | None:
        result = EagerGraphs.compute(graphs, rows, chosen_N)
        assert result is not None
        computed.append(result)
        monkeypatch.setattr(runner.executor.backend, "best", None)  # whoever calls it from here on fails
        return result

    monkeypatch.setattr(runner.executor.graphs, "compute", compute)
    ((token,),) = runner.step([Slice(token_ids=[7], start=0, block_table=[0], samples=(GREEDY,))])
    assert isinstance(token, SampledToken)
    assert token.token_id == int(computed[0].logits_NV.argmax())
    assert runner._chosen_N.data_ptr() == computed[0].likeliest.tokens_N.data_ptr(), "it is where the graph left it"


def follow_step_by_step(runner: ModelRunner, params: SamplingParams) -> list[list[tuple[Sampled, ...]]]:
    """Three prompts in one step, then steps that are planned before the tokens are known; sequences leave, and change
    places. What the host knows of the tokens are the prompts."""
    prompts = [list(range(10, 30)), list(range(40, 71)), [5]]
    submitted, before = [], [0, 1, 2]
    for step, order in enumerate(([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1])):
        slices = []
        for row in order:
            position = len(prompts[row]) + step
            known = prompts[row]
            sample = Sample(params=params, choice=0, position=position, token_ids=known, prompt_len=len(known))
            slices.append(
                Slice(
                    token_ids=[0] if step else prompts[row],
                    start=position - 1 if step else 0,
                    block_table=list(range(4 * row, 4 * row + 4)),
                    samples=(sample,),
                    follows=before.index(row) if step else None,
                )
            )
        submitted.append(runner.submit(slices))
        before = order
    return [each.outcomes() for each in submitted]


@pytest.mark.parametrize("repetition_penalty", [1.0, 3.0])
def test_tokens_that_follow_the_step_before_are_looked_up_in_the_graph(
    device: torch.device, checkpoint: Callable[[str], Path], repetition_penalty: float
) -> None:
    folder = checkpoint("llama")
    params = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=repetition_penalty)
    expected = follow_step_by_step(runner_of(folder, device, TritonBackend(device)), params)
    runner = runner_of(folder, device, TritonBackend(device))
    runner.executor.graphs = EagerGraphs(
        runner.executor.decoder, runner.cache, runner.executor.backend, max_num_seqs=4, max_blocks=4
    )
    assert follow_step_by_step(runner, params) == expected
    assert runner.executor.graphs.replayed == 2
    assert len({str(each) for each in expected}) == 4


def test_what_is_no_batch_of_decode_tokens_has_no_graph(
    device: torch.device, checkpoint: Callable[[str], Path]
) -> None:
    runner = runner_of(checkpoint("llama"), device, TritonBackend(device))
    graphs = EagerGraphs(runner.executor.decoder, runner.cache, runner.executor.backend, max_num_seqs=2, max_blocks=4)
    decode = Slice(token_ids=[7], start=3, block_table=[0], samples=(ANY,))
    chosen = torch.tensor([7, 8, 9], device=device)
    for slices in (
        [Slice(token_ids=[0], start=3, block_table=[0], samples=(ANY,), follows=2)],
        [Slice(token_ids=[7, 8], start=0, block_table=[1], samples=(ANY,))],
        [decode, Slice(token_ids=[7], start=0, block_table=[1])],
        [decode] * 3,
        [Slice(token_ids=[7], start=70, block_table=[0, 1, 2, 3, 4], samples=(ANY,))],
    ):
        assert graphs.compute(Rows.of(slices, BLOCK_SIZE), chosen) is None


def test_sizes_that_have_a_graph() -> None:
    assert ladder(1) == [1]
    assert ladder(6) == [1, 2, 4, 6]
    assert ladder(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert all(b - a <= max(8, a // 16) for a, b in pairwise(ladder(512)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_engine_gives_the_tokens_of_a_cpu(checkpoint: Callable[[str], Path]) -> None:
    prompts = [list(range(10, 50)), list(range(60, 77)), [5]]
    for family in FAMILIES:
        folder = checkpoint(family)
        on_cpu = load_runner(folder, kv_cache_bytes=2**22, block_size=16, dtype="float32")
        on_gpu = load_runner(folder, kv_cache_bytes=2**22, block_size=16, dtype="float32", device="cuda")
        on_gpu.capture_graphs(4)
        assert tokens_of(on_gpu, prompts, 9) == tokens_of(on_cpu, prompts, 9), family


def submit_every_kind(runner: ModelRunner) -> list[Submitted]:
    """A prompt, decode tokens that follow it, both together; rows that ask for all there is; a swap."""
    every_params = (
        *PARAMS.values(),
        SamplingParams(max_tokens=9, min_p=0.1, logprobs=3, min_tokens=15, logit_bias=((3, 1.0),)),
        SamplingParams(max_tokens=9, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
    )
    tokens = tuple(range(5, 25))
    samples = tuple(
        Sample(params=params, choice=0, position=len(tokens), token_ids=tokens, prompt_len=10)
        for params in every_params
    )
    prompt = Slice(token_ids=tokens, start=0, block_table=[8, 9], samples=samples)
    decodes = [
        Slice(token_ids=[7], start=3, block_table=[row], samples=(sample,), follows=row)
        for row, sample in enumerate(samples)
    ]
    submitted = [runner.submit([prompt]), runner.submit(decodes), runner.submit([*decodes, prompt])]
    runner.copy_block(8, 10)
    runner.swap_out([(8, 0)])
    runner.swap_in([(0, 8)])
    return submitted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_is_submitted_without_waiting(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    runner = load_runner(folder, kv_cache_bytes=2**22, block_size=16, swap_bytes=2**20, dtype="float32", device="cuda")
    runner.capture_graphs(8)
    submit_every_kind(runner)[-1].outcomes()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        submitted = submit_every_kind(runner)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [sum(map(len, each.outcomes())) for each in submitted] == [5, 5, 10]
