"""Draws random tokens from logits, in torch. Shapes: P rows (one for each sample), V vocabulary.

Every filter is one batched operation on the rows whose parameters ask for it, and on no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common.engine.batch import Sample
from common.engine.philox import uniforms

_TOP_P_CANDIDATES = 256
"""Number of the most likely tokens in which the cutoff of top-p is searched, before whole rows are sorted."""
_MIN_TEMPERATURE = 1e-30
"""Least temperature that is used. A smaller one would leave the range of float32. Far above this value, tokens other
than the most likely one already have no chance."""
_HIDDEN = float("-inf")


def draw(logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Draw a token for each row by its sample's parameters and random number, `[P]` int64.

    `best_P` is the largest logit of each row. The order is: temperature, top-k, top-p, min-p, and the inverse of the
    cumulative distribution. A row with NaN gets an arbitrary token.
    """
    device = logits_PV.device
    x_PV = _scaled(logits_PV, best_P, samples)
    for hide, concerned in (
        (_hide_below_top_k, [0 < each.params.top_k < x_PV.shape[1] for each in samples]),
        (_hide_beyond_top_p, [each.params.top_p < 1.0 for each in samples]),
        (_hide_below_min_p, [each.params.min_p > 0.0 for each in samples]),
    ):
        rows = [row for row, concerns in enumerate(concerned) if concerns]
        if rows:
            index = torch.tensor(rows, device=device)
            x_PV[index] = hide(x_PV[index], [samples[row] for row in rows])
    cumulative_PV = x_PV.exp_().cumsum(dim=-1, dtype=torch.float64)
    random_P = random_numbers(samples)
    # The first token at which the cumulative weight reaches a number in (0, total). Its own weight is above 0.
    wanted_P1 = torch.from_numpy(random_P).to(device)[:, None] * cumulative_PV[:, -1:]
    return torch.searchsorted(cumulative_PV, wanted_P1)[:, 0].clamp_(max=x_PV.shape[1] - 1)  # NaN in a row: any token


def temperatures(samples: Sequence[Sample]) -> list[float]:
    """The temperature of each sample, at least `_MIN_TEMPERATURE`."""
    return [max(each.params.temperature, _MIN_TEMPERATURE) for each in samples]


def random_numbers(samples: Sequence[Sample]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One random number in (0, 1) for each sample, `[P]` float64. It depends only on (seed, choice, position)."""
    return uniforms(
        [each.params.seed for each in samples],
        [each.choice for each in samples],
        [each.position for each in samples],
    )


def _scaled(x_PV: torch.Tensor, best_P: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """(logit - largest logit) / temperature. The most likely token is at 0, however small the temperature."""
    temperature_P = torch.tensor(temperatures(samples)).to(x_PV.device)
    return (x_PV - best_P[:, None]).div_(temperature_P[:, None])


def _hide_below_top_k(x_PV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Keep the k largest values of each row, and values equal to the k-th."""
    ranks_P1 = torch.tensor([[each.params.top_k - 1] for each in samples], device=x_PV.device)
    largest = x_PV.topk(int(ranks_P1.max()) + 1, dim=-1).values
    return x_PV.masked_fill_(x_PV < largest.gather(1, ranks_P1), _HIDDEN)


def _hide_beyond_top_p(x_PV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Keep the fewest largest values of each row whose probabilities reach p, and values equal to the last of them."""
    top_p_P1 = torch.tensor([[each.params.top_p] for each in samples], device=x_PV.device)
    total_P1 = x_PV.logsumexp(dim=-1, keepdim=True)
    largest = x_PV.topk(min(_TOP_P_CANDIDATES, x_PV.shape[1]), dim=-1).values
    cutoff_P1, reached_P = _top_p_cutoff(largest, total_P1, top_p_P1)
    flat = torch.nonzero(~reached_P)[:, 0]
    if flat.numel():
        everything = x_PV[flat].sort(dim=-1, descending=True).values
        cutoff_P1[flat], _ = _top_p_cutoff(everything, total_P1[flat], top_p_P1[flat])
    return x_PV.masked_fill_(x_PV < cutoff_P1, _HIDDEN)


def _top_p_cutoff(
    largest: torch.Tensor, total_P1: torch.Tensor, top_p_P1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cutoff of top-p, `[P, 1]`, and whether it was found, `[P]` bool.

    `largest` holds the largest values of each row, in descending order. The cutoff is the value whose probability lets
    the sum of probabilities reach p. It is found if the sum over all of `largest` reaches p.
    """
    probabilities = (largest - total_P1).exp()
    mass = probabilities.cumsum(dim=-1)
    last_P1 = ((mass - probabilities < top_p_P1).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # p may round to 0
    return largest.gather(1, last_P1), mass[:, -1] >= top_p_P1[:, 0]


def _hide_below_min_p(x_PV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Keep tokens that are at least p times as likely as the most likely token, which is at 0."""
    floor_P1 = torch.tensor([[each.params.min_p] for each in samples], dtype=x_PV.dtype, device=x_PV.device).log()
    return x_PV.masked_fill_(x_PV < floor_P1, _HIDDEN)
