"""A worker's HTTP port, to which everybody may connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from held_worker import worker
from needs import require
from prometheus_client.metrics_core import Metric

from common.contract.messages.session import Role
from common.engine import native
from common.runtime import probes
from common.runtime.probes import MAX_CONNECTIONS, ProbeServer, gauge

GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT_S = 10.0


class Large:
    """A worker that has much to tell."""

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        return True, {}

    def metrics(self) -> Iterable[Metric]:
        return [gauge(f"baton_{number}", "A number. " * 100, number) for number in range(4000)]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """That of a worker."""
    server = ProbeServer()
    server.probed = Large()
    yield await server.bind("127.0.0.1", 0)
    await server.close()


async def answer(port: int, path: bytes = b"health") -> bytes:
    """All that comes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET % path)
    async with asyncio.timeout(WAIT_S):
        found = await reader.read()
    writer.close()
    return found


async def test_a_connection_has_one_request(port: int) -> None:
    for path in (b"health", b"ready", b"metrics"):
        found = await answer(port, path)
        assert found.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in found.lower()


async def test_connections_that_nobody_uses_keep_no_probe_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CONNECTION_S", 1000.0)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MAX_CONNECTIONS)]
    for _, writer in idle[::2]:
        writer.write(b"GET /he")
    assert (await answer(port)).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(WAIT_S):
        cut = await asyncio.gather(
            *(reader.read() for reader, _ in idle[: 2 * MAX_CONNECTIONS]), return_exceptions=True
        )
    assert all(isinstance(each, ConnectionError) or each == b"" for each in cut), "the oldest are cut off"
    for _, writer in idle:
        writer.close()


async def test_a_request_must_come_in_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CONNECTION_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /he")
    async with asyncio.timeout(WAIT_S):
        (end,) = await asyncio.gather(reader.read(), return_exceptions=True)
    assert isinstance(end, ConnectionError) or end == b""
    writer.close()


async def test_an_answer_that_nobody_reads_delays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CONNECTION_S", 1000.0)
    monkeypatch.setattr(probes, "_SHUTDOWN_S", 1000.0)
    server = ProbeServer()
    server.probed = Large()
    port = await server.bind("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    writer.write((GET % b"metrics") * 5)
    await reader.read(1)  # it is being answered
    async with asyncio.timeout(WAIT_S):
        await server.close()
    writer.close()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_tells_how_its_cpu_computes(
    role: Role, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("compiler")
    kernels = native.kernels()
    assert kernels is not None
    without = make_checkpoint("llama", tmp_path, head_dim=20)
    for folder, has_kernels, by in ((checkpoint("llama"), True, kernels.instructions[0]), (without, False, "torch")):
        async with worker(role, folder) as (tested, held, *_):
            assert tested.ready()[1]["cpu_kernels"] is has_kernels
            assert tested.ready()[1]["cpu_products"] == {"by": by, "widened": False}
            (sample,) = next(each.samples for each in tested.metrics() if each.name == "baton_cpu_kernels")
            assert (sample.value, sample.labels) == (has_kernels, {"products": by, "widened": "false"})
            for name in ("cpu_kernels", "cpu_products"):  # as on a GPU
                monkeypatch.setattr(held, name, None, raising=False)
                assert tested.ready()[1][name] is None
            assert "baton_cpu_kernels" not in [each.name for each in tested.metrics()]
