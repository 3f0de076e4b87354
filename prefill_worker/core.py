"""The prefill worker's core: turns events from gateways, decode workers and the engine into decisions.

Life cycle of a request in the prefill worker:

    1. Prefill arrives from a gateway. The request waits for blocks, also while another prompt is about to compute
       some of them.
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

Pure state: `handle` takes an event and returns actions (`common.worker`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.contract.block_hashes import BlockHash
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.gateway import Abort, Drain, Prefill
from common.contract.messages.session import Profile, Role
from common.engine.block_pool import BlockPool
from common.engine.engine import Engine
from common.engine.grammar import GaveUp, GrammarState
from common.runtime.config import PrefillSettings
from common.worker.agenda import Agenda, PlanWanted
from common.worker.events import (
    Action,
    DrainEnded,
    DrainWanted,
    Event,
    HelloReceived,
    MaskMade,
    PeerLost,
    Received,
    StepEnded,
    StepWanted,
    Ticked,
)
from common.worker.front import Front
from common.worker.mask_asks import MaskAsks
from kv_transfer.events import Consequence, LeaseDropped, Pulled, PullFailed, PullOffered, Unpinned
from kv_transfer.pull import Pull
from kv_transfer.regions import Region
from prefill_worker import view
from prefill_worker.prefix_pulls import PrefixPulls
from prefill_worker.request import PrefillRequest, PromptEvent, PromptState
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.steps import PrefillSteps

log = logging.getLogger(__name__)

_SAMPLED_BYTES = 256 * 2**20
"""Most memory of the float32 logits that a step samples from, or those of one prompt. Sampling may copy them a few
times."""


class PrefillCore:
    """The state of a prefill worker and every decision about its requests."""

    role = Role.PREFILL
    profile = Profile.THROUGHPUT

    def __init__(self, settings: PrefillSettings, me: Incarnation, engine: Engine, region: Region) -> None:
        """Only facts about the model are read from `engine`, its count of steps, and its costs, which its steps refine.
        `region` computes checksums."""
        self.settings = settings
        self.engine = engine
        layout = engine.runner.layout
        self.block_size = layout.block_size
        self.pool = BlockPool(engine.runner.cache.num_blocks, prefix_cache=settings.prefix_cache)
        self.prefix_pulls = PrefixPulls(
            me,
            self.block_size,
            layout.block_bytes,
            engine.costs,
            settings.pull_prefixes,
            settings.pull_patience_s,
            on_gpu=settings.device == "cuda",
        )
        self.scheduler = PrefillScheduler(
            self.pool,
            block_size=self.block_size,
            chunk_size=settings.chunk_size,
            token_budget=settings.token_budget,
            max_waiting=settings.max_waiting,
            ageing_s=settings.ageing_s,
            ttft_target_s=settings.ttft_target_s,
            costs=engine.costs,
            most_samples=_SAMPLED_BYTES // (4 * engine.runner.config.vocab_size),
            expected_pull=self.prefix_pulls.expected,
        )
        self._agenda = Agenda(self._decide)
        self.front: Front[PrefillRequest] = Front(
            self._agenda,
            settings,
            self.block_size,
            self.pool,
            self.scheduler.trials,
            region,
            self._find_prefix,
            settings.unattached_ttl_s,
        )
        self.pulls, self.lender = self.front.pulls, self.front.lender
        self.requests = self.front.requests
        """Every request, from its arrival until its lease has ended."""
        self.masks: MaskAsks[PrefillRequest] = MaskAsks(self._agenda)
        """Requests that wait for blocks once the mask of their first tokens is known."""
        self.steps = PrefillSteps(
            self._agenda,
            engine.runner.config,
            engine.costs,
            self.block_size,
            self.pool,
            self.scheduler,
            self.prefix_pulls,
            self.front,
            self._fail,
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide on an event, to the end of all its consequences; returns the actions, in order. `now` is in monotonic
        seconds."""
        return self._agenda.handle(event, now)

    def _decide(self, event: Event | Consequence) -> None:
        match event:
            case StepWanted(before):
                self.steps.wanted(before)
            case PlanWanted(before):
                self.steps.plan(before)
            case StepEnded():
                self.steps.ended(event)
            case Received(gateway, Prefill() as work):
                self._on_prefill(gateway, work)
            case Received(gateway, Abort() as abort):
                self._on_abort(gateway, abort)
            case Received(_, Drain()):
                self._drain()
            case PullOffered(pull, num_blocks):
                self._on_pull_offered(pull, num_blocks)
            case Pulled(pull, block_ids, _):
                self._on_pulled(pull, block_ids)
            case PullFailed(pull, cause, message):
                self._on_pull_failed(pull, cause, message)
            case Unpinned(key, block_ids, _):
                self._on_unpinned(key, block_ids)
            case LeaseDropped(key, cause, message):
                self._on_lease_dropped(key, cause, message)
            case MaskMade(state, gave_up):
                self._on_mask(state, gave_up)
            case Ticked():
                self._on_tick()
            case HelloReceived(peer, listed):
                for request in self.front.hello(peer, listed):
                    self._end(request, Cause.CANCELLED, "unknown to its gateway")
            case PeerLost(peer):
                for request in self.front.lost(peer):
                    # Its sinks tell the same gateway, perhaps, which is not to take this worker for a bad source.
                    self._end(request, Cause.LEASE_LOST, "the prefill worker lost its gateway")
            case DrainWanted():
                self._drain(leaving=True)
            case DrainEnded(why):
                for request in list(self.requests.values()):
                    self._fail(request, Cause.DRAINING, why)
            case _:
                self.front.handle(event)

    # --- messages ------------------------------------------------------------------------------------------------

    def _on_prefill(self, gateway: Incarnation, work: Prefill) -> None:
        if not self.front.fence.admits(work.key):
            return
        known = self.requests.get(work.request)
        if known is not None:
            self.front.count(Cause.SUPERSEDED)
            self._end(known, Cause.SUPERSEDED, "a newer attempt arrived")
        now = self._agenda.now
        request = PrefillRequest(work, gateway, now, now + work.budget_s)
        self.lender.expect(work.key, request.deadline)
        refusal = self._refusal(request)
        if refusal is not None:
            self.front.refuse(gateway, work.key, *refusal)
            # No sink is to wait for it, not even one that the gateway sends before it hears of this.
            self.lender.withdraw(work.request, Cause.LEASE_LOST, refusal[1])
            return
        self.requests[work.request] = request
        if work.sampling.grammar is None:
            self.scheduler.add(request)
        else:
            request.enter(PromptEvent.MASK)
            state = request.grammar_state = GrammarState()
            self.masks.ask(request, work.sampling.grammar, state, work.token_ids, work.prompt_len)

    def _refusal(self, request: PrefillRequest) -> tuple[Cause, str] | None:
        """Why a request that arrives is not taken; None if it is."""
        work, needed = request.work, self.scheduler.blocks_for(request)
        objection = self.engine.runner.objection(work.token_ids, work.sampling)
        if objection is not None:
            return Cause.INVALID, objection
        if needed > self.pool.num_blocks:
            return Cause.TOO_LARGE, f"the prompt needs {needed} KV blocks, this worker has {self.pool.num_blocks}"
        if self.front.draining:
            return Cause.DRAINING, "this prefill worker takes no new work"
        if self.scheduler.full(len(self.masks)) and not work.admitted:
            return Cause.CAPACITY, f"{len(self.scheduler.waiting)} requests waiting already"
        return None

    def _on_mask(self, state: GrammarState, gave_up: GaveUp | None) -> None:
        """The mask of a request's first tokens is known, or its grammar gave up: the request waits for blocks, or
        fails."""
        request = self.masks.made(state)
        if request is not None and gave_up is not None:
            self._fail(request, gave_up.cause, gave_up.why)
        elif request is not None:
            self.scheduler.add(request)

    def _on_abort(self, gateway: Incarnation, message: Abort) -> None:
        request = self.requests.get(message.request)
        if message.choice is not None:
            return  # the prompt is computed for the other choices
        if request is not None and request.gateway == gateway and request.work.attempt <= message.attempt:
            self._end(request, Cause.CANCELLED, "aborted")
            self.front.cancelled(gateway, message.key)

    # --- prefixes that are pulled --------------------------------------------------------------------------------

    def _on_pull_offered(self, pull: Pull, num_blocks: int) -> None:
        """Another worker offers the beginning of a prompt: read it into the blocks in which it would have been
        computed."""
        prefix = self.prefix_pulls.find(pull)
        num_held = prefix.request.num_computed // self.block_size
        if num_blocks <= num_held:
            self.pulls.abandon(pull, Cause.LEASE_LOST, "the other worker holds no more than this one")
            return
        self.prefix_pulls.offered(pull, num_blocks, self._agenda.now)
        blocks = prefix.request.block_table[:num_blocks]
        self.pool.share(blocks)
        self.pulls.reserve(pull, blocks, num_held)

    def _on_pulled(self, pull: Pull, block_ids: Sequence[int]) -> None:
        """The beginning of a prompt was pulled and is valid: compute the rest."""
        prefix = self.prefix_pulls.pulled(pull, self._agenda.now)
        self.scheduler.resume(prefix.request, len(block_ids) * self.block_size, self._agenda.now)
        self.pool.release(block_ids)
        self.steps.offer(prefix.request)

    def _on_pull_failed(self, pull: Pull, cause: Cause | None, message: str) -> None:
        """A prefix could not be pulled: compute it. If a read may still write to its blocks, the prompt waits for
        others."""
        request = self.prefix_pulls.gave_up(pull, cause, self._agenda.now).request
        if request.state is PromptState.ENDED:
            return
        log.info("request %s computes its prefix: %s", request.key.request, message)
        if pull.quarantined:
            self.scheduler.requeue(request)
        else:
            self.scheduler.resume(request, request.num_computed, self._agenda.now)
            self.steps.offer(request)

    # --- leases --------------------------------------------------------------------------------------------------

    def _find_prefix(self, block_hashes: Sequence[BlockHash]) -> Sequence[int]:
        """Cached blocks that another worker may read, each with a reference for the lender. Admitted prompts already
        hold every block that they need, so this takes none from them."""
        blocks = self.pool.match(block_hashes)
        self.pool.share(blocks)
        return blocks

    def _on_unpinned(self, key: RequestKey, block_ids: Sequence[int]) -> None:
        """A request's lease has ended, so the request has ended, too, unless a newer attempt has begun."""
        self.pool.release(block_ids)
        self.scheduler.holdings.end(key)
        request = self.requests.get(key.request)
        if request is not None and request.key == key:
            del self.requests[key.request]
            request.enter(PromptEvent.END)

    def _on_lease_dropped(self, key: RequestKey, cause: Cause, message: str) -> None:
        """The lender has given a request up, for which an attempt up to `key.attempt` has attached."""
        request = self.requests.get(key.request)
        if request is not None and request.work.attempt <= key.attempt:
            self._fail(request, cause, message)

    def _on_tick(self) -> None:
        now = self._agenda.now
        self.front.tick(now)
        for prefix in self.prefix_pulls.overdue(now):
            self.pulls.abandon(prefix.pull, Cause.DEADLINE, "pulling the prefix took too long")
        overdue = [request for request in self.masks.subjects() if request.deadline <= now]
        for request in (*overdue, *self.scheduler.expired(now)):
            message = f"the request's time ran out in the prefill worker, {request.state.value}"
            self._fail(request, Cause.DEADLINE, message)

    # --- the end of a request ------------------------------------------------------------------------------------

    def _fail(self, request: PrefillRequest, cause: Cause, message: str) -> None:
        # The gateway first: a sink passes on that the offer is withdrawn as the loss of its source.
        self.front.refuse(request.gateway, request.key, cause, message)
        self._end(request, cause, message)

    def _end(self, request: PrefillRequest, cause: Cause, message: str) -> None:
        """Release whatever the request holds here: its place in the queue, its blocks, its pull, its lease."""
        del self.requests[request.key.request]
        self.masks.forget(request.grammar_state)
        prefix = self.prefix_pulls.of(request)
        self.scheduler.remove(request)
        request.enter(PromptEvent.END)
        if prefix is not None:
            self.pulls.abandon(prefix.pull, None, message)
        self.lender.withdraw(request.key.request, cause, message)

    def _drain(self, *, leaving: bool = False) -> None:
        """Take no new work. Requests that have not begun go back to their gateways; the others are computed and handed
        over."""
        if not self.front.drain(leaving=leaving):
            return
        for request in list(self.requests.values()):
            if request.state in (PromptState.MASKING, PromptState.WAITING):
                self._fail(request, Cause.DRAINING, "this prefill worker is leaving")

    # --- what others see (`common.worker.shell.Core`) ------------------------------------------------------------

    heartbeat = view.heartbeat
    counts = view.counts
    metrics = view.metrics

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.front.check_invariants()
        self.scheduler.check_invariants()
        scheduled = {PromptState.WAITING, PromptState.RUNNING, PromptState.ON_HOLD}
        assert {r for r in self.requests.values() if r.state in scheduled} == set(self.scheduler.requests())
        assert {r for r in self.requests.values() if r.state is PromptState.MASKING} == set(self.masks.subjects())
        holders = {PromptState.RUNNING, PromptState.ON_HOLD, PromptState.COMPUTED}
        holding = {r.key for r in self.requests.values() if r.state in holders}
        assert holding == set(self.scheduler.holdings.keys())
        for request in self.requests.values():
            assert request.state not in (PromptState.ARRIVED, PromptState.ENDED), request.story
            offered = request.state in (PromptState.RUNNING, PromptState.COMPUTED)
            assert self.lender.holds(request.key) == offered, request.story
            pulled = self.prefix_pulls.of(request) is not None
            assert pulled == (request.state is PromptState.ON_HOLD), request.story
