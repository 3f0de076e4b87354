"""What a generation's time was spent on: stages that follow each other and, together, are all of it.

The gateway's clock says when a generation arrived, when its attempts began, and when each attempt's tokens came.
Between an attempt's beginning and its tokens, workers say how long they have taken for what (`Timings`), by clocks of
their own. Messages make a chain, gateway → P → D → gateway: what is left of the whole, when the stages of the workers
on the chain are taken away, is what the messages were on their way, as in NTP. What overlaps counts once: of a pull,
the part that follows the first tokens' arrival at D, since the part before is hidden by the prefill.

The account is that of one choice, the one that ends last. Marks in, segments out; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from common.contract.ids import RequestKey
from common.contract.messages import DecodeTimes, PromptTimes, Role, Timings


class Stage(StrEnum):
    """Of a request, in the order in which they are gone through."""

    INTAKE = "intake"
    """The gateway reads, checks and tokenises."""
    PLACEMENT = "placement"
    """It chooses workers, or waits for one that is usable."""
    QUEUE = "queue"
    """The prompt waits at the worker that is to compute it."""
    PREFIX_PULL = "prefix_pull"
    """Its beginning is pulled from another worker."""
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"  # noqa: S105
    """The request is on its way to the worker that computes the prompt, and the first token from there."""
    RESERVE = "reserve"
    """The decode worker has no room for the blocks."""
    PULL = "pull"
    """Blocks are read, and no prefill hides it."""
    SETTLE = "settle"
    """The source is asked whether what was read is valid."""
    DECODE_QUEUE = "decode_queue"
    """The choice waits for a place in the batch."""
    DECODE = "decode"
    PREEMPTED = "preempted"
    """The choice has lost its place or its blocks, and waits to be in the batch again."""
    TRANSIT = "transit"
    """Every other way of a message between the gateway and the workers on the chain."""
    LOST = "lost"
    """An attempt brings nothing more, and that is not noticed yet."""
    RECOVERY = "recovery"
    """From there until the next attempt begins."""
    DELIVERY = "delivery"
    """The last token becomes text, and is handed to the client's connection."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`[start_ns, end_ns)` since arrival was spent on a stage; `attempt` counts from 1, 0 is none's."""

    stage: Stage
    start_ns: int
    end_ns: int
    attempt: int


@dataclass(slots=True, eq=False)
class Leg:
    """What one attempt brings of one choice. Times are the gateway's monotonic seconds."""

    number: int
    begun_at: float
    failed_at: float | None
    """When the attempt before had failed."""
    decode_address: str
    prefill_address: str | None
    """None where the decode worker computes the prompt, or takes a running sequence over."""
    moving: bool
    """A running sequence is taken over from another decode worker."""
    takes_over: bool
    """The prefill worker began with it for an attempt before."""
    prompt: PromptTimes | None = None
    decode: DecodeTimes | None = None
    """As told together with the tokens that came at `told_at`."""
    told_at: float = 0.0
    coming: DecodeTimes | None = None
    """Told, of the tokens that come next."""
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
    """Segments, one after another; the last one ends at `end` at the latest."""

    def __init__(self, start: int, end: int) -> None:
        self.segments: list[Segment] = []
        self._start = start
        self.end = max(start, end)
        self.now = start
        """Up to where it is accounted for."""

    def until(self, stage: Stage, moment: float | None, attempt: int = 0) -> None:
        """The time up to `moment` was spent on `stage`; inert when that is past."""
        if moment is not None:
            self.spend(stage, min(_ns(moment), self.end) - self.now, attempt)

    def spend(self, stage: Stage, duration: int, attempt: int) -> None:
        """So long was spent on `stage`."""
        if duration > 0:
            begin = self.now - self._start
            self.now += duration
            self.segments.append(Segment(stage, begin, begin + duration, attempt))


