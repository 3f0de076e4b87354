"""Every fault, in every state of the handoff, to either worker: the stream goes on with the same tokens.

Each state is reached by a gate (`chaos.staged_worker`), not by luck, and each fault is checked to have happened. The
answers are compared with those of the same workers before anything has happened to them, and what is computed and tried
again with what docs/faults.md says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from needs import needs
from stack import BLOCK_BYTES, BLOCK_SIZE, Answer, Process, Workers, answer, avoided, generation, prompt, until

from chaos.client import Outcome, ask
from chaos.theatre import (
    CHUNK,
    FAULTS,
    PULSE,
    RANK_FAULTS,
    Actor,
    Theatre,
    begun_anew_if_collapsed,
    lose_if_silent,
    theatre,
)
from common.contract.errors import Cause
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Decode, Prefill
from common.contract.messages.session import Role
from common.runtime.channel import ends
from gateway.dispatch.broken_paths import BrokenPaths
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import GenerationFailed
from gateway.workers.registry import Registry

STATES = ("queued", "mid-chunk", "offered", "pulling", "settling", "running", "finishing")
UNTIL_PULLED, UNTIL_SETTLED = STATES[:4], STATES[:5]
IN_SHORT = {"freeze": STATES, "kill": ("mid-chunk", "pulling", "settling", "running")}
"""What is in `make test`: these, and every fault while a sequence runs."""
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "seed": 5}
MOVING_IN_SHORT = (("kill", "cut", "source"), ("freeze", "moving", "sink"), ("part", "moving", "source"))
GATEWAYS_IN_SHORT = (("kill", "pulling"), ("freeze", "running"))
COMPUTED = "baton_prompt_tokens_computed_total"
NUM_BLOCKS = 64
PROMPT = prompt(1, 5 * CHUNK + 7)
FILLER = prompt(2, 8 * CHUNK + 3)
BIG_FILLER = prompt(3, (NUM_BLOCKS - 20) * BLOCK_SIZE)
SAMPLING: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}

_salts = itertools.count()
_seeds = itertools.count(1_000_000)

pytestmark = needs("hosts")


def _transports() -> list[Any]:
    others = ("nixl-tcp", "zmq", "nixl-ranks")
    return [pytest.param("nixl"), *(pytest.param(wire, marks=pytest.mark.chaos) for wire in others)]


@pytest.fixture(scope="module", params=_transports())
def stage(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Theatre]:
    size = ("--kv-cache-bytes", str(NUM_BLOCKS * BLOCK_BYTES))
    with theatre(checkpoint("llama"), tmp_path_factory.mktemp("stage"), request.param, options=size) as made:
        yield made


class References:
    """Answers of undisturbed workers, once they are known."""

    def __init__(self) -> None:
        self._known: dict[str, list[list[int]]] = {}

    async def __call__(
        self, name: str, ask: Callable[[list[int]], asyncio.Task[Answer]], token_ids: list[int]
    ) -> list[list[int]]:
        """The tokens that are to come."""
        if name not in self._known:
            self._known[name] = (await ask(token_ids)).tokens
        return self._known[name]


@pytest.fixture(scope="module")
def references(stage: Theatre) -> References:
    return References()


def cells() -> list[Any]:
    made = []
    for fault in FAULTS:
        for state in STATES:
            for role in (Role.PREFILL, Role.DECODE):
                marks = () if state in IN_SHORT.get(fault, ("running",)) else pytest.mark.chaos
                made.append(pytest.param(fault, state, role, marks=marks, id=f"{fault}-{state}-{role.value}"))
    return made


async def reached(
    state: str, stage: Theatre, ask: Callable[[list[int]], asyncio.Task[Any]]
) -> tuple[list[asyncio.Task[Any]], tuple[Actor, str]]:
    """A request in this state on P1 and D1: the requests under way, the target first, and the gate that holds it."""
    p1, d1 = stage.p1, stage.d1
    others: list[asyncio.Task[Any]] = []
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
            held, gate = (lambda: d1.state()["waiting"] == 1 and p1.state()["leases"] == 1), (d1, "step")
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
    return tasks, gate


def asker(dispatcher: Dispatcher, **options: Any) -> Callable[[list[int]], asyncio.Task[Answer]]:
    """Asks, each time under a salt of its own, so that nothing of it is cached."""

    def ask(token_ids: list[int]) -> asyncio.Task[Answer]:
        work = generation(token_ids, cache_salt=str(next(_salts)), **(SAMPLING | options))
        return asyncio.create_task(answer(dispatcher, work))

    return ask


async def settled(stage: Theatre, dispatcher: Dispatcher, registry: Registry) -> None:
    """Wait until nothing is left of the last fault: a broken connection between workers, say, shows in a request. Over
    TCP it may also end a source, which is then started again."""
    in_a_row = 0
    while in_a_row < 3:
        before = sum(dispatcher.recovery.tally.failures.values())
        async with asyncio.timeout(60):
            await asker(dispatcher)(FILLER[:40])
        in_a_row = in_a_row + 1 if sum(dispatcher.recovery.tally.failures.values()) == before else 0
        if any(actor.process.popen.poll() is not None for actor in stage.actors):
            await recovered(stage, dispatcher, registry)
            in_a_row = 0
        dispatcher.placement._router.paths = BrokenPaths()  # what has failed is tried again at once


@asynccontextmanager
async def happening(
    stage: Theatre, dispatcher: Dispatcher, registry: Registry, fault: str, victim: Actor, gate: tuple[Actor, str]
) -> AsyncIterator[None]:
    """The fault, until the body is done; once gateways have noticed it, who waits at the gate goes on, if it can."""
    incarnation = registry.workers[victim.address].incarnation
    befalls = (FAULTS | RANK_FAULTS)[fault]()
    stage.befallen = True
    befalls.begin(victim)
    try:
        if befalls.silences or fault == "slow":
            lose_if_silent(dispatcher, victim)
        if befalls.silences:
            worker = registry.workers[victim.address]
            await until(lambda: worker.incarnation != incarnation, "the gateway does not notice")
        holder, name = gate
        if holder is not victim or fault not in ("kill", "freeze", *RANK_FAULTS):
            holder.open(name)
        async with asyncio.timeout(60):
            yield
    finally:
        befalls.end(victim)
    if fault == "freeze":
        holder.open(name)  # it wakes, and goes on where it was


class Effects:
    """What a fault leads to beside the tokens, counted from the making of this on."""

    def __init__(self, stage: Theatre, dispatcher: Dispatcher) -> None:
        self._actors, self._others = stage.actors, (stage.p1, stage.p2, stage.d2)
        self._failures, self._links = dispatcher.recovery.tally.failures, dispatcher.links
        self._num_failures, self._num_lost = self._failures.total(), self._links._traffic().sessions_lost
        self._num_computed, self._num_prompts = self._computed(), 0
        self._send = dispatcher.links.send
        dispatcher.links.send = self._count  # type: ignore[method-assign]

    def _count(self, address: str, message: Message) -> int | None:
        """Send, and count the prompts that workers are given to compute."""
        self._num_prompts += isinstance(message, Prefill) or (isinstance(message, Decode) and message.source is None)
        return self._send(address, message)

    def _computed(self) -> float:
        """Prompt tokens that workers other than D1 have computed."""
        return sum(actor.process.metric(COMPUTED) for actor in self._others)

    def check(self, fault: str, state: str, role: Role) -> None:
        """They are those of docs/faults.md, unless UCX has ended a worker meanwhile, which is another fault."""
        if any(actor.aborted_by_ucx() for actor in self._actors):
            return
        num_failures = self._failures.total() - self._num_failures
        num_lost = self._links._traffic().sessions_lost - self._num_lost
        if fault == "slow":
            assert (num_failures, num_lost) == (0, 0), "it is only slow"
        if fault == "part":
            assert num_lost == 0, "the gateway reaches both"
            if role is Role.PREFILL and state in UNTIL_SETTLED:
                assert num_failures > 0, "the decode worker hears nothing from its source"
        if role is Role.DECODE and state in UNTIL_PULLED and fault in ("kill", "freeze", "cut"):
            self._check_computed(state)

    def _check_computed(self, state: str) -> None:
        """D1 has failed, and no prompt was computed again but that of a filler that ran there."""
        prompts = [PROMPT, *{"queued": [FILLER], "offered": [BIG_FILLER]}.get(state, [])]
        filler_ran = state == "offered"
        assert self._num_prompts == len(prompts) + filler_ran
        if not filler_ran:
            assert self._computed() - self._num_computed == sum(map(len, prompts))


async def recovered(stage: Theatre, dispatcher: Dispatcher, registry: Registry) -> None:
    """Everything is mended, and everybody serves; also who died, or forgot that it was to serve, of the mending."""
    async with asyncio.timeout(60):
        while not all(worker.usable for worker in registry.workers.values()):
            stage.revive()
            dispatcher.links.tell(stage.d1.address, drain=False)
            await asyncio.sleep(0.1)


@pytest.mark.chaos
@pytest.mark.parametrize("stage", ["nixl-ranks"], indirect=True)
@pytest.mark.parametrize("fault", RANK_FAULTS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_the_stream_goes_on_without_a_rank(
    stage: Theatre, references: References, fault: str, state: str, role: Role
) -> None:
    await test_the_stream_goes_on(stage=stage, references=references, fault=fault, state=state, role=role)


@pytest.mark.parametrize(("fault", "state", "role"), cells())
@begun_anew_if_collapsed
async def test_the_stream_goes_on(stage: Theatre, references: References, fault: str, state: str, role: Role) -> None:
    stage.revive()
    async with stage.dispatcher(patience_s=20.0) as (dispatcher, registry):
        how = ("greedy", "sampled")[(STATES.index(state) + (role is Role.DECODE)) % 2]
        ask = asker(dispatcher, **SAMPLED if how == "sampled" else {})
        expected = [await references(how, ask, PROMPT)]
        with avoided(registry, stage.p2.process, *[stage.d2.process] * 4):  # with the fillers, D1 is busy too
            await settled(stage, dispatcher, registry)
            loads = registry.workers.values()
            await until(lambda: all(worker.load is not None for worker in loads), "a worker tells nothing")
            effects = Effects(stage, dispatcher)
            tasks, gate = await reached(state, stage, ask)
            victim = stage.p1 if role is Role.PREFILL else stage.d1
            async with happening(stage, dispatcher, registry, fault, victim, gate):
                answers = await asyncio.gather(*tasks)
            effects.check(fault, state, role)
        if len(tasks) > 1:
            filler = FILLER if state == "queued" else BIG_FILLER
            expected.append(await references(f"{how} filler of {state}", ask, filler))
        assert [each.tokens for each in answers] == expected
        assert all(each.reasons == ["length"] for each in answers)
        await recovered(stage, dispatcher, registry)
    stage.wait_for_baseline()


@begun_anew_if_collapsed
async def test_a_stream_leaves_a_decode_worker_that_reaches_no_prefill_worker(
    stage: Theatre, references: References
) -> None:
    """The gateway reaches all of them, and D1 is the emptiest decode worker until the end."""
    stage.revive()
    async with stage.dispatcher(patience_s=20.0) as (dispatcher, registry):
        ask = asker(dispatcher)
        expected = await references("greedy", ask, PROMPT)
        with avoided(registry, *[stage.d2.process] * 4):
            await settled(stage, dispatcher, registry)
            failures, local = dispatcher.recovery.tally.failures, dispatcher.placement.num_local_prefills
            before = failures.total(), local.total()
            stage.befallen = True
            for source in (stage.p1, stage.p2):
                stage.d1.host.cut_from(source.host)
            try:
                async with asyncio.timeout(60):
                    answered = await ask(PROMPT)
            finally:
                stage.d1.host.heal()
        assert (answered.tokens, answered.reasons) == (expected, ["length"])
        assert (failures.total(), local.total()) == (before[0] + 1, before[1]), "one at D1, and D2 could read"
    stage.wait_for_baseline()


async def test_a_worker_that_is_left_draining_serves_the_next_test(stage: Theatre) -> None:
    async with stage.dispatcher() as (dispatcher, registry):
        dispatcher.links.tell(stage.d1.address, drain=True)
        await until(lambda: not registry.workers[stage.d1.address].usable, "it does not drain")
    async with stage.dispatcher() as (_, registry):
        assert all(worker.usable for worker in registry.workers.values())


NUM_RESETS = 3


@contextmanager
def reconnecting_within(actor: Actor, seconds: float) -> Iterator[None]:
    """A worker and this process wait so long for each other when a connection has broken."""
    usual_s = ends.RECONNECT_S
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ends, "RECONNECT_S", seconds)
        actor.command(reconnect_s=seconds)
        try:
            yield
        finally:
            actor.command(reconnect_s=usual_s)


async def test_a_reset_while_tokens_flow_restarts_nobody(stage: Theatre, references: References) -> None:
    """Only connections to D1's control port break: all that is lost is what was on its way, and that is asked for."""
    stage.revive()
    d1 = stage.d1
    async with stage.dispatcher(patience_s=20.0) as (dispatcher, registry):
        ask = asker(dispatcher, max_tokens=300)
        expected = await references("300 tokens", ask, PROMPT)
        with avoided(registry, stage.p2.process, *[stage.d2.process] * 4):
            await settled(stage, dispatcher, registry)
        with avoided(registry, stage.p2.process, *[stage.d2.process] * 4), reconnecting_within(d1, 20.0):
            traffic = dispatcher.links._links[d1.address].traffic
            before = traffic.sessions_lost, sum(dispatcher.recovery.tally.failures.values())
            num_resets = num_resyncs = 0

            def opened_again() -> bool:
                return traffic.resyncs > num_resyncs

            while num_resets < NUM_RESETS:
                num_resyncs = traffic.resyncs
                tasks = [ask(PROMPT) for _ in range(2)]

                def flows(tasks: Sequence[asyncio.Task[Answer]] = tasks) -> bool:
                    return any(task.done() for task in tasks) or d1.state()["running"] == len(tasks)

                await until(flows, "no tokens flow")
                if any(task.done() for task in tasks):  # too fast to be seen, on a busy machine
                    await asyncio.gather(*tasks)
                    continue
                assert d1.host.reset("sport", "=", f":{d1.control_port}") > 0, "there was no connection to break"
                num_resets += not any(task.done() for task in tasks)  # else they were too fast, and it shows nothing
                answers = await asyncio.gather(*tasks)
                await until(opened_again, "the session is not opened again")
                assert all((each.tokens, each.reasons) == (expected, ["length"]) for each in answers)
        assert (traffic.sessions_lost, sum(dispatcher.recovery.tally.failures.values())) == before
        await recovered(stage, dispatcher, registry)
    stage.wait_for_baseline()


