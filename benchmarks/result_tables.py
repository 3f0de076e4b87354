"""The tables in the documents, each from a recorded run (`benchmarks/record.py`), as Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.record import Run
from common.runtime.kv_size import KNOWN_SHAPES

FORWARDER = "forwarder "
"""What precedes the number of streams in the name of a configuration of `benchmarks.gateway` without a gateway."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with this head and these rows."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def of_rounds(figure: dict[str, float], form: str, unit: str = "") -> str:
    """Median, and from the least to the most of the rounds."""
    middle, least, most = (form.format(figure[name]) for name in ("p50", "min", "max"))
    return f"{middle}{unit} ({least} to {most})"


def versus(run: Run) -> str:
    """Baton compared with vLLM: medians, and ratios of the rounds."""
    rows = []
    for each in run["figures"]["ratios"]:
        rounds = sum(
            of["system"] == each["ours"] and of["concurrency"] == each["concurrency"] for of in run["figures"]["runs"]
        )
        rate, ttft, itl = (each[name] for name in ("output_tokens_per_s", "ttft_p50_s", "itl_p99_s"))
        rows.append(
            [
                f"{each['ours']} / {each['theirs']}",
                str(each["concurrency"]),
                f"{rate['ours']:.1f} / {rate['theirs']:.1f}",
                f"**{rate['ratio']:.2f}** ({rate['ratio_min']:.2f} to {rate['ratio_max']:.2f})"
                if rounds > 1
                else f"**{rate['ratio']:.2f}** (one round)",
                f"{1e3 * ttft['ours']:.0f} / {1e3 * ttft['theirs']:.0f}",
                f"{1e3 * itl['ours']:.0f} / {1e3 * itl['theirs']:.0f}",
            ]
        )
    head = ["systems", "concurrency", "output tokens/s", "ratio", "TTFT p50, ms", "ITL P99, ms"]
    failed = Counter[str]()
    for each in run["figures"]["runs"]:
        failed[each["system"]] += each.get("failed", 0)
    note = ", ".join(f"{number} of {system}" for system, number in failed.items() if number)
    return table(head, rows) + (f"\nFailed requests: {note}.\n" if note else "")


def against(run: Run) -> str:
    """Show decode steps and decode attention of a tree beside those of another one."""
    rows = []
    for kind, each in ((kind, each) for kind, cases in run["figures"].items() for each in cases):
        ours, theirs = each["ms"]
        ratio = of_rounds(each["ratio"], "{:.2f}")
        rows.append([kind, ", ".join(map(str, each["case"])), f"{ours:.1f} / {theirs:.1f}", ratio])
    return table(["what", "case", "least ms, after / before", "ratio"], rows)


def step_overhead(run: Run) -> str:
    """The time of a step outside the model, by number of streams, with the parts of it inside the sampler."""
    head = ["streams", "sampling", "µs, median", "least", "µs of processor time"]
    head += ["`best`, µs", "`draw`, µs", "outside both, µs, median", "least", "`best` / a plain read"]
    rows = []
    for streams, kinds in run["figures"].items():
        for kind, each in kinds.items():
            row = [streams, kind, *(f"{each['wall_us'][name]:.0f}" for name in ("p50", "min"))]
            row += [f"{each[name]['p50']:.0f}" for name in ("cpu_us", "best_us", "draw_us")]
            row += [f"{each['outside_us'][name]:.0f}" for name in ("p50", "min")]
            rows.append([*row, f"{each['best_over_read']['p50']:.2f}"])
    return table(head, rows)


def routing_cost(run: Run) -> str:
    """CPU time of one choice of workers, by number of workers and by how many hold the prompt's beginning."""
    rows = [
        [
            f"{int(workers):,}",
            load,
            *(f"{each[f'choose_us_{holders}'] / 1000:.2f}" for holders in ("none", "20", "all")),
            f"{each['report_us']:.0f}",
        ]
        for load in ("idle", "busy")
        for workers, each in run["figures"][load].items()
    ]
    head = ["workers", "load", "prompt cached nowhere, ms", "by 20, ms", "by all, ms", "a heartbeat, µs"]
    return table(head, rows)


def steady(run: Run) -> str:
    """Memory of each process over the stages."""
    figures = run["figures"]
    rows = [
        [name, f"{values[0]:.0f}", f"{values[len(values) // 2]:.0f}", f"{values[-1]:.0f}"]
        for name, values in figures["resident_mib"].items()
    ]
    return table(["process", "MiB after the first stage", "half-way", "at the end"], rows)


def modes(run: Run) -> str:
    """One trace in every mode."""
    rows = [
        [
            name,
            f"{1e3 * each['ttft_mean_s']:.0f}",
            f"{1e3 * each['ttft_p99_s']:.0f}",
            f"{each['itl_p50_ms']:.0f}",
            f"{each['itl_p99_ms']:.0f}",
            f"{each['latency_mean_s']:.2f}",
            f"{each['tokens_per_s']:.0f}",
        ]
        for name, each in run["figures"].items()
    ]
    head = ["mode", "TTFT mean, ms", "TTFT P99", "ITL p50, ms", "ITL P99", "latency mean, s", "tokens/s"]
    return table(head, rows)


