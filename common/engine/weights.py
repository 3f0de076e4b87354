"""Loads Hugging Face checkpoints (safetensors, one file or shards) into the decoder's fused tensors. Strict: no tensor
may be missing or unexpected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import embedding

from common.contract.errors import OperatorError
from common.contract.kv_layout import DTYPE_BYTES
from common.engine.backend import Norms
from common.engine.host_memory import LargePages
from common.engine.kv_cache import TORCH_DTYPES
from common.engine.linear import Linear
from common.engine.model_config import ModelConfig
from common.engine.native import Kernels
from common.engine.shard import WHOLE, Shard
from common.runtime.checkpoint import WEIGHTS, refuse_pointer, shards_by_tensor
from common.runtime.malloc import give_memory_back

Progress = Callable[[int, int], None]
"""Called with (done, to do): numbers of tensors that are loaded, or of graphs that are captured."""

_PAIR = ("model.embed_tokens.weight", "lm_head.weight")
"""The two tensors that are one if `tie_word_embeddings` is set."""
_ROWS_COMPARED = 1024
"""Rows of the two that are compared at once."""
_MAX_NAMED = 5
"""Most tensors that an error message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one decoder layer. Fused projections are concatenated along their outputs."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norms: Norms | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of a decoder."""

    embedding: torch.Tensor | None
    """None if the rows of `lm_head` are the embeddings."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Copy the tokens' embeddings, `[T, E]`, in the type of the activations."""
        table = self.embedding
        rows_TE = self.lm_head.rows(token_ids_T) if table is None else embedding(token_ids_T, table)
        return rows_TE.to(self.final_norm.dtype)


@dataclass(frozen=True, slots=True)
class _Target:
    """What a tensor of a checkpoint, or a part of it, fills: a tensor, often a part of a linear's."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the checkpoint's tensor."""
    part: tuple[range, ...]
    """What is loaded of it, by axis."""
    linear: Linear | None = None


def load_weights(
    config: ModelConfig,
    folder: Path,
    dtype: str,
    device: torch.device,
    progress: Progress | None = None,
    kernels: Kernels | None = None,
    batch_invariant: bool = False,
    shard: Shard = WHOLE,
) -> Weights:
    """Load the checkpoint in `folder` as `dtype` (a key of `DTYPE_BYTES`). On a CPU, weights are packed for `kernels`,
    if there are any; see `Linear` for `batch_invariant`. Of each tensor only the part of the `shard` is read.

    Raises `OperatorError`, naming tensors, if one is missing, unexpected or of the wrong shape, or a file is damaged.
    """
    files = {n: file for n, file in _files_by_tensor(folder).items() if not n.endswith("rotary_emb.inv_freq")}
    of_pair = [name for name in _PAIR if name in files]
    if config.tie_word_embeddings and len(of_pair) == 2 and _is_stored_twice(config, files):
        del files[of_pair.pop()]
    shared = config.tie_word_embeddings and len(of_pair) == 1
    weights = _allocate(config, shard, TORCH_DTYPES[dtype], device, kernels, batch_invariant, shared=shared)
    # As in transformers: if one of a tied pair is absent, or equal to the other, the other stands for both.
    stands_for = dict.fromkeys(_PAIR, of_pair[0]) if shared else {}
    targets = _by_tensor(_targets(config, shard, weights), stands_for)
    _require_none(folder, "lacks", targets.keys() - files.keys())
    _require_none(folder, "has unexpected", files.keys() - targets.keys())
    missing = Counter(each.linear for of_name in targets.values() for each in of_name if each.linear is not None)
    memory = LargePages()
    for done, (name, stored) in enumerate(_tensors(files), start=1):
        _fill(folder, name, stored, targets[name])
        # Nothing may refer to a loaded weight once it is packed: it would take its memory twice until the last one is.
        for linear in [each.linear for each in targets.pop(name) if each.linear is not None]:
            missing[linear] -= 1
            if not missing[linear]:
                linear.pack(memory.zeros)
        if progress is not None:
            progress(done, len(files))
    give_memory_back()
    if shard.rank:  # the sum over the ranks has each bias once
        for bias in (linear.bias for layer in weights.layers for linear in (layer.output, layer.down)):
            if bias is not None:
                bias.zero_()
    return weights


