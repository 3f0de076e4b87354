"""The prefill worker's core, driven by events, without the world around it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handoff_bounds import BLOCK_SIZE
from handoff_worker import _REGION, _WELCOME, PREFILL, Facts

from common.contract.block_hashes import block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.gateway import Abort, Drain, Prefill, PrefixHint, Resume, Source
from common.contract.messages.handoff import Attach, Detach, OfferWithdrawn
from common.contract.messages.worker import Failed, TokenScores
from common.contract.sampling import SamplingParams
from common.engine.batch import Chosen, InvalidLogitsError, Sampled, SampledToken, StepResult
from common.scheduling.costs import Costs
from common.worker.events import (
    Action,
    DrainWanted,
    HelloReceived,
    PeerLost,
    PlannedStep,
    Received,
    StepEnded,
    StepWanted,
    Ticked,
)
from kv_transfer.events import Send, SourceLost, SourceOpened
from prefill_worker.core import PrefillCore
from prefill_worker.view import heartbeat, metrics

GATEWAY = Incarnation("gateway")
_NUM_TOKENS = 4 * BLOCK_SIZE
_PROMPT = Prefill(
    request=RequestId("r"),
    attempt=1,
    token_ids=tuple(range(_NUM_TOKENS)),
    prompt_len=_NUM_TOKENS,
    choices=(0,),
    sampling=SamplingParams(max_tokens=2),
    budget_s=60.0,
)


def prefill_core(costs: Costs | None = None, **settings: object) -> PrefillCore:
    """A core that a gateway has connected to."""
    facts = Facts(16)
    facts.costs = costs or facts.costs
    core = PrefillCore(PREFILL[1].model_copy(update=settings), Incarnation("p0"), facts, _REGION)  # type: ignore[arg-type]
    core.handle(HelloReceived(GATEWAY, frozenset()), 0.0)
    return core


def held_by(incarnation: str) -> Prefill:
    """The prompt, all of which but for its last block that worker holds."""
    source = Source(address="d:1", incarnation=Incarnation(incarnation))
    return replace(_PROMPT, prefix=PrefixHint(source=source, num_tokens=_NUM_TOKENS - BLOCK_SIZE))


@pytest.mark.parametrize("drained_before", [False, True])
def test_a_worker_that_is_leaving_does_not_take_work_again(drained_before: bool) -> None:
    core = prefill_core()
    core.handle(Received(GATEWAY, Drain()), 0.0)
    core.handle(Received(GATEWAY, Resume()), 0.0)
    assert not core.front.draining
    if drained_before:
        core.handle(Received(GATEWAY, Drain()), 0.0)
    core.handle(DrainWanted(), 0.0)
    core.handle(Received(GATEWAY, Resume()), 0.0)
    assert core.front.draining


def planned(core: PrefillCore) -> list[int]:
    """Numbers of tokens of the next step."""
    steps = [each for each in core.handle(StepWanted(None), 0.0) if isinstance(each, PlannedStep)]
    return [len(each.token_ids) for step in steps for each in step.slices]


def compute(core: PrefillCore, sampled: Sampled) -> list[Action]:
    """Plan a step of one slice, and end it with this outcome; what follows."""
    (step,) = (each for each in core.handle(StepWanted(None), 0.0) if isinstance(each, PlannedStep))
    result = StepResult(
        outcomes=[(sampled,)], scores=[TokenScores()], chosen=Chosen([], {}), duration_s=0.01, between_s=0.0
    )
    return core.handle(StepEnded(step, result, ()), 0.0)


def test_a_prompt_whose_prefix_cannot_be_pulled_is_computed_in_the_same_step() -> None:
    """The pull ends as it begins, since another worker has the address now. No other event wakes the worker."""
    core = prefill_core(prefix_cache=True, pull_prefixes="always")
    core.handle(SourceOpened("d:1", Incarnation("new"), _WELCOME), 0.0)
    core.handle(Received(GATEWAY, held_by("old")), 0.0)
    assert planned(core) == [_NUM_TOKENS]
    assert core.prefix_pulls.ended == {"pulled": 0, "gave_up": 1}
    core.check_invariants()


def test_a_prompt_does_not_wait_for_a_source_that_the_one_before_could_not_reach() -> None:
    core = prefill_core(prefix_cache=True, pull_prefixes="always")
    core.handle(Received(GATEWAY, held_by("holder")), 0.0)
    assert planned(core) == []
    core.handle(SourceLost("d:1", None, Cause.WORKER_LOST, "it never answered"), 0.0)
    other = tuple(range(1000, 1000 + _NUM_TOKENS))
    core.handle(Received(GATEWAY, replace(held_by("holder"), request=RequestId("r2"), token_ids=other)), 0.0)
    assert planned(core) == [_NUM_TOKENS] * 2
    assert core.prefix_pulls.ended == {"pulled": 0, "gave_up": 1}
    core.check_invariants()


def test_no_prompt_waits_for_what_is_pulled_for_another() -> None:
    """Each pulls for itself, or is computed."""
    core = prefill_core(prefix_cache=True, pull_prefixes="always")
    core.handle(SourceOpened("d:1", Incarnation("holder"), _WELCOME), 0.0)
    for name in "ab":
        core.handle(Received(GATEWAY, replace(held_by("holder"), request=RequestId(name))), 0.0)
    assert planned(core) == []
    assert (len(core.prefix_pulls), len(core.scheduler.waiting)) == (2, 0)
    core.handle(Received(GATEWAY, replace(_PROMPT, request=RequestId("c"))), 0.0)
    assert planned(core) == [_NUM_TOKENS]
    core.check_invariants()


def test_what_is_pulled_is_not_told_as_work_that_is_queued() -> None:
    """Neither before the pull nor while it is under way. If it fails, it is."""
    core = prefill_core(prefix_cache=True, pull_prefixes="always")
    core.handle(Received(GATEWAY, held_by("holder")), 0.0)
    assert heartbeat(core, 0).queued_tokens == (0, BLOCK_SIZE, 0)
    assert planned(core) == []
    assert heartbeat(core, 1).queued_tokens == (0, BLOCK_SIZE, 0)
    core.handle(SourceLost("d:1", None, Cause.WORKER_LOST, "it never answered"), 0.0)
    assert heartbeat(core, 2).queued_tokens == (0, _NUM_TOKENS, 0)
    core.check_invariants()


def test_an_attempt_that_a_newer_one_supersedes_is_counted() -> None:
    core = prefill_core()
    for attempt in (1, 2):
        core.handle(Received(GATEWAY, replace(_PROMPT, attempt=attempt)), 0.0)
    (ended,) = (each for each in core.front.metrics() if each.name == "baton_requests_ended")
    assert {each.labels["end"]: each.value for each in ended.samples} == {"superseded": 1}
    core.check_invariants()


def test_a_prompt_that_waits_for_its_grammar_waits() -> None:
    core = prefill_core()
    sampling = replace(_PROMPT.sampling, grammar='start: "a"')
    core.handle(Received(GATEWAY, replace(_PROMPT, sampling=sampling)), 0.0)
    assert heartbeat(core, 0).waiting == core.counts()["masking"] == 1
    waiting = next(each for each in metrics(core) if each.name == "vllm:num_requests_waiting")
    assert [each.value for each in waiting.samples] == [1]
    core.check_invariants()


def test_a_pull_whose_client_leaves_does_not_count_as_given_up() -> None:
    """Nothing is computed in its place."""
    core = prefill_core(prefix_cache=True, pull_prefixes="always")
    core.handle(SourceOpened("d:1", Incarnation("holder"), _WELCOME), 0.0)
    core.handle(Received(GATEWAY, held_by("holder")), 0.0)
    assert planned(core) == []
    assert len(core.prefix_pulls) == 1
    core.handle(Received(GATEWAY, Abort(request=_PROMPT.request, attempt=_PROMPT.attempt)), 0.0)
    assert len(core.prefix_pulls) == 0
    assert core.prefix_pulls.ended == {"pulled": 0, "gave_up": 0}
    core.check_invariants()


@pytest.mark.parametrize(("step_s", "pulled"), [(1.0, True), (1e-3, False)])
def test_a_prefix_is_pulled_if_steps_would_take_longer(step_s: float, pulled: bool) -> None:
    """Even if tokens seem to cost nothing beside the fixed time of their steps."""
    costs = Costs(prefill_s_per_token=0.0, step_s=step_s, step_tokens=_NUM_TOKENS)
    core = prefill_core(costs, prefix_cache=True, pull_prefixes="cost")
    core.handle(SourceOpened("d:1", Incarnation("holder"), _WELCOME), 0.0)
    core.handle(Received(GATEWAY, held_by("holder")), 0.0)
    assert planned(core) == ([] if pulled else [_NUM_TOKENS])


def test_what_is_told_of_a_prompt_token_includes_its_part_of_a_step() -> None:
    """Whether it is computed or pulled, and in the metric by which the pool is scaled."""
    core = prefill_core(Costs(prefill_s_per_token=1e-4, step_s=1e-2, step_tokens=100), pull_prefixes="never")
    told = heartbeat(core, 0)
    assert (told.token_s, told.pulled_token_s) == pytest.approx((2e-4, 2e-4))
    core.handle(Received(GATEWAY, _PROMPT), 0.0)
    queued = next(each for each in metrics(core) if each.name == "baton_prefill_queued_seconds")
    assert [each.value for each in queued.samples] == pytest.approx([_NUM_TOKENS * 2e-4])


def test_a_step_tells_how_deep_its_tokens_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, ...]] = []
    monkeypatch.setattr(Costs, "observe_prefill", lambda _, *observed: seen.append(observed))
    core = prefill_core(chunk_size=BLOCK_SIZE)
    core.handle(Received(GATEWAY, _PROMPT), 0.0)
    for _ in range(4):
        compute(core, SampledToken(5))
    assert seen == [(BLOCK_SIZE, 0.01, BLOCK_SIZE * start) for start in range(0, _NUM_TOKENS, BLOCK_SIZE)]


def test_a_worker_on_a_gpu_takes_pulls_to_be_fast_at_first() -> None:
    told = [heartbeat(prefill_core(device=device), 0).pulled_token_s for device in ("cpu", "cuda")]
    assert told[0] == pytest.approx(10 * told[1])


def test_kv_after_which_logits_are_no_numbers_is_not_found_again() -> None:
    """Whoever found it would fail in the same way, and would be sent where it is."""
    core = prefill_core(prefix_cache=True)
    core.handle(Received(GATEWAY, _PROMPT), 0.0)
    compute(core, InvalidLogitsError("NaN"))
    assert not core.requests
    assert core.pool.match(block_hashes(_PROMPT.token_ids, BLOCK_SIZE)) == []
    core.check_invariants()


def test_the_end_of_an_offer_is_told_of_the_attempt_that_the_gateway_knows_here() -> None:
    """Decode workers of later attempts attach to it; at this worker the gateway knows the first alone."""
    core = prefill_core()
    core.handle(Received(GATEWAY, _PROMPT), 0.0)
    compute(core, SampledToken(5))
    sink, later = Incarnation("sink"), _PROMPT.attempt + 1
    core.handle(HelloReceived(sink, frozenset()), 0.0)
    core.handle(Received(sink, Attach(request=_PROMPT.request, attempt=later, offered=_PROMPT.attempt)), 0.0)
    core.handle(Received(sink, Detach(request=_PROMPT.request, attempt=later)), 0.0)
    told = [each.message for each in core.handle(Ticked(), 50.0) if isinstance(each, Send) and each.peer == GATEWAY]
    (failed,) = (each for each in told if isinstance(each, Failed))
    assert (failed.attempt, failed.cause) == (_PROMPT.attempt, Cause.LEASE_LOST)
    core.check_invariants()


def test_no_sink_waits_for_a_prompt_that_was_refused() -> None:
    """Its gateway may have sent it before it heard of the refusal."""
    core, sink = prefill_core(), Incarnation("sink")
    core.handle(DrainWanted(), 0.0)
    refused = core.handle(Received(GATEWAY, _PROMPT), 0.0)
    assert [each.message.cause for each in refused if isinstance(each, Send) and isinstance(each.message, Failed)] == [
        Cause.DRAINING
    ]
    core.handle(HelloReceived(sink, frozenset()), 0.0)
    attach = Attach(request=_PROMPT.request, attempt=2, offered=_PROMPT.attempt)
    [told] = [each.message for each in core.handle(Received(sink, attach), 0.0) if isinstance(each, Send)]
    assert isinstance(told, OfferWithdrawn)
    assert told.cause is Cause.LEASE_LOST
    core.check_invariants()


def test_a_worker_that_loses_its_gateway_is_no_bad_source_for_who_reads_from_it() -> None:
    """The reader may tell the same gateway, which has stood still, and is not to blame either of them."""
    core, reader = prefill_core(), Incarnation("reader")
    core.handle(HelloReceived(reader, frozenset()), 0.0)
    core.handle(Received(GATEWAY, _PROMPT), 0.0)
    assert planned(core) == [_NUM_TOKENS]
    core.handle(Received(reader, Attach(request=_PROMPT.request, attempt=1, offered=1)), 0.0)
    actions = core.handle(PeerLost(GATEWAY), 0.0)
    told = [(each.peer, each.message) for each in actions if isinstance(each, Send)]
    assert [(peer, each.cause) for peer, each in told if isinstance(each, OfferWithdrawn)] == [
        (reader, Cause.LEASE_LOST)
    ]
    core.check_invariants()


def test_open_requests_that_end_with_their_gateway_are_counted() -> None:
    """And those that it has lost."""
    core = prefill_core()
    for name in "abc":
        core.handle(Received(GATEWAY, replace(_PROMPT, request=RequestId(name))), 0.0)
    for event, num_cancelled in (
        (HelloReceived(GATEWAY, frozenset(RequestKey(RequestId(name), 1) for name in "ab")), 1),
        (PeerLost(GATEWAY), 3),
    ):
        core.handle(event, 0.0)
        (ended,) = (each for each in metrics(core) if each.name == "baton_requests_ended")
        assert {each.labels["end"]: each.value for each in ended.samples} == {"cancelled": num_cancelled}
    core.check_invariants()


def test_a_gateway_is_told_of_a_failure_before_the_reader_is() -> None:
    """The reader passes it on as the loss of its source, which the gateway would take for a path that is cut."""
    core, reader = prefill_core(), Incarnation("reader")
    core.handle(HelloReceived(reader, frozenset()), 0.0)
    core.handle(Received(GATEWAY, _PROMPT), 0.0)
    core.handle(Received(reader, Attach(request=_PROMPT.request, attempt=1, offered=1)), 0.0)
    actions = compute(core, InvalidLogitsError("NaN"))
    told = [(each.peer, type(each.message)) for each in actions if isinstance(each, Send)]
    ends = [each for each in told if each[1] in (Failed, OfferWithdrawn)]
    assert ends == [(GATEWAY, Failed), (reader, OfferWithdrawn)]
