"""Times work on a GPU without the cost of launching it, and measures the highest rates of the device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_REPLAYS = 15
_LEAST_US = 300.0
"""Least time of a replay: in it the host launches the next one, which takes some 10 µs."""
_WARM_UP_US = 20_000.0
_COLD_BYTES = 512 * 2**20
"""Bytes of other inputs that are read between two uses of one input: ten times the last-level cache of an H200."""


def num_copies(num_bytes: int, most: int = 64) -> int:
    """Number of copies of an input of `num_bytes` bytes with which none is found in a cache."""
    return max(2, min(most, -(-_COLD_BYTES // num_bytes)))


def device() -> Iterator[dict[str, Any]]:
    """A row with the device's name and its highest rates."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: `pytest tests/kernels` tests without one what the kernels compute")
    gpu, copies, products = torch.cuda.get_device_name(), copy_bytes_per_s(), matmul_flops_per_s()
    yield {"kind": "device", "gpu": gpu, "copy_bytes_per_s": copies, "matmul_flops_per_s": products}


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of `calls`, one after another. Each is called once before, which compiles what it launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of one of `calls`. They are captured one after another, as often as makes `_LEAST_US`, in a
    graph that is replayed."""
    graph = captured(calls)
    us = replay_us(graph, 2)
    repeats = math.ceil(_LEAST_US / us)
    if repeats > 1:
        graph = captured([*calls] * repeats)
    for _ in range(math.ceil(_WARM_UP_US / (us * repeats))):
        graph.replay()
    return replay_us(graph, _REPLAYS) / (repeats * len(calls))


def replay_us(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Median microseconds of a replay, without those that the host takes to launch it: another one runs meanwhile."""
    taken: list[float] = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end))
    return statistics.median(taken)


def copy_bytes_per_s() -> float:
    """Bytes read plus bytes written per second by a copy of 2 GiB: the device's own, or a kernel, whichever is faster.
    In a graph the device's own copy takes longer."""
    source = torch.empty(2**30, dtype=torch.int16, device="cuda").random_()
    target = torch.empty_like(source)
    us = min(launched_us(lambda: target.copy_(source)), graph_us([lambda: torch.bitwise_not(source, out=target)]))
    return 2 * source.nbytes / (1e-6 * us)


def read_bytes_per_s() -> float:
    """Bytes per second that memory gives to the largest of 2 GiB of numbers, or to a copy, which also writes."""
    source = torch.empty(2**29, dtype=torch.int32, device="cuda").random_()
    return max(source.nbytes / (1e-6 * graph_us([lambda: torch.amax(source)])), copy_bytes_per_s())


def launched_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call that takes much longer than its launch."""
    taken: list[float] = []
    for _ in range(_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end))
    return statistics.median(taken)


def matmul_flops_per_s(size: int = 8192) -> float:
    """Floating-point operations per second of a product of two square matrices in bfloat16."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / (1e-6 * graph_us([lambda: torch.mm(a, b, out=out)]))
