"""What rank 0 of a group tells the others to compute: an array of numbers for each order. Ranks run no scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from common.engine.backend import Backend
from common.engine.batch import Ints
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder, Hidden
from common.engine.native.group import SharedGroup
from common.engine.ragged import RaggedBatch

_BATCH, _LOGITS = 1, 2


class LeadingDecoder(Decoder):
    """The decoder of rank 0: the others compute what it computes."""

    _group: SharedGroup

    def hidden(self, batch: RaggedBatch, cache: KVCache, backend: Backend) -> Hidden:
        """See `Decoder.hidden`. Once it returns, the KV of all ranks is stored."""
        with self._or_end():
            self._group.tell(batch_order(batch))
            return super().hidden(batch, cache, backend)

    def logits(self, hidden: Hidden, rows_R: torch.Tensor, backend: Backend) -> torch.Tensor:
        """See `Decoder.logits`."""
        with self._or_end():
            if rows_R.numel():
                self._group.tell((np.array([_LOGITS]), rows_R.numpy()))
            return super().logits(hidden, rows_R, backend)

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """After an error the ranks are not at the same place any more."""
        try:
            yield
        except BaseException:
            self._group.end()
            raise


def follow(decoder: Decoder, cache: KVCache, backend: Backend, group: SharedGroup) -> None:
    """Compute what rank 0 says, for ever. Raises `GroupEndedError` when the group ends."""
    hidden: Hidden | None = None
    while True:
        order = group.hear()
        if order[0] == _BATCH:
            hidden = decoder.hidden(batch_of(order), cache, backend)
        else:
            assert hidden is not None, "logits of nothing"
            decoder.logits(hidden, torch.from_numpy(order[1:]), backend)


def batch_order(batch: RaggedBatch) -> list[Ints]:
    """The order to compute a batch, in parts."""
    num_slices, num_blocks = batch.block_tables_BM.shape
    sizes = (batch.num_tokens, num_slices, num_blocks, batch.begun_blocks.numel(), batch.logit_rows_R.numel())
    tensors = (
        batch.token_ids_T,
        batch.positions_T,
        batch.slot_blocks_T,
        batch.slot_offsets_T,
        batch.begun_blocks,
        batch.query_start_B1,
        batch.seq_lens_B,
        batch.block_tables_BM,
        batch.logit_rows_R,
    )
    return [np.array((_BATCH, batch.block_size, *sizes)), *(each.numpy() for each in tensors)]


def batch_of(order: Ints) -> RaggedBatch:
    """The batch that is to be computed, from an order whose parts lie one after another."""
    _, block_size, num_tokens, num_slices, num_blocks, num_begun, num_logits = order[:7].tolist()
    of_tokens, tables = (num_tokens,) * 4, num_slices * num_blocks
    sizes = (*of_tokens, num_begun, num_slices + 1, num_slices, tables, num_logits)
    token_ids, positions, slot_blocks, slot_offsets, begun, starts, lens, tables_flat, logit_rows = torch.split(
        torch.from_numpy(order[7:]), list(sizes)
    )
    return RaggedBatch(
        token_ids_T=token_ids,
        positions_T=positions,
        slot_blocks_T=slot_blocks,
        slot_offsets_T=slot_offsets,
        begun_blocks=begun,
        query_start_B1=starts,
        seq_lens_B=lens,
        block_tables_BM=tables_flat.view(num_slices, num_blocks),
        logit_rows_R=logit_rows,
        block_size=block_size,
        num_tokens=num_tokens,
        query_lens=tuple(starts.diff().tolist()),
        seq_lens=tuple(lens.tolist()),
    )
