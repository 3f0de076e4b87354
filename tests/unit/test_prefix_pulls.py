"""When a prefill worker pulls a prefix that another worker holds, and how its estimate of the time follows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from common.contract.block_hashes import block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestId, new_incarnation
from common.contract.messages.gateway import Prefill, PrefixHint, Source
from common.contract.messages.handoff import BlocksReady
from common.contract.sampling import SamplingParams
from common.scheduling.costs import Costs
from kv_transfer.pull import Pull
from prefill_worker.prefix_pulls import PrefixPull, PrefixPulls, When
from prefill_worker.request import PrefillRequest

BLOCK_SIZE, NUM_TOKENS = 16, 1600
SOURCE = Source(address="10.0.0.1:1", incarnation=new_incarnation())
PATIENCE_S = 1.0
_numbers = itertools.count()


def request(num_tokens: int = NUM_TOKENS, source: Source = SOURCE) -> PrefillRequest:
    """A prompt of which the source holds all but the last token."""
    tokens = tuple(range(num_tokens))
    work = Prefill(
        request=RequestId(f"r{next(_numbers)}"),
        attempt=1,
        token_ids=tokens,
        prompt_len=num_tokens,
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        budget_s=1000.0,
        prefix=PrefixHint(source=source, num_tokens=num_tokens - 1),
    )
    made = PrefillRequest(work, Incarnation("g"), 0.0, 1e6)
    made.block_hashes = block_hashes(tokens, BLOCK_SIZE, "")
    return made


def other_source() -> Source:
    """One that no other call returns."""
    return replace(SOURCE, incarnation=new_incarnation())


def pulls(
    token_s: float = 1e-4, block_bytes: int = 2**20, when: When = "cost", *, depth_s: float = 0.0, on_gpu: bool = False
) -> PrefixPulls:
    costs = Costs(prefill_s_per_token=token_s, depth_s=depth_s)
    return PrefixPulls(new_incarnation(), BLOCK_SIZE, block_bytes, costs, when, PATIENCE_S, on_gpu=on_gpu)


def begun(made: PrefixPulls) -> PrefixPull | None:
    prefix = made.choose(request(), 0.0)
    if prefix is not None:
        made.offered(prefix.pull, len(prefix.pull.block_hashes or ()), 0.0)
    return prefix


def pull(made: PrefixPulls, took_s: float) -> bool:
    """Whether a pull was begun; if so, it takes so long, or until nobody waits for it any more."""
    if (prefix := begun(made)) is None:
        return False
    if took_s < prefix.until:
        made.pulled(prefix.pull, took_s)
    else:
        made.gave_up(prefix.pull, Cause.DEADLINE, prefix.until)
    return True


def test_pulls_that_were_slow_for_a_while_are_tried_again() -> None:
    made = pulls()
    assert all(pull(made, 0.03) for _ in range(20))
    slow = sum(pull(made, 0.8) for _ in range(100))
    assert 1 <= slow <= 10, "a slow network costs few prompts"
    assert any(pull(made, 0.03) for _ in range(200))
    assert sum(pull(made, 0.03) for _ in range(100)) == 100, "and what it is then decides"


def test_a_first_guess_that_forbids_pulls_does_not_forbid_them_for_ever() -> None:
    """The first guess is no NVLink."""
    made = pulls(token_s=4e-5, block_bytes=2 * 2**20)
    assert not pull(made, 0.006)
    assert any(pull(made, 0.006) for _ in range(200))
    assert all(pull(made, 0.006) for _ in range(100))


def test_on_a_gpu_the_first_prefix_is_pulled_and_few_where_that_takes_longer() -> None:
    """128 KiB per token, as of a model of 8 billion weights; computing a token takes 20 microseconds."""
    made = pulls(token_s=2e-5, block_bytes=2 * 2**20, on_gpu=True)
    assert all(pull(made, 0.02) for _ in range(100))
    made = pulls(token_s=2e-5, block_bytes=2 * 2**20, on_gpu=True)
    assert 1 <= sum(pull(made, NUM_TOKENS * 2**17 / 1e9) for _ in range(100)) <= 4


def test_depth_is_part_of_what_computing_a_history_takes() -> None:
    """A block takes 1.05 ms to pull, and 0.8 ms to compute if depth cost nothing."""
    assert not pull(pulls(token_s=5e-5), 0.1)
    assert pull(pulls(token_s=5e-5, depth_s=1e-7), 0.1)


def test_pulls_that_are_given_up_become_rare() -> None:
    made = pulls()
    before = made.token_s
    tried = sum(pull(made, 1e9) for _ in range(1000))
    assert made.token_s > before
    assert 1 < tried < 50
    assert made.ended == {"pulled": 0, "gave_up": tried}


@pytest.mark.parametrize(
    ("cause", "offers", "at"),
    [
        (Cause.WORKER_LOST, False, 1.75),
        (Cause.FINGERPRINT, False, 0.1),
        (Cause.TRANSFER, True, 3.0),
        (Cause.TRANSFER, True, 4.0),
        (Cause.DEADLINE, False, 4.0),
    ],
)
def test_nothing_is_pulled_for_a_while_from_a_source_that_cannot_be_read(
    cause: Cause, offers: bool, at: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Every prompt that it holds a part of would wait for nothing. Others are read from, and seem no slower."""
    made, other = pulls(token_s=2.0 / NUM_TOKENS), other_source()
    before = made.token_s
    pulled = [made.choose(request(), 0.0) for _ in range(2)]
    for number, prefix in enumerate(pulled, 1):
        assert prefix is not None
        assert prefix.until == pytest.approx(4.0 * number, rel=0.05), "twice the time to compute it, if it is alone"
        made.offered(prefix.pull, offers * len(prefix.pull.block_hashes or ()), 0.0)
        made.gave_up(prefix.pull, cause, at)
    assert caplog.text.count("for 10 s") == len(caplog.records) == 1
    assert made.choose(request(), at + 0.25) is None
    assert made.expected(request(), 0, at + 0.25) == 0
    assert made.choose(request(source=other), at + 0.25) is not None
    assert made.choose(request(), at + 9.9) is None
    assert made.choose(request(), at + 10.1) is not None
    assert made.token_s == before


