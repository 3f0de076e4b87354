"""An OpenAI-compatible server over plain `transformers`, for comparison: static, windowed or continuous batching.

    python -m benchmarks.peers.transformers_server --model FOLDER --mode static --batch 8 --port N

`static` waits until `--batch` requests have arrived (or none has arrived for `--flush-ms`), pads them and runs them
until the longest has ended; `windowed` starts a batch when it is full or its first request has waited `--window-ms`;
`continuous` is the library's own continuous batching with at most `--batch` requests at a time. It supports greedy
completions with one prompt in each request. One chunk is sent per token, whether or not it completes a character.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM

from benchmarks.peers.batching import BatchAfterBatch, Continuous, Departure, Engine, EngineError, Job

MAX_BODY_BYTES = 64 * 2**20
MODES = ("static", "windowed", "continuous")


class BadRequest(Exception):  # noqa: N818 - it becomes an answer
    """The client's request cannot be served."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model, its tokenizer and its limits."""

    name: str
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    max_tokens: int
    """Most tokens of prompt and output together."""

    def job(self, body: dict[str, Any]) -> Job:
        """The job that a completion request asks for. Raises `BadRequest`."""
        if body.get("temperature") or body.get("n", 1) != 1 or body.get("stop") or body.get("logprobs"):
            raise BadRequest("greedy completions only: temperature 0, n 1, no stop strings, no logprobs")
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt).ids
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            raise BadRequest("prompt must be one string or one array of tokens")
        num_output = body.get("max_tokens", 16)
        if not isinstance(num_output, int) or num_output < 1 or len(prompt) + num_output > self.max_tokens:
            raise BadRequest(f"max_tokens must be at least 1, and with the prompt at most {self.max_tokens}")
        end_ids = frozenset() if body.get("ignore_eos") else self.end_ids
        return Job(prompt=prompt, max_tokens=num_output, end_ids=end_ids)


class Server:
    """The HTTP handlers for one engine."""

    def __init__(self, served: Served, engine: Engine) -> None:
        self._served = served
        self._engine = engine

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        """Run the engine while the application runs."""
        async with self._engine.lifetime():
            yield

    async def models(self, _: web.Request) -> web.Response:
        """List the one model."""
        return web.json_response({"object": "list", "data": [{"id": self._served.name, "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Serve a completion, streamed or not."""
        body = json.loads(await request.read())
        try:
            job = self._served.job(body)
        except BadRequest as error:
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
        async with aclosing(self._tokens(job)) as tokens:
            if body.get("stream"):
                return await self._stream(request, body, job, tokens)
            output = [token async for token in tokens]
        answer = self._chunk(job, self._served.tokenizer.decode(output), _reason(job, output))
        return web.json_response(answer | {"usage": _usage(job, len(output))})

    async def _tokens(self, job: Job) -> AsyncGenerator[int]:
        """Yield the job's tokens as they arrive; cancel the job if the caller stops reading."""
        self._engine.submit(job)
        output: list[int] = []
        try:
            while not job.ends_with(output):
                fresh = await job.tokens.get()
                if isinstance(fresh, EngineError):
                    raise fresh
                for token in fresh:
                    output.append(token)
                    yield token
        finally:
            if not job.ends_with(output):
                self._engine.cancel(job)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], job: Job, tokens: AsyncIterator[int]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        text = DecodeStream(skip_special_tokens=True)
        output: list[int] = []
        async for token in tokens:
            output.append(token)
            piece = text.step(self._served.tokenizer, token) or ""
            await response.write(_event(self._chunk(job, piece, _reason(job, output))))
        if (body.get("stream_options") or {}).get("include_usage"):
            last = self._chunk(job, "", None) | {"choices": [], "usage": _usage(job, len(output))}
            await response.write(_event(last))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _chunk(self, job: Job, text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        head = {"id": f"cmpl-{job.id}", "object": "text_completion", "created": int(time.time())}
        return {**head, "model": self._served.name, "choices": [choice]}


def _reason(job: Job, output: list[int]) -> str | None:
    if not job.ends_with(output):
        return None
    return "stop" if output[-1] in job.end_ids else "length"


def _usage(job: Job, num_output: int) -> dict[str, int]:
    num_prompt = len(job.prompt)
    total = num_prompt + num_output
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": total}


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def end_ids(model: Any) -> frozenset[int]:
    """The tokens that end a sequence, according to the model's generation configuration."""
    declared = model.generation_config.eos_token_id
    return frozenset(declared if isinstance(declared, list) else [] if declared is None else [declared])


def load(options: argparse.Namespace) -> tuple[Served, Engine]:
    """The model and the engine that `options` ask for."""
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa", local_files_only=True
    ).to(options.device)
    model.eval()
    served = Served(
        name=options.model.resolve().name,
        tokenizer=Tokenizer.from_file(str(options.model / "tokenizer.json")),
        end_ids=end_ids(model),
        max_tokens=model.config.max_position_embeddings,
    )
    model.generation_config.eos_token_id = None  # each job defines its own end tokens
    if options.mode == "continuous":
        page_size = 64
        return served, Continuous(
            model,
            batch_size=options.batch,
            page_size=page_size,
            num_blocks=options.kv_tokens // page_size,
            batch_tokens=options.batch_tokens,
        )
    static = options.mode == "static"
    patience_s = (options.flush_ms if static else options.window_ms) / 1000
    return served, BatchAfterBatch(model, Departure(batch_size=options.batch, patience_s=patience_s, after_last=static))


async def application(options: argparse.Namespace) -> web.Application:
    """The server's routes over the model that `options` name."""
    server = Server(*load(options))
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(server.lifetime)
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_get("/v1/models", server.models)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/health", healthy)
    return app


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint's folder")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, default=8, help="most requests at a time (default: %(default)s)")
    parser.add_argument("--window-ms", type=float, default=50, help="windowed: longest wait of a batch's first request")
    parser.add_argument("--flush-ms", type=float, default=1000, help="static: quiet after which a partial batch leaves")
    parser.add_argument("--kv-tokens", type=int, default=65536, help="continuous: tokens that the KV cache holds")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="continuous: most tokens in a step")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    uvloop.install()
    web.run_app(
        application(options),
        host="127.0.0.1",
        port=options.port,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=5,
        print=None,
    )


if __name__ == "__main__":
    main()
