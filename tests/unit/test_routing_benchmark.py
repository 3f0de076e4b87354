"""What the benchmark of routing plays, and what it makes of it."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from benchmarks.memory import counts
from benchmarks.routing import COMPUTED, POLICIES, WORKLOADS, Dialogue, multi_turn, ratios, shared_prefix, unshared


def run(workload: str, routing: str, number: int, figure: float, **changes: float) -> dict[str, object]:
    """One run, all of whose figures are the same."""
    figures = dict.fromkeys(("ttft_mean_ms", "ttft_p99_ms", "tokens_computed"), figure) | changes
    return {"workload": workload, "routing": routing, "round": number, "requests": 10, **figures}


def paired(*pairs: tuple[float, float]) -> list[dict[str, object]]:
    """Rounds of every workload, as they alternate; each pair is (expected, in turn)."""
    runs = []
    for number, pair in enumerate(pairs):
        for name in WORKLOADS:
            both = [run(name, policy, number, figure) for policy, figure in zip(POLICIES, pair, strict=True)]
            runs += both if number % 2 else both[::-1]
    return runs


# --- ratios ----------------------------------------------------------------------------------------------------------


def test_a_ratio_is_of_the_two_runs_of_a_round() -> None:
    """Rounds differ by more than policies do: of the medians, 30 / 20, the ratio would be another."""
    found = ratios(paired((10.0, 20.0), (90.0, 100.0), (30.0, 10.0)))
    assert found.keys() == WORKLOADS.keys()
    for each in found.values():
        assert each == dict.fromkeys(("ttft_mean_ms", "ttft_p99_ms", "tokens_computed"), 0.9)


def test_the_order_of_the_runs_is_nothing_to_the_ratios() -> None:
    runs = paired((10.0, 20.0), (90.0, 100.0), (30.0, 10.0))
    random.Random(0).shuffle(runs)
    assert ratios(runs)["unshared"]["ttft_mean_ms"] == 0.9


def test_workloads_and_figures_have_ratios_of_their_own() -> None:
    runs = paired((10.0, 20.0))
    for each in runs:
        if each["workload"] == "unshared" and each["routing"] == "expected":
            each |= {"ttft_p99_ms": 25.0, "tokens_computed": 20.0}
    found = ratios(runs)
    assert found["unshared"] == {"ttft_mean_ms": 0.5, "ttft_p99_ms": 1.25, "tokens_computed": 1.0}
    assert set(found["multi-turn"].values()) == set(found["shared-prefix"].values()) == {0.5}


def test_a_run_that_is_missing_is_not_passed_over() -> None:
    runs = paired((1.0, 2.0), (1.0, 2.0))
    with pytest.raises(KeyError):
        ratios(runs[:-1])


# --- what is played --------------------------------------------------------------------------------------------------


def common_prefix(one: Dialogue, other: Dialogue) -> int:
    """Tokens with which both begin."""
    pairs = zip(itertools.chain(*one.turns), itertools.chain(*other.turns), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("make", WORKLOADS.values(), ids=WORKLOADS)
def test_both_policies_are_played_the_same(make: Callable[[random.Random, float], list[Dialogue]]) -> None:
    assert make(random.Random(3), 0.2) == make(random.Random(3), 0.2) != make(random.Random(4), 0.2)
    starts = [each.start_s for each in make(random.Random(3), 0.5)]
    assert starts == sorted(starts)
    assert starts[0] > 0


def test_conversations_have_five_turns() -> None:
    dialogues = multi_turn(random.Random(0), 1.0)
    assert len(dialogues) == 24
    assert {(len(each.turns), len(each.think_s)) for each in dialogues} == {(5, 5)}
    assert {len(turn) for each in dialogues for turn in each.turns} == {150}
    assert max(common_prefix(a, b) for a, b in itertools.combinations(dialogues, 2)) < 16


def test_a_prompt_shares_640_tokens_with_those_of_its_system_and_nothing_with_others() -> None:
    dialogues = shared_prefix(random.Random(0), 1.0)
    assert len(dialogues) == 100
    assert {sum(map(len, each.turns)) for each in dialogues} == {740}
    shared = {common_prefix(a, b) // 16 for a, b in itertools.combinations(dialogues, 2)}
    assert shared == {0, 640 // 16}, "in blocks of 16"
    assert len({each.turns[0][:640] for each in dialogues}) == 8


def test_other_prompts_share_nothing() -> None:
    dialogues = unshared(random.Random(0), 1.0)
    assert len(dialogues) == 80
    lengths = [sum(map(len, each.turns)) for each in dialogues]
    assert min(lengths) >= 100
    assert max(lengths) < 700
    assert max(common_prefix(a, b) for a, b in itertools.combinations(dialogues, 2)) < 16


# --- what workers have computed --------------------------------------------------------------------------------------


@contextmanager
def exporting(text: str) -> Iterator[str]:
    """A process's metrics, at an address."""

    class Handler(BaseHTTPRequestHandler):
        paths: ClassVar[list[str]] = []

        def do_GET(self) -> None:
            self.paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()
    assert Handler.paths == ["/metrics"]


def test_counters_are_summed_over_labels() -> None:
    text = f'# HELP {COMPUTED} tokens\n{COMPUTED}{{role="a b"}} 3.0\n{COMPUTED}{{role="c"}} 4e2\nbaton_other_total 7\n'
    with exporting(text) as address:
        assert counts(address) == {COMPUTED: 403.0, "baton_other_total": 7.0}