@pytest.mark.parametrize("cause", [None, Cause.LEASE_LOST, Cause.CAPACITY, Cause.DEADLINE])
def test_a_source_that_answers_is_asked_again(cause: Cause | None) -> None:
    """It has evicted the prefix, lends too many already, or is slow; or the client has left."""
    made = pulls(when="always")
    prefix = begun(made)
    assert prefix is not None
    made.gave_up(prefix.pull, cause, 0.5)
    assert made.choose(request(), 0.6) is not None


def test_a_source_that_cannot_be_read_is_tried_ever_more_seldom_until_it_can() -> None:
    made, now, pauses = pulls(when="always"), 0.0, []
    for _ in range(7):
        prefix = made.choose(request(), now)
        assert prefix is not None
        made.gave_up(prefix.pull, Cause.WORKER_LOST, now)
        failed_at = now
        while not made.expected(request(), 0, now):
            now += 5.0
        pauses.append(now - failed_at)
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0]
    prefix = made.choose(request(), now)
    assert prefix is not None
    made.pulled(prefix.pull, now + 0.01)
    assert made.choose(request(), now + 0.02) is not None
    assert not made._pauses


def test_a_pause_is_forgotten_some_time_after_it() -> None:
    """Nothing is kept of sources that are gone."""
    made = pulls(when="always")
    for now in (0.0, 100.0):
        prefix = made.choose(request(source=other_source()), now)
        assert prefix is not None
        made.gave_up(prefix.pull, Cause.WORKER_LOST, now)
    assert len(made._pauses) == 1


@pytest.mark.parametrize("num", [20, 30])
def test_pulls_that_share_the_network_are_not_taken_for_slow_ones(num: int) -> None:
    """Each of them would take 0.042 s alone. Thirty take longer than one is expected to."""
    made, took_s = pulls(), 0.042 * num
    before = made.token_s
    for prefix in [begun(made) for _ in range(num)]:
        assert prefix is not None
        assert (prefix.expected_by < took_s) == (num == 30)
        made.pulled(prefix.pull, took_s)
        assert made.token_s < before, "also after the first one, which began alone"
    assert made.choose(request(), took_s) is not None


