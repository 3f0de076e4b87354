"""What a flow decides (`gateway.serving.flow`); whoever holds the flow carries it out, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from common.contract.ids import RequestKey
from gateway.serving.attempt import Assignment, Attempt, Deliver, SendToWorker
from gateway.serving.choice import Choice
from gateway.serving.generation import Fail, PromptDelta
from gateway.workers.worker_life import WorkerLife

FIRST_DELAY_S = 0.05
"""Seconds before a new attempt after two failures in a row; each further failure doubles it."""


@dataclass(slots=True, eq=False)
class Want:
    """Choices that want workers: call `Flow.go` once these are chosen."""

    key: RequestKey
    choices: tuple[Choice, ...]
    avoid: frozenset[WorkerLife] = frozenset()
    """Workers that have just failed these choices."""
    offer: Assignment | None = None
    """A prefill worker's assignment whose offer still stands."""
    delay_s: float = 0.0
    too_small: frozenset[WorkerLife] = frozenset()
    """Workers that can never hold these choices."""
    hopeless_at: float | None = None
    """When no worker was left that could take these choices now or later; None while there is one."""

    @classmethod
    def of(cls, key: RequestKey, choices: Sequence[Choice], offer: Assignment | None) -> Self:
        """What these choices want after all that has failed them."""
        num_failures = max(choice.num_failures for choice in choices)
        return cls(
            key,
            tuple(choices),
            frozenset(life for choice in choices for life in choice.avoid),
            offer,
            delay_s=FIRST_DELAY_S * 2 ** (num_failures - 2) if num_failures >= 2 else 0.0,
            too_small=frozenset(life for choice in choices for life in choice.too_small),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence whose KV is wanted."""
        return self.choices[0].next_position if self.offer is None else self.offer.num_tokens


class Wants(list[Want]):
    """The wants of a request."""

    def at(self, address: str) -> list[tuple[Want, Assignment]]:
        """The wants whose offer stands at a worker, and these offers."""
        offers = ((want, want.offer) for want in self)
        return [(want, offer) for want, offer in offers if offer is not None and offer.life.address == address]

    def find(self, key: RequestKey, address: str) -> Want | None:
        """The want whose offer a prefill worker has made under this key; None if there is none."""
        return next((want for want, offer in self.at(address) if offer.key == key), None)


class Unwanted(NamedTuple):
    """Action: the request has ended, or the offer has fallen: these choices want workers for it no more."""

    want: Want


class AttemptBegan(NamedTuple):
    """Action: expect messages about this attempt."""

    attempt: Attempt


class AssignmentOver(NamedTuple):
    """Action: a worker has nothing more to do for this assignment."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Done:
    """Terminal: every choice is complete."""


FlowAction = SendToWorker | Deliver | PromptDelta | Want | Unwanted | AttemptBegan | AssignmentOver | Done | Fail
