"""What others see of a prefill worker: its load for gateways, its counts for probes, its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from common.contract.messages.session import Heartbeat
from common.runtime.probes import counter, gauge

if TYPE_CHECKING:
    from prefill_worker.core import PrefillCore


def heartbeat(core: PrefillCore, number: int) -> Heartbeat:
    """The present load."""
    scheduler = core.scheduler
    return Heartbeat(
        number=number,
        steps=core.engine.num_steps,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(scheduler.on_hold) + len(core.masks),
        blocks_used=core.pool.num_used,
        blocks_total=core.pool.num_blocks,
        phase=core.front.phase,
        queued_tokens=scheduler.queued_tokens,
        token_s=core.engine.costs.prompt_s_per_token,
        pulled_token_s=core.prefix_pulls.token_s,
        prompt_tokens=core.steps.num_computed,
    )


def counts(core: PrefillCore) -> Mapping[str, object]:
    """What the worker holds. At rest all counts but `blocks_total` and `blocks_cached` are zero."""
    scheduler = core.scheduler
    return {
        **core.front.counts(),
        "masking": len(core.masks),
        "waiting": len(scheduler.waiting),
        "on_hold": len(scheduler.on_hold),
        "running": len(scheduler.running),
        "pulling": core.pulls.num_pulls,
    }


def metrics(core: PrefillCore) -> Iterable[Metric]:
    """Prometheus metrics of this moment."""
    scheduler = core.scheduler
    name = core.settings.model
    running = {name: len(scheduler.running)}
    yield gauge("vllm:num_requests_running", "Prompts being computed.", running, "model_name")
    waiting = {name: len(scheduler.waiting) + len(scheduler.on_hold) + len(core.masks)}
    text = "Prompts waiting for blocks, for what another worker holds of them, or for their grammar."
    yield gauge("vllm:num_requests_waiting", text, waiting, "model_name")
    yield counter("baton_prompt_tokens_computed", "Prompt tokens computed here.", core.steps.num_computed)
    scored = core.steps.num_scored
    yield counter("baton_prompt_tokens_scored", "Prompt tokens whose log probabilities were told.", scored)
    queued = scheduler.num_uncomputed
    yield gauge("baton_prefill_queued_tokens", "Prompt tokens still to compute.", queued)
    yield gauge("baton_prefill_queued_seconds", "What computing them is expected to take.", scheduler.queued_s)
    queried, hit = {name: scheduler.num_prefix_queried}, {name: scheduler.num_prefix_hit}
    yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", queried, "model_name")
    yield counter("vllm:prefix_cache_hits", "Prompt tokens that were cached.", hit, "model_name")
    yield counter("baton_prefix_pulls", "Prefixes pulled from others, by end.", core.prefix_pulls.ended, "end")
    pulled = core.prefix_pulls.num_tokens_pulled
    yield counter("baton_prefix_tokens_pulled", "Prompt tokens pulled instead of computed.", pulled)
    yield from core.front.metrics()
