"""The thread that moves blocks, so that no copy, however long, delays the event loop.

The event loop puts the core's actions into a queue, and is told about ended reads by `call_soon_threadsafe`. Only the
thread uses the transport. If no read is open and no peer may be reading, the thread sleeps on its queue; otherwise it
also polls the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from common.contract.errors import TransferError
from common.contract.ids import Incarnation
from kv_transfer.bandwidths import Bandwidths
from kv_transfer.events import AddSource, DropRead, DropSource, MoverAction, Poll, Polled, ReadEnded, Serve, StartRead
from kv_transfer.regions import Region
from kv_transfer.routes import ReadRoute
from kv_transfer.transport import Read, ReadId, ReadState, Transport

READING_POLL_INTERVAL_S = 0.0003
"""Seconds between two polls while reads are open."""
SERVING_POLL_INTERVAL_S = 0.0005
"""Seconds between two polls while peers may be reading what they have learned of; this costs about 4 % of a core."""
LONGEST_SERVING_POLL_INTERVAL_S = 0.005
"""The same when they should have read it long ago; this costs less than 1 % of a core."""
READ_BYTES_PER_S = 1e9
"""The rate at which peers should have read something: that of a slow network. Over TCP a read sends what fits into a
socket's buffer between two polls, so that a faster one may need the shorter interval."""
_CLOSE_S = 30.0
"""Seconds after which `close` does not wait for the thread any more: a call into UCX or a driver has not returned."""
_HUNG_S = 300.0
"""Seconds after which the mover is given up if a call has not returned. The longest ones register the KV cache for some
sources, each of which may take a minute for hundreds of GB."""
_LOOKS = 8
"""How often the thread is looked at in that time. A process that stands still for a while misses looks, and the thread
is not held to be hung."""
CLOSE_GRACE_S = 0.5
"""Seconds that `close` gives open reads to end, because UCX may abort a source whose sink leaves during a read."""

_logger = logging.getLogger(__name__)


def serving_poll_interval_s(since_s: float) -> float:
    """Seconds between two polls while peers may be reading, `since_s` seconds after they should have read all that they
    have learned of: a tenth of that, within bounds."""
    return min(max(SERVING_POLL_INTERVAL_S, since_s / 10), LONGEST_SERVING_POLL_INTERVAL_S)


class _Stop:
    """The command that ends the thread."""


@dataclass(frozen=True, slots=True)
class _Died:
    """What serves peers has died of a bug."""

    error: Exception


@dataclass(frozen=True, slots=True)
class _Arrived:
    """The measure of a read whose blocks have all arrived."""

    source: Incarnation
    num_blocks: int
    duration_s: float
    route: ReadRoute


