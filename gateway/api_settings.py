"""Settings of the HTTP API at start: the model that it serves, and its limits."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.contract.errors import OperatorError
from common.contract.sampling import SamplingParams
from common.contract.tiers import NO_TARGETS, Target, Tier


def version() -> str:
    """Baton's installed version."""
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on everything that a client can make the gateway hold."""

    max_sequence_tokens: int
    """Most tokens of prompt and output together: the model's context, or less (`--max-model-len`)."""
    max_body_bytes: int = 8 * 2**20
    max_bodies_bytes: int = 256 * 2**20
    """Most bytes, as received, of all bodies being read; above it the client that holds most gets a 429."""
    max_answer_bytes: int = 64 * 2**20
    """Most bytes of all answers to one request at their longest; a request that could exceed it is refused with 400."""
    max_in_flight: int = 2048
    """Most POST requests in flight whose bodies have been read; further ones are refused with 429."""
    request_budget_s: float = 86400.0
    """Most seconds that a generation may take."""
    body_timeout_s: float = 60.0
    """Most seconds that a client may take to send its body."""
    body_grace_s: float = 10.0
    """Seconds without a rate limit on a body; after them it must have an average rate of `min_body_bytes_per_s`."""
    min_body_bytes_per_s: int = 1024

    @property
    def max_body_values(self) -> int:
        """Most commas and opening brackets in a body, those in its strings included. A prompt that fits the context, as
        text or as tokens, has fewer."""
        return max(100_000, 4 * self.max_sequence_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling parameters for requests that omit them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_model(cls, folder: Path) -> SamplingDefaults:
        """The model author's defaults from `generation_config.json`. If that file does not enable sampling
        (`do_sample`), only its repetition penalty counts: `transformers` applies it to greedy output, too.

        Raises `OperatorError` if the file is there and its values cannot be used.
        """
        path = folder / "generation_config.json"
        if not path.exists():
            return cls()
        try:
            config = json.loads(path.read_text())
            names = cls.__slots__ if config.get("do_sample") else ("repetition_penalty",)
            given = {name: config[name] for name in names if config.get(name) is not None}
            TypeAdapter(SamplingParams).validate_python({"max_tokens": 1, **given})
        except (OSError, ValueError, AttributeError, RecursionError, ValidationError) as error:
            raise OperatorError(f"cannot use {path}: {error}") from error
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The served model, the limits, and who may call."""

    model_name: str
    """Name of the model in requests, answers and metrics."""
    other_names: tuple[str, ...] = ()
    """Further names that requests may use for the model."""
    system_fingerprint: str | None = None
    """Reported in answers."""
    model_vocab_size: int
    """Rows of the model's embedding; every token id sent to a worker is less."""
    limits: Limits
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    targets: Mapping[Tier, Target] = field(default_factory=lambda: NO_TARGETS)
    tenant_header: str | None = None
    """Header that names the tenant of a request. It is trusted whoever wrote it, so the operator's ingress must set it
    or remove it from client requests. With None, all requests belong to one tenant. With API keys, the tenant is the
    key's, and the header takes precedence only for keys that allow it."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser; see `gateway/access/cors.py`."""
    allowed_hosts: frozenset[str] | None = None
    """Names by which the gateway may be called, besides addresses and `localhost`; None for any:
    `gateway/access/hosts.py`."""
    explain_routing: bool = False
    """Report in each answer's headers where its request went, and why: worker addresses and cached tokens."""
    tool_parser: str = "auto"
    """Format of the model's function calls, one known to `gateway.text.dialect`; `none`, or `auto`."""
    reasoning_parser: str = "auto"
    """`think` for a model that reasons between tags; `none`, or `auto`."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return (self.model_name, *self.other_names)
