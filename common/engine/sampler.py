"""From logits to tokens. A row's outcome depends on that row alone: its logits, parameters and random number.

Every step is a batched operation on the rows whose parameters ask for it, and on no others: a batch of greedy rows
costs one argmax. Shapes: N rows (one for each sample), V vocabulary, P rows that a step concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain

import numpy as np
import torch

from common.contract.messages import TokenLogprobs
from common.engine.batch import InvalidLogitsError, Sample, Sampled, SampledToken
from common.engine.philox import uniforms

_TOP_P_CANDIDATES = 256
"""Most likely tokens among which the end of top-p is looked for before all are sorted."""
_MIN_TEMPERATURE = 1e-30
"""Below this a temperature would leave float32; what is not the most likely token is hopeless long before."""
_HIDDEN = float("-inf")


def sample(
    logits_NV: torch.Tensor,
    samples: Sequence[Sample],
    eos_token_ids: Collection[int],
    best: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> list[Sampled]:
    """Choose a token for each sample from its row of `logits_NV`, which is left as it was. `best` is a backend's.

    In order: repetition, presence and frequency penalties; no ending token before `min_tokens`; log probabilities;
    then the most likely token, or temperature, top-k, top-p, min-p and the inverse of the cumulative distribution at
    the random number of (seed, choice, position).
    """
    if not samples:
        return []
    logits_NV = _penalised(logits_NV.float(), samples)
    logits_NV = _without_endings(logits_NV, samples, eos_token_ids)
    best_N, tokens_N = best(logits_NV)
    # The maximum of a row is NaN if any of it is, and infinite if nothing is left or something overflowed.
    valid = best_N.isfinite().tolist()
    random = [row for row, each in enumerate(samples) if not each.params.greedy and valid[row]]
    if random:
        rows = torch.tensor(random, device=logits_NV.device)
        scaled_PV = _scaled(logits_NV[rows], best_N[rows], [samples[row] for row in random])
        tokens_N[rows] = _drawn(scaled_PV, [samples[row] for row in random])
    token_ids = tokens_N.tolist()
    reported = _logprobs(logits_NV, tokens_N, samples, valid)
    return [
        SampledToken(token_id, reported.get(row)) if ok else InvalidLogitsError(_why(best_N[row].item(), samples[row]))
        for row, (token_id, ok) in enumerate(zip(token_ids, valid, strict=True))
    ]


def _penalised(logits_NV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Repetition penalty (prompt and output), then presence and frequency penalties (output).

    Only the cells of tokens that occur are touched: C cells, one for each (row, distinct token).
    """
    rows = [
        row
        for row, each in enumerate(samples)
        if each.params.repetition_penalty != 1.0 or each.params.presence_penalty or each.params.frequency_penalty
    ]
    if not rows:
        return logits_NV
    lengths = np.array([len(samples[row].token_ids) for row in rows])
    token_ids = np.fromiter(chain.from_iterable(samples[row].token_ids for row in rows), np.int64, int(lengths.sum()))
    row_of_token = np.repeat(np.array(rows), lengths)
    starts = np.cumsum(lengths) - lengths
    prompt_lens = np.array([samples[row].prompt_len for row in rows])
    is_output = np.arange(len(token_ids)) - np.repeat(starts + prompt_lens, lengths) >= 0

    cells, cell_of_token = np.unique(row_of_token * logits_NV.shape[1] + token_ids, return_inverse=True)
    num_output_C = torch.from_numpy(np.bincount(cell_of_token, weights=is_output)).float().to(logits_NV.device)
    row_C = torch.from_numpy(cells // logits_NV.shape[1])
    repetition_C, presence_C, frequency_C = (
        torch.tensor(
            [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in (each.params for each in samples)]
        )[row_C]
        .to(logits_NV.device)
        .T
    )
    index_C = torch.from_numpy(cells).to(logits_NV.device)
    x_C = logits_NV.take(index_C)
    x_C = torch.where(x_C > 0, x_C / repetition_C, x_C * repetition_C)
    x_C -= presence_C * (num_output_C > 0) + frequency_C * num_output_C
    return logits_NV.clone().put_(index_C, x_C)


def _without_endings(
    logits_NV: torch.Tensor, samples: Sequence[Sample], eos_token_ids: Collection[int]
) -> torch.Tensor:
    """Hide end-of-sequence and stop tokens in rows that have fewer than `min_tokens` output tokens."""
    rows: list[int] = []
    columns: list[int] = []
    vocab_size = logits_NV.shape[1]
    for row, each in enumerate(samples):
        if each.position - each.prompt_len < each.params.min_tokens:
            endings = [token for token in {*eos_token_ids, *each.params.stop_token_ids} if token < vocab_size]
            rows += [row] * len(endings)
            columns += endings
    if not rows:
        return logits_NV
    index = (torch.tensor(rows, device=logits_NV.device), torch.tensor(columns, device=logits_NV.device))
    return logits_NV.index_put(index, torch.tensor(_HIDDEN, device=logits_NV.device))


def _scaled(x_PV: torch.Tensor, best_P: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Logits over temperature, in place; the most likely token is at 0, however small the temperature."""
    temperature_P = torch.tensor([max(each.params.temperature, _MIN_TEMPERATURE) for each in samples])
    return x_PV.sub_(best_P[:, None]).div_(temperature_P.to(x_PV.device)[:, None])


def _drawn(x_PV: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Token of each row of scaled logits, which are overwritten."""
    device = x_PV.device
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
    random_P = uniforms(
        [each.params.seed for each in samples],
        [each.choice for each in samples],
        [each.position for each in samples],
    )
    # The first token at which the distribution reaches a number in (0, total): never one of probability 0.
    wanted_P1 = torch.from_numpy(random_P).to(device)[:, None] * cumulative_PV[:, -1:]
    return torch.searchsorted(cumulative_PV, wanted_P1)[:, 0]


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


def _logprobs(
    logits_NV: torch.Tensor, tokens_N: torch.Tensor, samples: Sequence[Sample], valid: Sequence[bool]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of the rows that ask for them, by row."""
    wanted = {
        row: each.params.logprobs for row, each in enumerate(samples) if each.params.logprobs is not None and valid[row]
    }
    if not wanted:
        return {}
    rows = torch.tensor(list(wanted), device=logits_NV.device)
    logprobs_PV = logits_NV[rows].log_softmax(dim=-1)
    taken = logprobs_PV.gather(1, tokens_N[rows, None])[:, 0].tolist()
    top = logprobs_PV.topk(min(max(wanted.values()), logits_NV.shape[1]), dim=-1)
    reported = {}
    for row, num, logprob, values, token_ids in zip(
        wanted, wanted.values(), taken, top.values.tolist(), top.indices.tolist(), strict=True
    ):
        # Hidden tokens have a log probability of minus infinity, which is not reported.
        best = tuple(pair for pair in zip(token_ids[:num], values[:num], strict=True) if pair[1] != _HIDDEN)
        reported[row] = TokenLogprobs(logprob=logprob, top=best)
    return reported


def _why(best: float, each: Sample) -> str:
    return f"the largest logit for position {each.position} is {best}: nothing can be sampled"
