"""Messages of a session itself, whatever it is used for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from common.contract.errors import Cause
from common.contract.kv_layout import Fingerprint
from common.contract.messages.fields import ByTier, Count, LinkMessage, OpenRequests, Seconds, Text

PULL_LATENCY_S: Final = 0.005
"""Fixed seconds of a prefix pull, whatever its size: attach, offer, start of the read, settle. A prefill worker decides
by it whether to pull, and a gateway foretells by it what the worker decides."""


class Role(StrEnum):
    """The role of a process."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"


class Profile(StrEnum):
    """What a decode worker is packed for."""

    THROUGHPUT = "throughput"
    """As many tokens per second as possible: large batches."""
    LATENCY = "latency"
    """Tokens in quick succession: a batch so small that its steps keep a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(LinkMessage):
    """Client to worker: opens a session, or opens it again after a loss; the worker aborts requests not listed."""

    number: Count = 0
    """Number of this Hello on the link; the client ignores a Welcome that answers an earlier Hello."""
    role: Role
    fingerprint: Fingerprint | None
    """None from a gateway, which holds no KV."""
    open_requests: OpenRequests
    """The requests of a gateway at this worker, or the unfinished pulls of a sink from this worker."""


class Phase(StrEnum):
    """Whether a worker accepts new work."""

    SERVING = "serving"
    DRAINING = "draining"
    """The worker accepts no new work; the work that it has continues, or moves to other workers."""
    DRAINED = "drained"
    """The worker holds nothing any more, so it can exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(LinkMessage):
    """Worker to client: the session is open. The client gives up its requests that are not in `open_requests`."""

    number: Count = 0
    """Number of the Hello that this answers."""
    role: Role
    fingerprint: Fingerprint
    max_sequence_tokens: Count
    """Most tokens, prompt and output together, that this worker accepts in one sequence."""
    transport: Annotated[str, Field(strict=True, min_length=1, max_length=64)]
    """Name of the data transport."""
    transport_metadata: Annotated[bytes, Field(strict=True, max_length=2**20)]
    """The data that a sink's transport needs in order to read this worker's blocks."""
    open_requests: OpenRequests
    phase: Phase = Phase.SERVING
    """The worker's phase now; later heartbeats update it."""
    profile: Profile = Profile.THROUGHPUT
    """Of a decode worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRefused(LinkMessage):
    """Worker to client: the session is refused, and why (a fingerprint mismatch names both values)."""

    cause: Cause
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRequired(LinkMessage):
    """Worker to client: send Hello (again). You have no session here, or I have restarted, or messages were lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(LinkMessage):
    """Either side ends the session on purpose; the client's open requests are aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(LinkMessage):
    """Worker to client, at a fixed interval. Lets the client detect a dead worker, a wedged engine and lost frames."""

    number: Count
    sent: Count = 0
    """Messages sent to this client in this session before this one; a client that received fewer says Hello again."""
    steps: Count
    """Engine steps finished since start."""
    running: Count
    """Sequences in the engine: the running batch, and prompts that are being computed."""
    waiting: Count
    """Requests that wait: at a prefill worker for their turn, at a decode worker for room. Sequences that wait for a
    place in a decode worker's batch count, too."""
    blocks_used: Count
    """Blocks in use; from a decode worker, the peak that it forecasts."""
    blocks_total: Count
    phase: Phase
    queued_tokens: ByTier = (0, 0, 0)
    """Prompt tokens that this worker has still to compute."""
    sequences: ByTier = (0, 0, 0)
    """Sequences that a decode worker has accepted and that have not ended."""
    places: Count = 0
    """Most sequences, of the size of the present ones, that a decode worker can hold at once; 0 from a prefill
    worker."""
    token_s: Seconds = 0.0
    """Measured seconds to compute one prompt token, with its part of the fixed time of a full step."""
    pulled_token_s: Seconds = 0.0
    """Measured seconds for a prefill worker to pull the KV of one token instead, beyond the pull's `PULL_LATENCY_S`."""
    sequence_s: Seconds = 0.0
    """EWMA of the seconds from first to last token of a decode worker's sequences; 0 if not known."""
    itl_s: Seconds = 0.0
    """Recent seconds between the tokens of a decode worker's sequences; 0 if it has none."""
    prompt_tokens: Count = 0
    """Prompt tokens computed since start."""
    output_tokens: Count = 0
    """Tokens that a decode worker has generated since start, including first tokens of prompts that it computed."""
    received: Count = 0
    """Messages received from this client in this session; the other fields include their effects."""
    echoed: Count = 0
    """Number of the last heartbeat whose echo arrived; it tells a client that its own messages do not arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatEcho(LinkMessage):
    """Client to worker: the answer to `Heartbeat`, so that a link broken in one direction is detected, too."""

    number: Count
    sent: Count
    """Messages sent to the worker in this session before this one."""
