"""A gateway's HTTP API in a process of its own, with a generator that makes every answer up, for hostile inputs.

It prints its two ports as one line of JSON: everyone is let in at `open`, and at `keyed` whoever has the key "k".
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from gateway_fixtures import MODEL, encode, settings, tokenizer

from common.contract.messages.fields import FinishReason
from common.runtime.lifecycle import end_with_parent, run
from gateway.access.api_keys import Keyring
from gateway.access.connections import ConnectionBounds, Listener
from gateway.api import create_app, create_runner
from gateway.observability.metrics import GatewayMetrics
from gateway.serving.generation import Delta, Generation, Readiness

TIMEOUT_S = 2.0
"""For heads, bodies, and answers that are not read."""


class Parrot:
    """Says hello to every choice until it has to stop, and keeps nothing."""

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        word = tuple(encode(" hello"))
        left = generation.sampling.max_tokens
        while left > 0:
            await asyncio.sleep(0)
            part, left = word[:left], left - len(word)
            for choice in range(generation.num_choices):
                end: FinishReason | None = None if left > 0 else "length"
                yield Delta(choice=choice, token_ids=part, logprobs=None, finish_reason=end)

    def ready(self) -> Readiness:
        return Readiness(ready=True, reason="ok")


async def serve(stop: asyncio.Event) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "keys.toml")
        file.write_text(f'[[keys]]\nname = "k"\nsha256 = "{hashlib.sha256(b"k").hexdigest()}"\n')
        await _serve(stop, Keyring(file))


async def _serve(stop: asyncio.Event, keyring: Keyring) -> None:
    limits = settings(body_timeout_s=TIMEOUT_S, max_body_bytes=2**20)
    bounds = ConnectionBounds(header_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S, max_connections=256)
    runners, listeners = [], {}
    for name, keys in [("open", None), ("keyed", keyring)]:
        metrics = GatewayMetrics(MODEL)
        runner = create_runner(create_app(Parrot(), tokenizer(), limits, metrics, keyring=keys), shutdown_timeout_s=1.0)
        await runner.setup()
        listener = Listener(runner, bounds, metrics)
        listener.listen(socket.create_server(("127.0.0.1", 0)))
        runners.append(runner)
        listeners[name] = listener
    print(json.dumps({name: listener.port for name, listener in listeners.items()}), flush=True)
    await stop.wait()
    for listener in listeners.values():
        await listener.close()
    for runner in runners:
        await runner.cleanup()


if __name__ == "__main__":
    logging.basicConfig(level="DEBUG")
    end_with_parent(int(sys.argv[1]))
    run(serve)
