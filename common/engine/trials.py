"""Suspects: requests that were on a worker when it crashed (`gateway.serving.suspicion`). Their first steps are apart
from everybody else's.

Whose steps come next is told to the gateways before they begin: should the worker crash, it was one of these. Suspects
of a first crash are tried as a group, in turns with everybody else, who have at least half of the time. Who was in the
steps of a group when that crashed a worker is tried alone: it is cleared, or convicted, by what happens meanwhile,
whoever else is here, and whichever gateways they come from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import Message, Suspicion, Trial

TRIAL_TOKENS: Final = 4
"""Tokens beyond the place of a crash with which a suspect is above suspicion."""
TRIAL_S: Final = 5.0
"""Longest that everybody else stands still for one suspect; after that it runs with them, uncleared."""
NOTICE_S: Final = 0.005
"""What the news is given to leave the process, before a step that may end it."""


class Trials:
    """The suspects at one worker, in the order of their arrival, and whose turn it is."""

    def __init__(self) -> None:
        self.turn: tuple[RequestKey, ...] = ()
        """The suspects whose steps these are; with none, they are everybody else's."""
        self._suspects: dict[RequestKey, Suspicion] = {}
        self._level = Suspicion.NONE
        """Of the last turn."""
        self._began = -math.inf
        self._others_wait = False
        """Whether somebody else has stood still for the last turn."""
        self._others_until = -math.inf
        """When they have had as much time as the group's last turn took."""

    def __bool__(self) -> bool:
        return bool(self._suspects or self.turn)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._suspects

    def suspects(self) -> tuple[RequestKey, ...]:
        """In the order of their arrival."""
        return tuple(self._suspects)

    def add(self, key: RequestKey, level: Suspicion) -> None:
        """A request is here; inert if it is no suspect."""
        if level is not Suspicion.NONE:
            self._suspects[key] = level

    def discard(self, key: RequestKey) -> None:
        """A request has left, or is a suspect no more; inert for others."""
        self._suspects.pop(key, None)

    def choose(self, present: Collection[RequestKey], now: float) -> Collection[RequestKey]:
        """Who of those that could be in the next step may: a group of suspects, one of them, or everybody else. The
        step before is over."""
        if self.turn and self._level is Suspicion.ALONE:
            (key,) = self.turn
            if now >= self._began + TRIAL_S:
                self.discard(key)
            if key in self._suspects and key in present:
                return self.turn
        if self.turn:
            self._end_turn(now)
        others = [key for key in present if key not in self._suspects]
        if others and (self._others_wait or now < self._others_until):
            self._others_wait = False
            return others
        self._begin_turn(present, now)
        return self.turn or others

    def _begin_turn(self, present: Collection[RequestKey], now: float) -> None:
        group = [key for key, level in self._suspects.items() if level is Suspicion.GROUP and key in present]
        single = [key for key, level in self._suspects.items() if level is Suspicion.ALONE and key in present][:1]
        if group and single:
            group, single = ([], single) if self._level is Suspicion.GROUP else (group, [])
        if group or single:
            self.turn, self._began = tuple(group or single), now
            self._level = Suspicion.GROUP if group else Suspicion.ALONE

    def _end_turn(self, now: float) -> None:
        self.turn, self._others_wait = (), True
        if self._level is Suspicion.GROUP:  # the news of this turn and of theirs are on its account
            self._others_until = now + min(now - self._began + 2 * NOTICE_S, TRIAL_S)


class TrialFeed:
    """Tells the gateways whose turn it is: how many requests, and to each gateway which of its own."""

    def __init__(
        self,
        trials: Trials,
        gateway_of: Callable[[RequestKey], Incarnation | None],
        send: Callable[[Incarnation, Message], None],
    ) -> None:
        """`gateway_of` tells whose a request is, or None if it has left."""
        self._trials = trials
        self._gateway_of = gateway_of
        self._send = send
        self._gateways: dict[Incarnation, None] = {}
        self._told: tuple[RequestKey, ...] = ()

    def begin(self, gateway: Incarnation) -> None:
        """A session with a gateway is open, maybe again."""
        self._gateways[gateway] = None
        if self._told:
            self._tell([gateway])

    def end(self, gateway: Incarnation) -> None:
        """Its session is over; inert for a client that is no gateway."""
        self._gateways.pop(gateway, None)

    def publish(self) -> bool:
        """To be called before each step, and when there is none to begin; whether there was any news."""
        if self._trials.turn == self._told:
            return False
        self._told = self._trials.turn
        self._tell(self._gateways)
        return True

    def _tell(self, gateways: Iterable[Incarnation]) -> None:
        requests: defaultdict[Incarnation | None, list[RequestKey]] = defaultdict(list)
        for key in self._told:
            requests[self._gateway_of(key)].append(key)
        for gateway in gateways:
            self._send(gateway, Trial(num_requests=len(self._told), requests=tuple(requests[gateway])))
