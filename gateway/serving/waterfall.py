"""Account of a generation's time: stages that follow each other and add up to the whole.

The gateway's clock gives the arrival of a generation, the beginnings of its attempts, and the arrivals of their tokens.
For the time between an attempt's beginning and its tokens, workers report the duration of their stages (`Timings`), by
their own clocks. Messages form a chain, gateway → P → D → gateway. The whole, less the stages of the workers on the
chain, is the time that messages were in transit, as in NTP. Overlapping time counts once: of a pull, only the part
after the arrival of the first tokens at D counts, since the prefill hides the part before.

The account is that of one choice, the one that ends last. Pure: marks in, segments out; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from common.contract.ids import RequestKey
from common.contract.messages.session import Role
from common.contract.messages.worker import DecodeTimes, PromptTimes, Timings


class Stage(StrEnum):
    """Stages of a request, in the order in which they occur."""

    INTAKE = "intake"
    """The gateway reads, checks and tokenises the request."""
    PLACEMENT = "placement"
    """The gateway chooses workers, or waits: until one is usable, or for the turn of a prompt of many."""
    QUEUE = "queue"
    """The prompt waits at the worker that is to compute it."""
    PREFIX_PULL = "prefix_pull"
    """The prompt's beginning is pulled from another worker."""
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"  # noqa: S105
    """Transit of the request to the worker that computes the prompt, and of the first token from there."""
    RESERVE = "reserve"
    """The decode worker waits for room for the blocks."""
    PULL = "pull"
    """Blocks are read; reading that the prefill hides is not counted."""
    SETTLE = "settle"
    """The decode worker waits for the source to say that what it read is valid."""
    DECODE_QUEUE = "decode_queue"
    """The choice waits for a place in the batch."""
    DECODE = "decode"
    PREEMPTED = "preempted"
    """The choice has lost its place or its blocks, and waits to be in the batch again."""
    TRANSIT = "transit"
    """All other transit of messages between the gateway and the workers on the chain."""
    LOST = "lost"
    """An attempt brings no more tokens, and the gateway has not noticed yet."""
    RECOVERY = "recovery"
    """From the end of `LOST` until the next attempt begins."""
    DELIVERY = "delivery"
    """The last token becomes text and is handed to the client's connection."""


_ORDER = {stage: number for number, stage in enumerate(Stage)}


class Segment(NamedTuple):
    """`[start_ns, end_ns)` since arrival, spent on one stage. `attempt` counts from 1; 0 means no attempt."""

    stage: Stage
    start_ns: int
    end_ns: int
    attempt: int


@dataclass(slots=True, eq=False)
class Leg:
    """One attempt's contribution to one choice. Times are the gateway's monotonic seconds."""

    number: int
    begun_at: float
    failed_at: float | None
    """When the preceding attempt failed; None if it goes on, or there is none."""
    decode_address: str
    prefill_address: str | None
    """None if the decode worker computes the prompt, or takes over a running sequence."""
    moving: bool
    """Whether it takes over a running sequence from another decode worker."""
    takes_over: bool
    """Whether it takes over an offer, which the prefill worker began for an earlier attempt."""
    prompt: PromptTimes | None = None
    decode: DecodeTimes | None = None
    """As reported with the tokens that arrived at `told_at`."""
    told_at: float = 0.0
    coming: DecodeTimes | None = None
    """Reported for the tokens that arrive next."""
    first_at: float | None = None
    first_role: Role | None = None
    last_at: float = 0.0

    @property
    def computes(self) -> Role | None:
        """The role of the worker that computes the prompt; None if none does."""
        if self.moving:
            return None
        return Role.DECODE if self.prefill_address is None else Role.PREFILL


class _Line:
    """Consecutive segments from `start`; none extends beyond `end`."""

    def __init__(self, start: int, end: int) -> None:
        self.segments: list[Segment] = []
        self._start = start
        self.end = max(start, end)
        self.now = start
        """Time up to which all is accounted for."""

    def until(self, stage: Stage, moment: float | None, attempt: int = 0) -> None:
        """Account the time up to `moment` to `stage`; inert if `moment` is None or past."""
        if moment is not None:
            self.spend(stage, min(_ns(moment), self.end) - self.now, attempt)

    def spend(self, stage: Stage, duration: int, attempt: int) -> None:
        """Account `duration` nanoseconds to `stage`."""
        if duration > 0:
            begin = self.now - self._start
            self.now += duration
            self.segments.append(Segment(stage, begin, begin + duration, attempt))


