"""The kernels in C against plain arithmetic in float64: every tile, edge and type; and doing without them."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from native_builds import EMULATED_TILES, build, folder_of_run
from needs import require

from common.contract.sampling import SamplingParams
from common.engine import native
from common.engine.backend import PlainProducts, TorchBackend
from common.engine.batch import Sample, Samples, Slice
from common.engine.draw import draw, random_numbers
from common.engine.linear import Linear
from common.engine.native import Kernels, library
from common.engine.native.backend import NativeBackend
from common.engine.native.packing import pack, pack_pairs
from common.engine.ragged import Rows
from common.engine.rope import Rope, RopeConfig
from common.engine.runner import load_runner

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 1e-5
"""‖out - ref‖ / ‖ref‖: sums are in float32 whatever the type of the weights."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """The kernels of this CPU, which widen bf16 also if it has instructions for it."""
    require("compiler")
    found = Kernels(library.load())
    found.multiplies_pairs = False
    return found


@pytest.fixture(scope="module")
def large(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels with the tiles of a CPU with AVX-512, and without AMX."""
    return build(tmp_path_factory.mktemp("large"), "-DLARGE_TILES", "-U__AMX_TILE__")


@pytest.fixture(scope="module", params=["of this CPU", "large"])
def tiled(request: pytest.FixtureRequest, kernels: Kernels, large: Kernels) -> Kernels:
    """The kernels with the tiles that suit this CPU, and with those of a CPU with AVX-512."""
    return kernels if request.param == "of this CPU" else large


