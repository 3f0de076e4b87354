"""The tables in the documents, each from a recorded run (`benchmarks/record.py`), as Markdown.

Most are declared: a template, and the rows of values that a run's figures have.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from benchmarks.figures import spread
from benchmarks.peers.vllm import best
from benchmarks.record import Run
from common.runtime.kv_size import KNOWN_SHAPES

FORWARDER = "forwarder "
"""What precedes the number of streams in the name of a configuration of `benchmarks.gateway` without a gateway."""

Figures = Any
Row = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with this head and these rows."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class Cell(Formatter):
    """`str.format`, with a letter that may precede a number's specification: `m` for milliseconds of seconds, `k` for
    thousands, `c` for hundredths, and `r` for the median of a spread with its least and most. None is a dash."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """One value."""
        kind, rest = format_spec[:1], format_spec[1:]
        if value is None:
            return "-"
        if kind == "r":
            return "{} ({} to {})".format(*(format(value[name], rest) for name in ("p50", "min", "max")))
        if kind and kind in "mkc":
            return format(value / 1000 if kind == "k" else value * {"m": 1000, "c": 100}[kind], rest)
        return str(format(value, format_spec))


@dataclass(frozen=True, slots=True)
class Table:
    """A declared table."""

    template: str
    """Two lines of Markdown: the head, and the form (`Cell`) of a line with the values of a row."""
    rows: Callable[[Figures], Iterable[Row]]

    def __call__(self, run: Run) -> str:
        """The table of a run."""
        head, form = self.template.strip().splitlines()
        rule = "| --- " * head.count(" | ") + "| --- |"
        return "\n".join([head, rule, *(Cell().vformat(form, (), row) for row in self.rows(run["figures"])), ""])


def named(figures: Figures) -> list[Row]:
    """The rows of figures by name."""
    return [{"name": name, **each} for name, each in figures.items()]


def failures(runs: Iterable[Row]) -> str:
    """The line that says how many requests of each system failed; empty if none did."""
    failed = Counter[str]()
    for each in runs:
        failed[each["system"]] += each.get("failed", 0)
    note = ", ".join(f"{number} of {system}" for system, number in failed.items() if number)
    return f"\nFailed requests: {note}.\n" if note else ""


def compared_rows(figures: Figures, by: str, *names: str) -> Iterator[Row]:
    """The rows of systems that took turns at each value of `by`, with the number of their rounds, and as `NAME_ratio`
    the median of the rounds' ratios with the least and the most."""
    for each in figures["ratios"]:
        rounds = sum((run["system"], run[by]) == (each["ours"], each[by]) for run in figures["runs"])
        yield each | {"rounds": rounds} | {f"{name}_ratio": _ratio(each[name], rounds) for name in names}


def _ratio(of: Row, rounds: int) -> str:
    if of["ratio"] is None:
        return "-"
    span = " ({ratio_min:.2f} to {ratio_max:.2f})" if rounds > 1 else ""
    return f"**{{ratio:.2f}}**{span}".format(**of)


def bound_threads(run: Run) -> bool:
    """Whether the record is from before vLLM's threads could run on any core: all were bound then."""
    peers = run.get("peers") or {}
    return "vllm" in peers and "threads" not in peers["vllm"]["settings"]


def _bound(run: Run) -> str:
    why = '[log.md](log.md), "vLLM\'s threads, bound to cores"'
    told = f"\nIn this record vLLM's threads were bound to cores, which mostly makes it slower ({why}).\n"
    return told if bound_threads(run) else ""


def versus(run: Run) -> str:
    """Baton compared with vLLM: medians, and the median of the rounds' ratios, which is not that of the medians."""
    return _versus(run) + failures(run["figures"]["runs"]) + _bound(run)


