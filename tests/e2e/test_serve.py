"""`baton serve` with the demo model, over HTTP: what a newcomer meets. Every script of `examples/` runs with it, as the
README says, and does what it is there to show."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from needs import require
from served import Stack
from sockets import descendants, listeners
from stack import wait_until

from common.runtime.checkpoint import DEMO_FOLDER
from common.runtime.config import DEFAULTS_BY_DEVICE

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MIRA = "The code of Mira is 4817. The code of Otto is 2093. What is the code of Mira?"
EXPLAINS = "x-baton-* headers tell every client the workers' addresses"


def open_sockets() -> dict[str, int]:
    """Each socket's inode, and a process that has it."""
    found = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if (inode := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))) is not None:
                found[inode[1]] = int(link.parts[2])
    return found


def is_of(stack: Stack, pid: int) -> bool:
    """Whether the stack, or whoever it has started, has started this process, which may be gone."""
    try:
        return stack.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def listening(stack: Stack) -> set[int]:
    """Ports that are listened on by the stack, or by nobody who can be named: other tests may have taken up one that it
    has let go."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    owners = open_sockets()
    found = [(int(line[1].rpartition(":")[2], 16), owners.get(line[9])) for line in lines if line[3] == "0A"]
    return {port for port, pid in found if pid is None or is_of(stack, pid)}


def ports_in(log: str) -> set[int]:
    """Ports that a stack has said that it has."""
    return {int(match.group(1)) for match in re.finditer(r"127\.0\.0\.1:(\d+)", log)}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One stack for the tests that only talk to it."""
    with Stack("--explain-routing") as running:
        assert running.ready.startswith("ready"), running.wait()
        yield running
        children = running.children()
        code, log = running.end(signal.SIGTERM)
    assert code == 0, log
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    wait_until(lambda: not ports_in(log) & listening(running), "somebody listens")
    assert "Traceback" not in log, log
    assert log.count(EXPLAINS) == 1, "an operator should know what clients are told"


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    """A client; afterwards nothing is held, by the gateway or by a worker."""
    async with aiohttp.ClientSession(stack.url) as session:
        yield session
        async with asyncio.timeout(30):
            while (await (await session.get("/ready")).json())["details"]["in_flight"] or stack.leftovers():
                await asyncio.sleep(0.02)


def answer_to_its_curl(stack: Stack) -> dict[str, Any]:
    """The choice that the command answers which a stack prints."""
    require("curl")
    command = shlex.split(stack.ready.removeprefix("ready:"))
    assert command[0] == "curl"
    assert json.loads(command[-1])["temperature"] == 0, "a sampled answer may be a wrong one"
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def test_the_curl_that_it_prints_works_as_printed(stack: Stack) -> None:
    choice = answer_to_its_curl(stack)
    assert choice["message"]["content"].strip() == "4817"
    assert choice["finish_reason"] == "stop"


def test_everything_that_a_stack_opens_is_on_loopback(stack: Stack) -> None:
    """After one handoff: whoever reads has an agent for each source, which listens, too. Later tests may add agents."""
    stack.hand_over()
    processes = descendants(stack.popen.pid)
    found = listeners(*processes)
    assert len(processes) == 4
    # API and admin port; of each worker the control port, the probes, and what UCX listens on; the reader's agent.
    assert len(found) == 9, found
    assert all(each.on_loopback for each in found), found