@pytest.fixture(scope="module")
def emulating(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels with AMX, whose instructions are emulated."""
    return build(folder_of_run(tmp_path_factory), EMULATED_TILES)


@pytest.fixture(scope="module", params=["of this CPU", "large", "emulated AMX"])
def pairing(request: pytest.FixtureRequest, kernels: Kernels, large: Kernels, emulating: Kernels) -> Kernels:
    """Kernels that multiply bf16 in pairs, with instructions for them or without."""
    found = {"of this CPU": Kernels(library.load()), "large": large, "emulated AMX": emulating}[request.param]
    found.multiplies_pairs = True
    return found


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def distance(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float(((out.double() - ref).norm() / ref.norm()).item())


# --- threads ---------------------------------------------------------------------------------------------------------


def callers_get_their_own_products(kernels: Kernels, packed: torch.Tensor, features: int, times: int) -> bool:
    """Four threads multiply inputs of different numbers of rows at the same time."""
    inputs = [torch.randn(rows, features) for rows in (1, 20, 40, 200)]
    torch.set_num_threads(1)
    alone = [kernels.linear(x, packed, None, 500) for x in inputs]

    def call(index: int) -> bool:
        torch.set_num_threads(3)  # the number is of a thread
        return all(torch.equal(kernels.linear(inputs[index], packed, None, 500), alone[index]) for _ in range(times))

    with ThreadPoolExecutor(4) as pool:
        return all(pool.map(call, range(4)))


def test_callers_at_the_same_time_get_their_own_products(kernels: Kernels) -> None:
    torch.manual_seed(0)
    assert callers_get_their_own_products(kernels, pack(torch.randn(500, 96)), 96, 300)


@pytest.mark.parametrize(("features", "times"), [(96, 100), (4200, 3)])
def test_callers_at_the_same_time_get_their_own_products_in_pairs(pairing: Kernels, features: int, times: int) -> None:
    """Of 4,200 input features 200 rows are multiplied in parts."""
    torch.manual_seed(0)
    packed = pack_pairs(torch.randn(500, features).bfloat16())
    assert callers_get_their_own_products(pairing, packed, features, times)


def test_helpers_come_again_after_they_slept(kernels: Kernels) -> None:
    torch.set_num_threads(4)
    packed, x = pack(torch.randn(2000, 300)), torch.randn(70, 300)
    once = kernels.linear(x, packed, None, 2000)
    for pause_s in (0.0, 0.002, 0.0, 0.05, 0.0):
        time.sleep(pause_s)
        assert torch.equal(kernels.linear(x, packed, None, 2000), once)


@pytest.mark.processes
def test_a_forked_process_computes_without_the_helpers_of_its_parent(kernels: Kernels) -> None:
    """In a process of its own, because torch's threads would not survive a fork of the tests."""
    program = """
import os, torch
from common.engine import native
from common.engine.native import packing
kernels = native.kernels()
torch.set_num_threads(3)
packed, x = packing.pack(torch.ones(300, 50)), torch.ones(100, 50)
assert kernels.linear(x, packed, None, 300).eq(50).all()
child = os.fork()
if child == 0:
    right = all(kernels.linear(x, packed, None, 300).eq(50).all() for _ in range(50))
    os._exit(0 if right else 1)
assert os.waitpid(child, 0)[1] == 0
assert kernels.linear(x, packed, None, 300).eq(50).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def told_by(folder: Path, program: str) -> str:
    """What a program in C prints, which may include the kernels' headers."""
    require("compiler")
    (folder / "jobs.c").write_text(program)
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    options = ["-O0", "-pthread", "-I", str(Path(native.__file__).parent)]
    subprocess.run([*compiler, *options, "-o", "jobs", "jobs.c"], cwd=folder, check=True, timeout=60)
    return subprocess.run([folder / "jobs"], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.processes
def test_helpers_that_cannot_be_started_are_tried_again_only_a_second_later(tmp_path: Path) -> None:
    """As where `pids.max` is reached. For forks it is registered once: the system keeps what it is given for ever."""
    told = told_by(
        tmp_path,
        """
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
static int seconds, num_tries, num_registrations;
#define clock_gettime(clock, time) (*(time) = (struct timespec){.tv_sec = seconds})
#define pthread_create(...) (num_tries++, EAGAIN)
#define pthread_atfork(...) (num_registrations++, 0)
#include "crew.h"
static int count(void *done, long unit) { return ++*(int *)done, 0; }
int main(void) {
    int done = 0;
    for (seconds = 10; seconds < 13; seconds++)
        for (int i = 0; i < 1000; i++) share(4, 3, count, &done);
    printf("%d units, tried %d times, registered %d times", done, num_tries, num_registrations);
}
""",
    )
    assert told == "12000 units, tried 3 times, registered 1 times"


@pytest.mark.processes
def test_a_job_waits_for_no_helper_that_the_one_before_did_not_want(tmp_path: Path) -> None:
    """A job with four threads has started three helpers. All are woken for one with two threads, and one comes in."""
    told = told_by(
        tmp_path,
        """
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
static void looks(void *at), adds(void *at), subtracts(void *at);
#undef atomic_load
#undef atomic_fetch_add
#undef atomic_fetch_sub
#define atomic_load(at) (looks((void *)(at)), atomic_load_explicit(at, memory_order_seq_cst))
#define atomic_fetch_add(at, n) (adds((void *)(at)), atomic_fetch_add_explicit(at, n, memory_order_seq_cst))
#define atomic_fetch_sub(at, n) (subtracts((void *)(at)), atomic_fetch_sub_explicit(at, n, memory_order_seq_cst))
#include "crew.h"
static _Atomic int num_looked, num_came, num_left; /* helpers */
static void looks(void *at) { num_looked += at == &crew.helpers; }
static void adds(void *at) { num_came += at == &crew.inside; }
static void subtracts(void *at) { num_left += at == &crew.inside; }
static int nothing(void *job, long unit) { return 0; }
int main(void) {
    share(8, 4, nothing, NULL);
    while (num_left < 3) sched_yield();
    share(8, 2, nothing, NULL);
    while (num_looked < 6 || num_left < 4) sched_yield();
    printf("%d", num_came - 3);
}
""",
    )
    assert told == "1"


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 64, 100, 130])
def test_a_product_is_the_reference_s_for_any_number_of_rows(
    tiled: Kernels, dtype: torch.dtype, out_features: int
) -> None:
    torch.manual_seed(out_features)
    for in_features in (1, 7, 96, 1100, 4200):
        weight = torch.randn(out_features, in_features).to(dtype)
        bias = torch.randn(out_features)
        packed = pack(weight)
        for rows in (*range(1, 15), 23, 24, 25, 193, 200):
            x = torch.randn(rows, in_features)
            out = tiled.linear(x, packed, bias, out_features)
            assert out.shape == (rows, out_features)
            assert distance(out, x.double() @ weight.double().T + bias.double()) < TOLERANCE, (in_features, rows)
        plain = tiled.linear(x, packed, None, out_features)
        assert distance(plain, x.double() @ weight.double().T) < TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_s_product_does_not_depend_on_the_rows_beside_it(tiled: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for in_features in (50, 1100, 4200):
        packed, bias = pack(torch.randn(70, in_features).to(dtype)), torch.randn(70)
        x = torch.randn(230, in_features)
        alone = torch.cat([tiled.linear(row[None], packed, bias, 70) for row in x])
        for rows in (2, 3, 5, 8, 24, 100, 230):
            assert torch.equal(tiled.linear(x[:rows], packed, bias, 70), alone[:rows]), (in_features, rows)


def test_a_cpu_with_tiles_has_its_weights_in_pairs(emulating: Kernels) -> None:
    assert emulating.multiplies_pairs
    assert emulating.instructions[1] == "amx"


@pytest.mark.parametrize("out_features", [1, 16, 40, 100, 130])
def test_a_product_of_pairs_is_that_of_rounded_inputs_for_any_number_of_rows(
    pairing: Kernels, out_features: int
) -> None:
    torch.manual_seed(out_features)
    for in_features in (1, 7, 32, 96, 99, 1100, 4200):
        weight, bias = torch.randn(out_features, in_features).bfloat16(), torch.randn(out_features)
        packed = pack_pairs(weight)
        for rows in (1, 2, 3, 4, 7, 8, 10, 11, 15, 16, 17, 32, 33, 49, 256, 512, 513, 546):
            x = torch.randn(rows, in_features)
            out, exact = pairing.linear(x, packed, bias, out_features), x.bfloat16().double() @ weight.double().T
            assert distance(out, exact + bias.double()) < TOLERANCE, (in_features, rows)
        assert distance(pairing.linear(x, packed, None, out_features), exact) < TOLERANCE


def test_a_row_s_product_of_pairs_depends_neither_on_the_rows_beside_it_nor_on_threads(pairing: Kernels) -> None:
    torch.manual_seed(1)
    for in_features in (50, 2500):
        packed, bias = pack_pairs(torch.randn(200, in_features).bfloat16()), torch.randn(200)
        x = torch.randn(530, in_features)
        torch.set_num_threads(1)
        alone = torch.cat([pairing.linear(row[None], packed, bias, 200) for row in x])
        for rows, threads in ((2, 1), (5, 3), (16, 2), (24, 3), (100, 1), (257, 2), (513, 2), (530, 3)):
            torch.set_num_threads(threads)
            assert torch.equal(pairing.linear(x[:rows], packed, bias, 200), alone[:rows]), (in_features, rows)


def test_pairs_round_as_torch_does_and_keep_what_is_not_a_number_in_its_row(pairing: Kernels) -> None:
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.3e38, 1e-30, float("inf"), float("-inf"), float("nan")]
    for in_features in (1, 9, 32, 40):
        last = torch.zeros(1, in_features)
        last[0, -1] = 1
        x = torch.zeros(len(ties), in_features)
        x[:, -1] = torch.tensor(ties)
        out = pairing.linear(x, pack_pairs(last.bfloat16()), None, 1)
        expected = x.bfloat16().float()[:, -1:]
        assert torch.equal(out.isnan(), expected.isnan()), in_features
        assert torch.equal(out.nan_to_num(), expected.nan_to_num()), in_features


@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (17, 33), (50, 96), (130, 7)])
@pytest.mark.parametrize("kind", ["pairs", *DTYPES], ids=str)
def test_rows_of_a_packed_weight_are_those_of_the_weight(
    kernels: Kernels, kind: str | torch.dtype, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape).to(torch.bfloat16 if isinstance(kind, str) else kind)
    packed = pack_pairs(weight) if kind == "pairs" else pack(weight)
    rows = torch.arange(shape[0] - 1, -1, -1)
    assert torch.equal(kernels.unpack(packed, rows, shape), weight.float().flip(0))
    for absent in (-1, shape[0]):
        with pytest.raises(IndexError, match=f"not one of {shape[0]}$"):
            kernels.unpack(packed, torch.tensor([0, absent]), shape)


