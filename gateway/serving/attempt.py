"""One attempt at some choices of a request: on a pair of workers, or on a decode worker alone.

Life cycle of an attempt:

    1. A prefill and a decode worker are chosen; Prefill and Decode leave together. Or a decode worker alone, which
       computes the prompt itself: then there is no Prefill, no step 2, and every token comes from there. Or a decode
       worker for an offer that another one has left: then the prefill worker's part goes on as it is.
    2. The first token of each choice comes from the prefill worker (Tokens), and goes to the client at once.
    3. The decode worker's first frame repeats it, and goes on. Duplicates are dropped, gaps asked for again (Resend).
       Where the client wants log probabilities of the prompt, whoever computes it tells them first (PromptLogprobs).
       Until the client has all of them, the attempt cannot do without that worker, and no token is taken.
    4. Every choice has its finish reason: the decode worker may forget (Ack). Or a part of it fails, or is lost: the
       flow (`gateway.serving.flow`) decides what follows. Each end frees every worker.

Pure state: events in, actions out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import (
    Abort,
    Ack,
    Cancelled,
    Cut,
    Decode,
    Failed,
    Finished,
    Message,
    Moved,
    Prefill,
    PrefixHint,
    PromptLogprobs,
    Resend,
    Role,
    Source,
    Suspicion,
    Tokens,
)
from gateway.serving.generation import Delta, Generation, PromptDelta


@dataclass(frozen=True, slots=True)
class Place:
    """A worker in one of its lives."""

    address: str
    incarnation: Incarnation

    @property
    def source(self) -> Source:
        """The place as a sink is told of it."""
        return Source(address=self.address, incarnation=self.incarnation)


@dataclass(slots=True, eq=False)
class Part:
    """What one worker has been given of a request."""

    role: Role
    place: Place
    key: RequestKey
    num_tokens: int
    """Tokens of its prompt, whoever computes them."""
    over: bool = False
    """Whether the worker has nothing (more) to do for it."""


@dataclass(slots=True, eq=False)
class Choice:
    """One choice as its client has it. Several attempts may bring its tokens; each position is taken once."""

    index: int
    token_ids: list[int]
    """The prompt, and every token that the client has."""
    ended: bool = False
    num_failures: int = 0
    """Attempts that have failed since its last token."""
    num_bugs: int = 0
    """Of those, the ones that a worker has called its own fault."""
    num_crashes: int = 0
    """Workers that have crashed in everybody's steps while it was there."""
    suspicion: Suspicion = Suspicion.NONE
    innocent_at: int = 0
    """Where it will be above suspicion."""
    avoid: set[Place] = field(default_factory=set)
    """Workers that have failed it since its last token."""
    too_small: set[Place] = field(default_factory=set)
    """Workers that have said that it can never fit there."""

    @property
    def next_position(self) -> int:
        """Of the token that the client is to get next."""
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class PromptReport:
    """The prompt's log probabilities as the client has them. Attempts may bring them again; each is taken once."""

    end: int
    """Of the positions that it wants; 0 for none."""
    next_position: int = 1
    """Whose log probability it is to get next: the first token has none."""

    @property
    def complete(self) -> bool:
        """Whether it has all that it wants."""
        return self.next_position >= self.end


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the worker of this part."""

    part: Part
    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the client new tokens."""

    delta: Delta
    attempt: RequestKey
    role: Role
    """Whose worker has brought them."""


@dataclass(frozen=True, slots=True)
class DeliverPrompt:
    """Give the client more log probabilities of its prompt."""

    delta: PromptDelta


@dataclass(frozen=True, slots=True)
class Broken:
    """The attempt cannot go on."""

    part: Part
    """Whose end this is."""
    cause: Cause
    message: str
    blame: Part | None
    """Whose worker is better avoided."""


Action = Send | Deliver | DeliverPrompt | Broken


def abort(part: Part) -> Send:
    """Let a worker free what it holds."""
    return Send(part, Abort(request=part.key.request, attempt=part.key.attempt))


