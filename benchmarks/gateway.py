"""Measure the gateway alone, on one core: streamed tokens and requests per second, and the delay that it adds.

    python -m benchmarks.gateway                        # about ten minutes

A gateway process, pinned to one core, runs between scripted workers (`benchmarks.scripted_workers`) and clients that
only count (`benchmarks.event_client`); workers and clients are in this process, on the other cores. Workers speak the
real protocol. There is one decode worker for each 64 streams, the default batch of a decode worker, and their steps are
at different times. Every event has one token, and at the end each stream must have received each of its tokens.

* `added`: time from a worker's handing a token to its channel until the client has its event, at a moderate pace.
* `streams`: the pace is raised until fewer tokens arrive than are sent; workers never wait for the gateway.
* `requests`: answers of two tokens to prompts of 200 words, a fixed number at a time.

In turns with it, streams are measured through `benchmarks.forwarder`, which forwards the same events from a scripted
server (`benchmarks.scripted_upstream`) at the same paces: the floor of a process that is written with aiohttp.

Processor time is that of all threads of the process, so the time for a token or a request does not depend on
other processes. Each configuration has a process of its own, and configurations take turns.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import uvloop

from benchmarks.command import Result, UsageError, run, show
from benchmarks.event_client import EventClient, post
from benchmarks.figures import cpu_seconds, spread
from benchmarks.load.prompts import WORDS
from benchmarks.load.summary import percentile
from benchmarks.pinned_processes import (
    Pool,
    Through,
    model_folder,
    through_forwarder,
    through_gateway,
    tokens_with_text,
)
from benchmarks.process import Process
from benchmarks.result_tables import FORWARDER
from benchmarks.scripted_batch import Batch, Script, Sequence
from gateway.access.connections import allow_connections

STREAMS = {1: 0.01, 100: 0.02, 1000: 0.2}
"""Number of open streams → seconds between a worker's steps at the moderate pace."""
BATCH = 64
"""Streams per decode worker."""
PROMPT_TOKENS = 128
CLIENTS = 64
"""Requests at a time in the measurement of requests."""
FASTER = 1.2
"""Factor from one pace to the next."""
KEPT_UP = 0.96
"""Share of the offered tokens per second that must arrive for the pace to be raised again."""

Figures = dict[str, Any]


# --- streams -----------------------------------------------------------------------------------------------------


def journeys_ms(arrivals: Iterable[tuple[float, int]], step_times: list[float]) -> list[float]:
    """Milliseconds from the step to the client of each token of a stream, without the first token.

    `arrivals` are (time, events so far). The first event is the prefill worker's token; each further event is the token
    of one step in `step_times`.
    """
    taken: list[float] = []
    for when, count in arrivals:
        taken += [1e3 * (when - step_times[step]) for step in range(len(taken), count - 1)]
    return taken


def stream_figures(moderate: Figures, journeys: list[float], paces: list[Figures]) -> Figures:
    """The figures of one configuration. The maximum throughput is that of the pace at which most tokens arrived."""
    best = max(paces, key=lambda pace: pace["received_per_s"])
    return {
        "added_p50_ms": statistics.median(journeys),
        "added_p99_ms": percentile(journeys, 99),
        "moderate_cpu_us_per_token": moderate["cpu_us_per_token"],
        "moderate": moderate,
        "tokens_per_s": best["received_per_s"],
        "cpu_us_per_token": best["cpu_us_per_token"],
        "gateway_share": best["gateway_share"],
        "load_share": best["load_share"],
        "paces": paces,
    }


