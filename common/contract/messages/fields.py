"""What messages are made of: bounds, types of fields, and the bases of all messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from common.contract.block_hashes import SHORT_NAME_BYTES
from common.contract.ids import ATTEMPT, HANDLE, RequestId, RequestKey
from common.contract.sampling import MAX_CHOICES

ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"
"""`host:port`; the host is a name or an IP address."""
MAX_TOKENS = 2**20
"""Most tokens of one sequence."""
MAX_TOLD_TOKENS = 2**11
"""Most tokens in one message: each token may carry log probabilities."""
MAX_STEP_TOKENS = 2**16
"""Most tokens in one `StepTokens`."""
LEAST_LOGPROB = -9999.0
"""The log probability that is reported for a token that cannot occur."""
MAX_PREFIX_BLOCKS = 2**16
"""Most blocks that one `AttachPrefix` asks for."""
MAX_CACHE_EVENTS = 2**14
"""Most blocks of each kind in one `CacheEvents`."""
MAX_OPEN_REQUESTS = 2**16
"""Most requests that one peer may have open at once."""

Count = Annotated[int, Field(strict=True, ge=0, le=2**62)]
Address = Annotated[str, Field(strict=True, max_length=256, pattern=ADDRESS_PATTERN)]
Text = Annotated[str, Field(strict=True, max_length=4096)]
Flag = Annotated[bool, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=10**6, allow_inf_nan=False)]
ByTier = tuple[Count, Count, Count]
"""One count for each tier, the most urgent tier first."""
Name = Annotated[str, Field(strict=True, max_length=256)]
Choice = Annotated[int, Field(strict=True, ge=0, lt=MAX_CHOICES)]
FinishReason = Literal["stop", "length"]
ShortNames = Annotated[bytes, Field(strict=True, max_length=MAX_CACHE_EVENTS * SHORT_NAME_BYTES)]
"""The leading `SHORT_NAME_BYTES` bytes of each block's name, concatenated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireData:
    """Base of what processes send each other, and of its parts: a field that is not known is refused."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(WireData):
    """Base of every message on a control channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMessage(Message):
    """Base of messages that go to processes of other versions, too: those by which two processes find out that their
    versions differ, those that a worker sends to every gateway, and an operator's orders. Fields of a later version are
    ignored, so that an earlier one can read why the two do not fit."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMessage(Message):
    """A message about one attempt at one request."""

    request: Annotated[RequestId, HANDLE]
    attempt: Annotated[int, ATTEMPT]

    @property
    def key(self) -> RequestKey:
        """(request, attempt)."""
        return RequestKey(self.request, self.attempt)


OpenRequests = Annotated[tuple[RequestKey, ...], Field(max_length=MAX_OPEN_REQUESTS, fail_fast=True)]
