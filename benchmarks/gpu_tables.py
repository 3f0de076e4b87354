"""The tables of recorded runs on a GPU (`benchmarks/gpu/`)."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.record import Run
from benchmarks.result_tables import table


def compiled(run: Run) -> str:
    """The kernels' use of a multiprocessor's resources."""
    rows = [
        [
            f"{each['kernel']}, {each['dtype']}, "
            + (each["product"] if "product" in each else f"head dimension {each['head_dim']}"),
            str(each["registers"]),
            str(each["stack_bytes"]),
            f"{each['shared_bytes'] / 1024:.0f}",
            str(each["num_warps"]),
            str(each["programs"]),
            each["products"],
        ]
        for each in run["figures"]["binaries"]
        if each["kernel"] in ("decode", "prefill", "skinny")
    ]
    head = ["kernel", "registers", "stack, bytes", "shared, KiB", "warps", "programs at a time", "products"]
    return table(head, rows)


def decode_attention(run: Run) -> str:
    """Decode attention of one layer, compared with FlashAttention-3's fit and torch."""
    rows = [
        [
            f"{each['batch']} x {each['length']}",
            f"{each['us']:.1f}",
            f"{each['longest_us']:.1f}",
            f"{each['runs_us']:.1f}",
            f"{each['of_copy_rate']:.0%}",
            f"{each['over_fa3_fit']:.2f}",
            _of_peer(each["sdpa_us"], "{:.1f}"),
            _of_peer(each["cudnn_us"], "{:.1f}"),
            f"{each['gather_us']:.1f}",
        ]
        for each in run["figures"]["decode_attention"]
    ]
    ragged = run["figures"]["decode_ragged"]
    shape = f"{ragged['num_short']} x {ragged['short']} and 1 x {ragged['long']}"
    of_ragged = [f"{ragged['us']:.1f}", f"{ragged['longest_us']:.1f}", "", f"{ragged['of_copy_rate']:.0%}"]
    rows.append([shape, *of_ragged, "", "", "", ""])
    head = ["batch x context", "µs", "µs, grid of a graph", "runs, µs a step", "of the copy rate"]
    return table([*head, "over FlashAttention-3", "SDPA, µs", "cuDNN, µs", "gathering for them, µs"], rows)


def _of_peer(us: float | None, form: str) -> str:
    """Not every library has every shape."""
    return "-" if us is None else form.format(us)


def prefill_attention(run: Run) -> str:
    """Prefill attention of a chunk at the end of a context."""
    rows = [
        [
            f"{each['chunk']} of {each['context']}",
            f"{each['us']:.0f}",
            f"{each['tflops']:.0f}",
            _of_peer(each["sdpa_us"], "{:.0f}"),
            _of_peer(each["cudnn_us"], "{:.0f}"),
        ]
        for each in run["figures"]["prefill_attention"]
    ]
    return table(["chunk", "µs", "TFLOP/s", "SDPA, µs", "cuDNN, µs"], rows)


def small_kernels(run: Run) -> str:
    """The other kernels of a layer, and the sampler."""
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


def products(run: Run) -> str:
    """Products of few rows by the kernel and by torch."""
    rows = [
        [
            f"{each['model']}: {each['product']} {each['outputs']} x {each['inputs']}",
            str(each["rows"]),
            f"{each['us']:.1f}",
            f"{each['torch_us']:.1f}",
            f"{each['floor_us']:.1f}",
        ]
        for each in run["figures"]["product"]
    ]
    return table(["product", "rows", "µs, untuned", "torch, µs", "the weight's bytes alone, µs"], rows)


def engine(run: Run) -> str:
    """Whole steps compared with the least time that the device needs."""
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


def transfer(run: Run) -> str:
    """Reads between two processes on the GPU, and writes of the same number of blocks."""
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


def stack(run: Run) -> str:
    """Whole systems on one GPU."""
    rates = run["figures"]["output_tokens_per_s"]
    ours = rates["baton pair"]
    rows = [[name, f"{rate:.0f}", f"{ours / rate:.1f}"] for name, rate in rates.items()]
    return table(["system", "output tokens/s", "a Baton pair has times as many"], rows)


TABLES: dict[str, Callable[[Run], str]] = {
    "gpu-compile": compiled,
    "gpu-engine": engine,
    "gpu-transfer": transfer,
    "gpu-stack": stack,
}
PARTS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "gpu decode attention": ("gpu-kernels", decode_attention),
    "gpu prefill attention": ("gpu-kernels", prefill_attention),
    "gpu small kernels": ("gpu-kernels", small_kernels),
    "gpu products": ("gpu-kernels", products),
}
