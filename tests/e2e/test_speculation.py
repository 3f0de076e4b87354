"""Workers that verify drafted tokens: clients get what they would get without drafts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.theatre import staged
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from stack import (
    BLOCK_BYTES,
    FEW,
    KV_CACHE,
    Process,
    Workers,
    answer,
    avoided,
    generation,
    logprobs_of,
    prompt,
    until,
)

from common.contract.errors import Cause
from common.contract.messages.session import Role
from gateway.serving.generation import Generation, GenerationFailed
from gateway.serving.waterfall import Waterfall

Pool = Callable[..., Workers]
NUM_BEFORE = 40
"""Steps of a worker before it goes away, amid answers of 700 tokens: a step gives a sequence five at most."""


def works(stop_token: int) -> list[Generation]:
    """Everything that concerns a token, on texts that repeat themselves and on texts that only seem to."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7, "logit_bias": FEW},
        {"temperature": 1.0, "seed": 8, "top_p": 0.9, "min_p": 0.05, "logit_bias": FEW[:2]},
        {"stop_token_ids": (stop_token,)},
        {"stop_token_ids": (stop_token,), "min_tokens": 12},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "logit_bias": FEW},
        {"temperature": 1.2, "seed": 8, "n": 3, "logit_bias": FEW},
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 9, "grammar": "start: /([a-f]{3}-){20}/"},
    ]
    return [
        generation([*prompt(index, 9 + index), *[40, 50, 60] * 7], **{"max_tokens": num, "ignore_eos": True, **kind})
        for index, kind in enumerate(kinds)
        for num in (1, 2, 60)
    ]


@pytest.mark.parametrize(("room", "ahead"), [("enough", "off"), ("little", "on")])
async def test_drafts_change_nothing_that_clients_see(main_pool: Workers, pool: Pool, room: str, ahead: str) -> None:
    """With little room sequences are preempted all the time, and come back."""
    little = ("--kv-cache-bytes", str(40 * BLOCK_BYTES), "--memory-reserve", "-1")
    drafts = ("--speculation", "lookup", "--draft-tokens", "5", "--run-ahead", ahead)
    drafting = pool(
        f"drafts with {room} room, ahead {ahead}",
        options=("--checksums",),
        decode_options=(*drafts, *(little if room == "little" else ())),
    )
    draw = random.Random(room)
    async with main_pool.dispatcher() as dispatcher:
        greedy = (await answer(dispatcher, works(0)[2])).tokens[0]
        asked = works(stop_token=greedy[9])
        expected = await asyncio.gather(*(answer(dispatcher, work) for work in asked))
    async with drafting.dispatcher() as dispatcher:
        for _ in range(2):
            order = draw.sample(range(len(asked)), len(asked))
            got = await asyncio.gather(*(answer(dispatcher, asked[index]) for index in order))
            for index, each in zip(order, got, strict=True):
                assert (each.tokens, each.reasons) == (expected[index].tokens, expected[index].reasons), index
                assert logprobs_of(each) == pytest.approx(logprobs_of(expected[index]), abs=1e-4), index
        assert dispatcher.recovery.tally.num_gaps == 0, "a token overtook those before it"
    drafted = sum(worker.metric("vllm:spec_decode_num_draft_tokens_total") for worker in drafting.decode)
    right = sum(worker.metric("vllm:spec_decode_num_accepted_tokens_total") for worker in drafting.decode)
    assert 200 < right < drafted - 200, "tokens were drafted that were right, and some that were wrong"
    if room == "little":
        assert sum(worker.metric("baton_preemptions_total") for worker in drafting.decode) > 0


def draft_model(kind: str, checkpoint: Callable[[str], Path], folder: Path) -> Path:
    """A model that says what the llama says: always, mostly, or by chance alone."""
    if kind == "right":
        return checkpoint("llama")
    make_checkpoint("llama", folder, seed=8 if kind == "wrong" else 7)
    if kind == "similar":
        weights = load_file(folder / "model.safetensors")
        torch.manual_seed(0)
        noisy = {name: each + 0.1 * each.std() * torch.randn_like(each) for name, each in weights.items()}
        save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("kind", "room"), [("right", "enough"), ("wrong", "little"), ("similar", "little")])
async def test_what_a_draft_model_says_changes_nothing(
    main_pool: Workers, pool: Pool, checkpoint: Callable[[str], Path], tmp_path: Path, kind: str, room: str
) -> None:
    """With little room sequences are preempted, and the draft model has to compute them again."""
    little = ("--kv-cache-bytes", str(40 * BLOCK_BYTES), "--memory-reserve", "-1", "--draft-cache-bytes", str(2**19))
    folder = draft_model(kind, checkpoint, tmp_path)
    drafts = ("--speculation", "auto" if kind == "similar" else "draft", "--draft-model", str(folder))
    drafting = pool(
        f"{kind} draft model, {room} room",
        options=("--checksums",),
        decode_options=(*drafts, "--draft-tokens", "4", *(little if room == "little" else ())),
    )
    draw = random.Random(kind + room)
    async with main_pool.dispatcher() as dispatcher:
        greedy = (await answer(dispatcher, works(0)[2])).tokens[0]
        asked = works(stop_token=greedy[9])
        expected = await asyncio.gather(*(answer(dispatcher, work) for work in asked))
    async with drafting.dispatcher() as dispatcher:
        for _ in range(2):
            order = draw.sample(range(len(asked)), len(asked))
            got = await asyncio.gather(*(answer(dispatcher, asked[index]) for index in order))
            for index, each in zip(order, got, strict=True):
                assert (each.tokens, each.reasons) == (expected[index].tokens, expected[index].reasons), index
                assert logprobs_of(each) == pytest.approx(logprobs_of(expected[index]), abs=1e-4), index
        assert dispatcher.recovery.tally.num_gaps == 0, "a token overtook those before it"
    [worker] = drafting.decode
    drafted = worker.metric("baton_draft_tokens_total", proposer="draft")
    right = sum(
        worker.metric("baton_draft_tokens_accepted_total", proposer="draft", position=str(place)) for place in range(4)
    )
    share = {"right": (0.8, 1.0), "wrong": (0.0, 0.3), "similar": (0.2, 0.95)}[kind]
    assert drafted > 200
    assert share[0] <= right / drafted <= share[1], (right, drafted)
    assert worker.metric("baton_draft_tokens_caught_up_total") > 500
    assert worker.metric("baton_draft_seconds_total") > 0
    if room == "little":
        assert worker.metric("baton_preemptions_total") > 0
    drafting.wait_for_baseline()
    assert worker.metric("baton_draft_blocks_used") == 0


