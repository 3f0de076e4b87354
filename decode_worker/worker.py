"""The decode worker: turns events from gateways, sources, the transport and the engine into decisions and messages.

Life cycle of a request in the decode worker:

    1. Decode arrives from a gateway. The worker attaches to the source's offer (`kv_transfer.intake`). Without a source
       it computes the prompt itself, in chunks that share steps with decodes.
    2. The offer opens. The request waits until room is reserved. Blocks that are cached here are kept. The others are
       read when the source announces them, while the source computes the next chunk.
    3. The last read has ended and the first tokens are known: the worker asks the source to settle.
    4. If the source answers that the blocks are valid, the choices join the running batch at the next step. Otherwise
       nothing is decoded from the blocks.
    5. Each step sends each choice's token. After the last one Finished is sent; the tokens are kept until Ack.

Under memory pressure a choice may lose its blocks and get them back later; its client gets the same tokens. While the
worker drains, other decode workers pull its running sequences (`decode_worker.migration`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client.metrics_core import Metric

from common.contract.block_hashes import BlockChain, BlockHash
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    MAX_TOLD_TOKENS,
    Abort,
    Ack,
    Attach,
    AttachPrefix,
    AttachSequence,
    Cancelled,
    Decode,
    Detach,
    Drain,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Phase,
    Resend,
    Resume,
    Role,
    Settle,
    Timings,
    Tokens,
    Welcome,
)
from common.contract.tiers import by_tier
from common.engine.batch import Chosen, InvalidLogitsError, Sampled, Scored, Slice
from common.engine.block_pool import BlockPool
from common.engine.cache_feed import CacheFeed
from common.engine.chunked_prefill import Chunk
from common.engine.engine import Engine, Started
from common.engine.grammar import GaveUp, GrammarState
from common.engine.masks import Masks
from common.engine.prompt import first_tokens, prompt_logprobs
from common.engine.sequence import finish_reason
from common.engine.trials import NOTICE_S, TRIAL_TOKENS, TrialFeed
from common.runtime.channel import ControlServer
from common.runtime.clock import Clock
from common.runtime.config import DecodeSettings
from common.runtime.counting import step_tokens
from common.runtime.fence import AttemptFence
from common.runtime.logs import about
from common.runtime.probes import counter, gauge
from decode_worker.columns import DecodeColumns, Decoding
from decode_worker.migration import Arrivals, Departures, pull_of
from decode_worker.policy import Policy
from decode_worker.request import DecodeRequest, Generation, LocalPrompt, Stage
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step
from decode_worker.step_tokens import StepReport
from decode_worker.times import prompt_times_of, timings_of
from kv_transfer.intake import Intake
from kv_transfer.lender import Lender
from kv_transfer.regions import Region
from kv_transfer.sink import Pull
from kv_transfer.transport import Transport

log = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED = 4096
"""Most finished requests whose tokens are kept until the gateway acknowledges them."""
_SEQUENCE_WEIGHT = 0.1
"""EWMA weight of the newest sequence's duration."""
_TICK_S = 0.25
"""Seconds between two checks of deadlines and quarantine, while a request is open."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was handed to the engine."""

    number: int
    """The block pool's number of the step."""
    step: Step
    decoding: Decoding | None
    """The decodes of the step; None if it has none."""
    submitted: asyncio.Future[Started]
    """The engine's future of the step."""


