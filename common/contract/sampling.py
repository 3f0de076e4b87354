"""Sampling parameters: validated once where they enter, and again wherever they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

MAX_LOGPROBS = 20
"""Most alternatives reported for a token."""
MAX_CHOICES = 16
"""Most choices (`n`) of one request."""
MAX_STOP_TOKEN_IDS = 64
"""Most stop token ids of one request."""
MAX_SEED = 2**63 - 1
"""Largest seed; the gateway draws one when the client gives none."""

_Int = Annotated[int, Field(strict=True, le=MAX_SEED)]
_Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    `temperature == 0` is greedy. The random number of a token is keyed by (seed, choice, position) alone, so the
    same request gives the same text whatever runs beside it and whichever worker runs it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    max_tokens: Annotated[_Int, Field(ge=1)]
    """Most tokens to generate."""
    min_tokens: Annotated[_Int, Field(ge=0)] = 0
    """No end-of-sequence or stop token before this many generated tokens."""
    temperature: Annotated[_Real, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[_Int, Field(ge=0)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[_Real, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: Annotated[_Real, Field(ge=0, le=1)] = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    repetition_penalty: Annotated[_Real, Field(ge=0.01, le=100)] = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, section 4.1)."""
    presence_penalty: Annotated[_Real, Field(ge=-2, le=2)] = 0.0
    """Subtracted once from each token already in the output."""
    frequency_penalty: Annotated[_Real, Field(ge=-2, le=2)] = 0.0
    """Subtracted from each token once per occurrence in the output."""
    seed: Annotated[_Int, Field(ge=0, le=MAX_SEED)] = 0
    stop_token_ids: Annotated[tuple[Annotated[_Int, Field(ge=0)], ...], Field(max_length=MAX_STOP_TOKEN_IDS)] = ()
    """Token ids that end a choice, besides the model's own; the ending token is part of the output."""
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    """Do not end at the model's end-of-sequence tokens."""
    logprobs: Annotated[_Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report log probabilities, with this many alternatives; None reports none."""

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far change what is likely."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0
