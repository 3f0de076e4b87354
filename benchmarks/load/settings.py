"""Every option of `baton bench`: declared once, typed, validated; each is also a variable `BATON_BENCH_<OPTION>`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, NoDecode

from common.runtime.options import load_options, with_prefix

ENV_PREFIX = "BATON_BENCH_"
MAX_REQUESTS = 1_000_000
_PLANNED_FIELDS = ("prompt", "messages", "stream", "stream_options", "max_tokens", "n", "model")

Arrivals = Literal["poisson", "gamma", "constant", "trace"]
Workload = Literal["fixed", "azure-code", "azure-conv", "sharegpt", "mooncake-conv", "trace"]


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not http://host:port")
    return text.rstrip("/").removesuffix("/v1")


def _object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        decoded = json.loads(value)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise ValueError("not a JSON object")
    return decoded


def _leaves_the_plan_alone(value: dict[str, Any]) -> dict[str, Any]:
    if fixed := [name for name in _PLANNED_FIELDS if name in value]:
        raise ValueError(f"may not set {', '.join(fixed)}: these follow from other options")
    return value


ExtraBody = Annotated[dict[str, Any], NoDecode, BeforeValidator(_object), AfterValidator(_leaves_the_plan_alone)]
Url = Annotated[str, AfterValidator(_url)]


class _Settings(BaseSettings):
    model_config = with_prefix(ENV_PREFIX)


class LoadSettings(_Settings):
    """The endpoint and the load."""

    url: Url = Field("http://127.0.0.1:8000", description="the endpoint, with or without /v1")
    model: str | None = Field(None, description="model to ask for (default: the first of /v1/models)")
    api: Literal["completions", "chat"] = Field("completions", description="which API: token arrays, or messages")
    api_key: SecretStr | None = Field(None, description="bearer token; not recorded")
    text: bool = Field(False, description="completions: send words instead of token ids")
    extra_body: ExtraBody = Field(default={}, description="JSON object, added to every request's body")
    timeout_s: float = Field(600.0, gt=0, le=86400, description="seconds that a request may take in all")

    requests: int = Field(
        100, ge=1, le=MAX_REQUESTS, description="arrivals; each is a conversation of --turns requests"
    )
    duration_s: float | None = Field(
        None, gt=0, le=86400, description="seconds of arrivals at --rate, instead of --requests"
    )
    warmup: int = Field(0, ge=0, le=10_000, description="requests sent before, and not counted")
    seed: int = Field(
        0, ge=0, description="what prompts, lengths and arrival times are drawn from, and nothing else is"
    )

    arrivals: Arrivals = Field("poisson", description="when requests arrive; trace: as in --trace, jittered")
    rate: float | None = Field(
        None, gt=0, description="arrivals in a second; inf: all at once (default: inf; the trace's own with a trace)"
    )
    cv: float = Field(1.0, gt=0, le=100, description="gamma: coefficient of variation of the gaps; above 1 is bursty")
    concurrency: int | None = Field(None, ge=1, le=65536, description="most requests in flight; others wait here")

    workload: Workload = Field(
        "fixed", description="lengths (fixed: --input-tokens and --output-tokens), or the trace's"
    )
    input_tokens: int = Field(512, ge=1, le=2**20, description="fixed: tokens of a prompt (of a turn)")
    output_tokens: int = Field(64, ge=1, le=2**20, description="fixed: tokens of an answer")
    max_input_tokens: int | None = Field(None, ge=1, description="longer prompts (turns) are cut to this many tokens")
    max_output_tokens: int | None = Field(None, ge=1, description="longer answers are cut to this many tokens")
    trace: Path | None = Field(
        None, description="Mooncake JSONL file: timestamp, input_length, output_length, hash_ids"
    )

    turns: int = Field(1, ge=1, le=1000, description="turns of a conversation (chat); each holds those before it")
    think_time_s: float = Field(0.0, ge=0, le=86400, description="mean seconds between an answer and the next turn")
    token_low: int = Field(10, ge=0, description="lowest token id in prompts")
    token_high: int = Field(249, ge=1, description="highest token id in prompts; below the model's vocabulary")
    tokens_per_word: float = Field(1.0, gt=0, le=100, description="text: tokens that the model makes of a word")
    ignore_eos: bool = Field(True, description="answers have exactly the tokens asked for")

    ttft_target_s: float | None = Field(None, gt=0, description="goodput: most seconds to the first token")
    tpot_target_s: float | None = Field(None, gt=0, description="goodput: most mean seconds for each later token")
    itl_target_s: float | None = Field(None, gt=0, description="goodput: most seconds between any two tokens")

    output: Path | None = Field(None, description="file for the results, JSON")
    timeline: bool = Field(False, description="results hold the times of every chunk of every request")

    @property
    def offered_rate(self) -> float | None:
        """Arrivals per second; None: the trace's own."""
        return math.inf if self.rate is None and self.arrivals != "trace" else self.rate

    @property
    def has_targets(self) -> bool:
        """Whether goodput is defined."""
        return any(target is not None for target in (self.ttft_target_s, self.tpot_target_s, self.itl_target_s))

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        wants_trace = "trace" in (self.arrivals, self.workload)
        if wants_trace != (self.trace is not None):
            raise ValueError("trace goes with arrivals trace or workload trace, and they with it")
        if self.duration_s is not None and self.arrivals != "trace" and not math.isfinite(self.offered_rate or 0):
            raise ValueError("duration_s needs a finite rate")
        if self.arrivals == "trace" and self.rate == math.inf:
            raise ValueError("arrivals trace needs a finite rate, or none")
        if self.turns > 1 and (self.api != "chat" or self.workload == "trace"):
            raise ValueError("turns above 1 need api chat, and a workload other than trace")
        if self.think_time_s > 0 and self.turns == 1:
            raise ValueError("think_time_s needs turns above 1")
        if self.cv != 1.0 and self.arrivals != "gamma":
            raise ValueError("cv needs arrivals gamma")
        if self.token_high < self.token_low:
            raise ValueError("token_high is below token_low")
        if self.timeline and self.output is None:
            raise ValueError("timeline needs output")
        return self


