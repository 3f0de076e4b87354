"""Sends the pieces of a streamed answer as events: in the request's task, or at once while that task waits."""

from __future__ import annotations

from collections.abc import Callable

from gateway.answer.chunk_encoder import ChunkEncoder
from gateway.answer.responses import AnswerFormat, usage_of
from gateway.intake.request_intake import Job
from gateway.text.choice_text import Piece
from gateway.web.event_stream import EventStream


class ChunkSender:
    """The events of one request."""

    def __init__(self, events: EventStream, job: Job, answer: AnswerFormat, observe: Callable[[Piece], None]) -> None:
        """`observe` is called with each piece before it is sent."""
        self._events = events
        self._num_prompt_tokens = job.num_prompt_tokens if job.continuous_usage else None
        self._observe = observe
        self._chunks = ChunkEncoder(answer, usage_follows=job.include_usage)
        self._begun: set[int] = set()
        self._num_open = sum(generation.num_choices for generation in job.generations)
        self._num_tokens = 0

    async def send(self, piece: Piece) -> None:
        """Send a piece, together with the next one if that is there already. Raises `ConnectionError` as `EventStream`
        does."""
        event = self._event(piece)
        if event:
            await self._events.send(event, more=piece.more or not self._num_open)
        elif not piece.more:
            await self._events.flush()

    @property
    def ready(self) -> bool:
        """Whether `take` can be called: the pieces before are sent."""
        return self._events.flows

    def take(self, piece: Piece) -> None:
        """Send a piece that does not end its choice, at once; `ready` must hold."""
        event = self._event(piece)
        if event:
            self._events.send_now(event)

    def _event(self, piece: Piece) -> bytes:
        """Account for a piece, and encode it; empty if the client need not hear of it."""
        self._observe(piece)
        self._num_tokens += piece.num_tokens
        first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        self._num_open -= piece.finish_reason is not None
        if not (first or piece.told or piece.finish_reason is not None):
            return b""
        usage = None
        if self._num_prompt_tokens is not None:
            usage = usage_of(self._num_prompt_tokens, self._num_tokens)
        return self._chunks.encode(piece, first, usage)
