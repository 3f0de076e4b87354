"""A source that freezes under a read, and wakes when the sink has long used its blocks for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from stack import BLOCK_BYTES, answer, avoided, generation, prompt, until

from chaos.theatre import CHUNK, Freeze, Theatre, lose_if_silent, theatre

pytestmark = needs("hosts")

NUM_BLOCKS = 64
BOUND_S = 5.0
"""Until quarantine is empty again: the timeout of the heartbeats, and the replacement of an agent."""


@pytest.fixture(
    scope="module", params=["nixl-tcp", *(pytest.param(w, marks=pytest.mark.chaos) for w in ("nixl", "zmq"))]
)
def stage(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Theatre]:
    size = ("--kv-cache-bytes", str(NUM_BLOCKS * BLOCK_BYTES))
    with theatre(checkpoint("llama"), tmp_path_factory.mktemp("frozen"), request.param, options=size) as made:
        yield made


async def test_a_source_that_wakes_up_late_changes_no_block(stage: Theatre) -> None:
    source, sink, frozen = stage.p1, stage.d1, Freeze()
    async with stage.dispatcher(patience_s=20.0) as (dispatcher, registry):
        sampling: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
        with avoided(registry, stage.p2.process, stage.d2.process):
            await answer(dispatcher, generation(prompt(9, 40), **sampling))  # the two know each other
        sink.close("read")
        with avoided(registry, stage.p2.process, stage.d2.process):
            task = asyncio.create_task(answer(dispatcher, generation(prompt(1, 5 * CHUNK), **sampling)))
            await until(lambda: sink.waiting("read") > 0, "no read is about to begin")
        frozen.begin(source)
        lose_if_silent(dispatcher, source)
        try:
            sink.open("read")
            task.cancel()  # before anybody can have noticed that the source stands still
            began = time.monotonic()
            most = 0

            def empty() -> bool:
                nonlocal most
                state = sink.state()  # one answer: between two, an abort moves the blocks from the one to the other
                most = max(most, state["blocks_quarantined"])
                return bool(state["requests"] == 0 and state["blocks_quarantined"] == 0)

            await until(empty, "quarantine does not end", timeout_s=4 * BOUND_S)
            print(f"at most {most} blocks in quarantine, none after {time.monotonic() - began:.2f} s")
            # Others use every block of the sink, through the other prefill worker.
            with avoided(registry, stage.d2.process):
                for seed in range(20, 26):
                    await answer(dispatcher, generation(prompt(seed, 300), **sampling))
            before = sink.crc()
        finally:
            frozen.end(source)
        worker, popen = registry.workers[source.address], source.process.popen
        await until(lambda: worker.usable or popen.poll() is not None, "the source does not come back")
        await asyncio.sleep(2.0)  # what the kernel and UCX still hold has long arrived by now
        assert sink.crc() == before, "a read that was given up has written to blocks of others"
        assert len(set(before)) > NUM_BLOCKS // 2, "the cache was not filled"
        assert most > 0 or stage.transport != "nixl-tcp", "nothing was in quarantine"
        again = await answer(dispatcher, generation(prompt(1, 5 * CHUNK), **sampling))
        assert again.reasons == ["length"]
    stage.revive()  # asserts that the source lives, or was aborted by UCX
    stage.wait_for_baseline()