class SweepSettings(LoadSettings):
    """Rates upward until goodput breaks, then between the last that held and the first that did not."""

    rate: float | None = Field(1.0, gt=0, description="the first rate, in arrivals a second")
    attainment: float = Field(0.9, gt=0, le=1, description="share of requests that must meet every target")
    rate_factor: float = Field(2.0, gt=1, le=10, description="from one rate to the next, on the way up")
    bisections: int = Field(
        3, ge=0, le=20, description="rates tried between the last that held and the first that broke"
    )
    max_steps: int = Field(12, ge=1, le=100, description="most rates tried in all")

    @model_validator(mode="after")
    def _can_be_swept(self) -> Self:
        if not self.has_targets:
            raise ValueError("a sweep needs ttft_target_s, tpot_target_s or itl_target_s")
        if self.rate is None or self.rate == math.inf:
            raise ValueError("a sweep needs a finite rate to begin with")
        return self


class ReportSettings(_Settings):
    """Figures again from a file's timeline."""

    file: CliPositionalArg[Path] = Field(description="results with a timeline")


class PlotSettings(_Settings):
    """Pictures of results."""

    files: CliPositionalArg[list[Path]] = Field(description="results of sweeps, or of runs with a timeline")
    folder: Path = Field(Path(), description="where the pictures go")
    format: Literal["png", "svg", "pdf"] = Field("png", description="their format")


AnySettings = TypeVar("AnySettings", bound=_Settings)


def load(cls: type[AnySettings], program: str, arguments: Sequence[str]) -> AnySettings:
    """Options of `baton bench`; see `load_options`."""
    return load_options(cls, program, arguments, (LoadSettings, SweepSettings, ReportSettings, PlotSettings))
