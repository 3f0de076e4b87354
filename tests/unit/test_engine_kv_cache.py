from __future__ import annotations

import ctypes

import torch

from common.contract.kv_layout import KVLayout
from common.engine.kv_cache import KVCache

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype="float16")
NUM_BYTES = 5 * LAYOUT.block_bytes


def test_is_zeroed_contiguous_and_on_a_page() -> None:
    cache = KVCache(LAYOUT, 5, torch.device("cpu"))
    assert cache.parts[0].address % 4096 == 0
    assert cache.blocks[0].nbytes == LAYOUT.block_bytes == 3 * 2 * 2 * 8 * 4 * 2
    assert ctypes.string_at(cache.parts[0].address, NUM_BYTES) == bytes(NUM_BYTES)


def test_a_block_is_contiguous_its_heads_outermost() -> None:
    cache = KVCache(LAYOUT, 5, torch.device("cpu"))
    cache.layer(1)[3, 1, 0, 7, 2] = 1.5  # block, head, keys, slot, dimension
    offset = 3 * LAYOUT.block_bytes + ((((1 * 3 + 1) * 2 + 0) * 8 + 7) * 4 + 2) * 2
    memory = ctypes.string_at(cache.parts[0].address, NUM_BYTES)
    assert memory[offset : offset + 2] == torch.tensor(1.5, dtype=torch.float16).numpy().tobytes()
    assert memory.count(0) == len(memory) - 1, "something else was written"


def test_blocks_are_the_cache_itself() -> None:
    cache = KVCache(LAYOUT, 5, torch.device("cpu"))
    assert cache.blocks.shape == (5, 2, 3, 2, 8, 4)
    assert cache.blocks.data_ptr() == cache.parts[0].address
    assert cache.blocks[3].data_ptr() == cache.parts[0].address + 3 * LAYOUT.block_bytes
    assert cache.blocks[3].is_contiguous()


def test_copy_and_clear_concern_all_layers_of_one_block() -> None:
    cache = KVCache(LAYOUT, 3, torch.device("cpu"))
    for layer in range(3):
        cache.layer(layer)[0] = layer + 1
    cache.copy_block(0, 2)
    for layer in range(3):
        assert bool((cache.layer(layer)[2] == layer + 1).all())
        assert not cache.layer(layer)[1].any()
    cache.begin(torch.tensor([0]))
    for layer in range(3):
        assert not cache.layer(layer)[0].any()
        assert bool((cache.layer(layer)[2] == layer + 1).all())
