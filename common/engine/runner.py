"""The engine of one worker: a model, its KV cache, and `step`, which computes slices and samples tokens.

Shapes: R rows of logits, N samples, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from common.contract.errors import OperatorError
from common.contract.kv_layout import KVLayout
from common.contract.messages.worker import TokenScores
from common.contract.sampling import SamplingParams
from common.engine import native
from common.engine.backends import backend_on
from common.engine.batch import Chosen, Decodes, Ints, Sample, Sampled, Samples, Scored, Slice
from common.engine.executor import Executor, Pairs
from common.engine.grammar import Grammars
from common.engine.host_copy import HostCopy, to_device
from common.engine.host_swap import HostSwap
from common.engine.kv_cache import TORCH_DTYPES, KVCache
from common.engine.linear import Products, multiplies_natively
from common.engine.logprobs import Scores
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.native.backend import NativeBackend
from common.engine.orders import LeadingExecutor
from common.engine.ragged import Rows
from common.engine.ranks import GroupPlan, Ranks
from common.engine.sampler import ChosenOnDevice, choose
from common.engine.shard import Shard, require_width
from common.engine.weights import Progress, load_weights, resolve_dtype

_log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 256 * 2**20
"""Bytes of a CPU worker's KV cache if no size was given."""


class Submitted:
    """A step that the device computes, or has computed."""

    def __init__(
        self,
        slices: Sequence[Slice],
        choice: ChosenOnDevice | None,
        cache: KVCache,
        scores: Scores | None = None,
        num_decodes: int = 0,
    ) -> None:
        self._num_samples = [len(one.samples) for one in slices]
        self._num_decodes = num_decodes
        self._choice = choice
        self._chosen: Chosen | None = None
        self._scores = scores
        self._cache = cache
        self._end = HostCopy(device=cache.device) if choice is None else None

    @property
    def done(self) -> bool:
        """Whether `outcomes` returns without waiting."""
        return self._cache.device.type == "cpu"

    def chosen(self) -> Chosen:
        """The results of the decodes, then of the slices' samples. Waits for the device.

        From then on the KV of the step, and every block copied or swapped before, is in the cache.
        """
        if self._chosen is None:
            if self._choice is None:
                assert self._end is not None
                self._end.wait()
                self._chosen = Chosen([], {})
            else:
                self._chosen = self._choice.chosen()
        return self._chosen

    def outcomes(self) -> list[tuple[Sampled, ...]]:
        """One tuple for each slice, with one outcome for each of its samples. Waits as `chosen` does."""
        each = iter(self.chosen().outcomes(self._num_decodes))
        return [tuple(islice(each, num)) for num in self._num_samples]

    def scores(self) -> list[Scored]:
        """Scores of the scored tokens of each slice. Does not wait once the outcomes are known."""
        return [TokenScores() for _ in self._num_samples] if self._scores is None else self._scores.outcomes()


