"""One request's flow, and everything that it ever asked for: the test chooses the workers and plays them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.fields import FinishReason, Message
from common.contract.messages.gateway import Abort, Ack, Decode, Prefill, PrefixHint, Resend
from common.contract.messages.session import Role
from common.contract.messages.worker import Cancelled, Cut, Failed, Finished, Moved, PromptLogprobs, Tokens, TokenScores
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from gateway.serving.attempt import Assignment, Attempt, Deliver, SendToWorker
from gateway.serving.flow import Flow, FlowState
from gateway.serving.flow_actions import AssignmentOver, AttemptBegan, Done, FlowAction, Unwanted, Want
from gateway.serving.generation import Delta, Fail, Generation, PromptDelta
from gateway.serving.suspicion import Crash
from gateway.workers.worker_life import WorkerLife

P, P2, D, D2, D3 = "p:1", "p:2", "d:1", "d:2", "d:3"
REQUEST = RequestId("r1")
"""The first name of a request in what a run shows; the next ones are r2, r3, and so on."""
KEY = RequestKey(REQUEST, 1)
PROMPT = (7, 8, 9)
START = len(PROMPT)
ABORT = Abort(request=REQUEST, attempt=1)
ACK = Ack(request=REQUEST, attempt=1)
FINISHED = Finished(request=REQUEST, attempt=1)
CANCELLED = Cancelled(request=REQUEST, attempt=1)


def tokens(position: int, *token_ids: int, choice: int = 0, end: FinishReason | None = None) -> Tokens:
    return Tokens(request=REQUEST, attempt=1, choice=choice, position=position, token_ids=token_ids, finish_reason=end)


def of_prompt(*positions: int) -> PromptLogprobs:
    """What tells of the prompt's tokens at these positions, which follow each other."""
    scores = TokenScores(logprobs=tuple(-float(position) for position in positions), ranks=positions)
    return PromptLogprobs(request=REQUEST, attempt=1, position=positions[0], scores=scores)


def resend(position: int, choice: int = 0, attempt: int = 1) -> Resend:
    return Resend(request=REQUEST, attempt=attempt, choice=choice, position=position)


def failed(cause: Cause = Cause.CAPACITY, message: str = "full") -> Failed:
    return Failed(request=REQUEST, attempt=1, cause=cause, message=message)


def cut(position: int, choice: int = 0) -> Cut:
    return Cut(request=REQUEST, attempt=1, choice=choice, position=position)


def moved(choice: int = 0) -> Moved:
    return Moved(request=REQUEST, attempt=1, choice=choice)


def life(address: str, number: int = 1) -> WorkerLife:
    return WorkerLife(address, Incarnation(f"{address}/{number}"))


_ANYTHING: tuple[Message, ...] = (
    tokens(START, 1),
    tokens(99, 1),
    tokens(0, 1, choice=9),
    FINISHED,
    failed(),
    CANCELLED,
    cut(START),
    moved(),
    moved(9),
    of_prompt(1, 2),
)


@dataclass(frozen=True)
class Sent:
    """A message to the worker at an address, under the names of this run."""

    address: str
    message: Message


Seen = Sent | Deliver | PromptDelta | Want | Done | Fail


