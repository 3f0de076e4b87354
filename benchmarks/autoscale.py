"""Simulate a pool of prefill workers and its autoscaler on a modelled clock, through a step of the load.

    python -m benchmarks.autoscale

The scheduler, the admission, the recording rules and the autoscaler's `behavior` are the product's; the rules are
evaluated by Prometheus' own engine (`promtool`, which must be installed), from samples as a scrape every 15 s would
find them. Time, the workers' speed, their start-up and Kubernetes' autoscaler are modelled. For comparison, the same
pool is also scaled by the length of the queue alone.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import yaml

from benchmarks.command import Result, run, show
from benchmarks.horizontal import Autoscaler
from benchmarks.load.lengths import WORKLOADS, clipped
from benchmarks.load.summary import percentile
from common.contract.ids import Incarnation, RequestId
from common.contract.messages.gateway import Prefill
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from gateway.dispatch.router import Expected
from gateway.dispatch.ttft_limits import TtftLimits
from gateway.observability.metrics import GatewayMetrics
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler

K8S: Final = Path(__file__).parents[1] / "k8s"
SCRAPE_S: Final = 15
"""Seconds between two scrapes, between two evaluations of the rules, and between two decisions of the autoscaler."""
LATE: Final = 2
"""Number of intervals by which the autoscaler sees the rules' results late: scrape, evaluation and decision are not
synchronised, and metric adapters cache values for a while."""
WINDOW: Final = 20
"""Number of samples of each series that the rules see: more than their longest window."""
START_S: Final = 60.0
"""Seconds from requesting a worker until it is ready, with its image present and its weights on a local disk."""
TOKEN_S: Final = 0.0002
STEP_S: Final = 0.005
"""A step takes `STEP_S`, and `TOKEN_S` more for each of its tokens."""
BLOCK_SIZE: Final = 256
PROMPTS: Final = clipped(WORKLOADS["azure-conv"][0], 16384)
WANTED: Final = "baton:prefill_workers:wanted"


def rules(component: Path = K8S / "components" / "rules") -> dict[str, Any]:
    """The recording rules, as Prometheus reads them."""
    objects = yaml.safe_load_all((component / "scaling-rules.yaml").read_text())
    spec: dict[str, Any] = next(each["spec"] for each in objects if each["kind"] == "PrometheusRule")
    return spec


def autoscaler(role: str) -> dict[str, Any]:
    """The `spec` of a role's HorizontalPodAutoscaler."""
    objects = yaml.safe_load_all((K8S / "components" / "hpa" / "autoscalers.yaml").read_text())
    spec: dict[str, Any] = next(each["spec"] for each in objects if each["metadata"]["name"] == f"baton-{role}")
    return spec


Samples = dict[str, list[float | None]]
"""Scraped in some minutes, by series."""


def evaluate(scrapes: Sequence[Samples], query: str, folder: Path, spec: dict[str, Any]) -> list[float | None]:
    """Evaluate `query`, with the rules, at the last of the samples of each scrape; None where the result is empty."""
    (folder / "rules.yaml").write_text(json.dumps(spec))
    tests = []
    for samples in scrapes:
        num = max(len(values) for values in samples.values())
        words = {name: " ".join("_" if v is None else f"{v:.9g}" for v in values) for name, values in samples.items()}
        expected = {
            "expr": f'{query} or label_replace(vector(-1), "none", "of", "", "")',
            "eval_time": f"{(num - 1) * SCRAPE_S}s",
            "exp_samples": [],
        }
        series = [{"series": name, "values": values} for name, values in words.items()]
        tests.append({"interval": f"{SCRAPE_S}s", "input_series": series, "promql_expr_test": [expected]})
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": f"{SCRAPE_S}s", "tests": tests}
    (folder / "test.yaml").write_text(json.dumps(test))
    command = ["promtool", "test", "rules", str(folder / "test.yaml")]
    env = os.environ | {"GOGC": "off", "GOMEMLIMIT": "500MiB"}  # so small a program needs no garbage collection
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    # The tests expect empty results, so promtool's failure messages contain the real ones, in the same order.
    found = re.findall(r"got:\s*(.*)", done.stderr + done.stdout)
    assert len(found) == len(tests), done.stderr + done.stdout
    results: list[float | None] = []
    for each in found:
        labelled = re.findall(r"\{([^}]*)\} (\S+?)(?:,|$)", each)
        values = [float(value) for labels, value in labelled if "none=" not in labels]
        assert len(values) <= 1, each
        results.append(values[0] if values else None)
    return results


