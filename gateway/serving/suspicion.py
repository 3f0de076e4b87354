"""What a worker's crash says about a request that it had (docs/decisions/0018).

the crash was in …      the next worker computes the request's first steps …
everybody's steps       with those of all other suspects of such a crash          (`Suspicion.GROUP`)
its group's steps       alone                                                     (`Suspicion.ALONE`)
its own steps           nowhere: the request is refused
others' steps           as if there had been no crash
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.contract.ids import RequestKey

MAX_CRASHES = 8
"""Crashes in everybody's steps that a choice may have been present at; one more fails it. This catches a request that
crashes workers later than in its first steps."""


class Share(StrEnum):
    """A request's share in the loss of a worker."""

    NONE = "none"
    """The worker has not crashed, or it was dead before the request reached it."""
    STOOD_BY = "stood by"
    """The worker crashed in the steps of others."""
    PERHAPS = "perhaps"
    """The worker crashed in everybody's steps."""
    IN_GROUP = "in a group"
    """The worker crashed in the steps of a group of suspects that the request belonged to."""
    ALONE = "alone"
    """The worker crashed in steps of this request alone."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash of a worker's process."""

    at: float
    num_on_trial: int = 0
    """Suspects that the last steps were computed for, as the worker last reported; 0 means everybody's steps."""
    on_trial: frozenset[RequestKey] = frozenset()
    """This gateway's requests among these suspects."""

    def share_of(self, key: RequestKey, begun_at: float) -> Share:
        """The share of a request that was given to the worker at `begun_at`."""
        if begun_at > self.at:
            return Share.NONE
        if not self.num_on_trial:
            return Share.PERHAPS
        if key not in self.on_trial:
            return Share.STOOD_BY
        return Share.ALONE if self.num_on_trial == 1 else Share.IN_GROUP
