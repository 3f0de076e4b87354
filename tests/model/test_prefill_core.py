"""The prefill worker's core, driven by events, without the world around it."""

from __future__ import annotations

from handoff_bounds import BLOCK_SIZE
from handoff_worker import _REGION, _WELCOME, PREFILL, Facts

from common.contract.ids import Incarnation, RequestId
from common.contract.messages.gateway import Prefill, PrefixHint, Source
from common.contract.sampling import SamplingParams
from common.worker.events import Compute, HelloReceived, Received, StepWanted
from kv_transfer.events import SourceOpened
from prefill_worker.core import PrefillCore


def test_a_prompt_whose_prefix_cannot_be_pulled_is_computed_in_the_same_step() -> None:
    """The pull ends as it begins, since another worker has the address now. No other event wakes the worker."""
    settings = PREFILL[1].model_copy(update={"prefix_cache": True, "pull_prefixes": "always"})
    core = PrefillCore(settings, Incarnation("p0"), Facts(16), _REGION)  # type: ignore[arg-type]
    gateway = Incarnation("gateway")
    core.handle(HelloReceived(gateway, frozenset()), 0.0)
    core.handle(SourceOpened("d:1", Incarnation("new"), _WELCOME), 0.0)
    num_tokens = 4 * BLOCK_SIZE
    work = Prefill(
        request=RequestId("r"),
        attempt=1,
        token_ids=tuple(range(num_tokens)),
        prompt_len=num_tokens,
        choices=(0,),
        sampling=SamplingParams(max_tokens=2),
        budget_s=60.0,
        prefix=PrefixHint(
            source=Source(address="d:1", incarnation=Incarnation("old")), num_tokens=num_tokens - BLOCK_SIZE
        ),
    )
    core.handle(Received(gateway, work), 0.0)
    planned = [each for each in core.handle(StepWanted(None), 0.0) if isinstance(each, Compute)]
    assert [len(each.token_ids) for compute in planned for each in compute.work.slices] == [num_tokens]
    core.check_invariants()