class Mover:
    """Owns a transport. Every method is called on the event loop's thread, and every callback is made there.

    `report(event)` takes one `ReadEnded` for each read, when nothing will write to its blocks any more, and one
    `Polled` for each `Poll`. It is never called from within `carry_out`.

    `on_fatal(error)` is called if the thread dies of a bug or hangs, or what serves peers dies. Reads whose end could
    not be proved are then never reported, and their blocks stay in quarantine: the process should end.
    """

    def __init__(
        self,
        region: Region,
        make_transport: Callable[[], Transport],
        report: Callable[[ReadEnded | Polled], None],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self.num_reads_failed = 0
        self.num_bytes_read = 0
        """Bytes of the reads that are done."""
        self.read_seconds = 0.0
        """Seconds from start to end, summed over the reads that are done; reads overlap."""
        self.bandwidths = Bandwidths(region.device)
        self._region = region
        self._make_transport = make_transport
        self._report = report
        self._on_fatal = on_fatal
        # Bounded by its users: at most one open read for each block, and a few others for each peer.
        self._commands: SimpleQueue[MoverAction | _Stop | _Died] = SimpleQueue()
        self._open: set[ReadId] = set()
        self._thread: threading.Thread | None = None
        self._transport: Transport | None = None
        self._stopped = False
        self._watching: asyncio.Task[None] | None = None
        self._hung = False

    @property
    def num_open_reads(self) -> int:
        """Reads whose end has not been reported."""
        return len(self._open)

    @property
    def num_registrations(self) -> int:
        """See `Transport.num_registrations`."""
        return 0 if self._transport is None else self._transport.num_registrations

    @property
    def num_evicted(self) -> int:
        """See `Transport.num_evicted`."""
        return 0 if self._transport is None else self._transport.num_evicted

    async def start(self) -> bytes:
        """Make the transport and return its metadata. Raises `TransferError` when it cannot work here."""
        assert self._thread is None
        self._loop = asyncio.get_running_loop()
        self._metadata: asyncio.Future[bytes] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()
        return await asyncio.shield(self._metadata)

    def carry_out(self, action: MoverAction) -> None:
        """Let the thread do what a core has decided, after everything before it."""
        if isinstance(action, StartRead):
            assert action.read_id not in self._open, action
            self._open.add(action.read_id)
        self._commands.put(action)
        if self._stopped:
            self._loop.call_soon(self._refuse_reads)

    async def close(self) -> None:
        """End the thread and the transport. Open reads have `CLOSE_GRACE_S` to end; the others are reported as
        failed. A thread that hangs, or that a call of the transport holds up for `_CLOSE_S`, is left behind."""
        if self._thread is None or self._hung:
            return
        if self._watching is not None:
            self._watching.cancel()
        self._commands.put(_Stop())
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(self._ended)
        except TimeoutError:
            _logger.error("the transport has not ended after %.0f s: it is left as it is", _CLOSE_S)
            return
        self._thread.join()

    def _on_ended(self, ended: ReadEnded, arrived: _Arrived | None = None) -> None:
        """A read has ended. `arrived` measures it; None if it has failed or was dropped."""
        self._open.remove(ended.read_id)
        if arrived is None:
            self.num_reads_failed += not ended.dropped
        else:
            self.read_seconds += arrived.duration_s
            num_bytes = arrived.num_blocks * self._region.bytes_moved(arrived.route.way)
            self.num_bytes_read += num_bytes
            self.bandwidths.observe(arrived.source, arrived.route, num_bytes, arrived.duration_s)
        self._report(ended)

    def _begin(self, transport: Transport, mover_thread: _MoverThread, metadata: bytes) -> None:
        """The first callback of the thread: the transport works."""
        self._transport = transport
        self._watching = self._loop.create_task(self._watch(mover_thread))
        self._metadata.set_result(metadata)

    async def _watch(self, mover_thread: _MoverThread) -> None:
        """Find out that a call of the transport does not return."""
        seen, num_looks = mover_thread.turn, 0
        while num_looks < _LOOKS:
            await asyncio.sleep(_HUNG_S / _LOOKS)
            num_looks = num_looks + 1 if mover_thread.turn == seen and mover_thread.at_work else 0
            seen = mover_thread.turn
        self._hung = True
        _logger.error("the mover hangs with %d reads open", self.num_open_reads)
        self._on_fatal(TransferError(f"a call of the transport has not returned for {_HUNG_S:.0f} s"))

    def _end(self, fatal: Exception | None) -> None:
        """The last callback of the thread: it has ended, and `fatal` is the bug that it died of, if any."""
        self._stopped = True
        self._transport = None
        if self._watching is not None:
            self._watching.cancel()
        self._refuse_reads()
        self._ended.set_result(None)
        if fatal is None:
            return
        if not self._metadata.done():
            self._metadata.set_exception(fatal)
            return
        _logger.error("the mover has died with %d reads open", self.num_open_reads, exc_info=fatal)
        self._on_fatal(fatal)

    def _refuse_reads(self) -> None:
        """Once the thread has ended: report the reads that are still in the queue as failed. Nothing was started for
        them."""
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if isinstance(command, StartRead):
                self._on_ended(ReadEnded(command.read_id, "the mover has stopped"))

    def _run(self) -> None:
        """What the thread runs."""
        fatal: Exception | None = None
        try:
            transport = self._make_transport()
            transport.watch(lambda error: self._commands.put(_Died(error)))
            mover_thread = _MoverThread(
                transport,
                self._commands,
                lambda ended, arrived: self._tell(self._on_ended, ended, arrived),
                lambda polled: self._tell(self._report, polled),
                self._region,
            )
            try:
                self._tell(self._begin, transport, mover_thread, mover_thread.metadata())
                mover_thread.run()
            finally:
                mover_thread.close()
        except Exception as error:  # noqa: BLE001 (`start` raises it, or `on_fatal` gets it)
            fatal = error
        self._tell(self._end, fatal)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback, *args)


