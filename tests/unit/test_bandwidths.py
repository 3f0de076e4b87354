"""Which ways count as a fallback, and what is said, counted and shown of them."""

from __future__ import annotations

import logging

import pytest

from common.contract.ids import Incarnation
from kv_transfer.bandwidths import Bandwidths
from kv_transfer.routes import ReadRoute, Way

SUFFICIENT = {"cpu": {Way.RDMA, Way.CUDA_IPC, Way.SHARED_MEMORY}, "cuda": {Way.RDMA, Way.CUDA_IPC}}


def observe(bandwidths: Bandwidths, *routes: ReadRoute) -> None:
    """Two reads by each of these routes, each from a source of its own."""
    for number, route in enumerate(routes):
        for _ in range(2):
            bandwidths.observe(Incarnation(f"p{number}"), route, 10**9, 0.5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("way", Way)
def test_what_suffices_and_what_is_a_fallback(device: str, way: Way) -> None:
    route = ReadRoute(way=way)
    assert route.suffices(device) == (way in SUFFICIENT[device])
    assert route.falls_back(device) == (way not in SUFFICIENT[device] | {Way.ZMQ, Way.UNKNOWN})


def test_a_fallback_is_counted_logged_once_and_visible(caplog: pytest.LogCaptureFixture) -> None:
    bandwidths = Bandwidths("cpu")
    assert bandwidths.state() == {"sources_read": {}, "fallbacks": 0}
    tcp = ReadRoute(way=Way.TCP, wire="tcp/eth0", same_host=False)
    observe(bandwidths, tcp, ReadRoute(way=Way.RDMA, wire="rc_mlx5/mlx5_0:1", same_host=False), tcp)
    assert bandwidths.state() == {"sources_read": {"rdma": 1, "tcp": 2}, "fallbacks": 2}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "blocks from p0 come by tcp (tcp/eth0)" in warning
    values = {sample.name: sample.value for metric in bandwidths.metrics() for sample in metric.samples}
    assert values["baton_transfer_fallbacks_total"] == 2


@pytest.mark.parametrize(
    ("device", "route", "said"),
    [
        ("cuda", ReadRoute(way=Way.TCP, wire="tcp/lo", same_host=True), True),
        ("cuda", ReadRoute(way=Way.RDMA, wire="rc_mlx5/mlx5_0:1", same_host=True), True),
        ("cuda", ReadRoute(way=Way.CUDA_IPC, wire="cuda_ipc/cuda", same_host=True), False),
        ("cuda", ReadRoute(way=Way.RDMA, wire="rc_mlx5/mlx5_0:1", same_host=False), False),
        ("cuda", ReadRoute(), False),
        ("cpu", ReadRoute(way=Way.SHARED_MEMORY, wire="cma/memory", same_host=True), False),
    ],
)
def test_gpus_of_one_host_that_do_not_use_cuda_ipc_are_warned_of(
    device: str, route: ReadRoute, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    observe(Bandwidths(device), route)
    lines = [record.getMessage() for record in caplog.records if "and not by cuda_ipc" in record.getMessage()]
    assert len(lines) == said
    assert all("CUDA_VISIBLE_DEVICES may differ" in line for line in lines)


def test_as_many_sources_are_remembered_as_were_read_from_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that restart have new incarnations each time."""
    monkeypatch.setattr("kv_transfer.bandwidths.MAX_SOURCES", 2)
    bandwidths = Bandwidths("cpu")
    for source, num_known in (("p0", 1), ("p1", 2), ("p0", 2), ("p2", 3), ("p0", 3), ("p1", 4)):
        bandwidths.observe(Incarnation(source), ReadRoute(way=Way.TCP), 10**9, 0.5)
        assert bandwidths.num_sources[Way.TCP] == bandwidths.num_fallbacks == num_known
        assert len(bandwidths._known) <= 2


def test_rates_have_the_way_as_their_only_label() -> None:
    bandwidths = Bandwidths("cpu")
    observe(bandwidths, *[ReadRoute(way=Way.TCP, wire=f"tcp/eth{number}") for number in range(50)])
    samples = [sample for metric in bandwidths.metrics() for sample in metric.samples]
    assert {tuple(sample.labels) for sample in samples} == {("way",), ()}
    (rate,) = [sample for sample in samples if sample.name == "baton_read_bytes_per_second"]
    assert (rate.labels, rate.value) == ({"way": "tcp"}, 2e9)
    counts = {sample.labels["way"]: sample.value for sample in samples if sample.name == "baton_sources_read_total"}
    assert counts == dict.fromkeys([way.value for way in Way], 0) | {"tcp": 50}
