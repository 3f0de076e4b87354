"""`baton bench` as a process: what it prints, writes, refuses, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from load_server import Connection, ScriptedServer, obedient, scripted, token
from pydantic import BaseModel
from stack import until

from benchmarks.load import plots, results
from benchmarks.load.settings import LoadSettings, PlotSettings, ReportSettings, SweepSettings, load
from common.contract.errors import OperatorError

COMMANDS: dict[str, type[BaseModel]] = {
    "": LoadSettings,
    "sweep": SweepSettings,
    "report": ReportSettings,
    "plot": PlotSettings,
}
GOAL = ("--ttft-target-s", "60")


def test_a_copy_in_somebody_elses_repository_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is installed into an environment there."""
    for module in ("record", "load.results"):
        monkeypatch.setattr(f"benchmarks.{module}.ROOT", Path(__file__).parent)
    assert results._commit() is None


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted() as endpoint:
        yield endpoint


async def start(*arguments: str, before: Sequence[str] = (), **env: str) -> asyncio.subprocess.Process:
    """`baton bench ARGUMENTS`, running, by a command that is to come before it."""
    return await asyncio.create_subprocess_exec(
        *(*before, sys.executable, "-m", "benchmarks.load", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        env=os.environ | env,
    )


async def bench(*arguments: str, before: Sequence[str] = (), **env: str) -> tuple[int | None, str, str]:
    """Its exit code and what it printed."""
    process = await start(*arguments, before=before, **env)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus", "1"], "unrecognized arguments: --bogus"),
        (["--url", "ftp://x"], "--url: Value error, 'ftp://x' is not http://host:port"),
        (["--rate", "nan"], "--rate: Input should be greater than 0"),
        (["--requests", "0"], "--requests: Input should be greater"),
        (["--extra-body", "[1]"], "--extra-body: Value error, not a JSON object"),
        (["--extra-body", "{"], "--extra-body: Value error, not JSON"),
        (["--extra-body", '{"stream": false}'], "may not set stream"),
        (["--workload", "novel"], "--workload: Input should be 'fixed'"),
        (["--turns", "2"], "turns above 1 need api chat"),
        (["--think-time-s", "2"], "think_time_s needs turns above 1"),
        (["--arrivals", "trace"], "trace goes with"),
        (["--trace", "x"], "trace goes with"),
        (["--cv", "2"], "cv needs arrivals gamma"),
        (["--duration-s", "2"], "duration_s needs a finite rate"),
        (["--token-low", "9", "--token-high", "8"], "token_high is below token_low"),
        (["--timeline"], "timeline needs output"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(OperatorError, match="baton bench") as caught:
        load(LoadSettings, "baton bench", arguments)
    assert message in str(caught.value)


def test_a_sweep_needs_targets_and_a_rate() -> None:
    with pytest.raises(OperatorError, match="needs ttft_target_s"):
        load(SweepSettings, "baton bench sweep", [])
    with pytest.raises(OperatorError, match="finite rate"):
        load(SweepSettings, "baton bench sweep", [*GOAL, "--rate", "inf"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is_for(command: str) -> None:
    assert [name for name, field in COMMANDS[command].model_fields.items() if not field.description] == []


def test_options_are_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_BENCH_REQUESTS", "7")
    monkeypatch.setenv("BATON_BENCH_EXTRA_BODY", '{"top_k": 1}')
    settings = load(LoadSettings, "baton bench", ["--url", "http://h:1/v1/"])
    assert (settings.requests, settings.extra_body, settings.url) == (7, {"top_k": 1}, "http://h:1")
    monkeypatch.setenv("BATON_BENCH_REQEUSTS", "7")
    with pytest.raises(OperatorError, match="unknown environment variable BATON_BENCH_REQEUSTS"):
        load(LoadSettings, "baton bench", [])


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OperatorError, match=r"pip install '\.\[bench\]'"):
        plots.plot_files({}, tmp_path, "png")


@pytest.mark.processes
async def test_a_run_is_reported_written_and_computed_again(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ("--url", server.url, "--requests", "12", "--warmup", "3", "--output-tokens", "5", "--seed", "9", *GOAL)
    code, out, err = await bench(
        *options, "--output", str(path), "--timeline", "--api-key", "hush", BATON_BENCH_CONCURRENCY="4"
    )
    assert code == 0, err
    assert "12 in" in out
    assert "12 of 12 (100.0 %) meet TTFT 60 s" in out
    assert len(server.bodies) == 15
    body = json.loads(path.read_text())
    assert "hush" not in path.read_text()
    assert body["command"].startswith("baton bench --url")
    assert body["endpoint"] | {"url": ""} == {
        "url": "",
        "model": "m",
        "server": "script",
        "model_card": {"id": "m", "max_model_len": 9},
    }
    assert (body["settings"]["seed"], body["settings"]["concurrency"], body["settings"]["rate"]) == (9, 4, None)
    assert {"python", "aiohttp"} <= body["versions"].keys()
    assert body["run"]["summary"]["tokens"]["output"] == 60
    assert len(body["run"]["timeline"]["records"]) == 12
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]

    code, again, err = await bench("report", str(path))
    assert code == 0, err
    figures = [line for line in out.splitlines() if line not in (out.splitlines()[0], str(path))]
    assert again.splitlines()[1:] == figures

    body["run"]["timeline"]["records"][0]["sent_s"] -= 1
    path.write_text(json.dumps(body))
    code, _, err = await bench("report", str(path))
    assert (code, "does not follow from its timeline" in err) == (2, True)


@pytest.mark.processes
async def test_the_same_command_sends_the_same_bytes(server: ScriptedServer) -> None:
    options = ("--url", server.url, "--requests", "6", "--workload", "sharegpt", "--seed", "2", "--concurrency", "1")
    assert (await bench(*options))[0] == 0
    assert (await bench(*options))[0] == 0
    assert server.bodies[:6] == server.bodies[6:]


@pytest.mark.processes
async def test_a_sweep_and_its_pictures(server: ScriptedServer, tmp_path: Path) -> None:
    """From the third rate on, every other request is refused."""

    async def script(connection: Connection, body: dict[str, Any]) -> None:
        if len(server.bodies) > 16 and len(server.bodies) % 2:
            await connection.answer("429 Too Many Requests", {"error": {"message": "full"}})
        else:
            await obedient(connection, body)

    server.script = script
    path = tmp_path / "sweep.json"
    options = ("--url", server.url, "--rate", "100", "--requests", "8", "--bisections", "1", "--output-tokens", "3")
    code, out, err = await bench("sweep", *options, *GOAL, "--output", str(path), "--timeline")
    assert code == 0, err
    body = json.loads(path.read_text())
    assert [point["rate"] for point in body["points"]] == [100, 200, 400, 300]
    assert (body["held"], body["broke"]) == (200, 300)
    assert "up to 200/s; at 300/s no longer" in out
    assert len(set(server.bodies)) == len(server.bodies), "no prompt is sent twice"
    assert [run["summary"]["outcomes"].get("refused 429", 0) for run in (p["run"] for p in body["points"])] == [
        0,
        0,
        4,
        4,
    ]

    code, again, err = await bench("report", str(path))
    assert code == 0, err
    assert again.splitlines()[1:] == out.splitlines()[1:-2]


@pytest.mark.processes
async def test_pictures(server: ScriptedServer, tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    options = ("--url", server.url, "--requests", "4", "--rate", "200", "--output-tokens", "3", *GOAL)
    assert (await bench(*options, "--output", str(one), "--timeline"))[0] == 0
    assert (await bench("sweep", *options, "--output", str(many), "--max-steps", "2"))[0] == 0
    code, out, err = await bench("plot", str(one), str(many), "--folder", str(tmp_path))
    assert code == 0, err
    assert sorted(Path(line).name for line in out.splitlines()) == ["goodput.png", "latency.png", "timeline-one.png"]
    assert all(Path(line).read_bytes().startswith(b"\x89PNG") for line in out.splitlines())


@pytest.mark.processes
async def test_ctrl_c_reports_what_is_done_and_exits_130(server: ScriptedServer, tmp_path: Path) -> None:
    async def script(connection: Connection, body: dict[str, Any]) -> None:
        if len(server.bodies) > 4:
            await connection.begin()
            await connection.write(token())
            await asyncio.Event().wait()
        await obedient(connection, body)

    server.script = script
    path = tmp_path / "run.json"
    process = await start("--url", server.url, "--concurrency", "2", "--output", str(path))
    await until(lambda: len(server.bodies) == 6, "two requests hang", 60.0)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130, err.decode()
    assert "4 in" in out.decode()
    assert "2 interrupted, 4 ok" in out.decode()
    assert json.loads(path.read_text())["run"]["interrupted"] is True


def open_files(soft: int, hard: int) -> list[str]:
    """The beginning of a command that gives the rest of it these limits."""
    return ["sh", "-c", f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"', "sh"]


@pytest.mark.processes
async def test_requests_do_not_fail_for_want_of_files_that_the_system_allows(server: ScriptedServer) -> None:
    everyone = asyncio.Event()

    async def script(connection: Connection, body: dict[str, Any]) -> None:
        if server.num_open == 200:
            everyone.set()
        await everyone.wait()
        await obedient(connection, body)

    server.script = script
    options = ("--url", server.url, "--requests", "200", "--output-tokens", "2", "--timeout-s", "30")
    code, out, err = await bench(*options, before=open_files(64, 4096))
    assert code == 0, err
    assert "200 in" in out
    assert "open files" not in err
    assert server.most_open == 200


@pytest.mark.processes
async def test_a_limit_of_open_files_that_is_too_low_is_told(server: ScriptedServer) -> None:
    options = ("--url", server.url, "--requests", "200", "--output-tokens", "2")
    _, _, err = await bench(*options, before=open_files(64, 128))
    warning = "warning: up to 200 requests at a time may need 264 open files, and the system allows 128"
    assert err.splitlines()[:1] == [warning]
    code, _, err = await bench(*options, "--concurrency", "8", before=open_files(64, 128))
    assert (code, "open files" in err) == (0, False)


@pytest.mark.processes
async def test_nobody_there_is_one_line(server: ScriptedServer) -> None:
    code, out, err = await bench("--url", "http://127.0.0.1:1")
    assert (code, out) == (2, "")
    assert err.startswith("error: http://127.0.0.1:1 cannot be reached")
    assert err.count("\n") == 1


@pytest.mark.processes
async def test_a_run_without_a_success_fails_and_says_why(server: ScriptedServer) -> None:
    async def script(connection: Connection, body: dict[str, Any]) -> None:
        await connection.answer("400 Bad Request", {"error": {"message": "too long"}})

    server.script = script
    code, out, err = await bench("--url", server.url, "--requests", "2")
    assert (code, "2 http_error 400" in out) == (2, True)
    assert err.splitlines() == ["warning: http_error 400, for example: too long", "error: no request succeeded"]
    code, _, err = await bench("--url", server.url, "--requests", "2", "--warmup", "1")
    assert code == 2
    assert err == "error: no warm-up request succeeded; the first: http_error 400: too long\n"


@pytest.mark.processes
async def test_files_that_are_not_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert "is no result of baton bench" in (await bench("report", str(path)))[2]
    assert "cannot read" in (await bench("report", str(tmp_path / "y.json")))[2]
    assert "there is no folder" in (await bench("--output", str(tmp_path / "no" / "y.json")))[2]


@pytest.mark.processes
@pytest.mark.parametrize("command", ["", "sweep"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 255, "File name too long"),  # legal, but not with what is added for the file from which it is made
        (".", "is a folder"),
    ],
)
async def test_results_that_cannot_be_written_are_refused_before_the_run(
    command: str, name: str, why: str, server: ScriptedServer, tmp_path: Path
) -> None:
    arguments = [*filter(None, [command]), "--url", server.url, "--requests", "2", *GOAL]
    code, _, err = await bench(*arguments, "--output", str(tmp_path / name))
    assert (code, err.startswith("error: cannot write the results: ")) == (2, True)
    assert why in err
    assert (server.bodies, list(tmp_path.iterdir())) == ([], [])