def test_some_rows_are_normalised_as_all_are_and_stay_as_they_are(kernels: Kernels) -> None:
    for size in (8, 33, 288):
        h, delta, weight = torch.randn(70, size), torch.randn(70, size), torch.randn(size)
        rows = torch.tensor([69, 0, 5, 5])
        for more in (None, delta):
            before, added = h.clone(), h.clone()
            expected = kernels.add_norm(added, more, weight, 1e-5)
            assert torch.equal(kernels.norm_some(h, more, rows, weight, 1e-5), expected[rows])
            assert torch.equal(h, before)
        for absent in (-1, 70):
            with pytest.raises(IndexError, match=r"not one of 70$"):
                kernels.norm_some(h, None, torch.tensor([0, absent]), weight, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_some_rows_are_projected_as_plain_products_do_it(kernels: Kernels, dtype: torch.dtype) -> None:
    linear = Linear(50, 64, bias=False, dtype=dtype, device=CPU, kernels=kernels, batch_invariant=True)
    linear.weight.copy_(torch.randn(50, 64))
    linear.pack()
    h, delta, weight, rows = torch.randn(9, 64), torch.randn(9, 64), torch.randn(64), torch.tensor([8, 0, 3])
    backend = NativeBackend(kernels)
    for more in (None, delta):
        plain = PlainProducts.project_rows(backend, h, more, rows, weight, 1e-5, linear)
        assert torch.equal(backend.project_rows(h, more, rows, weight, 1e-5, linear), plain)


def test_threads_change_nothing(kernels: Kernels) -> None:
    packed, x = pack(torch.randn(300, 64)), torch.randn(2100, 64)
    deep, y = pack(torch.randn(300, 1100)), torch.randn(33, 1100)
    q, layer, tables, lens = scene(torch.float32, 64, 4, 2, (5, 70, 33))
    prompt = torch.randn(60, 8, 64)
    angles = Rope(RopeConfig(theta=1e4), 64, 2100, CPU).table(torch.float32), torch.arange(2100)
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        h, qkv = x.clone(), torch.cat((x, x), dim=1)
        kernels.rotate(qkv, 1, 1, (x[0], x[1]), 1e-6, angles)
        results.append(
            (
                kernels.linear(x[:40], packed, None, 300),
                kernels.linear(y, deep, None, 300),
                kernels.unpack(packed, torch.arange(2100) % 300, (300, 64)),
                kernels.norm_some(x, x, torch.arange(2100).flip(0), x[0], 1e-6),
                decode(kernels, q, layer, tables, lens, None, 0.1),
                prefill(kernels, prompt, layer, tables[1], 10, None, 0.1),
                kernels.add_norm(h, x, torch.ones(64), 1e-6),
                h,
                qkv,
                kernels.silu_mul(x),
            )
        )
    assert all(torch.equal(a, b) for each in results[1:] for a, b in zip(each, results[0], strict=True))


# --- attention -------------------------------------------------------------------------------------------------------


def scene(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int, lens: tuple[int, ...], block_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, one layer of a cache of three with NaN wherever nobody should look, tables and lengths."""
    torch.manual_seed(head_dim + group)
    num_blocks = [-(-length // block_size) for length in lens]
    cache = torch.full((sum(num_blocks) + 1, num_kv_heads, 3, 2, block_size, head_dim), float("nan"), dtype=dtype)
    order = (torch.randperm(sum(num_blocks)) + 1).tolist()
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int64)
    for row, (length, number) in enumerate(zip(lens, num_blocks, strict=True)):
        mine = [order.pop() for _ in range(number)]
        tables[row, :number] = torch.tensor(mine)
        at = torch.arange(length)
        written = torch.randn(length, num_kv_heads, 2, head_dim).to(dtype)
        cache[torch.tensor(mine)[at // block_size], :, 1, :, at % block_size] = written
    q = torch.randn(len(lens), num_kv_heads * group, head_dim)
    return q, cache[:, :, 1], tables, torch.tensor(lens)


def decode(
    kernels: Kernels,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Into numbers that nobody may see, with queries that lie among others."""
    wide = torch.cat((q, torch.full_like(q, float("nan"))), dim=1)
    out = torch.full_like(q, float("nan"))
    kernels.attend_decode(wide[:, : q.shape[1]], layer, tables, lens, window, scale, out)
    return out


def prefill(
    kernels: Kernels,
    q: torch.Tensor,
    layer: torch.Tensor,
    table: torch.Tensor,
    start: int,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """As `decode`, of a chunk."""
    wide = torch.cat((q, torch.full_like(q, float("nan"))), dim=1)
    out = torch.full_like(q, float("nan"))
    kernels.attend_prefill(wide[:, : q.shape[1]], layer, table, start, window, scale, out)
    return out


def reference(
    q: torch.Tensor, layer: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    """By the definition, in float64, without the slots that nobody has written."""
    out = torch.empty_like(q, dtype=torch.float64)
    for row, length in enumerate(lens.tolist()):
        blocks = layer[tables[row, : -(-length // layer.shape[3])]].double()
        k_KSD, v_KSD = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, max(0, length - (window or length)) : length]
        scores = q[row].double().view(layer.shape[1], -1, q.shape[2]) @ k_KSD.transpose(1, 2) * scale
        out[row] = (scores.softmax(-1) @ v_KSD).flatten(0, 1)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 48, 64, 80, 96, 128])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 1), (2, 2), (1, 3), (2, 4), (2, 7), (1, 8)])
def test_attention_is_the_reference_s(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int
) -> None:
    lens = (1, 2, 15, 16, 17, 31, 33, 100)
    q, layer, tables, lengths = scene(dtype, head_dim, num_kv_heads, group, lens)
    for window in (None, 1, 5, 16, 40):
        out = decode(kernels, q, layer, tables, lengths, window, head_dim**-0.5)
        assert distance(out, reference(q, layer, tables, lengths, window, head_dim**-0.5)) < TOLERANCE, window


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (3, 16), (7, 24), (2, 512)])
@pytest.mark.parametrize("block_size", [1, 3, 4, 6, 32])
def test_attention_over_blocks_of_any_size(
    kernels: Kernels, block_size: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    q, layer, tables, lens = scene(dtype, head_dim, 2, group, (1, 7, 40), block_size)
    for window in (None, 9):
        out = decode(kernels, q, layer, tables, lens, window, 0.25)
        assert distance(out, reference(q, layer, tables, lens, window, 0.25)) < TOLERANCE


def test_a_token_s_attention_does_not_depend_on_the_others(kernels: Kernels) -> None:
    q, layer, tables, lens = scene(torch.bfloat16, 64, 2, 7, (5, 300, 17, 64, 1))
    together = decode(kernels, q, layer, tables, lens, None, 0.125)
    for row in range(len(lens)):
        one = slice(row, row + 1)
        assert torch.equal(decode(kernels, q[one], layer, tables[one], lens[one], None, 0.125), together[one])


@pytest.mark.parametrize("far", [0.0, 60.0, 500.0, 1e5])
def test_scores_that_are_far_apart_do_not_overflow(kernels: Kernels, far: float) -> None:
    q, layer, tables, lens = scene(torch.float32, 16, 1, 1, (20,))
    layer[tables[0, 0], 0, :, 3] = far
    q.fill_(1.0)
    out = decode(kernels, q, layer, tables, lens, None, 1.0)
    assert distance(out, reference(q, layer, tables, lens, None, 1.0)) < TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 1), (2, 2), (1, 7)])
