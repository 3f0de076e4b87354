"""What UCX's log tells of the way that blocks come, and what is passed on of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from common.contract.ids import new_incarnation
from kv_transfer import nixl_transport, ucx_log
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.regions import RankPart, Region
from kv_transfer.routes import ReadRoute, Way, way_of
from kv_transfer.ucx_log import MAX_TABLES, UcxLog

MIB = 2**20
STAMP = "[1795512456.853375] [node7:25087:0]   "
AGENT = "sink-1-baton-298217d24c46e59cb93e5262"


def table(name: str, where: str, title: str, *rows: tuple[str, str, str]) -> str:
    """As UCX 1.23 prints it with `UCX_PROTO_INFO`."""
    width = max(len(title), 60)
    line = f"+{'-' * width}+"
    body = [
        line,
        f"| {name[:31]} {where} cfg#1  |",
        f"| {title} |",
        line,
        "| Range | Description | Config |",
        line,
        *(f"| {size:>8} | {how} | {wire} |" for size, how, wire in rows),
        line,
    ]
    return "".join(f"{STAMP}{each}\n" for each in body)


HOST = "remote memory read by ucp_get*(multi) into host memory from host"
GPU = "remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1]"
CMA = ("0..inf", "zero-copy", "cma/memory")


class Written:
    """A log that the test writes."""

    def __init__(self) -> None:
        self.file = os.memfd_create("test")
        self.num_flushes = 0
        self.log = UcxLog(self.file, self._flush)
        self._ucx = os.open(f"/proc/self/fd/{self.file}", os.O_WRONLY)

    def write(self, text: str) -> None:
        """Where UCX has come to, as UCX does: its position is its own."""
        os.write(self._ucx, text.encode())

    def _flush(self) -> None:
        self.num_flushes += 1

    def route(self, agent: str = AGENT, *sizes: int, device: str = "cpu") -> ReadRoute:
        """What is known by now, of reads of `sizes` bytes, or of 1 MiB."""
        self.log.drain()
        return self.log.route(agent, sizes or (MIB,), device)


@pytest.fixture
def written() -> Iterator[Written]:
    each = Written()
    yield each
    os.close(each._ucx)
    os.close(each.file)


@pytest.mark.parametrize(
    ("wire", "way"),
    [
        ("rc_mlx5/mlx5_0:1", Way.RDMA),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on dc_mlx5/mlx5_1:1", Way.RDMA),
        ("ud_verbs/mlx5_0:1", Way.RDMA),
        ("cuda_ipc/cuda", Way.CUDA_IPC),
        ("cma/memory", Way.SHARED_MEMORY),
        ("sysv/memory", Way.SHARED_MEMORY),
        ("tcp/lo", Way.TCP),
        ("52% on tcp/lo and 48% on tcp/eth0", Way.TCP),
        ("60% on rc_mlx5/mlx5_0:1 and 40% on tcp/eth0", Way.TCP),  # it ends when the slowest has ended
        ("cuda_copy/cuda, cma/memory", Way.SHARED_MEMORY),
        ("new_thing/dev0", Way.UNKNOWN),
        ("", Way.UNKNOWN),
    ],
)
def test_the_way_by_what_ucx_calls_it(wire: str, way: Way) -> None:
    assert way_of(wire) is way


def test_a_table_names_the_route_of_its_agent(written: Written) -> None:
    assert written.route() == ReadRoute()
    written.write(table(AGENT, "intra-node", HOST, CMA))
    written.write(table(AGENT.replace("sink-1", "sink-12"), "inter-node", HOST, ("0..inf", "zero-copy", "rc/m:1")))
    assert written.route() == ReadRoute(way=Way.SHARED_MEMORY, wire="cma/memory", same_host=True)
    assert written.route(AGENT.replace("sink-1", "sink-12")).same_host is False
    assert written.route(AGENT.replace("sink-1", "sink-2")) == ReadRoute()
    assert written.num_flushes > 0, "UCX holds lines back"
    written.log.forget(AGENT)
    assert written.route() == ReadRoute()


def test_the_row_of_the_blocks_size_counts(written: Written) -> None:
    rows = (
        ("0", "short", "rc_mlx5/mlx5_0:1"),
        ("1..8184", "short", "tcp/lo"),
        ("8185..512K", "zero-copy", "cma/memory"),
        ("524289..inf", "zero-copy", "rc_mlx5/mlx5_0:1"),
    )
    written.write(table(AGENT, "inter-node", HOST, *rows))
    ways = [written.route(AGENT, size).way for size in (0, 4096, 2**19, MIB)]
    assert ways == [Way.RDMA, Way.TCP, Way.SHARED_MEMORY, Way.RDMA]


def test_the_latest_table_counts(written: Written) -> None:
    """UCX chooses again when it has connected."""
    written.write(table(AGENT, "inter-node", HOST, ("0..inf", "software emulation", "tcp/eth0")))
    assert written.route().way is Way.TCP
    written.write(table(AGENT, "inter-node", HOST, ("0..inf", "zero-copy", "rc_mlx5/mlx5_0:1")))
    assert written.route().way is Way.RDMA


def test_tables_of_other_memory_operations_and_peers_do_not_count(written: Written) -> None:
    written.write(table(AGENT, "self", HOST, CMA))
    written.write(table(AGENT, "intra-node", "remote memory write by ucp_put* from host memory to host", CMA))
    assert written.route() == ReadRoute()
    written.write(table(AGENT, "intra-node", HOST, CMA))
    assert written.route(device="cuda") == ReadRoute()
    written.write(table(AGENT, "intra-node", GPU, ("0..inf", "zero-copy", "cuda_ipc/cuda")))
    assert written.route(device="cuda").way is Way.CUDA_IPC
    assert written.route().way is Way.SHARED_MEMORY


def test_the_slowest_way_between_any_two_gpus_counts(written: Written) -> None:
    """UCX prints a table for each pair of devices that two groups of ranks use."""
    other = GPU.replace("GPU0", "GPU1").replace("dev[1]", "dev[2]")
    written.write(table(AGENT, "inter-node", GPU, ("0..inf", "zero-copy", "tcp/eth0")))
    written.write(table(AGENT, "inter-node", other, ("0..inf", "zero-copy", "rc_mlx5/mlx5_0:1")))
    assert written.route(device="cuda") == ReadRoute(way=Way.TCP, wire="tcp/eth0", same_host=False)
    written.write(table(AGENT, "inter-node", GPU, ("0..inf", "zero-copy", "cuda_ipc/cuda")))
    assert written.route(device="cuda").way is Way.RDMA, "the latest table of each pair counts"
    written.write(table(AGENT, "inter-node", other, ("0..inf", "zero-copy", "new_thing/dev0")))
    assert written.route(device="cuda").way is Way.UNKNOWN, "which --require-rdma must not accept"
    written.log.forget(AGENT)
    assert written.route(device="cuda") == ReadRoute()


def test_a_table_without_its_rows_leaves_the_way_open(written: Written) -> None:
    written.write(table(AGENT, "intra-node", GPU, ("0..inf", "zero-copy", "cuda_ipc/cuda")))
    written.write(table(AGENT, "intra-node", GPU.replace("GPU0", "GPU1")))
    assert (written.route(device="cuda").way, written.route(device="cuda").wire) == (Way.UNKNOWN, "")


def test_the_slowest_way_of_the_sizes_counts(written: Written) -> None:
    written.write(
        table(AGENT, "inter-node", HOST, ("0..64K", "short", "tcp/eth0"), ("65537..inf", "zero-copy", "rc/m:1"))
    )
    assert written.route(AGENT, MIB, 2 * MIB).way is Way.RDMA
    assert written.route(AGENT, MIB, 4096).way is Way.TCP


def test_host_memory_that_is_read_from_a_gpu_is_host_memory(written: Written) -> None:
    title = "remote memory read by ucp_get*(multi) into host memory from cuda/dev[0]"
    written.write(table(AGENT, "inter-node", title, ("0..inf", "zero-copy", "rc_mlx5/mlx5_0:1")))
    assert written.route().way is Way.RDMA
    assert written.route(device="cuda") == ReadRoute()


class Asked(UcxLog):
    """A log that tells nothing, and what it was asked for."""

    def __init__(self) -> None:
        super().__init__(None, lambda: None)
        self.sizes: list[Sequence[int]] = []

    def route(self, agent: str, sizes: Sequence[int], device: str) -> ReadRoute:
        self.sizes.append(sizes)
        return ReadRoute()


def test_a_link_asks_for_the_sizes_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No read has the size of a block where the parts of the sink are not those of the source."""
    asked = Asked()
    monkeypatch.setattr(nixl_transport, "ucx_log", lambda: asked)
    theirs, ours = (np.zeros(4 * 4096, np.uint8) for _ in range(2))
    address, me, you = ours.ctypes.data, new_incarnation(), new_incarnation()
    parts = (RankPart(address, 0, 1024), RankPart(address + 4 * 1024, 1024, 4096))
    whole = (RankPart(theirs.ctypes.data, 0, 4096),)
    source = NixlTransport(Region(parts=whole, num_blocks=4, block_bytes=4096), you)
    sink = NixlTransport(Region(parts=parts, num_blocks=4, block_bytes=4096), me)
    try:
        sink.add_source(you, source.metadata())
        sink.route(you)
        assert [sorted(sizes) for sizes in asked.sizes] == [[1024, 3072]]
    finally:
        sink.close()
        source.close()