class Attempt:
    """One attempt. It accepts by position: what its choices have got from elsewhere meanwhile is a duplicate."""

    def __init__(
        self,
        key: RequestKey,
        generation: Generation,
        choices: Sequence[Choice],
        report: PromptReport,
        decode: Place,
        *,
        prefill: Place | None = None,
        offer: Part | None = None,
        moving: Part | None = None,
        admitted: bool = False,
        now: float = 0.0,
    ) -> None:
        """On `decode` and `prefill`; on `decode` alone, which takes over the `offer` of a prefill worker, or a running
        sequence from another decode worker that is `moving` it, or computes the prompt."""
        self.key = key
        self.generation = generation
        self.choices = {choice.index: choice for choice in choices}
        self.report = report
        self.token_ids = tuple(choices[0].token_ids)
        """What the decode worker gets the KV of."""
        if offer is not None:
            self.token_ids = self.token_ids[: offer.num_tokens]
        num_tokens = len(self.token_ids)
        self.prefill = offer or (None if prefill is None else Part(Role.PREFILL, prefill, key, num_tokens))
        self.decode = Part(Role.DECODE, decode, key, num_tokens)
        self.parts = (self.decode,) if self.prefill is None else (self.prefill, self.decode)
        """Of the prefill worker, if there is one, and of the decode worker."""
        self.moving = moving
        self.admitted = admitted
        self.begun_at = now
        self.decode_has_spoken = False
        """Whether any of the tokens came from the decode worker: it holds the KV of all that came before them."""
        self.suspicion = max((choice.suspicion for choice in choices), key=list(Suspicion).index)
        """Of the choice that is suspected most."""
        self.over = False
        self.num_duplicates = 0
        self.num_gaps = 0
        self.cut: set[int] = set()
        """Choices that the decode worker goes on with no more: whoever pulls them does."""
        self.moved: set[int] = set()
        """Choices that another attempt has taken over."""
        self._asked: dict[int, int] = {}
        """Choice → position from which a Resend is under way."""

    @property
    def unfinished(self) -> list[Choice]:
        """Choices that want more tokens from here."""
        return [choice for choice in self.choices.values() if not choice.ended and choice.index not in self.moved]

    # --- events --------------------------------------------------------------------------------------------------

    def start(self, budget_s: float, prefix: PrefixHint | None = None) -> list[Action]:
        """Give each worker its part; `prefix` tells the prefill worker where the prompt's beginning may be found."""
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
            "admitted": self.admitted,
            "suspicion": self.suspicion,
        }
        report = None if self.report.complete else generation.prompt_logprobs
        source = self.moving or self.prefill
        if source is None:
            return [Send(self.decode, Decode(**work, source=None, prompt_logprobs=report))]
        decode = Decode(**work, source=source.place.source, offered=source.key, moving=self.moving is not None)
        if self.prefill is None or self.prefill.key != self.key:
            return [Send(self.decode, decode)]
        prefill = Prefill(**work, prefix=prefix, prompt_logprobs=report)
        return [Send(self.prefill, prefill), Send(self.decode, decode)]

    def on_message(self, part: Part, message: Message) -> list[Action]:
        """A message from the worker of one of its parts."""
        match message:
            case Tokens():
                return self._on_tokens(part, message)
            case PromptLogprobs():
                return self._on_prompt(part, message)
            case Failed(cause=cause, message=text):
                return [Broken(part, cause, text, self._to_blame(part, cause))]
            case Finished() if part is self.decode and self.report.complete:
                return self._ask_for_missing(again=False)
            case Cancelled():
                return [self._fault(part, "cancelled what was not aborted")]
            case Cut(choice=index) | Moved(choice=index):
                if part is not self.decode or index not in self.choices:
                    return [self._fault(part, "stopped a choice that it does not have")]
                self.cut.add(index)
        return []

    def on_resync(self, part: Part, *, known: bool) -> list[Action]:
        """Messages to or from this worker were lost; whether it still knows its part."""
        if known and not self.report.complete and part is self._computing:
            return [self._without_prompt(part)]
        if known and part is self.decode:
            return self._ask_for_missing(again=True)
        if known or self._can_miss(part):
            return []
        message = f"the {part.role} worker does not know the request after lost messages"
        return [Broken(part, Cause.WORKER_LOST, message, blame=None)]

    def lost(self, part: Part, why: str) -> list[Action]:
        """The session with this worker is over. After its first tokens a prefill worker is the decode worker's concern:
        it goes on if it has settled, and says so if it has not."""
        if self._can_miss(part):
            return []
        message = f"the {part.role} worker at {part.place.address} was lost: {why}"
        return [Broken(part, Cause.WORKER_LOST, message, blame=part)]

    def acknowledge(self) -> Send:
        """Every choice is complete. Had the first tokens ended them all, the decode worker still waits in vain."""
        if self.decode_has_spoken:
            return Send(self.decode, Ack(request=self.key.request, attempt=self.key.attempt))
        return abort(self.decode)

    # --- the steps between ---------------------------------------------------------------------------------------

    def _on_tokens(self, part: Part, message: Tokens) -> list[Action]:
        choice = self.choices.get(message.choice)
        if choice is None:
            return [self._fault(part, "sent a choice that was not asked for")]
        if part is self.decode:
            self.decode_has_spoken = True
        if not self.report.complete:  # the decode worker's are asked for again as soon as it is
            return [self._without_prompt(part)] if part is self._computing else []
        if choice.ended:
            self.num_duplicates += 1
            return []
        skip = choice.next_position - message.position
        if skip < 0:
            return self._ask_again(choice)
        token_ids = message.token_ids[skip:]
        if not token_ids:
            self.num_duplicates += 1
            return []
        choice.token_ids += token_ids
        choice.ended = message.finish_reason is not None
        self._asked.pop(choice.index, None)
        logprobs = None if message.logprobs is None else message.logprobs[skip:]
        delta = Delta(choice=choice.index, token_ids=token_ids, logprobs=logprobs, finish_reason=message.finish_reason)
        return [Deliver(delta, self.key, part.role)]

    def _on_prompt(self, part: Part, message: PromptLogprobs) -> list[Action]:
        report = self.report
        end = message.position + len(message.scores)
        if part is not self._computing or end > len(self.generation.token_ids):
            return [self._fault(part, "sent log probabilities of a prompt that it was not asked for")]
        if report.complete or end <= report.next_position:
            self.num_duplicates += 1
            return []
        skip = report.next_position - message.position
        if skip < 0:
            return [self._without_prompt(part)]
        report.next_position = end
        delta = PromptDelta(scores=message.scores.part(skip))
        actions: list[Action] = [DeliverPrompt(delta)]
        if report.complete and self.decode_has_spoken:
            actions += self._ask_for_missing(again=True)
        return actions

    def _without_prompt(self, part: Part) -> Broken:
        """Nobody keeps log probabilities of a prompt in order to tell them again: it is computed again."""
        message = f"log probabilities of the prompt were lost between the {part.role} worker and the gateway"
        return Broken(part, Cause.WORKER_LOST, message, blame=None)

    @property
    def _computing(self) -> Part:
        """Whose worker computes the prompt."""
        return self.prefill or self.decode

    def _ask_again(self, choice: Choice) -> list[Action]:
        self.num_gaps += 1
        if self._asked.get(choice.index) == choice.next_position:
            return []
        self._asked[choice.index] = choice.next_position
        return [self._resend(choice)]

    def _ask_for_missing(self, *, again: bool) -> list[Action]:
        """Every token of the choices that have not ended, from where they stand; `again` if an answer may be lost. A
        worker that has ended says so with each answer, though it may not have what another one goes on with."""
        missing = [
            choice for choice in self.unfinished if again or self._asked.get(choice.index) != choice.next_position
        ]
        self._asked |= {choice.index: choice.next_position for choice in missing}
        return [self._resend(choice) for choice in missing]

    def _resend(self, choice: Choice) -> Send:
        request, attempt = self.key
        return Send(
            self.decode,
            Resend(request=request, attempt=attempt, choice=choice.index, position=choice.next_position),
        )

    def _can_miss(self, part: Part) -> bool:
        """Whether the attempt goes on without this worker. Without a prefill worker, once the first tokens are here, or
        sure to come: a decode worker speaks only after it has settled."""
        if part is self.decode or not self.report.complete:
            return False
        return self.decode_has_spoken or all(
            choice.next_position > len(self.token_ids) for choice in self.choices.values()
        )

    def _to_blame(self, part: Part, cause: Cause) -> Part | None:
        """Of a failure that a worker reports: a decode worker speaks of its source, too."""
        source = self.moving or self.prefill
        if cause is Cause.LEASE_LOST:
            return None
        if part is self.decode and cause in (Cause.WORKER_LOST, Cause.FINGERPRINT):
            return source
        if part is self.decode and cause is Cause.TRANSFER and any(c.num_failures for c in self.choices.values()):
            return source  # a second failure in a row; the first one is blamed on the reader
        return part

    def _fault(self, part: Part, what: str) -> Broken:
        return Broken(part, Cause.INTERNAL, f"the {part.role} worker {what}", blame=part)
