"""A conversation computes only its new text, wherever the KV of its turns was born, and its answers stay the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from played_source import FINGERPRINT, PlayedSource
from stack import BLOCK_BYTES, BLOCK_SIZE, Process, Workers, answer, avoided, gateway_of, generation, prompt, until
from step_tokens import handles
from transport_source import SourceProcess

from common.contract.block_hashes import block_hashes
from common.contract.ids import Incarnation, LeaseId, RequestKey, new_request_id
from common.contract.messages.gateway import Decode, Prefill, PrefixHint, Source
from common.contract.messages.handoff import AttachPrefix, BlocksReady
from common.contract.messages.session import Hello, Role, Welcome
from common.contract.messages.worker import Finished, Tokens
from common.contract.sampling import SamplingParams
from gateway.dispatch import router
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.router import LocalPrefill

NEW_TEXT = (100, 1, 15, 16, 17, 33, 5, 48)
"""Tokens that each turn adds to the prompt, besides the answer before."""
ANSWERS = (40, 47, 48, 49, 41, 64, 40, 40)
"""Tokens of each turn's answer."""
SAMPLED = {"temperature": 1.0, "top_k": 20, "seed": 77}
"""With this seed no random number falls within 1e-5 of the border between two tokens: there, the last bits of the
logits would decide, and these differ between batches of different shapes."""
COMPUTED = "baton_prompt_tokens_computed_total"
PULLS = "baton_prefix_pulls_total"


