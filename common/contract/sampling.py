"""Sampling parameters: validated where they enter the system, and again by every process that receives them."""

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
MAX_GRAMMAR_CHARS = 2**18
"""Longest grammar of a structured output, in the form that is sent to workers."""
MAX_LOGIT_BIAS = 1024
"""Most tokens in the `logit_bias` of one request."""
MAX_BIAS = 100
"""Largest absolute value that is added to a logit."""
MAX_SEED = 2**63 - 1
"""Largest seed; the gateway draws one when the client gives none."""

_Int = Annotated[int, Field(strict=True, le=MAX_SEED)]
_Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]

# The bounds of each parameter, for code that checks them earlier or publishes them.
MaxTokens = Annotated[_Int, Field(ge=1)]
MinTokens = Annotated[_Int, Field(ge=0)]
Temperature = Annotated[_Real, Field(ge=0, le=100)]
TopK = Annotated[_Int, Field(ge=0)]
TopP = Annotated[_Real, Field(gt=0, le=1)]
MinP = Annotated[_Real, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[_Real, Field(ge=0.01, le=100)]
OutputPenalty = Annotated[_Real, Field(ge=-2, le=2)]
Seed = Annotated[_Int, Field(ge=0)]
TokenId = Annotated[_Int, Field(ge=0)]
LogitBias = Annotated[_Real, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
NumLogprobs = Annotated[_Int, Field(ge=0, le=MAX_LOGPROBS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    `temperature == 0` is greedy. The random number of a token is keyed by (seed, choice, position) alone, so the
    same request gives the same text, whichever requests share its batch and whichever worker runs it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    max_tokens: MaxTokens
    """Most tokens to generate."""
    min_tokens: MinTokens = 0
    """No end-of-sequence or stop token before this many generated tokens."""
    temperature: Temperature = 1.0
    top_k: TopK = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: TopP = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: MinP = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, section 4.1)."""
    presence_penalty: OutputPenalty = 0.0
    """Subtracted once from each token already in the output."""
    frequency_penalty: OutputPenalty = 0.0
    """Subtracted from each token once per occurrence in the output."""
    logit_bias: Annotated[tuple[tuple[TokenId, LogitBias], ...], Field(max_length=MAX_LOGIT_BIAS)] = ()
    """(token id, value added to its logit), each token at most once; ids beyond the vocabulary have no effect."""
    seed: Seed = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_STOP_TOKEN_IDS)] = ()
    """Token ids that end a choice, besides the model's own; the ending token is part of the output."""
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    """Do not end at the model's end-of-sequence tokens."""
    grammar: Annotated[str, Field(strict=True, min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    """The grammar that the output must follow, in the format of `llguidance`."""
    logprobs: NumLogprobs | None = None
    """Report log probabilities, with this many alternatives; None reports none."""

    def __post_init__(self) -> None:
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("a token twice in logit_bias")

    @property
    def penalised(self) -> bool:
        """Whether a penalty changes logits depending on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0
