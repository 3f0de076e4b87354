"""A gateway of two processes, between clients and workers that only talk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack import Process

from benchmarks.pinned_processes import PULSE, model_folder, tokens_with_text
from benchmarks.scripted_batch import Script
from benchmarks.scripted_workers import ScriptedPool
from common.contract.errors import OperatorError
from common.contract.kv_layout import Fingerprint, KVLayout
from common.runtime.checkpoint import config_hash
from common.runtime.clock import Pulse
from gateway.processes import bind_shared, merged_metrics, merged_readiness

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
BODY = {"prompt": [7] * 100, "max_tokens": 3, "ignore_eos": True}


@asynccontextmanager
async def gateway(tmp_path: Path, *options: str) -> AsyncIterator[tuple[Process, str]]:
    """Two processes; the URL that they share."""
    folder = model_folder(tmp_path)
    fingerprint = Fingerprint(config_hash=config_hash(folder), weights_hash="", layout=LAYOUT)
    pool = ScriptedPool(fingerprint, 1, Script(tokens_with_text(folder), short=True), Pulse(timeout_s=30.0))
    arguments = ["--model", str(folder), "--port", "0", "--prefill-workers", pool.prefill.bind()]
    arguments += ["--decode-workers", ",".join(worker.bind() for worker in pool.decode)]
    arguments += ["--heartbeat-timeout-s", str(PULSE.timeout_s), "--processes", "2", *options]
    process = Process("gateway", arguments)
    running = asyncio.create_task(pool.run())
    try:
        await asyncio.to_thread(process.fact, "ready")
        yield process, process.facts["url"]
    finally:
        process.kill()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def values(exposition: str, name: str) -> dict[str, float]:
    """A sample of each process."""
    samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    return {sample.labels["process"]: sample.value for sample in samples if sample.name == name}


async def test_two_processes_serve_one_port_and_answer_for_each_other(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (process, url):
        answered = 0
        async with asyncio.timeout(60):
            while True:  # until the kernel has dealt each of them a connection
                async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=BODY) as got:
                    assert got.status == 200, await got.text()
                    assert (await got.json())["usage"]["completion_tokens"] == 3
                answered += 1
                status, metrics = await get(f"{url}/metrics")
                assert status == 200
                tokens = values(metrics, "vllm:generation_tokens_total")
                assert sum(tokens.values()) == 3 * answered
                if all(tokens.values()):
                    break
        assert set(tokens) == {"0", "1"}
        assert set(values(metrics, "baton_gateway_workers_usable")) == {"0", "1"}
        assert metrics.count("# TYPE vllm:generation_tokens_total counter") == 1
        status, body = await get(f"{url}/ready")
        assert (status, json.loads(body)["ready"], len(json.loads(body)["details"]["processes"])) == (200, True, 2)
        own = json.loads((await get(f"{url}/ready?own"))[1])
        assert own["details"]["workers"]

        processes = children(process.popen.pid)
        assert len(processes) == 2
        process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.popen.wait, 30) == 0
        assert not any(Path(f"/proc/{child}").exists() for child in processes)


async def test_a_hangup_reaches_every_process_and_ends_none(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"

    def write(secret: str) -> None:
        digest = hashlib.sha256(secret.encode()).hexdigest()
        keys.write_text(f'[[keys]]\nname = "a"\nsha256 = "{digest}"\n')

    write("old")
    async with gateway(tmp_path, "--api-keys", str(keys)) as (process, url):
        write("new")
        os.utime(keys, (0, 0))
        process.popen.send_signal(signal.SIGHUP)
        reloaded: dict[str, float] = {}
        async with asyncio.timeout(60):
            while len(reloaded) < 2 or not all(reloaded.values()):
                _, metrics = await get(f"{url}/metrics")
                reloaded = values(metrics, "baton_gateway_files_reloaded_total")
        for secret, status in (("new", 200), ("old", 401)) * 4:
            headers = {"Authorization": f"Bearer {secret}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                async with session.post(f"{url}/v1/completions", json=BODY) as got:
                    assert got.status == status, await got.text()
        assert process.popen.poll() is None


async def test_a_page_says_which_process_it_sees(tmp_path: Path) -> None:
    async with gateway(tmp_path, "--dashboard", "on") as (_, url):
        status, body = await get(f"{url}/pools")
    assert status == 200
    number, of = json.loads(body)["process"]
    assert (of, number in (1, 2)) == (2, True)


async def test_a_process_that_dies_ends_the_gateway(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (process, _):
        first, second = children(process.popen.pid)
        os.kill(first, signal.SIGKILL)
        assert await asyncio.to_thread(process.popen.wait, 30) == 1
        assert not Path(f"/proc/{second}").exists()


async def test_a_process_that_does_not_answer_is_not_ready_and_all_end_with_the_one_that_watches(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as (process, url):
        processes = children(process.popen.pid)
        os.kill(processes[0], signal.SIGSTOP)
        try:
            # A connection of which the frozen one is in charge gets no answer at all.
            asking = [asyncio.create_task(get(f"{url}/ready")) for _ in range(20)]
            async with asyncio.timeout(60):
                answered, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            status, body = answered.pop().result()
        finally:
            os.kill(processes[0], signal.SIGCONT)
        assert (status, json.loads(body)) == (503, {"ready": False, "reason": "a process does not answer"})

        process.popen.kill()
        async with asyncio.timeout(60):
            while any(Path(f"/proc/{child}").exists() for child in processes):
                await asyncio.sleep(0.05)


def test_a_port_that_is_taken_is_an_error_of_the_operators() -> None:
    (first, *others) = bind_shared("127.0.0.1", 0, 3)
    try:
        first.listen()
        port = first.getsockname()[1]
        assert {each.getsockname()[1] for each in others} == {port}
        with pytest.raises(OperatorError, match=f"cannot bind 127.0.0.1:{port}"):
            bind_shared("127.0.0.1", port, 2)
    finally:
        for each in (first, *others):
            each.close()


def test_metrics_are_told_apart_by_process() -> None:
    one = b'# HELP a_total A.\n# TYPE a_total counter\na_total{x="y"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    merged = merged_metrics([one, one.replace(b"1.0", b"5.0")]).decode()
    assert 'a_total{process="0",x="y"} 1.0\n' in merged
    assert 'a_total{process="1",x="y"} 5.0\n' in merged
    assert 'b{process="1"} 2.0\n' in merged
    assert merged.count("# TYPE") == 2


def test_one_that_is_not_ready_speaks_for_all() -> None:
    up = {"ready": True, "reason": "ready", "details": {"in_flight": 1}}
    down = {"ready": False, "reason": "no decode worker is usable", "details": {"in_flight": 0}}
    both = {"processes": [{"in_flight": 1}, {"in_flight": 0}]}
    assert merged_readiness([up, down]) == {"ready": False, "reason": down["reason"], "details": both}
    assert merged_readiness([up, up])["ready"] is True
