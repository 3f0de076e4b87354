"""Drives the product's decode scheduler without a network: on a real engine, or on the clock of a cost model.

One worker computes prompts and decodes (colocated), or prompts arrive already computed after a delay (a handoff as a
decode worker sees it). The scheduler is the one that decode workers run, so that policies and baselines can be compared
on one trace.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.baselines import BatchAtATime
from common.contract.block_hashes import BlockChain
from common.contract.ids import Handle, Incarnation, RequestId, RequestKey
from common.contract.messages.fields import FinishReason
from common.contract.messages.gateway import Decode, Source
from common.contract.messages.handoff import Attach
from common.contract.messages.worker import Tokens
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.engine.batch import InvalidLogitsError, Sampled, SampledToken
from common.engine.block_pool import BlockPool
from common.engine.runner import ModelRunner
from common.engine.sequence import finish_reason
from decode_worker.columns import DecodeColumns
from decode_worker.request import DecodeChoice, DecodeRequest, LocalPrompt
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step
from kv_transfer.pull import Pull

_SOMEWHERE = Source(address="p:1", incarnation=Incarnation("p"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    time_s: float
    prompt: tuple[int, ...]
    num_output: int
    """Output tokens after which the driver ends the request."""
    max_tokens: int
    """The client's limit on output tokens, which the scheduler knows."""
    tier: Tier = Tier.STANDARD
    tenant: str = ""
    handoff: bool = False
    """Whether the prompt is computed elsewhere."""


@dataclass(slots=True, eq=False)
class Story:
    """The course of one request."""

    arrival: Arrival
    token_ids: list[int] = field(default_factory=list)
    """The output tokens."""
    times_s: list[float] = field(default_factory=list)
    """The time of each output token."""
    steps: list[int] = field(default_factory=list)
    """The number of the step that generated each output token."""


class Execution(Protocol):
    """Carries out steps: a real engine or a model of one."""

    def run(self, step: Step) -> list[tuple[Sampled, ...]]:
        """The outcomes of the step's decodes, then of its chunks."""

    def seconds(self, step: Step) -> float:
        """Simulated seconds of the last step; 0 if it took real time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A cost model of a step, in seconds. A record must say whether it is fitted to a machine or assumed."""

    step_s: float = 0.010
    decode_s: float = 0.0001
    """Seconds for each sequence that decodes."""
    prompt_token_s: float = 0.0001
    swap_block_s: float = 0.0001


class Modelled:
    """Models an engine: every token is its position, and a step takes the time that `timing` gives."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing

    def run(self, step: Step) -> list[tuple[Sampled, ...]]:
        """Tokens that nobody reads."""
        decodes: list[tuple[Sampled, ...]] = [(SampledToken(7),)] * len(step.decodes)
        chunks: list[tuple[Sampled, ...]] = [
            tuple(SampledToken(7) for _ in range(_num_samples(chunk.prompt))) if chunk.last else ()
            for chunk in step.chunks
        ]
        return decodes + chunks

    def seconds(self, step: Step) -> float:
        """Seconds of the step, by the cost model."""
        timing = self._timing
        num_prompt = sum(chunk.end - chunk.start for chunk in step.chunks)
        num_swapped = len(step.swap_outs) + len(step.swap_ins)
        return (
            timing.step_s
            + timing.decode_s * len(step.decodes)
            + timing.prompt_token_s * num_prompt
            + timing.swap_block_s * num_swapped
        )


class Real:
    """A real engine: a model runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._columns = DecodeColumns(runner.config.max_sequence_tokens, runner.config.eos_token_ids)

    def run(self, step: Step) -> list[tuple[Sampled, ...]]:
        """Carry the step out as the decode worker's engine does."""
        for source, destination in step.copies:
            self._runner.copy_block(source, destination)
        self._runner.swap_out(step.swap_outs)
        self._runner.swap_in(step.swap_ins)
        decodes = self._columns.decoding(step.decodes).decodes if step.decodes else None
        submitted = self._runner.submit(step.slices(), decodes)
        decoded = submitted.chosen().outcomes()[: len(step.decodes)]
        return [*((outcome,) for outcome in decoded), *submitted.outcomes()]

    def seconds(self, step: Step) -> float:
        """0: the step took real time."""
        return 0.0


