"""`baton bench`: one run; `baton bench sweep`, `report` and `plot`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmarks.load import results
from benchmarks.load.client import Client, open_session
from benchmarks.load.encode import BodyEncoder
from benchmarks.load.endpoint import Endpoint, probe
from benchmarks.load.plan import Plan, make_plan, warmup_plan
from benchmarks.load.plots import plot_files
from benchmarks.load.record import Outcome, Record
from benchmarks.load.results import Measured
from benchmarks.load.runner import LoadRunner, Recording
from benchmarks.load.settings import LoadSettings, PlotSettings, ReportSettings, SweepSettings, load
from benchmarks.load.sweep import RateSearch
from benchmarks.load.tables import run_table, sweep_table, warnings_of
from common.contract.errors import OperatorError
from common.runtime.descriptors import allow_descriptors
from common.runtime.lifecycle import exit_on_operator_error, freeze_startup_objects, run

EXIT_INTERRUPTED = 130
_SPARE_DESCRIPTORS = 64
"""Open files that are no connections of requests."""
_WARMUP_CONCURRENCY = 8
_PROGRAM = "baton bench"


class Bench:
    """Runs plans against one endpoint, with a progress bar on a terminal."""

    def __init__(self, settings: LoadSettings, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._settings = settings
        self._session = session
        self._endpoint = endpoint

    async def warm_up(self, stop: asyncio.Event) -> None:
        """Send requests that do not count. Raises `OperatorError` if none succeeds, since the measured ones would fail,
        too."""
        if not self._settings.warmup:
            return
        concurrency = self._settings.concurrency or _WARMUP_CONCURRENCY
        recording = await self._run(warmup_plan(self._settings), concurrency, "warm-up", stop)
        if not recording.interrupted and all(record.outcome is not Outcome.OK for record in recording.records):
            first = recording.records[0]
            raise OperatorError(f"no warm-up request succeeded; the first: {first.cause}: {first.detail}")

    async def measure(self, settings: LoadSettings, plan: Plan, label: str, stop: asyncio.Event) -> Measured:
        """Send the requests that count; return their records."""
        digest = plan.digest()
        freeze_startup_objects()
        recording = await self._run(plan, settings.concurrency, label, stop)
        return Measured(plan_digest=digest, recording=recording, targets=results.targets_of(settings))

    async def _run(self, plan: Plan, concurrency: int | None, label: str, stop: asyncio.Event) -> Recording:
        most = len(plan.conversations)
        _allow_connections(most if concurrency is None else min(most, concurrency))
        begun = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - begun

        encoder = BodyEncoder(self._settings, self._endpoint.model)
        client = Client(self._session, self._endpoint.url + encoder.path, self._settings.timeout_s, clock)
        with tqdm(total=plan.num_requests, desc=label, unit="req", disable=None, leave=False) as bar:

            def on_record(record: Record) -> None:
                bar.update()

            runner = LoadRunner(client, encoder, clock, concurrency=concurrency, on_record=on_record)
            return await runner.run(plan, stop)


def _allow_connections(most: int) -> None:
    """Let the process have as many files open as `most` requests at a time may need; warn if the system does not."""
    needed = most + _SPARE_DESCRIPTORS
    allowed = allow_descriptors(needed)
    if allowed < needed:
        _warn([f"up to {most} requests at a time may need {needed} open files, and the system allows {allowed}"])


Work = Callable[[Bench, Endpoint], Coroutine[Any, Any, None]]


async def _with_bench(settings: LoadSettings, work: Work, stop: asyncio.Event) -> None:
    """Find the endpoint, warm up, and do the work; `stop` ends any of these."""
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    async with open_session(key) as session:
        probing = asyncio.create_task(probe(session, settings.url, settings.model))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([probing, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not probing.done():
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            return
        endpoint = probing.result()
        bench = Bench(settings, session, endpoint)
        await bench.warm_up(stop)
        if not stop.is_set():
            await work(bench, endpoint)


async def _run_once(settings: LoadSettings, argv: Sequence[str], stop: asyncio.Event) -> None:
    plan = make_plan(settings)

    async def work(bench: Bench, endpoint: Endpoint) -> None:
        started = _now()
        measured = await bench.measure(settings, plan, "run", stop)
        summary = measured.summary()
        print(f"{endpoint.model} at {endpoint.url} ({endpoint.server or 'server unnamed'})")
        print(run_table(summary))
        _warn(warnings_of(summary, exact_lengths=settings.ignore_eos))
        _warn_of_failures(measured)
        if settings.output is not None:
            body = results.heading("run", settings, endpoint, argv, started)
            body["run"] = measured.as_json(with_timeline=settings.timeline)
            results.write(settings.output, body)
            print(settings.output)
        if not summary["succeeded"] and not stop.is_set():
            raise OperatorError("no request succeeded")

    await _with_bench(settings, work, stop)


async def _sweep(settings: SweepSettings, argv: Sequence[str], stop: asyncio.Event) -> None:
    search = RateSearch(
        next_rate=settings.rate,
        attainment=settings.attainment,
        factor=settings.rate_factor,
        bisections=settings.bisections,
        max_steps=settings.max_steps,
    )
    points: list[dict[str, Any]] = []

    async def work(bench: Bench, endpoint: Endpoint) -> None:
        started = _now()
        while (rate := search.next_rate) is not None and not stop.is_set():
            # Each rate has its own seed, so that no prompt is in the server's prefix cache already.
            step = settings.model_copy(update={"rate": rate, "seed": settings.seed + len(points)})
            measured = await bench.measure(step, make_plan(step), f"{rate:g}/s", stop)
            summary = measured.summary()
            if summary["requests"]:
                points.append(
                    {"rate": rate, "seed": step.seed, "run": measured.as_json(with_timeline=settings.timeline)}
                )
            _warn(f"at {rate:g}/s: {text}" for text in warnings_of(summary, exact_lengths=settings.ignore_eos))
            _warn_of_failures(measured)
            if not stop.is_set():
                search.observe(summary["goodput"]["attainment"])
        print(f"{endpoint.model} at {endpoint.url} ({endpoint.server or 'server unnamed'})")
        print(sweep_table(points))
        print(_verdict(search, settings.attainment))
        if settings.output is not None:
            body = results.heading("sweep", settings, endpoint, argv, started)
            results.write(settings.output, body | {"points": points, "held": search.held, "broke": search.broke})
            print(settings.output)

    await _with_bench(settings, work, stop)


def _verdict(search: RateSearch, attainment: float) -> str:
    share = f"{100 * attainment:g} % of requests"
    if search.held is None:
        return f"at no rate tried did {share} meet the targets"
    broke = "no rate tried broke them" if search.broke is None else f"at {search.broke:g}/s no longer"
    return f"{share} meet the targets at up to {search.held:g}/s; {broke}"


def _warn(texts: Iterable[str]) -> None:
    for text in texts:
        print(f"warning: {text}", file=sys.stderr)


def _warn_of_failures(measured: Measured) -> None:
    """Print one example of each cause of failure."""
    shown: set[str] = {Outcome.OK, Outcome.INTERRUPTED, Outcome.ABANDONED}
    for record in measured.recording.records:
        if record.cause not in shown:
            shown.add(record.cause)
            _warn([f"{record.cause}, for example: {record.detail}"])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _report(settings: ReportSettings) -> None:
    body = results.read(settings.file)
    summaries = results.recomputed(body, settings.file)
    print(f"{body['command']} ({body['started']}); recomputed from the timeline, and equal")
    if body["kind"] == "sweep":
        print(sweep_table(body["points"]))
    else:
        print(run_table(summaries[0]))


def _plot(settings: PlotSettings) -> None:
    bodies: Mapping[str, dict[str, Any]] = {path.stem: results.read(path) for path in settings.files}
    if len(bodies) < len(settings.files):
        raise OperatorError("the files' names must differ: they label the curves")
    for path in plot_files(bodies, settings.folder, settings.format):
        print(path)


def _measure(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run until done or Ctrl-C. After Ctrl-C, report the results so far and exit with 130."""
    interrupted = False

    async def body(stop: asyncio.Event) -> None:
        nonlocal interrupted
        try:
            await serve(stop)
        finally:
            interrupted = stop.is_set()

    run(body)
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)


