"""What is kept of a request: times, counts, and how it ended. Every figure is computed from these alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"
    """HTTP 429 or 503."""
    HTTP_ERROR = "http_error"
    """Another status than 200."""
    STREAM_ERROR = "stream_error"
    """An error in mid-stream."""
    TRUNCATED = "truncated"
    """The connection ended before the stream did."""
    CONNECTION = "connection"
    """No answer: nobody listened, or the connection ended before one."""
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    """No stream of events as the API has it."""
    NO_TOKENS = "no_tokens"
    """A complete stream without a token."""
    ABANDONED = "abandoned"
    """Never sent: an earlier turn of its conversation failed."""
    INTERRUPTED = "interrupted"
    """In flight when the run was interrupted; counts neither way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request. All times are seconds from the start of the run, on one monotonic clock."""

    index: int
    """Of the conversation, in the order of arrival."""
    turn: int
    planned_s: float
    """When it was to arrive; for later turns, when the answer before and the pause had ended."""
    due_s: float
    """When it could be sent: as planned, or when there was room under the cap."""
    sent_s: float
    chunk_s: tuple[float, ...]
    """When each chunk that carries tokens arrived."""
    last_s: float | None
    """When the last token, or the word that there are no more, arrived."""
    ended_s: float
    """When the answer was complete, or had failed."""
    input_tokens: int
    """Asked for, as `output_tokens`."""
    output_tokens: int
    prompt_tokens: int | None
    """Counted by the server, as `completion_tokens`; None if it does not say."""
    completion_tokens: int | None
    outcome: Outcome
    status: int | None
    detail: str

    @property
    def num_tokens(self) -> int:
        """Generated: by the server's count, or else one for each chunk."""
        return len(self.chunk_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def cause(self) -> str:
        """The outcome, and the status where that says more."""
        has_status = self.outcome in (Outcome.REFUSED, Outcome.HTTP_ERROR)
        return f"{self.outcome.value} {self.status}" if has_status else self.outcome.value

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Record:
        """From the file. Raises `TypeError`, `ValueError` or `KeyError` for anything else."""
        outcome, chunk_s = Outcome(fields["outcome"]), tuple(float(each) for each in fields["chunk_s"])
        return cls(**(dict(fields) | {"outcome": outcome, "chunk_s": chunk_s}))
