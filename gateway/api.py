"""The OpenAI-compatible HTTP API.

The life cycle of a generating request:

1. `Guard` identifies the caller and admits the request within the limits of its API key.
2. The body is read within bounds on size, time and rate; then the request counts as one of those in flight, and its
   form is validated (`schemas`).
3. `Intake` tokenises the prompts and makes a `Job` with one `Generation` for each prompt. The caller is charged for the
   prompts, by length before and by tokens after tokenising, and later for generated tokens.
4. `stream_pieces` runs the generations and turns their tokens into pieces of text, up to a stop string. If answers can
   contain function calls or reasoning, `answer_parts` splits them.
5. Each piece is sent as a chunk, or all are collected into one answer. The status line waits for the first piece, so
   that a failure before it has an HTTP status; a failure after it is an event with an error object.
6. If the client leaves, the handler is cancelled (`create_runner` arranges that), which closes the generations. So are
   the handlers of requests that the gateway's grace period does not suffice for; these end with an error (`Ending`).
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Final, TypeVar, cast

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from common.contract.errors import Cause
from common.runtime.clock import Clock, monotonic
from gateway.access.api_keys import Keyring
from gateway.access.callers import CALLER, Caller, Callers, client_of
from gateway.access.connections import announce_close
from gateway.access.http_guard import Guard, as_api_error, gateway_ended, is_gone
from gateway.answer import answer_schemas as answers
from gateway.answer.choice_stream import stream_pieces
from gateway.answer.chunk_encoder import encode, encode_in_pieces
from gateway.answer.chunk_sender import ChunkSender
from gateway.answer.responses import AnswerFormat, ChatFormat, CompletionFormat, Heading, WholeChoice, usage_of
from gateway.api_settings import ApiSettings, version
from gateway.dashboard.handlers import Dashboard
from gateway.intake.request_intake import ChargeAhead, Intake, Job
from gateway.intake.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    SchemaT,
    TokenizeRequest,
    parse,
)
from gateway.observability.metrics import GatewayMetrics
from gateway.observability.request_life import RequestLife, Traces
from gateway.openapi import ROUTES, document
from gateway.serving.generation import GenerationFailed, Generator
from gateway.text.choice_text import Piece
from gateway.text.tokenizer import ModelTokenizer
from gateway.web.ending import ENDING, GOODBYE_S, Ending
from gateway.web.event_stream import EventStream
from gateway.web.request_body import BodyReader
from gateway.web.request_ids import echo_name, name_requests

_FormT = TypeVar("_FormT", bound=SamplingFields)

_READING_GRACE_S: Final = 60.0
"""Time after the budget of a streamed answer in which its client must read the rest."""
_JOB = web.RequestKey("job", Job)
_TURN_REPORTS = 256
"""Tokens with log probabilities that are processed before other tasks get a turn of the event loop."""
_SHORT_TOKENS = 64
"""An answer of at most so many tokens is encoded at once."""
_TURN_BYTES = 2**16
"""Bytes of an answer that are encoded before other tasks get a turn of the event loop."""


def create_app(
    generator: Generator,
    tokenizer: ModelTokenizer,
    settings: ApiSettings,
    metrics: GatewayMetrics,
    *,
    keyring: Keyring | None = None,
    clock: Clock = monotonic,
    traces: Traces | None = None,
    dashboard: Dashboard | None = None,
) -> web.Application:
    """The application, which `create_runner` runs. `clock` returns seconds and never goes back.

    With a keyring, only holders of its keys are admitted, within the limits of their keys.
    """
    ending = Ending()
    guard = Guard(settings, metrics, Callers(keyring, settings.tenant_header, metrics, clock), ending, clock)
    api = _Api(generator, tokenizer, settings, metrics, clock, traces, ending, guard)
    app = web.Application(middlewares=[name_requests, guard.middleware])
    app[ENDING] = ending
    app.on_response_prepare.extend([echo_name, guard.add_headers, announce_close])
    app.add_routes([web.route(each.method, each.path, getattr(api, each.handler)) for each in ROUTES])
    if settings.explain_routing:
        app.on_response_prepare.append(_explain)
    if dashboard is not None:
        dashboard.add_to(app)
    return app


def create_runner(app: web.Application, *, shutdown_timeout_s: float = 60.0) -> web.AppRunner:
    """A runner for the application of `create_app`.

    It cancels the handler of a client that leaves, which `aiohttp` does only on request. Its `cleanup` closes idle
    connections, gives requests that are open or still arriving `shutdown_timeout_s` to finish, and then ends the others
    with an error. Connections come from a `Listener`, which bounds them and is closed before.
    """

    async def wait(_: web.Application) -> None:
        await app[ENDING].wait(shutdown_timeout_s)

    app.on_shutdown.append(wait)
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=GOODBYE_S)


class _Api:
    """The handlers that `ROUTES` names."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: ModelTokenizer,
        settings: ApiSettings,
        metrics: GatewayMetrics,
        clock: Clock,
        traces: Traces | None,
        ending: Ending,
        guard: Guard,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._settings = settings
        self._limits = settings.limits
        self._bodies = BodyReader(settings.limits, client_of)
        self._metrics = metrics
        self._clock = clock
        self._traces = traces
        self._ending = ending
        self._guard = guard
        self._intake = Intake(tokenizer, settings, generator.ready)
        self._started_unix_s = int(time.time())
        self._document = document()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CompletionRequest, self._intake.completion, CompletionFormat, "cmpl")

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, ChatRequest, self._intake.chat, ChatFormat, "chatcmpl")

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        caller = request[CALLER]
        form = await self._form(request, TokenizeRequest)
        tokens = await self._intake.tokenize(form, caller.charge_ahead)
        caller.charge_prompt(len(tokens))
        answer = answers.Tokenized(tokens=tokens, count=len(tokens), max_model_len=self._limits.max_sequence_tokens)
        if form.return_token_strs:
            answer["token_strs"] = await self._tokenizer.raw(tokens)
        return _json(await _encoded(answer))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request, DetokenizeRequest)
        text = await self._intake.detokenize(form, request[CALLER].charge_prompt)
        return _json(await _encoded(answers.DetokenizedText(prompt=text)))

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(answers.ModelList(object="list", data=[*map(self._model, self._settings.names)]))

    async def model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self._intake.check_model(name)
        return web.json_response(self._model(name))

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._document, content_type="application/json")

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(answers.Health(status="ok"))

    async def version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(answers.Version(version=version()))

    async def load(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(answers.Load(server_load=self._guard.num_in_flight))

    async def ready(self, request: web.Request) -> web.StreamResponse:
        readiness = self._generator.ready()
        body = answers.ReadyAnswer(
            ready=readiness.ready,
            reason=readiness.reason,
            details=readiness.details() if self._guard.knows(request) else {},
        )
        return web.json_response(body, status=200 if readiness.ready else 503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _form(self, request: web.Request, schema: type[SchemaT]) -> SchemaT:
        body = await self._bodies.read_json(request)
        self._guard.count(request)
        return parse(schema, body)

    async def _generate(
        self,
        request: web.Request,
        schema: type[_FormT],
        make_job: Callable[[_FormT, str, ChargeAhead], Awaitable[Job]],
        format_of: type[AnswerFormat],
        prefix: str,
    ) -> web.StreamResponse:
        """Answer a request of a generating endpoint. `prefix` begins the ids of its answers."""
        arrived_s, caller = self._clock(), request[CALLER]
        form = await self._form(request, schema)
        caller.check_tier(form.service_tier)
        job = await make_job(form, caller.tenant, caller.charge_ahead)
        answer = format_of(
            Heading.draw(prefix, int(time.time()), self._settings.model_name, self._settings.system_fingerprint),
            self._tokenizer,
            job.with_logprobs,
            prompt_ids=job.prompt_ids,
            echoed=form.logprobs if isinstance(form, CompletionRequest) and form.echo else None,
            prompted=form.prompt_logprobs,
        )
        caller.charge_prompt(job.num_prompt_tokens)
        request[_JOB] = job
        target = self._settings.targets[job.generations[0].tier]
        life = RequestLife(
            request, job, answer, arrived_s, self._clock(), metrics=self._metrics, target=target, traces=self._traces
        )
        answering = self._stream if job.stream else self._collect
        return await answering(request, life, answer)

    async def _collect(self, request: web.Request, life: RequestLife, answer: AnswerFormat) -> web.StreamResponse:
        choices = [WholeChoice() for generation in life.job.generations for _ in range(generation.num_choices)]
        caller, num_reports = request[CALLER], 0
        with self._failures_counted(request, life):
            async with aclosing(stream_pieces(self._generator, self._tokenizer, life.job)) as pieces:
                async for piece in pieces:
                    self._observe(life, caller, piece)
                    choices[piece.choice].add(piece)
                    num_reports += len(piece.reports) + len(piece.prompt_reports)
                    if num_reports >= _TURN_REPORTS:
                        num_reports = 0
                        await asyncio.sleep(0)
            life.finished(self._clock())
        whole = answer.whole(choices, _usage(life))
        return _json(encode(whole) if _is_short(life) else await _encoded(whole))

    async def _stream(self, request: web.Request, life: RequestLife, answer: AnswerFormat) -> web.StreamResponse:
        events = EventStream(request)
        limit_s = max(generation.budget_s for generation in life.job.generations) + _READING_GRACE_S
        with events.limit(limit_s, partial(self._metrics.connection_refused, "slow_reader")):
            return await self._send_events(request, events, life, answer)

    async def _send_events(
        self, request: web.Request, events: EventStream, life: RequestLife, answer: AnswerFormat
    ) -> web.StreamResponse:
        chunks = ChunkSender(events, life.job, answer, partial(self._observe, life, request[CALLER]))
        num_reports = 0
        try:
            with self._failures_counted(request, life):
                async with aclosing(stream_pieces(self._generator, self._tokenizer, life.job, chunks)) as pieces:
                    async for piece in pieces:
                        await chunks.send(piece)
                        num_reports += len(piece.reports) + len(piece.prompt_reports)
                        if num_reports >= _TURN_REPORTS:
                            num_reports = 0
                            await asyncio.sleep(0)
                life.finished(self._clock())
                if life.job.include_usage:
                    await events.send(encode(answer.usage_chunk(_usage(life))), more=True)
                await events.send_done()
        except Exception as error:
            if not events.started or is_gone(request):
                raise
            self._metrics.recent.failed(self._clock())
            await events.send(encode(as_api_error(error).body()))
        return await events.close()

    def _observe(self, life: RequestLife, caller: Caller, piece: Piece) -> None:
        life.observe(piece, self._clock())
        caller.charge(piece.num_tokens)

    @contextmanager
    def _failures_counted(self, request: web.Request, life: RequestLife) -> Iterator[None]:
        try:
            yield
        except GenerationFailed as error:
            if _is_untouched(life, error.cause):
                request[CALLER].give_back(life.job.num_prompt_tokens)
            life.failed(error.cause, error.message, self._clock())
            raise
        except asyncio.CancelledError:
            if self._ending.is_reason():
                failure = gateway_ended()
                life.failed(failure.cause, failure.message, self._clock())
                raise failure from None
            why = "the client has left" if is_gone(request) else "the gateway has ended"
            life.failed(Cause.CANCELLED, why, self._clock())
            raise
        except ConnectionError:
            life.failed(Cause.CANCELLED, "the client has left", self._clock())
            raise
        except Exception:
            life.failed(Cause.INTERNAL, "unexpected error", self._clock())
            raise

    def _model(self, name: str) -> answers.Model:
        return {
            "id": name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "baton",
            "root": self._settings.model_name,
            "max_model_len": self._limits.max_sequence_tokens,
        }


async def _explain(request: web.Request, response: web.StreamResponse) -> None:
    """Add the routing decision to the headers; of several prompts, the first one's. A stream's head waits for its first
    piece."""
    if _JOB in request:
        for name, value in request[_JOB].generations[0].waterfall.explain_route().items():
            response.headers[f"x-baton-{name}"] = value


def _is_untouched(life: RequestLife, cause: Cause) -> bool:
    """Whether nothing was computed of a request that failed for this cause: it was refused, or no worker got it."""
    if life.begun:
        return False
    given = any(generation.waterfall.legs for generation in life.job.generations)
    return cause is Cause.CAPACITY or (cause is Cause.WORKER_LOST and not given)


def _json(body: bytes) -> web.Response:
    # aiohttp writes a file in pieces, and waits for the client in between; over TLS, one large write pauses nothing.
    # The file is a copy.
    content = io.BytesIO(body) if len(body) > _TURN_BYTES else body
    return web.Response(body=content, content_type="application/json", charset="utf-8")


def _is_short(life: RequestLife) -> bool:
    """Whether a whole answer is encoded in no time: it has few tokens, and reports nothing of those of a prompt."""
    job = life.job
    return (
        life.num_tokens <= _SHORT_TOKENS and job.prompt_ids is None and not any(job.echoes) and not job.reports_prompt
    )


async def _encoded(answer: Mapping[str, object]) -> bytes:
    """Encode a whole answer, which may be large, and let other tasks run meanwhile."""
    pieces: list[bytes] = []
    num_bytes = 0
    for piece in encode_in_pieces(answer):
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _TURN_BYTES:
            num_bytes = 0
            await asyncio.sleep(0)
    return b"".join(pieces)


def _usage(life: RequestLife) -> answers.Usage:
    job = life.job
    drafts = None
    if job.include_drafts:
        right, wrong = zip(*(each.waterfall.draft_outcomes for each in job.generations), strict=True)
        drafts = sum(right), sum(wrong)
    cached = (min(each.waterfall.num_cached, len(each.token_ids)) for each in job.generations)
    return usage_of(
        job.num_prompt_tokens,
        life.num_tokens,
        num_cached_tokens=sum(cached),
        num_reasoning_tokens=life.num_reasoning_tokens if job.plan is not None and job.plan.reasons else None,
        draft_outcomes=drafts,
        timings=cast(answers.AnswerTimings, life.timings()) if job.include_timings else None,
    )