def _dispatch(arguments: Sequence[str]) -> None:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    program = f"{_PROGRAM} {command}"
    argv = [*_PROGRAM.split(), *arguments]
    match command:
        case "sweep":
            sweep_settings = load(SweepSettings, program, rest)
            _check_output(sweep_settings.output)
            _measure(lambda stop: _sweep(sweep_settings, argv, stop))
        case "report":
            _report(load(ReportSettings, program, rest))
        case "plot":
            _plot(load(PlotSettings, program, rest))
        case _:
            if command in ("-h", "--help"):
                print("usage: baton bench [options]         one run, as below")
                print("       baton bench sweep [options]   rates upward until goodput breaks (--help)")
                print("       baton bench report FILE       figures again, from a file's timeline")
                print("       baton bench plot FILE...      pictures of results (--help)\n")
            settings = load(LoadSettings, _PROGRAM, arguments)
            _check_output(settings.output)
            _measure(lambda stop: _run_once(settings, argv, stop))


def _check_output(path: Path | None) -> None:
    """Check before the run that the output file can be written. Raises `OperatorError`."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise OperatorError(f"there is no folder {path.parent} for --output")
    results.check(path)


def main() -> None:
    """Entry point."""
    exit_on_operator_error(lambda: _dispatch(sys.argv[1:]))
