"""The pictures in the documents, each from a recorded run (`benchmarks/record.py`); they need matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import Run, recorded


def draw(folder: Path) -> list[Path]:
    """Draw the pictures whose runs are recorded; return their paths. Raises `ImportError` without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "baton"
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    made = []
    for name, picture in PICTURE_OF.items():
        run = recorded(name)
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
    """Tokens per second over concurrency, with one point for every round."""
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


def goodput_picture(run: Run, axis: Any) -> None:
    """Share of requests that met both targets over the rate, with one point for every round."""
    for system, each in run["figures"]["systems"].items():
        rates, shares = ([at[name] for at in each["shares"]] for name in ("rate", "good_share"))
        (line,) = axis.plot(rates, [100 * share for share in shares], label=system)
        points = [(of["rate"], 100 * of["good_share"]) for of in run["figures"]["runs"] if of["system"] == system]
        axis.plot(*zip(*points, strict=True), marker=".", linestyle="", color=line.get_color())
    axis.axhline(90, color="grey", linestyle=":")
    axis.set(xlabel="requests/s", ylabel="met both targets, %", ylim=(0, None))
    workload = run["workload"]
    axis.set_title(f"{workload['model']}, {workload['dtype']}, {workload['workload']} lengths, 2 cores")


def drafts_picture(run: Run, axis: Any) -> None:
    """Tokens per second with drafts by lookup over those without, over the number of requests."""
    _over_concurrency(run, axis, "lookup", lambda each: each["output_tokens_per_s"]["ratio"])
    axis.axhline(1, color="grey", linestyle=":")
    axis.set(yscale="log", ylabel="output tokens/s, prompt lookup / no drafts")
    ticks = (0.8, 1, 1.5, 2, 3, 5)
    axis.set_yticks(ticks, map(str, ticks), minor=False)
    axis.set_yticks((), minor=True)


def acceptance_picture(run: Run, axis: Any) -> None:
    """Share of drafted tokens that were right over the number of requests."""
    _over_concurrency(run, axis, "fixed", lambda each: 100 * each["acceptance"])
    axis.set(ylabel="drafted tokens that were right, %", ylim=(0, None))


def _over_concurrency(run: Run, axis: Any, system: str, figure: Callable[[Any], float]) -> None:
    """A line for each text."""
    of = [each for each in run["figures"]["ratios"] if each["system"] == system]
    for text in dict.fromkeys(each["text"] for each in of):
        points = [(each["concurrency"], figure(each)) for each in of if each["text"] == text]
        axis.plot(*zip(*points, strict=True), marker=".", label=text)
    numbers = sorted({each["concurrency"] for each in of})
    axis.set(xscale="log", xlabel="requests at once")
    axis.set_xticks(numbers, map(str, numbers), minor=False)
    axis.set_xticks((), minor=True)
    axis.set_title(f"{run['workload']['model']}, {run['workload']['dtype']}, 2 cores")


def profiles_picture(run: Run, axis: Any) -> None:
    """Goodput of two profiles over that of a packed pool that drafts, by rate; a line for each text and mix."""
    figures = run["figures"]
    texts = list(dict.fromkeys(each["text"] for each in figures["ratios"]))
    for text, mix in dict.fromkeys((each["text"], each["mix"]) for each in figures["ratios"]):
        of = [each for each in figures["ratios"] if (each["text"], each["mix"]) == (text, mix)]
        both = [
            each
            for each in of
            if (each["tier"], each["against"]) == ("interactive and standard", "drafting") and each["goodput"]["ratio"]
        ]
        axis.plot(
            [each["rate"] for each in both],
            [each["goodput"]["ratio"] for each in both],
            marker=".",
            linestyle=("-", "--")[texts.index(text)],
            label=f"{text}, {mix:.0%} interactive",
        )
    axis.axhline(1, color="grey", linestyle=":")
    axis.set(xlabel="requests/s", ylabel="goodput, two profiles / one packed pool that drafts")
    axis.set_title(f"{run['workload']['model']}, {run['workload']['dtype']}, 2 cores")


def steady_picture(run: Run, axis: Any) -> None:
    """Memory of each process over the number of requests."""
    for name, values in run["figures"]["resident_mib"].items():
        stage = run["workload"]["requests"] // run["workload"]["stages"]
        axis.plot([stage * (number + 1) for number in range(len(values))], values, marker=".", label=name)
    axis.set(xlabel="requests", ylabel="memory of its own, MiB", ylim=(0, None))


def autoscale_picture(run: Run, axis: Any) -> None:
    """Number of requested workers over time."""
    for name, runs in run["figures"].items():
        times, replicas = zip(*runs[0]["replicas"], strict=True)
        axis.step([t / 60 for t in times], replicas, where="post", label=name)
    axis.axvline(run["workload"]["step_at_s"] / 60, color="grey", linestyle=":", label="the load steps up")
    axis.set(xlabel="minutes", ylabel="prefill workers wanted", ylim=(0, None))


PICTURE_OF: dict[str, Callable[[Run, Any], None]] = {
    "versus-15m-bfloat16-fixed": versus_picture,
    "versus-0.5b-bfloat16-fixed": versus_picture,
    "goodput-15m-float32-fixed": goodput_picture,
    "goodput-15m-float32-sharegpt-avx2": goodput_picture,
    "speculation-15m-float32": drafts_picture,
    "speculation-15m-float32-fixed": acceptance_picture,
    "profiles-15m-float32": profiles_picture,
    "steady": steady_picture,
    "autoscale": autoscale_picture,
}
