"""Measure the gateway alone, on one core: streamed tokens and requests per second, and the delay that it adds.

    python -m benchmarks.gateway                        # about five minutes

A gateway process, pinned to one core, runs between scripted workers (`benchmarks.scripted_workers`) and clients that
only count (`benchmarks.event_client`); workers and clients are in this process, on the other cores. Workers speak the
real protocol. There is one decode worker for each 64 streams, the default batch of a decode worker, and their steps are
at different times. Every event has one token, and at the end each stream must have received each of its tokens.

* `added`: time from a worker's handing a token to its channel until the client has its event, at a moderate pace.
* `streams`: the pace is raised until fewer tokens arrive than are sent; workers never wait for the gateway.
* `requests`: answers of two tokens to prompts of 200 words, a fixed number at a time.

Processor time is that of all threads of the gateway process, so the time for a token or a request does not depend on
other processes. Each configuration has a gateway of its own, and configurations take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from tokenizers import Tokenizer

from benchmarks.event_client import EventClient, post
from benchmarks.load.prompts import WORDS
from benchmarks.record import record, spread
from benchmarks.scripted_workers import Script, ScriptedPool, ScriptedWorker, Sequence
from common.contract.kv_layout import Fingerprint, KVLayout
from common.runtime.checkpoint import DEMO_FOLDER, config_hash
from common.runtime.clock import Pulse

STREAMS = {1: 0.01, 100: 0.02, 1000: 0.2}
"""Number of open streams → seconds between a worker's steps at the moderate pace."""
BATCH = 64
"""Streams per decode worker."""
PROMPT_TOKENS = 128
CLIENTS = 64
"""Requests at a time in the measurement of requests."""
PULSE = Pulse(timeout_s=60.0)
"""A long timeout: a gateway that gets more than it can forward must fall behind, and not lose its workers."""
FASTER = 1.2
"""Factor from one pace to the next."""
KEPT_UP = 0.96
"""Share of the offered tokens per second that must arrive for the pace to be raised again."""

Figures = dict[str, Any]


# --- the gateway process -----------------------------------------------------------------------------------------


class GatewayProcess:
    """A `baton gateway` process, pinned to a core if one is given."""

    def __init__(self, folder: Path, pool: ScriptedPool, core: int | None, options: list[str]) -> None:
        self._log = folder / "gateway.log"
        reader, writer = os.pipe()
        places = ["--prefill-workers", pool.prefill.bind()]
        places += ["--decode-workers", ",".join(worker.bind() for worker in pool.decode)]
        places += ["--heartbeat-timeout-s", str(PULSE.timeout_s)]
        command = [sys.executable, "-m", "gateway", "--model", str(folder), "--port", "0", *places, *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--announce-fd", str(writer)],
                pass_fds=(writer,),
                stderr=log,
                preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
            )
        os.close(writer)
        self._announcements = os.fdopen(reader)

    def wait_ready(self) -> int:
        """Wait until it serves; return its port."""
        for line in self._announcements:
            said = json.loads(line)
            if said.get("ready"):
                return int(said["url"].rpartition(":")[2])
        raise SystemExit("the gateway has not started")

    def log_tail(self) -> str:
        """The end of its log."""
        return self._log.read_text()[-2000:]

    def cpu_s(self) -> float:
        """Processor time of all its threads, in seconds, to the nanosecond (Linux has a clock for each process id)."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def close(self) -> None:
        """Stop it."""
        self.process.kill()
        self.process.wait()
        self._announcements.close()


@asynccontextmanager
async def serving(
    folder: Path, num_decode: int, script: Script, options: argparse.Namespace
) -> AsyncIterator[tuple[ScriptedPool, GatewayProcess, int]]:
    """A context with a pool, its gateway, and the gateway's port."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
    fingerprint = Fingerprint(config_hash=config_hash(folder), weights_hash="", layout=layout)
    pool = ScriptedPool(fingerprint, num_decode, script, PULSE)
    gateway = GatewayProcess(folder, pool, options.core, options.gateway_options.split())
    running = asyncio.create_task(pool.run())
    try:
        yield pool, gateway, await asyncio.to_thread(gateway.wait_ready)
    except BaseException:
        print(gateway.log_tail())
        raise
    finally:
        gateway.close()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def model_folder(folder: Path) -> Path:
    """Write the files that a gateway reads: the demo model's tokenizer, and a configuration for long answers."""
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"max_position_embeddings": 2**20}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return folder


