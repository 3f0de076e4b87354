"""Where a request's time has gone, told by a gateway process in front of real workers: the stages add up to what the
client has measured, and a delay shows in the stage in which it was made.

The workers stop at gates (`chaos.staged_worker`), for as long as the test says; the test measures that itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chaos.net import HERE
from chaos.theatre import CHUNK, Actor
from otlp_collector import Collector, running_collector
from stack import BLOCK_BYTES, BLOCK_SIZE, Process, Workers, prompt, until

from common.contract.messages.session import Role
from gateway.answer.answer_schemas import AnswerTimings

DELAY_S = 0.75
_PAUSE_S = 0.005
WAYS = ("first_token", "transit")
"""Stages of messages on their way."""
LONG_S = 4.0
"""Beside which what a gateway does not account for, on the way to it and back, is about one percent or less."""
NUM_BLOCKS = 64
NUM_TOKENS = 24
PATIENT = ("--heartbeat-timeout-s", "10")
"""Nobody is lost because the machine is busy; a process that dies is noticed at once."""
_seeds = itertools.count(2_000_000)


@dataclass
class Stage:
    """A prefill and two decode workers."""

    folder: Path
    p: Actor
    d1: Actor
    d2: Actor

    @property
    def actors(self) -> tuple[Actor, ...]:
        return self.p, self.d1, self.d2

    def open_all(self) -> None:
        """Every gate is open; who has died lives again."""
        for actor in self.actors:
            if actor.process.popen.poll() is not None:
                actor.start()
                actor.ready()
            for gate in actor.closed.copy():
                actor.open(gate)

    def workers(self, *decode: Actor) -> Workers:
        return Workers(self.folder, [self.p.process], [each.process for each in decode])

    @contextmanager
    def gateway(self, *decode: Actor, options: Sequence[str] = ()) -> Iterator[Process]:
        """A gateway process that knows these decode workers, and logs nothing but JSON."""
        options = (*PATIENT, "--log-format", "json", "--admin-port", "0", *options)
        with self.workers(*decode).gateway(*options) as gateway:
            yield gateway
        for line in gateway.log:
            json.loads(line)


@dataclass
class Told:
    """What a client has seen of an answer."""

    e2e_s: float
    """From asking to the chunk that says how long it was."""
    usage: dict[str, Any]
    id: str
    request_id: str
    round_trip_s: float = 0.0
    """The longest way to the gateway and back meanwhile: of a busy machine, which the gateway cannot account for."""

    @property
    def stages_s(self) -> dict[str, float]:
        return {stage: spent / 1e3 for stage, spent in self.usage["timings"]["stages_ms"].items()}

    def check(self) -> None:
        """The stages add up to what the gateway says, to the last nanosecond but for rounding."""
        timings = self.usage["timings"]
        assert timings.keys() <= AnswerTimings.__annotations__.keys(), "what is described"
        stages = timings["stages_ms"]
        assert sum(stages.values()) == pytest.approx(timings["e2e_ms"], abs=0.001 * (len(stages) + 1))
        assert all(spent > 0 for spent in stages.values()), timings
        assert timings["e2e_ms"] <= 1e3 * self.e2e_s


class Client:
    """Asks for prompts of its own, so that nothing is cached."""

    def __init__(self, gateway: Process, session: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self._session = session

    def ask(self, length: int, *, headers: Mapping[str, str] | None = None, **body: Any) -> asyncio.Task[Told]:
        return asyncio.create_task(self._ask({"prompt": prompt(next(_seeds), length), **body}, headers))

    async def _ask(self, body: dict[str, Any], headers: Mapping[str, str] | None) -> Told:
        body = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True} | body
        began = ended = time.monotonic()
        chunk: dict[str, Any] = {}
        options = {"stream_options": {"include_timings": True}}
        url = f"{self.gateway.fact('url')}/v1/completions"
        async with self._session.post(url, json=body | options, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    ended = time.monotonic()
            told = Told(ended - began, chunk["usage"], chunk["id"], response.headers["X-Request-Id"])
        told.check()
        return told

    def watch(self, asked: asyncio.Task[Told]) -> asyncio.Task[Told]:
        """The same, with the longest way to the gateway and back meanwhile."""
        return asyncio.create_task(self._watch(asked))

    async def _watch(self, asked: asyncio.Task[Told]) -> Told:
        longest_s = 0.0
        while not asked.done():
            began = time.monotonic()
            async with self._session.get(f"{self.gateway.fact('url')}/health") as response:
                assert response.status == 200
            await asyncio.wait([asked], timeout=_PAUSE_S)
            longest_s = max(longest_s, time.monotonic() - began - _PAUSE_S)
        return replace(await asked, round_trip_s=longest_s)

    async def events(self, request_id: str) -> list[dict[str, Any]]:
        """Lines of the log about a request, by what the client knows it by; the last, of its end, may come late."""
        found: list[dict[str, Any]] = []

        def ended() -> bool:
            lines = [json.loads(line) for line in list(self.gateway.log)]
            found[:] = [line for line in lines if line.get("id") == request_id]
            return bool(found) and found[-1]["event"] == "finished"

        await until(ended, "the log does not tell of its end")
        return found


@pytest.fixture(scope="module")
def stage(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder, scratch = checkpoint("llama"), tmp_path_factory.mktemp("stage")
    options = ["--model", str(folder), "--num-threads", "1", "--transport", "zmq", *PATIENT]
    options += ["--kv-cache-bytes", str(NUM_BLOCKS * BLOCK_BYTES)]
    chunks = ["--chunk-size", str(CHUNK), "--token-budget", str(CHUNK)]
    actors = []
    for index, role in enumerate((Role.PREFILL, Role.DECODE, Role.DECODE)):
        own = [role.value, *options, *(chunks if role is Role.PREFILL else [])]
        actors.append(Actor(role, HERE, own, {}, scratch / f"stage{index}"))
    try:
        for actor in actors:
            actor.start()
        for actor in actors:
            actor.ready()
        yield Stage(folder, *actors)
    finally:
        for actor in actors:
            actor.process.kill()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as made:
        yield made


@pytest.fixture(scope="module")
def pair(stage: Stage, collector: Collector) -> Iterator[Process]:
    """A gateway that knows one decode worker, and tells a collector."""
    with stage.gateway(stage.d1, options=("--otlp-endpoint", collector.url)) as gateway:
        yield gateway


@pytest.fixture
async def client(pair: Process) -> AsyncIterator[Client]:
    """Its client, when its decode worker is usable: it may have been killed or drained for the test before."""
    await until(lambda: pair.get("/ready")["ready"], "its worker does not come back")
    async with aiohttp.ClientSession() as session:
        yield Client(pair, session)


@pytest.fixture
async def client_of_two(stage: Stage) -> AsyncIterator[Client]:
    """Of a gateway that knows both decode workers."""
    with stage.gateway(stage.d1, stage.d2) as gateway:
        async with aiohttp.ClientSession() as session:
            yield Client(gateway, session)


@pytest.fixture(autouse=True)
def clean(stage: Stage) -> Iterator[None]:
    stage.open_all()
    yield
    stage.open_all()
    stage.workers(stage.d1, stage.d2).wait_for_baseline()


async def delay(seconds: float = DELAY_S) -> float:
    """Wait; how long that was."""
    began = time.monotonic()
    await asyncio.sleep(seconds)
    return time.monotonic() - began


# --- a delay shows where it was made ---------------------------------------------------------------------------------


def shows(told: Told, stage: str, delayed_s: float, *, beside: Sequence[str] = ()) -> None:
    """The stage, with little of those beside it, has the whole delay; so all others share what else the request has
    taken."""
    told.check()
    beside_s = sum(told.stages_s.get(name, 0.0) for name in beside)
    assert told.stages_s[stage] + beside_s >= delayed_s, told.usage
    assert told.stages_s[stage] > beside_s, told.usage
    rest_s = sum(spent for name, spent in told.stages_s.items() if name not in (stage, *beside))
    assert rest_s <= told.e2e_s - delayed_s + 1e-5, told.usage


async def test_in_the_queue(stage: Stage, client: Client) -> None:
    stage.p.close("step")
    filler = client.ask(2 * CHUNK)
    await until(lambda: stage.p.waiting("step") == 1, "the filler is not computed")
    asked = client.ask(3 * CHUNK)
    await until(lambda: stage.p.state()["waiting"] == 1, "it is not queued")
    delayed_s = await delay()
    stage.p.open("step")
    shows(await asked, "queue", delayed_s)
    assert (await filler).stages_s["prefill"] >= delayed_s


async def test_in_the_prefill(stage: Stage, client: Client) -> None:
    stage.p.close("step", skip=1)
    asked = client.ask(3 * CHUNK)
    await until(lambda: stage.p.waiting("step") == 1, "it is not computed")
    delayed_s = await delay()
    stage.p.open("step")
    shows(await asked, "prefill", delayed_s)


async def test_in_a_local_prefill(stage: Stage, client: Client) -> None:
    stage.d1.close("step")
    asked = client.ask(30)
    await until(lambda: stage.d1.waiting("step") == 1, "it is not computed")
    delayed_s = await delay()
    stage.d1.open("step")
    shows(told := await asked, "prefill", delayed_s)
    assert "pull" not in told.stages_s


async def test_in_the_pull(stage: Stage, client: Client) -> None:
    stage.d1.close("read")
    asked = client.ask(3 * CHUNK)
    await until(lambda: stage.d1.waiting("read") > 0 and stage.p.state()["running"] == 0, "it is not pulled")
    delayed_s = await delay()
    stage.d1.open("read")
    shows(told := await asked, "pull", delayed_s, beside=WAYS)  # the prompt's end is on its way to the decode worker
    assert told.usage["timings"]["pull_bytes"] == 3 * CHUNK // BLOCK_SIZE * BLOCK_BYTES
    assert told.usage["timings"]["pull_ms"] >= 1e3 * delayed_s


async def test_not_in_a_pull_that_the_prefill_hides(stage: Stage, client: Client) -> None:
    stage.d1.close("read")
    stage.p.close("step", skip=2)
    asked = client.ask(3 * CHUNK)
    await until(lambda: stage.d1.waiting("read") > 0 and stage.p.waiting("step") == 1, "nothing is read")
    delayed_s = await delay()
    stage.d1.open("read")
    await until(lambda: stage.d1.state()["reads"] == 0, "the reads do not end")
    stage.p.open("step")
    shows(told := await asked, "prefill", delayed_s)
    assert told.usage["timings"]["hidden_pull_ms"] >= 1e3 * delayed_s


async def test_in_the_reservation(stage: Stage, client: Client) -> None:
    stage.d1.close("step", skip=2)
    filler = client.ask((NUM_BLOCKS - 8) * BLOCK_SIZE)
    await until(lambda: stage.d1.waiting("step") == 1, "the filler does not run")
    asked = client.ask(9 * BLOCK_SIZE)
    held = {"waiting": 1, "pulling": 0}
    await until(lambda: stage.d1.state() | held == stage.d1.state(), "it does not wait for room")
    await until(lambda: stage.p.state()["running"] == 0, "it is still computed")
    delayed_s = await delay()
    stage.d1.open("step")
    shows(await asked, "reserve", delayed_s, beside=WAYS)
    await filler


async def test_in_the_settle(stage: Stage, client: Client) -> None:
    stage.p.close("Settled")
    asked = client.ask(3 * CHUNK)
    await until(lambda: stage.p.waiting("Settled") == 1, "it does not settle")
    delayed_s = await delay()
    stage.p.open("Settled")
    shows(await asked, "settle", delayed_s)


async def test_in_the_decode_queue(stage: Stage, client: Client) -> None:
    stage.d1.close("step", skip=2)
    filler = client.ask(2 * CHUNK)
    await until(lambda: stage.d1.waiting("step") == 1, "the filler does not run")
    asked = client.ask(3 * CHUNK)
    settled = {"waiting": 1, "pulling": 0, "running": 1, "requests": 2}
    await until(lambda: stage.d1.state() | settled == stage.d1.state(), "it is not ready")
    await until(lambda: stage.p.state()["leases"] == 0, "it has not settled")
    delayed_s = await delay()
    stage.d1.open("step")
    shows(await asked, "decode_queue", delayed_s)
    assert (await filler).stages_s["decode"] >= delayed_s


async def test_in_decoding(stage: Stage, client: Client) -> None:
    stage.d1.close("step", skip=6)
    asked = client.ask(3 * CHUNK)
    await until(lambda: stage.d1.waiting("step") == 1, "it does not run")
    delayed_s = await delay()
    stage.d1.open("step")
    shows(await asked, "decode", delayed_s)


async def test_in_decoding_while_the_worker_is_frozen(stage: Stage, client: Client) -> None:
    stage.d1.close("step", skip=6)
    asked = client.ask(3 * CHUNK)
    await until(lambda: stage.d1.waiting("step") == 1, "it does not run")
    with stage.d1.process.frozen():
        delayed_s = await delay()
    stage.d1.open("step")
    shows(await asked, "decode", delayed_s)


async def test_on_the_way_of_a_message(stage: Stage, client: Client) -> None:
    stage.p.close("PrefillDone")
    asked = client.ask(3 * CHUNK)
    await until(lambda: stage.p.waiting("PrefillDone") == 1, "it was not sent")
    delayed_s = await delay()
    stage.p.open("PrefillDone")
    # The first token's way to the gateway, meanwhile, has a part of this delay, since it counts once.
    shows(await asked, "transit", delayed_s, beside=["first_token"])


async def test_on_the_way_of_the_first_token(stage: Stage, client: Client) -> None:
    """It is the last one too; the decode worker is not to be the first to tell it."""
    for gate in ("PrefillDone", "LastTokens"):
        stage.p.close(gate)
    asked = client.ask(3 * CHUNK, max_tokens=1)
    await until(lambda: stage.p.waiting("PrefillDone") == stage.p.waiting("LastTokens") == 1, "it was not sent")
    delayed_s = await delay()
    stage.p.open("LastTokens")
    shows(await asked, "first_token", delayed_s)


async def test_of_several_choices_the_last_one_counts(stage: Stage, client: Client) -> None:
    stage.d1.close("LastTokens", skip=1)
    asked = client.ask(3 * CHUNK, n=2)
    await until(lambda: stage.d1.waiting("LastTokens") == 1, "it does not end")
    delayed_s = await delay()
    stage.d1.open("LastTokens")
    # The first token's way may overlap with the decode worker's stages, and is then counted here.
    shows(await asked, "transit", delayed_s, beside=["first_token"])


# --- whatever way it goes --------------------------------------------------------------------------------------------


def agrees(told: Told) -> None:
    """The stages add up to what the client has measured, within one percent and the way there and back."""
    told.check()
    assert told.e2e_s >= LONG_S
    assert sum(told.stages_s.values()) >= 0.99 * told.e2e_s - 2 * told.round_trip_s


async def test_a_request_that_is_handed_off(stage: Stage, client: Client) -> None:
    pulled = client.gateway.metric("baton_gateway_pull_bytes_sum")
    stage.d1.close("step", skip=6)
    asked = client.watch(client.ask(3 * CHUNK))
    await until(lambda: stage.d1.waiting("step") == 1, "it does not run")
    await delay(LONG_S)
    stage.d1.open("step")
    agrees(told := await asked)
    assert told.usage["timings"]["attempts"] == 1
    expected = {"intake", "placement", "queue", "prefill", "first_token", "pull", "settle", "decode", "delivery"}
    assert expected <= told.stages_s.keys()
    assert told.usage["timings"]["ttft_ms"] / 1e3 < told.e2e_s - LONG_S
    events = await client.events(told.id)
    assert [line["event"] for line in events] == ["accepted", "routed", "first_token", "finished"]
    assert events[0]["prompt_tokens"] == 3 * CHUNK
    assert (events[1]["prefill"], events[1]["decode"]) == (stage.p.address, stage.d1.address)
    assert events[3]["stages_ms"] == told.usage["timings"]["stages_ms"]
    assert {line["x_request_id"] for line in events if "x_request_id" in line} == {told.request_id}
    spent = client.gateway.metric("baton_gateway_stage_seconds_sum")
    assert spent == pytest.approx(client.gateway.metric("vllm:e2e_request_latency_seconds_sum"), rel=1e-6)
    assert client.gateway.metric("baton_gateway_stage_seconds_sum", stage="decode") >= LONG_S
    assert client.gateway.metric("baton_gateway_pull_bytes_sum") == pulled + told.usage["timings"]["pull_bytes"]
    assert client.gateway.metric("baton_gateway_timings_cut_total") == 0


async def test_a_request_of_one_decode_worker(stage: Stage, client: Client) -> None:
    stage.d1.close("step", skip=6)
    asked = client.watch(client.ask(30))
    await until(lambda: stage.d1.waiting("step") == 1, "it does not run")
    await delay(LONG_S)
    stage.d1.open("step")
    agrees(told := await asked)
    assert told.stages_s["decode"] >= LONG_S
    assert {"queue", "prefill", "first_token", "decode"} <= told.stages_s.keys()
    assert not {"pull", "settle", "reserve"} & told.stages_s.keys()


async def test_a_request_whose_decode_worker_dies(stage: Stage, client_of_two: Client) -> None:
    client = client_of_two
    for actor in (stage.d1, stage.d2):
        actor.close("step", skip=6)
    asked = client.watch(client.ask(3 * CHUNK))
    await until(lambda: stage.d1.waiting("step") + stage.d2.waiting("step") == 1, "it does not run")
    dies, other = (stage.d1, stage.d2) if stage.d1.waiting("step") else (stage.d2, stage.d1)
    other.open("step")
    delayed_s = await delay(LONG_S)
    dies.process.kill()
    agrees(told := await asked)
    assert told.usage["timings"]["attempts"] == 2
    assert told.stages_s["lost"] >= delayed_s, "from its last token on the first attempt brought nothing"
    assert {"recovery", "pull", "settle", "decode"} <= told.stages_s.keys()
    events = [line["event"] for line in await client.events(told.id)]
    assert events == ["accepted", "routed", "first_token", "failed_over", "routed", "finished"]


async def test_a_request_that_moves(stage: Stage, client_of_two: Client) -> None:
    client = client_of_two
    for actor in (stage.d1, stage.d2):
        actor.close("step", skip=6)
    asked = client.watch(client.ask(3 * CHUNK, max_tokens=200))
    await until(lambda: stage.d1.waiting("step") + stage.d2.waiting("step") == 1, "it does not run")
    leaves, other = (stage.d1, stage.d2) if stage.d1.waiting("step") else (stage.d2, stage.d1)
    other.open("step")
    place = f"{client.gateway.fact('admin')}/workers/{leaves.address}"
    await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(f"{place}/drain", method="POST"))
    await until(lambda: leaves.state()["parked"] == 1, "nobody wants the sequence")
    delayed_s = await delay(LONG_S)
    leaves.open("step")
    agrees(told := await asked)
    await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(f"{place}/resume", method="POST"))
    assert told.usage["timings"]["attempts"] == 2
    assert told.stages_s["decode"] >= delayed_s
    assert not {"lost", "recovery"} & told.stages_s.keys()
    events = [line["event"] for line in await client.events(told.id)]
    assert events == ["accepted", "routed", "first_token", "moved", "finished"]


async def test_a_request_as_spans(client: Client, collector: Collector) -> None:
    trace_id = f"{next(_seeds):032x}"
    told = await client.ask(3 * CHUNK, headers={"traceparent": f"00-{trace_id}-{'1' * 16}-01"})

    def mine() -> list[Any]:
        return [span for span in collector.spans if span.trace_id.hex() == trace_id]

    await until(lambda: len(mine()) == len(told.stages_s) + 1, "its spans did not come")
    [request] = [span for span in mine() if span.parent_span_id.hex() == "1" * 16]
    children = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in mine()}
    whole_s = children.pop(request.name)
    assert children == pytest.approx(told.stages_s, abs=1e-6)
    assert sum(children.values()) == pytest.approx(whole_s, abs=1e-9)
    assert all(span.parent_span_id == request.span_id for span in mine() if span is not request)
