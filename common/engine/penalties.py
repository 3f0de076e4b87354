"""Penalties on tokens that have occurred: repetition (prompt and output), then presence and frequency (output).

The host counts every token of a row but the last. A step that runs ahead does not know the last token on the host, so
the device adds it. Shapes: N rows, W of them with penalties, V vocabulary, C cells, one for each (row with penalties,
distinct token).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import torch

from common.engine.batch import Sample, Samples
from common.engine.host_copy import to_device
from common.engine.token_counts import TokenCounts

LastTokens = Callable[[], torch.Tensor]
"""Returns the last token of each row, `[N]` on the device."""


def penalise(logits_NV: torch.Tensor, samples: Samples, last_tokens: LastTokens) -> bool:
    """Apply the penalties of the rows to their float32 logits, in place; returns whether there are any.

    Only the distinct tokens of each row are sent to the device, and only their logits are read and changed.
    """
    rows = [row for row, each in samples.special.items() if each.params.penalised]
    if not rows:
        return False
    concerned = [samples.special[row] for row in rows]
    counts = [_counted(each) for each in concerned]
    in_output = [each.position > each.prompt_len for each in concerned]
    num_cells = [len(each.tokens) for each in counts]
    device, total = logits_NV.device, sum(num_cells)
    parts = [*(each.tokens for each in counts), *(each.nums for each in counts)]
    parts += [array("i", each) for each in (num_cells, rows, in_output)]
    flat = to_device(np.frombuffer(bytearray().join(parts), np.int32), torch.int32, device).long()
    tokens_C, nums_C, num_cells_W, rows_W, in_output_W = torch.split(flat, [total, total, *[len(rows)] * 3])
    params = [each.params for each in concerned]
    penalties_W3 = to_device(
        [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in params],
        torch.float32,
        device,
    )
    last_W = last_tokens()[rows_W]
    of_W = torch.arange(len(rows), device=device)
    of_C = of_W.repeat_interleave(num_cells_W, output_size=total)
    nums_C = nums_C + (tokens_C == last_W[of_C]) * in_output_W[of_C]

    # First the last tokens, as if they were new to their rows. The cells then overwrite those that are not new, so all
    # logits are read before the first is changed.
    changes = []
    for of, tokens, nums in ((of_W, last_W, in_output_W), (of_C, tokens_C, nums_C)):
        index = rows_W[of] * logits_NV.shape[1] + tokens
        repetition, presence, frequency = penalties_W3[of].unbind(1)
        x = logits_NV.take(index)
        x = torch.where(x > 0, x / repetition, x * repetition)
        num_output = nums.float()
        x -= presence * (num_output > 0) + frequency * num_output
        changes.append((index, x))
    for index, x in changes:
        logits_NV.put_(index, x)
    return True


def _counted(sample: Sample) -> TokenCounts:
    """Count all tokens of the sample but the last."""
    counts = sample.counts or TokenCounts(sample.token_ids, sample.prompt_len, sample.params)
    if sample.draft:
        return counts.with_draft(sample.position - len(sample.draft), sample.draft[:-1])
    counts.count(sample.position - 1)
    return counts
