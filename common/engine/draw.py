"""Draws random tokens from logits, in torch. Shapes: P rows (one for each sample), V vocabulary.

Every filter is one batched operation on the rows whose parameters ask for it, and on no others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from common.engine.batch import Samples
from common.engine.philox import uniforms

_HIDDEN = float("-inf")


def draw(logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Samples) -> torch.Tensor:
    """Draw a token for each row by its sample's parameters and random number, `[P]` int64.

    `best_P` is the largest logit of each row. The order is: temperature, top-k, top-p, min-p, and the inverse of the
    cumulative distribution. A row with NaN gets an arbitrary token.
    """
    device = logits_PV.device
    x_PV = _scaled(logits_PV, best_P, samples)
    parameters_P = samples.parameters_N
    for hide, name, concerned_P in (
        (_hide_below_top_k, "top_k", (parameters_P["top_k"] > 0) & (parameters_P["top_k"] < x_PV.shape[1])),
        (_hide_beyond_top_p, "top_p", parameters_P["top_p"] < 1.0),
        (_hide_below_min_p, "min_p", parameters_P["min_p"] > 0.0),
    ):
        rows = np.flatnonzero(concerned_P)
        if rows.size:
            index = torch.from_numpy(rows).to(device)
            values = torch.from_numpy(np.ascontiguousarray(parameters_P[name][rows])[:, None]).to(device)
            x_PV[index] = hide(x_PV[index], values)
    cumulative_PV = x_PV.exp_().cumsum(dim=-1, dtype=torch.float64)
    random_P = random_numbers(samples)
    # The first token at which the cumulative weight reaches a number in (0, total). Its own weight is above 0.
    wanted_P1 = torch.from_numpy(random_P).to(device)[:, None] * cumulative_PV[:, -1:]
    return torch.searchsorted(cumulative_PV, wanted_P1)[:, 0].clamp_(max=x_PV.shape[1] - 1)  # NaN in a row: any token


def random_numbers(samples: Samples) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One random number in (0, 1) for each sample, `[P]` float64. It depends only on (seed, choice, position)."""
    parameters_P = samples.parameters_N
    return uniforms(parameters_P["seed"], parameters_P["choice"], samples.positions_N)


def column(samples: Samples, name: str) -> torch.Tensor:
    """A parameter of each sample, `[P]`: float32, or int64 for integers."""
    values_P = torch.from_numpy(np.ascontiguousarray(samples.parameters_N[name]))
    return values_P.float() if values_P.is_floating_point() else values_P


def _scaled(x_PV: torch.Tensor, best_P: torch.Tensor, samples: Samples) -> torch.Tensor:
    """(logit - largest logit) / temperature. The most likely token is at 0, however small the temperature."""
    temperature_P = column(samples, "temperature").to(x_PV.device)
    return (x_PV - best_P[:, None]).div_(temperature_P[:, None])


def _hide_below_top_k(x_PV: torch.Tensor, top_k_P1: torch.Tensor) -> torch.Tensor:
    """Keep the k largest values of each row, and values equal to the k-th."""
    ranks_P1 = top_k_P1 - 1
    largest = x_PV.topk(int(ranks_P1.max()) + 1, dim=-1).values
    return x_PV.masked_fill_(x_PV < largest.gather(1, ranks_P1), _HIDDEN)


def _hide_beyond_top_p(x_PV: torch.Tensor, top_p_P1: torch.Tensor) -> torch.Tensor:
    """Keep the fewest largest values of each row whose probabilities reach p, and values equal to the last of them."""
    largest = x_PV.sort(dim=-1, descending=True).values
    probabilities = largest.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    last_P1 = ((before < top_p_P1.float()).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # p may round to 0
    return x_PV.masked_fill_(x_PV < largest.gather(1, last_P1), _HIDDEN)


def _hide_below_min_p(x_PV: torch.Tensor, min_p_P1: torch.Tensor) -> torch.Tensor:
    """Keep tokens that are at least p times as likely as the most likely token, which is at 0."""
    floor_P1 = min_p_P1.to(x_PV.dtype).log()
    return x_PV.masked_fill_(x_PV < floor_P1, _HIDDEN)
