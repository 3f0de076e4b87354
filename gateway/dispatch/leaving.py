"""Running sequences that are to leave draining decode workers, found a few at a time, and where they may go. Pure.

Life cycle of a round, which looks at every request once, oldest first:

    begun ──► the request's sequences at that worker are returned one at a time ──► over
      └─────► over early: the worker serves again or is gone, or no other worker has room
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.contract.kv_layout import Fingerprint
from common.contract.messages.session import Phase, Role
from common.contract.tiers import Tier
from gateway.dispatch.ask import Ask
from gateway.dispatch.open_request import OpenRequest
from gateway.dispatch.router import Router
from gateway.serving.attempt import Attempt
from gateway.serving.choice import Choice
from gateway.workers.registry import Registry
from gateway.workers.worker_view import WorkerView

MOST_LOOKED_AT = 64
"""Requests and attempts that are examined in one call before it returns None."""
_ONE_TOKEN = Ask(num_tokens=1, tier=Tier.INTERACTIVE)
"""The least that a sequence can ask for."""


@dataclass(frozen=True, slots=True)
class Leaver:
    """A running sequence that is to leave a worker."""

    request: OpenRequest
    attempt: Attempt
    choice: Choice


class Leaving:
    """The rounds in progress, at most one for each worker."""

    def __init__(self, registry: Registry, router: Router) -> None:
        self._registry = registry
        self._router = router
        self._rounds: dict[str, Iterator[Leaver | None]] = {}
        self._none_for: dict[Tier, int] = {}
        """Tier → tokens of the shortest of its sequences for which no worker had room since a round began."""

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def begin(self, address: str, requests: Iterable[OpenRequest]) -> None:
        """Begin a round through `requests`, because the worker at `address` drains. Inert during a round: a draining
        worker reports itself again, and the next round finds sequences that this one has missed."""
        if address not in self._rounds:
            self._none_for.clear()
            self._rounds[address] = _look_through(address, tuple(requests), self._none_for)

    def next(self) -> Leaver | None:
        """The next sequence to leave, from the oldest round; None if those examined in this call have none, or the
        round is over. A round ends as soon as sequences may not leave its worker any more (`may_leave`)."""
        address, leavers = next(iter(self._rounds.items()))
        if self.may_leave(address):
            for leaver in leavers:
                if leaver is None or leaver.request.flow.attempts.can_move(leaver.attempt, leaver.choice):
                    return leaver
        del self._rounds[address]
        return None

    def may_leave(self, address: str) -> bool:
        """Whether the worker at `address` is a draining decode worker, and another one may have room for its
        sequences."""
        leaving = self._registry.workers.get(address)
        if leaving is None or leaving.role is not Role.DECODE:
            return False
        if leaving.welcome is None or leaving.load is None or leaving.load.phase is Phase.SERVING:
            return False
        others = self._router.takers(_ONE_TOKEN._replace(fingerprint=leaving.welcome.fingerprint))
        return any(
            worker.has_room(_ONE_TOKEN.num_tokens, _ONE_TOKEN.tier) for worker in self._registry.table.views(others)
        )

    def refuge(
        self,
        address: str,
        choice: Choice,
        most_tokens: int,
        fingerprint: Fingerprint | None,
        tier: Tier,
        now: float,
    ) -> WorkerView | None:
        """A decode worker other than the one at `address` that probably has room for a leaving sequence; None without
        one. Those that have failed to take it over are tried again after a pause if there are no others."""
        ask = Ask(
            num_tokens=choice.next_position,
            tier=tier,
            most_tokens=most_tokens,
            fingerprint=fingerprint,
            too_small=frozenset(choice.too_small),
            admitted=True,
        )
        rows = self._router.takers(ask)
        others = {
            row: worker.life
            for row, worker in zip(rows.tolist(), self._registry.table.views(rows), strict=True)
            if worker.address != address and worker.has_room(ask.num_tokens, tier)
        }
        # Only if each usable worker comes into question: another sequence may go where this one does not fit.
        if not others and len(rows) == len(self._router.takers(_ONE_TOKEN._replace(fingerprint=fingerprint))):
            self._none_for[tier] = min(ask.num_tokens, self._none_for.get(tier, ask.num_tokens))
        untried = [row for row, life in others.items() if life not in choice.bad_sinks]
        if not others or not (untried or choice.may_try_again(now)):
            return None
        return self._router.taker(np.array(untried or list(others)), ask, {})


def _look_through(
    address: str, requests: Sequence[OpenRequest], none_for: Mapping[Tier, int]
) -> Iterator[Leaver | None]:
    """Sequences that run at a worker, and None after every few requests without any. All sequences of a request are
    found together, so some of them may have ended before they are returned. Those for which there is no room by
    `none_for` (tier → tokens of the shortest one) are left out."""
    num_looked_at = 0
    for request in requests:
        num_looked_at += 1 + len(request.flow.attempts)
        tier = request.flow.generation.tier
        for attempt, choice in request.flow.attempts.movable(address):
            if tier in none_for and choice.next_position >= none_for[tier]:
                continue
            num_looked_at = 0
            yield Leaver(request, attempt, choice)
        if num_looked_at >= MOST_LOOKED_AT:
            num_looked_at = 0
            yield None
