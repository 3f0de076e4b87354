"""The operations of a layer, by the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from common.engine.backend import Norms
from common.engine.batch import Sample
from common.engine.draw import random_numbers, temperatures
from common.engine.host_copy import to_device
from common.engine.kernels import layer, sampler
from common.engine.kernels.decode_attention import decode_attention
from common.engine.kernels.prefill_attention import prefill_attention, query_tiles
from common.engine.kernels.tuning import Tuning
from common.engine.ragged import RaggedBatch
from common.engine.rope import Angles, Rope


class TritonBackend:
    """Activations are in the type of the weights; what is between a load and a store is float32."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # The interpreter, which tests use, has one processor; a few let it split contexts as a GPU would.
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        self._tuning = Tuning.of(device) if on_gpu else Tuning("", 0)
        self._batch: RaggedBatch | None = None
        self._tiles: dict[int, torch.Tensor] = {}
        """Of `_batch`, for each number of tokens in a tile of queries."""
        self.add_norm = layer.add_norm
        self.silu_mul = layer.silu_mul
        self.best = sampler.best

    def embed(self, token_ids_T: torch.Tensor, table_VE: torch.Tensor) -> torch.Tensor:
        """See `Backend.embed`."""
        return embedding(token_ids_T, table_VE)

    def angles(self, rope: Rope, positions_T: torch.Tensor, dtype: torch.dtype) -> Angles:
        """See `Backend.angles`."""
        return rope.table(dtype), positions_T

    def rotate_and_write(
        self,
        qkv_TF: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: RaggedBatch,
        num_heads: int,
        norms: Norms | None,
        eps: float,
        angles: Angles,
    ) -> torch.Tensor:
        """See `Backend.rotate_and_write`."""
        return layer.rotate_and_write(
            qkv_TF, kv_layer, batch.slot_blocks_T, batch.slot_offsets_T, num_heads, norms, eps, angles
        )

    def attend(
        self, q_THD: torch.Tensor, kv_layer: torch.Tensor, batch: RaggedBatch, window: int | None, scale: float
    ) -> torch.Tensor:
        """See `Backend.attend`. A batch of decode tokens alone is split along the contexts."""
        out_THD = torch.empty_like(q_THD)
        num_tokens, num_heads, head_dim = q_THD.shape
        num_kv_heads = kv_layer.shape[1]
        group = num_heads // num_kv_heads
        if num_tokens == len(batch.query_lens):
            longest = max(batch.seq_lens)
            decode_tiling = self._tuning.decode(
                head_dim=head_dim,
                itemsize=kv_layer.itemsize,
                block_size=batch.block_size,
                group=group,
                num_rows=num_tokens * num_kv_heads,
                max_seq_len=longest,
            )
            decode_attention(
                q_THD,
                kv_layer,
                batch.block_tables_BM,
                batch.seq_lens_B,
                window=window,
                scale=scale,
                max_seq_len=longest,
                num_processors=self._num_processors,
                tiling=decode_tiling,
                out_BHD=out_THD,
            )
            return out_THD
        tiling = self._tuning.prefill(
            head_dim=head_dim, itemsize=kv_layer.itemsize, block_size=batch.block_size, group=group
        )
        prefill_attention(
            q_THD,
            kv_layer,
            batch.block_tables_BM,
            batch.query_start_B1,
            batch.seq_lens_B,
            self._tiles_of(batch, tiling.num_tokens(group)),
            window=window,
            scale=scale,
            tiling=tiling,
            out_THD=out_THD,
        )
        return out_THD

    def draw(self, logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Backend.draw`."""
        device = logits_PV.device
        params = [each.params for each in samples]
        return sampler.draw(
            logits_PV,
            best_P,
            to_device(temperatures(samples), torch.float32, device),
            to_device([each.top_k for each in params], torch.int32, device),
            to_device([each.top_p for each in params], torch.float32, device),
            to_device([each.min_p for each in params], torch.float32, device),
            to_device(random_numbers(samples), torch.float64, device),
            hiding=any(each.top_k or each.top_p < 1.0 or each.min_p for each in params),
        )

    def _tiles_of(self, batch: RaggedBatch, num_tokens: int) -> torch.Tensor:
        """Tiles of queries, made once for all layers of a step."""
        if batch is not self._batch:
            self._batch, self._tiles = batch, {}
        if num_tokens not in self._tiles:
            tiles = query_tiles(batch.query_lens, num_tokens)
            self._tiles[num_tokens] = to_device(tiles, torch.int32, batch.query_start_B1.device)
        return self._tiles[num_tokens]
