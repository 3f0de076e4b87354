"""Transport of blocks over NIXL with the UCX backend: NVLink, RDMA, shared memory or TCP, whatever UCX finds.

One agent serves the reads of peers. Each source is read by an agent of its own, because destroying the agent is the
only way to stop a read: over TCP, a frozen source that wakes up still fills the sink's memory after the handle was
released, the peer removed and the memory deregistered. Such an agent costs about 40 ms, 11 file descriptors and 5 MiB.
It also costs a registration of the whole region, which agents do not share, so the number of agents is bounded. This is
the only module that imports nixl, and it does so when a transport is made.

A hazard remains over TCP, where UCX (as bundled with nixl 1.5.1) emulates a READ in the source's process. A source that
finds its sink gone while it is sending may abort (`stubs.c: Assertion '0' failed`). In measurements this never happened
when a sink was killed under a healthy source (0 of 31). It happened often when a source slept while its sink left (up
to 6 of 6), and sometimes when a sink destroyed its agent under a healthy source (3 of 11). So a source is dropped only
when it is dead or stuck.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from common.contract.errors import TransferError
from common.contract.ids import Incarnation
from common.contract.messages.fields import WireData
from common.runtime.config import DEFAULT_MAX_REGISTRATIONS
from kv_transfer.regions import BlockPiece, RankPart, Region, pieces
from kv_transfer.routes import ReadRoute
from kv_transfer.transport import MAX_METADATA_BYTES, Read, pack_metadata, require_pairs, unpack_metadata
from kv_transfer.ucx_log import asked_for_routes, ucx_log

DRAIN_INTERVAL_S = 0.1
"""Least seconds after which polls read UCX's log again, which takes a system call."""

_logger = logging.getLogger(__name__)

