"""The prefill worker: events from gateways, decode workers and the engine, turned into decisions and messages.

Life cycle of a request in the prefill worker:

    1. Prefill arrives from a gateway and waits for blocks.
    2. It is admitted: blocks for the whole prompt, pinned by a lease that is offered to the sink (Attach may come
       before or after).
    3. Each step computes a chunk; blocks that are full afterwards are announced (BlocksReady) and read meanwhile.
    4. The last chunk samples the first token of each choice: to the gateway (Tokens), and to the sink with the last
       blocks (PrefillDone).
    5. The sink settles; the lease ends, and the blocks are free. Any other end (abort, failure, expiry) withdraws it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from common.contract.errors import Cause, TransferError
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    Abort,
    Attach,
    Cancelled,
    Detach,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Prefill,
    Role,
    Settle,
    Tokens,
    Welcome,
)
from common.engine.batch import InvalidLogitsError, Sample, Sampled, SampledToken, Slice
from common.engine.block_pool import BlockPool
from common.engine.engine import Engine
from common.engine.sequence import finish_reason
from common.runtime.channel import ControlServer
from common.runtime.clock import Clock
from common.runtime.config import PrefillSettings
from common.runtime.fence import AttemptFence
from common.runtime.probes import counter, gauge
from kv_transfer.mover import Mover
from kv_transfer.regions import Region
from kv_transfer.source import Action, Dropped, LeaseTable, Send, Unpin
from kv_transfer.transport import ReadId, Transport
from prefill_worker.scheduler import Chunk, PrefillRequest, PrefillScheduler

log = logging.getLogger(__name__)

_RECLAIM_AGE_S = 1.0
"""An offer that no sink has attached to for this long may be dropped when a waiting prompt needs its blocks."""


@dataclass(frozen=True, slots=True)
class _Owner:
    gateway: Incarnation
    attempt: int


class PrefillWorker:
    """The shell around scheduler, leases, engine and transport. Runs on the event loop's thread."""

    def __init__(
        self,
        settings: PrefillSettings,
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
        self._mover = Mover(region, make_transport, _reads_nothing, self._on_mover_died)
        self._transport_metadata = b""
        self._serving = False
        self._clock = clock
        self._block_size = engine.runner.layout.block_size
        self._pool = BlockPool(engine.runner.cache.num_blocks)
        self._scheduler = PrefillScheduler(
            self._pool,
            block_size=self._block_size,
            chunk_size=settings.chunk_size,
            token_budget=settings.token_budget,
            max_waiting=settings.max_waiting,
        )
        self._leases = LeaseTable(unattached_ttl_s=settings.unattached_ttl_s, checksums=settings.checksums)
        self._fence = AttemptFence()
        self._owners: dict[RequestId, _Owner] = {}
        """Who asked for each request that is queued, computed or under a lease."""
        self._wake = asyncio.Event()
        self._deadlines_changed = asyncio.Event()
        self._ended: dict[str, int] = {}
        self._prompt_tokens = 0

    # --- the loops -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the transport. Raises `TransferError` when it cannot work here."""
        self._transport_metadata = await self._mover.start()
        self._mover_died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._step_loop())
                tasks.create_task(self._deadline_loop())
                tasks.create_task(self._watch_mover())
        finally:
            await self._mover.close()
            self._engine.close()

    async def _watch_mover(self) -> None:
        await self._mover_died

    def _on_mover_died(self, error: Exception) -> None:
        if not self._mover_died.done():
            self._mover_died.set_exception(error)

    async def _step_loop(self) -> None:
        while True:
            self._admit()
            chunks = self._scheduler.schedule()
            if not chunks:
                self._wake.clear()
                await self._wake.wait()
                continue
            step = self._pool.step_started()
            slices = [self._slice(chunk) for chunk in chunks]
            tables = [tuple(chunk.request.block_table) for chunk in chunks]
            outcomes = await self._engine.step(slices)
            checksums = await self._checksums(chunks, tables)
            self._pool.step_finished(step)
            self._after_step(chunks, outcomes, checksums)

    async def _deadline_loop(self) -> None:
        while True:
            self._expire()
            self._deadlines_changed.clear()
            requests = (request.deadline for request in self._scheduler.requests())
            wait_s = min(self._leases.next_expiry(), min(requests, default=math.inf)) - self._clock()
            if self._scheduler.num_waiting:  # an offer may have become old enough to be reclaimed
                wait_s = min(wait_s, _RECLAIM_AGE_S)
                self._wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._deadlines_changed.wait(), None if wait_s == math.inf else max(wait_s, 0.01)
                )

    # --- events from clients -------------------------------------------------------------------------------------

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """A message from a gateway or a decode worker."""
        match message:
            case Prefill():
                self._on_prefill(peer, message)
            case Abort():
                self._on_abort(peer, message)
            case Attach():
                self._do(self._leases.attach(message, peer, self._clock()))
            case Settle():
                self._do(self._leases.settle(message, peer))
            case Detach():
                self._do(self._leases.detach(message, peer, self._clock()))
            case _:
                log.warning("%s is not for a prefill worker; ignored", type(message).__name__)
        self._serve_readers()
        self._deadlines_changed.set()

    def _serve_readers(self) -> None:
        """Give the transport progress while somebody may be reading."""
        serving = self._leases.num_readers > 0
        if serving != self._serving:
            self._serving = serving
            self._mover.set_serving(serving)

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session (re)opens: what the client does not list is given up."""
        listed = set(hello.open_requests)
        for key in self._owned_by(peer):
            if key not in listed:
                self._end(key.request, Cause.CANCELLED, "unknown to its gateway")
        self._do(self._leases.sink_said_hello(peer, listed, self._clock()))
        self._serve_readers()
        return tuple(self._owned_by(peer))

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A gateway's requests end with it; a sink's leases wait for another sink."""
        for key in self._owned_by(peer):
            self._end(key.request, Cause.WORKER_LOST, "the prefill worker lost its gateway")
        self._do(self._leases.sink_said_hello(peer, (), self._clock()))
        self._serve_readers()

    def _on_prefill(self, gateway: Incarnation, work: Prefill) -> None:
        if not self._fence.admits(work.key):
            return
        if work.request in self._owners:
            self._end(work.request, Cause.SUPERSEDED, "a newer attempt arrived")
        request = PrefillRequest(work, gateway, self._clock() + work.budget_s)
        needed = self._scheduler.blocks_for(request)
        objection = self._engine.runner.config.objection(work.token_ids)
        if objection is not None:
            self._refuse(gateway, work.key, Cause.INVALID, objection)
        elif needed > self._pool.num_blocks:
            message = f"the prompt needs {needed} KV blocks, this worker has {self._pool.num_blocks}"
            self._refuse(gateway, work.key, Cause.TOO_LARGE, message)
        elif self._scheduler.full:
            self._refuse(gateway, work.key, Cause.CAPACITY, f"{self._scheduler.num_waiting} requests waiting already")
        else:
            self._owners[work.request] = _Owner(gateway, work.attempt)
            self._scheduler.add(request)
            self._wake.set()

    def _on_abort(self, gateway: Incarnation, message: Abort) -> None:
        owner = self._owners.get(message.request)
        if owner is not None and owner.gateway == gateway and owner.attempt <= message.attempt:
            self._end(message.request, Cause.CANCELLED, "aborted")
            self._count(Cause.CANCELLED)
            self._server.send(gateway, Cancelled(request=message.request, attempt=message.attempt))

    # --- decisions -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        missing = self._scheduler.blocks_missing()
        if missing:
            self._do(self._leases.reclaim(missing, self._clock() - _RECLAIM_AGE_S))
        for request in self._scheduler.admit():
            self._pool.share(request.block_table)
            self._do(self._leases.open(request.key, request.block_table, request.deadline, self._clock()))
            self._serve_readers()

    def _slice(self, chunk: Chunk) -> Slice:
        work = chunk.request.work
        samples: tuple[Sample, ...] = ()
        if chunk.last:
            samples = tuple(
                Sample(
                    params=work.sampling,
                    choice=choice,
                    position=len(work.token_ids),
                    token_ids=work.token_ids,
                    prompt_len=work.prompt_len,
                )
                for choice in work.choices
            )
        return Slice(
            token_ids=work.token_ids[chunk.start : chunk.end],
            start=chunk.start,
            block_table=chunk.request.block_table,
            samples=samples,
        )

    async def _checksums(self, chunks: Sequence[Chunk], tables: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Of the blocks that each chunk has completed; empty where the deployment runs without."""
        if not self._settings.checksums:
            return [()] * len(chunks)
        completed = [
            table[chunk.start // self._block_size : self._num_ready(chunk)]
            for chunk, table in zip(chunks, tables, strict=True)
        ]
        return await self._engine.call(lambda: [self._region.crc32(blocks) for blocks in completed])

    def _num_ready(self, chunk: Chunk) -> int:
        """Blocks of the prompt that can no longer change after `chunk`; a partly filled one only at the end."""
        return self._scheduler.blocks_for(chunk.request) if chunk.last else chunk.end // self._block_size

    def _after_step(
        self,
        chunks: Sequence[Chunk],
        outcomes: Sequence[tuple[Sampled, ...]],
        checksums: Sequence[tuple[int, ...]],
    ) -> None:
        live = {id(chunk) for chunk in self._scheduler.step_done(chunks)}
        now = self._clock()
        for chunk, sampled, sums in zip(chunks, outcomes, checksums, strict=True):
            if id(chunk) not in live:
                continue
            self._prompt_tokens += chunk.end - chunk.start
            request = chunk.request.key.request
            self._do(self._leases.blocks_ready(request, self._num_ready(chunk), sums, now=now))
            if chunk.last:
                self._finish(chunk.request, sampled)

    def _finish(self, request: PrefillRequest, sampled: Sequence[Sampled]) -> None:
        tokens = []
        for choice, outcome in zip(request.work.choices, sampled, strict=True):
            if isinstance(outcome, InvalidLogitsError):
                self._fail(request.key, Cause.INTERNAL, str(outcome))
                return
            tokens.append(self._first_token(request.work, choice, outcome))
        self._do(self._leases.complete(request.key.request, tokens))
        for message in tokens:
            self._server.send(request.gateway, message)
        self._deadlines_changed.set()  # a complete offer waits for a sink only so long
        self._count("finished")
        if all(message.finish_reason is not None for message in tokens):
            self._server.send(request.gateway, Finished(request=request.key.request, attempt=request.key.attempt))

    def _first_token(self, work: Prefill, choice: int, sampled: SampledToken) -> Tokens:
        num_tokens = len(work.token_ids) + 1
        return Tokens(
            request=work.request,
            attempt=work.attempt,
            choice=choice,
            position=len(work.token_ids),
            token_ids=(sampled.token_id,),
            logprobs=None if sampled.logprobs is None else (sampled.logprobs,),
            finish_reason=finish_reason(
                sampled.token_id,
                num_tokens - work.prompt_len,
                work.sampling,
                self._engine.runner.config.eos_token_ids,
                num_tokens,
                self._engine.runner.config.max_sequence_tokens,
            ),
        )

    def _expire(self) -> None:
        now = self._clock()
        self._do(self._leases.expire(now))
        for request in [request for request in self._scheduler.requests() if request.deadline <= now]:
            state = "computing the prompt" if request.block_table else "waiting for the prefill worker"
            self._fail(request.key, Cause.DEADLINE, f"the request's time ran out while {state}")

    # --- the end of a request ------------------------------------------------------------------------------------

    def _fail(self, key: RequestKey, cause: Cause, message: str) -> None:
        owner = self._owners.get(key.request)
        self._end(key.request, cause, message)
        if owner is not None:
            self._refuse(owner.gateway, key, cause, message)

    def _refuse(self, gateway: Incarnation, key: RequestKey, cause: Cause, message: str) -> None:
        log.warning("request %s failed: %s: %s", key.request, cause, message)
        self._count(cause)
        self._server.send(gateway, Failed(request=key.request, attempt=key.attempt, cause=cause, message=message))

    def _end(self, request: RequestId, cause: Cause, message: str) -> None:
        """Give back whatever the request holds here: queue place, blocks, lease."""
        self._owners.pop(request, None)
        scheduled = self._scheduler.get(request)
        if scheduled is not None:
            self._scheduler.remove(scheduled)
        self._do(self._leases.withdraw(request, cause, message, now=self._clock()))
        self._wake.set()

    def _do(self, actions: Sequence[Action]) -> None:
        """Carry out what the lease table decided."""
        if not actions:
            return
        for action in actions:
            match action:
                case Send(sink, message):
                    self._server.send(sink, message)
                case Unpin(key, block_ids):
                    self._pool.release(block_ids)
                    self._owners.pop(key.request, None)
                    self._wake.set()
                case Dropped(key, cause, message):
                    self._fail(key, cause, message)
        self._deadlines_changed.set()

    def _owned_by(self, gateway: Incarnation) -> list[RequestKey]:
        return [RequestKey(r, o.attempt) for r, o in self._owners.items() if o.gateway == gateway]

    def _count(self, end: str) -> None:
        self._ended[end] = self._ended.get(end, 0) + 1

    # --- what others see -----------------------------------------------------------------------------------------

    def welcome(self) -> Welcome:
        """This worker's side of a handshake."""
        config = self._engine.runner.config
        return Welcome(
            role=Role.PREFILL,
            fingerprint=self._engine.fingerprint,
            max_sequence_tokens=min(config.max_sequence_tokens, self._pool.num_blocks * self._block_size),
            transport=self._settings.transport,
            transport_metadata=self._transport_metadata,
            open_requests=(),
        )

    def heartbeat(self, number: int, sent: int) -> Heartbeat:
        """The load of this moment."""
        return Heartbeat(
            number=number,
            sent=sent,
            steps=self._engine.num_steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.num_uncomputed,
            blocks_used=self._pool.num_used,
            blocks_total=self._pool.num_blocks,
            draining=False,
        )

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Ready once serving; the counts are zero when nothing is going on."""
        return True, {
            "role": Role.PREFILL.value,
            "transport": self._settings.transport,
            "blocks_used": self._pool.num_used,
            "blocks_limbo": self._pool.num_limbo,
            "blocks_total": self._pool.num_blocks,
            "waiting": self._scheduler.num_waiting,
            "running": self._scheduler.num_running,
            "leases": len(self._leases),
            "parked": self._leases.num_parked,
            "readers": self._leases.num_readers,
            "requests": len(self._owners),
        }

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        traffic = self._server.traffic
        model = {"model_name": self._settings.model}
        used = self._pool.num_used / self._pool.num_blocks
        yield gauge("vllm:num_requests_running", "Prompts being computed.", self._scheduler.num_running, model)
        yield gauge("vllm:num_requests_waiting", "Prompts waiting for blocks.", self._scheduler.num_waiting, model)
        yield gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache.", used, model)
        yield counter("baton_prompt_tokens_computed", "Prompt tokens computed here.", self._prompt_tokens)
        yield gauge("baton_prefill_queued_tokens", "Prompt tokens still to compute.", self._scheduler.num_uncomputed)
        yield gauge("baton_leases", "Leases held.", len(self._leases))
        yield gauge("baton_readers", "Pulls whose reads may be under way.", self._leases.num_readers)
        yield gauge("baton_lease_blocks", "Blocks pinned by leases.", self._leases.num_blocks)
        yield gauge("baton_attaches_parked", "Attaches waiting for their prefill.", self._leases.num_parked)
        yield counter("baton_leases_expired", "Leases that outlived their time.", self._leases.num_expired)
        yield counter("baton_leases_reclaimed", "Leases dropped under pressure.", self._leases.num_reclaimed)
        yield counter("baton_requests_ended", "Requests by how they ended here.", self._ended, "end")
        yield counter("baton_engine_steps", "Engine steps.", self._engine.num_steps)
        yield counter("baton_frames_refused", "Control frames refused.", traffic.frames_refused)
        yield counter("baton_sessions_lost", "Clients lost.", traffic.sessions_lost)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self._pool.check_invariants()
        self._scheduler.check_invariants()
        self._leases.check_invariants()


def _reads_nothing(read_id: ReadId, error: TransferError | None) -> None:
    raise AssertionError(f"a prefill worker reads from nobody: {read_id}, {error}")
