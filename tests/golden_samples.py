"""Seeded samples that no upgrade may change: who asks again with the same seed gets the same answer.

The logits are plain fractions, so that no library's random numbers are in them, and every token was drawn well away
from the border between two, so that rounding does not matter: it is the same for every backend and on every machine.
"""

from __future__ import annotations

from typing import Any

import torch

from common.contract.sampling import SamplingParams
from common.engine.batch import Sample

VOCAB = 200
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 12},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
]
NAMES = [(0, 0, 1), (0, 0, 3), (0, 1, 1), (3, 0, 1), (7, 2, 5), (7, 5, 2), (2**32, 3, 91), (2**63 - 1, 15, 2000)]
"""(seed, choice, position)."""
TOKENS = [
    [194, 160, 86, 60, 64, 145, 141, 162],
    [194, 160, 81, 62, 64, 145, 143, 162],
    [194, 162, 96, 64, 64, 145, 145, 162],
    [194, 160, 92, 62, 64, 145, 143, 162],
    [194, 160, 90, 60, 64, 145, 141, 162],
    [194, 160, 90, 60, 64, 143, 141, 162],
]
"""By parameters, then by name."""


def golden_logits() -> torch.Tensor:
    """The same row for each sample."""
    row = torch.tensor([(token * 7919 % 211) / 32 - 4 for token in range(VOCAB)])
    return row.repeat(len(PARAMS) * len(NAMES), 1)


def golden_samples() -> list[Sample]:
    """One for each token of `TOKENS`."""
    return [
        Sample(
            params=SamplingParams(max_tokens=9, seed=seed, **params),
            choice=choice,
            position=position,
            token_ids=(),
            prompt_len=0,
        )
        for params in PARAMS
        for seed, choice, position in NAMES
    ]


def golden_tokens() -> list[int]:
    """What is drawn for each."""
    return [token for tokens in TOKENS for token in tokens]
