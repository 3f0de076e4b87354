"""Kernels in C for CPUs, which `library` compiles.

If there is no compiler, or it fails, or there are no kernels for the model's head dimension, the engine computes with
torch alone and logs a warning.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from typing import Any

import torch

from common.engine.native.library import load
from common.engine.native.packing import BLOCK, PANEL, blocks_of

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of numbers, as `kernels.c` numbers them."""
PAIRS = 3
"""Pairs of bfloat16 numbers."""


def serves(head_dim: int) -> bool:
    """Whether there are kernels for heads of this dimension."""
    return head_dim % 8 == 0 and head_dim <= 512


class Kernels:
    """The compiled functions. They release the interpreter's lock while they run, and use as many threads as torch.

    Activations are float32; weights and KV are float32, bfloat16 or float16. A row's result does not depend on the
    other rows. Shapes: T tokens, E hidden size, H query heads, K KV heads, D head dimension (see `serves`), N
    sequences. `kv_layer` is `[num_blocks, K, 2, block_size, D]`, where the part of one head in one block is contiguous.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        p, n, f, i = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
        of_type: dict[str, tuple[list[Any], Any]] = {
            "linear": ([p, n, n, p, p, p, n, i], i),
            "gated": ([p, n, n, p, p, p, n, i], i),
            "decode": ([p, n, p, n, n, p, n, p, n, n, n, n, n, n, f, p, i], i),
            "prefill": ([p, n, p, n, n, p, n, n, n, n, n, n, n, f, p, i], i),
            "write": ([p, p, n, p, n, n, p, p, n, n, n, n, i], None),
        }
        self._of_type = {
            (name, dtype): _function(library, f"baton_{name}_{str(dtype).removeprefix('torch.')}", *signature)
            for name, signature in of_type.items()
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        self._in_pairs = {
            name: _function(library, f"baton_{name}_pairs", *of_type[name])
            for name in ("linear", "gated", "decode", "prefill")
        }
        self._linear_rounded = _function(library, "baton_linear_rounded", *of_type["linear"])
        pairs = _function(library, "baton_multiplies_pairs", [], i)()
        self.multiplies_pairs = pairs > 0
        """Whether the CPU has instructions for products of bfloat16, for which weights, keys and values are packed in
        pairs."""
        floats = _function(library, "baton_multiplies_floats", [], ctypes.c_char_p)().decode()
        self.instructions = (floats, ("none", "avx512_bf16", "amx")[pairs])
        """The names of those that multiply float32, and pairs."""
        log.info("the kernels in C multiply float32 with %s, and pairs of bfloat16 with %s", *self.instructions)
        self._add_norm = _function(library, "baton_add_norm", [p, p, p, f, n, n, p, i], None)
        self._norm_some = _function(library, "baton_norm_some", [p, p, p, p, f, n, n, n, p, i], i)
        self._unpack = _function(library, "baton_unpack", [p, n, p, n, n, n, p, i], i)
        self._rotate = _function(library, "baton_rotate", [p, n, n, n, n, p, p, f, p, n, p, n, i], i)
        self._best = _function(library, "baton_best", [p, n, n, p, p, i], None)
        self._draw = _function(library, "baton_draw", [p, n, n, p, p, p, p, p, p, p, i], i)
        self._silu_mul = _function(library, "baton_silu_mul", [p, n, n, p, i], None)
        self.group_add = _function(library, "baton_group_add", [p, p, n], i)
        self.group_beside = _function(library, "baton_group_beside", [p, p, n, n, p], i)
        self.group_wait_for_readers = _function(library, "baton_group_wait_for_readers", [p], i)
        self.group_tell = _function(library, "baton_group_tell", [p], None)
        self.group_hear = _function(library, "baton_group_hear", [p], i)
        self.group_has_read = _function(library, "baton_group_has_read", [p], None)
        self.group_end = _function(library, "baton_group_end", [p], None)
        self.forward = _function(library, "baton_forward", [p], i)
        self.group_table_bytes = _function(library, "baton_group_table_bytes", [], n)()

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor:
        """`x @ weight.T + bias`: `[T, in]` to `[T, out]`. `packed` is a weight from `packing.pack` or
        `pack_pairs`, and the bias is float32. With pairs, x is rounded to bfloat16, or is what `gated` returned.

        Products are exact and summed in float32, in an order that does not depend on the number of rows. Raises
        `MemoryError`.
        """
        rows, in_features = x.shape
        self._check(in_features, packed, -(-out_features // PANEL))
        assert bias is None or bias.shape == (out_features,)
        out = torch.empty(rows, out_features)
        arguments = (rows, in_features, packed.data_ptr(), floats_at(bias), out.data_ptr(), out_features, _threads())
        if x.dtype == torch.bfloat16:
            assert packed.dim() == 4
            assert x.is_contiguous()
            assert in_features % BLOCK == 0
            failed = self._linear_rounded(x.data_ptr(), *arguments)
        else:
            failed = self._product("linear", packed)(floats_at(x), *arguments)
        if failed:
            raise MemoryError("no memory for a product's inputs")
        return out

    def gated(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor:
        """`silu(gate) * up` of the products of `linear`, `[T, in]` to `[T, out]`. The panels of `packed`, and the 16
        numbers of the bias for each of them, are those of gates and of ups in turn; see `packing.alternating`.

        With pairs the result is bfloat16, rounded as `linear` would round it, and `out` is padded with zeros to a
        multiple of `BLOCK`. Raises `MemoryError`.
        """
        rows, in_features = x.shape
        panels = -(-out_features // PANEL) * 2
        self._check(in_features, packed, panels)
        assert bias is None or bias.shape == (panels * PANEL,)
        if packed.dim() == 4:
            out = torch.empty(rows, blocks_of(out_features) * BLOCK, dtype=torch.bfloat16)
        else:
            out = torch.empty(rows, out_features)
        arguments = (rows, in_features, packed.data_ptr(), floats_at(bias), out.data_ptr(), out_features, _threads())
        if self._product("gated", packed)(floats_at(x), *arguments):
            raise MemoryError("no memory for a product's inputs")
        return out

    def _check(self, in_features: int, packed: torch.Tensor, panels: int) -> None:
        """Whether a packed weight has so many panels and inputs."""
        pairs = (panels, blocks_of(in_features) * BLOCK // 2, PANEL, 2)
        assert packed.shape == (pairs if packed.dim() == 4 else (panels, in_features, PANEL)), (
            packed.shape,
            in_features,
        )
        assert packed.is_contiguous()

    def _product(self, name: str, packed: torch.Tensor) -> Any:
        """The function for weights of this form."""
        return self._in_pairs[name] if packed.dim() == 4 else self._of_type[name, packed.dtype]

    def _attention(self, name: str, dtype: torch.dtype) -> Any:
        """The function for KV of this type."""
        if dtype == torch.bfloat16 and self.multiplies_pairs:
            return self._in_pairs[name]
        return self._of_type[name, dtype]

    def attend_decode(
        self,
        q_NHD: torch.Tensor,
        kv_layer: torch.Tensor,
        tables_NM: torch.Tensor,
        lens_N: torch.Tensor,
        window: int | None,
        scale: float,
        out_NHD: torch.Tensor,
    ) -> None:
        """Write the attention of N tokens into `out_NHD`. Each is the last of the `lens_N` tokens of its sequence,
        whose blocks are in `tables_NM`. On a CPU that `multiplies_pairs`, queries and weights are rounded to bfloat16
        beside KV of that type. Raises `MemoryError`."""
        assert (tables_NM.dtype, lens_N.dtype) == (torch.int64, torch.int64)
        assert tables_NM.stride(1) == 1
        assert lens_N.is_contiguous()
        assert len(q_NHD) == len(tables_NM) == len(lens_N)
        assert out_NHD.shape == q_NHD.shape
        failed = self._attention("decode", kv_layer.dtype)(
            *_queries(q_NHD),
            *_cache(kv_layer),
            tables_NM.data_ptr(),
            tables_NM.stride(0),
            lens_N.data_ptr(),
            *_heads(q_NHD, kv_layer),
            window or 0,
            scale,
            floats_at(out_NHD),
            _threads(),
        )
        if failed:
            raise MemoryError("no memory for attention scores")

    def attend_prefill(
        self,
        q_THD: torch.Tensor,
        kv_layer: torch.Tensor,
        table_M: torch.Tensor,
        start: int,
        window: int | None,
        scale: float,
        out_THD: torch.Tensor,
    ) -> None:
        """Write the attention of a sequence's tokens at positions `start` and on into `out_THD`. The sequence's blocks
        are `table_M`, and hold the KV of these tokens already. Rounds as `attend_decode`. Raises `MemoryError`."""
        assert (table_M.dtype, table_M.stride(0)) == (torch.int64, 1)
        assert start + len(q_THD) <= len(table_M) * kv_layer.shape[3]
        assert out_THD.shape == q_THD.shape
        failed = self._attention("prefill", kv_layer.dtype)(
            *_queries(q_THD),
            *_cache(kv_layer),
            table_M.data_ptr(),
            start,
            *_heads(q_THD, kv_layer),
            window or 0,
            scale,
            floats_at(out_THD),
            _threads(),
        )
        if failed:
            raise MemoryError("no memory for a prompt's keys and values")

    def write(
        self,
        kv_layer: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        blocks_T: torch.Tensor,
        offsets_T: torch.Tensor,
    ) -> None:
        """Store keys and values, rounded to the cache's type, in slots `offsets_T` of blocks `blocks_T` (int64)."""
        num_tokens, num_kv_heads, head_dim = k_TKD.shape
        assert (k_TKD.dtype, v_TKD.dtype) == (torch.float32, torch.float32)
        assert k_TKD.stride() == v_TKD.stride(), (k_TKD.stride(), v_TKD.stride())
        assert k_TKD.stride()[1:] == (head_dim, 1)
        assert (blocks_T.dtype, offsets_T.dtype) == (torch.int64, torch.int64)
        assert len(blocks_T) == len(offsets_T) == num_tokens
        assert serves(head_dim), head_dim
        assert head_dim == kv_layer.shape[4]
        self._of_type["write", kv_layer.dtype](
            k_TKD.data_ptr(),
            v_TKD.data_ptr(),
            k_TKD.stride(0),
            *_cache(kv_layer),
            blocks_T.data_ptr(),
            offsets_T.data_ptr(),
            num_tokens,
            num_kv_heads,
            kv_layer.shape[3],
            head_dim,
            _threads(),
        )

    def add_norm(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta_TE` to `h_TE` in place. Returns the weighted root mean square normalisation of `h_TE`."""
        out_TE = torch.empty(h_TE.shape)
        num_rows, size = h_TE.shape
        assert delta_TE is None or delta_TE.shape == h_TE.shape
        assert weight_E.shape == (size,)
        inputs = (floats_at(h_TE), floats_at(delta_TE), floats_at(weight_E))
        self._add_norm(*inputs, eps, num_rows, size, out_TE.data_ptr(), _threads())
        return out_TE

    def norm_some(
        self,
        h_TE: torch.Tensor,
        delta_TE: torch.Tensor | None,
        rows_R: torch.Tensor,
        weight_E: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """What `add_norm` returns for some rows, `[R, E]`; `h_TE` stays as it is. Raises `IndexError`."""
        num_rows, size = len(rows_R), h_TE.shape[1]
        out_RE = torch.empty(num_rows, size)
        assert delta_TE is None or delta_TE.shape == h_TE.shape
        assert weight_E.shape == (size,)
        failed = self._norm_some(
            floats_at(h_TE),
            floats_at(delta_TE),
            integers_at(rows_R),
            floats_at(weight_E),
            eps,
            len(h_TE),
            num_rows,
            size,
            out_RE.data_ptr(),
            _threads(),
        )
        if failed:
            raise IndexError(f"a row is not one of {len(h_TE)}")
        return out_RE

    def unpack(self, packed: torch.Tensor, rows_R: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """Rows of a packed weight of this shape, `[R, in]` float32. Raises `IndexError`."""
        out_features, in_features = shape
        self._check(in_features, packed, -(-out_features // PANEL))
        out = torch.empty(len(rows_R), in_features)
        sizes = (len(rows_R), out_features, in_features)
        if self._unpack(packed.data_ptr(), type_of(packed), integers_at(rows_R), *sizes, floats_at(out), _threads()):
            raise IndexError(f"a row is not one of {out_features}")
        return out

    def rotate(
        self,
        qkv_TF: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Rotate queries and keys in place. They are the first `H + K` heads of each row. The angles are a table from
        `Rope.table` and the positions `[T]`, int64. With `norms` of queries and of keys, `[D]` each, they are
        normalised first. Raises `IndexError` for a position that is not in the table."""
        table, positions_T = angles
        num_rows, row_size = qkv_TF.shape
        head_dim = table.shape[1]
        assert positions_T.shape == (num_rows,)
        assert row_size >= (num_heads + num_kv_heads) * head_dim
        q_norm, k_norm = norms if norms is not None else (None, None)
        failed = self._rotate(
            floats_at(qkv_TF),
            row_size,
            num_heads + num_kv_heads,
            num_heads,
            head_dim,
            floats_at(q_norm),
            floats_at(k_norm),
            eps,
            floats_at(table),
            len(table),
            integers_at(positions_T),
            num_rows,
            _threads(),
        )
        if failed:
            raise IndexError(f"a position is not one of {len(table)}")

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`. The first half of a row holds the gates, the second half the ups."""
        num_rows, size = gate_up_TF.shape
        out_TF = torch.empty(num_rows, size // 2)
        self._silu_mul(floats_at(gate_up_TF), num_rows, size // 2, floats_at(out_TF), _threads())
        return out_TF

    def best(self, x_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest number of each row, NaN if the row has one, and its index, int64. Of equal numbers, the first one
        counts."""
        num_rows, size = x_TV.shape
        values_T, indices_T = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        self._best(floats_at(x_TV), num_rows, size, values_T.data_ptr(), indices_T.data_ptr(), _threads())
        return values_T, indices_T

    def draw(
        self,
        x_TV: torch.Tensor,
        best_T: torch.Tensor,
        temperature_T: torch.Tensor,
        top_k_T: torch.Tensor,
        top_p_T: torch.Tensor,
        log_min_p_T: torch.Tensor,
        random_T: torch.Tensor,
    ) -> torch.Tensor:
        """Draw a token for each row of logits, `[T]` int64. Top-k, then top-p, then min-p remove tokens. The token
        drawn is the first at which the cumulative weight of those left reaches `random_T` (float64) times their sum.

        `best_T` is the largest logit of each row. A `top_k_T` of 0 removes none. Raises `MemoryError`.
        """
        num_rows, size = x_TV.shape
        assert (top_k_T.dtype, random_T.dtype) == (torch.int64, torch.float64)
        tokens_T = torch.empty(num_rows, dtype=torch.int64)
        failed = self._draw(
            floats_at(x_TV),
            num_rows,
            size,
            floats_at(best_T),
            floats_at(temperature_T),
            top_k_T.data_ptr(),
            floats_at(top_p_T),
            floats_at(log_min_p_T),
            random_T.data_ptr(),
            tokens_T.data_ptr(),
            _threads(),
        )
        if failed:
            raise MemoryError("no memory to sample")
        return tokens_T


def _function(library: ctypes.CDLL, name: str, arguments: list[Any], result: Any) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    return function


def floats_at(x: torch.Tensor | None) -> int | None:
    """The address of contiguous float32 numbers; None for None."""
    if x is None:
        return None
    assert x.dtype == torch.float32, x.dtype
    assert x.is_contiguous(), x.stride()
    return x.data_ptr()


def integers_at(x: torch.Tensor) -> int:
    """The address of contiguous int64 numbers."""
    assert x.dtype == torch.int64, x.dtype
    assert x.is_contiguous(), x.stride()
    return x.data_ptr()


def type_of(packed: torch.Tensor) -> int:
    """The type of a packed weight, as C names it."""
    return PAIRS if packed.dim() == 4 else TYPES[packed.dtype]


def _queries(q_NHD: torch.Tensor) -> tuple[int, int]:
    """The address of queries, and the distance between their rows, in numbers."""
    assert q_NHD.dtype == torch.float32, q_NHD.dtype
    assert q_NHD.stride()[1:] == (q_NHD.shape[2], 1), q_NHD.stride()
    return q_NHD.data_ptr(), q_NHD.stride(0)


def _cache(kv_layer: torch.Tensor) -> tuple[int, int, int]:
    """The address of one layer of the cache, and the bytes from block to block and from head to head."""
    _, _, _, block_size, head_dim = kv_layer.shape
    assert kv_layer.stride()[2:] == (block_size * head_dim, head_dim, 1), kv_layer.stride()
    itemsize = kv_layer.element_size()
    return kv_layer.data_ptr(), kv_layer.stride(0) * itemsize, kv_layer.stride(1) * itemsize


def _heads(q_NHD: torch.Tensor, kv_layer: torch.Tensor) -> tuple[int, int, int, int, int]:
    """(rows, KV heads, query heads per KV head, block size, head dimension)."""
    num_rows, num_heads, head_dim = q_NHD.shape
    _, num_kv_heads, _, block_size, _ = kv_layer.shape
    assert head_dim == kv_layer.shape[4]
    assert serves(head_dim), head_dim
    return num_rows, num_kv_heads, num_heads // num_kv_heads, block_size, head_dim


def _threads() -> int:
    return torch.get_num_threads()


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, compiled if need be. Returns None, and logs a warning, if that fails."""
    try:
        return Kernels(load())
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        detail = error.stderr[-500:] if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("no C kernels, which GCC 12 or later compiles, so that the CPU computes more slowly: %s", detail)
        return None