_versus = Table(
    """
| systems | concurrency | rounds | output tokens/s | ratio | TTFT p50, ms | ratio | ITL P99, ms | ratio |
| {ours} / {theirs} | {concurrency} | {rounds} \
| {output_tokens_per_s[ours]:.1f} / {output_tokens_per_s[theirs]:.1f} | {output_tokens_per_s_ratio} \
| {ttft_p50_s[ours]:m.0f} / {ttft_p50_s[theirs]:m.0f} | {ttft_p50_s_ratio} \
| {itl_p99_s[ours]:m.0f} / {itl_p99_s[theirs]:m.0f} | {itl_p99_s_ratio} |
""",
    lambda figures: compared_rows(figures, "concurrency", "output_tokens_per_s", "ttft_p50_s", "itl_p99_s"),
)


speculation = Table(
    """
| text | concurrency | drafts | output tokens/s | ratio | TPOT p50, ms | ITL P99, ms |
| {text} | {concurrency} | {system} | {output_tokens_per_s[ours]:.0f} / {output_tokens_per_s[theirs]:.0f} \
| **{output_tokens_per_s[ratio]:.2f}** ({output_tokens_per_s[ratio_min]:.2f} to {output_tokens_per_s[ratio_max]:.2f}) \
| {tpot_p50_s[ours]:m.2f} / {tpot_p50_s[theirs]:m.2f} | {itl_p99_s[ours]:m.1f} / {itl_p99_s[theirs]:m.1f} |
""",
    lambda figures: figures["ratios"],
)


fixed_drafts = Table(
    """
| text | concurrency | drafted tokens that were right, % | output tokens/s | ratio | TPOT p50, ms |
| {text} | {concurrency} | {acceptance:c.0f} | {output_tokens_per_s[ours]:.0f} / {output_tokens_per_s[theirs]:.0f} \
| **{output_tokens_per_s[ratio]:.2f}** ({output_tokens_per_s[ratio_min]:.2f} to {output_tokens_per_s[ratio_max]:.2f}) \
| {tpot_p50_s[ours]:m.2f} / {tpot_p50_s[theirs]:m.2f} |
""",
    lambda figures: figures["ratios"],
)


def _profile_rows(figures: Figures) -> Iterator[Row]:
    """One row for the tiers of each text, mix and rate."""
    cases: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for each in figures["ratios"]:
        case = cases.setdefault((each["text"], each["mix"], each["rate"]), {})
        case[each["against"], each["tier"]] = each["goodput"]
    for (text, mix, rate), of in cases.items():
        row = {"text": text, "mix": 100 * mix, "rate": rate}
        for packed in ("packed", "drafting"):
            both = of[packed, "interactive and standard"]
            told = (
                "-" if both["ratio"] is None else "**{ratio:.2f}** ({ratio_min:.2f} to {ratio_max:.2f})".format(**both)
            )
            row |= {packed: both, f"{packed}_ratio": told, "interactive": of["packed", "interactive"]}
        yield row


profiles = Table(
    """
| text | interactive, % | requests/s | good requests/s | ratio | interactive ones | to a pool that drafts |
| {text} | {mix:.0f} | {rate:g} | {packed[ours]:.2f} / {packed[theirs]:.2f} | {packed_ratio} \
| {interactive[ours]:.2f} / {interactive[theirs]:.2f} | {drafting_ratio} |
""",
    _profile_rows,
)


def _width_rows(figures: Figures) -> Iterator[Row]:
    for each in figures["steps"]:
        case = f"a step of {each['batch']}" if each["batch"] else "a prompt of 512 tokens"
        summed = (each["add_s"] + each["beside_s"]) / each["two_threads"]["ours"]
        yield {**each, "case": case, "summed": summed}


widths_steps = Table(
    """
| model | case | two ranks / one worker, two threads, ms | ratio | to one thread | sums and logits, % | orders, µs |
| {model}, {dtype} | {case} | {two_threads[ours]:m.2f} / {two_threads[theirs]:m.2f} \
| **{two_threads[ratio]:.2f}** ({two_threads[ratio_min]:.2f} to {two_threads[ratio_max]:.2f}) \
| {one_thread[ratio]:.2f} | {summed:c.0f} | {tell_us:.0f} |
""",
    lambda figures: ({**each, "tell_us": 1e6 * each["tell_s"]} for each in _width_rows(figures)),
)


