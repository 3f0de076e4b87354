"""Prompts that wait in a prefill worker: how long for others, and what is said of them if their time runs out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handoff_bounds import BLOCK_SIZE
from test_prefill_core import GATEWAY, held_by, planned, prefill_core

from common.contract.ids import RequestId
from common.contract.messages.gateway import Prefill
from common.contract.messages.worker import Failed
from common.worker.events import Received, StepWanted, Ticked
from kv_transfer.events import Send


def prompt(
    name: str, *, pulled: bool, source: str = "holder", grammar: str | None = None, budget_s: float = 60.0
) -> Prefill:
    """A prompt that begins like no other one. If `pulled`, the worker `source` holds all but its last block."""
    made, number = held_by(source), sum(name.encode())
    return replace(
        made,
        request=RequestId(name),
        token_ids=tuple(1000 * number + token for token in made.token_ids),
        prefix=made.prefix if pulled else None,
        sampling=replace(made.sampling, grammar=grammar),
        budget_s=budget_s,
    )


@pytest.mark.parametrize(("source", "held"), [("other", True), ("holder", False)])
def test_a_prompt_does_not_wait_for_others_whose_pulls_hang(source: str, held: bool) -> None:
    """Their source does not answer. Two of them are all that two steps compute. One behind them is put on hold only if
    another source holds its prefix; else it is computed."""
    core = prefill_core(
        prefix_cache=True, pull_prefixes="always", pull_patience_s=1.0, chunk_size=BLOCK_SIZE, token_budget=BLOCK_SIZE
    )
    for name in "ab":
        core.handle(Received(GATEWAY, prompt(name, pulled=True)), 0.0)
    core.handle(Received(GATEWAY, prompt("c", pulled=True, source=source)), 0.0)
    assert planned(core) == []
    assert (len(core.scheduler.on_hold), len(core.scheduler.waiting)) == (2, 1)
    core.handle(StepWanted(None), 1.0)
    assert (len(core.scheduler.on_hold), len(core.scheduler.running)) == ((3, 0) if held else (2, 1))
    core.check_invariants()


def test_it_is_said_for_what_a_prompt_waited_whose_time_ran_out() -> None:
    core = prefill_core(prefix_cache=True, pull_prefixes="always", pull_patience_s=60.0)
    masking = prompt("a", pulled=False, grammar='start: "a"', budget_s=1.0)
    for work in (masking, prompt("b", pulled=True, budget_s=1.0), prompt("c", pulled=False, budget_s=1.0)):
        core.handle(Received(GATEWAY, work), 0.0)
    assert len(planned(core)) == 1
    core.handle(Received(GATEWAY, prompt("d", pulled=False, budget_s=1.0)), 0.0)
    told = [each.message for each in core.handle(Ticked(), 1.0) if isinstance(each, Send)]
    states = {each.request: each.message.split()[-1] for each in told if isinstance(each, Failed)}
    assert states == {"a": "masking", "b": "on_hold", "c": "running", "d": "waiting"}
    assert not core.requests
    core.check_invariants()
