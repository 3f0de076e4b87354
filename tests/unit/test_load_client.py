"""The load generator against an endpoint that misbehaves on purpose, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_server import DONE, Connection, ScriptedServer, delta, event, obedient, scripted, token, usage
from stack import until

from benchmarks.load.chunk import Done, Finished, StreamError, Text, Usage, read_event
from benchmarks.load.client import Client, Exchange, open_session
from benchmarks.load.encode import BodyEncoder
from benchmarks.load.endpoint import probe
from benchmarks.load.plan import make_plan
from benchmarks.load.record import Outcome
from benchmarks.load.runner import LoadRunner, Recording
from benchmarks.load.settings import LoadSettings
from benchmarks.load.sse import Event, EventDecoder, MalformedStreamError
from benchmarks.load.summary import Targets, summarize
from common.contract.errors import OperatorError


class HandClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Talk:
    """One exchange with a scripted endpoint: what is written at a moment has been read before the next moment."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.exchange = Exchange()

    async def say(self, connection: Connection, after_s: float, data: bytes, *, then: Callable[[], bool]) -> None:
        """Write `data` when `after_s` more have passed, and wait until the client has noted it."""
        self.clock.now_s += after_s
        await connection.write(data)
        async with asyncio.timeout(30):
            while not then():
                await asyncio.sleep(0)

    async def tokens(self, connection: Connection, after_s: float, data: bytes, count: int) -> None:
        """Write, and wait until the client has `count` chunks."""
        await self.say(connection, after_s, data, then=lambda: len(self.exchange.chunk_s) == count)

    async def hold(self, script: Callable[[Connection], Awaitable[None]], timeout_s: float = 30.0) -> Exchange:
        """Run one request against `script`."""

        async def answer(connection: Connection, body: dict[str, Any]) -> None:
            await script(connection)

        async with scripted(answer) as server, open_session(None) as session:
            await Client(session, f"{server.url}/v1/completions", timeout_s, self.clock).send(b"{}", self.exchange)
        return self.exchange


@pytest.fixture
def talk() -> Talk:
    return Talk()


