"""What one API key may use up, on one gateway: requests and tokens a minute, and requests at once.

The rates are token buckets: a bucket holds a minute's worth, and fills evenly. A key that has rested may use a minute's
worth at once, and goes on at its rate. Nothing here looks at a clock, or waits: every call is told the time.

A prompt's tokens are taken when the request is let in, and output tokens as they are generated, if need be on credit:
then the next request waits until that is paid back. The other way, to set `max_tokens` aside and give back what was not
used, would refuse most requests that leave `max_tokens` out, for what they could use and hardly ever do. So the rate is
kept over time, and exceeded for a moment by at most what the requests at once generate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_SECONDS: Final = 60.0
"""Limits are for a minute."""
_ROUNDING: Final = 1e-9
"""Share of a bucket by which what has been computed in floating point may miss."""


class Limit(StrEnum):
    """What a request may run into. The value is the error's code, and labels metrics."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of one key; None where there is none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that is not let in."""

    limit: Limit
    wait_s: float | None
    """Seconds until it would be, if nothing else comes meanwhile; None if nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A bucket, as clients see it."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until it is full."""


class TokenBucket:
    """Holds what may be used at once, and fills at an even rate. What is taken on credit is paid back first."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        """Full at `now_s`, with a minute's worth."""
        self.capacity = per_minute
        self._rate = per_minute / _SECONDS
        self._level = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until it holds `amount`, which is not more than it ever will; 0 if it does."""
        assert 0 <= amount <= self.capacity
        missing = amount - self._fill(now_s)
        return 0.0 if missing <= self.capacity * _ROUNDING else missing / self._rate

    def take(self, amount: int, now_s: float) -> None:
        """Take `amount`, on credit if it holds less."""
        assert amount >= 0
        self._level = self._fill(now_s) - amount

    def give_back(self, amount: int, now_s: float) -> None:
        """What was taken was not used."""
        assert amount >= 0
        self._level = min(float(self.capacity), self._fill(now_s) + amount)

    def allowance(self, now_s: float) -> Allowance:
        """What it holds now."""
        level = self._fill(now_s)
        remaining = max(0, int(level + self.capacity * _ROUNDING))
        return Allowance(limit=self.capacity, remaining=remaining, reset_s=(self.capacity - level) / self._rate)

    def resized(self, per_minute: int, now_s: float) -> TokenBucket:
        """A bucket of another size, from which as much is missing."""
        missing = self.capacity - self._fill(now_s)
        bucket = TokenBucket(per_minute, self._at_s)  # the latest time told, which no clock that goes back fills again
        bucket._level -= missing
        return bucket

    def check_invariants(self) -> None:
        """Raise `AssertionError` if it holds more than it can."""
        assert self._level <= self.capacity

    def _fill(self, now_s: float) -> float:
        if now_s > self._at_s:
            self._level = min(float(self.capacity), self._level + (now_s - self._at_s) * self._rate)
            self._at_s = now_s
        return self._level


class KeyMeter:
    """What one key uses. Whatever `begin` lets in, `end` must follow."""

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self._limits = limits
        self._requests = _bucket(None, limits.requests_per_minute, now_s)
        self._tokens = _bucket(None, limits.tokens_per_minute, now_s)
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Requests let in and not ended."""
        return self._num_open

    def begin(self, now_s: float) -> Refusal | None:
        """Let a request in, which counts at once, whatever becomes of it; or say why not, and count nothing."""
        if self._limits.max_concurrency is not None and self._num_open >= self._limits.max_concurrency:
            return Refusal(limit=Limit.CONCURRENCY, wait_s=None)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now_s)
            if wait_s:
                return Refusal(limit=Limit.REQUESTS, wait_s=wait_s)
            self._requests.take(1, now_s)
        self._num_open += 1
        return None

    def end(self) -> None:
        """A request that was let in has ended."""
        assert self._num_open > 0
        self._num_open -= 1

    def admit(self, num_tokens: int, now_s: float, num_taken: int = 0) -> Refusal | None:
        """Take a prompt's tokens, at most `most_tokens`, of which `num_taken` have been taken; or say why not, and take
        none. Who comes again after a refusal has to pay for all of them."""
        if self._tokens is None:
            return None
        if self._tokens.wait_s(max(0, num_tokens - num_taken), now_s):
            return Refusal(limit=Limit.TOKENS, wait_s=self._tokens.wait_s(num_tokens, now_s))
        if num_taken > num_tokens:
            self._tokens.give_back(num_taken - num_tokens, now_s)
        else:
            self._tokens.take(num_tokens - num_taken, now_s)
        return None

    def give_back(self, num_tokens: int, now_s: float) -> None:
        """An admitted prompt was not computed."""
        if self._tokens is not None:
            self._tokens.give_back(num_tokens, now_s)

    @property
    def most_tokens(self) -> int | None:
        """Largest prompt that is ever let in; None for any."""
        return self._limits.tokens_per_minute

    def charge(self, num_tokens: int, now_s: float) -> None:
        """Tokens have been generated."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)

    def allowances(self, now_s: float) -> Mapping[Limit, Allowance]:
        """What is left of each rate that has a limit."""
        buckets = {Limit.REQUESTS: self._requests, Limit.TOKENS: self._tokens}
        return {limit: bucket.allowance(now_s) for limit, bucket in buckets.items() if bucket is not None}

    def set_limits(self, limits: KeyLimits, now_s: float) -> None:
        """Go on with other limits; what has been used stays used."""
        if limits == self._limits:
            return
        self._limits = limits
        self._requests = _bucket(self._requests, limits.requests_per_minute, now_s)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now_s)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if anything is counted that cannot be."""
        assert self._num_open >= 0
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.check_invariants()


def _bucket(old: TokenBucket | None, per_minute: int | None, now_s: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    return TokenBucket(per_minute, now_s) if old is None else old.resized(per_minute, now_s)
