from __future__ import annotations

import random
import resource
from dataclasses import replace

import pytest
import torch

from common.contract.kv_layout import DTYPE_BYTES, KVLayout
from common.engine.batch import Slice
from common.engine.host_swap import HostSwap, pin
from common.engine.kv_cache import KVCache

CPU = torch.device("cpu")
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype="float32")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def scribble(cache: KVCache) -> None:
    """Fill the cache with random bits: NaN of many payloads, infinities and denormals are among them."""
    raw = cache.blocks.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))


def bits(cache: KVCache, block: int) -> bytes:
    return cache.blocks[block].cpu().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_block_comes_back_bit_for_bit_elsewhere(dtype: str, device: str) -> None:
    torch.manual_seed(1)
    layout = replace(LAYOUT, dtype=dtype)
    cache = KVCache(layout, 9, torch.device(device))
    swap = HostSwap(layout, 4, torch.device(device))
    scribble(cache)
    was = {block: bits(cache, block) for block in range(9)}
    swap.swap_out(cache, [(7, 3), (0, 1), (4, 0)])
    swap.join()
    assert {block: bits(cache, block) for block in range(9)} == was, "swapping out changed the cache"
    scribble(cache)
    others = {block: bits(cache, block) for block in (0, 3, 4, 5, 7, 8)}
    swap.swap_in(cache, [(0, 1), (3, 6), (1, 2)])
    swap.join()
    assert (bits(cache, 1), bits(cache, 6), bits(cache, 2)) == (was[4], was[7], was[0])
    assert {block: bits(cache, block) for block in others} == others, "another block was written"


@pytest.mark.parametrize("seed", range(5))
def test_many_rounds_agree_with_a_dictionary(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    cache, swap = KVCache(LAYOUT, 12, CPU), HostSwap(LAYOUT, 6, CPU)
    slots: dict[int, bytes] = {}
    for _ in range(40):
        scribble(cache)
        outs = list(zip(draw.sample(range(12), 3), draw.sample(range(6), 3), strict=True))
        slots |= {slot: bits(cache, block) for block, slot in outs}
        swap.swap_out(cache, outs)
        held = draw.sample(sorted(slots), 2)
        ins = list(zip(held, draw.sample(range(12), 2), strict=True))
        swap.swap_in(cache, ins)
        for slot, block in ins:
            assert bits(cache, block) == slots[slot]


def test_nothing_to_swap_is_fine_even_without_room() -> None:
    swap = HostSwap(LAYOUT, 0, CPU)
    cache = KVCache(LAYOUT, 2, CPU)
    swap.swap_out(cache, [])
    swap.swap_in(cache, [])
    assert not cache.blocks.any()


@pytest.mark.parametrize("slot", [-1, 4])
@pytest.mark.parametrize("block", [-1, 5])
def test_what_is_not_there_is_refused(slot: int, block: int) -> None:
    cache, swap = KVCache(LAYOUT, 5, CPU), HostSwap(LAYOUT, 4, CPU)
    with pytest.raises(AssertionError, match=rf"no room at {slot}, there are 4"):
        swap.swap_out(cache, [(0, slot)])
    with pytest.raises(AssertionError, match=rf"nothing is at {block}, there are 5"):
        swap.swap_out(cache, [(block, 0)])
    with pytest.raises(AssertionError, match=rf"nothing is at {slot}, there are 4"):
        swap.swap_in(cache, [(slot, 0)])
    with pytest.raises(AssertionError, match=rf"no room at {block}, there are 5"):
        swap.swap_in(cache, [(0, block)])


def test_two_blocks_do_not_go_to_one_place() -> None:
    cache, swap = KVCache(LAYOUT, 5, CPU), HostSwap(LAYOUT, 4, CPU)
    with pytest.raises(AssertionError, match="two blocks to one place"):
        swap.swap_out(cache, [(0, 2), (1, 2)])
    with pytest.raises(AssertionError, match="two blocks to one place"):
        swap.swap_in(cache, [(0, 2), (1, 2)])


def piece(start: int, num_tokens: int, *table: int) -> Slice:
    return Slice(token_ids=[0] * num_tokens, start=start, block_table=table)


def test_a_step_waits_if_it_writes_what_goes_out_or_uses_what_comes_in() -> None:
    """Blocks have 8 slots."""
    cache, swap = KVCache(LAYOUT, 9, CPU), HostSwap(LAYOUT, 4, CPU)
    assert not swap.clashes_with([piece(0, 8, 3)])
    swap.swap_out(cache, [(3, 0), (4, 1)])
    assert swap.clashes_with([piece(0, 8, 3)])
    assert swap.clashes_with([piece(0, 8, 1), piece(7, 2, 1, 4)])
    assert swap.clashes_with([piece(15, 1, 1, 4)])
    assert not swap.clashes_with([piece(16, 1, 3, 4, 5)]), "it reads them, as the copy does"
    assert not swap.clashes_with([piece(8, 8, 1, 2, 3, 4)]), "it does not come so far"
    swap.swap_in(cache, [(0, 6)])
    assert swap.clashes_with([piece(16, 1, 3, 6, 5)])
    assert not swap.clashes_with([piece(0, 8, 5, 6)])
    swap.join()
    assert not swap.clashes_with([piece(0, 8, 3), piece(16, 1, 3, 6, 5)])


class Cudart:
    """What is known of memory of the host."""

    def __init__(self, code: int = 0) -> None:
        self._code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.registered[address] = num_bytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def test_memory_is_pinned_as_it_is_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    slots = torch.empty(3, 1000, dtype=torch.uint8)
    pin(slots)
    assert cudart.registered == {slots.data_ptr(): 3000}
    one = slots[1]
    del slots
    assert list(cudart.registered.values()) == [3000], "a part of it can still be written"
    del one
    assert cudart.registered == {}


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(code=2))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        pin(torch.empty(8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_slots_are_pinned() -> None:
    swap = HostSwap(LAYOUT, 4, torch.device("cuda"))
    assert swap._slots.is_pinned()
    assert swap._slots.untyped_storage().nbytes() == 4 * LAYOUT.block_bytes


def test_room_that_is_not_used_costs_no_memory() -> None:
    """4 GiB are reserved; what the process holds does not grow by a hundredth of it."""

    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    swap = HostSwap(LAYOUT, 2**32 // LAYOUT.block_bytes, CPU)
    cache = KVCache(LAYOUT, 2, CPU)
    swap.swap_out(cache, [(0, 17)])
    assert resident_bytes() - before < 2**32 // 100
