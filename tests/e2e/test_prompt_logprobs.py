"""Log probabilities of prompts through the whole path: as `transformers` has them, told as they are computed, and
nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest
import torch
from held_worker import decode_from, work, worker
from stack import MODEL, Process, Workers, gateway_of, prompt
from step_tokens import handles
from transformers import AutoModelForCausalLM
from waiting import eventually

from common.contract.errors import Cause
from common.contract.ids import new_incarnation
from common.contract.messages.gateway import Abort, Decode, Prefill
from common.contract.messages.session import Role
from common.contract.messages.worker import Cancelled, Failed, Finished, PromptLogprobs, Tokens
from common.contract.sampling import SamplingParams
from common.engine.batch import InvalidLogitsError
from common.engine.runner import Submitted
from common.runtime.checkpoint import config_hash
from common.runtime.clock import Pulse, monotonic
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Delta, Generation
from gateway.workers.registry import Registry

LENGTH = 200
CHUNK = 64
SIZES: dict[Role, dict[str, Any]] = {
    Role.PREFILL: {"chunk_size": CHUNK},
    Role.DECODE: {"token_budget": CHUNK, "prefill_tokens": CHUNK - 8, "max_num_seqs": 8},
}


def positions(told: Sequence[Any]) -> list[int]:
    """Of all prompt tokens that were told of, in order."""
    reports = [message for message in told if isinstance(message, PromptLogprobs)]
    return [message.position + index for message in reports for index in range(len(message.scores))]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_each_chunk_is_told_before_the_next_one_is_computed(role: Role, checkpoint: Callable[[str], Any]) -> None:
    async with AsyncExitStack() as stack:
        tested, held, at, _ = await stack.enter_async_context(worker(role, checkpoint("llama"), **SIZES[role]))
        gateway, link = await stack.enter_async_context(gateway_of(at))

        def send(num: int | None) -> None:
            asked = work(LENGTH, 1) | {"prompt_logprobs": num}
            link.send(Prefill(**asked) if role is Role.PREFILL else Decode(**asked, handles=handles(), source=None))

        held.hold(after=2)
        send(2)
        assert await asyncio.to_thread(held.in_step.wait, 20), "the third step never began"
        await eventually(lambda: len(positions(gateway.heard)) == 2 * CHUNK)
        held.release()
        await gateway.until(Finished)
        assert positions(gateway.heard) == list(range(1, LENGTH))
        kinds = [type(each) for each in gateway.heard if isinstance(each, PromptLogprobs | Tokens)]
        assert kinds == [PromptLogprobs] * 4 + [Tokens]
        first = [each for each in gateway.heard if isinstance(each, PromptLogprobs)]
        assert all(message.scores.num_alternatives == 2 for message in first)

        gateway.heard.clear()
        send(0)  # all of it is cached now
        await gateway.until(Finished)
        again = [each for each in gateway.heard if isinstance(each, PromptLogprobs)]
        assert positions(again) == list(range(1, LENGTH))
        assert [each for message in again for each in message.scores.logprobs] == pytest.approx(
            [each for message in first for each in message.scores.logprobs], abs=1e-5
        )
        gateway.heard.clear()
        send(None)
        await gateway.until(Finished)
        assert positions(gateway.heard) == []
        assert tested.ready()[1]["blocks_used"] == 0
        samples = {sample.name: sample.value for metric in tested.metrics() for sample in metric.samples}
        assert samples["baton_prompt_tokens_scored_total"] == 2 * (LENGTH - 1)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_who_is_aborted_in_mid_prompt_tells_no_more_and_holds_nothing(
    role: Role, checkpoint: Callable[[str], Any]
) -> None:
    async with AsyncExitStack() as stack:
        tested, held, at, _ = await stack.enter_async_context(worker(role, checkpoint("llama"), **SIZES[role]))
        gateway, link = await stack.enter_async_context(gateway_of(at))
        asked = work(LENGTH, 5) | {"prompt_logprobs": 0}
        held.hold(after=1)
        link.send(Prefill(**asked) if role is Role.PREFILL else Decode(**asked, handles=handles(), source=None))
        assert await asyncio.to_thread(held.in_step.wait, 20)
        await eventually(lambda: len(positions(gateway.heard)) == CHUNK)
        link.send(Abort(request=asked["request"], attempt=1))
        await gateway.until(Cancelled)
        held.release()
        await eventually(lambda: tested.ready()[1]["blocks_limbo"] == tested.ready()[1]["blocks_used"] == 0)
        assert positions(gateway.heard) == list(range(1, CHUNK + 1))
        state = tested.ready()[1]
        assert (state["requests"], state["leases"]) == (0, 0)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_what_is_not_a_number_fails_the_request_and_holds_nothing(
    role: Role, checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Submitted, "scores", lambda submitted: [InvalidLogitsError("not numbers")])
    async with AsyncExitStack() as stack:
        tested, _, at, _ = await stack.enter_async_context(worker(role, checkpoint("llama"), **SIZES[role]))
        gateway, link = await stack.enter_async_context(gateway_of(at))
        for length in (LENGTH, CHUNK // 2):  # in mid prompt, and with the last chunk
            asked = work(length, 5) | {"prompt_logprobs": 0}
            link.send(Prefill(**asked) if role is Role.PREFILL else Decode(**asked, handles=handles(), source=None))
            failed = await gateway.until(Failed)
            assert (failed.cause, failed.message) == (Cause.INTERNAL, "not numbers")
            await eventually(lambda: tested.ready()[1]["blocks_limbo"] == tested.ready()[1]["blocks_used"] == 0)
            assert (tested.ready()[1]["requests"], tested.ready()[1]["leases"]) == (0, 0)
            gateway.heard.clear()


async def test_a_decode_worker_that_pulls_tells_nothing_of_the_prompt(checkpoint: Callable[[str], Any]) -> None:
    async with AsyncExitStack() as stack:
        _, _, prefill_at, me = await stack.enter_async_context(worker(Role.PREFILL, checkpoint("llama")))
        _, _, decode_at, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        p_gateway, p_link = await stack.enter_async_context(gateway_of(prefill_at))
        d_gateway, d_link = await stack.enter_async_context(gateway_of(decode_at))
        request = work(LENGTH, 5)
        p_link.send(Prefill(**request, prompt_logprobs=0))
        d_link.send(decode_from(request, prefill_at, me))
        await d_gateway.until(Finished)
        assert (positions(p_gateway.heard), positions(d_gateway.heard)) == (list(range(1, LENGTH)), [])


async def test_another_worker_goes_on_where_the_client_is(checkpoint: Callable[[str], Any]) -> None:
    """The first one is gone in mid prompt: what it has told is computed again, and not told again."""
    sizes, prompt_ids = SIZES[Role.PREFILL], tuple(range(10, 10 + LENGTH))
    async with AsyncExitStack() as stack:
        prefill = {}
        for _ in range(2):
            own = await stack.enter_async_context(AsyncExitStack())
            tested, held, at, _ = await own.enter_async_context(worker(Role.PREFILL, checkpoint("llama"), **sizes))
            held.hold(after=2)
            prefill[at] = own, held, tested
        _, _, decode_at, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        registry = Registry(tuple(prefill), (decode_at,), config_hash(checkpoint("llama")))
        dispatcher = Dispatcher(new_incarnation(), registry, monotonic, Pulse(timeout_s=20))
        running = asyncio.create_task(dispatcher.links.run())
        stack.callback(running.cancel)
        async with asyncio.timeout(20):
            while dispatcher.ready().reason != "ready" or len(registry.usable(Role.PREFILL)) < 2:
                await asyncio.sleep(0.01)
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        asked = Generation(token_ids=prompt_ids, num_choices=1, sampling=sampling, budget_s=60, prompt_logprobs=1)
        told: list[float] = []
        output: list[int] = []
        lost = False
        async for delta in dispatcher.generate(asked):
            if isinstance(delta, Delta):
                output += delta.token_ids
                continue
            assert not output
            told += delta.scores.logprobs
            if len(told) >= 2 * CHUNK and not lost:
                lost = True
                (first,) = [at for at, (_, _, tested) in prefill.items() if tested.ready()[1]["requests"]]
                (second,) = prefill.keys() - {first}
                await prefill[first][0].aclose()
                prefill[second][1].release()
        assert lost, "nothing was lost"
        assert (len(told), len(output)) == (LENGTH - 1, 3)
        # The decode worker may tell of it before the gateway knows, and then the next attempt begins there once more.
        assert 1 <= dispatcher.recovery.tally.failures.total() <= 2
        again = replace(asked, prompt_logprobs=None)
        assert [t async for d in dispatcher.generate(again) if isinstance(d, Delta) for t in d.token_ids] == output
        whole = replace(asked, cache_salt="other")
        scores = [d.scores async for d in dispatcher.generate(whole) if not isinstance(d, Delta)]
        assert [each for part in scores for each in part.logprobs] == pytest.approx(told, abs=1e-5)


# --- real processes ----------------------------------------------------------------------------------------------


def reference(workers: Workers, token_ids: list[int]) -> torch.Tensor:
    """Log probabilities `[T, V]` of what follows each token."""
    model = AutoModelForCausalLM.from_pretrained(workers.folder, dtype=torch.float32)
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)
    return logprobs


def check(logprobs: Any, rows: torch.Tensor, token_ids: list[int]) -> None:
    """An answer's log probabilities against the reference, whose tokens may go on beyond the prompt."""
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    expected = [rows[index, token].item() for index, token in enumerate(token_ids[1:])]
    assert logprobs["token_logprobs"][1 : len(token_ids)] == pytest.approx(expected, abs=2e-4)
    for index, top in enumerate(logprobs["top_logprobs"][1 : len(token_ids)]):
        assert max(top.values()) == pytest.approx(rows[index].max().item(), abs=2e-4)
    assert len(logprobs["text_offset"]) == len(logprobs["tokens"]) == len(logprobs["token_logprobs"])


