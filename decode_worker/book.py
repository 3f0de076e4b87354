"""The requests of a decode worker: where they are found, and how they end."""

from __future__ import annotations

from dataclasses import dataclass

from common.contract.errors import Cause
from common.contract.ids import RequestId
from common.engine.grammar import GrammarState
from common.worker.agenda import Agenda
from common.worker.front import Front
from common.worker.mask_asks import MaskAsks
from decode_worker.answers import Answers
from decode_worker.migration import Arrivals, Departures
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest, RequestEvent, RequestState
from decode_worker.scheduler import DecodeScheduler
from decode_worker.view import DecodeTotals

MAX_UNACKNOWLEDGED = 4096
"""Most finished requests whose tokens are kept until the gateway acknowledges them."""


@dataclass(eq=False)
class Book:
    """Every request of one worker, from its arrival until the gateway has acknowledged its end. Pure state."""

    _agenda: Agenda
    _scheduler: DecodeScheduler
    _arrivals: Arrivals
    _departures: Departures
    _masks: MaskAsks[DecodeRequest | DecodeChoice]
    _front: Front[DecodeRequest]
    _answers: Answers
    _totals: DecodeTotals

    def __post_init__(self) -> None:
        self.requests, self.finished = self._front.requests, self._front.finished

    def find(self, request: RequestId) -> DecodeRequest | None:
        """The request with this id, also if it has ended and is not acknowledged; None if it is not here."""
        return self.requests.get(request) or self.finished.get(request)

    # --- ends ----------------------------------------------------------------------------------------------------

    def end(self, choice: DecodeChoice, *, by_client: bool = False) -> None:
        """A sequence that has begun has had its last token, or its client needs no more of it (`by_client`)."""
        self._totals.sequence_ended(self._agenda.now - choice.began)
        self._scheduler.sequences.remove(choice, by_client=by_client)
        self.finish_if_ended(choice.request)

    def finish_if_ended(self, request: DecodeRequest) -> None:
        """If every choice has ended or moved away, the request has ended here."""
        if not request.finished:
            return
        self.drop(request)
        if all(choice.moved for choice in request.choices):
            self.close(request)
            self._front.count("moved")
            return
        request.enter(RequestEvent.FINISH)
        self.finished[request.work.request] = request
        while len(self.finished) > MAX_UNACKNOWLEDGED:
            self.close(self.finished.popitem(last=False)[1])
        self._front.count("finished")
        self._answers.finished(request)

    def give_up(self, choice: DecodeChoice) -> None:
        """Its client needs no more of a choice, and goes on with others; no effect once it has ended."""
        if not choice.goes_on:
            return
        choice.given_up = True
        if choice.stage is ChoiceStage.ENDED:  # it was cut, and has ended here when its lease has
            self._departures.give_up(choice)
            return
        self._masks.forget(choice.sequence.grammar_state)
        self.end(choice, by_client=True)

    def fail(self, request: DecodeRequest, cause: Cause, message: str) -> None:
        """Remove the request, and tell its gateway why."""
        self.forget(request, message)
        self._front.refuse(request.gateway, request.key, cause, message)

    def forget(self, request: DecodeRequest, why: str, *, by_client: bool = False) -> None:
        """Remove the request, whatever its state, without a message to the gateway. `by_client`: its client asked for
        its end."""
        if request.state is RequestState.FINISHED:
            del self.finished[request.work.request]
            self.close(request)
        elif request.state is not RequestState.ENDED:
            self.drop(request, by_client=by_client)
            self.close(request)
            if request.pull is not None:
                self._front.pulls.abandon(request.pull, None, why)

    def close(self, request: DecodeRequest) -> None:
        """Nothing of the request is left here. Its choices are cleared, since with them it is a reference cycle, which
        only the garbage collector would free."""
        request.enter(RequestEvent.END)
        request.choices.clear()

    def drop(self, request: DecodeRequest, *, by_client: bool = False) -> None:
        """Remove the request from all tables. The blocks of its pull are released, or kept in quarantine, by the
        pull."""
        del self.requests[request.work.request]
        self._departures.forget(request)
        self._arrivals.forget(request)
        for state in (request.grammar_state, *(each.sequence.grammar_state for each in request.choices)):
            self._masks.forget(state)
        if by_client:
            for choice in request.choices:
                if choice.stage is not ChoiceStage.ENDED:
                    self._totals.sequence_ended(self._agenda.now - choice.began)
        self._scheduler.forget(request, by_client=by_client)

    # --- masks ---------------------------------------------------------------------------------------------------

    def ask_first_mask(self, request: DecodeRequest) -> None:
        """Compute the mask of what follows the request's tokens, if it has a grammar."""
        work = request.work
        if work.sampling.grammar is None:
            return
        state = request.grammar_state = GrammarState()
        self._masks.ask(request, work.sampling.grammar, state, work.token_ids, work.prompt_len)

    def ask_mask(self, choice: DecodeChoice) -> None:
        """A sequence has got a token: compute the mask of the next one, if it has a grammar."""
        sequence = choice.sequence
        if sequence.sampling.grammar is None or choice.finish_reason is not None:
            return
        assert sequence.grammar_state is not None
        self._scheduler.entrance.mask_awaited(choice)
        self._masks.ask(
            choice, sequence.sampling.grammar, sequence.grammar_state, sequence.token_ids, sequence.prompt_len
        )
