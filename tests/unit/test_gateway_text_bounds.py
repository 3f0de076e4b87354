"""What a text may take before it is known to be too long: time, memory, and the key's tokens."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from gateway_fixtures import (
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    CONTEXT,
    assert_error,
    byte_level_backend,
    encode,
    post,
    settings,
    tokenizer,
    wrap,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_rate_limits import client_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.runtime.checkpoint import DEMO_FOLDER
from gateway.text.tokenizer import ModelTokenizer, TextTooLong

MIB = 2**20
CONTEXT_OF_LARGE_MODELS = 131_072

MEMORY = """
import asyncio, gc, json, sys
from pathlib import Path
from gateway.text.tokenizer import ModelTokenizer, TextTooLong, keep_torch_out

keep_torch_out()
tokenizer = ModelTokenizer.load(Path(sys.argv[1]))
context = int(sys.argv[2])

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

async def main():
    await tokenizer.encode("hello " * 10_000, context)
    before, refused = resident("VmRSS"), 0
    for text in ["a" * 2**23, "hello " * (2**23 // 6), "a" * (6 * context), " " * 2**23] * 2:
        try:
            await tokenizer.encode(text, context)
        except TextTooLong:
            refused += 1
    gc.collect()
    print(json.dumps({"refused": refused, "peak": resident("VmHWM") - before, "after": resident("VmRSS") - before}))

asyncio.run(main())
"""


@pytest.mark.processes
def test_a_text_that_is_too_long_takes_little_memory_and_gives_it_back() -> None:
    """8 MiB of one letter took 1.2 GiB, and of words 2 GiB, most of which stayed; what is tokenised whole is at most
    6 bytes for each token of the context."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(DEMO_FOLDER), str(CONTEXT_OF_LARGE_MODELS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["refused"] == 6
    assert found["peak"] < 400 * MIB
    assert found["after"] < 100 * MIB


async def _refused_unseen(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch, param: str) -> None:
    def never(*_: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(ModelTokenizer, "_encode_whole", never)
    status, answer, _ = await post(path, body)
    assert status == 400, answer
    assert_error(answer, param, "context_length_exceeded")


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, "/tokenize"])
@pytest.mark.parametrize("num_chars", [100 * CONTEXT, 1_000_000])
async def test_a_text_beyond_the_context_by_its_length_is_not_tokenised(
    path: str, num_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _refused_unseen(path, {"prompt": "a" * num_chars}, monkeypatch, "prompt")


@pytest.mark.parametrize("path", [CHAT_PATH, "/tokenize"])
async def test_so_is_a_conversation(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "a" * 100_000}]
    await _refused_unseen(path, {"messages": messages}, monkeypatch, "messages")


async def test_several_texts_are_looked_at_before_the_first_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    await _refused_unseen(COMPLETIONS_PATH, {"prompt": ["hello", "a" * 100_000]}, monkeypatch, "prompt")


async def test_tokenize_gives_as_many_tokens_as_the_context_has() -> None:
    one = encode("9")
    assert len(one) == 1
    status, answer, _ = await post("/tokenize", {"prompt": "9" * (CONTEXT - 1)})
    assert (status, answer["count"]) == (200, CONTEXT)
    status, answer, _ = await post("/tokenize", {"prompt": "9" * CONTEXT})
    assert status == 400
    assert_error(answer, "prompt", "context_length_exceeded")
    assert str(CONTEXT + 1) in answer["error"]["message"]


# --- near the limit -------------------------------------------------------------------------------------------------


def _with_long_tokens() -> ModelTokenizer:
    """Byte-level, with tokens of 1, 2, 4, ... 64 spaces: slices of a text have other tokens at their seams."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spaces = ["Ġ" * 2**power for power in range(1, 7)]
    words = ["<s>", "</s>", *alphabet, *spaces]
    merges = [("Ġ" * (len(each) // 2),) * 2 for each in spaces]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return wrap(backend)


LONG_TOKENS = _with_long_tokens()


@hypothesis_settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 8_000), st.sampled_from(["", "a", "\n", "é"])), min_size=1, max_size=8))
async def test_what_fits_is_never_refused_for_what_its_slices_have(runs: list[tuple[int, str]]) -> None:
    text = "".join(" " * length + between for length, between in runs)
    token_ids = await LONG_TOKENS.encode(text)
    assert LONG_TOKENS.least_tokens(text) <= len(token_ids)
    assert await LONG_TOKENS.encode(text, len(token_ids)) == token_ids


async def test_what_is_far_beyond_is_refused_without_a_count_to_the_end() -> None:
    with pytest.raises(TextTooLong):
        await LONG_TOKENS.encode(" a" * 100_000, 1000)


# --- who pays -------------------------------------------------------------------------------------------------------


async def test_long_texts_are_tokenised_a_few_at_once_and_not_for_clients_that_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, go, begun = wrap(byte_level_backend()), threading.Event(), list[int]()
    backend = tokenizer._backend

    class Slow:
        def encode_batch_fast(self, *args: object, **options: object) -> object:
            begun.append(threading.get_ident())
            assert go.wait(60)
            return backend.encode_batch_fast(*args, **options)

    monkeypatch.setattr(tokenizer, "_backend", Slow())
    asked = [asyncio.create_task(tokenizer.encode("hello " * 2000)) for _ in range(50)]
    async with asyncio.timeout(30):
        while len(begun) < 4:
            await asyncio.sleep(0.01)
    for task in asked[:40]:
        task.cancel()
    await asyncio.gather(*asked[:40], return_exceptions=True)
    assert len(begun) == 4
    go.set()
    assert len({len(tokens) for tokens in await asyncio.gather(*asked[40:])}) == 1
    assert len(begun) == 14


async def test_the_event_loop_runs_while_many_tokens_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, and without the interpreter lock: with it, there would be a turn or two before and after."""
    tokenizer, num_turns, during = wrap(byte_level_backend()), 0, list[int]()
    backend = tokenizer._backend

    class Watched:
        def decode_batch(self, *args: object, **options: object) -> object:
            before = num_turns
            texts = backend.decode_batch(*args, **options)
            during.append(num_turns - before)
            return texts

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0.001)

    monkeypatch.setattr(tokenizer, "_backend", Watched())
    turns = asyncio.create_task(take_turns())
    token_ids = encode("hello ") * 100_000
    while max(during, default=0) < 5 and len(during) < 50:
        assert await tokenizer.text_of(token_ids, with_special=True) == "hello " * 100_000
    turns.cancel()
    await asyncio.gather(turns, return_exceptions=True)
    assert max(during) >= 5


