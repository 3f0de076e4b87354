"""Tables that combine several recorded runs: README's, least favourable first, and that of the soaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.aim_table import AIMED, BESIDE_VLLM_AIMS, aims, outcome
from benchmarks.record import RECORDED_ONCE, Run, instructions
from benchmarks.result_tables import Figures, Row, bound_threads, table

PAIRINGS = (("baton pair", "vllm single"), ("baton pair", "vllm pair"), ("baton colocated", "vllm single"))
"""(ours, theirs), least favourable first: with the cores of a pair one could also run a single vLLM."""
_CALLED = {"baton pair": "a pair", "vllm pair": "a pair", "baton colocated": "one worker", "vllm single": "one vLLM"}


def beside_vllm(*runs: Run | None) -> str:
    """Baton's tokens per second, time to the first token and gaps in multiples of vLLM's.

    From the least to the most over the requests at a time: medians of the rounds, in brackets any round. The run in
    which Baton has the fewest tokens per second comes first. Runs with vLLM's threads bound to cores are marked with *.
    """
    groups = []
    for run in filter(None, runs):
        workload, machine, figures = run["workload"], run["machine"], run["figures"]["runs"]
        at_a_time = " ".join(map(str, workload["concurrency"]))
        cpu = machine["cpu"].replace("(R)", "").removesuffix(" Processor")
        on = f"{instructions(machine)} ({cpu})"
        what = f"{workload['model']}, {workload['dtype']}, {at_a_time} at a time, {on}"
        what, least, rows = f"{what} *" if bound_threads(run) else what, [], []
        for ours, theirs in PAIRINGS:
            of = [_ratios(figures, ours, theirs, name) for name in ("output_tokens_per_s", "ttft_p50_s", "itl_p99_s")]
            if of[0]:
                rounds = min(len(each) for each in of[0])
                rows.append([what, f"{_CALLED[ours]} / {_CALLED[theirs]}", str(rounds), *map(_span, of)])
                least.append(min(map(median, of[0])))
                what = ""
        groups.append((min(least), rows))
    rows = [row for _, group in sorted(groups) for row in group]
    missed = [f"* {aim.told}: {outcome(aim, [*filter(None, runs)])}" for aim in BESIDE_VLLM_AIMS]
    head = ["model, weights, requests, CPU", "systems", "rounds", "tokens/s", "first token", "gaps, P99"]
    return "\n".join([table(head, rows), "The aims, by medians, at all points of these runs:\n", *missed, ""])


def _ratios(runs: Sequence[Row], ours: str, theirs: str, figure: str) -> list[list[float]]:
    """The ratios of the rounds in which both took part, for each number of requests at a time."""
    figures: dict[tuple[int, int], dict[str, float]] = {}
    for each in runs:
        figures.setdefault((each["concurrency"], each["round"]), {})[each["system"]] = each[figure]
    ratios: dict[int, list[float]] = {}
    for (concurrency, _), of in figures.items():
        if {ours, theirs} <= of.keys():
            ratios.setdefault(concurrency, []).append(of[ours] / of[theirs])
    return list(ratios.values())


def _span(ratios: Sequence[Sequence[float]]) -> str:
    middle, every = [median(each) for each in ratios], [each for of in ratios for each in of]
    return f"{min(middle):.2f} to {max(middle):.2f} ({min(every):.2f} to {max(every):.2f})"


def handoff(*runs: Run) -> str:
    """The time that the separate processes add to an engine in one process."""
    spreads = {
        "time to first token, engine alone, in one process": "isolated_ttft_ms",
        "time to first token over HTTP, through gateway and prefill worker": "ttft_ms",
        "gap between tokens in the decode worker": "gap_ms",
        "gap between first and second token: pull, settle and one step": "first_gap_ms",
    }
    rows = [
        [name, *("{p50:.1f} ms (P90 {p90:.1f})".format(**run["figures"][figure]) for run in runs)]
        for name, figure in spreads.items()
    ]
    steps = [f"{run['figures']['first_gap_in_decode_steps']:.2f}" for run in runs]
    rows.append(["the same, in decode steps (the aim: less than 2)", *steps])
    names = {"demo": "demo model (0.5 M weights)", "15m": "random Llama (15 M weights)"}
    return table(["", *(names[run["workload"]["model"]] for run in runs)], rows)


def memory(figures: Figures) -> str:
    """Failed or other answers, and preemptions, in each way of running out of memory."""
    ways = [each for each in figures.values() if isinstance(each, dict)]
    failed = sum(each["failed"] + each["different_outputs"] for each in ways)
    usual, *pressed = (f"{100 * each['preemptions_share_of_requests']:.0f}" for each in ways)
    return f"{failed}; {usual} ({' and '.join(pressed)} where memory is over-committed on purpose)"


def reserve(figures: Figures) -> str:
    """Results of the default reserve, over the workloads."""
    at = [each["0.05"] for each in figures.values()]
    used = sorted(100 * each["blocks_used_share"] for each in at)
    return f"{100 * max(each['preempted_share'] for each in at):.1f} %; {used[0]:.0f} to {used[-1]:.0f} %"


def scheduler_cost(figures: Figures) -> str:
    """The scheduling cost of a step with many sequences."""
    queue = (figures["queued"]["100000"]["p50_us"] - figures["queued"]["0"]["p50_us"]) / 1e3
    return f"{figures['running']['1024']['p50_us'] / 1e3:.2f} ms; {round(queue, 1) + 0.0:.1f} ms"  # + 0.0: no "-0.0"


def scheduler_aim(figures: Figures) -> str:
    """What `scheduler_cost` returns, and whether it misses the aim."""
    missed = ", missed" if figures["running"]["1024"]["p50_us"] > 1000 else ""
    return f"scheduling a step of 1,024 sequences (the aim: 1 ms{missed}); what 100,000 queued requests add to a step"


AT_A_GLANCE: tuple[tuple[str, str | Callable[[Figures], str], str | Callable[[Figures], str]], ...] = (
    (
        "recovery",
        "kill -9 of a decode worker: its stream stands still for",
        "{kill[stall_ms][p50]:.0f} ms, at most {kill[stall_ms][max]:.0f}",
    ),
    (
        "recovery",
        "freeze of a decode worker: its stream stands still for",
        "{freeze[stall_ms][p50]:.0f} ms, at most {freeze[stall_ms][max]:.0f}",
    ),
    (
        "idle",
        "CPU use of the idle stack, share of one core",
        "{total_percent_of_a_core[p50]:.2f} % "
        "({total_percent_of_a_core[min]:.2f} to {total_percent_of_a_core[max]:.2f})",
    ),
    (
        "interference-long-prompt",
        "streams beside a prompt of 32,000 tokens in chunks of 256, P99 of the gap: on a worker of their own / on the "
        "same; the prompt's first token",
        "{disaggregated-256[itl_during][p99_ms]:.0f} / {colocated-256[itl_during][p99_ms]:.0f} ms; "
        "{disaggregated-256[long_ttft_s]:.1f} / {colocated-256[long_ttft_s]:.1f} s",
    ),
    (
        "interference-flood",
        "interactive streams, P99 of the gap: alone / beside a flood of the tier `batch`",
        "{alone[itl][p99_ms]:.0f} / {batch-flood[itl][p99_ms]:.0f} ms",
    ),
    (
        "memory",
        "at {default[demand_over_memory]:.1f} times the KV memory: failed or other answers; preemptions in a hundred "
        "requests",
        memory,
    ),
    (
        "worker-memory",
        "a worker of the 0.5B model in float32, beyond its weights and its KV cache; at its peak, with them",
        "{rows[2][beyond_mib]:,} MiB; {rows[2][peak_mib]:,} MiB",
    ),
    (
        "reserve",
        "simulated, with `--memory-reserve` 0.05: requests preempted, at most; KV blocks in use",
        reserve,
    ),
    (
        "scheduler-cost",
        scheduler_aim,
        scheduler_cost,
    ),
)
"""(record, what is told or a function of the figures, the form of its figures or a function of them)."""
GLANCED = tuple(dict.fromkeys(name for name, _, _ in AT_A_GLANCE))


def at_a_glance(*runs: Run | None) -> str:
    """One or two lines of each run that has been recorded."""
    found = {name: run["figures"] for name, run in zip(GLANCED, runs, strict=True) if run is not None}
    rows = []
    for name, told, form in AT_A_GLANCE:
        if (figures := found.get(name)) is not None:
            value = form(figures) if callable(form) else form.format(**figures)
            what = told(figures) if callable(told) else told.format(**figures)
            once = ", made once" if name in RECORDED_ONCE else ""
            rows.append([what, value, f"[record](benchmarks/results/{name}.json){once}"])
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


BESIDE_VLLM = (
    "versus-0.5b-float32-fixed-baton-colocated-vllm-single-avx2",
    "versus-0.5b-float32-fixed-baton-pair-vllm-pair-avx2",
    "versus-0.5b-float32-fixed-baton-colocated-vllm-single-amx",
    "versus-0.5b-float32-fixed-baton-pair-vllm-pair-amx",
    "versus-0.5b-bfloat16-fixed",
    "versus-0.5b-bfloat16-fixed-amx",
    "versus-0.5b-bfloat16-fixed-baton-colocated-vllm-single-amx",
    "versus-0.5b-bfloat16-fixed-baton-pair-vllm-pair-amx",
    "versus-15m-float32-fixed",
    "versus-15m-bfloat16-fixed",
    "versus-15m-bfloat16-fixed-amx",
    "versus-15m-float32-fixed-amx",
    "versus-15m-float32-fixed-amx-as-avx2",
    "versus-15m-float32-fixed-avx2",
)
OVERVIEWS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "handoff": (("handoff-demo", "handoff-15m"), handoff),
    "soaks": (("soak-zmq", "soak-nixl", "soak-nixl-tcp"), soaks),
}
"""Name of a part of the documents → (runs that it shows, function that makes it)."""
SUMMARIES: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "aims": (AIMED, aims),
    "beside vLLM": (BESIDE_VLLM, beside_vllm),
    "at a glance": (GLANCED, at_a_glance),
}
"""The same for parts without what is not recorded, and without the lines that name the runs: their rows or the text
beside them link to these."""
