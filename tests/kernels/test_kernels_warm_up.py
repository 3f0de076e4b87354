"""No kernel is compiled while a worker serves: whatever a step can ask for has been asked for by the warm-up."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from triton.runtime.interpreter import InterpretedFunction

from common.contract.sampling import SamplingParams
from common.engine.backend import Backend, TorchBackend
from common.engine.batch import Ints, Sample, Slice
from common.engine.executor import Executor
from common.engine.host_swap import HostSwap
from common.engine.kernels.backend import TritonBackend
from common.engine.kernels.skinny import SkinnyTiling
from common.engine.kernels.tiles import INTERPRETED
from common.engine.kernels.tuning import Tuning
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.runner import ModelRunner
from common.engine.warm_up import decode_batches
from common.engine.weights import load_weights
from kernels.tuned import keep_rows, skinny_entries

BLOCK_SIZE, NUM_BLOCKS = 16, 64
NUM_SEQS = 64
"""Sequences of the largest step of a worker with default settings."""
CPU = torch.device("cpu")
WRITTEN = ("best_ptr", "out_ptr", "q_ptr", "token_ptr")
"""Arguments by which kernels give what others read."""


def tuned(num_rows: int, max_seq_len: int, **tiling: float) -> list[dict[str, Any]]:
    """Entries of a tuning table, for the models of these tests in bfloat16."""
    shape = {"group": 2, "num_rows": num_rows, "max_seq_len": max_seq_len, "block_size": BLOCK_SIZE}
    entry = {"kernel": "decode", "itemsize": 2, "shape": shape, "tiling": tiling}
    return [entry | {"head_dim": head_dim} for head_dim in (16, 32)]


TABLE = {
    "tuned": [
        *tuned(2, 128, tile=16, num_warps=2, num_stages=2, least_tiles=1),
        *tuned(2, 512, tile=32, num_warps=4, num_stages=2),
        *tuned(2, 1024, tile=64, num_warps=4, num_stages=3, least_tiles=1),
        *tuned(16, 512, tile=64, num_warps=8, num_stages=2, least_tiles=4),
        *tuned(64, 256, tile=16, num_warps=4, num_stages=2, programs_per_processor=4.0),
    ]
}

PRODUCTS = {
    rows: SkinnyTiling(columns=16 * rows, depth=16, splits=splits)
    for rows, splits in ((1, 4), (2, 1), (4, 4), (8, 1), (16, 3))
}


class Recorder:
    """What Triton would have compiled: the sets of what it specialises for, by kernel. Nothing is run: kernels
    give zeros."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: set[tuple[Any, ...]] = set()
        self.most_runs = 0
        """Most runs of decode attention for whose partial results memory was taken."""
        recorder = self

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False)) | options
            recorder.compiled.add(key(kernel, named))
            if kernel.fn.__name__ == "_decode":
                recorder.most_runs = max(recorder.most_runs, named["partial_ptr"].shape[0])
            for name in WRITTEN:
                if name in named:
                    named[name].zero_()

        monkeypatch.setattr(InterpretedFunction, "run", run)


def key(kernel: Any, named: dict[str, Any]) -> tuple[Any, ...]:
    """What a launch is specialised for: constants, options, and of each argument its type and what is assumed of it."""
    parameters = inspect.signature(kernel.fn).parameters
    exempt = kernel.kwargs.get("do_not_specialize") or ()
    parts: list[tuple[Any, ...]] = []
    for name, value in sorted(named.items()):
        if name not in parameters or "constexpr" in str(parameters[name].annotation):
            parts.append((name, value))
        elif isinstance(value, torch.Tensor):
            parts.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, int):
            assumed = None if name in exempt else "1" if value == 1 else value % 16 == 0
            parts.append((name, "int", abs(value) >= 2**31, assumed))
        else:
            parts.append((name, type(value)))
    return (kernel.fn.__name__, *parts)


def runner_of(
    folder: Path, backend: Backend, *, batch_invariant: bool = False, num_blocks: int = NUM_BLOCKS
) -> ModelRunner:
    """In bfloat16, of which tiles are small; sequences may fill the cache."""
    config = ModelConfig.from_folder(folder)
    layout = config.layout(BLOCK_SIZE, "bfloat16")
    weights = load_weights(config, folder, "bfloat16", CPU, batch_invariant=batch_invariant)
    return ModelRunner(
        Executor(Decoder(config, weights), KVCache(layout, num_blocks, CPU), HostSwap(layout, 0, CPU), backend)
    )


def any_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=9,
        temperature=draw.choice((0.0, 1.0)),
        top_k=draw.choice((0, 7)),
        top_p=draw.choice((1.0, 0.9)),
        min_p=draw.choice((0.0, 0.1)),
        repetition_penalty=draw.choice((1.0, 1.2)),
        presence_penalty=draw.choice((0.0, 0.3)),
        logit_bias=draw.choice(((), ((3, 1.0), (9, -1.0)))),
        min_tokens=draw.choice((0, 5)),
        logprobs=draw.choice((None, 0, 3)),
    )