class Worker:
    """The product's scheduler on a modelled engine, with the metrics of a prefill worker."""

    def __init__(self, name: str, ready_at: float) -> None:
        self.name = name
        self.ready_at = ready_at
        self.now = ready_at
        self.busy_s = 0.0
        self.draining = False
        self._pool = BlockPool(8192, prefix_cache=False)
        self._scheduler = PrefillScheduler(
            self._pool,
            block_size=BLOCK_SIZE,
            chunk_size=512,
            token_budget=1024,
            max_waiting=65536,
            ageing_s=30.0,
            ttft_target_s=lambda tier: 2.0,
            costs=Costs(prefill_s_per_token=TOKEN_S),
        )

    @property
    def queued_s(self) -> float:
        """The value of `baton_prefill_queued_seconds`."""
        return self._scheduler.num_uncomputed * TOKEN_S

    def add(self, work: Prefill, now: float) -> None:
        """A prompt arrives."""
        if not self._scheduler.requests():
            self.now = max(self.now, now)
        self._scheduler.add(PrefillRequest(work, Incarnation("g"), arrived=now, deadline=math.inf))

    def run(self, until: float) -> Iterator[tuple[RequestId, float]]:
        """Compute until the time `until`; yield (prompt, time of its first token) for each prompt that is done."""
        while self._scheduler.requests() and self.now < until:
            self._scheduler.admit(self.now)
            chunks = self._scheduler.schedule(self.now)
            took_s = STEP_S + TOKEN_S * sum(chunk.end - chunk.start for chunk in chunks)
            self.now += took_s
            self.busy_s += took_s
            for chunk in self._scheduler.step_done(chunks):
                if chunk.last:
                    self._scheduler.holdings.end(chunk.prompt.key)
                    yield chunk.prompt.key.request, self.now

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self._scheduler.requests()


@dataclass
class Story:
    """The course of a simulation, sampled at each decision of the autoscaler."""

    times_s: list[float] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    wanted: list[float | None] = field(default_factory=list)
    ttft_s: list[tuple[float, float]] = field(default_factory=list)
    """(arrival, time to first token)."""
    refused: list[float] = field(default_factory=list)
    """Arrival times of refused requests."""

    def reversals(self, after_s: float = 0.0) -> int:
        """Number of times that scaling changed its direction."""
        steps = [
            b - a
            for (t, a), b in zip(zip(self.times_s, self.replicas, strict=True), self.replicas[1:], strict=False)
            if t >= after_s
        ]
        signs = [step > 0 for step in steps if step]
        return sum(a != b for a, b in itertools.pairwise(signs))

    def first(self, replicas: int, since_s: float) -> float:
        """Seconds from `since_s` until at least `replicas` workers were requested; infinite if never."""
        return (
            next(
                (t for t, n in zip(self.times_s, self.replicas, strict=True) if t >= since_s and n >= replicas),
                math.inf,
            )
            - since_s
        )

    def p90_ttft_s(self, begin_s: float, end_s: float) -> float:
        """90th percentile of the time to first token of requests that arrived in `[begin_s, end_s)`."""
        some = [ttft for arrived, ttft in self.ttft_s if begin_s <= arrived < end_s]
        return percentile(some, 90) if some else math.nan

    def met_after_s(self, target_s: float, since_s: float) -> float:
        """Seconds from `since_s` until a minute began in which 90 % of the first tokens came within `target_s`."""
        end_s = self.times_s[-1]
        minutes = itertools.takewhile(lambda begin: begin + 60 <= end_s, itertools.count(since_s, SCRAPE_S))
        return next((m - since_s for m in minutes if self.p90_ttft_s(m, m + 60) <= target_s), math.inf)


