"""What dividing a model among ranks costs on a CPU, and what blocks lose that move between workers of unequal widths.

    python -m benchmarks.widths --models 15m 0.5b --dtypes float32 bfloat16 --rounds 9

*Steps*: two ranks with one thread each beside one worker with two threads, and with one. The systems take turns, and a
ratio is of one round. Of the group's step it is told how much rank 0 spends in sums of all ranks, waiting for the other
one included, and in telling the others what to compute.

*Pulls*: NIXL reads of 64 blocks between processes on this machine, in turns; a ratio is of the rate of a read between
two workers of one rank in the same round.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch

from benchmarks.command import Result, run
from benchmarks.figures import compared
from benchmarks.models import MODELS, Model
from benchmarks.process import restart_as_a_worker
from common.contract.ids import Incarnation, new_incarnation
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Slice
from common.engine.orders import LeadingExecutor
from common.engine.ranks import GroupPlan
from common.engine.runner import ModelRunner, load_runner
from common.engine.shard import Shard
from common.runtime.clock import Pulse
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.regions import RankPart, Region
from kv_transfer.transport import ReadState

CONTEXT, BLOCK_SIZE, PROMPT_TOKENS = 512, 32, 512
NUM_BLOCKS, NUM_READ, HEADS = 128, 64, 8
SYSTEMS = {"one thread": (1, 1), "two threads": (1, 2), "two ranks": (2, 1)}
"""System → (ranks, threads of each)."""
PATIENCE_S = 60.0


def measure(
    scratch: Path,
    *,
    models: tuple[Model, ...] = ("15m", "0.5b"),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    batches: Annotated[tuple[int, ...], "sequences of a decode step"] = (1, 8, 32),
    widths: Annotated[tuple[str, ...], "ranks of source and sink"] = ("1:1", "2:1", "1:2", "4:2", "2:4", "2:2"),
    block_kib: tuple[int, ...] = (512, 2048),
    rounds: int = 9,
) -> Iterator[Result]:
    """All steps so far, after each model and type; the pulls at last."""
    restart_as_a_worker()
    steps: list[dict[str, Any]] = []
    for model in models:
        folder = scratch / model
        folder.mkdir()
        MODELS[model](folder)
        for dtype in dtypes:
            steps += steps_of(folder, model, dtype, batches, rounds)
            yield Result(name="widths-steps", figures={"steps": steps}, seed=None)
    pairs = [(int(source), int(sink)) for source, sink in (each.split(":") for each in widths)]
    pulls = [row for kib in block_kib for row in pulls_of(pairs, 1024 * kib, rounds)]
    yield Result(name="widths-pulls", figures={"pulls": pulls}, seed=None)


# --- steps -----------------------------------------------------------------------------------------------------------


class Timed:
    """Seconds that rank 0 spends in each operation of its group since `begin`."""

    def __init__(self, runner: ModelRunner) -> None:
        assert isinstance(runner.executor, LeadingExecutor)
        self._group = runner.executor._orders
        for name in ("beside", "tell"):
            self._watch(name, getattr(self._group, name))
        self.begin()

    def begin(self) -> None:
        """Begin anew."""
        self._taken: dict[str, float] = {}
        self._added_s = self._group.adding_s

    def seconds(self, name: str) -> float:
        """Those in one of the operations."""
        return self._group.adding_s - self._added_s if name == "add" else self._taken.get(name, 0.0)

    def _watch(self, name: str, operation: Callable[..., Any]) -> None:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = operation(*arguments)
            self._taken[name] = self._taken.get(name, 0.0) + time.perf_counter() - begin
            return result

        setattr(self._group, name, timed)


def steps_of(folder: Path, model: str, dtype: str, batches: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each batch, and one for a prompt."""
    runners: dict[str, ModelRunner] = {}
    for name, (ranks, threads) in SYSTEMS.items():
        torch.set_num_threads(threads)
        plan = None if ranks == 1 else GroupPlan(width=ranks, num_threads=threads, pulse=Pulse())
        size = 2**30 if model != "15m" else 2**28
        runners[name] = load_runner(folder, kv_cache_bytes=size, block_size=BLOCK_SIZE, dtype=dtype, group=plan)
        for own in runners[name].cache.parts:
            own.blocks.fill_(0.5)
    timed = Timed(runners["two ranks"])
    rows = []
    for batch in (*batches, 0):
        slices = prompt() if batch == 0 else decodes(batch)
        repeats = 1 if batch == 0 or model != "15m" else 8
        took: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        parts: dict[str, list[float]] = {"add": [], "beside": [], "tell": []}
        for turn in range(-1, rounds):  # the first warms up
            for name in sorted(SYSTEMS, reverse=bool(turn % 2)):
                torch.set_num_threads(SYSTEMS[name][1])
                timed.begin()
                begin = time.perf_counter()
                for _ in range(repeats):
                    runners[name].step(slices)
                seconds = (time.perf_counter() - begin) / repeats
                if turn >= 0:
                    took[name].append(seconds)
                    if name == "two ranks":
                        for part, of in parts.items():
                            of.append(timed.seconds(part) / repeats)
        rows.append(
            {
                "model": model,
                "dtype": dtype,
                "batch": batch,
                "one_thread": compared(zip(took["two ranks"], took["one thread"], strict=True)),
                "two_threads": compared(zip(took["two ranks"], took["two threads"], strict=True)),
                **{f"{part}_s": statistics.median(of) for part, of in parts.items()},
            }
        )
        print(
            model, dtype, batch, {name: round(1e3 * statistics.median(of), 2) for name, of in took.items()}, flush=True
        )
    runners["two ranks"].close()
    return rows