async def test_the_openai_client_works_unchanged(stack: Stack) -> None:
    client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused")
    async with client:
        model = (await client.models.list()).data[0].id
        chat = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": MIRA}], temperature=0, logprobs=True, top_logprobs=2
        )
        assert (chat.choices[0].message.content or "").strip() == "4817"
        assert chat.usage is not None
        assert chat.choices[0].logprobs is not None
        text = ""
        usage = None
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": MIRA.replace("of Mira?", "of Otto?")}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text.strip() == "2093"
        assert usage is not None
        assert usage.completion_tokens >= 4
        completion = await client.completions.create(model=model, prompt=[MIRA, "hello"], max_tokens=5, n=2, seed=1)
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=model, prompt="hi", max_tokens=-1)
        assert bad.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"prompt": "hi", "repetition_penalty": 1e-46}, 400, "repetition_penalty"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": "a b c d " * 4000}, 400, "prompt"),
        ("completions", {"prompt": "hi", "max_tokens": -1}, 400, "max_tokens"),
        ("completions", {"prompt": "hi", "max_tokens": 10**7}, 400, "max_tokens"),
        ("completions", {"prompt": "hi", "max_tokens": "many"}, 400, "max_tokens"),
        ("completions", {"prompt": "hi", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "hi", "top_p": -0.1}, 400, "top_p"),
        ("completions", {"prompt": "hi", "n": 1000}, 400, "n"),
        ("completions", {"prompt": "hi", "model": "nothing"}, 404, "model"),
        ("completions", {"prompt": {"a": 1}}, 400, "prompt"),
        ("completions", {"prompt": [10**9]}, 400, "prompt"),
        ("completions", {}, 400, "prompt"),
        ("chat/completions", {}, 400, "messages"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": "hi"}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stop": 5}, 400, "stop"),
    ],
)
async def test_bad_input_names_the_parameter(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    async with http.post(f"/v1/{path}", json=body) as response:
        answer = await response.json()
    assert response.status == status, answer
    assert answer["error"]["param"] == param, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_the_smallest_numbers_that_are_allowed_harm_nobody(http: aiohttp.ClientSession) -> None:
    tiny = 5e-324
    for fields in ({"top_p": tiny}, {"min_p": tiny}, {"temperature": tiny}, {"temperature": 1, "top_p": 1e-300}):
        async with http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3, **fields}) as response:
            assert response.status == 200, (fields, await response.text())


async def test_a_body_that_is_no_json_or_too_large(http: aiohttp.ClientSession) -> None:
    for data, status in ((b"{nonsense", 400), (b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}', 413)):
        async with http.post("/v1/completions", data=data, headers={"Content-Type": "application/json"}) as response:
            assert response.status == status
            assert "error" in await response.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything_within_a_second(
    http: aiohttp.ClientSession, stack: Stack, stream: bool
) -> None:
    body = {"prompt": "The code of Mira is 4817. " * 20, "max_tokens": 1500, "ignore_eos": True, "stream": stream}

    async def ask() -> None:
        async with http.post("/v1/completions", json=body) as response:
            await response.read()

    for _ in range(5):
        tasks = [asyncio.create_task(ask()) for _ in range(4)]
        async with asyncio.timeout(20):
            while (await (await http.get("/ready")).json())["details"]["in_flight"] < 4:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(wait_until, lambda: bool(stack.leftovers()), "the requests never reached the workers")
        if not any(task.done() for task in tasks):
            break
        await asyncio.gather(*tasks)  # this machine is too busy to look in time: once more
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    left = time.monotonic()
    async with asyncio.timeout(30):
        while (await (await http.get("/ready")).json())["details"]["in_flight"] or stack.leftovers():
            await asyncio.sleep(0.01)
    print(f"everything is free {time.monotonic() - left:.3f} s after the clients left")


async def test_an_answer_tells_where_it_was_made(http: aiohttp.ClientSession) -> None:
    for prompt, stream, route in (("hello", True, "short"), ("a b c d " * 100, False, "handoff")):
        body = {"prompt": prompt, "max_tokens": 2, "stream": stream}
        async with http.post("/v1/completions", json=body) as response:
            told = response.headers
            assert response.status == 200
            assert told["x-baton-route"] == route
            assert ("x-baton-prefill" in told) == (route == "handoff")
            assert float(told["x-baton-expected-ttft-ms"]) > 0
            assert int(told["x-baton-cached-tokens"]) >= 0


@pytest.mark.parametrize("length", [10, 100], ids=["short", "handoff"])
async def test_an_answer_tells_what_was_cached_and_which_tokens_it_has(
    http: aiohttp.ClientSession, length: int
) -> None:
    body = {"prompt": f"{length} is a number. " * length, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    answers = []
    for _ in range(2):
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200
            answers.append(await response.json())
    first, again = answers
    assert first["system_fingerprint"].startswith("fp_")
    assert again["system_fingerprint"] == first["system_fingerprint"]
    num_tokens = again["usage"]["prompt_tokens"]
    for (choice,) in (first["choices"], again["choices"]):
        assert len(choice["token_ids"]) == 4
        assert len(choice["prompt_token_ids"]) == num_tokens
    assert first["choices"][0]["prompt_token_ids"] == again["choices"][0]["prompt_token_ids"]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    block_size = DEFAULTS_BY_DEVICE["cpu"]["block_size"]
    assert cached == [0, (num_tokens - 1) // block_size * block_size]


async def test_tokenize_and_detokenize_are_inverse(http: aiohttp.ClientSession) -> None:
    text = "Mira's code is 4817 — naïve 日本語 👩‍👩‍👧"
    tokens = (await (await http.post("/tokenize", json={"prompt": text})).json())["tokens"]
    back = (await (await http.post("/detokenize", json={"tokens": tokens})).json())["prompt"]
    assert back.endswith(text)


async def test_the_metrics_have_the_names_that_dashboards_know(http: aiohttp.ClientSession) -> None:
    await (await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})).read()
    text = await (await http.get("/metrics")).text()
    for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:prompt_tokens_total"):
        assert name in text


async def test_a_heartbeat_that_tells_of_more_sequences_than_requests_is_taken(
    http: aiohttp.ClientSession, stack: Stack
) -> None:
    async def ask_until_told_to_stop() -> None:
        body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "n": 4}
        while True:
            async with http.post("/v1/completions", json=body) as response:
                answer = await response.json()
            assert response.status == 200, answer
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
            assert answer["usage"]["completion_tokens"] == 2000

    async def heard_of() -> int:
        """Sequences that the decode worker's last heartbeat has told the gateway of."""
        workers = (await (await http.get("/pools")).json())["workers"]
        return next(worker["running"] for worker in workers if worker["role"] == "decode") or 0

    asking = asyncio.create_task(ask_until_told_to_stop())
    async with asyncio.timeout(60):
        while await heard_of() < 4:
            assert not asking.done(), asking.exception()
            await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not any(re.search("frame .*refused", line) for line in stack.log), stack.log


