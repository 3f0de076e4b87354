"""The processes of a worker's ranks on a CPU: rank 0 is the worker, and starts the others.

What they share is memory without a name, which is gone with them: what they say to each other, and the KV cache of each
rank, which rank 0 sees too. So it alone copies and swaps blocks, and its transport moves them. A rank ends with its
parent. If another one ends, or counts no more, the worker ends at once, whatever it computes; gateways see one worker
that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from pydantic import TypeAdapter

from common.contract.errors import OperatorError
from common.contract.kv_layout import KVLayout
from common.engine.backend import TorchBackend
from common.engine.batch import Ints
from common.engine.kv_cache import KVCache, part_bytes
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.native import Kernels
from common.engine.native import kernels as compiled
from common.engine.native.backend import NativeBackend
from common.engine.native.group import GroupEndedError, SharedGroup, memory_bytes
from common.engine.orders import follow
from common.engine.shard import Shard, require_width
from common.engine.weights import load_weights
from common.runtime.clock import Pulse
from common.runtime.lifecycle import end_with_parent

log = logging.getLogger(__name__)

EXIT_RANK_LOST = 3
"""Exit code of a worker one of whose ranks is lost."""
_PLACE_NUMBERS = 2**16
_ORDER_NUMBERS = 2**26
"""Half a GiB, of which only what is used takes memory: the block tables of 1,024 sequences of a million tokens."""
_LOOK_S = 0.05
_END_S = 2.0
"""Seconds in which a rank ends when it is told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """How a worker runs as several ranks."""

    width: int
    num_threads: int
    """Those of each rank."""
    pulse: Pulse
    """How often a rank counts, and without how long a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankArguments:
    """What a rank's process is told."""

    plan: GroupPlan
    rank: int
    folder: Path
    layout: KVLayout
    """That of a whole block."""
    num_blocks: int
    in_c: bool
    """Whether the kernels in C compute."""
    exact: bool
    """See `Linear` for `row_invariant`."""
    place_numbers: int
    """Numbers that a rank says at once."""
    parent: int
    group_fd: int
    cache_fd: int

    @property
    def shard(self) -> Shard:
        """The rank's part."""
        return Shard(self.rank, self.plan.width)


_ARGUMENTS = TypeAdapter(_RankArguments)


class Ranks:
    """The other ranks of a worker, started by rank 0."""

    def __init__(
        self,
        plan: GroupPlan,
        config: ModelConfig,
        folder: Path,
        layout: KVLayout,
        kv_cache_bytes: int,
        *,
        in_c: bool,
        exact: bool,
    ) -> None:
        """Start them, for a cache of this many bytes in all. They compute with the kernels in C, or with torch; for
        `exact` see `Linear`. Raises `OperatorError`."""
        kernels = compiled()
        if kernels is None:
            raise OperatorError("--tensor-parallel on a CPU needs a C compiler (cc)")
        require_width(plan.width, config)
        shards = [Shard(rank, plan.width) for rank in range(plan.width)]
        block_bytes = sum(shard.layout(layout).block_bytes for shard in shards)
        self.num_blocks = kv_cache_bytes // block_bytes
        """Blocks of the cache."""
        if not self.num_blocks:
            raise OperatorError(
                f"a KV cache of {kv_cache_bytes} bytes does not hold one block: {block_bytes} bytes for "
                f"{layout.block_size} tokens at {plan.width} ranks"
            )
        self._plan = plan
        place_numbers = max(_PLACE_NUMBERS, -(-config.vocab_size // plan.width))
        sizes = [part_bytes(layout, self.num_blocks, shard) for shard in shards]
        try:
            mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE).close()  # which the system refuses if it is far too much
            self._files = [_memory_file("group", _group_bytes(kernels, plan.width, place_numbers))]
            self._files += [_memory_file("kv", size) for size in sizes]
            for file in self._files[1:]:
                os.posix_fallocate(file, 0, os.fstat(file).st_size)
            memory, *self.cache_memory = map(_mapped, self._files)
        except (OSError, OverflowError) as error:
            raise OperatorError(f"no memory for a KV cache of {kv_cache_bytes} bytes: {error}") from error
        self.group = SharedGroup(kernels, memory, shards[0], place_numbers, _ORDER_NUMBERS)
        self._pulses = _pulses(memory, plan.width)
        self._closing, self._ready, self._why = False, False, ""
        common = _RankArguments(
            plan=plan,
            rank=0,
            folder=folder,
            layout=layout,
            num_blocks=self.num_blocks,
            in_c=in_c,
            exact=exact,
            place_numbers=place_numbers,
            parent=os.getpid(),
            group_fd=self._files[0],
            cache_fd=self._files[1],
        )
        each = [replace(common, rank=shard.rank, cache_fd=self._files[1 + shard.rank]) for shard in shards[1:]]
        self._processes: list[subprocess.Popen[bytes]] = []
        # A process ends with the thread that started it: this one stays.
        self._watching = threading.Thread(target=self._run, args=(each,), name="ranks", daemon=True)
        self._watching.start()

    def wait(self) -> None:
        """Wait until all have loaded their part of the model. Raises `OperatorError` if one has not."""
        with contextlib.suppress(GroupEndedError):
            self.group.add(torch.zeros(1))
        self._ready = True  # from here on, whoever is lost ends this process
        if self._why:
            raise OperatorError(self._why)

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        self.group.end()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._watching.join()
        for file in self._files:
            os.close(file)

    def _run(self, each: Sequence[_RankArguments]) -> None:
        try:
            for arguments in each:
                self._processes.append(_start(arguments))
        except OSError as error:
            self._lost(f"a rank cannot be started: {error}")
        else:
            self._watch()

    def _watch(self) -> None:
        timeout_s = self._plan.pulse.timeout_s
        looked = time.monotonic()
        seen, since = self._pulses.tolist(), [looked] * self._plan.width
        while not self._closing:
            time.sleep(_LOOK_S)
            now, counts = time.monotonic(), self._pulses.tolist()
            stopped, looked = now - looked > timeout_s / 2, now  # and perhaps the others, too
            for rank, process in enumerate(self._processes, start=1):
                if counts[rank] != seen[rank] or not counts[rank] or stopped:  # it counts once it has started
                    since[rank] = now
                if process.poll() is not None:
                    self._lost(f"rank {rank} has ended with code {process.returncode}")
                elif now - since[rank] > timeout_s:
                    self._lost(f"rank {rank} has not counted for {timeout_s:g} s")
            seen = counts

    def _lost(self, why: str) -> None:
        if self._closing or self._why:
            return
        self._why = why
        if self._ready:
            log.critical("%s: the worker ends", why)
            for process in self._processes:
                process.kill()
            os._exit(EXIT_RANK_LOST)
        self.group.end()  # whoever loads the model raises


def _start(arguments: _RankArguments) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "common.engine.ranks", _ARGUMENTS.dump_json(arguments).decode()]
    files = arguments.group_fd, arguments.cache_fd
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files)  # noqa: S603


