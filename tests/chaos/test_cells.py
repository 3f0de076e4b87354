"""Every fault, in every state of the handoff, to either worker: the stream goes on with the same tokens.

Each state is reached by a gate (`chaos.staged_worker`), not by luck, and each fault is checked to have happened. The
answers are compared with those of the same workers before anything has happened to them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from stack import BLOCK_BYTES, BLOCK_SIZE, Answer, answer, avoided, generation, prompt, until

from chaos.net import why_not
from chaos.theatre import CHUNK, FAULTS, Actor, Theatre, theatre
from common.contract.messages import Role
from gateway.dispatcher import Dispatcher
from gateway.registry import Registry

STATES = ("queued", "mid-chunk", "offered", "pulling", "settling", "running", "finishing")
IN_SHORT = {"freeze": STATES, "kill": ("mid-chunk", "pulling", "settling", "running")}
"""What is in `make test`: these, and every fault while a sequence runs."""
NUM_BLOCKS = 64
PROMPT = prompt(1, 5 * CHUNK + 7)
FILLER = prompt(2, 8 * CHUNK + 3)
BIG_FILLER = prompt(3, (NUM_BLOCKS - 20) * BLOCK_SIZE)
SAMPLING: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}

_salts = itertools.count()

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def _transports() -> list[Any]:
    return [pytest.param("nixl"), *(pytest.param(wire, marks=pytest.mark.chaos) for wire in ("nixl-tcp", "zmq"))]


@pytest.fixture(scope="module", params=_transports())
def stage(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Theatre]:
    size = ("--kv-cache-bytes", str(NUM_BLOCKS * BLOCK_BYTES))
    with theatre(checkpoint("llama"), tmp_path_factory.mktemp("stage"), request.param, options=size) as made:
        yield made


@pytest.fixture(scope="module")
def references(stage: Theatre) -> dict[str, Any]:
    """Answers of undisturbed workers, once they are known."""
    return {}


def cells() -> list[Any]:
    made = []
    for fault in FAULTS:
        for state in STATES:
            for role in (Role.PREFILL, Role.DECODE):
                marks = () if state in IN_SHORT.get(fault, ("running",)) else pytest.mark.chaos
                made.append(pytest.param(fault, state, role, marks=marks, id=f"{fault}-{state}-{role.value}"))
    return made


@asynccontextmanager
async def reached(
    state: str, stage: Theatre, dispatcher: Dispatcher, registry: Registry
) -> AsyncIterator[tuple[list[asyncio.Task[Answer]], tuple[Actor, str]]]:
    """A request in this state on P1 and D1: the requests under way, the target first, and the gate that holds it."""
    p1, d1 = stage.p1, stage.d1
    others: list[asyncio.Task[Answer]] = []

    def ask(token_ids: list[int], **sampling: Any) -> asyncio.Task[Answer]:
        # Under a salt of its own, so that nothing of it is cached.
        work = generation(token_ids, cache_salt=str(next(_salts)), **(SAMPLING | sampling))
        return asyncio.create_task(answer(dispatcher, work))

    with avoided(registry, stage.p2.process, *[stage.d2.process] * 4):  # with the fillers, D1 is busy too
        in_a_row = 0
        while in_a_row < 3:  # what is left of the last fault between the two shows here: a broken connection, say
            before = sum(dispatcher.recovery.failovers.values())
            await ask(FILLER[:40])
            in_a_row = in_a_row + 1 if sum(dispatcher.recovery.failovers.values()) == before else 0
        match state:
            case "queued":
                p1.close("step")
                others = [ask(FILLER)]
                await until(lambda: p1.waiting("step") == 1, "the filler is not computed")
                held, gate = (lambda: p1.state()["waiting"] == 1), (p1, "step")
            case "mid-chunk":
                p1.close("step", skip=2)
                held, gate = (lambda: p1.waiting("step") == 1 and p1.state()["running"] == 1), (p1, "step")
            case "offered":
                d1.close("step", skip=2)
                others = [ask(BIG_FILLER)]
                await until(lambda: d1.waiting("step") == 1, "the filler does not run")
                held = lambda: d1.state()["waiting"] == 1 and p1.state()["leases"] == 1  # noqa: E731
                gate = (d1, "step")
            case "pulling":
                d1.close("read")
                held, gate = (lambda: d1.waiting("read") > 0 and d1.state()["pulling"] == 1), (d1, "read")
            case "settling":
                p1.close("Settled")
                held, gate = (lambda: p1.waiting("Settled") == 1), (p1, "Settled")
            case "running":
                d1.close("step", skip=6)
                held, gate = (lambda: d1.waiting("step") == 1 and d1.state()["running"] == 1), (d1, "step")
            case _:
                d1.close("LastTokens")
                held, gate = (lambda: d1.waiting("LastTokens") == 1), (d1, "LastTokens")
        tasks = [ask(PROMPT), *others]
        await until(held, f"{state} was not reached")
    yield tasks, gate


@pytest.mark.parametrize(("fault", "state", "role"), cells())
async def test_the_stream_goes_on(
    stage: Theatre, references: dict[str, Any], fault: str, state: str, role: Role
) -> None:
    stage.revive()
    async with stage.dispatcher(patience_s=20.0) as (dispatcher, registry):
        if not references:
            for name, token_ids in (("target", PROMPT), ("filler", FILLER), ("big", BIG_FILLER)):
                references[name] = (await answer(dispatcher, generation(token_ids, **SAMPLING))).tokens
        victim = stage.p1 if role is Role.PREFILL else stage.d1
        incarnation = registry.workers[victim.address].incarnation
        async with reached(state, stage, dispatcher, registry) as (tasks, (holder, gate)):
            happening = FAULTS[fault]()
            happening.begin(victim)
            try:
                if happening.silences:
                    worker = registry.workers[victim.address]
                    await until(lambda: worker.incarnation != incarnation, "the gateway does not notice")
                if holder is not victim or fault not in ("kill", "freeze"):
                    holder.open(gate)
                expected = [references["target"]]
                expected += [references["filler" if state == "queued" else "big"]] * (len(tasks) - 1)
                async with asyncio.timeout(60):
                    answers = await asyncio.gather(*tasks)
                assert [each.tokens for each in answers] == expected
                assert all(each.reasons == ["length"] for each in answers)
            finally:
                happening.end(victim)
                for task in tasks:
                    task.cancel()
        if fault == "freeze":
            holder.open(gate)  # it wakes, and goes on where it was
        stage.revive()
        await until(lambda: all(w.usable for w in registry.workers.values()), "a worker does not come back")
    stage.workers().wait_for_baseline()
