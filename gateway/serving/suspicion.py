"""What the end of a worker says of a request that it had (docs/decisions/0018).

a crash in …            the next worker computes its first steps …
everybody's steps       with those of all other suspects of such a crash          (`Suspicion.GROUP`)
those of its group      alone                                                     (`Suspicion.ALONE`)
steps of its own        nowhere: it is refused
others' steps           as if nothing had been
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.contract.ids import RequestKey
from common.contract.messages import Suspicion

TRIAL_TOKENS = 4
"""Tokens beyond the place of a crash with which a suspect is above suspicion."""
MAX_CRASHES = 8
"""Workers that may crash in everybody's steps while a choice is there, for one that kills later than in its first
steps; one more fails it."""


class Share(StrEnum):
    """What a request has to do with the loss of a worker."""

    NONE = "none"
    """The worker has not crashed; or the request was on its way to a dead one."""
    STOOD_BY = "stood by"
    """It crashed in the steps of others."""
    PERHAPS = "perhaps"
    """It crashed in everybody's steps."""
    IN_GROUP = "in a group"
    """It crashed in the steps of a group of suspects, of which the request was one."""
    ALONE = "alone"
    """It crashed in steps of the request's own."""


@dataclass(frozen=True, slots=True)
class Crash:
    """The end of a worker's process."""

    at: float
    num_on_trial: int = 0
    """Requests whose steps these were, as the worker has said last; with none, they were everybody's."""
    on_trial: frozenset[RequestKey] = frozenset()
    """Those of this gateway."""

    def share_of(self, key: RequestKey, begun_at: float) -> Share:
        """Of a request that was given to the worker at `begun_at`."""
        if begun_at > self.at:
            return Share.NONE
        if not self.num_on_trial:
            return Share.PERHAPS
        if key not in self.on_trial:
            return Share.STOOD_BY
        return Share.ALONE if self.num_on_trial == 1 else Share.IN_GROUP


def suspicion_after(before: Suspicion, share: Share) -> Suspicion:
    """How a request is to be tried after the loss of a worker."""
    if share in (Share.NONE, Share.STOOD_BY):
        return before
    if before is Suspicion.NONE:
        return Suspicion.GROUP
    return before if share is Share.PERHAPS else Suspicion.ALONE
