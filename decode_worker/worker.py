"""The decode worker: events from gateways, sources, the transport and the engine, turned into decisions.

Life cycle of a request in the decode worker:

    1. Decode arrives from a gateway; the worker attaches to the source's offer (`kv_transfer.sink.Pull`).
    2. The offer opens; the request waits until everything that it can ever need is free, and that is reserved.
    3. Blocks are read as the source announces them, while it computes the next chunk.
    4. The last read has ended and the first tokens are known: the source is asked to settle.
    5. Valid: the choices join the running batch at the next step. Anything else: nothing is decoded from the blocks.
    6. Each step sends each choice's token; after the last one Finished, and the tokens are kept until Ack.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from common.contract.errors import Cause, TransferError
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    Abort,
    Ack,
    BlocksReady,
    Cancelled,
    Decode,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    OfferWithdrawn,
    PrefillDone,
    Resend,
    Role,
    Settled,
    Source,
    Tokens,
    Welcome,
)
from common.engine.batch import InvalidLogitsError, Sample, Sampled, Slice
from common.engine.block_pool import BlockPool
from common.engine.engine import Engine
from common.engine.sequence import finish_reason
from common.runtime.channel import ControlServer
from common.runtime.clock import Clock
from common.runtime.config import DecodeSettings
from common.runtime.fence import AttemptFence
from common.runtime.probes import counter, gauge
from decode_worker.request import DecodeRequest, Generation
from decode_worker.scheduler import DecodeScheduler
from decode_worker.source_links import SourceLinks
from kv_transfer.mover import Mover
from kv_transfer.regions import Region
from kv_transfer.sink import Action, Admit, GaveUp, Pull, PullState, Release, SendToSource, StartRead, WantBlocks
from kv_transfer.transport import ReadId, Transport

log = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED = 4096
"""Finished requests whose tokens are kept for a gateway that may ask again."""
_TICK_S = 0.25
"""Between two looks at deadlines and quarantine, while a request is open."""


class DecodeWorker:
    """The shell around scheduler, pulls, engine and transport. Runs on the event loop's thread."""

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
        self._mover = Mover(region, make_transport, self.on_read, self.on_died)
        self._transport_metadata = b""
        self._clock = clock
        self._config = engine.runner.config
        self._block_size = engine.runner.layout.block_size
        self._pool = BlockPool(engine.runner.cache.num_blocks)
        self._max_sequence_tokens = min(self._config.max_sequence_tokens, self._pool.num_blocks * self._block_size)
        self._scheduler = DecodeScheduler(
            self._pool,
            block_size=self._block_size,
            max_num_seqs=settings.max_num_seqs,
            max_sequence_tokens=self._config.max_sequence_tokens,
        )
        self._links = SourceLinks(me, engine.fingerprint, self, clock, settings.pulse)
        self._fence = AttemptFence()
        self._requests: dict[RequestId, DecodeRequest] = {}
        self._finished: OrderedDict[RequestId, DecodeRequest] = OrderedDict()
        self._reads: dict[ReadId, tuple[DecodeRequest, int]] = {}
        self._quarantine: dict[Pull, float] = {}
        """Abandoned pulls with reads under way → when they were abandoned."""
        self._read_ids = itertools.count()
        self._wake = asyncio.Event()
        self._busy = asyncio.Event()
        self._ended: dict[str, int] = {}
        self._generation_tokens = 0

    # --- the loops -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the transport. Raises `TransferError` when it cannot work here."""
        self._transport_metadata = await self._mover.start()
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._step_loop())
                tasks.create_task(self._tick_loop())
                tasks.create_task(self._watch_threads())
        finally:
            await self._mover.close()  # before the links: sources must go on serving the reads that it lets end
            await self._links.close()
            self._engine.close()

    async def _watch_threads(self) -> None:
        await self._died

    def on_died(self, error: BaseException) -> None:
        """The mover's thread or a link's task has died of a bug: so does the worker, loudly."""
        if not self._died.done():
            self._died.set_exception(error)

    async def _step_loop(self) -> None:
        while True:
            step = self._pool.step_started()
            batch, copies = self._scheduler.schedule()
            if not batch:
                self._pool.step_finished(step)
                self._wake.clear()
                self._reserve()
                await self._wake.wait()
                continue
            outcomes = await self._engine.step([_slice(generation) for generation in batch], copies)
            self._pool.step_finished(step)
            self._after_step(batch, outcomes)

    async def _tick_loop(self) -> None:
        while True:
            await self._busy.wait()
            await asyncio.sleep(_TICK_S)
            self._tick()
            if not self._requests and not self._quarantine:
                self._busy.clear()

    # --- events from gateways ------------------------------------------------------------------------------------

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """A message from a gateway."""
        match message:
            case Decode():
                self._on_decode(peer, message)
            case Abort():
                self._on_abort(peer, message)
            case Ack():
                self._on_ack(peer, message)
            case Resend():
                self._on_resend(peer, message)
            case _:
                log.warning("%s is not for a decode worker; ignored", type(message).__name__)

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session (re)opens: what the gateway does not list is given up."""
        listed = set(hello.open_requests)
        for request in self._owned_by(peer):
            if request.key not in listed:
                self._forget(request, "unknown to its gateway")
        return tuple(request.key for request in self._owned_by(peer))

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A gateway's requests end with it."""
        for request in self._owned_by(peer):
            self._forget(request, "its gateway is gone")

    def _on_decode(self, gateway: Incarnation, work: Decode) -> None:
        if not self._fence.admits(work.key):
            return
        known = self._find(work.request)
        if known is not None:
            self._forget(known, "a newer attempt arrived")
        objection = self._config.objection(work.token_ids)
        if objection is not None:
            self._refuse(gateway, work.key, Cause.INVALID, objection)
            return
        if not self._scheduler.fits(work):
            needed = self._scheduler.blocks_needed(work)
            message = f"the request may need {needed} KV blocks, this worker has {self._pool.num_blocks}"
            self._refuse(gateway, work.key, Cause.TOO_LARGE, message)
            return
        if len(self._requests) >= self._settings.max_waiting + self._settings.max_num_seqs:
            self._refuse(gateway, work.key, Cause.CAPACITY, f"{len(self._requests)} requests open already")
            return
        request = DecodeRequest(work, gateway, self._clock() + work.budget_s, Pull(work.key, work.source))
        self._requests[work.request] = request
        self._busy.set()
        at = self._links.need(work.source.address)
        if at == work.source.incarnation:
            self._do(request, request.pull.attach())
        elif at is not None:
            self._fail(request, Cause.WORKER_LOST, "the prefill worker has restarted")

    def _on_abort(self, gateway: Incarnation, message: Abort) -> None:
        request = self._find(message.request)
        if request is None or request.gateway != gateway or request.work.attempt > message.attempt:
            return
        self._forget(request, "aborted")
        self._count(Cause.CANCELLED)
        self._server.send(gateway, Cancelled(request=message.request, attempt=request.work.attempt))

    def _on_ack(self, gateway: Incarnation, message: Ack) -> None:
        request = self._finished.get(message.request)
        if request is not None and request.gateway == gateway and request.work.attempt == message.attempt:
            del self._finished[message.request]

    def _on_resend(self, gateway: Incarnation, message: Resend) -> None:
        request = self._find(message.request)
        if request is None or request.gateway != gateway or request.work.attempt != message.attempt:
            return
        for generation in request.generations:
            if generation.sequence.choice == message.choice and message.position < generation.sequence.num_tokens:
                self._server.send(gateway, generation.tokens(message.position))
        if request.finished:
            self._server.send(gateway, Finished(request=request.work.request, attempt=request.work.attempt))

    # --- events from sources and the transport -------------------------------------------------------------------

    def on_source_open(self, address: str, source: Incarnation, welcome: Welcome) -> None:
        """Attach, or attach again, every pull from this address."""
        if welcome.transport == self._settings.transport:
            self._mover.add_source(source, welcome.transport_metadata)
        for request in self._pulling_from(address):
            if welcome.transport != self._settings.transport:
                message = f"this worker moves blocks by {self._settings.transport}, its source by {welcome.transport}"
                self._fail(request, Cause.TRANSFER, message)
            elif request.work.source.incarnation != source:
                self._fail(request, Cause.WORKER_LOST, "the prefill worker has restarted")
            else:
                self._do(request, request.pull.attach())

    def open_pulls(self, address: str) -> list[RequestKey]:
        """The pulls from this address that are not over."""
        pulls = (*(request.pull for request in self._pulling_from(address)), *self._quarantine)
        return [pull.key for pull in pulls if pull.source.address == address]

    def on_source_message(self, source: Incarnation, message: Message) -> None:
        """A message from a source, about one of its pulls."""
        if not isinstance(message, BlocksReady | PrefillDone | Settled | OfferWithdrawn):
            return
        request = self._requests.get(message.request)
        if request is None or request.key != message.key or request.work.source.incarnation != source:
            return
        match message:
            case BlocksReady():
                self._do(request, request.pull.blocks_ready(message))
            case PrefillDone() if not _fits(message.first_tokens, request.work):
                self._do(request, request.pull.abandon(Cause.TRANSFER, "the first tokens are not those asked for"))
            case PrefillDone():
                self._do(request, request.pull.prefill_done(message))
            case Settled():
                self._do(request, request.pull.settled(message))
            case OfferWithdrawn():
                self._do(request, request.pull.withdrawn(message))

    def on_source_lost(self, address: str, source: Incarnation | None, cause: Cause, why: str) -> None:
        """Nothing pulled from this source can be settled any more; the fence gives its quarantined blocks back."""
        for request in self._pulling_from(address):
            self._fail(request, cause, f"the prefill worker at {address}: {why}")
        if source is not None:
            self._mover.drop_source(source)

    def on_read(self, read_id: ReadId, error: TransferError | None) -> None:
        """A read has ended: nothing will write to its blocks any more."""
        request, start = self._reads.pop(read_id)
        self._do(request, request.pull.read_done(start, None if error is None else str(error)))
        if request.pull.over:
            self._quarantine.pop(request.pull, None)

    # --- decisions -----------------------------------------------------------------------------------------------

    def _do(self, request: DecodeRequest, actions: Iterable[Action]) -> None:
        """Carry out what the request's pull decided."""
        for action in actions:
            match action:
                case SendToSource(message):
                    self._links.send(request.work.source.address, message)
                case WantBlocks(num_blocks):
                    self._want(request, num_blocks)
                case StartRead():
                    self._start_read(request, action)
                case Admit(block_ids, first_tokens):
                    self._admit(request, block_ids, first_tokens)
                case Release(block_ids):
                    self._pool.release(block_ids)
                    self._reserve()
                case GaveUp(cause, message):
                    self._gave_up(request, cause, message)

    def _want(self, request: DecodeRequest, num_blocks: int) -> None:
        expected = -(-len(request.work.token_ids) // self._block_size)
        if num_blocks != expected:
            message = f"the source offers {num_blocks} blocks for a prompt of {expected}"
            self._do(request, request.pull.abandon(Cause.TRANSFER, message))
            return
        self._scheduler.want(request, num_blocks)
        self._reserve()

    def _reserve(self) -> None:
        for request, block_ids in self._scheduler.reserve():
            self._do(request, request.pull.reserve(block_ids))

    def _start_read(self, request: DecodeRequest, read: StartRead) -> None:
        read_id = ReadId(next(self._read_ids))
        self._reads[read_id] = (request, read.start)
        self._mover.read(read_id, request.work.source.incarnation, read.source_blocks, read.sink_blocks, read.checksums)

    def _admit(self, request: DecodeRequest, block_ids: Sequence[int], first_tokens: Sequence[Tokens]) -> None:
        self._scheduler.admit(request, block_ids, first_tokens)
        for generation in request.generations:
            if generation.finish_reason is not None:
                self._send_tokens(generation)
        self._wake.set()

    def _gave_up(self, request: DecodeRequest, cause: Cause | None, message: str) -> None:
        self._drop(request)
        if cause is not None:
            self._refuse(request.gateway, request.key, cause, message)

    def _after_step(self, batch: Sequence[Generation], outcomes: Sequence[tuple[Sampled, ...]]) -> None:
        for generation, (outcome,) in zip(batch, outcomes, strict=True):
            if not self._scheduler.is_running(generation):
                continue
            if isinstance(outcome, InvalidLogitsError):
                self._fail(generation.request, Cause.INTERNAL, str(outcome))
                continue
            sequence = generation.sequence
            sequence.num_computed = sequence.num_tokens
            num_tokens = sequence.num_tokens + 1
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
            if reason is not None:
                self._scheduler.remove(generation)
                self._finish_if_ended(generation.request)
        self._reserve()

    def _send_tokens(self, generation: Generation) -> None:
        self._server.send(generation.request.gateway, generation.tokens(generation.num_sent))
        generation.num_sent = generation.sequence.num_tokens

    def _finish_if_ended(self, request: DecodeRequest) -> None:
        if not request.finished:
            return
        self._drop(request)
        self._finished[request.work.request] = request
        while len(self._finished) > MAX_UNACKNOWLEDGED:
            self._finished.popitem(last=False)
        self._count("finished")
        self._server.send(request.gateway, Finished(request=request.work.request, attempt=request.work.attempt))

    def _tick(self) -> None:
        now = self._clock()
        for request in [request for request in self._requests.values() if request.deadline <= now]:
            state = request.pull.state.value if request.pull.state is not PullState.SETTLED else "decoding"
            self._fail(request, Cause.DEADLINE, f"the request's time ran out in the decode worker, {state}")
        for pull, since in list(self._quarantine.items()):
            if now - since > self._settings.quarantine_bound_s:
                log.warning("blocks in quarantine for %.1f s: replacing the agent for %s", now - since, pull.source)
                self._replace_agent(pull.source)

    def _replace_agent(self, source: Source) -> None:
        """The fence for a source that is still there; each of its pulls fails and may be tried again."""
        self._mover.drop_source(source.incarnation)
        if self._links.need(source.address) == source.incarnation:
            self._mover.add_source(source.incarnation, self._links.transport_metadata(source.address))

    # --- the end of a request ------------------------------------------------------------------------------------

    def _fail(self, request: DecodeRequest, cause: Cause, message: str) -> None:
        self._forget(request, message)
        self._refuse(request.gateway, request.key, cause, message)

    def _refuse(self, gateway: Incarnation, key: RequestKey, cause: Cause, message: str) -> None:
        log.warning("request %s failed: %s: %s", key.request, cause, message)
        self._count(cause)
        self._server.send(
            gateway, Failed(request=key.request, attempt=key.attempt, cause=cause, message=message[:4096])
        )

    def _forget(self, request: DecodeRequest, why: str) -> None:
        """Give the request up wherever it is, without a word to the gateway."""
        self._finished.pop(request.work.request, None)
        if request.work.request in self._requests:
            if request.pull.state is PullState.SETTLED:
                self._drop(request)
            else:
                self._do(request, request.pull.abandon(None, why))

    def _drop(self, request: DecodeRequest) -> None:
        """Take the request off the books; what a read may still write to goes into quarantine."""
        del self._requests[request.work.request]
        self._scheduler.forget(request)
        if request.pull.quarantined:
            self._quarantine[request.pull] = self._clock()
        self._wake.set()

    def _find(self, request: RequestId) -> DecodeRequest | None:
        return self._requests.get(request) or self._finished.get(request)

    def _owned_by(self, gateway: Incarnation) -> list[DecodeRequest]:
        return [r for r in (*self._requests.values(), *self._finished.values()) if r.gateway == gateway]

    def _pulling_from(self, address: str) -> list[DecodeRequest]:
        return [
            request
            for request in self._requests.values()
            if request.work.source.address == address and request.pull.state is not PullState.SETTLED
        ]

    def _count(self, end: str) -> None:
        self._ended[end] = self._ended.get(end, 0) + 1

    # --- what others see -----------------------------------------------------------------------------------------

    @property
    def _num_quarantined(self) -> int:
        return sum(len(pull.quarantined) for pull in self._quarantine)

    def welcome(self) -> Welcome:
        """This worker's side of a handshake."""
        return Welcome(
            role=Role.DECODE,
            fingerprint=self._engine.fingerprint,
            max_sequence_tokens=self._max_sequence_tokens,
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
            waiting=sum(not request.generations for request in self._requests.values()),
            waiting_tokens=0,
            blocks_used=self._pool.num_used + self._scheduler.num_promised,
            blocks_total=self._pool.num_blocks,
            draining=False,
        )

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Ready once serving; the counts are zero when nothing is going on."""
        return True, {
            "role": Role.DECODE.value,
            "transport": self._settings.transport,
            "blocks_used": self._pool.num_used,
            "blocks_limbo": self._pool.num_limbo,
            "blocks_promised": self._scheduler.num_promised,
            "blocks_quarantined": self._num_quarantined,
            "blocks_total": self._pool.num_blocks,
            "waiting": self._scheduler.num_waiting,
            "pulling": self._scheduler.num_pulling,
            "running": self._scheduler.num_running,
            "reads": len(self._reads),
            "requests": len(self._requests),
            "unacknowledged": len(self._finished),
        }

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        used = self._pool.num_used / self._pool.num_blocks
        traffic = self._server.traffic
        model = {"model_name": self._settings.model}
        yield gauge("vllm:num_requests_running", "Sequences in the batch.", self._scheduler.num_running, model)
        yield gauge("vllm:num_requests_waiting", "Requests waiting for room.", self._scheduler.num_waiting, model)
        yield gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache.", used, model)
        yield counter("baton_tokens_generated", "Tokens generated here.", self._generation_tokens)
        yield gauge("baton_pulls", "Requests whose blocks are on their way.", self._scheduler.num_pulling)
        yield gauge("baton_reads", "Reads under way.", len(self._reads))
        yield gauge("baton_blocks_promised", "Blocks reserved for growth.", self._scheduler.num_promised)
        yield gauge("baton_blocks_quarantined", "Blocks that an unfinished read may write to.", self._num_quarantined)
        pulled = self._mover.num_blocks_read * self._engine.runner.layout.block_bytes
        yield counter("baton_transfer_bytes", "Bytes pulled.", pulled)
        yield counter("baton_transfer_seconds", "Durations of reads, summed; reads overlap.", self._mover.read_seconds)
        yield counter("baton_transfer_failures", "Reads that failed.", self._mover.num_reads_failed)
        yield counter("baton_requests_ended", "Requests by how they ended here.", self._ended, "end")
        yield counter("baton_engine_steps", "Engine steps.", self._engine.num_steps)
        yield counter("baton_frames_refused", "Control frames refused.", traffic.frames_refused)
        yield counter("baton_sessions_lost", "Clients lost.", traffic.sessions_lost)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self._pool.check_invariants()
        self._scheduler.check_invariants()
        for request in self._requests.values():
            request.pull.check_invariants()


def _fits(first_tokens: Sequence[Tokens], work: Decode) -> bool:
    """Whether these are one token for each choice of `work`, at the right position."""
    return tuple(first.choice for first in first_tokens) == work.choices and all(
        (first.position, len(first.token_ids)) == (len(work.token_ids), 1)
        and (first.logprobs is None) == (work.sampling.logprobs is None)
        for first in first_tokens
    )


def _slice(generation: Generation) -> Slice:
    sequence = generation.sequence
    return Slice(
        token_ids=sequence.token_ids[-1:],
        start=sequence.num_tokens - 1,
        block_table=sequence.block_table,
        samples=(
            Sample(
                params=sequence.sampling,
                choice=sequence.choice,
                position=sequence.num_tokens,
                token_ids=sequence.token_ids,
                prompt_len=sequence.prompt_len,
            ),
        ),
    )
