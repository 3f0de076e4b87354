"""The operations of a layer, computed by the kernels of a GPU."""

from __future__ import annotations

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from common.engine.backend import Norms, PlainProducts
from common.engine.batch import Samples
from common.engine.draw import random_numbers
from common.engine.host_copy import to_device
from common.engine.kernels import layer, sampler
from common.engine.kernels.decode_attention import DecodeTiling, decode_attention
from common.engine.kernels.decode_runs import DecodeRuns
from common.engine.kernels.prefill_attention import PrefillTiling, prefill_attention
from common.engine.kernels.query_runs import aligned_runs, longest_run, query_runs, query_tiles
from common.engine.kernels.skinny import SkinnyTiling, skinny
from common.engine.kernels.tiles import cache_rows, describe, padded
from common.engine.kernels.tuning import INVARIANT_RUN, Kind, Tuning
from common.engine.linear import FEW_ROWS, Linear, sum_in_float32
from common.engine.ragged import RaggedBatch
from common.engine.rope import Angles, Rope

_MOST_PARTIAL_BYTES = 256 * 2**20
"""Bytes of partial results that a batch-invariant prompt takes at a time."""
_Runs = tuple[torch.Tensor, torch.Tensor, int]
"""Runs, tiles of queries that are cut, and places of partial results, as `prefill_attention` takes them."""