def decodes(batch: int) -> list[Slice]:
    """A greedy decode step, all at one position. What the cache holds does not matter to its time."""
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    sample = Sample(params=params, choice=0, position=CONTEXT + 1, token_ids=(), prompt_len=CONTEXT)
    per_sequence = CONTEXT // BLOCK_SIZE + 1
    tables = [list(range(row * per_sequence, (row + 1) * per_sequence)) for row in range(batch)]
    return [
        Slice(token_ids=[row % 250 + 5], start=CONTEXT, block_table=table, samples=(sample,))
        for row, table in enumerate(tables)
    ]


def prompt() -> list[Slice]:
    """A prompt's only chunk, and its first token."""
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    sample = Sample(params=params, choice=0, position=PROMPT_TOKENS, token_ids=(), prompt_len=PROMPT_TOKENS)
    ids = [7 * position % 250 + 5 for position in range(PROMPT_TOKENS)]
    return [Slice(token_ids=ids, start=0, block_table=list(range(PROMPT_TOKENS // BLOCK_SIZE)), samples=(sample,))]


# --- pulls -----------------------------------------------------------------------------------------------------------


@contextmanager
def cache_of(width: int, block_bytes: int, byte: int) -> Iterator[Region]:
    """A cache in host memory, in a part for each rank."""
    head_bytes = block_bytes // HEADS
    held = [Shard(rank, width).kv_heads(HEADS) for rank in range(width)]
    memory = [torch.full((NUM_BLOCKS * len(heads) * head_bytes,), byte, dtype=torch.uint8) for heads in held]
    parts = [
        RankPart(each.data_ptr(), heads.start * head_bytes, heads.stop * head_bytes)
        for each, heads in zip(memory, held, strict=True)
    ]
    yield Region(parts=tuple(parts), num_blocks=NUM_BLOCKS, block_bytes=block_bytes)


def serve(pipe: Connection, incarnation: Incarnation, width: int, block_bytes: int) -> None:
    """A source's process: sends its metadata, then gives reads progress until it receives anything."""
    with cache_of(width, block_bytes, 7) as region:
        transport = NixlTransport(region, incarnation)
        pipe.send(transport.metadata())
        while not pipe.poll():
            transport.poll()
            time.sleep(0.0002)
        transport.close()


@contextmanager
def source_of(width: int, block_bytes: int) -> Iterator[tuple[Incarnation, bytes]]:
    """A source that runs: its name, and its transport's metadata."""
    processes, incarnation = multiprocessing.get_context("spawn"), new_incarnation()
    ours, theirs = processes.Pipe()
    process = processes.Process(target=serve, args=(theirs, incarnation, width, block_bytes), daemon=True)
    process.start()
    theirs.close()  # so the end of the source is an end of file here
    if not ours.poll(PATIENCE_S):
        raise SystemExit("the source does not start")
    yield incarnation, ours.recv()
    ours.send(None)
    process.join(PATIENCE_S)


def pulls_of(pairs: Sequence[tuple[int, int]], block_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each pair of widths but the first, to which the others are compared."""
    os.environ.setdefault("UCX_TLS", "^ib")
    taken: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    with ExitStack() as stack:
        widths = sorted({source for source, _ in pairs})
        sources = {width: stack.enter_context(source_of(width, block_bytes)) for width in widths}
        for turn in range(-1, rounds):  # the first warms up
            for source, sink in sorted(taken, reverse=bool(turn % 2)):
                seconds = pull_s(*sources[source], sink, block_bytes)
                if turn >= 0:
                    taken[source, sink].append(seconds)
    equal = taken[pairs[0]]
    rate = NUM_READ * block_bytes
    return [
        {
            "source": pair[0],
            "sink": pair[1],
            "block_bytes": block_bytes,
            "bytes_per_s": compared((rate / own, rate / other) for own, other in zip(of, equal, strict=True)),
        }
        for pair, of in taken.items()
        if pair != pairs[0]
    ]


def pull_s(source: Incarnation, metadata: bytes, width: int, block_bytes: int) -> float:
    """Median seconds of some reads by a worker of this many ranks."""
    with cache_of(width, block_bytes, 0) as region:
        transport = NixlTransport(region, new_incarnation())
        transport.add_source(source, metadata)
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
        seconds = []
        for _ in range(8):
            begin = time.perf_counter()
            read = transport.start_read(source, order[:NUM_READ], order[-NUM_READ:])
            while read.state is ReadState.PENDING:
                transport.poll()
                assert time.perf_counter() - begin < PATIENCE_S
            assert read.state is ReadState.DONE, read.error
            seconds.append(time.perf_counter() - begin)
        transport.close()
        return statistics.median(seconds[1:])


if __name__ == "__main__":
    run(measure, __doc__)
