"""Suspects: requests that were on a worker when it crashed (`gateway.serving.suspicion`). Their first steps are
computed apart from those of all other requests.

The gateways are told which suspects take part in the next steps before these steps begin. If the worker then crashes,
it was one of them. Suspects of a first crash are tried as a group, in turns with all other requests, which have at
least half of the time. A suspect that took part in a group's steps when they crashed a worker is tried alone. The trial
clears or convicts it, whichever other requests are on the worker and whichever gateways they come from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeVar

from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Suspicion
from common.contract.messages.worker import Trial

S = TypeVar("S")

TRIAL_S: Final = 5.0
"""Longest time, in seconds, that all other requests wait for one suspect. Then it runs with them, uncleared."""
NOTICE_S: Final = 0.005
"""Seconds that the news has to leave the process, before a step that may end it."""


class Trials:
    """The suspects on one worker, in the order of their arrival, and whose turn it is."""

    def __init__(self) -> None:
        self.turn: tuple[RequestKey, ...] = ()
        """The suspects that have the turn; empty while all other requests have it."""
        self._suspects: dict[RequestKey, Suspicion] = {}
        self._level = Suspicion.NONE
        """Level of the suspects that had the last turn."""
        self._began = -math.inf
        self._others_wait = False
        """Whether other requests are due a step, because they waited during the last turn."""
        self._others_until = -math.inf
        """Time at which the other requests have had as much time as the group's last turn took."""

    def __bool__(self) -> bool:
        return bool(self._suspects or self.turn)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._suspects

    def add(self, key: RequestKey, level: Suspicion) -> None:
        """Add a request that has arrived; inert if it is not a suspect."""
        if level is not Suspicion.NONE:
            self._suspects[key] = level

    def discard(self, key: RequestKey) -> None:
        """Remove a request that has left or is no longer a suspect; inert for others."""
        self._suspects.pop(key, None)

    def permitted(
        self, present: Iterable[S], key_of: Callable[[S], RequestKey], now: float
    ) -> Callable[[S], bool] | None:
        """Which of `present`, parts of requests that could be in the next step, may be in it; None if there are no
        suspects, so that all may. What is left out stays as it is."""
        if not self:
            return None
        chosen = self.choose({key_of(each) for each in present}, now)
        return lambda each: key_of(each) in chosen

    def choose(self, present: Collection[RequestKey], now: float) -> Collection[RequestKey]:
        """Which of the requests `present`, which could be in the next step, may be in it: a group of suspects, one
        suspect, or all others. The step before must be over."""
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
        if self._level is Suspicion.GROUP:  # the group pays for the news of both turns
            self._others_until = now + min(now - self._began + 2 * NOTICE_S, TRIAL_S)


class TrialFeed:
    """Tells the gateways whose turn it is: the number of requests, and to each gateway which of its own are among
    them."""

    def __init__(
        self,
        trials: Trials,
        gateway_of: Callable[[RequestKey], Incarnation | None],
        send: Callable[[Incarnation, Message], None],
    ) -> None:
        """`gateway_of` returns the gateway of a request, or None if the request has left."""
        self._trials = trials
        self._gateway_of = gateway_of
        self._send = send
        self._told: tuple[RequestKey, ...] = ()

    def begin(self, gateway: Incarnation) -> None:
        """A session with a gateway has opened, perhaps again."""
        if self._told:
            self._tell([gateway])

    def publish(self, gateways: Iterable[Incarnation]) -> bool:
        """Tell `gateways`, those with a session, if the turn has changed. Returns whether it has. Call this before each
        step, and when no step begins."""
        if self._trials.turn == self._told:
            return False
        self._told = self._trials.turn
        self._tell(gateways)
        return True

    def _tell(self, gateways: Iterable[Incarnation]) -> None:
        requests: defaultdict[Incarnation | None, list[RequestKey]] = defaultdict(list)
        for key in self._told:
            requests[self._gateway_of(key)].append(key)
        for gateway in gateways:
            self._send(gateway, Trial(num_requests=len(self._told), requests=tuple(requests[gateway])))