class ModelRunner:
    """A loaded model with its KV cache and swap space. Not thread-safe: one engine thread calls it."""

    def __init__(
        self, executor: Executor, grammars: Grammars | None = None, close: Callable[[], None] = lambda: None
    ) -> None:
        self.close = close
        """Ends the processes of other ranks, if there are any."""
        self.executor = executor
        """What computes, at this rank."""
        self.grammars = grammars
        """Computes grammar masks; None if the model's tokenizer cannot be used."""
        self._chosen_N = torch.empty(0, dtype=torch.int64, device=executor.cache.device)
        """Tokens chosen by the samples of the last step that had samples."""

    def capture_graphs(self, max_num_seqs: int, progress: Progress | None = None) -> None:
        """See `Executor.capture_graphs`."""
        self.executor.capture_graphs(max_num_seqs, progress)

    def warm_up(self, largest_step: int = 0) -> None:
        """Compile every kernel before a request needs it, by steps of each kind over the first blocks: a prompt, one
        token, and both together. Each kind runs without a sample, as in the middle of a prompt, and with each way of
        sampling. At last prompts of `largest_step` tokens run in one step, so that memory that does not suffice for it
        is missed now."""
        num_tokens = min(2, self.cache.num_blocks) * self.layout.block_size
        num_tokens = min(num_tokens, self.config.max_sequence_tokens)
        tokens, table = (0,) * num_tokens, list(range(self.layout.blocks_for(num_tokens)))
        ways: list[SamplingParams | None] = [
            None,
            SamplingParams(max_tokens=1, temperature=0.0),
            SamplingParams(max_tokens=1, temperature=1.0),
            SamplingParams(max_tokens=1, temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, logprobs=1),
            SamplingParams(max_tokens=1, repetition_penalty=1.1, frequency_penalty=0.1, logit_bias=((0, 1.0),)),
        ]
        for params in ways:
            samples: tuple[Sample, ...] = ()
            if params is not None:
                sample = Sample(params=params, choice=0, position=num_tokens, token_ids=tokens, prompt_len=num_tokens)
                samples = (sample,)
            prompt = Slice(token_ids=tokens, start=0, block_table=table, samples=samples)
            last = Slice(token_ids=(0,), start=num_tokens - 1, block_table=table, samples=samples)
            for slices in ([prompt], [last], [last, prompt]):
                self.step(slices)
        self.executor.warm_up()
        whole = min(self.config.max_sequence_tokens, self.cache.num_slots)
        lengths = [min(whole, largest_step - begin) for begin in range(0, largest_step, whole)]
        blocks = list(range(self.layout.blocks_for(max(num_tokens, *lengths, 0))))
        self.step([Slice(token_ids=(0,) * num, start=0, block_table=blocks) for num in lengths])
        self.clear(len(blocks))

    def clear(self, num_blocks: int) -> None:
        """Zero the first blocks of the cache, and wait until that is done."""
        self.executor.clear(np.arange(num_blocks))
        self.step([])

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.executor.decoder.config

    @property
    def layout(self) -> KVLayout:
        """The geometry of a KV block."""
        return self.cache.layout

    @property
    def cache(self) -> KVCache:
        """The KV cache that `step` reads and writes."""
        return self.executor.cache

    @property
    def cpu_kernels(self) -> bool | None:
        """Whether the CPU computes with the kernels in C; None on a GPU."""
        return isinstance(self.executor.backend, NativeBackend) if self.cache.device.type == "cpu" else None

    @property
    def cpu_products(self) -> Products | None:
        """See `Decoder.cpu_products`."""
        return self.executor.decoder.cpu_products

    def objection(
        self, token_ids: Sequence[int], sampling: SamplingParams, prediction: Sequence[int] = ()
    ) -> str | None:
        """Why the model cannot continue `token_ids` with this sampling, or verify `prediction`; None if it can."""
        if sampling.grammar is not None and self.grammars is None:
            return "there is no structured output: the model's tokenizer cannot be used"
        return self.config.objection(token_ids, prediction)

    @property
    def num_host_blocks(self) -> int:
        """Blocks that the swap space holds. Host slots are `[0, num_host_blocks)`."""
        return self.executor.swap.num_blocks

    def step(self, slices: Sequence[Slice]) -> list[tuple[Sampled, ...]]:
        """Compute `slices`, as `submit` does, and wait for the outcomes."""
        return self.submit(slices).outcomes()

    @torch.inference_mode()
    def submit(self, slices: Sequence[Slice], decodes: Decodes | None = None) -> Submitted:
        """Compute `decodes` and `slices`, any mix of prompt chunks and decode tokens, or nothing. Sample and score what
        they ask for.

        Does not wait for a GPU. What is computed may follow samples of the step that was submitted before.
        """
        executor = self.executor
        if not slices and decodes is None:
            executor.join()
            return Submitted(slices, None, self.cache)
        swap = executor.swap
        clashes = swap.busy and swap.clashes_with([*(decodes.slices() if decodes is not None else ()), *slices])
        rows = Rows.of(slices, self.layout.block_size, decodes)
        samples = _samples(slices, decodes)
        num_decodes = 0 if decodes is None else len(decodes)
        computed = executor.compute(rows, self._chosen_N, after_swaps=clashes)
        scores = self._score(slices, num_decodes)
        executor.join()  # before the outcomes are copied: once they are known, the swaps are over
        if samples is None:
            return Submitted(slices, None, self.cache, scores)
        logits_RV, likeliest, last_tokens_R = computed.logits_RV, computed.likeliest, computed.last_tokens
        rows_N: slice | torch.Tensor = slice(None)
        if len(samples) != logits_RV.shape[0]:  # several choices are sampled from one row
            rows_N, likeliest = to_device(rows.sample_rows_N, torch.int64, logits_RV.device), None
        choice = choose(
            logits_RV[rows_N],
            samples,
            self.config.eos_token_ids,
            executor.backend,
            lambda: last_tokens_R()[rows_N],
            likeliest,
        )
        self._chosen_N = choice.tokens_N
        return Submitted(slices, choice, self.cache, scores, num_decodes)

    def _score(self, slices: Sequence[Slice], num_decodes: int) -> Scores | None:
        """Score what the slices ask for. A batch computed by graphs has nothing to score, because the token after a
        sequence's last one is not known."""
        if not any(each.scored for each in slices):
            return None

        def logits(rows_W: Ints) -> torch.Tensor:
            return self.executor.logits(rows_W + num_decodes)

        return Scores(slices, logits, self.config.vocab_size, self.cache.device)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy the KV of block `src` to block `dst`."""
        self.executor.copy_block(src, dst)

    def swap_out(self, pairs: Pairs) -> None:
        """Copy the KV of blocks to host memory: pairs (block, host slot)."""
        if pairs:
            self.executor.swap_out(pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy KV from host memory to blocks: pairs (host slot, block)."""
        if pairs:
            self.executor.swap_in(pairs)


