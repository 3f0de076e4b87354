"""The processes of a worker's ranks: rank 0 is the worker, and starts the others.

They share memory without a name, which is gone with them: for orders, and on CPUs also for sums. All memory of KV
caches is rank 0's, whose transport registers it as one cache in parts; the other ranks compute in theirs. On CPUs it is
shared memory; on GPUs rank 0 allocates it on each rank's device, and the rank opens it by CUDA's handle (torch counts
who uses it in a file of 80 KB in `/dev/shm`, which stays: a worker ends without destructors).

A rank ends with its parent. If another one ends, or counts no more, the worker ends at once, whatever it computes;
gateways see one worker that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NoReturn

import numpy as np
import torch
from pydantic import TypeAdapter
from torch.multiprocessing.reductions import reduce_tensor

from common.contract.errors import OperatorError
from common.contract.kv_layout import KVLayout
from common.engine.backends import backend_on
from common.engine.batch import Ints
from common.engine.device_group import Collectives, DeviceGroup
from common.engine.executor import Executor
from common.engine.group import Group
from common.engine.host_copy import HostCopy
from common.engine.host_memory import lacks_memory
from common.engine.host_swap import HostSwap
from common.engine.kv_cache import KVCache, part_bytes
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.native import Kernels
from common.engine.native import kernels as compiled
from common.engine.native.group import GroupEndedError, SharedGroup, memory_bytes
from common.engine.orders import follow
from common.engine.shard import Shard
from common.engine.weights import load_weights
from common.runtime.clock import Pulse
from common.runtime.lifecycle import command_of, end_with_parent
from common.runtime.memory_files import memory_file

log = logging.getLogger(__name__)

EXIT_RANK_LOST = 3
"""Exit code of a worker one of whose ranks is lost."""
_PLACE_NUMBERS = 2**16
_ORDER_NUMBERS = 2**20
"""Those that are said at once, in 8 MiB: among them the block tables of 64 sequences of 250,000 tokens."""
_LOOK_S = 0.05
_KNOWN_S = 0.5
"""Seconds in which gateways know that a worker has ended."""
_MEET_S = 600.0
"""Seconds in which all ranks must have joined NCCL, and then each of its operations outside CUDA graphs must end."""
_START_S = 120.0
"""Seconds without a count for which a rank may load, and start CUDA."""
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
    device: Literal["cpu", "cuda"] = "cpu"
    gpus: tuple[int, ...] = ()
    """The index of each rank's GPU; empty if these are the ranks' own numbers. NCCL wants different ones."""
    collectives: Collectives | None = None
    """By which the ranks add up; None for shared memory, which only CPUs have."""

    def device_of(self, rank: int) -> torch.device:
        """The device of a rank."""
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", self.gpus[rank] if self.gpus else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankArguments:
    """What a rank's process is told."""

    plan: GroupPlan
    rank: int
    folder: Path
    layout: KVLayout
    """That of a whole block."""
    in_c: bool
    """Whether the kernels in C compute."""
    batch_invariant: bool
    """See `Linear`."""
    place_numbers: int
    """Numbers that a rank says at once."""
    parent: int
    group_fd: int
    meeting_fd: int
    """See `DeviceGroup`."""
    cache_fd: int
    """On CPUs, the memory of its part of the cache."""

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
        *,
        in_c: bool,
        batch_invariant: bool,
    ) -> None:
        """Start them; they load their part of the model. They compute with the kernels in C, or with those of torch or
        Triton; for `batch_invariant` see `Linear`. Raises `OperatorError`."""
        kernels = compiled()
        if kernels is None:
            raise OperatorError(
                "--tensor-parallel needs the kernels in C, which a C compiler (cc: GCC 12 or later) makes"
            )
        if plan.device == "cuda" and not plan.gpus and torch.cuda.device_count() < plan.width:
            raise OperatorError(
                f"--tensor-parallel {plan.width} needs as many GPUs of this machine, and there are "
                f"{torch.cuda.device_count()}: the ranks of a worker are on one machine"
            )
        self._plan, self._layout = plan, layout
        self._shards = [Shard(rank, plan.width) for rank in range(plan.width)]
        place_numbers = max(_PLACE_NUMBERS, -(-config.vocab_size // plan.width))
        group_file = _memory_file("group", _group_bytes(kernels, plan.width, place_numbers))
        self._meeting_file = _memory_file("meeting", 0)
        self._cache_files = [_memory_file("kv", 0) for _ in self._shards]
        self._files = [group_file, self._meeting_file, *self._cache_files]
        memory = _mapped(group_file)
        self.orders = SharedGroup(kernels, memory, self._shards[0], place_numbers, _ORDER_NUMBERS)
        self._group: Group = self.orders
        self._pulses = _pulses(memory, plan.width)
        self._closing, self._ready, self._why = False, False, ""
        common = _RankArguments(
            plan=plan,
            rank=0,
            folder=folder,
            layout=layout,
            in_c=in_c,
            batch_invariant=batch_invariant,
            place_numbers=place_numbers,
            parent=os.getpid(),
            group_fd=group_file,
            meeting_fd=self._meeting_file,
            cache_fd=self._cache_files[0],
        )
        each = [replace(common, rank=shard.rank, cache_fd=self._cache_files[shard.rank]) for shard in self._shards[1:]]
        self._processes: list[subprocess.Popen[bytes]] = []
        # A process ends with the thread that started it: this one stays.
        self._watching = threading.Thread(target=self._run, args=(each,), name="ranks", daemon=True)
        self._watching.start()

    def require_all(self) -> None:
        """Raise `OperatorError` if one was lost before `join`."""
        if self._why:
            raise OperatorError(self._why)

    def join(self) -> Group:
        """Wait until all have loaded their part of the model, and return the group. Raises `OperatorError` if one has
        not."""
        log.info("rank 0 has loaded its part of the model, and waits for the other ranks")
        with contextlib.suppress(GroupEndedError):
            self.orders.add(torch.zeros(1))
        self._ready = True  # from here on, whoever is lost ends this process
        self.require_all()
        self._group = _group_of(self._plan, self.orders, self._meeting_file)
        return self._group

    def cache_memory(self, num_blocks: int, num_host_blocks: int) -> list[torch.Tensor]:
        """Memory of each rank's part of a KV cache, uint8, which all ranks use from now on, with as many host slots.
        Raises `RuntimeError` if there is not enough."""
        sizes = [part_bytes(self._layout, num_blocks, shard) for shard in self._shards]
        handles = b""
        if self._plan.device == "cpu":
            memory = _shared(self._cache_files, sizes)
        else:
            memory = [
                torch.zeros(size, dtype=torch.uint8, device=self._plan.device_of(rank))
                for rank, size in enumerate(sizes)
            ]
            handles = pickle.dumps([reduce_tensor(each) for each in memory[1:]])  # type: ignore[no-untyped-call]
            for rank in range(self._plan.width):
                torch.cuda.synchronize(self._plan.device_of(rank))
        numbers = np.frombuffer(handles + bytes(-len(handles) % 8), np.int64)
        self.orders.tell([np.array((num_blocks, num_host_blocks)), numbers])
        return memory

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        self.orders.end()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._watching.join()
        if isinstance(self._group, DeviceGroup):
            self._group.close()
        for file in self._files:
            if file != self._meeting_file or self._plan.collectives != "nccl":  # which is open until the end
                os.close(file)

    def _run(self, each: Sequence[_RankArguments]) -> None:
        try:
            for arguments in each:
                self._processes.append(_start(arguments))
        except OSError as error:
            self._lost(f"a rank cannot be started: {error}")
            return
        try:
            self._watch()
        except BaseException as error:  # else nobody would notice if a rank ended
            log.critical("the watch over the ranks has failed", exc_info=True)
            self._lost(f"the watch over the ranks has failed: {error!r}")
            raise

    def _watch(self) -> None:
        timeout_s = self._plan.pulse.timeout_s
        interval_s = self._plan.pulse.interval_s
        # A frozen rank is noticed as soon as a frozen worker is.
        counting_s = max(timeout_s / 2, timeout_s - _KNOWN_S, 2 * (interval_s + _LOOK_S))
        pause_s = max(2 * _LOOK_S, counting_s - interval_s - 2 * _LOOK_S)
        ends = _Ends(self._processes)
        looked = time.monotonic()
        seen, since = self._pulses.tolist(), [looked] * self._plan.width
        while not self._closing:
            ends.wait(_LOOK_S)
            now, counts = time.monotonic(), self._pulses.tolist()
            stopped, looked = now - looked > pause_s, now  # and perhaps the others, too
            patience_s = counting_s if self._ready else _START_S
            for rank, process in enumerate(self._processes, start=1):
                if counts[rank] != seen[rank] or stopped:
                    since[rank] = now
                silent_s = now - since[rank]
                if (code := process.poll()) is not None:
                    how = f"with code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"
                    self._lost(f"rank {rank} has ended {how}")
                elif silent_s > patience_s and _stands_still(process.pid):
                    self._lost(f"rank {rank} stands still: it has not counted for {silent_s:.1f} s")
                elif silent_s > max(patience_s, 2 * timeout_s):  # it runs, but gets too little of a CPU
                    advice = " (are the CPUs overloaded? then raise --heartbeat-timeout-s)" if self._ready else ""
                    self._lost(f"rank {rank} has not counted for {silent_s:.1f} s{advice}")
            seen = counts

    def _lost(self, why: str) -> None:
        if self._closing or self._why or self.orders.ended:
            return  # it was rank 0, which says why, or has
        self._why = why
        if self._ready:
            log.critical("%s: the worker ends", why)
            for process in self._processes:
                process.kill()
            os._exit(EXIT_RANK_LOST)
        self.orders.end()  # whoever loads the model raises


def _stands_still(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # a sandbox may lack it
        return True


class _Ends:
    """Waits for the end of processes."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._poll = select.poll()
        # A sandbox, or a Python that was built for an old kernel, may lack them: then an end is seen a little later.
        with contextlib.suppress(OSError, AttributeError):
            for process in processes:
                self._poll.register(os.pidfd_open(process.pid), select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait until one has ended, or for so long. Each end is told once."""
        for file, _ in self._poll.poll(1000 * timeout_s):
            self._poll.unregister(file)
            os.close(file)


def _start(arguments: _RankArguments) -> subprocess.Popen[bytes]:
    command = command_of("common.engine.ranks", _ARGUMENTS.dump_json(arguments).decode())
    files = arguments.group_fd, arguments.meeting_fd, arguments.cache_fd
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files)  # noqa: S603


def _memory_file(name: str, num_bytes: int) -> int:
    file = memory_file(f"baton-{name}")
    os.ftruncate(file, num_bytes)
    return file


def _mapped(file: int) -> torch.Tensor:
    """The memory, in large pages if the system gives them to memory that is shared."""
    mapped = mmap.mmap(file, os.fstat(file).st_size)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _shared(files: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Memory of these files, which get these sizes."""
    total = sum(sizes)
    try:
        mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE).close()  # which the system refuses if it is far too much
        for file, size in zip(files, sizes, strict=True):
            os.posix_fallocate(file, 0, size)
        return list(map(_mapped, files))
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"{total} bytes: {error}") from error


def _group_of(plan: GroupPlan, shared: SharedGroup, meeting_file: int) -> Group:
    if plan.collectives is None:
        return shared
    return DeviceGroup(shared.shard, plan.collectives, meeting_file, _MEET_S)


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


def _wait_for(marks: SimpleQueue[HostCopy], device: torch.device) -> NoReturn:
    """Wait for what a rank's device is given, and end the process if the device fails.

    Nothing else may notice: rank 0 then waits for a sum, in a CUDA graph, of which this rank's part never comes, and
    gives no order with which CUDA would tell this rank of the error."""
    try:
        torch.cuda.set_device(device)  # else CUDA would start on the first GPU for this thread
        while True:
            marks.get().wait()
    except BaseException:  # noqa: BLE001 (whatever it is, the rank must not live on)
        traceback.print_exc()
        os._exit(1)


def _run(arguments: _RankArguments) -> None:
    plan, shard = arguments.plan, arguments.shard
    end_with_parent(arguments.parent, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends the others when it has drained
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(plan.num_threads)
    kernels = compiled()
    assert kernels is not None, "rank 0 has them"
    memory = _mapped(arguments.group_fd)
    orders = SharedGroup(kernels, memory, shard, arguments.place_numbers, _ORDER_NUMBERS)
    own, layout, device = kernels if arguments.in_c else None, arguments.layout, plan.device_of(shard.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    counting = (_pulses(memory, plan.width), shard.rank, plan.pulse.interval_s)
    threading.Thread(target=_count, args=counting, daemon=True).start()
    config = ModelConfig.from_folder(arguments.folder)
    batch_invariant = arguments.batch_invariant
    weights = load_weights(config, arguments.folder, layout.dtype, device, None, own, batch_invariant, shard)
    # It may load Triton, which takes seconds from a cold disk, in which nothing counts: before the watch is strict.
    backend = backend_on(device, own, batch_invariant=batch_invariant)
    orders.add(torch.zeros(1))
    group = _group_of(plan, orders, arguments.meeting_fd)
    num_blocks, num_host_blocks, *handles = orders.hear().tolist()
    cache = KVCache(layout, num_blocks, device, shard, [_cache_memory(arguments, handles)])
    swap = HostSwap(shard.layout(layout), num_host_blocks, device)
    decoder = Decoder(config, weights, group, cache.num_slots)
    marks: SimpleQueue[HostCopy] | None = None
    if device.type == "cuda":
        marks = SimpleQueue()
        threading.Thread(target=_wait_for, args=(marks, device), daemon=True).start()
    follow(Executor(decoder, cache, swap, backend, group), orders, marks)


def _cache_memory(arguments: _RankArguments, handles: Sequence[int]) -> torch.Tensor:
    if arguments.plan.device == "cpu":
        return _mapped(arguments.cache_fd)
    opened, what = pickle.loads(np.array(handles).tobytes())[arguments.rank - 1]  # noqa: S301 - it is rank 0's
    memory: torch.Tensor = opened(*what)
    return memory


def main() -> None:
    """A rank's process."""
    # Rank 0 says the same of the same files.
    logging.getLogger("common.engine.model_config").addHandler(logging.NullHandler())
    arguments = _ARGUMENTS.validate_json(sys.argv[1])
    try:
        _run(arguments)
    except GroupEndedError:
        os._exit(0)  # what waits for the others is left
    except (OperatorError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, OperatorError) or lacks_memory(error)):
            raise
        what = " ".join(str(error).split()) or "no memory"
        print(f"error: rank {arguments.rank}: {what}", file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    main()
