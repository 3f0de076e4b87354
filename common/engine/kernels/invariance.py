"""A look, as a batch-invariant worker starts, at whether its GPU gives a row the same bits in tiles of every size.

Tiles of 16 and of 64 rows are multiplied by different instructions of some GPUs. That these sum alike is nothing that
their makers promise, so a few products and rows of attention are computed in several ways. They are compared before
they are rounded: two sums that differ in their last bit are nearly always rounded to the same number of 16 bits, but
not in each of the many sums of an answer.
"""

from __future__ import annotations

import torch

from common.contract.errors import OperatorError
from common.contract.kv_layout import KVLayout
from common.engine.backend import Backend
from common.engine.batch import Slice
from common.engine.kernels.backend import TritonBackend
from common.engine.kernels.matmul import matmul
from common.engine.kv_cache import TORCH_DTYPES, KVCache
from common.engine.ragged import Rows

_ROWS = (1, 16, 17, 64, 65, 200)
_INPUTS, _OUTPUTS = 1024, 256
_CHUNK = 24
"""Tokens of a chunk, which are computed in smaller ones, side by side, and by themselves as well."""


def require_invariance(backend: Backend, layout: KVLayout, num_heads: int, device: torch.device) -> None:
    """Raise `OperatorError` if `backend`, which is batch-invariant, does not give the same bits on this device.

    `layout` and `num_heads` are those of the model. `backend` should be for this alone: it keeps memory of what it has
    seen. What is multiplied is drawn by a generator of its own.
    """
    assert isinstance(backend, TritonBackend)
    generator = torch.Generator(device).manual_seed(0)
    lengths = (_CHUNK + 3, 2 * backend.run_keys + _CHUNK // 2)  # one run, and about the end of the second
    differ = {
        "products": _products_differ(TORCH_DTYPES[layout.dtype], generator),
        "attention": any(_attention_differs(backend, layout, num_heads, length, generator) for length in lengths),
    }
    if any(differ.values()):
        what = " and ".join(name for name in differ if differ[name])
        raise OperatorError(
            f"--batch-invariant cannot be had on this device: {what} of the same row have other bits in a larger batch"
        )


def _random(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(dtype)


def _products_differ(dtype: torch.dtype, generator: torch.Generator) -> bool:
    x_MK = _random(max(_ROWS), _INPUTS, dtype=dtype, generator=generator)
    weight_NK = _random(_OUTPUTS, _INPUTS, dtype=dtype, generator=generator)
    whole = matmul(x_MK, weight_NK, out_dtype=torch.float32)
    return any(not torch.equal(matmul(x_MK[:rows], weight_NK, out_dtype=torch.float32), whole[:rows]) for rows in _ROWS)


def _attention_differs(
    backend: TritonBackend, layout: KVLayout, num_heads: int, length: int, generator: torch.Generator
) -> bool:
    """The last tokens of a sequence of `length`: as a chunk, in smaller ones, and as decode tokens, many and one."""
    size, first, scale = layout.block_size, length - _CHUNK, layout.head_dim**-0.5
    table = list(range(layout.blocks_for(length)))
    one_layer = KVLayout(
        num_layers=1, num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim, block_size=size, dtype=layout.dtype
    )
    kv_layer = KVCache(one_layer, len(table), generator.device).layer(0)
    kv_layer.normal_(generator=generator)
    q_THD = _random(_CHUNK, num_heads, layout.head_dim, dtype=kv_layer.dtype, generator=generator)

    def attended(start: int, end: int, tokens_at_once: int) -> torch.Tensor:
        """The attention of the chunk's tokens `[start, end)`."""
        slices = [
            Slice(token_ids=[0] * min(tokens_at_once, end - at), start=first + at, block_table=table)
            for at in range(start, end, tokens_at_once)
        ]
        batch = Rows.of(slices, size).on(generator.device)
        return backend.attend(q_THD[start:end], kv_layer, batch, None, scale, out_dtype=torch.float32)

    whole = attended(0, _CHUNK, _CHUNK)
    return any(
        not torch.equal(attended(start, end, tokens), whole[start:end])
        for start, end, tokens in ((0, _CHUNK, 1), (0, _CHUNK, 5), (0, 1, 1), (_CHUNK - 1, _CHUNK, 1))
    )
