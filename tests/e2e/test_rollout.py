"""Every worker is replaced, one by one, as a Deployment does it, while requests come: no client notices.

Real processes in the pods' roles, a real gateway that watches EndpointSlices, and the fake API server between them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kubernetes_api import DECODE, NAMESPACE, PREFILL, FakeApi, Pod, running_api
from stack import BLOCK_BYTES, BLOCK_SIZE, Process, prompt

CLIENTS = 3
NUM_TOKENS = 150
SERVICES = {"prefill": PREFILL, "decode": DECODE}
OPTIONS = (
    "--num-threads",
    "1",
    "--block-size",
    str(BLOCK_SIZE),
    "--kv-cache-bytes",
    str(400 * BLOCK_BYTES),
    "--drain-grace-s",
    "30",
)


@dataclass
class Kubelet:
    """Pods and what the API server is told of them: each is a process with a slice of its own, since ports differ."""

    api: FakeApi
    folder: Path
    pods: dict[str, Process] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _told_first: itertools.cycle[bool] = field(default_factory=lambda: itertools.cycle((True, False)))

    async def create(self, role: str) -> str:
        """A pod, listed as soon as it has an address, and serving once it is ready; its name."""
        name = f"{role}-{next(self._numbers)}"
        process = Process(f"{role}_worker", ["--model", str(self.folder), *OPTIONS])
        self.pods[name] = process
        await asyncio.to_thread(process.fact, "control")
        self._list(name, ready=False)
        await asyncio.to_thread(process.fact, "ready")
        self._list(name, ready=True)
        return name

    async def delete(self, name: str) -> None:
        """It ends as a pod does: terminating and SIGTERM, of which now the one is known first and now the other; then
        gone."""
        process = self.pods.pop(name)
        told_first = next(self._told_first)
        if told_first:
            self._list(name, ready=True, terminating=True, process=process)
        process.signal()
        if not told_first:
            await asyncio.sleep(0.5)  # the gateway hears it of the worker
            self._list(name, ready=True, terminating=True, process=process)
        assert await asyncio.to_thread(process.wait) == 0, process.log[-30:]
        self.api.delete(name)

    def _list(self, name: str, *, ready: bool, terminating: bool = False, process: Process | None = None) -> None:
        port = int((process or self.pods[name]).facts["control"].rpartition(":")[2])
        service = SERVICES[name.partition("-")[0]]
        self.api.put(name, service, [Pod("127.0.0.1", name, ready=ready, terminating=terminating)], port)


@asynccontextmanager
async def discovering(api: FakeApi, folder: Path, scratch: Path) -> AsyncIterator[Process]:
    """A gateway that finds its workers as `kubectl` would find the API server."""
    config = scratch / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "here", "cluster": {"server": api.url}}],
                "users": [{"name": "me", "user": {"token": "t"}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "current-context": "here",
            }
        )
    )
    options = ["--model", str(folder), "--port", "0", "--discovery", "kubernetes"]
    options += ["--prefill-service", PREFILL, "--decode-service", DECODE, "--kubernetes-namespace", NAMESPACE]
    gateway = Process("gateway", options, {"KUBECONFIG": str(config)})
    try:
        await asyncio.to_thread(gateway.fact, "ready")
        yield gateway
    finally:
        gateway.signal()
        code = await asyncio.to_thread(gateway.wait)
    assert code == 0, gateway.log[-30:]


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> str:
    """The text of a streamed answer, which must be whole."""
    body = {
        "prompt": prompt(number, 100),
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    text, reason = [], None
    async with session.post(
        f"{url}/v1/completions", json=body | {"stream_options": {"include_usage": True}}
    ) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                text.append(choice["text"])
                reason = choice["finish_reason"] or reason
            if chunk.get("usage"):
                assert chunk["usage"]["completion_tokens"] == NUM_TOKENS
    assert reason == "length"
    return "".join(text)


@pytest.mark.timeout(600)
async def test_every_worker_is_replaced_and_no_request_fails(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama")
    async with running_api() as api:
        kubelet = Kubelet(api, folder)
        try:
            await asyncio.gather(*(kubelet.create(role) for role in ("prefill", "prefill", "decode", "decode")))
            async with discovering(api, folder, tmp_path) as gateway, aiohttp.ClientSession() as session:
                url = gateway.fact("url")
                expected = [await ask(session, url, number) for number in range(CLIENTS)]
                over, counts = asyncio.Event(), [0] * CLIENTS

                async def client(number: int) -> None:
                    while not over.is_set():
                        assert await ask(session, url, number) == expected[number]
                        counts[number] += 1

                clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
                first = list(kubelet.pods)
                for name in first:
                    before = list(counts)
                    await kubelet.create(name.partition("-")[0])
                    await kubelet.delete(name)
                    async with asyncio.timeout(120):  # each client has had an answer with the new ones
                        while any(now <= then for now, then in zip(counts, before, strict=True)):
                            done = [task for task in clients if task.done()]
                            assert not done, [task.exception() for task in done]
                            await asyncio.sleep(0.1)
                over.set()
                await asyncio.gather(*clients)
                workers = (await asyncio.to_thread(gateway.get, "/ready"))["details"]["workers"]
                ports = {process.facts["control"] for process in kubelet.pods.values()}
                assert {worker["id"] for worker in workers} == ports, "what is gone is forgotten"
                assert not set(first) & kubelet.pods.keys()
        finally:
            for process in kubelet.pods.values():
                process.signal()
            for process in kubelet.pods.values():
                await asyncio.to_thread(process.wait)
