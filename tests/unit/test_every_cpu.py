"""What torch computes for the kernels in C is rounded once, and has the same bits on every CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from common.engine.rope import Rope, RopeConfig, inverse_frequencies

PROGRAM = """
import hashlib
from types import SimpleNamespace
import torch
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Samples
from common.engine.native.backend import NativeBackend
from common.engine.rope import Llama3Scaling, Rope, RopeConfig

def told(numbers):
    print(hashlib.sha256(numbers.numpy()).hexdigest())

told(
    torch.cat(
        [Rope(config, 128, 20_000, torch.device("cpu")).table(torch.float32) for config in (
            RopeConfig(theta=1e4),
            RopeConfig(theta=5e5, scaling=Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)),
            RopeConfig(theta=1e6),
        )]
    )
)
kernels = SimpleNamespace(add_norm=None, silu_mul=None, best=None, draw=lambda *arguments: told(arguments[5]))
samples = [
    Sample(
        params=SamplingParams(max_tokens=9, min_p=number / 1000), choice=0, position=1, token_ids=[7], prompt_len=1
    )
    for number in range(1000)
]
NativeBackend(kernels).draw(torch.zeros(1000, 2), torch.zeros(1000), Samples.of(samples))
"""
"""Prints digests of the rotation angles, among them positions at which a float32 cosine differs, and of the logarithms
of `min_p`."""


@pytest.mark.processes
def test_narrower_instructions_compute_the_same() -> None:
    """PyTorch and its libraries use none that are wider than these variables name."""
    limits: tuple[dict[str, str], ...] = (
        {},
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | limit,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.split()[-2:]
        for limit in limits
    ]
    angles, logarithms = zip(*told, strict=True)
    assert len(set(angles)) == 1
    assert len(set(logarithms)) == 1


@pytest.mark.parametrize("head_dim", [64, 80])
def test_cosines_and_sines_of_float32_angles_are_rounded_once(head_dim: int) -> None:
    """A position times a frequency is rounded to float32, as in transformers, before its cosine is taken."""
    config, half = RopeConfig(theta=1e4), head_dim // 2
    rope = Rope(config, head_dim, 131_072, torch.device("cpu"))
    table, frequencies = rope.table(torch.float32), inverse_frequencies(config, head_dim)
    positions = torch.cat((torch.arange(50), torch.arange(4090, 4100), torch.arange(131_000, 131_072)))
    angles = positions[:, None] * frequencies
    assert angles.dtype == torch.float32
    for function, found in ((math.cos, table[positions, :half]), (math.sin, table[positions, half:])):
        exact = torch.tensor([[function(each) for each in row] for row in angles.tolist()], dtype=torch.float64)
        half_a_unit = 2**-24 * exact.abs()
        assert ((found.double() - exact).abs() - half_a_unit * (1 + 1e-6)).max().item() <= 0
    cos, signed_sin = rope.angles(positions, torch.float32)
    assert torch.equal(cos[:, 0], table[positions, :half].repeat(1, 2))
    assert torch.equal(signed_sin[:, 0], torch.cat((-table[positions, half:], table[positions, half:]), dim=1))