def tokens_with_text(folder: Path) -> tuple[int, ...]:
    """The token ids that are complete text by themselves, so that each of them gives one event."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    return tuple(token for token, text in texts.items() if text and "\N{REPLACEMENT CHARACTER}" not in text)


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
    taken, best = sorted(journeys), max(paces, key=lambda pace: pace["received_per_s"])
    return {
        "added_p50_ms": statistics.median(taken),
        "added_p99_ms": taken[int(0.99 * len(taken))],
        "moderate_cpu_us_per_token": moderate["cpu_us_per_token"],
        "moderate": moderate,
        "tokens_per_s": best["received_per_s"],
        "cpu_us_per_token": best["cpu_us_per_token"],
        "gateway_share": best["gateway_share"],
        "load_share": best["load_share"],
        "paces": paces,
    }


class Streams:
    """Open streams through one gateway, and their measurements."""

    def __init__(self, pool: ScriptedPool, gateway: GatewayProcess, clients: list[EventClient]) -> None:
        self.pool, self.gateway, self.clients = pool, gateway, clients

    @classmethod
    async def open(cls, pool: ScriptedPool, gateway: GatewayProcess, port: int, number: int, seed: int) -> Streams:
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
        return cls(pool, gateway, clients)

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
        return time.perf_counter(), self.gateway.cpu_s(), time.process_time(), self.pool.num_sent, received

    async def added(self, interval_s: float, seconds: float) -> tuple[Figures, list[float]]:
        """The same figures, and the milliseconds of each token from its worker to its client."""
        for client in self.clients:
            client.arrivals = []
        figures = await self.measure(interval_s, seconds)
        taken: list[float] = []
        for client, worker, sequence in self._places():
            taken += journeys_ms(client.arrivals or (), worker.step_times[sequence.first_step :])
            client.arrivals = None
        return figures, taken

    def _places(self) -> list[tuple[EventClient, ScriptedWorker, Sequence]]:
        """The client, decode worker and sequence of each stream; a stream's prompt begins with the stream's number."""
        places = self.pool.sequences()
        return [(self.clients[each.work.token_ids[0] * 256 + each.work.token_ids[1]], w, each) for w, each in places]

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


async def stream(folder: Path, tokens: tuple[int, ...], number: int, options: argparse.Namespace, seed: int) -> Figures:
    """One configuration: the delay added at a moderate pace, and how far the pace can be raised."""
    async with serving(folder, -(-number // BATCH), Script(tokens), options) as (pool, gateway, port):
        streams = await Streams.open(pool, gateway, port, number, seed)
        moderate, taken = await streams.added(STREAMS[number], options.seconds)
        rate = 0.6e6 / moderate["cpu_us_per_token"]
        paces: list[Figures] = []
        while not paces or paces[-1]["received_per_s"] >= KEPT_UP * paces[-1]["offered_per_s"]:
            paces.append(await streams.measure(number / rate, options.pace_seconds))
            rate *= FASTER
        await streams.caught_up()
        await streams.finish()
    return stream_figures(moderate, taken, paces)


# --- requests ----------------------------------------------------------------------------------------------------


async def requests(folder: Path, tokens: tuple[int, ...], options: argparse.Namespace, seed: int) -> Figures:
    """Requests per second, with `CLIENTS` requests at a time."""
    draw = random.Random(seed)
    script = Script(tokens, short=True)
    async with serving(folder, 1, script, options) as (_, gateway, port):
        clients = []
        for _ in range(CLIENTS):
            prompt = " ".join(draw.choices(WORDS, k=200))
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
            clients.append(EventClient(post("/v1/completions", body), again=True))
        for client in clients:
            await asyncio.get_running_loop().create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        await asyncio.gather(*(client.ended for client in clients))
        await asyncio.sleep(1.0)
        before = time.perf_counter(), gateway.cpu_s(), time.process_time(), sum(each.num_answers for each in clients)
        await asyncio.sleep(options.seconds)
        after = time.perf_counter(), gateway.cpu_s(), time.process_time(), sum(each.num_answers for each in clients)
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


async def measure(folder: Path, options: argparse.Namespace) -> list[Figures]:
    """Measure every configuration, in turns."""
    tokens = tokens_with_text(folder)
    rounds = []
    for number in range(options.rounds):
        each: Figures = {}
        for streams in options.streams:
            each[str(streams)] = found = await stream(folder, tokens, streams, options, number)
            print(f"{number}  {streams:5} streams  {line(found)}", flush=True)
        each["requests"] = found = await requests(folder, tokens, options, number)
        print(f"{number}      requests  {line(found)}", flush=True)
        rounds.append(each)
        gc.collect()
    return rounds


def line(figures: Figures) -> str:
    """One line for the terminal."""
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, float))


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


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="at a moderate pace, and of requests")
    parser.add_argument("--pace-seconds", type=float, default=2.0, help="at each higher pace")
    parser.add_argument("--gateway-options", default="", help="for the gateway, as one word")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    options.core, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or {options.core})
    gc.freeze()
    with TemporaryDirectory() as scratch:
        rounds = uvloop.run(measure(model_folder(Path(scratch)), options))
    figures = summary(rounds)
    for name, each in figures.items():
        print(f"{name:>10}  ", "  ".join(f"{figure} {value['p50']:.4g}" for figure, value in each.items()))
    if not options.no_record:
        workload = {name: value for name, value in vars(options).items() if name not in ("no_record", "core")}
        workload |= {
            "seeds": list(range(options.rounds)),
            "prompt_tokens": PROMPT_TOKENS,
            "batch": BATCH,
            "clients": CLIENTS,
        }
        print(record("gateway", workload=workload, figures=figures | {"rounds": rounds}, seed=0))


if __name__ == "__main__":
    main()
