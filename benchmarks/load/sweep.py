"""Chooses the rates of a sweep: upward until goodput breaks, then by bisection. Pure: results are passed in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RateSearch:
    """Narrows the interval between `held`, the highest rate that holds, and `broke`, the lowest that does not."""

    next_rate: float | None
    """The next rate to try; None when the search is over."""
    attainment: float
    """Share of requests that must meet the targets."""
    factor: float
    bisections: int
    """Remaining rates to try between `held` and `broke`."""
    max_steps: int
    """Remaining rates to try in all."""
    held: float | None = None
    broke: float | None = None
    tried: list[float] = field(default_factory=list)

    def observe(self, attained: float) -> None:
        """Take the result at `next_rate`: this share of requests met the targets."""
        rate = self.next_rate
        assert rate is not None, "the search has ended"
        self.tried.append(rate)
        if attained >= self.attainment:
            self.held = rate if self.held is None else max(rate, self.held)
        else:
            self.broke = rate if self.broke is None else min(rate, self.broke)
        self.max_steps -= 1
        self.next_rate = self._choose() if self.max_steps > 0 else None
        self.check_invariants()

    def _choose(self) -> float | None:
        if self.broke is None:
            assert self.held is not None
            return self.held * self.factor
        if self.held is None:
            return self.broke / self.factor
        if self.bisections == 0:
            return None
        self.bisections -= 1
        return (self.held + self.broke) / 2

    def check_invariants(self) -> None:
        """Assert that `held` lies below `broke`."""
        assert self.held is None or self.broke is None or self.held < self.broke, self
