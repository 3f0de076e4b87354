"""Log probabilities of chosen tokens, and of a prompt's own tokens.

Scoring a prompt needs every row of its logits. They are computed, and dropped, some rows at a time. Shapes: W rows
whose log probabilities are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, count

import numpy as np
import torch

from common.contract.messages.fields import LEAST_LOGPROB
from common.contract.messages.worker import TokenScores
from common.engine.batch import Ints, InvalidLogitsError, Scored, Slice
from common.engine.host_copy import HostCopy, to_device

LOGITS_BYTES = 64 * 2**20
"""Most bytes of a prompt's logits in float32 that exist at once. Results computed from them take twice that in
addition."""


def log_softmax_of(
    logits_WV: torch.Tensor, tokens_W: torch.Tensor, num_alternatives: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All log probabilities `[W, V]`, those of `tokens_W`, `[W]`, and values and tokens of the most likely ones."""
    logprobs_WV = logits_WV.log_softmax(dim=-1)
    taken_W = logprobs_WV.gather(1, tokens_W[:, None])[:, 0]
    top = logprobs_WV.topk(min(num_alternatives, logits_WV.shape[1]), dim=-1)
    return logprobs_WV, taken_W, top.values, top.indices


class Scores:
    """Log probabilities and ranks of the scored tokens of a step's slices, which are being copied to the host."""

    def __init__(
        self,
        slices: Sequence[Slice],
        logits: Callable[[Ints], torch.Tensor],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`logits` returns the rows of logits of the batch's tokens at the given places."""
        self._slices = slices
        starts = accumulate((len(each.token_ids) for each in slices), initial=0)
        places = chain.from_iterable(
            range(start, start + len(each.scored)) for start, each in zip(starts, slices, strict=False)
        )
        rows_W = np.fromiter(places, np.int64)
        tokens_W = to_device([token for each in slices for token in each.scored], torch.int64, device)
        num_alternatives = max(each.num_alternatives for each in slices)
        num_rows = max(1, LOGITS_BYTES // (4 * vocab_size))
        parts = []
        for begin, tokens in zip(count(0, num_rows), torch.split(tokens_W, num_rows), strict=False):
            rows = rows_W[begin : begin + num_rows]
            logprobs, taken, values, indices = log_softmax_of(logits(rows).float(), tokens, num_alternatives)
            ranks = (logprobs >= taken[:, None]).sum(dim=-1)
            parts.append((taken.clamp(min=LEAST_LOGPROB), ranks, values.clamp(min=LEAST_LOGPROB), indices))
        self._copy = HostCopy(*(torch.cat(each) for each in zip(*parts, strict=True)), device=device)

    def outcomes(self) -> list[Scored]:
        """One outcome for each slice, with all tokens that the slice scores. Waits for the device."""
        taken_W, ranks_W, values, tokens = self._copy.wait()
        outcomes: list[Scored] = []
        begin = 0
        for each in self._slices:
            part, num = slice(begin, begin + len(each.scored)), each.num_alternatives
            begin = part.stop
            if taken_W[part].isfinite().all():
                outcomes.append(
                    TokenScores(
                        logprobs=tuple(taken_W[part].tolist()),
                        ranks=tuple(ranks_W[part].tolist()),
                        top_token_ids=tuple(tokens[part, :num].flatten().tolist()),
                        top_logprobs=tuple(values[part, :num].flatten().tolist()),
                    )
                )
            else:
                message = f"log probabilities of the prompt from position {each.start + 1} on are not numbers"
                outcomes.append(InvalidLogitsError(message))
        return outcomes
