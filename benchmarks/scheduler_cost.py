"""Measure the scheduling cost of a decode worker's step, with 1 to 4,096 running and up to 100,000 waiting sequences.

Everything that the scheduler and the block pool do for a step is timed (admitting, settling, growing, planning while
the step before runs as on a GPU, removing ended sequences), in CPU time of the thread, since other processes share the
machine. Sampling, messages and the model are left out. Sequences end after 200 tokens on average and are replaced at
once, so that the number of changes in a step grows with the number of running sequences.

    python -m benchmarks.scheduler_cost
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from pathlib import Path

from benchmarks.command import Result, run, show
from benchmarks.load.summary import percentile
from common.contract.block_hashes import BlockChain
from common.contract.ids import Handle, Incarnation, RequestId, RequestKey
from common.contract.messages.gateway import Decode, Source
from common.contract.messages.handoff import Attach
from common.contract.messages.worker import Tokens
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeRequest
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step
from kv_transfer.pull import Pull

BLOCK_SIZE = 16
MEAN_OUTPUT = 200
PROMPT = tuple(range(500))
SOURCE = Source(address="p:1", incarnation=Incarnation("p"))
RUNNING = (1, 4, 16, 64, 256, 1024, 2048, 4096)
QUEUED = (0, 1_000, 10_000, 100_000)


class Load:
    """A scheduler in steady state: each request that ends is replaced."""

    def __init__(self, num_running: int, num_queued: int, seed: int, *, pressure: bool) -> None:
        self.draw = random.Random(seed)
        blocks_each = -(-(len(PROMPT) + MEAN_OUTPUT) // BLOCK_SIZE)
        num_blocks = num_running * blocks_each * (1 if pressure else 4) + 64
        self.pool = BlockPool(num_blocks)
        policy = Policy(
            block_size=BLOCK_SIZE,
            max_num_seqs=num_running,
            max_sequence_tokens=8192,
            token_budget=num_running + 1024,
            num_host_blocks=num_blocks if pressure else 0,
        )
        self.scheduler = DecodeScheduler(self.pool, policy, Costs())
        self.num_running, self.num_queued = num_running, num_queued
        self.num_requests = 0
        self.ends: dict[RequestId, int] = {}
        self.running: tuple[int, Step] | None = None
        """The step that runs, and its number."""
        self.timed = 0.0

    def arrive(self) -> None:
        """Add one request."""
        number = self.num_requests
        self.num_requests += 1
        work = Decode(
            request=RequestId(f"r{number}"),
            attempt=1,
            token_ids=(number, *PROMPT),
            prompt_len=len(PROMPT) + 1,
            choices=(0,),
            handles=(Handle(number),),
            sampling=SamplingParams(max_tokens=8 * MEAN_OUTPUT),
            budget_s=1.0,
            tenant=f"t{number % 100}",
            source=SOURCE,
            offered=RequestKey(RequestId(f"r{number}"), 1),
        )
        self.ends[work.request] = max(2, round(self.draw.expovariate(1 / MEAN_OUTPUT)))
        chain = BlockChain(BLOCK_SIZE)
        # Hashing a prompt is part of its arrival, not of a step.
        chain.extend(work.token_ids, len(work.token_ids))
        pull = Pull(SOURCE, Attach(request=work.request, attempt=1, offered=1))
        request = DecodeRequest(work, Incarnation("g"), 1e9, float(number), chain, pull)
        began = time.thread_time()
        self.scheduler.want(request, float(number))
        self.timed += time.thread_time() - began

    def step(self) -> float:
        """Run one step; return the seconds of CPU time that the scheduler used."""
        self.timed = 0.0
        while len(self.ends) < self.num_running + self.num_queued:
            self.arrive()
        if self.num_requests == len(self.ends):
            self.timed = 0.0  # filling the queue at the start does not count as the cost of a step
        began = time.thread_time()
        reservations = self.scheduler.reserve(0.0)
        self.timed += time.thread_time() - began
        for reservation in reservations:
            work = reservation.request.work
            first = Tokens(request=work.request, attempt=1, choice=0, position=len(work.token_ids), token_ids=(5,))
            began = time.thread_time()
            self.scheduler.settled(reservation.request, reservation.block_ids, [first], 0.0)
            self.timed += time.thread_time() - began
        running, self.running = self.running, None
        if running is not None:
            if self.scheduler.may_run_ahead(running[1]):
                self.plan(running[1])
            self.end(*running)
        if self.running is None:
            self.plan(None)
        return self.timed

    def plan(self, before: Step | None) -> None:
        """Plan a step, while `before` runs if there is such a step."""
        began = time.thread_time()
        self.running = self.pool.step_started(), self.scheduler.schedule(0.0, before)
        self.timed += time.thread_time() - began

    def end(self, number: int, step: Step) -> None:
        """The step that ran is over: its sequences get their tokens, or end."""
        ended = []
        for choice in step.decodes:
            if choice.stage is not ChoiceStage.RUNNING:
                continue
            sequence = choice.sequence
            sequence.num_computed = sequence.num_tokens
            last = sequence.num_output + 1 >= self.ends[sequence.key.request]
            choice.append(5, None, "stop" if last else None)
            if last:
                ended.append(choice)
        began = time.thread_time()
        self.pool.step_finished(number)
        for choice in ended:
            self.scheduler.sequences.remove(choice)
            self.scheduler.forget(choice.request)
            del self.ends[choice.request.work.request]
        live = self.scheduler.chunks_done(step.chunks)
        if live:
            self.scheduler.entrance.match_again()
        self.pool.take_changes()
        self.timed += time.thread_time() - began
        for chunk in live:
            if chunk.last and chunk.prompt.choice is not None:
                self.scheduler.sequences.recomputed(chunk.prompt.choice, 0.0)


def measure(num_running: int, num_queued: int, num_steps: int, seed: int, *, pressure: bool) -> dict[str, float]:
    """Microseconds of scheduling for each step."""
    load = Load(num_running, num_queued, seed, pressure=pressure)
    for _ in range(400):
        load.step()
    gc.collect()
    gc.freeze()
    taken = [1e6 * load.step() for _ in range(num_steps)]
    gc.unfreeze()
    return {
        "p50_us": statistics.median(taken),
        "p99_us": percentile(taken, 99),
        "max_us": max(taken),
        "running": load.scheduler.batch.num_running,
        "preemptions": load.scheduler.swap.num_swapped + load.scheduler.preemption.num_recomputed,
    }


def measure_all(scratch: Path, *, steps: int = 1000, seed: int = 0) -> Result:
    """The cost by running sequences, by the same under memory pressure, and by waiting ones."""
    figures: dict[str, dict[str, dict[str, float]]] = {"running": {}, "under_pressure": {}, "queued": {}}
    cases = [(kind, number, number, 0) for kind in ("running", "under_pressure") for number in RUNNING]
    cases += [("queued", number, 256, number) for number in QUEUED]
    for kind, number, num_running, num_queued in cases:
        pressure = kind != "running"
        found = measure(num_running, num_queued, steps, seed, pressure=pressure)
        figures[kind][str(number)] = found
        show(f"{kind} {number}", found)
    workload = {"mean_output_tokens": MEAN_OUTPUT, "prompt_tokens": len(PROMPT), "block_size": BLOCK_SIZE}
    return Result(name="scheduler-cost", figures=figures, workload=workload)


if __name__ == "__main__":
    run(measure_all, __doc__)