class Pool:
    """The workers, the gateway in front of them, and the samples that Prometheus has scraped from both."""

    def __init__(self, rate: Callable[[float], float], seed: int) -> None:
        self._draw = random.Random(seed)
        self._rate = rate
        self._most = max(rate(t) for t in range(0, 7200, 10))
        self._ttft_limits = TtftLimits(dict.fromkeys(Tier, 30.0))
        self._metrics = GatewayMetrics("model")
        self._num_refused = 0
        self._numbers = itertools.count()
        self._arrived: dict[RequestId, tuple[float, Expected]] = {}
        self._coming = 0.0
        self._scraped: dict[str, list[float | None]] = {}
        self._num_scrapes = 0
        self.workers = [Worker("p0", 0.0)]
        self._names = (f"p{number}" for number in itertools.count(1))
        self.story = Story()
        self._next()

    def _next(self) -> None:
        """The next arrival of a Poisson process whose rate changes (thinning)."""
        while True:
            self._coming += self._draw.expovariate(self._most)
            if self._draw.random() * self._most <= self._rate(self._coming):
                return

    def run(self, until: float) -> None:
        """Let requests arrive and be computed until the time `until`."""
        while self._coming < until:
            self._work(self._coming)
            self._arrive(self._coming)
            self._next()
        self._work(until)

    def _work(self, until: float) -> None:
        for worker in self.workers:
            for request, moment in worker.run(until):
                arrived, expected = self._arrived.pop(request)
                self._metrics.time_to_first_token.observe(moment - arrived)
                self._ttft_limits.observe(Tier.STANDARD, expected, moment - arrived, moment)
                self.story.ttft_s.append((arrived, moment - arrived))
        self.workers = [worker for worker in self.workers if not (worker.draining and worker.idle)]

    def _arrive(self, now: float) -> None:
        num_tokens = PROMPTS.draw(self._draw)
        usable = [worker for worker in self.workers if worker.ready_at <= now and not worker.draining]
        chosen = min(usable, key=lambda worker: worker.queued_s)
        expected = Expected(queue_s=chosen.queued_s, prompt_s=num_tokens * TOKEN_S, room_s=0.0)
        if self._ttft_limits.refusal(Tier.STANDARD, expected, now) is not None:
            self._num_refused += 1
            self.story.refused.append(now)
            return
        request = RequestId(f"r{next(self._numbers)}")
        self._arrived[request] = now, expected
        work = Prefill(
            request=request,
            attempt=1,
            token_ids=(7,) * num_tokens,
            prompt_len=num_tokens,
            choices=(0,),
            sampling=SamplingParams(max_tokens=1),
            budget_s=600.0,
        )
        chosen.add(work, now)

    def scale(self, replicas: int, now: float) -> None:
        """Change the pool to `replicas` workers: start new ones, or drain the youngest."""
        staying = [worker for worker in self.workers if not worker.draining]
        for _ in range(replicas - len(staying)):
            self.workers.append(Worker(next(self._names), now + START_S))
        for worker in staying[replicas:]:
            worker.draining = True
            worker.ready_at = min(worker.ready_at, now)

    def scrape(self, now: float) -> Samples:
        """Prometheus' samples of the last minutes."""
        found: dict[str, float] = {}
        for worker in self.workers:
            labels = f'namespace="baton", pod="{worker.name}", component="prefill"'
            found[f"up{{{labels}}}"] = 1
            if worker.ready_at <= now:
                found[f"baton_engine_busy_seconds_total{{{labels}}}"] = worker.busy_s
                found[f"baton_prefill_queued_seconds{{{labels}}}"] = worker.queued_s
        labels = 'namespace="baton", pod="g", component="gateway"'
        found[f"up{{{labels}}}"] = 1
        found[f'baton_gateway_refused_total{{{labels}, role="prefill", tier="standard"}}'] = self._num_refused
        found[f'baton_gateway_refused_total{{{labels}, role="decode", tier="standard"}}'] = 0
        for family in self._metrics.registry.collect():
            if family.name == "vllm:time_to_first_token_seconds":
                for sample in family.samples:
                    more = "".join(f', {name}="{value}"' for name, value in sample.labels.items())
                    found[f"{sample.name}{{{labels}{more}}}"] = sample.value
        for name in {*self._scraped, *found}:
            # Prometheus marks the series of a vanished target as stale; promtool's notation cannot do so in a gap.
            series = self._scraped.setdefault(name, [None] * self._num_scrapes)
            series.append(found.get(name))
        self._num_scrapes += 1
        recent = {name: series[-WINDOW:] for name, series in self._scraped.items()}
        return {name: series for name, series in recent.items() if any(value is not None for value in series)}


