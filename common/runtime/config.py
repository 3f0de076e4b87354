"""Every setting of every role: declared once, typed, validated. Command line and `BATON_*` variables derive from it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings

from common.contract.messages.session import Profile
from common.contract.tiers import Target, Tier
from common.runtime.checkpoint import DEMO_MODEL
from common.runtime.clock import Pulse
from common.runtime.logs import LogFormat
from common.runtime.options import load_options, with_prefix
from common.runtime.setting_types import (
    HostNames,
    IPv4,
    LogLevel,
    ModelNames,
    Networks,
    Origins,
    Port,
    Width,
    WorkerAddresses,
    address,
)

ENV_PREFIX = "BATON_"
_OTHER_PREFIXES = ("BATON_BENCH_", "BATON_KV_SIZE_")
"""Variables of `baton bench` and of `baton kv-size`, which the roles leave alone."""
_SERVICE_VARIABLE = re.compile(r"BATON_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP)\w*)?)")
"""What Kubernetes sets in every pod beside a Service whose name is `baton`, or begins with `baton-`."""
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://[^/]+:\d+")
_BARE_PORT = re.compile(r"(?!.*_(SERVICE_PORT|PORT_\d+_(TCP|UDP)))\w+_PORT")
"""A port without anything of a Service in its name: Kubernetes then sets a URL."""
_RIDING_TOKENS = 128
"""Prompt tokens for which a token budget by default has room beside a full batch."""
MAX_DRAFT_TOKENS = 15
"""Most drafted tokens of a sequence in a step."""
_LEAST_RIDING_TOKENS = 16
"""Prompt tokens for which any token budget must have room beside a full batch."""
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

DeviceType = Literal["cpu", "cuda"]
DEFAULTS_BY_DEVICE: Mapping[DeviceType, Mapping[str, int]] = {
    "cpu": {"block_size": 32, "chunk_size": 512, "token_budget": 1024, "draft_cache_bytes": 2**27},
    "cuda": {"block_size": 64, "chunk_size": 2048, "token_budget": 4096, "draft_cache_bytes": 2**32},
}
"""What a setting is that is given as 0. KV heads are outermost in a block: a head's keys lie in pieces of `block_size`
slots, and pieces of 16 are too short for the prefetchers of a CPU where heads are small."""
DEFAULT_MAX_REGISTRATIONS = 32
"""Most registrations of the KV cache with NIXL at once."""


class ProcessSettings(BaseSettings):
    """What every process has."""

    model_config = with_prefix(ENV_PREFIX)

    model: str = Field(DEMO_MODEL, description="demo, a Hugging Face folder, or a hub id")
    revision: str | None = Field(
        None, min_length=1, description="commit, tag or branch of a hub id (none: its branch main)"
    )
    log_level: LogLevel = Field("info", description="least severe level that is logged")
    log_format: LogFormat = Field("text", description="text, or json: one object a line")
    heartbeat_interval_s: float = Field(0.25, gt=0, le=60, description="seconds between heartbeats")
    heartbeat_timeout_s: float = Field(1.5, gt=0, le=600, description="seconds of silence after which a peer is lost")
    curve_keys: str | None = Field(
        None, description="file of keys (baton keys FILE) that encrypt the control channel; without it, it is open"
    )
    announce_fd: int | None = Field(None, description="pipe on which to report start-up to a supervisor")
    end_with_parent: int | None = Field(None, description="process id of the parent to end with")

    @model_validator(mode="after")
    def _timeout_outlasts_heartbeats(self) -> Self:
        if self.heartbeat_timeout_s < 3 * self.heartbeat_interval_s:
            raise ValueError("heartbeat_timeout_s must be at least three times heartbeat_interval_s")
        return self

    @property
    def pulse(self) -> Pulse:
        """The heartbeat settings."""
        return Pulse(interval_s=self.heartbeat_interval_s, timeout_s=self.heartbeat_timeout_s)


class TierSettings(ProcessSettings):
    """What every process has that knows the tiers' targets."""

    interactive_ttft_s: float = Field(0.5, gt=0, description="target of the tier interactive: seconds to first token")
    standard_ttft_s: float = Field(2.0, gt=0, description="target of the tier standard: seconds to first token")
    batch_ttft_s: float = Field(60.0, gt=0, description="target of the tier batch: seconds to first token")

    def ttft_target_s(self, tier: Tier) -> float:
        """Seconds from arrival to the first token that a tier aims at, for a short prompt."""
        return {
            Tier.INTERACTIVE: self.interactive_ttft_s,
            Tier.STANDARD: self.standard_ttft_s,
            Tier.BATCH: self.batch_ttft_s,
        }[tier]


