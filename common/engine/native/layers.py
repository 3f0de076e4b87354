"""All layers of a model in one call of the kernels in C. See `layers.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch

from common.engine.kv_cache import KVCache
from common.engine.linear import Linear
from common.engine.model_config import ModelConfig
from common.engine.native import PAIRS, TYPES, Kernels, floats_at, integers_at, serves, type_of
from common.engine.native.group import GroupEndedError, SharedGroup
from common.engine.ragged import RaggedBatch
from common.engine.rope import Angles
from common.engine.weights import LayerWeights

_GROUP_ENDED, _NO_SUCH_POSITION = 2, 3

_pointer, _long, _float, _int = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class _Product(ctypes.Structure):
    """`struct product`."""

    _fields_ = (("w", _pointer), ("bias", _pointer), ("outputs", _long), ("type", _long))


class _Layer(ctypes.Structure):
    """`struct layer`."""

    _fields_ = (
        *((name, _pointer) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Product) for name in ("qkv", "output", "gate_up", "down")),
        ("window", _long),
    )


class _Forward(ctypes.Structure):
    """`struct forward`."""

    _fields_ = (
        ("layers", _pointer),
        ("num_layers", _long),
        *((name, _pointer) for name in ("h", "delta")),
        *((name, _long) for name in ("T", "E", "heads", "kv_heads", "head_dim")),
        ("angles", _pointer),
        ("num_positions", _long),
        *((name, _pointer) for name in ("positions", "slot_blocks", "slot_offsets")),
        *((name, _pointer) for name in ("starts", "lens", "tables")),
        *((name, _long) for name in ("slices", "width")),
        ("cache", _pointer),
        *((name, _long) for name in ("layer_bytes", "block_bytes", "head_bytes", "block_size", "kv_type")),
        ("group", _pointer),
        *((name, _float) for name in ("scale", "eps")),
        ("threads", _int),
    )


class NativeLayers:
    """The layers of one model, whose products are all computed by kernels in C. Used by one thread at a time."""

    def __init__(self, kernels: Kernels, layers: Sequence[LayerWeights], config: ModelConfig) -> None:
        """`config` is that of this rank's part of the model."""
        assert serves(config.head_dim), config.head_dim
        self.weights, self.config = layers, config
        self._kernels = kernels
        described = [_layer(config, *each) for each in zip(layers, config.windows, strict=True)]
        self._layers = (_Layer * len(layers))(*described)
        self._forward = _Forward(
            layers=ctypes.addressof(self._layers),
            num_layers=len(layers),
            E=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )

    def compute(
        self, h_TE: torch.Tensor, batch: RaggedBatch, cache: KVCache, angles: Angles, group: SharedGroup | None
    ) -> torch.Tensor:
        """Compute the batch's tokens, whose embeddings are `h_TE`, in place, and store their KV. Returns what is still
        to be added. Raises `MemoryError`, `GroupEndedError`, and `IndexError` for a position without angles."""
        step = self._forward
        delta_TE = torch.empty(h_TE.shape)
        assert h_TE.shape[1] == step.E
        step.h, step.T, step.delta = floats_at(h_TE), h_TE.shape[0], delta_TE.data_ptr()
        self._describe_batch(batch, angles)
        self._describe_cache(cache.blocks)
        step.group = None if group is None else group.address
        step.threads = torch.get_num_threads()
        failed = self._kernels.forward(ctypes.addressof(step))
        if failed == _GROUP_ENDED:
            raise GroupEndedError
        if failed == _NO_SUCH_POSITION:
            raise IndexError(f"a position is beyond the {step.num_positions} that the model can have here")
        if failed:
            raise MemoryError("no memory for a step's activations")
        return delta_TE

    def _describe_batch(self, batch: RaggedBatch, angles: Angles) -> None:
        step, num_slices, tables_BM = self._forward, len(batch.query_lens), batch.block_tables_BM
        tokens, slices = (batch.slot_blocks_T, batch.slot_offsets_T), (batch.query_start_B1, batch.seq_lens_B)
        assert [len(each) for each in (*tokens, *slices)] == [step.T, step.T, num_slices + 1, num_slices]
        assert (len(tables_BM), tables_BM.dtype, tables_BM.stride(1)) == (num_slices, torch.int64, 1)
        table, positions_T = angles
        assert (table.shape[1], len(positions_T)) == (step.head_dim, step.T)
        step.angles, step.num_positions, step.positions = floats_at(table), len(table), integers_at(positions_T)
        step.slot_blocks, step.slot_offsets, step.starts, step.lens = map(integers_at, (*tokens, *slices))
        step.tables, step.width, step.slices = tables_BM.data_ptr(), tables_BM.stride(0), num_slices

    def _describe_cache(self, blocks: torch.Tensor) -> None:
        """`blocks` is `[num_blocks, K, num_layers, 2, block_size, D]`."""
        step = self._forward
        _, num_kv_heads, num_layers, _, block_size, head_dim = blocks.shape
        assert (num_kv_heads, num_layers, head_dim) == (step.kv_heads, step.num_layers, step.head_dim)
        assert blocks.is_contiguous()
        itemsize = blocks.element_size()
        step.cache, step.block_size = blocks.data_ptr(), block_size
        step.block_bytes, step.head_bytes, step.layer_bytes = (itemsize * each for each in blocks.stride()[:3])
        pairs = blocks.dtype == torch.bfloat16 and self._kernels.multiplies_pairs
        step.kv_type = PAIRS if pairs else TYPES[blocks.dtype]


def computes(layers: Sequence[LayerWeights]) -> bool:
    """Whether all products of these layers are computed by kernels in C."""
    products = chain.from_iterable((each.qkv, each.output, each.gate_up, each.down) for each in layers)
    return all(product.panels is not None for product in products)


def _layer(config: ModelConfig, layer: LayerWeights, window: int | None) -> _Layer:
    q_norm, k_norm = (None, None) if layer.qk_norms is None else layer.qk_norms
    width, inner = config.num_heads * config.head_dim, config.intermediate_size
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    gate_up, down = (
        _product(layer.gate_up, config.hidden_size, 2 * inner),
        _product(layer.down, inner, config.hidden_size),
    )
    assert gate_up.type == down.type
    gate_up.outputs = inner
    return _Layer(
        *(floats_at(each) for each in (layer.input_norm, layer.mlp_norm, q_norm, k_norm)),
        _product(layer.qkv, config.hidden_size, qkv),
        _product(layer.output, width, config.hidden_size),
        gate_up,
        down,
        window or 0,
    )


def _product(linear: Linear, inputs: int, outputs: int) -> _Product:
    assert (linear.in_features, linear.out_features) == (inputs, outputs)
    assert linear.panels is not None
    return _Product(linear.panels.data_ptr(), floats_at(linear.bias), outputs, type_of(linear.panels))
