"""How many sequences a batch may have: a number that is set, and with the profile latency no more than lets a step keep
the target between tokens. Pure state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.scheduling.row_times import RowTimes
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice, rows_of

_SHARE = 0.8
"""Part of the target that a step of decodes alone may take: prompts beside them, and what varies, have the rest."""


class BatchBound:
    """The bound of one worker."""

    def __init__(self, policy: Policy, times: RowTimes | None = None) -> None:
        """Steps take what `times` say; without, the bound is that of the policy."""
        self.most = policy.max_num_seqs
        """The bound never exceeds it."""
        self.num = policy.max_num_seqs
        """Most sequences that may run now."""
        self._times = None if policy.step_target_s is None else times
        self._step_s = _SHARE * (policy.step_target_s or math.inf)
        self._mean_tokens = 0
        """The mean length of the sequences for which the bound was last decided."""
        self.update(())

    @property
    def fixed(self) -> bool:
        """Whether `update` changes nothing."""
        return self._times is None

    @property
    def num_holding(self) -> int:
        """Sequences that may hold blocks: a full batch, and some more that join when places become free."""
        return self.num + max(2, self.num // 4)

    def update(self, choices: Sequence[DecodeChoice]) -> None:
        """Decide anew, for sequences as long as `choices`, or, without any, as those before. At least one may always
        run."""
        times = self._times
        if times is None:
            return
        if choices:
            num, num_tokens = rows_of(choices)
            self._mean_tokens = num_tokens // num
        least, most = 1, self.most
        while least < most:
            middle = (least + most + 1) // 2
            if times.step_s((middle, middle * self._mean_tokens)) <= self._step_s:
                least = middle
            else:
                most = middle - 1
        self.num = least

    def observe(self, choices: Sequence[DecodeChoice], seconds: float, plan_s: float) -> None:
        """Learn from what a step took that did nothing but decode, and began `plan_s` after the end of the step
        before."""
        if self._times is not None:
            self._times.observe(rows_of(choices), (0, 0), seconds, plan_s)
