"""Workers that come and go while a gateway runs, as discovery tells it; over the real control channel."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import zmq
from kubernetes_api import DECODE, NAMESPACE, Pod, running_api
from prometheus_client import CollectorRegistry
from waiting import eventually

from benchmarks.scripted_batch import Script
from benchmarks.scripted_workers import ScriptedPool, ScriptedWorker
from common.contract.errors import Cause
from common.contract.ids import new_incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.session import HelloRefused, HelloRequired, Role
from common.contract.sampling import SamplingParams
from common.runtime.channel import ControlServer
from common.runtime.clock import Pulse, monotonic
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Delta, Generation
from gateway.workers.discovery import Discovery, Endpoint
from gateway.workers.endpoint_slices import EndpointSliceSource
from gateway.workers.registry import Registry

WAIT_S = 30
PULSE = Pulse(interval_s=0.03, timeout_s=20.0)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="w", layout=LAYOUT)
PROMPT = tuple(range(100))


@dataclass
class Cluster:
    """Real control servers, and a gateway's dispatcher that is told of them."""

    pool: ScriptedPool
    addresses: dict[ScriptedWorker, str]
    registry: Registry
    dispatcher: Dispatcher

    def endpoint(self, worker: ScriptedWorker, *, identity: str = "", serving: bool = True) -> Endpoint:
        return Endpoint(address=self.addresses[worker], identity=identity, serving=serving)

    def follow(self, *endpoints: Endpoint, role: Role = Role.DECODE) -> None:
        self.dispatcher.links.follow(role, endpoints)

    def usable(self) -> set[str]:
        return {worker.address for worker in self.registry.usable(Role.DECODE)}

    def counted(self, name: str) -> float:
        """Value of a counter of the dispatcher."""
        samples = [sample for metric in self.dispatcher.collect() for sample in metric.samples]
        return next(sample.value for sample in samples if sample.name == f"baton_gateway_{name}_total")

    async def ask(self, num_tokens: int = 3) -> list[Delta]:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        generation = Generation(token_ids=PROMPT, num_choices=1, sampling=sampling, budget_s=WAIT_S)
        deltas = []
        async for delta in self.dispatcher.generate(generation):
            assert isinstance(delta, Delta)
            deltas.append(delta)
        return deltas


@asynccontextmanager
async def cluster(num_decode: int, *, prefill: bool = True) -> AsyncIterator[Cluster]:
    pool = ScriptedPool(FINGERPRINT, num_decode, Script((7,), short=True), PULSE)
    addresses = {worker: worker.bind() for worker in (pool.prefill, *pool.decode)}
    registry = Registry((), (), "c", colocated=not prefill)
    dispatcher = Dispatcher(new_incarnation(), registry, monotonic, PULSE, patience_s=WAIT_S)
    tasks = [asyncio.create_task(pool.run()), asyncio.create_task(dispatcher.links.run())]
    made = Cluster(pool, addresses, registry, dispatcher)
    try:
        if prefill:
            made.follow(made.endpoint(pool.prefill), role=Role.PREFILL)
        yield made
        assert not any(task.done() for task in tasks)
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_serves_once_it_is_found() -> None:
    async with cluster(2) as made:
        first, second = made.pool.decode
        made.follow(made.endpoint(first))
        await asyncio.wait_for(made.dispatcher.links.wait_usable(), WAIT_S)
        assert sum(len(delta.token_ids) for delta in await made.ask()) == 3
        made.follow(made.endpoint(first), made.endpoint(second))
        await eventually(lambda: made.usable() == set(made.addresses.values()) - {made.addresses[made.pool.prefill]})
        assert not made.registry.colocated


