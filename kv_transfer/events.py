"""What a worker's core and its shell tell each other about pulls and leases.

The shell reports *events*. The core answers with *actions*, which the shell carries out in order. Before it answers,
the core acts on the *consequences* that its pulls and leases have for its requests. A consequence never leaves the
core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.session import Welcome
from common.contract.messages.worker import Tokens
from kv_transfer.transport import ReadId

if TYPE_CHECKING:
    from kv_transfer.pull import Pull

# --- events: from the shell to the core --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceOpened:
    """The source at `address` can be attached to. Also reported after lost messages: every pull attaches again."""

    address: str
    source: Incarnation
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class SourceReceived:
    """A message from a source."""

    source: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source at `address` is gone, refuses this worker, or never answered."""

    address: str
    source: Incarnation | None
    """None if there was never a session."""
    cause: Cause
    why: str


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read has ended: it writes nothing any more."""

    read_id: ReadId
    error: str | None
    """Why it failed; None if every block has arrived."""
    mismatch: bool = False
    """Whether it failed although every block has arrived, because the checksum of one differs: nothing is wrong with
    the connection."""
    dropped: bool = False
    """Whether it was ended by `DropRead` before anything of it had begun: this, too, says nothing of the connection."""


@dataclass(frozen=True, slots=True)
class Polled:
    """The mover has done everything before a `Poll`, and has polled the transport."""

    waiting: frozenset[ReadId]
    """Open reads of which nothing has begun: they wait for reads from other sources."""


TransferEvent = SourceOpened | SourceReceived | SourceLost | ReadEnded | Polled

# --- actions: from the core to the shell -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a link to the source at `address`, if there is none; `SourceOpened` or `SourceLost` follows."""

    address: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to a client: a gateway, or a worker that pulls from this one."""

    peer: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class SendToSource:
    """Send `message` to the source at `address`; inert without an open link."""

    address: str
    message: Message


@dataclass(frozen=True, slots=True)
class AddSource:
    """Let the mover read from `source`, whose transport has this metadata; inert if it may already. If the metadata is
    refused, each read from that source reports why."""

    source: Incarnation
    metadata: bytes


@dataclass(frozen=True, slots=True)
class DropSource:
    """End every read from `source`: this is the fence after which its blocks are free. A read that had not ended has
    failed."""

    source: Incarnation


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read blocks of `source`; `ReadEnded` follows."""

    read_id: ReadId
    source: Incarnation
    source_blocks: tuple[int, ...]
    sink_blocks: tuple[int, ...]
    checksums: tuple[int, ...] | None
    """CRC-32 of each block as the source sent it. If a block arrives with another one, the read fails."""


@dataclass(frozen=True, slots=True)
class DropRead:
    """End a read that nobody wants any more, if nothing of it has begun; inert otherwise."""

    read_id: ReadId


@dataclass(frozen=True, slots=True)
class Serve:
    """Tell the mover whether peers may be reading from this worker, and anew whenever they learn of more to read. While
    they may, it gives their reads progress."""

    serving: bool
    num_blocks: int = 0
    """Blocks of which they learn now."""


@dataclass(frozen=True, slots=True)
class Poll:
    """Poll the transport; `Polled` follows. It comes late if a call of the transport takes long, such as one that
    registers memory."""


MoverAction = AddSource | DropSource | StartRead | DropRead | Serve | Poll
TransferAction = Connect | Send | SendToSource | MoverAction

# --- consequences: within the core -------------------------------------------------------------------------------


class Consequence:
    """What a part of a core has decided about the worker's requests. The core acts on it before it returns its
    actions."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PullOffered(Consequence):
    """The offer of a pull is open: reserve room for it, or abandon it. Comes once for each pull."""

    pull: Pull
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Pulled(Consequence):
    """The pull is settled and valid: the reserved blocks hold the KV, and belong to the worker again."""

    pull: Pull
    block_ids: Sequence[int]
    first_tokens: Sequence[Tokens]
    """Empty for a pull of a prefix."""


@dataclass(frozen=True, slots=True)
class Released(Consequence):
    """These blocks, of a pull or a lent prefix, belong to the worker again, and nothing writes to them."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PullFailed(Consequence):
    """The pull is over without valid blocks."""

    pull: Pull
    cause: Cause | None
    """The cause with which it was abandoned. None also if the first tokens ended the request (`Pull.ended_with`)."""
    message: str


@dataclass(frozen=True, slots=True)
class Unpinned(Consequence):
    """The lease that the worker opened for a request has ended."""

    key: RequestKey
    """The request, and the attempt for which the lease was opened."""
    block_ids: tuple[int, ...]
    settled: bool
    """Whether a sink has settled, which proves that it has the blocks."""


@dataclass(frozen=True, slots=True)
class LeaseDropped(Consequence):
    """The lease table itself ended the lease of a request (expiry, reclaim); its gateway must learn of this. `Unpinned`
    follows."""

    key: RequestKey
    cause: Cause
    message: str
