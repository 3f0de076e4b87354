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

if TYPE_CHECKING:
    from decode_worker.core import DecodeCore

_SEQUENCE_WEIGHT = 0.1
"""EWMA weight of the newest sequence's duration."""


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
    drafted: int = 0
    """Drafted tokens."""
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    """Drafted tokens that were right, by their place in the draft."""
    block_steps: int = 0
    """Blocks in use, summed over the steps."""
    sequence_s: float = field(default=0.0)
    """EWMA of a sequence's duration here, in seconds from its first token to its last."""

    def verified(self, num_drafted: int, num_right: int) -> None:
        """A draft was verified; its first `num_right` tokens were right."""
        self.drafts += 1
        self.drafted += num_drafted
        for place in range(num_right):
            self.accepted_at[place] += 1

    def sequence_ended(self, took_s: float) -> None:
        """A sequence has had its last token, `took_s` seconds after its first."""
        self.sequence_s += (took_s - self.sequence_s) * (_SEQUENCE_WEIGHT if self.sequence_s else 1.0)


def heartbeat(core: DecodeCore, number: int) -> Heartbeat:
    """The present load. `blocks_used` is the forecast of the most blocks in use."""
    scheduler, requests = core.scheduler, core.book.requests.values()
    return Heartbeat(
        number=number,
        steps=core.engine.num_steps,
        running=scheduler.batch.num_running - scheduler.num_idle + len(scheduler.prompts),
        waiting=sum(not request.choices for request in requests),
        blocks_used=min(scheduler.num_expected, core.pool.num_blocks),
        blocks_total=core.pool.num_blocks,
        phase=core.front.phase,
        queued_tokens=by_tier((r.work.tier, scheduler.num_uncomputed_of(r)) for r in requests),
        sequences=by_tier((r.work.tier, len(r.work.choices)) for r in requests),
        places=scheduler.num_places,
        token_s=core.engine.costs.prefill_s_per_token,
        sequence_s=core.totals.sequence_s,
        prompt_tokens=core.totals.prompt,
        output_tokens=core.totals.generated,
    )


def counts(core: DecodeCore) -> Mapping[str, object]:
    """What the worker holds."""
    scheduler = core.scheduler
    return {
        **core.front.counts(),
        "host_blocks_used": scheduler.swap.num_used,
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
    model = {"model_name": name}
    yield gauge("vllm:num_requests_running", "Sequences in the batch.", scheduler.batch.num_running, model)
    yield gauge("vllm:num_requests_waiting", "Requests waiting for room.", scheduler.num_waiting, model)
    yield gauge("vllm:num_requests_swapped", "Preempted sequences.", len(scheduler.entrance.preempted), model)
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
    load = sum(len(request.work.choices) for request in core.book.requests.values()) / scheduler.num_places
    yield gauge("baton_decode_load", "Sequences here, those that wait included, by how many fit.", load)
    yield gauge("baton_blocks_expected", "Most blocks in use from now on, as forecast.", scheduler.num_expected)
    yield counter("baton_block_steps", "Blocks in use, summed over the engine's steps.", totals.block_steps)
    yield gauge("baton_host_blocks_used", "Blocks of host memory in use.", scheduler.swap.num_used)
    yield counter("baton_sequences_moved", "Sequences that went on elsewhere.", core.departures.num_moved)
    by_model = {"drafts": totals.drafts, "draft_tokens": totals.drafted, "accepted_tokens": sum(totals.accepted_at)}
    for what, number in by_model.items():
        text = f"Speculative decoding: {what.replace('_', ' ')}."
        yield counter(f"vllm:spec_decode_num_{what}", text, {name: number}, "model_name")
    by_place = {str(place): number for place, number in enumerate(totals.accepted_at)}
    yield counter("baton_draft_tokens_accepted", "Drafted tokens that were right.", by_place, "position")
    tail = core.arrivals.num_tail_blocks
    yield counter("baton_move_tail_blocks", "Blocks read while sequences stood still to come here.", tail)
    yield from core.front.metrics()
