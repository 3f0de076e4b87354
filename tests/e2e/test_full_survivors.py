"""A worker dies, and the others have as many requests as they let in: its streams go on there all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from stack import Process, Workers, answer, generation, prompt, until

from common.contract.errors import Cause
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Delta

NUM_SEQS, NUM_WAITING = 2, 1
NUM_LET_IN = NUM_SEQS + NUM_WAITING
"""By each decode worker; one that the other one refuses while a heartbeat is on its way may come beyond that."""
NUM_MORE = 20
"""Tokens that show that a stream goes on."""


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers end when the test does."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("long"), seed=7, max_position_embeddings=2**16)


class Stream:
    """An answer without an end, until its client leaves."""

    def __init__(self, dispatcher: Dispatcher, number: int) -> None:
        self.prompt = prompt(60 + number, 40)
        self.tokens: list[int] = []
        self._dispatcher = dispatcher
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        work = generation(self.prompt, max_tokens=2**15, ignore_eos=True)
        async for delta in self._dispatcher.generate(work):
            assert isinstance(delta, Delta)
            self.tokens += delta.token_ids

    def has_got(self, num_tokens: int) -> bool:
        return len(self.tokens) >= num_tokens

    async def leave(self) -> None:
        assert not self.task.done(), "it has ended"
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def expected(self) -> list[int]:
        """What it should have got so far."""
        work = generation(self.prompt, max_tokens=len(self.tokens), ignore_eos=True)
        return (await answer(self._dispatcher, work)).tokens[0]


def held(process: Process) -> int:
    """The requests that a worker has."""
    num_requests: int = process.get("/ready")["requests"]
    return num_requests


def are_at(dispatcher: Dispatcher, process: Process) -> set[tuple[int, ...]]:
    """The prompts of the requests that a decode worker has."""
    flows = [flow for flow in dispatcher.open_flows() if flow.keys_at(process.facts["control"])]
    return {flow.generation.token_ids for flow in flows}


async def test_every_stream_of_a_dead_worker_goes_on_where_there_is_no_room(
    long_context: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = Workers.start(
        long_context,
        decode=2,
        options=("--max-waiting", str(NUM_WAITING)),
        decode_options=("--max-num-seqs", str(NUM_SEQS)),
    )
    dying, left = workers.decode
    try:
        async with workers.dispatcher() as dispatcher:
            streams: list[Stream] = []
            while min(held(dying), held(left)) < NUM_LET_IN:
                assert len(streams) < 4 * NUM_LET_IN, "all of them go to one worker"
                streams.append(Stream(dispatcher, len(streams)))
                await until(lambda: held(dying) + held(left) == len(streams), "it is not let in")
            at_dying = are_at(dispatcher, dying)
            orphans = [stream for stream in streams if tuple(stream.prompt) in at_dying]
            assert len(orphans) >= NUM_LET_IN
            caplog.clear()
            dying.kill()
            await until(lambda: held(left) == len(streams), "they do not come where it is full")
            before = {stream: len(stream.tokens) for stream in orphans}
            for stream in streams:
                if stream not in orphans:
                    await stream.leave()
            going_on = list(orphans)
            while going_on:  # there is a place for two of them at a time
                await until(lambda: any(each.has_got(before[each] + NUM_MORE) for each in going_on), "none goes on")
                for stream in [each for each in going_on if each.has_got(before[each] + NUM_MORE)]:
                    await stream.leave()
                    going_on.remove(stream)
            for stream in orphans:
                assert stream.tokens == await stream.expected()
            assert dispatcher.recovery.tally.failures[Cause.WORKER_LOST] >= len(orphans)
            assert f"elsewhere: {Cause.CAPACITY}" not in caplog.text, "they are not refused"
    finally:
        workers.signal()
        workers.wait()
