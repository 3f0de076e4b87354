"""A request in the decode worker: its pull, then its choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.contract.ids import Incarnation, RequestKey
from common.contract.messages import Decode, FinishReason, TokenLogprobs, Tokens
from common.engine.sequence import Sequence
from kv_transfer.sink import Pull


@dataclass(slots=True, eq=False)
class Generation:
    """One choice: a sequence, what of it has been sent, and the blocks it may still ask for."""

    request: DecodeRequest
    sequence: Sequence
    promised: int = 0
    """Blocks reserved for its growth and not allocated yet."""
    num_sent: int = 0
    """Tokens of the sequence that the gateway has been sent."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the generated tokens from `first_position` on, when the request asks."""
    first_position: int = 0
    """Position of the first token that this attempt generated."""
    finish_reason: FinishReason | None = None

    def append(self, token_id: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None) -> None:
        """The next token."""
        assert self.finish_reason is None, self.sequence
        self.sequence.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.finish_reason = finish_reason

    def tokens(self, position: int) -> Tokens:
        """The tokens from `position` on, as a message."""
        sequence = self.sequence
        position = min(max(position, self.first_position), sequence.num_tokens)
        asked = sequence.sampling.logprobs is not None
        return Tokens(
            request=sequence.key.request,
            attempt=sequence.key.attempt,
            choice=sequence.choice,
            position=position,
            token_ids=tuple(sequence.token_ids[position:]),
            logprobs=tuple(self.logprobs[position - self.first_position :]) if asked else None,
            finish_reason=self.finish_reason,
        )


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One attempt at a request, from its arrival until the gateway has acknowledged its end."""

    work: Decode
    gateway: Incarnation
    deadline: float
    """Monotonic seconds at which its budget ends."""
    pull: Pull
    generations: list[Generation] = field(default_factory=list)
    """One for each choice, once the pull is settled."""

    @property
    def key(self) -> RequestKey:
        """(request, attempt)."""
        return self.work.key

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return bool(self.generations) and all(g.finish_reason is not None for g in self.generations)
