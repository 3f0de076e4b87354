"""The prefill worker: turns events from gateways, decode workers and the engine into decisions and messages.

Life cycle of a request in the prefill worker:

    1. Prefill arrives from a gateway. The request waits for blocks.
    2. The request is admitted: it gets blocks for the whole prompt, the leading of which may be cached here. If another
       worker holds more of the prompt, and a pull is cheaper than computing, that part is pulled first
       (`prefix_pulls`).
    3. The blocks are pinned by a lease that is offered to the sink. Attach may come before or after this.
    4. Each step computes a chunk. Blocks that are full after a step are announced (BlocksReady), and the sink reads
       them meanwhile. If a request asks for its prompt's log probabilities, those of each step go to the gateway
       (PromptLogprobs).
    5. The last chunk samples the first token of each choice. The tokens go to the gateway (Tokens), and with the last
       blocks to the sink (PrefillDone).
    6. The sink settles. The lease ends; the blocks are free and stay cached. Any other end (abort, failure, expiry)
       withdraws the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client.metrics_core import Metric

from common.contract.block_hashes import BlockHash
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    Abort,
    Attach,
    AttachPrefix,
    Cancelled,
    Detach,
    Drain,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Phase,
    Prefill,
    Resume,
    Role,
    Settle,
    Timings,
    Tokens,
    Welcome,
)
from common.contract.tiers import by_tier
from common.engine.batch import InvalidLogitsError, Sampled, Scored
from common.engine.block_pool import BlockPool
from common.engine.cache_feed import CacheFeed
from common.engine.chunked_prefill import Chunk
from common.engine.engine import Engine, Started
from common.engine.grammar import GaveUp, GrammarState
from common.engine.masks import Masks
from common.engine.prompt import first_tokens, prompt_logprobs, prompt_slice
from common.engine.trials import NOTICE_S, TrialFeed
from common.runtime.channel import ControlServer
from common.runtime.clock import Clock
from common.runtime.config import PrefillSettings
from common.runtime.counting import step_tokens
from common.runtime.fence import AttemptFence
from common.runtime.logs import about
from common.runtime.probes import counter, gauge
from kv_transfer.intake import Intake
from kv_transfer.lender import Lender
from kv_transfer.regions import Region
from kv_transfer.sink import Pull
from kv_transfer.transport import Transport
from prefill_worker.prefix_pulls import PrefixPulls
from prefill_worker.scheduler import PrefillRequest, PrefillScheduler

log = logging.getLogger(__name__)

_RECLAIM_AGE_S = 1.0
"""Age in seconds from which an offer without a sink may be dropped when a waiting prompt needs its blocks."""
_QUARANTINE_LOOK_S = 0.25
"""Seconds between two checks of blocks in quarantine, while there are any."""


@dataclass(frozen=True, slots=True)
class _Owner:
    gateway: Incarnation
    attempt: int


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was handed to the engine."""

    number: int
    """The block pool's number of the step."""
    chunks: list[Chunk[PrefillRequest]]
    submitted: asyncio.Future[Started]
    """The engine's future of the step."""
    checksums: asyncio.Future[list[tuple[int, ...]]] | None


