"""The events that a worker's shell reports to its core, and the actions that the core answers with.

Events and actions of pulls and leases are in `kv_transfer.events`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.session import Role
from common.engine.batch import Decodes, Drafting, Slice, StepResult
from common.engine.grammar import GaveUp, GrammarState
from kv_transfer.events import TransferAction, TransferEvent

# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a client: a gateway, or a worker that pulls from this one."""

    peer: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """A session opens, or opens again: requests and pulls of the client that it does not list are given up."""

    peer: Incarnation
    listed: Collection[RequestKey]


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """From now on messages can be sent to the client."""

    peer: Incarnation
    role: Role


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The session with a client has ended."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class MaskMade:
    """The mask of a text's next token is in `state`, or will never be."""

    state: GrammarState
    gave_up: GaveUp | None


@dataclass(frozen=True, slots=True)
class StepWanted:
    """The engine is free for a step, or will be when the step `before` has ended. A `PlannedStep` follows if there is
    anything to compute that can be planned now."""

    before: PlannedStep | None


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step has ended."""

    work: PlannedStep
    result: StepResult
    checksums: Sequence[tuple[int, ...]]
    """CRC-32 of the blocks `work.completed`; empty if the deployment does not use checksums."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Some time has passed: whatever is overdue ends."""


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """Take no new work."""


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """The time for draining is over: fail the requests that are left."""

    why: str


Event = (
    Received
    | HelloReceived
    | SessionOpened
    | PeerLost
    | MaskMade
    | StepWanted
    | StepEnded
    | Ticked
    | DrainWanted
    | DrainEnded
    | TransferEvent
)

# --- actions -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PlannedStep:
    """Compute this step next; `StepEnded` follows."""

    plan: Any
    """The core's own record of the step."""
    slices: Sequence[Slice]
    decodes: Decodes | None = None
    """Sequences that decode; None if there are none."""
    drafting: Drafting | None = None
    """What a draft model computes before; None if nothing."""
    copies: Sequence[tuple[int, int]] = ()
    swap_outs: Sequence[tuple[int, int]] = ()
    swap_ins: Sequence[tuple[int, int]] = ()
    completed: Sequence[Sequence[int]] = ()
    """Blocks that each slice completes and whose checksums are wanted; empty without checksums."""
    noticed: bool = False
    """Whether gateways were just told which suspects are in it. That message must leave before the step begins."""


@dataclass(frozen=True, slots=True)
class AskMask:
    """Compute which tokens may follow `token_ids`, whose output begins at `prompt_len`; `MaskMade` follows."""

    grammar: str
    state: GrammarState
    token_ids: Sequence[int]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class ForgetMask:
    """The mask of `state` is not needed any more; inert if none is awaited."""

    state: GrammarState


Action = PlannedStep | AskMask | ForgetMask | TransferAction