@dataclass
class Turn:
    """One turn of a conversation and what it took."""

    prompt: list[int]
    answer: list[int]
    num_known: int
    """Leading tokens of the prompt in the full blocks of the turn before: its last token was never computed."""
    num_computed: float
    """Prompt tokens that the workers computed, all together."""
    num_cached: int
    """Those that they did not compute, as the client is told."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


async def converse(
    dispatcher: Dispatcher,
    workers: Workers,
    seed: int,
    num_turns: int = len(NEW_TEXT),
    sampling: dict[str, Any] | None = None,
    around: Callable[[int], AbstractContextManager[None]] = lambda turn: nullcontext(),
) -> AsyncIterator[Turn]:
    """The turns of a conversation: each prompt is the one before, its answer, and some new text."""
    history: list[int] = []
    num_known = 0
    for number in range(num_turns):
        ids = history + prompt(seed + number, NEW_TEXT[number])
        work = generation(ids, max_tokens=ANSWERS[number], ignore_eos=True, **(sampling or {}))
        before = workers.metric(COMPUTED)
        with around(number):
            result = await answer(dispatcher, work)
        turn = Turn(ids, result.tokens[0], num_known, workers.metric(COMPUTED) - before, work.waterfall.num_cached)
        assert len(turn.answer) == ANSWERS[number] >= 40
        yield turn
        history = ids + turn.answer
        num_known = (turn.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture
def uncached(pool: Callable[..., Workers]) -> Callable[..., Any]:
    """Have a conversation where nothing is cached: its answers."""
    workers = pool("uncached", options=("--no-prefix-cache", "--heartbeat-timeout-s", "10"))

    async def run(seed: int, num_turns: int = len(NEW_TEXT), sampling: dict[str, Any] | None = None) -> list[list[int]]:
        async with workers.dispatcher() as dispatcher:
            turns = [turn async for turn in converse(dispatcher, workers, seed, num_turns, sampling)]
        assert [turn.num_computed for turn in turns] == [len(turn.prompt) for turn in turns], "something was cached"
        assert not any(turn.num_cached for turn in turns)
        return [turn.answer for turn in turns]

    return run


def some_of(workers: Workers, num_prefill: int, num_decode: int) -> Workers:
    """The first of the workers."""
    return Workers(workers.folder, prefill=workers.prefill[:num_prefill], decode=workers.decode[:num_decode])


# --- what a turn costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
async def test_a_turn_computes_its_new_text_and_pulls_the_answer_before_from_where_it_was_born(
    main_pool: Workers, uncached: Callable[..., Any], sampling: dict[str, Any] | None
) -> None:
    """The prefill worker has the prompts of the turns before, which it computed; the decode worker has the answers too.

    Of each turn everything is computed from the last full block of the turn before on, and nothing else.
    """
    workers = some_of(main_pool, 1, 1)
    (p,), (d,) = workers.prefill, workers.decode
    seed = 1000 if sampling is None else 2000
    answers = []
    num_held = 0
    """Leading tokens of the prompt that the prefill worker computed, or pulled, for the turn before."""
    async with workers.dispatcher() as dispatcher:
        names: tuple[tuple[Process, str, dict[str, str]], ...] = (
            (p, PULLS, {"end": "pulled"}),
            (p, PULLS, {"end": "gave_up"}),
            (p, "baton_prefix_tokens_pulled_total", {}),
            (d, "baton_prefixes_lent_total", {}),
            (d, "baton_transfer_bytes_total", {}),
        )

        def counts() -> list[float]:
            return [process.metric(name, **labels) for process, name, labels in names]

        before = counts()
        async for turn in converse(dispatcher, workers, seed, sampling=sampling):
            answers.append(turn.answer)
            assert turn.num_computed == len(turn.prompt) - turn.num_known
            assert turn.num_cached == turn.num_known
            pulled, gave_up, tokens_pulled, lent, bytes_read = (
                now - then for now, then in zip(counts(), before, strict=True)
            )
            before = counts()
            later = turn.num_known > 0
            assert (pulled, gave_up, lent) == (later, 0, later)
            assert tokens_pulled == turn.num_known - num_held
            # The decode worker reads only what it has not born, or read, itself.
            assert bytes_read == (-(-len(turn.prompt) // BLOCK_SIZE) - turn.num_known // BLOCK_SIZE) * BLOCK_BYTES
            num_held = len(turn.prompt) // BLOCK_SIZE * BLOCK_SIZE
    assert dispatcher.placement.num_prefix_hints == len(NEW_TEXT) - 1
    assert answers == await uncached(seed, sampling=sampling)


async def test_prefill_workers_that_take_turns_pull_from_whoever_was_there_before(
    main_pool: Workers, uncached: Callable[..., Any]
) -> None:
    registry = main_pool.registry()

    def elsewhere(number: int) -> AbstractContextManager[None]:
        """Neither worker of a turn has seen the turn before."""
        return avoided(registry, main_pool.prefill[number % 2], main_pool.decode[number % 2])

    pulls = [process.metric(PULLS, end="pulled") for process in main_pool.prefill]
    answers = []
    async with main_pool.dispatcher(registry) as dispatcher:
        async for turn in converse(dispatcher, main_pool, 3000, around=elsewhere):
            answers.append(turn.answer)
            assert turn.num_computed == len(turn.prompt) - turn.num_known
            assert turn.num_cached == turn.num_known
    pulls = [process.metric(PULLS, end="pulled") - n for process, n in zip(main_pool.prefill, pulls, strict=True)]
    assert sorted(pulls) == [3, 4]
    assert answers == await uncached(3000)


async def test_a_turn_with_little_new_text_is_computed_where_the_answer_was_born(
    main_pool: Workers, uncached: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conditional disaggregation: the first prompt is handed off, every later one computed by the decode worker."""
    # What the workers measure of themselves on a busy machine decides nothing here.
    monkeypatch.setattr(router, "_HANDOFF_S", math.inf)
    computed = [process.metric(COMPUTED) for process in (*main_pool.prefill, *main_pool.decode)]
    turns = []
    async with main_pool.dispatcher(local_prefill_tokens=80) as dispatcher:
        async for turn in converse(dispatcher, main_pool, 4000):
            assert turn.num_computed == len(turn.prompt) - turn.num_known
            assert turn.num_cached == turn.num_known
            turns.append(turn)
        assert dispatcher.placement.num_local_prefills[LocalPrefill.SHORT] == len(turns) - 1
    now = [process.metric(COMPUTED) for process in (*main_pool.prefill, *main_pool.decode)]
    *by_prefill, first, second = (after - before for after, before in zip(now, computed, strict=True))
    assert sum(by_prefill) == len(turns[0].prompt)
    assert sorted((first, second)) == [0, sum(turn.num_computed for turn in turns[1:])]
    assert [turn.answer for turn in turns] == await uncached(4000)


