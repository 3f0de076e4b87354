"""The measurement of a step outside the model, for a moment: each part is timed, for each number of streams."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models import llama_15m
from benchmarks.process import Process
from benchmarks.step_overhead import KINDS, in_turns, worker_options


async def test_every_part_of_a_step_is_timed(tmp_path: Path) -> None:
    with Process("benchmarks.step_overhead", worker_options(llama_15m(tmp_path), 3)) as worker:
        taken = await in_turns(worker, [2, 3], rounds=1, seconds=0.4)
    assert taken.keys() == {"2", "3"}
    for kinds in taken.values():
        assert kinds.keys() == KINDS.keys()
        for kind, figures in kinds.items():
            [wall], [best], [draw], [outside] = (
                figures[name] for name in ("wall_us", "best_us", "draw_us", "outside_us")
            )
            assert outside == wall - best - draw > 0
            assert best > 0
            assert (draw == 0) == (kind == "greedy")
            assert figures["read_us"][0] > 0
            assert figures["best_over_read"][0] > 0