async def test_chunks_are_stamped_when_they_arrive(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        await connection.begin()
        await talk.tokens(connection, 0.5, token("a"), 1)
        await talk.tokens(connection, 0.25, token("b"), 2)
        await talk.tokens(connection, 2.0, token("c", "length"), 3)
        talk.clock.now_s += 4.0
        await connection.write(usage(7, 3) + DONE)
        await connection.end()

    exchange = await talk.hold(script)
    assert (exchange.sent_s, exchange.chunk_s) == (100.0, [100.5, 100.75, 102.75])
    assert (exchange.last_s, exchange.ended_s) == (102.75, 106.75)
    assert (exchange.outcome, exchange.usage, "".join(exchange.texts)) == (Outcome.OK, Usage(7, 3), "abc")


async def test_events_of_one_packet_have_one_time_and_a_split_event_that_of_its_end(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        await connection.begin()
        whole = token("d")
        await talk.tokens(connection, 1.0, token("a") + token("b") + whole[:9], 2)
        await talk.tokens(connection, 1.0, whole[9:] + token("e", "stop")[:-1], 3)
        await talk.tokens(connection, 1.0, b"\n", 4)
        await connection.write(DONE)
        await connection.end()

    exchange = await talk.hold(script)
    assert exchange.chunk_s == [101.0, 101.0, 102.0, 103.0]
    assert (exchange.outcome, "".join(exchange.texts)) == (Outcome.OK, "abde")


async def test_neither_role_nor_usage_nor_a_bare_finish_is_a_token(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        await connection.begin()
        await connection.write(b": keep-alive\n\n" + delta(role="assistant", content=""))
        await talk.tokens(connection, 1.0, delta(content="a"), 1)
        await talk.tokens(connection, 1.0, delta(reasoning_content="b"), 2)
        await talk.say(connection, 1.0, delta("length"), then=lambda: talk.exchange.last_s == 103.0)
        talk.clock.now_s += 1
        await connection.write(usage(3, 2) + DONE)
        await connection.end()

    exchange = await talk.hold(script)
    assert (exchange.chunk_s, exchange.last_s, exchange.outcome) == ([101.0, 102.0], 103.0, Outcome.OK)


@pytest.mark.parametrize(
    ("status", "headers", "outcome"),
    [
        ("429 Too Many Requests", "Retry-After: 1\r\n", Outcome.REFUSED),
        ("503 Service Unavailable", "", Outcome.REFUSED),
        ("400 Bad Request", "", Outcome.HTTP_ERROR),
    ],
)
async def test_a_refusal_says_why(talk: Talk, status: str, headers: str, outcome: Outcome) -> None:
    async def script(connection: Connection) -> None:
        talk.clock.now_s += 2
        await connection.answer(status, {"error": {"message": "no\nroom", "code": "x"}}, headers)

    exchange = await talk.hold(script)
    assert (exchange.outcome, exchange.status, exchange.detail) == (outcome, int(status[:3]), "no room")
    assert (exchange.chunk_s, exchange.ended_s) == ([], 102.0)


async def test_an_error_in_mid_stream(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        await connection.begin()
        await talk.tokens(connection, 1.0, token(), 1)
        await connection.write(event({"error": {"message": "worker lost"}}, "error"))
        await connection.end()

    exchange = await talk.hold(script)
    assert (exchange.outcome, exchange.detail, exchange.chunk_s) == (Outcome.STREAM_ERROR, "worker lost", [101.0])


async def test_a_connection_that_breaks_in_mid_stream(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        await connection.begin()
        await talk.tokens(connection, 1.0, token(), 1)
        connection.cut()

    assert (await talk.hold(script)).outcome is Outcome.TRUNCATED


async def test_a_stream_that_just_ends_is_truncated(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        await connection.begin()
        await connection.write(token())
        await connection.end()

    assert (await talk.hold(script)).outcome is Outcome.TRUNCATED


async def test_a_connection_that_breaks_before_the_answer(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        connection.cut()

    assert (await talk.hold(script)).outcome is Outcome.CONNECTION


async def test_nobody_there() -> None:
    async with scripted() as server:
        url = server.url
    async with open_session(None) as session:
        exchange = Exchange()
        await Client(session, f"{url}/v1/completions", 30.0, HandClock()).send(b"{}", exchange)
        assert exchange.outcome is Outcome.CONNECTION
        with pytest.raises(OperatorError, match="cannot be reached"):
            await probe(session, url, None)


@pytest.mark.parametrize("begun", [False, True])
async def test_an_answer_that_never_comes_or_never_ends(talk: Talk, begun: bool) -> None:
    async def script(connection: Connection) -> None:
        if begun:
            await connection.begin()
        await asyncio.Event().wait()

    exchange = await talk.hold(script, timeout_s=0.05)
    assert (exchange.outcome, exchange.detail) == (Outcome.TIMEOUT, "not complete after 0.05 s")


async def test_an_answer_without_tokens(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        await connection.begin()
        await connection.write(usage(3, 0) + DONE)
        await connection.end()

    assert (await talk.hold(script)).outcome is Outcome.NO_TOKENS


@pytest.mark.parametrize("data", [event("nonsense"), event([1]), event({"choices": [7]}), event({"usage": {"a": 1}})])
async def test_what_is_no_such_stream(talk: Talk, data: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.begin()
        await connection.write(data)
        await connection.end()

    assert (await talk.hold(script)).outcome is Outcome.MALFORMED


async def test_an_answer_that_is_not_streamed(talk: Talk) -> None:
    async def script(connection: Connection) -> None:
        await connection.answer("200 OK", {"choices": []})

    exchange = await talk.hold(script)
    assert (exchange.outcome, exchange.detail) == (
        Outcome.MALFORMED,
        "the answer is application/json, not text/event-stream",
    )


def test_parts_of_a_chunk() -> None:
    def parts(body: object, name: str = "") -> list[object]:
        return list(read_event(Event(name, json.dumps(body).encode())))

    assert parts({"choices": [{"text": "a", "finish_reason": "stop"}]}) == [Text("a", True)]
    assert parts({"choices": [{"text": "", "finish_reason": None}]}) == [Text("")]
    assert parts({"choices": [{"text": "", "finish_reason": "stop"}]}) == [Finished()]
    assert parts({"choices": [{"text": "", "finish_reason": "stop", "token_ids": [2]}]}) == [Text("", True)]
    assert parts({"choices": [{"delta": {"content": ""}, "logprobs": {"content": [1]}}]}) == [Text("")]
    assert parts({"choices": [{"delta": {"role": "assistant"}}]}) == []
    assert parts({"error": "gone"}) == [StreamError("gone")]
    assert parts({"message": "gone"}, "error") == [StreamError("gone")]
    assert read_event(Event("", b"[DONE]")) == [Done()]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "error"]), st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1)
        )
    ),
    st.lists(st.integers(0, 400)),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_events_survive_any_cutting(events: list[tuple[str, str]], cuts: list[int], newline: bytes) -> None:
    lines = [f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n" for name, data in events]
    stream = "".join(lines).encode().replace(b"\n", newline)
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    decoder = EventDecoder()
    found = [each for begin, end in pairwise(edges) for each in decoder.feed(stream[begin:end])]
    assert found == [Event(name, data.encode()) for name, data in events]


def test_an_event_without_end_is_refused() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"x" * 16 * 2**20) == []
    with pytest.raises(MalformedStreamError, match="16777216"):
        decoder.feed(b"x")


# Runs: many requests, on the real clock.


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted() as endpoint:
        yield endpoint


async def run(server: ScriptedServer, stop: asyncio.Event | None = None, **options: Any) -> Recording:
    """One run."""
    settings = LoadSettings(url=server.url, **options)
    clock = asyncio.get_running_loop().time
    async with open_session("key") as session:
        encoder = BodyEncoder(settings, "m")
        client = Client(session, settings.url + encoder.path, settings.timeout_s, clock)
        runner = LoadRunner(client, encoder, clock, concurrency=settings.concurrency)
        return await runner.run(make_plan(settings), stop or asyncio.Event())


async def test_a_run_sends_what_was_planned_and_keeps_every_request(server: ScriptedServer) -> None:
    options: dict[str, Any] = {"requests": 30, "workload": "sharegpt", "max_input_tokens": 50, "max_output_tokens": 9}
    recording = await run(server, **options, rate=1000.0)
    planned = [c.turns[0] for c in make_plan(LoadSettings(**options, rate=1000.0)).conversations]
    assert sorted(str(r["prompt"]) for r in server.requests) == sorted(str(json.loads(t.prompt)) for t in planned)
    assert [record.index for record in recording.records] == list(range(30))
    assert [record.outcome for record in recording.records] == [Outcome.OK] * 30
    assert [record.completion_tokens for record in recording.records] == [turn.output_tokens for turn in planned]
    assert all(record.planned_s <= record.due_s <= record.sent_s <= record.ended_s for record in recording.records)
    assert "Authorization: Bearer key" in server.heads[0]


async def test_an_open_loop_does_not_wait_for_answers(server: ScriptedServer) -> None:
    everyone = asyncio.Event()

    async def script(connection: Connection, body: dict[str, Any]) -> None:
        if server.num_open == 120:
            everyone.set()
        await everyone.wait()
        await obedient(connection, body)

    server.script = script
    recording = await run(server, requests=120, rate=2000.0)
    assert {record.outcome for record in recording.records} == {Outcome.OK}


async def test_a_cap_is_kept_and_waiting_for_room_is_no_lag_of_the_client(server: ScriptedServer) -> None:
    full = asyncio.Event()

    async def script(connection: Connection, body: dict[str, Any]) -> None:
        if server.num_open == 3:
            full.set()
        await full.wait()
        await obedient(connection, body)

    server.script = script
    recording = await run(server, requests=40, concurrency=3, output_tokens=4)
    assert server.most_open == 3
    records = recording.records
    assert {record.outcome for record in records} == {Outcome.OK}
    ends = [record.ended_s for record in records]
    assert all(record.due_s in ends for record in records[3:])


async def test_the_next_turn_holds_the_answer_of_the_last(server: ScriptedServer) -> None:
    recording = await run(server, api="chat", turns=3, requests=2, output_tokens=2, input_tokens=3)
    longest = [r["messages"] for r in server.requests if len(r["messages"]) == 5]
    assert [[m["role"] for m in messages] for messages in longest] == [["user", "assistant"] * 2 + ["user"]] * 2
    assert {m["content"] for messages in longest for m in messages if m["role"] == "assistant"} == {"xx"}
    assert [(record.index, record.turn) for record in recording.records] == [(i, t) for i in (0, 1) for t in (0, 1, 2)]
    by_turn = [record for record in recording.records if record.index == 0]
    assert all(later.planned_s >= earlier.ended_s for earlier, later in pairwise(by_turn))


async def test_turns_after_a_failure_are_not_sent_and_are_misses(server: ScriptedServer) -> None:
    async def script(connection: Connection, body: dict[str, Any]) -> None:
        if len(body["messages"]) == 3:
            await connection.answer("503 Service Unavailable", {"error": {"message": "no"}})
        else:
            await obedient(connection, body)

    server.script = script
    recording = await run(server, api="chat", turns=4, requests=1)
    summary = summarize(recording.records, Targets(ttft_s=100.0), [])
    assert summary["outcomes"] == {"ok": 1, "refused 503": 1, "abandoned": 2}
    assert summary["goodput"]["attainment"] == 0.25


async def test_tokens_are_counted_by_chunks_where_usage_lacks(server: ScriptedServer) -> None:
    async def script(connection: Connection, body: dict[str, Any]) -> None:
        await connection.begin()
        await connection.write(token() + token() + token(finish="length") + DONE)
        await connection.end()

    server.script = script
    tokens = summarize((await run(server, requests=2, output_tokens=4)).records, Targets(), [])["tokens"]
    assert (tokens["output"], tokens["counted_by_usage"], tokens["counted_by_chunks"]) == (6, 0, 2)
    assert tokens["output_not_as_asked"] == 2


async def test_stopping_keeps_what_is_done_and_ends_what_is_in_flight(server: ScriptedServer) -> None:
    async def script(connection: Connection, body: dict[str, Any]) -> None:
        if len(server.bodies) > 5:
            await connection.begin()
            await connection.write(token())
            await asyncio.Event().wait()
        await obedient(connection, body)

    server.script = script
    stop = asyncio.Event()
    running = asyncio.create_task(run(server, stop, requests=20, concurrency=2))
    await until(lambda: server.num_open == 2 and len(server.bodies) == 7, "two requests hang")
    stop.set()
    recording = await running
    assert recording.interrupted
    assert [record.outcome for record in recording.records].count(Outcome.OK) == 5
    assert [record.outcome for record in recording.records].count(Outcome.INTERRUPTED) == 2
    assert len(recording.records) == 7


async def test_the_endpoint_says_who_it_is(server: ScriptedServer) -> None:
    async with open_session(None) as session:
        endpoint = await probe(session, server.url, None)
        assert endpoint.as_json() == {
            "url": server.url,
            "model": "m",
            "server": "script",
            "model_card": {"id": "m", "max_model_len": 9},
        }
        with pytest.raises(OperatorError, match="serves m, not other"):
            await probe(session, server.url, "other")
