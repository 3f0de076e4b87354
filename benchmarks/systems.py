"""The systems that are compared on one machine with the same weights and prompts, and how they take turns.

All systems are up during the whole run, and each gets one run of the load in turn, in another order each round. The
processes of vLLM are stopped while another system has its turn, since each idle engine of it takes 2 to 3 % of a core;
an idle stack of Baton takes 0.6 %, and is not stopped. All have equal cores: a pair has one core for each of
its workers, a single system has both. The load is token ids, the same to all systems in a round.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.command import show
from benchmarks.figures import compared
from benchmarks.local import local_stack
from benchmarks.models import Model, model_with_texts
from benchmarks.peers import vllm
from benchmarks.peers.process import groups, paused

PAIRS = (("baton pair", "vllm pair"), ("baton colocated", "vllm single"))
SYSTEMS = tuple(name for pair in PAIRS for name in pair)

Workload = Literal["fixed", "sharegpt"]


SETTLING_S = 2.0
"""Seconds that a system gets after its turn to end requests whose clients have left."""


@dataclass(frozen=True)
class System:
    """A system that is up."""

    url: str
    groups: frozenset[int] = frozenset()
    """Its process groups that are stopped while another system has its turn."""


Turn = dict[str, Any]
"""One run of the load on one system: the system, the point of the load, the round, the seed, and the figures."""


def start(stack: ExitStack, name: str, folder: Path, model: Model, dtype: str, itl_target_s: float = 0.0) -> str:
    """Start a system; return its base URL. The prefill worker of a pair computes every prompt, however short.
    `itl_target_s` is Baton's target between tokens, 0 its default."""
    target = {"BATON_STANDARD_ITL_S": str(itl_target_s)} if itl_target_s else {}
    common = ["--model", str(folder), "--dtype", dtype, "--kv-cache-bytes", str(2**30)]
    match name:
        case "baton pair":
            handed_over = {"BATON_LOCAL_PREFILL_TOKENS": "0"} | target
            return stack.enter_context(local_stack([*common, "--prefill", "1", "--decode", "1"], handed_over)).url
        case "baton colocated":
            return stack.enter_context(local_stack([*common, "--prefill", "0", "--decode", "1"], target)).url
        case "vllm single" | "vllm pair":
            form = name.removeprefix("vllm ")
            return stack.enter_context(vllm.FORMS[form](folder, dtype=dtype, settings=vllm.chosen(form, model, dtype)))
    raise SystemExit(f"no such system: {name}")


@contextmanager
def started(
    scratch: Path, model: Model, dtype: str, systems: Sequence[str], itl_target_s: float = 0.0
) -> Iterator[dict[str, System]]:
    """Start all systems with one checkpoint; yields them by name. For `itl_target_s` see `start`."""
    folder = model_with_texts(scratch, model)
    with ExitStack() as stack:
        found = {}
        for name in systems:
            before = groups()
            url = start(stack, name, folder, model, dtype, itl_target_s)
            found[name] = System(url, groups() - before)
        yield found


def peers_of(systems: Sequence[str], model: Model, dtype: str) -> dict[str, Any] | None:
    """The description of the other systems for the record; None if there are none."""
    forms = [name.removeprefix("vllm ") for name in systems if name.startswith("vllm ")]
    settings = {form: asdict(vllm.chosen(form, model, dtype)) for form in forms}
    return {"vllm": vllm.described(dtype, settings)} if forms else None


def part(systems: Sequence[str]) -> str:
    """The end of a record's name: of a part of the systems, such as those that fit into memory together, it names them,
    so that it does not replace the record of all."""
    return "" if tuple(systems) == SYSTEMS else "".join(f"-{name.replace(' ', '-')}" for name in systems)


def lengths_of(workload: Workload, input_tokens: int, output_tokens: int) -> dict[str, int | None]:
    """The lengths in tokens, for the record: of `fixed` those given, of ShareGPT where they are cut. Two thirds of its
    answers would be longer."""
    if workload == "fixed":
        return {"input_tokens": input_tokens, "output_tokens": output_tokens}
    return {"input_tokens": None, "output_tokens": None, "max_input_tokens": 1500, "max_output_tokens": 300}


def length_options(workload: Workload, lengths: Mapping[str, int | None]) -> list[str]:
    """Options of the load generator for such lengths."""
    told = ((f"--{name.replace('_', '-')}", str(number)) for name, number in lengths.items() if number is not None)
    return ["--workload", workload, *itertools.chain.from_iterable(told)]


def turns(points: Sequence[float], rounds: int) -> Iterator[tuple[int, float]]:
    """(round, point of the load) of each turn. Round -1 is a warm-up at each point."""
    return itertools.product(range(-1, rounds), points)


def order(systems: Sequence[str], round_number: int) -> list[str]:
    """The order in a round. Every second round has the order of the one before backwards, so that a machine that slows
    down favours neither of two; then another one is first."""
    first = round_number // 2 % len(systems)
    turned = [*systems[first:], *systems[:first]]
    return turned[::-1] if round_number % 2 else turned


def in_turns(
    systems: Mapping[str, System],
    by: str,
    points: Sequence[float],
    *,
    rounds: int,
    minutes: float,
    load: Callable[[str, float, int], dict[str, Any]],
) -> Iterator[list[Turn]]:
    """Let the systems take turns at each point of the load; yields all turns so far after each point.

    `by` names what the points are; `load` runs one (system, point, seed) and returns its figures. No point begins when
    `minutes` have passed. Each point and round has a seed of its own, so that no prompt is in a prefix cache already.
    """
    done: list[Turn] = []
    end = time.monotonic() + 60 * minutes
    for number, point in turns(points, rounds):
        if time.monotonic() > end:
            return
        seed = round(1000 * point) + number + 1
        for name in order(tuple(systems), number):
            with paused([group for other in systems if other != name for group in systems[other].groups]):
                figures = load(name, point, seed)
            time.sleep(SETTLING_S)
            show(f"{number} {name}, {point:g}", figures)
            done += [{"system": name, by: point, "round": number, "seed": seed, **figures}] if number >= 0 else []
        if done:
            yield done


def compared_pairs(done: Sequence[Turn], by: str, figures: Sequence[str]) -> list[dict[str, Any]]:
    """For each pair of systems and each point of the load: medians, and the ratios of the rounds."""
    made = []
    for ours, theirs in PAIRS:
        for point in sorted({each[by] for each in done}):
            rounds = [
                {each["system"]: each for each in done if (each[by], each["round"]) == (point, number)}
                for number in sorted({each["round"] for each in done})
            ]
            rounds = [each for each in rounds if ours in each and theirs in each]
            if not rounds:
                continue
            entry: dict[str, Any] = {"ours": ours, "theirs": theirs, by: point}
            for figure in figures:
                entry[figure] = compared((each[ours][figure], each[theirs][figure]) for each in rounds)
            made.append(entry)
    return made
