"""From logits to tokens. A row's outcome depends on that row alone: its logits, parameters and random number.

Every step is a batched operation on the rows whose parameters ask for it, and on no others: a batch of greedy rows
costs one argmax. Shapes: N rows (one for each sample), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np
import torch

from common.contract.messages import TokenLogprobs
from common.engine.backend import Backend
from common.engine.batch import InvalidLogitsError, Sample, Sampled, SampledToken

_HIDDEN = float("-inf")


def sample(
    logits_NV: torch.Tensor,
    samples: Sequence[Sample],
    eos_token_ids: Collection[int],
    backend: Backend,
) -> list[Sampled]:
    """Choose a token for each sample from its row of `logits_NV`, which is left as it was.

    In order: repetition, presence and frequency penalties; no ending token before `min_tokens`; log probabilities;
    then the most likely token, or temperature, top-k, top-p, min-p and the inverse of the cumulative distribution at
    the random number of (seed, choice, position).
    """
    if not samples:
        return []
    logits_NV = _penalised(logits_NV.float().contiguous(), samples)
    logits_NV = _without_endings(logits_NV, samples, eos_token_ids)
    best_N, tokens_N = backend.best(logits_NV)
    # The maximum of a row is NaN if any of it is, and infinite if nothing is left or something overflowed.
    valid = best_N.isfinite().tolist()
    random = [row for row, each in enumerate(samples) if not each.params.greedy and valid[row]]
    if len(random) == len(samples):
        tokens_N = backend.draw(logits_NV, best_N, samples)
    elif random:
        rows = torch.tensor(random, device=logits_NV.device)
        tokens_N[rows] = backend.draw(logits_NV[rows], best_N[rows], [samples[row] for row in random])
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
