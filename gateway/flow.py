"""One request's handoff, as the gateway sees it: tokens accepted by (attempt, position), and exactly one end.

Life cycle of a request in the gateway:

    1. A prefill and a decode worker are chosen; Prefill and Decode leave together. Or a decode worker alone, which
       computes the prompt itself: then there is no Prefill, no step 2, and every token comes from there.
    2. The first token of each choice comes from the prefill worker (Tokens), and goes to the client at once.
    3. The decode worker's first frame repeats it, and goes on. Duplicates are dropped, gaps asked for again (Resend).
    4. Every choice has its finish reason: done, and the decode worker may forget (Ack). Or a worker fails, or is lost,
       or the time runs out: failed, with the cause. Or the client leaves: cancelled. Each end frees every worker.

Pure state: events in, actions out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import (
    Abort,
    Ack,
    Cancelled,
    Decode,
    Failed,
    Finished,
    Message,
    Prefill,
    PrefixHint,
    Resend,
    Role,
    Source,
    Tokens,
)
from gateway.generation import Delta, Generation


class FlowState(StrEnum):
    """Where a request is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the request's worker of this role."""

    role: Role
    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the client new tokens."""

    delta: Delta


@dataclass(frozen=True, slots=True)
class Done:
    """Terminal: every choice is complete."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Terminal: the request failed."""

    cause: Cause
    message: str


Action = Send | Deliver | Done | Fail


@dataclass(slots=True)
class _Choice:
    next_position: int
    ended: bool = False
    asked_again: int | None = None
    """Position from which a Resend is under way."""


@dataclass(frozen=True, slots=True)
class Place:
    """A worker chosen for a request."""

    address: str
    incarnation: Incarnation


