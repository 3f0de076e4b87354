"""One step of the engine, as the scheduler plans it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.engine.batch import Slice
from common.engine.prompt import prompt_slice
from common.scheduling.chunked_prefill import Chunk
from decode_worker.columns import Decoding, next_sample
from decode_worker.draft_model import DraftWork
from decode_worker.request import DecodeChoice, LocalPrompt


@dataclass(slots=True)
class Step:
    """The engine's next work: copies, then swaps, then the tokens of `decodes` and `chunks`."""

    number: int = 0
    """The block pool's number of the step."""
    decodes: list[DecodeChoice] = field(default_factory=list)
    drafts: dict[DecodeChoice, list[int]] = field(default_factory=dict)
    """Tokens that are verified after those of some of `decodes`, in their order."""
    draft_work: DraftWork | None = None
    """What the draft model does before; None if nothing. Until then its drafts are zeros."""
    chunks: list[Chunk[LocalPrompt]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, target block)."""
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    """(block, slot of host memory)."""
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    """(slot of host memory, block)."""
    decoding: Decoding | None = None
    """`decodes` and `drafts` as columns; None if nothing is decoded."""

    @property
    def empty(self) -> bool:
        """Whether the engine has nothing to do."""
        return not (self.decodes or self.chunks or self.copies or self.swap_outs or self.swap_ins)

    def slices(self) -> list[Slice]:
        """The chunks, as input of the engine."""
        return [_chunk_slice(chunk) for chunk in self.chunks]


def _chunk_slice(chunk: Chunk[LocalPrompt]) -> Slice:
    prompt = chunk.prompt
    if prompt.choice is None:
        state = prompt.request.grammar_state
        allowed = None if state is None else state.allowed
        return prompt_slice(prompt.request.work, chunk.start, chunk.end, prompt.block_table, allowed)
    return Slice(
        token_ids=prompt.token_ids[chunk.start : chunk.end],
        start=chunk.start,
        block_table=prompt.block_table,
        samples=(next_sample(prompt.choice, len(prompt.token_ids)),) if chunk.last else (),
    )
