"""A request's generations as one stream of pieces, which can be closed at any moment and leaves nothing running."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from common.contract.errors import Cause
from gateway.answer.chunk_sender import ChunkSender
from gateway.intake.request_intake import Job
from gateway.serving.generation import Delta, GenerationFailed, Generator, PromptDelta
from gateway.text.answer_parts import AnswerParts
from gateway.text.choice_text import ChoiceText, Piece
from gateway.text.detokenizer import SpecialDecoder
from gateway.text.prompt_text import PromptText
from gateway.text.stop_strings import StopTables

_QUEUED_PIECES = 64
"""Pieces that wait for the client, of a request with several prompts; at this number its generations are not read."""
_TURN_CHOICES = 64
"""Choices without tokens that are answered in one turn of the event loop."""
_CHOICES_AT_ONCE = 32
"""Choices of one request with several prompts that are generated at a time; the other prompts begin as these end. With
this bound the choices of as many requests as may be in flight by default fit into the list of one message to a
worker."""


class ChoicePieces(Protocol):
    """One choice's conversion of deltas into pieces."""

    ended: bool
    """Whether the last piece has been returned; further deltas are to be ignored."""

    def pieces(self, delta: Delta) -> Sequence[Piece]:
        """Take the choice's next delta, and return its pieces."""
        ...