widths_pulls = Table(
    """
| ranks, source to sink | KiB of a block | GB/s, against 1 to 1 | ratio |
| {source} to {sink} | {kib:.0f} | {ours:.2f} / {theirs:.2f} | **{ratio:.2f}** ({ratio_min:.2f} to {ratio_max:.2f}) |
""",
    lambda figures: (
        {
            **each,
            **each["bytes_per_s"],
            "kib": each["block_bytes"] / 1024,
            "ours": 1e-9 * each["bytes_per_s"]["ours"],
            "theirs": 1e-9 * each["bytes_per_s"]["theirs"],
        }
        for each in figures["pulls"]
    ),
)


def _settings_rows(figures: Figures) -> Iterator[Row]:
    for form in dict.fromkeys(each["form"] for each in figures["runs"]):
        runs = [each for each in figures["runs"] if each["form"] == form]
        yield from (each | {"used": "yes" if each is best(runs) else ""} for each in runs)


def vllm_settings(run: Run) -> str:
    """vLLM with several settings, at 8 requests at a time."""
    old = bound_threads(run)
    threads = "bound" if old else "nobind"
    runs = [each | {"settings": {"threads": threads} | each["settings"]} for each in run["figures"]["runs"]]
    since = "What was chosen so is used since with threads that are not bound.\n" if old else ""
    return _vllm_settings(run | {"figures": {"runs": runs}}) + _bound(run) + since


_vllm_settings = Table(
    """
| vLLM | tokens of a step | cores left to the API server | threads | output tokens/s | TTFT p50, ms | ITL P99, ms \
| used |
| {form} | {settings[max_num_batched_tokens]} | {settings[reserved_cores]} | {settings[threads]} \
| {output_tokens_per_s:.1f} | {ttft_p50_s:m.0f} | {itl_p99_s:m.0f} | {used} |
""",
    _settings_rows,
)


def _floor_rows(figures: Figures) -> Iterator[Row]:
    for each in figures["cases"]:
        steps = each["kind"] == "steps"
        what = f"a decode step of {each['size']}" if steps else f"a prompt of {each['size']} tokens"
        span = "{ratio_min:.2f} to {ratio_max:.2f}".format(**each)
        yield each | {"what": what, "read_s": each["read_s"] if steps else None, "span": span}


def floors(run: Run) -> str:
    """Steps and prompts, and what the machine must take for them."""
    limits = "The loop read {gb_per_s:.1f} GB/s, and torch multiplied at {gflops:.0f} GFLOP/s.".format(**run["figures"])
    return f"{_floors(run)}\n{limits}\n"


_floors = Table(
    """
| what | takes, ms | to read, ms | to compute, ms | ratio to the larger |
| {what} | {seconds:m.1f} | {read_s:m.1f} | {compute_s:m.1f} | **{ratio:.2f}** ({span}) |
""",
    _floor_rows,
)


def goodput(run: Run) -> str:
    """Baton compared with vLLM by the requests that met both targets, and the highest rate that each system held."""
    workload, systems = run["workload"], run["figures"]["systems"]
    told = ", ".join(f"{name} {Cell().format('{:g}', each['highest_rate'])}" for name, each in systems.items())
    targets = f"the first token within {workload['ttft_s']:g} s, the others {1000 * workload['itl_s']:g} ms apart"
    note = f"Targets of a request: {targets} in the mean. Highest of these rates at which 90 % met both: {told}."
    return f"{_goodput(run)}\n{note}\n{failures(run['figures']['runs'])}{_bound(run)}"


_goodput = Table(
    """
| systems | requests/s | rounds | good requests/s | ratio | met both targets, % | output tokens/s |
| {ours} / {theirs} | {rate:g} | {rounds} | {goodput[ours]:.2f} / {goodput[theirs]:.2f} | {goodput_ratio} \
| {good_share[ours]:c.0f} / {good_share[theirs]:c.0f} \
| {output_tokens_per_s[ours]:.0f} / {output_tokens_per_s[theirs]:.0f} |
""",
    lambda figures: compared_rows(figures, "rate", "goodput"),
)