async def test_the_dashboard_is_there_and_may_drain(http: aiohttp.ClientSession, stack: Stack) -> None:
    assert any(line.endswith(f"dashboard on {stack.url}/") for line in stack.log)
    async with http.get("/") as response:
        assert response.content_type == "text/html"
    view = await (await http.get("/pools")).json()
    assert [worker["phase"] for worker in view["workers"]] == ["serving", "serving"]
    async with http.get(f"http://127.0.0.1:{view['admin_port']}/workers") as response:
        assert len((await response.json())["workers"]) == 2


async def test_the_demo_model_answers_from_its_prompt(http: aiohttp.ClientSession) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    names = (DEMO_FOLDER / "names.txt").read_text().split()
    assert len(names) >= 200

    async def ask(count: int) -> bool:
        chosen = draw.sample(names, count)
        codes = {name: f"{draw.randrange(10000):04d}" for name in chosen}
        facts = " ".join(f"The code of {name} is {code}." for name, code in codes.items())
        asked = draw.choice(chosen)
        body = {"messages": [{"role": "user", "content": f"{facts} What is the code of {asked}?"}], "temperature": 0}
        async with http.post("/v1/chat/completions", json=body) as response:
            told: str = (await response.json())["choices"][0]["message"]["content"]
        return told.strip() == codes[asked]

    right = await asyncio.gather(*(ask(draw.randint(2, 16)) for _ in range(100)))
    assert sum(right) >= 97, f"{sum(right)} of 100 right"


# --- examples --------------------------------------------------------------------------------------------------------


