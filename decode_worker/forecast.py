"""Forecast of the most blocks in use, if every sequence grows and ends as expected.

Blocks in use rise while sequences grow and fall when one ends, so the peak lies just before an expected end. With the
sequences sorted by the steps they have left, `r_1 <= … <= r_n`, the blocks in use just before the k-th end are

    used now + (n - k + 1) * r_k / block_size - (blocks held now by the first k - 1, which have been released by then)

("Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025, section 3.3). The sequences are kept in that
order, which does not change as time passes. So a step in which no sequence comes or ends costs nothing, and a newcomer
is judged by a few vector operations. Blocks are counted as fractions: a sequence grows by 1 / block_size in each step.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

K = TypeVar("K", bound=Hashable)
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Forecast(Generic[K]):
    """Expected ends of sequences, and the blocks that each end releases. It has one entry for each sequence that holds
    blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._still: dict[K, tuple[int, int]] = {}
        """Sequences that do not grow yet → (steps they are expected to take, blocks that only they hold)."""
        self._places: dict[K, tuple[int, int]] = {}
        """Growing sequences → (step at which they are expected to end, a number that distinguishes equal steps)."""
        # Arrays over the growing sequences, sorted by place. They are contiguous, because each question searches them.
        self._ends = array("d")
        self._numbers = array("q")
        self._private = array("d")
        """Blocks that only this sequence holds, minus the blocks that it has grown by since step 0."""
        self._sum_of_steps = 0
        """Sum of the expected steps of sequences that do not grow yet."""
        self._sum_of_ends = 0
        self._last_number = 0
        self._curve: _Curve | None = None
        """The curve of the last question; None after a sequence leaves or begins to grow. A step makes it invalid,
        too."""
        self._growth_since = 0.0
        """Blocks that sequences entered since `_curve` was made will grow by."""

    def __len__(self) -> int:
        return len(self._places) + len(self._still)

    def __contains__(self, key: K) -> bool:
        return key in self._places or key in self._still

    def __iter__(self) -> Iterator[K]:
        yield from self._places
        yield from self._still

    def hold(self, key: K, *, num_steps: int, num_private: int) -> None:
        """Enter a sequence that holds its blocks and does not grow before it is `put`."""
        assert key not in self, key
        self._still[key] = num_steps, num_private
        self._sum_of_steps += num_steps
        self._growth_since += num_steps / self._block_size

    def held(self, key: K) -> tuple[int, int]:
        """(steps, blocks) that `hold` was given for a sequence that does not grow yet."""
        return self._still[key]

    def put(self, key: K, *, step: int, end_step: int, num_private: int) -> None:
        """Enter a growing sequence, or let a held one begin to grow. `step` is the present step, `end_step` the one at
        which the sequence is expected to end, `num_private` the number of blocks that only it holds now."""
        assert key not in self._places, key
        if key in self._still:
            self.remove(key)
        else:
            self._growth_since += (end_step - step) / self._block_size
        self._insert(key, end_step, num_private - step / self._block_size)

    def stop(self, key: K, *, step: int, num_private: int) -> None:
        """A growing sequence pauses: it is held again, and expected to take the steps it has left."""
        num_steps = max(1, self._places[key][0] - step)
        self.remove(key)
        self.hold(key, num_steps=num_steps, num_private=num_private)

    def move(self, key: K, end_step: int, num_more: int = 0) -> None:
        """Move the expected end of a growing sequence to `end_step`. It has grown by `num_more` tokens more than one in
        a step."""
        self._insert(key, end_step, self._take(key) + num_more / self._block_size)

    def remove(self, key: K) -> None:
        """Remove a sequence. Does nothing if it is unknown."""
        if key in self._still:
            self._sum_of_steps -= self._still.pop(key)[0]
        elif key in self._places:
            self._take(key)
        self._curve = None

    def most(self, step: int, num_used: int, newcomers: Sequence[tuple[int, int]] = ()) -> int:
        """An upper bound of `peak` without a curve: the growth of all sequences, as if none ended before the others."""
        left = self._sum_of_ends - step * len(self._places) + self._sum_of_steps + sum(each[0] for each in newcomers)
        return math.ceil(num_used + (left + len(self._places)) / self._block_size)

    def peak(self, step: int, num_used: int, newcomers: Sequence[tuple[int, int]] = ()) -> int:
        """Forecast of the most blocks in use from now on.

        `step` is the present step; `num_used` is the number of blocks in use now, with those of the newcomers. A
        newcomer is (steps it is expected to take, blocks that only it holds). Sequences that have outlived their
        expected end count as ending with the next step. If several sequences enter in one step, all but the first are
        judged as if those before them never ended, so that a step needs one curve only.
        """
        if self._curve is None or self._curve.step != step:
            self._growth_since = 0.0
            self._curve = self._curve_at(step)
        curve = self._curve
        for num_steps, num_private in newcomers[1:]:
            curve = curve.beside(num_steps, num_private)
        highest = curve.highest_with(*newcomers[0]) if newcomers else curve.highest
        return math.ceil(num_used + self._growth_since + highest)

    def _curve_at(self, step: int) -> _Curve:
        steps_left = np.maximum(np.frombuffer(self._ends) - step, 1)
        private = np.frombuffer(self._private) + step / self._block_size
        if self._still:
            still = np.array(list(self._still.values()), float)
            steps_left = np.concatenate((steps_left, still[:, 0]))
            order = np.argsort(steps_left, kind="stable")
            steps_left, private = steps_left[order], np.concatenate((private, still[:, 1]))[order]
        return _Curve(self._block_size, step, steps_left, private)

    def _insert(self, key: K, end_step: int, private: float) -> None:
        self._last_number += 1
        index = bisect_right(self._ends, float(end_step))  # after equal ends: its number is the highest
        self._ends.insert(index, end_step)
        self._numbers.insert(index, self._last_number)
        self._private.insert(index, private)
        self._places[key] = end_step, self._last_number
        self._sum_of_ends += end_step
        self._curve = None

    def _take(self, key: K) -> float:
        """Remove a growing sequence; returns its entry of `_private`."""
        end_step, number = self._places.pop(key)
        start = bisect_left(self._ends, float(end_step))
        index = bisect_left(self._numbers, number, start, bisect_right(self._ends, float(end_step), start))
        self._sum_of_ends -= end_step
        del self._ends[index], self._numbers[index]
        return self._private.pop(index)


