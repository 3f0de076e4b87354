"""From logits to random tokens, in torch. Shapes: P rows (one for each sample), V vocabulary.

Every step is a batched operation on the rows whose parameters ask for it, and on no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common.engine.batch import Sample
from common.engine.philox import uniforms

_TOP_P_CANDIDATES = 256
"""Most likely tokens among which the end of top-p is looked for before all are sorted."""
_MIN_TEMPERATURE = 1e-30
"""Below this a temperature would leave float32; what is not the most likely token is hopeless long before."""
_HIDDEN = float("-inf")


def draw(logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """A token for each row, whose largest logit is `best_P`, by its sample's parameters and random number.

    In order: temperature, top-k, top-p, min-p, and the inverse of the cumulative distribution.
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
    # The first token at which the distribution reaches a number in (0, total): never one of probability 0.
    wanted_P1 = torch.from_numpy(random_P).to(device)[:, None] * cumulative_PV[:, -1:]
    return torch.searchsorted(cumulative_PV, wanted_P1)[:, 0].clamp_(max=x_PV.shape[1] - 1)  # of a row with NaN, any


def temperatures(samples: Sequence[Sample]) -> list[float]:
    """Of each, as far as float32 goes."""
    return [max(each.params.temperature, _MIN_TEMPERATURE) for each in samples]


def random_numbers(samples: Sequence[Sample]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """In (0, 1), by seed, choice and position."""
    return uniforms(
        [each.params.seed for each in samples],
        [each.choice for each in samples],
        [each.position for each in samples],
    )


def _scaled(x_PV: torch.Tensor, best_P: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Logits over temperature; the most likely token is at 0, however small the temperature."""
    temperature_P = torch.tensor(temperatures(samples)).to(x_PV.device)
    return (x_PV - best_P[:, None]).div_(temperature_P[:, None])


def _hide_below_top_k(x_PV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Keep the k largest of each row, and what equals the last of them."""
    ranks_P1 = torch.tensor([[each.params.top_k - 1] for each in samples], device=x_PV.device)
    largest = x_PV.topk(int(ranks_P1.max()) + 1, dim=-1).values
    return x_PV.masked_fill_(x_PV < largest.gather(1, ranks_P1), _HIDDEN)


def _hide_beyond_top_p(x_PV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Keep the fewest largest of each row whose probabilities reach p, and what equals the last of them."""
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
    """Of the largest of each row, best first, the one whose probability lets their sum reach p; whether it does."""
    probabilities = (largest - total_P1).exp()
    mass = probabilities.cumsum(dim=-1)
    last_P1 = ((mass - probabilities < top_p_P1).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # p may round to 0
    return largest.gather(1, last_P1), mass[:, -1] >= top_p_P1[:, 0]


def _hide_below_min_p(x_PV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Keep what is at least p times as likely as the most likely token, which is at 0."""
    floor_P1 = torch.tensor([[each.params.min_p] for each in samples], dtype=x_PV.dtype, device=x_PV.device).log()
    return x_PV.masked_fill_(x_PV < floor_P1, _HIDDEN)
