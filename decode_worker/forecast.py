"""How many blocks will be in use at most, if every sequence grows, and ends, as expected.

Blocks in use rise while sequences grow and fall when one ends, so the peak lies just before an expected end. With the
sequences sorted by the steps they have left, `r_1 <= … <= r_n`, the blocks in use just before the k-th end are

    used now + (n - k + 1) * r_k / block_size - (blocks held now by the first k - 1, which are back by then)

("Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025, section 3.3). The sequences are kept in that
order, which time does not change; a step in which nobody comes or goes costs nothing, and whoever wants to come in is
judged by a few vector operations. Blocks are counted as fractions: a sequence grows by 1 / block_size in each step.
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
    """Expected ends, and blocks that come back with each. One entry for each sequence that holds blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._still: dict[K, tuple[int, int]] = {}
        """Those that do not grow yet → (steps they are expected to take, blocks that they alone hold)."""
        self._places: dict[K, tuple[int, int]] = {}
        """Those that grow → (the step at which they are expected to end, a number that tells equals apart)."""
        # Of those that grow, sorted by place. The arrays lie close together in memory: they are searched at every turn.
        self._ends = array("d")
        self._numbers = array("q")
        self._private = array("d")
        """Blocks that a sequence alone holds, less those that it has grown by since step 0."""
        self._sum_of_steps = 0
        """Of those that do not grow yet."""
        self._sum_of_ends = 0
        self._last_number = 0
        self._curve: _Curve | None = None
        """Of the last question, until somebody leaves or a step passes."""
        self._growth_since = 0.0
        """Blocks that those who have come since then will grow by."""

    def __len__(self) -> int:
        return len(self._places) + len(self._still)

    def __contains__(self, key: K) -> bool:
        return key in self._places or key in self._still

    def __iter__(self) -> Iterator[K]:
        yield from self._places
        yield from self._still

    def hold(self, key: K, *, num_steps: int, num_private: int) -> None:
        """Enter a sequence that holds its blocks and does not grow before it is `put`, however long that takes."""
        assert key not in self, key
        self._still[key] = num_steps, num_private
        self._sum_of_steps += num_steps
        self._growth_since += num_steps / self._block_size

    def held(self, key: K) -> tuple[int, int]:
        """What was said of a sequence that does not grow yet."""
        return self._still[key]

    def put(self, key: K, *, step: int, end_step: int, num_private: int) -> None:
        """Enter a sequence, or let one that is held begin: the present step, the one at which it is expected to end,
        and the blocks that it alone holds now. From now on it grows."""
        assert key not in self._places, key
        if key in self._still:
            self.remove(key)
        else:
            self._growth_since += (end_step - step) / self._block_size
        self._insert(key, end_step, num_private - step / self._block_size)

    def stop(self, key: K, *, step: int, num_private: int) -> None:
        """A sequence that grows does not for a while: it is held again, and expected to take the steps it has left."""
        num_steps = max(1, self._places[key][0] - step)
        self.remove(key)
        self.hold(key, num_steps=num_steps, num_private=num_private)

    def postpone(self, key: K, end_step: int) -> None:
        """A sequence that grows will end later than was expected."""
        self._insert(key, end_step, self._take(key))

    def remove(self, key: K) -> None:
        """Forget a sequence; inert when it is unknown."""
        if key in self._still:
            self._sum_of_steps -= self._still.pop(key)[0]
        elif key in self._places:
            self._take(key)
        self._curve = None

    def most(self, step: int, num_used: int, newcomers: Sequence[tuple[int, int]] = ()) -> int:
        """A bound on `peak` that costs nothing: everyone's growth, as if nobody ended before all others have."""
        left = self._sum_of_ends - step * len(self._places) + self._sum_of_steps + sum(each[0] for each in newcomers)
        return math.ceil(num_used + (left + len(self._places)) / self._block_size)

    def peak(self, step: int, num_used: int, newcomers: Sequence[tuple[int, int]] = ()) -> int:
        """The most blocks in use from now on.

        `step` is the present one, `num_used` the blocks in use now, those of the newcomers included; a newcomer is
        (steps it is expected to take, blocks that it alone holds). Sequences that have outlived their expectation
        count as ending with the next step. Of several that come in one step all but the first are judged as if those
        before them never ended: so a step costs one curve, however many come.
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
        index = bisect_right(self._ends, float(end_step))  # its number is the highest
        self._ends.insert(index, end_step)
        self._numbers.insert(index, self._last_number)
        self._private.insert(index, private)
        self._places[key] = end_step, self._last_number
        self._sum_of_ends += end_step
        self._curve = None

    def _take(self, key: K) -> float:
        """Take out a sequence that grows; what was noted of its blocks."""
        end_step, number = self._places.pop(key)
        start = bisect_left(self._ends, float(end_step))
        index = bisect_left(self._numbers, number, start, bisect_right(self._ends, float(end_step), start))
        self._sum_of_ends -= end_step
        del self._ends[index], self._numbers[index]
        return self._private.pop(index)


class _Curve:
    """Blocks in use over the steps to come, relative to those in use now."""

    def __init__(self, block_size: int, step: int, steps: Floats, private: Floats) -> None:
        """`steps` left of each sequence, ascending, and the blocks that it alone holds."""
        self.step = step
        self._block_size = block_size
        self._steps = steps
        self._private = private
        self._returned = np.concatenate(([0.0], np.cumsum(private)))
        """Blocks held now by the first k."""
        growth = steps / block_size
        in_use = np.arange(len(steps), 0, -1) * growth - self._returned[:-1]
        # What a newcomer adds to this: its growth until its own end, and afterwards the blocks that it gives back.
        self._highest_before = np.maximum.accumulate(in_use + growth)
        self._highest_after = np.maximum.accumulate(in_use[::-1])[::-1]
        self.highest = float(in_use.max(initial=0.0))

    def highest_with(self, num_steps: int, num_private: int) -> float:
        """The peak with one more sequence, whose blocks count as in use now already."""
        index = int(np.searchsorted(self._steps, num_steps))
        # Just before its end the newcomer, and everyone who ends no earlier, have grown by `num_steps` tokens.
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
