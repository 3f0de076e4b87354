"""Plans which requests are sent, and when: a function of the settings alone, so that equal seeds give equal loads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.load.arrivals import arrival_times, jittered, scaled
from benchmarks.load.lengths import WORKLOADS, Fixed, clipped
from benchmarks.load.prompts import Alphabet, token_alphabet, word_alphabet
from benchmarks.load.settings import MAX_REQUESTS, LoadSettings
from benchmarks.load.trace import TraceLine, read_trace
from common.contract.errors import OperatorError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """One request."""

    prompt: str
    """JSON of the part that this turn adds: an array of token ids, or a string."""
    input_tokens: int
    output_tokens: int
    think_s: float = 0.0
    """Seconds between the end of the turn before and this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedConversation:
    """A sequence of requests, each sent after the one before it has ended; most often a single request."""

    time_s: float
    """Seconds from the start of the run until the first request is sent."""
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All conversations, in the order of their start."""

    conversations: tuple[PlannedConversation, ...]

    @property
    def num_requests(self) -> int:
        """Turns of all conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    def digest(self) -> str:
        """SHA-256 over every prompt, length and time: two runs with one digest had the same load."""
        digest = hashlib.sha256()
        for conversation in self.conversations:
            digest.update(repr(conversation.time_s).encode())
            for turn in conversation.turns:
                line = f"|{turn.prompt}|{turn.input_tokens}|{turn.output_tokens}|{turn.think_s!r}"
                digest.update(line.encode())
            digest.update(b"\n")
        return digest.hexdigest()


def make_plan(settings: LoadSettings) -> Plan:
    """Draw the load. Raises `OperatorError` if a trace cannot be read, or is too short."""
    count = _count(settings)
    lines = read_trace(settings.trace, count) if settings.trace is not None else []
    if settings.arrivals == "trace" and settings.duration_s is not None:
        times_s = [time_s for time_s in _times(settings, count, lines) if time_s <= settings.duration_s]
        count = len(times_s)
    elif lines and len(lines) < count:
        raise OperatorError(f"{settings.trace} holds {len(lines)} requests, and {count} are asked for")
    else:
        times_s = _times(settings, count, lines)
    turns = _trace_turns(settings, lines, count) if settings.workload == "trace" else _drawn_turns(settings, count)
    return Plan(
        tuple(PlannedConversation(time_s=time_s, turns=each) for time_s, each in zip(times_s, turns, strict=True))
    )


def warmup_plan(settings: LoadSettings) -> Plan:
    """Requests with the same distributions as the measured ones but other content, all at time 0; in place of a trace,
    they have the fixed lengths."""
    turns = [turns[:1] for turns in _drawn_turns(settings, settings.warmup, "warmup/")]
    return Plan(tuple(PlannedConversation(time_s=0.0, turns=each) for each in turns))


def _count(settings: LoadSettings) -> int:
    if settings.duration_s is None:
        return settings.requests
    if settings.arrivals == "trace":
        return MAX_REQUESTS
    rate = settings.offered_rate
    assert rate is not None
    return min(MAX_REQUESTS, max(1, round(rate * settings.duration_s)))


def _times(settings: LoadSettings, count: int, lines: Sequence[TraceLine]) -> list[float]:
    random = Random(f"{settings.seed}/arrivals")
    if settings.arrivals == "trace":
        return scaled(jittered([line.time_s for line in lines], random), settings.rate)
    rate = settings.offered_rate
    assert rate is not None
    return arrival_times(settings.arrivals, rate, count, settings.cv, random)


def _alphabet(settings: LoadSettings) -> Alphabet:
    if settings.api == "chat" or settings.text:
        return word_alphabet(settings.tokens_per_word)
    return token_alphabet(settings.token_low, settings.token_high)


def _trace_turns(settings: LoadSettings, lines: Sequence[TraceLine], count: int) -> list[tuple[PlannedTurn, ...]]:
    alphabet = _alphabet(settings)
    turns: list[tuple[PlannedTurn, ...]] = []
    for line in lines[:count]:
        tokens = min(line.input_tokens, settings.max_input_tokens or line.input_tokens)
        turn = PlannedTurn(
            prompt=alphabet.prompt_of_blocks(settings.seed, line.blocks, tokens),
            input_tokens=tokens,
            output_tokens=min(line.output_tokens, settings.max_output_tokens or line.output_tokens),
        )
        turns.append((turn,))
    return turns


def _drawn_turns(settings: LoadSettings, count: int, purpose: str = "") -> list[tuple[PlannedTurn, ...]]:
    """Draw `count` conversations. Lengths, pauses and prompts have separate random streams for each purpose, so that
    another rate changes no prompt."""
    fixed = (Fixed(settings.input_tokens), Fixed(settings.output_tokens))
    inputs, outputs = WORKLOADS.get(settings.workload, fixed)
    inputs, outputs = clipped(inputs, settings.max_input_tokens), clipped(outputs, settings.max_output_tokens)
    lengths = Random(f"{settings.seed}/{purpose}lengths")
    thoughts = Random(f"{settings.seed}/{purpose}thoughts")
    words = Random(f"{settings.seed}/{purpose}prompts")
    alphabet = _alphabet(settings)

    def turn(number: int) -> PlannedTurn:
        input_tokens, output_tokens = inputs.draw(lengths), outputs.draw(lengths)
        pause_s = thoughts.expovariate(1 / settings.think_time_s) if number and settings.think_time_s else 0.0
        return PlannedTurn(
            prompt=alphabet.prompt(words, input_tokens),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            think_s=pause_s,
        )

    return [tuple(turn(number) for number in range(settings.turns)) for _ in range(count)]