def test_a_table_that_is_half_written_is_read_on(written: Written) -> None:
    text = table(AGENT, "intra-node", HOST, CMA)
    for start in range(0, len(text), 37):
        written.write(text[start : start + 37])
        written.log.drain()
    assert written.route().way is Way.SHARED_MEMORY


def test_what_was_read_takes_no_memory(written: Written) -> None:
    for _ in range(4):
        written.write(STAMP + "x" * 300_000 + "\n" + table(AGENT, "intra-node", HOST, CMA))
        assert written.route().way is Way.SHARED_MEMORY
        assert os.fstat(written.file).st_size == 0
    assert os.fstat(written.file).st_blocks == 0


def test_tables_are_bounded(written: Written) -> None:
    for number in range(MAX_TABLES + 1):
        written.write(table(f"sink-{number}-baton-298217d24c46e59cb93e5262", "intra-node", HOST, CMA))
    assert written.route("sink-0-baton-298217d24c46e59cb93e5262") == ReadRoute()
    assert written.route(f"sink-{MAX_TABLES}-baton-298217d24c46e59cb93e5262").way is Way.SHARED_MEMORY


def test_everything_else_is_passed_on(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for level in ("ERROR", "WARN ", "INFO "):
        written.write(f"{STAMP[:-2]}         sock.c:331  UCX  {level} connect failed\n")
    written.write("something\n")
    written.write(table(AGENT, "intra-node", HOST, CMA))
    written.log.drain()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [
        ("ERROR", "UCX: sock.c:331  UCX  ERROR connect failed"),
        ("WARNING", "UCX: sock.c:331  UCX  WARN  connect failed"),
        ("INFO", "UCX: sock.c:331  UCX  INFO  connect failed"),
        ("WARNING", "UCX: something"),
    ]


def test_a_log_that_goes_elsewhere_tells_nothing() -> None:
    told = UcxLog(None, lambda: pytest.fail("there is nothing to flush"))
    told.drain()
    assert not told.heard
    assert told.route(AGENT, (MIB,), "cpu") == ReadRoute()


def test_a_python_that_was_built_for_an_old_libc_has_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    for variable in ("UCX_LOG_FILE", "UCX_PROTO_INFO"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(ucx_log, "_library", lambda: None)  # UCX may be loaded in this process
    told = ucx_log.ucx_log.__wrapped__()
    assert told._file is not None
    os.close(told._file)


@pytest.mark.processes
@pytest.mark.parametrize("variable", [None, "UCX_LOG_FILE", "UCX_PROTO_INFO"])
def test_an_operator_who_wants_the_log_gets_it(variable: str | None) -> None:
    """In a process of its own, for UCX may be loaded in this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    script = "from kv_transfer.ucx_log import ucx_log; print(ucx_log().heard)"
    asked = kept | ({} if variable is None else {variable: "y"})
    told = subprocess.run([sys.executable, "-c", script], env=asked, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(variable is None)