@dataclass(slots=True, eq=False)
class Waterfall:
    """The account of one generation. Every component that handles the generation adds its marks."""

    request_id: str = ""
    """The request's id as the client knows it."""
    arrived_at: float = 0.0
    opened_at: float | None = None
    """When the dispatcher received the first prompt of its request."""
    first_token_at: float | None = None
    route: Callable[[], Mapping[str, str]] | None = None
    """Returns the first routing decision, as text by header name; None before it."""
    excess_ns: int = 0
    """Nanoseconds by which the workers' reports exceed the time available."""
    segments: list[Segment] = field(default_factory=list)
    """Set at the end; without gaps, from arrival to end."""
    _legs: dict[int, dict[RequestKey, Leg]] = field(default_factory=dict)
    """Choice → its legs by attempt, in the order of their beginnings."""
    _failed_at: dict[int, float] = field(default_factory=dict)
    """Choice → when an attempt at it failed, until the next one begins."""

    def explain_route(self) -> Mapping[str, str]:
        """The first routing decision; empty before it."""
        return {} if self.route is None else self.route()

    # --- marks ---------------------------------------------------------------------------------------------------

    def arrived(self, request_id: str, now: float) -> None:
        """Mark the arrival of the request."""
        self.request_id = request_id
        self.arrived_at = now

    def opened(self, now: float) -> None:
        """Mark the moment at which the request was read and checked. Workers are wanted, or its other prompts go
        first."""
        self.opened_at = now

    def failed(self, choices: Iterable[int], now: float) -> None:
        """Mark the failure of the attempt at these choices; another attempt is to follow. Failures before it has begun
        change nothing."""
        for choice in choices:
            self._failed_at.setdefault(choice, now)

    def began(
        self,
        key: RequestKey,
        choices: Iterable[int],
        now: float,
        *,
        decode: str,
        prefill: str | None = None,
        moving: bool = False,
        takes_over: bool = False,
    ) -> None:
        """Mark the beginning of an attempt at these choices, at workers of these addresses."""
        for choice in choices:
            legs = self._legs.setdefault(choice, {})
            legs[key] = Leg(
                number=len(legs) + 1,
                begun_at=now,
                failed_at=self._failed_at.pop(choice, None),
                decode_address=decode,
                prefill_address=prefill,
                moving=moving,
                takes_over=takes_over,
            )

    def measured(self, key: RequestKey, timings: Timings) -> None:
        """Take a worker's report about the next tokens of an attempt."""
        for choice, legs in self._legs.items():
            leg = legs.get(key)
            if leg is not None and timings.choice in (None, choice):
                leg.prompt = timings.prompt or leg.prompt
                leg.coming = timings.decode or leg.coming

    def leg(self, key: RequestKey, choice: int) -> Leg:
        """The leg of an attempt that has begun at a choice. To mark the arrival of a token that is neither the first
        nor reported about, set its `last_at`."""
        return self._legs[choice][key]

    def tokens(self, key: RequestKey, choice: int, role: Role, now: float) -> float | None:
        """Mark the arrival of new tokens of a choice from the attempt's worker of this role. Returns when the failure
        came after which they are the first tokens; None if there was none."""
        legs = self._legs.get(choice, {})
        leg, failed_at = legs.get(key), None
        if leg is None:
            return None
        if leg.first_at is None:
            without_tokens = takewhile(lambda each: each.first_at is None, reversed(legs.values()))
            failed_at = min((each.failed_at for each in without_tokens if each.failed_at is not None), default=None)
            leg.first_at, leg.first_role = now, role
            if self.first_token_at is None:
                self.first_token_at = now
        if leg.coming is not None and role is Role.DECODE:
            leg.decode, leg.coming, leg.told_at = leg.coming, None, now
        leg.last_at = now
        return failed_at

    def ended(self, now: float, *, finished: bool) -> None:
        """Mark the end, and compute the segments. `finished`: the client has the last token; else the request
        failed."""
        self.excess_ns = 0
        line = _Line(_ns(self.arrived_at), _ns(now))
        line.until(Stage.INTAKE, self.opened_at)
        legs = self.legs
        for leg in legs:
            self._before(line, leg)
            if leg.first_at is not None:
                self._account(line, leg)
        if self.opened_at is None:
            rest = Stage.INTAKE
        elif not legs:
            rest = Stage.PLACEMENT
        else:
            rest = Stage.DELIVERY if finished else Stage.LOST
        line.spend(rest, line.end - line.now, 0)
        self.segments = line.segments

    # --- results -------------------------------------------------------------------------------------------------

    @property
    def legs(self) -> list[Leg]:
        """The legs of the choice whose last token came latest."""
        return list(max(self._legs.values(), key=_last_token_at, default={}).values())

    @property
    def last_token_at(self) -> float:
        """When the last token came; minus infinity if none did."""
        came = [leg.last_at for legs in self._legs.values() for leg in legs.values() if leg.first_at is not None]
        return max(came, default=float("-inf"))

    def last_token_of(self, choice: int) -> float:
        """When the last token of a choice came; minus infinity if none did."""
        return _last_token_at(self._legs[choice])

    @property
    def e2e_ns(self) -> int:
        """Nanoseconds from arrival to end."""
        return self.segments[-1].end_ns if self.segments else 0

    def stages_ns(self) -> dict[Stage, int]:
        """Nanoseconds spent on each stage, without stages of no time."""
        spent: dict[Stage, int] = {}
        for segment in self.segments:
            spent[segment.stage] = spent.get(segment.stage, 0) + segment.end_ns - segment.start_ns
        return {stage: spent[stage] for stage in sorted(spent, key=_ORDER.__getitem__)}

    @property
    def pulls(self) -> list[DecodeTimes]:
        """Reports of the attempts that have pulled blocks, as far as they have arrived."""
        told = [leg.decode for leg in self.legs if leg.decode is not None]
        return [each for each in told if each.pull_bytes > 0]

    @property
    def num_cached(self) -> int:
        """Prompt tokens whose KV was not computed, as reported for the last attempt that computed the prompt."""
        told = [leg.prompt.num_cached for leg in self.legs if leg.prompt is not None and leg.first_at is not None]
        return told[-1] if told else 0

    @property
    def draft_outcomes(self) -> tuple[int, int]:
        """(drafted tokens that were right, others that were wrong), over all choices, as far as workers have told."""
        told = [leg.decode for legs in self._legs.values() for leg in legs.values() if leg.decode is not None]
        num_right = sum(each.num_accepted for each in told)
        return num_right, sum(each.num_drafted for each in told) - num_right

    # --- internal steps ------------------------------------------------------------------------------------------

    def _before(self, line: _Line, leg: Leg) -> None:
        """Account the time up to the beginning of an attempt."""
        if leg.moving:  # meanwhile the other decode worker goes on
            line.until(Stage.DECODE, leg.begun_at, leg.number - 1)
        elif leg.number == 1:
            line.until(Stage.PLACEMENT, leg.begun_at)
        else:
            line.until(Stage.LOST, leg.failed_at, leg.number - 1)
            line.until(Stage.RECOVERY, leg.begun_at)

    def _account(self, line: _Line, leg: Leg) -> None:
        """Account the time from the beginning of an attempt, or from the end of the preceding one, to its last tokens.

        Up to `told`, the workers' reports say what they did; the time after it was spent decoding.
        """
        told_at = leg.first_at if leg.decode is None else leg.told_at
        assert told_at is not None
        told = min(_ns(told_at), line.end)
        room = max(0, told - line.now)
        prompt, decode = self._prompt_stages(leg), _decode_stages(leg)
        excess = sum(spent for _, spent in (*prompt, *decode)) - room
        if excess > 0:
            if line.now == _ns(leg.begun_at) and not leg.takes_over:
                self.excess_ns += excess
            _take(excess, prompt, decode)
        way = room - sum(spent for _, spent in (*prompt, *decode))
        first_way = 0
        if leg.first_at is not None and leg.first_role is leg.computes:
            # The first token's transit counts only as far as D's stages, which may overlap with it, leave time for it.
            first_way = min(way, max(0, _ns(leg.first_at) - line.now - sum(spent for _, spent in prompt)))
        stages = [*prompt, (Stage.FIRST_TOKEN, first_way), *decode, (Stage.TRANSIT, way - first_way)]
        for stage, spent in stages:
            line.spend(stage, spent, leg.number)
        line.until(Stage.DECODE, leg.last_at, leg.number)

    def _prompt_stages(self, leg: Leg) -> list[tuple[Stage, int]]:
        """Stages of computing the prompt within this attempt's time."""
        times = leg.prompt
        if times is None:
            return []
        stages = [
            (Stage.QUEUE, _ns(times.queue_s)),
            (Stage.PREFIX_PULL, _ns(times.prefix_pull_s)),
            (Stage.PREFILL, _ns(times.prefill_s)),
        ]
        if leg.takes_over:
            # Nothing if the prompt was done before this attempt; else its end, as long as the decode worker waited for
            # it.
            if any(each.first_role is Role.PREFILL for each in self.legs[: leg.number - 1]):
                return []
            if leg.decode is not None:
                _take(sum(spent for _, spent in stages) - _ns(leg.decode.wait_s), stages)
        return stages


def _decode_stages(leg: Leg) -> list[tuple[Stage, int]]:
    times = leg.decode
    if times is None:
        return []
    return [
        (Stage.RESERVE, _ns(times.reserve_s)),
        (Stage.PULL, _ns(times.pull_s)),
        (Stage.SETTLE, _ns(times.settle_s)),
        (Stage.DECODE_QUEUE, _ns(times.queue_s)),
        (Stage.DECODE, _ns(times.decode_s)),
        (Stage.PREEMPTED, _ns(times.preempted_s)),
    ]


def _take(excess: int, *parts: list[tuple[Stage, int]]) -> None:
    """Trim the earliest stages first; clock skew overstates those."""
    for stages in parts:
        for index, (stage, spent) in enumerate(stages):
            taken = min(max(0, excess), spent)
            stages[index] = (stage, spent - taken)
            excess -= taken


def _last_token_at(legs: dict[RequestKey, Leg]) -> float:
    return max([leg.last_at for leg in legs.values() if leg.first_at is not None], default=float("-inf"))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
