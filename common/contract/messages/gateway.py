"""Messages of gateways to workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from common.contract.ids import HANDLE, Handle, Incarnation, RequestKey
from common.contract.messages.fields import (
    MAX_TOKENS,
    Address,
    Choice,
    Count,
    Flag,
    LinkMessage,
    Name,
    Real,
    RequestMessage,
    WireData,
)
from common.contract.packed import packed_longs, packed_numbers
from common.contract.sampling import MAX_CHOICES, NumLogprobs, SamplingParams
from common.contract.tiers import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(LinkMessage):
    """Accept no new work; let the present work finish, or move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(LinkMessage):
    """Accept work again."""


TRIAL_TOKENS = 4
"""Tokens beyond its place at the crash after which a suspect is one no longer."""


class Suspicion(StrEnum):
    """With which other requests the first steps of a request may be computed, given that it may crash a worker."""

    NONE = "none"
    """Not suspected: with all other requests."""
    GROUP = "group"
    """Only with other requests of this level."""
    ALONE = "alone"
    """With no other request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work(RequestMessage):
    token_ids: Annotated[tuple[int, ...], packed_numbers(1, MAX_TOKENS)]
    """The prompt, followed on a retry by the tokens that the client already has (a forced prefix)."""
    prompt_len: Annotated[Count, Field(ge=1)]
    """Number of leading tokens of `token_ids` that are the prompt; the rest counts as output for penalties and
    limits."""
    choices: Annotated[tuple[Choice, ...], Field(min_length=1, max_length=MAX_CHOICES)]
    """Indices of the choices to generate; more than one only when `token_ids` is the bare prompt."""
    sampling: SamplingParams
    budget_s: Annotated[Real, Field(gt=0, le=10**6)]
    """Seconds, from receipt, that the request may still take."""
    tier: Tier = Tier.STANDARD
    tenant: Name = ""
    """The tenant that sent the request: tenants of one tier share a worker evenly."""
    cache_salt: Name = ""
    """Requests share cached prefixes only under the same salt."""
    admitted: Flag = False
    """Whether a worker admitted this request before: it is then not refused because of the requests that wait."""
    suspicion: Suspicion = Suspicion.NONE
    """Whether the request may have crashed a worker; `Trial` says when its first steps are computed."""
    prompt_logprobs: NumLogprobs | None = None
    """Report log probabilities of the prompt's tokens, with this many alternatives (`PromptLogprobs`); every token of
    the prompt is then computed, even if a cache holds it. None reports none."""

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None and self.prompt_len < len(self.token_ids):
            raise ValueError("prompt_logprobs of a sequence that goes on: its prompt has been told")
        if self.prompt_len > len(self.token_ids):
            raise ValueError(f"prompt_len {self.prompt_len} of a sequence of {len(self.token_ids)} tokens")
        if len(set(self.choices)) != len(self.choices):
            raise ValueError("choices names one twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(WireData):
    """The worker from which blocks are read."""

    address: Address
    """Control address, `host:port`."""
    incarnation: Annotated[Incarnation, HANDLE]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHint(WireData):
    """A worker that probably holds the KV of a prompt's prefix. Only a hint: the worker itself says what it holds."""

    source: Source
    num_tokens: Annotated[Count, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(_Work):
    """Compute the KV of `token_ids`, sample the next token of each choice, and offer the blocks."""

    prefix: PrefixHint | None = None
    """A worker from which to pull the prompt's prefix, if that is cheaper than computing it."""

    def __post_init__(self) -> None:
        _Work.__post_init__(self)
        if self.prefix is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs of a prompt that is not all computed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(_Work):
    """Get the KV of `token_ids` and generate every choice to its end."""

    source: Source | None
    """The worker from which to pull the KV; None: compute it here, in chunks that share steps with the decodes."""
    offered: RequestKey | None = None
    """The key under which the source offers the blocks; None without a source."""
    moving: Flag = False
    """True for a migration: the source is a decode worker that stops generating the one choice and hands it over."""
    handles: Annotated[tuple[Handle, ...], packed_longs(1, MAX_CHOICES)]
    """Names of the choices, in their order, in `StepTokens`; the gateway uses none of them again."""
    prediction: Annotated[tuple[int, ...], packed_numbers(0, MAX_TOKENS)] = ()
    """What the client expects after the prompt: a draft, which changes no token."""

    def __post_init__(self) -> None:
        _Work.__post_init__(self)
        if len(self.handles) != len(self.choices):
            raise ValueError(f"{len(self.handles)} handles for {len(self.choices)} choices")
        if (self.source is None) != (self.offered is None):
            raise ValueError("source and offered go together")
        if self.moving and (self.source is None or len(self.choices) != 1):
            raise ValueError("one choice moves, from a source")
        if self.source is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are told by who computes the prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(RequestMessage):
    """Give the request up, or one choice of it, and free everything that it holds; no effect if it is unknown. Only a
    decode worker that generates the choice, or has cut it, gives it up. For a choice that was cut it sends `Moved`, for
    another one nothing, unless the request has finished with that."""

    choice: Choice | None = None
    """The only choice that is given up; None: the request is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend(RequestMessage):
    """Send the tokens of a choice again, from `position` (in the whole sequence)."""

    choice: Choice
    position: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(RequestMessage):
    """The terminal message arrived: the worker may forget the request's tokens."""