class TritonBackend(PlainProducts):
    """Activations are in the type of the weights; what is between a load and a store is float32."""

    def __init__(self, device: torch.device, *, batch_invariant: bool = False, run_keys: int = INVARIANT_RUN) -> None:
        """If `batch_invariant`, a token's numbers have the same bits whatever is computed beside it, in a chunk of any
        size or as a decode token: products are those of `Linear`, which must be so, too, and contexts are cut at the
        multiples of `run_keys` keys. The other kernels compute each row by itself in any case."""
        sum_in_float32()
        self._invariant, self.run_keys = batch_invariant, run_keys
        on_gpu = device.type == "cuda"
        # The interpreter, which tests use, has one processor. A higher number lets it split contexts as a GPU would.
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        self._tuning = Tuning.of(device) if on_gpu else Tuning("", 0)
        self._batch: RaggedBatch | None = None
        self._num_decodes = 0
        """Number of leading slices of `_batch` that have one token."""
        self._runs: dict[int | None, tuple[PrefillTiling, list[_Runs]]] = {}
        """Runs of prefill attention of `_batch`, for each window that layers use; several where partial results take
        too much memory for one launch."""
        self._decode_runs: dict[int | None, tuple[DecodeTiling, DecodeRuns]] = {}
        """Those of decode attention."""
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}
        """`describe` of layers that prompts have been attended in, by the address of the layer and the tile."""
        self._captured = False
        """Whether `_batch` is computed by a graph that is being captured."""
        self._combines = False
        """Whether the kernel that combines runs has been compiled."""
        self.add_norm = layer.add_norm
        self.silu_mul = layer.silu_mul
        self.best = sampler.best

    @property
    def invariant_run(self) -> int | None:
        """See `Backend.invariant_run`."""
        return self.run_keys if self._invariant else None

    def norm_project(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, norm_E: torch.Tensor, eps: float, linear: Linear
    ) -> torch.Tensor:
        """See `Backend.norm_project`."""
        tiling = self._skinny("plain", h_TE, linear)
        if tiling is None:
            return super().norm_project(h_TE, delta_TE, norm_E, eps, linear)
        return skinny(self.add_norm(h_TE, delta_TE, norm_E, eps), linear.weight, linear.bias, tiling)

    def norm_gate(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, norm_E: torch.Tensor, eps: float, linear: Linear
    ) -> torch.Tensor:
        """See `Backend.norm_gate`."""
        tiling = self._skinny("gate", h_TE, linear)
        if tiling is None:
            return super().norm_gate(h_TE, delta_TE, norm_E, eps, linear)
        return skinny(self.add_norm(h_TE, delta_TE, norm_E, eps), linear.weight, linear.bias, tiling, gated=True)

    def project_onto(self, h_TE: torch.Tensor, x_TF: torch.Tensor, linear: Linear) -> torch.Tensor | None:
        """See `Backend.project_onto`."""
        tiling = self._skinny("onto", x_TF, linear)
        if tiling is None:
            return super().project_onto(h_TE, x_TF, linear)
        skinny(x_TF, linear.weight, linear.bias, tiling, onto_MN=h_TE)
        return None

    def _skinny(self, kind: Kind, x_MK: torch.Tensor, linear: Linear) -> SkinnyTiling | None:
        """How the kernel for few rows is cut; None where `linear` is to multiply: if nothing was measured, or the
        backend is batch-invariant."""
        num_rows, inputs = x_MK.shape
        if self._invariant or num_rows > FEW_ROWS:
            return None
        outputs = linear.out_features
        return self._tuning.skinny(kind, rows=num_rows, outputs=outputs, inputs=inputs, itemsize=x_MK.itemsize)

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
        self,
        q_THD: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: RaggedBatch,
        window: int | None,
        scale: float,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `Backend.attend`. Leading slices of one token are split along their contexts, also in a batch with
        chunks. The result has the type `out_dtype`, by default that of `q_THD`: float32 is what was computed, before
        it is rounded."""
        # A graph must make its runs itself at each replay, from the lengths that it finds then.
        captured = q_THD.is_cuda and torch.cuda.is_current_stream_capturing()
        if batch is not self._batch or captured != self._captured:
            self._batch, self._captured, self._num_decodes = batch, captured, _num_decodes(batch)
            self._runs, self._decode_runs = {}, {}
        out_THD = torch.empty_like(q_THD, dtype=out_dtype)
        if self._num_decodes:
            self._decode(q_THD, kv_layer, batch, window, scale, out_THD)
        if self._num_decodes < len(batch.query_lens):
            self._prefill(q_THD, kv_layer, batch, window, scale, out_THD)
        return out_THD

    def _decode(
        self,
        q_THD: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: RaggedBatch,
        window: int | None,
        scale: float,
        out_THD: torch.Tensor,
    ) -> None:
        num, num_kv_heads = self._num_decodes, kv_layer.shape[1]
        seq_lens_B = batch.seq_lens_B[:num]
        if window not in self._decode_runs:
            longest = max(batch.seq_lens[:num])
            shape = _shape(q_THD, kv_layer)
            if self._invariant:
                tiling, _ = self._invariant_tilings(shape, kv_layer)
            else:
                tiling = self._tuning.decode(**shape, num_rows=num * num_kv_heads, max_seq_len=longest)
            runs = tiling.runs(
                seq_lens_B,
                window=window,
                max_seq_len=longest,
                num_kv_heads=num_kv_heads,
                num_processors=self._num_processors,
            )
            self._decode_runs[window] = tiling, runs
        tiling, runs = self._decode_runs[window]
        decode_attention(
            q_THD[:num],
            kv_layer,
            batch.block_tables_BM[:num],
            seq_lens_B,
            runs,
            window=window,
            scale=scale,
            tiling=tiling,
            out_BHD=out_THD[:num],
        )

    def _prefill(
        self,
        q_THD: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: RaggedBatch,
        window: int | None,
        scale: float,
        out_THD: torch.Tensor,
    ) -> None:
        if window not in self._runs:
            shape = _shape(q_THD, kv_layer)
            if self._invariant:
                _, tiling = self._invariant_tilings(shape, kv_layer)
            else:
                tiling = self._tuning.prefill(**shape, cache_rows=cache_rows(kv_layer))
            self._runs[window] = self._cut(batch, tiling, shape, kv_layer.shape[1], window)
        tiling, launches = self._runs[window]
        for runs_R5, splits_S4, num_places in launches:
            prefill_attention(
                q_THD,
                kv_layer,
                batch.block_tables_BM,
                batch.query_start_B1,
                batch.seq_lens_B,
                runs_R5,
                splits_S4,
                num_places=num_places,
                window=window,
                scale=scale,
                tiling=tiling,
                out_THD=out_THD,
                kv_descriptor=self._described(kv_layer, tiling.tile) if tiling.copy_engine else None,
            )

    def _invariant_tilings(self, shape: dict[str, int], kv_layer: torch.Tensor) -> tuple[DecodeTiling, PrefillTiling]:
        """For decode tokens, and for chunks."""
        return self._tuning.invariant(
            head_dim=shape["head_dim"],
            itemsize=shape["itemsize"],
            block_size=shape["block_size"],
            cache_rows=cache_rows(kv_layer),
            run=self.run_keys,
        )

    def _described(self, kv_layer: torch.Tensor, tile: int) -> TensorDescriptor:
        """`describe`, which takes longer than a launch."""
        key = (kv_layer.data_ptr(), tile)
        if key not in self._descriptors:
            self._descriptors[key] = describe(kv_layer, tile)
        return self._descriptors[key]

    def draw(self, logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Samples) -> torch.Tensor:
        """See `Backend.draw`."""
        device = logits_PV.device
        parameters_P = samples.parameters_N
        top_k_P, top_p_P, min_p_P = (parameters_P[name] for name in ("top_k", "top_p", "min_p"))
        top_k_P = np.minimum(top_k_P, logits_PV.shape[1])  # the kernels have 32 bits for it
        return sampler.draw(
            logits_PV,
            best_P,
            to_device(parameters_P["temperature"], torch.float32, device),
            to_device(top_k_P, torch.int32, device),
            to_device(top_p_P, torch.float32, device),
            to_device(min_p_P, torch.float32, device),
            to_device(random_numbers(samples), torch.float64, device),
            hiding=bool(((top_k_P > 0) | (top_p_P < 1.0) | (min_p_P > 0.0)).any()),
        )

    def _cut(
        self, batch: RaggedBatch, tiling: PrefillTiling, shape: dict[str, int], num_kv_heads: int, window: int | None
    ) -> tuple[PrefillTiling, list[_Runs]]:
        """Cut the queries of a batch into runs, for all layers with this window."""
        group, device = shape["group"], batch.query_start_B1.device
        tiles = query_tiles(
            batch.query_lens, batch.seq_lens, tiling.num_tokens(group), tiling.tile, window, self._num_decodes
        )
        if tiling.run_tiles:
            place_bytes = 4 * num_kv_heads * padded(tiling.num_tokens(group) * group) * (shape["head_dim"] + 2)
            made = aligned_runs(tiles, tiling.run_tiles, max(1, _MOST_PARTIAL_BYTES // place_bytes))
        else:
            num_programs = self._num_processors * tiling.programs
            made = [query_runs(tiles, longest_run(tiles, num_kv_heads, num_programs, tiling.least_tiles))]
        launches = []
        for runs in made:
            splits = runs.splits
            if not self._combines:  # in a warm-up: if there is nothing to combine, the kernel is compiled
                splits, self._combines = splits or [(0, 0, 0, 0)], True
            runs_R5, splits_S4 = (to_device(each, torch.int32, device) for each in (runs.runs, splits))
            launches.append((runs_R5, splits_S4, runs.num_places))
        return tiling, launches


def _num_decodes(batch: RaggedBatch) -> int:
    """Number of leading slices of one token: schedulers put decode tokens before chunks."""
    return next((row for row, num in enumerate(batch.query_lens) if num > 1), len(batch.query_lens))


def _shape(q_THD: torch.Tensor, kv_layer: torch.Tensor) -> dict[str, int]:
    """The shape by which `Tuning` chooses a tiling."""
    _, num_heads, head_dim = q_THD.shape
    _, num_kv_heads, _, block_size, _ = kv_layer.shape
    return {
        "head_dim": head_dim,
        "itemsize": kv_layer.itemsize,
        "block_size": block_size,
        "group": num_heads // num_kv_heads,
    }