def interference(run: Run) -> str:
    """Gaps in streams while a long prompt is computed."""
    rows = [
        [
            name,
            f"{each['itl_before']['p99_ms']:.0f}",
            f"{each['itl_during']['p50_ms']:.0f}",
            f"{each['itl_during']['p99_ms']:.0f}",
            f"{each['long_ttft_s']:.1f}",
        ]
        for name, each in run["figures"].items()
    ]
    return table(["mode and chunk", "ITL P99 before, ms", "during: p50", "during: P99", "TTFT of the prompt, s"], rows)


def grammars(run: Run) -> str:
    """Gaps in streams while choices follow grammars: medians of the rounds, and the longest gap of all rounds."""
    rows = []
    for name, rounds in run["figures"].items():
        gaps = {when: [each[f"itl_{when}"] for each in rounds] for when in ("before", "during")}
        row = [name]
        for when in ("before", "during"):
            row.append(f"{statistics.median([each['p99_ms'] for each in gaps[when]]):.0f}")
            row.append(f"{statistics.median([each['max_ms'] for each in gaps[when]]):.0f}")
            row.append(f"{max(each['max_ms'] for each in gaps[when]):.0f}")
        ends = Counter(each["end"] for each in rounds)
        rows.append([*row, ", ".join(f"{end} {number}" for end, number in sorted(ends.items()))])
    head = [
        "the 16 choices",
        "before: P99, ms",
        "longest, median",
        "of all",
        "during: P99",
        "longest, median",
        "of all",
    ]
    return table([*head, "ends"], rows)


def kv_sizes() -> str:
    """Size of the KV of well-known models, with 16-bit elements."""
    rows = []
    for name, shape in KNOWN_SHAPES.items():
        layout = shape.layout(16, "auto")
        per_token = layout.block_bytes / layout.block_size
        rows.append([name, f"{per_token / 2**10:g} KiB", f"{per_token * 4096 / 2**30:g} GiB"])
    return table(["model", "a token", "4,096 tokens"], rows)


def gateway(run: Run) -> str:
    """One gateway process between scripted workers and clients, streaming; and a plain forwarder, if it was measured in
    turns with it."""
    rows = [
        [
            f"{streams.removeprefix(FORWARDER)}, forwarder" if streams.startswith(FORWARDER) else streams,
            of_rounds(each["added_p50_ms"], "{:.2f}"),
            of_rounds(each["added_p99_ms"], "{:.1f}"),
            of_rounds(each["tokens_per_s"], "{:,.0f}"),
            of_rounds(each["moderate_cpu_us_per_token"], "{:.0f}"),
            of_rounds(each["cpu_us_per_token"], "{:.0f}"),
            f"{each['gateway_share']['p50']:.0%}".replace("%", " %"),
        ]
        for streams, each in run["figures"].items()
        if streams.removeprefix(FORWARDER).isdigit()
    ]
    head = [
        "open streams",
        "added, p50, ms",
        "P99",
        "tokens/s at most",
        "µs a token, moderate pace",
        "at most",
        "of a core",
    ]
    return table(head, rows)


def gateway_requests(run: Run) -> str:
    """The same, with short answers."""
    figures = run["figures"]["requests"]
    share = f"{figures['gateway_share']['p50']:.0%}".replace("%", " %")
    row = [of_rounds(figures["requests_per_s"], "{:.0f}"), of_rounds(figures["cpu_us_per_request"], "{:.0f}"), share]
    return table(["requests/s", "µs a request", "of a core"], [row])


def interval(values: Sequence[float], form: str = "{:.1f}") -> str:
    """The median, with minimum and maximum if there is more than one value."""
    if len(values) == 1:
        return form.format(values[0])
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def overload(run: Run) -> str:
    """Goodput over load: medians with the range of the rounds, sums of counts, and the time to a refusal as median of
    the rounds' medians / maximum of all rounds."""
    runs = run["figures"]["runs"]
    rows = []
    for share in sorted({each["share"] for each in runs}):
        of = [each for each in runs if each["share"] == share]
        refusals = [each["refusal_s"] for each in of if each["refusal_s"]]
        rows.append(
            [
                f"{share:g}",
                f"{statistics.median(each['rate'] for each in of):.1f}",
                interval([each["goodput"] for each in of]),
                f"{sum(each['accepted'] for each in of)}",
                f"{sum(each['refused'] for each in of)}",
                interval([100 * each["refused"] / each["requests"] for each in of], "{:.0f}"),
                f"{sum(each['neither'] for each in of)}",
                interval([100 * each["accepted_that_met_the_target"] for each in of], "{:.0f}"),
                f"{1e3 * statistics.median(each['p50'] for each in refusals):.0f} / "
                f"{1e3 * max(each['max'] for each in refusals):.0f}"
                if refusals
                else "",
            ]
        )
    head = [
        "of the closed loop's rate",
        "requests/s",
        "good requests/s",
        "accepted",
        "refused",
        "of all, %",
        "failed",
        "of the accepted, on time, %",
        "ms to a refusal, p50 / most",
    ]
    return table(head, rows)