async def test_tokenize_is_charged(tmp_path: Path) -> None:
    async with client_of(tmp_path, "tokens_per_minute = 60") as client:
        status, answer, _ = await client.ask({"prompt": "9" * 39}, "/tokenize")
        assert (status, answer["count"]) == (200, 40)
        status, answer, headers = await client.ask({"prompt": "9" * 29}, "/tokenize")
        assert status == 429
        assert_error(answer, None, "tokens_per_minute")
        assert headers["Retry-After"] == "10"
        client.time.now += 10
        assert (await client.ask({"prompt": "9" * 29}, "/tokenize"))[0] == 200


PREDICTION = {"prediction": {"type": "content", "content": "9" * 2500}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS_PATH, {"prompt": "9" * 2500}),
        ("/tokenize", {"prompt": "9" * 2500}),
        (COMPLETIONS_PATH, {"prompt": ["9" * 200] * 20}),
        (COMPLETIONS_PATH, {"prompt": [5] * 20} | PREDICTION),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "9" * 20}]} | PREDICTION),
    ],
    ids=["completion", "tokenize", "long together", "prediction", "prediction of a chat"],
)
async def test_who_has_nothing_left_gets_nothing_long_tokenised(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = settings(max_sequence_tokens=4096)
    async with client_of(tmp_path, "tokens_per_minute = 3000", api_settings=context) as client:
        assert (await client.ask({"prompt": [5] * 2990, "max_tokens": 1}))[0] == 200

        encode_whole = ModelTokenizer._encode_whole

        def only_short(self: ModelTokenizer, text: str, add_special_tokens: bool) -> list[int]:
            assert len(text) < 100, "it was tokenised"
            return encode_whole(self, text, add_special_tokens)

        monkeypatch.setattr(ModelTokenizer, "_encode_whole", only_short)
        status, answer, _ = await client.ask(body, path)
        assert status == 429
        assert_error(answer, None, "tokens_per_minute")


@pytest.mark.parametrize("content", ["9" * 20, "9" * 2500])
async def test_a_prediction_costs_nothing(content: str, tmp_path: Path) -> None:
    context = settings(max_sequence_tokens=4096)
    body = COMPLETION | {"prompt": [5] * 20, "max_tokens": 1}
    async with client_of(tmp_path, "tokens_per_minute = 3000", api_settings=context) as client:
        for left in (2979, 2958):
            status, _, headers = await client.ask(body | {"prediction": {"type": "content", "content": content}})
            assert status == 200
            _, _, headers = await client.ask({"prompt": 5})
            assert headers["x-ratelimit-remaining-tokens"] == str(left)
        too_long = {"prediction": {"type": "content", "content": "9" * 1_000_000}}
        status, _, headers = await client.ask(body | too_long)
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (400, "2958"), "its length alone shows it"


async def test_detokenize_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(tmp_path, "tokens_per_minute = 60") as client:
        for wrong in ([10**9], [5] * (CONTEXT + 1), [5] * 61):
            status, _, headers = await client.ask({"tokens": wrong}, "/detokenize")
            assert (status, headers["x-ratelimit-remaining-tokens"]) == (400, "60")
        status, _, headers = await client.ask({"tokens": [5] * 40}, "/detokenize")
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, "20")

        def never(*_: object) -> str:
            raise AssertionError("it was decoded")

        with monkeypatch.context() as patch:
            patch.setattr(ModelTokenizer, "decode_all", never)
            status, answer, headers = await client.ask({"tokens": [5] * 30}, "/detokenize")
        assert (status, headers["Retry-After"]) == (429, "10")
        assert_error(answer, None, "tokens_per_minute")
        client.time.now += 10
        assert (await client.ask({"tokens": [5] * 30}, "/detokenize"))[0] == 200


