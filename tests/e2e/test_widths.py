"""Workers of several ranks, beside workers of other widths: clients get what they get from workers of one rank."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chaos.theatre import staged
from checkpoints import FAMILIES
from served import Stack
from stack import BLOCK_BYTES, KV_CACHE, Workers, answer, generation, logprobs_of, prompt, ranks_of, until, wait_until

from common.contract.errors import Cause
from common.contract.messages.session import Role
from common.engine.ranks import EXIT_RANK_LOST
from gateway.serving.generation import Generation

Pool = Callable[..., Workers]
WIDTHS = (1, 2, 4)
TRANSPORTS = ("nixl", "zmq")
PATIENT = ("--heartbeat-timeout-s", "5")
"""By default a worker ends when a rank is silent for a second, as one may be on a busy machine."""
EVERY = [
    (family, *pair, transport)
    for family, pair, transport in itertools.product(FAMILIES, itertools.product(WIDTHS, repeat=2), TRANSPORTS)
    if pair != (1, 1)
]
SOME = [("llama", 2, 2, "nixl"), ("qwen2", 1, 2, "zmq"), ("qwen3", 2, 4, "nixl"), ("mistral", 4, 1, "zmq")]
"""Each family, each width at both sides, fewer, as many and more at the source, and both transports."""
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "n": 2},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"grammar": "start: /([a-f]{3}-){20}/"},
]


def new_works() -> list[Generation]:
    """New requests, the same ones each time: the time of each runs from its first use."""
    return [
        generation(prompt(10 * index + turn, 5 + 40 * index + 13 * turn), max_tokens=24, ignore_eos=True, **kind)
        for index, kind in enumerate(KINDS)
        for turn in range(3)
    ]


@pytest.mark.parametrize(
    ("family", "prefill_width", "decode_width", "transport"),
    [pytest.param(*each, marks=[] if each in SOME else pytest.mark.widths) for each in EVERY],
)
async def test_answers_are_those_of_workers_of_one_rank(
    pool: Pool, checkpoint: Callable[[str], Path], family: str, prefill_width: int, decode_width: int, transport: str
) -> None:
    """In float32 the last bits differ, as sums are added in other places: no token does here. Sequences are preempted
    meanwhile."""
    plain = pool(f"{family}, one rank", family, options=("--checksums",))
    async with plain.dispatcher() as dispatcher:
        expected = await asyncio.gather(*(answer(dispatcher, work) for work in new_works()))
    little = ("--kv-cache-bytes", str(40 * BLOCK_BYTES * decode_width), "--memory-reserve", "-1")
    workers = Workers.start(
        checkpoint(family),
        options=("--checksums", "--transport", transport, *PATIENT),
        prefill_options=("--chunk-size", "64", "--tensor-parallel", str(prefill_width)),
        decode_options=("--tensor-parallel", str(decode_width), *little),
    )
    try:
        assert [len(ranks_of(each.popen.pid)) for each in workers.all] == [prefill_width - 1, decode_width - 1]
        assert [each.metric("baton_ranks") for each in workers.all] == [prefill_width, decode_width]
        async with workers.dispatcher() as dispatcher:
            for _ in range(2):
                got = await asyncio.gather(*(answer(dispatcher, work) for work in new_works()))
                for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
                    assert (ours.tokens, ours.reasons) == (theirs.tokens, theirs.reasons), index
                    assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=1e-3), index
        [decode] = workers.decode
        assert decode.metric("baton_transfer_bytes_total") > 0
        assert decode.metric("baton_preemptions_total") > 0
        workers.wait_for_baseline()
    finally:
        workers.signal()
        workers.wait()


@pytest.mark.parametrize(
    ("role", "number"),
    [
        (Role.PREFILL, signal.SIGSTOP),
        (Role.DECODE, signal.SIGKILL),
        pytest.param(Role.PREFILL, signal.SIGKILL, marks=pytest.mark.widths),
        pytest.param(Role.DECODE, signal.SIGSTOP, marks=pytest.mark.widths),
    ],
)
async def test_a_lost_rank_is_a_lost_worker_and_nothing_else(
    main_pool: Workers, tmp_path: Path, role: Role, number: signal.Signals
) -> None:
    """In the middle of a prompt, or of streams."""
    works = [generation(prompt(index, 300), max_tokens=300, ignore_eos=True) for index in range(6)]
    async with main_pool.dispatcher() as dispatcher:
        expected = await asyncio.gather(*(answer(dispatcher, work) for work in works))
    wide, chunks = ("--tensor-parallel", "2"), ("--chunk-size", "64")
    own = {Role.PREFILL: (*chunks, *wide), Role.DECODE: wide}[role]
    actor = staged(role, main_pool.folder, tmp_path, "--checksums", *PATIENT, *KV_CACHE, *own)
    workers = Workers.start(
        main_pool.folder,
        prefill=1 if role is Role.PREFILL else 2,
        decode=1 if role is Role.DECODE else 2,
        options=("--checksums", *PATIENT),
        prefill_options=own if role is Role.PREFILL else chunks,
        decode_options=own if role is Role.DECODE else (),
    )
    try:
        actor.ready()
        lost = actor.process
        (workers.prefill if role is Role.PREFILL else workers.decode).append(lost)
        [rank] = ranks_of(lost.popen.pid)
        async with workers.dispatcher(timeout_s=3.0) as dispatcher:
            actor.close("step", skip=3)  # of the five chunks of a prompt
            answers = [asyncio.create_task(answer(dispatcher, work)) for work in works]
            await until(lambda: actor.waiting("step") == 1, "it computes nothing")
            os.kill(rank, number)
            got = await asyncio.gather(*answers)
            assert dispatcher.recovery.tally.failures[Cause.WORKER_LOST] > 0
        assert [each.tokens for each in got] == [each.tokens for each in expected]
        assert await asyncio.to_thread(lost.popen.wait, 20) == EXIT_RANK_LOST
        assert any("the worker ends" in line for line in lost.log), lost.log
        await until(lambda: not Path(f"/proc/{rank}").exists(), "the rank is left behind")
        lost.killed = True
        workers.wait_for_baseline()
    finally:
        workers.signal()
        workers.wait()


async def test_the_local_stack_starts_ranks_and_leaves_none_behind() -> None:
    body = {"messages": [{"role": "user", "content": "The code of Mira is 4817. What is the code of Mira?"}]}
    variables = {"CUDA_VISIBLE_DEVICES": "4,5,7", "BATON_HEARTBEAT_TIMEOUT_S": "5"}  # this CPU ignores the first
    with Stack("--prefill-tp", "2", "--decode-tp", "2", variables=variables) as stack:
        assert stack.ready.startswith("ready"), stack.wait()
        prefill, decode = stack.pid_of("prefill_worker"), stack.pid_of("decode_worker")
        assert prefill is not None
        assert decode is not None
        for pid, gpus in ((prefill, "4,5"), (decode, "7,4")):
            assert f"CUDA_VISIBLE_DEVICES={gpus}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert b"--gpu-share\x000.5\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ranks = [rank for pid in (prefill, decode) for rank in ranks_of(pid)]
        assert len(ranks) == 2
        async with aiohttp.ClientSession(stack.url) as session:
            async with session.post("/v1/chat/completions", json={**body, "temperature": 0}) as response:
                answered = await response.json()
        assert answered["choices"][0]["message"]["content"].strip() == "4817"
        code, log = stack.end(signal.SIGTERM)
        assert code == 0, log
        assert "Traceback" not in log, log
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "a rank is left")
