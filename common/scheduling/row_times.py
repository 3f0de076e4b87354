"""What a step of decodes costs, by its rows and by the tokens that their attention reads: whether drafts pay, and how
many sequences a batch may have, is decided by it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT = 0.1
"""Weight of an observation."""
_FORGETTING = 0.05
"""Part of what was learnt of drafts that a step without drafts makes forgotten: if it says that drafts do not pay,
nothing else would ever correct it."""
_MOST_SCALE, _MOST_DRAFT_SCALE = 4.0, 16.0
"""Greatest factors, and the inverses of the least ones, by which observations correct what was measured: of a step, and
of what drafts add to it."""
_LEAST_ROW = 0.01
"""Least part of a step that a drafted row is taken to add: were it nothing, no factor could correct it. In a large
batch it is less: so much that the greatest factor makes the row as dear as every other one."""


@dataclass(slots=True, kw_only=True)
class RowTimes:
    """Seconds of a step with one token each of some rows, measured at start and corrected by the steps since."""

    rows: Sequence[int]
    """Numbers of rows that were timed, ascending; at least one."""
    seconds: Sequence[float]
    """What a step of each number took, with rows that attend to next to nothing; not descending."""
    token_s: float = 0.0
    """Seconds, in addition, for each token that a row attends to."""
    scale: float = 1.0
    """Ratio of what steps take to what was measured."""
    draft_scale: float = 1.0
    """The same ratio for what drafts add to a step, on top of `scale`."""
    plan_s: float = 0.0
    """Seconds from the end of a step to the begin of the next one, if that has no drafts; close to 0 if it is planned
    ahead. They are part of every step here."""
    draft_plan_s: float = 0.0
    """The same, if the next step has drafts, which none does that is planned ahead."""

    def step_s(self, plain: tuple[int, int], drafts: tuple[int, int] = (0, 0)) -> float:
        """Seconds of a step. Each pair is (rows, tokens that these rows attend to in all)."""
        base_s = self._measured_s(*plain)
        if not drafts[0]:
            return self.plan_s + self.scale * base_s
        more_s = self._more_s(plain, drafts, base_s)
        return self.draft_plan_s + self.scale * (base_s + self.draft_scale * more_s)

    def least_share(self, plain: tuple[int, int], most: int) -> float:
        """The least that each of up to `most` drafted rows may add to a step without drafts, as a share of it."""
        num_rows, base_s = plain[0], self._measured_s(plain[0], 0)
        further = {1, most, *(rows - num_rows for rows in self.rows if num_rows < rows < num_rows + most)}
        row_s = min(self._more_s((num_rows, 0), (num, 0), base_s) / num for num in further)
        return self.scale * self.draft_scale * row_s / self.step_s(plain)

    def observe(
        self, plain: tuple[int, int], drafts: tuple[int, int], seconds: float, plan_s: float | None = None
    ) -> None:
        """Move the estimates towards what a step took that did nothing else, `plan_s` after the step before; None if
        that says nothing. A step without drafts moves `scale`, and one with drafts `draft_scale`."""
        base_s = self._measured_s(*plain)
        if not drafts[0]:
            self.scale = _moved(self.scale, seconds / base_s, _MOST_SCALE)
            self.draft_scale += _FORGETTING * (1 - self.draft_scale)
            if plan_s is not None:
                self.plan_s += _WEIGHT * (plan_s - self.plan_s)
            self.draft_plan_s += _FORGETTING * (self.plan_s - self.draft_plan_s)
            return
        if plan_s is not None:
            self.draft_plan_s += _WEIGHT * (plan_s - self.draft_plan_s)
        seen = (seconds / self.scale - base_s) / self._more_s(plain, drafts, base_s)
        self.draft_scale = _moved(self.draft_scale, seen, _MOST_DRAFT_SCALE)

    def correct(self, expected_s: float, seconds: float) -> None:
        """Move `scale` towards what something took that was expected, by `step_s`, to take `expected_s`."""
        if expected_s > 0:
            self.scale = _moved(self.scale, self.scale * seconds / expected_s, _MOST_SCALE)

    def _more_s(self, plain: tuple[int, int], drafts: tuple[int, int], base_s: float) -> float:
        """What drafts add to a step that takes `base_s` without them, by what was measured."""
        more_s = self._measured_s(plain[0] + drafts[0], plain[1] + drafts[1]) - base_s
        least_row = min(_LEAST_ROW, 1 / (_MOST_DRAFT_SCALE * plain[0]))
        return max(more_s, least_row * drafts[0] * base_s)

    def _measured_s(self, num_rows: int, num_tokens: int) -> float:
        """By the line between the measured numbers of rows on both sides; beyond the largest, by that through the last
        two, or through the origin if there is but one."""
        rows, seconds = self.rows, self.seconds
        index = bisect_left(rows, num_rows)
        if index == len(rows):
            row_s = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if index > 1 else seconds[-1] / rows[-1]
            of_rows = seconds[-1] + (num_rows - rows[-1]) * row_s
        elif index == 0 or rows[index] == num_rows:
            of_rows = seconds[index]
        else:
            share = (num_rows - rows[index - 1]) / (rows[index] - rows[index - 1])
            of_rows = seconds[index - 1] + share * (seconds[index] - seconds[index - 1])
        return of_rows + self.token_s * num_tokens


def _moved(scale: float, seen: float, most: float) -> float:
    return scale + _WEIGHT * (min(max(seen, 1 / most), most) - scale)
