"""A model whose sequences have the last blocks of a cache. On a GPU these lie beyond the first 2^31 elements, where a
32-bit offset does not reach; elsewhere the cache is small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE

from benchmarks.gpu.checks import BEYOND
from common.engine.backend import TorchBackend
from common.engine.batch import Sampled, Slice
from common.engine.executor import Executor
from common.engine.host_swap import HostSwap
from common.engine.kernels.backend import TritonBackend
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.runner import ModelRunner
from common.engine.weights import load_weights
from kernels.eager_graphs import EagerGraphs
from kernels.test_kernels_model import BLOCK_SIZE, runner_of, tokens_of

NUM_BLOCKS = 24
"""Blocks that are used, the last ones of the cache."""
_FEW = 10
"""Number of blocks before them without a GPU."""


def runner_with_far_blocks(folder: Path, device: torch.device) -> tuple[ModelRunner, int]:
    """A runner in float32 with graphs, and the first of its cache's last `NUM_BLOCKS` blocks."""
    config = ModelConfig.from_folder(folder)
    layout = config.layout(BLOCK_SIZE, "float32")
    first = -(-BEYOND * 4 // layout.block_bytes) if device.type == "cuda" else _FEW
    cache, swap = KVCache(layout, first + NUM_BLOCKS, device), HostSwap(layout, 1, device)
    decoder = Decoder(config, load_weights(config, folder, "float32", device))
    runner = ModelRunner(Executor(decoder, cache, swap, TritonBackend(device)))
    if device.type == "cuda":
        runner.capture_graphs(4)
    else:
        runner.executor.graphs = EagerGraphs(decoder, cache, runner.executor.backend, max_num_seqs=4, max_blocks=6)
    return runner, first


def test_tokens_in_the_last_blocks_are_those_of_the_reference(
    device: torch.device, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written elsewhere, and the blocks can be copied and swapped."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(5, VOCAB_SIZE, (size,), generator=generator).tolist() for size in (30, 17, 1)]
    folder = checkpoint("qwen3")
    expected = tokens_of(runner_of(folder, torch.device("cpu"), TorchBackend()), prompts, 4)
    runner, first = runner_with_far_blocks(folder, device)
    step, blocks = runner.step, runner.cache.blocks

    def step_far(slices: Sequence[Slice]) -> list[tuple[Sampled, ...]]:
        return step([replace(each, block_table=[first + block for block in each.block_table]) for each in slices])

    monkeypatch.setattr(runner, "step", step_far)
    assert tokens_of(runner, prompts, 4) == expected
    assert not blocks[:first].any()
    assert blocks[first].all()
    copied, swapped = first + NUM_BLOCKS - 1, first + NUM_BLOCKS - 2
    assert not blocks[swapped:].any()
    runner.copy_block(first, copied)
    runner.swap_out([(first, 0)])
    runner.swap_in([(0, swapped)])
    step([])
    assert torch.equal(blocks[copied], blocks[first])
    assert torch.equal(blocks[swapped], blocks[first])
