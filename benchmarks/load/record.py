"""The record of a request: times, counts, and how it ended. Every figure is computed from records alone."""

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
    """Any other HTTP status than 200."""
    STREAM_ERROR = "stream_error"
    """An error in mid-stream."""
    TRUNCATED = "truncated"
    """The connection ended before the stream did."""
    CONNECTION = "connection"
    """No answer: nothing listened, or the connection ended before the answer began."""
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    """The answer is not a valid stream of the API's events."""
    NO_TOKENS = "no_tokens"
    """A complete stream without a token."""
    ABANDONED = "abandoned"
    """Never sent: an earlier turn of its conversation failed."""
    INTERRUPTED = "interrupted"
    """In flight when the run was interrupted; counts neither as success nor as failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request. All times are seconds from the start of the run, on one monotonic clock."""

    index: int
    """Index of the conversation, in the order of arrival."""
    turn: int
    planned_s: float
    """Planned arrival; for later turns, the end of the pause after the answer before."""
    due_s: float
    """Earliest time at which it could be sent: as planned, or when there was room under the cap."""
    sent_s: float
    chunk_s: tuple[float, ...]
    """Arrival of each chunk that carries tokens."""
    last_s: float | None
    """Arrival of the last token, or of the notice that there are no more."""
    ended_s: float
    """Time at which the answer was complete, or had failed."""
    input_tokens: int
    """Requested number of prompt tokens; `output_tokens` is the requested number of output tokens."""
    output_tokens: int
    prompt_tokens: int | None
    """Prompt tokens counted by the server, and likewise `completion_tokens`; None if it reports no count."""
    completion_tokens: int | None
    outcome: Outcome
    status: int | None
    detail: str

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens: the server's count, or else one for each chunk."""
        return len(self.chunk_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def cause(self) -> str:
        """The outcome, with the HTTP status if the request was refused or failed with a status."""
        has_status = self.outcome in (Outcome.REFUSED, Outcome.HTTP_ERROR)
        return f"{self.outcome.value} {self.status}" if has_status else self.outcome.value

    def as_json(self) -> dict[str, Any]:
        """The JSON form for the results file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Record:
        """The inverse of `as_json`. Raises `TypeError`, `ValueError` or `KeyError` for another form."""
        outcome, chunk_s = Outcome(fields["outcome"]), tuple(float(each) for each in fields["chunk_s"])
        return cls(**(dict(fields) | {"outcome": outcome, "chunk_s": chunk_s}))