def simulate(
    rate: Callable[[float], float], end_s: float, seed: int, spec: dict[str, Any], query: str = WANTED
) -> Story:
    """Simulate `end_s` seconds with `rate(t)` requests per second, scaled by the result of `query`."""
    pool, scaler = Pool(rate, seed), Autoscaler(autoscaler("prefill"))
    replicas, story = 1, pool.story
    scrapes: list[Samples] = []
    with TemporaryDirectory() as scratch:
        for index in range(int(end_s / SCRAPE_S)):
            now = float((index + 1) * SCRAPE_S)
            pool.run(now)
            scrapes.append(pool.scrape(now))
            seen = max(0, index - LATE)
            if index and seen == len(story.wanted):  # promtool takes its time to start: for several scrapes at once
                story.wanted += evaluate(scrapes, query, Path(scratch), spec)
                scrapes.clear()
            replicas = scaler.replicas(now, replicas, story.wanted[seen] if index else None)
            pool.scale(replicas, now)
            story.times_s.append(now)
            story.replicas.append(replicas)
            story.ready.append(sum(worker.ready_at <= now for worker in pool.workers))
        story.wanted += evaluate(scrapes, query, Path(scratch), spec) if scrapes else []
    return story


def step(before: float, after: float, at_s: float, back_at_s: float = math.inf) -> Callable[[float], float]:
    """A rate of `before` requests per second, and of `after` in `[at_s, back_at_s)`."""
    return lambda t: after if at_s <= t < back_at_s else before


QUEUE_ALONE: Final = "sum by (namespace) (baton_prefill_queued_seconds) / 1"
"""One worker for each second of queued work: a common rule."""
STEP_AT_S: Final = 300.0
BEFORE, AFTER = 2.0, 11.0
"""Requests per second: half the capacity of one worker, and the load of four workers at three quarters of theirs."""
NEEDED: Final = 4
TARGET_S: Final = 2.0
"""Target for the 90th percentile of the time to first token."""


def figures(story: Story, end_s: float) -> dict[str, Any]:
    """The figures of a run that are recorded."""
    return {
        "seconds_until_needed_are_asked_for": story.first(NEEDED, STEP_AT_S),
        "seconds_until_the_target_is_met": story.met_after_s(TARGET_S, STEP_AT_S),
        "most_replicas": max(story.replicas),
        "last_replicas": story.replicas[-1],
        "changes_of_direction": story.reversals(),
        "p90_ttft_s_in_the_first_five_minutes_of_the_step": story.p90_ttft_s(STEP_AT_S, STEP_AT_S + 300),
        "p90_ttft_s_after": story.p90_ttft_s(STEP_AT_S + 300, end_s),
        "refused": len(story.refused),
        "last_refusal_after_the_step_s": max(story.refused, default=STEP_AT_S) - STEP_AT_S,
        "replicas": list(zip(story.times_s, story.replicas, strict=True)),
    }


def changes(replicas: Sequence[tuple[float, int]]) -> list[tuple[tuple[float, int], tuple[float, int]]]:
    """For each change of the number of replicas, the samples before and after it."""
    return [(before, after) for before, after in itertools.pairwise(replicas) if before[1] != after[1]]


def measure(
    scratch: Path, *, minutes: float = 35.0, runs: Annotated[int, "seeds, from --seed on"] = 3, seed: int = 0
) -> Result:
    """Simulate the step, scaled by the rules and by the queue alone."""
    found: dict[str, Any] = {}
    for name, query in (("rules", WANTED), ("queue alone", QUEUE_ALONE)):
        found[name] = []
        for each in range(seed, seed + runs):
            story = simulate(step(BEFORE, AFTER, STEP_AT_S), 60 * minutes, each, rules(), query)
            found[name].append(figures(story, 60 * minutes))
            show(f"{name} {each}", found[name][-1])
    workload = {"requests_per_s": [BEFORE, AFTER], "step_at_s": STEP_AT_S, "token_s": TOKEN_S, "step_s": STEP_S}
    return Result(name="autoscale", figures=found, workload=workload | {"start_s": START_S})


if __name__ == "__main__":
    run(measure, __doc__)