async def test_one_to_which_no_link_can_be_made_is_tried_with_the_next_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file descriptor is left; the gateway goes on with the workers that it has."""

    def no_descriptors(*_: object, **__: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    async with cluster(2) as made:
        first, second = made.pool.decode
        made.follow(made.endpoint(first))
        await eventually(lambda: len(made.usable()) == 1)
        with monkeypatch.context() as scarce:
            scarce.setattr("gateway.dispatch.links.ControlClient", no_descriptors)
            made.follow(made.endpoint(first), made.endpoint(second))
        assert made.addresses[second] not in made.registry.workers
        assert sum(len(delta.token_ids) for delta in await made.ask()) == 3
        made.follow(made.endpoint(first), made.endpoint(second))
        await eventually(lambda: len(made.usable()) == 2)


async def test_one_that_is_not_serving_gets_nothing_new() -> None:
    async with cluster(2) as made:
        first, second = made.pool.decode
        made.follow(made.endpoint(first), made.endpoint(second))
        await eventually(lambda: len(made.usable()) == 2 and len(made.registry.usable(Role.PREFILL)) == 1)
        made.follow(made.endpoint(first, serving=False), made.endpoint(second))
        assert made.usable() == {made.addresses[second]}
        for _ in range(4):
            await made.ask()
        assert made.dispatcher.handoffs == {(made.addresses[made.pool.prefill], made.addresses[second]): 4}
        made.follow(made.endpoint(first), made.endpoint(second))
        assert len(made.usable()) == 2


async def test_one_that_is_not_listed_any_more_finishes_what_it_has_and_is_forgotten() -> None:
    async with cluster(2) as made:
        first, second = made.pool.decode
        made.follow(made.endpoint(first))
        await eventually(lambda: len(made.usable()) == 1)
        made.pool.script.short, made.pool.script.interval_s = False, 0.01
        asked = asyncio.create_task(made.ask())
        await eventually(lambda: len(first.batch) == 1)
        made.follow(made.endpoint(second))
        await eventually(lambda: made.usable() == {made.addresses[second]})
        made.pool.script.last_step = True
        assert (await asked)[-1].finish_reason == "length"
        assert made.addresses[first] in made.registry.workers, "its session is open"
        await first.server.close()
        await eventually(lambda: made.addresses[first] not in made.registry.workers)
        assert [worker["id"] for worker in made.dispatcher.links.workers()].count(made.addresses[first]) == 0


async def test_of_a_worker_that_is_forgotten_only_the_totals_are_kept() -> None:
    async with cluster(2) as made:
        first, second = made.pool.decode
        made.follow(made.endpoint(first))
        await eventually(lambda: len(made.usable()) == len(made.registry.usable(Role.PREFILL)) == 1)
        await made.ask()
        assert made.dispatcher.handoffs == {(made.addresses[made.pool.prefill], made.addresses[first]): 1}
        made.follow(made.endpoint(second))
        await first.server.close()
        await eventually(lambda: made.addresses[first] not in made.registry.workers)
        assert not made.dispatcher.handoffs
        assert made.counted("handoffs") == 1
        assert made.addresses[first] not in made.dispatcher.links._listed


async def test_what_links_count_is_told_and_kept_when_a_worker_is_forgotten() -> None:
    async with cluster(2) as made:
        first, second = made.pool.decode
        made.follow(made.endpoint(first), made.endpoint(second))
        await eventually(lambda: len(made.usable()) == 2)
        assert made.counted("resyncs") == made.counted("frames_refused") == 0
        (gateway,) = first.server._sessions
        assert first.server._send_now(gateway, b"\xc1")
        first.server._send_control(gateway, HelloRequired())
        await eventually(lambda: made.counted("resyncs") == 1)
        assert made.counted("frames_refused") == 1
        made.follow(made.endpoint(second))
        await first.server.close()
        await eventually(lambda: made.addresses[first] not in made.registry.workers)
        assert (made.counted("resyncs"), made.counted("frames_refused")) == (1, 1)
        assert made.counted("sessions_lost") == 0, "it has said goodbye"


async def test_one_that_is_not_listed_any_more_may_refuse_within_its_session() -> None:
    """That ends the session, and with it all that is known of the worker."""
    async with cluster(2) as made:
        first, second = made.pool.decode
        made.follow(made.endpoint(first))
        await eventually(lambda: len(made.usable()) == 1)
        made.follow(made.endpoint(second))
        await eventually(lambda: made.usable() == {made.addresses[second]})
        (gateway,) = first.server._sessions
        first.server._send_control(gateway, HelloRefused(cause=Cause.CAPACITY, message="full"))
        await eventually(lambda: made.addresses[first] not in made.registry.workers)
        await made.ask()


async def test_one_that_never_answered_is_forgotten_at_once_and_may_come_again() -> None:
    async with cluster(1) as made:
        ghost = Endpoint(address="127.0.0.1:1")
        (worker,) = made.pool.decode
        for _ in range(3):
            made.follow(ghost, made.endpoint(worker))
            assert ghost.address in made.registry.workers
            made.follow(made.endpoint(worker))
            assert ghost.address not in made.registry.workers
        await eventually(lambda: len(made.usable()) == 1)
        await made.ask()
        assert len(made.dispatcher.links._linking) == 2


async def test_another_pod_at_the_same_address_is_another_worker() -> None:
    """What the old one had goes on elsewhere at once: nobody waits until it is found to be silent."""
    async with cluster(2) as made:
        first, second = made.pool.decode
        made.follow(made.endpoint(first, identity="old"))
        await eventually(lambda: len(made.usable()) == 1)
        made.pool.script.short, made.pool.script.interval_s = False, 0.01
        asked = asyncio.create_task(made.ask())
        await eventually(lambda: len(first.batch) == 1)
        made.follow(made.endpoint(first, identity="old"), made.endpoint(second))
        await eventually(lambda: len(made.usable()) == 2)
        made.follow(made.endpoint(first, identity="new", serving=False), made.endpoint(second))
        await eventually(lambda: len(second.batch) == 1)
        made.pool.script.last_step = True
        assert (await asked)[-1].finish_reason == "length"
        made.follow(made.endpoint(first, identity="new"), made.endpoint(second))
        await eventually(lambda: len(made.usable()) == 2)


async def test_a_pod_that_ends_does_not_take_its_address_back_from_a_worker_of_the_other_role() -> None:
    """It is listed until its object is gone, and its address is another pod's already."""
    async with cluster(1) as made:
        (worker,) = made.pool.decode
        made.follow(made.endpoint(worker, identity="new"))
        await eventually(lambda: len(made.usable()) == 1)
        session = made.registry.workers[made.addresses[worker]].session
        ends = made.endpoint(worker, identity="old", serving=False)
        made.follow(made.endpoint(made.pool.prefill), ends, role=Role.PREFILL)
        known = made.registry.workers[made.addresses[worker]]
        assert (known.role, known.identity, known.session, known.usable) == (Role.DECODE, "new", session, True)
        await made.ask()
        made.follow(made.endpoint(worker, identity="new", serving=False))
        made.follow(made.endpoint(made.pool.prefill), made.endpoint(worker, identity="next"), role=Role.PREFILL)
        assert made.registry.workers[made.addresses[worker]].role is Role.PREFILL, "one that serves takes it"