class TokenTierSettings(TierSettings):
    """What processes have, besides, that know how long the tokens of an answer may take."""

    interactive_itl_s: float = Field(
        0.1, gt=0, description="target of the tier interactive: mean seconds between tokens"
    )
    standard_itl_s: float = Field(0.2, gt=0, description="target of the tier standard: the same")
    batch_itl_s: float = Field(1.0, gt=0, description="target of the tier batch: the same")

    def itl_target_s(self, tier: Tier) -> float:
        """Mean seconds between the tokens of an answer that a tier aims at."""
        return {
            Tier.INTERACTIVE: self.interactive_itl_s,
            Tier.STANDARD: self.standard_itl_s,
            Tier.BATCH: self.batch_itl_s,
        }[tier]

    @property
    def targets(self) -> Mapping[Tier, Target]:
        """What each tier aims at."""
        return {tier: Target(ttft_s=self.ttft_target_s(tier), itl_s=self.itl_target_s(tier)) for tier in Tier}


class WorkerSettings(TierSettings):
    """What both worker roles have."""

    host: IPv4 = Field("127.0.0.1", description="IPv4 address to bind; peers and gateways reach the worker here")
    control_port: Port = Field(0, description="control port (0: any free one)")
    http_port: Port = Field(0, description="port of /health, /ready and /metrics (0: any free one)")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="auto: the checkpoint's")
    block_size: int = Field(0, ge=0, le=256, description="token slots in a KV block (0: 32 on a CPU, 64 on a GPU)")
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="bytes of the KV cache (none: 256 MiB on a CPU; what is free on a GPU, less the reserve)",
    )
    gpu_reserve_bytes: int = Field(
        4 * 2**30, ge=0, description="GPU memory that a KV cache without a size leaves to activations and CUDA graphs"
    )
    gpu_share: float = Field(
        1.0, gt=0, le=1, description="share of each GPU's memory that the worker may use, if others have the rest"
    )
    cpu_kernels: bool = Field(True, description="on a CPU: compute with kernels in C, compiled at first use")
    batch_invariant: bool = Field(
        False,
        description="compute each token with the same bits whatever is computed beside it: on a GPU, and for float16 "
        "on a CPU with instructions for it, by kernels whose order of sums is fixed",
    )
    num_threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="threads of the engine on a CPU, of each rank (0: one for each usable core, in all)",
    )
    tensor_parallel: Width = Field(
        1, description="ranks among which the model is divided, each a process, on GPUs with one of its own"
    )
    run_ahead: Literal["auto", "on", "off"] = Field(
        "auto", description="plan a step while the one before it runs: auto does on a GPU"
    )
    transport: Literal["nixl", "zmq"] = Field("nixl", description="how KV blocks move between workers; zmq: on CPUs")
    expose_memory_over_tcp: bool = Field(
        False,
        description="let UCX listen off loopback: whoever reaches its port reads and writes this worker's memory",
    )
    require_rdma: bool = Field(
        False, description="move blocks by RDMA or NVLink alone: do not start without, and read nothing over TCP"
    )
    max_registrations: int = Field(
        DEFAULT_MAX_REGISTRATIONS,
        ge=2,
        le=65536,
        description="NIXL agents, each with a registration of the KV cache: one serves, one for each source read from",
    )
    peer_networks: Networks | None = Field(
        None,
        description="networks in which a worker may connect to an address that a message names: 10.0.0.0/8,... "
        "(none: anywhere with CURVE keys; else loopback, or the subnets of --host, no link-local ones)",
    )
    checksums: bool = Field(False, description="verify every block that moves by CRC-32 (CPU only)")
    max_waiting: int = Field(2048, ge=1, le=65536, description="requests waiting; one more is refused")
    prefix_cache: bool = Field(True, description="keep the KV of prompts and answers for prompts that begin alike")
    quarantine_bound_s: float = Field(
        10.0, gt=0, description="seconds, and 10 for each GB, after which the agent of quarantined blocks is replaced"
    )
    read_bound_s: float = Field(
        30.0, gt=0, description="seconds, and 10 for each GB, after which a read is given up, and its agent replaced"
    )
    ageing_s: float = Field(30.0, gt=0, description="seconds of waiting that entitle a lower tier to a share")
    drain_grace_s: float = Field(
        30.0, ge=0, le=86400, description="seconds after SIGTERM in which requests finish, or move to other workers"
    )

    def on(self, device: DeviceType) -> Self:
        """These settings on the device that was found: whatever is 0 for a default by device has that default."""
        names = [name for name in DEFAULTS_BY_DEVICE[device] if getattr(self, name, None) == 0]
        return self.model_copy(update={"device": device} | {name: DEFAULTS_BY_DEVICE[device][name] for name in names})

    @property
    def runs_ahead(self) -> bool:
        """Whether a worker plans a step while the one before it runs. `device` must have been found, see `on`."""
        return self.device == "cuda" if self.run_ahead == "auto" else self.run_ahead == "on"


