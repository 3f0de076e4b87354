"""How close a token was to being another one: where batches differ, so do the last bits of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos.client import Outcome

from common.engine.philox import uniforms

NEAR_TIE = 1e-5
"""A difference is excused where a logit or a probability that far off would have made it."""


def is_near_tie(folder: Path, body: Mapping[str, Any], expected: Outcome, found: Outcome) -> bool:
    """Whether two answers differ, first, where another batch may decide otherwise, and in nothing else but tokens."""
    pairs = zip(expected.tokens, found.tokens, strict=False)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    same_otherwise = (found.error, found.reason, found.usage) == ("", expected.reason, expected.usage)
    if first is None or not same_otherwise:
        return False
    margin = margin_at(folder, body, first)
    print(f"{body['temperature']=} output token {first}: margin {margin:.2g}")
    return margin < NEAR_TIE


def margin_at(folder: Path, body: Mapping[str, Any], index: int) -> float:
    """What would have to change for another output token `index` of a request to /v1/completions: in logits for a
    greedy one; in logits or probability for one with a seed and top-k, at temperature 1. By `transformers`, in float64.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    token_ids = torch.tensor([body["prompt"]])
    cache, margin = None, 0.0
    with torch.inference_mode():
        new = token_ids
        for _ in range(index + 1):
            output = model(new, past_key_values=cache, use_cache=True)
            cache, logits_V = output.past_key_values, output.logits[0, -1]
            if body["temperature"] == 0:
                best = logits_V.topk(2)
                new, margin = best.indices[:1], (best.values[0] - best.values[1]).item()
            else:
                new, margin = _drawn(logits_V, body["top_k"], body["seed"], position=token_ids.shape[1])
            new = new[None]
            token_ids = torch.cat((token_ids, new), dim=1)
    return margin


def _drawn(logits_V: Any, top_k: int, seed: int, position: int) -> tuple[Any, float]:
    """The token where the cumulative distribution reaches the random number, and how near any border is."""
    import torch

    largest = logits_V.topk(top_k + 1).values
    edge = (largest[-2] - largest[-1]).item()
    kept_V = logits_V.masked_fill(logits_V < largest[-2], -float("inf"))
    cumulative_V = kept_V.softmax(dim=-1).cumsum(dim=-1)
    wanted = torch.tensor([uniforms([seed], [0], [position])[0]])
    border = (cumulative_V[kept_V.isfinite()][:-1] - wanted).abs().min().item()
    return torch.searchsorted(cumulative_V, wanted), min(edge, border)
