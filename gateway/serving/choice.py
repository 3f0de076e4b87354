"""What the client of a request has: the tokens of each choice, and the log probabilities of the prompt.

Several attempts may bring them; each position is accepted once. A choice also knows what has failed it. Pure state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from common.contract.messages.gateway import TRIAL_TOKENS, Suspicion
from common.contract.messages.session import Role
from gateway.serving.suspicion import Share
from gateway.workers.worker_life import WorkerLife

_FIRST_MOVE_PAUSE_S: Final = 1.0
_LONGEST_MOVE_PAUSE_S: Final = 32.0


@dataclass(slots=True, eq=False)
class Choice:
    """One choice as its client has it."""

    index: int
    token_ids: list[int]
    """The prompt, and every token that the client has. Choices without a token of their own share the list."""
    ended: bool = False
    given_up: bool = False
    """Whether it has ended because its client needs no more of it. Workers may still send some."""
    num_failures: int = 0
    """Failed attempts since its last token from a decode worker."""
    num_bugs: int = 0
    """Attempts among `num_failures` whose worker reported an internal error."""
    num_transfers: int = 0
    """Attempts among `num_failures` whose decode worker could not read the KV."""
    num_crashes: int = 0
    """Workers that crashed with this choice while they computed everybody's steps together."""
    suspicion: Suspicion = Suspicion.NONE
    innocent_at: int = 0
    """Position at which the choice is no longer suspected."""
    avoid: set[WorkerLife] = field(default_factory=set)
    """Workers that have failed it since its last token from a decode worker."""
    too_small: set[WorkerLife] = field(default_factory=set)
    """Workers that have said that they can never hold it."""
    bad_sinks: set[WorkerLife] = field(default_factory=set)
    """Workers that could not take it over from the one that generates it, for another reason than want of room."""
    _moves_after: float | None = None
    """When `bad_sinks` may be tried again, if nobody else is left; monotonic seconds."""
    _move_pause_s: float = _FIRST_MOVE_PAUSE_S

    @property
    def next_position(self) -> int:
        """Position of the next token for the client."""
        return len(self.token_ids)

    @property
    def suspected(self) -> bool:
        """Whether it may be what crashed a worker."""
        return self.suspicion is not Suspicion.NONE

    def progressed(self, role: Role) -> None:
        """Forget the failures before its new tokens if they come from a decode worker: those of a prefill worker do not
        show that a decode worker can read from it. The suspicion is forgotten once enough tokens have come."""
        if role is Role.DECODE:
            self.num_failures = self.num_bugs = self.num_transfers = 0
            self.avoid.clear()
        if self.ended or self.next_position >= self.innocent_at:
            self.suspicion = Suspicion.NONE

    def may_try_again(self, now: float) -> bool:
        """Whether those that could not take it over may be tried again, because there are no others: after a pause that
        begins with the first call, and is twice as long each time."""
        if self._moves_after is None:
            self._moves_after = now + self._move_pause_s
            self._move_pause_s = min(2 * self._move_pause_s, _LONGEST_MOVE_PAUSE_S)
        if now < self._moves_after:
            return False
        self._moves_after = None
        self.bad_sinks.clear()
        return True

    def moved(self) -> None:
        """Another worker has taken it over: what could not take it from the one before may take it from this one."""
        self.bad_sinks.clear()
        self._moves_after, self._move_pause_s = None, _FIRST_MOVE_PAUSE_S

    def suspect(self, share: Share) -> None:
        """Note the loss of a worker that had it."""
        if share in (Share.NONE, Share.STOOD_BY):
            return
        if self.suspicion is Suspicion.NONE:
            self.suspicion = Suspicion.GROUP
        elif share is not Share.PERHAPS:
            self.suspicion = Suspicion.ALONE
        self.num_crashes += share is Share.PERHAPS
        self.innocent_at = self.next_position + TRIAL_TOKENS


@dataclass(slots=True, eq=False)
class PromptReport:
    """The client's log probabilities of the prompt."""

    end: int
    """End of the positions that the client wants; 0 for none."""
    next_position: int = 1
    """Position of the next log probability for the client. The first token has none."""

    @property
    def complete(self) -> bool:
        """Whether the client has all that it wants."""
        return self.next_position >= self.end
