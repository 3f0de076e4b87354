"""One request, from its arrival to its one end: the attempts at its choices, and what follows when one fails.

Life cycle of a request in the gateway:

    1. Its choices want workers (`Want`); once these are chosen, an attempt begins
       (`gateway.serving.attempt`).
    2. Tokens are accepted by position, whichever attempt they come from, and go to the client.
    3. A worker fails, refuses or is lost: the unfinished choices want workers again, with the tokens that the client
       has as a forced prefix. Choices with tokens of their own continue separately. If the decode worker failed before
       its first token, the prefill worker's offer still stands, and only a decode worker is wanted, unless those that
       are usable have other weights.
    4. A decode worker drains: a second attempt pulls the running sequence from it (`move`), and takes over at the cut.
    5. The request ends. Done: every choice has its finish reason, or its client needs no more of it. Failed, with the
       cause: an attempt failed for good, or too often, or no worker takes the request, or its time ran out. Cancelled:
       the client left. Each end frees every worker.

A full, draining or too small worker is not a failure: other workers are asked. No worker is too full for an admitted
request, which waits for those that drain.

A choice that was on a worker when it crashed is a suspect until it has passed the position where it was. The next
worker computes its first steps together with those of other suspects, or alone (`common.scheduling.trials`), and
reports that (`Trial`). If that worker crashes too, the suspicion grows or the choice is refused
(`gateway.serving.suspicion`).

Pure state: events in, actions out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from common.contract.errors import Cause
from common.contract.ids import RequestId, RequestKey, new_request_id
from common.contract.messages.fields import Message
from common.contract.messages.gateway import PrefixHint
from common.contract.messages.session import Role
from common.contract.messages.worker import Cut, Failed, Moved, PromptLogprobs
from gateway.serving.attempt import Assignment, Attempt, AttemptAction, Broken, Deliver, SendToWorker, Tally, abort
from gateway.serving.attempts import Attempts
from gateway.serving.blame import count_crash, count_failure, note_refusal
from gateway.serving.choice import Choice, PromptReport
from gateway.serving.flow_actions import AssignmentOver, AttemptBegan, Done, FlowAction, Unwanted, Want, Wants
from gateway.serving.generation import Fail, Generation, PromptDelta
from gateway.serving.suspicion import Crash, Share
from gateway.workers.worker_life import WorkerLife

_MAY_PASS = frozenset({Cause.CAPACITY, Cause.DRAINING, Cause.LEASE_LOST})
"""Causes with which a move fails, and may succeed later at the same worker: it has no room, or was too late."""


class FlowState(StrEnum):
    """State of a request."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Flow:
    """One request and its attempts."""

    generation: Generation
    state: FlowState = FlowState.RUNNING
    story: list[str] = field(default_factory=list)
    """For logs: it names addresses."""
    failure: str = ""
    """The last failure of a worker, for the client: without its address."""
    tally: Tally = field(default_factory=Tally)
    attempts: Attempts = field(default_factory=Attempts)
    """Attempts under way."""
    wants: Wants = field(default_factory=Wants)
    """Choices that wait for workers."""
    choices: tuple[Choice, ...] = ()
    report: PromptReport = field(init=False)
    """The client's log probabilities of the prompt."""
    admitted: bool = False
    """Whether a worker has admitted the request, or may have. If so, no other worker refuses it for its queue's
    length."""
    refusal: Fail | None = None
    """The last refusal after which the refusing worker is not asked again."""
    _newest: dict[RequestId, int] = field(default_factory=dict)
    """Request id as workers know it → its newest attempt. A request may have several ids."""

    def __post_init__(self) -> None:
        prompt = list(self.generation.token_ids)
        self.choices = tuple(Choice(index, prompt) for index in range(self.generation.num_choices))
        self.report = PromptReport(0 if self.generation.prompt_logprobs is None else len(prompt))

    @property
    def running(self) -> bool:
        """Whether the request has not ended."""
        return self.state is FlowState.RUNNING

    @property
    def requests(self) -> Collection[RequestId]:
        """Every id under which workers know the request."""
        return self._newest.keys()

    def keys_at(self, address: str) -> list[RequestKey]:
        """Keys that a worker holds of this request: of assignments, and of offers that stand while a decode worker is
        wanted."""
        held = [*self.attempts.at(address), *self.wants.at(address)]
        return [assignment.key for _, assignment in held]

    def beside(self, want: Want) -> frozenset[WorkerLife]:
        """Workers of this request's other suspects, where a want with a suspect should go too. Spread over the pool,
        the suspects would crash one worker each."""
        if not any(choice.suspected for choice in want.choices):
            return frozenset()
        suspected = [each for each in self.attempts if any(choice.suspected for choice in each.unfinished)]
        return frozenset(assignment.life for attempt in suspected for assignment in attempt.assignments)

    # --- events --------------------------------------------------------------------------------------------------

    def begin(self) -> list[FlowAction]:
        """Begin the request: want workers for all its choices."""
        return [self._want(self.choices, self._next_key(None))]

    def go(
        self,
        want: Want,
        decode: WorkerLife,
        prefill: WorkerLife | None,
        budget_s: float,
        prefix: PrefixHint | None = None,
        *,
        now: float,
    ) -> list[FlowAction]:
        """Begin an attempt on the chosen workers. With neither `prefill` nor an offer, `decode` computes the prompt."""
        self.wants.remove(want)
        attempt = Attempt(
            want.key,
            self.generation,
            want.choices,
            self.report,
            decode,
            prefill=prefill,
            offer=want.offer,
            admitted=self.admitted,
            now=now,
            tally=self.tally,
        )
        return self._begin(attempt, budget_s, prefix)

    def on_offer(self, want: Want, message: Message) -> list[FlowAction]:
        """Handle a message of the worker whose offer stands. It fails, or its prompt is computed."""
        assert want.offer is not None, self.story
        if isinstance(message, Failed):
            blame = () if message.cause is Cause.LEASE_LOST else (want.offer,)
            return self._offer_failed(want, Broken(want.offer, message.cause, message.message, blame))
        return self._over(want.offer)

    def move(
        self, attempt: Attempt, choice: Choice, decode: WorkerLife, budget_s: float, *, now: float
    ) -> list[FlowAction]:
        """Let `decode` pull a choice's running sequence from its draining worker, and continue it."""
        key = self._next_key(attempt.key.request, alone=attempt.unfinished == [choice])
        moving = Attempt(
            key,
            self.generation,
            [choice],
            self.report,
            decode,
            moving=attempt.decode,
            admitted=True,
            now=now,
            tally=self.tally,
        )
        return self._begin(moving, budget_s)

    def on_message(self, attempt: Attempt, assignment: Assignment, message: Message) -> list[FlowAction]:
        """Handle a message about an assignment of an attempt under way."""
        if not self.running:
            return []
        actions: list[FlowAction] = []
        if assignment.role is Role.PREFILL and not isinstance(message, PromptLogprobs):
            # The first message ends its work: the prompt is computed, or never will be.
            actions += self._over(assignment)
        actions += self._do(attempt, attempt.on_message(assignment, message))
        if isinstance(message, (Cut, Moved)) and self.running and attempt in self.attempts:
            actions += self._cut(attempt, self.choices[message.choice])
        return actions

    def on_resync(self, address: str, listed: Set[RequestKey], known: Set[RequestKey]) -> list[FlowAction]:
        """Handle the loss of messages to or from a worker. Of the keys `listed` in the Hello it still knows `known`."""
        actions: list[FlowAction] = []
        for attempt, assignment in self.attempts.at(address):
            if self.running and attempt in self.attempts and assignment.key in listed:
                actions += self._do(attempt, attempt.on_resync(assignment, known=assignment.key in known))
        for want, offer in self.wants.at(address):
            if self.running and offer.key in listed and offer.key not in known:
                message = f"the {offer.role} worker does not know the request after lost messages"
                actions += self._offer_failed(want, Broken(offer, Cause.WORKER_LOST, message))
        return actions

    def worker_lost(self, address: str, why: str, crash: Crash | None) -> list[FlowAction]:
        """Handle the end of a worker's session, by a crash (`crash`) or otherwise."""
        actions: list[FlowAction] = []
        for attempt, assignment in self.attempts.at(address):
            if self.running and attempt in self.attempts:
                share = Share.NONE if crash is None else crash.share_of(assignment.key, assignment.given_at)
                actions += self._do(attempt, attempt.lost(assignment, why), share)
        for want, offer in self.wants.at(address):
            if self.running:
                actions += self._offer_lost(want, offer, why, crash)
        return actions

    def fail(self, end: Fail) -> list[FlowAction]:
        """End with an error; inert after the end."""
        if not self.running:
            return []
        return [*self._end(FlowState.FAILED, f"{end.cause}: {end.message}"), end]

    def give_up(self, index: int) -> list[FlowAction]:
        """The client needs no more of a choice, though others may go on; inert after its end."""
        choice = self.choices[index]
        if not self.running or choice.ended:
            return []
        self.story.append(f"choice {index} is given up")
        choice.ended = choice.given_up = True
        actions: list[FlowAction] = []
        for attempt in [each for each in self.attempts if index in each.choices]:
            if attempt.unfinished:
                actions += self._do(attempt, attempt.give_up(choice))
            else:
                actions += [*map(abort, attempt.assignments), *self._close(attempt)]
        for want in [each for each in self.wants if all(other.ended for other in each.choices)]:
            actions += self._drop(want)
        if all(each.ended for each in self.choices):
            actions += [*self._end(FlowState.DONE, "done"), Done()]
        return actions

    def give_up_offer(self, want: Want) -> list[FlowAction]:
        """No usable decode worker has the weights with which the offered prompt was computed: want new workers."""
        assert want.offer is not None
        self._note(want.offer, Cause.FINGERPRINT, "no usable decode worker has its weights")
        return self._without_offer(want, Cause.FINGERPRINT)

    def cancel(self) -> list[FlowAction]:
        """The client has left; inert after the end."""
        return self._end(FlowState.CANCELLED, "cancelled") if self.running else []

    # --- internal steps ------------------------------------------------------------------------------------------

    def _do(self, attempt: Attempt, actions: Sequence[AttemptAction], share: Share = Share.NONE) -> list[FlowAction]:
        """Carry out an attempt's actions. `share` is the attempt's share in a worker's crash."""
        done: list[FlowAction] = []
        for action in actions:
            match action:
                case SendToWorker():
                    done.append(action)
                case Deliver():
                    done += [action, *self._progress(attempt, self.choices[action.delta.choice], action.role)]
                case PromptDelta():
                    self._let_in()
                    done.append(action)
                case Broken():
                    done += self._broken(attempt, action, share)
        return done

    def _let_in(self) -> None:
        """A worker has let the request in, or may have: who refused it before may be asked again."""
        if not self.admitted:
            self.admitted = True
            for choice in self.choices:
                choice.avoid.clear()

    def _begin(self, attempt: Attempt, budget_s: float, prefix: PrefixHint | None = None) -> list[FlowAction]:
        self.attempts.append(attempt)
        number = "" if attempt.key.attempt == 1 else f"attempt {attempt.key.attempt}: "
        hint = f", {prefix.num_tokens} tokens of prefix perhaps at {prefix.source.address}" if prefix else ""
        self.story.append(f"{number}{attempt.where}{hint}")
        return [AttemptBegan(attempt), *self._do(attempt, attempt.start(budget_s, prefix))]

    def _progress(self, attempt: Attempt, choice: Choice, role: Role) -> list[FlowAction]:
        """A choice has got tokens from a worker of this role."""
        self._let_in()
        choice.progressed(role)
        actions: list[FlowAction] = []
        if not choice.ended and attempt.moving is None:
            return actions  # the usual case: every attempt goes on as before
        if all(each.ended for each in self.choices):
            return [*self._end(FlowState.DONE, "done"), Done()]
        for other in self.attempts:
            if attempt.moving is other.decode:
                other.moved.add(choice.index)
                choice.moved()
        for each in [each for each in self.attempts if not each.unfinished]:
            actions += [*each.acknowledge(), *self._close(each)]
        return actions

    def _broken(self, attempt: Attempt, broken: Broken, share: Share) -> list[FlowAction]:
        """An attempt has failed: want workers for the choices that it was to generate."""
        self._note(broken.assignment, broken.cause, broken.message)
        if attempt.moving is not None and not attempt.decode_has_spoken and broken.cause not in _MAY_PASS:
            for choice in attempt.unfinished:
                choice.bad_sinks.add(attempt.decode.life)
        wanting = [choice for choice in attempt.unfinished if self.attempts.needs(choice, attempt)]
        held = [
            each for each in attempt.unfinished if each in wanting or self.attempts.source_of(attempt, each) is None
        ]
        if not held:  # what it was to take over goes on where it is
            self.tally.moves["stayed"] += 1
        end = self._count_failure(attempt.unfinished, wanting, held, broken, share)
        offer = attempt.standing_offer(broken) if wanting and end is None else None
        actions: list[FlowAction] = [abort(assignment) for assignment in attempt.assignments if assignment is not offer]
        actions += self._close(attempt, keep=offer)
        for choice in wanting:
            source = self.attempts.source_of(attempt, choice)
            actions += [] if source is None else self._leave(source, choice)
        if not wanting:
            return actions
        if end is not None:
            return [*actions, *self.fail(end)]
        self.tally.failures[broken.cause] += 1
        if offer is not None:
            return [*actions, self._want(tuple(attempt.choices.values()), self._next_key(attempt.key.request), offer)]
        return [*actions, *self._want_all(attempt.key.request, wanting)]

    def _count_failure(
        self,
        asked: Sequence[Choice],
        wanting: Sequence[Choice],
        held: Sequence[Choice],
        broken: Broken,
        share: Share,
    ) -> Fail | None:
        """Count a failure, or note the refusal of what a worker was `asked` for; see `gateway.serving.blame`."""
        if broken.refused:
            self.refusal = note_refusal(asked, broken, admitted=self.admitted) or self.refusal
            return None
        self._let_in()
        return count_failure(wanting, held, broken, share)

    def _note(self, assignment: Assignment, cause: Cause, message: str) -> None:
        """Note a failure at the worker of an assignment."""
        self.failure = f"{cause}: {message}"
        self.story.append(f"{cause} at {assignment.life.address}: {message}")

    def _offer_failed(self, want: Want, broken: Broken) -> list[FlowAction]:
        """The worker whose offer stood has none: want new workers for the unfinished choices."""
        self._note(broken.assignment, broken.cause, broken.message)
        end = self._count_failure(want.choices, want.choices, want.choices, broken, Share.NONE)
        return self._without_offer(want, broken.cause) if end is None else self.fail(end)

    def _offer_lost(self, want: Want, offer: Assignment, why: str, crash: Crash | None) -> list[FlowAction]:
        """The worker is lost whose offer stood. That is no failure of an attempt. If it has crashed while it computed
        the prompt, that is suspected."""
        self._let_in()
        message = f"the {offer.role} worker was lost: {why}"
        self._note(offer, Cause.WORKER_LOST, message)
        share = Share.NONE if crash is None or offer.over else crash.share_of(offer.key, offer.given_at)
        end = count_crash(want.choices, want.choices, message, share)
        return self._without_offer(want, Cause.WORKER_LOST) if end is None else self.fail(end)

    def _without_offer(self, want: Want, cause: Cause) -> list[FlowAction]:
        """Want new workers for the choices of a want whose offer has fallen."""
        self.tally.failures[cause] += 1
        actions = self._drop(want)
        choices = [choice for choice in want.choices if not choice.ended]
        wants = self._want_all(want.key.request, choices)
        for each in wants:
            each.hopeless_at = want.hopeless_at
        return [*actions, *wants]

    def _want_all(self, request: RequestId, choices: Sequence[Choice]) -> list[Want]:
        """Want workers for choices: together if none has a token of its own, else separately."""
        prompt_len = len(self.generation.token_ids)
        if all(choice.next_position == prompt_len for choice in choices):
            return [self._want(choices, self._next_key(request))]
        return [self._want([choice], self._next_key(request, alone=len(choices) == 1)) for choice in choices]

    def _want(self, choices: Sequence[Choice], key: RequestKey, offer: Assignment | None = None) -> Want:
        want = Want.of(key, choices, offer)
        self.wants.append(want)
        return want

    def _cut(self, attempt: Attempt, choice: Choice) -> list[FlowAction]:
        """The decode worker has stopped a choice. Another attempt that pulls it goes on; without one, want workers
        again."""
        if choice.ended or choice not in attempt.unfinished or self.attempts.is_moving(choice, attempt):
            return []
        self.story.append(f"choice {choice.index} was cut for nobody")
        actions = self._leave(attempt, choice)
        return [*actions, self._want([choice], self._next_key(attempt.key.request, alone=not attempt.unfinished))]

    def _leave(self, attempt: Attempt, choice: Choice) -> list[FlowAction]:
        """Expect no more of a choice from this attempt; close the attempt if no unfinished choice is left."""
        told = attempt.leave(choice)
        return [told] if attempt.unfinished else [told, *self._close(attempt)]

    def _drop(self, want: Want) -> list[FlowAction]:
        """Want no workers for it any more. Its offer is aborted: no decode worker will take it over."""
        self.wants.remove(want)
        if want.offer is None:
            return [Unwanted(want)]
        return [Unwanted(want), abort(want.offer), *self._over(want.offer)]

    @staticmethod
    def _over(assignment: Assignment) -> list[FlowAction]:
        """The worker has nothing more to do for an assignment; inert if that was so before."""
        if assignment.over:
            return []
        assignment.over = True
        return [AssignmentOver(assignment)]

    def _next_key(self, request: RequestId | None, *, alone: bool = True) -> RequestKey:
        """The key of the next attempt: under the same request id if `alone`, else, for a choice that parts from others,
        under a new one."""
        request = request if request is not None and alone else new_request_id()
        number = self._newest[request] = self._newest.get(request, 0) + 1
        return RequestKey(request, number)

    def _close(self, attempt: Attempt, keep: Assignment | None = None) -> list[FlowAction]:
        """Remove an attempt from those under way; the assignment `keep` goes on."""
        self.attempts.remove(attempt)
        return [action for each in attempt.assignments if each is not keep for action in self._over(each)]

    def _end(self, state: FlowState, why: str) -> list[FlowAction]:
        self.state = state
        self.story.append(why)
        actions: list[FlowAction] = []
        for attempt in list(self.attempts):
            if state is FlowState.DONE:
                actions += attempt.acknowledge()
            else:
                actions += [abort(assignment) for assignment in attempt.assignments]
            actions += self._close(attempt)
        for want in self.wants[:]:
            actions += self._drop(want)
        return actions

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        prompt = list(self.generation.token_ids)
        assert all(choice.token_ids[: len(prompt)] == prompt for choice in self.choices), self.story
        own = [choice.token_ids for choice in self.choices if len(choice.token_ids) > len(prompt)]
        assert len(set(map(id, own))) == len(own), self.story
        assert self.report.complete or all(len(each.token_ids) == len(prompt) for each in self.choices), self.story
        if self.state is FlowState.DONE:
            assert all(choice.ended for choice in self.choices), self.story
        if not self.running:
            assert not self.attempts, self.story
            assert not self.wants, self.story
        assignments = [assignment for attempt in self.attempts for assignment in attempt.assignments]
        assignments += [want.offer for want in self.wants if want.offer is not None]
        assert len({(assignment.life, assignment.key) for assignment in assignments}) == len(assignments), self.story
        for attempt in self.attempts:
            assert attempt.unfinished, self.story
        for choice in self.choices if self.running else ():
            under_way = [each for each in self.attempts if choice in each.unfinished]
            going_on = [each for each in under_way if self.attempts.source_of(each, choice) is None]
            wanted = [want for want in self.wants if choice in want.choices]
            assert len(under_way) <= 2, self.story
            assert choice.ended or len(going_on) + len(wanted) == 1, self.story
