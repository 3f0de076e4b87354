"""The measurement of transfers between two GPUs' memories, here of two hosts' memories."""

from __future__ import annotations

from benchmarks.gpu.transfer import transfers


def test_reads_bring_what_the_source_has_and_writes_end() -> None:
    made = list(transfers(2**16, 2**24, "cpu"))
    assert [each["kind"] for each in made] == ["reads"] * 4 + ["writes"] * 4
    assert [each["blocks"] for each in made] == 2 * [1, 4, 16, 64]
    assert all(each["gb_per_s"] > 0 for each in made)
