"""`baton kv-size`: the size of a model's KV from its configuration alone. Loads no weights, and no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, CliPositionalArg, NoDecode

from common.contract.errors import OperatorError
from common.contract.kv_layout import DTYPE_BYTES, KVLayout, width_objection
from common.runtime.checkpoint import UNSTATED, read_config, resolve_model
from common.runtime.config import DEFAULTS_BY_DEVICE, DeviceType
from common.runtime.lifecycle import exit_on_operator_error
from common.runtime.options import load_options, with_prefix
from common.runtime.setting_types import Width

_PROGRAM = "baton kv-size"
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What of a model decides the size of its KV."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str | None
    """Element type of the checkpoint; None if its configuration states none."""

    def layout(self, block_size: int, dtype: str, width: int = 1) -> KVLayout:
        """Geometry of blocks of `block_size` tokens, or of what one of `width` ranks holds of them; `dtype` auto is the
        checkpoint's. Raises `OperatorError`."""
        objection = width_objection(width, self.num_heads, self.num_kv_heads)
        if objection is not None:
            raise OperatorError(objection)
        element = self.dtype if dtype == "auto" else dtype
        if element not in DTYPE_BYTES:
            stated = "none" if element is None else repr(element)
            raise OperatorError(f"the model's dtype is {stated}: choose one of {', '.join(DTYPE_BYTES)} by --dtype")
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=max(1, self.num_kv_heads // width),
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=element,
        )