async def test_another_salt_shares_nothing(main_pool: Workers) -> None:
    ids = prompt(5000, 100)
    hits = "vllm:prefix_cache_hits_total"
    computed, hit, answers = [], [], []
    async with main_pool.dispatcher() as dispatcher:
        for salt in ("a", "a", "b", "", "b"):
            before = main_pool.metric(COMPUTED), main_pool.metric(hits)
            answers.append((await answer(dispatcher, generation(ids, cache_salt=salt))).tokens)
            computed.append(main_pool.metric(COMPUTED) - before[0])
            hit.append(main_pool.metric(hits) - before[1] > 0)
    assert computed == [100, 4, 100, 100, 4]
    assert hit == [False, True, False, False, True]
    assert answers == [answers[0]] * 5


# --- sources that fail -------------------------------------------------------------------------------------------


@contextmanager
def killed(process: Process) -> Iterator[None]:
    process.kill()
    yield


@pytest.fixture
def victim(pools: dict[str, Workers], main_pool: Workers) -> Process:
    """A decode worker that need not live."""
    pools["victim"] = Workers.start(main_pool.folder, prefill=0, options=("--checksums",))
    return pools["victim"].decode[0]


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_a_holder_that_does_not_answer_costs_time_but_no_request(
    main_pool: Workers, uncached: Callable[..., Any], request: pytest.FixtureRequest, fault: str
) -> None:
    """The third turn is told of the decode worker that had the first two, which stands still, or is gone."""
    holder = request.getfixturevalue("victim") if fault == "killed" else main_pool.decode[1]
    workers = Workers(main_pool.folder, prefill=main_pool.prefill[:1], decode=[main_pool.decode[0], holder])
    healthy, p = some_of(workers, 1, 1), workers.prefill[0]
    registry = workers.registry()
    faults = ExitStack()

    def around(number: int) -> AbstractContextManager[None]:
        if number < 2:
            return avoided(registry, healthy.decode[0])
        faults.enter_context(killed(holder) if fault == "killed" else holder.frozen())
        return avoided(registry, holder)

    pulls = p.metric(PULLS, end="pulled"), p.metric(PULLS, end="gave_up")
    seed = 6000 if fault == "frozen" else 7000
    with faults:
        async with workers.dispatcher(registry) as dispatcher:
            turns = [turn async for turn in converse(dispatcher, healthy, seed, 3, around=around)]
    # The prefill worker itself has the second turn's prompt, and nothing of its answer.
    num_held = len(turns[1].prompt) // BLOCK_SIZE * BLOCK_SIZE
    assert turns[2].num_computed == len(turns[2].prompt) - num_held
    assert num_held < turns[2].num_known
    assert (p.metric(PULLS, end="pulled"), p.metric(PULLS, end="gave_up")) == (pulls[0] + 1, pulls[1] + 1)
    assert [turn.answer for turn in turns] == await uncached(seed, 3)


class PlayedHolder(PlayedSource):
    """A holder whose words are the test's, and whose blocks another process serves."""

    def __init__(self, sink: Incarnation, wire: str, source: SourceProcess) -> None:
        super().__init__(sink)
        self.incarnation = source.incarnation
        self._wire = wire
        self._source = source
        self._living: asyncio.Task[None] | None = None

    def answer(self, hello: Hello, transport: str = "zmq") -> Welcome:
        """Tell how to read the blocks."""
        return Welcome(
            number=hello.number,
            role=Role.DECODE,
            fingerprint=FINGERPRINT,
            max_sequence_tokens=1024,
            transport=transport,
            transport_metadata=self._source.metadata,
            open_requests=(),
        )

    async def _live(self) -> None:
        """Give signs of life: frames without messages."""
        while True:
            await self._send()
            await asyncio.sleep(0.1)

    def close(self) -> None:
        """Die."""
        if self._living is not None:
            self._living.cancel()
        super().close()

    async def lend(self) -> AttachPrefix:
        """Let the sink in, and offer it every block that it asks for."""
        await self.welcome(self._wire)
        self._living = asyncio.create_task(self._live())
        attach = await self.expect(AttachPrefix)
        num_blocks = len(attach.block_hashes)
        await self.send(
            BlocksReady(
                request=attach.request,
                attempt=attach.attempt,
                lease=LeaseId("l"),
                epoch=1,
                start=0,
                block_ids=tuple(range(num_blocks)),
                num_blocks=num_blocks,
                checksums=self._source.checksums[:num_blocks],
            )
        )
        return attach


