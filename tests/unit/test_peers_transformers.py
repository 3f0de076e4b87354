"""The server over plain transformers: when batches leave, and that every mode gives what `generate` gives."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.models import llama_15m
from benchmarks.peers.batching import BatchAfterBatch
from benchmarks.peers.transformers_server import Mode, application

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [100, 200, 300], list(range(20, 60))]
LENGTHS = [12, 3, 8]


def test_a_static_batch_waits_until_it_is_full_or_for_quiet() -> None:
    engine = BatchAfterBatch(None, 3, 2.0)
    assert engine.leaves_at([]) == math.inf
    assert engine.leaves_at([10.0, 11.5]) == 13.5
    assert engine.leaves_at([1.0, 2.0, 3.0]) == -math.inf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_15m(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
        )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def serving(folder: Path, mode: Mode) -> web.Application:
    return application(
        model=folder, mode=mode, batch=2, flush_ms=50, kv_tokens=4096, batch_tokens=64, dtype="float32", threads=1
    )


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int], length: int) -> list[dict[str, Any]]:
    body = {
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(url, json=body) as answer:
        assert answer.status == 200
        lines = (await answer.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("mode", get_args(Mode))
async def test_every_mode_streams_what_generate_gives(folder: Path, expected: list[list[int]], mode: Mode) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    async with TestServer(serving(folder, mode)) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("/v1/completions"))
        work = (complete(session, url, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True))
        streams = await asyncio.gather(*work)
    for chunks, prompt, length, ids in zip(streams, PROMPTS, LENGTHS, expected, strict=True):
        *tokens, last = chunks
        assert len(tokens) == length
        assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None] * (length - 1) + ["length"]
        assert last["usage"]["prompt_tokens"] == len(prompt)
        assert last["usage"]["completion_tokens"] == length
        assert "".join(chunk["choices"][0]["text"] for chunk in tokens).strip() == tokenizer.decode(ids).strip()


async def test_what_it_cannot_do_is_refused(folder: Path) -> None:
    async with TestServer(serving(folder, "static")) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("/v1/completions"))
        wrongs: list[dict[str, Any]] = [
            {"temperature": 1},
            {"n": 2},
            {"prompt": [[1], [2]]},
            {"prompt": []},
            {"stream": False},
            {"max_tokens": 5000},
        ]
        for wrong in wrongs:
            async with session.post(
                url, json={"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True, "stream": True, **wrong}
            ) as answer:
                assert answer.status == 400, wrong
