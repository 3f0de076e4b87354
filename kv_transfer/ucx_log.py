"""UCX's log: the protocol that UCX has chosen for reads, and its warnings.

UCX tells which transport a read takes only in its own log, which it opens when it is loaded. So the log goes to a file
in memory that is read here. The routes are taken from the tables of `UCX_PROTO_INFO`; everything else is passed on to
the log of this process. What UCX says while it aborts is not read here, because UCX writes it to stderr.

If an operator has set `UCX_LOG_FILE` or `UCX_PROTO_INFO`, UCX's log stays as it is, and the routes are not known.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.runtime.memory_files import memory_file
from kv_transfer.routes import ReadRoute, Way, way_of

MAX_TABLES = 1024
"""Most tables that are kept. An agent that has begun to read, and is not forgotten, has one for each pair of devices
between which it reads."""

_FILE_VARIABLE, _TABLES_VARIABLE = "UCX_LOG_FILE", "UCX_PROTO_INFO"
_READS = "*memory*read*"
"""Tables that UCX prints, as a pattern over their titles."""
_CHUNK_BYTES = 2**20
_PREFIX = re.compile(r"^\[\d+\.\d+\] \[[^\]]*\]\s*")
_PEER = re.compile(r"(\S+) +(self|intra-node|inter-node) cfg#\d+")
_LEVEL = re.compile(r"UCX\s+(FATAL|ERROR|WARN|DIAG|INFO|DEBUG|TRACE)")
_LEVELS = {"FATAL": logging.ERROR, "ERROR": logging.ERROR, "WARN": logging.WARNING, "DIAG": logging.WARNING}
_SLOWEST_FIRST = (Way.TCP, Way.UNKNOWN, Way.SHARED_MEMORY, Way.RDMA, Way.CUDA_IPC)
"""An unknown way comes before those that `--require-rdma` may accept."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+)([KMG]?)")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Table:
    same_host: bool
    device: str
    """What memory is read into: "cpu" or "cuda"."""
    rows: list[tuple[int, float, str]] = field(default_factory=list)
    """(first, last, wire): the configuration of reads of `[first, last]` bytes."""

    def route(self, num_bytes: int) -> ReadRoute:
        """The route of reads of this size; unknown, without a wire, as long as UCX has not written the row."""
        wire = next((wire for first, last, wire in self.rows if first <= num_bytes <= last), "")
        return ReadRoute(way=way_of(wire), wire=wire, same_host=self.same_host)


class UcxLog:
    """Reads UCX's log from `file`, the descriptor of a file that UCX writes to. If `file` is None, the log does not
    come here. Any thread may call."""

    def __init__(self, file: int | None, flush: Callable[[], None]) -> None:
        self._file = file
        self._flush = flush
        self._position = 0
        self._rest = b""
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[str, str], _Table] = OrderedDict()
        """(the agent's name, cut off as UCX does, title, which names both devices) → the latest table."""
        self._peer: tuple[str, str] | None = None
        self._rows: list[tuple[int, float, str]] | None = None

    @property
    def heard(self) -> bool:
        """Whether UCX's log comes here."""
        return self._file is not None

    def drain(self) -> None:
        """Read what UCX has written: keep the tables, and log everything else."""
        if self._file is None:
            return
        with self._lock:
            self._flush()
            while data := os.pread(self._file, _CHUNK_BYTES, self._position):
                self._position += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace"))
                if os.fstat(self._file).st_size == self._position:
                    os.ftruncate(self._file, 0)  # UCX goes on at its position; the bytes before that take no memory

    def route(self, agent: str, sizes: Sequence[int], device: str) -> ReadRoute:
        """The slowest way by which reads of these sizes, in bytes, come into memory of `device` to the agent of this
        name, which reads from one source. Known once a read of a block is posted, by which UCX has told the way between
        all devices that take part."""
        with self._lock:
            routes = [
                table.route(size)
                for (name, _), table in self._tables.items()
                if agent.startswith(name) and table.device == device
                for size in sizes
            ]
        return min(routes, key=lambda route: _SLOWEST_FIRST.index(route.way), default=ReadRoute())

    def forget(self, agent: str) -> None:
        """Drop the tables of an agent that is destroyed."""
        with self._lock:
            for key in [key for key in self._tables if agent.startswith(key[0])]:
                del self._tables[key]

    def _take(self, line: str) -> None:
        message = _PREFIX.sub("", line).rstrip()
        if message.startswith("|"):
            self._take_row([cell.strip() for cell in message.strip("|").split("|")])
        elif message and not message.startswith("+-"):
            found = _LEVEL.search(message)
            log.log(_LEVELS.get(found[1], logging.INFO) if found else logging.WARNING, "UCX: %s", message)

    def _take_row(self, cells: list[str]) -> None:
        """Handle one line of a table: first the peer, then the title, then the rows."""
        peer = _PEER.fullmatch(cells[0]) if len(cells) == 1 else None
        if peer is not None:
            self._peer, self._rows = (peer[1], peer[2]), None
        elif len(cells) == 1 and self._peer is not None:
            name, where = self._peer
            self._peer = None
            if cells[0].startswith("remote memory read") and where != "self":
                into = cells[0].partition(" into ")[2]
                table = _Table(where == "intra-node", "cuda" if into.startswith("cuda") else "cpu")
                self._tables.pop((name, cells[0]), None)
                self._tables[name, cells[0]] = table
                self._rows = table.rows
                if len(self._tables) > MAX_TABLES:
                    self._tables.popitem(last=False)
        elif self._rows is not None and len(cells) == 3 and (sizes := _range(cells[0])) is not None:
            self._rows.append((*sizes, cells[2]))


@functools.cache
def ucx_log() -> UcxLog:
    """The log of UCX in this process. It must be asked for before UCX is loaded."""
    theirs = os.environ.get(_FILE_VARIABLE) or os.environ.get(_TABLES_VARIABLE)
    return UcxLog(None if theirs or _library() is not None else memory_file("ucx-log"), _flush)


_asking = threading.Lock()


@contextlib.contextmanager
def asked_for_routes() -> Iterator[UcxLog]:
    """Set the variables that UCX reads when an agent is made. They are removed afterwards, because a child process does
    not have the file."""
    told = ucx_log()
    with _asking:
        if told.heard:
            os.environ |= {_FILE_VARIABLE: f"/proc/self/fd/{told._file}", _TABLES_VARIABLE: _READS}
        try:
            yield told
        finally:
            if told.heard:
                del os.environ[_FILE_VARIABLE], os.environ[_TABLES_VARIABLE]
            told.drain()


def _range(text: str) -> tuple[int, float] | None:
    """(first, last) bytes of a row, from `0`, `1..8184` or `64K..inf`; None for the heading."""
    first, dots, last = text.partition("..")
    ends = [_size(first), _size(last if dots else first)]
    return None if ends[0] is None or ends[1] is None else (int(ends[0]), ends[1])


def _size(text: str) -> float | None:
    if text == "inf":
        return float("inf")
    found = _SIZE.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS[found[2]]


def _library() -> str | None:
    """Path of UCX's base library, if it is loaded."""
    paths = (line.rpartition(" ")[2] for line in Path("/proc/self/maps").read_text().splitlines())
    return next((path for path in paths if os.path.basename(path).startswith(("libucs-", "libucs.so"))), None)


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    path = _library()
    return None if path is None else ctypes.CDLL(path)


def _flush() -> None:
    """Let UCX write out what is in its buffer, if its library is found. Called once UCX is loaded."""
    library = _loaded()
    if library is not None:
        library.ucs_log_flush()
