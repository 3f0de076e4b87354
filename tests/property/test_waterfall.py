"""The account of a request's time: exact in a world whose clocks differ, and without gaps whatever is told in whatever
order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.ids import RequestId, RequestKey
from common.contract.messages.session import Role
from common.contract.messages.worker import DecodeTimes, PromptTimes, Timings
from gateway.serving.waterfall import Segment, Stage, Waterfall

REQUEST = RequestId("r")
SECOND = 10**9
moments = st.integers(0, 5 * SECOND)
WORKERS = (
    Stage.QUEUE,
    Stage.PREFIX_PULL,
    Stage.PREFILL,
    Stage.RESERVE,
    Stage.PULL,
    Stage.SETTLE,
    Stage.DECODE_QUEUE,
    Stage.DECODE,
    Stage.PREEMPTED,
)
"""Stages that a worker measures."""


def key(attempt: int) -> RequestKey:
    return RequestKey(REQUEST, attempt)


def check(waterfall: Waterfall, arrived: int, ended: int) -> None:
    """The segments follow each other from arrival to end, and none is empty or negative."""
    at = 0
    for segment in waterfall.segments:
        assert segment.start_ns == at, waterfall.segments
        assert segment.end_ns > segment.start_ns, waterfall.segments
        at = segment.end_ns
    assert at == ended - arrived
    assert sum(waterfall.stages_ns().values()) == waterfall.e2e_ns == ended - arrived


# --- a world ---------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """What truly happens, in nanoseconds of a clock that nobody has."""

    draw: Callable[[st.SearchStrategy[int]], int]
    now: int
    """At the gateway."""
    waterfall: Waterfall = field(default_factory=Waterfall)
    truth: dict[Stage, int] = field(default_factory=dict)
    """Spent on what workers measure."""
    ways: int = 0
    """Spent by messages on their way, as far as anybody waited for them."""
    attempt: int = 0
    arrived: int = 0

    def some(self) -> int:
        return self.draw(moments)

    def spend(self, **stages: int) -> int:
        for name, duration in stages.items():
            stage = Stage(name)
            self.truth[stage] = self.truth.get(stage, 0) + duration
        return sum(stages.values())

    def arrive(self) -> None:
        self.arrived = self.now
        self.waterfall.arrived("id", self.now / SECOND)
        self.now += self.some()
        self.waterfall.opened(self.now / SECOND)
        self.now += self.some()

    def begin(self, **how: bool) -> RequestKey:
        self.attempt += 1
        prefill = None if how.pop("local", False) else "p:1"
        self.waterfall.began(key(self.attempt), [0], self.now / SECOND, decode="d:1", prefill=prefill, **how)
        return key(self.attempt)

    def tell(self, prompt: PromptTimes | None, decode: DecodeTimes | None) -> None:
        about = key(self.attempt)
        self.waterfall.measured(
            about, Timings(request=REQUEST, attempt=about.attempt, choice=0, prompt=prompt, decode=decode)
        )

    def tokens(self, role: Role, at: int) -> None:
        self.waterfall.tokens(key(self.attempt), 0, role, at / SECOND)

    def fail(self) -> None:
        """It is noticed after a while, and after another one the next attempt begins."""
        for _ in range(2):
            before = self.now
            self.now += self.some()
            stage = Stage.LOST if _ == 0 else Stage.RECOVERY
            self.truth[stage] = self.truth.get(stage, 0) + self.now - before
            if _ == 0:
                self.waterfall.failed([0], self.now / SECOND)


def decode_times(wait: int, stages: dict[str, int], *, read: int = 0, hidden: int = 0) -> DecodeTimes:
    names = ("reserve", "pull", "settle", "decode", "preempted")
    seconds: dict[str, Any] = {name: stages.get(name, 0) / SECOND for name in names}
    return DecodeTimes(
        wait_s=wait / SECOND,
        queue_s=stages.get("decode_queue", 0) / SECOND,
        read_s=read / SECOND,
        hidden_read_s=hidden / SECOND,
        pull_bytes=read,
        **{f"{name}_s": value for name, value in seconds.items()},
    )


def handed_off(world: World, *, until: str = "end") -> None:
    """An attempt at two workers, up to its first token, to some tokens of D, or to the end."""
    world.begin()
    begun = world.now
    to_p, to_d, from_p, p_to_d, from_d, last_from_d = (world.some() for _ in range(6))
    prompt = {"queue": world.some(), "prefix_pull": world.some(), "prefill": world.some()}
    sent = begun + to_p + sum(prompt.values())
    first_at = sent + from_p
    prompt_times = PromptTimes(num_cached=0, **{f"{name}_s": spent / SECOND for name, spent in prompt.items()})
    told = max(sent + p_to_d, begun + to_d)
    stages = {name: world.some() for name in ("reserve", "pull", "settle", "decode_queue")}
    joined = told + sum(stages.values())
    one_step, steps, preempted = world.some(), world.some(), world.some()
    d_first_at = joined + one_step + from_d
    last_at = max(d_first_at, joined + one_step + steps + preempted + last_from_d)
    wait = told - begun - to_d
    if first_at <= d_first_at:
        world.tell(prompt_times, None)
        world.tokens(Role.PREFILL, first_at)
    if until == "first token":
        world.now = first_at
        if first_at <= d_first_at:
            world.spend(**prompt)
            world.ways += to_p + from_p
        return
    world.tell(prompt_times, decode_times(wait, stages | {"decode": one_step}))
    world.tokens(Role.DECODE, d_first_at)
    if until == "some tokens":
        world.tokens(Role.DECODE, d_first_at + steps)
        stages |= {"decode": one_step + steps}
        world.now = d_first_at + steps
        claimed = world.spend(**prompt, **stages)
    else:
        stages |= {"decode": one_step + steps, "preempted": preempted}
        world.tell(prompt_times, decode_times(wait, stages))
        world.tokens(Role.DECODE, last_at)
        world.now = last_at
        claimed = world.spend(**prompt, **stages)
    world.ways += world.now - begun - claimed


def local(world: World) -> None:
    """An attempt at a decode worker alone."""
    world.begin(local=True)
    begun = world.now
    to_d, from_d, last_from_d = (world.some() for _ in range(3))
    prompt = {"queue": world.some(), "prefill": world.some()}
    prompt_times = PromptTimes(
        queue_s=prompt["queue"] / SECOND, prefix_pull_s=0.0, prefill_s=prompt["prefill"] / SECOND
    )
    sent = begun + to_d + sum(prompt.values())
    world.tell(prompt_times, None)
    world.tokens(Role.DECODE, sent + from_d)
    stages = {name: world.some() for name in ("decode_queue", "decode", "preempted")}
    world.now = max(sent + from_d, sent + sum(stages.values()) + last_from_d)
    world.tell(prompt_times, decode_times(0, stages))
    world.tokens(Role.DECODE, world.now)
    world.ways += world.now - begun - world.spend(**prompt, **stages)


def moved(world: World) -> None:
    """From another decode worker, which has brought everything up to now."""
    world.begin(moving=True)
    begun = world.now
    wait, cut_to_d2, from_d2 = (world.some() for _ in range(3))
    stages = {name: world.some() for name in ("pull", "settle", "decode_queue", "decode")}
    world.now = begun + cut_to_d2 + sum(stages.values()) + from_d2
    world.tell(None, decode_times(wait, stages))
    world.tokens(Role.DECODE, world.now)
    world.spend(**stages)
    world.ways += cut_to_d2 + from_d2


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_what_workers_measure_and_what_messages_take_is_told_apart(data: st.DataObject) -> None:
    world = World(data.draw, now=data.draw(st.integers(0, 1000 * SECOND)))
    world.arrive()
    for until in data.draw(st.lists(st.sampled_from(["first token", "some tokens"]), max_size=2)):
        handed_off(world, until=until)
        if until == "some tokens" and data.draw(st.booleans()):
            moved(world)
        world.fail()
    if data.draw(st.booleans()):
        local(world)
    else:
        handed_off(world)
    last = world.now
    world.now += world.some()
    world.waterfall.ended(world.now / SECOND, finished=True)
    check(world.waterfall, world.arrived, world.now)
    spent = world.waterfall.stages_ns()
    legs = world.waterfall.legs
    if all(leg.first_at is not None for leg in legs):  # else the time of an attempt is lost, which is told elsewhere
        for stage in (*WORKERS, Stage.LOST, Stage.RECOVERY):
            assert spent.get(stage, 0) == world.truth.get(stage, 0), (stage, spent, world.truth)
        assert spent.get(Stage.FIRST_TOKEN, 0) + spent.get(Stage.TRANSIT, 0) == world.ways
    assert spent.get(Stage.DELIVERY, 0) == world.now - last
    assert world.waterfall.excess_ns == 0


# --- anything --------------------------------------------------------------------------------------------------------

seconds = st.floats(0, 20)
prompt_times = st.builds(PromptTimes, queue_s=seconds, prefix_pull_s=seconds, prefill_s=seconds)
any_decode_times = st.builds(
    DecodeTimes,
    **{
        f"{name}_s": seconds
        for name in (
            "wait", "reserve", "pull", "settle", "queue", "decode", "preempted", "read", "hidden_read",
        )
    },
    pull_bytes=st.integers(0, 100),
)  # fmt: skip
attempts = st.integers(1, 4).map(key)
choices = st.integers(0, 2)
events = st.one_of(
    st.tuples(st.just("opened")),
    st.tuples(st.just("failed"), st.lists(choices, max_size=3)),
    st.tuples(st.just("began"), attempts, st.lists(choices, max_size=3), st.booleans(), st.booleans(), st.booleans()),
    st.tuples(
        st.just("measured"), attempts, st.none() | choices, st.none() | prompt_times, st.none() | any_decode_times
    ),
    st.tuples(st.just("tokens"), attempts, choices, st.sampled_from([Role.PREFILL, Role.DECODE])),
)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.tuples(events, st.floats(0, 3)), max_size=25), st.floats(0, 1e6), st.booleans())
def test_whatever_is_told_the_account_is_complete(
    told: list[tuple[Any, float]], arrived: float, finished: bool
) -> None:
    waterfall, now = Waterfall(), arrived
    waterfall.arrived("id", arrived)
    for (kind, *about), pause_s in told:
        now += pause_s
        match kind, about:
            case "opened", []:
                waterfall.opened(now)
            case "failed", [ended]:
                waterfall.failed(ended, now)
            case "began", [attempt, begun, moving, takes_over, alone]:
                prefill = None if alone or moving else "p:1"
                waterfall.began(
                    attempt,
                    begun,
                    now,
                    decode="d:1",
                    prefill=prefill,
                    moving=moving,
                    takes_over=takes_over and not moving,
                )
            case "measured", [attempt, choice, prompt, decode]:
                waterfall.measured(
                    attempt, Timings(request=REQUEST, attempt=attempt[1], choice=choice, prompt=prompt, decode=decode)
                )
            case "tokens", [attempt, choice, role]:
                waterfall.tokens(attempt, choice, role, now)
    waterfall.ended(now, finished=finished)
    check(waterfall, round(arrived * 1e9), round(now * 1e9))
    assert waterfall.excess_ns >= 0


def one_leg(prefill_s: float) -> Waterfall:
    """A second at a prefill worker, which ends everything, and says that it has taken so long."""
    waterfall = Waterfall()
    waterfall.arrived("id", 10.0)
    waterfall.opened(10.0)
    waterfall.began(key(1), [0], 10.0, decode="d:1", prefill="p:1")
    times = PromptTimes(queue_s=0.25, prefix_pull_s=0.0, prefill_s=prefill_s)
    waterfall.measured(key(1), Timings(request=REQUEST, attempt=1, choice=None, prompt=times, decode=None))
    waterfall.tokens(key(1), 0, Role.PREFILL, 11.0)
    waterfall.ended(11.0, finished=True)
    return waterfall


def test_who_claims_more_than_there_was_is_cut_and_found_out() -> None:
    waterfall = one_leg(prefill_s=7.0)
    assert waterfall.segments == [Segment(Stage.PREFILL, 0, SECOND, 1)]
    assert waterfall.excess_ns == 6.25 * SECOND
    assert one_leg(prefill_s=0.75).excess_ns == 0
    assert one_leg(prefill_s=0.75).stages_ns() == {Stage.QUEUE: SECOND // 4, Stage.PREFILL: SECOND * 3 // 4}
