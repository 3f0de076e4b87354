"""All layers of a model in one call of the kernels in C. See `layers.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch

from common.engine.kv_cache import KVCache
from common.engine.linear import Linear
from common.engine.model_config import ModelConfig
from common.engine.native import Kernels
from common.engine.native.group import GroupEndedError, SharedGroup
from common.engine.ragged import RaggedBatch
from common.engine.rope import Angles
from common.engine.weights import LayerWeights

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PAIRS = 3
_GROUP_ENDED = 2

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
        *((name, _pointer) for name in ("cosines", "sines", "slot_blocks", "slot_offsets", "starts", "lens", "tables")),
        *((name, _long) for name in ("slices", "width")),
        ("cache", _pointer),
        *((name, _long) for name in ("layer_bytes", "block_bytes", "head_bytes", "block_size", "kv_type")),
        ("group", _pointer),
        *((name, _float) for name in ("scale", "eps")),
        ("threads", _int),
    )


class NativeLayers:
    """The layers of one model, whose products are all computed by kernels in C."""

    def __init__(self, kernels: Kernels, layers: Sequence[LayerWeights], config: ModelConfig) -> None:
        """`config` is that of this rank's part of the model."""
        assert computes(layers)
        self.weights = layers
        self._kernels = kernels
        described = [_layer(layer, window) for layer, window in zip(layers, config.windows, strict=True)]
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
        to be added. Raises `MemoryError`, and `GroupEndedError`."""
        step, (cos_T1D, sin_T1D), blocks = self._forward, angles, cache.blocks
        num_tokens = h_TE.shape[0]
        delta_TE = torch.empty(h_TE.shape)
        floats = (h_TE, cos_T1D, sin_T1D)
        integers = (
            batch.slot_blocks_T,
            batch.slot_offsets_T,
            batch.query_start_B1,
            batch.seq_lens_B,
        )
        tables_BM = batch.block_tables_BM
        assert all(each.dtype == torch.float32 and each.is_contiguous() for each in floats)
        assert all(each.dtype == torch.int64 and each.is_contiguous() for each in integers)
        assert (tables_BM.dtype, tables_BM.stride(1)) == (torch.int64, 1)
        assert cos_T1D.shape == sin_T1D.shape == (num_tokens, 1, step.head_dim)
        assert h_TE.shape[1] == step.E
        step.h, step.cosines, step.sines = (each.data_ptr() for each in floats)
        step.slot_blocks, step.slot_offsets, step.starts, step.lens = (each.data_ptr() for each in integers)
        step.tables, step.width, step.slices = tables_BM.data_ptr(), tables_BM.stride(0), len(batch.query_lens)
        step.delta, step.T = delta_TE.data_ptr(), num_tokens
        num_heads, _, block_size, head_dim = blocks.shape[1], *blocks.shape[3:]
        assert (num_heads, head_dim) == (step.kv_heads, step.head_dim)
        itemsize = blocks.element_size()
        step.cache, step.block_size = blocks.data_ptr(), block_size
        step.block_bytes, step.head_bytes, step.layer_bytes = (itemsize * each for each in blocks.stride()[:3])
        pairs = blocks.dtype == torch.bfloat16 and self._kernels.multiplies_pairs
        step.kv_type = _PAIRS if pairs else _TYPES[blocks.dtype]
        step.group = None if group is None else group.address
        step.threads = torch.get_num_threads()
        failed = self._kernels.forward(ctypes.addressof(step))
        if failed == _GROUP_ENDED:
            raise GroupEndedError
        if failed:
            raise MemoryError("no memory for a step's activations")
        return delta_TE


def computes(layers: Sequence[LayerWeights]) -> bool:
    """Whether all products of these layers are computed by kernels in C."""
    products = chain.from_iterable((each.qkv, each.output, each.gate_up, each.down) for each in layers)
    return all(product.panels is not None for product in products)


def _layer(layer: LayerWeights, window: int | None) -> _Layer:
    q_norm, k_norm = (None, None) if layer.qk_norms is None else layer.qk_norms
    norms = (layer.input_norm, layer.mlp_norm, q_norm, k_norm)
    assert all(each is None or (each.dtype == torch.float32 and each.is_contiguous()) for each in norms)
    return _Layer(
        *(None if each is None else each.data_ptr() for each in norms),
        _product(layer.qkv, layer.qkv.out_features),
        _product(layer.output, layer.output.out_features),
        _product(layer.gate_up, layer.gate_up.out_features // 2),
        _product(layer.down, layer.down.out_features),
        window or 0,
    )


def _product(linear: Linear, outputs: int) -> _Product:
    assert linear.panels is not None
    bias = None if linear.bias is None else linear.bias.data_ptr()
    pairs = linear.panels.dim() == 4
    return _Product(linear.panels.data_ptr(), bias, outputs, _PAIRS if pairs else _TYPES[linear.panels.dtype])
