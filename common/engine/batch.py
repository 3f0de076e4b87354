"""What one engine step is asked to do, and its results, in plain data: schedulers know no torch.

Nobody changes these objects once they are made. They are not frozen, because that would more than double the time to
make them, and a step makes some for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.contract.errors import BatonError, Cause
from common.contract.messages import TokenLogprobs, TokenScores
from common.contract.sampling import SamplingParams
from common.engine.token_counts import TokenCounts


@dataclass(slots=True, kw_only=True)
class Sample:
    """A token to be sampled for one choice."""

    params: SamplingParams
    choice: int
    position: int
    """Position in the whole sequence of the token to be sampled. Equals `len(token_ids)`, or one more in a slice that
    `follows` a sample."""
    token_ids: Sequence[int]
    """The known tokens before it: prompt and output. Read only where the parameters have penalties. It may get longer
    once the step is planned."""
    prompt_len: int
    """Leading tokens of `token_ids` that are the prompt."""
    allowed: bytes | None = None
    """For parameters with a grammar: one bit per token, set if the token may come here (`GrammarState.allowed`)."""
    counts: TokenCounts | None = None
    """Counts of `token_ids` from earlier steps, for penalties. Without them the tokens are counted anew."""


@dataclass(slots=True, kw_only=True)
class Slice:
    """Tokens `[start, start + len(token_ids))` of one sequence, to be computed in a step."""

    token_ids: Sequence[int]
    """The tokens; at least one."""
    start: int
    block_table: Sequence[int]
    """Blocks that hold `[0, start + len(token_ids))`, in order; there may be more."""
    samples: tuple[Sample, ...] = ()
    """Choices to sample from the logits of the last token; empty in the middle of a prompt."""
    scored: Sequence[int] = ()
    """The tokens that follow the leading ones of this slice, in order, if their log probabilities are wanted."""
    num_alternatives: int = 0
    """How many of the most likely tokens are reported with each scored token."""
    follows: int | None = None
    """Index, among the samples of the step before, of the sample that chooses this slice's only token. A step that is
    planned while that one runs does not know the token, so its value in `token_ids` is ignored."""


@dataclass(slots=True)
class SampledToken:
    """The result of a `Sample`."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Present if the parameters ask for it."""


class InvalidLogitsError(BatonError):
    """The model's logits of one row cannot be sampled from: NaN, infinite, or no token left.

    In the results of a step it takes the place of the row's `SampledToken`, so that the other rows keep theirs.
    """

    def __init__(self, message: str, cause: Cause = Cause.INTERNAL) -> None:
        super().__init__(message)
        self.cause = cause
        """`INVALID` if the error would be the same on every worker."""


Sampled = SampledToken | InvalidLogitsError
"""The result of one sample."""


Scored = TokenScores | InvalidLogitsError
"""The result of one slice's `scored`."""
