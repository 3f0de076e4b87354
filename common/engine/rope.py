"""Rotary position embeddings and their scalings, as `transformers` computes them.

Angles are float32 products, as there. Their cosines and sines are computed in float64 and rounded to float32, so that
they have the same bits on every CPU: in float32, torch's depend on the instructions that its libraries choose.

Shapes: T tokens, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_ROWS = 4096
"""Positions whose angles are computed at once, so that those in float64 take little memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Interpolation by parts with an attention temperature (YaRN, arXiv 2309.00071, sections 3.2 to 3.4)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Multiplies cosines and sines, hence the attention logits by its square."""
    beta_fast: float
    beta_slow: float
    truncate: bool


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines, `[T, 1, D]` each. The sines in the first half of D are negated. Instead, kernels in C or
Triton take a table of all positions (`Rope.table`) and the positions `[T]`."""

Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The base frequency, and how the context was extended, if it was."""

    theta: float
    scaling: Scaling | None = None


class Rope:
    """Rotation angles of a model."""

    def __init__(self, config: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        self._num_positions, self._device = num_positions, device
        self._tables: dict[torch.dtype, torch.Tensor] = {}
        self._inv_freq = inverse_frequencies(config, head_dim)
        self._factor = config.scaling.attention_factor if isinstance(config.scaling, YarnScaling) else 1.0

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Cosines and signed sines of tokens at these positions, computed in float32 and cast to `dtype`."""
        cos, sin = self.table(dtype)[positions_T].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

    def table(self, dtype: torch.dtype) -> torch.Tensor:
        """Cosines, then sines, for every position of the model's context: `[positions, D]`, half of D each. Computed at
        the first call for a `dtype`, by the CPU."""
        if dtype not in self._tables:
            self._tables[dtype] = self._computed().to(self._device, dtype)
        return self._tables[dtype]

    def _computed(self) -> torch.Tensor:
        """The table in float32."""
        half = len(self._inv_freq)
        table = torch.empty(self._num_positions, 2 * half)
        for begin in range(0, self._num_positions, _ROWS):
            rows = table[begin : begin + _ROWS]
            positions_T = torch.arange(begin, begin + len(rows))
            freqs = (positions_T[:, None].float() * self._inv_freq).double()
            rows[:, :half], rows[:, half:] = freqs.cos(), freqs.sin()
        return table.mul_(self._factor)


def rotate(x_THD: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate each pair (i, i + D/2) of every head by its token's angle."""
    cos_T1D, signed_sin_T1D = angles
    swapped = torch.roll(x_THD, x_THD.shape[-1] // 2, dims=-1)
    return x_THD * cos_T1D + swapped * signed_sin_T1D


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair, in radians, `[head_dim / 2]` float32."""
    inv_freq = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match config.scaling:
        case None:
            return inv_freq
        case LinearScaling(factor=factor):
            return inv_freq / factor
        case Llama3Scaling() as scaling:
            return _llama3(inv_freq, scaling)
        case YarnScaling() as scaling:
            return _yarn(inv_freq, scaling, config.theta, head_dim)


def _llama3(inv_freq: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    context = scaling.original_max_position_embeddings
    low_wavelen, high_wavelen = context / scaling.low_freq_factor, context / scaling.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    stretched = torch.where(wavelen > low_wavelen, inv_freq / scaling.factor, inv_freq)
    smooth = (context / wavelen - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = (wavelen >= high_wavelen) & (wavelen <= low_wavelen)
    return torch.where(between, blended, stretched)


def _yarn(inv_freq: torch.Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> torch.Tensor:
    def correction_dim(rotations: float) -> float:
        """Index, not rounded, of the pair that turns `rotations` times over the original context."""
        context = scaling.original_max_position_embeddings
        return (head_dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = correction_dim(scaling.beta_fast), correction_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The attention factor of a YaRN checkpoint that does not state one."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