def moving_cells() -> list[Any]:
    made = []
    for fault in FAULTS:
        for state in ("moving", "cut"):
            for who in ("source", "sink"):
                marks = () if (fault, state, who) in MOVING_IN_SHORT else pytest.mark.chaos
                made.append(pytest.param(fault, state, who, marks=marks, id=f"{fault}-{state}-{who}"))
    return made


@pytest.mark.parametrize(("fault", "state", "who"), moving_cells())
@begun_anew_if_collapsed
async def test_the_stream_goes_on_from_a_worker_that_it_leaves(
    stage: Theatre, references: References, fault: str, state: str, who: str
) -> None:
    """D1 drains; before the cut D2 is about to read ahead, after it D1 is about to say that the sequence is D2's."""
    stage.revive()
    d1, d2 = stage.d1, stage.d2
    async with stage.dispatcher(patience_s=20.0) as (dispatcher, registry):
        ask = asker(dispatcher, **SAMPLED, max_tokens=500)
        expected = await references("long", ask, PROMPT)

        def on_d1() -> AbstractContextManager[None]:
            return avoided(registry, stage.p2.process, *[d2.process] * 4)

        async def leaving() -> asyncio.Task[Answer]:
            """A stream on D1, which has to leave, and stands still before its next step."""
            d1.close("step", skip=24)
            with on_d1():
                task = ask(PROMPT)
                await until(lambda: d1.waiting("step") == 1, "it does not run")
            dispatcher.links.tell(d1.address, drain=True)
            return task

        async def cut() -> None:
            await until(lambda: d1.state()["parked"] == 1, "nobody wants the sequence")
            d1.open("step")

        with on_d1():
            await settled(stage, dispatcher, registry)
        async with asyncio.timeout(60):
            # A connection between D1 and D2 that the last fault has broken shows, and is replaced.
            task = await leaving()
            await cut()
            await task
        await recovered(stage, dispatcher, registry)
        gate = (d2, "read") if state == "moving" else (d1, "Settled")
        gate[0].close(gate[1], skip=0 if state == "moving" else 1)
        task = await leaving()
        if state == "cut":
            await cut()
        await until(lambda: gate[0].waiting(gate[1]) > 0, f"{state} was not reached")
        assert d1.state()["running"] == (1 if state == "moving" else 0)
        if who == "source":
            d1.open("step")
        d1.partner, d2.partner = d2, d1
        try:
            async with happening(stage, dispatcher, registry, fault, d1 if who == "source" else d2, gate):
                if who == "sink":
                    dispatcher.links.tell(d1.address, drain=False)  # it is the only one that is left
                    d1.open("step")
                answered = await task
        finally:
            d1.partner, d2.partner = stage.p1, stage.p2
            await recovered(stage, dispatcher, registry)
        assert (answered.tokens, answered.reasons) == (expected, ["length"])
    stage.wait_for_baseline()