@pytest.mark.parametrize(("offers", "at"), [(False, 0.0), (True, PATIENCE_S)])
def test_others_do_not_look_cheap_beside_pulls_that_hang(offers: bool, at: float) -> None:
    """Their source has frozen before it has offered anything, or later. They take nothing of the network."""
    made, alone = pulls(), pulls()
    for _ in range(10):
        assert (begun(made) if offers else made.choose(request(), 0.0)) is not None
    for each in (made, alone):
        prefix = each.choose(request(source=other_source()), at)
        assert prefix is not None
        each.offered(prefix.pull, NUM_TOKENS // BLOCK_SIZE - 1, at)
        each.pulled(prefix.pull, at + 0.1)
    assert made.token_s == alone.token_s


def test_pulls_that_hang_do_not_prolong_the_patience_with_others() -> None:
    """Else each would hang for longer than the one before."""
    made = pulls(token_s=2.0 / NUM_TOKENS)
    for number in range(5):
        began = 4.0 * number
        prefix = made.choose(request(source=other_source()), began)
        assert prefix is not None
        assert began < prefix.expected_by == prefix.until < began + 4.0


def test_nothing_is_pulled_from_a_source_while_a_pull_from_it_hangs() -> None:
    """Whether or not it has been offered blocks, and until it has ended."""
    made = pulls(when="always")
    hanging = begun(made)
    assert hanging is not None
    assert made.expected(request(), 0, 0.9 * PATIENCE_S) > 0
    assert made.expected(request(), 0, PATIENCE_S) == 0
    assert made.choose(request(), PATIENCE_S) is None
    assert made.choose(request(source=other_source()), PATIENCE_S) is not None
    made.pulled(hanging.pull, 1.1 * PATIENCE_S)
    assert made.choose(request(), 1.1 * PATIENCE_S) is not None


def given_up(made: PrefixPulls, cause: Cause | None, at: float) -> Pull:
    """A pull that was begun at 0 s and is given up while its read, which begins at block 0, is under way."""
    prefix = begun(made)
    assert prefix is not None
    pull = prefix.pull
    request, attempt = pull.key
    pull.blocks_ready(
        BlocksReady(
            request=request, attempt=attempt, lease=LeaseId("l"), epoch=1, start=0, block_ids=(7,), num_blocks=1
        )
    )
    pull.reserve((3,))
    pull.abandon(cause, "given up")
    made.gave_up(pull, cause, at)
    return pull


def test_a_pull_hangs_until_its_read_has_ended_too() -> None:
    """Else each prompt that its source holds a part of would wait in vain, one after the other."""
    made, at = pulls(when="always"), PATIENCE_S + 0.1
    hanging = given_up(made, Cause.DEADLINE, PATIENCE_S)
    assert len(made) == 0
    assert made.expected(request(), 0, at) == 0
    assert made.choose(request(), at) is None
    assert made.choose(request(source=other_source()), at) is not None
    hanging.read_done(0, "the fence")
    assert made.choose(request(), at) is not None
    assert not made._lingering


def test_a_pull_that_is_given_up_before_it_hangs_stops_no_other_until_then() -> None:
    """Its client has left. A sound read ends soon, and one that does not end hangs."""
    made = pulls(when="always")
    left = given_up(made, None, 0.1)
    assert made.choose(request(), 0.2) is not None
    assert made.choose(request(), PATIENCE_S) is None
    left.read_done(0, None)
    assert made.choose(request(), PATIENCE_S) is not None


@pytest.mark.parametrize(("num_here", "expected"), [(0, 1584), (800, 1584), (1568, 0), (1584, 0)])
def test_it_is_known_beforehand_what_is_pulled(num_here: int, expected: int) -> None:
    """Unless too little is left to pull. What was decided once is not expected again."""
    made = pulls()
    asked = request()
    assert made.expected(asked, num_here, 0.0) == expected
    assert (made.expected(asked, num_here, 0.0), asked.prefix_tried) == (expected, False)
    asked.num_computed = num_here
    prefix = made.choose(asked, 0.0)
    assert (0 if prefix is None else BLOCK_SIZE * len(prefix.pull.block_hashes or ())) == expected
    assert made.expected(asked, num_here, 0.0) == 0


def test_nothing_is_expected_where_nothing_is_pulled() -> None:
    assert pulls(when="never").expected(request(), 0, 0.0) == 0
    assert pulls(when="always", token_s=1e-9).expected(request(), 0, 0.0) == 1584
    assert pulls(token_s=1e-9).expected(request(), 0, 0.0) == 0


def test_prefixes_that_are_too_short_teach_nothing() -> None:
    made = pulls()
    before = made.token_s
    assert [made.choose(request(33), 0.0) for _ in range(1000)] == [None] * 1000
    assert made.token_s == before


@pytest.mark.parametrize(("when", "expected"), [("always", True), ("never", False)])
def test_the_setting_decides_alone(when: When, expected: bool) -> None:
    made = pulls(token_s=1e-9, when=when)
    assert [pull(made, 0.03) for _ in range(10)] == [expected] * 10


def test_many_short_pulls_do_not_make_pulls_free() -> None:
    """After days of them, the network is congested, or a source is reachable by TCP only."""
    made = pulls()
    assert all(pull(made, 0.004) for _ in range(5000))
    assert made.token_s > 0
    assert sum(pull(made, 0.8) for _ in range(200)) < 50


@pytest.mark.parametrize("is_valid", [False, True])
def test_beyond_a_number_of_pulls_a_prefix_waits_for_the_end_of_one(is_valid: bool) -> None:
    """The number is that of `docs/protocol.md`. A prompt that was not let in may be asked about again."""
    made = pulls(when="always")
    under_way = [begun(made) for _ in range(64)]
    late = request()
    assert made.expected(late, 0, 0.5) == 0
    assert made.choose(late, 0.5) is None
    assert not late.prefix_tried
    assert len(made) == 64
    first = under_way[0]
    assert first is not None
    if is_valid:
        made.pulled(first.pull, 0.5)
    else:
        made.gave_up(first.pull, Cause.LEASE_LOST, 0.5)
    assert made.expected(late, 0, 0.5) > 0
    prefix = made.choose(late, 0.5)
    assert prefix is not None
    assert prefix.request is late
    assert made.choose(request(), 0.5) is None
