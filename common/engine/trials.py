"""Suspects: requests that were on a worker when it crashed (`gateway.serving.flow`). Each one's first steps are its
own.

Whoever is alone in a step has nobody to share the blame with: the gateways are told before that step begins, and after
the last of them. So a suspect is cleared, or convicted, by what happens while it is alone, whoever else is here, and
whichever gateways they come from. Between two trials the others have a step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from common.contract.ids import RequestKey

TRIAL_TOKENS: Final = 4
"""Tokens beyond the place of a crash with which a suspect is above suspicion."""
TRIAL_S: Final = 5.0
"""Longest that everybody else stands still for one suspect; after that it runs with them, uncleared."""
NOTICE_S: Final = 0.005
"""What the news is given to leave the process, before a step that may end it."""


class Trials:
    """The suspects at one worker, in the order of their arrival, and the one that is alone."""

    def __init__(self) -> None:
        self.alone: RequestKey | None = None
        """Whose steps these are."""
        self._suspects: dict[RequestKey, None] = {}
        self._until = 0.0
        self._others_wait = False
        """Whether somebody else has stood still for the last trial."""
        self._news: list[tuple[RequestKey, bool]] = []

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._suspects

    def suspects(self) -> tuple[RequestKey, ...]:
        """In the order of their arrival."""
        return tuple(self._suspects)

    def add(self, key: RequestKey) -> None:
        """A suspect is here."""
        self._suspects[key] = None

    def discard(self, key: RequestKey) -> None:
        """A request has left, or is a suspect no more; inert for others."""
        self._suspects.pop(key, None)
        if key == self.alone:
            self._end()

    def choose(self, present: Collection[RequestKey], now: float) -> Collection[RequestKey]:
        """Who of those that could be in the next step may: one suspect, or everybody else."""
        if not self._suspects:
            return present
        if self.alone is not None and now >= self._until:
            self.discard(self.alone)
        if self.alone is not None and self.alone not in present:
            self._end()
        if self.alone is None:
            suspects = [key for key in self._suspects if key in present]
            others = [key for key in present if key not in self._suspects]
            if not suspects or (others and self._others_wait):
                self._others_wait = False
                return others
            self._begin(suspects[0], now)
        assert self.alone is not None
        return (self.alone,)

    def news(self) -> list[tuple[RequestKey, bool]]:
        """Who is alone, or is so no more, since this was asked last."""
        news, self._news = self._news, []
        return news

    def _begin(self, key: RequestKey, now: float) -> None:
        self.alone, self._until = key, now + TRIAL_S
        self._news.append((key, True))

    def _end(self) -> None:
        assert self.alone is not None
        self._news.append((self.alone, False))
        self.alone, self._others_wait = None, True