DEADLINES = {
    "queued": "prefill worker, waiting|decode worker, attaching",
    "mid-chunk": "prefill worker, running|decode worker, (offered|pulling)|offered to a decode worker",
    "offered": "decode worker, offered|offered to a decode worker",
    "pulling": "decode worker, pulling|offered to a decode worker",
    "settling": "decode worker, settling|offered to a decode worker",
    "running": "decode worker, decoding",
    "finishing": "ran out at the gateway; a prefill and a decode worker had it",
}
"""State → what the error says. The time runs out at both workers, and the first to say so is heard: while a chunk is
computed, the decode worker may be pulling those before it."""


@pytest.mark.parametrize("state", [pytest.param(state, marks=pytest.mark.chaos) for state in STATES])
@begun_anew_if_collapsed
async def test_the_end_of_its_time_names_the_state(stage: Theatre, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    if state != "finishing":  # a worker, however late, says so before the gateway does
        monkeypatch.setattr("gateway.dispatch.dispatcher._BUDGET_GRACE_S", 30.0)
    stage.revive()
    async with stage.dispatcher() as (dispatcher, registry):
        with avoided(registry, stage.p2.process, *[stage.d2.process] * 4):
            await settled(stage, dispatcher, registry)
            tasks, (holder, gate) = await reached(state, stage, asker(dispatcher, budget_s=4.0))
        with pytest.raises(GenerationFailed, match=DEADLINES[state]) as failed:
            await tasks[0]
        assert failed.value.cause is Cause.DEADLINE
        holder.open(gate)
        await asyncio.gather(*tasks, return_exceptions=True)
    stage.wait_for_baseline()


class GatewayClient:
    """Asks a gateway process, each time for a prompt of its own, so that nothing of it is cached."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.bodies: dict[asyncio.Task[Outcome], dict[str, Any]] = {}

    def __call__(self, token_ids: list[int]) -> asyncio.Task[Outcome]:
        body = {"prompt": prompt(next(_seeds), len(token_ids)), "temperature": 0.0, "logprobs": 0, **SAMPLING}
        task = self.ask({**body, "stream": True, "stream_options": {"include_usage": True}})
        self.bodies[task] = body
        return task

    def ask(self, body: dict[str, Any]) -> asyncio.Task[Outcome]:
        return asyncio.create_task(ask(self._session, self._url, body))


@asynccontextmanager
async def another_gateway(stage: Theatre) -> AsyncIterator[tuple[Process, GatewayClient]]:
    """A gateway process that knows of P1 and D1 only, and its client."""
    with Workers(stage.folder, [stage.p1.process], [stage.d1.process]).gateway(*PULSE) as gateway:
        async with aiohttp.ClientSession() as session:
            yield gateway, GatewayClient(session, gateway.fact("url"))


def gateway_cells() -> list[Any]:
    return [
        pytest.param(fault, state, marks=() if (fault, state) in GATEWAYS_IN_SHORT else pytest.mark.chaos)
        for fault in ("kill", "freeze")
        for state in STATES
    ]


@pytest.mark.parametrize(("fault", "state"), gateway_cells())
@begun_anew_if_collapsed
async def test_a_gateway_is_gone_and_another_one_does_not_notice(stage: Theatre, fault: str, state: str) -> None:
    """What it had is free; the request of the other one, at the same gate, goes on. A frozen one wakes, and goes on."""
    stage.revive()
    p1, d1 = stage.p1, stage.d1

    def at_most_one_each() -> bool:
        return all(actor.state()["requests"] + actor.state().get("unacknowledged", 0) <= 1 for actor in (p1, d1))

    async with another_gateway(stage) as (gateway, client), stage.dispatcher() as (dispatcher, registry):
        with avoided(registry, stage.p2.process, *[stage.d2.process] * 4):
            await settled(stage, dispatcher, registry)
            expected = await asker(dispatcher)(PROMPT)
            tasks, (holder, gate) = await reached(state, stage, client)
            neighbour = asker(dispatcher)(PROMPT)
            await until(lambda: d1.state()["requests"] + d1.state()["unacknowledged"] > len(tasks), "it never came")
        assert not at_most_one_each()
        stage.befallen = True
        if fault == "kill":
            gateway.kill()
        with gateway.frozen() if fault == "freeze" else nullcontext():
            await until(at_most_one_each, "what the gateway had open is open still")
            holder.open(gate)
            async with asyncio.timeout(60):
                assert (await neighbour).tokens == expected.tokens
            await asyncio.to_thread(stage.workers().wait_for_baseline)
        if fault == "freeze":
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*tasks)
                undisturbed = [await client.ask(client.bodies[task]) for task in tasks]
            assert [each.error for each in answers] == [""] * len(tasks)
            assert [each.tokens for each in answers] == [each.tokens for each in undisturbed]
            assert [each.usage for each in answers] == [each.usage for each in undisturbed]
        else:
            broken = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, aiohttp.ClientError) for each in broken), broken
    stage.wait_for_baseline()