class PrefillSettings(WorkerSettings):
    """Settings of a prefill worker."""

    chunk_size: int = Field(
        0,
        ge=0,
        le=65536,
        description="most tokens of one prompt in one step (0: 512 on a CPU, 2048 on a GPU); fewer where the step "
        "would take longer than half of the shortest TTFT target",
    )
    token_budget: int = Field(
        0, ge=0, le=2**20, description="most tokens of all prompts in one step (0: 1024 on a CPU, 4096 on a GPU)"
    )
    pull_prefixes: Literal["cost", "always", "never"] = Field(
        "cost", description="whether to pull a prompt's beginning that another worker holds; cost: if that is cheaper"
    )
    pull_patience_s: float = Field(
        1.0, gt=0, le=60, description="least seconds after which a pull that has not ended is given up"
    )
    unattached_ttl_s: float = Field(30.0, gt=0, description="seconds an offer waits for a decode worker to attach")


class DecodeSettings(WorkerSettings, TokenTierSettings):
    """Settings of a decode worker."""

    max_num_seqs: int = Field(64, ge=1, le=65536, description="most sequences in the running batch")
    token_budget: int = Field(
        0,
        ge=0,
        le=2**20,
        description="most tokens in one step, prompts and decodes together (0: 1024 on a CPU, 4096 on a GPU; more if "
        "max_num_seqs and the prompts beside them need it)",
    )
    prefill_tokens: int = Field(
        0,
        ge=0,
        le=65536,
        description="most prompt tokens in a step with decodes (0: chosen in each step by its expected time, the ITL "
        "target of who decodes and the TTFT target of who waits); a step without decodes has at most token_budget, and "
        "fewer, but at least 128, where it would take longer than four fifths of the shortest TTFT target",
    )
    prefill_priority: bool = Field(False, description="compute whole prompts before anything is decoded")
    memory_reserve: float = Field(
        0.05, ge=-1, le=0.9, description="share of the KV cache kept from new requests; below 0 commits more than all"
    )
    swap_bytes: int = Field(256 * 2**20, ge=0, description="host memory for the KV of preempted sequences")
    preempt_by: Literal["cost", "swap", "recompute"] = Field(
        "cost", description="how a sequence gives up its blocks: cost takes the cheaper way"
    )
    profile: Profile = Field(
        Profile.THROUGHPUT,
        description="throughput: large batches; latency: no larger than keeps the ITL target of the tier interactive",
    )
    speculation: Literal["default", "off", "lookup", "draft", "auto"] = Field(
        "default",
        description="verify several tokens of a sequence in a step where that yields more tokens per second; lookup: "
        "those that followed the last ones earlier in the text; draft: those of a draft model; auto: of whichever is "
        "right more often; default: off, or with --profile latency lookup (auto with a draft_model)",
    )
    draft_model: str | None = Field(
        None, description="folder or hub id of a small model with the same tokenizer, for --speculation draft or auto"
    )
    draft_cache_bytes: int = Field(
        0, ge=0, description="bytes of the draft model's KV cache (0: 134217728 on a CPU, 4294967296 on a GPU)"
    )
    draft_tokens: int = Field(
        0,
        ge=0,
        le=MAX_DRAFT_TOKENS,
        description="tokens that are drafted of a sequence of which any can be (0: chosen in each step by what pays)",
    )

    @model_validator(mode="after")
    def _drafts_have_a_model(self) -> Self:
        if self.speculation in ("draft", "auto") and self.draft_model is None:
            raise ValueError(f"speculation {self.speculation} needs a draft_model")
        return self

    @model_validator(mode="after")
    def _budget_holds_the_batch(self) -> Self:
        least = self.max_num_seqs + (self.prefill_tokens or _LEAST_RIDING_TOKENS)
        if 0 < self.token_budget < least:
            raise ValueError(f"token_budget must be at least {least}, for max_num_seqs and prompt tokens beside them")
        return self

    @property
    def drafts_by(self) -> Literal["off", "lookup", "draft", "auto"]:
        """What tells drafted tokens: `speculation`, by default that of the profile."""
        if self.speculation != "default":
            return self.speculation
        if self.profile is Profile.THROUGHPUT:
            return "off"
        return "lookup" if self.draft_model is None else "auto"

    def on(self, device: DeviceType) -> Self:
        """See `WorkerSettings.on`; a token budget by default holds the batch."""
        made = super().on(device)
        if self.token_budget:
            return made
        least = self.max_num_seqs + max(_RIDING_TOKENS, self.prefill_tokens)
        return made.model_copy(update={"token_budget": max(made.token_budget, least)})


