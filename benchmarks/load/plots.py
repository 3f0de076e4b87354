"""Draws pictures of recorded results; needs the optional dependency matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load.record import Record
from benchmarks.load.results import runs_of
from common.contract.errors import OperatorError

_MAX_BARS = 100
_LOG_FROM = 20
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""
_INCH_PER_BAR = 0.12


def plot_files(bodies: Mapping[str, Mapping[str, Any]], folder: Path, extension: str) -> list[Path]:
    """Draw pictures of the results (by label); return their paths. Raises `OperatorError`."""
    pyplot = _pyplot()
    sweeps = {label: body for label, body in bodies.items() if body["kind"] == "sweep"}
    timelines = {label: body for label, body in bodies.items() if body["kind"] == "run" and "timeline" in body["run"]}
    if lost := bodies.keys() - sweeps.keys() - timelines.keys():
        raise OperatorError(f"nothing to draw in {', '.join(sorted(lost))}: neither a sweep, nor a timeline")
    figures: dict[str, Any] = {}
    if sweeps:
        figures["latency"] = latency_figure(pyplot, sweeps)
        figures["goodput"] = goodput_figure(pyplot, sweeps)
    for label, body in timelines.items():
        records = [Record.from_json(each) for each in body["run"]["timeline"]["records"]]
        figures[f"timeline-{label}"] = timeline_figure(pyplot, records, label)
    paths = [folder / f"{name}.{extension}" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise OperatorError(f"cannot write the picture: {error}") from error
        pyplot.close(figure)
    return paths


def latency_figure(pyplot: Any, sweeps: Mapping[str, Mapping[str, Any]]) -> Any:
    """TTFT, TPOT and ITL over the rate; the median as a solid line, P99 as a dashed line."""
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for axis, (name, key) in zip(axes, (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s")), strict=True):
        for label, body in sweeps.items():
            points = [(rate, summary[key]) for rate, summary in _points(body) if summary[key] is not None]
            rates = [rate for rate, _ in points]
            (line,) = axis.plot(rates, [1000 * each["p50"] for _, each in points], marker="o", label=f"{label} P50")
            p99 = [1000 * each["p99"] for _, each in points]
            axis.plot(rates, p99, marker="o", linestyle="--", color=line.get_color(), label=f"{label} P99")
        _name(axis, "offered requests/s", f"{name} (ms)")
        _scale(axis)
    return figure


def goodput_figure(pyplot: Any, sweeps: Mapping[str, Mapping[str, Any]]) -> Any:
    """Rate of requests that meet every target over the offered rate, with the ideal line."""
    figure, axis = pyplot.subplots(figsize=(6.5, 4.5), layout="constrained")
    highest = 0.0
    for label, body in sweeps.items():
        points = _points(body)
        rates = [rate for rate, _ in points]
        axis.plot(rates, [s["goodput"]["requests_per_s"] or 0.0 for _, s in points], marker="o", label=label)
        highest = max([highest, *rates])
    axis.plot([0, highest], [0, highest], color="grey", linestyle=":", label="all of them")
    _name(axis, "offered requests/s", "goodput (requests/s)")
    return figure


def timeline_figure(pyplot: Any, records: Sequence[Record], label: str) -> Any:
    """A bar for each request: the wait for room, the wait for the first token, its tokens; failures end in a cross."""
    shown = sorted((record for record in records if record.ended_s > record.planned_s), key=lambda r: r.sent_s)[
        :_MAX_BARS
    ]
    if not shown:
        raise OperatorError(f"the timeline of {label} holds no request")
    start_s = min(record.planned_s for record in shown)
    figure, axis = pyplot.subplots(figsize=(10, max(3.0, 1.5 + _INCH_PER_BAR * len(shown))), layout="constrained")
    phases: dict[str, list[tuple[int, float, float]]] = {"queue (client)": [], "to first token": [], "tokens": []}
    for row, record in enumerate(shown):
        first_s = record.chunk_s[0] if record.chunk_s else record.ended_s
        phases["queue (client)"].append((row, record.planned_s, record.sent_s))
        phases["to first token"].append((row, record.sent_s, first_s))
        phases["tokens"].append((row, first_s, record.last_s or record.ended_s))
    for (name, bars), colour in zip(phases.items(), ("lightgrey", "tab:orange", "tab:blue"), strict=True):
        rows = [row for row, _, _ in bars]
        widths = [max(0.0, end - begin) for _, begin, end in bars]
        axis.barh(rows, widths, left=[begin - start_s for _, begin, _ in bars], color=colour, label=name)
    ticks = [(row, time_s - start_s) for row, record in enumerate(shown) for time_s in record.chunk_s]
    axis.plot([time_s for _, time_s in ticks], [row for row, _ in ticks], "|", color="white", alpha=0.5, markersize=3)
    failed = [(row, record.ended_s - start_s) for row, record in enumerate(shown) if record.outcome != "ok"]
    axis.plot([time_s for _, time_s in failed], [row for row, _ in failed], "x", color="red", label="failed")
    axis.set_ylim(len(shown), -1)
    axis.set_title(f"{label}: {len(shown)} of {len(records)} requests")
    _name(axis, "seconds", "request")
    return figure


def _points(body: Mapping[str, Any]) -> list[tuple[float, Mapping[str, Any]]]:
    rates = [float(point["rate"]) for point in body["points"]]
    pairs = zip(rates, (run["summary"] for run in runs_of(body)), strict=True)
    return sorted(pairs, key=lambda pair: pair[0])


def _scale(axis: Any) -> None:
    values = [value for line in axis.get_lines() for value in line.get_ydata() if value > 0]
    if values and max(values) > _LOG_FROM * min(values):
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)


def _name(axis: Any, across: str, up: str) -> None:
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise OperatorError("pictures need matplotlib: pip install '.[bench]' in Baton's checkout") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