def test_a_chunk_s_attention_is_the_reference_s(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int
) -> None:
    for start, num in ((0, 1), (0, 16), (0, 50), (3, 13), (16, 1), (31, 2), (40, 60)):
        length = start + num
        _, layer, tables, _ = scene(dtype, head_dim, num_kv_heads, group, (length,))
        q = torch.randn(num, num_kv_heads * group, head_dim)
        each = tables.expand(num, -1)
        lens = torch.arange(start, length) + 1
        for window in (None, 1, 5, 16, 40):
            out = prefill(kernels, q, layer, tables[0], start, window, head_dim**-0.5)
            ref = reference(q, layer, each, lens, window, head_dim**-0.5)
            assert distance(out, ref) < TOLERANCE, (start, num, window)


@pytest.mark.parametrize("block_size", [1, 3, 4, 6, 32])
def test_a_chunk_s_attention_over_blocks_of_any_size(kernels: Kernels, block_size: int) -> None:
    _, layer, tables, _ = scene(torch.float32, 16, 2, 3, (45,), block_size)
    q = torch.randn(40, 6, 16)
    for window in (None, 9):
        out = prefill(kernels, q, layer, tables[0], 5, window, 0.25)
        ref = reference(q, layer, tables.expand(40, -1), torch.arange(5, 45) + 1, window, 0.25)
        assert distance(out, ref) < TOLERANCE


def test_a_token_s_attention_does_not_depend_on_the_chunk_it_is_in(kernels: Kernels) -> None:
    for window in (None, 21):
        _, layer, tables, _ = scene(torch.bfloat16, 64, 2, 3, (300,))
        q = torch.randn(300, 6, 64)
        whole = prefill(kernels, q, layer, tables[0], 0, window, 0.125)
        for begin, end in ((0, 1), (5, 40), (40, 300), (299, 300)):
            part = prefill(kernels, q[begin:end], layer, tables[0], begin, window, 0.125)
            assert torch.equal(part, whole[begin:end]), (window, begin, end)


def test_a_chunk_s_attention_to_many_slots(tiled: Kernels) -> None:
    _, layer, tables, _ = scene(torch.float32, 16, 1, 3, (1100,))
    q = torch.randn(40, 3, 16)
    for window in (None, 900):
        out = prefill(tiled, q, layer, tables[0], 1060, window, 0.25)
        ref = reference(q, layer, tables.expand(40, -1), torch.arange(1060, 1100) + 1, window, 0.25)
        assert distance(out, ref) < TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(3, 1, 48), (2, 2, 64), (1, 3, 40), (2, 7, 128)])
def test_a_token_s_attention_has_the_same_bits_in_a_step_and_in_a_chunk(
    kernels: Kernels, dtype: torch.dtype, num_kv_heads: int, group: int, head_dim: int
) -> None:
    """So an answer goes on with the same numbers where its KV is computed again, as tokens of a prompt."""
    for block_size in (3, 32):
        _, layer, tables, _ = scene(dtype, head_dim, num_kv_heads, group, (600,), block_size)
        q = 3 * torch.randn(600, num_kv_heads * group, head_dim)
        for window in (None, 21, 200):
            chunk = prefill(kernels, q, layer, tables[0], 0, window, head_dim**-0.5)
            for first in (0, 570):
                lens = torch.arange(first, first + 30) + 1
                step = decode(
                    kernels, q[lens - 1], layer, tables.expand(30, -1).contiguous(), lens, window, head_dim**-0.5
                )
                assert torch.equal(step, chunk[lens - 1]), (block_size, window, first)


def test_a_chunk_does_not_see_what_comes_after_it(kernels: Kernels) -> None:
    """Slots of the same sequence beyond the chunk: a cached block that is longer than the prompt."""
    _, layer, tables, _ = scene(torch.float32, 16, 2, 3, (64,))
    q = torch.randn(20, 6, 16)
    before = prefill(kernels, q, layer, tables[0], 10, None, 0.25)
    layer[tables[0, 2:]] = float("nan")
    layer[tables[0, 1], :, :, 30 - 16 :] = float("nan")
    assert torch.equal(prefill(kernels, q, layer, tables[0], 10, None, 0.25), before)


