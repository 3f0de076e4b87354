"""What others see of a decode worker: its load for gateways, its counts for probes, its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from common.contract.messages.session import Heartbeat
from common.contract.tiers import by_tier
from common.runtime.config import MAX_DRAFT_TOKENS
from common.runtime.probes import counter, gauge
from decode_worker.request import RequestState

if TYPE_CHECKING:
    from decode_worker.core import DecodeCore

PROPOSERS = ("lookup", "draft")
"""What tells drafted tokens: the text, or the draft model."""
_SEQUENCE_WEIGHT = 0.1
"""EWMA weight of the newest sequence's duration."""
_STEP_WEIGHT = 0.1
"""EWMA weight of the last step's mean time between tokens."""


def _by_place() -> dict[str, list[int]]:
    return {proposer: [0] * MAX_DRAFT_TOKENS for proposer in PROPOSERS}


@dataclass(slots=True)
class DecodeTotals:
    """Numbers that grow over the worker's life."""

    generated: int = 0
    """Tokens generated here."""
    prompt: int = 0
    """Prompt tokens computed here."""
    scored: int = 0
    """Prompt tokens whose log probabilities were told."""
    recomputed: int = 0
    """Tokens computed again after a preemption."""
    drafts: int = 0
    """Sequences that had drafted tokens, summed over the steps."""
    accepted_at: dict[str, list[int]] = field(default_factory=_by_place)
    """Drafted tokens that were right, by their proposer and their place in the draft."""
    drafted_by: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROPOSERS, 0))
    """Drafted tokens by their proposer."""
    draft_s: float = 0.0
    """What the draft model's passes took, in seconds."""
    block_steps: int = 0
    """Blocks in use, summed over the steps."""
    sequence_s: float = 0.0
    """EWMA of the duration here of sequences that ended as their clients wanted, in seconds from the first token."""
    itl_s: float = 0.0
    """EWMA of the mean seconds between a sequence's tokens, over the steps in which sequences got some."""

    def verified(self, proposer: str, num_drafted: int, num_right: int) -> None:
        """A draft was verified; its first `num_right` tokens were right."""
        self.drafts += 1
        self.drafted_by[proposer] += num_drafted
        for place in range(num_right):
            self.accepted_at[proposer][place] += 1

    def step_ended(self, token_s: float) -> None:
        """A step has ended in which sequences got tokens, one every `token_s` in the mean."""
        self.itl_s += (token_s - self.itl_s) * (_STEP_WEIGHT if self.itl_s else 1.0)

    def sequence_ended(self, took_s: float) -> None:
        """A sequence has ended by itself, or by an Abort, `took_s` seconds after its first token."""
        self.sequence_s += (took_s - self.sequence_s) * (_SEQUENCE_WEIGHT if self.sequence_s else 1.0)


def heartbeat(core: DecodeCore, number: int) -> Heartbeat:
    """The present load. `blocks_used` is the forecast of the most blocks in use."""
    scheduler, requests = core.scheduler, core.book.requests.values()
    return Heartbeat(
        number=number,
        steps=core.engine.num_steps,
        running=scheduler.batch.num_running - scheduler.num_idle + len(scheduler.prompts),
        waiting=scheduler.num_waiting,
        blocks_used=min(scheduler.num_expected, core.pool.num_blocks),
        blocks_total=core.pool.num_blocks,
        phase=core.front.phase,
        queued_tokens=by_tier((r.work.tier, scheduler.num_uncomputed_of(r)) for r in requests),
        sequences=by_tier((r.work.tier, r.num_going_on) for r in requests),
        places=scheduler.num_places,
        token_s=core.engine.costs.prompt_s_per_token,
        sequence_s=core.totals.sequence_s,
        itl_s=core.totals.itl_s if scheduler.batch.num_running else 0.0,
        prompt_tokens=core.totals.prompt,
        output_tokens=core.totals.generated,
    )


def counts(core: DecodeCore) -> Mapping[str, object]:
    """What the worker holds. At rest all counts but `blocks_total` and `blocks_cached` are zero."""
    scheduler = core.scheduler
    return {
        **core.front.counts(),
        "host_blocks_used": scheduler.swap.num_used,
        "draft_blocks_used": _num_draft_blocks(core),
        "waiting": scheduler.num_waiting,
        "pulling": len(scheduler.entrance.reserved),
        "computing": len(scheduler.prompts),
        "running": scheduler.batch.num_running,
        "preempted": len(scheduler.entrance.preempted),
        "unacknowledged": len(core.book.finished),
    }


