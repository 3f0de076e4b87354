"""What the record of the fault matrix counts."""

from __future__ import annotations

from typing import Any

import pytest
from chaos.theatre import FAULTS, RANK_FAULTS, Theatre, begun_anew_if_collapsed, says_that_ucx_aborts

from benchmarks.chaos import aborts, counted


def test_cells_are_counted_by_transport_and_fault() -> None:
    cases = [
        ("test_the_stream_goes_on[nixl-kill-mid-chunk-decode]", True),
        ("test_the_stream_goes_on[nixl-kill-queued-prefill]", True),
        ("test_the_stream_goes_on[nixl-tcp-cut-in-running-decode]", True),
        ("test_the_stream_goes_on_from_a_worker_that_it_leaves[zmq-cut-pulling-old]", False),
        ("test_a_gateway_is_gone_and_another_one_does_not_notice[zmq-freeze-queued]", True),
        ("test_the_end_of_its_time_names_the_state[zmq-offered]", True),
        ("test_a_reset_while_tokens_flow_restarts_nobody[nixl]", True),
        ("test_a_poisonous_request_is_refused[decode]", True),
    ]
    assert counted(cases) == {
        "passed": {
            "nixl": {"kill": 2, "a reset while tokens flow restarts nobody": 1, "a poisonous request is refused": 1},
            "nixl-tcp": {"cut-in": 1},
            "zmq": {"freeze": 1, "the end of its time names the state": 1},
        },
        "failed": {"zmq": {"cut": 1}},
    }


def test_workers_of_two_ranks_are_a_transport_of_their_own() -> None:
    cases = [
        ("test_the_stream_goes_on[nixl-ranks-kill-queued-prefill]", True),
        ("test_the_stream_goes_on_without_a_rank[prefill-queued-kill-rank-nixl-ranks]", True),
        ("test_the_stream_goes_on_without_a_rank[decode-mid-chunk-freeze-rank-nixl-ranks]", True),
        ("test_a_gateway_is_gone_and_another_one_does_not_notice[nixl-ranks-freeze-queued]", True),
        ("test_the_end_of_its_time_names_the_state[nixl-ranks-offered]", False),
    ]
    assert counted(cases) == {
        "passed": {"nixl-ranks": {"kill": 1, "kill-rank": 1, "freeze-rank": 1, "freeze": 1}},
        "failed": {"nixl-ranks": {"the end of its time names the state": 1}},
    }
    assert aborts([(name, "prefill at 10.0.0.1:1 was aborted by UCX\n") for name, _ in cases]) == {"nixl-ranks": 5}


@pytest.mark.parametrize("fault", [*FAULTS, *RANK_FAULTS])
@pytest.mark.parametrize("state", ["mid-chunk", "cut"])
def test_every_fault_of_the_matrix_is_known(fault: str, state: str) -> None:
    name = f"test_the_stream_goes_on[zmq-{fault}-{state}-source]"
    assert counted([(name, True)])["passed"] == {"zmq": {fault: 1}}


def test_aborts_are_counted_by_transport() -> None:
    told = "decode at 10.154.99.3:39695 was aborted by UCX\n"
    cases = [
        ("test_the_stream_goes_on[nixl-kill-mid-chunk-decode]", ""),
        ("test_the_stream_goes_on[nixl-tcp-reset-running-decode]", f"something\n{told}{told}"),
        ("test_a_reset_while_tokens_flow_restarts_nobody[nixl-tcp]", told),
    ]
    assert aborts(cases) == {"nixl": 0, "nixl-tcp": 3}


@pytest.mark.parametrize(
    ("line", "aborts_there"),
    [
        ("[vm:31487:0:31635] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout", True),
        ("[vm:8383 :0:8413]     arbiter.c:36   Assertion `ucs_arbiter_group_is_empty(group)' failed", True),
        ("[vm:211:0:240]       stubs.c:21   Assertion `0' failed", True),
        ("[1795478367.865903] [vm:31502:0] ucp_worker.c:3071 UCX  WARN  worker 0x7f8e: 1 pending operations", False),
        ("[vm:31487:0:31635] Caught signal 11 (Segmentation fault: address not mapped to object)", False),
        ("2026-11-23 23:59:25,898 INFO baton prefill ready", False),
    ],
)
def test_an_abort_by_ucx_is_told_by_what_ucx_prints(line: str, aborts_there: bool) -> None:
    assert says_that_ucx_aborts(line) is aborts_there


class PlayedStage:
    """A stage on which UCX has aborted a worker, and a test that fails, before its fault or after."""

    def __init__(self, num_collapses: int, befallen: bool, transport: str = "nixl") -> None:
        self.transport = transport
        self.befallen = False
        self.num_tries = 0
        self.actors = [self]
        self._num_collapses = num_collapses
        self._befalls = befallen

    collapsed = Theatre.collapsed

    def aborted_by_ucx(self) -> bool:
        return self.num_tries <= self._num_collapses

    async def test(self, stage: Any, answer: str) -> None:
        assert stage is self
        assert answer == "right"
        self.num_tries += 1
        self.befallen = self._befalls
        assert self.num_tries > self._num_collapses, "it fails"


@pytest.mark.parametrize("num_collapses", [0, 1, 2])
async def test_a_stage_that_collapsed_before_the_fault_is_put_up_again(num_collapses: int) -> None:
    stage = PlayedStage(num_collapses, befallen=False)
    await begun_anew_if_collapsed(stage.test)(stage, answer="right")
    assert stage.num_tries == num_collapses + 1


@pytest.mark.parametrize(
    ("stage", "num_tries"),
    [
        pytest.param(PlayedStage(3, befallen=False), 3, id="thrice"),
        pytest.param(PlayedStage(1, befallen=True), 1, id="after the fault"),
        pytest.param(PlayedStage(1, befallen=False, transport="zmq"), 1, id="no UCX"),
    ],
)
async def test_every_other_failure_is_one(stage: PlayedStage, num_tries: int) -> None:
    with pytest.raises(AssertionError, match="it fails"):
        await begun_anew_if_collapsed(stage.test)(stage, answer="right")
    assert stage.num_tries == num_tries
