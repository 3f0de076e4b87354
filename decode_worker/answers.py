"""The messages with which a decode worker answers its gateways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.contract.messages.fields import MAX_TOLD_TOKENS
from common.contract.messages.gateway import Resend
from common.contract.messages.worker import Finished, Timings, Tokens
from common.engine.batch import Scored
from common.engine.prompt import prompt_logprobs
from common.worker.agenda import Agenda
from decode_worker.migration import Departures
from decode_worker.request import DecodeChoice, DecodeRequest
from decode_worker.step_tokens import StepReport
from decode_worker.times import timings_of


class Answers:
    """Sends what requests have produced. Keeps only the tokens of the step whose end is being handled."""

    def __init__(self, agenda: Agenda, departures: Departures) -> None:
        self._agenda = agenda
        self._departures = departures
        self.report = StepReport()
        """Tokens of the step that has just ended."""

    def tokens(self, choice: DecodeChoice) -> None:
        """Send the tokens that the gateway has not been sent: with the step's others if there is one, and nothing else
        to be told with it."""
        gateway, sequence = choice.request.gateway, choice.sequence
        if not choice.num_sent or choice.finish_reason is not None:
            choice.timings = timings_of(choice, self._agenda.now)
            self._agenda.send(gateway, choice.timings)
            self._send_from(choice, choice.num_sent)
        elif sequence.sampling.logprobs is not None:
            self._send_from(choice, choice.num_sent)
        else:
            new = range(choice.num_sent, sequence.num_tokens)
            self.report.add_all(gateway, (choice.handle,) * len(new), new, sequence.token_ids[choice.num_sent :])
        choice.num_sent = sequence.num_tokens

    def step_ended(self) -> None:
        """Every sequence has its token of the step: send those that go together."""
        self.report.send_all(self._agenda.send)

    def prompt_scores(self, request: DecodeRequest, start: int, scored: Scored) -> int:
        """Send the log probabilities of prompt tokens from `start` on. Returns their number; raises
        `InvalidLogitsError`."""
        num_scored = 0
        for message in prompt_logprobs(request.work, start, scored):
            self._agenda.send(request.gateway, message)
            num_scored += len(message.scores)
        return num_scored

    def finished(self, request: DecodeRequest) -> None:
        """Every choice has ended."""
        request_id, attempt = request.key
        self._agenda.send(request.gateway, Finished(request=request_id, attempt=attempt))

    def ended_at_source(self, request: DecodeRequest, first_tokens: Sequence[Tokens]) -> None:
        """Relay the first tokens, with which the request ends. The source has sent them, but perhaps to an attempt that
        was over."""
        request_id, attempt = request.key
        if request.pull is not None and request.pull.prompt_times is not None:
            prompt = request.pull.prompt_times
            timings = Timings(request=request_id, attempt=attempt, choice=None, prompt=prompt, decode=None)
            self._agenda.send(request.gateway, timings)
        for tokens in first_tokens:
            self._agenda.send(request.gateway, replace(tokens, request=request_id, attempt=attempt))
        self.finished(request)

    def again(self, request: DecodeRequest, message: Resend) -> None:
        """Repeat what a gateway has lost of a choice, from `message.position` on."""
        for choice in request.choices:
            sequence = choice.sequence
            if sequence.choice == message.choice:
                if message.position < sequence.num_tokens and choice.timings is not None:
                    self._agenda.send(request.gateway, choice.timings)
                self._send_from(choice, message.position)
                self._departures.tell_again(choice)
        if request.finished:
            self.finished(request)

    def _send_from(self, choice: DecodeChoice, position: int) -> None:
        """Send what there is from `position` on, in as many messages as it takes."""
        first = max(position, choice.first_position)
        for start in range(first, choice.sequence.num_tokens, MAX_TOLD_TOKENS):
            self._agenda.send(choice.request.gateway, choice.tokens(start))
