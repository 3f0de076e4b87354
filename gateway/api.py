"""The OpenAI-compatible HTTP API.

The life of a generating request:

1. `Guard` lets it in, within the bound on requests at once.
2. Its body is read, within the bounds on size and time, and checked for form (`schemas`).
3. `Intake` tokenises its prompts and makes it a `Job` of one `Generation` for each prompt.
4. `stream_pieces` runs the generations and turns their tokens into pieces of text, up to a stop string.
5. Each piece is worded as a chunk and sent, or all are collected into one answer. The status line waits for the first
   piece, so that a failure before it has an HTTP status; a failure after it is an `error` event.
6. A client that leaves cancels the handler (`create_runner` sees to that), which closes the generations.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import NoReturn

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from common.contract.errors import Cause
from gateway.api_settings import ApiSettings
from gateway.choice_stream import stream_pieces
from gateway.choice_text import Piece
from gateway.event_stream import EventStream
from gateway.generation import GenerationFailed, Generator
from gateway.http_errors import ApiError, invalid
from gateway.http_guard import Guard, as_api_error, is_gone, tenant_of
from gateway.metrics import GatewayMetrics, RequestStopwatch
from gateway.request_intake import Intake, Job
from gateway.responses import AnswerFormat, ChatFormat, CompletionFormat, Heading, Usage, WholeChoice
from gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SchemaT,
    TokenizeRequest,
    parse,
)
from gateway.tokenizer import ModelTokenizer

Clock = Callable[[], float]


def create_app(
    generator: Generator,
    tokenizer: ModelTokenizer,
    settings: ApiSettings,
    metrics: GatewayMetrics,
    *,
    clock: Clock = time.monotonic,
) -> web.Application:
    """The application, to be run by `create_runner`. `clock` gives seconds and never goes back."""
    api = _Api(generator, tokenizer, settings, metrics, clock)
    app = web.Application(
        middlewares=[Guard(settings, metrics).middleware], client_max_size=settings.limits.max_body_bytes
    )
    app.add_routes(
        [
            web.post("/v1/completions", api.completions),
            web.post("/v1/chat/completions", api.chat_completions),
            web.post("/tokenize", api.tokenize),
            web.post("/detokenize", api.detokenize),
            web.get("/v1/models", api.models),
            web.get("/v1/models/{name:.+}", api.model),
            web.get("/health", api.health),
            web.get("/ready", api.ready),
            web.get("/metrics", api.metrics),
        ]
    )
    return app


def create_runner(app: web.Application, *, shutdown_timeout_s: float = 60.0) -> web.AppRunner:
    """A runner for the application of `create_app`.

    It cancels the handler of a client that leaves, which `aiohttp` does not do unless told. Its `cleanup` stops
    listening, gives requests in flight `shutdown_timeout_s` to end, and then cancels them.
    """
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)


class _Api:
    def __init__(
        self,
        generator: Generator,
        tokenizer: ModelTokenizer,
        settings: ApiSettings,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._settings = settings
        self._limits = settings.limits
        self._metrics = metrics
        self._clock = clock
        self._intake = Intake(tokenizer, settings, lambda: generator.ready().max_sequence_tokens)
        self._started_unix_s = int(time.time())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrived_s = self._clock()
        tenant = tenant_of(request, self._settings.tenant_header)
        job = await self._intake.completion(await self._form(request, CompletionRequest), tenant)
        answer = CompletionFormat(self._heading("cmpl"), self._tokenizer, job.with_logprobs)
        return await self._generate(request, job, answer, arrived_s)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        arrived_s = self._clock()
        tenant = tenant_of(request, self._settings.tenant_header)
        job = await self._intake.chat(await self._form(request, ChatRequest), tenant)
        answer = ChatFormat(self._heading("chatcmpl"), self._tokenizer, job.with_logprobs)
        return await self._generate(request, job, answer, arrived_s)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        tokens = await self._intake.tokenize(await self._form(request, TokenizeRequest))
        return web.json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self._limits.max_sequence_tokens}
        )

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"prompt": self._intake.detokenize(await self._form(request, DetokenizeRequest))})

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        self._intake.check_model(request.match_info["name"])
        return web.json_response(self._model())

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        readiness = self._generator.ready()
        body = {"ready": readiness.ready, "reason": readiness.reason, "details": dict(readiness.details)}
        return web.json_response(body, status=200 if readiness.ready else 503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _form(self, request: web.Request, schema: type[SchemaT]) -> SchemaT:
        return parse(schema, _decode(await self._read(request)))

    async def _read(self, request: web.Request) -> bytes:
        if request.content_length is not None and request.content_length > self._limits.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.max_body_bytes)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._limits.body_timeout_s} s") from None
        except web.RequestPayloadError as error:
            raise invalid(None, f"the body could not be read: {error}", code="invalid_body") from error

    async def _generate(
        self, request: web.Request, job: Job, answer: AnswerFormat, arrived_s: float
    ) -> web.StreamResponse:
        stopwatch = RequestStopwatch(self._metrics, arrived_s, job.num_prompt_tokens)
        async with aclosing(self._pieces(job, stopwatch)) as pieces:
            if job.stream:
                return await self._stream(request, job, answer, pieces, stopwatch)
            return await self._collect(job, answer, pieces, stopwatch)

    async def _pieces(self, job: Job, stopwatch: RequestStopwatch) -> AsyncGenerator[Piece, None]:
        async with aclosing(stream_pieces(self._generator, self._tokenizer, job)) as pieces:
            async for piece in pieces:
                stopwatch.observe(piece, self._clock())
                yield piece
        stopwatch.finish(self._clock())

    async def _collect(
        self, job: Job, answer: AnswerFormat, pieces: AsyncGenerator[Piece, None], stopwatch: RequestStopwatch
    ) -> web.StreamResponse:
        choices = [WholeChoice() for generation in job.generations for _ in range(generation.num_choices)]
        with self._failures_counted():
            async for piece in pieces:
                choices[piece.choice].add(piece)
        return web.json_response(answer.whole(choices, _usage(job, stopwatch)))

    async def _stream(
        self,
        request: web.Request,
        job: Job,
        answer: AnswerFormat,
        pieces: AsyncGenerator[Piece, None],
        stopwatch: RequestStopwatch,
    ) -> web.StreamResponse:
        events = EventStream(request, self._limits.stall_timeout_s)
        try:
            with self._failures_counted():
                await _send_chunks(events, job, answer, pieces)
                if job.include_usage:
                    await events.send(answer.usage_chunk(_usage(job, stopwatch)))
                await events.send_done()
        except Exception as error:
            if not events.started or is_gone(request):
                raise
            await events.send_error(as_api_error(error).body())
        return await events.close()

    @contextmanager
    def _failures_counted(self) -> Iterator[None]:
        try:
            yield
        except GenerationFailed as error:
            self._metrics.failed(error.cause)
            raise
        except (asyncio.CancelledError, ConnectionError):
            self._metrics.failed(Cause.CANCELLED)
            raise
        except Exception:
            self._metrics.failed(Cause.INTERNAL)
            raise

    def _heading(self, prefix: str) -> Heading:
        return Heading.draw(prefix, int(time.time()), self._settings.model_name)

    def _model(self) -> dict[str, object]:
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "baton",
            "max_model_len": self._limits.max_sequence_tokens,
        }


async def _send_chunks(
    events: EventStream, job: Job, answer: AnswerFormat, pieces: AsyncGenerator[Piece, None]
) -> None:
    begun: set[int] = set()
    async for piece in pieces:
        first = piece.choice not in begun
        begun.add(piece.choice)
        if first or piece.text or piece.reports or piece.finish_reason is not None:
            chunk = answer.chunk(piece, first)
            await events.send(chunk | {"usage": None} if job.include_usage else chunk)


def _usage(job: Job, stopwatch: RequestStopwatch) -> Usage:
    return Usage(num_prompt_tokens=job.num_prompt_tokens, num_completion_tokens=stopwatch.num_tokens)


def _decode(body: bytes) -> object:
    """JSON, and nothing but JSON. Raises `ApiError`."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
