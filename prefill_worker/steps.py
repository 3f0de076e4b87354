"""The steps of a prefill worker: who is admitted, what the engine is given, and what becomes of its outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.contract.errors import Cause
from common.contract.messages.worker import Finished, Timings
from common.engine.batch import InvalidLogitsError, Sampled
from common.engine.block_pool import BlockPool
from common.engine.model_config import ModelConfig
from common.engine.prompt import first_tokens, prompt_logprobs, prompt_slice
from common.scheduling.chunked_prefill import Chunk
from common.scheduling.costs import Costs
from common.worker.agenda import Agenda, PlanWanted
from common.worker.events import PlannedStep, StepEnded
from common.worker.front import Front
from prefill_worker.prefix_pulls import PrefixPulls
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler

_RECLAIM_AGE_S = 1.0
"""Age in seconds from which an offer without a sink may be dropped when a waiting prompt needs its blocks."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A step that was handed to the shell."""

    number: int
    """The block pool's number of the step."""
    chunks: list[Chunk[PrefillRequest]]


@dataclass(eq=False)
class PrefillSteps:
    """Plans steps, offers prompts, and processes outcomes. Pure state."""

    _agenda: Agenda
    _config: ModelConfig
    _costs: Costs
    _block_size: int
    _pool: BlockPool
    _scheduler: PrefillScheduler
    _prefix_pulls: PrefixPulls
    _front: Front[PrefillRequest]
    _fail: Callable[[PrefillRequest, Cause, str], None]
    """Ends a request, and tells its gateway why."""
    num_computed: int = field(init=False, default=0)
    """Prompt tokens computed here."""
    num_scored: int = field(init=False, default=0)
    """Prompt tokens whose log probabilities were told."""

    def __post_init__(self) -> None:
        self._pulls, self._lender, self._checksum = self._front.pulls, self._front.lender, self._front.checksum

    def wanted(self, before: PlannedStep | None) -> None:
        """Ask for a plan once everything else is decided. If the next waiting prompt lacks blocks, offers that nobody
        has attached to give theirs first."""
        if before is not None and self._scheduler.trials:
            return  # suspects share no step with others
        now = self._agenda.now
        missing = self._scheduler.blocks_missing(now)
        if missing:
            self._lender.reclaim(missing, now - _RECLAIM_AGE_S)
        self._agenda.emit_last(PlanWanted(before))

    def plan(self, before: PlannedStep | None) -> None:
        """Admit prompts that fit and plan the next step, now that the blocks of `wanted` are free."""
        now, held = self._agenda.now, False
        for request in self._scheduler.admit(now):
            prefix = self._prefix_pulls.choose(request, now)
            if prefix is None:
                self.offer(request)
            else:
                held = True
                num_coming = len(prefix.pull.block_hashes or ()) * self._block_size
                self._scheduler.hold(request, num_coming, prefix.expected_by)
                self._pulls.begin(prefix.pull)
        chunks = self._scheduler.schedule(now)
        if not chunks:
            if before is None:
                self._front.tell_turn()
            if held:  # the pull may end at once: then the prompt is to be computed here
                self._agenda.emit_last(PlanWanted(before))
            return
        planned = PlannedStep(
            plan=PrefillPlan(self._pool.step_started(), chunks),
            slices=[
                prompt_slice(c.prompt.work, c.start, c.end, c.prompt.block_table, c.prompt.allowed) for c in chunks
            ],
            completed=[self._completed(chunk) for chunk in chunks] if self._checksum is not None else (),
            noticed=self._front.tell_turn(),
        )
        self._agenda.emit(planned)

    def _completed(self, chunk: Chunk[PrefillRequest]) -> Sequence[int]:
        """The prompt's blocks that `chunk` completes."""
        return tuple(chunk.prompt.block_table[chunk.start // self._block_size : self._num_ready(chunk)])

    def _num_ready(self, chunk: Chunk[PrefillRequest]) -> int:
        """Number of the prompt's blocks that no longer change after `chunk`. The last, partly filled block counts after
        the last chunk only."""
        return self._scheduler.blocks_for(chunk.prompt) if chunk.last else chunk.end // self._block_size

    def offer(self, request: PrefillRequest) -> None:
        """Open the request's lease, and announce the blocks that are complete already."""
        self._pool.share(request.block_table)
        self._lender.open(request.key, request.block_table, request.deadline)
        num_ready = request.num_computed // self._block_size
        if num_ready:
            self._lender.blocks_ready(request.key.request, num_ready)

    def ended(self, ended: StepEnded) -> None:
        """Process a step's outcomes."""
        plan: PrefillPlan = ended.work.plan
        chunks, result = plan.chunks, ended.result
        self._pool.step_finished(plan.number)
        num_tokens, depth_sum = sum(c.end - c.start for c in chunks), sum(c.depth_sum for c in chunks)
        self._costs.observe_prefill(num_tokens, result.duration_s, depth_sum)
        checksums = ended.checksums or [()] * len(chunks)
        tables = [chunk.prompt.block_table for chunk in chunks]  # `step_done` takes them from prompts that are done
        live = set(self._scheduler.step_done(chunks))
        told = zip(chunks, tables, result.outcomes, checksums, result.scores, strict=True)
        for chunk, table, sampled, sums, scored in told:
            if chunk not in live:
                continue
            self.num_computed += chunk.end - chunk.start
            self._lender.blocks_ready(chunk.prompt.key.request, self._num_ready(chunk), sums)
            try:
                for message in prompt_logprobs(chunk.prompt.work, chunk.start, scored):
                    self._agenda.send(chunk.prompt.gateway, message)
                    self.num_scored += len(message.scores)
                if chunk.last:
                    self._finish(chunk.prompt, sampled)
            except InvalidLogitsError as error:
                if error.cause is Cause.INTERNAL:  # the machine's fault: its KV is no better, whoever computed it
                    self._pool.forget(table)
                self._fail(chunk.prompt, error.cause, str(error))
        self._front.tell_cache()

    def _finish(self, request: PrefillRequest, sampled: Sequence[Sampled]) -> None:
        """Send a prompt's first tokens, to its gateway and with the lease to the sink. Raises `InvalidLogitsError`."""
        config = self._config
        tokens = first_tokens(request.work, sampled, config.eos_token_ids, config.max_sequence_tokens)
        request_id, attempt = request.key
        times = request.times(self._agenda.now)
        self._lender.complete(request_id, tokens, times)
        self._agenda.send(
            request.gateway, Timings(request=request_id, attempt=attempt, choice=None, prompt=times, decode=None)
        )
        for message in tokens:
            self._agenda.send(request.gateway, message)
        self._front.count("finished")
        if all(message.finish_reason is not None for message in tokens):
            self._agenda.send(request.gateway, Finished(request=request_id, attempt=attempt))
