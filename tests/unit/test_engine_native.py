"""The kernels in C against plain arithmetic in float64: every tile, edge and type; and doing without them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.engine import native
from common.engine.attention import ReferenceAttention
from common.engine.batch import Slice
from common.engine.native import Kernels, pack
from common.engine.ragged import RaggedBatch
from common.engine.runner import load_runner

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 1e-5
"""‖out - ref‖ / ‖ref‖: sums are in float32 whatever the type of the weights."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = native.kernels()
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def distance(out: torch.Tensor, ref: torch.Tensor) -> float:
    return ((out.double() - ref).norm() / ref.norm()).item()


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 64, 100, 130])
def test_a_product_is_the_reference_s_for_any_number_of_rows(
    kernels: Kernels, dtype: torch.dtype, out_features: int
) -> None:
    torch.manual_seed(out_features)
    for in_features in (1, 7, 96):
        weight = torch.randn(out_features, in_features).to(dtype)
        bias = torch.randn(out_features)
        packed = pack(weight)
        for rows in (*range(1, 15), 23, 24, 25, 193, 200):
            x = torch.randn(rows, in_features)
            out = kernels.linear(x, packed, bias, out_features)
            assert out.shape == (rows, out_features)
            assert distance(out, x.double() @ weight.double().T + bias.double()) < TOLERANCE, (in_features, rows)
        plain = kernels.linear(x, packed, None, out_features)
        assert distance(plain, x.double() @ weight.double().T) < TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_s_product_does_not_depend_on_the_rows_beside_it(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    packed = pack(torch.randn(70, 50).to(dtype))
    x = torch.randn(230, 50)
    alone = torch.cat([kernels.linear(row[None], packed, None, 70) for row in x])
    for rows in (2, 3, 5, 8, 24, 100, 230):
        assert torch.equal(kernels.linear(x[:rows], packed, None, 70), alone[:rows]), rows


def test_a_product_takes_rows_that_are_not_contiguous(kernels: Kernels) -> None:
    x, weight = torch.randn(4, 20), torch.randn(33, 10)
    assert distance(kernels.linear(x[:, ::2], pack(weight), None, 33), (x[:, ::2] @ weight.T).double()) < TOLERANCE


def test_threads_change_nothing(kernels: Kernels) -> None:
    packed, x = pack(torch.randn(300, 64)), torch.randn(40, 64)
    q, layer, tables, lens = scene(torch.float32, 64, 4, 2, (5, 70, 33))
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append((kernels.linear(x, packed, None, 300), kernels.attend_decode(q, layer, tables, lens, None, 0.1)))
    assert all(torch.equal(a, b) for each in results[1:] for a, b in zip(each, results[0], strict=True))


# --- attention -------------------------------------------------------------------------------------------------------


def scene(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int, lens: tuple[int, ...], block_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, one layer of a cache of three with NaN wherever nobody should look, tables and lengths."""
    torch.manual_seed(head_dim + group)
    num_blocks = [-(-length // block_size) for length in lens]
    cache = torch.full((sum(num_blocks) + 1, 3, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    order = (torch.randperm(sum(num_blocks)) + 1).tolist()
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int64)
    for row, (length, number) in enumerate(zip(lens, num_blocks, strict=True)):
        mine = [order.pop() for _ in range(number)]
        tables[row, :number] = torch.tensor(mine)
        for position in range(length):
            block = cache[mine[position // block_size], 1]
            block[:, :, position % block_size] = torch.randn(2, num_kv_heads, head_dim).to(dtype)
    q = torch.randn(len(lens), num_kv_heads * group, head_dim)
    return q, cache[:, 1], tables, torch.tensor(lens)


def reference(
    q: torch.Tensor, layer: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    """By the definition, in float64, without the slots that nobody has written."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // layer.shape[2]
    for row, length in enumerate(lens.tolist()):
        blocks = layer[tables[row, : -(-length // layer.shape[3])]].double()
        k_KSD, v_KSD = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, max(0, length - (window or length)) : length]
        for head in range(q.shape[1]):
            scores = k_KSD[head // group] @ q[row, head].double() * scale
            out[row, head] = scores.softmax(0) @ v_KSD[head // group]
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
        out = kernels.attend_decode(q, layer, tables, lengths, window, head_dim**-0.5)
        assert distance(out, reference(q, layer, tables, lengths, window, head_dim**-0.5)) < TOLERANCE, window


@pytest.mark.parametrize("block_size", [1, 3, 4, 6, 32])
def test_attention_over_blocks_of_any_size(kernels: Kernels, block_size: int) -> None:
    q, layer, tables, lens = scene(torch.float32, 16, 2, 3, (1, 7, 40), block_size)
    for window in (None, 9):
        out = kernels.attend_decode(q, layer, tables, lens, window, 0.25)
        assert distance(out, reference(q, layer, tables, lens, window, 0.25)) < TOLERANCE


def test_a_token_s_attention_does_not_depend_on_the_others(kernels: Kernels) -> None:
    q, layer, tables, lens = scene(torch.bfloat16, 64, 2, 7, (5, 300, 17, 64, 1))
    together = kernels.attend_decode(q, layer, tables, lens, None, 0.125)
    for row in range(len(lens)):
        one = slice(row, row + 1)
        assert torch.equal(kernels.attend_decode(q[one], layer, tables[one], lens[one], None, 0.125), together[one])


@pytest.mark.parametrize("far", [0.0, 60.0, 500.0, 1e5])
def test_scores_that_are_far_apart_do_not_overflow(kernels: Kernels, far: float) -> None:
    q, layer, tables, lens = scene(torch.float32, 16, 1, 1, (20,))
    layer[tables[0, 0], 0, :, 3] = far
    q.fill_(1.0)
    out = kernels.attend_decode(q, layer, tables, lens, None, 1.0)
    assert distance(out, reference(q, layer, tables, lens, None, 1.0)) < TOLERANCE


def test_decode_tokens_beside_chunks_go_to_the_kernels(kernels: Kernels) -> None:
    """Mixed batches: every second slice is a chunk of a prompt."""
    from common.engine.cpu_attention import CpuAttention

    torch.manual_seed(3)
    slices = [
        Slice(token_ids=[1] * length, start=start, block_table=list(range(4 * row, 4 * row + 4)))
        for row, (start, length) in enumerate(((10, 1), (0, 20), (40, 1), (3, 9), (0, 1)))
    ]
    batch = RaggedBatch.of(slices, 16, torch.device("cpu"))
    layer = torch.randn(20, 2, 2, 16, 32)
    q = torch.randn(batch.num_tokens, 6, 32)
    ours = CpuAttention(kernels=kernels).attend(q, layer, batch, None, 0.2)
    theirs = ReferenceAttention().attend(q, layer, batch, None, 0.2)
    assert distance(ours, theirs.double()) < TOLERANCE


# --- without them ----------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_engine_says_so_and_computes(
    checkpoint: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    native.kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            runner = load_runner(checkpoint("llama"), kv_cache_bytes=2**20)  # type: ignore[operator]
        assert "no C compiler" in caplog.text
        assert runner.step([Slice(token_ids=[5, 6], start=0, block_table=[0])]) == [()]
    finally:
        native.kernels.cache_clear()


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


def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._load()
    (library,) = (tmp_path / "baton").iterdir()
    made = library.stat().st_mtime_ns
    native._load()
    assert list((tmp_path / "baton").iterdir()) == [library]
    assert library.stat().st_mtime_ns == made


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


@pytest.mark.parametrize("trouble", [others_can_write, cannot_be_made, no_home])
def test_without_a_cache_that_can_be_trusted_the_kernels_are_compiled_and_nothing_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: Kernels,
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    trouble(tmp_path, monkeypatch)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    out = native._load().linear(torch.ones(1, 8), pack(torch.ones(16, 8)), None, 16)
    assert out.tolist() == [[8.0] * 16]
    assert list(tmp_path.rglob("*.so")) == []
    assert list(scratch.iterdir()) == []