def llama(run: Run) -> str:
    """Baton's engine compared with llama.cpp: medians, and ratios of the rounds."""
    same = ", ".join(
        f"{each['same_tokens']} of {each['of']} in {dtype}" for dtype, each in run["figures"]["agreement"].items()
    )
    return _llama(run) + f"\nGreedy tokens that are the same in both: {same}.\n"


def _llama_rows(figures: Figures) -> Iterator[Row]:
    for each in figures["cases"]:
        sizes, chosen = each["sizes"], each["settings"]
        what = f"a prompt of {sizes[0]} tokens" if each["kind"] == "prompts" else f"a decode step of {sizes[0]}"
        how = f"KV in {chosen['kv']}, {'' if chosen['flash_attention'] else 'no '}flash attention"
        yield {"what": what, "how": how, **each}


_llama = Table(
    """
| weights | what | ms, Baton / llama.cpp | ratio of the times | llama.cpp with |
| {dtype} | {what} | {seconds[ours]:m.1f} / {seconds[theirs]:m.1f} \
| **{seconds[ratio]:.2f}** ({seconds[ratio_min]:.2f} to {seconds[ratio_max]:.2f}) | {how} |
""",
    _llama_rows,
)
against = Table(
    """
| what | case | least ms, after / before | ratio |
| {kind} | {told} | {ms[0]:.1f} / {ms[1]:.1f} | {ratio:r.2f} |
""",
    lambda figures: [
        {"kind": kind, "told": ", ".join(map(str, each["case"])), **each}
        for kind, cases in figures.items()
        for each in cases
    ],
)
step_overhead = Table(
    """
| streams | sampling | µs, median | least | µs of processor time | `best`, µs | `draw`, µs \
| outside both, µs, median | least | `best` / a plain read |
| {streams} | {name} | {wall_us[p50]:.0f} | {wall_us[min]:.0f} | {cpu_us[p50]:.0f} | {best_us[p50]:.0f} \
| {draw_us[p50]:.0f} | {outside_us[p50]:.0f} | {outside_us[min]:.0f} | {best_over_read[p50]:.2f} |
""",
    lambda figures: [{"streams": streams, **row} for streams, kinds in figures.items() for row in named(kinds)],
)
routing_cost = Table(
    """
| workers | load | prompt cached nowhere, ms | by 20, ms | by all, ms | a heartbeat, µs |
| {workers:,} | {load} | {choose_us_none:k.2f} | {choose_us_20:k.2f} | {choose_us_all:k.2f} | {report_us:.0f} |
""",
    lambda figures: [
        {"workers": int(row["name"]), "load": load, **row} for load in ("idle", "busy") for row in named(figures[load])
    ],
)
steady = Table(
    """
| process | MiB after the first stage | half-way | at the end |
| {name} | {first:.0f} | {middle:.0f} | {last:.0f} |
""",
    lambda figures: [
        {"name": name, "first": values[0], "middle": values[len(values) // 2], "last": values[-1]}
        for name, values in figures["resident_mib"].items()
    ],
)
modes = Table(
    """
| mode | TTFT mean, ms | TTFT P99 | ITL p50, ms | ITL P99 | latency mean, s | tokens/s |
| {name} | {ttft_mean_s:m.0f} | {ttft_p99_s:m.0f} | {itl_p50_ms:.0f} | {itl_p99_ms:.0f} | {latency_mean_s:.2f} \
| {tokens_per_s:.0f} |
""",
    named,
)
interference = Table(
    """
| mode and chunk | ITL P99 before, ms | during: p50 | during: P99 | TTFT of the prompt, s |
| {name} | {itl_before[p99_ms]:.0f} | {itl_during[p50_ms]:.0f} | {itl_during[p99_ms]:.0f} | {long_ttft_s:.1f} |
""",
    named,
)


def _grammar_rows(figures: Figures) -> Iterator[Row]:
    """Medians of the rounds, and the longest gap of all rounds."""
    for name, rounds in figures.items():
        row = {"name": name}
        for when in ("before", "during"):
            for figure in ("p99_ms", "max_ms"):
                row[f"{when}_{figure}"] = spread([each[f"itl_{when}"][figure] for each in rounds])
        ends = Counter(each["end"] for each in rounds)
        yield row | {"ends": ", ".join(f"{end} {number}" for end, number in sorted(ends.items()))}


grammars = Table(
    """
| the 16 choices | before: P99, ms | longest, median | of all | during: P99 | longest, median | of all | ends |
| {name} | {before_p99_ms[p50]:.0f} | {before_max_ms[p50]:.0f} | {before_max_ms[max]:.0f} \
| {during_p99_ms[p50]:.0f} | {during_max_ms[p50]:.0f} | {during_max_ms[max]:.0f} | {ends} |
""",
    _grammar_rows,
)


def kv_sizes() -> str:
    """Size of the KV of well-known models, with 16-bit elements."""
    rows = []
    for name, shape in KNOWN_SHAPES.items():
        layout = shape.layout(16, "auto")
        per_token = layout.block_bytes / layout.block_size
        rows.append([name, f"{per_token / 2**10:g} KiB", f"{per_token * 4096 / 2**30:g} GiB"])
    return table(["model", "a token", "4,096 tokens"], rows)


def _gateway_rows(figures: Figures) -> Iterator[Row]:
    """The gateway, and a plain forwarder, if it was measured in turns with it."""
    for name, each in figures.items():
        number = name.removeprefix(FORWARDER)
        if number.isdigit():
            yield each | {"name": name if name == number else f"{number}, forwarder"}


gateway = Table(
    """
| open streams | added, p50, ms | P99 | tokens/s at most | µs a token, moderate pace | at most | of a core |
| {name} | {added_p50_ms:r.2f} | {added_p99_ms:r.1f} | {tokens_per_s:r,.0f} | {moderate_cpu_us_per_token:r.0f} \
| {cpu_us_per_token:r.0f} | {gateway_share[p50]:c.0f} % |
""",
    _gateway_rows,
)
gateway_requests = Table(
    """
| requests/s | µs a request | of a core |
| {requests_per_s:r.0f} | {cpu_us_per_request:r.0f} | {gateway_share[p50]:c.0f} % |
""",
    lambda figures: [figures["requests"]],
)


def _overload_rows(figures: Figures) -> Iterator[Row]:
    """Medians with the range of the rounds, sums of counts, and the time to a refusal as median of the rounds' medians
    / maximum of all rounds."""
    runs = figures["runs"]
    for share in sorted({each["share"] for each in runs}):
        of = [each for each in runs if each["share"] == share]
        refusals = [each["refusal_s"] for each in of if each["refusal_s"]]
        slowest = (
            [statistics.median(each["p50"] for each in refusals), max(e["max"] for e in refusals)] if refusals else []
        )
        yield {
            "share": share,
            "rate": statistics.median(each["rate"] for each in of),
            "goodput": spread([each["goodput"] for each in of]),
            **{name: sum(each[name] for each in of) for name in ("accepted", "refused", "neither")},
            "refused_share": spread([100 * each["refused"] / each["requests"] for each in of]),
            "on_time": spread([100 * each["accepted_that_met_the_target"] for each in of]),
            "refusal_ms": " / ".join(f"{1000 * each:.0f}" for each in slowest),
        }


overload = Table(
    """
| of the closed loop's rate | requests/s | good requests/s | accepted | refused | of all, % | failed \
| of the accepted, on time, % | ms to a refusal, p50 / most |
| {share:g} | {rate:.1f} | {goodput:r.1f} | {accepted} | {refused} | {refused_share:r.0f} | {neither} \
| {on_time:r.0f} | {refusal_ms} |
""",
    _overload_rows,
)


def _autoscale_rows(figures: Figures) -> Iterator[Row]:
    """The worst run, unless stated otherwise."""
    for name, runs in figures.items():
        worst = {figure: float(max(each[figure] for each in runs)) for figure in runs[0] if figure != "replicas"}
        each = {
            f"each_{of}": ", ".join(str(run[of]) for run in runs) for of in ("last_replicas", "changes_of_direction")
        }
        yield {"name": name, **worst, **each}


autoscale = Table(
    """
| scaled by | four are asked for after | the target is met after | most | in the end, each run \
| changes of direction, each run | TTFT P90 from then on | refused |
| {name} | {seconds_until_needed_are_asked_for:.0f} s | {seconds_until_the_target_is_met:.0f} s \
| {most_replicas:.0f} | {each_last_replicas} | {each_changes_of_direction} | {p90_ttft_s_after:.2f} s \
| {refused:.0f} |
""",
    _autoscale_rows,
)


def recovery(run: Run) -> str:
    """Times to detect a fault, and the stalls and pauses of streams."""
    names = {
        ("kill", "detect_ms"): "kill -9 of the decode worker: noticed after",
        ("kill", "stall_ms"): "the stream stands still for",
        ("freeze", "detect_ms"): "freeze of the decode worker: noticed after",
        ("freeze", "stall_ms"): "the stream stands still for",
        ("kill-rank", "detect_ms"): "kill -9 of another rank of the decode worker: noticed after",
        ("kill-rank", "stall_ms"): "the stream stands still for",
        ("freeze-rank", "detect_ms"): "freeze of another rank of the decode worker: noticed after",
        ("freeze-rank", "stall_ms"): "the stream stands still for",
        ("move-500", "pause_ms"): "a sequence of 500 tokens moves: longest gap between tokens",
        ("move-4000", "pause_ms"): "a sequence of 4,000 tokens moves: the same",
        ("move-4000", "gap_ms"): "for comparison: gap between tokens of a stream of 4,000",
        ("gateway", "free_ms"): "kill -9 of a gateway with four streams: the workers hold nothing of it after",
    }
    figures = run["figures"]
    rows = []
    for (what, figure), name in names.items():
        if what not in figures:
            continue
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
    "recovery-ranks": recovery,
    "chaos": matrix,
    "gateway": gateway,
    "overload": overload,
    "speculation-15m-float32": speculation,
    "speculation-15m-float32-fixed": fixed_drafts,
    "profiles-15m-float32": profiles,
    "widths-steps": widths_steps,
    "widths-pulls": widths_pulls,
    "versus-15m-bfloat16-fixed": versus,
    "versus-15m-float32-fixed": versus,
    "versus-15m-bfloat16-sharegpt": versus,
    "versus-15m-float32-sharegpt": versus,
    "versus-0.5b-bfloat16-fixed": versus,
    "versus-0.5b-float32-fixed": versus,
    "versus-0.5b-float32-fixed-baton-pair-vllm-pair": versus,
    "versus-0.5b-bfloat16-fixed-baton-pair-vllm-pair": versus,
    "versus-0.5b-bfloat16-fixed-baton-colocated-vllm-single": versus,
    "versus-0.5b-float32-fixed-baton-colocated-vllm-single": versus,
    "versus-0.5b-float32-fixed-baton-colocated-vllm-single-itl-4": versus,
    "versus-0.5b-float32-sharegpt-baton-pair-vllm-pair": versus,
    "versus-0.5b-float32-sharegpt-baton-colocated-vllm-single": versus,
    "versus-0.5b-bfloat16-sharegpt": versus,
    "goodput-15m-float32-fixed": goodput,
    "goodput-15m-float32-sharegpt": goodput,
    "goodput-15m-bfloat16-sharegpt": goodput,
    "goodput-0.5b-bfloat16-sharegpt": goodput,
    "vllm-settings-15m-float32": vllm_settings,
    "vllm-settings-15m-bfloat16": vllm_settings,
    "vllm-settings-0.5b-float32": vllm_settings,
    "vllm-settings-0.5b-bfloat16": vllm_settings,
    "llama-0.5b": llama,
    "floors-0.5b-float32-1": floors,
    "floors-0.5b-bfloat16-1": floors,
    "against": against,
    "products": against,
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