class PrefillWorker:
    """Connects scheduler, lender, intake and engine with the network. Runs on the event loop's thread."""

    def __init__(
        self,
        settings: PrefillSettings,
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
        self._region = region
        self._clock = clock
        layout = engine.runner.layout
        self._block_size = layout.block_size
        self._pool = BlockPool(engine.runner.cache.num_blocks, prefix_cache=settings.prefix_cache)
        self._scheduler = PrefillScheduler(
            self._pool,
            block_size=self._block_size,
            chunk_size=settings.chunk_size,
            token_budget=settings.token_budget,
            max_waiting=settings.max_waiting,
            ageing_s=settings.ageing_s,
            ttft_target_s=settings.ttft_target_s,
            seconds_per_token=engine.costs.prefill_s_per_token,
        )
        self._intake = Intake(
            settings, me, Role.PREFILL, engine.fingerprint, region, make_transport, events=self, clock=clock
        )
        self._lender = Lender(
            events=self,
            send=server.send,
            set_serving=self._intake.mover.set_serving,
            clock=clock,
            unattached_ttl_s=settings.unattached_ttl_s,
            checksum=region.crc32 if settings.checksums else None,
        )
        self._prefix_pulls = PrefixPulls(
            me,
            self._block_size,
            layout.block_bytes,
            engine.costs,
            settings.pull_prefixes,
            settings.pull_patience_s,
        )
        self._feed = CacheFeed(self._pool, server.send)
        self._trial_feed = TrialFeed(self._scheduler.trials, self._gateway_of, server.send)
        self._masks = Masks(engine.runner.grammars)
        self._without_mask: dict[RequestId, PrefillRequest] = {}
        """Requests whose grammar's first mask is being computed. They wait for blocks once it is known."""
        self._draining = False
        self._fence = AttemptFence(clock)
        self._owners: dict[RequestId, _Owner] = {}
        """The gateway and attempt of each request that is queued, computed or under a lease."""
        self._wake = asyncio.Event()
        self._deadlines_changed = asyncio.Event()
        self._ended: dict[str, int] = {}
        self._prompt_tokens = 0
        self._step_tokens = step_tokens(settings.model)
        self._scored_tokens = 0
        self._runs_ahead = settings.runs_ahead(engine.runner.cache.device.type)
        self._steps_ahead = 0
        """Number of steps that were planned while another one ran."""

    # --- the loops -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the transport. Raises `TransferError` if it cannot work on this machine."""
        await self._intake.start()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._step_loop())
                tasks.create_task(self._deadline_loop())
                tasks.create_task(self._intake.run())
        finally:
            await self._intake.close()
            self._engine.close()

    async def _step_loop(self) -> None:
        before: _InFlight | None = None
        while True:
            self._admit()
            chunks = self._scheduler.schedule(self._clock())
            if not chunks:
                if before is None:
                    self._wake.clear()
                    self._trial_feed.publish()
                    await self._wake.wait()
                else:
                    await self._end_step(before)
                    before = None
                continue
            number = self._pool.step_started()
            slices = [
                prompt_slice(c.prompt.work, c.start, c.end, c.prompt.block_table, c.prompt.allowed) for c in chunks
            ]
            await self._tell_whose_turn_it_is()
            self._steps_ahead += before is not None
            step = _InFlight(number, chunks, self._engine.submit(slices), self._checksums(chunks))
            if before is not None:
                await self._end_step(before)
            before = step
            if not self._runs_ahead or self._scheduler.trials:  # suspects share no step with others
                await self._end_step(before)
                before = None

    async def _end_step(self, step: _InFlight) -> None:
        """Wait for a step's outcomes and process them."""
        outcomes = await self._engine.outcomes(step.submitted)
        checksums = [()] * len(step.chunks) if step.checksums is None else await step.checksums
        self._pool.step_finished(step.number)
        self._step_tokens.observe(sum(chunk.end - chunk.start for chunk in step.chunks))
        self._after_step(step.chunks, outcomes, checksums, self._engine.scores(step.submitted))

    async def _tell_whose_turn_it_is(self) -> None:
        """Tell gateways which suspects compute in the next step, and give the message time to leave: the step may crash
        this worker."""
        if self._trial_feed.publish():
            await asyncio.sleep(NOTICE_S)

    async def _deadline_loop(self) -> None:
        while True:
            self._expire()
            self._deadlines_changed.clear()
            next_event = min(
                self._lender.next_expiry(),
                self._scheduler.next_deadline(),
                self._prefix_pulls.next_expiry(),
                min((request.deadline for request in self._without_mask.values()), default=math.inf),
            )
            wait_s = next_event - self._clock()
            if self._scheduler.num_waiting:  # an offer may have become old enough to be reclaimed
                wait_s = min(wait_s, _RECLAIM_AGE_S)
                self._wake.set()
            if self._intake.num_quarantined or self._intake.num_reads:
                wait_s = min(wait_s, _QUARANTINE_LOOK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_s == math.inf else max(wait_s, 0.01)):
                    await self._deadlines_changed.wait()

    # --- events from clients -------------------------------------------------------------------------------------

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """Handle a message from a gateway, or from a worker that pulls from this one."""
        match message:
            case Prefill():
                self._on_prefill(peer, message)
            case Abort():
                self._on_abort(peer, message)
            case Attach() | AttachPrefix() | Settle() | Detach():
                self._lender.on_message(peer, message)
            case Drain():
                self.drain()
            case Resume():
                self.resume()
            case _:
                log.warning("%s is not for a prefill worker; ignored", type(message).__name__)
        self._deadlines_changed.set()

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session opens or reopens: end the requests that the client does not list. Returns those that go on."""
        listed = set(hello.open_requests)
        for key in self._owned_by(peer):
            if key not in listed:
                self._end(key.request, Cause.CANCELLED, "unknown to its gateway")
        self._lender.on_hello(peer, listed)
        return tuple(self._owned_by(peer))

    def on_open(self, peer: Incarnation, role: Role) -> None:
        """Start to tell a gateway which blocks the prefix cache holds and which requests are on trial."""
        if role is Role.GATEWAY:
            self._feed.begin(peer)
            self._trial_feed.begin(peer)

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A peer is lost: a gateway's requests end; a sink's leases wait for another sink."""
        for key in self._owned_by(peer):
            self._end(key.request, Cause.WORKER_LOST, "the prefill worker lost its gateway")
        self._lender.on_peer_lost(peer)
        self._feed.end(peer)
        self._trial_feed.end(peer)

    def _on_prefill(self, gateway: Incarnation, work: Prefill) -> None:
        if not self._fence.admits(work.key):
            return
        if work.request in self._owners:
            self._end(work.request, Cause.SUPERSEDED, "a newer attempt arrived")
        now = self._clock()
        request = PrefillRequest(work, gateway, now, now + work.budget_s)
        needed = self._scheduler.blocks_for(request)
        objection = self._engine.runner.objection(work.token_ids, work.sampling)
        if objection is not None:
            self._refuse(gateway, work.key, Cause.INVALID, objection)
        elif needed > self._pool.num_blocks:
            message = f"the prompt needs {needed} KV blocks, this worker has {self._pool.num_blocks}"
            self._refuse(gateway, work.key, Cause.TOO_LARGE, message)
        elif self._draining:
            self._refuse(gateway, work.key, Cause.DRAINING, "this prefill worker takes no new work")
        elif self._scheduler.full(len(self._without_mask)) and not work.admitted:
            self._refuse(gateway, work.key, Cause.CAPACITY, f"{self._scheduler.num_waiting} requests waiting already")
        else:
            self._owners[work.request] = _Owner(gateway, work.attempt)
            self._lender.expect(work.key, request.deadline)
            if work.sampling.grammar is None:
                self._scheduler.add(request)
                self._wake.set()
            else:
                self._without_mask[work.request] = request
                state = request.grammar_state = GrammarState()
                told = partial(self._on_mask, request)
                self._masks.ask(work.sampling.grammar, state, work.token_ids, work.prompt_len, told)

    def _on_mask(self, request: PrefillRequest, gave_up: GaveUp | None) -> None:
        """The mask of a request's first tokens is known, or its grammar gave up: the request waits for blocks, or
        fails."""
        del self._without_mask[request.key.request]
        if gave_up is not None:
            self._fail(request.key, Cause.INVALID, gave_up.why)
            return
        self._scheduler.add(request)
        self._deadlines_changed.set()
        self._wake.set()

    def _on_abort(self, gateway: Incarnation, message: Abort) -> None:
        owner = self._owners.get(message.request)
        if owner is not None and owner.gateway == gateway and owner.attempt <= message.attempt:
            self._end(message.request, Cause.CANCELLED, "aborted")
            self._count(Cause.CANCELLED)
            self._server.send(gateway, Cancelled(request=message.request, attempt=message.attempt))

    # --- events from the intake: prefixes that are pulled (`kv_transfer.intake.IntakeEvents`) ---------------------

    def on_want_blocks(self, pull: Pull, num_blocks: int) -> None:
        """Another worker offers the beginning of a prompt: read it into the blocks in which it would have been
        computed."""
        prefix = self._prefix_pulls.find(pull)
        num_held = prefix.request.num_computed // self._block_size
        if num_blocks <= num_held:
            self._intake.abandon(pull, Cause.LEASE_LOST, "the other worker holds no more than this one")
            return
        prefix.num_blocks = num_blocks
        blocks = prefix.request.block_table[:num_blocks]
        self._pool.share(blocks)
        self._intake.reserve(pull, blocks, num_held)

    def on_pulled(self, pull: Pull, block_ids: Sequence[int], first_tokens: Sequence[Tokens]) -> None:
        """The beginning of a prompt was pulled and is valid: compute the rest."""
        prefix = self._prefix_pulls.pulled(pull, self._clock())
        self._scheduler.resume(prefix.request, len(block_ids) * self._block_size)
        self._pool.release(block_ids)
        self._offer(prefix.request)

    def on_release(self, block_ids: Sequence[int]) -> None:
        """Release the blocks of an abandoned pull."""
        self._pool.release(block_ids)
        self._wake.set()

    def on_gave_up(self, pull: Pull, cause: Cause | None, message: str) -> None:
        """A prefix could not be pulled: compute it. If a read may still write to its blocks, the prompt waits for
        others."""
        request = self._prefix_pulls.gave_up(pull, self._clock()).request
        if self._scheduler.get(request.key.request) is not request:
            return
        log.info("request %s computes its prefix: %s", request.key.request, message)
        if pull.quarantined:
            self._scheduler.requeue(request)
            self._wake.set()
        else:
            self._scheduler.resume(request, request.num_computed)
            self._offer(request)

    # --- events from the lender (`kv_transfer.lender.LenderEvents`) ----------------------------------------------

    def find_prefix(self, block_hashes: Sequence[bytes]) -> Sequence[int]:
        """Cached blocks that another worker may read, each with a reference for the lender. Admitted prompts already
        hold every block that they need, so this takes none from them."""
        blocks = self._pool.match(BlockHash(name) for name in block_hashes)
        self._pool.share(blocks)
        return blocks

    def on_returned(self, block_ids: Sequence[int]) -> None:
        """Release blocks that were lent."""
        self.on_release(block_ids)

    def on_unpinned(self, key: RequestKey, block_ids: Sequence[int], *, settled: bool) -> None:
        """A request's lease has ended, so the request has ended, too."""
        self._pool.release(block_ids)
        self._scheduler.unpinned(key)
        self._owners.pop(key.request, None)
        self._wake.set()
        self._deadlines_changed.set()

    def on_dropped(self, key: RequestKey, cause: Cause, message: str) -> None:
        """The lender gave a request up: tell its gateway."""
        self._fail(key, cause, message)

    # --- decisions -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        now = self._clock()
        missing = self._scheduler.blocks_missing(now)
        if missing:
            self._lender.reclaim(missing, now - _RECLAIM_AGE_S)
        self._scheduler.seconds_per_token = self._engine.costs.prefill_s_per_token
        for request in self._scheduler.admit(now):
            prefix = self._prefix_pulls.consider(request, now)
            if prefix is None:
                self._offer(request)
            else:
                self._scheduler.hold(request)
                self._intake.begin(prefix.pull)
                self._deadlines_changed.set()

    def _offer(self, request: PrefillRequest) -> None:
        """Open the request's lease, and announce the blocks that are complete already."""
        self._pool.share(request.block_table)
        self._lender.open(request.key, request.block_table, request.deadline)
        num_ready = request.num_computed // self._block_size
        if num_ready:
            blocks = request.block_table[:num_ready]
            self._lender.blocks_ready(
                request.key.request, num_ready, self._region.crc32(blocks) if self._settings.checksums else ()
            )
        self._wake.set()

    def _checksums(self, chunks: Sequence[Chunk[PrefillRequest]]) -> asyncio.Future[list[tuple[int, ...]]] | None:
        """Checksums of the blocks that each chunk of the step just submitted completes, computed before another step
        begins. None if the deployment does not use checksums."""
        if not self._settings.checksums:
            return None
        completed = [
            tuple(chunk.prompt.block_table[chunk.start // self._block_size : self._num_ready(chunk)])
            for chunk in chunks
        ]
        return self._engine.call(lambda: [self._region.crc32(blocks) for blocks in completed])

    def _num_ready(self, chunk: Chunk[PrefillRequest]) -> int:
        """Number of the prompt's blocks that no longer change after `chunk`. The last, partly filled block counts after
        the last chunk only."""
        return self._scheduler.blocks_for(chunk.prompt) if chunk.last else chunk.end // self._block_size

    def _after_step(
        self,
        chunks: Sequence[Chunk[PrefillRequest]],
        outcomes: Sequence[tuple[Sampled, ...]],
        checksums: Sequence[tuple[int, ...]],
        scores: Sequence[Scored],
    ) -> None:
        self._engine.costs.observe_prefill(sum(c.end - c.start for c in chunks), self._engine.last_step_s)
        live = {id(chunk) for chunk in self._scheduler.step_done(chunks)}
        for chunk, sampled, sums, scored in zip(chunks, outcomes, checksums, scores, strict=True):
            if id(chunk) not in live:
                continue
            self._prompt_tokens += chunk.end - chunk.start
            self._lender.blocks_ready(chunk.prompt.key.request, self._num_ready(chunk), sums)
            try:
                for message in prompt_logprobs(chunk.prompt.work, chunk.start, scored):
                    self._server.send(chunk.prompt.gateway, message)
                    self._scored_tokens += len(message.scores)
                if chunk.last:
                    self._finish(chunk.prompt, sampled)
            except InvalidLogitsError as error:
                self._fail(chunk.prompt.key, error.cause, str(error))
        self._feed.publish()

    def _finish(self, request: PrefillRequest, sampled: Sequence[Sampled]) -> None:
        """Send a prompt's first tokens, to its gateway and with the lease to the sink. Raises `InvalidLogitsError`."""
        config = self._engine.runner.config
        tokens = first_tokens(request.work, sampled, config.eos_token_ids, config.max_sequence_tokens)
        request_id, attempt = request.key
        times = request.times(self._clock())
        self._lender.complete(request_id, tokens, times)
        self._server.send(
            request.gateway, Timings(request=request_id, attempt=attempt, choice=None, prompt=times, decode=None)
        )
        for message in tokens:
            self._server.send(request.gateway, message)
        self._deadlines_changed.set()  # a complete offer expires if no sink attaches
        self._count("finished")
        if all(message.finish_reason is not None for message in tokens):
            self._server.send(request.gateway, Finished(request=request_id, attempt=attempt))

    def _expire(self) -> None:
        now = self._clock()
        self._lender.expire(now)
        self._intake.tick(now)
        for prefix in self._prefix_pulls.overdue(now):
            self._intake.abandon(prefix.pull, Cause.DEADLINE, "pulling the prefix took too long")
        overdue = [request for request in self._without_mask.values() if request.deadline <= now]
        for request in (*overdue, *self._scheduler.expired(now)):
            state = "computing the prompt" if request.block_table else "waiting for the prefill worker"
            self._fail(request.key, Cause.DEADLINE, f"the request's time ran out while {state}")

    # --- the end of a request ------------------------------------------------------------------------------------

    def _fail(self, key: RequestKey, cause: Cause, message: str) -> None:
        owner = self._owners.get(key.request)
        self._end(key.request, cause, message)
        if owner is not None:
            self._refuse(owner.gateway, key, cause, message)

    def _refuse(self, gateway: Incarnation, key: RequestKey, cause: Cause, message: str) -> None:
        fields = about("failed", request=key.request, attempt=key.attempt, cause=cause, why=message)
        log.warning("request %s failed: %s: %s", key.request, cause, message, extra=fields)
        self._count(cause)
        self._server.send(gateway, Failed(request=key.request, attempt=key.attempt, cause=cause, message=message))

    def _end(self, request: RequestId, cause: Cause, message: str) -> None:
        """Release whatever the request holds here: its place in the queue, its blocks, its pull, its lease."""
        self._owners.pop(request, None)
        without_mask = self._without_mask.pop(request, None)
        if without_mask is not None:
            self._masks.forget(without_mask.grammar_state)
        scheduled = self._scheduler.get(request)
        if scheduled is not None:
            prefix = self._prefix_pulls.of(scheduled)
            self._scheduler.remove(scheduled)
            if prefix is not None:
                self._intake.abandon(prefix.pull, None, message)
        self._lender.withdraw(request, cause, message)
        self._wake.set()

    def _gateway_of(self, key: RequestKey) -> Incarnation | None:
        owner = self._owners.get(key.request)
        return owner.gateway if owner is not None and owner.attempt == key.attempt else None

    def _owned_by(self, gateway: Incarnation) -> list[RequestKey]:
        return [RequestKey(r, o.attempt) for r, o in self._owners.items() if o.gateway == gateway]

    def _count(self, end: str) -> None:
        self._ended[end] = self._ended.get(end, 0) + 1

    # --- leaving -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new work. Requests that have not begun go back to their gateways; the others are computed and handed
        over."""
        if self._draining:
            return
        log.info("draining: %d requests are open", len(self._owners))
        self._draining = True
        for request in (*self._without_mask.values(), *self._scheduler.requests()):
            if not request.block_table:
                self._fail(request.key, Cause.DRAINING, "this prefill worker is leaving")

    def resume(self) -> None:
        """Take work again."""
        self._draining = False

    def give_up(self, why: str) -> None:
        """The time for draining is over: fail the requests that are still here."""
        for request, owner in list(self._owners.items()):
            self._fail(RequestKey(request, owner.attempt), Cause.DRAINING, why)

    @property
    def phase(self) -> Phase:
        """Serving; while draining, DRAINING until nothing is held here any more, then DRAINED."""
        if not self._draining:
            return Phase.SERVING
        held = self._owners or self._intake.num_pulls or self._intake.num_quarantined
        return Phase.DRAINING if held or self._lender.num_leases or self._lender.num_readers else Phase.DRAINED

    # --- what others see -----------------------------------------------------------------------------------------

    def welcome(self) -> Welcome:
        """This worker's message in a handshake."""
        config = self._engine.runner.config
        return Welcome(
            role=Role.PREFILL,
            fingerprint=self._engine.fingerprint,
            max_sequence_tokens=min(config.max_sequence_tokens, self._pool.num_blocks * self._block_size),
            transport=self._settings.transport,
            transport_metadata=self._intake.transport_metadata,
            open_requests=(),
            phase=self.phase,
        )

    def heartbeat(self, number: int) -> Heartbeat:
        """The present load."""
        return Heartbeat(
            number=number,
            steps=self._engine.num_steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting + self._scheduler.num_on_hold + len(self._without_mask),
            blocks_used=self._pool.num_used,
            blocks_total=self._pool.num_blocks,
            phase=self.phase,
            queued_tokens=by_tier((r.tier, r.num_uncomputed) for r in self._scheduler.requests()),
            token_s=self._engine.costs.prefill_s_per_token,
            pulled_token_s=self._prefix_pulls.token_s,
            prompt_tokens=self._prompt_tokens,
        )

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Whether the worker takes work, and counts of what it holds. At rest the counts are zero."""
        return not self._draining, {
            "role": Role.PREFILL.value,
            "phase": self.phase.value,
            "safe_to_delete": self.phase is Phase.DRAINED,
            "transport": self._settings.transport,
            **self._intake.mover.bandwidths.state(),
            "blocks_used": self._pool.num_used,
            "blocks_limbo": self._pool.num_limbo,
            "blocks_total": self._pool.num_blocks,
            "waiting": self._scheduler.num_waiting,
            "on_hold": self._scheduler.num_on_hold,
            "running": self._scheduler.num_running,
            "blocks_quarantined": self._intake.num_quarantined,
            "blocks_cached": self._pool.num_cached,
            "pulling": self._intake.num_pulls,
            "reads": self._intake.num_reads,
            "leases": self._lender.num_leases,
            "parked": self._lender.num_parked,
            "readers": self._lender.num_readers,
            "requests": len(self._owners),
        }

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics with their present values."""
        traffic = self._server.traffic
        model = {"model_name": self._settings.model}
        used = self._pool.num_used / self._pool.num_blocks
        yield gauge("vllm:num_requests_running", "Prompts being computed.", self._scheduler.num_running, model)
        waiting = self._scheduler.num_waiting + self._scheduler.num_on_hold
        text = "Prompts waiting for blocks, or for what another worker holds of them."
        yield gauge("vllm:num_requests_waiting", text, waiting, model)
        yield gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache.", used, model)
        sizes = {"block_size": str(self._block_size), "num_gpu_blocks": str(self._pool.num_blocks)}
        yield gauge("vllm:cache_config_info", "How large the KV cache is.", 1, model | sizes)
        yield from self._step_tokens.collect()
        yield counter("baton_prompt_tokens_computed", "Prompt tokens computed here.", self._prompt_tokens)
        scored = self._scored_tokens
        yield counter("baton_prompt_tokens_scored", "Prompt tokens whose log probabilities were told.", scored)
        queued = self._scheduler.num_uncomputed
        yield gauge("baton_prefill_queued_tokens", "Prompt tokens still to compute.", queued)
        queued_s = queued * self._engine.costs.prefill_s_per_token
        yield gauge("baton_prefill_queued_seconds", "What computing them is expected to take.", queued_s)
        yield from self._lender.metrics()
        masks = self._masks
        yield counter("baton_grammar_masks", "Masks made for texts that follow a grammar.", masks.num_made)
        yield counter("baton_grammar_masks_late", "Masks that a step has waited for in vain.", masks.num_late)
        yield counter("baton_grammars_given_up", "Texts that could not go on, by bound.", masks.given_up, "bound")
        yield from self._intake.metrics()
        name = self._settings.model
        queried, hit = {name: self._scheduler.num_prefix_queried}, {name: self._scheduler.num_prefix_hit}
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", queried, "model_name")
        yield counter("vllm:prefix_cache_hits", "Prompt tokens that were cached.", hit, "model_name")
        yield gauge("baton_blocks_cached", "Blocks known by name.", self._pool.num_cached)
        yield counter("baton_blocks_evicted", "Cached blocks that were given away.", self._pool.num_evicted)
        yield counter("baton_prefix_pulls", "Prefixes pulled from others, by end.", self._prefix_pulls.ended, "end")
        pulled = self._prefix_pulls.num_tokens_pulled
        yield counter("baton_prefix_tokens_pulled", "Prompt tokens pulled instead of computed.", pulled)
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
