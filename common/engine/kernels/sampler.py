"""Chooses tokens from logits: the most likely one, or a random one as `common.engine.draw` does, but without a sort.

A row is cut into chunks, so that a small batch fills the device. A random token takes one pass that sums the weights of
each chunk, and a search within the chunk in which the cumulative weight reaches the random number.

A row with top-k or top-p takes two passes before. They gather the few tokens that can be kept into a window. The
*distance* of a token is how far its logit is below the largest one, over the temperature. The first pass counts and
weighs the tokens within each of sixteen distances, the *rungs*. The second pass gathers the tokens within the least
rung that holds enough, in number (top-k) or in weight (top-p). If a distribution is so flat that they do not fit into
the window, the whole row is searched instead.

Among the gathered tokens, the kernel then searches the largest distance that is kept. A distance is a float that is not
negative, and such floats are ordered as their bits are. So it is found four bits at a time: by the number, or the
weight, of the tokens below each of sixteen edges.

Shapes: N rows, V vocabulary, C chunks, R rungs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.engine.kernels.tiles import num_tiles, padded

_CHUNK = 8192
"""Tokens per chunk."""
_TILE = 1024
_NUM_RUNGS = 16
"""Number of rungs: distances from the largest logit, within each of which tokens are counted and weighed."""
_WINDOW = 4096
"""Most tokens that the window holds."""
_EVERYTHING = tl.constexpr(0x7F800000)
"""The bits of infinity, as a limit that keeps every token."""


def best(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row, float32, NaN if the row has one, and its token, int64. Of equal logits, the first
    one counts."""
    num_rows, size = logits_NV.shape
    num_chunks = num_tiles(size, _CHUNK)
    values_NC = logits_NV.new_empty(num_rows, num_chunks)
    tokens_NC = logits_NV.new_empty(num_rows, num_chunks, dtype=torch.int32)
    best_N = logits_NV.new_empty(num_rows)
    token_N = logits_NV.new_empty(num_rows, dtype=torch.int64)
    assert logits_NV.stride(1) == 1
    _best_of_chunks[num_rows, num_chunks](
        logits_NV, values_NC, tokens_NC, size, logits_NV.stride(0), CHUNK=_CHUNK, TILE=_TILE, num_warps=4
    )
    _best[(num_rows,)](
        values_NC, tokens_NC, best_N, token_N, num_chunks, CHUNKS_PAD=padded(num_chunks, least=1), num_warps=1
    )
    return best_N, token_N


@triton.jit
def _best_of_chunks(
    logits_ptr, values_ptr, tokens_ptr, size, stride, CHUNK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = chunk * CHUNK
    best = float("-inf")
    token = begin
    spoiled = 0
    for start in range(begin, min(begin + CHUNK, size), TILE):
        columns = start + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + row * stride + columns, mask=columns < size, other=float("-inf"))
        spoiled += tl.sum((logits != logits).to(tl.int32), axis=0)
        highest = tl.max(logits, axis=0)
        first = tl.min(tl.where(logits == highest, columns, size), axis=0)
        token = tl.where(highest > best, first, token)
        best = tl.maximum(highest, best)
    place = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + place, tl.where(spoiled > 0, float("nan"), best))
    tl.store(tokens_ptr + place, token)


@triton.jit
def _best(values_ptr, tokens_ptr, best_ptr, token_ptr, num_chunks, CHUNKS_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PAD)
    inside = chunks < num_chunks
    values = tl.load(values_ptr + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * num_chunks + chunks, mask=inside, other=0x7FFFFFFF)
    spoiled = tl.max((values != values).to(tl.int32), axis=0)
    clean = tl.where(values != values, float("-inf"), values)
    highest = tl.max(clean, axis=0)
    tl.store(best_ptr + row, tl.where(spoiled > 0, float("nan"), highest))
    tl.store(token_ptr + row, tl.min(tl.where(inside & (clean == highest), tokens, 0x7FFFFFFF), axis=0).to(tl.int64))