class DecodeWorker:
    """Connects scheduler, intake, lender and engine with the network. Runs on the event loop's thread."""

    def __init__(
        self,
        settings: DecodeSettings,
        me: Incarnation,
        server: ControlServer,
        engine: Engine,
        region: Region,
        make_transport: Callable[[], Transport],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._server = server
        self._engine = engine
        self._clock = clock
        self._config = engine.runner.config
        self._block_size = engine.runner.layout.block_size
        self._pool = BlockPool(engine.runner.cache.num_blocks, prefix_cache=settings.prefix_cache)
        self._max_sequence_tokens = min(self._config.max_sequence_tokens, self._pool.num_blocks * self._block_size)
        policy = Policy(
            block_size=self._block_size,
            max_num_seqs=settings.max_num_seqs,
            max_sequence_tokens=self._config.max_sequence_tokens,
            token_budget=settings.token_budget,
            prefill_tokens=settings.prefill_tokens,
            prefill_priority=settings.prefill_priority,
            memory_reserve=settings.memory_reserve,
            num_host_blocks=engine.runner.num_host_blocks,
            preempt_by=settings.preempt_by,
            ageing_s=settings.ageing_s,
            ttft_target_s=settings.ttft_target_s,
        )
        self._scheduler = DecodeScheduler(self._pool, policy, engine.costs)
        self._intake = Intake(
            settings, me, Role.DECODE, engine.fingerprint, region, make_transport, events=self, clock=clock
        )
        self._lender = Lender(
            events=self,
            send=server.send,
            set_serving=self._intake.mover.set_serving,
            clock=clock,
            checksum=region.crc32 if settings.checksums else None,
        )
        self._arrivals = Arrivals(self._scheduler, self._pool, self._intake, self._block_size)
        self._departures = Departures(
            self._scheduler,
            self._pool,
            self._lender,
            server.send,
            region.crc32 if settings.checksums else None,
            self._block_size,
        )
        self._runs_ahead = settings.runs_ahead(engine.runner.cache.device.type)
        self._feed = CacheFeed(self._pool, server.send)
        self._trial_feed = TrialFeed(self._scheduler.trials, self._gateway_of, server.send)
        self._masks = Masks(engine.runner.grammars)
        self._report = StepReport()
        self._columns = DecodeColumns(self._config.max_sequence_tokens, self._config.eos_token_ids)
        self._draining = False
        self._fence = AttemptFence(clock)
        self._requests: dict[RequestId, DecodeRequest] = {}
        self._finished: OrderedDict[RequestId, DecodeRequest] = OrderedDict()
        self._wake = asyncio.Event()
        self._busy = asyncio.Event()
        self._ended: dict[str, int] = {}
        self._generation_tokens = 0
        self._prompt_tokens = 0
        self._step_tokens = step_tokens(settings.model)
        self._scored_tokens = 0
        self._recomputed_tokens = 0
        self._steps_ahead = 0
        """Number of steps that were planned while another one ran."""
        self._sequence_s = 0.0
        """EWMA of a sequence's duration here, in seconds from its first token to its last."""
        self._block_steps = 0
        """Blocks in use, summed over the steps."""

    # --- the loops -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the transport. Raises `TransferError` if it cannot work on this machine."""
        await self._intake.start()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._step_loop())
                tasks.create_task(self._tick_loop())
                tasks.create_task(self._intake.run())
        finally:
            await self._intake.close()
            self._engine.close()

    async def _step_loop(self) -> None:
        before: _InFlight | None = None
        while True:
            if before is None:
                await self._masks.settle()
            number = self._pool.step_started()
            step_before = None if before is None else before.step
            step = self._scheduler.schedule(self._clock(), step_before)
            for request in step.revoked:
                assert request.pull is not None, request.work
                self._intake.revoke(request.pull)
            if step.empty:
                self._pool.step_finished(number)
                if before is None:
                    await self._rest()
                else:
                    await self._finish(before)
                    before = None
                continue
            slices, decoding = self._input(step, step_before)  # before the first await: an abort takes blocks
            await self._tell_whose_turn_it_is()
            self._steps_ahead += before is not None
            decodes = None if decoding is None else decoding.decodes
            submitted = self._engine.submit(slices, step.copies, step.swap_outs, step.swap_ins, decodes)
            if before is not None:
                await self._finish(before)
            before = _InFlight(number, step, decoding, submitted)
            if not self._may_run_ahead(step):
                await self._finish(before)
                before = None

    def _input(self, step: Step, before: Step | None) -> tuple[list[Slice], Decoding | None]:
        """The input of the engine. `before` is the step that still runs."""
        decoding = None
        if step.decodes:
            decoding = self._columns.decoding(step.decodes, () if before is None else before.decodes)
        return step.slices(), decoding

    def _may_run_ahead(self, step: Step) -> bool:
        """Whether the next step is planned, and handed to the engine, while this one runs."""
        return self._runs_ahead and not self._departures.awaited and self._scheduler.may_run_ahead(step)

    async def _finish(self, in_flight: _InFlight) -> None:
        """Wait for a step's outcomes and process them."""
        outcomes = await self._engine.outcomes(in_flight.submitted)
        self._block_steps += self._pool.num_used
        self._pool.step_finished(in_flight.number)
        step = in_flight.step
        self._step_tokens.observe(len(step.decodes) + sum(chunk.end - chunk.start for chunk in step.chunks))
        asked = any(chunk.prompt.request.work.prompt_logprobs is not None for chunk in step.chunks)
        if in_flight.decoding is not None:
            self._decoded(step, in_flight.decoding, self._engine.chosen(in_flight.submitted))
        self._after_step(step, outcomes, self._engine.scores(in_flight.submitted) if asked else ())

    async def _rest(self) -> None:
        """Nothing can be computed: wait for an event, unless admitting requests has just made work possible."""
        self._wake.clear()
        self._trial_feed.publish()
        self._departures.cut()
        self._reserve()
        if not (self._scheduler.num_running > self._scheduler.num_idle and self._pool.num_free):
            await self._wake.wait()

    async def _tell_whose_turn_it_is(self) -> None:
        """Tell gateways which suspects compute in the next step, and give the message time to leave: the step may crash
        this worker."""
        if self._trial_feed.publish():
            await asyncio.sleep(NOTICE_S)

    async def _tick_loop(self) -> None:
        while True:
            await self._busy.wait()
            await asyncio.sleep(_TICK_S)
            self._tick()
            lending = self._lender.num_leases or self._lender.num_parked
            if not (self._requests or self._intake.num_quarantined or lending):
                self._busy.clear()

    def _tick(self) -> None:
        now = self._clock()
        for request in [request for request in self._requests.values() if request.deadline <= now]:
            stage = "decoding"
            if not request.generations:
                stage = "computing the prompt" if request.pull is None else request.pull.state.value
            self._fail(request, Cause.DEADLINE, f"the request's time ran out in the decode worker, {stage}")
        self._intake.tick(now)
        self._lender.expire(now)
        self._reserve()  # a request may have aged since

    # --- events from gateways and sinks --------------------------------------------------------------------------

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """Handle a message from a gateway, or from a worker that pulls from this one."""
        match message:
            case Decode():
                self._on_decode(peer, message)
            case Abort():
                self._on_abort(peer, message)
            case Ack():
                self._on_ack(peer, message)
            case Resend():
                self._on_resend(peer, message)
            case Attach() | AttachPrefix() | Settle() | Detach():
                self._lender.on_message(peer, message)
                self._busy.set()
            case AttachSequence():
                self._on_attach_sequence(peer, message)
            case Drain():
                self.drain()
            case Resume():
                self.resume()
            case _:
                log.warning("%s is not for a decode worker; ignored", type(message).__name__)

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session opens or reopens: end the requests that the peer does not list. Returns those that go on."""
        listed = set(hello.open_requests)
        for request in self._owned_by(peer):
            if request.key not in listed:
                self._forget(request, "unknown to its gateway")
        self._lender.on_hello(peer, listed)
        return tuple(request.key for request in self._owned_by(peer))

    def on_open(self, peer: Incarnation, role: Role) -> None:
        """Start to tell a gateway which blocks the prefix cache holds and which requests are on trial."""
        if role is Role.GATEWAY:
            self._feed.begin(peer)
            self._trial_feed.begin(peer)

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A peer is lost: end a gateway's requests, and the leases of a sink."""
        for request in self._owned_by(peer):
            self._forget(request, "its gateway is gone")
        self._lender.on_peer_lost(peer)
        self._feed.end(peer)
        self._trial_feed.end(peer)

    def _on_decode(self, gateway: Incarnation, work: Decode) -> None:
        if not self._fence.admits(work.key):
            return
        known = self._find(work.request)
        if known is not None:
            self._forget(known, "a newer attempt arrived")
        objection = self._engine.runner.objection(work.token_ids, work.sampling)
        if work.moving and len(work.token_ids) == work.prompt_len:
            objection = "a sequence moves only when it runs"
        if objection is not None:
            self._refuse(gateway, work.key, Cause.INVALID, objection)
            return
        if not self._scheduler.fits(work):
            needed = self._scheduler.blocks_needed(work)
            message = f"the request may need {needed} KV blocks, this worker has {self._pool.num_blocks}"
            self._refuse(gateway, work.key, Cause.TOO_LARGE, message)
            return
        if self._draining:
            self._refuse(gateway, work.key, Cause.DRAINING, "this decode worker takes no new work")
            return
        if not work.admitted and len(self._requests) >= self._settings.max_waiting + self._settings.max_num_seqs:
            self._refuse(gateway, work.key, Cause.CAPACITY, f"{len(self._requests)} requests open already")
            return
        self._begin(gateway, work)

    def _begin(self, gateway: Incarnation, work: Decode) -> None:
        now = self._clock()
        pull: Pull | None = None
        if work.moving:
            # The last token has no KV yet, at the source or here: the first step here computes it.
            work = replace(work, token_ids=work.token_ids[:-1])
            pull = pull_of(work)
        elif work.source is not None and work.offered is not None:
            pull = Pull(work.key, work.source, offered=work.offered.attempt)
        chain = BlockChain(self._block_size, work.cache_salt)
        request = DecodeRequest(work, gateway, now + work.budget_s, now, chain, pull)
        self._requests[work.request] = request
        self._busy.set()
        if pull is not None and not work.moving:
            self._intake.begin(pull, lambda tokens: _fits(tokens, work))
            return
        if pull is None and work.sampling.grammar is not None:
            state = request.grammar_state = GrammarState()
            told = partial(self._on_first_mask, request)
            self._masks.ask(work.sampling.grammar, state, work.token_ids, work.prompt_len, told)
            return
        self._scheduler.want(request, now)
        self._reserve()
        if work.moving and self._requests.get(work.request) is request and request not in self._arrivals:
            self._fail(request, Cause.CAPACITY, "there is no room for the sequence at once; where it is, it can go on")

    def _on_first_mask(self, request: DecodeRequest, gave_up: GaveUp | None) -> None:
        """The mask of a local prompt's first tokens is known, or its grammar gave up: the request waits for room, or
        fails."""
        if gave_up is not None:
            self._fail(request, Cause.INVALID, gave_up.why)
            return
        self._scheduler.want(request, self._clock())
        self._reserve()

    def _on_attach_sequence(self, sink: Incarnation, message: AttachSequence) -> None:
        request = self._requests.get(message.sequence.request)
        generations = request.generations if request is not None and request.key == message.sequence else []
        generation = next((g for g in generations if g.sequence.choice == message.choice), None)
        self._departures.attach(sink, message, generation)
        self._busy.set()
        self._wake.set()

    def _on_abort(self, gateway: Incarnation, message: Abort) -> None:
        request = self._find(message.request)
        if request is None or request.gateway != gateway or request.work.attempt > message.attempt:
            return
        if message.request in self._finished:
            self._forget(request, "aborted")  # the gateway was sent its end
            return
        self._forget(request, "aborted", wanted=True)
        self._count(Cause.CANCELLED)
        self._server.send(gateway, Cancelled(request=message.request, attempt=request.work.attempt))

    def _on_ack(self, gateway: Incarnation, message: Ack) -> None:
        request = self._finished.get(message.request)
        if request is not None and request.gateway == gateway and request.work.attempt == message.attempt:
            del self._finished[message.request]
            request.generations.clear()  # breaks the reference cycle, which only the garbage collector would free

    def _on_resend(self, gateway: Incarnation, message: Resend) -> None:
        request = self._find(message.request)
        if request is None or request.gateway != gateway or request.work.attempt != message.attempt:
            return
        for generation in request.generations:
            if generation.sequence.choice == message.choice:
                if message.position < generation.sequence.num_tokens and generation.timings is not None:
                    self._server.send(gateway, generation.timings)
                first = max(message.position, generation.first_position)
                for position in range(first, generation.sequence.num_tokens, MAX_TOLD_TOKENS):
                    self._server.send(gateway, generation.tokens(position))
                self._departures.tell_again(generation)
        if request.finished:
            self._server.send(gateway, Finished(request=request.work.request, attempt=request.work.attempt))

    # --- events from the intake (`kv_transfer.intake.IntakeEvents`) ----------------------------------------------

    def on_want_blocks(self, pull: Pull, num_blocks: int) -> None:
        """The offer of a request, or of a stage of a moving sequence, is open: it waits for room."""
        if self._arrivals.find(pull):
            self._arrivals.want_ahead(pull, num_blocks)
            return
        request = self._requests[pull.key.request]
        if request in self._arrivals:
            self._arrivals.want(request, num_blocks)
            return
        expected = -(-len(request.work.token_ids) // self._block_size)
        if num_blocks != expected:
            message = f"the source offers {num_blocks} blocks for a prompt of {expected}"
            self._intake.abandon(pull, Cause.TRANSFER, message)
            return
        self._scheduler.want(request, self._clock())
        self._reserve()

    def on_pulled(self, pull: Pull, block_ids: Sequence[int], first_tokens: Sequence[Tokens]) -> None:
        """The pulled blocks are valid: the request's choices begin."""
        if self._arrivals.find(pull):
            self._arrivals.pulled_ahead(pull, block_ids)
            return
        request = self._requests[pull.key.request]
        request.prompt_times = pull.prompt_times
        self._scheduler.settled(request, block_ids, first_tokens, self._clock())
        self._begun(request)

    def on_release(self, block_ids: Sequence[int]) -> None:
        """Release the blocks of an abandoned pull."""
        self._pool.release(block_ids)
        self._wake.set()
        self._reserve()

    def on_gave_up(self, pull: Pull, cause: Cause | None, message: str) -> None:
        """A pull has ended without valid blocks."""
        ahead_of = self._arrivals.find(pull)
        if ahead_of is not None:
            if not self._arrivals.gave_up_ahead(pull):
                self._fail(ahead_of, Cause.TRANSFER, f"reading ahead failed: {message}")
            return
        request = self._requests.get(pull.key.request)
        if request is not None and request.pull is pull:
            self._drop(request)
            if pull.ended_with:
                self._relay_end(request, pull.ended_with)
            elif cause is not None:
                self._refuse(request.gateway, request.key, cause, message)

    def _relay_end(self, request: DecodeRequest, first_tokens: Sequence[Tokens]) -> None:
        """Send the first tokens, with which the request ends. The source has sent them, but perhaps to an attempt that
        was over."""
        request_id, attempt = request.key
        if request.pull is not None and request.pull.prompt_times is not None:
            prompt = request.pull.prompt_times
            timings = Timings(request=request_id, attempt=attempt, choice=None, prompt=prompt, decode=None)
            self._server.send(request.gateway, timings)
        for tokens in first_tokens:
            self._server.send(request.gateway, replace(tokens, request=request_id, attempt=attempt))
        self._count("finished")
        self._server.send(request.gateway, Finished(request=request_id, attempt=attempt))

    # --- events from the lender (`kv_transfer.lender.LenderEvents`) ----------------------------------------------

    def find_prefix(self, block_hashes: Sequence[bytes]) -> Sequence[int]:
        """Cached blocks that another worker may read, each with a reference for the lender."""
        if self._draining:
            self._scheduler.name_running()
        return self._scheduler.lend([BlockHash(name) for name in block_hashes])

    def on_returned(self, block_ids: Sequence[int]) -> None:
        """Release blocks that were lent."""
        self.on_release(block_ids)

    def on_unpinned(self, key: RequestKey, block_ids: Sequence[int], *, settled: bool) -> None:
        """The lease of a cut sequence has ended: another worker continues it, or no worker does and the request
        fails."""
        request = self._departures.unpinned(key, block_ids, settled=settled)
        if request is not None and settled:
            self._finish_if_ended(request)
        elif request is not None:
            self._fail(request, Cause.LEASE_LOST, "a sequence was cut, and nobody has taken it over")
        self._wake.set()
        self._reserve()

    def on_dropped(self, key: RequestKey, cause: Cause, message: str) -> None:
        """The lease of a cut sequence has expired. `on_unpinned` follows and does the work."""

    # --- decisions -----------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        for reservation in self._scheduler.reserve(self._clock()):
            pull = reservation.request.pull
            assert pull is not None, reservation.request.work
            if reservation.request.work.moving:
                self._arrivals.begin(reservation)
            else:
                self._intake.reserve(pull, reservation.block_ids, reservation.num_held)
        if self._scheduler.has_work:
            self._wake.set()

    def _begun(self, request: DecodeRequest) -> None:
        """The request's choices have begun and have their first tokens."""
        for generation in request.generations:
            if generation.finish_reason is not None:
                self._send_tokens(generation)
            self._ask_mask(generation)
        self._wake.set()

    def _ask_mask(self, generation: Generation) -> None:
        """A sequence has got a token: compute the mask of the next one, if it has a grammar."""
        sequence = generation.sequence
        if sequence.sampling.grammar is None or generation.finish_reason is not None:
            return
        assert sequence.grammar_state is not None
        self._scheduler.mask_awaited(generation)
        told = partial(self._on_mask, generation)
        self._masks.ask(
            sequence.sampling.grammar, sequence.grammar_state, sequence.token_ids, sequence.prompt_len, told
        )

    def _on_mask(self, generation: Generation, gave_up: GaveUp | None) -> None:
        self._scheduler.mask_known(generation)
        if gave_up is not None and generation.stage is not Stage.ENDED:
            self._fail(generation.request, Cause.INVALID, gave_up.why)
        self._reserve()
        self._wake.set()

    def _decoded(self, step: Step, decoding: Decoding, chosen: Chosen) -> None:
        """Process the tokens of a step's decodes."""
        num_appended, others = decoding.append(chosen, self._report)
        self._generation_tokens += num_appended
        for index in others:
            generation = step.decodes[index]
            if self._scheduler.is_running(generation):
                self._advance(generation, chosen.outcome(index))
        if self._scheduler.trials:
            for generation in step.decodes:
                self._end_trial(generation.request)

    def _after_step(self, step: Step, outcomes: Sequence[tuple[Sampled, ...]], scores: Sequence[Scored] = ()) -> None:
        """Process the outcomes of a step's chunks. `scores` is empty if none of them asked for prompt log
        probabilities."""
        sampled = dict(zip(map(id, step.chunks), outcomes, strict=True))
        scored = dict(zip(map(id, step.chunks), scores, strict=False))
        for chunk in self._scheduler.chunks_done(step.chunks):
            num_tokens = chunk.end - chunk.start
            if chunk.prompt.generation is None:
                self._prompt_tokens += num_tokens
            else:
                self._recomputed_tokens += num_tokens
            told = id(chunk) not in scored or self._tell_prompt(chunk, scored[id(chunk)])
            if told and chunk.last:
                self._computed(chunk.prompt, sampled[id(chunk)])
        self._report.send_all(self._server.send)
        if step.chunks and not step.decodes:
            num_tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
            self._engine.costs.observe_prefill(num_tokens, self._engine.last_step_s)
        if not self._pool.num_in_flight:
            self._departures.cut()
        self._reserve()
        self._feed.publish()

    def _tell_prompt(self, chunk: Chunk[LocalPrompt], scored: Scored) -> bool:
        """Send the prompt's log probabilities, if the request asked for them. Returns whether the request goes on."""
        request = chunk.prompt.request
        try:
            for message in prompt_logprobs(request.work, chunk.start, scored):
                self._server.send(request.gateway, message)
                self._scored_tokens += len(message.scores)
        except InvalidLogitsError as error:
            self._fail(request, error.cause, str(error))
            return False
        return True

    def _computed(self, prompt: LocalPrompt, outcomes: Sequence[Sampled]) -> None:
        """Every token of a local prompt has its KV; `outcomes` has what was sampled after the last one."""
        request, generation = prompt.request, prompt.generation
        if generation is not None:
            if generation.stage is not Stage.RECOMPUTING:
                return  # the request has just failed by another choice
            self._scheduler.recomputed(generation, self._clock())
            self._advance(generation, outcomes[0])
            return
        try:
            tokens = first_tokens(request.work, outcomes, self._config.eos_token_ids, self._config.max_sequence_tokens)
        except InvalidLogitsError as error:
            self._fail(request, error.cause, str(error))
            return
        now = self._clock()
        request.prompt_times = prompt_times_of(request, now)
        self._scheduler.computed(request, tokens, now)
        for generation in request.generations:
            self._generation_tokens += 1
            self._send_tokens(generation)
            self._ask_mask(generation)
        self._finish_if_ended(request)

    def _advance(self, generation: Generation, outcome: Sampled) -> None:
        """Append the sampled token to a sequence whose tokens all have their KV."""
        if isinstance(outcome, InvalidLogitsError):
            self._fail(generation.request, outcome.cause, str(outcome))
            return
        sequence = generation.sequence
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
        generation.append(outcome.token_id, outcome.logprobs, reason)
        self._generation_tokens += 1
        self._send_tokens(generation)
        request = generation.request
        self._end_trial(request)
        if reason is not None:
            took_s = self._clock() - generation.began
            self._sequence_s += (took_s - self._sequence_s) * (_SEQUENCE_WEIGHT if self._sequence_s else 1.0)
            self._scheduler.remove(generation)
            self._finish_if_ended(request)
        if sequence.grammar_state is not None:
            self._ask_mask(generation)

    def _end_trial(self, request: DecodeRequest) -> None:
        """End the trial of a request that has shown, by enough tokens, that it does no harm."""
        trials = self._scheduler.trials
        if trials and request.key in trials and request.num_new >= TRIAL_TOKENS:
            trials.discard(request.key)

    def _send_tokens(self, generation: Generation) -> None:
        """Send the tokens that the gateway has not been sent: with the step's others if there is one, and nothing else
        to be told with it."""
        gateway, sequence = generation.request.gateway, generation.sequence
        if not generation.num_sent or generation.finish_reason is not None:
            generation.timings = timings_of(generation, self._clock())
            self._server.send(gateway, generation.timings)
            self._server.send(gateway, generation.tokens(generation.num_sent))
        elif sequence.sampling.logprobs is not None:
            self._server.send(gateway, generation.tokens(generation.num_sent))
        else:
            assert generation.num_sent == sequence.num_tokens - 1, sequence
            self._report.add(gateway, generation.handle, generation.num_sent, sequence.token_ids[-1])
        generation.num_sent = sequence.num_tokens

    def _finish_if_ended(self, request: DecodeRequest) -> None:
        if not request.finished:
            return
        self._drop(request)
        if all(generation.moved for generation in request.generations):
            self._count("moved")
            return
        self._finished[request.work.request] = request
        while len(self._finished) > MAX_UNACKNOWLEDGED:
            self._finished.popitem(last=False)
        self._count("finished")
        self._server.send(request.gateway, Finished(request=request.work.request, attempt=request.work.attempt))

    # --- the end of a request ------------------------------------------------------------------------------------

    def _fail(self, request: DecodeRequest, cause: Cause, message: str) -> None:
        self._forget(request, message)
        self._refuse(request.gateway, request.key, cause, message)

    def _refuse(self, gateway: Incarnation, key: RequestKey, cause: Cause, message: str) -> None:
        fields = about("failed", request=key.request, attempt=key.attempt, cause=cause, why=message)
        log.warning("request %s failed: %s: %s", key.request, cause, message, extra=fields)
        self._count(cause)
        self._server.send(
            gateway, Failed(request=key.request, attempt=key.attempt, cause=cause, message=message[:4096])
        )

    def _forget(self, request: DecodeRequest, why: str, *, wanted: bool = False) -> None:
        """Remove the request, whatever its state, without a message to the gateway. `wanted`: its client asked for its
        end."""
        self._finished.pop(request.work.request, None)
        if request.work.request in self._requests:
            self._drop(request, wanted=wanted)
            if request.pull is not None:
                self._intake.abandon(request.pull, None, why)
            self._reserve()

    def _drop(self, request: DecodeRequest, *, wanted: bool = False) -> None:
        """Remove the request from all tables. The intake releases the blocks of its pull, or keeps them in
        quarantine."""
        del self._requests[request.work.request]
        self._departures.forget(request)
        self._arrivals.forget(request)
        for state in (request.grammar_state, *(each.sequence.grammar_state for each in request.generations)):
            self._masks.forget(state)
        self._scheduler.forget(request, wanted=wanted)
        self._wake.set()

    def _find(self, request: RequestId) -> DecodeRequest | None:
        return self._requests.get(request) or self._finished.get(request)

    def _gateway_of(self, key: RequestKey) -> Incarnation | None:
        request = self._requests.get(key.request)
        return request.gateway if request is not None and request.key == key else None

    def _owned_by(self, gateway: Incarnation) -> list[DecodeRequest]:
        return [r for r in (*self._requests.values(), *self._finished.values()) if r.gateway == gateway]

    def _count(self, end: str) -> None:
        self._ended[end] = self._ended.get(end, 0) + 1

    # --- leaving -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new work. Gateways learn it by the next heartbeat, and let other workers pull the running
        sequences."""
        if not self._draining:
            log.info("draining: %d requests are open", len(self._requests))
        self._draining = True

    def resume(self) -> None:
        """Take work again."""
        self._draining = False

    def give_up(self, why: str) -> None:
        """The time for draining is over: fail the requests that are still here."""
        for request in list(self._requests.values()):
            self._fail(request, Cause.DRAINING, why)

    @property
    def phase(self) -> Phase:
        """Serving; while draining, DRAINING until nothing is held here any more, then DRAINED."""
        if not self._draining:
            return Phase.SERVING
        held = self._requests or self._finished or self._intake.num_pulls or self._intake.num_quarantined
        return Phase.DRAINING if held or self._lender.num_leases or self._lender.num_readers else Phase.DRAINED

    # --- what others see -----------------------------------------------------------------------------------------

    def welcome(self) -> Welcome:
        """This worker's message in a handshake."""
        return Welcome(
            role=Role.DECODE,
            fingerprint=self._engine.fingerprint,
            max_sequence_tokens=self._max_sequence_tokens,
            transport=self._settings.transport,
            transport_metadata=self._intake.transport_metadata,
            open_requests=(),
            phase=self.phase,
        )

    def heartbeat(self, number: int) -> Heartbeat:
        """The present load. `blocks_used` is the forecast of the most blocks in use."""
        return Heartbeat(
            number=number,
            steps=self._engine.num_steps,
            running=self._scheduler.num_running - self._scheduler.num_idle + self._scheduler.num_computing,
            waiting=sum(not request.generations for request in self._requests.values()),
            blocks_used=min(self._scheduler.num_expected, self._pool.num_blocks),
            blocks_total=self._pool.num_blocks,
            phase=self.phase,
            queued_tokens=by_tier((r.work.tier, self._scheduler.num_uncomputed_of(r)) for r in self._requests.values()),
            sequences=by_tier((r.work.tier, len(r.work.choices)) for r in self._requests.values()),
            places=self._scheduler.num_places,
            token_s=self._engine.costs.prefill_s_per_token,
            sequence_s=self._sequence_s,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._generation_tokens,
        )

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Whether the worker takes work, and counts of what it holds. At rest the counts are zero."""
        return not self._draining, {
            "role": Role.DECODE.value,
            "phase": self.phase.value,
            "safe_to_delete": self.phase is Phase.DRAINED,
            "transport": self._settings.transport,
            **self._intake.mover.bandwidths.state(),
            "blocks_used": self._pool.num_used,
            "blocks_limbo": self._pool.num_limbo,
            "blocks_quarantined": self._intake.num_quarantined,
            "blocks_total": self._pool.num_blocks,
            "blocks_cached": self._pool.num_cached,
            "host_blocks_used": self._scheduler.num_host_used,
            "waiting": self._scheduler.num_waiting,
            "pulling": self._scheduler.num_pulling,
            "computing": self._scheduler.num_computing,
            "running": self._scheduler.num_running,
            "preempted": self._scheduler.num_preempted,
            "reads": self._intake.num_reads,
            "leases": self._lender.num_leases,
            "readers": self._lender.num_readers,
            "parked": self._lender.num_parked,
            "requests": len(self._requests),
            "unacknowledged": len(self._finished),
        }

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics with their present values."""
        scheduler = self._scheduler
        used = self._pool.num_used / self._pool.num_blocks
        traffic = self._server.traffic
        name = self._settings.model
        model = {"model_name": name}
        yield gauge("vllm:num_requests_running", "Sequences in the batch.", scheduler.num_running, model)
        yield gauge("vllm:num_requests_waiting", "Requests waiting for room.", scheduler.num_waiting, model)
        yield gauge("vllm:num_requests_swapped", "Preempted sequences.", scheduler.num_preempted, model)
        yield gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache.", used, model)
        sizes = {"block_size": str(self._block_size), "num_gpu_blocks": str(self._pool.num_blocks)}
        yield gauge("vllm:cache_config_info", "How large the KV cache is.", 1, model | sizes)
        preempted = {"swap": scheduler.num_swapped, "recompute": scheduler.num_recomputed}
        yield counter("vllm:num_preemptions", "Preemptions.", {name: sum(preempted.values())}, "model_name")
        yield counter("baton_preemptions", "Preemptions by kind.", preempted, "kind")
        revoked = scheduler.num_revoked
        yield counter("baton_reservations_revoked", "Reservations taken back before their first read.", revoked)
        queried, hit = {name: scheduler.num_prefix_queried}, {name: scheduler.num_prefix_hit}
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", queried, "model_name")
        yield counter("vllm:prefix_cache_hits", "Prompt tokens that were cached.", hit, "model_name")
        yield gauge("baton_blocks_cached", "Blocks known by name.", self._pool.num_cached)
        yield counter("baton_blocks_evicted", "Cached blocks that were given away.", self._pool.num_evicted)
        yield counter("baton_tokens_generated", "Tokens generated here.", self._generation_tokens)
        yield from self._step_tokens.collect()
        yield counter("baton_prompt_tokens_computed", "Prompt tokens computed here.", self._prompt_tokens)
        scored = self._scored_tokens
        yield counter("baton_prompt_tokens_scored", "Prompt tokens whose log probabilities were told.", scored)
        yield counter("baton_tokens_recomputed", "Tokens computed again after a preemption.", self._recomputed_tokens)
        sequences = sum(len(request.work.choices) for request in self._requests.values())
        load = sequences / scheduler.num_places
        yield gauge("baton_decode_load", "Sequences here, those that wait included, by how many fit.", load)
        yield gauge("baton_blocks_expected", "Most blocks in use from now on, as forecast.", scheduler.num_expected)
        yield counter("baton_block_steps", "Blocks in use, summed over the engine's steps.", self._block_steps)
        yield gauge("baton_host_blocks_used", "Blocks of host memory in use.", scheduler.num_host_used)
        yield from self._intake.metrics()
        yield from self._lender.metrics()
        masks = self._masks
        yield counter("baton_grammar_masks", "Masks made for texts that follow a grammar.", masks.num_made)
        yield counter("baton_grammar_masks_late", "Masks that a step has waited for in vain.", masks.num_late)
        yield counter("baton_grammars_given_up", "Texts that could not go on, by bound.", masks.given_up, "bound")
        yield counter("baton_sequences_moved", "Sequences that went on elsewhere.", self._departures.num_moved)
        tail = self._arrivals.num_tail_blocks
        yield counter("baton_move_tail_blocks", "Blocks read while sequences stood still to come here.", tail)
        yield counter("baton_requests_ended", "Requests by how they ended here.", self._ended, "end")
        yield counter("baton_engine_steps", "Engine steps.", self._engine.num_steps)
        yield counter("baton_engine_busy_seconds", "Time in engine steps.", self._engine.busy_s)
        yield counter("baton_steps_ahead", "Steps planned while another one ran.", self._steps_ahead)
        yield counter("baton_frames_refused", "Control frames refused.", traffic.frames_refused)
        yield counter("baton_sessions_lost", "Clients lost.", traffic.sessions_lost)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self._pool.check_invariants()
        self._scheduler.check_invariants()
        self._intake.check_invariants()
        self._lender.check_invariants()


def _fits(tokens: Sequence[Tokens], work: Decode) -> bool:
    """Whether `tokens` has one token for each choice of `work`, at the right position."""
    return tuple(first.choice for first in tokens) == work.choices and all(
        (first.position, len(first.token_ids)) == (len(work.token_ids), 1)
        and (first.logprobs is None) == (work.sampling.logprobs is None)
        for first in tokens
    )