class Flow:
    """One attempt at one request, on one pair of workers, or on a decode worker alone."""

    def __init__(self, key: RequestKey, generation: Generation, prefill: Place | None, decode: Place) -> None:
        """Without `prefill`, the decode worker computes the prompt."""
        self.key = key
        self.generation = generation
        self.places = {Role.DECODE: decode} if prefill is None else {Role.PREFILL: prefill, Role.DECODE: decode}
        self.state = FlowState.RUNNING
        self.story: list[str] = []
        self._choices = [_Choice(len(generation.token_ids)) for _ in range(generation.num_choices)]
        self.decode_has_spoken = False
        """Whether any of the tokens came from the decode worker: it holds the KV of all that came before them."""
        self.num_duplicates = 0
        self.num_gaps = 0

    @property
    def running(self) -> bool:
        """Whether the end has not come yet."""
        return self.state is FlowState.RUNNING

    # --- events --------------------------------------------------------------------------------------------------

    def start(self, budget_s: float, prefix: PrefixHint | None = None) -> list[Action]:
        """Give each worker its part; `prefix` tells the prefill worker where the prompt's beginning may be found."""
        request, attempt = self.key
        work: dict[str, Any] = {
            "request": request,
            "attempt": attempt,
            "token_ids": self.generation.token_ids,
            "prompt_len": len(self.generation.token_ids),
            "choices": tuple(range(self.generation.num_choices)),
            "sampling": self.generation.sampling,
            "budget_s": budget_s,
            "tier": self.generation.tier,
            "tenant": self.generation.tenant,
            "cache_salt": self.generation.cache_salt,
        }
        prefill, decode = self.places.get(Role.PREFILL), self.places[Role.DECODE]
        if prefill is None:
            self.story.append(f"prefill and decode at {decode.address}")
            return [Send(Role.DECODE, Decode(**work, source=None))]
        self.story.append(f"prefill at {prefill.address}, decode at {decode.address}")
        if prefix is not None:
            self.story[-1] += f", {prefix.num_tokens} tokens of prefix perhaps at {prefix.source.address}"
        source = Source(address=prefill.address, incarnation=prefill.incarnation)
        return [Send(Role.PREFILL, Prefill(**work, prefix=prefix)), Send(Role.DECODE, Decode(**work, source=source))]

    def on_message(self, role: Role, message: Message) -> list[Action]:
        """A message about this attempt from its worker of this role."""
        if self.state is not FlowState.RUNNING:
            return []
        match message:
            case Tokens():
                return self._on_tokens(role, message)
            case Failed(cause=cause, message=text):
                return self.fail(cause, text)
            case Finished() if role is Role.DECODE:
                return self._ask_for_missing()
            case Cancelled():
                return self.fail(Cause.INTERNAL, f"the {role} worker cancelled a request that was not aborted")
            case _:
                return []

    def on_resync(self, role: Role, open_requests: frozenset[RequestKey]) -> list[Action]:
        """Messages to or from this worker were lost; these requests are open there."""
        if self.state is not FlowState.RUNNING:
            return []
        if role is Role.DECODE and self.key in open_requests:
            return self._ask_for_missing()
        if self.key in open_requests or (role is Role.PREFILL and self._prefill_may_go()):
            return []
        return self.fail(Cause.WORKER_LOST, f"the {role} worker does not know the request after lost messages")

    def worker_lost(self, role: Role, why: str) -> list[Action]:
        """The session with this worker is over. After its first tokens a prefill worker is the decode worker's concern:
        it goes on if it has settled, and says so if it has not."""
        if role is Role.PREFILL and self._prefill_may_go():
            return []
        return self.fail(Cause.WORKER_LOST, f"the {role} worker was lost: {why}")

    def fail(self, cause: Cause, message: str) -> list[Action]:
        """End with an error; inert after the end."""
        if self.state is not FlowState.RUNNING:
            return []
        self._end(FlowState.FAILED, f"{cause}: {message}")
        return [*self._abort(), Fail(cause, message)]

    def cancel(self) -> list[Action]:
        """The client has left; inert after the end."""
        if self.state is not FlowState.RUNNING:
            return []
        self._end(FlowState.CANCELLED, "cancelled")
        return self._abort()

    # --- the steps between ---------------------------------------------------------------------------------------

    def _on_tokens(self, role: Role, message: Tokens) -> list[Action]:
        if role is Role.DECODE:
            self.decode_has_spoken = True
        if message.choice >= len(self._choices):
            return self.fail(Cause.INTERNAL, f"the {role} worker sent a choice that was not asked for")
        choice = self._choices[message.choice]
        if choice.ended:
            self.num_duplicates += 1
            return []
        skip = choice.next_position - message.position
        if skip < 0:
            return self._ask_again(message.choice, choice)
        token_ids = message.token_ids[skip:]
        if not token_ids:
            self.num_duplicates += 1
            return []
        choice.next_position += len(token_ids)
        choice.asked_again = None
        choice.ended = message.finish_reason is not None
        logprobs = None if message.logprobs is None else message.logprobs[skip:]
        delta = Delta(
            choice=message.choice, token_ids=token_ids, logprobs=logprobs, finish_reason=message.finish_reason
        )
        if not all(each.ended for each in self._choices):
            return [Deliver(delta)]
        self._end(FlowState.DONE, "done")
        return [Deliver(delta), *self._acknowledge(), Done()]

    def _ask_again(self, index: int, choice: _Choice) -> list[Action]:
        self.num_gaps += 1
        if choice.asked_again == choice.next_position:
            return []
        choice.asked_again = choice.next_position
        request, attempt = self.key
        self.story.append(f"gap in choice {index} at {choice.next_position}")
        return [
            Send(Role.DECODE, Resend(request=request, attempt=attempt, choice=index, position=choice.next_position))
        ]

    def _ask_for_missing(self) -> list[Action]:
        """Every token of the choices that have not ended, from where they stand."""
        request, attempt = self.key
        return [
            Send(Role.DECODE, Resend(request=request, attempt=attempt, choice=index, position=choice.next_position))
            for index, choice in enumerate(self._choices)
            if not choice.ended
        ]

    def _prefill_may_go(self) -> bool:
        """Whether the first tokens are here, or sure to come: a decode worker speaks only after it has settled."""
        return self.decode_has_spoken or all(
            choice.next_position > len(self.generation.token_ids) for choice in self._choices
        )

    def _acknowledge(self) -> list[Action]:
        """Every choice is complete. Had the first tokens ended them all, the decode worker still waits in vain."""
        request, attempt = self.key
        if self.decode_has_spoken:
            return [Send(Role.DECODE, Ack(request=request, attempt=attempt))]
        return [Send(Role.DECODE, Abort(request=request, attempt=attempt))]

    def _abort(self) -> list[Action]:
        request, attempt = self.key
        abort = Abort(request=request, attempt=attempt)
        return [Send(role, abort) for role in self.places]

    def _end(self, state: FlowState, why: str) -> None:
        self.state = state
        self.story.append(why)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert Role.DECODE in self.places, self.story
        assert all(choice.next_position >= len(self.generation.token_ids) for choice in self._choices), self.story
        if self.state is FlowState.DONE:
            assert all(choice.ended for choice in self._choices), self.story