def _is_stored_twice(config: ModelConfig, files: Mapping[str, Path]) -> bool:
    """Whether the two tensors of the pair are equal. All of both is compared, whatever the shard, so that every rank
    finds the same."""
    one, other = (stored for _, stored in _tensors({name: files[name] for name in _PAIR}))
    if not one.get_shape() == other.get_shape() == [config.vocab_size, config.hidden_size]:
        return False
    rows = range(config.vocab_size)
    pieces = (rows[begin : begin + _ROWS_COMPARED] for begin in rows[::_ROWS_COMPARED])
    return all(torch.equal(one[each.start : each.stop], other[each.start : each.stop]) for each in pieces)


def _by_tensor(targets: Iterable[tuple[str, _Target]], stands_for: Mapping[str, str]) -> dict[str, list[_Target]]:
    """What each tensor fills; one may stand for another."""
    found: dict[str, list[_Target]] = {}
    for name, target in targets:
        found.setdefault(stands_for.get(name, name), []).append(target)
    return found


def _fill(folder: Path, name: str, stored: Any, targets: list[_Target]) -> None:
    for each in targets:
        if (shape := tuple(stored.get_shape())) != each.shape:
            raise OperatorError(
                f"{folder}: tensor {name} has shape {list(shape)}, config.json asks for {list(each.shape)}"
            )
        each.tensor.copy_(stored[tuple(slice(part.start, part.stop) for part in each.part)])


def resolve_dtype(config: ModelConfig, folder: Path, dtype: str) -> str:
    """The element type to load with: `dtype` itself, or for "auto" the checkpoint's.

    The checkpoint's type is the one that its configuration states, otherwise that of its first tensor. Raises
    `OperatorError` for an unknown type.
    """
    if dtype != "auto":
        if dtype not in DTYPE_BYTES:
            raise OperatorError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPE_BYTES)}")
        return dtype
    if config.dtype is not None:
        return config.dtype
    _, first = next(_tensors(_files_by_tensor(folder)))
    type_of_first = first[:1].dtype
    stored = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}.get(type_of_first)
    if stored is None:
        raise OperatorError(f"{folder}: tensors of {type_of_first}; name the dtype to load them with")
    return stored


def _allocate(
    whole: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None,
    batch_invariant: bool = False,
    *,
    shared: bool = False,
) -> Weights:
    """Weights of the shard's shapes, uninitialised. If one tensor is `shared` by the embedding and the head, there is
    no table of embeddings, unless the head's rows cannot be read."""
    config, vocab_size = shard.config(whole), len(shard.of(whole.vocab_size))

    def vector(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype if kernels is None else torch.float32, device=device)

    def projection(out_features: int, in_features: int, bias: bool = False, *, gated: bool = False) -> Linear:
        return Linear(
            out_features,
            in_features,
            bias=bias,
            dtype=dtype,
            device=device,
            kernels=kernels,
            batch_invariant=batch_invariant,
            gated=gated,
        )

    hidden, inner = config.hidden_size, config.intermediate_size
    q_out, kv_out = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    lm_head = projection(vocab_size, hidden)
    has_table = not shared or lm_head.for_onednn
    return Weights(
        embedding=torch.empty(vocab_size, hidden, dtype=dtype, device=device) if has_table else None,
        layers=tuple(
            LayerWeights(
                input_norm=vector(hidden),
                qkv=projection(q_out + 2 * kv_out, hidden, config.qkv_bias),
                qk_norms=(vector(config.head_dim), vector(config.head_dim)) if config.qk_norm else None,
                output=projection(hidden, q_out, config.output_bias),
                mlp_norm=vector(hidden),
                gate_up=projection(2 * inner, hidden, config.mlp_bias, gated=True),
                down=projection(hidden, inner, config.mlp_bias),
            )
            for _ in range(config.num_layers)
        ),
        final_norm=vector(hidden),
        lm_head=lm_head,
    )


