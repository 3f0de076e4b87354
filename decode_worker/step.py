"""One step of the engine, as the scheduler plans it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.engine.batch import Sample, Slice
from common.engine.prompt import prompt_slice
from common.scheduling.chunked_prefill import Chunk
from decode_worker.request import DecodeRequest, Generation, LocalPrompt


@dataclass(slots=True)
class Step:
    """The engine's next work: copies, then swaps, then the tokens of `decodes` and `chunks`."""

    decodes: list[Generation] = field(default_factory=list)
    chunks: list[Chunk[LocalPrompt]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, target block)."""
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    """(block, slot of host memory)."""
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    """(slot of host memory, block)."""
    revoked: list[DecodeRequest] = field(default_factory=list)
    """Requests that wait again: the blocks reserved for their pulls, of which none was read yet, are taken back."""

    @property
    def empty(self) -> bool:
        """Whether the engine has nothing to do."""
        return not (self.decodes or self.chunks or self.copies or self.swap_outs or self.swap_ins)

    def slices(self, before: Step | None = None) -> list[Slice]:
        """Input of the engine: the decodes, then the chunks. `before` is the step that still runs, or None."""
        samples = {} if before is None else {each: index for index, each in enumerate(before.decodes)}
        decodes = [_decode_slice(generation, samples.get(generation)) for generation in self.decodes]
        return decodes + [_chunk_slice(chunk) for chunk in self.chunks]


def _decode_slice(generation: Generation, follows: int | None) -> Slice:
    """A slice of a sequence's last token, from which the next one is sampled. `follows` is the index, in the step that
    still runs, of the sample that becomes the last token; None if that token is known."""
    sequence = generation.sequence
    num_tokens = sequence.num_tokens + (follows is not None)
    return Slice(
        token_ids=sequence.token_ids[-1:],
        start=num_tokens - 1,
        block_table=sequence.block_table,
        samples=(_next_token(generation, num_tokens),),
        follows=follows,
    )


def _chunk_slice(chunk: Chunk[LocalPrompt]) -> Slice:
    prompt = chunk.prompt
    if prompt.generation is None:
        state = prompt.request.grammar_state
        allowed = None if state is None else state.allowed
        return prompt_slice(prompt.request.work, chunk.start, chunk.end, prompt.block_table, allowed)
    return Slice(
        token_ids=prompt.token_ids[chunk.start : chunk.end],
        start=chunk.start,
        block_table=prompt.block_table,
        samples=(_next_token(prompt.generation, len(prompt.token_ids)),) if chunk.last else (),
    )


def _next_token(generation: Generation, position: int) -> Sample:
    sequence = generation.sequence
    return Sample(
        params=sequence.sampling,
        choice=sequence.choice,
        position=position,
        token_ids=sequence.token_ids,
        prompt_len=sequence.prompt_len,
        allowed=None if sequence.grammar_state is None else sequence.grammar_state.allowed,
        counts=sequence.counts,
    )
