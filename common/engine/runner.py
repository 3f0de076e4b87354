"""The engine of one worker: a model, its KV cache, and `step`, which computes slices and samples tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from common.contract.errors import OperatorError
from common.contract.kv_layout import KVLayout
from common.engine.attention import AttentionBackend, ReferenceAttention
from common.engine.batch import Sample, Sampled, Slice
from common.engine.cpu_attention import CpuAttention
from common.engine.kv_cache import TORCH_DTYPES, KVCache
from common.engine.linear import multiplies_natively
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.ragged import RaggedBatch
from common.engine.sampler import sample
from common.engine.weights import Progress, load_weights, resolve_dtype

_log = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model with its KV cache. Not thread-safe: one engine thread calls it."""

    def __init__(self, decoder: Decoder, cache: KVCache, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._cache = cache
        self._attention = attention

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self._decoder.config

    @property
    def layout(self) -> KVLayout:
        """The geometry of a KV block."""
        return self._cache.layout

    @property
    def cache(self) -> KVCache:
        """The KV cache that `step` reads and writes."""
        return self._cache

    @torch.inference_mode()
    def step(self, slices: Sequence[Slice]) -> list[tuple[Sampled, ...]]:
        """Compute `slices`, any mix of prompt chunks and decode tokens, and sample what they ask for.

        Returns one tuple for each slice, with one outcome for each of its samples. On return the KV of the slices is
        in the cache.
        """
        batch = RaggedBatch.of(slices, self.layout.block_size, self._cache.device)
        samples: list[Sample] = [each for one in slices for each in one.samples]
        logits_RV = self._decoder.forward(batch, self._cache, self._attention)
        # Several choices may be sampled from one row; otherwise there is nothing to copy.
        logits_NV = logits_RV if len(samples) == logits_RV.shape[0] else logits_RV[batch.sample_rows_N]
        outcomes = iter(sample(logits_NV, samples, self.config.eos_token_ids))
        return [tuple(next(outcomes) for _ in one.samples) for one in slices]

    def copy_block(self, src: int, dst: int) -> None:
        """Copy the KV of block `src` to block `dst`."""
        self._cache.copy_block(src, dst)


def load_runner(
    folder: Path,
    *,
    kv_cache_bytes: int,
    block_size: int = 16,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
) -> ModelRunner:
    """Load the checkpoint in `folder` and allocate its KV cache.

    `dtype` is "auto" (the checkpoint's), "float32", "bfloat16" or "float16", and is also the cache's; `progress` is
    called with (tensors loaded, tensors to load). Raises `OperatorError` for whatever the operator must change.
    """
    config = ModelConfig.from_folder(folder)
    dtype = resolve_dtype(config, folder, dtype)
    layout = config.layout(block_size, dtype)
    num_blocks = kv_cache_bytes // layout.block_bytes
    if num_blocks < 1:
        raise OperatorError(
            f"a KV cache of {kv_cache_bytes} bytes does not hold one block: {layout.block_bytes} bytes for "
            f"{block_size} tokens of {folder}"
        )
    on = torch.device(device)
    if on.type == "cpu" and not multiplies_natively(TORCH_DTYPES[dtype]):
        _log.warning("this CPU has no instructions for %s: weights are held, and multiplied, in float32", dtype)
    weights = load_weights(config, folder, dtype, on, progress)
    attention = CpuAttention() if on.type == "cpu" else ReferenceAttention()
    return ModelRunner(Decoder(config, weights), KVCache(layout, num_blocks, on), attention)
