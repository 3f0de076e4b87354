"""The tables of recorded runs on a GPU (`benchmarks/gpu/`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.record import Run
from benchmarks.result_tables import Figures, Row, Table


def _binaries(figures: Figures) -> Iterator[Row]:
    for each in figures["binaries"]:
        if each["kernel"] in ("decode", "prefill", "skinny"):
            of = each["product"] if "product" in each else f"head dimension {each['head_dim']}"
            yield {**each, "of": of, "shared": each["shared_bytes"] / 1024}


def _decode_rows(figures: Figures) -> Iterator[Row]:
    """Every shape, and the ragged batch, which no other library was given."""
    for each in figures["decode_attention"]:
        forms = {
            "fa3": f"{each['over_fa3_fit']:.2f}",
            "gather": f"{each['gather_us']:.1f}",
            "runs": f"{each['runs_us']:.1f}",
        }
        peers = {name: "-" if (us := each[f"{name}_us"]) is None else f"{us:.1f}" for name in ("sdpa", "cudnn")}
        yield {**each, **forms, **peers, "shape": f"{each['batch']} x {each['length']}"}
    ragged = figures["decode_ragged"]
    shape = f"{ragged['num_short']} x {ragged['short']} and 1 x {ragged['long']}"
    yield {**ragged, **dict.fromkeys(("fa3", "gather", "runs", "sdpa", "cudnn"), ""), "shape": shape}


def _small_rows(figures: Figures) -> Iterator[Row]:
    for each in figures["layer"]:
        name = f"{each['kernel']}, {each['tokens']} tokens"
        yield {"name": name, "us": f"{each['us']:.1f}"}
    for each in figures["sampler"]:
        for kind in ("greedy", "temperature", "top_k_top_p"):
            name = f"{kind}, {each['batch']} rows of {each['vocabulary']}"
            yield {"name": name, "us": f"{each[f'{kind}_us']:.0f}"}


def _steps(figures: Figures) -> Iterator[Row]:
    for name, each in figures.items():
        for d in each["decode"]:
            step = f"{name}, decode {d['batch']} x {d['context']}"
            yield {"step": step, "takes": f"{d['step_ms']:.2f}", "floor": f"{d['over_floor']:.2f} times"}
        for p in each["prefill"]:
            floor = f"{p['of_matmul']:.0%} of a product's rate"
            yield {"step": f"{name}, prefill {p['tokens']}", "takes": f"{1e3 * p['s']:.0f}", "floor": floor}
        for i in each["invariant"]:
            step, floor = f"{name}, {i['step']}, batch-invariant", f"{i['ratio']:.2f} times as long as without"
            yield {"step": step, "takes": f"{i['invariant_ms']:.2f}", "floor": floor}
        for e in each["early"]:
            step = f"{name}, decode {e['batch']} x {e['context']}, kernels launched early"
            yield {"step": step, "takes": f"{e['early_ms']:.2f}", "floor": f"{e['plain_ms']:.2f} ms without"}


def _systems(figures: Figures) -> Iterator[Row]:
    rates = figures["output_tokens_per_s"]
    for name, rate in rates.items():
        yield {"name": name, "rate": rate, "times": rates["baton pair"] / rate}


TABLES: dict[str, Callable[[Run], str]] = {
    "gpu-compile": Table(
        """
| kernel | registers | stack, bytes | shared, KiB | warps | programs at a time | products |
| {kernel}, {dtype}, {of} | {registers} | {stack_bytes} | {shared:.0f} | {num_warps} | {programs} | {products} |
""",
        _binaries,
    ),
    "gpu-engine": Table(
        """
| step | takes | its floor |
| {step} | {takes} ms | {floor} |
""",
        _steps,
    ),
    "gpu-transfer": Table(
        """
| blocks | a read, µs | reads, GB/s | writes, GB/s |
| {blocks} x {mib} MiB | {us:.0f} | {gb_per_s:.1f} | {writes:.1f} |
""",
        lambda figures: [
            {**read, "mib": read["block_bytes"] >> 20, "writes": write["gb_per_s"]}
            for read, write in zip(figures["reads"], figures["writes"], strict=True)
        ],
    ),
    "gpu-stack": Table(
        """
| system | output tokens/s | a Baton pair has times as many |
| {name} | {rate:.0f} | {times:.1f} |
""",
        _systems,
    ),
}
PARTS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "gpu decode attention": (
        "gpu-kernels",
        Table(
            """
| batch x context | µs | µs, grid of a graph | runs, µs a step | of the copy rate | over FlashAttention-3 \
| SDPA, µs | cuDNN, µs | gathering for them, µs |
| {shape} | {us:.1f} | {longest_us:.1f} | {runs} | {of_copy_rate:.0%} | {fa3} | {sdpa} | {cudnn} | {gather} |
""",
            _decode_rows,
        ),
    ),
    "gpu prefill attention": (
        "gpu-kernels",
        Table(
            """
| chunk | µs | TFLOP/s | SDPA, µs | cuDNN, µs |
| {chunk} of {context} | {us:.0f} | {tflops:.0f} | {sdpa_us:.0f} | {cudnn_us:.0f} |
""",
            lambda figures: figures["prefill_attention"],
        ),
    ),
    "gpu small kernels": (
        "gpu-kernels",
        Table(
            """
| kernel | µs |
| {name} | {us} |
""",
            _small_rows,
        ),
    ),
    "gpu products": (
        "gpu-kernels",
        Table(
            """
| product | rows | µs, untuned | torch, µs | the weight's bytes alone, µs |
| {model}: {product} {outputs} x {inputs} | {rows} | {us:.1f} | {torch_us:.1f} | {floor_us:.1f} |
""",
            lambda figures: figures["product"],
        ),
    ),
}
