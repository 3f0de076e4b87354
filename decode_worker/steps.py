"""The steps of a decode worker: what the engine is given, and what becomes of its outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

from common.contract.errors import Cause
from common.contract.messages.gateway import TRIAL_TOKENS
from common.engine.batch import Chosen, InvalidLogitsError, Sampled, SampledToken, Scored, StepResult
from common.engine.block_pool import BlockPool
from common.engine.model_config import ModelConfig
from common.engine.prompt import first_tokens
from common.engine.sequence import finish_reason
from common.scheduling.chunked_prefill import Chunk
from common.scheduling.costs import Costs
from common.worker.agenda import Agenda, PlanWanted
from common.worker.events import PlannedStep, StepEnded
from common.worker.front import Front
from decode_worker.answers import Answers
from decode_worker.book import Book
from decode_worker.columns import DecodeColumns, Decoding
from decode_worker.migration import Departures
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest, LocalPrompt
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step
from decode_worker.times import prompt_times_of
from decode_worker.view import DecodeTotals

_MOST_BETWEEN = 4.0
"""Most time between steps that is learnt from, in durations of the step: a process that was stopped says nothing."""


@dataclass(eq=False)
class DecodeSteps:
    """Plans steps, and processes their outcomes. Pure state."""

    _agenda: Agenda
    _config: ModelConfig
    _costs: Costs
    _pool: BlockPool
    _scheduler: DecodeScheduler
    _departures: Departures
    _front: Front[DecodeRequest]
    _answers: Answers
    _book: Book
    _totals: DecodeTotals
    _columns: DecodeColumns = field(init=False)
    _follows: bool = field(init=False, default=False)
    """Whether there has been something to compute ever since the last step ended."""

    def __post_init__(self) -> None:
        self._columns = DecodeColumns(self._config.max_sequence_tokens, self._config.eos_token_ids)

    def wanted(self, before: PlannedStep | None) -> None:
        """Plan the next step, if there is anything to compute. Without one, nothing runs until another event."""
        step: Step | None = None if before is None else before.plan
        if step is not None and (self._departures.awaited or not self._scheduler.may_run_ahead(step)):
            return
        if self._plan(step) or step is not None:
            return
        self._front.tell_turn()
        self._departures.cut()
        self._agenda.emit_last(PlanWanted(None))

    def wanted_again(self) -> None:
        """The last plan was empty. Plan again, if what followed from it has left something to compute."""
        may_go_on = self._scheduler.batch.num_running > self._scheduler.num_idle and self._pool.num_free
        if may_go_on or self._scheduler.has_work:
            self.wanted(None)

    def _plan(self, before: Step | None) -> bool:
        """Plan a step; returns whether there is anything to compute. The step `before` still runs."""
        number = self._pool.step_started()
        # Its drafts would only be dropped with a sequence that is about to move.
        step = self._scheduler.schedule(self._agenda.now, before, may_draft=not self._departures.awaited)
        if step.empty:
            self._pool.step_finished(number)
            if before is None:
                self._follows = False
            return False
        step.number = number
        decodes = drafting = None
        if step.decodes:
            decodes_before = () if before is None else before.decodes
            step.decoding = self._columns.decoding(step.decodes, decodes_before, step.drafts)
            decodes = step.decoding.decodes
            drafting = None if step.draft_work is None else step.draft_work.drafting(step.decoding.row_of())
        planned = PlannedStep(
            plan=step,
            slices=step.slices(),
            decodes=decodes,
            drafting=drafting,
            copies=step.copies,
            swap_outs=step.swap_outs,
            swap_ins=step.swap_ins,
            noticed=self._front.tell_turn(),
        )
        self._agenda.emit(planned)
        return True

    def ended(self, ended: StepEnded) -> None:
        """Process a step's outcomes."""
        step: Step = ended.work.plan
        result, speculation = ended.result, self._scheduler.speculation
        self._totals.block_steps += self._pool.num_used
        self._pool.step_finished(step.number)
        if speculation is not None:
            speculation.drafted(step, result.drafted)
            self._totals.draft_s += result.drafted.seconds
        before = self._totals.generated
        if step.decoding is not None:
            self._decoded(step, step.decoding, result.chosen)
        num_tokens = self._totals.generated - before
        sampled = dict(zip(step.chunks, result.outcomes, strict=True))
        scored = dict(zip(step.chunks, result.scores, strict=True))
        for chunk in self._scheduler.chunks_done(step.chunks):
            if self._chunk_done(chunk, scored[chunk]) and chunk.last:
                self._computed(chunk.prompt, sampled[chunk])
        # A prompt whose last chunk was in this step, and whose logits are no numbers, has failed, and nobody finds its
        # blocks. Those of earlier chunks are found before any logits have proved them.
        if step.chunks:
            self._scheduler.entrance.match_again()
        self._answers.step_ended()
        self._learn(step, num_tokens, result)
        if not self._pool.num_in_flight:
            self._departures.cut()
        self._front.tell_cache()

    def _learn(self, step: Step, num_tokens: int, result: StepResult) -> None:
        """Learn from what a step took whose decodes got `num_tokens`, and from the time between it and the step before,
        which clients wait for, too."""
        duration_s = result.duration_s
        plan_s = min(result.between_s, _MOST_BETWEEN * duration_s) if self._follows else 0.0
        self._follows = True
        if step.decodes:
            self._totals.step_ended((plan_s + duration_s) * len(step.decodes) / max(num_tokens, len(step.decodes)))
        if step.copies or step.swap_outs or step.swap_ins:
            return
        num_prompt = sum(chunk.end - chunk.start for chunk in step.chunks)
        depth_sum = sum(chunk.depth_sum for chunk in step.chunks)
        took_s = duration_s + (plan_s if step.decodes else 0.0)
        self._costs.observe_step(num_prompt, len(step.decodes), took_s, depth_sum)
        if step.chunks or not step.decodes:
            return
        if self._scheduler.speculation is not None:
            self._scheduler.speculation.observe(step, duration_s - result.drafted.seconds, plan_s)
        else:
            self._scheduler.bound.observe(step.decodes, duration_s, plan_s)

    def _decoded(self, step: Step, decoding: Decoding, chosen: Chosen) -> None:
        """Process the tokens of a step's decodes."""
        num_appended, others = decoding.append(chosen, self._answers.report)
        self._totals.generated += num_appended
        for index in others:
            choice = step.decodes[index]
            if choice.stage is ChoiceStage.RUNNING:
                self._advance(choice, decoding.outcomes(index, chosen), step)
        if self._scheduler.trials:
            for choice in step.decodes:
                self._end_trial(choice.request)

    def _end_trial(self, request: DecodeRequest) -> None:
        """End the trial of a request that has shown, by enough tokens, that it does no harm."""
        trials = self._scheduler.trials
        if trials and request.key in trials and request.num_new >= TRIAL_TOKENS:
            trials.discard(request.key)

    def _chunk_done(self, chunk: Chunk[LocalPrompt], scored: Scored) -> bool:
        """Account for a chunk, and send the prompt's log probabilities if the request asked for them. Returns whether
        the request goes on."""
        num_tokens = chunk.end - chunk.start
        if chunk.prompt.choice is None:
            self._totals.prompt += num_tokens
        else:
            self._totals.recomputed += num_tokens
        request = chunk.prompt.request
        try:
            self._totals.scored += self._answers.prompt_scores(request, chunk.start, scored)
        except InvalidLogitsError as error:
            self._invalid(request, chunk.prompt.block_table, error)
            return False
        return True

    def _invalid(self, request: DecodeRequest, blocks: Iterable[int], error: InvalidLogitsError) -> None:
        """Fail a request whose logits, after the KV in `blocks`, are no numbers to sample from."""
        if error.cause is Cause.INTERNAL:  # the machine's fault: the KV is no better, whoever computed it
            self._pool.forget(blocks)
        self._book.fail(request, error.cause, str(error))

    def _computed(self, prompt: LocalPrompt, outcomes: Sequence[Sampled]) -> None:
        """Every token of a local prompt has its KV; `outcomes` has what was sampled after the last one."""
        request, choice = prompt.request, prompt.choice
        if choice is not None:
            if choice.stage is not ChoiceStage.RECOMPUTING:
                return  # the request has just failed by another choice
            self._scheduler.sequences.recomputed(choice, self._agenda.now)
            self._advance(choice, outcomes)
            return
        try:
            tokens = first_tokens(request.work, outcomes, self._config.eos_token_ids, self._config.max_sequence_tokens)
        except InvalidLogitsError as error:
            self._invalid(request, prompt.block_table, error)
            return
        now = self._agenda.now
        request.prompt_times = prompt_times_of(request, now)
        self._scheduler.computed(request, tokens, now)
        for choice in request.choices:
            self._totals.generated += 1
            self._answers.tokens(choice)
            self._book.ask_mask(choice)
        self._book.finish_if_ended(request)

    def _advance(self, choice: DecodeChoice, outcomes: Iterable[Sampled], step: Step | None = None) -> None:
        """Append what was sampled to a sequence whose tokens all have their KV: a token, and one more for each token
        that was drafted of it in `step` and was right. Tokens after the last one of the sequence do not count."""
        request, before = choice.request, choice.sequence.num_tokens
        for outcome in outcomes:
            if isinstance(outcome, InvalidLogitsError):
                self._invalid(request, choice.sequence.block_table, outcome)
                return
            self._append(choice, outcome)
            if choice.finish_reason is not None:
                break
        self._totals.generated += choice.sequence.num_tokens - before
        if step is not None and choice in step.drafts:
            self._verified(choice, step, before)  # before its end is told, with what was drafted of it
        self._answers.tokens(choice)
        self._end_trial(request)
        if choice.finish_reason is not None:
            self._book.end(choice)
        if choice.sequence.grammar_state is not None:
            self._book.ask_mask(choice)

    def _verified(self, choice: DecodeChoice, step: Step, before: int) -> None:
        """A sequence had `before` tokens; some were drafted in `step`, and those that it has now were right."""
        draft, new = step.drafts[choice], choice.sequence.token_ids[before:]
        num_drafted, num_right = len(draft), sum(takewhile(bool, map(eq, draft, new)))
        by_model = step.draft_work is not None and choice in step.draft_work.drafts
        self._totals.verified("draft" if by_model else "lookup", num_drafted, num_right)
        choice.num_drafted += num_drafted
        choice.num_accepted += num_right
        self._scheduler.sequences.drafted(choice, len(new) - 1)
        model = None if self._scheduler.speculation is None else self._scheduler.speculation.model
        if by_model and model is not None:
            model.verified(choice, before, num_drafted, num_right)

    def _append(self, choice: DecodeChoice, outcome: SampledToken) -> None:
        """Append a token, and note if the sequence ends with it."""
        sequence = choice.sequence
        sequence.num_computed = len(sequence.token_ids)
        num_tokens = sequence.num_computed + 1
        reason = finish_reason(
            outcome.token_id,
            num_tokens - sequence.prompt_len,
            sequence.sampling,
            self._config.eos_token_ids,
            num_tokens,
            self._config.max_sequence_tokens,
        )
        choice.append(outcome.token_id, outcome.logprobs, reason)
