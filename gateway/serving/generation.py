"""Where the HTTP API ends and serving begins: one tokenised prompt goes in, deltas of tokens come out.

The API validates, tokenises and words the answers; it knows no worker. The dispatcher behind `Generator` knows no
HTTP: it routes, hands off and recovers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from common.contract.errors import BatonError, Cause
from common.contract.messages import FinishReason, TokenLogprobs, TokenScores
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from gateway.serving.waterfall import Waterfall


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is not let in."""

    message: str
    retry_after_s: int
    """When it might be."""


@dataclass(slots=True)
class Admittance:
    """What became of a request at the door; its prompts share it, and the first of them decides for all."""

    decided: bool = False
    refusal: Refusal | None = None
    """Why it was not let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One prompt to be generated, tokenised and validated. Nothing in it was copied from a client unseen."""

    token_ids: tuple[int, ...]
    """The prompt, at least one token."""
    num_choices: int
    """Choices to generate; they are numbered from 0."""
    sampling: SamplingParams
    budget_s: float
    """Seconds that the whole generation may take."""
    tier: Tier = Tier.STANDARD
    tenant: str = ""
    """Whose it is: tenants of one tier share the workers evenly."""
    cache_salt: str = ""
    """Prefixes are shared only under the same salt; `request_intake` makes it of the tenant and the client's own."""
    prompt_logprobs: int | None = None
    """Tell log probabilities of the prompt's tokens, with this many alternatives; None tells none."""
    admittance: Admittance = field(default_factory=Admittance, compare=False, repr=False)
    """Shared with the request's other prompts."""
    waterfall: Waterfall = field(default_factory=Waterfall, compare=False, repr=False)
    """The record of its time, which the dispatcher fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of one choice; the deltas of a choice follow each other in order and without gaps."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    """One for each token when the sampling asked for them, else None."""
    finish_reason: FinishReason | None
    """Set on the choice's last delta."""
    more: bool = False
    """Whether the next one is there already, of this very choice: whoever takes this one will not wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelta:
    """How likely more of the prompt's tokens were, from the second one on; all of them come before any `Delta`, in
    order and without gaps."""

    scores: TokenScores


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether a request that arrives now could be served."""

    ready: bool
    reason: str
    """One line for an operator."""
    max_sequence_tokens: int | None = None
    """Most tokens, prompt and output, that a usable decode worker takes in one sequence; None while none is known."""
    details: Mapping[str, object] = field(default_factory=dict)
    """What `/ready` shows besides; JSON values only."""


class GenerationFailed(BatonError):  # noqa: N818 (the protocol's word for this end is Failed)
    """A generation ended without finishing."""

    def __init__(self, cause: Cause, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_after_s = retry_after_s
        """When to try again, where that is known."""
        self.message = message
        """What the client is told."""


class Generator(Protocol):
    """Serves generations with whatever workers there are."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        """Yield deltas until each choice has had its `finish_reason`; before them what was asked of the prompt.

        Raises `GenerationFailed`. Closing the iterator early (`aclose`, or cancelling the task that awaits it) aborts
        the request on the workers.
        """
        ...

    def ready(self) -> Readiness:
        """Whether a decode worker is usable; where no prefill worker is, it computes the prompts too."""
        ...
