"""Formats results for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.load.lag import lag_warnings

_LATENCIES = (
    ("TTFT", "ttft_s"),
    ("TPOT", "tpot_s"),
    ("ITL", "itl_s"),
    ("end-to-end", "e2e_s"),
)
_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def run_table(summary: Mapping[str, Any]) -> str:
    """All figures of one run."""
    return "\n".join(_run_lines(summary))


def warnings_of(summary: Mapping[str, Any], *, exact_lengths: bool) -> list[str]:
    """Warnings about anything that makes the figures doubtful."""
    found = lag_warnings(summary)
    tokens = summary["tokens"]
    if tokens["counted_by_chunks"]:
        found.append(f"{tokens['counted_by_chunks']} requests came without usage: their tokens are counted by chunks")
    if exact_lengths and tokens["output_not_as_asked"]:
        found.append(f"{tokens['output_not_as_asked']} answers do not have the number of tokens that was asked for")
    return found


def sweep_table(points: Sequence[Mapping[str, Any]]) -> str:
    """One line for each rate, in ascending order."""
    rows = [f"{'rate':>9}{'attained':>10}{'goodput':>9}{'out tok/s':>11}" + _latency_heads()]
    for point in sorted(points, key=lambda point: float(point["rate"])):
        summary = point["run"]["summary"]
        goodput = summary["goodput"]
        rows.append(
            f"{point['rate']:>9.3f}{100 * goodput['attainment']:>9.1f}%{_number(goodput['requests_per_s']):>9}"
            f"{_number(summary['throughput']['output_tokens_per_s'], 1):>11}" + _latency_cells(summary)
        )
    return "\n".join(rows)


def _latency_heads() -> str:
    return "".join(f"{name + ' ' + column:>12}" for name in ("TTFT", "TPOT", "ITL") for column in ("p50", "p99"))


def _latency_cells(summary: Mapping[str, Any]) -> str:
    spreads = [summary[key] for key in ("ttft_s", "tpot_s", "itl_s")]
    return "".join(
        f"{'-' if spread is None else f'{1000 * spread[column]:.1f} ms':>12}"
        for spread in spreads
        for column in ("p50", "p99")
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _run_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    tokens, throughput = summary["tokens"], summary["throughput"]
    outcomes = ", ".join(f"{count} {cause}" for cause, count in summary["outcomes"].items()) or "none"
    yield f"{'requests':<14}{summary['requests']} in {summary['duration_s']:.2f} s: {outcomes}"
    yield f"{'tokens':<14}{tokens['prompt']} prompt, {tokens['output']} output ({_counted(tokens)})"
    yield (
        f"{'throughput':<14}{_number(throughput['requests_per_s'])} requests/s, "
        f"{_number(throughput['output_tokens_per_s'], 1)} output tokens/s, "
        f"{_number(throughput['total_tokens_per_s'], 1)} total tokens/s"
    )
    if (goodput := summary["goodput"]) is not None:
        yield (
            f"{'goodput':<14}{_number(goodput['requests_per_s'])} requests/s: "
            f"{goodput['good']} of {summary['requests']} ({100 * goodput['attainment']:.1f} %) meet {_targets(goodput)}"
        )
    yield f"{'ms':<14}" + "".join(f"{column:>11}" for column in _COLUMNS)
    for name, key in (*_LATENCIES, ("send lag", "send_s"), ("loop lag", "loop_s")):
        spread = summary[key] if key in summary else summary["lag"][key]
        if spread is not None:
            yield f"{name:<14}" + "".join(f"{1000 * spread[column]:>11.2f}" for column in _COLUMNS)


def _counted(tokens: Mapping[str, Any]) -> str:
    if not tokens["counted_by_chunks"]:
        return "counted by usage"
    return "counted by chunks" if not tokens["counted_by_usage"] else "counted by usage, and by chunks where it lacks"


def _targets(goodput: Mapping[str, Any]) -> str:
    names = (("TTFT", "ttft_target_s"), ("TPOT", "tpot_target_s"), ("ITL", "itl_target_s"))
    return ", ".join(f"{name} {goodput[key]:g} s" for name, key in names if goodput[key] is not None)