def stream_pieces(
    generator: Generator, tokenizer: SpecialDecoder, job: Job, outlet: ChunkSender | None = None
) -> AsyncGenerator[Piece, None]:
    """Generate every prompt of `job`; yield the pieces of all choices, those of one choice in order. While the reader
    waits, and `outlet` is ready, that one gets the pieces.

    Raises `GenerationFailed` as soon as one generation fails. A generation is closed once its choices have ended, and
    all are closed when the stream is.
    """
    if job.generates_nothing and not job.reports_prompt:
        return _prompts_alone(job)
    prompts, numbers = _Prompts(tokenizer, job), range(len(job.generations))
    if len(numbers) == 1:
        return _one_generation(generator, prompts, 0, outlet)
    at_once = max(1, _CHOICES_AT_ONCE // job.generations[0].num_choices)
    return _merged([_one_generation(generator, prompts, number) for number in numbers], at_once)


async def _prompts_alone(job: Job) -> AsyncGenerator[Piece, None]:
    texts = [
        echo
        for echo, generation in zip(job.echoes, job.generations, strict=True)
        for _ in range(generation.num_choices)
    ]
    for choice, text in enumerate(texts):
        if choice % _TURN_CHOICES == 0:
            await asyncio.sleep(0)  # let other tasks run: there may be many choices
        yield Piece(choice=choice, text=text, num_tokens=0, reports=(), finish_reason="length")


class _NoText:
    """A choice whose answer has only the prompt: the one token that workers have to generate is dropped."""

    def __init__(self, choice: int) -> None:
        self._choice = choice
        self.ended = False

    def pieces(self, delta: Delta) -> Sequence[Piece]:
        """The final piece, whatever was generated."""
        self.ended = True
        return (Piece(choice=self._choice, text="", num_tokens=0, reports=(), finish_reason="length"),)


class _Shortcut:
    """Turns deltas into pieces, and gives them to the outlet."""

    def __init__(self, choices: Sequence[ChoicePieces], outlet: ChunkSender) -> None:
        self._choices = choices
        self._outlet = outlet
        self.left: deque[Sequence[Piece] | Exception] = deque()
        """What has become of each delta that was not taken, although it was turned into pieces."""

    def __call__(self, delta: Delta) -> bool:
        choice = self._choices[delta.choice]
        if choice.ended or not self._outlet.ready:
            return False
        try:
            pieces = choice.pieces(delta)
            if not choice.ended:
                for piece in pieces:
                    self._outlet.take(piece)
                return True
            self.left.append(pieces)
        except Exception as error:  # noqa: BLE001 (it is raised in the request's task)
            self.left.append(error)
        return False


class _Prompts:
    """The prompts of a request. What turns the deltas of one into pieces is made when its turn has come: there may be
    many."""

    def __init__(self, tokenizer: SpecialDecoder, job: Job) -> None:
        self.job = job
        self._tokenizer = tokenizer
        self._stops = StopTables(job.stops)

    def text(self, number: int) -> PromptText | None:
        """For the log probabilities of a prompt; None if they were not asked for."""
        job = self.job
        if not job.reports_prompt:
            return None
        return PromptText(
            self._choices_of(number), job.generations[number].token_ids, self._tokenizer, job.echoes[number]
        )

    def choices(self, number: int) -> Sequence[ChoicePieces]:
        """For the choices of a prompt."""
        job, generation, echo = self.job, self.job.generations[number], self.job.echoes[number]
        if job.generates_nothing:
            return [_NoText(choice) for choice in self._choices_of(number)]
        decoder = job.decoder or (self._tokenizer if job.plan is None else job.plan.decoder)
        texts = [
            ChoiceText(
                choice,
                decoder,
                self._stops,
                generation.sampling.min_tokens,
                echo="" if job.reports_prompt else echo,
                continues=generation.token_ids if job.continues else (),
                with_token_ids=job.prompt_ids is not None,
                num_before=len(echo) if job.reports_prompt else 0,
                eos_token_id=job.eos_token_id,
            )
            for choice in self._choices_of(number)
        ]
        return texts if job.plan is None else [AnswerParts(text, job.plan) for text in texts]

    def _choices_of(self, number: int) -> range:
        num_choices = self.job.generations[number].num_choices
        return range(number * num_choices, (number + 1) * num_choices)


async def _one_generation(
    generator: Generator, prompts: _Prompts, number: int, outlet: ChunkSender | None = None
) -> AsyncGenerator[Piece, None]:
    generation, prompt, choices = prompts.job.generations[number], prompts.text(number), prompts.choices(number)
    num_open = len(choices)
    shortcut = None if outlet is None else _Shortcut(choices, outlet)
    generation.shortcut = shortcut
    try:
        async with aclosing(generator.generate(generation)) as deltas:
            async for delta in deltas:
                if prompt is not None:
                    for piece in prompt.pieces(delta if isinstance(delta, PromptDelta) else None):
                        yield piece
                if isinstance(delta, PromptDelta):
                    continue
                choice = choices[delta.choice]
                if shortcut is not None and shortcut.left:
                    pieces = shortcut.left.popleft()
                    if isinstance(pieces, Exception):
                        raise pieces
                elif choice.ended:
                    continue
                else:
                    pieces = choice.pieces(delta)
                num_open -= choice.ended
                if choice.ended and delta.finish_reason is None and generation.give_up is not None:
                    generation.give_up(delta.choice)  # before its last pieces, which wait for the client
                for piece in pieces:
                    yield piece
                if not num_open:
                    return
    finally:
        generation.shortcut = None  # it holds the request that the generation belongs to
    raise GenerationFailed(Cause.INTERNAL, f"a generation ended with {num_open} of its choices open")


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]], at_once: int) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_QUEUED_PIECES)
    room = asyncio.Semaphore(at_once)
    tasks = [asyncio.create_task(_pump(stream, queue, room)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            match await queue.get():
                case Piece() as piece:
                    yield piece
                case Exception() as error:
                    raise error
                case None:
                    num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    stream: AsyncGenerator[Piece, None], queue: asyncio.Queue[Piece | Exception | None], room: asyncio.Semaphore
) -> None:
    """Move pieces into `queue`, and at the end put None, or the exception raised, which the reader raises again."""
    try:
        async with room, aclosing(stream) as pieces:
            async for piece in pieces:
                await queue.put(piece)
    except Exception as error:  # noqa: BLE001
        await queue.put(error)
    else:
        await queue.put(None)
