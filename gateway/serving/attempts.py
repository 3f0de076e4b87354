"""The attempts of a request that are under way, and which of them continue others. Pure state."""

from __future__ import annotations

from common.contract.ids import RequestKey
from gateway.serving.attempt import Assignment, Attempt
from gateway.serving.choice import Choice


class Attempts(list[Attempt]):
    """Attempts under way, in the order in which they began. Usually there is one. A second one may pull a choice from
    a draining worker, whose attempt is then its source; choices that have parted have attempts of their own."""

    @property
    def whereabouts(self) -> str:
        """Where the request is, for the client: without addresses."""
        if not self:
            return "it waits for workers"
        return f"a {'prefill and a ' if any(attempt.prefill for attempt in self) else ''}decode worker had it"

    def find(self, key: RequestKey, address: str) -> tuple[Attempt, Assignment] | None:
        """The attempt, and its assignment at this address, that messages under `key` belong to; None if there is
        none."""
        return next((found for found in self.at(address) if found[1].key == key), None)

    def at(self, address: str) -> list[tuple[Attempt, Assignment]]:
        """The assignments at a worker."""
        return [(a, each) for a in self for each in a.assignments if each.life.address == address]

    def source_of(self, moving: Attempt, choice: Choice) -> Attempt | None:
        """The attempt that this one is pulling the choice from, if that is still under way."""
        return next((each for each in self if each.decode is moving.moving and choice in each.unfinished), None)

    def is_moving(self, choice: Choice, old: Attempt) -> bool:
        """Whether another attempt is pulling the choice from this one."""
        return any(each.moving is old.decode and choice in each.unfinished for each in self)

    def movable(self, address: str) -> list[tuple[Attempt, Choice]]:
        """Running sequences of the decode worker at `address` of which the client has a token, and that no worker pulls
        yet."""
        return [
            (attempt, choice)
            for attempt, assignment in self.at(address)
            if assignment is attempt.decode and attempt.decode_has_spoken
            for choice in attempt.unfinished
            if self._may_move(attempt, choice)
        ]

    def can_move(self, attempt: Attempt, choice: Choice) -> bool:
        """Whether a sequence that was `movable` still is."""
        return attempt in self and choice in attempt.unfinished and self._may_move(attempt, choice)

    def needs(self, choice: Choice, broken: Attempt) -> bool:
        """Whether nothing generates the choice any more without this attempt."""
        if self.is_moving(choice, broken):
            return False
        source = self.source_of(broken, choice)
        return source is None or broken.decode_has_spoken or choice.index in source.cut

    def _may_move(self, attempt: Attempt, choice: Choice) -> bool:
        begun = choice.next_position > len(attempt.generation.token_ids)
        return begun and self.source_of(attempt, choice) is None and not self.is_moving(choice, attempt)