KNOWN_SHAPES = {
    "llama-2-7b": KVShape(num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, dtype="float16"),
    "llama-3-8b": KVShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
    "llama-3-70b": KVShape(num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
    "qwen2.5-0.5b": KVShape(num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64, dtype="bfloat16"),
    "qwen2.5-7b": KVShape(num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128, dtype="bfloat16"),
}
"""Models whose size is told without a file or a network. The names go before folders of the same name."""


def _split(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else value


_NumTokens = Annotated[int, Field(ge=1, le=2**40)]
_Positive = Annotated[int, Field(strict=True, ge=1)]


class KVSizeSettings(BaseSettings):
    """Size of a model's KV: of a token, of a block, of sequences; without MODEL, of well-known models."""

    model_config = with_prefix("BATON_KV_SIZE_")

    model: CliPositionalArg[str | None] = Field(
        None, description=f"demo, a Hugging Face folder, a hub id, or one of {', '.join(KNOWN_SHAPES)}"
    )
    tokens: Annotated[tuple[_NumTokens, ...], NoDecode, BeforeValidator(_split)] = Field(
        (4096,), description="lengths of sequences, in tokens: N,... or the option again"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="auto: the checkpoint's")
    device: DeviceType = Field("cpu", description="device of the workers, by which their block size is")
    block_size: int = Field(0, ge=0, le=256, description="token slots in a KV block (0: 32 on a CPU, 64 on a GPU)")
    kv_cache_bytes: int | None = Field(
        None, ge=1, description="bytes of the KV cache of a worker, to say how many tokens fit"
    )
    tensor_parallel: Width = Field(1, description="ranks of a worker: the sizes are those of one rank")

    @property
    def block_slots(self) -> int:
        """Token slots in a block of such workers."""
        return self.block_size or DEFAULTS_BY_DEVICE[self.device]["block_size"]


class _Config(BaseModel):
    """The keys of `config.json` that matter here."""

    num_hidden_layers: _Positive
    num_attention_heads: _Positive
    num_key_value_heads: _Positive | None = None
    hidden_size: _Positive | None = None
    head_dim: _Positive | None = None
    dtype: str | None = Field(None, validation_alias=AliasChoices("dtype", "torch_dtype"))


def find_shape(model: str) -> KVShape:
    """The shape of a well-known model, or else of a checkpoint, which is found as a worker finds it.

    Raises `OperatorError`.
    """
    return KNOWN_SHAPES[model] if model in KNOWN_SHAPES else read_shape(resolve_model(model, weights=False))


def read_shape(folder: Path) -> KVShape:
    """The shape that `config.json` states. Raises `OperatorError` for what is missing or makes no sense."""
    path = folder / "config.json"
    try:
        stated = read_config(folder)
        config = _Config.model_validate(UNSTATED.get(str(stated.get("model_type")), {}) | stated)
    except ValidationError as error:
        problems = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors())
        raise OperatorError(f"{path}: {problems}") from error
    if config.head_dim is None and config.hidden_size is None:
        raise OperatorError(f"{path}: neither head_dim nor hidden_size is there")
    head_dim = config.head_dim or (config.hidden_size or 0) // config.num_attention_heads
    if head_dim < 1:
        raise OperatorError(
            f"{path}: a hidden_size of {config.hidden_size} is less than {config.num_attention_heads} heads"
        )
    return KVShape(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        dtype=None if config.dtype is None else config.dtype.removeprefix("torch."),
    )


def human(num_bytes: int) -> str:
    """In the largest unit that is not larger: without a fraction if that is exact, else with two decimals."""
    for unit, unit_bytes in _UNITS:
        if num_bytes >= unit_bytes:
            whole, rest = divmod(num_bytes, unit_bytes)
            return f"{num_bytes / unit_bytes:.2f} {unit}" if rest else f"{whole} {unit}"
    return f"{num_bytes} B"


def size_of_model(name: str, settings: KVSizeSettings) -> str:
    """The figures of one model, one to a line."""
    layout = find_shape(name).layout(settings.block_slots, settings.dtype, settings.tensor_parallel)
    rows = [[label, human(num_bytes), f"{num_bytes} bytes"] for label, num_bytes in _sizes(layout, settings)]
    if settings.kv_cache_bytes is not None:
        num_blocks = settings.kv_cache_bytes // (settings.tensor_parallel * layout.block_bytes)
        fitting = f"{num_blocks * layout.block_size} tokens"
        rows.append([f"fit into {human(settings.kv_cache_bytes)}", fitting, f"{num_blocks} blocks"])
    heads = f"{layout.num_kv_heads} KV heads of dimension {layout.head_dim}"
    return f"{name}: {layout.num_layers} layers, {heads}, {layout.dtype}\n{_aligned(rows)}"


def table_of_known_models(settings: KVSizeSettings) -> str:
    """The same figures, one well-known model to a line."""
    rows, left_out = [], []
    for name, shape in KNOWN_SHAPES.items():
        if width_objection(settings.tensor_parallel, shape.num_heads, shape.num_kv_heads) is not None:
            left_out.append(name)
            continue
        layout = shape.layout(settings.block_slots, settings.dtype, settings.tensor_parallel)
        cells = {
            "model": name,
            "layers": f"{layout.num_layers}",
            "KV heads": f"{layout.num_kv_heads}",
            "head dim": f"{layout.head_dim}",
            "dtype": layout.dtype,
        }
        cells |= {label: human(num_bytes) for label, num_bytes in _sizes(layout, settings)}
        if settings.kv_cache_bytes is not None:
            num_blocks = settings.kv_cache_bytes // (settings.tensor_parallel * layout.block_bytes)
            cells[f"fit into {human(settings.kv_cache_bytes)}"] = f"{num_blocks * layout.block_size} tokens"
        rows.append(cells)
    lines = [_aligned([list(rows[0]), *(list(cells.values()) for cells in rows)])] if rows else []
    if left_out:
        lines.append(f"not to be divided among {settings.tensor_parallel} ranks: {', '.join(left_out)}")
    return "\n".join(lines)


def _sizes(layout: KVLayout, settings: KVSizeSettings) -> Iterator[tuple[str, int]]:
    """What is measured, and its bytes; sequences take whole blocks, as they do in a worker."""
    yield "per token", layout.token_bytes
    yield f"per block of {layout.block_size}", layout.block_bytes
    for num_tokens in settings.tokens:
        yield f"{num_tokens} tokens", layout.blocks_for(num_tokens) * layout.block_bytes


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines with the first column flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def main() -> None:
    """`baton kv-size [MODEL]`."""
    exit_on_operator_error(_print_sizes)


def _print_sizes() -> None:
    settings = load_options(KVSizeSettings, _PROGRAM, sys.argv[1:], (KVSizeSettings,))
    if settings.model is None:
        print(table_of_known_models(settings))
    else:
        print(size_of_model(settings.model, settings))
