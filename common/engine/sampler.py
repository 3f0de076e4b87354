"""Chooses tokens from logits. A row's outcome depends on that row alone: its logits, parameters and random number.

Every operation is batched over the rows whose parameters ask for it, and over no others: a batch of greedy rows costs
one argmax. Shapes: N rows (one for each sample), V vocabulary, C cells, one for each (row, biased token).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from common.contract.errors import Cause
from common.contract.messages.worker import TokenLogprobs
from common.engine.backend import Backend
from common.engine.batch import Chosen, Ints, InvalidLogitsError, Sampled, SampledToken, Samples
from common.engine.host_copy import HostCopy, to_device
from common.engine.logprobs import log_softmax_of
from common.engine.penalties import LastTokens, penalise

_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class _Reported:
    """Log probabilities and most likely tokens of the W rows that ask for them, on the device."""

    rows: list[int]
    nums: list[int]
    """How many of the most likely tokens each row asks for."""
    taken_W: torch.Tensor
    top_values: torch.Tensor
    top_tokens: torch.Tensor


class Likeliest:
    """The most likely token of each row of logits, and its logit, in one buffer: one copy brings both to the host."""

    _TOKEN_BYTES, _ROW_BYTES = 8, 12

    def __init__(self, buffer: torch.Tensor, num_rows: int) -> None:
        self.buffer = buffer
        """Bytes: the tokens of all rows that it has room for, int64, then their logits, float32."""
        self._num_rows = num_rows
        room = buffer.numel() // self._ROW_BYTES
        self.tokens_N = buffer[: self._TOKEN_BYTES * room].view(torch.int64)[:num_rows]
        self.best_N = buffer[self._TOKEN_BYTES * room :].view(torch.float32)[:num_rows]

    @classmethod
    def empty(cls, room: int, device: torch.device) -> Likeliest:
        """A buffer with room for `room` rows, all of them in use."""
        even = room + room % 2  # so that the logits begin at a multiple of 16 bytes, as kernels like it
        return cls(torch.empty(even * cls._ROW_BYTES, dtype=torch.uint8, device=device), room)

    def first(self, num_rows: int) -> Likeliest:
        """The first rows, in the same buffer."""
        return Likeliest(self.buffer, num_rows)

    def fill(self, logits_NV: torch.Tensor, backend: Backend) -> None:
        """Find them in float32 logits."""
        best_N, tokens_N = backend.best(logits_NV)
        self.tokens_N.copy_(tokens_N)
        self.best_N.copy_(best_N)

    def read(self, host_buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and logits in a copy of the buffer."""
        copied = Likeliest(host_buffer, self._num_rows)
        return copied.tokens_N, copied.best_N


class ChosenOnDevice:
    """The tokens of a step, chosen on the device, and their copy to the host, which arrives later."""

    def __init__(
        self,
        samples: Samples,
        tokens_N: torch.Tensor,
        best_N: torch.Tensor,
        reported: _Reported | None,
        likeliest: Likeliest | None = None,
    ) -> None:
        """`likeliest` is where `tokens_N` and `best_N` lie, if they lie side by side."""
        self.tokens_N = tokens_N
        """Tokens on the device. A row that cannot be sampled from has an arbitrary token."""
        self._samples = samples
        self._reported = reported
        self._likeliest = likeliest
        chosen = (tokens_N, best_N) if likeliest is None else (likeliest.buffer,)
        more = () if reported is None else (reported.taken_W, reported.top_values, reported.top_tokens)
        self._copy = HostCopy(*chosen, *more, device=tokens_N.device)

    def chosen(self) -> Chosen:
        """The result of each sample; waits for the device."""
        if self._likeliest is None:
            tokens_N, best_N, *more = self._copy.wait()
        else:
            buffer, *more = self._copy.wait()
            tokens_N, best_N = self._likeliest.read(buffer)
        token_ids = tokens_N.tolist()
        told: dict[int, Sampled] = {}
        if self._reported is not None:
            taken, values, tokens = (each.tolist() for each in more)
            of_rows = zip(self._reported.rows, self._reported.nums, taken, values, tokens, strict=True)
            for row, num, logprob, row_values, row_tokens in of_rows:
                # Hidden tokens have a log probability of minus infinity, which is not reported.
                best = tuple(
                    pair for pair in zip(row_tokens[:num], row_values[:num], strict=True) if pair[1] != _HIDDEN
                )
                told[row] = SampledToken(token_ids[row], TokenLogprobs(logprob=logprob, top=best))
        # The maximum of a row is NaN if one of its logits is, and infinite if no token is left or a logit overflowed.
        finite_N = np.isfinite(best_N.numpy())
        if not finite_N.all():
            for row in np.flatnonzero(~finite_N).tolist():
                told[row] = _invalid(float(best_N[row]), self._samples, row)
        return Chosen(token_ids, told)