def _targets(config: ModelConfig, shard: Shard, weights: Weights) -> Iterator[tuple[str, _Target]]:
    """For each tensor of a checkpoint: its name, and what it fills."""
    table, lm_head = _PAIR
    rows, hidden, dim = shard.of(config.vocab_size), config.hidden_size, config.head_dim
    shape, words = (config.vocab_size, hidden), (rows, range(hidden))
    if weights.embedding is not None:
        yield table, _Target(weights.embedding, shape, words)
    yield lm_head, _Target(weights.lm_head.weight, shape, words, weights.lm_head)
    yield "model.norm.weight", _all(weights.final_norm)
    inner = (config.intermediate_size, shard.of(config.intermediate_size))
    queries = (config.num_heads * dim, _times(shard.of(config.num_heads), dim))
    keys = (config.num_kv_heads * dim, _times(shard.kv_heads(config.num_kv_heads), dim))
    every = (hidden, range(hidden))
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", _all(layer.input_norm)
        yield f"{prefix}.post_attention_layernorm.weight", _all(layer.mlp_norm)
        if layer.qk_norms is not None:
            for name, norm in zip(("q_norm", "k_norm"), layer.qk_norms, strict=True):
                yield f"{prefix}.self_attn.{name}.weight", _all(norm)
        for named, inputs, linear in (
            ({"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}, every, layer.qkv),
            ({"self_attn.o_proj": every}, queries, layer.output),
            ({"mlp.gate_proj": inner, "mlp.up_proj": inner}, every, layer.gate_up),
            ({"mlp.down_proj": every}, inner, layer.down),
        ):
            sizes = [len(part) for _, part in named.values()]
            for (name, (total, part)), tensor in zip(named.items(), torch.split(linear.weight, sizes), strict=True):
                yield f"{prefix}.{name}.weight", _Target(tensor, (total, inputs[0]), (part, inputs[1]), linear)
            if linear.bias is not None:
                for (name, (total, part)), tensor in zip(named.items(), torch.split(linear.bias, sizes), strict=True):
                    yield f"{prefix}.{name}.bias", _Target(tensor, (total,), (part,), linear)


def _all(tensor: torch.Tensor) -> _Target:
    return _Target(tensor, tuple(tensor.shape), tuple(map(range, tensor.shape)))


def _times(part: range, num: int) -> range:
    return range(part.start * num, part.stop * num)


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """Tensor name → its file, ordered by file: the files that `weights_hash` covers. Raises `OperatorError` if they or
    the index are missing or wrong."""
    single = folder / WEIGHTS
    if single.exists():
        with _opened(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    files = shards_by_tensor(folder)
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise OperatorError(f"{folder} lacks the files {', '.join(absent[:_MAX_NAMED])} that its index names")
    return files


def _tensors(files: dict[str, Path]) -> Iterator[tuple[str, Any]]:
    """The name of every tensor, and what reads parts of it, file by file."""
    for file in dict.fromkeys(files.values()):
        with _opened(file) as tensors:
            present = set(tensors.keys())
            for name in (name for name, of in files.items() if of == file):
                if name not in present:
                    raise OperatorError(f"{file} lacks tensor {name}, which the index places there")
                yield name, tensors.get_slice(name)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        with suppress(OSError), file.open("rb") as opened:
            refuse_pointer(file, opened.read(64))
        raise OperatorError(f"{file} is not a readable safetensors file: {error}") from error


def _require_none(folder: Path, verb: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_MAX_NAMED])
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise OperatorError(f"checkpoint {folder} {verb} tensors: {shown}{more}")
