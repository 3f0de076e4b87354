"""What every rank of a worker does: it computes rows of tokens, and moves blocks of its part of the cache.

A worker of one rank has one executor. In a group each rank has its own; rank 0's tells the others to do what it does
(`common.engine.orders`). Methods return before a GPU has done its part, and what they ask for happens in the order of
the calls.

Shapes: R rows of logits, N samples of the step before, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.backend import Backend
from common.engine.batch import NO_SAMPLE, Ints
from common.engine.graphs import DecodeGraphs
from common.engine.group import Group
from common.engine.host_copy import to_device
from common.engine.host_swap import HostSwap
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder, Hidden
from common.engine.penalties import LastTokens
from common.engine.ragged import Rows
from common.engine.sampler import Likeliest
from common.engine.warm_up import decode_batches, few_rows
from common.engine.weights import Progress

Pairs = Sequence[tuple[int, int]]
"""(from, to): numbers of blocks, or of a block and a host slot."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step has computed of its rows."""

    logits_RV: torch.Tensor
    """The sampler may change it. Arbitrary at a rank that gets no logits (`Decoder.leads`)."""
    last_tokens: LastTokens
    likeliest: Likeliest | None = None
    """The most likely tokens, if they are known."""


class Executor:
    """A rank's part of the model, of its KV cache and of the swap space. One thread calls it."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, swap: HostSwap, backend: Backend, group: Group | None = None
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.swap = swap
        self.backend = backend
        self._group = group
        self.graphs: DecodeGraphs | None = None
        self._hidden: Hidden | None = None
        self.moved = False
        """Whether blocks have been moved since the last `join`."""

    def capture_graphs(self, max_num_seqs: int, progress: Progress | None = None) -> None:
        """Capture CUDA graphs for steps of decode tokens alone, of up to `max_num_seqs` sequences. Needs a GPU."""
        layout = self.cache.layout
        longest = min(self.decoder.config.max_sequence_tokens, self.cache.num_slots)
        graphs = DecodeGraphs(
            self.decoder,
            self.cache,
            self.backend,
            max_num_seqs=max_num_seqs,
            max_blocks=layout.blocks_for(longest),
        )
        graphs.capture(progress)
        self.graphs = graphs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run decode attention on each batch of `decode_batches`, once for each window, and compute batches of few
        rows, for which a GPU may have kernels of their own. Writes to block 0."""
        config, cache = self.decoder.own_config, self.cache
        one_of_each = {window: config.windows.index(window) for window in config.windows}
        sizes = (cache.num_blocks, cache.layout.block_size, config.max_sequence_tokens)
        for batch in decode_batches(*sizes, cache.device, self.backend.invariant_run):
            q_THD = cache.blocks.new_zeros(len(batch.token_ids_T), config.num_heads, config.head_dim)
            for window, layer in one_of_each.items():
                self.backend.attend(q_THD, cache.layer(layer), batch, window, config.head_dim**-0.5)
        for batch in few_rows(cache.device):
            self.decoder.forward(batch, cache, self.backend)
        if cache.device.type == "cuda":
            torch.cuda.empty_cache()  # many of the longest sequences, as above, are in no step: give their memory back

    @torch.inference_mode()
    def compute(self, rows: Rows, chosen_N: torch.Tensor, *, after_swaps: bool = False) -> StepLogits:
        """Compute the rows, store their KV, and return their logits, which a later call may overwrite.

        `chosen_N` are the tokens that the samples of the step before have chosen; zeros at all ranks but rank 0. With
        `after_swaps` the rows wait for the swaps that are under way.
        """
        self._hidden = None
        if after_swaps:
            self.swap.join()
        if self._group is not None and (rows.follows_B != NO_SAMPLE).any():
            chosen_N = self._group.add(chosen_N.float()).long()  # a float32 holds every token exactly
        replayed = None if self.graphs is None else self.graphs.compute(rows, chosen_N)
        if self.graphs is not None and replayed is not None:
            return StepLogits(replayed.logits_NV, self.graphs.last_tokens, replayed.likeliest)
        batch = rows.on(self.cache.device)
        batch.follow(rows.follows_B, chosen_N)
        self._hidden = self.decoder.hidden(batch, self.cache, self.backend)
        logits_RV = self.decoder.logits(self._hidden, batch.logit_rows_R, self.backend)
        return StepLogits(logits_RV, batch.last_tokens)

    @torch.inference_mode()
    def logits(self, rows_R: Ints) -> torch.Tensor:
        """Logits `[R, V]` of tokens of the last batch, which must not have been computed by a graph."""
        assert self._hidden is not None, "nothing has been computed"
        return self.decoder.logits(self._hidden, to_device(rows_R, torch.int64, self.cache.device), self.backend)

    @torch.inference_mode()
    def clear(self, blocks: Ints) -> None:
        """Zero these blocks."""
        self.cache.begin(to_device(blocks, torch.int64, self.cache.device))
        self.moved = True

    def copy_block(self, src: int, dst: int) -> None:
        """Copy the KV of block `src` to block `dst`."""
        self.swap.join()
        self.cache.copy_block(src, dst)
        self.moved = True

    def swap_out(self, pairs: Pairs) -> None:
        """Copy the KV of blocks to host memory: pairs (block, host slot)."""
        self.swap.swap_out(self.cache, pairs)
        self.moved = True

    def swap_in(self, pairs: Pairs) -> None:
        """Copy KV from host memory to blocks: pairs (host slot, block)."""
        self.swap.swap_in(self.cache, pairs)
        self.moved = True

    @torch.inference_mode()
    def join(self) -> None:
        """Let everything that is asked for later wait until every rank has moved its part of every block."""
        self.swap.join()
        if self.moved and self._group is not None:
            self._group.add(torch.zeros(1, device=self.cache.device))
        self.moved = False
