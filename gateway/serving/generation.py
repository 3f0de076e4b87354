"""The interface between the HTTP API and serving: one tokenised prompt goes in, deltas of tokens come out.

The API validates, tokenises and formats answers, and knows no worker. The dispatcher behind `Generator` routes, hands
off and recovers, and knows no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.contract.errors import BatonError, Cause
from common.contract.messages.fields import FinishReason
from common.contract.messages.worker import TokenLogprobs, TokenScores
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from gateway.serving.waterfall import Waterfall


@dataclass(frozen=True, slots=True)
class Fail:
    """Terminal: the request failed, or was not accepted."""

    cause: Cause
    message: str
    retry_after_s: int | None = None
    """Seconds after which it may be accepted; None if unknown."""


@dataclass(slots=True)
class Admittance:
    """The admission of a request, which its prompts share: the first of them decides for all, those that begin late
    included."""

    decided: bool = False
    refusal: Fail | None = None
    """Why it was not accepted; None if it was, or is not decided."""
    taken: bool = False
    """Whether the client has got something of a prompt. If so, no worker refuses those that begin later for its queue's
    length, and they wait until one takes them."""
    opened_at: float | None = None
    """Monotonic seconds at which the dispatcher received the first of its prompts: when its budget began."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """One prompt to be generated, tokenised and validated. Client data enters it only after validation. Only
    `admittance`, `waterfall`, `shortcut` and `give_up` change; it is not frozen since that would double the time to
    make it."""

    token_ids: tuple[int, ...]
    """The prompt, at least one token."""
    num_choices: int
    """Choices to generate; they are numbered from 0."""
    sampling: SamplingParams
    budget_s: float
    """Most seconds that the whole request may take."""
    tier: Tier = Tier.STANDARD
    tenant: str = ""
    """The request's tenant. Tenants within a tier share the workers evenly."""
    cache_salt: str = ""
    """Prefixes are shared only under the same salt; `request_intake` derives it from the tenant and the client's
    salt."""
    prompt_logprobs: int | None = None
    """Report log probabilities of the prompt's tokens with this many alternatives; None reports none."""
    prediction: tuple[int, ...] = ()
    """What the client expects the answer to be; may be empty."""
    admittance: Admittance = field(default_factory=Admittance, compare=False, repr=False)
    """Shared with the request's other prompts."""
    waterfall: Waterfall = field(default_factory=Waterfall, compare=False, repr=False)
    """Account of the generation's time, filled by the dispatcher."""
    shortcut: Callable[[Delta], bool] | None = field(default=None, compare=False, repr=False)
    """Takes a delta while the generator's reader waits, which saves to wake it; False: the delta is to be yielded. It
    does not raise."""
    give_up: Callable[[int], None] | None = field(default=None, compare=False, repr=False)
    """While the generator runs: no more is needed of a choice, of which deltas may still come."""

    @property
    def most_tokens(self) -> int:
        """Most tokens that one of its sequences can have in the end."""
        return len(self.token_ids) + self.sampling.max_tokens


@dataclass(slots=True)
class Delta:
    """New tokens of one choice; the deltas of a choice follow each other in order and without gaps. Nobody changes one
    that a generator has yielded; it is not frozen since that would double the time to make it."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry for each token if the sampling asked for them, else None."""
    finish_reason: FinishReason | None = None
    """Set on the choice's last delta."""
    more: bool = False
    """Whether the next delta of this choice, or the end, is available already, so that its reader will not wait for
    it."""
    joined: bool = False
    """Whether it has come together with the choice's delta before it: from the same step, so that no time is between
    the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelta:
    """Log probabilities of further prompt tokens, from the second token on. All of them precede any `Delta`, in order
    and without gaps."""

    scores: TokenScores


class Readiness(NamedTuple):
    """Whether a request that arrives now could be served."""

    ready: bool
    reason: str
    """One line for an operator."""
    max_sequence_tokens: int | None = None
    """Most tokens, prompt and output, of one sequence at any usable decode worker; None while unknown."""
    usual_sequence_tokens: int | None = None
    """Most tokens of a sequence whose client gives no length: so many that all decode workers take it that are nearly
    as large as the largest; None while unknown."""
    details: Callable[[], Mapping[str, object]] = dict
    """Returns further details, which `/ready` shows; JSON values only. Few of those who ask want them."""


class GenerationFailed(BatonError):  # noqa: N818 (the protocol's word for this end is Failed)
    """A generation ended without finishing."""

    def __init__(self, cause: Cause, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_after_s = retry_after_s
        """Seconds after which the client may retry; None if unknown."""
        self.message = message
        """The message for the client."""


class Generator(Protocol):
    """Serves generations with the available workers."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        """Yield deltas until each choice has its `finish_reason`; before them the prompt's log probabilities, if asked
        for.

        Raises `GenerationFailed`. Closing the iterator early (`aclose`, or cancelling the task that awaits it) aborts
        the request on the workers.
        """
        ...

    def ready(self) -> Readiness:
        """Whether a decode worker is usable. Without a usable prefill worker, decode workers compute the prompts
        too."""
        ...