@pytest.mark.parametrize("window", [None, 5])
def test_in_pairs_what_a_token_does_not_see_has_no_weight(pairing: Kernels, window: int | None) -> None:
    """Not even a small one: values that are seen are zeros, and the others as large as there are."""
    q, layer, tables, _ = scene(torch.bfloat16, 16, 1, 2, (40,))
    q = q.expand(40, -1, -1).contiguous()
    for token in (0, 7, 20, 38):
        begin = max(token + 1 - window, 0) if window else 0
        for slot in range(40):
            seen = begin <= slot <= token
            layer[tables[0, slot // 16], :, 1, slot % 16] = 0.0 if seen else 3e38
        chunk = prefill(pairing, q, layer, tables[0], 0, window, 0.25)
        assert not bool(chunk[token].any()), token
        step = decode(pairing, q[token : token + 1], layer, tables, torch.tensor([token + 1]), window, 0.25)
        assert not bool(step.any()), token


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_no_nan_is_lost(kernels: Kernels, bits: int) -> None:
    _, layer, tables, _ = scene(torch.float32, 16, 1, 2, (40,))
    layer[tables[0, 0], 0, 0, 3] = torch.tensor(bits - 2**32 if bits >= 2**31 else bits, dtype=torch.int32).view(
        torch.float32
    )
    q = torch.randn(40, 2, 16)
    assert bool(prefill(kernels, q, layer, tables[0], 0, None, 0.25)[3:].isnan().all())
    assert bool(decode(kernels, q[:1], layer, tables, torch.tensor([40]), None, 0.25).isnan().all())


@pytest.mark.parametrize("score", [-1e31, -1e37])
def test_scores_that_are_very_low_count(kernels: Kernels, score: float) -> None:
    _, layer, tables, _ = scene(torch.float32, 8, 1, 1, (3,))
    layer[tables[0, 0], :, 0] = score / 8
    q = torch.ones(3, 1, 8)
    mean = layer[tables[0, 0], 0, 1, :3].mean(dim=0)
    assert (
        distance(decode(kernels, q[:1], layer, tables, torch.tensor([3]), None, 1.0)[0, 0], mean.double()) < TOLERANCE
    )
    assert distance(prefill(kernels, q, layer, tables[0], 0, None, 1.0)[2, 0], mean.double()) < TOLERANCE


@pytest.mark.parametrize("lengths", [(1, 20, 1, 9, 1), (1, 1, 5), (7, 1, 1), (3, 4), (1, 1)])
def test_slices_of_one_token_and_of_many(kernels: Kernels, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    slices = [
        Slice(token_ids=[1] * length, start=start, block_table=list(range(4 * row, 4 * row + 4)))
        for row, (start, length) in enumerate(zip((10, 0, 40, 3, 0), lengths, strict=False))
    ]
    batch = Rows.of(slices, 16).on(CPU)
    layer = torch.randn(20, 2, 2, 16, 32)
    q = torch.randn(len(batch.token_ids_T), 6, 32)
    for window in (None, 7):
        ours = NativeBackend(kernels).attend(q, layer, batch, window, 0.2)
        theirs = TorchBackend().attend(q, layer, batch, window, 0.2)
        assert distance(ours, theirs.double()) < TOLERANCE


ROUNDED = 3e-3
"""‖out - ref‖ / ‖ref‖ where weights of slots are rounded to bf16."""


GROUPS = [(3, 1, 16), (2, 2, 3), (1, 7, 32), (1, 20, 64)]


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "block_size"),
    [(head_dim, *group) for head_dim in (8, 40, 64) for group in GROUPS]
    + [(48, 1, 7, 32), (128, 2, 2, 3), (24, 1, 49, 16), (56, 1, 35, 16), (512, 1, 1, 16)],
)
def test_attention_in_pairs_is_that_of_rounded_queries(
    pairing: Kernels, head_dim: int, num_kv_heads: int, group: int, block_size: int
) -> None:
    scale = head_dim**-0.5
    q, layer, tables, lens = scene(torch.bfloat16, head_dim, num_kv_heads, group, (1, 31, 32, 33, 300), block_size)
    q = (q * scale).bfloat16().float() / scale
    for window in (None, 1, 5, 33, 270):
        out, ref = (
            decode(pairing, q, layer, tables, lens, window, scale),
            reference(q, layer, tables, lens, window, scale),
        )
        assert distance(out, ref) < ROUNDED, window
    for start, num in ((0, 1), (0, 50), (31, 2), (3, 13), (40, 100)):
        _, layer, tables, _ = scene(torch.bfloat16, head_dim, num_kv_heads, group, (start + num,), block_size)
        q = (torch.randn(num, num_kv_heads * group, head_dim) * scale).bfloat16().float() / scale
        lens = torch.arange(start, start + num) + 1
        for window in (None, 1, 17, 40):
            out = prefill(pairing, q, layer, tables[0], start, window, scale)
            ref = reference(q, layer, tables.expand(num, -1), lens, window, scale)
            assert distance(out, ref) < ROUNDED, (start, num, window)


@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(3, 1, 48), (2, 7, 64)])
def test_in_pairs_a_token_s_attention_has_the_same_bits_in_a_step_and_in_any_chunk(
    pairing: Kernels, num_kv_heads: int, group: int, head_dim: int
) -> None:
    for block_size in (3, 32):
        _, layer, tables, _ = scene(torch.bfloat16, head_dim, num_kv_heads, group, (600,), block_size)
        q = 3 * torch.randn(600, num_kv_heads * group, head_dim)
        for window in (None, 21, 300):
            torch.set_num_threads(1)
            whole = prefill(pairing, q, layer, tables[0], 0, window, head_dim**-0.5)
            torch.set_num_threads(3)
            for begin, end in ((0, 1), (5, 40), (320, 600)):
                part = prefill(pairing, q[begin:end], layer, tables[0], begin, window, head_dim**-0.5)
                assert torch.equal(part, whole[begin:end]), (block_size, window, begin)
            lens = torch.tensor([1, 2, 20, 33, 255, 256, 257, 512, 599, 600])
            each = tables.expand(len(lens), -1).contiguous()
            step = decode(pairing, q[lens - 1], layer, each, lens, window, head_dim**-0.5)
            assert torch.equal(step, whole[lens - 1]), (block_size, window)


