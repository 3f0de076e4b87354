"""Computing a prompt, on any kind of worker: the slice of a chunk, and the messages made from its results."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.contract.messages.fields import MAX_TOLD_TOKENS
from common.contract.messages.gateway import Decode, Prefill
from common.contract.messages.worker import PromptLogprobs, Tokens
from common.engine.batch import InvalidLogitsError, Sample, Sampled, Scored, Slice
from common.engine.sequence import finish_reason
from common.engine.token_counts import token_counts


def prompt_slice(
    work: Prefill | Decode, start: int, end: int, block_table: Sequence[int], allowed: bytes | None = None
) -> Slice:
    """The slice of tokens `[start, end)` of `work`. If it ends with the last token, it samples the first token of each
    choice, among those `allowed` if there is a grammar. The tokens that follow those of the slice are scored if the
    request asks for it."""
    samples: tuple[Sample, ...] = ()
    if end == len(work.token_ids):
        counts = token_counts(work.sampling, work.token_ids, work.prompt_len)
        samples = tuple(
            Sample(
                params=work.sampling,
                choice=choice,
                position=end,
                token_ids=work.token_ids,
                prompt_len=work.prompt_len,
                allowed=allowed,
                counts=counts,
            )
            for choice in work.choices
        )
    return Slice(
        token_ids=work.token_ids[start:end],
        start=start,
        block_table=block_table,
        samples=samples,
        scored=() if work.prompt_logprobs is None else work.token_ids[start + 1 : end + 1],
        num_alternatives=work.prompt_logprobs or 0,
    )


def prompt_logprobs(work: Prefill | Decode, start: int, scored: Scored) -> list[PromptLogprobs]:
    """The scores of the tokens after `start`, as messages. Raises `InvalidLogitsError` if they could not be scored."""
    if isinstance(scored, InvalidLogitsError):
        raise scored
    return [
        PromptLogprobs(
            request=work.request,
            attempt=work.attempt,
            position=start + 1 + index,
            scores=scored.part(index, index + MAX_TOLD_TOKENS),
        )
        for index in range(0, len(scored), MAX_TOLD_TOKENS)
    ]


def first_tokens(
    work: Prefill | Decode, outcomes: Sequence[Sampled], eos_token_ids: Collection[int], max_sequence_tokens: int
) -> list[Tokens]:
    """The first token of each choice, one message for each. Raises `InvalidLogitsError` if one could not be sampled."""
    num_tokens = len(work.token_ids) + 1
    tokens = []
    for choice, outcome in zip(work.choices, outcomes, strict=True):
        if isinstance(outcome, InvalidLogitsError):
            raise outcome
        reason = finish_reason(
            outcome.token_id,
            num_tokens - work.prompt_len,
            work.sampling,
            eos_token_ids,
            num_tokens,
            max_sequence_tokens,
        )
        tokens.append(
            Tokens(
                request=work.request,
                attempt=work.attempt,
                choice=choice,
                position=len(work.token_ids),
                token_ids=(outcome.token_id,),
                logprobs=None if outcome.logprobs is None else (outcome.logprobs,),
                finish_reason=reason,
            )
        )
    return tokens