@pytest.mark.parametrize("wire", ["nixl", "zmq"])
@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_a_holder_that_fails_in_the_middle_of_a_read_costs_time_but_no_request(
    over: Callable[[str], Workers], wire: str, fault: str
) -> None:
    """Blocks that a frozen holder's read may still write to are nobody's until it has ended: over ZMQ, what the holder
    sends once it goes on does land in them.

    Over ZMQ only the holder's Python stands still: a connection to a frozen process is lost within a second, by ZMQ's
    own heartbeats, and so is the read.
    """
    workers = over(wire)
    p, d = workers.prefill[0], workers.decode[0]
    ids = tuple(prompt(8000 if fault == "frozen" else 9000, 200))
    work: dict[str, Any] = {
        "request": new_request_id(),
        "attempt": 1,
        "token_ids": ids,
        "prompt_len": len(ids),
        "choices": (0,),
        "sampling": SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        "budget_s": 60,
    }
    async with AsyncExitStack() as stack:
        source = stack.enter_context(SourceProcess(wire, 12, BLOCK_BYTES, seed=5, environment={}))
        source.wait_ready()
        _, p_link = await stack.enter_async_context(gateway_of(p.facts["control"]))
        d_gateway, d_link = await stack.enter_async_context(gateway_of(d.facts["control"]))
        assert p_link.worker is not None
        holder = PlayedHolder(p_link.worker, wire, source)
        stack.callback(holder.close)
        stop, go_on = (
            (source.hold, source.let_go) if wire == "zmq" and fault == "frozen" else (source.freeze, source.thaw)
        )
        stop()
        hint = PrefixHint(source=Source(address=holder.address, incarnation=holder.incarnation), num_tokens=192)
        p_link.send(Prefill(**work, prefix=hint))
        key = RequestKey(work["request"], work["attempt"])
        d_link.send(
            Decode(
                **work, handles=handles(), source=Source(address=p_link.address, incarnation=p_link.worker), offered=key
            )
        )
        finished = asyncio.create_task(d_gateway.until(Finished))
        attach = await holder.lend()
        assert attach.block_hashes == tuple(block_hashes(ids, BLOCK_SIZE))
        await until(lambda: p.get("/ready")["reads"] == 1, "the read never began")
        assert not finished.done()
        if fault == "killed":
            source.kill()
        else:  # asked for at once: on a busy machine the request may take longer than they are kept for
            await until(lambda: p.get("/ready")["blocks_quarantined"] == 12, "the blocks are not kept")
        await finished
        if fault == "frozen":
            go_on()
        await until(lambda: p.get("/ready")["blocks_quarantined"] == 0, "the read never ended")
    received = {message.position: message.token_ids for message in d_gateway.heard if isinstance(message, Tokens)}
    tokens = [token for position in sorted(received) for token in received[position]]
    # What the prefill worker has cached is right, too.
    computed = p.metric(COMPUTED)
    async with Workers(workers.folder, prefill=[p], decode=[d]).dispatcher() as dispatcher:
        for salt, num_computed in (("", 8), ("nobody's", 200)):
            again = generation(ids, cache_salt=salt, max_tokens=20, ignore_eos=True)
            assert (await answer(dispatcher, again)).tokens == [tokens]
            computed += num_computed
            assert p.metric(COMPUTED) == computed