@dataclass(slots=True, eq=False)
class Waterfall:
    """The record of one generation, which everybody who has it in hand adds to."""

    request_id: str = ""
    """What the client knows the request by."""
    arrived_at: float = 0.0
    opened_at: float | None = None
    """When the dispatcher got it."""
    first_token_at: float | None = None
    route: Mapping[str, str] = field(default_factory=dict)
    """Where it was sent first, and why."""
    excess_ns: int = 0
    """What workers have claimed beyond the time that there was."""
    segments: list[Segment] = field(default_factory=list)
    """Once it has ended; without gaps, from arrival to end."""
    _legs: dict[int, dict[RequestKey, Leg]] = field(default_factory=dict)
    """By choice, in the order of their beginnings."""
    _failed_at: dict[int, float] = field(default_factory=dict)

    # --- marks ---------------------------------------------------------------------------------------------------

    def arrived(self, request_id: str, now: float) -> None:
        """The request that it belongs to has arrived."""
        self.request_id = request_id
        self.arrived_at = now

    def opened(self, now: float) -> None:
        """Workers are wanted for it."""
        self.opened_at = now

    def failed(self, choices: Iterable[int], now: float) -> None:
        """What was to bring these choices has failed; another attempt is to follow."""
        self._failed_at |= dict.fromkeys(choices, now)

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
        """An attempt at these choices begins, at workers of these addresses."""
        for choice in choices:
            legs = self._legs.setdefault(choice, {})
            legs[key] = Leg(
                number=len(legs) + 1,
                begun_at=now,
                failed_at=self._failed_at.get(choice),
                decode_address=decode,
                prefill_address=prefill,
                moving=moving,
                takes_over=takes_over,
            )

    def measured(self, key: RequestKey, timings: Timings) -> None:
        """A worker tells what the next tokens of an attempt have taken."""
        for choice, legs in self._legs.items():
            leg = legs.get(key)
            if leg is not None and timings.choice in (None, choice):
                leg.prompt = timings.prompt or leg.prompt
                leg.coming = timings.decode or leg.coming

    def tokens(self, key: RequestKey, choice: int, role: Role, now: float) -> None:
        """An attempt has brought new tokens of a choice, from its worker of this role."""
        leg = self._legs.get(choice, {}).get(key)
        if leg is None:
            return
        if leg.first_at is None:
            leg.first_at, leg.first_role = now, role
            if self.first_token_at is None:
                self.first_token_at = now
        if leg.coming is not None and role is Role.DECODE:
            leg.decode, leg.coming, leg.told_at = leg.coming, None, now
        leg.last_at = now

    def ended(self, now: float, *, finished: bool) -> None:
        """The client has its last token; or the request has ended otherwise."""
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

    # --- what has come of it -------------------------------------------------------------------------------------

    @property
    def legs(self) -> list[Leg]:
        """Of the choice that has got its last token latest."""
        return list(max(self._legs.values(), key=_last_token_at, default={}).values())

    @property
    def last_token_at(self) -> float:
        """When the last token came; before anything else if none did."""
        return max(map(_last_token_at, self._legs.values()), default=float("-inf"))

    @property
    def e2e_ns(self) -> int:
        """From arrival to end."""
        return self.segments[-1].end_ns if self.segments else 0

    def stages_ns(self) -> dict[Stage, int]:
        """What was spent on each stage that there was."""
        spent: dict[Stage, int] = {}
        for segment in self.segments:
            spent[segment.stage] = spent.get(segment.stage, 0) + segment.end_ns - segment.start_ns
        return {stage: spent[stage] for stage in Stage if stage in spent}

    @property
    def pulls(self) -> list[DecodeTimes]:
        """Of the attempts that have pulled blocks, as far as they have told."""
        told = [leg.decode for leg in self.legs if leg.decode is not None]
        return [each for each in told if each.pull_bytes > 0]

    @property
    def num_cached(self) -> int:
        """Prompt tokens whose KV was not computed, as far as is told of the attempt that last computed the others."""
        told = [leg.prompt.num_cached for leg in self.legs if leg.prompt is not None and leg.first_at is not None]
        return told[-1] if told else 0

    # --- the steps between ---------------------------------------------------------------------------------------

    def _before(self, line: _Line, leg: Leg) -> None:
        """Up to the beginning of an attempt."""
        if leg.moving:  # meanwhile the other decode worker goes on
            line.until(Stage.DECODE, leg.begun_at, leg.number - 1)
        elif leg.number == 1:
            line.until(Stage.PLACEMENT, leg.begun_at)
        else:
            line.until(Stage.LOST, leg.failed_at, leg.number - 1)
            line.until(Stage.RECOVERY, leg.begun_at)

    def _account(self, line: _Line, leg: Leg) -> None:
        """From the beginning of an attempt, or since the one before has ended, to its last tokens.

        Up to `told`, workers have told what they did; what came after that has come of decoding.
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
            # The way back of the first token is on the chain only as far as D has not overtaken it.
            first_way = min(way, max(0, _ns(leg.first_at) - line.now - sum(spent for _, spent in prompt)))
        stages = [*prompt, (Stage.FIRST_TOKEN, first_way), *decode, (Stage.TRANSIT, way - first_way)]
        for stage, spent in stages:
            line.spend(stage, spent, leg.number)
        line.until(Stage.DECODE, leg.last_at, leg.number)

    def _prompt_stages(self, leg: Leg) -> list[tuple[Stage, int]]:
        """What computing the prompt has taken of this attempt's time."""
        times = leg.prompt
        if times is None:
            return []
        stages = [
            (Stage.QUEUE, _ns(times.queue_s)),
            (Stage.PREFIX_PULL, _ns(times.prefix_pull_s)),
            (Stage.PREFILL, _ns(times.prefill_s)),
        ]
        if leg.takes_over:
            # Nothing, if it was over before; else as much of its end as the decode worker has waited for.
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
    """Take away from what came first: that is what another clock's beginning may lie before."""
    for stages in parts:
        for index, (stage, spent) in enumerate(stages):
            taken = min(max(0, excess), spent)
            stages[index] = (stage, spent - taken)
            excess -= taken


def _last_token_at(legs: dict[RequestKey, Leg]) -> float:
    return max((leg.last_at for leg in legs.values() if leg.first_at is not None), default=float("-inf"))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