def _memory_file(name: str, num_bytes: int) -> int:
    file = os.memfd_create(f"baton-{name}", os.MFD_CLOEXEC)
    os.ftruncate(file, num_bytes)
    return file


def _mapped(file: int) -> torch.Tensor:
    """The memory, in large pages if the system gives them to memory that is shared."""
    mapped = mmap.mmap(file, os.fstat(file).st_size)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _group_bytes(kernels: Kernels, width: int, place_numbers: int) -> int:
    return memory_bytes(kernels, width, place_numbers, _ORDER_NUMBERS) + 8 * width


def _pulses(memory: torch.Tensor, width: int) -> Ints:
    """How often each rank has counted, `[width]`."""
    pulses: Ints = memory[-8 * width :].numpy().view(np.int64)
    return pulses


def _count(pulses: Ints, rank: int, interval_s: float) -> NoReturn:
    while True:
        pulses[rank] += 1
        time.sleep(interval_s)


def _run(arguments: _RankArguments) -> None:
    plan, shard = arguments.plan, arguments.shard
    end_with_parent(arguments.parent, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends the others when it has drained
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(plan.num_threads)
    kernels = compiled()
    assert kernels is not None, "rank 0 has them"
    memory = _mapped(arguments.group_fd)
    counting = (_pulses(memory, plan.width), shard.rank, plan.pulse.interval_s)
    threading.Thread(target=_count, args=counting, daemon=True).start()
    group = SharedGroup(kernels, memory, shard, arguments.place_numbers, _ORDER_NUMBERS)
    own, layout, device = kernels if arguments.in_c else None, arguments.layout, torch.device("cpu")
    config = ModelConfig.from_folder(arguments.folder)
    weights = load_weights(config, arguments.folder, layout.dtype, device, None, own, arguments.exact, shard)
    cache = KVCache(layout, arguments.num_blocks, device, shard, [_mapped(arguments.cache_fd)])
    group.add(torch.zeros(1))
    decoder, backend = Decoder(config, weights, group), TorchBackend() if own is None else NativeBackend(own)
    with torch.inference_mode():
        follow(decoder, cache, backend, group)


def main() -> None:
    """A rank's process."""
    try:
        _run(_ARGUMENTS.validate_json(sys.argv[1]))
    except GroupEndedError:
        os._exit(0)


if __name__ == "__main__":
    main()