def choose(
    logits_NV: torch.Tensor,
    samples: Samples,
    eos_token_ids: Collection[int],
    backend: Backend,
    last_tokens: LastTokens,
    likeliest: Likeliest | None = None,
) -> ChosenOnDevice:
    """Choose a token for each sample from its row of `logits_NV`. Does not wait for the device. Changes float32 logits
    in place, for the rows whose parameters ask for it: a copy of all rows would cost more than the choice.

    In order: repetition, presence and frequency penalties; biases; what the grammars allow; no ending token before
    `min_tokens`; log probabilities; then the most likely token, or temperature, top-k, top-p, min-p and the inverse of
    the cumulative distribution at the random number of (seed, choice, position). `last_tokens` gives each row's token
    before the one to come. `likeliest` is what is already known of `logits_NV`; it counts if no row changes its logits.
    """
    logits_NV = logits_NV.float().contiguous()
    if samples.special:
        changes = (
            penalise(logits_NV, samples, last_tokens),
            _bias(logits_NV, samples),
            _keep_to_grammars(logits_NV, samples),
            _hide_endings(logits_NV, samples, eos_token_ids),
        )
        if any(changes):
            likeliest = None
    random = np.flatnonzero(samples.parameters_N["temperature"])
    if likeliest is None:
        best_N, tokens_N = backend.best(logits_NV)
    else:
        best_N, tokens_N = likeliest.best_N, likeliest.tokens_N
    if random.size and random.size == len(samples):
        tokens_N = backend.draw(logits_NV, best_N, samples)
        likeliest = None
    elif random.size:
        rows = to_device(random, torch.int64, logits_NV.device)
        tokens_N[rows] = backend.draw(logits_NV[rows], best_N[rows], samples.take(random))
    return ChosenOnDevice(samples, tokens_N, best_N, _report(logits_NV, tokens_N, samples), likeliest)


def _bias(logits_NV: torch.Tensor, samples: Samples) -> bool:
    """Add the biases of the rows, in place; returns whether there are any. Biases of tokens beyond the vocabulary are
    ignored."""
    vocab_size, device = logits_NV.shape[1], logits_NV.device
    biased = {row: each.params.logit_bias for row, each in samples.special.items() if each.params.logit_bias}
    if not biased:
        return False
    cells = [_bias_cells(each, vocab_size) for each in biased.values()]
    rows_C = np.repeat(list(biased), [len(tokens) for tokens, _ in cells])
    tokens_C, biases_C = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    index = (to_device(rows_C, torch.int64, device), to_device(tokens_C, torch.int64, device))
    logits_NV[index] += to_device(biases_C, torch.float32, device)
    return len(tokens_C) > 0


@lru_cache(maxsize=64)
def _bias_cells(
    logit_bias: tuple[tuple[int, float], ...], vocab_size: int
) -> tuple[Ints, np.ndarray[Any, np.dtype[np.float32]]]:
    """The tokens of `logit_bias` that are in the vocabulary, and their biases. They are kept, since every step of every
    choice of a request needs them: to hash the pairs takes a fraction of the time that it takes to make arrays."""
    pairs = [pair for pair in logit_bias if pair[0] < vocab_size]
    tokens = np.fromiter((token for token, _ in pairs), np.int64, len(pairs))
    return tokens, np.fromiter((bias for _, bias in pairs), np.float32, len(pairs))


def _keep_to_grammars(logits_NV: torch.Tensor, samples: Samples) -> bool:
    """Hide the tokens that the grammars of W of the rows do not allow, in place; returns whether there are such
    rows."""
    rows = [row for row, each in samples.special.items() if each.params.grammar is not None]
    if not rows:
        return False
    bits = []
    for row in rows:
        allowed = samples.special[row].allowed
        assert allowed is not None, "it is in no step before that is known"
        bits.append(allowed)
    device = logits_NV.device
    bytes_W = to_device(np.frombuffer(b"".join(bits), np.uint8).reshape(len(rows), -1).copy(), torch.uint8, device)
    allowed_WV = (bytes_W[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten(1).bool()
    index_W = to_device(rows, torch.int64, device)
    within_WV = logits_NV[index_W].masked_fill_(~allowed_WV[:, : logits_NV.shape[1]], _HIDDEN)
    logits_NV.index_copy_(0, index_W, within_WV)
    return True


def _hide_endings(logits_NV: torch.Tensor, samples: Samples, eos_token_ids: Collection[int]) -> bool:
    """Hide end-of-sequence and stop tokens, in place, in rows that have fewer than `min_tokens` output tokens; returns
    whether any are hidden."""
    rows: list[int] = []
    columns: list[int] = []
    vocab_size = logits_NV.shape[1]
    for row, each in samples.special.items():
        if each.position - each.prompt_len < each.params.min_tokens:
            endings = [token for token in {*eos_token_ids, *each.params.stop_token_ids} if 0 <= token < vocab_size]
            rows += [row] * len(endings)
            columns += endings
    if not rows:
        return False
    device = logits_NV.device
    index = (to_device(rows, torch.int64, device), to_device(columns, torch.int64, device))
    logits_NV.index_put_(index, logits_NV.new_full((), _HIDDEN))
    return True


def _report(logits_NV: torch.Tensor, tokens_N: torch.Tensor, samples: Samples) -> _Reported | None:
    """Log probabilities of the rows that ask for them; None if no row does."""
    wanted = {row: each.params.logprobs for row, each in samples.special.items() if each.params.logprobs is not None}
    if not wanted:
        return None
    rows = to_device(list(wanted), torch.int64, logits_NV.device)
    _, taken_W, values, tokens = log_softmax_of(logits_NV[rows], tokens_N[rows], max(wanted.values()))
    return _Reported(list(wanted), list(wanted.values()), taken_W, values, tokens)


def _invalid(best: float, samples: Samples, row: int) -> InvalidLogitsError:
    position = int(samples.positions_N[row])
    if row in samples.special and samples.special[row].params.grammar is not None and best == _HIDDEN:
        return InvalidLogitsError(f"no token goes on within the grammar at position {position}", Cause.INVALID)
    return InvalidLogitsError(f"the largest logit for position {position} is {best}: nothing can be sampled")