async def test_a_long_prompt_costs_its_tokens_once_and_what_is_refused_then_its_length(tmp_path: Path) -> None:
    context = settings(max_sequence_tokens=4096)
    async with client_of(tmp_path, "tokens_per_minute = 6000", api_settings=context) as client:
        text = "9" * 2499
        _, _, headers = await client.ask({"prompt": text}, "/tokenize")
        assert headers["x-ratelimit-remaining-tokens"] == str(6000 - 2500)
        await client.ask(COMPLETION | {"prompt": [5] * 2000, "max_tokens": 1})
        left = 6000 - 2500 - 2000 - 1
        status, _, headers = await client.ask({"prompt": text}, "/tokenize")
        paid = tokenizer().least_tokens(text)
        assert 0 < paid < 2500
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (429, str(left - paid))
        wait_s = int(headers["Retry-After"])
        client.time.now += wait_s - 1
        assert (await client.ask({"prompt": text}, "/tokenize"))[0] == 429
        client.time.now += 1 + -(-paid * 60 // 6000)
        assert (await client.ask({"prompt": text}, "/tokenize"))[0] == 200


async def test_a_short_prompt_is_charged_by_its_tokens_alone(tmp_path: Path) -> None:
    async with client_of(tmp_path, "tokens_per_minute = 60") as client:
        status, _, headers = await client.ask({"prompt": "9" * 99}, "/tokenize")
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (400, "60")