class _Curve:
    """Blocks in use over the coming steps, relative to those in use now."""

    def __init__(self, block_size: int, step: int, steps: Floats, private: Floats) -> None:
        """`steps` has the steps left of each sequence, ascending; `private` has the blocks that only it holds."""
        self.step = step
        self._block_size = block_size
        self._steps = steps
        self._private = private
        self._returned = np.concatenate(([0.0], np.cumsum(private)))
        """Element k: blocks held now by the first k sequences."""
        growth = steps / block_size
        in_use = np.arange(len(steps), 0, -1) * growth - self._returned[:-1]
        # A newcomer adds its growth to ends before its own, and subtracts the blocks that it releases from later ones.
        self._highest_before = np.maximum.accumulate(in_use + growth)
        self._highest_after = np.maximum.accumulate(in_use[::-1])[::-1]
        self.highest = float(in_use.max(initial=0.0))

    def highest_with(self, num_steps: int, num_private: int) -> float:
        """The peak with one more sequence, whose present blocks already count as in use."""
        index = int(np.searchsorted(self._steps, num_steps))
        # Just before its end the newcomer, and every sequence that ends no earlier, have grown by `num_steps` tokens.
        alive = len(self._steps) - index + 1
        highest = alive * num_steps / self._block_size - float(self._returned[index])
        if index > 0:
            highest = max(highest, float(self._highest_before[index - 1]))
        if index < len(self._steps):
            highest = max(highest, float(self._highest_after[index]) - num_private)
        return max(highest, 0.0)

    def beside(self, num_steps: int, num_private: int) -> _Curve:
        """The curve with one more sequence."""
        index = int(np.searchsorted(self._steps, num_steps))
        steps = np.insert(self._steps, index, num_steps)
        return _Curve(self._block_size, self.step, steps, np.insert(self._private, index, num_private))
