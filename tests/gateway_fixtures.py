"""A small tokenizer, a scripted generator and a real server on loopback, for the gateway's HTTP tests."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import aiohttp
import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.contract.messages.fields import FinishReason
from common.contract.messages.worker import TokenLogprobs, TokenScores
from gateway.access.api_keys import Keyring
from gateway.access.connections import ConnectionBounds, Listener
from gateway.api import create_app, create_runner
from gateway.api_settings import ApiSettings, Limits
from gateway.observability.metrics import GatewayMetrics
from gateway.observability.request_life import Traces
from gateway.serving.generation import Delta, Generation, PromptDelta, Readiness
from gateway.text.tokenizer import ModelTokenizer

MODEL = "owner/tiny"
CONTEXT = 256
BOS, EOS = 0, 1
READY = Readiness(ready=True, reason="ok", details=lambda: {"prefill": 1, "decode": 1})
STORY = "the quick brown fox jumps over the lazy dog"
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
COMPLETION = {"model": MODEL, "prompt": "hello"}
CHAT = {"model": MODEL, "messages": MESSAGES}
COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog. hello again, hello there, the end of the story",
    "user: assistant: system: naïve café, 日本語の文章 日本 中文字符 👩‍👩‍👧 😀😀 привет",
] * 3


def byte_level_backend(vocab_size: int = 420) -> Tokenizer:
    """A byte-level BPE that puts `<s>` before a text; many of its tokens end within a character."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return backend


def byte_fallback_backend() -> Tokenizer:
    """A BPE in SentencePiece's manner: words begin with U+2581, and what it does not know is spelt in byte tokens."""
    words = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrdinatsf"]
    backend = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    return backend


def wrap(backend: Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> ModelTokenizer:
    """As `transformers` would have loaded it."""
    return ModelTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=chat_template
        )
    )


@functools.cache
def tokenizer() -> ModelTokenizer:
    """The tokenizer of the tests; its vocabulary is also the model's."""
    return wrap(byte_level_backend())


def encode(text: str) -> list[int]:
    """Tokens of `text`, nothing around them."""
    token_ids: list[int] = byte_level().encode(text, add_special_tokens=False).ids
    return token_ids


@functools.cache
def byte_level() -> Tokenizer:
    """The backend of `tokenizer`."""
    return byte_level_backend()


def logprobs_of(generation: Generation, token_id: int) -> TokenLogprobs | None:
    """Made-up log probabilities, if asked for: the token itself and its successors."""
    if generation.sampling.logprobs is None:
        return None
    top = tuple((token_id + rank, -0.5 - rank) for rank in range(generation.sampling.logprobs))
    return TokenLogprobs(logprob=-0.5, top=top)


def prompt_deltas(generation: Generation, size: int) -> list[PromptDelta]:
    """Made-up log probabilities of a prompt, if asked for: minus the position, and of a rank that is ten times it."""
    num = generation.prompt_logprobs
    if num is None:
        return []
    positions = range(1, len(generation.token_ids))
    deltas = []
    for start in range(0, len(positions), size):
        part = positions[start : start + size]
        scores = TokenScores(
            logprobs=tuple(-float(p) for p in part),
            ranks=tuple(10 * p for p in part),
            top_token_ids=tuple(10 + i for _ in part for i in range(num)),
            top_logprobs=tuple(-0.1 - i for _ in part for i in range(num)),
        )
        deltas.append(PromptDelta(scores=scores))
    return deltas