def draw(
    logits_NV: torch.Tensor,
    best_N: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    random_N: torch.Tensor,
    *,
    hiding: bool,
) -> torch.Tensor:
    """Draw a token, int64, for each row of float32 logits, whose largest is `best_N`.

    `temperature_N`, `top_p_N` and `min_p_N` are float32; `top_k_N` is int32, and 0 keeps all tokens; `random_N` is
    float64 in (0, 1). `hiding` says whether some row has a top-k, top-p or min-p. A row that is not finite gets an
    arbitrary token.
    """
    num_rows, size = logits_NV.shape
    num_chunks = num_tiles(size, _CHUNK)
    assert logits_NV.stride(1) == 1
    chunks_pad = padded(num_chunks, least=1)
    limit_N = torch.full_like(top_k_N, int(_EVERYTHING.value))
    weights_NC = logits_NV.new_empty(num_rows, num_chunks, dtype=torch.float64)
    token_N = logits_NV.new_empty(num_rows, dtype=torch.int64)
    if hiding:
        counts_NCR = logits_NV.new_empty(num_rows, num_chunks, _NUM_RUNGS, dtype=torch.int32)
        weights_NCR = logits_NV.new_empty(num_rows, num_chunks, _NUM_RUNGS)
        window_NW = logits_NV.new_empty(num_rows, _WINDOW)
        held_N = torch.empty_like(top_k_N)
        _climb[num_rows, num_chunks](
            logits_NV, best_N, temperature_N, top_k_N, top_p_N, counts_NCR, weights_NCR, size, logits_NV.stride(0),
            CHUNK=_CHUNK, RUNGS=_NUM_RUNGS, TILE=_TILE // 2, num_warps=8,
        )  # fmt: skip
        _gather[num_rows, num_chunks](
            logits_NV, best_N, temperature_N, top_k_N, top_p_N, counts_NCR, weights_NCR, window_NW, held_N, limit_N,
            size, logits_NV.stride(0),
            CHUNK=_CHUNK, CHUNKS_PAD=chunks_pad, RUNGS=_NUM_RUNGS, WINDOW=_WINDOW, TILE=_TILE, num_warps=4,
        )  # fmt: skip
        _limit[(num_rows,)](
            logits_NV, best_N, temperature_N, top_k_N, top_p_N, min_p_N, weights_NCR, window_NW, held_N, limit_N,
            size, num_chunks, logits_NV.stride(0),
            CHUNKS_PAD=chunks_pad, RUNGS=_NUM_RUNGS, WINDOW=_WINDOW, TILE=_TILE, num_warps=8,
        )  # fmt: skip
    _weigh_chunks[num_rows, num_chunks](
        logits_NV, best_N, temperature_N, limit_N, weights_NC, size, logits_NV.stride(0),
        CHUNK=_CHUNK, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    _pick[(num_rows,)](
        logits_NV, best_N, temperature_N, limit_N, weights_NC, random_N, token_N, size, num_chunks, logits_NV.stride(0),
        CHUNK=_CHUNK, CHUNKS_PAD=chunks_pad, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return token_N


@triton.jit
def _distances(row_ptr, start, size, best, temperature, TILE: tl.constexpr):
    """The distance of each logit of a tile below the largest logit, over the temperature; infinite beyond the row's
    end."""
    columns = start + tl.arange(0, TILE)
    logits = tl.load(row_ptr + columns, mask=columns < size, other=float("-inf"))
    return (best - logits) / temperature


@triton.jit
def _weights(distances, limit):
    """Probabilities, not normalised, of the tokens; 0 for tokens whose distance has bits above `limit`."""
    return tl.where(distances.to(tl.int32, bitcast=True) <= limit, tl.exp(-distances), 0.0)


@triton.jit
def _rungs(RUNGS: tl.constexpr):
    """The rungs: distances from 0.5 on, each the square root of 2 times the one before; the last one is infinite."""
    rungs = tl.arange(0, RUNGS)
    return tl.where(rungs < RUNGS - 1, 0.5 * tl.exp2(0.5 * rungs.to(tl.float32)), float("inf"))


@triton.jit
def _climb(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    counts_ptr,
    weights_ptr,
    size,
    stride,
    CHUNK: tl.constexpr,
    RUNGS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count and weigh the tokens of a chunk within each rung."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k = tl.load(top_k_ptr + row)
    if ((top_k > 0) & (top_k < size)) | (tl.load(top_p_ptr + row) < 1.0):
        best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
        edges = _rungs(RUNGS)
        counts = tl.zeros([TILE, RUNGS], tl.int32)
        weights = tl.zeros([TILE, RUNGS], tl.float32)
        for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, size), TILE):
            distances = _distances(logits_ptr + row * stride, start, size, best, temperature, TILE)
            there = start + tl.arange(0, TILE) < size
            within = there[:, None] & (distances[:, None] <= edges[None, :])
            counts += within.to(tl.int32)
            weights += tl.where(within, tl.exp(-distances)[:, None], 0.0)
        place = (row * tl.num_programs(1) + chunk) * RUNGS + tl.arange(0, RUNGS)
        tl.store(counts_ptr + place, tl.sum(counts, axis=0))
        tl.store(weights_ptr + place, tl.sum(weights, axis=0))


@triton.jit
def _gather(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    counts_ptr,
    weights_ptr,
    window_ptr,
    held_ptr,
    limit_ptr,
    size,
    stride,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    RUNGS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy a chunk's logits within the first rung that has enough into the window, if the window has room for those of
    the whole row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    by_number = (top_k > 0) & (top_k < size)
    if by_number | (top_p < 1.0):
        chunks, rungs = tl.arange(0, CHUNKS_PAD), tl.arange(0, RUNGS)
        place = (row * num_chunks + chunks)[:, None] * RUNGS + rungs[None, :]
        counts_CR = tl.load(counts_ptr + place, mask=(chunks < num_chunks)[:, None], other=0)
        counts_R = tl.sum(counts_CR, axis=0)
        weights_R = tl.sum(tl.load(weights_ptr + place, mask=(chunks < num_chunks)[:, None], other=0.0), axis=0)
        enough_R = tl.where(by_number, counts_R >= top_k, weights_R >= top_p * tl.max(weights_R, axis=0))
        rung = tl.minimum(tl.sum((enough_R == 0).to(tl.int32), axis=0), RUNGS - 1)
        held = tl.sum(tl.where(rungs == rung, counts_R, 0), axis=0)
        edge = tl.sum(tl.where(rungs == rung, _rungs(RUNGS), 0.0), axis=0)
        if chunk == 0:
            tl.store(held_ptr + row, held)
        if held <= WINDOW:
            if chunk == 0:
                tl.store(limit_ptr + row, edge.to(tl.int32, bitcast=True))
            before = (chunks < chunk)[:, None] & (rungs == rung)[None, :]
            held = tl.sum(tl.sum(tl.where(before, counts_CR, 0), axis=1), axis=0)
            for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, size), TILE):
                columns = start + tl.arange(0, TILE)
                logits = tl.load(logits_ptr + row * stride + columns, mask=columns < size, other=float("-inf"))
                within = ((columns < size) & ((best - logits) / temperature <= edge)).to(tl.int32)
                slots = held + tl.cumsum(within, axis=0) - 1
                tl.store(window_ptr + row * WINDOW + slots, logits, mask=within != 0)
                held += tl.sum(within, axis=0)