def autoscale(run: Run) -> str:
    """Effects of the load step, scaled by the rules and by the queue alone: the worst run, unless stated otherwise."""
    rows = []
    for name, runs in run["figures"].items():

        def worst(figure: str, runs: Sequence[Run] = runs) -> float:
            return float(max(each[figure] for each in runs))

        rows.append(
            [
                name,
                f"{worst('seconds_until_needed_are_asked_for'):.0f} s",
                f"{worst('seconds_until_the_target_is_met'):.0f} s",
                f"{worst('most_replicas'):.0f}",
                ", ".join(str(each["last_replicas"]) for each in runs),
                ", ".join(str(each["changes_of_direction"]) for each in runs),
                f"{worst('p90_ttft_s_after'):.2f} s",
                f"{worst('refused'):.0f}",
            ]
        )
    head = ["scaled by", "four are asked for after", "the target is met after", "most", "in the end, each run"]
    return table([*head, "changes of direction, each run", "TTFT P90 from then on", "refused"], rows)


def recovery(run: Run) -> str:
    """Times to detect a fault, and the stalls and pauses of streams."""
    names = {
        ("kill", "detect_ms"): "kill -9 of the decode worker: noticed after",
        ("kill", "stall_ms"): "the stream stands still for",
        ("freeze", "detect_ms"): "freeze of the decode worker: noticed after",
        ("freeze", "stall_ms"): "the stream stands still for",
        ("move-500", "pause_ms"): "a sequence of 500 tokens moves: longest gap between tokens",
        ("move-4000", "pause_ms"): "a sequence of 4,000 tokens moves: the same",
        ("move-4000", "gap_ms"): "for comparison: gap between tokens of a stream of 4,000",
        ("gateway", "free_ms"): "kill -9 of a gateway with four streams: the workers hold nothing of it after",
    }
    figures = run["figures"]
    rows = []
    for (what, figure), name in names.items():
        found = figures[what][figure]
        digits = 1 if found["p50"] < 100 else 0
        rows.append([name, f"{found['p50']:.{digits}f} ms", f"{found['max']:.{digits}f} ms"])
    return table(["", "p50", f"longest of {run['workload']['rounds']}"], rows)


def matrix(run: Run) -> str:
    """Number of passed cells of the fault matrix, by fault and transport."""
    passed, failed = run["figures"]["passed"], run["figures"]["failed"]
    transports = list(passed)
    faults = sorted({fault for by in (passed, failed) for each in by.values() for fault in each})

    def told(transport: str, of: Sequence[str]) -> str:
        good, bad = (sum(by.get(transport, {}).get(fault, 0) for fault in of) for by in (passed, failed))
        return f"{good}, and {bad} failed" if bad else str(good)

    rows = [[fault, *(told(transport, [fault]) for transport in transports)] for fault in faults]
    rows.append(["all", *(told(transport, faults) for transport in transports)])
    aborted = run["figures"]["aborted_by_ucx"]
    rows.append(["workers that UCX aborted meanwhile", *(str(aborted[transport]) for transport in transports)])
    return table(["fault", *transports], rows)


def restarts(run: Run) -> str:
    """Outcomes of requests in flight while a process of `baton serve` died, or was frozen."""
    cases = run["figures"]["cases"]
    rows = [
        [f"{case['role']} worker {case['befalls']}", str(run["workload"]["requests"])]
        + [f"{case[name]:.0f}" for name in ("failovers", "lost", "wrong", "near_ties")]
        for case in sorted(cases, key=lambda case: (case["role"], case["befalls"]))
    ]
    return table(["", "requests", "went on elsewhere", "lost", "wrong", "near ties"], rows)


TABLES: dict[str, Callable[[Run], str]] = {
    "restarts": restarts,
    "autoscale": autoscale,
    "recovery": recovery,
    "chaos": matrix,
    "gateway": gateway,
    "overload": overload,
    "versus-15m-bfloat16-fixed": versus,
    "versus-15m-float32-fixed": versus,
    "versus-15m-bfloat16-sharegpt": versus,
    "versus-0.5b-bfloat16-fixed": versus,
    "versus-0.5b-float32-fixed": versus,
    "versus-0.5b-bfloat16-sharegpt": versus,
    "against": against,
    "step-overhead": step_overhead,
    "routing-cost": routing_cost,
    "steady": steady,
    "modes": modes,
    "interference-long-prompt": interference,
    "interference-grammar": grammars,
}
PARTS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "gateway requests": ("gateway", gateway_requests),
}