@dataclass
class ScriptedGenerator:
    """Answers every choice with the same script and keeps a record of what was asked and closed."""

    text: str = "hello world"
    token_ids: Sequence[int] | None = None
    """Instead of `text`."""
    finish_reason: FinishReason = "length"
    """`stop`: the script's last token ends the answer, and so is no text."""
    tokens_per_delta: int = 1
    prompt_tokens_per_delta: int = 2
    """Of which log probabilities come at once, where they are asked for; see `prompt_deltas`."""
    failure: Exception | None = None
    """Raised once `num_before` deltas of each choice are out."""
    hang: bool = False
    """Wait for ever once `num_before` deltas of each choice are out."""
    num_before: int = 0
    gate: asyncio.Event | None = None
    """Wait for it once `num_before` deltas of each choice are out."""
    pause_s: float = 0.0
    takes_shortcuts: bool = True
    """Offer deltas that have one token and nothing else to the generation's shortcut, as the dispatcher does."""
    num_taken: int = 0
    """Deltas that a shortcut has taken."""
    readiness: Readiness = READY
    generations: list[Generation] = field(default_factory=list)
    num_open: int = 0
    closed_early: asyncio.Event = field(default_factory=asyncio.Event)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    num_deltas: int = 0
    given_up: list[int] = field(default_factory=list)
    """Choices of which no more was needed, in order."""

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        self.generations.append(generation)
        generation.give_up = self.given_up.append
        self.num_open += 1
        complete = False
        try:
            for delta_of_prompt in prompt_deltas(generation, self.prompt_tokens_per_delta):
                yield delta_of_prompt
            for number, deltas in enumerate(self._rounds(generation)):
                if number == self.num_before:
                    await self._interrupt()
                await asyncio.sleep(self.pause_s)
                for delta in deltas:
                    self.num_deltas += 1
                    if self._is_taken(generation, delta):
                        self.num_taken += 1
                    else:
                        yield delta
            assert self.failure is None
            assert not self.hang, "the script was over before it was to hang"
            complete = True
        finally:
            self.num_open -= 1
            if not complete:
                self.closed_early.set()

    def ready(self) -> Readiness:
        return self.readiness

    def _is_taken(self, generation: Generation, delta: Delta) -> bool:
        plain = Delta(delta.choice, delta.token_ids[:1]) == delta
        return self.takes_shortcuts and plain and generation.shortcut is not None and generation.shortcut(delta)

    async def _interrupt(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.hang:
            self.hanging.set()
            await asyncio.Event().wait()
        if self.gate is not None:
            await self.gate.wait()

    def _rounds(self, generation: Generation) -> list[list[Delta]]:
        """One delta of each choice, again and again."""
        token_ids = list(self.token_ids if self.token_ids is not None else encode(self.text))
        finish_reason = self.finish_reason
        if len(token_ids) > generation.sampling.max_tokens:
            token_ids, finish_reason = token_ids[: generation.sampling.max_tokens], "length"
        starts = range(0, len(token_ids), self.tokens_per_delta)
        rounds = []
        for start in starts:
            part = tuple(token_ids[start : start + self.tokens_per_delta])
            reports = [logprobs_of(generation, token_id) for token_id in part]
            logprobs = tuple(report for report in reports if report is not None) or None
            last = start == starts[-1]
            delta = Delta(choice=0, token_ids=part, logprobs=logprobs, finish_reason=finish_reason if last else None)
            rounds.append([replace(delta, choice=choice) for choice in range(generation.num_choices)])
        return rounds


def settings(**limits: Any) -> ApiSettings:
    """Settings of the tests' server, with some limits of its own."""
    return ApiSettings(
        model_name=MODEL,
        model_vocab_size=tokenizer().vocab_size,
        limits=Limits(**{"max_sequence_tokens": CONTEXT, **limits}),
    )


@dataclass
class Server:
    """A running server."""

    url: str
    metrics: GatewayMetrics


def keyring_of(*keys: str) -> Keyring:
    """Lets in who has one of these keys, without limits."""
    with NamedTemporaryFile("w", suffix=".toml") as file:
        for number, key in enumerate(keys):
            file.write(f'[[keys]]\nname = "{number}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n')
        file.flush()
        return Keyring(Path(file.name))


@asynccontextmanager
async def serve(
    generator: ScriptedGenerator,
    api_settings: ApiSettings | None = None,
    model_tokenizer: ModelTokenizer | None = None,
    clock: Callable[[], float] | None = None,
    send_buffer_bytes: int | None = None,
    traces: Traces | None = None,
    keyring: Keyring | None = None,
    bounds: ConnectionBounds | None = None,
    tls: ssl.SSLContext | None = None,
    shutdown_timeout_s: float = 0.2,
) -> AsyncIterator[Server]:
    """Serve on a free port of loopback; afterwards, no generation may be left open. Requests that are open at the end
    have `shutdown_timeout_s` seconds."""
    metrics = GatewayMetrics(MODEL)
    options: dict[str, Any] = {"traces": traces} | ({} if clock is None else {"clock": clock})
    app = create_app(
        generator, model_tokenizer or tokenizer(), api_settings or settings(), metrics, keyring=keyring, **options
    )
    runner = create_runner(app, shutdown_timeout_s=shutdown_timeout_s)
    await runner.setup()
    listener = Listener(runner, bounds or ConnectionBounds(), metrics, tls)
    try:
        place = socket.create_server(("127.0.0.1", 0))
        if send_buffer_bytes is not None:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        listener.listen(place)
        yield Server(url=f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.port}", metrics=metrics)
    finally:
        await listener.close()
        await runner.cleanup()
    assert generator.num_open == 0


async def post(
    path: str,
    body: Any,
    generator: ScriptedGenerator | None = None,
    *,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> tuple[int, Any, Any]:
    """Status, decoded body and headers."""
    async with serve(generator or ScriptedGenerator(), **options) as server, aiohttp.ClientSession() as session:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(server.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read()), response.headers


@dataclass
class Refusing:
    """A server that refuses whatever a test sends, and so can be shared by many."""

    url: str
    session: aiohttp.ClientSession
    generator: ScriptedGenerator

    async def refusal(self, path: str, body: Any) -> Any:
        """The answer, of status 400, to a request that generates nothing."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data) as response:
            answer = json.loads(await response.read())
            assert response.status == 400, answer
        assert not self.generator.generations
        return answer


@asynccontextmanager
async def serve_refusing(**options: Any) -> AsyncIterator[Refusing]:
    """Serve, with the options of `serve`."""
    generator = ScriptedGenerator()
    async with serve(generator, **options) as server, aiohttp.ClientSession() as session:
        yield Refusing(server.url, session, generator)


def assert_error(answer: Any, param: str | None, code: str | None = None) -> None:
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


def plain_openai(url: str, **options: Any) -> openai.AsyncOpenAI:
    """The official client of a server without TLS, which needs no list of authorities: reading it takes a while."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, **options)


@asynccontextmanager
async def openai_client(generator: ScriptedGenerator, **limits: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serve(generator, settings(**limits)) as server:
        async with plain_openai(server.url, max_retries=0) as client:
            yield client


async def stream_of(generator: ScriptedGenerator, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
    """The data events of a stream, `[DONE]` checked and left out."""
    async with serve(generator, **options) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            events = (await response.read()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
