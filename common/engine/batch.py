"""What one engine step is asked to do, and its results, in plain data: schedulers know no torch.

A step computes slices, each an object, and decodes: the last token of each of many sequences, as columns of arrays. So
a token of a decode costs an entry of each array, and no object. Nobody changes these objects once they are made.

Shapes: N samples, D decodes, M blocks of the longest sequence, S sequences of which a draft model drafts tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.contract.errors import BatonError, Cause
from common.contract.messages.worker import TokenLogprobs, TokenScores
from common.contract.sampling import SamplingParams
from common.engine.token_counts import TokenCounts

Ints = np.ndarray[Any, np.dtype[np.int64]]
MIN_TEMPERATURE = 1e-30
"""Least temperature that is used. A smaller one would leave the range of float32. Far above this value, tokens other
than the most likely one already have no chance."""
NO_SAMPLE = -1
"""In `Decodes.follows_D`: the token is known."""

PARAMETERS = np.dtype(
    [("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"), ("seed", "u8"), ("choice", "i8")]
)
"""The parameters by which a token is drawn. The temperature is 0 for the most likely token, and otherwise at least
`MIN_TEMPERATURE`."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """A token to be sampled for one choice."""

    params: SamplingParams
    choice: int
    position: int
    """Position in the whole sequence of the token to be sampled. Equals `len(token_ids) + len(draft)`, or one more in a
    slice that `follows` a sample."""
    token_ids: Sequence[int]
    """The known tokens before it: prompt and output. Read only where the parameters have penalties. It may get longer
    once the step is planned."""
    prompt_len: int
    """Leading tokens of `token_ids` that are the prompt."""
    allowed: bytes | None = None
    """For parameters with a grammar: one bit per token, set if the token may come here (`GrammarState.allowed`)."""
    counts: TokenCounts | None = None
    """Counts of `token_ids` from earlier steps, for penalties. Without them the tokens are counted anew."""
    draft: Sequence[int] = ()
    """Drafted tokens that follow the known ones, up to `position`. The sample counts only if they come true."""


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


def parameters(params: SamplingParams, choice: int) -> tuple[float, int, float, float, int, int]:
    """An entry of `PARAMETERS`."""
    temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    return temperature, params.top_k, params.top_p, params.min_p, params.seed, choice


def special(params: SamplingParams) -> bool:
    """Whether `PARAMETERS` do not say everything that concerns the choice of a token."""
    return (
        params.penalised
        or params.logprobs is not None
        or params.grammar is not None
        or params.min_tokens > 0
        or bool(params.logit_bias)
    )


@dataclass(slots=True, kw_only=True)
class Samples:
    """N tokens to be sampled, as columns."""

    parameters_N: np.ndarray[Any, np.dtype[np.void]]
    """Entries of `PARAMETERS`."""
    positions_N: Ints
    """See `Sample.position`."""
    special: dict[int, Sample]
    """Index → sample, in ascending order, for those whose parameters are `special`."""

    def __len__(self) -> int:
        return len(self.positions_N)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Samples:
        """The same samples as columns."""
        return cls(
            parameters_N=np.array([parameters(each.params, each.choice) for each in samples], PARAMETERS),
            positions_N=np.array([each.position for each in samples], np.int64),
            special={row: each for row, each in enumerate(samples) if special(each.params)},
        )

    def followed_by(self, others: Samples) -> Samples:
        """These samples, then `others`."""
        return Samples(
            parameters_N=np.concatenate((self.parameters_N, others.parameters_N)),
            positions_N=np.concatenate((self.positions_N, others.positions_N)),
            special=self.special | {len(self) + row: each for row, each in others.special.items()},
        )

    def take(self, rows: Ints) -> Samples:
        """The samples at `rows`, which are in ascending order."""
        return Samples(
            parameters_N=self.parameters_N[rows],
            positions_N=self.positions_N[rows],
            special={new: self.special[row] for new, row in enumerate(rows.tolist()) if row in self.special},
        )


@dataclass(slots=True, kw_only=True)
class Decodes:
    """D rows of one token each, to be computed in a step, and the tokens to be sampled after them: the last token of a
    sequence, or a drafted one after it, which attends to those in the rows before it.

    They come before the slices of the step, and each has one sample.
    """

    token_ids_D: Ints
    positions_D: Ints
    """Positions of these tokens."""
    num_blocks_D: Ints
    tables_DM: Ints
    """Blocks of each sequence, in order, and zeros beyond its `num_blocks_D`."""
    follows_D: Ints
    """Index, among the samples of the step before, of the sample that chooses the token, or `NO_SAMPLE`. A step that
    is planned while that one runs does not know the token, so its value in `token_ids_D` is ignored."""
    samples: Samples

    def __len__(self) -> int:
        return len(self.positions_D)

    def slices(self) -> list[Slice]:
        """The tokens and blocks as slices without samples."""
        columns = zip(self.token_ids_D.tolist(), self.positions_D.tolist(), self.tables_DM.tolist(), strict=True)
        return [Slice(token_ids=(token,), start=start, block_table=table) for token, start, table in columns]


@dataclass(slots=True, kw_only=True, eq=False)
class Drafting:
    """What the draft model computes before a step, and the rows of the step's decodes that wait for what it says."""

    slices: Sequence[Slice]
    """Tokens of sequences that the draft model does not know yet, without the last one of those of which it drafts.
    Like `tables` they name blocks of the draft model's cache."""
    rows_S: Ints
    """The row of the last token of each sequence of which tokens are drafted; the rows of these tokens follow it."""
    nums_S: Ints
    """Tokens to be drafted of each sequence, at least one."""
    tables: Sequence[Sequence[int]]
    """Blocks of each of these sequences, for all but the last drafted token."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the draft model has said."""

    token_ids: Sequence[Sequence[int]] = ()
    """The drafted tokens of each sequence, in the order of `Drafting`."""
    seconds: float = 0.0


NOTHING_DRAFTED = Drafted()


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


@dataclass(slots=True)
class Chosen:
    """The results of N samples, as a column."""

    token_ids: list[int]
    """Arbitrary where the sample failed."""
    told: dict[int, Sampled]
    """Index → result, for the samples of which there is more to tell than the token."""

    def outcome(self, index: int) -> Sampled:
        """The result of one sample."""
        return self.told.get(index) or SampledToken(self.token_ids[index])

    def take(self, indices: Sequence[int]) -> Chosen:
        """The results of some samples."""
        told = {new: self.told[index] for new, index in enumerate(indices) if index in self.told}
        return Chosen([self.token_ids[index] for index in indices], told)

    def outcomes(self, start: int = 0) -> list[Sampled]:
        """The results from `start` on."""
        return [self.outcome(index) for index in range(start, len(self.token_ids))]


Scored = TokenScores | InvalidLogitsError
"""The result of one slice's `scored`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a finished step has computed."""

    outcomes: Sequence[tuple[Sampled, ...]]
    """One tuple for each slice, with one outcome for each of its samples."""
    scores: Sequence[Scored]
    """One for each slice."""
    chosen: Chosen
    """The results of the decodes, then of the slices' samples."""
    drafted: Drafted = NOTHING_DRAFTED
    duration_s: float
    """Seconds from the step's begin on the engine's thread, or from the end of the step before, whichever is later."""
    between_s: float
    """Seconds from the end of the step before to the step's begin; 0 if it had begun before."""