class Driver:
    """Runs a trace to its end. `now` is simulated time for a cost model, time since the start for a real engine."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: DecodeScheduler | BatchAtATime,
        execution: Execution,
        *,
        block_size: int,
        max_sequence_tokens: int,
        eos_token_ids: Sequence[int] = (),
        real_time: bool = False,
        after_step: Callable[[Driver, Step], None] | None = None,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.now = 0.0
        self.num_steps = 0
        self._execution = execution
        self._block_size = block_size
        self._max_sequence_tokens = max_sequence_tokens
        self._eos_token_ids = eos_token_ids
        self._began = time.perf_counter() if real_time else None
        self._after_step = after_step
        self._stories: dict[RequestId, Story] = {}
        self._open: dict[RequestId, DecodeRequest] = {}

    def run(self, arrivals: Iterable[Arrival], *, until_s: float = float("inf")) -> list[Story]:
        """Serve every request to its end, or until `until_s`; return the stories in the order of arrival."""
        coming = sorted(arrivals, key=lambda arrival: arrival.time_s)
        due = deque(coming)
        while (due or self._open) and self._time() < until_s:
            while due and due[0].time_s <= self.now:
                self._arrive(due.popleft())
            if not due and isinstance(self.scheduler, BatchAtATime):
                self.scheduler.no_more()
            if not self._step():
                opens_at = self.scheduler.opens_at() if isinstance(self.scheduler, BatchAtATime) else math.inf
                moment = min(opens_at, due[0].time_s if due else math.inf)
                assert moment < math.inf, f"{len(self._open)} requests wait, and nothing happens"
                self._wait_until(moment)
        return list(self._stories.values())

    def _time(self) -> float:
        if self._began is not None:
            self.now = time.perf_counter() - self._began
        return self.now

    def _wait_until(self, moment: float) -> None:
        if self._began is None:
            self.now = max(self.now, moment)
        else:
            time.sleep(max(0.0, moment - self._time()))

    def _arrive(self, arrival: Arrival) -> None:
        number = len(self._stories)
        work = Decode(
            request=RequestId(f"r{number}"),
            attempt=1,
            token_ids=arrival.prompt,
            prompt_len=len(arrival.prompt),
            choices=(0,),
            handles=(Handle(number),),
            sampling=SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0),
            budget_s=1e6,
            tier=arrival.tier,
            tenant=arrival.tenant,
            source=_SOMEWHERE if arrival.handoff else None,
            offered=RequestKey(RequestId(f"r{number}"), 1) if arrival.handoff else None,
        )
        wanted = Attach(request=work.request, attempt=1, offered=1)
        pull = Pull(_SOMEWHERE, wanted) if arrival.handoff else None
        chain = BlockChain(self._block_size)
        request = DecodeRequest(work, Incarnation("g"), float("inf"), self.now, chain, pull)
        assert self.scheduler.fits(work), arrival
        self._stories[work.request] = Story(arrival)
        self._open[work.request] = request
        self.scheduler.want(request, self.now)

    def _step(self) -> bool:
        """Run one step; return whether there was anything to do."""
        for reservation in self.scheduler.reserve(self.now):
            request = reservation.request
            tokens = self._first_tokens(request, [SampledToken(7)] * len(request.work.choices))
            self.scheduler.settled(request, reservation.block_ids, tokens, self.now)
            self._take_firsts(request)
        number = self.pool.step_started()
        step = self.scheduler.schedule(self.now)
        if step.empty:
            self.pool.step_finished(number)
            return self.scheduler.has_work or self.scheduler.batch.num_running > 0
        outcomes = self._execution.run(step)
        self.now += self._execution.seconds(step)
        self._time()
        self.num_steps += 1
        self.pool.step_finished(number)
        for choice, (outcome,) in zip(step.decodes, outcomes, strict=False):
            self._advance(choice, outcome)
        by_chunk = dict(zip(map(id, step.chunks), outcomes[len(step.decodes) :], strict=True))
        for chunk in self.scheduler.chunks_done(step.chunks):
            if chunk.last:
                self._computed(chunk.prompt, by_chunk[id(chunk)])
        if step.chunks:
            self.scheduler.entrance.match_again()
        if self._after_step is not None:
            self._after_step(self, step)
        return True

    def _computed(self, prompt: LocalPrompt, outcomes: Sequence[Sampled]) -> None:
        if prompt.choice is not None:
            self.scheduler.sequences.recomputed(prompt.choice, self.now)
            self._advance(prompt.choice, outcomes[0])
            return
        self.scheduler.computed(prompt.request, self._first_tokens(prompt.request, outcomes), self.now)
        self._take_firsts(prompt.request)

    def _first_tokens(self, request: DecodeRequest, outcomes: Sequence[Sampled]) -> list[Tokens]:
        work = request.work
        return [
            Tokens(
                request=work.request,
                attempt=1,
                choice=choice,
                position=len(work.token_ids),
                token_ids=(_token(outcome),),
                finish_reason=self._reason(request, _token(outcome), 1),
            )
            for choice, outcome in zip(work.choices, outcomes, strict=True)
        ]

    def _take_firsts(self, request: DecodeRequest) -> None:
        for choice in request.choices:
            self._record(request, choice.sequence.token_ids[-1])
        if request.finished:
            self._close(request)

    def _advance(self, choice: DecodeChoice, outcome: Sampled) -> None:
        sequence, token = choice.sequence, _token(outcome)
        sequence.num_computed = sequence.num_tokens
        choice.append(token, None, self._reason(choice.request, token, sequence.num_output + 1))
        self._record(choice.request, token)
        if choice.finish_reason is not None:
            self.scheduler.sequences.remove(choice)
            if choice.request.finished:
                self._close(choice.request)

    def _reason(self, request: DecodeRequest, token: int, num_output: int) -> FinishReason | None:
        work = request.work
        if num_output >= self._stories[work.request].arrival.num_output:
            return "stop"
        num_tokens = work.prompt_len + num_output
        return finish_reason(
            token, num_output, work.sampling, self._eos_token_ids, num_tokens, self._max_sequence_tokens
        )

    def _record(self, request: DecodeRequest, token: int) -> None:
        story = self._stories[request.work.request]
        story.token_ids.append(token)
        story.times_s.append(self.now)
        story.steps.append(self.num_steps)

    def _close(self, request: DecodeRequest) -> None:
        self.scheduler.forget(request)
        del self._open[request.work.request]


def _token(outcome: Sampled) -> int:
    assert not isinstance(outcome, InvalidLogitsError), outcome
    return outcome.token_id


def _num_samples(prompt: LocalPrompt) -> int:
    return 1 if prompt.choice is not None else len(prompt.request.work.choices)