class GatewaySettings(TokenTierSettings):
    """Settings of a gateway."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: Port = Field(8000, description="port of the HTTP API (0: any free one)")
    dashboard: Literal["on", "off"] = Field("on", description="the page at /, and /pools from which it reads")
    admin_host: str = Field("127.0.0.1", description="address of the admin port")
    admin_port: Port | None = Field(None, description="port to look at workers and drain them (0: any free one)")
    prefill_workers: WorkerAddresses = Field(
        (), description="control addresses of prefill workers: host:port,... (none: decode workers compute prompts too)"
    )
    decode_workers: WorkerAddresses = Field((), description="control addresses of decode workers: host:port,...")
    discovery: Literal["static", "dns", "kubernetes"] = Field(
        "static",
        description="static: the workers named; dns: all addresses of names; kubernetes: EndpointSlices of Services",
    )
    prefill_service: str | None = Field(
        None, description="dns: host:port of the prefill workers; kubernetes: their Service (none: there are none)"
    )
    decode_service: str | None = Field(None, description="the same of the decode workers")
    discovery_period_s: float = Field(
        30.0, ge=1, le=240, description="seconds after which names are resolved, or EndpointSlices listed, once more"
    )
    kubernetes_namespace: str | None = Field(None, description="of the Services (default: the pod's own)")
    served_model_name: ModelNames = Field(
        (), description="name in the API, or several: answers and metrics have the first (default: the model's own)"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="most tokens of prompt and answer together (default: the model's context)"
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="largest request body")
    max_in_flight: int = Field(2048, ge=1, le=65536, description="requests in flight; one more gets 429")
    max_connections: int = Field(4096, ge=1, le=2**20, description="connections of clients; one more is turned away")
    header_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="seconds that a TLS handshake, and the head of a request, may take"
    )
    idle_timeout_s: float = Field(
        75.0,
        gt=0,
        le=86400,
        description="seconds that a connection is kept between requests: more than the balancer before the gateway "
        "keeps one",
    )
    api_keys: str | None = Field(
        None, description="file of the API keys that are let in (baton api-key NAME); without it, everyone is"
    )
    tls_cert: str | None = Field(None, description="PEM file of the certificate chain for HTTPS; needs --tls-key")
    tls_key: str | None = Field(None, description="PEM file of the certificate's key, not encrypted")
    cors_origins: Origins = Field(
        (), description="origins of web pages that may call from a browser: https://host[:port],... (*: any)"
    )
    allowed_hosts: HostNames = Field(
        (),
        description="names in Host by which clients may call, beside localhost and addresses (*: any); none: any, but "
        "for a gateway on a loopback address that asks for no key",
    )
    tenant_header: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="request header that names the tenant; it is believed, so your ingress must set it or strip it",
    )
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = Field(
        "auto", description="how the model writes calls of functions; auto: what its chat template tells"
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto", description="think: the model reasons between <think> and </think>; auto: what its chat template tells"
    )
    chat_template: str | None = Field(None, description="file with the chat template (none: the model's own)")
    local_prefill_tokens: int = Field(
        64, ge=0, le=2**20, description="prompts with at most this many uncached tokens are computed by a decode worker"
    )
    prefix_index_names: int = Field(
        2_000_000, ge=1024, le=2**30, description="most cached blocks that are known by name, 120 bytes each"
    )
    explain_routing: bool = Field(
        False, description="say in x-baton-* headers of each answer where its request went, and why"
    )
    interactive_limit_s: float = Field(
        0.5,
        ge=0,
        le=86400,
        description="seconds: interactive requests that would wait longer get 429 (0: never)",
    )
    standard_limit_s: float = Field(0.0, ge=0, le=86400, description="the same for tier standard")
    batch_limit_s: float = Field(0.0, ge=0, le=86400, description="the same for tier batch")
    engine_stall_s: float = Field(
        30.0, gt=0, le=86400, description="seconds without a step after which a busy engine counts as hanging"
    )
    patience_s: float = Field(
        10.0, ge=0, le=86400, description="seconds that a request which has lost its worker waits for a usable one"
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+(/\S*)?$",
        description="URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request (none: off)",
    )
    request_budget_s: float = Field(86400.0, gt=0, le=86400, description="seconds that a request may take in all")
    silence_s: float = Field(
        1800.0, gt=0, le=86400, description="seconds that a request may go without a new token, the first one included"
    )
    shutdown_grace_s: float = Field(5.0, ge=0, le=86400, description="seconds that open requests get after SIGTERM")

    @model_validator(mode="after")
    def _workers_are_named_or_found(self) -> Self:
        services = [each for each in (self.prefill_service, self.decode_service) if each is not None]
        if self.discovery == "static":
            if services:
                raise ValueError("prefill_service and decode_service need --discovery dns or kubernetes")
            return self
        if self.prefill_workers or self.decode_workers:
            raise ValueError(f"with --discovery {self.discovery} workers have no addresses, but services")
        if self.decode_service is None:
            raise ValueError("decode_service must be named; without prefill_service decode workers compute prompts too")
        for service in services:
            if self.discovery == "dns":
                address(service)
            elif _SERVICE_NAME.fullmatch(service) is None:
                raise ValueError(f"{service!r} is not the name of a Service")
        return self

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self


class ServeSettings(ProcessSettings):
    """Settings of the local stack."""

    host: str = Field("127.0.0.1", description="address of the HTTP API")
    port: Port = Field(8000, description="port of the HTTP API")
    admin_port: Port = Field(0, description="port to look at workers and drain them (0: any free one)")
    prefill: int = Field(1, ge=0, le=64, description="prefill workers; 0: decode workers compute the prompts too")
    decode: int = Field(1, ge=1, le=64, description="decode workers")
    latency: int = Field(0, ge=0, le=64, description="decode workers with --profile latency, besides those")
    prefill_tp: Width = Field(1, description="ranks of each prefill worker: its --tensor-parallel")
    decode_tp: Width = Field(1, description="ranks of each decode worker")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="auto: the checkpoint's")
    transport: Literal["nixl", "zmq"] = Field("nixl", description="how KV blocks move between workers; zmq: on CPUs")
    kv_cache_bytes: int | None = Field(
        None, ge=1, description="bytes of the KV cache of each worker (none: as the worker decides)"
    )
    chat_template: str | None = Field(None, description="file with the chat template (none: the model's own)")
    restart: Literal["always", "never"] = Field(
        "always", description="whether a process that ends is started again; never: the stack ends with it"
    )
    explain_routing: bool = Field(
        False, description="say in x-baton-* headers of each answer where its request went, and why"
    )
    grace_s: float = Field(10.0, gt=0, le=600, description="seconds that processes get to end on Ctrl-C")


Settings = TypeVar("Settings", bound=ProcessSettings)


def load(cls: type[Settings], program: str, arguments: Sequence[str]) -> Settings:
    """A role's settings; see `load_options`."""
    for name, value in list(os.environ.items()):
        if _SERVICE_VARIABLE.fullmatch(name) and _SERVICE_URL.fullmatch(value):
            del os.environ[name]  # of a Service, even where it has a setting's name, as that of `baton-admin` has
    family = (PrefillSettings, DecodeSettings, GatewaySettings, ServeSettings)
    return load_options(cls, program, arguments, family, _is_foreign)


def _is_foreign(variable: str) -> bool:
    if variable.startswith(_OTHER_PREFIXES):
        return True
    found = _SERVICE_VARIABLE.fullmatch(variable)
    return found is not None and (not _BARE_PORT.fullmatch(variable) or "://" in os.environ[variable])
