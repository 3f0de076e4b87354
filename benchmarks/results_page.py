"""The tables and pictures of `docs/results.md`, from the recorded runs.

    python -m benchmarks.results_page           # write them
    python -m benchmarks.results_page --check   # fail if the page's tables are not those of the records

The page's text is written by hand. Between `<!-- NAME -->` and `<!-- end -->` is what this module makes: a table, and
the run that it is from. Where a run has not been recorded, the page says so. Pictures want matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS
from common.runtime.kv_size import KNOWN_SHAPES

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
PICTURES = PAGE.with_suffix("")
_PART = re.compile(r"<!-- (?P<name>[\w .-]+?) -->\n(?P<body>.*?)<!-- end -->\n", re.DOTALL)

Run = dict[str, Any]


def load(name: str) -> Run | None:
    """A recorded run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def source(run: Run) -> str:
    """Where a table is from."""
    machine = run["machine"]
    return f"\n`{run['command']}`, commit {run['commit'][:7]}, {machine['cpu']}, {machine['cores']} cores\n"


# --- tables ------------------------------------------------------------------------------------------------------


def versus(run: Run) -> str:
    """Baton beside vLLM: medians, ratios of the rounds."""
    rows = []
    for each in run["figures"]["ratios"]:
        rate, ttft, itl = (each[name] for name in ("output_tokens_per_s", "ttft_p50_s", "itl_p99_s"))
        rows.append(
            [
                f"{each['ours']} / {each['theirs']}",
                str(each["concurrency"]),
                f"{rate['ours']:.1f} / {rate['theirs']:.1f}",
                f"**{rate['ratio']:.2f}** ({rate['ratio_min']:.2f} to {rate['ratio_max']:.2f})",
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


def decode_floor(run: Run) -> str:
    """A decode step beside what reading and computing take at least."""
    rows = [
        [
            batch,
            f"{each['step_ms']['min']:.1f} (median {each['step_ms']['p50']:.1f})",
            f"{each['floor_ms']:.1f}",
            f"{each['compute_floor_ms']:.1f}",
            f"{each['ratio']:.2f}",
            f"{each['step_ms']['min'] / max(each['floor_ms'], each['compute_floor_ms']):.2f}",
        ]
        for batch, each in run["figures"]["batches"].items()
    ]
    head = ["batch", "step, ms", "to read, ms", "to compute, ms", "step / to read", "step / the larger"]
    return table(head, rows)


def batch_throughput(run: Run) -> str:
    """Tokens per second of decode steps, relative to a batch of one."""
    rates = {batch: int(batch) / each["step_ms"]["p50"] for batch, each in run["figures"]["batches"].items()}
    rows = [[batch, f"{1e3 * rate:.0f}", f"{rate / rates['1']:.1f}"] for batch, rate in rates.items()]
    return table(["batch", "tokens/s", "relative"], rows)


def step_overhead(run: Run) -> str:
    """A step without its model."""
    rows = [
        [kind, f"{each['wall_us']['p50']:.0f}", f"{each['wall_us']['min']:.0f}", f"{each['cpu_us']['p50']:.0f}"]
        for kind, each in run["figures"].items()
    ]
    return table(["sampling", "µs, median", "least", "µs of processor time"], rows)


def steady(run: Run) -> str:
    """Memory over the stages."""
    figures = run["figures"]
    rows = [
        [name, f"{values[0]:.0f}", f"{values[len(values) // 2]:.0f}", f"{values[-1]:.0f}"]
        for name, values in figures["resident_mib"].items()
    ]
    return table(["process", "MiB after the first stage", "half-way", "at the end"], rows)


def agreement(run: Run) -> str:
    """Two clients."""
    rows = [
        [name.replace("_", " "), f"{each['ours']:.4g}", f"{each['theirs']:.4g}", f"{100 * (each['ratio'] - 1):+.1f} %"]
        for name, each in run["figures"]["ratios"].items()
    ]
    return table(["figure", "`baton bench`", "`vllm bench serve`", "difference"], rows)


def batching(run: Run) -> str:
    """Continuous over static batching."""
    rows = [
        [
            f"{each['batch']}",
            f"{each['cv']}",
            f"{each['ratio']:.2f}",
            f"{each['ratio_to_naive']:.2f}",
            f"{each['ratio_of_steps']:.2f}",
            f"{100 * each['static_utilisation']:.0f} %",
            f"{100 * each['continuous_utilisation']:.0f} %",
        ]
        for each in run["figures"]["batching"]
    ]
    head = ["batch", "cv of the output length", "to static", "to naive static", "in steps"]
    return table([*head, "static: places in use", "continuous: places in use"], rows)


def memory_limited(run: Run) -> str:
    """The same where memory is the limit."""
    rows = [
        [
            f"{each['cv']}",
            f"{each['mean_decoding']:.1f} / {each['batch']}",
            f"{each['ratio']:.2f}",
            f"{each['ratio_to_naive']:.2f}",
            f"{each['ratio_of_steps']:.2f}",
        ]
        for each in run["figures"]["memory_limited"]
    ]
    return table(["cv", "sequences at a time", "to static", "to naive static", "in steps"], rows)


def empty_slots(run: Run) -> str:
    """Memory that holds nothing."""
    names = {
        "max_model_len": "the model's context",
        "prompt_and_max_tokens": "prompt and `max_tokens`",
        "paged": "blocks of 16, as they are needed",
    }
    rows = [[names[name], f"{100 * share:.1f} %"] for name, share in run["figures"]["empty_slots"].items()]
    return table(["what a sequence reserves", "reserved, and empty"], rows)


def padding(run: Run) -> str:
    """Tokens computed for nothing."""
    each = run["figures"]["padding"]
    return table(["padding of 8 prompts", "of what is computed"], [[f"{each['tokens']:.0f}", f"{each['share']:.0%}"]])


def modes(run: Run) -> str:
    """One trace, every mode."""
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
    """Streams beside a long prompt."""
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


def kv_sizes() -> str:
    """KV of well-known models, in 16 bits."""
    rows = []
    for name, shape in KNOWN_SHAPES.items():
        layout = shape.layout(16, "auto")
        per_token = layout.block_bytes / layout.block_size
        rows.append([name, f"{per_token / 2**10:g} KiB", f"{per_token * 4096 / 2**30:g} GiB"])
    return table(["model", "a token", "4,096 tokens"], rows)


def gpu_compile(run: Run) -> str:
    """What the kernels take of a multiprocessor."""
    rows = [
        [
            f"{each['kernel']}, {each['dtype']}, head dimension {each['head_dim']}",
            str(each["registers"]),
            str(each["stack_bytes"]),
            f"{each['shared_bytes'] / 1024:.0f}",
            str(each["num_warps"]),
            str(each["programs"]),
            each["products"],
        ]
        for each in run["figures"]["binaries"]
        if each["kernel"] in ("decode", "prefill")
    ]
    head = ["kernel", "registers", "stack, bytes", "shared, KiB", "warps", "programs at a time", "products"]
    return table(head, rows)


def gpu_decode_attention(run: Run) -> str:
    """Of one layer, beside FlashAttention-3's fit and torch."""
    rows = [
        [
            f"{each['batch']} x {each['length']}",
            f"{each['us']:.1f}",
            f"{each['of_copy_rate']:.0%}",
            f"{each['over_fa3_fit']:.2f}",
            f"{each['sdpa_us']:.1f}",
        ]
        for each in run["figures"]["decode_attention"]
    ]
    ragged = run["figures"]["decode_ragged"]
    shape = f"{ragged['num_short']} x {ragged['short']} and 1 x {ragged['long']}"
    rows.append([shape, f"{ragged['us']:.1f}", f"{ragged['of_copy_rate']:.0%}", "", ""])
    return table(["batch x context", "µs", "of the copy rate", "over FlashAttention-3", "SDPA, µs"], rows)


def gpu_prefill_attention(run: Run) -> str:
    """Of a chunk at the end of a context."""
    rows = [
        [f"{each['chunk']} of {each['context']}", f"{each['us']:.0f}", f"{each['tflops']:.0f}"]
        for each in run["figures"]["prefill_attention"]
    ]
    return table(["chunk", "µs", "TFLOP/s"], rows)


def gpu_small_kernels(run: Run) -> str:
    """The rest of a layer, and the sampler."""
    rows = [
        [f"{each['kernel']}, {each['tokens']} tokens", f"{each['us']:.1f}", f"{each['floor_us']:.1f}"]
        for each in run["figures"]["layer"]
    ]
    for each in run["figures"]["sampler"]:
        rows += [
            [f"{kind}, {each['batch']} rows of {each['vocabulary']}", f"{each[f'{kind}_us']:.0f}", ""]
            for kind in ("greedy", "temperature", "top_k_top_p")
        ]
    return table(["kernel", "µs", "its bytes alone, µs"], rows)


def gpu_engine(run: Run) -> str:
    """Whole steps beside what the device needs at least."""
    rows = []
    for name, each in run["figures"].items():
        rows += [
            [f"{name}, decode {d['batch']} x {d['context']}", f"{d['step_ms']:.2f} ms", f"{d['over_floor']:.2f} times"]
            for d in each["decode"]
        ]
        rows += [
            [f"{name}, prefill {p['tokens']}", f"{1e3 * p['s']:.0f} ms", f"{p['of_matmul']:.0%} of a product's rate"]
            for p in each["prefill"]
        ]
    return table(["step", "takes", "its floor"], rows)


def gpu_transfer(run: Run) -> str:
    """Reads between two processes on the GPU, and writes of as many blocks."""
    rows = [
        [
            f"{read['blocks']} x {read['block_bytes'] >> 20} MiB",
            f"{read['us']:.0f}",
            f"{read['gb_per_s']:.1f}",
            f"{write['gb_per_s']:.1f}",
        ]
        for read, write in zip(run["figures"]["reads"], run["figures"]["writes"], strict=True)
    ]
    return table(["blocks", "a read, µs", "reads, GB/s", "writes, GB/s"], rows)


def gpu_stack(run: Run) -> str:
    """Whole systems on one GPU."""
    rates = run["figures"]["output_tokens_per_s"]
    ours = rates["baton pair"]
    rows = [[name, f"{rate:.0f}", f"{ours / rate:.1f}"] for name, rate in rates.items()]
    return table(["system", "output tokens/s", "a Baton pair has times as many"], rows)


def gateway(run: Run) -> str:
    """One gateway process between scripted workers and clients, streaming."""
    rows = []
    for streams, each in run["figures"].items():
        if streams.isdigit():
            mid = {figure: spread["p50"] for figure, spread in each.items()}
            rows.append(
                [
                    streams,
                    f"{mid['added_p50_ms']:.2f}",
                    f"{mid['added_p99_ms']:.1f}",
                    f"{mid['tokens_per_s']:,.0f}",
                    f"{mid['moderate_cpu_us_per_token']:.0f}",
                    f"{mid['cpu_us_per_token']:.0f}",
                    f"{mid['gateway_share']:.0%}".replace("%", " %"),
                ]
            )
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
    mid = {figure: spread["p50"] for figure, spread in run["figures"]["requests"].items()}
    share = f"{mid['gateway_share']:.0%}".replace("%", " %")
    row = [f"{mid['requests_per_s']:.0f}", f"{mid['cpu_us_per_request']:.0f}", share]
    return table(["requests/s", "µs a request", "of a core"], [row])


def routing(run: Run) -> str:
    """By expected time, and in turn: medians of the rounds, and of the rounds' ratios."""
    rows = []
    for workload, ratios in run["figures"]["ratios"].items():
        row = [workload]
        for figure, form in (("ttft_mean_ms", "{:.0f}"), ("ttft_p99_ms", "{:.0f}"), ("tokens_computed", "{:,.0f}")):
            ours, theirs = (
                statistics.median(
                    each[figure]
                    for each in run["figures"]["runs"]
                    if each["workload"] == workload and each["routing"] == policy
                )
                for policy in ("expected", "round_robin")
            )
            row.append(f"{form.format(ours)} / {form.format(theirs)} (**{ratios[figure]:.2f}**)")
        rows.append(row)
    return table(["workload", "mean TTFT, ms", "TTFT P99, ms", "prompt tokens computed"], rows)


def overload(run: Run) -> str:
    """Goodput over load; medians of the rounds."""
    runs = run["figures"]["runs"]
    rows = []
    for share in sorted({each["share"] for each in runs}):
        of = [each for each in runs if each["share"] == share]
        refusals = [each["refusal_s"] for each in of if each["refusal_s"]]
        rows.append(
            [
                f"{share:g}",
                f"{statistics.median(each['rate'] for each in of):.1f}",
                f"{statistics.median(each['goodput'] for each in of):.1f}",
                f"{sum(each['accepted'] for each in of)}",
                f"{sum(each['refused'] for each in of)}",
                f"{sum(each['neither'] for each in of)}",
                f"{100 * min(each['accepted_that_met_the_target'] for each in of):.1f} %",
                f"{1e3 * statistics.median(each['p50'] for each in refusals):.0f} / "
                f"{1e3 * max(each['max'] for each in refusals):.0f}"
                if refusals
                else "",
            ]
        )
    head = [
        "of the capacity",
        "requests/s",
        "good requests/s",
        "accepted",
        "refused",
        "failed",
        "of the accepted, on time",
        "ms to a refusal, p50 / most",
    ]
    return table(head, rows)


def autoscale(run: Run) -> str:
    """What became of the step, by the rules and by the queue alone: the worst of the runs, unless it says otherwise."""
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


TABLES: dict[str, Callable[[Run], str]] = {
    "autoscale": autoscale,
    "gateway": gateway,
    "routing": routing,
    "overload": overload,
    "versus-15m-bfloat16-fixed": versus,
    "versus-15m-float32-fixed": versus,
    "versus-15m-bfloat16-sharegpt": versus,
    "versus-0.5b-bfloat16-fixed": versus,
    "versus-0.5b-float32-fixed": versus,
    "versus-0.5b-bfloat16-sharegpt": versus,
    "decode-floor-0.5b-1": decode_floor,
    "decode-floor-15m-1": decode_floor,
    "step-overhead": step_overhead,
    "steady": steady,
    "bench-agreement": agreement,
    "modes": modes,
    "interference-long-prompt": interference,
    "gpu-compile": gpu_compile,
    "gpu-engine": gpu_engine,
    "gpu-transfer": gpu_transfer,
    "gpu-stack": gpu_stack,
}
PARTS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "gateway requests": ("gateway", gateway_requests),
    "batch throughput": ("decode-floor-15m-1", batch_throughput),
    "batching": ("claims", batching),
    "memory limited": ("claims", memory_limited),
    "empty slots": ("claims", empty_slots),
    "padding": ("claims", padding),
    "gpu decode attention": ("gpu-kernels", gpu_decode_attention),
    "gpu prefill attention": ("gpu-kernels", gpu_prefill_attention),
    "gpu small kernels": ("gpu-kernels", gpu_small_kernels),
}


CAPTIONS = {
    "versus-15m-bfloat16-fixed": "Output tokens per second over the requests at a time",
    "versus-0.5b-bfloat16-fixed": "Output tokens per second over the requests at a time",
    "batching": "Ratio of throughput over the variation of lengths",
    "steady": "Memory of each process over the requests",
    "autoscale": "Workers wanted over time",
}
"""Parts that have a picture, named like their record."""


def part(name: str) -> str:
    """What stands between the marks of that name."""
    if name == "kv sizes":
        return f"\n{kv_sizes()}\n`baton kv-size`\n\n"
    record, render = PARTS.get(name) or (name, TABLES[name])
    run = load(record)
    if run is None:
        return "\nNot measured yet.\n\n"
    picture = f"\n![{CAPTIONS[name]}](results/{record}.svg)\n" if name in CAPTIONS else ""
    return f"\n{render(run)}{source(run)}{picture}\n"


def rendered(page: str) -> str:
    """The page with its parts as they are recorded."""

    def replace(found: re.Match[str]) -> str:
        return f"<!-- {found['name']} -->\n{part(found['name'])}<!-- end -->\n"

    return _PART.sub(replace, page)


# --- pictures ----------------------------------------------------------------------------------------------------


def draw(folder: Path) -> list[Path]:
    """Those whose runs are recorded. Raises `ImportError` without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "baton"
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    made = []
    for name, picture in PICTURE_OF.items():
        run = load(name)
        if run is not None:
            figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
            picture(run, axis)
            axis.legend()
            axis.grid(alpha=0.3)
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            made.append(path)
    return made


def versus_picture(run: Run, axis: Any) -> None:
    """Tokens per second over concurrency, every round a point."""
    from matplotlib.ticker import NullLocator, ScalarFormatter

    systems = list(dict.fromkeys(each["system"] for each in run["figures"]["runs"]))
    for system in systems:
        points = [each for each in run["figures"]["runs"] if each["system"] == system]
        at = sorted({each["concurrency"] for each in points})
        rates = [[p["output_tokens_per_s"] for p in points if p["concurrency"] == c] for c in at]
        (line,) = axis.plot(at, [statistics.median(each) for each in rates], label=system)
        axis.plot(
            [c for c, each in zip(at, rates, strict=True) for _ in each],
            [rate for each in rates for rate in each],
            marker=".",
            linestyle="",
            color=line.get_color(),
        )
    axis.set(xlabel="requests at a time", ylabel="output tokens/s", xscale="log", yscale="log")
    axis.set_xticks(at, [str(each) for each in at], minor=False)
    axis.xaxis.set_minor_locator(NullLocator())
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(ScalarFormatter())
    workload = run["workload"]
    axis.set_title(f"{workload['model']}, {workload['dtype']}, {workload['workload']} lengths, 2 cores")


def claims_picture(run: Run, axis: Any) -> None:
    """Continuous over static throughput over the variation of the length."""
    for batch in sorted({each["batch"] for each in run["figures"]["batching"]}):
        points = [each for each in run["figures"]["batching"] if each["batch"] == batch]
        cv = [each["output_cv"] for each in points]
        (line,) = axis.plot(cv, [each["ratio"] for each in points], marker="o", label=f"batch {batch}, to static")
        naive = [each["ratio_to_naive"] for each in points]
        axis.plot(
            cv, naive, marker="o", linestyle="--", color=line.get_color(), label=f"batch {batch}, to naive static"
        )
    axis.set(xlabel="coefficient of variation of the output length", ylabel="throughput, continuous / static")


def steady_picture(run: Run, axis: Any) -> None:
    """Memory over the requests."""
    for name, values in run["figures"]["resident_mib"].items():
        stage = run["workload"]["requests"] // run["workload"]["stages"]
        axis.plot([stage * (number + 1) for number in range(len(values))], values, marker=".", label=name)
    axis.set(xlabel="requests", ylabel="memory of its own, MiB", ylim=(0, None))


def autoscale_picture(run: Run, axis: Any) -> None:
    """Workers that were asked for over time."""
    for name, runs in run["figures"].items():
        times, replicas = zip(*runs[0]["replicas"], strict=True)
        axis.step([t / 60 for t in times], replicas, where="post", label=name)
    axis.axvline(run["workload"]["step_at_s"] / 60, color="grey", linestyle=":", label="the load steps up")
    axis.set(xlabel="minutes", ylabel="prefill workers wanted", ylim=(0, None))


PICTURE_OF: dict[str, Callable[[Run, Any], None]] = {
    "versus-15m-bfloat16-fixed": versus_picture,
    "versus-0.5b-bfloat16-fixed": versus_picture,
    "claims": claims_picture,
    "steady": steady_picture,
    "autoscale": autoscale_picture,
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    page = PAGE.read_text()
    if options.check:
        raise SystemExit(rendered(page) != page and "docs/results.md is not what is recorded")
    PAGE.write_text(rendered(page))
    for path in draw(PICTURES):
        print(path)


if __name__ == "__main__":
    main()