def run(name: str, *arguments: str) -> str:
    """Run an example to its end; what it printed."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_openai_client_streams_the_answer(stack: Stack) -> None:
    answer, usage = run("openai_client.py", "--url", stack.url).splitlines()
    assert answer.strip() == "4817"
    assert usage.endswith(" out")
    other = run("openai_client.py", "--url", stack.url, "The code of Ida is 3352. What is the code of Ida?")
    assert other.splitlines()[0].strip() == "3352"


def test_the_engine_answers_without_servers() -> None:
    assert run("offline_engine.py").strip() == "4817"


def test_the_load_test_measures_and_draws(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    small = ("--requests", "4", "--warmup", "1", "--max-steps", "2", "--bisections", "0", "--rate", "20")
    printed = run("load_test.py", str(folder), "--url", stack.url, *small)
    body = json.loads((folder / "sweep.json").read_text())
    outcomes = [point["run"]["summary"]["outcomes"] for point in body["points"]]
    assert outcomes
    assert all(each == {"ok": 4} for each in outcomes)
    pictures = sorted(folder.glob("*.png"))
    assert pictures
    assert all(picture.read_bytes().startswith(b"\x89PNG") and str(picture) in printed for picture in pictures)


def test_the_load_test_ends_when_nobody_answers(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "load_test.py"), str(tmp_path), "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_load_test_without_a_folder_says_how_it_is_called() -> None:
    command = [sys.executable, str(EXAMPLES / "load_test.py"), "--rate", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "FOLDER [options" in done.stderr


def test_every_example_is_in_the_readme_and_tested_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    readme, tests = (ROOT / "README.md").read_text(), Path(__file__).read_text()
    assert names
    assert all(f"(examples/{name})" in readme and f'run("{name}"' in tests for name in names)


# --- stacks of their own ---------------------------------------------------------------------------------------------


def test_it_hands_over_and_counts_the_first_request_ends_cleanly_and_leaves_nothing() -> None:
    """The request is that of README's quick start and of docs/kubernetes.md, with `BATON_LOCAL_PREFILL_TOKENS=0`."""
    with Stack("--prefill", "2", "--decode", "1", variables={"BATON_LOCAL_PREFILL_TOKENS": "0"}) as stack:
        children = stack.children()
        assert len(children) == 4
        assert len(listening(stack)) >= 7
        assert answer_to_its_curl(stack)["message"]["content"].strip() == "4817"
        with urllib.request.urlopen(f"{stack.url}/metrics", timeout=10) as response:
            metrics = response.read().decode().splitlines()
        counts = [line for line in metrics if line.startswith("baton_gateway_handoffs_total")]
        assert counts == ["baton_gateway_handoffs_total 1.0"]
        code, log = stack.end(signal.SIGINT)
        assert code == 0, log
        assert "Traceback" not in log, log
        assert EXPLAINS not in log, "nobody has asked for it"
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
        ports = ports_in(log)
        assert len(ports) >= 7
        # What other tests begin or end just now is seen for a moment.
        wait_until(lambda: not ports & listening(stack), "somebody listens")
        wait_until(lambda: set(os.listdir("/dev/shm")) <= stack.shared_memory, "shared memory is left")


def test_with_restart_never_a_worker_that_dies_ends_the_stack_with_its_name(tmp_path: Path) -> None:
    """And no process imports what lies in the current folder: they have the operator's tokens."""
    for name in ("common", "gateway", "decode_worker", "numpy", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    options = ("--restart", "never", "--prefill", "0", "--device", "cpu", "--transport", "zmq")
    with Stack(*options, variables={"PYTHONPATH": os.getcwd()}, folder=tmp_path) as stack:
        assert stack.ready.startswith("ready"), stack.wait()
        for pid in stack.children():
            if b"decode_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        code, log = stack.wait()
        assert code == 2
        assert "decode-0 ended with signal SIGKILL unexpectedly" in log.splitlines()[-1]


def starting() -> Stack:
    """A stack whose workers have been started and have not bound their ports yet."""
    stack = Stack(wait=False)
    wait_until(lambda: len(stack.children()) >= 2, "no workers")
    return stack


def test_a_worker_that_dies_while_the_stack_starts_ends_it() -> None:
    with starting() as stack:
        os.kill(stack.children()[0], signal.SIGKILL)
        code, log = stack.wait()
        assert code == 2
        assert "prefill-0 ended with signal SIGKILL" in log.splitlines()[-1]
        assert "Traceback" not in log, log


def test_a_stack_killed_while_it_starts_leaves_no_orphans() -> None:
    with starting() as stack:
        children = stack.children()
        stack.popen.kill()
        stack.popen.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "orphans")


async def test_a_chat_without_a_length_fits_into_small_workers_and_open_requests_survive_sigterm() -> None:
    patient = {"BATON_SHUTDOWN_GRACE_S": "30"}  # 1,000 tokens take seconds, and many where other tests run beside this
    with Stack("--kv-cache-bytes", str(2 * 2**20), "--grace-s", "35", variables=patient) as stack:
        async with aiohttp.ClientSession(stack.url) as session:
            body = {"messages": [{"role": "user", "content": MIRA}], "ignore_eos": True}
            async with session.post("/v1/chat/completions", json=body) as response:
                answer = await response.json()
            assert response.status == 200, answer
            assert answer["usage"]["total_tokens"] < 2000
            async with asyncio.timeout(20):
                while stack.leftovers():  # the first answer may not be acknowledged yet
                    await asyncio.sleep(0.005)
            asking = asyncio.create_task(session.post("/v1/chat/completions", json=body))
            async with asyncio.timeout(20):
                while not stack.leftovers():  # as long an answer as fits, so that it is not missed between two looks
                    await asyncio.sleep(0.005)
            ending = asyncio.create_task(asyncio.to_thread(stack.end, signal.SIGTERM))
            response = await asking
            assert response.status == 200, await response.text()
            await response.read()
        code, log = await ending
        assert code == 0, log