@pytest.fixture(params=["handoff", "colocated"])
def served(request: pytest.FixtureRequest, pool: Callable[..., Workers]) -> Iterator[tuple[Workers, str]]:
    """Workers, and the URL of a gateway before them."""
    if request.param == "handoff":
        yield request.getfixturevalue("main_pool"), request.getfixturevalue("main_gateway").facts["url"]
        return
    workers = pool("colocated", prefill=0, decode=1, options=("--checksums",))
    with workers.gateway("--served-model-name", MODEL) as gateway:
        yield workers, gateway.facts["url"]


async def test_likelihoods_are_those_of_transformers(served: tuple[Workers, str]) -> None:
    """As lm-eval asks for them: several prompts of tokens, of which one was asked before and is cached."""
    workers, url = served
    prompts = [prompt(length, length) for length in (1, 17, 150, 333)]
    rows = [reference(workers, each) for each in prompts]
    body: dict[str, Any] = {"model": MODEL, "echo": True, "logprobs": 2, "temperature": 0, "seed": 1}
    async with aiohttp.ClientSession() as session:

        async def ask(**changes: Any) -> Any:
            async with session.post(f"{url}/v1/completions", json=body | changes) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        for max_tokens in (0, 1):
            answer = await ask(prompt=prompts, max_tokens=max_tokens)
            assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
            assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)
            for choice, expected, token_ids in zip(answer["choices"], rows, prompts, strict=True):
                check(choice["logprobs"], expected, token_ids)
                assert len(choice["logprobs"]["tokens"]) == len(token_ids) + max_tokens
                assert choice["finish_reason"] == "length"
                if max_tokens:
                    assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(
                        expected[-1].max().item(), abs=2e-4
                    )

        answer = await ask(prompt=prompts[2], max_tokens=20, ignore_eos=True, n=2, prompt_logprobs=3, echo=False)
        for choice in answer["choices"]:
            assert len(choice["logprobs"]["tokens"]) == 20
            told = choice["prompt_logprobs"]
            assert told[0] is None
            for row, token, entries in zip(rows[2], prompts[2][1:], told[1:], strict=False):
                assert entries[str(token)]["logprob"] == pytest.approx(row[token].item(), abs=2e-4)
                assert entries[str(token)]["rank"] == int((row >= row[token]).sum())
                assert {each["rank"] for each in entries.values()} >= {1, 2, 3}
    workers.wait_for_baseline()