_Address = Annotated[int, Field(strict=True, ge=1, lt=2**64)]
_Offset = Annotated[int, Field(strict=True, ge=0, le=2**40)]
_Size = Annotated[int, Field(strict=True, ge=1, le=2**40)]
_ADDRESSES = 2**64
_MOST_DESCRIPTORS = 2**31 - 1
"""NIXL's indices are 32 bits wide."""
_DeviceId = Annotated[int, Field(strict=True, ge=0, le=1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata(WireData):
    """What a source tells its sinks."""

    agent: Annotated[str, Field(strict=True, min_length=1, max_length=128)]
    agent_metadata: Annotated[bytes, Field(strict=True, min_length=1, max_length=MAX_METADATA_BYTES)]
    agent_sha256: Annotated[bytes, Field(strict=True, min_length=32, max_length=32)]
    """SHA-256 of the NIXL agent's metadata. NIXL and UCX would parse corrupt metadata without noticing."""
    parts: Annotated[list[tuple[_Address, _Offset, _Size, _DeviceId]], Field(min_length=1, max_length=64)]
    """See `RankPart`."""
    num_blocks: _Size
    block_bytes: _Size
    device: Literal["cpu", "cuda"]


_METADATA = TypeAdapter(_Metadata)


class NixlTransport:
    """The `Transport` over NIXL. Raises `TransferError` if nixl is missing or has no UCX backend."""

    serves_by_polling = True

    def __init__(
        self,
        region: Region,
        incarnation: Incarnation,
        synchronize: Callable[[], None] = lambda: None,
        max_registrations: int = DEFAULT_MAX_REGISTRATIONS,
        require_rdma: bool = False,
    ) -> None:
        """`max_registrations` bounds the number of agents, because each one registers the region. One of them serves
        peers.

        With `require_rdma`, a read fails before its blocks are accepted if its way does not suffice
        (`ReadRoute.suffices`), or if UCX does not say the way.

        `synchronize()` waits until the region's device has done everything that this process has queued on it. On a GPU
        it has two uses. A thread that has called it has the device's context, by which UCX finds out which devices are
        near each other. And the copies of a destroyed agent go on: the fence ends only when they have ended.
        """
        synchronize()
        self._synchronize = synchronize
        self._region = region
        self._nixl = _Nixl(region.device)
        self._log = ucx_log()
        self._drain_at_s = 0.0
        self._name = _agent_name(incarnation)
        self._serving = self._nixl.make_agent(self._name, region)
        self._sources: dict[Incarnation, _Metadata] = {}
        self._links: dict[Incarnation, _Link] = {}
        """In the order of use: the link that was used longest ago comes first."""
        self._require_rdma = require_rdma
        self._max_links = max_registrations - 1
        self._num_links_made = 0
        self._waiting: OrderedDict[Read, tuple[Sequence[int], Sequence[int]]] = OrderedDict()
        """Reads that are not posted yet, because every agent that may exist is reading from another source, and their
        source and sink blocks. Bounded by the blocks of the region, each of which is the target of at most one read."""
        self.num_evicted = 0

    @property
    def num_registrations(self) -> int:
        """See `Transport.num_registrations`."""
        return 1 + len(self._links)

    def watch(self, on_died: Callable[[Exception], None]) -> None:
        """See `Transport.watch`: polling serves."""

    def metadata(self) -> bytes:
        """The serving agent's metadata, and the address and shape of the region."""
        agent_metadata = self._serving.get_agent_metadata()
        return pack_metadata(
            {
                "agent": self._name,
                "agent_metadata": agent_metadata,
                "agent_sha256": hashlib.sha256(agent_metadata).digest(),
                "parts": [tuple(part) for part in self._region.parts],
                "num_blocks": self._region.num_blocks,
                "block_bytes": self._region.block_bytes,
                "device": self._region.device,
            }
        )

    def add_source(self, source: Incarnation, metadata: bytes) -> None:
        """Accept `source` and, if there is room, make the agent that reads from it; see `Transport.add_source`."""
        if source in self._sources:
            return
        theirs = unpack_metadata(_METADATA, metadata)
        if theirs.agent != _agent_name(source):
            raise TransferError(f"transport metadata of {theirs.agent}, not of {_agent_name(source)}")
        if hashlib.sha256(theirs.agent_metadata).digest() != theirs.agent_sha256:
            raise TransferError(f"the NIXL metadata of {source} is corrupt")
        if theirs.block_bytes != self._region.block_bytes:
            raise TransferError(f"blocks of {theirs.block_bytes} bytes at {source}, {self._region.block_bytes} here")
        parts = list(starmap(RankPart, theirs.parts))
        if any(
            each.start >= each.stop
            or each.stop > theirs.block_bytes
            or each.address + theirs.num_blocks * each.block_bytes > _ADDRESSES
            for each in parts
        ):
            raise TransferError(f"the parts of {source}'s blocks make no sense")
        num_pieces = len(pieces(self._region.parts, parts))
        if num_pieces * max(theirs.num_blocks, self._region.num_blocks) > _MOST_DESCRIPTORS:
            raise TransferError(f"{num_pieces} pieces of {theirs.num_blocks} blocks at {source}")
        if len(self._links) < self._max_links:
            self._links[source] = self._make_link(theirs)
        self._sources[source] = theirs

    def start_read(self, source: Incarnation, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> Read:
        """Post a READ, or queue it until an agent is free; see `Transport.start_read`. On the same host a posted READ
        is done when this returns."""
        theirs = self._sources.get(source)
        if theirs is None:
            raise TransferError(f"unknown source {source}")
        require_pairs(theirs.num_blocks, source_blocks, self._region.num_blocks, sink_blocks)
        read = Read(source)
        if not self._waiting and (source in self._links or self._make_room()):  # nobody overtakes those that wait
            self._post(read, source_blocks, sink_blocks)
        else:
            read.waiting = True
            self._waiting[read] = (tuple(source_blocks), tuple(sink_blocks))
        return read

    def drop_read(self, read: Read) -> bool:
        """Drop a read that waits for an agent; see `Transport.drop_read`."""
        waits = self._waiting.pop(read, None) is not None
        if waits:
            read.fail("the read was dropped")
        return waits

    def route(self, source: Incarnation) -> ReadRoute:
        """The route that UCX reports in its log; see `Transport.route`."""
        return self._links[source].route() if source in self._links else ReadRoute()

    def poll(self) -> None:
        """Give progress to the reads of peers and to each read of this worker."""
        self._serving.get_new_notifs()
        for source, link in list(self._links.items()):
            error = link.poll()
            if error is not None:
                self._destroy_link(source, error)
        self._post_waiting()
        if (now_s := time.monotonic()) >= self._drain_at_s:
            self._drain_at_s = now_s + DRAIN_INTERVAL_S
            self._log.drain()

    def drop_source(self, source: Incarnation) -> None:
        """Destroy the agent that reads from `source`. This takes about 5 ms, or 60 ms during a read."""
        self._sources.pop(source, None)
        for read in [read for read in self._waiting if read.source == source]:
            del self._waiting[read]
            read.fail("the source was dropped")
        if source in self._links:
            self._destroy_link(source, "the source was dropped")

    def close(self) -> None:
        """Destroy every agent."""
        for source in {**self._sources, **self._links}:
            self.drop_source(source)
        del self._serving

    def _post(self, read: Read, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> None:
        """Post a READ by the agent of its source. The agent is made if there is none: an earlier read failed and its
        agent was destroyed, or the agent had to make room. Raises `TransferError`, with nothing started, if it cannot
        be made."""
        source = read.source
        link = self._links.pop(source, None) or self._make_link(self._sources[source])
        self._links[source] = link
        error = link.start(read, source_blocks, sink_blocks)
        if error is not None:
            self._destroy_link(source, error)

    def _post_waiting(self) -> None:
        while self._waiting and (next(iter(self._waiting)).source in self._links or self._make_room()):
            read, (source_blocks, sink_blocks) = self._waiting.popitem(last=False)
            read.waiting = False
            try:
                self._post(read, source_blocks, sink_blocks)
            except TransferError as error:
                read.fail(str(error))

    def _make_room(self) -> bool:
        """Whether one more agent may be made. If need be, this destroys the agent that has been idle longest.

        An agent with a read under way is never destroyed here: that would fail the read, and may abort its source.
        """
        if len(self._links) < self._max_links:
            return True
        idle = next((source for source, link in self._links.items() if link.idle), None)
        if idle is None:
            return False
        self._destroy_link(idle, "another source was to be read")
        self.num_evicted += 1
        return True

    def _make_link(self, theirs: _Metadata) -> _Link:
        # Each agent has a new name, because a source must not take a new agent for one that it knows. The number comes
        # first, because UCX's log has only the first 31 characters of a name.
        self._num_links_made += 1
        name = f"sink-{self._num_links_made}-{self._name}"
        return _Link(self._nixl, name, self._region, theirs, self._require_rdma)

    def _destroy_link(self, source: Incarnation, error: str) -> None:
        reads = self._links[source].destroy()
        del self._links[source]
        if reads:
            self._synchronize()
        for read in reads:
            read.fail(error)


class _Link:
    """A NIXL agent that reads from one source.

    Errors of NIXL are returned as text, because the traceback of an exception would keep alive an agent that must be
    destroyed.
    """

    def __init__(self, nixl: _Nixl, name: str, region: Region, theirs: _Metadata, require_rdma: bool) -> None:
        self._nixl = nixl
        self._require_rdma = require_rdma
        self._name = name
        self._region = region
        self._num_source_blocks = theirs.num_blocks
        found = pieces(region.parts, list(starmap(RankPart, theirs.parts)))
        self._num_pieces, self._piece_bytes = len(found), sorted({each.stop - each.start for each in found})
        self._route = ReadRoute()
        self._agent = nixl.make_agent(name, region)
        self._alive = weakref.ref(self._agent.agent)
        self._open: dict[Read, Any] = {}
        try:
            remote = self._agent.add_remote_agent(theirs.agent_metadata)
            if remote != theirs.agent.encode():
                raise TransferError(f"metadata of the NIXL agent {remote!r}, not of {theirs.agent!r}")
            sink, source = _descriptors(region, theirs)
            self._sink_blocks = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", sink, _memory_type(region))
            self._source_blocks = self._agent.prep_xfer_dlist(theirs.agent, source, _memory_type(theirs))
        except nixl.errors as error:
            raise TransferError(f"NIXL cannot connect to {theirs.agent}: {_describe(error)}") from error

    def route(self) -> ReadRoute:
        """The route of blocks from this source. UCX decides it when the first read is posted."""
        if not self._route.wire:
            log = ucx_log()
            log.drain()
            self._route = log.route(self._name, self._piece_bytes, self._region.device)
        return self._route

    @property
    def idle(self) -> bool:
        """Whether no read is under way."""
        return not self._open

    def start(self, read: Read, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> str | None:
        """Post `read`. Returns what went wrong, if anything; the link must then be destroyed."""
        self._open[read] = None
        try:
            handle = self._open[read] = self._agent.make_prepped_xfer(
                "READ",
                self._sink_blocks,
                self._indices(sink_blocks, self._region.num_blocks),
                self._source_blocks,
                self._indices(source_blocks, self._num_source_blocks),
            )
            return self._note_state(read, handle, self._agent.transfer(handle))
        except self._nixl.errors as error:
            return _describe(error)

    def _indices(self, block_ids: Sequence[int], num_blocks: int) -> Any:
        """The descriptors of all pieces of these blocks: those of a piece of all blocks come one after another."""
        firsts = num_blocks * np.arange(self._num_pieces, dtype=np.int32)
        return (firsts[:, None] + np.asarray(block_ids, dtype=np.int32)).ravel()

    def poll(self) -> str | None:
        """Check the state of every open read. Returns what went wrong, if anything; the link must then be destroyed."""
        for read, handle in list(self._open.items()):
            try:
                error = self._note_state(read, handle, self._agent.check_xfer_state(handle))
            except self._nixl.errors as raised:
                return _describe(raised)
            if error is not None:
                return error
        return None

    def destroy(self) -> list[Read]:
        """Destroy the agent. Returns the reads that were open. Raises `RuntimeError` if something keeps the agent
        alive."""
        for read, handle in self._open.items():
            if handle is not None:
                with contextlib.suppress(*self._nixl.errors):  # the agent is destroyed next, even if NIXL refuses
                    handle.release()
            self._open[read] = handle = None
        self._agent = self._sink_blocks = self._source_blocks = None
        ucx_log().forget(self._name)
        if self._alive() is not None:
            raise RuntimeError("a NIXL agent could not be destroyed: its reads may still write")
        return list(self._open)

    def _note_state(self, read: Read, handle: Any, status: str) -> str | None:
        if self._require_rdma and (objection := self._objection(status)) is not None:
            return objection
        if status == "PROC":
            return None
        if status != "DONE":
            return "NIXL reports an error"
        handle.release()
        del self._open[read]
        read.finish()
        return None

    def _objection(self, status: str) -> str | None:
        """Why blocks may not come this way; None if they may. While a read is under way, UCX may not have said the way
        yet."""
        route = self.route()
        if route.suffices(self._region.device) or (status == "PROC" and not route.wire):
            return None
        _logger.error("a read into %s would go by %s: --require-rdma refuses it", self._name, route)
        return f"blocks come by {route}, and --require-rdma refuses that"


class _Nixl:
    """The nixl package, which takes 1.5 s to load, and the exceptions that it raises."""

    def __init__(self, device: str) -> None:
        if device == "cuda":
            # Without this, UCX refuses cuda_ipc reads where it sees no NVLink, and a READ would fall back to TCP.
            os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
        raise_logging_exceptions = logging.raiseExceptions
        try:
            self._api = importlib.import_module("nixl._api")
            bindings = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise TransferError(f"nixl cannot be loaded: {error}") from error
        # nixl configures logging for the whole process: its records go to stdout, and errors of any handler are
        # ignored. Undo both.
        logging.raiseExceptions = raise_logging_exceptions
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        classes: list[Any] = [item for item in vars(bindings).values() if isinstance(item, type)]
        self.errors: tuple[type[Exception], ...] = (RuntimeError, *(c for c in classes if issubclass(c, Exception)))

    def make_agent(self, name: str, region: Region) -> Any:
        """An agent with a UCX backend and the region registered. Raises `TransferError`."""
        try:
            with asked_for_routes():
                # A progress thread takes a whole core, even when idle.
                config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                agent = self._api.nixl_agent(name, config)
            if "UCX" not in agent.backends:
                raise TransferError(f"nixl has no UCX plugin, only {agent.get_plugin_list()}")
            memory = np.array(
                [[part.address, part.block_bytes * region.num_blocks, part.device_id] for part in region.parts],
                dtype=np.uint64,
            )
            agent.register_memory(memory, _memory_type(region))
        except self.errors as error:
            raise TransferError(f"NIXL cannot start: {_describe(error)}") from error
        return agent


def _agent_name(incarnation: Incarnation) -> str:
    return f"baton-{incarnation}"


def _memory_type(region: Region | _Metadata) -> str:
    return "VRAM" if region.device == "cuda" else "DRAM"


def _descriptors(sink: Region, theirs: _Metadata) -> tuple[Any, Any]:
    """The pieces of all blocks at both sides, a descriptor for each, as NIXL's strided lists: rows of [address, bytes,
    device, stride, count]."""
    source = list(starmap(RankPart, theirs.parts))
    found = pieces(sink.parts, source)

    def rows(parts: Sequence[RankPart], of: Iterable[tuple[int, BlockPiece]], num_blocks: int) -> Any:
        return np.array(
            [
                [
                    parts[index].address + piece.start - parts[index].start,
                    piece.stop - piece.start,
                    parts[index].device_id,
                    parts[index].block_bytes,
                    num_blocks,
                ]
                for index, piece in of
            ],
            dtype=np.uint64,
        )

    return (
        rows(sink.parts, ((each.sink, each) for each in found), sink.num_blocks),
        rows(source, ((each.source, each) for each in found), theirs.num_blocks),
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
