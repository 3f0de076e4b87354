"""One attempt at some choices of a request: on a pair of workers, or on a decode worker alone.

Life cycle of an attempt:

    1. A prefill and a decode worker are chosen; Prefill and Decode are sent together. Or a decode worker alone is
       chosen and computes the prompt itself: then there is no Prefill and no step 2, and it sends every token. Or a
       decode worker is chosen for an offer that another one has left: then the prefill worker's assignment continues.
    2. The first token of each choice comes from the prefill worker (Tokens), and goes to the client at once.
    3. The decode worker's first frame repeats that token and continues. Duplicates are dropped; gaps are requested
       again (Resend). If the client wants log probabilities of the prompt, the worker that computes the prompt sends
       them first (PromptLogprobs). Until the client has all of them, the attempt cannot do without that worker, and
       no token is accepted.
    4. Every choice has its finish reason: the decode worker may forget the request (Ack). A choice of which the client
       needs no more has ended, too, and the decode worker is told (Abort). Or an assignment fails or is lost: the flow
       (`gateway.serving.flow`) decides what follows. Each end frees every worker.

Pure state: events in, actions out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.contract.errors import Cause
from common.contract.ids import Handle, RequestKey, new_handle
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Ack, Decode, Prefill, PrefixHint, Resend, Suspicion
from common.contract.messages.session import Role
from common.contract.messages.worker import Cancelled, Cut, Failed, Finished, Moved, PromptLogprobs, Tokens
from gateway.serving.choice import Choice, PromptReport
from gateway.serving.generation import Delta, Generation, PromptDelta
from gateway.workers.worker_life import WorkerLife

_OF_SOURCE = frozenset({Cause.WORKER_LOST, Cause.FINGERPRINT, Cause.TRANSFER})
"""Causes with which a decode worker reports a failure of its source."""
_REFUSALS = frozenset({Cause.CAPACITY, Cause.DRAINING, Cause.TOO_LARGE})
"""Causes that are refusals, not failures: this worker does not take the request, now or ever, but another one may."""


@dataclass(slots=True, eq=False)
class Assignment:
    """The share of a request that one worker was given."""

    role: Role
    life: WorkerLife
    key: RequestKey
    num_tokens: int
    """Tokens of the assignment's prompt, whichever worker computes it."""
    handles: tuple[Handle, ...] = ()
    """A decode worker's assignment: the names of its choices in `StepTokens`, in their order."""
    given_at: float = 0.0
    """When the worker was given it; monotonic seconds."""
    admitted: bool = False
    """Whether the worker was told that the request was let in."""
    over: bool = False
    """Whether the worker has nothing more to do for it."""
    lost: bool = False
    """Whether the worker is lost, or does not know it any more."""


class SendToWorker(NamedTuple):
    """Action: send a message to the worker of this assignment."""

    assignment: Assignment
    message: Message


class Deliver(NamedTuple):
    """Action: give the client new tokens."""

    delta: Delta
    key: RequestKey
    """The attempt's."""
    role: Role
    """Role of the worker that sent them."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Action: the attempt cannot go on."""

    assignment: Assignment
    """The assignment that failed."""
    cause: Cause
    message: str
    blame: tuple[Assignment, ...] = ()
    """The assignments whose workers are to be avoided."""

    @property
    def refused(self) -> bool:
        """Whether it is a refusal, and no failure. A worker must not refuse for want of room what was let in."""
        return self.cause in _REFUSALS and not (self.cause is Cause.CAPACITY and self.assignment.admitted)


AttemptAction = SendToWorker | Deliver | PromptDelta | Broken
"""A `PromptDelta` is to be given to the client."""


def abort(assignment: Assignment, choice: int | None = None) -> SendToWorker:
    """An Abort, which lets a worker free what it holds for this assignment, or for one choice of it."""
    request, attempt = assignment.key
    return SendToWorker(assignment, Abort(request=request, attempt=attempt, choice=choice))


@dataclass(slots=True)
class Tally:
    """What went wrong with the requests of a gateway, and was put right."""

    num_duplicates: int = 0
    """Token frames that repeated what was known."""
    num_gaps: int = 0
    """Token frames that came before an earlier one."""
    failures: Counter[Cause] = field(default_factory=Counter)
    """Failed attempts that were followed by another, by cause."""
    moves: Counter[str] = field(default_factory=Counter)
    """Moves of running sequences from draining workers, by how they ended: moved or stayed."""


