"""What the HTTP API is told at start: the model it speaks for, and the bounds within which it does."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.contract.errors import OperatorError
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier


def version() -> str:
    """Of Baton, as it is installed."""
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:  # run where it lies
        return "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most of everything that a client can make the gateway hold."""

    max_sequence_tokens: int
    """Prompt and output together: the model's context, or what the workers take if that is less."""
    max_body_bytes: int = 8 * 2**20
    max_bodies_bytes: int = 256 * 2**20
    """Of all bodies that are being read at a time, as they come; beyond, the client that has most of it gets a 429."""
    max_answer_bytes: int = 64 * 2**20
    """Of all answers to one request, at their longest; what would come to more is refused with 400."""
    max_in_flight: int = 2048
    """Most POST requests at once whose bodies have been read; the next one is refused with 429."""
    default_budget_s: float = 86400.0
    """Time that a generation may take."""
    body_timeout_s: float = 60.0
    """Time that a client may take to send its body."""
    body_grace_s: float = 10.0
    """For the first byte of a body; from then on it must come, on average, at `min_body_bytes_per_s`."""
    min_body_bytes_per_s: int = 1024
    stall_timeout_s: float = 60.0
    """Time that a streaming client may read nothing before it counts as gone."""
    retry_after_s: int = 1
    """What 429 and 503 say in `Retry-After`."""

    @property
    def max_body_values(self) -> int:
        """Commas and opening brackets in a body, those in its strings included: a prompt that the context takes, as
        text or as tokens, has fewer."""
        return max(100_000, 4 * self.max_sequence_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling parameters of a request that leaves them out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    @classmethod
    def from_model(cls, folder: Path) -> SamplingDefaults:
        """The model author's, from `generation_config.json`, where that file asks for sampling (`do_sample`).

        Raises `OperatorError` if the file is there and its values cannot be used.
        """
        path = folder / "generation_config.json"
        if not path.exists():
            return cls()
        try:
            config = json.loads(path.read_text())
            if not config.get("do_sample"):
                return cls()
            given = {name: config[name] for name in cls.__slots__ if config.get(name) is not None}
            TypeAdapter(SamplingParams).validate_python({"max_tokens": 1, **given})
        except (OSError, ValueError, AttributeError, RecursionError, ValidationError) as error:
            raise OperatorError(f"cannot use {path}: {error}") from error
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request must meet to count as goodput."""

    ttft_s: float = math.inf
    """Arrival to first token."""
    itl_s: float = math.inf
    """Mean gap between the tokens of each choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The model served, the bounds, and who may call."""

    model_name: str
    """What clients call the model, and what answers and metrics do."""
    other_names: tuple[str, ...] = ()
    """By which it may be called, too."""
    system_fingerprint: str | None = None
    """What answers say of it."""
    model_vocab_size: int
    """Rows of the model's embedding: every token id that goes to a worker is below it."""
    limits: Limits
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    targets: Mapping[Tier, Target] = field(default_factory=lambda: dict.fromkeys(Tier, Target()))
    tenant_header: str | None = None
    """Names the tenant of a request. It is believed, whoever wrote it: the operator named it, so the operator's ingress
    sets it, or strips it from what clients send. None makes all requests one tenant's. Where API keys are asked for,
    the tenant is the key's, and the header goes before it only for keys that say so."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser; see `gateway/access/cors.py`."""
    allowed_hosts: frozenset[str] | None = None
    """Names by which it may be called, beside addresses and `localhost`; None for any: `gateway/access/hosts.py`."""
    explain_routing: bool = False
    """Say with each answer where its request went, and why: addresses of workers, and what they have cached."""
    tool_parser: str = "auto"
    """The format of the model's calls, as `gateway.text.dialect` knows them; `none`, or `auto`."""
    reasoning_parser: str = "auto"
    """`think` for a model that reasons between tags; `none`, or `auto`."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that the model goes by."""
        return (self.model_name, *self.other_names)
