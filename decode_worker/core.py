"""The decode worker's core: turns events from gateways, sources, sinks and the engine into decisions.

Life cycle of a request in the decode worker:

    1. Decode arrives from a gateway. The worker attaches to the source's offer (`kv_transfer.pulls`). Without a source
       it computes the prompt itself, in chunks that share steps with decodes.
    2. The offer opens. The request waits until room is reserved. Blocks that are cached here are kept. The others are
       read when the source announces them, while the source computes the next chunk.
    3. The last read has ended and the first tokens are known: the worker asks the source to settle.
    4. If the source answers that the blocks are valid, the choices join the running batch at the next step. Otherwise
       nothing is decoded from the blocks.
    5. Each step sends each choice's token. After the last one Finished is sent; the tokens are kept until Ack.

Under memory pressure a choice may lose its blocks and get them back later; its client gets the same tokens. While the
worker drains, other decode workers pull its running sequences (`decode_worker.migration`).

Pure state: `handle` takes an event and returns actions (`common.worker`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.contract.block_hashes import BlockChain, BlockHash
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.gateway import Abort, Ack, Decode, Drain, Resend
from common.contract.messages.handoff import Attach, AttachSequence
from common.contract.messages.session import Role
from common.engine.block_pool import BlockPool
from common.engine.engine import Engine
from common.engine.grammar import GaveUp, GrammarState
from common.runtime.config import DecodeSettings
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
from decode_worker import view
from decode_worker.answers import Answers
from decode_worker.book import Book
from decode_worker.draft_model import DraftModel
from decode_worker.entrance import AT_ENTRANCE
from decode_worker.migration import Arrivals, Departures, first_tokens_fit, pull_of
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest, RequestEvent, RequestState
from decode_worker.scheduler import DecodeScheduler
from decode_worker.speculation import Speculation
from decode_worker.steps import DecodeSteps
from kv_transfer.events import Consequence, LeaseDropped, Pulled, PullFailed, PullOffered, Unpinned
from kv_transfer.pull import Pull, PullState
from kv_transfer.regions import Region


@dataclass(frozen=True, slots=True)
class _Begin(Consequence):
    """A request was let in. It begins once the blocks of an earlier attempt are released."""

    gateway: Incarnation
    work: Decode


class DecodeCore:
    """The state of a decode worker and every decision about its requests."""

    role = Role.DECODE

    def __init__(self, settings: DecodeSettings, engine: Engine, region: Region) -> None:
        """Only facts about the model are read from `engine`, its count of steps, and its costs, which its steps refine.
        `region` computes checksums."""
        self.settings = settings
        self.profile = settings.profile
        self.engine = engine
        self.block_size = engine.runner.layout.block_size
        self.pool = BlockPool(engine.runner.cache.num_blocks, prefix_cache=settings.prefix_cache)
        runner = engine.runner
        policy = Policy.of(settings, runner.config.max_sequence_tokens, self.block_size, runner.num_host_blocks)
        self._policy = policy
        self._agenda = Agenda(self._decide, conclude=self._reserve)
        speculation = None
        if settings.drafts_by != "off":
            assert engine.row_times is not None, "steps were not timed"
            model = None if engine.drafter is None else DraftModel.of(policy, engine.drafter)
            speculation = Speculation(policy, engine.row_times, model, looks_up=settings.drafts_by != "draft")
        self.scheduler = DecodeScheduler(self.pool, policy, engine.costs, speculation, engine.row_times)
        self.front: Front[DecodeRequest] = Front(
            self._agenda, settings, self.block_size, self.pool, self.scheduler.trials, region, self._find_prefix
        )
        self.pulls, self.lender = self.front.pulls, self.front.lender
        vocab_size = engine.runner.config.vocab_size
        self.arrivals = Arrivals(self.scheduler, self.pool, self.pulls, self._agenda.emit, policy, vocab_size)
        self.departures = Departures(self.scheduler, self.pool, self.lender, self._agenda.send, self.block_size)
        self.totals = view.DecodeTotals()
        self.answers = Answers(self._agenda, self.departures)
        self._masks: MaskAsks[DecodeRequest | DecodeChoice] = MaskAsks(self._agenda)
        self.book = Book(
            self._agenda,
            self.scheduler,
            self.arrivals,
            self.departures,
            self._masks,
            self.front,
            self.answers,
            self.totals,
        )
        self.steps = DecodeSteps(
            self._agenda,
            engine.runner.config,
            engine.costs,
            self.pool,
            self.scheduler,
            self.departures,
            self.front,
            self.answers,
            self.book,
            self.totals,
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide on an event, to the end of all its consequences; returns the actions, in order. `now` is in monotonic
        seconds."""
        return self._agenda.handle(event, now)

    def _decide(self, event: Event | Consequence) -> None:
        match event:
            case StepWanted(before):
                self.steps.wanted(before)
            case PlanWanted():
                self.steps.wanted_again()
            case StepEnded():
                self.steps.ended(event)
            case Received(gateway, Decode() as work):
                self._on_decode(gateway, work)
            case Received(gateway, Abort() as abort):
                self._on_abort(gateway, abort)
            case Received(gateway, Ack() as ack):
                self._on_ack(gateway, ack)
            case Received(gateway, Resend() as resend):
                self._on_resend(gateway, resend)
            case Received(sink, AttachSequence() as attach):
                self.departures.attach(sink, attach, self._sequence(attach))
            case Received(_, Drain()):
                self.front.drain()
            case PullOffered(pull, num_blocks):
                self._on_pull_offered(pull, num_blocks)
            case Pulled():
                self._on_pulled(event)
            case PullFailed(pull, cause, why):
                self._on_pull_failed(pull, cause, why)
            case Unpinned(key, block_ids, settled):
                self._on_unpinned(key, block_ids, settled=settled)
            case LeaseDropped():
                pass  # the lease of a cut sequence; `Unpinned` follows and does the work
            case _Begin(gateway, work):
                self._begin(gateway, work)
            case MaskMade(state, gave_up):
                self._on_mask(state, gave_up)
            case Ticked():
                self._on_tick()
            case HelloReceived(peer, listed):
                for request in self.front.hello(peer, listed):
                    self.book.forget(request, "unknown to its gateway")
            case PeerLost(peer):
                for request in self.front.lost(peer):
                    self.book.forget(request, "its gateway is gone")
            case DrainWanted():
                self.front.drain(leaving=True)
            case DrainEnded(why):
                for request in list(self.book.requests.values()):
                    self.book.fail(request, Cause.DRAINING, why)
            case _:
                self.front.handle(event)

    # --- messages ------------------------------------------------------------------------------------------------

    def _on_decode(self, gateway: Incarnation, work: Decode) -> None:
        if not self.front.fence.admits(work.key):
            return
        known = self.book.find(work.request)
        if known is not None:
            if known.state is not RequestState.FINISHED:  # else it is counted
                self.front.count(Cause.SUPERSEDED)
            self.book.forget(known, "a newer attempt arrived")
        refusal = self._refusal(work)
        if refusal is not None:
            self.front.refuse(gateway, work.key, *refusal)
            return
        self._agenda.emit(_Begin(gateway, work))

    def _refusal(self, work: Decode) -> tuple[Cause, str] | None:
        """Why a request that arrives is not taken; None if it is."""
        if work.moving and len(work.token_ids) == work.prompt_len:
            return Cause.INVALID, "a sequence moves only when it runs"
        objection = self.engine.runner.objection(work.token_ids, work.sampling, work.prediction)
        if objection is not None:
            return Cause.INVALID, objection
        if not self.scheduler.fits(work):
            needed = self.scheduler.blocks_needed(work)
            return Cause.TOO_LARGE, f"the request may need {needed} KV blocks, this worker has {self.pool.num_blocks}"
        if self.front.draining:
            return Cause.DRAINING, "this decode worker takes no new work"
        num_open = len(self.book.requests)
        if num_open >= self.settings.max_waiting + self.settings.max_num_seqs and not work.admitted:
            return Cause.CAPACITY, f"{num_open} requests open already"
        return None

    def _begin(self, gateway: Incarnation, work: Decode) -> None:
        now = self._agenda.now
        pull: Pull | None = None
        if work.moving:
            # The last token has no KV yet, at the source or here: the first step here computes it.
            work = replace(work, token_ids=work.token_ids[:-1])
            pull = pull_of(work)
        elif work.source is not None and work.offered is not None:
            pull = Pull(work.source, Attach(request=work.request, attempt=work.attempt, offered=work.offered.attempt))
        chain = BlockChain(self.block_size, work.cache_salt)
        request = DecodeRequest(work, gateway, now + work.budget_s, now, chain, pull)
        self.book.requests[work.request] = request
        if work.moving:
            self.scheduler.want(request, now)
            self._reserve()
            if request not in self.arrivals:
                message = "there is no room for the sequence at once; where it is, it can go on"
                self.book.fail(request, Cause.CAPACITY, message)
            else:
                self.book.ask_first_mask(request)
        elif pull is not None:
            request.enter(RequestEvent.ATTACH)
            vocab_size = self.engine.runner.config.vocab_size
            self.pulls.begin(pull, lambda tokens: first_tokens_fit(tokens, work, vocab_size))
        elif work.sampling.grammar is not None:
            request.enter(RequestEvent.MASK)
            self.scheduler.entrance.look_up(request)  # heartbeats tell how much of the prompt is not cached
            self.book.ask_first_mask(request)
        else:
            self.scheduler.want(request, now)

    def _sequence(self, message: AttachSequence) -> DecodeChoice | None:
        """The sequence that a sink asks for, if it is here."""
        request = self.book.requests.get(message.sequence.request)
        if request is None or request.key != message.sequence:
            return None
        return next((each for each in request.choices if each.sequence.choice == message.choice), None)

    def _on_abort(self, gateway: Incarnation, message: Abort) -> None:
        request = self.book.find(message.request)
        if request is None or request.gateway != gateway or request.work.attempt > message.attempt:
            return
        if message.choice is not None:
            for choice in [each for each in request.choices if each.sequence.choice == message.choice]:
                self.book.give_up(choice)
            return
        if message.request in self.book.finished:
            self.book.forget(request, "aborted")  # the gateway was sent its end
            return
        self.book.forget(request, "aborted", by_client=True)
        self.front.cancelled(gateway, request.key)

    def _on_ack(self, gateway: Incarnation, message: Ack) -> None:
        request = self.book.finished.get(message.request)
        if request is not None and (request.gateway, request.key) == (gateway, message.key):
            del self.book.finished[message.request]
            self.book.close(request)

    def _on_resend(self, gateway: Incarnation, message: Resend) -> None:
        request = self.book.find(message.request)
        if request is not None and (request.gateway, request.key) == (gateway, message.key):
            self.answers.again(request, message)

    def _on_mask(self, state: GrammarState, gave_up: GaveUp | None) -> None:
        """A sequence's next mask is known, or that of a request's tokens; or the grammar gave up."""
        subject = self._masks.made(state)
        if isinstance(subject, DecodeChoice):
            self.scheduler.entrance.mask_known(subject)
            if gave_up is not None and subject.stage is not ChoiceStage.ENDED:
                self.book.fail(subject.request, gave_up.cause, gave_up.why)
        elif subject is not None and gave_up is not None:
            self.book.fail(subject, gave_up.cause, gave_up.why)
        elif subject is not None and subject.state is RequestState.MASKING:
            self.scheduler.want(subject, self._agenda.now)

    # --- pulls ---------------------------------------------------------------------------------------------------

    def _on_pull_offered(self, pull: Pull, num_blocks: int) -> None:
        """The offer of a request, or of a stage of a moving sequence, is open: it waits for room."""
        if self.arrivals.reads_ahead(pull):
            self.arrivals.offered_ahead(pull, num_blocks)
            return
        request = self._pulling(pull)
        if request is None:
            return
        if request in self.arrivals:
            self.arrivals.offered(request, num_blocks)
            return
        expected = self._policy.blocks_for(len(request.work.token_ids))
        if num_blocks != expected:
            message = f"the source offers {num_blocks} blocks for a prompt of {expected}"
            self.pulls.abandon(pull, Cause.TRANSFER, message)
            return
        # The grammar is compiled while the source computes the prompt. Offers open in the order in which it does so.
        self.book.ask_first_mask(request)
        self.scheduler.want(request, self._agenda.now)

    def _on_pulled(self, pulled: Pulled) -> None:
        """The pulled blocks are valid: the request's choices begin."""
        if self.arrivals.reads_ahead(pulled.pull):
            self.arrivals.pulled_ahead(pulled.pull, pulled.block_ids)
            return
        request = self.book.requests[pulled.pull.key.request]
        request.prompt_times = pulled.pull.prompt_times
        self._masks.forget(request.grammar_state)  # the sequences ask anew, for all of their tokens
        self.scheduler.settled(request, pulled.block_ids, pulled.first_tokens, self._agenda.now)
        for choice in request.choices:
            if choice.finish_reason is not None:
                self.answers.tokens(choice)
            self.book.ask_mask(choice)

    def _on_pull_failed(self, pull: Pull, cause: Cause | None, message: str) -> None:
        """A pull has ended without valid blocks."""
        if self.arrivals.reads_ahead(pull):
            self.arrivals.gave_up_ahead(pull, cause, message)
            return
        request = self._pulling(pull)
        if request is None:
            return
        self.book.drop(request)
        request.enter(RequestEvent.END)
        if pull.ended_with:
            self.front.count("finished")
            self.answers.ended_at_source(request, pull.ended_with)
        elif cause is not None:
            self.front.refuse(request.gateway, request.key, cause, message)

    def _pulling(self, pull: Pull) -> DecodeRequest | None:
        """The open request that this pull is for."""
        request = self.book.requests.get(pull.key.request)
        return request if request is not None and request.pull is pull else None

    # --- leases --------------------------------------------------------------------------------------------------

    def _find_prefix(self, block_hashes: Sequence[BlockHash]) -> Sequence[int]:
        """Cached blocks that another worker may read, each with a reference for the lender."""
        if self.front.draining:
            self.scheduler.sequences.name_running()
        return self.scheduler.lend(block_hashes)

    def _on_unpinned(self, key: RequestKey, block_ids: Sequence[int], *, settled: bool) -> None:
        """The lease of a cut sequence has ended: another worker continues it, or none does. Then its request fails, but
        not while other sequences of it go on here."""
        choice = self.departures.unpinned(key, block_ids)
        if choice is None:
            return
        request = choice.request
        if settled or choice.given_up or any(each is not choice and each.goes_on for each in request.choices):
            self.departures.leave(choice, settled=settled)
            self.book.finish_if_ended(request)
        else:
            self.book.fail(request, Cause.LEASE_LOST, "a sequence was cut, and nobody has taken it over")

    # --- room ----------------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Let in what has room now."""
        for reservation in self.scheduler.reserve(self._agenda.now):
            pull = reservation.request.pull
            assert pull is not None, reservation.request.work
            if reservation.request.work.moving:
                self.arrivals.begin(reservation)
            else:
                self.pulls.reserve(pull, reservation.block_ids, reservation.num_held)

    def _on_tick(self) -> None:
        now = self._agenda.now
        for request in [request for request in self.book.requests.values() if request.deadline <= now]:
            state = "decoding"
            if not request.choices:
                state = request.state.value if request.pull is None else request.pull.state.value
            self.book.fail(request, Cause.DEADLINE, f"the request's time ran out in the decode worker, {state}")
        self.front.tick(now)

    # --- what others see (`common.worker.shell.Core`) ------------------------------------------------------------

    heartbeat = view.heartbeat
    counts = view.counts
    metrics = view.metrics

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.front.check_invariants()
        self.scheduler.check_invariants()
        assert all(request.state is RequestState.FINISHED for request in self.book.finished.values())
        here = {request for request in self.book.requests.values() if request.state in AT_ENTRANCE}
        assert here == self.scheduler.entrance.requests()
        for request in self.book.requests.values():
            assert (request.state is RequestState.RUNNING) == bool(request.choices), request.story
            masked = request.grammar_state in self._masks
            assert masked == (request.state is RequestState.MASKING) or request.pull is not None, request.story
            attaching = request.pull is not None and request.pull.state is PullState.ATTACHING
            assert attaching or request.state is not RequestState.ATTACHING, request.story
