"""Limits of one API key at one gateway: requests and tokens per minute, and concurrent requests.

The rates are token buckets: a bucket holds one minute's worth and fills evenly. A key that was idle may use a minute's
worth at once, and continues at its rate. This code reads no clock and never waits: the time is an argument of each
call.

A prompt's tokens are taken when the request is admitted. Output tokens are taken as they are generated, on credit if
necessary; the next request then waits until the credit is repaid. The alternative, to reserve `max_tokens` and return
the unused rest, would refuse most requests that omit `max_tokens`, because few use as much as they could. So the rate
holds over time, and is exceeded briefly by at most what the concurrent requests generate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_SECONDS: Final = 60.0
"""Seconds in the period of the limits, one minute."""
_ROUNDING: Final = 1e-9
"""Tolerance for rounding errors of a bucket's level, as a fraction of its capacity."""


class Limit(StrEnum):
    """Which limit was reached. The value is the error's code and a metric label."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of one key; None means unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReached:
    """The limit of a key that a request would exceed."""

    limit: Limit
    wait_s: float | None
    """Seconds until it would be admitted if nothing else arrived; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A bucket's state as told to clients."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until the bucket is full."""


class TokenBucket:
    """A bucket that fills at an even rate up to a minute's worth. Tokens taken on credit make its level negative."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        """A full bucket at `now_s`, holding one minute's worth."""
        self.capacity = per_minute
        self._rate = per_minute / _SECONDS
        self._level = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until it holds `amount`, at most its capacity; 0 if it does now."""
        assert 0 <= amount <= self.capacity
        missing = amount - self._fill(now_s)
        return 0.0 if missing <= self.capacity * _ROUNDING else missing / self._rate

    def take(self, amount: int, now_s: float) -> None:
        """Take `amount`, on credit if the bucket holds less."""
        assert amount >= 0
        self._level = self._fill(now_s) - amount

    def give_back(self, amount: int, now_s: float) -> None:
        """Return tokens that were taken and not used."""
        assert amount >= 0
        self._level = min(float(self.capacity), self._fill(now_s) + amount)

    def allowance(self, now_s: float) -> Allowance:
        """The bucket's state now."""
        level = self._fill(now_s)
        remaining = max(0, int(level + self.capacity * _ROUNDING))
        return Allowance(limit=self.capacity, remaining=remaining, reset_s=(self.capacity - level) / self._rate)

    def resized(self, per_minute: int, now_s: float) -> TokenBucket:
        """A bucket of another capacity, with the same number of tokens missing."""
        missing = self.capacity - self._fill(now_s)
        bucket = TokenBucket(per_minute, self._at_s)  # the latest time seen: a clock that goes back does not refill it
        bucket._level -= missing
        return bucket

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the level is above the capacity."""
        assert self._level <= self.capacity

    def _fill(self, now_s: float) -> float:
        if now_s > self._at_s:
            self._level = min(float(self.capacity), self._level + (now_s - self._at_s) * self._rate)
            self._at_s = now_s
        return self._level


class KeyMeter:
    """Usage of one key. Each `begin` that admits a request must be followed by one `end`."""

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self._limits = limits
        self._requests = _bucket(None, limits.requests_per_minute, now_s)
        self._tokens = _bucket(None, limits.tokens_per_minute, now_s)
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Requests admitted and not ended."""
        return self._num_open

    def begin(self, now_s: float) -> LimitReached | None:
        """Admit a request and count it, whatever becomes of it; or return the reason for refusing it and count
        nothing."""
        if self._limits.max_concurrency is not None and self._num_open >= self._limits.max_concurrency:
            return LimitReached(limit=Limit.CONCURRENCY, wait_s=None)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now_s)
            if wait_s:
                return LimitReached(limit=Limit.REQUESTS, wait_s=wait_s)
            self._requests.take(1, now_s)
        self._num_open += 1
        return None

    def end(self) -> None:
        """Record the end of an admitted request."""
        assert self._num_open > 0
        self._num_open -= 1

    def admit(self, num_tokens: int, now_s: float, num_taken: int = 0) -> LimitReached | None:
        """Take a prompt's tokens, at most `most_tokens`, of which `num_taken` have been taken already; or return the
        reason for refusing, and take none. The wait of a refusal is for all of `num_tokens`, since a retry pays for all
        of them."""
        if self._tokens is None:
            return None
        if num_tokens > num_taken and self._tokens.wait_s(num_tokens - num_taken, now_s):
            return LimitReached(limit=Limit.TOKENS, wait_s=self._tokens.wait_s(num_tokens, now_s))
        if num_taken > num_tokens:
            self._tokens.give_back(num_taken - num_tokens, now_s)
        else:
            self._tokens.take(num_tokens - num_taken, now_s)
        return None

    def give_back(self, num_tokens: int, now_s: float) -> None:
        """Return the tokens of an admitted prompt that was not computed."""
        if self._tokens is not None:
            self._tokens.give_back(num_tokens, now_s)

    @property
    def most_tokens(self) -> int | None:
        """Largest prompt that can ever be admitted; None if unlimited."""
        return self._limits.tokens_per_minute

    def charge(self, num_tokens: int, now_s: float) -> None:
        """Take tokens that have been generated."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)

    def allowances(self, now_s: float) -> Mapping[Limit, Allowance]:
        """State of each limited rate."""
        buckets = {Limit.REQUESTS: self._requests, Limit.TOKENS: self._tokens}
        return {limit: bucket.allowance(now_s) for limit, bucket in buckets.items() if bucket is not None}

    def set_limits(self, limits: KeyLimits, now_s: float) -> None:
        """Replace the limits; earlier usage still counts."""
        if limits == self._limits:
            return
        self._limits = limits
        self._requests = _bucket(self._requests, limits.requests_per_minute, now_s)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now_s)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a count is impossible."""
        assert self._num_open >= 0
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.check_invariants()


def _bucket(old: TokenBucket | None, per_minute: int | None, now_s: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    return TokenBucket(per_minute, now_s) if old is None else old.resized(per_minute, now_s)