@triton.jit
def _least_limit(row_ptr, size, best, temperature, limit, wanted, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """The least limit, at most `limit`, at which the kept tokens reach `wanted` in number or, if WEIGH, in weight."""
    found = 0
    for digit in range(8):
        shift = tl.maximum(27 - 4 * digit, 0)
        edges = found + ((tl.arange(0, 16) + 1) << shift) - 1
        amounts = tl.zeros([TILE, 16], tl.float32)
        for start in range(0, size, TILE):
            distances = _distances(row_ptr, start, size, best, temperature, TILE)
            bits = distances.to(tl.int32, bitcast=True)
            if WEIGH:
                values = _weights(distances, limit)
            else:
                values = (start + tl.arange(0, TILE) < size).to(tl.float32)
            amounts += tl.where(bits[:, None] <= edges[None, :], values[:, None], 0.0)
        below = tl.sum(amounts, axis=0) < wanted
        digit_value = tl.minimum(tl.sum(below.to(tl.int32), axis=0), 15)
        found += digit_value << shift
    return tl.minimum(found, limit)


@triton.jit
def _limit(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    weights_ptr,
    window_ptr,
    held_ptr,
    limit_ptr,
    size,
    num_chunks,
    stride,
    CHUNKS_PAD: tl.constexpr,
    RUNGS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the bits of the largest distance that is kept: by top-k, then by top-p among the tokens kept, then by
    min-p."""
    row = tl.program_id(0).to(tl.int64)
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    limit = tl.load(limit_ptr + row)
    by_number = (top_k > 0) & (top_k < size)
    if by_number | (top_p < 1.0):
        values_ptr = logits_ptr + row * stride
        num = size
        held = tl.load(held_ptr + row)
        if held <= WINDOW:
            values_ptr = window_ptr + row * WINDOW
            num = held
        if by_number:
            limit = _least_limit(values_ptr, num, best, temperature, limit, top_k.to(tl.float32), False, TILE)
        if top_p < 1.0:
            total = 0.0
            if by_number:
                for start in range(0, num, TILE):
                    total += tl.sum(
                        _weights(_distances(values_ptr, start, num, best, temperature, TILE), limit), axis=0
                    )
            else:
                chunks = tl.arange(0, CHUNKS_PAD)
                last = (row * num_chunks + chunks) * RUNGS + RUNGS - 1
                total += tl.sum(tl.load(weights_ptr + last, mask=chunks < num_chunks, other=0.0), axis=0)
            limit = _least_limit(values_ptr, num, best, temperature, limit, top_p * total, True, TILE)
    if min_p > 0.0:
        furthest = (-tl.log(min_p)).to(tl.int32, bitcast=True)
        limit = tl.minimum(limit, tl.maximum(furthest, 0))  # a min_p of 1 gives minus zero
    tl.store(limit_ptr + row, limit)


@triton.jit
def _weigh_chunks(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    limit_ptr,
    weights_ptr,
    size,
    stride,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    limit = tl.load(limit_ptr + row)
    total = tl.zeros([], tl.float64)
    for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, size), TILE):
        distances = _distances(logits_ptr + row * stride, start, size, best, temperature, TILE)
        total += tl.sum(_weights(distances, limit).to(tl.float64), axis=0)
    tl.store(weights_ptr + row * tl.num_programs(1) + chunk, total)


@triton.jit
def _pick(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    limit_ptr,
    weights_ptr,
    random_ptr,
    token_ptr,
    size,
    num_chunks,
    stride,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Pick the first token at which the cumulative weight reaches the random number; never a token of weight 0."""
    row = tl.program_id(0).to(tl.int64)
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    limit = tl.load(limit_ptr + row)
    chunks = tl.arange(0, CHUNKS_PAD)
    weights_C = tl.load(weights_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    reached_C = tl.cumsum(weights_C, axis=0)
    wanted = tl.load(random_ptr + row) * tl.sum(weights_C, axis=0)
    last = tl.max(tl.where(weights_C > 0.0, chunks, 0), axis=0)
    chunk = tl.minimum(tl.sum((reached_C < wanted).to(tl.int32), axis=0), last)
    reached = tl.sum(tl.where(chunks < chunk, weights_C, 0.0), axis=0)
    token = size
    last_kept = chunk * CHUNK
    for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, size), TILE):
        distances = _distances(logits_ptr + row * stride, start, size, best, temperature, TILE)
        weights = _weights(distances, limit).to(tl.float64)
        columns = start + tl.arange(0, TILE)
        reached_T = reached + tl.cumsum(weights, axis=0)
        found = (weights > 0.0) & (reached_T >= wanted)
        token = tl.minimum(token, tl.min(tl.where(found, columns, size), axis=0))
        last_kept = tl.maximum(last_kept, tl.max(tl.where(weights > 0.0, columns, 0), axis=0))
        reached += tl.sum(weights, axis=0)
    # The sum here is in another order than that of the chunk's weight, so the last token may just miss the number.
    tl.store(token_ptr + row, tl.where(token < size, token, last_kept).to(tl.int64))
