"""Times steps of decodes of a model that was just loaded."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from common.engine.batch import NO_SAMPLE, PARAMETERS, Decodes, Samples
from common.engine.runner import ModelRunner
from common.scheduling.row_times import RowTimes

_MEASURE_S = 2.0
"""No step begins later than this many seconds after the first one, but for the smallest."""
_RUNS, _LONG_S = 3, 0.03
"""Runs of each step, of which the fastest counts; one that takes longer than so many seconds is run once."""
_LONG_ROWS, _LONG_TOKENS = 4, 512
"""Rows, and the tokens that each of them attends to, of the step that tells what attention takes."""


def time_rows(runner: ModelRunner, most_rows: int, clock: Callable[[], float] = time.perf_counter) -> RowTimes:
    """Time steps of up to `most_rows` decodes of a `runner` whose cache is empty, and leave it zeroed. `clock` returns
    seconds."""
    end = clock() + _MEASURE_S
    size, num_blocks = runner.layout.block_size, runner.cache.num_blocks

    def timed(num_rows: int, num_tokens: int) -> float:
        decodes = _decodes(num_rows, num_tokens, size, num_blocks)
        least = float("inf")
        for _ in range(_RUNS):
            begin = clock()
            runner.submit((), decodes).chosen()
            least = min(least, clock() - begin)
            if least > _LONG_S or clock() > end:
                break
        return least

    timed(1, 1)  # warms up
    rows, seconds = [1], [timed(1, 1)]
    while rows[-1] < most_rows and clock() < end:
        rows.append(min(2 * rows[-1], most_rows))
        seconds.append(max(seconds[-1], timed(rows[-1], 1)))
    long = min(_LONG_TOKENS, num_blocks * size // _LONG_ROWS, runner.config.max_sequence_tokens)
    times = RowTimes(rows=tuple(rows), seconds=tuple(seconds))
    if long > 1 and clock() < end:
        plain_s = times.step_s((_LONG_ROWS, 0))
        times.token_s = max(0.0, timed(_LONG_ROWS, long) - plain_s) / (_LONG_ROWS * long)
    runner.clear(num_blocks)
    return times


def _decodes(num_rows: int, num_tokens: int, block_size: int, num_blocks: int) -> Decodes:
    """Rows that attend to `num_tokens` tokens each, in blocks of their own as far as there are enough."""
    blocks = -(-num_tokens // block_size)
    parameters_N = np.zeros(num_rows, PARAMETERS)
    parameters_N["top_p"] = 1.0
    return Decodes(
        sequences=(),
        token_ids_D=np.zeros(num_rows, np.int64),
        positions_D=np.full(num_rows, num_tokens - 1),
        num_blocks_D=np.full(num_rows, blocks),
        tables_DM=np.arange(num_rows * blocks).reshape(num_rows, blocks) % num_blocks,
        follows_D=np.full(num_rows, NO_SAMPLE),
        samples=Samples(parameters_N=parameters_N, positions_N=np.full(num_rows, num_tokens), special={}),
    )
