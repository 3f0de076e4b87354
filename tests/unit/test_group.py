"""What the ranks of a group say to each other in shared memory."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from needs import require

from common.engine import native
from common.engine.native.group import GroupEndedError, SharedGroup, memory_bytes
from common.engine.shard import Shard

NUMBERS = 40


@pytest.fixture
def compiled() -> native.Kernels:
    require("compiler")
    kernels = native.kernels()
    assert kernels is not None
    return kernels


def group_of(kernels: native.Kernels, width: int, orders: int = 100) -> list[SharedGroup]:
    memory = torch.zeros(memory_bytes(kernels, width, NUMBERS, orders), dtype=torch.uint8)
    return [SharedGroup(kernels, memory, Shard(rank, width), NUMBERS, orders) for rank in range(width)]


def together(group: list[SharedGroup], run: Callable[[SharedGroup], torch.Tensor]) -> list[torch.Tensor]:
    """What each rank returns."""
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(run, group))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 8, NUMBERS - 1, NUMBERS, 3 * NUMBERS + 5])
def test_all_have_the_same_sum_in_the_order_of_the_ranks(compiled: native.Kernels, width: int, count: int) -> None:
    parts = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(width)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    group = group_of(compiled, width)
    for _ in range(5):
        for summed in together(group, lambda each: each.add(parts[each.shard.rank].clone())):
            assert torch.equal(summed, expected)


def part_of(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    part = shard.of(whole.shape[1])
    return whole[:, part.start : part.stop].clone()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 40), (7, 11), (9, 40), (0, 5)])
def test_parts_of_rows_lie_side_by_side(compiled: native.Kernels, width: int, num_rows: int, num_columns: int) -> None:
    whole = torch.randn(num_rows, num_columns)
    group = group_of(compiled, width)
    for _ in range(3):
        first, *others = together(group, lambda each: each.beside(part_of(whole, each.shard), num_columns))
        assert torch.equal(first, whole)
        assert all(each.shape == (0, num_columns) for each in others)


def test_other_types_are_summed_in_float32(compiled: native.Kernels) -> None:
    parts = [torch.tensor([256.0, 1.0]).bfloat16(), torch.tensor([1.0, 2**-9]).bfloat16()]
    sums = together(group_of(compiled, 2), lambda each: each.add(parts[each.shard.rank]))
    assert sums[0].dtype == torch.bfloat16
    assert sums[0].tolist() == sums[1].tolist() == [256.0, 1.0]
    columns = [torch.ones(2, 3).T[:, each : each + 1] for each in range(2)]
    added = together(group_of(compiled, 2), lambda each: each.add(columns[each.shard.rank]))
    assert added[0].shape == (3, 1)


def test_orders_come_one_after_another(compiled: native.Kernels) -> None:
    group = group_of(compiled, 3)
    orders = [np.arange(num) * 7 for num in (1, 50, 0, 98, 99, 2 * 98, 1000, 3)]  # 98 fit into a turn

    def run(each: SharedGroup) -> torch.Tensor:
        for order in orders:
            if each.shard.rank == 0:
                each.tell((order[:20], order[20:].reshape(1, -1)))
            else:
                assert each.hear().tolist() == order.tolist()
            each.add(torch.zeros(1))
        return torch.empty(0)

    together(group, run)


def test_an_order_waits_until_all_have_read_the_one_before(compiled: native.Kernels) -> None:
    first, *others = group_of(compiled, 3)
    read: list[list[int]] = [[], []]

    def run(rank: int) -> None:
        for order in range(20):
            if order % 7 == 3 + rank:
                time.sleep(0.02)
            read[rank] += others[rank].hear().tolist()

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(run, rank) for rank in range(2)]
        for order in range(20):
            first.tell((np.array([order]),))
        for reader in readers:
            reader.result()
    assert read == [list(range(20))] * 2
    first.tell((np.array([20]),))
    ended = threading.Timer(0.3, first.end)
    ended.start()
    with pytest.raises(GroupEndedError):
        first.tell((np.array([21]),))
    ended.join()


@pytest.mark.parametrize("waits", ["for an order", "for a part"])
def test_whoever_waits_in_a_group_that_ends_is_told(compiled: native.Kernels, waits: str) -> None:
    first, second = group_of(compiled, 2)
    ended = threading.Timer(0.3, first.end)
    ended.start()
    with pytest.raises(GroupEndedError):
        second.hear() if waits == "for an order" else second.add(torch.zeros(1))
    ended.join()
    with pytest.raises(GroupEndedError):
        first.add(torch.zeros(3 * NUMBERS))


def _other_process(memory: torch.Tensor, num_turns: int) -> None:
    kernels = native.kernels()
    assert kernels is not None
    torch.set_num_threads(1)
    rank = SharedGroup(kernels, memory, Shard(1, 2), NUMBERS, 100)
    for _ in range(num_turns):
        rank.add(torch.from_numpy(rank.hear()).float())


@pytest.fixture
def other(compiled: native.Kernels) -> Iterator[SharedGroup]:
    """Rank 0 of a group whose other rank is a process."""
    memory = torch.zeros(memory_bytes(compiled, 2, NUMBERS, 100), dtype=torch.uint8)
    memory.share_memory_()  # type: ignore[no-untyped-call]
    process = multiprocessing.get_context("spawn").Process(target=_other_process, args=(memory, 2000), daemon=True)
    process.start()
    yield SharedGroup(compiled, memory, Shard(0, 2), NUMBERS, 100)
    process.join(20)
    assert process.exitcode == 0


def test_a_rank_in_another_process_takes_its_turns(other: SharedGroup) -> None:
    """Thousands of them. A wake-up that is lost would show only in the time: nobody sleeps for longer than a nap."""
    for number in range(2000):
        order = np.arange(1 + number % 90) + number
        other.tell((order,))
        numbers = torch.from_numpy(order).float()
        assert torch.equal(other.add(numbers.clone()), 2.0 * numbers)
