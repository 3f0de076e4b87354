"""Tables that combine several recorded runs: README's, least favourable first, and that of the soaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from benchmarks.record import Run
from benchmarks.result_tables import of_rounds, table


def beside_vllm(*runs: Run) -> str:
    """Output tokens per second in multiples of vLLM's: from the least to the most over the requests at a time.

    Medians of the rounds, then the least and the most of any round.
    """
    rows = []
    for run in runs:
        row = [f"{run['workload']['dtype']}, {' '.join(map(str, run['workload']['concurrency']))} at a time"]
        for pair in ("baton pair", "baton colocated"):
            of = [each["output_tokens_per_s"] for each in run["figures"]["ratios"] if each["ours"] == pair]
            middle = f"{min(each['ratio'] for each in of):.2f} to {max(each['ratio'] for each in of):.2f} times"
            least, most = min(each["ratio_min"] for each in of), max(each["ratio_max"] for each in of)
            row.append(f"{middle} ({least:.2f} to {most:.2f})")
        rows.append(row)
    return table(["weights", "a pair beside vLLM's pair", "one worker beside one vLLM"], rows)


def handoff(*runs: Run) -> str:
    """The time that the separate processes add to an engine in one process."""
    rows = [
        [name, *("{p50:.1f} ms (P90 {p90:.1f})".format(**run["figures"][figure]) for run in runs)]
        for name, figure in (
            ("time to first token, engine alone, in one process", "isolated_ttft_ms"),
            ("time to first token over HTTP, through gateway and prefill worker", "ttft_ms"),
            ("gap between tokens in the decode worker", "gap_ms"),
            ("gap between first and second token: pull, settle and one step", "first_gap_ms"),
        )
    ]
    steps = [f"{run['figures']['first_gap_in_decode_steps']:.1f}" for run in runs]
    rows.append(["the same, in decode steps (the aim: less than 2)", *steps])
    names = {"demo": "demo model (0.5 M weights)", "15m": "random Llama (15 M weights)"}
    return table(["", *(names[run["workload"]["model"]] for run in runs)], rows)


def recovery(run: Run) -> list[list[str]]:
    """Stalls and pauses of a stream whose decode worker fails or drains."""
    return [
        [
            name,
            f"{run['figures'][what]['stall_ms']['p50']:.0f} ms, at most {run['figures'][what]['stall_ms']['max']:.0f}",
        ]
        for what, name in (
            ("kill", "kill -9 of a decode worker: its stream stands still for"),
            ("freeze", "freeze of a decode worker: its stream stands still for"),
        )
    ]


def idle(run: Run) -> list[list[str]]:
    """CPU time of a stack without requests."""
    total = run["figures"]["total_percent_of_a_core"]
    name = "the whole stack without a request, of one core"
    return [[name, of_rounds(total, "{:.2f}", " %")]]


def long_prompt(run: Run) -> list[list[str]]:
    """Gaps in streams while a long prompt is computed."""
    apart, beside = (run["figures"][f"{mode}-512"]["itl_during"]["p99_ms"] for mode in ("disaggregated", "colocated"))
    name = "streams beside a prompt of 32,000 tokens, P99 of the gap: on a worker of their own / on the same"
    return [[name, f"{apart:.0f} / {beside:.0f} ms"]]


def flood(run: Run) -> list[list[str]]:
    """Latencies of interactive requests during a flood."""
    alone, beside = (run["figures"][name]["itl"]["p99_ms"] for name in ("alone", "batch-flood"))
    name = "interactive streams, P99 of the gap: alone / beside a flood of the tier `batch`"
    return [[name, f"{alone:.0f} / {beside:.0f} ms"]]


def memory(run: Run) -> list[list[str]]:
    """Results at twice the demand that fits into memory."""
    figures = {name: each for name, each in run["figures"].items() if isinstance(each, dict)}
    failed = sum(each["failed"] + each["different_outputs"] for each in figures.values())
    times = figures["default"]["demand_over_memory"]
    shares = {name: 100 * each["preemptions_share_of_requests"] for name, each in figures.items()}
    usual, *pressed = (f"{share:.0f}" for share in shares.values())
    name = f"at {times:.1f} times the KV memory: failed or other answers; preemptions in a hundred requests"
    return [
        [name, f"{failed}; {usual} ({' and '.join(pressed)} where memory is over-committed on purpose)"],
    ]


def reserve(run: Run) -> list[list[str]]:
    """Results of the default reserve, over the workloads."""
    at = [each["0.05"] for each in run["figures"].values()]
    preempted = 100 * max(each["preempted_share"] for each in at)
    used = sorted(100 * each["blocks_used_share"] for each in at)
    name = "5 % of the cache in reserve, on modelled time: preempted, at most; blocks in use"
    return [[name, f"{preempted:.1f} %; {used[0]:.0f} to {used[-1]:.0f} %"]]


def scheduler_cost(run: Run) -> list[list[str]]:
    """The scheduling cost of a step with many sequences."""
    figures = run["figures"]
    step = figures["running"]["1024"]["p50_us"] / 1e3
    queue = (figures["queued"]["100000"]["p50_us"] - figures["queued"]["0"]["p50_us"]) / 1e3
    name = "scheduling a step of 1,024 sequences (the aim: 1 ms); what 100,000 queued requests add to a step"
    return [[name, f"{step:.2f} ms; {round(queue, 1) + 0.0:.1f} ms"]]  # + 0.0: no "-0.0"


AT_A_GLANCE: dict[str, Callable[[Run], list[list[str]]]] = {
    "recovery": recovery,
    "idle": idle,
    "interference-long-prompt": long_prompt,
    "interference-flood": flood,
    "memory": memory,
    "reserve": reserve,
    "scheduler-cost": scheduler_cost,
}


def at_a_glance(*runs: Run | None) -> str:
    """One or two lines of each run that has been recorded."""
    rows = [
        [*row, f"[record](benchmarks/results/{name}.json)"]
        for (name, rows_of), run in zip(AT_A_GLANCE.items(), runs, strict=True)
        if run is not None
        for row in rows_of(run)
    ]
    return table(["", "measured", ""], rows)


def soaks(*runs: Run) -> str:
    """Results of traffic during random faults."""
    rows = []
    for run in runs:
        figures = run["figures"]
        faults = Counter[str]()
        for name, number in figures["faults"].items():
            faults[name.split()[0]] += number
        told = ", ".join(f"{name} {number}" for name, number in sorted(faults.items()))
        row = [run["workload"]["transport"], run["workload"]["requests"], told]
        rows.append([str(each) for each in (*row, figures["lost"], figures["wrong"], figures["near_ties"])])
    return table(["transport", "requests", "faults", "lost", "wrong", "near ties"], rows)


OVERVIEWS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "beside vLLM": (("versus-15m-float32-fixed", "versus-15m-bfloat16-fixed"), beside_vllm),
    "handoff": (("handoff-demo", "handoff-15m"), handoff),
    "soaks": (("soak-zmq", "soak-nixl", "soak-nixl-tcp"), soaks),
    "at a glance": (tuple(AT_A_GLANCE), at_a_glance),
}
"""Name of a part of the documents → (runs that it shows, function that makes it)."""