async def test_a_restart_counts_though_the_worker_was_not_listed_meanwhile() -> None:
    """DNS lists no worker that is not ready."""
    async with cluster(0) as made:
        port = 0
        for num_restarts in (0, 1):
            server = ControlServer(new_incarnation(), monotonic, PULSE)
            worker = ScriptedWorker(Role.DECODE, FINGERPRINT, made.pool.script, server)
            port = server.bind("127.0.0.1", port)
            address = f"127.0.0.1:{port}"
            serving = asyncio.create_task(server.run(worker))
            try:
                made.follow(Endpoint(address=address))
                await eventually(lambda: len(made.usable()) == 1)
                assert made.registry.workers[address].restarts == num_restarts
                assert made.registry.num_restarts[Role.DECODE] == num_restarts
            finally:
                serving.cancel()
                await asyncio.wait([serving])
                await server.close()
            made.follow()
            await eventually(lambda: len(made.registry.workers) == 1)  # the prefill worker


async def test_a_worker_of_another_version_is_refused_and_the_gateway_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(2) as made:
        other, fits = made.pool.decode
        other.fingerprint = replace(FINGERPRINT, config_hash="other")
        made.follow(made.endpoint(other))
        await eventually(lambda: "worker refused" in caplog.text)
        made.follow(made.endpoint(other), made.endpoint(fits))
        await eventually(lambda: made.usable() == {made.addresses[fits]})
        await made.ask()


async def test_a_gateway_is_ready_once_a_worker_that_it_knows_already_is() -> None:
    async with cluster(1) as made:
        (worker,) = made.pool.decode
        made.follow(made.endpoint(worker, serving=False))
        await eventually(lambda: made.registry.workers[made.addresses[worker]].incarnation is not None)
        assert not made.usable()
        made.follow(made.endpoint(worker))
        await asyncio.wait_for(made.dispatcher.links.wait_usable(), WAIT_S)


async def test_workers_that_differ_are_never_used_together(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(2) as made:
        old, new = made.pool.decode
        new.fingerprint = replace(FINGERPRINT, weights_hash="other")
        made.follow(role=Role.PREFILL)
        await eventually(lambda: len(made.registry.workers) == 0)
        made.follow(made.endpoint(old))
        await eventually(lambda: made.usable() == {made.addresses[old]})
        made.follow(made.endpoint(old, serving=False), made.endpoint(new))
        await eventually(lambda: made.usable() == {made.addresses[new]})
        made.follow(made.endpoint(old), made.endpoint(new))
        assert made.usable() == {made.addresses[old]}
        assert "worker refused: fingerprint mismatch: weights_hash" in caplog.text
        made.follow(made.endpoint(new))
        assert made.usable() == {made.addresses[new]}


async def test_requests_are_served_while_the_source_is_down() -> None:
    async with cluster(1) as made, running_api() as api, api.client() as client:
        port = int(made.addresses[made.pool.decode[0]].rpartition(":")[2])
        api.put("d-1", DECODE, [Pod("127.0.0.1", "uid-d")], port)
        metrics = CollectorRegistry()
        sources = {Role.DECODE: EndpointSliceSource(client, NAMESPACE, DECODE)}
        discovery = Discovery(sources, metrics, monotonic)
        task = asyncio.create_task(discovery.run(made.dispatcher.links.follow))
        try:
            await asyncio.wait_for(made.dispatcher.links.wait_usable(), WAIT_S)
            await api.stop()
            failed = "baton_gateway_discovery_errors_total"
            await eventually(lambda: (metrics.get_sample_value(failed, {"role": "decode"}) or 0) >= 2)
            assert sum(len(delta.token_ids) for delta in await made.ask()) == 3
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_prefill_workers_that_are_gone_leave_the_prompts_to_decode_workers() -> None:
    async with cluster(1) as made:
        made.follow(made.endpoint(made.pool.decode[0]))
        await asyncio.wait_for(made.dispatcher.links.wait_usable(), WAIT_S)
        made.follow(role=Role.PREFILL)
        await made.ask()
        assert sum(made.dispatcher.placement.num_local_prefills.values()) == 1
        assert made.dispatcher.ready().ready