def _samples(slices: Sequence[Slice], decodes: Decodes | None) -> Samples | None:
    """What a step samples, the decodes' tokens first; None if it samples nothing."""
    of_slices = [each for one in slices for each in one.samples]
    if decodes is None:
        return Samples.of(of_slices) if of_slices else None
    return decodes.samples.followed_by(Samples.of(of_slices)) if of_slices else decodes.samples


def load_runner(
    folder: Path,
    *,
    kv_cache_bytes: int | None,
    block_size: int,
    gpu_reserve_bytes: int = 0,
    gpu_share: float = 1.0,
    swap_bytes: int = 0,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    cpu_kernels: bool = True,
    batch_invariant: bool = False,
    structured_output: bool = True,
    group: GroupPlan | None = None,
) -> ModelRunner:
    """Load the checkpoint in `folder`, and allocate its KV cache and `swap_bytes` of host memory for swapped blocks.

    If `kv_cache_bytes` is None, the cache has `CPU_CACHE_BYTES` on a CPU. On a GPU it has the memory that is free after
    the weights are loaded, or what is left of the share `gpu_share` of it, less `gpu_reserve_bytes`. `dtype` is "auto"
    (the checkpoint's), "float32", "bfloat16" or "float16", and is that of the cache too. `progress` is called with
    (tensors loaded, tensors to load). `cpu_kernels` lets a CPU use the kernels in C, compiled if need be. With
    `batch_invariant` a sequence's numbers have the same bits whatever is computed beside it: on a CPU, which must have
    the kernels in C, they compute every product; for a GPU see `TritonBackend`. Without `structured_output` the model
    serves no grammars. With a `group` this process is rank 0, and starts the other ranks. Raises `OperatorError` for
    whatever the operator must change.
    """
    config = ModelConfig.from_folder(folder)
    dtype = resolve_dtype(config, folder, dtype)
    layout = config.layout(block_size, dtype)
    on = torch.device(device) if group is None else group.device_of(0)
    width = 1 if group is None else group.width
    if width > 1:
        require_width(width, config)
    shard = Shard(0, width)
    own_layout = shard.layout(layout)
    if kv_cache_bytes is None and on.type == "cpu":
        kv_cache_bytes = CPU_CACHE_BYTES
    if kv_cache_bytes is not None:
        _require_a_block(kv_cache_bytes, own_layout, width)
    kernels = _kernels_for(config) if on.type == "cpu" and cpu_kernels else None
    if on.type == "cpu" and kernels is None and not multiplies_natively(TORCH_DTYPES[dtype]):
        _log.warning("this CPU has no instructions for %s: weights are held, and multiplied, in float32", dtype)
    if batch_invariant and on.type == "cpu" and kernels is None:
        raise OperatorError(
            "--batch-invariant needs the kernels in C on a CPU: a compiler (cc), --cpu-kernels, and a head dimension "
            f"that is a multiple of 8 up to 512, not {config.head_dim}"
        )
    ranks: Ranks | None = None

    def loaded(done: int, total: int) -> None:
        if ranks is not None:
            ranks.require_all()
        if progress is not None:
            progress(done, total)

    with ExitStack() as stack:
        if group is not None:
            ranks = Ranks(group, config, folder, layout, in_c=kernels is not None, batch_invariant=batch_invariant)
            stack.callback(ranks.close)
        weights = load_weights(config, folder, dtype, on, loaded, kernels, batch_invariant, shard)
        together = None if ranks is None else ranks.join()
        if kv_cache_bytes is None:
            devices = [on] if group is None else [group.device_of(rank) for rank in range(width)]
            memory_of = [torch.cuda.mem_get_info(each) for each in devices]
            used = torch.cuda.memory_reserved(on)
            kv_cache_bytes = width * room_of(memory_of, gpu_share, used, gpu_reserve_bytes, own_layout.block_bytes)
        num_blocks, num_host_blocks = (
            size // (width * own_layout.block_bytes) for size in (kv_cache_bytes, swap_bytes)
        )
        try:
            memory = None if ranks is None else ranks.cache_memory(num_blocks, num_host_blocks)
            cache = KVCache(layout, num_blocks, on, shard, memory)
            swap = HostSwap(own_layout, num_host_blocks, on)
        except RuntimeError as error:
            raise OperatorError(
                f"no memory for a KV cache of {kv_cache_bytes} bytes and a swap space of {swap_bytes}: {error}"
            ) from error
        grammars = Grammars.load(folder, config.vocab_size, config.eos_token_ids) if structured_output else None
        decoder = Decoder(config, weights, together, cache.num_slots)
        backend = backend_on(on, kernels, batch_invariant=batch_invariant)
        if on.type == "cuda" and batch_invariant:
            from common.engine.kernels.invariance import require_invariance  # here, so that only a GPU needs triton

            require_invariance(backend_on(on, kernels, batch_invariant=True), own_layout, config.num_heads // width, on)
        if ranks is None or together is None:
            executor = Executor(decoder, cache, swap, backend)
        else:
            executor = LeadingExecutor(decoder, cache, swap, backend, together, ranks.orders)
        return ModelRunner(executor, grammars, stack.pop_all().close)


def _kernels_for(config: ModelConfig) -> native.Kernels | None:
    """The kernels in C for a model. Returns None, and logs a warning, if there are none."""
    if native.serves(config.head_dim):
        return native.kernels()
    problem = f"no C kernels for the model's head dimension, {config.head_dim}, which is no multiple of 8 up to 512"
    _log.warning("%s: the CPU computes more slowly, and a token's bits may depend on the others of its step", problem)
    return None


def room_of(memory_of: Sequence[tuple[int, int]], share: float, used: int, reserve: int, block_bytes: int) -> int:
    """Bytes of each GPU for a KV cache: what is free, and is left of the worker's share, less as large a share of the
    reserve. `memory_of` has the free and all bytes of each; each rank has used as many. Raises `OperatorError` if there
    is no room for a block."""
    room = int(
        min(min(free, share * total - used) if share < 1 else free for free, total in memory_of) - share * reserve
    )
    if room < block_bytes:
        free, total = min(memory_of)
        raise OperatorError(
            f"no room for a KV cache on the GPU: with {used} bytes of weights loaded {free} of {total} bytes are free, "
            f"for the share {share:g} (--gpu-share) and {reserve} bytes beside the cache (--gpu-reserve-bytes); other "
            "processes may use the GPU, or keep the memory of a worker that has ended"
        )
    return room


def _require_a_block(kv_cache_bytes: int, own_layout: KVLayout, width: int) -> None:
    block_bytes = width * own_layout.block_bytes
    if kv_cache_bytes < block_bytes:
        raise OperatorError(
            f"a KV cache of {kv_cache_bytes} bytes does not hold one block: {block_bytes} bytes for "
            f"{own_layout.block_size} tokens at {width} rank{'s' if width > 1 else ''}"
        )
