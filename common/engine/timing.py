"""Times a model that was just loaded: prefills, swaps, and steps of decodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from common.engine.batch import NO_SAMPLE, PARAMETERS, Decodes, Samples, Slice
from common.engine.runner import ModelRunner
from common.scheduling.costs import DEEP_TOKENS, MIN_OBSERVED_TOKENS, Costs
from common.scheduling.row_times import RowTimes

_COSTS_S = 1.0
"""`measure_costs` leaves out a run that could end later than this many seconds after the first run began."""
_REPEAT_S = 0.1
"""`measure_costs` repeats short runs until this many seconds after the first one began: each may be interrupted while
other workers start."""
_LONG_STEP_S = 0.1
"""Seconds of a step that is long enough to tell the cost of a token: no larger step is measured."""
_LEAST_DEEP_TOKENS = 1024
"""Least depth whose cost is measured. Smaller ones cost little beside the products."""
_MEASURED_BLOCKS = (1, 8, 8)
"""Sizes of the swaps that `measure_costs` times. The first one warms up, and bounds the time of the next one."""
_ROWS_S = 2.0
"""`time_rows`: no step begins later than this many seconds after the first one, but for the two smallest."""
_RUNS, _LONG_S = 3, 0.03
"""Runs of each step, of which the fastest counts; one that takes longer than so many seconds is run once."""
_SHORT_TOKENS = 2
"""Tokens that a row attends to where its context shall not count. With one it would begin a block, which is zeroed: few
rows of a step that serves do."""
_LONG_ROWS = 4
_LONG_TOKENS = {"cpu": 512, "cuda": 8192}
"""`_LONG_ROWS` rows that attend to so many tokens each tell what attention takes. A GPU reads 512 in less time than two
of its steps may differ by."""


def measure_costs(runner: ModelRunner, most_tokens: int, clock: Callable[[], float] = time.perf_counter) -> Costs:
    """Time prefills, also deep in a prompt, and swaps of a `runner` whose cache is empty, and leave it zeroed. `clock`
    returns seconds.

    The largest step that is timed has `most_tokens` tokens, unless a smaller one takes long enough. This takes a third
    of a second for a small model, and at most about two seconds for a model that prefills `MIN_OBSERVED_TOKENS` tokens
    within one second.
    """
    begin, cache, layout = clock(), runner.cache, runner.layout
    longest = min(runner.config.max_sequence_tokens, cache.num_slots)
    most_tokens = min(most_tokens, longest)
    num_swapped = min(max(_MEASURED_BLOCKS), cache.num_blocks, runner.num_host_blocks)
    table = list(range(max(layout.blocks_for(most_tokens), num_swapped)))

    def prefill(num_tokens: int, depth: int = 0) -> None:
        """A chunk with `depth` tokens, of zeros, before it. It is written to the first blocks in any case."""
        token_ids = [token % runner.config.vocab_size for token in range(num_tokens)]
        before = range(len(table), len(table) + depth // layout.block_size)
        runner.step([Slice(token_ids=token_ids, start=depth, block_table=[*before, *table])])

    def swap(num: int) -> None:
        runner.swap_out([(block, block) for block in range(num)])
        runner.swap_in([(block, block) for block in range(num)])
        cache.synchronize()

    step_s, token_s = _step_and_token_s(prefill, most_tokens, clock)
    costs = Costs(prefill_s_per_token=token_s, step_s=step_s, step_tokens=most_tokens)
    size = costs.tokens_within(_LONG_STEP_S / 2, MIN_OBSERVED_TOKENS, most_tokens)
    room = min(longest - size, cache.num_slots - len(table) * layout.block_size, DEEP_TOKENS)
    depth = room // layout.block_size * layout.block_size
    if depth >= _LEAST_DEEP_TOKENS and clock() + step_s + size * token_s <= begin + _COSTS_S:
        deep_token_s = _least_s(lambda num_tokens: prefill(num_tokens, depth), [size, size], clock)
        # What was measured too high would make tokens look cheap; what is too low is learnt in a few steps.
        costs.depth_s = min(max(0.0, deep_token_s - token_s - step_s / size) / depth, token_s / DEEP_TOKENS)
    swap_s = _least_s(swap, [min(num, num_swapped) for num in _MEASURED_BLOCKS], clock) if num_swapped else math.inf

    def decode(_: int) -> None:
        runner.submit((), _decodes(1, _SHORT_TOKENS, layout.block_size, cache.num_blocks)).chosen()

    costs.least_step_s, costs.swap_s_per_block = _least_s(decode, [1, 1, 1], clock), swap_s / 2
    runner.clear(len(table))
    return costs


def _step_and_token_s(run: Callable[[int], None], most: int, clock: Callable[[], float]) -> tuple[float, float]:
    """(seconds of a step beside its tokens, seconds per token), from a small and a large step."""
    took_s: dict[int, float] = {}
    begin = clock()
    end = begin + _COSTS_S

    def time_run(size: int) -> None:
        run_begin = clock()
        run(size)
        took_s[size] = min(clock() - run_begin, took_s.get(size, math.inf))

    small = large = min(MIN_OBSERVED_TOKENS, most)
    time_run(small)  # warms up
    if clock() + took_s[small] <= end:
        time_run(small)
    # A larger step takes no more time per token than a smaller one does.
    while large < most and took_s[large] < _LONG_STEP_S:
        size = min(2 * large, most)
        if clock() + size / large * took_s[large] > end:
            break
        time_run(size)
        large = size
    if large > small and clock() + took_s[large] <= end:
        time_run(large)  # the first one may have been interrupted
    while clock() + took_s[small] + took_s[large] <= begin + _REPEAT_S:
        time_run(small)
        time_run(large)
    if took_s[large] <= took_s[small]:  # only one size, or a large step that takes no longer than a small one
        return 0.0, took_s[large] / large
    token_s = (took_s[large] - took_s[small]) / (large - small)
    return max(0.0, took_s[small] - small * token_s), token_s


def _least_s(run: Callable[[int], None], sizes: Sequence[int], clock: Callable[[], float]) -> float:
    """Least seconds per unit among runs of the ascending `sizes`. The first run always takes place."""
    least_s = 0.0
    end = clock() + _COSTS_S
    for number, size in enumerate(sizes):
        begin = clock()
        # A larger run costs no more per unit than a smaller one did.
        if number > 0 and begin + size * least_s > end:
            break
        run(size)
        taken_s = (clock() - begin) / size
        least_s = taken_s if number == 0 else min(least_s, taken_s)
    return least_s


def time_rows(runner: ModelRunner, most_rows: int, clock: Callable[[], float] = time.perf_counter) -> RowTimes:
    """Time steps of up to `most_rows` decodes of a `runner` whose cache is empty, and leave it zeroed. `clock` returns
    seconds."""
    end = clock() + _ROWS_S
    size, num_blocks = runner.layout.block_size, runner.cache.num_blocks

    def timed(num_rows: int, num_tokens: int = _SHORT_TOKENS) -> float:
        decodes = _decodes(num_rows, num_tokens, size, num_blocks)
        least = float("inf")
        for _ in range(_RUNS):
            begin = clock()
            runner.submit((), decodes).chosen()
            least = min(least, clock() - begin)
            if least > _LONG_S or clock() > end:
                break
        return least

    timed(1)  # warms up
    rows, seconds = [1], [timed(1)]
    # One number alone does not tell what a further row costs.
    while rows[-1] < most_rows and (len(rows) == 1 or clock() < end):
        rows.append(min(2 * rows[-1], most_rows))
        seconds.append(timed(rows[-1]))
    # No step takes longer than one of more rows, unless it was interrupted.
    seconds = [*accumulate(reversed(seconds), min)][::-1]
    most = min(num_blocks * size // _LONG_ROWS, runner.config.max_sequence_tokens)
    long = min(_LONG_TOKENS[runner.cache.device.type], most)
    times = RowTimes(rows=tuple(rows), seconds=tuple(seconds))
    if long > _SHORT_TOKENS and clock() < end:
        plain_s = times.step_s((_LONG_ROWS, 0))
        times.token_s = max(0.0, timed(_LONG_ROWS, long) - plain_s) / (_LONG_ROWS * (long - _SHORT_TOKENS))
    runner.clear(num_blocks)
    return times


def _decodes(num_rows: int, num_tokens: int, block_size: int, num_blocks: int) -> Decodes:
    """Rows that attend to `num_tokens` tokens each, in blocks of their own as far as there are enough."""
    blocks = -(-num_tokens // block_size)
    parameters_N = np.zeros(num_rows, PARAMETERS)
    parameters_N["top_p"] = 1.0
    return Decodes(
        token_ids_D=np.zeros(num_rows, np.int64),
        positions_D=np.full(num_rows, num_tokens - 1),
        num_blocks_D=np.full(num_rows, blocks),
        tables_DM=np.arange(num_rows * blocks).reshape(num_rows, blocks) % num_blocks,
        follows_D=np.full(num_rows, NO_SAMPLE),
        samples=Samples(parameters_N=parameters_N, positions_N=np.full(num_rows, num_tokens), special={}),
    )