# --- what lies between -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 8, 9, 288, 901])
def test_adding_and_normalising(kernels: Kernels, size: int) -> None:
    h, delta, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    plain = h.double()
    for more in (None, delta):
        if more is not None:
            plain = plain + more.double()
        factor = (plain.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
        assert distance(kernels.add_norm(h, more, weight, 1e-3), plain * factor * weight.double()) < TOLERANCE
        assert distance(h, plain) < TOLERANCE


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
def test_rotation(kernels: Kernels, head_dim: int, normalised: bool) -> None:
    qkv = torch.randn(4, 7 * head_dim)
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if normalised else None
    rope, positions = Rope(RopeConfig(theta=1e4), head_dim, 70001, CPU), torch.tensor([0, 3, 900, 70000])
    angles = rope.angles(positions, torch.float64)
    double = None if norms is None else (norms[0].double(), norms[1].double())
    expected = DoubleBackend().rotate(qkv.double(), 3, 2, double, 1e-5, angles)
    table = rope.table(torch.float32)
    for absent in (-1, 70001):
        with pytest.raises(IndexError, match=r"not one of 70001$"):
            kernels.rotate(qkv, 3, 2, norms, 1e-5, (table, torch.tensor([0, 3, absent, 9])))
    kernels.rotate(qkv, 3, 2, norms, 1e-5, (table, positions))
    ours = torch.split(qkv.view(4, 7, head_dim), [3, 2, 2], dim=1)
    for out, ref in zip(ours, expected, strict=True):
        assert out.shape == ref.shape
        assert distance(out, ref) < TOLERANCE


class DoubleBackend(TorchBackend):
    """In float64."""

    def rotate(self, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return super().rotate(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_reach_their_slots_rounded_as_torch_does_it_and_no_other(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    values = torch.cat(
        (torch.randn(300), torch.tensor([0.0, -0.0, 1e-42, 6e-8, 1.00390625, 1.01171875, 3e38, 65519.0]))
    )
    values = torch.cat((values, torch.tensor([float("inf"), float("-inf"), float("nan"), 65520.0])))
    qkv = values[torch.randint(len(values), (6, 7 * 24))]
    qkv.view(-1)[-312:] = values[torch.randperm(312)]
    slices = [Slice(token_ids=[1] * 6, start=3, block_table=[4, 1, 2])]
    batch = Rows.of(slices, 4).on(CPU)
    k, v = qkv.view(6, 7, 24)[:, 3:5], qkv.view(6, 7, 24)[:, 5:]
    ours, theirs = (torch.full((5, 2, 3, 2, 4, 24), 7.0, dtype=dtype) for _ in range(2))
    kernels.write(ours[:, :, 1], k, v, batch.slot_blocks_T, batch.slot_offsets_T)
    TorchBackend().write(theirs[:, :, 1], k.to(dtype), v.to(dtype), batch)
    assert torch.equal(ours.nan_to_num(-1.0, 100.0, -100.0), theirs.nan_to_num(-1.0, 100.0, -100.0))
    assert bool(theirs.isnan().any())


@pytest.mark.parametrize("size", [1, 7, 8, 100])
def test_gates(kernels: Kernels, size: int) -> None:
    x = torch.randn(6, 2 * size) * 30
    gate, up = x.double().chunk(2, dim=1)
    assert distance(kernels.silu_mul(x), torch.nn.functional.silu(gate) * up) < TOLERANCE
    edges = torch.tensor([[0.0, -0.0, 200.0, -200.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert kernels.silu_mul(edges)[0, :4].tolist() == pytest.approx([0.0, 0.0, 200.0, 0.0], abs=1e-30)
    assert bool(kernels.silu_mul(edges)[0, 4].isnan())
    assert kernels.silu_mul(torch.tensor([[-1e38, 1.0]])).item() == pytest.approx(0.0, abs=1e-30)


def gating(kernels: Kernels, out: int, features: int, dtype: torch.dtype, bias: bool) -> tuple[Linear, Linear]:
    """The same random weights of gates and ups twice: gated, and plain."""
    made = []
    for gated in (True, False):
        torch.manual_seed(out)
        settings: dict[str, Any] = {"dtype": dtype, "device": CPU, "kernels": kernels, "batch_invariant": True}
        linear = Linear(2 * out, features, bias=bias, gated=gated, **settings)
        linear.weight.copy_(torch.randn(2 * out, features) / features**0.5)
        if linear.bias is not None:
            linear.bias.copy_(torch.randn(2 * out))
        linear.pack()
        made.append(linear)
    return made[0], made[1]


def as_the_next_product_takes_it(gated: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16, and padded with zeros to whole blocks."""
    return torch.nn.functional.pad(gated.bfloat16(), (0, -gated.shape[1] % 32))


GATED_ROWS = [1, 2, 3, 11, 16, 17, 32, 33, 70, 193, 300]
GATED_SHAPES = [(8, 5), (72, 40), (300, 96), (48, 1500), (2000, 64)]
"""Outputs and input features: less than a panel, a part of one, more than stay in the second cache, many units."""


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "features"), GATED_SHAPES)
def test_gated_products(tiled: Kernels, out: int, features: int, dtype: torch.dtype, number: int) -> None:
    torch.set_num_threads(number)
    gated, plain = gating(tiled, out, features, dtype, bias=out % 100 != 0)
    for rows in GATED_ROWS:
        x = torch.randn(rows, features)
        expected = tiled.silu_mul(plain(x))
        rounded = dtype == torch.bfloat16 and tiled.multiplies_pairs
        expected = as_the_next_product_takes_it(expected) if rounded else expected
        assert torch.equal(cast("torch.Tensor", gated.gate(x)), expected)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(("out", "features"), [*GATED_SHAPES, (40, 2500), (40, 17000), (2600, 40), (2080, 2000)])
def test_gated_products_in_pairs(pairing: Kernels, out: int, features: int, number: int) -> None:
    torch.set_num_threads(number)
    gated, plain = gating(pairing, out, features, torch.bfloat16, bias=out % 100 != 0)
    down = gating(pairing, 40, out, torch.bfloat16, bias=True)[1]
    beyond = {(72, 40): [513, 530, 546], (48, 1500): [530], (40, 2500): [546]}  # more rows than are multiplied at once
    for rows in [*GATED_ROWS, *beyond.get((out, features), [])] if out * features < 10**6 else [2, 17, 300]:
        x = torch.randn(rows, features)
        expected = pairing.silu_mul(plain(x))
        result = cast("torch.Tensor", gated.gate(x))
        assert torch.equal(result, as_the_next_product_takes_it(expected))
        assert torch.equal(down(result), down(expected))


def test_a_layer_gates_what_has_been_normalised(kernels: Kernels) -> None:
    gated, plain = gating(kernels, 72, 40, torch.float32, bias=True)
    h, delta, norm = torch.randn(20, 40), torch.randn(20, 40), torch.randn(40)
    expected = kernels.silu_mul(plain(kernels.add_norm(h.clone(), delta, norm, 1e-5)))
    h_after = h.clone()
    assert torch.equal(NativeBackend(kernels).norm_gate(h_after, delta, norm, 1e-5, gated), expected)
    assert torch.equal(h_after, h + delta)


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 64, 100, 512, 543, 544, 1000, 2100])
def test_the_best_of_a_row(kernels: Kernels, size: int) -> None:
    torch.manual_seed(size)
    few = torch.randint(-3, 3, (40, size)).float()  # many are equal
    for x in (torch.randn(40, size), few, few.masked_fill(few > 0, float("-inf")), few.masked_fill(few > 1, torch.inf)):
        values, indices = kernels.best(x)
        assert values.tolist() == x.max(dim=1).values.tolist()
        assert indices.tolist() == [row.index(max(row)) for row in x.tolist()]
    spoiled = torch.randn(size, size)
    spoiled.fill_diagonal_(float("nan"))
    values, indices = kernels.best(spoiled)
    assert bool(values.isnan().all())
    assert indices.tolist() == list(range(size))
    infinite = torch.full((1, size), torch.inf)
    infinite[0, size // 2 :] = -torch.inf  # their sum is not a number either
    assert kernels.best(infinite)[0].item() == infinite.max().item()


def ask(**params: Any) -> Sample:
    seed = params.pop("seed")
    return Sample(
        params=SamplingParams(max_tokens=9, seed=seed, **params), choice=0, position=5, token_ids=[7] * 5, prompt_len=5
    )


def cumulative(logits: torch.Tensor, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution that a sample is drawn from, in float64, and its sums."""
    params = sample.params
    x = ((logits - logits.max()) / params.temperature).double()
    if 0 < params.top_k < len(x):
        x[x < x.sort(descending=True).values[params.top_k - 1]] = -torch.inf
    if params.top_p < 1:
        best = x.sort(descending=True).values
        mass = best.softmax(0).cumsum(0) - best.softmax(0)
        x[x < best[(mass < params.top_p).nonzero().max()]] = -torch.inf
    if params.min_p > 0:
        x[x < np.log(params.min_p)] = -torch.inf
    weights = x.softmax(0)
    return weights, weights.cumsum(0)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("size", [1, 7, 8, 50, 256, 257, 1000, 5003])
def test_what_is_drawn_is_where_the_distribution_reaches_the_number(kernels: Kernels, size: int, spread: float) -> None:
    torch.manual_seed(size)
    logits = torch.randn(48, size) * spread
    if size > 7:
        logits[:, 3] = -torch.inf
    options: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.5, "min_p": 0.01},
        {"temperature": 0.01, "top_p": 0.01},
        {"temperature": 1.0, "top_k": size + 3, "top_p": 0.999},
        {"temperature": 2.0, "top_k": 1},
    ]
    samples = [ask(seed=row, **options[row % len(options)]) for row in range(len(logits))]
    columns = Samples.of(samples)
    best = logits.max(dim=1).values
    tokens = NativeBackend(kernels).draw(logits, best, columns).tolist()
    same = sum(a == b for a, b in zip(tokens, draw(logits, best, columns).tolist(), strict=True))
    assert same >= len(tokens) - 1, "torch, which rounds elsewhere, draws another token now and then"
    for row, (token, wanted) in enumerate(zip(tokens, random_numbers(columns), strict=True)):
        weights, sums = cumulative(logits[row], samples[row])
        assert weights[token] > 0, (row, token)
        before = sums[token] - weights[token]
        assert before - 1e-5 <= wanted <= sums[token] + 1e-5, (row, token)
    for row in range(0, len(logits), 7):
        alone = NativeBackend(kernels).draw(
            logits[row : row + 1], best[row : row + 1], Samples.of(samples[row : row + 1])
        )
        assert alone.tolist() == tokens[row : row + 1]


def test_the_extremes_of_the_random_number(kernels: Kernels) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -200.0]]).expand(2, 5).contiguous()
    ones = torch.ones(2)
    numbers = torch.tensor([1e-300, 1.0 - 2**-53], dtype=torch.float64)
    none = torch.zeros(2, dtype=torch.int64), ones, torch.full((2,), -torch.inf)
    assert kernels.draw(logits, torch.zeros(2), ones, *none, numbers).tolist() == [1, 3]


def test_no_hidden_token_is_drawn_where_a_sum_misses_the_number(kernels: Kernels) -> None:
    """Small weights count in the whole sum, and are lost one by one beside a large one: it never reaches the number."""
    logits = torch.full((2, 256), -37.5)
    logits[:, 0] = 0.0
    logits[:, 200:] = -torch.inf
    options = torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.full((2,), -torch.inf)
    numbers = torch.tensor([1.0 - 2**-53, 0.5], dtype=torch.float64)
    assert kernels.draw(logits, torch.zeros(2), *options, numbers).tolist() == [199, 0]


def test_what_is_not_float32_or_not_in_order_is_refused(kernels: Kernels) -> None:
    for x in (torch.randn(4, 20).double(), torch.randn(20, 4).T):
        with pytest.raises(AssertionError):
            kernels.linear(x, pack(torch.randn(33, 20)), None, 33)


# --- without them ----------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_engine_says_so_and_computes(
    checkpoint: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    native.kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            runner = load_runner(checkpoint("llama"), kv_cache_bytes=2**20, block_size=16)  # type: ignore[operator]
        assert "no C compiler" in caplog.text
        assert runner.step([Slice(token_ids=[5, 6], start=0, block_table=[0])]) == [()]
    finally:
        native.kernels.cache_clear()


def test_a_head_dimension_without_kernels_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint("llama", tmp_path, head_dim=20)
    with caplog.at_level(logging.WARNING):
        runner = load_runner(folder, kv_cache_bytes=2**20, block_size=16, cpu_kernels=False)
        assert caplog.text == "", "nobody wants them"
        runner = load_runner(folder, kv_cache_bytes=2**20, block_size=16)
    assert "no C kernels for the model's head dimension, 20" in caplog.text
    assert runner.cpu_kernels is False
    assert runner.step([Slice(token_ids=[5, 6], start=0, block_table=[0])]) == [()]


@pytest.mark.processes
def test_a_compiler_that_fails_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'out of order' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.kernels() is None
        assert "out of order" in caplog.text
    finally:
        native.kernels.cache_clear()
    assert list((tmp_path / "baton").iterdir()) == []


@pytest.mark.processes
@pytest.mark.usefixtures("quickly")
def test_a_cache_that_holds_no_library_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    """Its disk is full, or nothing in it may be executed."""
    compiler = tmp_path / "cc"
    cache = tmp_path / "cache"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *"{cache}"*) echo "no space left" >&2; exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    made = Kernels(library.load())
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    expected = x.double() @ weight.double().T
    assert (made.linear(x, pack(weight), None, 32).double() - expected).norm() < 1e-5 * expected.norm()
    assert list((cache / "baton").iterdir()) == []


@pytest.mark.processes
@pytest.mark.usefixtures("quickly")
def test_a_cpu_without_avx_has_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """As virtual machines without a model of a CPU have it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    made = Kernels(library.load())
    assert made.instructions == ("other", "none")
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    expected = x.double() @ weight.double().T
    assert (made.linear(x, pack(weight), None, 32).double() - expected).norm() < 1e-5 * expected.norm()


def disassembled(compiled: Path, *options: str) -> str:
    command = ["objdump", *options, "--no-show-raw-insn", str(compiled)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.processes
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the compiler compiles for other CPUs")
def test_without_avx_the_sums_of_a_tile_are_in_registers(tmp_path: Path) -> None:
    """In vectors wider than a register they would be in memory, and a half of the instructions would use the stack."""
    require("compiler")
    tile, others, _ = library._SOURCE.read_text().partition("TILE_OF(tile_bfloat16")
    assert others, "the tiles of other types follow"
    source, compiled = tmp_path / "tile.c", tmp_path / "tile.so"
    source.write_text(f"{tile}\nvoid *const kept = tile_float32;\n")
    flags = (*library._FLAGS, "-march=x86-64-v2", f"-I{library._SOURCE.parent}")
    subprocess.run(["cc", *flags, "-o", compiled, source], capture_output=True, check=True, timeout=60)
    instructions = re.findall(r"^ .*", disassembled(compiled, "--disassemble=tile_float32"), re.MULTILINE)
    assert len(instructions) > 1000
    assert sum("(%rsp" in each for each in instructions) < len(instructions) / 3


@pytest.mark.processes
def test_no_wider_instructions_are_used_than_onednn_may_use(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a product in float32 has the same bits, so that workers of one pool may run on different CPUs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    limited = Kernels(library.load())
    assert not limited.multiplies_pairs
    assert limited.instructions == ("avx2", "none")
    (kept,) = (tmp_path / "baton").iterdir()
    told = disassembled(kept, "--disassemble")
    assert "%ymm" in told
    assert "%zmm" not in told, "registers of AVX-512"
    torch.manual_seed(0)
    for rows in (1, 7, 200):
        x, packed = torch.randn(rows, 700), pack(torch.randn(300, 700))
        assert torch.equal(limited.linear(x, packed, None, 300), kernels.linear(x, packed, None, 300))


V3 = "ssse3 sse4_1 sse4_2 popcnt avx2 fma f16c bmi1 bmi2 movbe abm"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
BF16 = f"{V4} avx512_vnni avx512_bf16"
"""Flags of CPUs."""


@pytest.mark.parametrize(
    ("limit", "flags", "compiled_for"),
    [
        ("", BF16, "native"),
        ("AVX2", BF16, "x86-64-v3"),
        ("avx512_core", BF16, "x86-64-v4"),
        ("SSE41", V3, "x86-64-v2"),
        ("AVX2_VNNI", V4, "x86-64-v3"),
        ("AVX512_CORE_VNNI", f"{BF16} amx_bf16", "x86-64-v4"),
        ("AVX512_CORE_FP16", f"{BF16} amx_bf16", "cooperlake"),
        ("AVX512_CORE_AMX", f"{BF16} amx_bf16", "native"),
        ("AVX512_CORE_BF16", f"{BF16} amx_bf16", "cooperlake"),
        ("AVX512_CORE", V3, "native"),
        ("AVX512_CORE_BF16", V4, "native"),
        ("ALL", V4, "native"),
        *(("AVX2", V3.replace(hidden, ""), "native") for hidden in ("fma", "f16c", "bmi1", "bmi2", "movbe", "abm")),
        ("AVX512_CORE", V4.replace("avx512dq", ""), "native"),
        ("SSE41", "sse4_1 ssse3 sse4_2", "native"),
    ],
)
def test_a_limit_never_lets_instructions_in_that_the_cpu_lacks(
    limit: str, flags: str, compiled_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_cpu", lambda: f"flags : {flags}".encode())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert library._instructions()[0] == f"-march={compiled_for}"


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """What is kept, and where, does not depend on how well it is compiled, which takes four times as long."""
    monkeypatch.setattr(library, "_FLAGS", ("-O0", *library._FLAGS[1:]))


@pytest.mark.processes
@pytest.mark.usefixtures("quickly")
def test_the_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are part of the library's name. Without a word, it is `cc`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for num_libraries, compiler in enumerate(("env cc -DANOTHER='one more'", " "), start=1):
        monkeypatch.setenv("CC", compiler)
        library.load()
        assert len(list((tmp_path / "baton").iterdir())) == num_libraries


def test_a_compiler_that_cannot_be_understood_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "'cc")
    native.kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.kernels() is None
        assert "No closing quotation" in caplog.text
    finally:
        native.kernels.cache_clear()


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of the kernels."""
    require("compiler")
    folder = tmp_path_factory.mktemp("library")
    build(folder, "-O0")
    (made,) = (folder / "baton").iterdir()
    return made


@pytest.fixture
def copying(compiled_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that copies a library: what is kept, and where, does not depend on how it is made."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        f'for each; do [ "$before" = -o ] && exec cp {shlex.quote(str(compiled_once))} "$each"; before=$each; done\n'
        "exit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))


@pytest.mark.processes
@pytest.mark.usefixtures("copying")
def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load()
    (kept,) = (tmp_path / "baton").iterdir()
    made = kept.stat().st_mtime_ns
    library.load()
    assert list((tmp_path / "baton").iterdir()) == [kept]
    assert kept.stat().st_mtime_ns == made


@pytest.mark.processes
@pytest.mark.usefixtures("copying")
def test_a_damaged_library_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load()
    (kept,) = (tmp_path / "baton").iterdir()
    size = kept.stat().st_size
    kept.unlink()  # it is loaded from there
    kept.write_bytes(b"half a library")
    library.load()
    assert kept.stat().st_size == size


def others_can_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    (folder / "baton").mkdir()
    os.chmod(folder / "baton", 0o777)


def cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))


def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod, where a user is a number."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(RuntimeError):
        Path.home()


@pytest.mark.processes
@pytest.mark.usefixtures("copying")
@pytest.mark.parametrize("trouble", [others_can_write, cannot_be_made, no_home])
def test_without_a_cache_that_can_be_trusted_the_kernels_are_compiled_and_nothing_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    trouble(tmp_path, monkeypatch)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    out = Kernels(library.load()).linear(torch.ones(1, 8), pack(torch.ones(16, 8)), None, 16)
    assert out.tolist() == [[8.0] * 16]
    assert list(tmp_path.rglob("*.so")) == []
    assert list(scratch.iterdir()) == []
