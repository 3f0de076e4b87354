"""Decodes as slices, one object for each: by definition, without the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.engine.batch import NO_SAMPLE, Decodes, Sample, Slice
from decode_worker.columns import next_sample
from decode_worker.request import DecodeChoice
from decode_worker.step import Step


def decode_slices(
    choices: Sequence[DecodeChoice],
    before: Sequence[DecodeChoice] = (),
    drafts: Mapping[DecodeChoice, Sequence[int]] | None = None,
) -> list[Slice]:
    """The last token of each sequence, and its drafted ones. `before` are the decodes of the step that still runs."""
    slices = []
    for choice in choices:
        sequence = choice.sequence
        follows = before.index(choice) if choice in before else None
        num_tokens = sequence.num_tokens + (follows is not None)
        slices.append(
            Slice(
                token_ids=sequence.token_ids[-1:],
                start=num_tokens - 1,
                block_table=sequence.block_table,
                samples=(next_sample(choice, num_tokens),),
                follows=follows,
            )
        )
        draft = (drafts or {}).get(choice, ())
        for place, token in enumerate(draft):
            position = num_tokens + place
            slices.append(
                Slice(
                    token_ids=(token,),
                    start=position,
                    block_table=sequence.block_table,
                    samples=(next_sample(choice, position + 1, draft[: place + 1]),),
                )
            )
    return slices


def slices_of(decodes: Decodes | None, step: Step) -> list[Slice]:
    """The slices that the columns of a step stand for, each with its sample."""
    if decodes is None:
        return []
    slices = decodes.slices()
    sequences = [each.sequence for each in step.decodes for _ in range(1 + len(step.drafts.get(each, ())))]
    samples = zip(sequences, decodes.samples.positions_N.tolist(), strict=True)
    for each, follows, (sequence, position) in zip(slices, decodes.follows_D.tolist(), samples, strict=True):
        each.follows = None if follows == NO_SAMPLE else follows
        each.samples = (
            Sample(
                params=sequence.sampling,
                choice=sequence.choice,
                position=position,
                token_ids=sequence.token_ids,
                prompt_len=sequence.prompt_len,
            ),
        )
    return slices