class Streams:
    """Open streams through one process, and their measurements."""

    def __init__(self, pool: Pool, process: Process, clients: list[EventClient]) -> None:
        self.pool, self.process, self.clients = pool, process, clients

    @classmethod
    async def open(cls, pool: Pool, process: Process, port: int, number: int, seed: int) -> Streams:
        """Open `number` streams; return when each has its first token."""
        draw = random.Random(seed)
        loop = asyncio.get_running_loop()
        clients = []
        for index in range(number):
            prompt = [index // 256, index % 256, *(draw.randrange(256) for _ in range(PROMPT_TOKENS - 2))]
            body = {"prompt": prompt, "max_tokens": 2**19, "ignore_eos": True, "stream": True}
            client = EventClient(post("/v1/completions", body))
            await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
            clients.append(client)
        await asyncio.gather(*(client.first for client in clients))
        while len(pool.sequences()) < number:
            await asyncio.sleep(0.01)
        return cls(pool, process, clients)

    async def measure(self, interval_s: float, seconds: float) -> Figures:
        """Figures over `seconds`, after a warm-up of 0.5 s, with workers that step every `interval_s`."""
        self.pool.script.interval_s = interval_s
        await asyncio.sleep(0.5)
        before = self._counts()
        await asyncio.sleep(seconds)
        wall, cpu, load_cpu, sent, received = (b - a for a, b in zip(before, self._counts(), strict=True))
        return {
            "offered_per_s": len(self.clients) / interval_s,
            "sent_per_s": sent / wall,
            "received_per_s": received / wall,
            "cpu_us_per_token": 1e6 * cpu / received,
            "gateway_share": cpu / wall,
            "load_share": load_cpu / wall,
        }

    def _counts(self) -> tuple[float, ...]:
        received = sum(client.num_events for client in self.clients)
        return time.perf_counter(), cpu_seconds(self.process.pid), time.process_time(), self.pool.num_sent, received

    async def added(self, interval_s: float, seconds: float) -> tuple[Figures, list[float]]:
        """The same figures, and the milliseconds of each token from its worker to its client."""
        for client in self.clients:
            client.arrivals = []
        figures = await self.measure(interval_s, seconds)
        taken: list[float] = []
        for client, batch, sequence in self._places():
            taken += journeys_ms(client.arrivals or (), batch.step_times[sequence.first_step :])
            client.arrivals = None
        return figures, taken

    def _places(self) -> list[tuple[EventClient, Batch[Any], Sequence]]:
        """The client, batch and sequence of each stream; a stream's prompt begins with the stream's number."""
        places = self.pool.sequences()
        return [(self.clients[each.prompt[0] * 256 + each.prompt[1]], batch, each) for batch, each in places]

    async def caught_up(self) -> None:
        """Stop the steps, and wait until every token that was sent has arrived."""
        self.pool.script.interval_s = None
        async with asyncio.timeout(60):
            while sum(client.num_events for client in self.clients) < len(self.clients) + self.pool.num_sent:
                await asyncio.sleep(0.01)

    async def finish(self) -> None:
        """End all streams; require that each has received each of its tokens, and its end."""
        places = self._places()
        self.pool.script.last_step = True
        self.pool.script.interval_s = 0.01
        await asyncio.gather(*(client.ended for client in self.clients))
        wrong = [(client.num_events, each.num_sent) for client, _, each in places if client.num_events != each.num_sent]
        assert not wrong, f"events, and tokens, of streams that differ: {wrong}"


async def stream(
    through: Through, folder: Path, script: Script, number: int, seconds: float, pace_seconds: float, seed: int
) -> Figures:
    """One configuration: the delay added at a moderate pace, and how far the pace can be raised."""
    async with through(folder, -(-number // BATCH), script) as (pool, process, port):
        streams = await Streams.open(pool, process, port, number, seed)
        moderate, taken = await streams.added(STREAMS[number], seconds)
        rate = 0.6e6 / moderate["cpu_us_per_token"]
        paces: list[Figures] = []
        while not paces or paces[-1]["received_per_s"] >= KEPT_UP * paces[-1]["offered_per_s"]:
            paces.append(await streams.measure(number / rate, pace_seconds))
            rate *= FASTER
        await streams.caught_up()
        await streams.finish()
    return stream_figures(moderate, taken, paces)


# --- requests ----------------------------------------------------------------------------------------------------


async def requests(through: Through, folder: Path, tokens: tuple[int, ...], seconds: float, seed: int) -> Figures:
    """Requests per second, with `CLIENTS` requests at a time."""
    draw = random.Random(seed)
    script = Script(tokens, short=True)
    clients: list[EventClient] = []
    async with through(folder, 1, script) as (_, gateway, port):

        def counts() -> tuple[float, ...]:
            answers = sum(client.num_answers for client in clients)
            return time.perf_counter(), cpu_seconds(gateway.pid), time.process_time(), answers

        for _ in range(CLIENTS):
            prompt = " ".join(draw.choices(WORDS, k=200))
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
            clients.append(EventClient(post("/v1/completions", body), again=True))
        for client in clients:
            await asyncio.get_running_loop().create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        await asyncio.gather(*(client.ended for client in clients))
        await asyncio.sleep(1.0)
        before = counts()
        await asyncio.sleep(seconds)
        after = counts()
        for client in clients:
            client.close()
    wall, cpu, load_cpu, number = (b - a for a, b in zip(before, after, strict=True))
    return {
        "requests_per_s": number / wall,
        "cpu_us_per_request": 1e6 * cpu / number,
        "gateway_share": cpu / wall,
        "load_share": load_cpu / wall,
    }


# --- all of it ---------------------------------------------------------------------------------------------------


def summary(rounds: list[Figures]) -> Figures:
    """The spread of each figure over the rounds, by configuration."""
    return {
        name: {
            figure: spread([each[name][figure] for each in rounds])
            for figure, value in rounds[0][name].items()
            if isinstance(value, float)
        }
        for name in rounds[0]
    }


def measure(
    scratch: Path,
    *,
    streams: Annotated[tuple[int, ...], f"of {', '.join(map(str, STREAMS))}"] = tuple(STREAMS),
    rounds: int = 3,
    seconds: Annotated[float, "at a moderate pace, and of requests"] = 4.0,
    pace_seconds: Annotated[float, "at each higher pace"] = 2.0,
    gateway_options: Annotated[str, "for the gateway, as one word"] = "",
) -> Result:
    """Measure every configuration, in turns."""
    if not STREAMS.keys() >= set(streams):
        raise UsageError(f"streams are some of {', '.join(map(str, STREAMS))}")
    core, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or {core})
    allow_connections(2 * max(STREAMS))
    gc.freeze()
    folder, found = model_folder(scratch), []
    tokens = tokens_with_text(folder)

    async def one_round(seed: int) -> Figures:
        figures: Figures = {}
        gateway = partial(through_gateway, core=core, options=gateway_options.split())
        for number in streams:
            for name, through in (
                (f"{number}", gateway),
                (f"{FORWARDER}{number}", partial(through_forwarder, core=core)),
            ):
                figures[name] = await stream(through, folder, Script(tokens), number, seconds, pace_seconds, seed)
                show(f"{seed}  {name} streams", figures[name])
        figures["requests"] = await requests(gateway, folder, tokens, seconds, seed)
        show(f"{seed}  requests", figures["requests"])
        return figures

    for seed in range(rounds):
        found.append(uvloop.run(one_round(seed)))
        gc.collect()
    workload = {"seeds": list(range(rounds)), "prompt_tokens": PROMPT_TOKENS, "batch": BATCH, "clients": CLIENTS}
    return Result(name="gateway", figures=summary(found) | {"rounds": found}, workload=workload)


if __name__ == "__main__":
    run(measure, __doc__)
