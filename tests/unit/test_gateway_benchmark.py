"""What the gateway's benchmark counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.event_client import EventClient, post
from benchmarks.gateway import journeys_ms, stream_figures, summary
from benchmarks.pinned_processes import tokens_with_text
from benchmarks.results_page import part
from common.runtime.checkpoint import DEMO_FOLDER

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"}\\n"}]}\n\n'


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def framed(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def connected(**options: Any) -> tuple[EventClient, Transport]:
    client, transport = EventClient(b"ask", **options), Transport()
    client.connection_made(transport)  # type: ignore[arg-type]
    return client, transport


async def test_events_are_counted_wherever_they_are_cut() -> None:
    answer = HEAD + framed(EVENT, EVENT + EVENT, b"data: [DONE]\n\n")
    for cut in range(len(HEAD), len(answer)):
        for second in {cut + 1, cut + 2, len(answer)}:
            client, _ = connected()
            for data in (answer[:cut], answer[cut:second], answer[second:]):
                if data:
                    client.data_received(data)
            assert client.num_events == 3, (cut, second)
            assert client.first.done()


async def test_an_answer_may_be_asked_for_again() -> None:
    client, transport = connected(again=True)
    for _ in range(3):
        client.data_received(HEAD + framed(EVENT, b"data: [DONE]\n\n"))
    assert (client.num_answers, client.num_events, transport.written) == (3, 3, [b"ask"] * 4)


async def test_a_refusal_and_a_lost_connection_show() -> None:
    client, _ = connected()
    client.data_received(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
    with pytest.raises(RuntimeError, match="429"):
        await client.first
    client.connection_lost(None)
    with pytest.raises(ConnectionError):
        await client.ended


async def test_arrivals_are_stamped_once_that_is_asked_for() -> None:
    client, _ = connected()
    client.data_received(HEAD)
    client.arrivals = []
    client.data_received(EVENT + EVENT)
    client.data_received(EVENT)
    assert [count for _, count in client.arrivals] == [2, 3]
    await asyncio.sleep(0)


def test_a_request_is_http() -> None:
    head, _, body = post("/v1/completions", {"prompt": "é"}).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"prompt": "é"}


def test_answers_are_made_of_tokens_that_are_text() -> None:
    assert 100 < len(tokens_with_text(DEMO_FOLDER)) < 860


def test_a_token_s_journey_is_from_its_step_to_its_event() -> None:
    steps = [10.0, 11.0, 12.0, 13.0]
    assert journeys_ms([(9.5, 1), (10.25, 2), (11.5, 3)], steps) == [250.0, 500.0], "the first event is of no step"
    assert journeys_ms([(12.5, 4), (12.75, 4), (14.0, 5)], steps) == [2500.0, 1500.0, 500.0, 1000.0], "several at once"
    assert journeys_ms([], steps) == journeys_ms([(9.0, 0)], steps) == []
    with pytest.raises(IndexError):
        journeys_ms([(14.0, 6)], steps)  # more events than steps


def test_at_most_is_the_pace_at_which_most_arrived() -> None:
    """The last pace was too much: what arrived was less again, and each token dearer."""

    def pace(received_per_s: float, cpu_us: float, share: float) -> dict[str, float]:
        figures = {"received_per_s": received_per_s, "cpu_us_per_token": cpu_us, "gateway_share": share}
        return {"offered_per_s": 9e9, "load_share": share / 2, **figures}

    paces = [pace(100.0, 50.0, 0.5), pace(300.0, 30.0, 1.0), pace(200.0, 40.0, 0.75)]
    journeys = [float(number) for number in range(200, 0, -1)]
    moderate = pace(10.0, 80.0, 0.1)
    assert stream_figures(moderate, journeys, paces) == {
        "added_p50_ms": 100.5,
        "added_p99_ms": 198.01,
        "moderate_cpu_us_per_token": 80.0,
        "moderate": moderate,
        "tokens_per_s": 300.0,
        "cpu_us_per_token": 30.0,
        "gateway_share": 1.0,
        "load_share": 0.5,
        "paces": paces,
    }
    assert journeys[0] == 200.0, "as it was"


def test_rounds_are_summed_up_by_configuration() -> None:
    rounds = [
        {"1": {"added_p50_ms": a, "paces": [], "moderate": {}}, "requests": {"requests_per_s": b}}
        for a, b in ((3.0, 50.0), (1.0, 70.0), (8.0, 60.0))
    ]
    assert summary(rounds) == {
        "1": {"added_p50_ms": {"min": 1.0, "p50": 3.0, "p90": 7.0, "max": 8.0, "n": 3}},
        "requests": {"requests_per_s": {"min": 50.0, "p50": 60.0, "p90": 68.0, "max": 70.0, "n": 3}},
    }


def test_the_record_becomes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    streams = {
        "added_p50_ms": 0.5,
        "added_p99_ms": 2.0,
        "moderate_cpu_us_per_token": 40.0,
        "tokens_per_s": 20500.0,
        "cpu_us_per_token": 30.0,
        "gateway_share": 0.99,
        "load_share": 0.5,
    }
    asked = {"requests_per_s": 900.0, "cpu_us_per_request": 1100.0, "gateway_share": 0.99, "load_share": 0.2}
    slower = streams | {"tokens_per_s": 19000.0, "added_p99_ms": 3.0}
    plain = streams | {"cpu_us_per_token": 12.0, "added_p50_ms": 0.25}
    rounds = [
        {"100": each | {"paces": []}, "forwarder 100": plain, "requests": asked} for each in (streams, streams, slower)
    ]
    machine = {"cpu": "Abacus", "cores": 2}
    run = {
        "command": "c",
        "commit": "c",
        "product": "p",
        "machine": machine,
        "figures": summary(rounds) | {"rounds": rounds},
    }
    (tmp_path / "gateway.json").write_text(json.dumps(run))
    head = "| 100 | 0.50 (0.50 to 0.50) | 2.0 (2.0 to 3.0) | 20,500 (19,000 to 20,500) | "
    assert head + "40 (40 to 40) | 30 (30 to 30) | 99 % |" in part("gateway")
    head = "| 100, forwarder | 0.25 (0.25 to 0.25) | 2.0 (2.0 to 2.0) | 20,500 (20,500 to 20,500) | "
    assert head + "40 (40 to 40) | 12 (12 to 12) | 99 % |" in part("gateway")
    assert part("gateway").count("\n| ") == 4, "head, rule, and a row for each process"
    assert "| 900 (900 to 900) | 1100 (1100 to 1100) | 99 % |" in part("gateway requests")