def any_slice(draw: random.Random, *, decodes: bool, longest: int) -> Slice:
    """One token, or a chunk; at any place of a sequence; with some samples, or none."""
    num_tokens = 1 if decodes else draw.randint(1, min(40, longest))
    start = draw.randint(0, longest - num_tokens)
    end = start + num_tokens
    samples = tuple(
        Sample(params=any_params(draw), choice=choice, position=end, token_ids=(5,) * end, prompt_len=end // 2)
        for choice in range(draw.choice((0, 1, 1, 2)))
    )
    token_ids = [draw.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
    return Slice(token_ids=token_ids, start=start, block_table=list(range(-(-end // BLOCK_SIZE))), samples=samples)


@pytest.mark.skipif(not INTERPRETED, reason="records what the interpreter is asked to run")
@pytest.mark.parametrize("gpu", ["default", "tuned", "invariant"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_no_step_meets_a_kernel_that_was_not_warmed_up(
    checkpoint: Callable[[str], Path], family: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    invariant = gpu == "invariant"
    backend = TritonBackend(CPU, batch_invariant=invariant, run_keys=256)
    keep_rows(monkeypatch)
    runner = runner_of(checkpoint(family), backend, batch_invariant=invariant)
    of_products = skinny_entries(runner.executor.decoder._weights, 2, PRODUCTS)
    backend._tuning, backend._num_processors = Tuning(gpu, 0, {"tuned": TABLE["tuned"] + of_products}), 132
    recorder = Recorder(monkeypatch)
    runner.warm_up()
    warmed = set(recorder.compiled)
    recorder.compiled.clear()
    draw = random.Random(3)
    for _ in range(50):
        longest = draw.choice((20, 200, 500, NUM_BLOCKS * BLOCK_SIZE))
        num, decodes = draw.choice((1, 1, 2, 3, 5, 12, 40)), draw.random() < 0.6
        runner.step([any_slice(draw, decodes=decodes, longest=longest) for _ in range(num)])
    new = recorder.compiled - warmed
    assert not new, sorted(map(str, new))
    met = {name for name, *_ in recorder.compiled}
    assert met >= {
        "_decode",
        "_prefill",
        "_add_norm",
        "_rotate_and_write",
        "_silu_mul",
        "_best",
        "_climb",
        "_limit",
        "_pick",
    }
    assert ("_matmul" in met) == invariant
    assert {"_skinny", "_skinny_sum"} & met == ({"_skinny", "_skinny_sum"} if gpu == "tuned" else set())
    assert len({each for each in recorder.compiled if each[0] == "_decode"}) >= (3 if gpu == "tuned" else 1)


@pytest.mark.skipif(not INTERPRETED, reason="records what the interpreter is asked to run")
@pytest.mark.parametrize("processors", [132, 320])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_batch_invariant_warm_up_takes_no_more_memory_than_a_step(
    family: str, processors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would take for the longest of contexts, 512 at a time, is not there beside the cache. Yet it leaves out
    no kernel."""
    num_blocks, run = 4096, 256
    longest = num_blocks * BLOCK_SIZE
    backend = TritonBackend(CPU, batch_invariant=True, run_keys=run)
    backend._num_processors = processors
    keep_rows(monkeypatch)
    folder = make_checkpoint(family, tmp_path, dtype="bfloat16", max_position_embeddings=longest)
    executor = runner_of(folder, backend, batch_invariant=True, num_blocks=num_blocks).executor
    recorder = Recorder(monkeypatch)
    executor.warm_up()
    assert recorder.most_runs <= NUM_SEQS * longest // run
    warmed = set(recorder.compiled)
    recorder.compiled.clear()
    config, cache = executor.decoder.own_config, executor.cache
    for batch in decode_batches(num_blocks, BLOCK_SIZE, longest, CPU):
        q_THD = cache.blocks.new_zeros(len(batch.token_ids_T), config.num_heads, config.head_dim)
        backend.attend(q_THD, cache.layer(0), batch, config.windows[0], 1.0)
    assert recorder.compiled <= warmed
    decodes = [dict(part[:2] for part in each[1:]) for each in recorder.compiled if each[0] == "_decode"]
    assert {each["IN_TURN"] for each in decodes} == {False, True}


def test_the_cache_is_empty_after_the_warm_up(checkpoint: Callable[[str], Path]) -> None:
    runner = runner_of(checkpoint("mistral"), TorchBackend())
    written: list[bool] = []
    clear = runner.executor.clear

    def watch(blocks: Ints) -> None:
        written.append(bool(runner.cache.blocks.any()))
        clear(blocks)

    runner.executor.clear = watch  # type: ignore[method-assign]
    runner.warm_up()
    assert any(written)
    assert not runner.cache.blocks.any()


def test_batches_of_decode_tokens_reach_from_one_to_all_that_fit() -> None:
    batches = list(decode_batches(20, 4, 70, CPU))
    assert {len(each.seq_lens) for each in batches} == {1, 2, 3, 4, 6, 8, 12, 16, 20}
    assert {max(each.seq_lens) for each in batches} == {16, 24, 32, 48, 64, 70}
    assert {max(each.seq_lens) for each in decode_batches(2, 4, 70, CPU)} == {8}
    for each in batches:
        assert len(each.token_ids_T) == len(each.query_lens) == len(each.seq_lens) == len(each.seq_lens_B)
