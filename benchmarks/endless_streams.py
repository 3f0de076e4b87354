"""A gateway's end of a control channel that keeps streams open at a decode worker, and reads their tokens only.

A gateway's dispatcher takes more time for the tokens of 256 streams than a worker without a model takes to send them:
it would fall behind, and messages would be lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import zmq.asyncio

from common.contract.ids import RequestKey, new_handle, new_incarnation, new_request_id
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Ack, Decode
from common.contract.messages.session import Hello, HelloRefused, Role, Welcome
from common.contract.messages.worker import Failed, Finished
from common.contract.sampling import SamplingParams
from common.runtime.channel import ControlClient
from common.runtime.clock import Pulse, monotonic

PULSE = Pulse(timeout_s=60.0)
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 1900


class EndlessStreams:
    """Streams at one worker (`common.runtime.channel.ClientHandler`). A stream that has ended begins again."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        """Set when the worker can be asked."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails if anything goes wrong: what is measured is then not what was meant."""
        self._link: ControlClient
        self._work: dict[RequestKey, Decode] = {}

    def start(self, number: int, parameters: Mapping[str, Any]) -> None:
        """Begin `number` streams with these sampling parameters."""
        for seed in range(number):
            draw = random.Random(seed)
            token_ids = tuple(draw.randrange(10, 200) for _ in range(PROMPT_TOKENS))
            sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=seed, **parameters)
            self._ask(
                Decode(
                    request=new_request_id(),
                    attempt=1,
                    token_ids=token_ids,
                    prompt_len=PROMPT_TOKENS,
                    choices=(0,),
                    handles=(new_handle(),),
                    sampling=sampling,
                    budget_s=3600,
                    source=None,
                )
            )

    def stop(self) -> None:
        """Abort every stream."""
        for key in self._work:
            self._link.send(Abort(request=key.request, attempt=key.attempt))
        self._work.clear()

    def _ask(self, work: Decode) -> None:
        self._work[work.key] = work
        self._link.send(work)

    # --- the link's events -------------------------------------------------------------------------------------------

    def hello(self, link: ControlClient) -> Hello:
        """The Hello of a gateway."""
        return Hello(role=Role.GATEWAY, fingerprint=None, open_requests=tuple(self._work))

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        """The worker can be asked."""
        self._link = link
        self.opened.set()

    def on_message(self, link: ControlClient, message: Message) -> None:
        """Begin a stream again that has ended. Tokens, and the ends of aborted streams, need no answer."""
        match message:
            case Finished():
                link.send(Ack(request=message.request, attempt=message.attempt))
                work = self._work.pop(message.key, None)
                if work is not None:
                    self._ask(replace(work, request=new_request_id(), handles=(new_handle(),)))
            case Failed() if message.key in self._work:
                self._break(f"a stream has failed: {message.cause}: {message.message}")

    def on_resync(self, link: ControlClient, welcome: Welcome) -> None:
        """Messages were lost, so the worker has done other work than it was asked for."""
        self._break("messages to or from the worker were lost")

    def on_lost(self, link: ControlClient, why: str, *, crashed: bool) -> None:
        """The worker has ended."""
        self._break(f"the worker is lost: {why}")

    def on_refused(self, link: ControlClient, refused: HelloRefused) -> None:
        """The worker does not speak this protocol."""
        self._break(f"the worker has refused: {refused.message}")

    def _break(self, why: str) -> None:
        if not self.broken.done():
            self.broken.set_exception(RuntimeError(why))


@asynccontextmanager
async def endless_streams(address: str) -> AsyncIterator[EndlessStreams]:
    """A context with a link to the worker at this control address. Raises an `ExceptionGroup` if it breaks."""

    async def watch() -> None:
        await streams.broken

    streams = EndlessStreams()
    link = ControlClient(zmq.asyncio.Context(), address, new_incarnation(), streams, monotonic, PULSE)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(link.run()), tasks.create_task(watch())]
        await streams.opened.wait()
        yield streams
        for each in running:
            each.cancel()