async def test_a_stream_and_a_text(served: tuple[Workers, str]) -> None:
    workers, url = served
    text = "A prefill worker computes the keys and values of a prompt in chunks. " * 6
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/tokenize", json={"prompt": text}) as response:
            token_ids = (await response.json())["tokens"]
    rows = reference(workers, token_ids)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.completions.create(
            model=MODEL, prompt=text, echo=True, logprobs=1, max_tokens=4, temperature=0, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
    parts = [chunk.logprobs.model_dump() for chunk in chunks if chunk.logprobs is not None]
    logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    check(logprobs, rows, token_ids)
    said = "".join(chunk.text for chunk in chunks)
    assert said.startswith(text)
    assert logprobs["text_offset"][len(token_ids)] == len(text)
    for name, offset in zip(logprobs["tokens"][: len(token_ids)], logprobs["text_offset"], strict=False):
        assert said[offset:].startswith(name)


async def test_who_leaves_in_mid_prompt_leaves_nothing(main_pool: Workers, main_gateway: Process) -> None:
    body = {"model": MODEL, "prompt": prompt(1, 900), "echo": True, "logprobs": 5, "max_tokens": 0, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{main_gateway.facts['url']}/v1/completions", json=body) as response:
            assert response.status == 200
            await response.content.readany()
    main_pool.wait_for_baseline()
