"""The handoff between real processes: sampling, forks, refusals, aborts and deadlines; and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from stack import BLOCK_BYTES, Workers, answer, avoided, generation, prompt, until

from common.contract.errors import Cause
from gateway.serving.generation import Delta, Generation, GenerationFailed

Pool = Callable[..., Workers]
SMALL_DECODE = {
    "decode_options": ("--kv-cache-bytes", str(20 * BLOCK_BYTES)),
    "prefill_options": ("--chunk-size", "32"),
}


async def test_same_seed_gives_the_same_text_alone_in_a_full_batch_and_over_every_transport(
    main_pool: Workers, over: Callable[[str], Workers]
) -> None:
    work = generation(prompt(1, 150), temperature=1.0, top_k=50, top_p=0.95, seed=1234, max_tokens=100, logprobs=2)
    texts = {}
    registry = main_pool.registry()
    place = main_pool.decode[0]
    beside = 0

    async def crowd(seed: int) -> None:
        """Generate until told to stop."""
        nonlocal beside
        other = generation(prompt(seed, 40 + seed), temperature=1.0, seed=seed, max_tokens=900, ignore_eos=True)
        while True:
            async for delta in dispatcher.generate(other):
                assert isinstance(delta, Delta)
                beside += len(delta.token_ids)

    async with main_pool.dispatcher(registry) as dispatcher:
        texts["alone"] = await answer(dispatcher, work)
        with avoided(registry, main_pool.decode[1]):
            others = [asyncio.create_task(crowd(seed)) for seed in range(100, 120)]
            await until(lambda: place.get("/ready")["running"] == 16, "the batch never was full")
            before = beside
            texts["in a full batch"] = await answer(dispatcher, work)
            assert beside - before > 5 * 100, "it ran alone"
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        again = generation(prompt(1, 150), temperature=1.0, top_k=50, top_p=0.95, seed=1235, max_tokens=100)
        other_seed = await answer(dispatcher, again)
    for wire in ("zmq", "nixl-tcp"):
        async with over(wire).dispatcher() as dispatcher:
            texts[wire] = await answer(dispatcher, work)
    first = texts["alone"].tokens[0]
    assert {name: text.tokens[0] for name, text in texts.items()} == dict.fromkeys(texts, first)
    assert other_seed.tokens[0] != first
    logprobs = [each for delta in texts["alone"].deltas for each in delta.logprobs or ()]
    assert len(logprobs) == len(first)
    assert all(each.logprob <= 0 and len(each.top) == 2 for each in logprobs)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 200])
async def test_choices_fork_from_one_prefill_and_one_pull(main_pool: Workers, length: int) -> None:
    workers = main_pool
    computed = workers.metric("baton_prompt_tokens_computed_total")
    pulled = workers.metric("baton_transfer_bytes_total")
    ids = prompt(5000 + length, length)
    async with workers.dispatcher() as dispatcher:
        several = await answer(dispatcher, generation(ids, n=4, temperature=1.0, seed=9, max_tokens=20))
        assert workers.metric("baton_prompt_tokens_computed_total") - computed == length
        assert workers.metric("baton_transfer_bytes_total") - pulled == -(-length // 16) * BLOCK_BYTES
        single = await answer(dispatcher, generation(ids, temperature=1.0, seed=9, max_tokens=20))
        greedy = await answer(dispatcher, generation(ids, n=3, max_tokens=20))
        greedy_single = await answer(dispatcher, generation(ids, max_tokens=20))
    assert several.tokens[0] == single.tokens[0]
    assert len({tuple(tokens) for tokens in several.tokens}) > 1, "the choices share their random numbers"
    assert greedy.tokens == [greedy_single.tokens[0]] * 3


async def test_a_request_that_its_first_token_ends_leaves_nothing_on_either_worker(main_pool: Workers) -> None:
    async with main_pool.dispatcher() as dispatcher:
        results = await asyncio.gather(
            *(answer(dispatcher, generation(prompt(seed, 90), max_tokens=1)) for seed in range(20))
        )
    assert [len(result.tokens[0]) for result in results] == [1] * 20
    assert {result.reasons[0] for result in results} == {"length"}


async def test_a_choice_that_is_given_up_ends_at_its_worker_and_the_other_goes_on(main_pool: Workers) -> None:
    def work() -> Generation:
        return generation(prompt(71, 100), n=2, temperature=1.0, seed=3, max_tokens=800, ignore_eos=True)

    def num_generated() -> float:
        return sum(worker.metric("baton_tokens_generated_total") for worker in main_pool.decode)

    given_up = work()
    got: list[list[int]] = [[], []]
    async with main_pool.dispatcher() as dispatcher:
        begin = num_generated()
        expected = await answer(dispatcher, work())
        middle = num_generated()
        async for delta in dispatcher.generate(given_up):
            assert isinstance(delta, Delta)
            got[delta.choice] += delta.token_ids
            if given_up.give_up is not None and len(got[0]) >= 20:
                given_up.give_up(0)
        assert given_up.give_up is None
    assert 20 <= len(got[0]) < 800
    assert got == [expected.tokens[0][: len(got[0])], expected.tokens[1]]
    assert num_generated() - middle < middle - begin, "as many as without"


async def test_a_stop_token_ends_a_choice_and_ignore_eos_does_not(main_pool: Workers) -> None:
    ids = prompt(11, 33)
    async with main_pool.dispatcher() as dispatcher:
        free = (await answer(dispatcher, generation(ids, max_tokens=30))).tokens[0]
        stop = free[7]
        stopped = await answer(dispatcher, generation(ids, max_tokens=30, stop_token_ids=(stop,)))
        assert stopped.tokens[0] == free[: free.index(stop) + 1]
        assert stopped.reasons == ["stop"]
        later = await answer(dispatcher, generation(ids, max_tokens=30, stop_token_ids=(stop,), min_tokens=20))
        assert len(later.tokens[0]) >= 20


@pytest.mark.parametrize("wire", ["nixl", "zmq", "nixl-tcp"])
async def test_aborts_at_random_moments_return_every_block(over: Callable[[str], Workers], wire: str) -> None:
    workers = over(wire)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    finished = cancelled = 0

    async def run(index: int) -> None:
        nonlocal finished, cancelled
        work = generation(prompt(index, draw.randint(1, 900)), max_tokens=draw.randint(1, 60), n=draw.choice([1, 1, 3]))
        try:
            async with asyncio.timeout(draw.choice([0.0, 0.005, 0.02, 0.1, 0.3, 1.0, 60.0])):
                await answer(dispatcher, work)
            finished += 1
        except TimeoutError:
            cancelled += 1

    async with workers.dispatcher() as dispatcher:
        await asyncio.gather(*(run(index) for index in range(60)))
        workers.wait_for_baseline()
        assert cancelled >= 5, (finished, cancelled)
        result = await answer(dispatcher, generation(prompt(1, 100)))
    assert len(result.tokens[0]) == 16


async def test_a_decode_worker_without_room_lets_requests_wait_and_every_one_finishes(pool: Pool) -> None:
    workers = pool("small-decode", **SMALL_DECODE)
    assert workers.decode[0].get("/ready")["blocks_total"] == 20
    works = [generation(prompt(seed, 100), max_tokens=40, ignore_eos=True) for seed in range(12)]
    async with workers.dispatcher() as dispatcher:
        crowd = await asyncio.gather(*(answer(dispatcher, work) for work in works))
        alone = [await answer(dispatcher, work) for work in works[:3]]
        assert [each.tokens for each in crowd[:3]] == [each.tokens for each in alone]
        assert all(len(each.tokens[0]) == 40 for each in crowd)
        with pytest.raises(GenerationFailed) as refused:
            await answer(dispatcher, generation(prompt(1, 300), max_tokens=100))
        assert refused.value.cause is Cause.TOO_LARGE
        assert "20" in refused.value.message
        # There is room for one of these at a time, and the one that is in a hurry comes last.
        works = [generation(prompt(seed, 250), max_tokens=60, ignore_eos=True) for seed in range(16)]
        queue = [asyncio.create_task(answer(dispatcher, work)) for work in works]
        await until(lambda: workers.decode[0].get("/ready")["waiting"] >= 10, "nobody waits for room")
        with pytest.raises(GenerationFailed) as late:
            await answer(dispatcher, generation(prompt(99, 250), max_tokens=60, budget_s=0.05))
        assert late.value.cause is Cause.DEADLINE
        assert all(len(each.tokens[0]) == 60 for each in await asyncio.gather(*queue))


async def test_gateways_share_workers_that_have_no_room_for_all(pool: Pool) -> None:
    """Each knows nothing of the others: room, order and ends are the workers' business. One leaves in the middle."""
    workers = pool("small-decode", **SMALL_DECODE)
    works = []
    for index in range(9):
        samplings: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": index}]
        ids, n = prompt(700 + index, 20 + 9 * index), 1 + index % 2
        works += [generation(ids, max_tokens=30, ignore_eos=True, n=n, **sampling) for sampling in samplings]
    async with workers.dispatcher() as first, workers.dispatcher() as second:
        async with workers.dispatcher() as leaving:
            alone = [await answer(first, work) for work in works]
            gateways = (first, second, leaving)
            crowd = [asyncio.create_task(answer(gateways[i % 3], work)) for i, work in enumerate(works)]
            await asyncio.wait(crowd, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            orphans = crowd[2::3]
            assert not all(task.done() for task in orphans)
        for task in orphans:
            task.cancel()
        for expected, task in zip(alone, crowd, strict=True):
            if task not in orphans:
                assert (await task).tokens == expected.tokens
        again = [asyncio.create_task(answer(gateway, works[0])) for gateway in (first, second)]
        assert [each.tokens for each in await asyncio.gather(*again)] == [alone[0].tokens] * 2


async def test_a_prefill_worker_without_room_lets_prompts_wait(pool: Pool) -> None:
    workers = pool("small-prefill", prefill_options=("--kv-cache-bytes", str(16 * BLOCK_BYTES), "--chunk-size", "32"))
    works = [generation(prompt(seed, 200), max_tokens=10) for seed in range(10)]
    async with workers.dispatcher() as dispatcher:
        crowd = await asyncio.gather(*(answer(dispatcher, work) for work in works))
        alone = await answer(dispatcher, works[9])
        before = workers.decode[0].metric("baton_prompt_tokens_computed_total")
        large = await answer(dispatcher, generation(prompt(77, 300)))
        assert workers.decode[0].metric("baton_prompt_tokens_computed_total") - before == 300
        again = await answer(dispatcher, generation(prompt(77, 300)))
    assert crowd[9].tokens == alone.tokens
    assert large.tokens == again.tokens, "a prompt that does not fit there is computed by the decode worker"


async def test_a_request_that_outlives_its_budget_fails_with_the_state_it_was_in(main_pool: Workers) -> None:
    budget_s = 0.4
    message = ""
    causes = set()
    async with main_pool.dispatcher() as dispatcher, asyncio.timeout(60):
        while "decoding" not in message:
            work = generation(prompt(1, 100), max_tokens=900, ignore_eos=True, budget_s=budget_s)
            try:
                await answer(dispatcher, work)
                budget_s /= 2  # this machine is faster
            except GenerationFailed as failed:
                causes.add(failed.cause)
                message = failed.message
                budget_s *= 1.5  # if it was not decoding yet
    assert causes == {Cause.DEADLINE}


async def test_a_gateway_that_leaves_takes_its_requests_with_it(main_pool: Workers) -> None:
    workers = main_pool
    async with workers.dispatcher() as dispatcher:
        tasks = [
            asyncio.create_task(answer(dispatcher, generation(prompt(seed, 500), max_tokens=400, ignore_eos=True)))
            for seed in range(8)
        ]
        await until(lambda: any(p.leftovers() for p in workers.all), "the requests never reached the workers")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    started = time.monotonic()
    workers.wait_for_baseline()
    print(f"baseline after {time.monotonic() - started:.2f} s")