async def test_predictions_change_nothing_but_the_number_of_steps(main_pool: Workers, pool: Pool) -> None:
    """Right ones, wrong ones, and some with a mistake: on answers that repeat nothing, so that nothing else helps."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 6, "n": 3},
        {"temperature": 1.0, "seed": 7, "logprobs": 1, "frequency_penalty": 0.5},
    ]
    plain = [generation(prompt(index, 30), max_tokens=64, ignore_eos=True, **kind) for index, kind in enumerate(kinds)]
    async with main_pool.dispatcher() as dispatcher:
        expected = await asyncio.gather(*(answer(dispatcher, work) for work in plain))
    drafting = pool(
        "drafts by predictions",
        options=("--checksums",),
        decode_options=("--speculation", "lookup", "--draft-tokens", "7"),
    )
    draw = random.Random(3)
    async with drafting.dispatcher() as dispatcher:
        for work, told in zip(plain, expected, strict=True):
            said = told.tokens[-1]
            mistaken = [*said[:20], 1, 1, 1, *said[21:]]
            wrong = [said[0], *(draw.randrange(200) for _ in said)]
            for prediction, is_right in ((said, True), (mistaken, True), (wrong, False), ([*said] * 9, True)):
                asked = replace(work, prediction=tuple(prediction), waterfall=Waterfall())
                got = await answer(dispatcher, asked)
                assert (got.tokens, got.reasons) == (told.tokens, told.reasons)
                assert logprobs_of(got) == pytest.approx(logprobs_of(told), abs=1e-4)
                num_right, num_wrong = asked.waterfall.draft_outcomes
                assert num_right > 40 if is_right else num_right < num_wrong, (num_right, num_wrong)
        with pytest.raises(GenerationFailed) as caught:
            await answer(dispatcher, replace(plain[0], prediction=(5, 2**31)))
        assert caught.value.cause is Cause.INVALID


@pytest.mark.parametrize("proposer", ["lookup", "draft"])
@pytest.mark.parametrize("fault", ["drain", "kill"])
async def test_drafts_change_nothing_where_a_worker_goes_away(
    main_pool: Workers, checkpoint: Callable[[str], Path], tmp_path: Path, fault: str, proposer: str
) -> None:
    """Its sequences move to another worker, or are computed again there; both draft."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3, "logit_bias": FEW},
        {"presence_penalty": 0.2},
        {"temperature": 1.0, "seed": 4, "n": 2, "logit_bias": FEW[:3]},
        {"logprobs": 2},
        {"grammar": "start: /([a-f]{3}-){150}/"},
    ]
    asked = [
        generation(prompt(index, 40), max_tokens=700, ignore_eos=True, **kinds[index % len(kinds)])
        for index in range(6)
    ]
    async with main_pool.dispatcher() as dispatcher:
        expected = await asyncio.gather(*(answer(dispatcher, work) for work in asked))
    drafts = ["--speculation", proposer, "--draft-tokens", "4"]
    drafts += ["--draft-model", str(draft_model("similar", checkpoint, tmp_path))] if proposer == "draft" else []
    leaving = staged(Role.DECODE, main_pool.folder, tmp_path, "--checksums", *KV_CACHE, *drafts)
    workers = Workers.start(main_pool.folder, options=("--checksums",), decode_options=drafts)
    [staying] = workers.decode

    def num_right(worker: Process) -> float:
        return worker.metric("baton_draft_tokens_accepted_total", proposer=proposer)

    try:
        leaving.ready()
        workers.decode.append(leaving.process)
        registry = workers.registry()
        async with workers.dispatcher(registry, timeout_s=3.0) as dispatcher:
            leaving.close("step", skip=NUM_BEFORE)
            with avoided(registry, staying):
                answers = [asyncio.create_task(answer(dispatcher, work)) for work in asked]
                await until(lambda: leaving.waiting("step") == 1, "nothing runs there")
            assert num_right(leaving.process) > 20, "nothing is drafted that is right"
            assert num_right(staying) == 0
            if fault == "kill":
                leaving.process.kill()
            else:
                assert dispatcher.links.tell(leaving.address, drain=True)
                await until(lambda: leaving.state()["parked"] > 0, "nobody wants the sequences")
                leaving.open("step")
            got = await asyncio.gather(*answers)
            tally = dispatcher.recovery.tally
        assert [(each.tokens, each.reasons) for each in got] == [(each.tokens, each.reasons) for each in expected]
        if fault == "drain":
            assert tally.moves["moved"] > 0
        else:
            assert tally.failures[Cause.WORKER_LOST] >= len(asked)
        assert num_right(staying) > 20, "nothing is drafted of those that came"
        workers.wait_for_baseline()
    finally:
        workers.signal()
        workers.wait()
