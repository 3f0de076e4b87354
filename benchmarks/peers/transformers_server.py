"""An OpenAI-compatible server over plain `transformers`, for comparison: static or continuous batching.

    python -m benchmarks.peers.transformers_server --model FOLDER --mode static --batch 8 --port N

`static` waits until `--batch` requests have arrived (or none has arrived for `--flush-ms`), pads them and runs them
until the longest has ended; `continuous` is the library's own continuous batching with at most `--batch` requests at a
time. It serves what `baton bench` sends: streamed greedy completions of one array of tokens, to a given length. One
chunk is sent per token, whether or not it completes a character.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import uvloop
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM

from benchmarks.command import call
from benchmarks.peers.batching import BatchAfterBatch, Continuous, Engine, EngineError, Job

MAX_BODY_BYTES = 64 * 2**20
PAGE_SIZE = 64
Mode = Literal["static", "continuous"]


class BadRequest(Exception):  # noqa: N818 - it becomes an answer
    """The client's request cannot be served."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model, its tokenizer and its limits."""

    name: str
    tokenizer: Tokenizer
    max_tokens: int
    """Most tokens of prompt and output together."""

    def job(self, body: dict[str, Any]) -> Job:
        """The job that a completion request asks for. Raises `BadRequest`."""
        if body.get("temperature") or body.get("n", 1) != 1 or not (body.get("ignore_eos") and body.get("stream")):
            raise BadRequest("greedy completions only: temperature 0, n 1, ignore_eos, stream")
        prompt, num_output = body.get("prompt"), body.get("max_tokens", 16)
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            raise BadRequest("prompt must be one array of tokens")
        if not isinstance(num_output, int) or num_output < 1 or len(prompt) + num_output > self.max_tokens:
            raise BadRequest(f"max_tokens must be at least 1, and with the prompt at most {self.max_tokens}")
        return Job(prompt=prompt, max_tokens=num_output)


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
        """Stream a completion."""
        try:
            job = self._served.job(json.loads(await request.read()))
        except BadRequest as error:
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        text, num_output = DecodeStream(skip_special_tokens=True), 0
        async with aclosing(self._tokens(job)) as tokens:
            async for token in tokens:
                num_output += 1
                reason = "length" if num_output == job.max_tokens else None
                piece = text.step(self._served.tokenizer, token) or ""
                await response.write(self._event(job, [{"index": 0, "text": piece, "finish_reason": reason}]))
        usage = {"prompt_tokens": len(job.prompt), "completion_tokens": num_output}
        await response.write(self._event(job, [], usage=usage) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _tokens(self, job: Job) -> AsyncGenerator[int]:
        """Yield the job's tokens as they arrive; cancel the job if the caller stops reading."""
        self._engine.submit(job)
        left = job.max_tokens
        try:
            while left:
                fresh = await job.tokens.get()
                if isinstance(fresh, EngineError):
                    raise fresh
                for token in fresh:
                    left -= 1
                    yield token
        finally:
            if left:
                self._engine.cancel(job)

    def _event(self, job: Job, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {"id": job.id, "object": "text_completion", "model": self._served.name, "choices": choices, **more}
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def application(
    *,
    model: Annotated[Path, "a checkpoint's folder"],
    mode: Mode,
    batch: Annotated[int, "most requests at a time"] = 8,
    flush_ms: Annotated[float, "static: quiet after which a partial batch leaves"] = 1000,
    kv_tokens: Annotated[int, "continuous: tokens that the KV cache holds"] = 65536,
    batch_tokens: Annotated[int, "continuous: most tokens in a step"] = 1024,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int = len(os.sched_getaffinity(0)),
) -> web.Application:
    """The server's routes over a model, which is loaded."""
    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    ).to(device)
    loaded.eval()
    loaded.generation_config.eos_token_id = None
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    limit = loaded.config.max_position_embeddings
    engine: Engine
    if mode == "continuous":
        blocks = kv_tokens // PAGE_SIZE
        engine = Continuous(loaded, batch_size=batch, page_size=PAGE_SIZE, num_blocks=blocks, batch_tokens=batch_tokens)
    else:
        engine = BatchAfterBatch(loaded, batch, flush_ms / 1000)
    server = Server(Served(name=model.resolve().name, tokenizer=tokenizer, max_tokens=limit), engine)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(server.lifetime)
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_get("/v1/models", server.models)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/health", healthy)
    return app


def main(*, port: int, **options: Any) -> None:
    """Serve until SIGTERM."""
    uvloop.install()
    web.run_app(
        application(**options),
        host="127.0.0.1",
        port=port,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=5,
        print=None,
    )


if __name__ == "__main__":
    call(main, __doc__, options_of=application)
