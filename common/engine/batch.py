"""What one engine step is asked to do and what it answers, in plain data: schedulers know no torch.

Nobody changes these once they are made. They are not frozen because that would more than double the time to make
them, and a step makes some for each sequence.
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
    """Of the token to be sampled, in the whole sequence; equals `len(token_ids)`, or one more in a slice that `follows`
    a sample."""
    token_ids: Sequence[int]
    """Every token before it that is known: prompt and output. Read only where the parameters have penalties. It may get
    longer once the step is planned."""
    prompt_len: int
    """Leading tokens of `token_ids` that are the prompt."""
    allowed: bytes | None = None
    """Where the parameters have a grammar: a bit for each token that may come here (`GrammarState.allowed`)."""
    counts: TokenCounts | None = None
    """What earlier steps have counted of `token_ids`, for penalties; without it they are counted anew."""


@dataclass(slots=True, kw_only=True)
class Slice:
    """Tokens `[start, start + len(token_ids))` of one sequence, to be computed in a step."""

    token_ids: Sequence[int]
    """At least one."""
    start: int
    block_table: Sequence[int]
    """Blocks that hold `[0, start + len(token_ids))`, in order; there may be more."""
    samples: tuple[Sample, ...] = ()
    """Choices to sample from the logits of the last token; empty in the middle of a prompt."""
    scored: Sequence[int] = ()
    """The tokens that follow the leading ones of this slice, in order, if it is asked how likely each of them was."""
    num_alternatives: int = 0
    """How many of the most likely tokens are told with each of these."""
    follows: int | None = None
    """Number, among the samples of the step before, of the one that chooses this slice's only token: a step that is
    planned while that one runs does not know it, and nothing reads `token_ids`."""


@dataclass(slots=True)
class SampledToken:
    """What came of a `Sample`."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Present when the parameters ask."""


class InvalidLogitsError(BatonError):
    """The model's logits of one row cannot be sampled from: NaN, infinite, or no token left.

    It stands in a step's answer where the row's `SampledToken` would, so that the other rows keep theirs.
    """

    def __init__(self, message: str, cause: Cause = Cause.INTERNAL) -> None:
        super().__init__(message)
        self.cause = cause
        """`INVALID` where it would be the same anywhere."""


Sampled = SampledToken | InvalidLogitsError
"""One row's outcome."""


Scored = TokenScores | InvalidLogitsError
"""What came of one slice's `scored`."""