class Attempt:
    """One attempt. It accepts tokens by position: what a choice has already from another attempt is a duplicate."""

    def __init__(
        self,
        key: RequestKey,
        generation: Generation,
        choices: Sequence[Choice],
        report: PromptReport,
        decode: WorkerLife,
        *,
        prefill: WorkerLife | None = None,
        offer: Assignment | None = None,
        moving: Assignment | None = None,
        admitted: bool,
        now: float,
        tally: Tally,
    ) -> None:
        """An attempt on `decode` and `prefill`, or on `decode` alone. Alone, `decode` takes over the `offer` of a
        prefill worker, or pulls the running sequence of the assignment `moving` from another decode worker, or else
        computes the prompt."""
        self.key = key
        self.generation = generation
        self.choices = {choice.index: choice for choice in choices}
        self.report = report
        self.token_ids = tuple(choices[0].token_ids)
        """Tokens of the sequence whose KV the decode worker gets."""
        if offer is not None:
            self.token_ids = self.token_ids[: offer.num_tokens]
        num_tokens = len(self.token_ids)
        self.prefill = offer
        if offer is None and prefill is not None:
            self.prefill = Assignment(Role.PREFILL, prefill, key, num_tokens, given_at=now, admitted=admitted)
        handles = tuple(new_handle() for _ in choices)
        self.decode = Assignment(Role.DECODE, decode, key, num_tokens, handles, now, admitted)
        self.assignments = (self.decode,) if self.prefill is None else (self.prefill, self.decode)
        """The prefill worker's assignment, if there is one, and the decode worker's."""
        self.moving = moving
        self.decode_has_spoken = False
        """Whether any tokens came from the decode worker. If so, it holds the KV of all earlier tokens."""
        self.suspicion = max((choice.suspicion for choice in choices), key=list(Suspicion).index)
        """The strongest suspicion among its choices."""
        self._tally = tally
        self.cut: set[int] = set()
        """Choices that the decode worker has stopped, because another worker pulls them."""
        self.moved: set[int] = set()
        """Choices that another attempt has taken over, or begins again."""
        self._asked: dict[int, int] = {}
        """Choice → position from which a Resend is under way."""
        self._told_end: set[int] = set()
        """Choices that the decode worker was told to give up since it has begun: the client needs no more of them, or
        another attempt begins them again."""

    @property
    def where(self) -> str:
        """Its workers, and what each of them does."""
        decode = self.decode.life.address
        if self.moving is not None:
            [index] = self.choices
            return f"choice {index} moves from {self.moving.life.address} to {decode}"
        if self.prefill is None:
            return f"prefill and decode at {decode}"
        if self.prefill.key != self.key:
            return f"decode at {decode}, from {self.prefill.life.address}"
        return f"prefill at {self.prefill.life.address}, decode at {decode}"

    @property
    def source(self) -> Assignment | None:
        """The assignment whose KV the decode worker reads; None if it computes the prompt itself."""
        return self.moving or self.prefill

    @property
    def unfinished(self) -> list[Choice]:
        """Choices that still need tokens from this attempt."""
        return [choice for choice in self.choices.values() if not choice.ended and choice.index not in self.moved]

    # --- events --------------------------------------------------------------------------------------------------

    def start(self, budget_s: float, prefix: PrefixHint | None = None) -> list[AttemptAction]:
        """Give each worker its assignment. `prefix` tells the prefill worker which worker may have the prompt's
        beginning."""
        generation = self.generation
        work: dict[str, Any] = {
            "request": self.key.request,
            "attempt": self.key.attempt,
            "token_ids": self.token_ids,
            "prompt_len": len(generation.token_ids),
            "choices": tuple(self.choices),
            "sampling": generation.sampling,
            "budget_s": budget_s,
            "tier": generation.tier,
            "tenant": generation.tenant,
            "cache_salt": generation.cache_salt,
            "admitted": self.decode.admitted,
            "suspicion": self.suspicion,
        }
        report = None if self.report.complete else generation.prompt_logprobs
        source = self.source
        decode = Decode(
            **work,
            handles=self.decode.handles,
            source=None if source is None else source.life.source,
            offered=None if source is None else source.key,
            moving=self.moving is not None,
            prompt_logprobs=report if source is None else None,
            prediction=generation.prediction,
        )
        if self.prefill is None or self.prefill.key != self.key:
            return [SendToWorker(self.decode, decode)]
        prefill = Prefill(**work, prefix=prefix, prompt_logprobs=report)
        return [SendToWorker(self.prefill, prefill), SendToWorker(self.decode, decode)]

    def on_message(self, assignment: Assignment, message: Message) -> list[AttemptAction]:
        """Handle a message from the worker of one of its assignments."""
        match message:
            case Tokens():
                return self._on_tokens(assignment, message)
            case PromptLogprobs():
                return self._on_prompt(assignment, message)
            case Failed(cause=cause, message=text):
                return [Broken(assignment, cause, text, self._to_blame(assignment, cause))]
            case Finished() if assignment is self.decode and self.report.complete:
                return self._ask_for_missing(again=False)
            case Cancelled():
                return [self._fault(assignment, "cancelled what was not aborted")]
            case Cut(choice=index) | Moved(choice=index):
                if assignment is not self.decode or index not in self.choices:
                    return [self._fault(assignment, "stopped a choice that it does not have")]
                self.cut.add(index)
        return []

    def take(self, choice: Choice, position: int, token_id: int) -> bool:
        """Take one token of a choice, which is not its first, from the decode worker, if nothing else follows from it:
        the choice goes on, has all earlier tokens, and nothing has failed since the last one. Otherwise do nothing, and
        return False: the token is to be handled as `Tokens`."""
        if position != len(choice.token_ids) or choice.ended or self._asked or not self.decode_has_spoken:
            return False
        if choice.num_failures or choice.num_bugs or choice.avoid or choice.suspicion is not Suspicion.NONE:
            return False
        if not self.report.complete:
            return False
        choice.token_ids.append(token_id)
        return True

    def on_resync(self, assignment: Assignment, *, known: bool) -> list[AttemptAction]:
        """Handle the loss of messages to or from a worker. `known`: whether it still knows its assignment."""
        if known and not self.report.complete and assignment is self._computing:
            return [self._without_prompt(assignment)]
        if known and assignment is self.decode:
            told_again = [abort(self.decode, index) for index in sorted(self._told_end)]
            return [*told_again, *self._ask_for_missing(again=True)]
        assignment.lost = not known
        if known or self._can_miss(assignment):
            return []
        message = f"the {assignment.role} worker does not know the request after lost messages"
        return [Broken(assignment, Cause.WORKER_LOST, message)]

    def lost(self, assignment: Assignment, why: str) -> list[AttemptAction]:
        """Handle the end of a worker's session. Once a prefill worker has sent its first tokens, its loss concerns only
        the decode worker, which goes on if it has settled, and reports a failure if it has not."""
        assignment.lost = True
        if self._can_miss(assignment):
            return []
        message = f"the {assignment.role} worker was lost: {why}"
        return [Broken(assignment, Cause.WORKER_LOST, message, (assignment,))]

    def unread_source(self, assignment: Assignment, cause: Cause) -> Assignment | None:
        """The prefill worker that the decode worker cannot reach or read, by a failure with this cause; None if the
        failure is another one's, or of another kind, or if the gateway has lost that worker, too."""
        if assignment is not self.decode or cause not in _OF_SOURCE or self.prefill is None or self.prefill.lost:
            return None
        return self.prefill

    def standing_offer(self, broken: Broken) -> Assignment | None:
        """The prefill worker's assignment, if its offer can serve another decode worker after this failure. It cannot
        while log probabilities of the prompt are outstanding: they would arrive while no attempt listens."""
        if not self.report.complete:
            return None
        if broken.assignment is not self.decode or self.decode_has_spoken or self.prefill is None:
            return None
        if self.prefill.lost or self.prefill in broken.blame or broken.cause is Cause.LEASE_LOST:
            return None
        return self.prefill

    def give_up(self, choice: Choice) -> list[AttemptAction]:
        """The client needs no more of a choice, and others go on. A decode worker that has not begun does not know the
        choice yet: it is told when it sends some of it."""
        if not self.decode_has_spoken or choice.index in self.moved:
            return []
        self._told_end.add(choice.index)
        return [abort(self.decode, choice.index)]

    def leave(self, choice: Choice) -> SendToWorker:
        """Expect no more of a choice that the decode worker has stopped, and that another attempt begins again. The
        worker is told: it would keep the choice's blocks for another sink until their lease expires."""
        self.moved.add(choice.index)
        if not self.unfinished:
            return abort(self.decode)
        self._told_end.add(choice.index)
        return abort(self.decode, choice.index)

    def acknowledge(self) -> list[SendToWorker]:
        """The messages that end a complete attempt. If the first tokens ended all choices, the decode worker still
        waits for the handoff, and is aborted. If a choice was given up, or another attempt begins it again, the workers
        may not know of its end."""
        if self._told_end or any(choice.given_up for choice in self.choices.values()):
            return [abort(assignment) for assignment in self.assignments]
        if self.decode_has_spoken:
            return [SendToWorker(self.decode, Ack(request=self.key.request, attempt=self.key.attempt))]
        return [abort(self.decode)]

    # --- internal steps ------------------------------------------------------------------------------------------

    def _on_tokens(self, assignment: Assignment, message: Tokens) -> list[AttemptAction]:
        choice = self.choices.get(message.choice)
        if choice is None:
            return [self._fault(assignment, "sent a choice that was not asked for")]
        if assignment is self.decode:
            self.decode_has_spoken = True
        if not self.report.complete:  # the decode worker's tokens are requested again once the report is complete
            return [self._without_prompt(assignment)] if assignment is self._computing else []
        if choice.ended:
            self._asked.pop(choice.index, None)
            self._tally.num_duplicates += not choice.given_up
            return self.give_up(choice) if choice.given_up and choice.index not in self._told_end else []
        skip = choice.next_position - message.position
        if skip < 0:
            return self._ask_again(choice)
        token_ids = message.token_ids[skip:]
        if not token_ids:
            self._tally.num_duplicates += 1
            return []
        if choice.next_position == len(self.generation.token_ids):
            choice.token_ids = choice.token_ids.copy()  # it was the other choices' too
        choice.token_ids += token_ids
        choice.ended = message.finish_reason is not None
        self._asked.pop(choice.index, None)
        logprobs = None if message.logprobs is None else message.logprobs[skip:]
        delta = Delta(choice=choice.index, token_ids=token_ids, logprobs=logprobs, finish_reason=message.finish_reason)
        return [Deliver(delta, self.key, assignment.role)]

    def _on_prompt(self, assignment: Assignment, message: PromptLogprobs) -> list[AttemptAction]:
        report = self.report
        end = message.position + len(message.scores)
        if assignment is not self._computing or end > len(self.generation.token_ids):
            return [self._fault(assignment, "sent log probabilities of a prompt that it was not asked for")]
        if report.complete or end <= report.next_position:
            self._tally.num_duplicates += 1
            return []
        skip = report.next_position - message.position
        if skip < 0:
            return [self._without_prompt(assignment)]
        report.next_position = end
        actions: list[AttemptAction] = [PromptDelta(scores=message.scores.part(skip))]
        if report.complete and self.decode_has_spoken:
            actions += self._ask_for_missing(again=True)
        return actions

    def _without_prompt(self, assignment: Assignment) -> Broken:
        """No worker keeps log probabilities of a prompt to send them again, so the prompt has to be computed again."""
        message = f"log probabilities of the prompt were lost between the {assignment.role} worker and the gateway"
        return Broken(assignment, Cause.WORKER_LOST, message)

    @property
    def _computing(self) -> Assignment:
        """The assignment whose worker computes the prompt."""
        return self.prefill or self.decode

    def _ask_again(self, choice: Choice) -> list[AttemptAction]:
        self._tally.num_gaps += 1
        if self._asked.get(choice.index) == choice.next_position:
            return []
        self._asked[choice.index] = choice.next_position
        return [self._resend(choice)]

    def _ask_for_missing(self, *, again: bool) -> list[AttemptAction]:
        """Request every missing token of the unfinished choices; `again` repeats requests whose answers may be lost.
        Otherwise none is repeated: a worker that has finished sends Finished with each answer, and may lack a choice
        that another worker continues."""
        missing = [
            choice for choice in self.unfinished if again or self._asked.get(choice.index) != choice.next_position
        ]
        self._asked |= {choice.index: choice.next_position for choice in missing}
        return [self._resend(choice) for choice in missing]

    def _resend(self, choice: Choice) -> SendToWorker:
        request, attempt = self.key
        return SendToWorker(
            self.decode,
            Resend(request=request, attempt=attempt, choice=choice.index, position=choice.next_position),
        )

    def _can_miss(self, assignment: Assignment) -> bool:
        """Whether the attempt goes on without this worker. It does without a prefill worker once the first tokens are
        here, or sure to come: a decode worker sends tokens only after it has settled."""
        if assignment is self.decode or not self.report.complete:
            return False
        return self.decode_has_spoken or all(
            choice.next_position > len(self.token_ids) for choice in self.choices.values()
        )

    def _to_blame(self, assignment: Assignment, cause: Cause) -> tuple[Assignment, ...]:
        """The assignments to blame for a failure that a worker reports. If a decode worker reports a failure of its
        source, both are: perhaps it cannot reach a source that is well. It is not blamed if the gateway has lost that
        source, too. The first failed transfer is blamed on the decode worker alone, and another one takes over the
        offer."""
        if cause is Cause.LEASE_LOST:
            return ()
        source = self.source
        failed_before = any(choice.num_transfers for choice in self.choices.values())
        of_source = cause in (Cause.WORKER_LOST, Cause.FINGERPRINT) or (cause is Cause.TRANSFER and failed_before)
        if source is None or assignment is not self.decode or not of_source:
            return (assignment,)
        return (source,) if source.lost else (source, assignment)

    def _fault(self, assignment: Assignment, what: str) -> Broken:
        return Broken(assignment, Cause.INTERNAL, f"the {assignment.role} worker {what}", (assignment,))