def metrics(core: DecodeCore) -> Iterable[Metric]:
    """Prometheus metrics of this moment."""
    scheduler, totals = core.scheduler, core.totals
    name = core.settings.model
    for state, text, number in (
        ("running", "Sequences in the batch.", scheduler.batch.num_running),
        ("waiting", "Requests waiting for room.", scheduler.num_waiting),
        ("swapped", "Preempted sequences.", len(scheduler.entrance.preempted)),
    ):
        yield gauge(f"vllm:num_requests_{state}", text, {name: number}, "model_name")
    preempted = {"swap": scheduler.swap.num_swapped, "recompute": scheduler.preemption.num_recomputed}
    yield counter("vllm:num_preemptions", "Preemptions.", {name: sum(preempted.values())}, "model_name")
    yield counter("baton_preemptions", "Preemptions by kind.", preempted, "kind")
    revoked = scheduler.preemption.num_revoked
    yield counter("baton_reservations_revoked", "Reservations taken back before their first read.", revoked)
    queried, hit = {name: scheduler.entrance.num_prefix_queried}, {name: scheduler.entrance.num_prefix_hit}
    yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", queried, "model_name")
    yield counter("vllm:prefix_cache_hits", "Prompt tokens that were cached.", hit, "model_name")
    yield counter("baton_tokens_generated", "Tokens generated here.", totals.generated)
    yield counter("baton_prompt_tokens_computed", "Prompt tokens computed here.", totals.prompt)
    yield counter("baton_prompt_tokens_scored", "Prompt tokens whose log probabilities were told.", totals.scored)
    yield counter("baton_tokens_recomputed", "Tokens computed again after a preemption.", totals.recomputed)
    # While a request is attaching, its prompt waits at the source, and more decode workers would not help it.
    here = (request for request in core.book.requests.values() if request.state is not RequestState.ATTACHING)
    load = sum(request.num_going_on for request in here) / scheduler.num_places
    yield gauge("baton_decode_load", "Sequences here, with those that wait for room, by how many fit.", load)
    yield gauge("baton_blocks_expected", "Most blocks in use from now on, as forecast.", scheduler.num_expected)
    yield counter("baton_block_steps", "Blocks in use, summed over the engine's steps.", totals.block_steps)
    yield gauge("baton_host_blocks_used", "Blocks of host memory in use.", scheduler.swap.num_used)
    yield gauge("baton_batch_bound", "Most sequences that may run now.", scheduler.bound.num)
    yield counter("baton_sequences_moved", "Sequences that went on elsewhere.", core.departures.num_moved)
    yield from _draft_metrics(core, name)
    tail = core.arrivals.num_tail_blocks
    yield counter("baton_move_tail_blocks", "Blocks read while sequences stood still to come here.", tail)
    yield from core.front.metrics()


def _draft_metrics(core: DecodeCore, name: str) -> Iterable[Metric]:
    totals = core.totals
    num_accepted = sum(map(sum, totals.accepted_at.values()))
    numbers = {
        "drafts": totals.drafts,
        "draft_tokens": sum(totals.drafted_by.values()),
        "accepted_tokens": num_accepted,
    }
    for what, number in numbers.items():
        text = f"Speculative decoding: {what.replace('_', ' ')}."
        yield counter(f"vllm:spec_decode_num_{what}", text, {name: number}, "model_name")
    yield counter("baton_draft_tokens", "Drafted tokens.", totals.drafted_by, "proposer")
    by_place = {(by, str(place)): num for by, nums in totals.accepted_at.items() for place, num in enumerate(nums)}
    yield counter("baton_draft_tokens_accepted", "Drafted tokens that were right.", by_place, "proposer", "position")
    speculation = core.scheduler.speculation
    model = None if speculation is None else speculation.model
    caught_up = 0 if model is None else model.num_caught_up
    yield counter("baton_draft_tokens_caught_up", "Tokens that the draft model computed to draft later.", caught_up)
    yield counter("baton_draft_seconds", "Time in the passes of the draft model.", totals.draft_s)
    yield gauge("baton_draft_blocks_used", "Blocks of the draft model's KV cache in use.", _num_draft_blocks(core))


def _num_draft_blocks(core: DecodeCore) -> int:
    speculation = core.scheduler.speculation
    return 0 if speculation is None or speculation.model is None else speculation.model.cache.num_used