class _MoverThread:
    """The transport and its open reads. The mover's thread alone uses this object."""

    def __init__(
        self,
        transport: Transport,
        commands: SimpleQueue[MoverAction | _Stop | _Died],
        on_ended: Callable[[ReadEnded, _Arrived | None], None],
        on_polled: Callable[[Polled], None],
        region: Region,
    ) -> None:
        self._transport = transport
        self._region = region
        self._commands = commands
        self._on_ended = on_ended
        self._on_polled = on_polled
        self._open: dict[ReadId, tuple[Read, float, StartRead]] = {}
        self._refused_sources: dict[Incarnation, str] = {}
        self.turn = 0
        """How often the thread has looked for a command. Another thread may read this and the next one."""
        self.at_work = False
        """Whether it may be in a call of the transport, and does not wait for a command."""
        self._read_by_s: float | None = None
        """Monotonic seconds at which peers should have read all that they have learned of; None while none may be
        reading."""

    def metadata(self) -> bytes:
        """The metadata of the transport."""
        return self._transport.metadata()

    def run(self) -> None:
        """Execute commands and poll the transport until told to stop. Then go on until no read is open, for at most
        `CLOSE_GRACE_S`."""
        stop_s: float | None = None
        while stop_s is None or (self._open and time.monotonic() < stop_s):
            self.at_work = False
            self.turn += 1
            command: MoverAction | _Stop | _Died | None = None
            with contextlib.suppress(Empty):
                command = self._commands.get(timeout=self._patience_s())
            self.at_work = True
            if isinstance(command, _Stop):
                stop_s = time.monotonic() + CLOSE_GRACE_S
            elif command is not None:
                self._execute(command)
            self._report_ended()  # a read on the same host ends when it starts
            self._transport.poll()
            self._report_ended()
            if isinstance(command, Poll):
                waiting = frozenset(read_id for read_id, (read, _, _) in self._open.items() if read.waiting)
                self._on_polled(Polled(waiting))

    def close(self) -> None:
        """Close the transport, which ends every read. Then fail reads that are still pending: a bug has cut their start
        short."""
        self._transport.close()
        for read, _, _ in self._open.values():
            if read.state is ReadState.PENDING:
                read.fail("the mover has stopped")
        self._report_ended()

    def _patience_s(self) -> float | None:
        """Seconds to wait for a command before the next poll; None waits until one comes."""
        if self._open:
            return READING_POLL_INTERVAL_S
        if self._read_by_s is None or not self._transport.serves_by_polling:
            return None
        return serving_poll_interval_s(time.monotonic() - self._read_by_s)

    def _execute(self, action: MoverAction | _Died) -> None:
        match action:
            case _Died(error):
                raise error
            case AddSource(source, metadata):
                self._refused_sources.pop(source, None)
                try:
                    self._transport.add_source(source, metadata)
                except TransferError as error:
                    self._refused_sources[source] = str(error)
            case StartRead():
                self._start_read(action)
            case DropRead(read_id):
                if read_id in self._open and self._transport.drop_read(self._open[read_id][0]):
                    del self._open[read_id]
                    self._on_ended(ReadEnded(read_id, "dropped before it had begun", dropped=True), None)
            case Serve(serving, num_blocks):
                begin_s = max(time.monotonic(), self._read_by_s or 0.0)
                self._read_by_s = (
                    begin_s + num_blocks * self._region.block_bytes / READ_BYTES_PER_S if serving else None
                )
            case DropSource(source):
                self._refused_sources.pop(source, None)
                self._transport.drop_source(source)
            case Poll():
                pass  # each turn ends with a poll

    def _start_read(self, command: StartRead) -> None:
        started_s = time.monotonic()
        read = Read(command.source)
        self._open[command.read_id] = (read, started_s, command)
        if command.source in self._refused_sources:
            read.fail(self._refused_sources[command.source])
            return
        if command.checksums is not None and self._region.device != "cpu":
            read.fail(f"the source sends checksums, and this worker cannot verify any in {self._region.device} memory")
            return
        try:
            read = self._transport.start_read(command.source, command.source_blocks, command.sink_blocks)
        except TransferError as refused:
            read.fail(str(refused))
        else:
            self._open[command.read_id] = (read, started_s, command)

    def _report_ended(self) -> None:
        now_s = time.monotonic()
        for read_id, (read, started_s, command) in list(self._open.items()):
            if read.state is not ReadState.PENDING:
                del self._open[read_id]
                mismatch = "" if read.error else self._mismatch(command)
                if error := read.error or mismatch:
                    self._on_ended(ReadEnded(read_id, error, mismatch=bool(mismatch)), None)
                    continue
                route = self._transport.route(read.source)
                arrived = _Arrived(read.source, len(command.sink_blocks), now_s - started_s, route)
                self._on_ended(ReadEnded(read_id, None), arrived)

    def _mismatch(self, command: StartRead) -> str:
        """A message about the first arrived block whose checksum differs from the source's; empty if there is none, or
        without checksums."""
        if command.checksums is None:
            return ""
        arrived = self._region.crc32(command.sink_blocks)
        for block, mine, theirs in zip(command.source_blocks, arrived, command.checksums, strict=True):
            if mine != theirs:
                return f"block {block} of the source arrived with checksum {mine:08x} instead of {theirs:08x}"
        return ""