class Run:
    """After every event the flow's invariants hold, and each part that was given is on the books until it has left."""

    def __init__(
        self,
        num_choices: int = 1,
        *,
        local: bool = False,
        prefix: PrefixHint | None = None,
        begin: bool = True,
        prompt_logprobs: int | None = None,
    ) -> None:
        """`local`: the decode worker computes the prompt."""
        self.flow = Flow(
            Generation(
                token_ids=PROMPT,
                num_choices=num_choices,
                sampling=SamplingParams(max_tokens=50),
                budget_s=9,
                tier=Tier.BATCH,
                tenant="acme",
                cache_salt="salt",
                prompt_logprobs=prompt_logprobs,
            )
        )
        self.seen: list[Seen] = []
        self.goodbyes: dict[Assignment, list[Message]] = {}
        """What every part that was given was told in the end."""
        self.last: dict[str, tuple[Attempt, Assignment]] = {}
        """The newest part at each address, whether or not it is still under way."""
        self.attempts: list[Attempt] = []
        """Every one that has begun."""
        self.now = 0.0
        self._left: Counter[Assignment] = Counter()
        self._names: dict[RequestId, RequestId] = {}
        self.do(self.flow.begin())
        if begin:
            self.go(D, None if local else P, prefix=prefix)

    # --- events --------------------------------------------------------------------------------------------------

    def do(self, actions: Iterable[FlowAction]) -> list[Seen]:
        """What is said or wanted; who has left is only counted."""
        seen: list[Seen] = []
        for action in actions:
            match action:
                case SendToWorker(part, message):
                    if isinstance(message, Prefill | Decode):
                        assert part not in self.goodbyes, "the same part is given twice"
                        self.goodbyes[part] = []
                    elif isinstance(message, Ack) or (isinstance(message, Abort) and message.choice is None):
                        self.goodbyes[part].append(message)
                    seen.append(Sent(part.life.address, self._shown(message)))
                case AttemptBegan(attempt):
                    self.attempts.append(attempt)
                    for part in attempt.assignments:
                        self.last[part.life.address] = (attempt, part)
                case Unwanted():
                    pass
                case AssignmentOver(part):
                    assert part in self.goodbyes
                    self._left[part] += 1
                case _:
                    seen.append(action)
        self.seen += seen
        self.flow.check_invariants()
        self._check_books()
        return seen

    def go(
        self,
        decode: str,
        prefill: str | None = None,
        *,
        want: Want | None = None,
        prefix: PrefixHint | None = None,
        budget_s: float = 9,
    ) -> list[Seen]:
        """Workers for what is wanted: the one thing, unless told otherwise."""
        if want is None:
            (want,) = self.flow.wants
        first = None if prefill is None else life(prefill)
        return self.do(self.flow.go(want, life(decode), first, budget_s, prefix, now=self.now))

    def move(self, decode: str, choice: int = 0, *, source: str = D) -> list[Seen]:
        """Let a running sequence leave its worker."""
        attempt, each = next(pair for pair in self.flow.attempts.movable(source) if pair[1].index == choice)
        return self.do(self.flow.move(attempt, each, life(decode), 5, now=self.now))

    def on(self, address: str, *messages: Any, attempt: Attempt | None = None) -> list[Seen]:
        """Messages about the newest part there, or about an attempt's, whatever their names."""
        seen = []
        for message in messages:
            about, part = self.last[address]
            if attempt is not None:
                about, part = attempt, next(each for each in attempt.assignments if each.life.address == address)
            message = replace(message, request=part.key.request, attempt=part.key.attempt)
            seen += self.do(self.flow.on_message(about, part, message))
        return seen

    def lose(self, address: str, why: str = "dead", *, crashed: bool = False, beside: int | None = None) -> list[Seen]:
        """The worker is gone; if it has crashed, in everybody's steps; with `beside`, in those of its newest part and
        of so many others."""
        if beside is None:
            return self.do(self.flow.worker_lost(address, why, Crash(self.now) if crashed else None))
        crash = Crash(self.now, 1 + beside, frozenset({self.last[address][1].key}))
        return self.do(self.flow.worker_lost(address, why, crash))

    def resync(self, address: str, *, known: bool, attempt: Attempt | None = None) -> list[Seen]:
        """Messages are lost; whether the worker still knows its newest part, or what it decodes of `attempt`."""
        keys = {self.last[address][1].key if attempt is None else attempt.decode.key}
        return self.do(self.flow.on_resync(address, keys, keys if known else set()))

    # --- what has come of it -------------------------------------------------------------------------------------

    @property
    def attempt(self) -> Attempt:
        """The newest one under way."""
        return self.flow.attempts[-1]

    @property
    def want(self) -> Want:
        """The one thing that waits for workers."""
        (want,) = self.flow.wants
        return want

    def text(self, choice: int = 0) -> list[int]:
        return [token for delta in self.deltas() if delta.choice == choice for token in delta.token_ids]

    def told(self) -> list[int]:
        """Positions of the prompt that the client has got log probabilities of, in the order in which they came."""
        deltas = [each for each in self.seen if isinstance(each, PromptDelta)]
        for delta in deltas:
            assert [-rank for rank in delta.scores.ranks] == list(delta.scores.logprobs)
        return [rank for delta in deltas for rank in delta.scores.ranks]

    def deltas(self) -> list[Delta]:
        return [each.delta for each in self.seen if isinstance(each, Deliver)]

    def sent(self, kind: type[Message]) -> list[tuple[str, Any]]:
        return [
            (each.address, each.message) for each in self.seen if isinstance(each, Sent) if type(each.message) is kind
        ]

    @property
    def terminals(self) -> list[Done | Fail]:
        return [each for each in self.seen if isinstance(each, Done | Fail)]

    @property
    def failure(self) -> Cause:
        """The cause of its one end."""
        (terminal,) = self.terminals
        assert isinstance(terminal, Fail), self.flow.story
        return terminal.cause

    def check_end(self) -> None:
        """What holds after any end: at most one terminal, each worker let go exactly once, and nothing more after."""
        ended = {FlowState.DONE: 1, FlowState.FAILED: 1, FlowState.CANCELLED: 0}[self.flow.state]
        assert len(self.terminals) == ended, self.flow.story
        for part, goodbyes in self.goodbyes.items():
            assert self._left[part] == 1, (part, self.flow.story)
            if part.role is Role.DECODE:
                assert len(goodbyes) == 1, (part, self.flow.story)
            else:
                settled = any(each.prefill is part and each.decode_has_spoken for each in self.attempts)
                complete = all(choice.ended for choice in self.flow.choices)
                assert len(goodbyes) == 1 or ((settled or complete) and not goodbyes), (part, self.flow.story)
        state, story = self.flow.state, list(self.flow.story)
        for attempt, part in self.last.values():
            for message in _ANYTHING:
                assert self.flow.on_message(attempt, part, message) == []
            for known in (set(), {part.key}):
                assert self.flow.on_resync(part.life.address, {part.key}, known) == []
            assert self.flow.worker_lost(part.life.address, "dead", Crash(self.now)) == []
            assert self.flow.attempts.movable(part.life.address) == []
            assert self.flow.keys_at(part.life.address) == []
        assert self.flow.fail(Fail(Cause.DEADLINE, "late")) == []
        assert self.flow.cancel() == []
        assert self.flow.give_up(0) == []
        assert (self.flow.state, self.flow.story) == (state, story)

    # --- the steps between ---------------------------------------------------------------------------------------

    def _shown(self, message: Any) -> Message:
        """The message, with names that do not depend on chance."""
        shown: Message = replace(message, request=self._name(message.request))
        if isinstance(shown, Decode) and shown.offered is not None:
            request, attempt = shown.offered
            shown = replace(shown, offered=RequestKey(self._name(request), attempt))
        return shown

    def _name(self, request: RequestId) -> RequestId:
        return self._names.setdefault(request, RequestId(f"r{len(self._names) + 1}"))

    def _check_books(self) -> None:
        parts = [part for attempt in self.flow.attempts for part in attempt.assignments]
        parts += [want.offer for want in self.flow.wants if want.offer is not None]
        assert {part for part in parts if not part.over} == {part for part in self.goodbyes if not self._left[part]}
        assert not self._left or max(self._left.values()) == 1
